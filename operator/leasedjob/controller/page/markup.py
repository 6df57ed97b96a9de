"""HTML and SVG as values. The one place that makes markup from text: whatever is not `Html` already is escaped.

Names, messages and reasons come from tenants. No other module of the page may make an `Html`, which a test holds, so
there is no place where escaping can be forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import Final
from urllib.parse import quote, urlencode

_VOID: Final = frozenset({"br", "input", "link", "meta"})
_NAME: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9-]*")
# Control characters have no place in a document; and what turns the direction of writing, or takes no space, makes a
# name look like another one.
_HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff\ufff9-\ufffb]"
)


class Html(str):
    """Markup that is safe as it stands."""

    __slots__ = ()


Child = str | int | None | Iterable["Child"]
NOTHING: Final = Html("")


def text(value: str) -> Html:
    """Escaped; what can't be seen is shown as an escape."""
    return Html(escape(_HIDDEN.sub(lambda m: f"\\u{ord(m[0]):04x}", value)))


def _shown(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str):
        return text(child)
    if isinstance(child, int):
        return str(child)
    return "".join(map(_shown, child))


def el(tag: str, *children: Child, **attributes: str | int | bool | None) -> Html:
    """An element. An attribute's name is written with `_` for `-`, and a trailing `_` where it is a word of Python.

    Args:
        attributes: None and False leave one out; True is one without a value.
    """
    parts = [f"<{tag}"]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        written = name.rstrip("_").replace("_", "-")
        if not _NAME.fullmatch(written) or written.lower().startswith(("on", "style", "srcdoc")):
            raise ValueError(f"{written} is no attribute of the page's")
        parts.append(f" {written}" if value is True else f' {written}="{text(str(value))}"')
    if tag in _VOID:
        return Html("".join((*parts, ">")))
    return Html("".join((*parts, ">", *map(_shown, children), f"</{tag}>")))


def join(*children: Child) -> Html:
    """Children without an element around them."""
    return Html("".join(map(_shown, children)))


def document(head: Html, body: Html) -> str:
    """A whole page."""
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def path(*parts: str, **query: str | int | None) -> str:
    """A path of this page, each part quoted; empty values of the query are left out."""
    where = "/" + "/".join(quote(part, safe="") for part in parts)
    given = {name: str(value) for name, value in query.items() if value not in (None, "")}
    return f"{where}?{urlencode(given)}" if given else where
