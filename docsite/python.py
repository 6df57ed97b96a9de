"""docs/reference/python.md: the public names of the Python packages, from their signatures and docstrings."""

from __future__ import annotations

import enum
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

from docsite.table import notice

# Module, what it is for, and its names (None: those of __all__).
MODULES: tuple[tuple[str, str, tuple[str, ...] | None], ...] = (
    ("leasedjob", "The lease, without Kubernetes. Guide: [guide-library.md](../guide-library.md).", None),
    ("leasedjob.workload", "Inside the program that runs. Guide: [guide-workload.md](../guide-workload.md).", None),
    ("leasedjob.workload.asgi", "`pip install 'leasedjob[asgi]'`", ("UvicornServer", "Draining")),
    ("leasedjob.workload.apscheduler", "`pip install 'leasedjob[apscheduler]'`", ("SchedulerJobs",)),
    ("leasedjob.workload.pools", "`pip install 'leasedjob[pool]'`", ("PsycopgPool", "AsyncPsycopgPool")),
    ("leasedjob.workload.bullmq", "`pip install 'leasedjob[bullmq]'`", None),
    ("leasedjob.workload.kafka", "`pip install 'leasedjob[kafka]'`", None),
    ("leasedjob.testing", "For tests of your own.", None),
    ("leasedjob.testing.postgres", "`pip install 'leasedjob[testing]'`", ("PostgresServer",)),
)
_SECTIONS = ("Args", "Returns", "Raises", "Yields", "Attributes")


def page() -> str:
    """The page."""
    parts = [
        notice("the docstrings"),
        "# Python\n",
        "What may be imported and used. Other modules and names that begin with an underscore may change with any release. "
        "The errors are in [errors.md](errors.md).\n",
    ]
    for name, about, names in MODULES:
        module = import_module(name)
        parts.append(f"## {name}\n\n{about}\n")
        for each in names or _own(module):
            parts.extend(_entry(each, getattr(module, each)))
    return "\n".join(parts)


def _own(module: Any) -> list[str]:
    """Its public names, errors left out."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            n
            for n, v in vars(module).items()
            if not n.startswith("_") and getattr(v, "__module__", "") == module.__name__
        ]
    return sorted(
        (n for n in names if not n.startswith("_") and not _is_error(getattr(module, n))),
        key=lambda n: (n.upper() == n, n.lower()),
    )


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def _entry(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield f"### {name}\n"
        if issubclass(value, enum.Enum):
            yield _text(value)
            yield "".join(f"- `{member.name}`: `{member.value}`\n" for member in value)
            return
        yield f"```text\nclass {name}{_signature(value)}\n```\n"
        yield _text(value)
        for member, called in _members(value):
            yield f"#### {name}.{member}\n"
            yield called
    elif callable(value):
        yield f"### {name}\n"
        prefix = "async def" if inspect.iscoroutinefunction(value) else "def"
        yield f"```text\n{prefix} {name}{_signature(value)}\n```\n"
        yield _text(value)
    else:
        yield f"### {name}\n"
        shown = repr(value) if isinstance(value, int | str) else " ".join(str(value).replace("typing.", "").split())
        yield f"`{shown}`\n"


def _members(kind: type) -> Iterator[tuple[str, str]]:
    """The public methods and properties that it, or a base of this package, defines."""
    seen: set[str] = set()
    dataclass_fields = {f.name for f in fields(kind)} if is_dataclass(kind) else set()
    for base in kind.__mro__:
        if not base.__module__.startswith("leasedjob"):
            continue
        for name, value in vars(base).items():
            if name.startswith("_") or name in seen or name in dataclass_fields:
                continue
            value = getattr(value, "__func__", value)
            if isinstance(value, property):
                seen.add(name)
                yield name, f"property\n\n{_text(value)}"
            elif (
                inspect.isfunction(value)
                or hasattr(value, "__wrapped__")
                or inspect.isroutine(getattr(kind, name, None))
            ):
                called = getattr(kind, name)
                text = _text(called)
                seen.add(name)
                prefix = "async def" if inspect.iscoroutinefunction(called) else "def"
                yield name, f"```text\n{prefix} {name}{_signature(called)}\n```\n\n{text}"


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    parts = []
    keyword_only = False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            if not any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):
                parts.append("*")
        match parameter.kind:
            case inspect.Parameter.VAR_POSITIONAL:
                star = "*"
            case inspect.Parameter.VAR_KEYWORD:
                star = "**"
            case _:
                star = ""
        text = star + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {_value(parameter.default)}"
        parts.append(text)
    returned = (
        "" if signature.return_annotation is signature.empty else f" -> {_annotation(signature.return_annotation)}"
    )
    line = f"({', '.join(parts)}){returned}"
    return line if len(line) < 90 else f"(\n    {(',' + chr(10) + '    ').join(parts)},\n){returned}"


def _annotation(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__qualname__", str(annotation))
    return text.replace("collections.abc.", "").replace("typing.", "")


def _value(default: Any) -> str:
    if isinstance(default, enum.Enum):
        return f"{type(default).__name__}.{default.name}"
    text = repr(default)
    return "…" if " at 0x" in text or text.startswith("<") or len(text) > 60 else text


def _text(value: Any) -> str:
    """A docstring as Markdown: its sections become lists, indented blocks stay as they are."""
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value) and is_dataclass(value) and text.startswith(f"{value.__name__}("):
        text = ""  # the one that dataclass makes
    lines: list[str] = []
    section = False
    for line in text.splitlines():
        if (match := re.fullmatch(r"(\w+):", line)) and match[1] in _SECTIONS:
            section = True
            lines += [f"{match[1]}:", ""]
        elif section and line.startswith("    ") and not line.startswith("     "):
            item = line.strip()
            found = re.match(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)", item)
            lines.append(f"- {'`' + found[1].replace(', ', '`, `') + '`: ' + found[2] if found else item}")
        elif section and line.startswith("     "):
            lines.append(f"  {line.strip()}")
        else:
            section = section and not line
            lines.append(line)
    return textwrap.dedent("\n".join(lines)).strip() + "\n"
