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
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, Literal, TypeVar
from uuid import UUID, uuid4

from psycopg.rows import DictRow

from leasedjob.errors import DatabaseRefusedError, DatabaseUnavailableError
from leasedjob.identity import JobSchedulerType
from leasedjob.lease import jsonsafe
from leasedjob.lease.options import LEFT_OUT, Resolved, _LeftOut
from leasedjob.lease.rows import JobSchedulerStatus, Outcome
from leasedjob.lease.trust import CLOCK_RATE

T = TypeVar("T")
TRIES: Final = 5  # of a statement whose answer was lost, or that met a lock
RETRY_SECONDS: Final = 0.2  # before the second try; doubles, with jitter


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
        values = {name: row[name] for name in cls.__dataclass_fields__}
        values["type"] = JobSchedulerType(row["type"])
        values["status"] = JobSchedulerStatus(row["status"])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class JobLease:
    """What an owner shows: the row's id and its own token."""

    id: UUID
    owner_token: UUID


class NotAcquired(StrEnum):
    """Why a run was not acquired."""

    HELD = "held"  # somebody owns it, or is about to
    COMPLETED = "completed"  # it has succeeded, and never runs again


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAcquired:
    """The run is ours: keep its lease alive, and end it by complete, fail or release."""

    row: JobScheduler
    id: UUID
    owner_token: UUID
    idempotency_key: str
    attempt: int
    fencing_token: int
    sent: float = field(repr=False, compare=False)  # when the request was sent, by `boottime`
    acquired: Literal[True] = True

    @property
    def lease(self) -> JobLease:
        """What heartbeat, complete, fail and release take."""
        return JobLease(self.id, self.owner_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNotAcquired:
    """Another owner has the run, or it has succeeded."""

    reason: NotAcquired
    acquired: Literal[False] = False


JobAcquireResult = JobAcquired | JobNotAcquired


# --- the conversation ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """A named statement; `within`: seconds after which its answer is of no use any more."""

    name: str
    parameters: dict[str, Any]
    within: float | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing is to be done for so many seconds."""

    seconds: float


Talk = Generator[Ask | Pause, list[DictRow], T]


def boottime() -> float:
    """Seconds on a clock that goes on while the machine sleeps, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def holder_name() -> str:
    """Who we are, for people: host name and process id."""
    return f"{jsonsafe.text(socket.gethostname())}/{os.getpid()}"


def _patiently(ask: Ask, tries: int = TRIES) -> Talk[DictRow]:
    """Asks again after a passing fault. Every statement here finds what its lost answer had done."""
    for attempt in range(1, tries + 1):
        try:
            (row,) = yield ask
        except DatabaseUnavailableError:
            if attempt == tries:
                raise
            yield Pause(RETRY_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
        else:
            return row
    raise AssertionError("unreachable")


def acquire(options: Resolved, clock: Callable[[], float] = boottime) -> Talk[JobAcquireResult]:
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


def finish(lease: JobLease, outcome: Outcome, data: Any = LEFT_OUT) -> Talk[bool]:
    """Records an end; False: lost. A repeated call with the same outcome is True again."""
    encoded = None if isinstance(data, _LeftOut) or data is None else jsonsafe.dumps(data)
    row = yield from _patiently(
        Ask("finish", {"id": lease.id, "token": lease.owner_token, "outcome": outcome.value, "data": encoded})
    )
    return bool(row["recorded"])


# --- keeping a lease alive -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Trust:
    """Until when a holder believes in its lease, and when it beats next. Seconds, on the holder's own clock."""

    lease: float
    interval: float  # 0: no heartbeats
    sent: float  # when the request was sent that extended the lease last
    retry_at: float | None = None  # a beat has failed: when to try again
    failed: int = 0

    @property
    def until(self) -> float:
        """Past this the lease is not believed in, whatever the database would say."""
        return self.sent + CLOCK_RATE * self.lease

    def over(self, now: float) -> bool:
        return now >= self.until

    def wait(self, now: float) -> float:
        """Seconds until the next beat, or until trust is over."""
        due = self.until if self.interval == 0 else self.sent + self.interval
        if self.retry_at is not None:
            due = self.retry_at
        return max(0.0, min(due, self.until) - now)

    def beaten(self, sent: float) -> None:
        """The database has extended the lease by a request that was sent then."""
        self.sent, self.retry_at, self.failed = sent, None, 0

    def missed(self, now: float, jitter: float) -> None:
        """A beat has failed: the next one comes soon, and not in step with others'."""
        self.failed += 1
        pause = min(self.interval, RETRY_SECONDS * 2 ** min(self.failed - 1, 5))
        self.retry_at = now + pause * (0.5 + jitter / 2)


def keep(
    lease: JobLease,
    trust: Trust,
    clock: Callable[[], float] = boottime,
    jitter: Callable[[], float] = random.random,
) -> Talk[str]:
    """Beats until the lease is lost; why it is, for people. Ended from outside where the work ends first."""
    while True:
        yield Pause(trust.wait(clock()))
        now = clock()
        if trust.over(now):
            return "no heartbeat reached the database in time"
        if trust.wait(now) > 0:
            continue
        try:
            (row,) = yield Ask(
                "heartbeat", {"id": lease.id, "token": lease.owner_token}, within=max(0.001, trust.until - now)
            )
        except (DatabaseUnavailableError, DatabaseRefusedError):
            trust.missed(clock(), jitter())
            continue
        if row["busy"]:
            trust.missed(clock(), jitter())
        elif not row["held"]:
            return "the run was reclaimed, or its lease had expired"
        elif row["stop_requested"]:
            return "the run was asked to stop"
        else:
            trust.beaten(now)
