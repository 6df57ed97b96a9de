"""OutboxRelay: publishes what is in the outbox, at least once and in the order of each partition key.

    relay = OutboxRelay(os.environ["DATABASE_URL"], publisher, state)
    shutdown.add(relay)
    relay.start()                      # on the running event loop, or in a thread of its own

A batch is one transaction: lock the lanes, claim rows with FOR UPDATE SKIP LOCKED, publish, mark, commit. Draining is
looked at before each claim; a batch that has been claimed is finished, within its time. Whoever is killed between
publishing and the commit has published without a mark: the message is published again, under the same idempotency key.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

from leasedjob.workload.abort import AbortSignal
from leasedjob.workload.draining import ShutdownState
from leasedjob.workload.outbox.batch import Relayed
from leasedjob.workload.outbox.judge import Judge, Patience
from leasedjob.workload.outbox.publisher import CallablePublisher, OutboxMessage, Publisher
from leasedjob.workload.phases import Phase

if TYPE_CHECKING:
    from leasedjob.lease.database import Connections, Credentials
    from leasedjob.workload.outbox.running import Running

BATCH: Final = 50
INTERVAL_SECONDS: Final = 0.5
LARGEST_BATCH: Final = 1000
STOP_SECONDS: Final = 19.0  # of the 20 that the phase has
LONGEST_SECONDS: Final = 18.0  # of a batch, so that it ends by itself within them
KEEP: Final = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a relay was told; see OutboxRelay."""

    name: str
    batch: int
    interval: float
    concurrency: int
    topics: tuple[str, ...] | None
    batch_seconds: float
    message_seconds: float
    retention: timedelta | None

    def __post_init__(self) -> None:
        for field in ("batch", "concurrency"):
            number = getattr(self, field)
            if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= LARGEST_BATCH:
                raise ValueError(f"{field} must be a whole number from 1 to {LARGEST_BATCH}, not {number!r}")
        for field in ("interval", "batch_seconds", "message_seconds"):
            seconds = getattr(self, field)
            if isinstance(seconds, bool) or not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{field} must be a positive number of seconds, not {seconds!r}")
        if (together := self.batch_seconds + self.message_seconds) > LONGEST_SECONDS:
            raise ValueError(
                f"batch_seconds and message_seconds must be at most {LONGEST_SECONDS:g} together, not {together:g}: "
                "a stop leaves no more"
            )
        if self.retention is not None and self.retention <= timedelta():
            raise ValueError(f"retention must be positive, not {self.retention}")


class OutboxRelay:
    """Any number of them, in any number of processes, may relay one outbox.

    Args:
        database: where the outbox is: a libpq connection string or Credentials, for a connection of its own; or a
            function that gives an asynchronous psycopg connection, as a pool's `connection`.
        publisher: a Publisher, or a function or coroutine function that is given each message.
        state: whose draining ends the relay; without one it ends by `stop` alone.
        name: for log lines, and unique among the parts of a GracefulShutdown.
        batch: messages that are claimed at once, 1 to 1000.
        interval: seconds between two looks when there is nothing to publish. Otherwise batch follows batch.
        concurrency: messages that are in hand at once. With 1 all are begun in the order of their ids.
        topics: only messages to these; None for all.
        patience: how long is waited after a failure, and how many tries a message has.
        batch_seconds: after this time no further message of a batch is begun.
        message_seconds: for one message, where the publisher is asynchronous. Together with batch_seconds at most 18,
            so that the batch has ended before a stop's time is over.
        retention: published messages, and with them their keys, are kept for this time; None for ever.

    Raises:
        ValueError: a number is out of range; the text names it.
    """

    phase: Final = Phase.BACKGROUND

    def __init__(
        self,
        database: str | Credentials | Connections,
        publisher: Publisher | Callable[[OutboxMessage], Awaitable[object] | object],
        state: ShutdownState | None = None,
        *,
        name: str = "outbox",
        batch: int = BATCH,
        interval: float = INTERVAL_SECONDS,
        concurrency: int = 1,
        topics: Iterable[str] | None = None,
        patience: Patience | None = None,
        batch_seconds: float = 10.0,
        message_seconds: float = 5.0,
        retention: timedelta | None = KEEP,
    ) -> None:
        if isinstance(topics, str):
            raise ValueError("topics must be several topics, not one string")
        chosen = None if topics is None else tuple(topics)
        self._settings = Settings(name, batch, interval, concurrency, chosen, batch_seconds, message_seconds, retention)
        self.name = name
        self._database = database
        self._publisher = _publisher(publisher)
        self._state = state
        self._judge = Judge(patience or Patience())
        self._stopping = AbortSignal()
        self._running: Running | None = None
        self._task: asyncio.Task[None] | None = None

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins relaying: on the running event loop, or, where none runs, in a thread with a loop of its own.

        Raises:
            RuntimeError: it is running.
        """
        running = self._begin()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            threading.Thread(
                target=asyncio.run, args=(running.relay(),), name=f"relay-{self.name}", daemon=True
            ).start()
        else:
            self._task = loop.create_task(running.relay(), name=f"relay-{self.name}")
            self._task.add_done_callback(lambda _: running.ended.set("it was cancelled before it began"))

    async def run(self) -> None:
        """The same as a coroutine, which ends when draining has begun or it was stopped, and its batch is finished."""
        await self._begin().relay()

    async def flush(self) -> Relayed:
        """Publishes what is there, batch by batch, until there is nothing to publish now, the sink is unavailable, or
        draining has begun; for a program that does this at times, and for tests.

        Raises:
            DatabaseUnavailableError, DatabaseRefusedError, OutboxMissingError.
        """
        return await self._begin().flush()

    async def stop(self) -> None:
        """Claims nothing more, and ends when the batch in hand is finished: what was published is marked.

        Near the limit of its phase, or when it is cancelled, what is still in hand is given up and the rest is marked.
        """
        self._stopping.set("it is stopped")
        if (running := self._running) is None:
            return
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await running.ended
        except TimeoutError:
            running.cut.set("the time to stop in is over")
            await running.ended
        except asyncio.CancelledError:
            running.cut.set("the stop is cut off")
            raise

    def wake(self) -> None:
        """There is something in the outbox: it looks at once. To be called after the commit, from any thread."""
        if (running := self._running) is not None:
            running.wake()

    def in_hand(self) -> Sequence[str]:
        """The messages of the batch that isn't committed yet."""
        running = self._running
        return [] if running is None else [str(message) for message in running.messages]

    def _begin(self) -> Running:
        from leasedjob.workload.outbox.running import Running  # and with it the database driver

        if self._running is not None and not self._running.ended.is_set():
            raise RuntimeError(f"{self.name} is running")
        endings = (self._stopping,) if self._state is None else (self._stopping, self._state.signal)
        self._running = Running(self._settings, self._database, self._publisher, self._judge, endings)
        return self._running


def _publisher(given: Any) -> Publisher:
    if hasattr(given, "publish"):
        return cast(Publisher, given)
    if not callable(given):
        raise TypeError(f"publisher must have a method publish or be a function, not {type(given).__name__}")
    return CallablePublisher(given)
