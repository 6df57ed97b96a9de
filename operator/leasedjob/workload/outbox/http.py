"""HttpPublisher: each message is one POST, with its idempotency key in a header. The standard library's client.

    publisher = HttpPublisher("https://billing.example/events/{topic}", headers={"Authorization": "Bearer …"})
    relay = OutboxRelay(database, publisher, state, concurrency=8)
    shutdown.add(publisher)            # its connections are closed after the relay
    shutdown.add(relay)

    POST /events/orders
    Content-Type: application/json
    Idempotency-Key: order-7-paid
    Outbox-Type: order-paid
    Outbox-Topic: orders
    Outbox-Partition-Key: order-7

What the answer means for the message:

    2xx                              it is taken
    400 and other 4xx                refused: a try is spent
    408, 425, 429, 5xx               unavailable; Retry-After in seconds is believed
    3xx, 401, 403, 404, 405, 407     unavailable as well: address or credentials are wrong, and that is no message's
                                     fault. If it is one message's fault, others show it (see `judge`)
    no answer                        unavailable; it may have been taken, so the same key comes again
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Self
from urllib.parse import quote, urlsplit

from leasedjob.errors import MessageRefusedError, PublisherUnavailableError
from leasedjob.workload.outbox.publisher import NO_HEADERS, OutboxMessage
from leasedjob.workload.phases import Phase

NOT_THE_MESSAGE: Final = frozenset({401, 403, 404, 405, 407, 408, 425, 429})
ANSWER_LIMIT: Final = 64 * 1024  # of an answer, so that the connection can be used again; a longer one ends it
SAID: Final = 200  # characters of an answer, for the error
IDLE: Final = 32  # connections that are kept
_PRINTABLE: Final = "".join(map(chr, range(0x20, 0x7F)))
_OURS: Final = frozenset({"host", "connection", "content-length", "transfer-encoding", "te", "upgrade", "expect"})
_GONE: Final = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


class HttpPublisher:
    """A Publisher, and a Stoppable that closes its connections after the relay has ended.

    Args:
        url: where messages are posted to; `{topic}` and `{type}` in it are the message's own.
        headers: more of them, as Authorization; or a function that gives them for each message (a token that rotates).
        seconds: for connecting, and for each part of the answer; the relay's message_seconds limit all of it.
        context: for https; default: the system's certificates.
        name: for log lines.

    Raises:
        ValueError: `url` is not an address of http or https.
    """

    phase: Final = Phase.POOLS  # consumers may use it as well

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | Callable[[], Mapping[str, str]] = NO_HEADERS,
        seconds: float = 5.0,
        context: ssl.SSLContext | None = None,
        name: str = "http",
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be an address of http or https, not {url!r}")
        if parts.username is not None:
            raise ValueError("url must not hold a user name: give it as a header")
        self.name = name
        self._host, self._port = parts.hostname, parts.port
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._headers, self._seconds = headers, seconds
        self._context = (context or ssl.create_default_context()) if parts.scheme == "https" else None
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._closed = False

    async def publish(self, message: OutboxMessage) -> None:
        """Posts it, from a thread. Cancelling it ends the connection."""
        exchange = _Exchange(self, self._address(message), self._all_headers(message), message.body())
        try:
            await asyncio.to_thread(exchange.carry_out)
        except asyncio.CancelledError:
            exchange.give_up()
            raise

    def close(self) -> None:
        """Closes the connections. What is in hand ends, and its connection then."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    stop = close

    def in_hand(self) -> Sequence[str]:
        return ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one message ---

    def _address(self, message: OutboxMessage) -> str:
        return self._target.replace("{topic}", quote(message.topic, "")).replace("{type}", quote(message.type, ""))

    def _all_headers(self, message: OutboxMessage) -> dict[str, str]:
        given = self._headers() if callable(self._headers) else self._headers
        chosen = {name.lower(): (name, value) for name, value in message.headers.items() if name.lower() not in _OURS}
        chosen |= {name.lower(): (name, value) for name, value in given.items()}
        ours = {
            "Content-Type": "application/json",
            "Idempotency-Key": message.idempotency_key,
            "Outbox-Type": message.type,
            "Outbox-Topic": message.topic,
        }
        if message.partition_key is not None:
            ours["Outbox-Partition-Key"] = message.partition_key
        chosen |= {name.lower(): (name, value) for name, value in ours.items()}
        # A header is ASCII: anything else is percent-encoded, as in an address.
        return {name: quote(value, _PRINTABLE) for name, value in chosen.values()}

    # --- connections ---

    def take(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was used before."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        return self.new(), False

    def new(self) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._seconds)
        return http.client.HTTPSConnection(self._host, self._port, timeout=self._seconds, context=self._context)

    def give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < IDLE:
                self._idle.append(connection)
                return
        connection.close()


class _Exchange:
    """One request and its answer, in a thread."""

    def __init__(self, publisher: HttpPublisher, target: str, headers: Mapping[str, str], body: bytes) -> None:
        self._publisher, self._target, self._headers, self._body = publisher, target, headers, body
        self._connection: http.client.HTTPConnection | None = None
        self._given_up = False

    def carry_out(self) -> None:
        """Raises what a publisher may raise."""
        try:
            status, retry_after, said = self._ask()
        except (http.client.HTTPException, OSError) as error:
            raise PublisherUnavailableError(f"{type(error).__name__}: {error}") from error
        text = f"HTTP {status}: {said}" if said else f"HTTP {status}"
        if 200 <= status < 300:
            return
        if status < 400 or status >= 500 or status in NOT_THE_MESSAGE:
            raise PublisherUnavailableError(text, retry_after=retry_after)
        raise MessageRefusedError(text)

    def give_up(self) -> None:
        """From another thread: whoever waits for the answer waits no longer."""
        self._given_up = True
        connection = self._connection
        if connection is not None and (sock := connection.sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _ask(self) -> tuple[int, float | None, str]:
        connection, used = self._publisher.take()
        try:
            return self._on(connection)
        except _GONE:
            if not used or self._given_up:
                raise
        return self._on(self._publisher.new())  # a server ends an idle connection whenever it likes

    def _on(self, connection: http.client.HTTPConnection) -> tuple[int, float | None, str]:
        self._connection = connection
        kept = False
        try:
            connection.request("POST", self._target, self._body, dict(self._headers))
            answer = connection.getresponse()
            said = answer.read(ANSWER_LIMIT)
            kept = answer.isclosed() and not answer.will_close and not self._given_up
            text = " ".join(said.decode("utf-8", "replace").split())[:SAID]
            return answer.status, _seconds(answer.headers.get("Retry-After")), text
        finally:
            self._connection = None
            if kept:
                self._publisher.give_back(connection)
            else:
                connection.close()


def _seconds(retry_after: str | None) -> float | None:
    """Its form in seconds; a date isn't understood."""
    return float(retry_after) if retry_after is not None and retry_after.isascii() and retry_after.isdigit() else None
