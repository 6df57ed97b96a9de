"""A relay while it runs: on one event loop, batch after batch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from leasedjob.errors import LeasedJobError, OutboxMissingError, SchemaMissingError
from leasedjob.lease.database import Connections, Credentials, Pool, translated, within
from leasedjob.workload.abort import AbortSignal
from leasedjob.workload.metrics import OutboxMetrics
from leasedjob.workload.outbox.batch import Batch, Relayed
from leasedjob.workload.outbox.claim import claim, settle
from leasedjob.workload.outbox.judge import Judge, Verdict
from leasedjob.workload.outbox.operations import outbox_status, prune_outbox
from leasedjob.workload.outbox.publisher import OutboxMessage, Publisher

if TYPE_CHECKING:
    from psycopg import AsyncConnection

    from leasedjob.workload.outbox.relay import Settings

_log: Final = logging.getLogger("leasedjob.workload")
STATEMENT_SECONDS: Final = 10.0
LEAST_IDLE_SECONDS: Final = 60.0
PRUNE_SECONDS: Final = 60.0
PRUNE_ROWS: Final = 1000
STATUS_SECONDS: Final = 15.0
LONGEST_FAULT_SECONDS: Final = 15.0


class Running:
    """A relay from its start to its end, on one event loop.

    Attributes:
        cut, ended: set from any thread.
        messages: of the batch that isn't committed yet.
    """

    def __init__(
        self,
        settings: Settings,
        database: str | Credentials | Connections,
        publisher: Publisher,
        judge: Judge,
        endings: Sequence[AbortSignal],
    ) -> None:
        self._settings, self._publisher, self._judge = settings, publisher, judge
        self._database = Credentials.from_conninfo(database) if isinstance(database, str) else database
        self._endings = endings
        self.cut, self.ended = AbortSignal(), AbortSignal()
        self.messages: Sequence[OutboxMessage] = ()
        self._prune_at = time.monotonic() + PRUNE_SECONDS
        self._status_at = time.monotonic()
        self._metrics = OutboxMetrics(settings.name)
        self.wake: Callable[[], None] = lambda: None

    # --- as long as it is wanted ---

    async def relay(self) -> None:
        name, faults = self._settings.name, 0
        async with self._open() as source:
            _log.info("%s: relaying begins", name)
            while not self._ending():
                try:
                    done = await self._batch(source)
                    await self._measure(source)
                    if not done.published and not done.pause:
                        await self._prune(source)
                except Exception as error:
                    faults += 1
                    pause = min(LONGEST_FAULT_SECONDS, self._settings.interval * 2.0 ** min(faults, 20))
                    _complain(name, error, faults, pause)
                    await self._rest(pause * random.uniform(0.75, 1.0))
                    continue
                if faults:
                    _log.info("%s: the database answers again", name)
                faults = 0
                if done.pause:
                    await self._rest(done.pause)
                elif not done.published:
                    await self._idle()
        _log.info("%s: relaying has ended", name)

    async def flush(self) -> Relayed:
        total, done = Relayed(), Relayed(claimed=1)
        async with self._open() as source:
            while done.claimed and not done.pause and not self._ending():
                done = await self._batch(source)
                total += done
        return total

    def _ending(self) -> bool:
        return any(signal.is_set() for signal in self._endings)

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[Connections]:
        loop = asyncio.get_running_loop()
        self._over, self._woken, self._cutting = asyncio.Event(), asyncio.Event(), asyncio.Event()

        def over() -> None:
            self._over.set()
            self._woken.set()

        self.wake = _from_anywhere(loop, self._woken.set)
        forget = [signal.call(_from_anywhere(loop, over)) for signal in self._endings]
        forget.append(self.cut.call(_from_anywhere(loop, self._cutting.set)))
        try:
            if isinstance(self._database, Credentials):
                async with Pool(self._database, max_size=1, application_name="leasedjob-outbox") as pool:
                    yield pool.connection
            else:
                yield self._database
        finally:
            for call in forget:
                call()
            self.ended.set("it has ended")

    async def _rest(self, seconds: float) -> None:
        """Nothing but the end shortens it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    async def _idle(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), self._settings.interval)
        if not self._over.is_set():
            self._woken.clear()

    # --- one batch ---

    async def _batch(self, source: Connections) -> Relayed:
        """One transaction: claim, publish, mark, commit."""
        batch: Batch | None = None
        try:
            with asked():
                async with source() as connection, _rolled_back(connection):
                    async with _talking(connection, "claim"):
                        messages = await self._claim(connection)
                    if messages:
                        self.messages = messages
                        batch = self._made(messages)
                        await batch.publish(self._publisher, self._judge)
                    async with _talking(connection, "mark"):
                        if batch is not None:
                            await settle(connection, batch.published, batch.failures)
                        await connection.commit()
        except BaseException:
            if batch is not None and batch.published:
                _log.error(
                    "%s: published, but not marked, so that they are published again under the same keys: %s",
                    self._settings.name,
                    ", ".join(map(str, batch.published)),
                )
            raise
        finally:
            self.messages = ()
        if batch is None:
            return Relayed()
        done = Relayed.of(batch, self._judge)
        self._metrics.relayed(done)
        _tell(self._settings.name, batch, done)
        if batch.cancelled:
            raise asyncio.CancelledError
        return done

    async def _claim(self, connection: AsyncConnection[Any]) -> Sequence[OutboxMessage]:
        # By hand: the isolation level belongs to this transaction, and not to a connection that others use, too.
        begin = "BEGIN" if connection.autocommit else "SET TRANSACTION"
        await connection.execute(f"{begin} ISOLATION LEVEL READ COMMITTED", prepare=False)
        settings = self._settings
        idle = max(LEAST_IDLE_SECONDS, 2 * (settings.batch_seconds + settings.message_seconds))
        return await claim(connection, settings.batch, settings.topics, idle)

    def _made(self, messages: Sequence[OutboxMessage]) -> Batch:
        settings = self._settings
        end = asyncio.get_running_loop().time() + settings.batch_seconds
        return Batch(messages, settings.concurrency, end, settings.message_seconds, self._cutting)

    async def _measure(self, source: Connections) -> None:
        if not self._metrics.wanted or time.monotonic() < self._status_at:
            return
        with asked():
            async with source() as connection, _talking(connection, "measure"):
                self._metrics.seen(await outbox_status(connection, self._settings.topics))
                await connection.commit()
        self._status_at = time.monotonic() + STATUS_SECONDS

    async def _prune(self, source: Connections) -> None:
        if self._settings.retention is None or time.monotonic() < self._prune_at:
            return
        with asked():
            async with source() as connection, _talking(connection, "prune"):
                pruned = await prune_outbox(connection, self._settings.retention, limit=PRUNE_ROWS)
                await connection.commit()
        if pruned < PRUNE_ROWS:
            self._prune_at = time.monotonic() + PRUNE_SECONDS


@contextlib.contextmanager
def asked() -> Iterator[None]:
    """The database's faults as this package's exceptions."""
    try:
        with translated():
            yield
    except SchemaMissingError as error:
        detail = str(error.__cause__ or "").partition("\n")[0]
        raise OutboxMissingError(detail) from error.__cause__


def _from_anywhere(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> Callable[[], None]:
    def called() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is nobody left to be told
            loop.call_soon_threadsafe(call)

    return called


def _talking(connection: AsyncConnection[Any], what: str) -> within:
    """The time that the database has for one part of the conversation on a connection that is kept."""
    return within(STATEMENT_SECONDS, lambda: contextlib.nullcontext(connection), what)


@contextlib.asynccontextmanager
async def _rolled_back(connection: AsyncConnection[Any]) -> AsyncIterator[None]:
    """If it fails: whoever gets the connection next finds no transaction on it."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            async with _talking(connection, "roll back"):
                await connection.rollback()
        raise


def _complain(name: str, error: Exception, faults: int, pause: float) -> None:
    """Once, and not at each look."""
    if faults > 1:
        return
    if isinstance(error, LeasedJobError):
        _log.error(
            "%s: %s; it looks again in %.1f s, and then at most each %g s", name, error, pause, LONGEST_FAULT_SECONDS
        )
    else:
        _log.error("%s: a batch has failed", name, exc_info=error)


def _tell(name: str, batch: Batch, done: Relayed) -> None:
    for failure in batch.failures:
        match failure.verdict:
            case Verdict.PARKED:
                _log.error(
                    "%s: %s is parked after %d tries, until retry_parked is called: %s",
                    name, failure.message, failure.tries, failure.error,
                )  # fmt: skip
            case Verdict.REFUSED:
                _log.warning(
                    "%s: %s was refused, and is tried again in %g s: %s",
                    name, failure.message, failure.wait, failure.error,
                )  # fmt: skip
            case Verdict.UNAVAILABLE:
                _log.warning("%s: %s was not taken: %s", name, failure.message, failure.error)
    if done.pause:
        _log.warning("%s: the sink is unavailable; it is asked again in %.1f s", name, done.pause)
