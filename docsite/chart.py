"""The chart's values.schema.json, the table of values in its README and docs/reference/values.md, from values.yaml.

`# -- text` above a key describes it; `# @schema` says what it may be: the name of a type in chart_types.yaml, or words
of JSON Schema. What has neither has its default's type; a map with keys of its own is closed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from docsite.table import notice, table

CHART = Path(__file__).parents[1] / "charts" / "leasedjob"
TYPES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("chart_types.yaml").read_text(encoding="utf-8"))
BEGIN, END = "<!-- values: written by `make generate` -->\n", "<!-- values: end -->\n"
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string"}


@dataclass(frozen=True, slots=True)
class Value:
    """A key of values.yaml that has a comment, or that is a leaf."""

    path: str
    default: Any
    text: str  # as Markdown
    words: Any  # what `@schema` says; None where nothing is said
    section: str


@dataclass(slots=True)
class _Notes:
    """The comment above the next key."""

    text: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    describes: bool = False

    def add(self, comment: str) -> None:
        if comment.startswith("@schema "):
            self.words.append(comment.removeprefix("@schema "))
        elif comment.startswith("-- "):
            self.text, self.describes = [comment.removeprefix("-- ")], True
        elif self.describes and not self.words:
            self.text.append(comment)


def read(text: str) -> list[Value]:
    """Every described key and every leaf, in order."""
    values = yaml.safe_load(text)
    found: list[Value] = []
    above: list[tuple[int, str]] = []
    notes, section = _Notes(), "General"
    closed = ""  # below a key with a schema of its own nothing is described
    for line in text.splitlines():
        if title := re.fullmatch(r"# --- (.+?) -{5,}", line):
            section, notes = title[1][:1].upper() + title[1][1:], _Notes()
        elif comment := re.fullmatch(r" *# (.*)", line):
            notes.add(comment[1])
        elif key := re.match(r"( *)([A-Za-z]\w*):", line):
            while above and above[-1][0] >= len(key[1]):
                above.pop()
            above.append((len(key[1]), key[2]))
            path = ".".join(name for _, name in above)
            default: Any = values
            for _, name in above:
                default = default[name]
            inner = closed and path.startswith(f"{closed}.")
            if not inner and (notes.text or notes.words or not isinstance(default, dict)):
                words = yaml.safe_load("\n".join(notes.words)) if notes.words else None
                found.append(Value(path, default, " ".join(notes.text), words, section))
                closed = path if notes.words else ""
            notes = _Notes()
        elif not line.strip():
            notes = _Notes()
    return found


def _node(value: Value) -> dict[str, Any]:
    """What the value may be."""
    words = value.words
    if isinstance(words, str):
        if words not in TYPES:
            raise ValueError(f"{value.path}: chart_types.yaml has no type {words}")
        words = TYPES[words]
    if words is None or not words.keys() & {"type", "enum"}:
        kind = _KINDS.get(type(value.default))
        if kind is None:
            raise ValueError(f"{value.path}: a default of {value.default!r} needs @schema")
        words = {"type": kind, **(words or {})}
    return {"description": value.text, **json.loads(json.dumps(words))}


def _closed() -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": {}}


def schema() -> str:
    """values.schema.json."""
    root = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart leasedjob", **_closed()}
    # For a chart that has this one as a dependency: the condition that it is installed under.
    root["properties"]["enabled"] = {"type": "boolean", "description": "A parent chart's condition; not used here."}
    for value in read((CHART / "values.yaml").read_text(encoding="utf-8")):
        *parents, last = value.path.split(".")
        node = root
        for name in parents:
            node = node["properties"].setdefault(name, _closed())
        if not value.text:
            raise ValueError(f"{value.path} has no description")
        node["properties"][last] = _node(value)
    # A parent chart's globals are everybody's.
    del root["properties"]["global"]["additionalProperties"]
    return json.dumps(root, indent=1, ensure_ascii=False) + "\n"


def _default(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        return "see `values.yaml`" if len(json.dumps(value)) > 60 else f"`{json.dumps(value)}`"
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _tables() -> Iterator[str]:
    sections: dict[str, list[tuple[str, str, str]]] = {}
    for value in read((CHART / "values.yaml").read_text(encoding="utf-8")):
        # The parts of an image are the same for each.
        default = f"`{value.default['repository']}`" if value.words == "image" else _default(value.default)
        sections.setdefault(value.section, []).append((f"`{value.path}`", default, value.text))
    for title, rows in sections.items():
        yield f"### {title}\n\n{table(('value', 'default', ''), rows)}"


def page() -> str:
    """docs/reference/values.md."""
    head = (
        f"{notice('charts/leasedjob/values.yaml')}# Values of the chart\n\nWhat is not listed here is refused by name. "
        "Each image has `registry`, `repository`, `tag` (empty: the chart's version), `digest` (takes precedence over the "
        "tag) and `pullPolicy`.\n\n"
    )
    return head + "\n".join(text.replace("### ", "## ", 1) for text in _tables())


def readme() -> str:
    """The chart's README: the text is its own, the tables of values are made."""
    text = (CHART / "README.md").read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"charts/leasedjob/README.md needs the lines {BEGIN.strip()} and {END.strip()}")
    tables = "\n".join(_tables())
    return f"{head}{BEGIN}\n{tables}\n{END}{tail}"
