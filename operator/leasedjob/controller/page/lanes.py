"""Runs on a line of time, a lane for each job and cluster. Pure: positions in percent of the window."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from leasedjob.lease.rows import JobSchedulerStatus, LedgerEntry, Run

LEAST: Final = 0.3  # percent: what is shorter would not be seen
STACKED: Final = 4  # bars above each other where runs of a lane overlap; more lie on the last one
_STEPS: Final = tuple(timedelta(minutes=m) for m in (5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880))
_MOST_LABELS: Final = 8


class Kind(StrEnum):
    """How a bar is drawn."""

    GOOD = "good"
    BAD = "bad"
    UNWANTED = "unwanted"
    RUNNING = "running"
    WAITING = "waiting"
    RETRYING = "retrying"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Bar:
    """One run. Percent of the window: `begin`, `worked` (the present attempt's workload may run from here), `end`."""

    run: Run
    kind: Kind
    earlier: float  # where the run itself began, before the present attempt
    begin: float
    worked: float | None
    end: float
    level: int


@dataclass(frozen=True, slots=True)
class Mark:
    """Ticks that did not run."""

    entry: LedgerEntry
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Lane:
    cluster: str
    bars: tuple[Bar, ...]
    levels: int


@dataclass(frozen=True, slots=True)
class Track:
    """One job's lanes."""

    code: str
    namespace: str
    name: str
    lanes: tuple[Lane, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    begin: datetime
    end: datetime
    labels: tuple[tuple[float, str], ...]

    def at(self, when: datetime) -> float:
        """Percent, within the window."""
        part = (when - self.begin) / (self.end - self.begin)
        return round(100 * min(1.0, max(0.0, part)), 2)


def axis(end: datetime, length: timedelta) -> Axis:
    """The window that ends at `end`, with labels at round times in UTC."""
    begin = end - length
    step = next((s for s in _STEPS if length / s <= _MOST_LABELS), _STEPS[-1])
    day = begin.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    first = day + step * -((day - begin) // step)
    labels = []
    while first < end:
        if first > begin:
            written = f"{first:%d %b}" if first.hour == first.minute == 0 else f"{first:%H:%M}"
            labels.append((round(100 * ((first - begin) / length), 2), written))
        first += step
    return Axis(begin, end, tuple(labels))


def kind_of(run: Run, now: datetime) -> Kind:
    """How a run stands, for its colour and shape."""
    match run.status:
        case JobSchedulerStatus.SUCCESS:
            return Kind.GOOD
        case JobSchedulerStatus.RUNNING if run.expires_at < now:
            return Kind.LOST
        case JobSchedulerStatus.RUNNING if run.pod_uid is None and run.job_uid:
            return Kind.WAITING
        case JobSchedulerStatus.RUNNING:
            return Kind.RUNNING
        case _ if run.retry_at is not None:
            return Kind.RETRYING
        case _:
            return Kind.UNWANTED if run.stopped_as else Kind.BAD


def ended_at(run: Run, now: datetime) -> datetime:
    """Until when it is drawn."""
    if run.status is JobSchedulerStatus.RUNNING:
        return now
    return run.finished_at or run.changed_at


@dataclass(frozen=True, slots=True)
class InWindow:
    """What one job has in the window."""

    code: str
    runs: list[Run]
    ledger: list[LedgerEntry]


def in_window(runs: Iterable[Run], ledgers: Iterable[LedgerEntry], on: Axis, now: datetime) -> list[InWindow]:
    """What lies in the window, by job."""
    found: dict[str, InWindow] = {}

    def of(code: str) -> InWindow:
        if code not in found:
            found[code] = InWindow(code, [], [])
        return found[code]

    for run in runs:
        if ended_at(run, now) >= on.begin and run.created_at <= on.end:
            of(run.identity.code).runs.append(run)
    for entry in ledgers:
        if entry.last >= on.begin and entry.first <= on.end:
            of(entry.code).ledger.append(entry)
    return sorted(found.values(), key=lambda job: job.code)


def track(job: InWindow, on: Axis, now: datetime) -> Track:
    """Where it is drawn."""
    namespace, _, name = job.code.partition("/")
    if job.runs and job.runs[0].job_name:
        namespace, name = job.runs[0].namespace, job.runs[0].job_name
    marks = tuple(Mark(entry, on.at(entry.first), on.at(entry.last)) for entry in job.ledger)
    return Track(job.code, namespace, name, _lanes(job.runs, on, now), marks)


def _lanes(runs: Sequence[Run], on: Axis, now: datetime) -> tuple[Lane, ...]:
    by_cluster: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_cluster[run.cluster].append(run)
    return tuple(_lane(cluster, by_cluster[cluster], on, now) for cluster in sorted(by_cluster))


def _lane(cluster: str, runs: list[Run], on: Axis, now: datetime) -> Lane:
    bars: list[Bar] = []
    free: list[float] = []  # for each level, where its last bar ends
    for run in sorted(runs, key=lambda r: (r.created_at, r.id)):
        begin = min(on.at(run.started_at), 100 - LEAST)
        end = max(on.at(ended_at(run, now)), begin + LEAST)
        earlier = on.at(run.created_at)
        level = next((n for n, until in enumerate(free) if until <= earlier), len(free))
        if level == STACKED:
            level -= 1
        if level == len(free):
            free.append(end)
        free[level] = max(free[level], end)
        worked = None if run.adopted_at is None else on.at(run.adopted_at)
        bars.append(Bar(run, kind_of(run, now), earlier, begin, worked, end, level))
    return Lane(cluster, tuple(bars), max(1, len(free)))
