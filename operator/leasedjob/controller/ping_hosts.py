"""Which hosts the operator may call for `spec.monitoring`. Pure.

The URL is a tenant's, and whoever calls it is a process inside the cluster that reaches more than the tenant may: so
nothing is called that an administrator has not listed, and what stands behind a listed name is looked at as well.

    monitor.example            https, this name
    monitor.example:8443       https, this name and port
    http://monitor.team.svc    http, this name
    *.monitor.example          https, any name below it
    *                          https, any name

A name that is listed itself may stand for a private address; one that only a pattern covers must stand for a public
one. Neither may stand for the loopback or for link-local addresses, where nodes and clouds keep what trusts whoever is
there. An address is called only where it is listed as it stands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Final
from urllib.parse import SplitResult, urlsplit

_ENTRY: Final = re.compile(r"(?:(https?)://)?(\*|(?:\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?)(?::([0-9]{1,5}))?")
_PORTS: Final = {"http": 80, "https": 443}
_NAT64: Final = IPv6Network("64:ff9b::/96")


class Trust(StrEnum):
    """How far a host is trusted to be what was meant."""

    LISTED = "listed"  # by its name
    PATTERN = "pattern"
    ADDRESS = "address"  # by its address


class PingRefusedError(Exception):
    """The URL may not be called. The message says why, without the URL's path, which is a secret."""


@dataclass(frozen=True, slots=True)
class _Entry:
    scheme: str
    host: str
    port: int

    def covers(self, scheme: str, host: str, port: int) -> bool:
        if (self.scheme, self.port) != (scheme, port):
            return False
        if self.host.startswith("*"):
            # A name's last label begins with a letter, no spelling of an address does.
            return host.endswith(self.host[1:]) and re.search(r"(^|\.)[a-z][a-z0-9-]*$", host) is not None
        return host == self.host


@dataclass(frozen=True, slots=True)
class PingHosts:
    """What was listed. Empty: nothing may be called."""

    entries: tuple[_Entry, ...] = ()

    @classmethod
    def parse(cls, texts: tuple[str, ...]) -> PingHosts:
        """Raises ValueError, which names the entry."""
        entries = []
        for text in texts:
            found = _ENTRY.fullmatch(text.lower())
            scheme = found[1] or "https" if found else ""
            port = int(found[4] or _PORTS[scheme]) if found else 0
            if found is None or not 1 <= port <= 65535:
                raise ValueError(
                    f"{text!r} is not a host such as monitor.example, *.example:8443 or http://ping.team.svc"
                )
            entries.append(_Entry(scheme, found[2], port))
        return cls(tuple(entries))

    def trust(self, url: str) -> Trust:
        """How far the URL's host is trusted.

        Raises:
            PingRefusedError: it may not be called.
        """
        if not self.entries:
            raise PingRefusedError("pings are turned off: an administrator has to list the hosts that may be called")
        parts = _split(url)
        host = (parts.hostname or "").rstrip(".")
        port = parts.port or _PORTS[parts.scheme]
        covering = [e for e in self.entries if e.covers(parts.scheme, host, port)]
        if not covering:
            shown = f"{parts.scheme}://{host}" + ("" if port == _PORTS[parts.scheme] else f":{port}")
            raise PingRefusedError(f"{shown} is not among the hosts that may be called")
        if all(e.host.startswith("*") for e in covering):
            return Trust.PATTERN
        return Trust.ADDRESS if _is_address(host) else Trust.LISTED


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise PingRefusedError("it is no URL") from None
    if parts.scheme not in _PORTS or not parts.hostname or port == 0:
        raise PingRefusedError("it must be an http or https URL")
    if parts.username is not None or parts.password is not None:
        raise PingRefusedError("it must not contain a user")
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise PingRefusedError("it must be printable ASCII without blanks")
    return parts


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def may_connect(address: str, trust: Trust) -> bool:
    """Whether a name of this trust may stand for this address."""
    ip = _inner(ip_address(address.partition("%")[0]))
    if trust is Trust.ADDRESS:
        return True
    if ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip.is_reserved:
        return False
    return trust is Trust.LISTED or ip.is_global


def _inner(ip: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The address that an IPv6 address leads to in the end."""
    if isinstance(ip, IPv4Address):
        return ip
    if ip in _NAT64:
        return IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.ipv4_mapped or ip.sixtofour or ip
