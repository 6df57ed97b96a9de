"""Backfills: past ticks, oldest first, a few at a time, each as the run of its tick.

What is done about a tick is decided here, purely; the database moves the backfill on, under the code's lock, only from
where the decision was made. So any number of replicas may work at one, and a restart loses nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice
from typing import Final

from leasedjob.api.v1alpha1 import BackfillSpec, PlannedAction, PlannedTick, Reprocess
from leasedjob.controller.facts import parse_time
from leasedjob.identity import RunIdentity, run_key_for
from leasedjob.lease.rows import JobSchedulerStatus, Run
from leasedjob.lease.store import OperatorStore
from leasedjob.schedule import Ticks

PAGE: Final = 500  # ticks that are looked at in one round trip
_BEFORE: Final = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class TickRuns:
    """The runs of one tick: its own, and those of backfills that ran it again.

    Args:
        runs: by their number, from 0 on, without a gap.
        pruned: runs of this time were deleted: what has no row can't be claimed any more.
    """

    tick: datetime
    runs: tuple[Run, ...] = ()
    pruned: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """What is done about one tick. `number`: of its run, see run_key_for; `reason`: of a tick that is left as it is."""

    tick: datetime
    action: PlannedAction
    number: int = 0
    reason: str = ""

    @property
    def run_key(self) -> str:
        """Of the run that it gets."""
        return run_key_for(self.tick, self.number)

    def shown(self) -> PlannedTick:
        """As a dry run shows it."""
        skipped = self.action is PlannedAction.SKIP
        return PlannedTick(
            tick=self.tick,
            action=self.action,
            run_key=None if skipped else self.run_key,
            reason=self.reason or None,
        )


def planned(found: TickRuns, reprocess: Reprocess) -> Planned:
    """What is done about a tick. Its latest run decides; one that is recorded SUCCESS is never touched."""
    if not found.runs:
        if found.pruned:
            return Planned(found.tick, PlannedAction.SKIP, reason="Pruned")
        return Planned(found.tick, PlannedAction.RUN)
    number, latest = len(found.runs) - 1, found.runs[-1]
    if not latest.terminal:
        return Planned(found.tick, PlannedAction.SKIP, reason="Active")
    succeeded = latest.status is JobSchedulerStatus.SUCCESS
    wanted = reprocess is Reprocess.ALL or (reprocess is Reprocess.FAILED and not succeeded)
    if not wanted:
        return Planned(found.tick, PlannedAction.SKIP, reason="Succeeded" if succeeded else "Failed")
    if found.pruned:
        return Planned(found.tick, PlannedAction.SKIP, reason="Pruned")
    if succeeded:
        return Planned(found.tick, PlannedAction.REPROCESS, number + 1)
    return Planned(found.tick, PlannedAction.RETRY, number)


@dataclass(frozen=True, slots=True)
class TickSpan:
    """The instants that a backfill asks for, both ends included."""

    first: datetime
    last: datetime

    @classmethod
    def of(cls, spec: BackfillSpec) -> TickSpan:
        first, last = parse_time(spec.from_), parse_time(spec.to)
        assert first is not None
        assert last is not None
        return cls(first, last)

    @property
    def start(self) -> datetime:
        """An instant before the first tick: where a backfill begins."""
        return self.first - _BEFORE

    def ticks(self, schedule: Ticks, after: datetime) -> Iterator[datetime]:
        """The ticks after an instant, oldest first."""
        tick = schedule.next(max(after, self.start))
        while tick is not None and tick <= self.last:
            yield tick
            tick = schedule.next(tick)

    def count(self, schedule: Ticks, limit: int) -> int:
        """How many ticks there are; at most one more than `limit` are counted."""
        return sum(1 for _ in islice(self.ticks(schedule, self.start), limit + 1))


@dataclass(slots=True)
class Plan:
    """What would be done, or is to be done: counts of all, and the first ticks."""

    ticks: int = 0
    to_run: int = 0
    first: list[PlannedTick] = field(default_factory=list)


async def runs_of(
    store: OperatorStore,
    cluster: str,
    code: str,
    ticks: Sequence[datetime],
    pruned_through: datetime | None,
    *,
    again: bool = True,
) -> list[TickRuns]:
    """What is recorded of these ticks, in their order. `again`: also of the runs that ran them again."""
    found: dict[datetime, list[Run]] = {tick: [] for tick in ticks}
    number, open_ticks = 0, list(ticks)
    while open_ticks:
        keys = {
            RunIdentity.of(code=code, run_key=run_key_for(tick, number)).lock_key: tick for tick in open_ticks
        }  # fmt: skip
        rows = await store.runs_by_key(cluster, keys)
        for lock_key, run in rows.items():
            found[keys[lock_key]].append(run)
        open_ticks = [keys[lock_key] for lock_key in rows] if again else []
        number += 1
    return [
        TickRuns(tick, tuple(runs), pruned_through is not None and tick <= pruned_through)
        for tick, runs in found.items()
    ]


async def decided(
    store: OperatorStore,
    cluster: str,
    code: str,
    ticks: Iterator[datetime],
    reprocess: Reprocess,
    pruned_through: datetime | None,
    *,
    page: int = PAGE,
) -> AsyncIterator[Planned]:
    """What is done about each of these ticks, by what is recorded when its page is read."""
    while some := list(islice(ticks, page)):
        again = reprocess is not Reprocess.NONE  # else a tick that has a run is left alone, whatever came after it
        for found in await runs_of(store, cluster, code, some, pruned_through, again=again):
            yield planned(found, reprocess)
