"""Metrics that are states, brought up to date from what is in memory: a scrape itself computes nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from leasedjob.controller.cache import Entry, Key
from leasedjob.controller.deadline import deadline_of, last_success
from leasedjob.controller.engine import Engine
from leasedjob.controller.metrics import Metrics
from leasedjob.lease.rows import JobSchedulerStatus, Run

GAUGE_SECONDS: Final = 10.0
SLICE: Final = 50  # jobs looked at before others may go on: a due tick does not wait for a metric


@dataclass(frozen=True, slots=True)
class JobState:
    """What of one job is exported."""

    next_start: datetime | None
    success: datetime | None
    deadline: datetime | None


class JobSeries:
    """The series that each job has, for so many jobs at most: the oldest objects keep theirs."""

    def __init__(self, metrics: Metrics, limit: int) -> None:
        self._metrics = metrics
        self._gauges = (metrics.job_next_schedule, metrics.job_last_success, metrics.job_success_deadline)
        self._limit = limit
        self._there: set[tuple[int, Key]] = set()

    def show(self, states: dict[Key, JobState]) -> None:
        """Exports these jobs, in their order, and no other one."""
        there = set()
        for key, state in list(states.items())[: self._limit]:
            for number, value in enumerate((state.next_start, state.success, state.deadline)):
                if value is not None:
                    self._gauges[number].labels(*key).set(value.timestamp())
                    there.add((number, key))
        for number, key in self._there - there:
            self._gauges[number].remove(*key)
        self._there = there
        self._metrics.jobs_without_series.set(max(0, len(states) - self._limit))


class Gauges:
    """Looks at every job in slices."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.states: dict[Key, JobState] = {}  # of all jobs, as they were at the last step
        self._series = JobSeries(engine.metrics, engine.settings.metrics_jobs)
        self._starts: dict[str, tuple[int, datetime | None]] = {}  # by uid: generation, next start
        self._deadlines: dict[str, tuple[object, datetime | None]] = {}  # by uid: what it follows from, deadline

    async def step(self) -> None:
        engine, metrics = self._engine, self._engine.metrics
        now = engine.clock.now()
        states: dict[Key, JobState] = {}
        pending: list[Run] = []
        overdue = suspended = broken = 0
        entries = sorted(engine.cache.jobs.values(), key=lambda e: (e.created_at, e.uid))
        for number, entry in enumerate(entries, start=1):
            state = self._state(entry, now)
            states[entry.key] = state
            overdue += state.deadline is not None and state.deadline < now
            suspended += entry.policy is not None and entry.policy.suspend
            broken += entry.problem is not None
            pending += [r for r in entry.rows.values() if _is_pending(r, engine.settings.cluster)]
            if number % SLICE == 0:
                await asyncio.sleep(0)
        self._forget(entries)
        self.states = states
        await asyncio.sleep(0)
        self._series.show(states)
        metrics.jobs.set(len(entries))
        metrics.jobs_overdue.set(overdue)
        metrics.jobs_suspended.set(suspended)
        metrics.jobs_not_ready.set(broken)
        metrics.claims_pending.set(len(pending))
        age = max(((now - r.started_at).total_seconds() for r in pending), default=0.0)
        metrics.oldest_claim_seconds.set(max(0.0, age))
        starts = [s.next_start for s in states.values() if s.next_start is not None]
        metrics.next_schedule.set(min(starts).timestamp() if starts else 0)

    def _state(self, entry: Entry, now: datetime) -> JobState:
        success = last_success(entry)
        return JobState(self._next_start(entry, now), success, self._deadline(entry, success))

    def _next_start(self, entry: Entry, now: datetime) -> datetime | None:
        policy = entry.policy
        if policy is None or policy.suspend or policy.schedule is None or entry.problem is not None:
            return None
        generation, known = self._starts.get(entry.uid, (-1, None))
        if generation != entry.generation or (known is not None and known <= now):
            known = policy.schedule.next_start(now)
            self._starts[entry.uid] = entry.generation, known
        return known

    def _deadline(self, entry: Entry, success: datetime | None) -> datetime | None:
        """Worked out again where something that it follows from has changed."""
        ledger = entry.state.ledger[:1] if entry.state else ()
        source = entry.generation, success, ledger
        before = self._deadlines.get(entry.uid)
        if before is None or before[0] != source:
            before = self._deadlines[entry.uid] = source, deadline_of(entry)
        return before[1]

    def _forget(self, entries: list[Entry]) -> None:
        there = {e.uid for e in entries}
        for uid in self._starts.keys() - there:
            del self._starts[uid]
        for uid in self._deadlines.keys() - there:
            del self._deadlines[uid]


def _is_pending(run: Run, cluster: str) -> bool:
    return run.status is JobSchedulerStatus.RUNNING and run.cluster == cluster and run.pod_uid is None
