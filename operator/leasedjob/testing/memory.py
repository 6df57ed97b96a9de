"""The lease without a database, for the tests of programs that use it.

    jobs = InMemoryJobSchedulerService()
    await jobs.run_exclusive(options, work)
    jobs.leases.clock.advance(901)          # the lease has expired, for everybody

It passes the contract suite that PostgreSQL passes. Services that share `InMemoryLeases` compete, as processes that
share a database do. Nothing survives the process, and nothing is shared with another one: it is for tests.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

from leasedjob.errors import DatabaseUnavailableError
from leasedjob.identity import JobSchedulerType, tick_of
from leasedjob.lease.core import Ask, JobScheduler
from leasedjob.lease.rows import JobSchedulerStatus, Outcome
from leasedjob.lease.service import Bell, JobSchedulerService, SyncJobSchedulerService

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Clock:
    """The time of an in-memory store and of those who wait in it.

    `advance` jumps, as if the process had been frozen for so long: to let heartbeats through, advance in steps that are
    shorter than their interval, and let the program run in between.

    Args:
        running: goes on by itself; else only `advance` moves it.
        start: what it shows first; default the real time.
    """

    def __init__(self, *, running: bool = True, start: datetime | None = None) -> None:
        self.running = running
        self._base = (start or datetime.now(UTC)).timestamp()
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._bells: set[Bell] = set()
        self._events: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def seconds(self) -> float:
        """Seconds since 1970."""
        return self._base + (time.monotonic() - self._began if self.running else 0.0)

    def now(self) -> datetime:
        """The same instant, aware, in UTC."""
        return _EPOCH + timedelta(seconds=self.seconds())

    def advance(self, seconds: float) -> None:
        """Moves the clock on, and wakes whoever waits for it."""
        with self._lock:
            self._base += seconds
            bells, events = set(self._bells), dict(self._events)
        for bell in bells:
            bell.ring()
        for event, loop in events.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def wait(self, seconds: float, bell: Bell) -> bool:
        """Blocks a thread for so long; True at once when the bell is set."""
        until = self.seconds() + seconds
        with self._lock:
            self._bells.add(bell)
        try:
            while True:
                heard = bell.rung
                left = until - self.seconds()
                if left <= 0 or bell.is_set():
                    return bell.is_set()
                bell.wait(left if self.running else None, heard)
        finally:
            with self._lock:
                self._bells.discard(bell)

    async def sleep(self, seconds: float) -> None:
        """As asyncio.sleep."""
        until = self.seconds() + seconds
        event = asyncio.Event()
        with self._lock:
            self._events[event] = asyncio.get_running_loop()
        try:
            await asyncio.sleep(0)
            while (left := until - self.seconds()) > 0:
                try:
                    async with asyncio.timeout(left if self.running else None):
                        await event.wait()
                except TimeoutError:
                    continue
                event.clear()
        finally:
            with self._lock:
                del self._events[event]


class InMemoryLeases:
    """What the table `job_scheduler` and its functions are: rows, a clock, and the sequence of fencing tokens.

    Attributes:
        clock: the one that decides.
        available: False: every statement fails with DatabaseUnavailableError.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.available = True
        self._lock = threading.Lock()
        self._rows: dict[str, _Row] = {}
        self._fencing_token = 0
        self._pruned_through: dict[str, datetime] = {}

    @property
    def rows(self) -> list[JobScheduler]:
        """Every row, oldest first."""
        with self._lock:
            return [row.job for row in self._rows.values()]

    def age(self, seconds: float) -> None:
        """Time goes by for the rows alone: as if every holder had been silent for so long, and had not noticed."""
        with self._lock:
            for row in self._rows.values():
                row.job = replace(row.job, modified_at=row.job.modified_at - timedelta(seconds=seconds))

    def request_stop(self, id: UUID) -> None:
        """Asks the holder to stop, as an operator does: its next heartbeat tells it that the lease is lost."""
        with self._lock:
            for row in self._rows.values():
                row.stop_requested |= row.job.id == id and row.job.status is JobSchedulerStatus.RUNNING

    def answer(self, ask: Ask) -> list[dict[str, Any]]:
        """What the database answers to a statement of the library."""
        if not self.available:
            raise DatabaseUnavailableError("the in-memory database is not available")
        with self._lock:
            match ask.name:
                case "acquire":
                    return [self._acquire(**ask.parameters)]
                case "heartbeat":
                    return [self._heartbeat(**ask.parameters)]
                case "finish":
                    return [{"recorded": self._finish(**ask.parameters)}]
                case "prunable":
                    return self._prunable(**ask.parameters)
                case "mark_pruned":
                    return self._mark_pruned(**ask.parameters)
                case "open_since":
                    return [{"transactions": 0}]
                case "delete_pruned":
                    return [{"gone": self._delete_pruned(**ask.parameters)}]
                case _:
                    raise ValueError(f"no statement {ask.name} here")

    def _acquire(
        self,
        *,
        lock_key: str,
        type: str,
        code: str,
        run_key: str | None,
        name: str,
        lease_ms: int,
        token: UUID,
        holder: str,
    ) -> dict[str, Any]:
        now = self.clock.now()
        row = self._rows.get(lock_key)
        tick, pruned = tick_of(run_key), self._pruned_through.get(code)
        if tick is not None and pruned is not None and tick <= pruned and (row is None or row.ended_as("FAIL")):
            return {"verdict": "pruned"}
        if row is None:
            self._fencing_token += 1
            job = JobScheduler(
                id=uuid4(),
                lock_key=lock_key,
                type=JobSchedulerType(type),
                code=code,
                run_key=run_key,
                name=name,
                status=JobSchedulerStatus.RUNNING,
                owner_token=token,
                attempt=1,
                fencing_token=self._fencing_token,
                lease_ms=lease_ms,
                holder=holder,
                data=None,
                created_at=now,
                started_at=now,
                finished_at=None,
                modified_at=now,
            )
            row = self._rows[lock_key] = _Row(job)
        elif row.ended_as("SUCCESS"):
            return {"verdict": "completed"}
        elif row.job.owner_token == token and row.valid(now):
            row.job = replace(row.job, modified_at=now)
        elif row.valid(now):
            return {"verdict": "held"}
        else:
            self._fencing_token += 1
            row.outcome, row.stop_requested = None, False
            row.job = replace(
                row.job,
                status=JobSchedulerStatus.RUNNING,
                owner_token=token,
                attempt=row.job.attempt + 1,
                fencing_token=self._fencing_token,
                name=name,
                lease_ms=lease_ms,
                holder=holder,
                data=None,
                started_at=now,
                finished_at=None,
                modified_at=now,
            )
        return {"verdict": "acquired", **{name: getattr(row.job, name) for name in JobScheduler.__dataclass_fields__}}

    def _find(self, id: UUID, token: UUID) -> _Row | None:
        return next((r for r in self._rows.values() if r.job.id == id and r.job.owner_token == token), None)

    def _heartbeat(self, *, id: UUID, token: UUID) -> dict[str, Any]:
        now = self.clock.now()
        row = self._find(id, token)
        held = row is not None and row.valid(now)
        if row is not None and held:
            row.job = replace(row.job, modified_at=now)
        return {"held": held, "busy": False, "stop_requested": row is not None and held and row.stop_requested}

    def _finish(self, *, id: UUID, token: UUID, outcome: str, data: str | None) -> bool:
        row = self._find(id, token)
        if row is None or row.job.status is not JobSchedulerStatus.RUNNING:
            return row is not None and row.outcome == outcome
        now = self.clock.now()
        kept = None if data is None else json.loads(data)
        if outcome == Outcome.RELEASE and kept is None:
            kept = {"released": True}
        status = JobSchedulerStatus.SUCCESS if outcome == Outcome.COMPLETE else JobSchedulerStatus.FAIL
        row.outcome = outcome
        row.job = replace(row.job, status=status, data=kept, finished_at=now, modified_at=now)
        return True

    def _old(self, age: timedelta, keep: int) -> Iterator[tuple[_Row, datetime]]:
        """Ended runs of ticks, but for the newest of each code, with their ticks."""
        before = self.clock.now() - age
        place: Counter[str] = Counter()
        for row in reversed(list(self._rows.values())):  # the newest first
            place[row.job.code] += 1
            tick, ended = tick_of(row.job.run_key), row.job.finished_at
            if ended is not None and tick is not None and max(ended, tick) < before and place[row.job.code] > keep:
                yield row, tick

    def _prunable(self, *, age: timedelta, keep: int) -> list[dict[str, Any]]:
        ticks: dict[str, list[datetime]] = {}
        for row, tick in self._old(age, keep):
            ticks.setdefault(row.job.code, []).append(tick)
        return [{"code": code, "rows": len(found), "through": max(found)} for code, found in sorted(ticks.items())]

    def _mark_pruned(self, *, age: timedelta, keep: int) -> list[dict[str, Any]]:
        marked = self._prunable(age=age, keep=keep)
        for answer in marked:
            answer["through"] = max(answer["through"], self._pruned_through.get(answer["code"], answer["through"]))
            self._pruned_through[answer["code"]] = answer["through"]
        return [{**answer, "marked_at": self.clock.now()} for answer in marked]

    def _delete_pruned(self, *, age: timedelta, keep: int, code: str, through: datetime, limit: int) -> int:
        old = [row for row, tick in self._old(age, keep) if row.job.code == code and tick <= through][:limit]
        for row in old:
            del self._rows[row.job.lock_key]
        return len(old)


class _Row:
    """A row, and what the library's callers don't see of it."""

    __slots__ = ("job", "outcome", "stop_requested")

    def __init__(self, job: JobScheduler) -> None:
        self.job = job
        self.outcome: str | None = None
        self.stop_requested = False

    def ended_as(self, status: str) -> bool:
        return self.job.status == status

    def valid(self, now: datetime) -> bool:
        """RUNNING, and not expired by the duration that its holder recorded."""
        age = (now - self.job.modified_at).total_seconds()
        return self.job.status is JobSchedulerStatus.RUNNING and age * 1000 <= self.job.lease_ms


class InMemoryJobSchedulerService(JobSchedulerService):
    """JobSchedulerService on InMemoryLeases; its pauses follow their clock.

    Args:
        leases: default new ones of its own.
    """

    _settle_seconds = 0.0

    def __init__(self, leases: InMemoryLeases | None = None) -> None:
        self.leases = leases or InMemoryLeases()
        self._clock = self.leases.clock.seconds

    async def _pause(self, seconds: float) -> None:
        await self.leases.clock.sleep(seconds)

    async def _ask(self, ask: Ask) -> list[dict[str, Any]]:
        await asyncio.sleep(0)  # others get their turn, as during a round trip
        return self.leases.answer(ask)


class InMemorySyncJobSchedulerService(SyncJobSchedulerService):
    """SyncJobSchedulerService on InMemoryLeases; its pauses follow their clock.

    Args:
        leases: default new ones of its own.
    """

    _settle_seconds = 0.0

    def __init__(self, leases: InMemoryLeases | None = None) -> None:
        self.leases = leases or InMemoryLeases()
        self._clock = self.leases.clock.seconds

    def _pause(self, seconds: float, bell: Bell) -> bool:
        return self.leases.clock.wait(seconds, bell)

    def _ask(self, ask: Ask) -> list[dict[str, Any]]:
        return self.leases.answer(ask)


__all__ = ["Clock", "InMemoryJobSchedulerService", "InMemoryLeases", "InMemorySyncJobSchedulerService"]
