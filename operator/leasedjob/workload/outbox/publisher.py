"""What the relay hands over, to whom, and what that one may answer.

    class Printer:
        async def publish(self, message: OutboxMessage) -> None:
            print(message.topic, message.payload)

A publisher returns when the sink has *acknowledged* the message: then the row is marked. How it fails decides what
becomes of the row:

    MessageRefusedError        this message, whenever it is sent: a try is spent, and the rows of its partition key
                               behind it wait; after the last try it is parked. With final=True at once
    PublisherUnavailableError  the sink doesn't work now, whatever is sent: no try is spent, the relay waits
    TimeoutError, ConnectionError, socket.gaierror
                               the same as PublisherUnavailableError
    any other exception        the same as MessageRefusedError

A publisher that can't tell the two apart (a server that answers 500 may be down, or choke on this message) says
"unavailable": the relay finds out by the other messages, see `judge`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Protocol

from leasedjob.errors import PublisherUnavailableError

NO_HEADERS: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxMessage:
    """A row of the outbox, as it is published.

    Args:
        id: grows in the order of the calls of `enqueue_once`.
        idempotency_key: unique among all messages, the same each time this one is published: for the sink.
        type: what happened or is to happen, for the receiver.
        payload: JSON, as plain Python values.
        topic: where it goes.
        partition_key: messages with the same topic and the same key are published in the order of `id`; None if no
            order is asked for.
        headers: more for the receiver, as a trace's id.
        created_at: when it was put in, aware.
        tries: how many times the sink has refused it so far.
    """

    id: int
    idempotency_key: str
    type: str
    payload: Any
    topic: str
    partition_key: str | None
    headers: Mapping[str, str] = field(default_factory=dict)
    created_at: datetime
    tries: int = 0

    def body(self) -> bytes:
        """The payload as compact JSON in UTF-8."""
        return json.dumps(self.payload, ensure_ascii=False, separators=(",", ":")).encode()

    def __str__(self) -> str:
        return f"row {self.id} ({self.type} to {self.topic}, key {self.idempotency_key})"


class Publisher(Protocol):
    """Hands messages over to a sink. The relay never has two messages of one topic and partition key in hand at once.

    With the relay's `concurrency` above 1 it is called for several messages at the same time.
    """

    def publish(self, message: OutboxMessage) -> Awaitable[object] | object:
        """Returns (or ends, as a coroutine) when the sink has acknowledged the message; else raises, see above.

        A coroutine function runs on the relay's event loop, and is cancelled when the time for one message is over. A
        plain function runs in a thread, where nothing can interrupt it: it must bring time limits of its own.
        """


class CallablePublisher:
    """A Publisher made of a function or a coroutine function.

    Args:
        call: is given each message; returns when it is handed over.
        unavailable: exceptions that say that the sink doesn't work now, besides those that always do:
            `(httpx.TransportError,)`, `(requests.ConnectionError, requests.Timeout)`.
    """

    def __init__(
        self,
        call: Callable[[OutboxMessage], Awaitable[object] | object],
        *,
        unavailable: tuple[type[Exception], ...] = (),
    ) -> None:
        self._call, self._unavailable = call, unavailable
        # The kind of function decides where it runs, so `publish` is of the same kind.
        self.publish = self._awaiting if _is_coroutine_function(call) else self._calling

    async def _awaiting(self, message: OutboxMessage) -> None:
        try:
            given = self._call(message)
            if inspect.isawaitable(given):
                await given
        except self._unavailable as error:
            raise PublisherUnavailableError(f"{type(error).__name__}: {error}") from error

    def _calling(self, message: OutboxMessage) -> Awaitable[object] | object:
        try:
            return self._call(message)
        except self._unavailable as error:
            raise PublisherUnavailableError(f"{type(error).__name__}: {error}") from error


def _is_coroutine_function(call: Callable[..., Any]) -> bool:
    """Also of an object with an asynchronous __call__."""
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(type(call), "__call__", None))  # noqa: B004
