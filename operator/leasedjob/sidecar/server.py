"""A very small HTTP/1.1 server: one thread, many clients, none of which can make another one wait.

It runs in the caller's selector loop. Each connection carries one exchange and is closed. A head or body that is too
large is refused, a client that is slow to send or to take is cut off, and where there are too many connections the
oldest one that has not yet sent its request makes room: the kubelet's probe is never the one that is refused.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from selectors import EVENT_READ, EVENT_WRITE, BaseSelector
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

HEAD_LIMIT: Final = 8 * 1024
CONNECTIONS: Final = 128
SLOW_SECONDS: Final = 5.0  # to send a whole request, to take a whole answer
BODY_SECONDS: Final = 15.0  # to send a body
LINGER_SECONDS: Final = 1.0  # for a client that is still sending what was refused

PHRASES: Final = {
    200: "OK",
    202: "Accepted",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    411: "Length Required",
    413: "Content Too Large",
    422: "Unprocessable Content",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}


class Request(NamedTuple):
    method: str
    path: str
    query: dict[str, str]
    body: bytes


Handler = Callable[[Request, "Exchange"], None]


class Exchange:
    """One request and its answer. A handler answers at once, or keeps the exchange and answers later."""

    __slots__ = ("_body_at", "_expected", "_in", "_out", "_server", "_socket", "_stage", "deadline", "request")

    READING, HELD, WRITING, LINGERING, CLOSED = range(5)

    def __init__(self, server: Server, connection: socket.socket, deadline: float) -> None:
        self._server, self._socket = server, connection
        self._in, self._out = bytearray(), b""
        self._stage = self.READING
        self._body_at = -1  # where the body begins, once the head is complete
        self._expected = 0
        self.deadline = deadline
        self.request: Request | None = None

    @property
    def open(self) -> bool:
        """False once the client has gone or was answered."""
        return self._stage in (self.READING, self.HELD)

    @property
    def reading(self) -> bool:
        return self._stage == self.READING

    def gone(self) -> bool:
        """Whether the client has already closed its side: it can't learn the answer any more."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def answer(self, status: int, body: dict[str, Any]) -> None:
        """Sends the answer; without effect if there has been one, or the client has gone."""
        if not self.open:
            return
        text = json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"HTTP/1.1 {status} {PHRASES.get(status, 'Status')}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        )
        self._out = head.encode("ascii") + text
        self._stage = self.WRITING
        self.deadline = self._server.now() + SLOW_SECONDS
        self._write()

    # --- called by the loop ---

    def ready(self, mask: int) -> None:
        try:
            if mask & EVENT_READ:
                self._read()
            if mask & EVENT_WRITE and self._stage == self.WRITING:
                self._write()
        except OSError:
            self.close()

    def expire(self) -> None:
        if self._stage == self.READING and self._in:
            self.answer(408, {"error": "the request took too long"})
        elif self._stage != self.HELD:
            self.close()

    def close(self) -> None:
        if self._stage != self.CLOSED:
            self._stage = self.CLOSED
            self._server.forget(self, self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return
        if not data:
            self.close()
        elif self._stage == self.READING:
            self._in += data
            if self._body_at < 0:
                self._parse_head()
            if self._stage == self.READING and self._body_at >= 0 and len(self._in) - self._body_at >= self._expected:
                self._handle()
        # What comes after the request, or after a refusal, is read and dropped.

    def _parse_head(self) -> None:
        end = self._in.find(b"\r\n\r\n")
        if end < 0 or end > HEAD_LIMIT:
            if len(self._in) > HEAD_LIMIT:
                self.answer(431, {"error": f"the request head is larger than {HEAD_LIMIT} bytes"})
            return
        lines = bytes(self._in[:end]).decode("latin-1").split("\r\n")
        parts = lines[0].split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            self.answer(400, {"error": "not an HTTP/1 request"})
            return
        headers = {}
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon:
                self.answer(400, {"error": "malformed header"})
                return
            headers[name.strip().lower()] = value.strip()
        target = urlsplit(parts[1])
        query = dict(parse_qsl(target.query, max_num_fields=20))
        self.request = Request(parts[0].upper(), unquote(target.path), query, b"")
        if "transfer-encoding" in headers:
            self.answer(411, {"error": "send the body with a Content-Length"})
            return
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdecimal()):
            self.answer(400, {"error": "malformed Content-Length"})
            return
        if len(length) > 12 or int(length) > self._server.body_limit:
            self.answer(413, {"error": f"the body is larger than {self._server.body_limit} bytes"})
            return
        self._expected, self._body_at = int(length), end + 4
        if self._expected:
            self.deadline = self._server.now() + BODY_SECONDS
            if headers.get("expect", "").lower() == "100-continue" and len(self._in) == self._body_at:
                self._socket.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _handle(self) -> None:
        assert self.request is not None
        body = bytes(self._in[self._body_at : self._body_at + self._expected])
        self._in.clear()
        self.request = self.request._replace(body=body)
        self._stage = self.HELD
        try:
            self._server.handle(self.request, self)
        except Exception as error:  # a handler's fault must not end the loop that holds the lease
            self.answer(500, {"error": f"{type(error).__name__}: {error}"})

    def _write(self) -> None:
        try:
            sent = self._socket.send(self._out)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return
        self._out = self._out[sent:]
        if self._out:
            self._server.watch(self, self._socket, EVENT_READ | EVENT_WRITE)
            return
        # Closing with unread input would reset the connection, and the answer with it.
        self._stage = self.LINGERING
        self.deadline = self._server.now() + LINGER_SECONDS
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._server.watch(self, self._socket, EVENT_READ)


class Server:
    """Listens on one port within a selector whose keys carry a callable that takes the event mask.

    Args:
        host: an address of this machine, or "" for all of them, IPv6 included where there is any.
        body_limit: bytes; 0 refuses every body.
        now: a monotonic clock, for slow clients only.
    """

    def __init__(
        self,
        selector: BaseSelector,
        host: str,
        port: int,
        handle: Handler,
        *,
        now: Callable[[], float],
        body_limit: int = 0,
        connections: int = CONNECTIONS,
    ) -> None:
        self._selector, self.handle, self.now = selector, handle, now
        self.body_limit, self._most = body_limit, connections
        self._exchanges: dict[Exchange, None] = {}  # oldest first
        self._listener = listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        selector.register(self._listener, EVENT_READ, self._accept)

    def _accept(self, _mask: int) -> None:
        for _ in range(32):
            try:
                connection, _address = self._listener.accept()
            except OSError:
                return
            connection.setblocking(False)
            if len(self._exchanges) >= self._most:
                victim = next((e for e in self._exchanges if e.reading), None) or next(iter(self._exchanges))
                victim.close()
            exchange = Exchange(self, connection, self.now() + SLOW_SECONDS)
            self._exchanges[exchange] = None
            self._selector.register(connection, EVENT_READ, exchange.ready)

    def expire(self) -> None:
        """Cuts off clients that are too slow; called now and then."""
        now = self.now()
        for exchange in [e for e in self._exchanges if e.deadline <= now]:
            exchange.expire()

    def watch(self, exchange: Exchange, connection: socket.socket, events: int) -> None:
        self._selector.modify(connection, events, exchange.ready)

    def forget(self, exchange: Exchange, connection: socket.socket) -> None:
        self._exchanges.pop(exchange, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()

    def close(self) -> None:
        for exchange in list(self._exchanges):
            exchange.close()
        self._selector.unregister(self._listener)
        self._listener.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. "" is every address of both families, or of IPv4 alone where there is no IPv6.

    Raises:
        OSError: the port is taken.
    """
    if host == "":
        try:
            return _bound(socket.AF_INET6, "::", port)
        except OSError:
            host = "0.0.0.0"
    return _bound(socket.AF_INET, host, port)


def _bound(family: int, host: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
        listener.listen(128)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
