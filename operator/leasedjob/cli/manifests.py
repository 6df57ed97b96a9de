"""Manifests as kubectl reads them: files, folders and standard input, YAML of several documents or JSON, `List`s.

YAML is read as Kubernetes reads it: `2026-07-20` is text and not a date, `1:30` is text and not 90, and a key that
is given twice is an error instead of a silent choice.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from leasedjob.cli.exits import Exit, Failure

Object = dict[str, Any]
STDIN: Final = "-"
SUFFIXES: Final = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Document:
    """One object of a manifest, and where it stands: `jobs.yaml`, or `jobs.yaml, document 2` where there are more."""

    where: str
    body: Object

    @property
    def kind(self) -> str:
        return str(self.body.get("kind") or "")

    @property
    def name(self) -> str:
        """`metadata.name`; "" where there is none."""
        metadata = self.body.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        return name if isinstance(name, str) else ""


def read(sources: Iterable[str]) -> list[Document]:
    """Every object of the named files, of the files in named folders, and of standard input (`-`), in this order.

    Raises:
        Failure: NOT_FOUND for a file that isn't there, USAGE for one that can't be read or is no manifest; the message
            names file and line.
    """
    return [document for source in sources for file in _files(source) for document in _documents(file)]


def _files(source: str) -> Iterator[str]:
    path = Path(source)
    if source == STDIN or not path.is_dir():
        yield source
        return
    found = sorted(str(p) for p in path.iterdir() if p.suffix in SUFFIXES and p.is_file())
    if not found:
        raise Failure(Exit.NOT_FOUND, f"{source}: no file in this folder ends in {', '.join(SUFFIXES)}")
    yield from found


def _documents(file: str) -> Iterator[Document]:
    shown = "standard input" if file == STDIN else file
    try:
        loaded = [body for body in yaml.load_all(_text(file), _Loader) if body is not None]
    except yaml.YAMLError as error:
        raise Failure(Exit.USAGE, f"{shown}: {_yaml_problem(error)}") from error
    except RecursionError as error:
        raise Failure(Exit.USAGE, f"{shown}: is nested too deeply") from error
    for number, body in enumerate(loaded, 1):
        where = shown if len(loaded) == 1 else f"{shown}, document {number}"
        if not isinstance(body, dict) or not isinstance(body.get("kind"), str):
            raise Failure(Exit.USAGE, f"{where}: is no Kubernetes object: it has no kind")
        yield from _flattened(where, body)


def _flattened(where: str, body: Object) -> Iterator[Document]:
    items = body.get("items")
    if not body["kind"].endswith("List") or not isinstance(items, list):
        yield Document(where, body)
        return
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict):
            raise Failure(Exit.USAGE, f"{where}: items[{number - 1}] is no Kubernetes object")
        # The API server leaves kind out of the items of a typed list.
        kind = body["kind"].removesuffix("List")
        given = {"apiVersion": body.get("apiVersion"), "kind": kind} if kind else {}
        yield Document(f"{where}, item {number}", {**given, **item})


def _text(file: str) -> str:
    try:
        if file == STDIN:
            return sys.stdin.read()
        return Path(file).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise Failure(Exit.NOT_FOUND, f"{file}: no such file") from error
    except UnicodeDecodeError as error:
        shown = "standard input" if file == STDIN else file
        raise Failure(Exit.USAGE, f"{shown}: is not UTF-8 text") from error
    except OSError as error:
        raise Failure(Exit.USAGE, f"{file}: {error.strerror or error}") from error


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "can't be read as YAML")
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark is not None else problem


class _Loader(yaml.SafeLoader):
    """SafeLoader, with the scalars of the YAML that Kubernetes reads, and no key twice."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - as the base has it

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    digits = text.lstrip("+-")
    base = {"0x": 16, "0b": 2, "0o": 8}.get(digits[:2].lower(), 8 if digits[0] == "0" and len(digits) > 1 else 10)
    return int(text, base)


_INTEGER: Final = r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|0|[1-9][0-9_]*)"
_FLOAT: Final = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_BOOLEAN: Final = r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF"
for _tag, _pattern, _first in (
    ("int", _INTEGER, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("bool", _BOOLEAN, "yYnNtTfFoO"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
