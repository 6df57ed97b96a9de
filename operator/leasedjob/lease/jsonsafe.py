"""JSON that PostgreSQL's jsonb always accepts. Pure.

A run's result or error may hold anything. What can't be stored is replaced, so that a finished run is recorded at the
first try:

    U+0000 and lone surrogates   U+FFFD
    NaN, Infinity                the text "NaN", "Infinity", "-Infinity"
    bytes                        text, undecodable bytes as U+FFFD
    anything else unknown        str() of it
    deeper than 64 levels        "…"
    longer than 256 KiB          {"truncated": true, "bytes": n, "head": the first 4,096 characters}
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

MAX_BYTES: Final = 256 * 1024
MAX_DEPTH: Final = 64
_HEAD: Final = 4096
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
REPLACEMENT: Final = "\ufffd"
ELLIPSIS: Final = "…"


def text(value: str) -> str:
    """`value` without characters that PostgreSQL can't store."""
    return _UNSTORABLE.sub(REPLACEMENT, value)


def clean(value: Any, *, depth: int = MAX_DEPTH) -> Any:
    """`value` as plain JSON types, with what can't be stored replaced."""
    match value:
        case None | bool():
            return value
        case str():
            return text(str(value))
        case int():
            return int(value)
        case float():
            if math.isfinite(value):
                return float(value)
            return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
        case bytes() | bytearray() | memoryview():
            return text(bytes(value).decode("utf-8", errors="replace"))
        case Mapping() | list() | tuple() | set() | frozenset() if depth <= 0:
            return ELLIPSIS
        case Mapping():
            return {text(str(key)): clean(item, depth=depth - 1) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [clean(item, depth=depth - 1) for item in value]
        case _:
            return text(str(value))


def dumps(value: Any) -> str:
    """`value` as compact JSON text of at most 256 KiB in UTF-8, as jsonb's own text form would count it."""
    try:
        encoded = json.dumps(clean(value), ensure_ascii=False)
    except ValueError:  # an integer with more digits than Python converts
        encoded = json.dumps({"truncated": True, "head": "a number too long to write"})
    size = len(encoded.encode())
    if size <= MAX_BYTES:
        return encoded
    return json.dumps({"truncated": True, "bytes": size, "head": encoded[:_HEAD]}, ensure_ascii=False)
