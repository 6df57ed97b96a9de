"""Which `Host` a request may name. Pure.

A page of another site can make a browser ask this server, by a name of its own that it lets stand for 127.0.0.1. The
browser then says that name, and gets nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

LOCAL: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HOST: Final = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)(:[0-9]{1,5})?")


def parse_hosts(names: Iterable[str]) -> frozenset[str]:
    """Names that the page may be asked by beside those of this machine, without ports.

    Raises ValueError for what is no name of a host.
    """
    found = set()
    for name in names:
        match = _HOST.fullmatch(name.lower())
        if match is None or match[3]:
            raise ValueError(f"{name!r} is no host name, without scheme and port")
        found.add(match[1])
    return frozenset(found)


def allowed(host: str | None, more: frozenset[str] = frozenset()) -> bool:
    """Whether this is a `Host` by which the page may be asked. Any port: a port-forward has its own."""
    match = _HOST.fullmatch((host or "").lower())
    return match is not None and match[1] in LOCAL | more
