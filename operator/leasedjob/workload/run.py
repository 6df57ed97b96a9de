"""current_run(): which run this process carries out, and how it ended.

    run = current_run()
    for order in orders(run.idempotency_key):
        ...
    run.complete({"orders": count})

The same program works in four places; `run.mode` says in which one it is:

    SIDECAR    in a LeasedJob's Pod: outcomes go to the Pod's sidecar
    COMMAND    under `leasedjob run-exclusive`: the exit code is the outcome
    DATABASE   anywhere with a database: it takes the lease itself, keeps it alive, and records the outcome
    ALONE      a laptop, a test: nothing is held, nothing is recorded
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, overload

from leasedjob import protocol
from leasedjob.errors import (
    DrainingError,
    InvalidJobIdentityOptionsError,
    LostJobLeaseError,
    OutcomeRefusedError,
    RunNotAcquiredError,
)
from leasedjob.identity import JobSchedulerType, RunIdentity, run_key_for, tick_of
from leasedjob.lease.rows import Outcome
from leasedjob.workload.abort import AbortSignal

if TYPE_CHECKING:
    from psycopg import AsyncConnection, Connection

    from leasedjob.lease.core import JobExecutionLease
    from leasedjob.lease.service import SyncJobSchedulerService
    from leasedjob.workload.sidecar import Sidecar, View

_log: Final = logging.getLogger("leasedjob.workload")
ENV_URL: Final = "LEASEDJOB_DATABASE_URL"
ALONE_CODE: Final = "stand-alone"
ERROR_LIMIT: Final = 10_000  # characters of an error's text


class Mode(StrEnum):
    """Where the run's lease is, and who is told of its end."""

    SIDECAR = "sidecar"
    COMMAND = "command"
    DATABASE = "database"
    ALONE = "alone"


class _Recorder(Protocol):
    """Where an outcome goes."""

    def record(self, outcome: Outcome, data: Any) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """One attempt of one logical run; also a context manager that reports what is raised in it.

    Args:
        run_key: None for type INITIAL.
        scheduled_time: the tick, aware; None for a run without one.
        attempt: 1 and more.
        idempotency_key: the same for every attempt: for a unique column at the sink.
        fencing_token: grows with each attempt; a sink refuses smaller ones. 0 where nothing is held.
        deadline: when `activeDeadlineSeconds` ends the attempt, aware. Counted from the adoption of the lease; the
            kubelet counts from when it accepted the Pod, seconds before: leave some. None if there is no deadline.
        lost: the abort signal for the loss of the lease.
    """

    mode: Mode
    type: JobSchedulerType
    code: str
    run_key: str | None
    scheduled_time: datetime | None
    attempt: int
    idempotency_key: str
    fencing_token: int
    deadline: datetime | None = None
    lost: AbortSignal = field(default_factory=AbortSignal)
    _recorder: _Recorder = field(repr=False)
    _ended: _Once = field(default_factory=lambda: _Once(), repr=False)

    def complete(self, data: Any = None) -> None:
        """The work is done: SUCCESS, and it never runs again. `data` is JSON; at most 256 KiB of it are kept.

        Returns when it is recorded. It blocks meanwhile: from a coroutine, `await asyncio.to_thread(run.complete)`.

        Raises:
            LostJobLeaseError: the lease is lost, somebody else has the run or will have it.
            OutcomeRefusedError: another outcome was reported before.
            SidecarUnavailableError, DatabaseUnavailableError, DatabaseRefusedError: it is unknown; the program may ask
                again, for as long as `lost` isn't set.
        """
        self._report(Outcome.COMPLETE, data)

    def fail(self, error: BaseException | str | Mapping[str, Any]) -> None:
        """The attempt has failed, which counts against the backoff limit. End the program soon after: in a Pod it is
        recorded when the program has ended. Raises as `complete` does.

        Args:
            error: what went wrong; kept as `{"error": …, "type": …}`, or as it is if it is a mapping.
        """
        data: Any = error
        if isinstance(error, BaseException):
            data = {"error": str(error)[:ERROR_LIMIT], "type": type(error).__name__}
        elif isinstance(error, str):
            data = {"error": error[:ERROR_LIMIT]}
        self._report(Outcome.FAIL, data)

    def release(self, data: Mapping[str, Any] | None = None) -> None:
        """Not done, and no failure: the run goes on with its next attempt. Otherwise as `fail`."""
        self._report(Outcome.RELEASE, {**(data or {}), "released": True})

    @overload
    def has_checkpoint(self, connection: Connection[Any]) -> bool: ...
    @overload
    def has_checkpoint(self, connection: AsyncConnection[Any]) -> Awaitable[bool]: ...
    def has_checkpoint(self, connection: Connection[Any] | AsyncConnection[Any]) -> bool | Awaitable[bool]:
        """Whether an attempt before has left a checkpoint (of a Cascade, or of Checkpoints); to be asked before this
        one saves its own. They are kept in the database that the work changes, so it is that one which is asked.

        Args:
            connection: of psycopg; for an asynchronous one the answer is to be awaited.
        """
        from psycopg import AsyncConnection

        from leasedjob.workload.checkpoint import AsyncCheckpoints, Checkpoints

        if isinstance(connection, AsyncConnection):
            return AsyncCheckpoints(self).left(connection)
        return Checkpoints(self).left(connection)

    def raise_if_lost(self) -> None:
        """LostJobLeaseError, if the lease is lost: to be called between steps of the work."""
        if self.lost.is_set():
            raise LostJobLeaseError("of this run", f"the lease is lost: {self.lost.reason}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """An exception is reported as a failure, unless it is the stop's own or the loss of the lease. Success is never
        assumed: work that was cut short leaves the block as quietly as work that is done, so `complete` says it. Where
        exit codes are seen, SystemExit and a quiet end are left to them."""
        if self.outcome is not None or isinstance(error, LostJobLeaseError):
            return
        if error is None or isinstance(error, SystemExit):
            if self.mode is not Mode.DATABASE:
                return
            if error is not None and error.code:
                self.fail(f"the program exits with {error.code}")
            else:
                self.release()
        elif isinstance(error, Exception) and not isinstance(error, DrainingError):
            self.fail(error)
        else:
            self.release()

    @property
    def outcome(self) -> Outcome | None:
        """What was reported through this object."""
        return self._ended.outcome

    def _report(self, outcome: Outcome, data: Any) -> None:
        with self._ended.lock:
            if self._ended.outcome is outcome:
                return
            if self._ended.outcome is not None:
                raise OutcomeRefusedError(f"{self._ended.outcome} was reported before")
            self._recorder.record(outcome, data)
            self._ended.outcome = outcome


@dataclass(slots=True)
class _Once:
    lock: threading.Lock = field(default_factory=threading.Lock)
    outcome: Outcome | None = None


# --- which one it is -------------------------------------------------------------------------------------------------

_current_lock = threading.Lock()
_current: list[Run] = []


def _in_child() -> None:
    """A child that was forked has no thread that hears of the Pod's lease, so the next call asks the sidecar anew. A
    lease that the parent itself holds stays the parent's."""
    global _current_lock
    _current_lock = threading.Lock()
    _current[:] = [run for run in _current if run.mode is not Mode.SIDECAR]


os.register_at_fork(after_in_child=_in_child)


def current_run(
    *,
    code: str | None = None,
    run_key: str | None = None,
    type: JobSchedulerType = JobSchedulerType.SCHEDULE,
    database: str | None = None,
) -> Run:
    """The run of this process; the same object at each call.

    In a Pod and under `leasedjob run-exclusive` the environment says everything, and the arguments are not used.

    Args:
        code, run_key, type: the run to take or to play; default LEASEDJOB_CODE and LEASEDJOB_RUN_KEY. Stand-alone, the
            key defaults to this second.
        database: a connection string; default LEASEDJOB_DATABASE_URL. With neither: stand-alone.

    Raises:
        RunNotAcquiredError: with a database: somebody else has the run, or it has succeeded.
        InvalidJobIdentityOptionsError: with a database, and no code or run key.
        DatabaseUnavailableError, DatabaseRefusedError, SchemaMissingError.
    """
    with _current_lock:
        if not _current:
            run = find_run(os.environ, code=code, run_key=run_key, type=type, database=database)
            _log.info("run %s %s, attempt %d: %s", run.code, run.run_key, run.attempt, _where(run.mode))
            _current.append(run)
        return _current[0]


def find_run(
    env: Mapping[str, str],
    *,
    code: str | None = None,
    run_key: str | None = None,
    type: JobSchedulerType = JobSchedulerType.SCHEDULE,
    database: str | None = None,
) -> Run:
    """As current_run, for an environment of your own, and anew at each call."""
    if url := env.get(protocol.ENV_SIDECAR_URL):
        return _in_a_pod(env, url)
    if env.get(protocol.ENV_IDEMPOTENCY_KEY):
        return _described(env, Mode.COMMAND, _ExitCode())
    code = code or env.get(protocol.ENV_CODE) or None
    run_key = run_key or env.get(protocol.ENV_RUN_KEY) or None
    url = database or env.get(ENV_URL)
    if url:
        return _with_a_lease(url, type, code, run_key)
    if run_key is None and type is JobSchedulerType.SCHEDULE:
        run_key = run_key_for(datetime.now(UTC).replace(microsecond=0))
    identity = RunIdentity.of(type=type, code=code or ALONE_CODE, run_key=run_key)
    return _of(identity, Mode.ALONE, _Nowhere(), attempt=1, fencing_token=0)


def _where(mode: Mode) -> str:
    return {
        Mode.SIDECAR: "outcomes go to the Pod's sidecar",
        Mode.COMMAND: "the exit code is the outcome",
        Mode.DATABASE: "this process holds the lease",
        Mode.ALONE: "stand-alone, nothing is held or recorded",
    }[mode]


def _of(identity: RunIdentity, mode: Mode, recorder: _Recorder, **more: Any) -> Run:
    return Run(
        mode=mode,
        type=identity.type,
        code=identity.code,
        run_key=identity.run_key,
        scheduled_time=tick_of(identity.run_key),
        idempotency_key=identity.idempotency_key,
        _recorder=recorder,
        **more,
    )


# --- in a Pod, or under run-exclusive --------------------------------------------------------------------------------


def _described(env: Mapping[str, str], mode: Mode, recorder: _Recorder, **more: Any) -> Run:
    """By the environment, which the operator, or `leasedjob run-exclusive`, has written."""
    scheduled = env.get(protocol.ENV_SCHEDULED_TIME)
    return Run(
        mode=mode,
        type=JobSchedulerType(env[protocol.ENV_TYPE]),
        code=env[protocol.ENV_CODE],
        run_key=env.get(protocol.ENV_RUN_KEY) or None,
        scheduled_time=datetime.fromisoformat(scheduled) if scheduled else None,
        attempt=int(env[protocol.ENV_ATTEMPT]),
        idempotency_key=env[protocol.ENV_IDEMPOTENCY_KEY],
        fencing_token=int(env[protocol.ENV_FENCING_TOKEN]),
        _recorder=recorder,
        **more,
    )


def _in_a_pod(env: Mapping[str, str], url: str) -> Run:
    from leasedjob.errors import SidecarUnavailableError
    from leasedjob.workload.sidecar import sidecar_at

    sidecar = sidecar_at(url)
    deadline: datetime | None = None
    if seconds := env.get(protocol.ENV_ACTIVE_DEADLINE):
        since = 0.0
        try:
            since = sidecar.look().since_adoption or 0.0
        except SidecarUnavailableError as error:
            _log.warning("the deadline is counted from now: %s", error)
        deadline = datetime.now(UTC) + timedelta(seconds=int(seconds) - since)
    run = _described(env, Mode.SIDECAR, _BySidecar(sidecar), deadline=deadline)

    def tell(view: View) -> None:
        if view.fenced:
            run.lost.set(view.reason)

    sidecar.subscribe(tell)
    return run


class _BySidecar:
    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar

    def record(self, outcome: Outcome, data: Any) -> None:
        self._sidecar.report(outcome, data)


class _ExitCode:
    def record(self, outcome: Outcome, data: Any) -> None:
        """The program's end says it; data has no place to go."""
        _log.info("%s: said by the exit code alone, under leasedjob run-exclusive", outcome)


class _Nowhere:
    def record(self, outcome: Outcome, data: Any) -> None:
        _log.warning("%s: stand-alone, so nothing is recorded", outcome)


# --- with a lease of its own -----------------------------------------------------------------------------------------


def _with_a_lease(url: str, type: JobSchedulerType, code: str | None, run_key: str | None) -> Run:
    from leasedjob.lease.options import LEFT_OUT, JobAcquireOptions, resolve
    from leasedjob.lease.service import SyncJobSchedulerService

    if not code or (run_key is None and type is JobSchedulerType.SCHEDULE):
        what, env = ("run_key", protocol.ENV_RUN_KEY) if code else ("code", protocol.ENV_CODE)
        raise InvalidJobIdentityOptionsError(
            f"{what} is missing: with a database, current_run({what}=...) or {env} says which run to take"
        )
    options = JobAcquireOptions(code=code, run_key=LEFT_OUT if run_key is None else run_key, type=type)
    identity = resolve(options).identity
    holder = _Holder(SyncJobSchedulerService(url), options)
    lease = holder.lease()
    run = _of(identity, Mode.DATABASE, holder, attempt=lease.attempt, fencing_token=lease.fencing_token)
    lease.lost.call(lambda: run.lost.set(lease.lost.reason))
    return run


@dataclass(slots=True)
class _Wanted:
    """An outcome on its way to the thread that holds the lease."""

    outcome: Outcome
    data: Any
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class _GivenBackError(BaseException):
    """Ends run_exclusive after a release; no Exception, so it is no failure."""


class _Holder:
    """A lease of this process: `run_exclusive` in a thread, whose work waits for the outcome."""

    def __init__(self, service: SyncJobSchedulerService, options: Any) -> None:
        self._service = service
        self._options = options
        self._pid = os.getpid()
        self._answers: queue.SimpleQueue[JobExecutionLease | BaseException | None] = queue.SimpleQueue()
        self._wanted: queue.SimpleQueue[_Wanted | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._hold, name="leasedjob-lease", daemon=True)

    def lease(self) -> JobExecutionLease:
        """Takes the run; raises what acquiring it raised."""
        self._thread.start()
        answer = self._answers.get()
        if answer is None:
            raise RunNotAcquiredError("another process has or had this run")
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def record(self, outcome: Outcome, data: Any) -> None:
        if os.getpid() != self._pid:
            raise OutcomeRefusedError("the lease is held by the process that forked this one: report it there")
        wanted = _Wanted(outcome, data)
        self._wanted.put(wanted)
        while not wanted.done.wait(0.2):
            if not self._thread.is_alive() and not wanted.done.is_set():
                raise LostJobLeaseError("of this run", "the lease is lost; nothing was recorded")
        if wanted.error is not None:
            raise wanted.error

    def _hold(self) -> None:
        try:
            if not self._service.run_exclusive(self._options, self._work).acquired:
                self._answers.put(None)
        except BaseException as error:
            self._answers.put(error)

    def _work(self, lease: JobExecutionLease) -> None:
        lease.lost.call(lambda: self._wanted.put(None))
        self._answers.put(lease)
        while (wanted := self._wanted.get()) is not None:
            try:
                end = {
                    Outcome.COMPLETE: self._service.complete,
                    Outcome.FAIL: self._service.fail,
                    Outcome.RELEASE: self._service.release,
                }[wanted.outcome]
                if not end(lease, wanted.data):
                    raise LostJobLeaseError(lease.id)
            except BaseException as error:
                wanted.error = error
                wanted.done.set()
                if isinstance(error, LostJobLeaseError):
                    raise
                continue
            wanted.done.set()
            # run_exclusive records the same end once more, which changes nothing.
            match wanted.outcome:
                case Outcome.COMPLETE:
                    return
                case Outcome.FAIL:
                    raise OutcomeRefusedError("the attempt was reported as failed")
                case Outcome.RELEASE:
                    raise _GivenBackError
        lease.raise_if_lost()
