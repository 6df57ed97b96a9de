"""What the page knows, and what follows from it. Values and pure functions.

A job's rows, Pods and policy are the controller's own frozen values, so a snapshot is a set of references; what is
worked out from them is kept for as long as they are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cached_property
from typing import Any, Final

from leasedjob.api.v1alpha1 import RunOutcome, RunStatus
from leasedjob.controller.facts import PodFacts
from leasedjob.controller.gauges import JobState
from leasedjob.controller.model import Policy
from leasedjob.controller.status import run_status
from leasedjob.lease.clusters import KnownCluster
from leasedjob.lease.rows import AuditLine, CodeState, JobSchedulerStatus, RegisteredBy, Run

LATE_AFTER: Final = timedelta(seconds=60)  # a tick that nobody has decided for so long is worth a word
PAGE: Final = "This page"  # among the sources
Json = Mapping[str, Any]


class State(StrEnum):
    """How a job stands, the worst first. The value stands in URLs."""

    NOT_READY = "not-ready"
    HALTED = "halted"
    FAILING = "failing"
    OVERDUE = "overdue"
    LATE = "late"
    RETRYING = "retrying"
    RUNNING = "running"
    WAITING = "waiting"
    NEW = "new"
    OK = "ok"
    SUSPENDED = "suspended"


TITLES: Final = {
    State.NOT_READY: "Not ready",
    State.FAILING: "Failing",
    State.HALTED: "Halted",
    State.OVERDUE: "Overdue",
    State.LATE: "Late",
    State.RETRYING: "Retrying",
    State.RUNNING: "Running",
    State.WAITING: "Waiting",
    State.NEW: "New",
    State.OK: "OK",
    State.SUSPENDED: "Suspended",
}
MEANINGS: Final = {
    State.NOT_READY: "the operator can't accept it as it is written",
    State.FAILING: "its latest run has failed for good",
    State.HALTED: "suspended after too many failed runs in a row",
    State.OVERDUE: "no success for longer than its schedule allows",
    State.LATE: "a tick is due for over a minute, and nobody has started it",
    State.RETRYING: "an attempt has ended, and another one follows",
    State.RUNNING: "a run is held",
    State.WAITING: "a run is claimed, and its workload has not begun",
    State.NEW: "it has not run yet",
    State.OK: "its latest run was good",
    State.SUSPENDED: "spec.suspend is true",
}
SEVERITY: Final = {state: number for number, state in enumerate(State)}
ATTENTION: Final = (State.NOT_READY, State.HALTED, State.FAILING, State.OVERDUE, State.LATE)


@dataclass(frozen=True, slots=True)
class Seen:
    """One LeasedJob as the controller knows it: references to frozen values, nothing worked out."""

    namespace: str
    name: str
    uid: str
    created_at: datetime
    generation: int
    code: str
    body: Json  # replaced, never changed, by the controller
    policy: Policy | None
    problem: tuple[str, str] | None
    warning: str
    state: CodeState | None
    watermark: datetime | None
    spec_differs: bool
    loaded: bool  # its rows were read
    rows: tuple[Run, ...]
    pods: tuple[PodFacts, ...]
    times: JobState | None  # next start, last success, deadline; None: not worked out yet

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name


@dataclass(frozen=True)
class Job:
    """A job, and what follows from what was seen of it, as far as time does not matter."""

    seen: Seen
    cluster: str
    due: datetime | None  # the first tick that nobody has decided
    search: str  # what the filter looks through

    @property
    def schedule(self) -> str:
        """As it was written."""
        spec = self.seen.body.get("spec") or {}
        written = [spec["schedule"]] if spec.get("schedule") else spec.get("schedules") or []
        return ", ".join(map(str, written)) or str(spec.get("type") or "")

    @property
    def zone(self) -> str:
        if self.seen.policy is not None and self.seen.policy.schedule is not None:
            return self.seen.policy.schedule.time_zone
        return ""

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The newest first."""
        return tuple(sorted(self.seen.rows, key=lambda r: (r.tick or r.created_at, r.created_at), reverse=True))

    @cached_property
    def active(self) -> tuple[Run, ...]:
        return tuple(r for r in self.runs if not r.terminal)

    @cached_property
    def ended(self) -> Run | None:
        """The latest run that has ended for good and was wanted."""
        over = (r for r in self.runs if r.terminal and not r.stopped_as)
        return max(over, key=lambda r: r.finished_at or r.changed_at, default=None)

    @cached_property
    def standing(self) -> frozenset[State]:
        """What holds of it, but for what the passing of time brings."""
        found = set()
        seen = self.seen
        if seen.problem is not None or self.conflict:
            found.add(State.NOT_READY)
        if seen.policy is not None and seen.policy.suspend:
            found.add(State.SUSPENDED)
        if seen.state is not None and seen.state.suspension is not None:
            found.add(State.HALTED)
        for run in self.active:
            outcome = self.shown(run).outcome
            found.add(
                State.RETRYING
                if outcome == RunOutcome.RETRYING
                else State.WAITING
                if outcome == RunOutcome.PENDING
                else State.RUNNING
            )
        if self.ended is not None:
            found.add(State.OK if self.ended.status is JobSchedulerStatus.SUCCESS else State.FAILING)
        elif not self.active:
            found.add(State.NEW)
        return frozenset(found)

    @property
    def conflict(self) -> bool:
        """Another object has its code."""
        return self.ready.get("status") == "False" and self.ready.get("reason") == "CodeConflict"

    @property
    def conditions(self) -> list[Json]:
        return list((self.seen.body.get("status") or {}).get("conditions") or [])

    @property
    def ready(self) -> Json:
        """Its condition Ready, as it was written last."""
        return next((c for c in self.conditions if c.get("type") == "Ready"), {})

    def states(self, now: datetime) -> frozenset[State]:
        """All that holds of it."""
        found = set(self.standing)
        times, policy = self.seen.times, self.seen.policy
        quiet = policy is None or policy.suspend or State.NOT_READY in found or State.HALTED in found
        if times is not None and times.deadline is not None and times.deadline < now and not quiet:
            found.add(State.OVERDUE)
        if self.due is not None and self.due + LATE_AFTER < now and not self.active and not quiet:
            found.add(State.LATE)
        return frozenset(found)

    def next_start(self, now: datetime) -> datetime | None:
        """When the next run starts; None: no tick starts one."""
        policy, times = self.seen.policy, self.seen.times
        if policy is None or policy.schedule is None or policy.suspend or self.seen.problem or self.conflict:
            return None
        if self.seen.state is not None and self.seen.state.suspension is not None:
            return None
        if times is not None and times.next_start is not None and times.next_start > now:
            return times.next_start
        return policy.schedule.next_start(now)

    def pod_of(self, run: Run) -> PodFacts | None:
        return next((p for p in self.seen.pods if p.lease_id == str(run.id) and p.attempt == run.attempt), None)

    def shown(self, run: Run) -> RunStatus:
        """A run as `status` shows it."""
        return run_status(run, self.pod_of(run))

    def attempts(self, run: Run) -> tuple[PodFacts, ...]:
        """The Pods of a run that this cluster still has, by attempt."""
        return tuple(sorted((p for p in self.seen.pods if p.lease_id == str(run.id)), key=lambda p: p.attempt))


def job_of(seen: Seen, cluster: str) -> Job:
    """Works out what time does not change."""
    policy, due = seen.policy, None
    if policy is not None and policy.schedule is not None and seen.watermark is not None and not policy.suspend:
        following = policy.schedule.next(seen.watermark)
        due = None if following is None else policy.schedule.start_of(following)
    job = Job(seen, cluster, due, "")
    words = (f"{seen.namespace}/{seen.name}", seen.code, job.schedule, *(r.holder or r.cluster for r in job.active))
    object.__setattr__(job, "search", "\n".join(words).casefold())
    return job


@dataclass(frozen=True, slots=True)
class Row:
    """A job at an instant."""

    job: Job
    states: frozenset[State]
    next_start: datetime | None

    @property
    def state(self) -> State:
        """The worst that holds; of a job that is suspended, nothing about its past."""
        if State.SUSPENDED in self.states and not self.states & {State.NOT_READY, State.HALTED, State.RUNNING}:
            return State.SUSPENDED
        return min(self.states, key=SEVERITY.__getitem__)

    @property
    def needs_attention(self) -> bool:
        return self.state in ATTENTION

    def counts_for(self, state: State) -> bool:
        """Whether it is among the jobs that are in `state`: one that fails may be running again, and is in both."""
        return state is self.state or (state in _COUNTED and state in self.states)


@dataclass(frozen=True, slots=True)
class Source:
    """How fresh what a source said is.

    Args:
        age: seconds since it last answered; None: never.
        fault: why it doesn't answer; "" if it does.
        stale: old enough that what is shown may be wrong.
    """

    name: str
    age: float | None
    fault: str
    stale: bool


@dataclass(frozen=True, slots=True)
class Leases:
    """What is held in all clusters, as the database said it."""

    held: tuple[Run, ...]
    total: int
    clusters: tuple[KnownCluster, ...]


@dataclass(frozen=True, slots=True)
class About:
    """What the database says of one job."""

    registered: tuple[RegisteredBy, ...]
    audit: tuple[AuditLine, ...]


@dataclass(frozen=True)
class Snapshot:
    """Everything at one instant.

    Args:
        now: the database's clock, as this process estimates it.
        taken: by time.monotonic().
    """

    cluster: str
    identity: str
    now: datetime
    taken: float
    rows: tuple[Row, ...]
    fresh: bool  # the operator works: all that its work rests on is known to be as this version needs it
    waits: str = ""  # why it isn't ready, but for the database
    counts: Mapping[State, int] = field(default_factory=dict)

    @cached_property
    def by_key(self) -> dict[tuple[str, str], Row]:
        return {row.job.seen.key: row for row in self.rows}

    @cached_property
    def by_code(self) -> dict[str, Row]:
        return {row.job.seen.code: row for row in self.rows if row.job.seen.code}

    @cached_property
    def namespaces(self) -> tuple[str, ...]:
        return tuple(sorted({row.job.seen.namespace for row in self.rows}))

    @cached_property
    def attention(self) -> int:
        """Jobs that somebody should look at."""
        return sum(row.needs_attention for row in self.rows)


def snapshot_of(
    jobs: Iterable[Job],
    *,
    cluster: str,
    identity: str,
    now: datetime,
    taken: float,
    fresh: bool,
    waits: str = "",
) -> Snapshot:
    """Jobs at `now`, and how many are in each state; a job counts for every state that holds of it."""
    rows = tuple(Row(job, job.states(now), job.next_start(now)) for job in jobs)
    counts = dict.fromkeys(State, 0)
    for row in rows:
        for state in row.states | {row.state}:
            counts[state] += row.counts_for(state)
    return Snapshot(cluster, identity, now, taken, rows, fresh, waits, counts)


# These are of interest beside the worst that holds.
_COUNTED: Final = frozenset({State.RUNNING, State.WAITING, State.RETRYING, State.OVERDUE, State.LATE, State.SUSPENDED})
