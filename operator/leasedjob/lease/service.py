"""JobSchedulerService: the lease for Python programs, asynchronous and synchronous.

    jobs = JobSchedulerService(connections(credentials))
    outcome = await jobs.run_exclusive(JobAcquireOptions(code="sync-orders", run_key="2026-07-20T03:00:00Z"), work)

Both services drive the same conversation (`leasedjob.lease.core`). Two deliberate differences from the library that
this follows: expiry is judged by the duration that the *holder* recorded, not by the challenger's, and a heartbeat that
comes after expiry is refused even if nobody reclaimed (complete and fail are then still accepted).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import psycopg
from psycopg.rows import DictRow, dict_row

from leasedjob.errors import DatabaseUnavailableError, LeasedJobError, LostJobLeaseError
from leasedjob.lease import core
from leasedjob.lease.core import Ask, JobAcquired, JobAcquireResult, JobLease, Pause, Talk, Trust
from leasedjob.lease.database import Connections, FaultKind, translated
from leasedjob.lease.options import LEFT_OUT, JobAcquireOptions, Resolved, resolve
from leasedjob.lease.rows import Outcome
from leasedjob.lease.statements import statement

T = TypeVar("T")
SyncConnections = Callable[[], AbstractContextManager[psycopg.Connection[DictRow]]]


class LostSignal:
    """Set once the lease is lost, or not to be trusted any more. Safe to read from any thread.

    `is_set()` also judges the clock, so it is true at the end of trust even while a heartbeat hangs.
    """

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._event = threading.Event()
        self.reason = ""

    def is_set(self) -> bool:
        """The work should stop now."""
        if not self._event.is_set() and self._trust.over(core.boottime()):
            self.set("no heartbeat reached the database in time")
        return self._event.is_set()

    def set(self, reason: str) -> None:
        """Tells the work to stop; the first reason stays."""
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks a thread until the signal is set; False after `timeout` seconds."""
        self._event.wait(timeout)
        return self.is_set()


@dataclass(frozen=True, slots=True)
class JobExecutionLease(JobLease):
    """What the work of `run_exclusive` gets.

    Args:
        idempotency_key: stable for the run, whatever the attempt: for a unique outbox or deduplication row.
        attempt: 1 and more.
        fencing_token: grows with every acquire, for sinks that refuse an older one.
        lost: the abort signal.
    """

    idempotency_key: str
    attempt: int
    fencing_token: int
    lost: LostSignal = field(compare=False)

    def raise_if_lost(self) -> None:
        """LostJobLeaseError, if the lease is lost: to be called between steps of the work."""
        if self.lost.is_set():
            raise LostJobLeaseError(self.id, f"the lease {self.id} is lost: {self.lost.reason}")


@dataclass(frozen=True, slots=True)
class RunExclusiveResult(Generic[T]):
    """Whether the work ran here, and what it returned."""

    acquired: bool
    result: T | None = None


def _execution(acquired: JobAcquired, options: Resolved) -> tuple[JobExecutionLease, Trust]:
    trust = Trust(options.lease_ms / 1000, options.heartbeat_ms / 1000, acquired.sent)
    lease = JobExecutionLease(
        acquired.id,
        acquired.owner_token,
        acquired.idempotency_key,
        acquired.attempt,
        acquired.fencing_token,
        LostSignal(trust),
    )
    return lease, trust


def _error_data(error: BaseException) -> dict[str, str]:
    return {"error": str(error)[:10_000], "type": type(error).__name__}


def _lost(lease: JobExecutionLease) -> LostJobLeaseError:
    reason = lease.lost.reason or "it was reclaimed before its end was recorded"
    return LostJobLeaseError(lease.id, f"the lease {lease.id} is lost: {reason}")


class JobSchedulerService:
    """The asynchronous service.

    Args:
        connection: a connection in autocommit for one statement: a pool's `connection`, or
            `leasedjob.lease.database.connections(credentials)`.
        timeout: seconds that one statement may take, connecting included.
    """

    def __init__(self, connection: Connections, *, timeout: float = 30.0) -> None:
        self._connection = connection
        self._timeout = timeout

    async def acquire(self, options: JobAcquireOptions) -> JobAcquireResult:
        """Takes the run if it is free: new, FAIL, or RUNNING and expired.

        The caller owns heartbeats and the end of what it acquired.

        Raises:
            InvalidJobIdentityOptionsError, InvalidJobLeaseOptionsError: before any SQL.
            DatabaseUnavailableError, DatabaseRefusedError, SchemaMissingError.
        """
        return await self._drive(core.acquire(resolve(options)))

    async def heartbeat(self, lease: JobLease) -> bool:
        """Extends the lease; False if it is lost or had expired.

        Raises:
            DatabaseUnavailableError: it is unknown; ask again. With kind "busy" the row is locked elsewhere.
        """
        return await self._drive(core.heartbeat(lease))

    async def complete(self, lease: JobLease, data: Any = LEFT_OUT) -> bool:
        """Records SUCCESS and optional JSON data; False if ownership is lost."""
        return await self._drive(core.finish(lease, Outcome.COMPLETE, data))

    async def fail(self, lease: JobLease, data: Any = LEFT_OUT) -> bool:
        """Records FAIL; the next acquire may take the run at once. False if ownership is lost."""
        return await self._drive(core.finish(lease, Outcome.FAIL, data))

    async def release(self, lease: JobLease, data: Any = LEFT_OUT) -> bool:
        """As fail, for work that is given back: data defaults to `{"released": true}`."""
        return await self._drive(core.finish(lease, Outcome.RELEASE, data))

    async def run_exclusive(
        self,
        options: JobAcquireOptions,
        work: Callable[[JobExecutionLease], Awaitable[T]],
        *,
        cancel_on_loss: bool = True,
    ) -> RunExclusiveResult[T]:
        """Runs `work` if the run is acquired, keeps the lease alive, and records the end.

        SUCCESS when it returns; FAIL when it raises, with the exception's text in the row (it is raised again); FAIL
        `{released: true}` when it is cancelled from outside. What it returns goes to the caller and nowhere else.

        Args:
            cancel_on_loss: cancel the work as soon as the lease is lost; else it only sees `lease.lost`.

        Raises:
            LostJobLeaseError: the lease was lost before the end was recorded.
        """
        resolved = resolve(options)
        acquired = await self._drive(core.acquire(resolved))
        if not acquired.acquired:
            return RunExclusiveResult(acquired=False)
        lease, trust = _execution(acquired, resolved)
        running = asyncio.create_task(_call(work, lease))
        keeping = asyncio.create_task(self._keep(lease, trust, running if cancel_on_loss else None))
        try:
            result = await self._outcome(lease, running)
        finally:
            keeping.cancel()  # last: the lease is kept until the end is recorded
            with contextlib.suppress(asyncio.CancelledError):
                await keeping
        return RunExclusiveResult(acquired=True, result=result)

    def exclusive(
        self, options: JobAcquireOptions | Callable[[], JobAcquireOptions], *, cancel_on_loss: bool = True
    ) -> Callable[[Callable[[JobExecutionLease], Awaitable[T]]], Callable[[], Awaitable[RunExclusiveResult[T]]]]:
        """`run_exclusive` as a decorator; `options` may be a function, for a run key that is new at each call."""

        def decorate(
            work: Callable[[JobExecutionLease], Awaitable[T]],
        ) -> Callable[[], Awaitable[RunExclusiveResult[T]]]:
            @functools.wraps(work)
            async def call() -> RunExclusiveResult[T]:
                chosen = options() if callable(options) else options
                return await self.run_exclusive(chosen, work, cancel_on_loss=cancel_on_loss)

            return call

        return decorate

    async def _keep(self, lease: JobExecutionLease, trust: Trust, running: asyncio.Task[Any] | None) -> None:
        lease.lost.set(await self._drive(core.keep(lease, trust)))
        if running is not None:
            running.cancel()

    async def _outcome(self, lease: JobExecutionLease, running: asyncio.Task[T]) -> T:
        try:
            result = await running
        except asyncio.CancelledError as cancelled:
            if not running.done():  # cancelled from outside while the work still cleans up
                await asyncio.wait([running])
            if not lease.lost.is_set():
                await _to_the_end(self.release(lease))
                raise
            # Nobody may have reclaimed yet: giving the run back spares the next owner the wait for its expiry.
            with contextlib.suppress(LeasedJobError):
                await _to_the_end(self.release(lease))
            raise _lost(lease) from cancelled
        except BaseException as error:
            recorded = True
            try:
                recorded = await _to_the_end(self.fail(lease, _error_data(error)))
            except LeasedJobError as unrecorded:  # the work's own error matters more; the lease will expire
                error.add_note(f"its failure could not be recorded: {unrecorded}")
            if not recorded:
                raise _lost(lease) from error
            raise
        if not await _to_the_end(self.complete(lease)):
            raise _lost(lease)
        return result

    async def _drive(self, talk: Talk[T]) -> T:
        answer: list[DictRow] | BaseException | None = None
        while True:
            step = _advance(talk, answer)
            if isinstance(step, _Done):
                return step.value  # type: ignore[no-any-return]
            if isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
                answer = []
                continue
            try:
                answer = await self._ask(step)
            except Exception as error:
                answer = error

    async def _ask(self, ask: Ask) -> list[DictRow]:
        within = self._timeout if ask.within is None else min(self._timeout, ask.within)
        with translated():
            try:
                async with (
                    asyncio.timeout(within),
                    self._connection() as connection,
                    connection.cursor(row_factory=dict_row) as cursor,
                ):
                    await cursor.execute(statement(ask.name), ask.parameters)
                    return await cursor.fetchall()
            except TimeoutError as error:
                raise DatabaseUnavailableError(
                    f"the database did not answer {ask.name} within {within:g} s", FaultKind.TRANSIENT
                ) from error


class SyncJobSchedulerService:
    """The synchronous service; every method and rule is that of JobSchedulerService.

    Args:
        connection: a connection in autocommit for one statement: a ConnectionPool's `connection`, or
            `lambda: connect_sync(credentials)`.
    """

    def __init__(self, connection: SyncConnections) -> None:
        self._connection = connection

    def acquire(self, options: JobAcquireOptions) -> JobAcquireResult:
        """See JobSchedulerService.acquire."""
        return self._drive(core.acquire(resolve(options)))

    def heartbeat(self, lease: JobLease) -> bool:
        """See JobSchedulerService.heartbeat."""
        return self._drive(core.heartbeat(lease))

    def complete(self, lease: JobLease, data: Any = LEFT_OUT) -> bool:
        """See JobSchedulerService.complete."""
        return self._drive(core.finish(lease, Outcome.COMPLETE, data))

    def fail(self, lease: JobLease, data: Any = LEFT_OUT) -> bool:
        """See JobSchedulerService.fail."""
        return self._drive(core.finish(lease, Outcome.FAIL, data))

    def release(self, lease: JobLease, data: Any = LEFT_OUT) -> bool:
        """See JobSchedulerService.release."""
        return self._drive(core.finish(lease, Outcome.RELEASE, data))

    def run_exclusive(
        self, options: JobAcquireOptions, work: Callable[[JobExecutionLease], T]
    ) -> RunExclusiveResult[T]:
        """See JobSchedulerService.run_exclusive. A thread can't be cancelled: the work looks at `lease.lost`.

        Heartbeats come from a thread of their own.
        """
        resolved = resolve(options)
        acquired = self._drive(core.acquire(resolved))
        if not acquired.acquired:
            return RunExclusiveResult(acquired=False)
        lease, trust = _execution(acquired, resolved)
        ended = threading.Event()

        def keep() -> None:
            with contextlib.suppress(_Ended):
                lease.lost.set(self._drive(core.keep(lease, trust), ended))

        keeper = threading.Thread(target=keep, name=f"lease-{lease.id}", daemon=True)
        keeper.start()
        try:
            result = self._outcome(lease, work)
        finally:
            ended.set()
            keeper.join(timeout=1)  # a beat that hangs ends with its connection
        return RunExclusiveResult(acquired=True, result=result)

    def exclusive(
        self, options: JobAcquireOptions | Callable[[], JobAcquireOptions]
    ) -> Callable[[Callable[[JobExecutionLease], T]], Callable[[], RunExclusiveResult[T]]]:
        """See JobSchedulerService.exclusive."""

        def decorate(work: Callable[[JobExecutionLease], T]) -> Callable[[], RunExclusiveResult[T]]:
            @functools.wraps(work)
            def call() -> RunExclusiveResult[T]:
                return self.run_exclusive(options() if callable(options) else options, work)

            return call

        return decorate

    def _outcome(self, lease: JobExecutionLease, work: Callable[[JobExecutionLease], T]) -> T:
        try:
            result = work(lease)
        except (KeyboardInterrupt, SystemExit):
            self.release(lease)
            raise
        except BaseException as error:
            recorded = True
            try:
                recorded = self.fail(lease, _error_data(error))
            except LeasedJobError as unrecorded:
                error.add_note(f"its failure could not be recorded: {unrecorded}")
            if not recorded:
                raise _lost(lease) from error
            raise
        if not self.complete(lease):
            raise _lost(lease)
        return result

    def _drive(self, talk: Talk[T], ended: threading.Event | None = None) -> T:
        answer: list[DictRow] | BaseException | None = None
        while True:
            step = _advance(talk, answer)
            if isinstance(step, _Done):
                return step.value  # type: ignore[no-any-return]
            if isinstance(step, Pause):
                if (ended or threading.Event()).wait(step.seconds):
                    raise _Ended
                answer = []
                continue
            try:
                answer = self._ask(step)
            except Exception as error:
                answer = error

    def _ask(self, ask: Ask) -> list[DictRow]:
        with (
            translated(),
            self._connection() as connection,
            connection.cursor(row_factory=dict_row) as cursor,
        ):
            return cursor.execute(statement(ask.name), ask.parameters).fetchall()


# --- shared by both drivers ------------------------------------------------------------------------------------------


class _Ended(Exception):
    """The work has ended, so its lease needs no more beats."""


@dataclass(frozen=True, slots=True)
class _Done:
    value: Any


def _advance(
    talk: Generator[Ask | Pause, list[DictRow], Any], answer: list[DictRow] | BaseException | None
) -> Ask | Pause | _Done:
    """One step of a conversation: None begins it, rows and exceptions are answers."""
    try:
        if answer is None:
            return next(talk)
        if isinstance(answer, BaseException):
            return talk.throw(answer)
        return talk.send(answer)
    except StopIteration as stop:
        return _Done(stop.value)


async def _call(work: Callable[[JobExecutionLease], Awaitable[T]], lease: JobExecutionLease) -> T:
    return await work(lease)


async def _to_the_end(recording: Coroutine[Any, Any, bool]) -> bool:
    """An end is recorded even if we are cancelled meanwhile; the cancellation comes after it."""
    task = asyncio.ensure_future(recording)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


__all__ = [
    "JobExecutionLease",
    "JobSchedulerService",
    "LostSignal",
    "RunExclusiveResult",
    "SyncJobSchedulerService",
]
