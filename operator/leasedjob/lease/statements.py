"""The named statements of `statements.sql`.

-- name: heartbeat
-- What it does, in one line.
SELECT ...;
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import LiteralString

_NAME = re.compile(r"^-- name: ([a-z_]+)$", re.MULTILINE)


def parse(text: str) -> dict[str, str]:
    """Name -> SQL without comments' header and semicolon.

    Raises:
        ValueError: a name occurs twice, or a statement has no description or no SQL.
    """
    found: dict[str, str] = {}
    parts = _NAME.split(text)[1:]
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        lines = body.strip().splitlines()
        described = bool(lines) and lines[0].startswith("-- ")
        sql = "\n".join(line for line in lines if not line.startswith("--")).strip().removesuffix(";")
        if name in found or not described or not sql:
            raise ValueError(f"statement {name}: named twice, not described, or empty")
        found[name] = sql
    return found


@cache
def _all() -> dict[str, str]:
    return parse(resources.files(__package__).joinpath("statements.sql").read_text(encoding="utf-8"))


def statement(name: str) -> LiteralString:
    """The SQL of that name; KeyError if there is none."""
    return _all()[name]


def names() -> frozenset[str]:
    """Every name there is."""
    return frozenset(_all())
