"""The lease's conversation with the database, without I/O.

Each operation is a generator: it yields an `Ask` (a named statement) or a `Pause`, gets rows or an exception back, and
returns its result. `leasedjob.lease.service` drives the same generators with an asynchronous and with a synchronous
connection, so neither is a copy of the other.

    acquire ──► RUNNING ──heartbeat──► RUNNING ──complete──► SUCCESS (final)
                   │                      │ ├────fail──────► FAIL ──acquire──► RUNNING, attempt + 1
                   │                      │ └────release───► FAIL
                   └── modified_at + lease_ms passes: anybody's acquire ──► RUNNING, attempt + 1, new token

Every change by an owner matches id, owner token and RUNNING, and is judged by the database's clock. The local clock
only shortens trust: a holder believes in its lease until `request sent + 0.98 * lease`, on a clock that counts suspend.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Never, TypeVar
from uuid import UUID, uuid4

from psycopg.rows import DictRow

from leasedjob.errors import DatabaseRefusedError, DatabaseUnavailableError, LeasedJobError, LostJobLeaseError
from leasedjob.identity import JobSchedulerType
from leasedjob.lease import jsonsafe
from leasedjob.lease.lost import RETRY_SECONDS, SILENT, Clock, LostSignal, Trust, boottime
from leasedjob.lease.options import LEFT_OUT, Resolved, _LeftOut
from leasedjob.lease.rows import JobSchedulerStatus, Outcome

T = TypeVar("T")
MYPY = False  # mypy takes it for True: it narrows `if result.acquired:`, pyright needs the lines that depend on this
TRIES: Final = 5  # of a statement whose answer was lost, or that met a lock
LONGEST_RETRY_SECONDS: Final = 5.0
LONG_SECONDS: Final = 600.0


# --- what the library's callers see ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScheduler:
    """A lease row.

    Args:
        lock_key: unique; equal to the run's idempotency key.
        run_key: None for INITIAL.
        owner_token: the fence: who shows it owns the run.
        data: what complete, fail or release recorded.
        modified_at: the last acquire, heartbeat or end, by the database's clock.
    """

    id: UUID
    lock_key: str
    type: JobSchedulerType
    code: str
    run_key: str | None
    name: str
    status: JobSchedulerStatus
    owner_token: UUID
    attempt: int
    fencing_token: int
    lease_ms: int
    holder: str
    data: Any
    created_at: datetime
    started_at: datetime
    finished_at: datetime | None
    modified_at: datetime

    @classmethod
    def from_row(cls, row: DictRow) -> JobScheduler:
        """The value of a row of leasedjob.job_scheduler."""
        return cls(
            id=row["id"],
            lock_key=row["lock_key"],
            type=JobSchedulerType(row["type"]),
            code=row["code"],
            run_key=row["run_key"],
            name=row["name"],
            status=JobSchedulerStatus(row["status"]),
            owner_token=row["owner_token"],
            attempt=row["attempt"],
            fencing_token=row["fencing_token"],
            lease_ms=row["lease_ms"],
            holder=row["holder"],
            data=row["data"],
            created_at=row["created_at"],
            started_at=row["started_at"],
            finished_at=row["finished_at"],
            modified_at=row["modified_at"],
        )


@dataclass(frozen=True, slots=True)
class JobLease:
    """What an owner shows: the row's id and its own token."""

    id: UUID
    owner_token: UUID


class NotAcquired(StrEnum):
    """Why a run was not acquired."""

    HELD = "held"  # somebody owns it, or is about to
    COMPLETED = "completed"  # it has succeeded, and never runs again
    PRUNED = "pruned"  # its time is pruned: whether it ran isn't known any more, so it never runs again


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAcquired:
    """The run is ours: keep its lease alive, and end it by complete, fail or release.

    Args:
        sent: when the request was sent, by the holder's own clock (`leasedjob.lease.lost`): trust counts from then.
    """

    row: JobScheduler
    id: UUID
    owner_token: UUID
    idempotency_key: str
    attempt: int
    fencing_token: int
    sent: float = field(default=0.0, repr=False, compare=False)
    acquired: Literal[True] = True

    @property
    def lease(self) -> JobLease:
        """What heartbeat, complete, fail and release take."""
        return JobLease(self.id, self.owner_token)

    if TYPE_CHECKING and not MYPY:

        @property
        def reason(self) -> Never: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNotAcquired:
    """Another owner has the run, or it has succeeded."""

    reason: NotAcquired
    acquired: Literal[False] = False

    if TYPE_CHECKING and not MYPY:

        @property
        def row(self) -> Never: ...
        @property
        def id(self) -> Never: ...
        @property
        def owner_token(self) -> Never: ...
        @property
        def idempotency_key(self) -> Never: ...
        @property
        def attempt(self) -> Never: ...
        @property
        def fencing_token(self) -> Never: ...
        @property
        def lease(self) -> Never: ...


JobAcquireResult = JobAcquired | JobNotAcquired


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
            raise lost_error(self)


@dataclass(frozen=True, slots=True)
class RunExclusiveResult(Generic[T]):
    """Whether the work ran here, and what it returned."""

    acquired: bool
    result: T | None = None


def lost_error(lease: JobExecutionLease) -> LostJobLeaseError:
    """Says why the lease is lost."""
    reason = lease.lost.reason or "it was reclaimed before its end was recorded"
    return LostJobLeaseError(lease.id, f"the lease {lease.id} is lost: {reason}")


# --- the conversation ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """A named statement.

    Args:
        within: seconds after which its answer is of no use any more.
        long: it may take its time, beyond the service's limit for one statement.
    """

    name: str
    parameters: dict[str, Any]
    within: float | None = None
    long: bool = False

    def limit(self, usual: float) -> float:
        """Seconds that it may take."""
        if self.long:
            return LONG_SECONDS
        return usual if self.within is None else min(usual, self.within)


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing is to be done for so many seconds."""

    seconds: float


Talk = Generator[Ask | Pause, list[DictRow], T]


def holder_name() -> str:
    """Who we are, for people: host name and process id."""
    return f"{_host_name()}/{os.getpid()}"


@cache
def _host_name() -> str:
    return jsonsafe.text(socket.gethostname())


def _patiently(ask: Ask, more: Callable[[], bool] = lambda: False) -> Talk[DictRow]:
    """Asks again after a passing fault: some times, and then as long as `more`.

    Every statement here finds what its lost answer had done.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            (row,) = yield ask
        except DatabaseUnavailableError:
            if attempt >= TRIES and not more():
                raise
            yield Pause(
                min(LONGEST_RETRY_SECONDS, RETRY_SECONDS * 2 ** min(attempt - 1, 10)) * random.uniform(0.5, 1.0)
            )
        else:
            return row


def acquire(options: Resolved, clock: Clock = boottime) -> Talk[JobAcquireResult]:
    """A fresh row, or a reclaim of FAIL or of an expired RUNNING one; SUCCESS stays."""
    identity = options.identity
    token = uuid4()  # proposed here: asking again after a lost answer finds our own row
    sent = clock()
    row = yield from _patiently(
        Ask(
            "acquire",
            {
                "lock_key": identity.lock_key,
                "type": identity.type.value,
                "code": identity.code,
                "run_key": identity.run_key,
                "name": options.name,
                "lease_ms": options.lease_ms,
                "token": token,
                "holder": holder_name(),
            },
        )
    )
    if row["verdict"] != "acquired":
        return JobNotAcquired(reason=NotAcquired(row["verdict"]))
    job = JobScheduler.from_row(row)
    return JobAcquired(
        row=job,
        id=job.id,
        owner_token=job.owner_token,
        idempotency_key=job.lock_key,
        attempt=job.attempt,
        fencing_token=job.fencing_token,
        sent=sent,
    )


def heartbeat(lease: JobLease) -> Talk[bool]:
    """One beat; False: lost."""
    (row,) = yield Ask("heartbeat", {"id": lease.id, "token": lease.owner_token})
    if row["busy"]:
        raise DatabaseUnavailableError("the lease row is locked elsewhere", "busy")
    return bool(row["held"])


def finish(
    lease: JobLease, outcome: Outcome, data: Any = LEFT_OUT, more: Callable[[], bool] = lambda: False
) -> Talk[bool]:
    """Records an end; False: lost. A repeated call with the same outcome is True again."""
    encoded = None if isinstance(data, _LeftOut) or data is None else jsonsafe.dumps(data)
    row = yield from _patiently(
        Ask("finish", {"id": lease.id, "token": lease.owner_token, "outcome": outcome.value, "data": encoded}), more
    )
    return bool(row["recorded"])


# --- run_exclusive: what follows from how the work ended -------------------------------------------------------------


def execution(
    acquired: JobAcquired, options: Resolved, clock: Clock = boottime, stopping: float = 0.0
) -> tuple[JobExecutionLease, Trust]:
    """The lease as its work sees it, and what keeps it alive."""
    trust = Trust(options.lease_ms / 1000, options.heartbeat_ms / 1000, acquired.sent, stopping=stopping)
    lease = JobExecutionLease(
        acquired.id,
        acquired.owner_token,
        acquired.idempotency_key,
        acquired.attempt,
        acquired.fencing_token,
        LostSignal(trust, clock),
    )
    return lease, trust


def conclude(lease: JobExecutionLease, error: BaseException | None) -> Talk[None]:
    """Records how the work ended, and raises what its caller is to see.

    Args:
        error: what the work raised; None if it returned. An Exception is a failure. Anything else (a cancellation, an
            interrupt), and the loss of the lease itself, gives the run back.

    Raises:
        LostJobLeaseError: the lease was lost, unless the work returned and its success could still be recorded.
    """
    lease.lost.forget()
    if error is None:
        try:
            # Work that is done is worth some patience: while the lease is trusted, nobody else can take the run.
            recorded = yield from finish(lease, Outcome.COMPLETE, more=lambda: not lease.lost.is_set())
        except (DatabaseUnavailableError, DatabaseRefusedError) as unrecorded:
            message = f"the work has ended, but its success could not be recorded, so it may be repeated: {unrecorded}"
            raise type(unrecorded)(message, unrecorded.kind) from unrecorded
        if not recorded:
            raise lost_error(lease)
        return
    failed = isinstance(error, Exception) and not isinstance(error, LostJobLeaseError)
    recorded = True
    try:
        recorded = yield from finish(
            lease, Outcome.FAIL if failed else Outcome.RELEASE, _error_data(error) if failed else LEFT_OUT
        )
    except LeasedJobError as unrecorded:  # the work's own error matters more; the lease will expire
        error.add_note(f"how the work ended could not be recorded: {unrecorded}")
    if failed and (not recorded or lease.lost.is_set()):
        raise lost_error(lease) from error
    raise error


def _error_data(error: BaseException) -> dict[str, str]:
    return {"error": jsonsafe.printed(error)[:10_000], "type": type(error).__name__}


# --- keeping a lease alive -------------------------------------------------------------------------------------------


def keep(
    lease: JobLease,
    trust: Trust,
    clock: Clock = boottime,
    jitter: Callable[[], float] = random.random,
) -> Talk[str]:
    """Beats until the lease is lost; why it is, for people. Ended from outside where the work ends first.

    Whatever a beat fails with, another one may reach the database while the lease is trusted.
    """
    trouble = ""
    trust.beaten(trust.sent, jitter())
    while True:
        yield Pause(trust.wait(clock()))
        now = clock()
        if trust.over(now):
            return SILENT + trouble
        if trust.wait(now) > 0:
            continue
        try:
            (row,) = yield Ask("heartbeat", {"id": lease.id, "token": lease.owner_token}, within=trust.patience(now))
        except Exception as error:
            trouble = f": {jsonsafe.printed(error)}"
            trust.missed(clock(), jitter())
            continue
        if row["busy"]:
            trouble = ": the lease row is locked elsewhere"
            trust.missed(clock(), jitter())
        elif not row["held"]:
            return "the run was reclaimed, or its lease had expired"
        elif row["stop_requested"]:
            return "the run was asked to stop"
        else:
            trust.beaten(now, jitter())
