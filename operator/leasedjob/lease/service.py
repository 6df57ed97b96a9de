"""JobSchedulerService: the lease for Python programs, asynchronous and synchronous.

    jobs = JobSchedulerService("postgresql://…")
    outcome = await jobs.run_exclusive(JobAcquireOptions(code="sync-orders", run_key="2026-07-20T03:00:00Z"), work)

There is one implementation: the conversations with the database in `leasedjob.lease.core`, and `_Operations` here. The
two services differ only in how they carry a conversation out: by awaiting, or by blocking.

Two deliberate differences from the library that this follows: expiry is judged by the duration that the *holder*
recorded, not by the challenger's, and a heartbeat that comes after expiry is refused even if nobody reclaimed (complete
and fail are then still accepted).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

import psycopg
from psycopg.rows import DictRow, dict_row

from leasedjob.errors import DatabaseUnavailableError, LostJobLeaseError
from leasedjob.lease import core, retention
from leasedjob.lease.alarm import cut_after
from leasedjob.lease.core import (
    Ask,
    JobAcquireResult,
    JobExecutionLease,
    JobLease,
    Pause,
    RunExclusiveResult,
    Talk,
)
from leasedjob.lease.database import (
    FAULTS,
    Connections,
    Credentials,
    FaultKind,
    as_error,
    connect_sync,
    connections,
    within,
)
from leasedjob.lease.lost import Clock, LostSignal, Trust, boottime
from leasedjob.lease.options import LEFT_OUT, JobAcquireOptions, resolve
from leasedjob.lease.retention import Pruned
from leasedjob.lease.rows import Outcome
from leasedjob.lease.statements import statement

P = ParamSpec("P")
T = TypeVar("T")
SyncConnections = Callable[[], AbstractContextManager[psycopg.Connection[Any]]]

STATEMENT_SECONDS = 30.0
# Options that were not given at all are refused as an identity error, like None, and not as a TypeError.
_NOTHING: Any = None


# --- one definition, two services ------------------------------------------------------------------------------------


class _Operation(Generic[P, T]):
    """A method that is a conversation: a coroutine function of the one service, a plain function of the other."""

    def __init__(self, talk: Callable[Concatenate[Any, P], Talk[T]]) -> None:
        @functools.wraps(talk)
        async def awaiting(service: Any, *args: P.args, **kwargs: P.kwargs) -> T:
            return cast(T, await service._drive(talk(service, *args, **kwargs)))

        @functools.wraps(talk)
        def blocking(service: Any, *args: P.args, **kwargs: P.kwargs) -> T:
            return cast(T, service._drive(talk(service, *args, **kwargs)))

        self.awaiting: Any = awaiting
        self.blocking: Any = blocking
        self.__doc__ = talk.__doc__

    @overload
    def __get__(self, service: None, owner: type) -> Callable[..., Any]: ...
    @overload
    def __get__(self, service: JobSchedulerService, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, service: SyncJobSchedulerService, owner: type) -> Callable[P, T]: ...
    def __get__(self, service: Any, owner: type) -> Any:
        raise AttributeError("a service has the function itself, not its definition")  # see `_Operations`


class _Operations:
    """What both services do."""

    def __init_subclass__(cls, awaits: bool | None = None) -> None:
        """A service gets plain functions: what each call would do otherwise is done once."""
        if awaits is not None:
            for name, member in vars(_Operations).items():
                if isinstance(member, _Operation):
                    setattr(cls, name, member.awaiting if awaits else member.blocking)

    _clock: Clock = staticmethod(boottime)
    _settle_seconds = retention.SETTLE_SECONDS
    _stopping = 0.0

    @_Operation
    def acquire(self, options: JobAcquireOptions = _NOTHING) -> Talk[JobAcquireResult]:
        """Takes the run if it is free: new, FAIL, or RUNNING and expired.

        The caller owns heartbeats and the end of what it acquired.

        Raises:
            InvalidJobIdentityOptionsError, InvalidJobLeaseOptionsError: before any SQL.
            DatabaseUnavailableError, DatabaseRefusedError, SchemaMissingError.
        """
        return (yield from core.acquire(resolve(options), self._clock))

    @_Operation
    def heartbeat(self, lease: JobLease) -> Talk[bool]:
        """Extends the lease; False if it is lost or had expired.

        Raises:
            DatabaseUnavailableError: it is unknown; ask again. With kind "busy" the row is locked elsewhere.
        """
        return (yield from core.heartbeat(lease))

    @_Operation
    def complete(self, lease: JobLease, data: Any = LEFT_OUT) -> Talk[bool]:
        """Records SUCCESS and optional JSON data; False if ownership is lost.

        Data that jsonb can't hold is made to fit (`leasedjob.lease.jsonsafe`); at most 256 KiB are kept.
        """
        return (yield from core.finish(lease, Outcome.COMPLETE, data))

    @_Operation
    def fail(self, lease: JobLease, data: Any = LEFT_OUT) -> Talk[bool]:
        """Records FAIL; the next acquire may take the run at once. False if ownership is lost."""
        return (yield from core.finish(lease, Outcome.FAIL, data))

    @_Operation
    def release(self, lease: JobLease, data: Any = LEFT_OUT) -> Talk[bool]:
        """As fail, for work that is given back: data defaults to `{"released": true}`."""
        return (yield from core.finish(lease, Outcome.RELEASE, data))

    @_Operation
    def prune(
        self, older_than: timedelta, *, keep_last: int = retention.KEEP_LAST, dry_run: bool = False
    ) -> Talk[list[Pruned]]:
        """Deletes runs that ended, and whose tick was, longer ago than `older_than`. It takes a minute at least.

        Only ended SCHEDULE runs go whose run key is a tick in UTC, as `2026-07-20T03:00:00Z`; INITIAL runs and other
        keys stay for ever. From then on a key at or below the latest of those ticks that has no row is refused, with
        NotAcquired.PRUNED. Any number may prune at the same time.

        Args:
            keep_last: how many of the newest runs of each code stay, however old they are.
            dry_run: delete nothing, mark nothing; only say what would go.

        Raises:
            ValueError: `older_than` is not positive, or `keep_last` is negative.
            DatabaseUnavailableError: also where an old transaction doesn't end; nothing was deleted, prune again.
        """
        return (
            yield from retention.prune(
                older_than, keep_last, dry_run=dry_run, settle=self._settle_seconds, clock=self._clock
            )
        )

    @_Operation
    def prune_ledger(self, older_than: timedelta, *, dry_run: bool = False) -> Talk[int]:
        """Deletes what says of ticks that ended longer ago than `older_than` why they did not run; how many ranges.

        Nothing becomes claimable by that: such ticks lie below their code's watermark. Audit lines and records of
        backfills of that age go as well. How many ticks did not run, ever, stays known.

        Args:
            dry_run: delete nothing; only say how many ranges would go.

        Raises:
            ValueError: `older_than` is not positive.
            DatabaseUnavailableError: ask again.
        """
        return (yield from retention.prune_ledger(older_than, dry_run=dry_run))


def _advance(talk: Talk[Any], answer: list[DictRow] | Exception) -> Ask | Pause:
    """The next step of a conversation after an answer. StopIteration has its result."""
    return talk.throw(answer) if isinstance(answer, Exception) else talk.send(answer)


def _silence(ask: Ask, seconds: float) -> DatabaseUnavailableError:
    return DatabaseUnavailableError(f"the database did not answer {ask.name} within {seconds:g} s", FaultKind.TRANSIENT)


class AsyncDecorator(Protocol):
    """What `run_exclusive` without work is."""

    def __call__(
        self, work: Callable[Concatenate[JobExecutionLease, P], Awaitable[T]], /
    ) -> Callable[P, Coroutine[Any, Any, RunExclusiveResult[T]]]: ...


class SyncDecorator(Protocol):
    """What `run_exclusive` without work is."""

    def __call__(
        self, work: Callable[Concatenate[JobExecutionLease, P], T], /
    ) -> Callable[P, RunExclusiveResult[T]]: ...


# --- asynchronous ----------------------------------------------------------------------------------------------------


class JobSchedulerService(_Operations, awaits=True):
    """The asynchronous service. Heartbeats of `run_exclusive` come from the event loop, so work must not block it.

    Args:
        database: a connection string or Credentials, for a connection of its own for each statement; or a function that
            gives a connection for one statement: a pool's `connection`. One that isn't in autocommit is committed.
        timeout: seconds that one statement may take, connecting included.
        stopping: seconds that work of `run_exclusive` needs to stop. It is told so much earlier that no heartbeat has
            reached the database, at most a third of the lease. Default 0: work that ends at once when it is cancelled.
    """

    def __init__(
        self,
        database: str | Credentials | Connections,
        *,
        timeout: float = STATEMENT_SECONDS,
        stopping: float = 0.0,
    ) -> None:
        if isinstance(database, str):
            database = Credentials.from_conninfo(database)
        self._connection = connections(database) if isinstance(database, Credentials) else database
        self._timeout = timeout
        self._stopping = stopping

    @overload
    def run_exclusive(
        self,
        options: JobAcquireOptions,
        work: Callable[[JobExecutionLease], Awaitable[T]],
        *,
        cancel_on_loss: bool = True,
    ) -> Coroutine[Any, Any, RunExclusiveResult[T]]: ...
    @overload
    def run_exclusive(self, options: JobAcquireOptions, *, cancel_on_loss: bool = True) -> AsyncDecorator: ...
    @overload
    def run_exclusive(
        self, options: Callable[P, JobAcquireOptions], *, cancel_on_loss: bool = True
    ) -> Callable[
        [Callable[Concatenate[JobExecutionLease, P], Awaitable[T]]],
        Callable[P, Coroutine[Any, Any, RunExclusiveResult[T]]],
    ]: ...
    def run_exclusive(self, options: Any = _NOTHING, work: Any = None, *, cancel_on_loss: bool = True) -> Any:
        """Runs `work` if the run is acquired, keeps the lease alive, and records the end.

        SUCCESS when it returns; FAIL when it raises, with the exception's text in the row (it is raised again); FAIL
        `{released: true}` when it is cancelled from outside. What it returns goes to the caller and nowhere else.

        Without `work` this is a decorator: `@jobs.run_exclusive(options)`. Options may then be a function, for a run
        key that is new at each call; it gets the call's arguments, as `work` does after the lease.

        Args:
            cancel_on_loss: cancel the work as soon as the lease is lost; else it only sees `lease.lost`.

        Raises:
            InvalidJobIdentityOptionsError, InvalidJobLeaseOptionsError: before any SQL.
            LostJobLeaseError: the lease was lost before the end was recorded.
            DatabaseUnavailableError, DatabaseRefusedError: the run was not acquired, or its end could not be recorded;
                the message says which.
        """
        if work is not None:
            return self._run(options, work, cancel_on_loss)

        def run(chosen: Any, bound: Callable[[JobExecutionLease], Any]) -> Any:
            return self._run(chosen, bound, cancel_on_loss)

        return _decorator(options, run)

    async def _run(
        self, options: JobAcquireOptions, work: Callable[[JobExecutionLease], Awaitable[T]], cancel_on_loss: bool
    ) -> RunExclusiveResult[T]:
        resolved = resolve(options)
        acquired = await self._drive(core.acquire(resolved, self._clock))
        if not acquired.acquired:
            return RunExclusiveResult(acquired=False)
        lease, trust = core.execution(acquired, resolved, self._clock, self._stopping)
        running = asyncio.create_task(_call(work, lease))
        keeping = asyncio.create_task(self._keep(lease, trust, running if cancel_on_loss else None))
        try:
            result, error = await _outcome(running, lease)
            await _to_the_end(self._drive(core.conclude(lease, error)))
        except LostJobLeaseError as lost:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from lost  # whoever cancels us must see it
            raise
        finally:
            keeping.cancel()  # last: the lease is kept until the end is recorded
            await asyncio.wait([keeping])
        return RunExclusiveResult(acquired=True, result=result)

    async def _keep(self, lease: JobExecutionLease, trust: Trust, running: asyncio.Task[Any] | None) -> None:
        lease.lost.set(await self._drive(core.keep(lease, trust, self._clock)))
        if running is not None:
            running.cancel()

    async def _drive(self, talk: Talk[T]) -> T:
        answer: list[DictRow] | Exception
        step = next(talk)
        while True:
            try:
                if isinstance(step, Pause):
                    await self._pause(step.seconds)
                    answer = []
                else:
                    answer = await self._ask(step)
            except Exception as error:
                answer = error
            try:
                step = _advance(talk, answer)
            except StopIteration as stop:
                return cast(T, stop.value)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _ask(self, ask: Ask) -> list[DictRow]:
        seconds = ask.limit(self._timeout)
        try:
            async with within(seconds, self._connection, ask.name) as connection:
                cursor = connection.cursor(row_factory=dict_row)
                await cursor.execute(statement(ask.name), ask.parameters)
                rows = await cursor.fetchall()
                if not connection.autocommit:
                    await connection.commit()
                return rows
        except FAULTS as error:
            if (known := as_error(error)) is None:
                raise
            raise known from error


async def _call(work: Callable[[JobExecutionLease], Awaitable[T]], lease: JobExecutionLease) -> T:
    lease.raise_if_lost()  # the answer to acquire may have come too late
    given = work(lease)
    if not inspect.isawaitable(given):
        raise TypeError("the work must be a coroutine function; SyncJobSchedulerService takes plain functions")
    return await given


async def _outcome(running: asyncio.Task[T], lease: JobExecutionLease) -> tuple[T | None, BaseException | None]:
    """What the work returned or raised. Its cancellation because of the loss is the loss."""
    try:
        return await running, None
    except asyncio.CancelledError as cancelled:
        if not running.done():  # cancelled from outside while the work still cleans up
            await asyncio.wait([running])
        if not lease.lost.is_set():
            return None, cancelled
        lost = core.lost_error(lease)
        lost.__cause__ = cancelled
        return None, lost
    except BaseException as error:
        return None, error


async def _to_the_end(recording: Coroutine[Any, Any, T]) -> T:
    """An end is recorded even if we are cancelled meanwhile; the cancellation comes after it."""
    task = asyncio.ensure_future(recording)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


# --- synchronous -----------------------------------------------------------------------------------------------------


class SyncJobSchedulerService(_Operations, awaits=False):
    """The synchronous service. Heartbeats of `run_exclusive` come from a thread of their own.

    Args:
        database: a connection string or Credentials, for a connection of its own for each statement; or a function that
            gives a connection for one statement: a ConnectionPool's `connection`. One that isn't in autocommit is
            committed.
        timeout: seconds that one statement may take, once it has a connection.
        stopping: as for JobSchedulerService.
    """

    def __init__(
        self,
        database: str | Credentials | SyncConnections,
        *,
        timeout: float = STATEMENT_SECONDS,
        stopping: float = 0.0,
    ) -> None:
        if isinstance(database, str):
            database = Credentials.from_conninfo(database)
        self._connection = functools.partial(connect_sync, database) if isinstance(database, Credentials) else database
        self._timeout = timeout
        self._stopping = stopping

    @overload
    def run_exclusive(
        self, options: JobAcquireOptions, work: Callable[[JobExecutionLease], T]
    ) -> RunExclusiveResult[T]: ...
    @overload
    def run_exclusive(self, options: JobAcquireOptions) -> SyncDecorator: ...
    @overload
    def run_exclusive(
        self, options: Callable[P, JobAcquireOptions]
    ) -> Callable[[Callable[Concatenate[JobExecutionLease, P], T]], Callable[P, RunExclusiveResult[T]]]: ...
    def run_exclusive(self, options: Any = _NOTHING, work: Any = None) -> Any:
        """As JobSchedulerService.run_exclusive, function and decorator. A thread can't be cancelled from outside: the
        work looks at `lease.lost`, calls `lease.raise_if_lost()` between its steps, or has `lease.lost.call(...)` end
        what it waits for. An interrupt (Ctrl-C, SystemExit) gives the run back.
        """
        return _decorator(options, self._run) if work is None else self._run(options, work)

    def _run(self, options: JobAcquireOptions, work: Callable[[JobExecutionLease], T]) -> RunExclusiveResult[T]:
        resolved = resolve(options)
        if inspect.iscoroutinefunction(work):
            raise TypeError("the work must be a plain function; JobSchedulerService takes coroutine functions")
        acquired = self._drive(core.acquire(resolved, self._clock))
        if not acquired.acquired:
            return RunExclusiveResult(acquired=False)
        lease, trust = core.execution(acquired, resolved, self._clock, self._stopping)
        ended = Bell()

        def keep() -> None:
            with contextlib.suppress(_Ended):
                lease.lost.set(self._drive(core.keep(lease, trust, self._clock), ended))

        keeper = threading.Thread(target=keep, name=f"lease-{lease.id}", daemon=True)
        keeper.start()
        result: T | None = None
        error: BaseException | None = None
        try:
            try:
                lease.raise_if_lost()  # the answer to acquire may have come too late
                result = work(lease)
            except BaseException as raised:
                error = raised
            self._drive(core.conclude(lease, error))
        finally:
            ended.set()
            keeper.join(timeout=1)  # a beat that hangs ends with its time limit
            error = None  # no circle of traceback and frame
        return RunExclusiveResult(acquired=True, result=result)

    def _drive(self, talk: Talk[T], ended: Bell | None = None) -> T:
        answer: list[DictRow] | Exception
        step = next(talk)
        while True:
            if isinstance(step, Pause):
                if self._pause(step.seconds, ended or Bell()):
                    raise _Ended
                answer = []
            else:
                try:
                    answer = self._ask(step)
                except Exception as error:
                    answer = error
            try:
                step = _advance(talk, answer)
            except StopIteration as stop:
                return cast(T, stop.value)

    def _pause(self, seconds: float, bell: Bell) -> bool:
        return bell.wait(seconds)

    def _ask(self, ask: Ask) -> list[DictRow]:
        within = ask.limit(self._timeout)
        try:
            with self._connection() as connection, cut_after(connection, within):
                cursor = connection.cursor(row_factory=dict_row)
                rows = cursor.execute(statement(ask.name), ask.parameters).fetchall()
                if not connection.autocommit:
                    connection.commit()
                return rows
        except TimeoutError as error:
            raise _silence(ask, within) from error
        except FAULTS as error:
            if (known := as_error(error)) is None:
                raise
            raise known from error


class Bell:
    """An event that can also be rung without being set: whoever waits then looks again."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._set = False
        self.rung = 0  # how often

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """For good."""
        with self._condition:
            self._set = True
            self._condition.notify_all()

    def ring(self) -> None:
        with self._condition:
            self.rung += 1
            self._condition.notify_all()

    def wait(self, seconds: float | None, heard: int | None = None) -> bool:
        """Blocks until it is set, or rung more often than `heard`, or for so many seconds; whether it is set."""
        with self._condition:
            before = self.rung if heard is None else heard
            limit = None if seconds is None else min(seconds, threading.TIMEOUT_MAX)
            self._condition.wait_for(lambda: self._set or self.rung != before, limit)
            return self._set


class _Ended(Exception):
    """The work has ended, so its lease needs no more beats."""


# --- run_exclusive as a decorator ------------------------------------------------------------------------------------


def _decorator(options: Any, run: Callable[[Any, Callable[[JobExecutionLease], Any]], Any]) -> Any:
    """`run` with options, for a work that gets the call's arguments after the lease."""
    if not callable(options):
        resolve(options)  # a mistake shows where it is written

    def decorate(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            chosen = options(*args, **kwargs) if callable(options) else options
            return run(chosen, _bound(work, args, kwargs))

        if inspect.iscoroutinefunction(work):

            async def awaiting(*args: Any, **kwargs: Any) -> Any:
                return await call(*args, **kwargs)

            return _named(awaiting, work)
        return _named(call, work)

    return decorate


def _bound(work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(work):

        async def coroutine(lease: JobExecutionLease) -> Any:
            return await work(lease, *args, **kwargs)

        return coroutine
    return lambda lease: work(lease, *args, **kwargs)


def _named(call: Callable[..., Any], work: Callable[..., Any]) -> Callable[..., Any]:
    """As functools.wraps, with the signature that the caller sees: without the lease."""
    functools.update_wrapper(call, work)
    with contextlib.suppress(TypeError, ValueError):
        signature = inspect.signature(work)
        call.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return call


__all__ = [
    "JobExecutionLease",
    "JobSchedulerService",
    "LostSignal",
    "RunExclusiveResult",
    "SyncJobSchedulerService",
]
