"""One HTTP request with one deadline for all of it: for a Pod's containers among themselves, and for its probes."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from typing import Final

ANSWER_LIMIT: Final = 64 * 1024  # what is read of an answer; the rest doesn't matter to anybody here


class HttpError(Exception):
    """The answer was none that HTTP/1 knows."""


def ask(
    host: str,
    port: int,
    method: str,
    target: str,
    *,
    seconds: float,
    headers: Iterable[tuple[str, str]] = (),
    body: bytes = b"",
    tls: bool = False,
) -> tuple[int, bytes]:
    """Status and body (at most 64 KiB of the answer) of one request.

    Args:
        seconds: for everything together; a server that sends a byte now and then doesn't prolong it.
        body: of a POST.
        tls: without verification, as the kubelet does it for probes.

    Raises:
        OSError: no connection, cut off, or too late (TimeoutError).
        HttpError: not HTTP.
    """
    until = time.monotonic() + seconds
    given = list(headers)
    if not any(name.lower() == "host" for name, _ in given):
        given.insert(0, ("Host", f"[{host}]:{port}" if ":" in host else f"{host}:{port}"))
    lines = [f"{method} {target} HTTP/1.1", *(f"{n}: {v}" for n, v in given), "Connection: close", "", ""]
    if method == "POST":
        lines.insert(-2, f"Content-Length: {len(body)}")
    connection = socket.create_connection((host, port), timeout=_left(until))
    received = bytearray()
    try:
        if tls:
            connection = _tls(connection, host)
        connection.sendall("\r\n".join(lines).encode("latin-1", "replace") + body)
        wanted = ANSWER_LIMIT
        while len(received) < wanted:
            connection.settimeout(_left(until))
            data = connection.recv(16384)
            if not data:
                break
            received += data
            if (end := received.find(b"\r\n\r\n")) >= 0:
                wanted = min(ANSWER_LIMIT, end + 4 + _length(bytes(received[:end])))
    finally:
        connection.close()
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    parts = head.split(b"\r\n", 1)[0].split(b" ", 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
        raise HttpError("the answer is not HTTP")
    return int(parts[1]), body


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip() == b"content-length" and value.strip().isdigit():
            return int(value)
    return ANSWER_LIMIT


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


def _tls(plain: socket.socket, host: str) -> socket.socket:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(plain, server_hostname=host)
