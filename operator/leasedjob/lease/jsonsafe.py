"""JSON that PostgreSQL's jsonb always accepts. Pure.

A run's result or error may hold anything. What can't be stored is replaced, so that a finished run is recorded at the
first try:

    U+0000 and lone surrogates   U+FFFD
    NaN, Infinity                the text "NaN", "Infinity", "-Infinity"
    bytes                        text, undecodable bytes as U+FFFD
    anything else unknown        str() of it
    deeper than 64 levels        "…"
    longer than 256 KiB          {"truncated": true, "bytes": n, "head": the first 4,096 characters}
    more than 262,144 values     the same, without "bytes"
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

MAX_BYTES: Final = 256 * 1024
MAX_VALUES: Final = MAX_BYTES  # each takes a byte at least, so more can't fit
MAX_DEPTH: Final = 64
_HEAD: Final = 4096
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
REPLACEMENT: Final = "\ufffd"
ELLIPSIS: Final = "…"


def text(value: str) -> str:
    """`value` without characters that PostgreSQL can't store."""
    return _UNSTORABLE.sub(REPLACEMENT, value)


def printed(value: object) -> str:
    """str() of it, storable; of a value that can't be printed, its type."""
    try:
        return text(str(value))
    except Exception:
        return f"<{type(value).__name__} that can't be printed>"


class TooManyValuesError(ValueError):
    """More values than could be stored; a structure that holds parts of itself again and again has no end of them."""


class _Cleaner:
    """One pass over a value; counts what it visits."""

    def __init__(self) -> None:
        self.values = 0
        self.longer = 0  # bytes by which jsonb's text is longer than Python's: it writes 1e+20 in full

    def clean(self, value: Any, depth: int) -> Any:
        self.values += 1
        if self.values > MAX_VALUES:
            raise TooManyValuesError
        match value:
            case None | bool():
                return value
            case str():
                return text(str(value))
            case int():
                return int(value)
            case float():
                return self._float(value)
            case bytes() | bytearray() | memoryview():
                return text(bytes(value).decode("utf-8", errors="replace"))
            case Mapping() | list() | tuple() | set() | frozenset() if depth <= 0:
                return ELLIPSIS
            case Mapping():
                return {printed(key): self.clean(item, depth - 1) for key, item in value.items()}
            case list() | tuple() | set() | frozenset():
                return [self.clean(item, depth - 1) for item in value]
            case _:
                return printed(value)

    def _float(self, value: float) -> float | str:
        if not math.isfinite(value):
            return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
        shown = repr(float(value))
        _, e, exponent = shown.partition("e")
        if e:
            self.longer += abs(int(exponent))
        return float(value)


def clean(value: Any, *, depth: int = MAX_DEPTH) -> Any:
    """`value` as plain JSON types, with what can't be stored replaced.

    Raises:
        TooManyValuesError: it has more than 262,144 values.
    """
    return _Cleaner().clean(value, depth)


def dumps(value: Any) -> str:
    """`value` as compact JSON text of at most 256 KiB in UTF-8, as jsonb's own text form would count it."""
    cleaner = _Cleaner()
    try:
        encoded = json.dumps(cleaner.clean(value, MAX_DEPTH), ensure_ascii=False)
    except TooManyValuesError:
        return json.dumps({"truncated": True, "head": f"more than {MAX_VALUES} values"})
    except ValueError:  # an integer with more digits than Python converts
        encoded = json.dumps({"truncated": True, "head": "a number too long to write"})
    size = len(encoded.encode()) + cleaner.longer
    if size <= MAX_BYTES:
        return encoded
    return json.dumps({"truncated": True, "bytes": size, "head": encoded[:_HEAD]}, ensure_ascii=False)
