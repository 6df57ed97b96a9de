"""JSON that is nested more deeply than anything that runs is read all the same, and told from the rest. Pure.

The API server keeps objects of up to 10,000 levels, and Python's parser gives up long before. A list or a watch that
holds one such object would never be read again, so that one tenant could stop the operator for all.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

MAX_LEVELS: Final = 64  # of a Pod template; one that runs has about twenty
KEPT_LEVELS: Final = 200  # of an object that is cut, its wrapping included: enough to see that it is too deep
_TOKEN: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[][{}]', re.DOTALL)


def loads(text: str | bytes) -> Any:
    """What `json.loads` makes of it; where that is too deep, with null for what is below `KEPT_LEVELS`.

    Raises ValueError for what isn't JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        return json.loads(cut(text.decode("utf-8", "replace") if isinstance(text, bytes) else text))


def readable(text: bytes) -> bytes:
    """The same JSON, cut where whoever called this could not parse it. With few brackets it can't be deep; else, that
    it can be parsed is found out by parsing it, which costs a fifth of looking for its depth; here, some calls further
    in, is a little less room for it than there."""
    if text.count(b"{") + text.count(b"[") <= KEPT_LEVELS:
        return text
    try:
        json.loads(text)
    except RecursionError:
        return cut(text.decode("utf-8", "replace")).encode()
    except ValueError:
        pass  # it is no JSON, which is the caller's to find out
    return text


def cut(text: str) -> str:
    """The same JSON with null for each list or map that is more than `KEPT_LEVELS` deep."""
    if text.count("{") + text.count("[") <= KEPT_LEVELS:
        return text
    parts: list[str] = []
    level = done = start = 0
    for token in _TOKEN.finditer(text):
        sign = text[token.start()]
        if sign in "[{":
            level += 1
            if level == KEPT_LEVELS + 1:
                start = token.start()
        elif sign in "]}":
            level -= 1
            if level == KEPT_LEVELS:
                parts += text[done:start], "null"
                done = token.end()
    if level > KEPT_LEVELS:  # it has no end, and is no JSON
        return "".join((*parts, text[done:start]))
    return "".join((*parts, text[done:]))


def too_deep(value: Any, most: int = MAX_LEVELS) -> bool:
    """Whether lists and maps are nested in each other more than `most` times."""
    layer = [value]
    for _ in range(most + 1):
        inner: list[Any] = []
        for each in layer:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        layer = [each for each in inner if isinstance(each, (dict, list))]
        if not layer:
            return False
    return True
