"""Which missed ticks start after a gap, and which are dropped, and why. Pure.

The rules are "Due, missed, skipped" of the scheduling chapter: a watermark says from when ticks count, so an edit never
fires an old tick and a resume replays nothing. This decides what an operator asks for; the claim judges deadline and
watermark again by the database's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, Protocol, assert_never

DEFAULT_LIMIT: Final = 100


class MissedRunPolicy(StrEnum):
    """What to do with ticks that nobody could start at their time."""

    RunLatest = "RunLatest"
    RunAll = "RunAll"
    Skip = "Skip"


class TickReason(StrEnum):
    """Why ticks don't run, where no claim decides."""

    StartingDeadline = "StartingDeadline"  # startingDeadlineSeconds had passed
    MissedRunPolicy = "MissedRunPolicy"  # the policy starts only the latest, or none
    MissedRunLimit = "MissedRunLimit"  # RunAll starts at most missedRunLimit
    Suspended = "Suspended"  # spec.suspend
    SuspendedAfterFailures = "SuspendedAfterFailures"  # suspendAfterFailures
    SpecDiffers = "SpecDiffers"  # another cluster's schedule has them, and this cluster's went on
    ScheduleEdited = "ScheduleEdited"  # they were ticks of the schedule that was
    JobDeleted = "JobDeleted"  # they were ticks of an object that is gone

    @property
    def kind(self) -> str:
        """The ledger's word: skipped by policy, missed because it was too late, dropped with the schedule that was."""
        match self:
            case TickReason.Suspended | TickReason.SuspendedAfterFailures:
                return "skipped"
            case TickReason.ScheduleEdited | TickReason.JobDeleted:
                return "dropped"
            case (
                TickReason.StartingDeadline
                | TickReason.MissedRunPolicy
                | TickReason.MissedRunLimit
                | TickReason.SpecDiffers
            ):
                return "missed"
            case _:
                assert_never(self)


@dataclass(frozen=True, slots=True)
class TickRange:
    """Ticks that share a fate: from `first` to `last`, both included, `count` of them (at least, if not exact)."""

    first: datetime
    last: datetime
    count: int
    count_is_exact: bool
    reason: TickReason


@dataclass(frozen=True, slots=True)
class DueTicks:
    """What is due now: `claims` to start and `dropped` ranges to record, each oldest first; no tick is in both."""

    claims: tuple[datetime, ...] = ()
    dropped: tuple[TickRange, ...] = ()


class Ticks(Protocol):
    """What this module needs of a schedule or a timetable."""

    def next(self, after: datetime) -> datetime | None: ...

    def previous(self, before_or_at: datetime) -> datetime | None: ...

    def count(self, after: datetime, through: datetime) -> tuple[int, bool]: ...

    def start_of(self, tick: datetime) -> datetime: ...

    def latest_started(self, now: datetime) -> datetime | None: ...


def ticks_due(
    schedule: Ticks,
    watermark: datetime,
    now: datetime,
    policy: MissedRunPolicy,
    *,
    limit: int = DEFAULT_LIMIT,
    starting_deadline: int | None = None,
    on_time: timedelta,
) -> DueTicks:
    """Sort the ticks after the watermark whose start has come into those to claim and those to drop.

    Args:
        watermark: ticks up to here don't count; aware, as `now`.
        limit: missedRunLimit, ticks that RunAll starts at most.
        starting_deadline: startingDeadlineSeconds; a tick whose start is longer ago than that is dropped. None: no
            deadline.
        on_time: how late the latest start may be and still count as on time, which Skip requires.

    Takes time by `limit` and the months of the gap, at most 20,000 days of them, not by the number of ticks.
    """
    latest = schedule.latest_started(now)
    if latest is None or latest <= watermark:
        return DueTicks()
    deadline = None if starting_deadline is None else now - timedelta(seconds=starting_deadline)
    if deadline is not None and schedule.start_of(latest) < deadline:
        return DueTicks(dropped=_range(schedule, watermark, latest, TickReason.StartingDeadline))

    match policy:
        case MissedRunPolicy.RunLatest:
            return _only_latest(schedule, watermark, latest)
        case MissedRunPolicy.Skip:
            if now - schedule.start_of(latest) <= on_time:
                return _only_latest(schedule, watermark, latest)
            return DueTicks(dropped=_range(schedule, watermark, latest, TickReason.MissedRunPolicy))
        case MissedRunPolicy.RunAll:
            return _all_within(schedule, watermark, latest, deadline, limit)
        case _:
            assert_never(policy)


def passed_over(schedule: Ticks, watermark: datetime, now: datetime, reason: TickReason) -> tuple[TickRange, ...]:
    """All ticks in (watermark, now], as a range that doesn't run; empty if there are none."""
    return _range(schedule, watermark, schedule.previous(now), reason)


def _only_latest(schedule: Ticks, watermark: datetime, latest: datetime) -> DueTicks:
    earlier = _before(schedule, latest)
    return DueTicks((latest,), _range(schedule, watermark, earlier, TickReason.MissedRunPolicy))


def _all_within(
    schedule: Ticks, watermark: datetime, latest: datetime, deadline: datetime | None, limit: int
) -> DueTicks:
    claims: list[datetime] = []
    tick: datetime | None = latest
    while tick is not None and tick > watermark and len(claims) < limit:
        if deadline is not None and schedule.start_of(tick) < deadline:
            break
        claims.append(tick)
        tick = _before(schedule, tick)
    claims.reverse()

    expired: tuple[TickRange, ...] = ()
    kept_from = watermark
    if deadline is not None:
        last_expired = _before(schedule, deadline)  # strictly before it: a tick at its deadline may still start
        if last_expired is not None and schedule.start_of(last_expired) >= deadline:
            last_expired = _before(schedule, last_expired)  # that one starts before the next tick
        if last_expired is not None and last_expired > watermark:
            expired = _range(schedule, watermark, last_expired, TickReason.StartingDeadline)
            kept_from = last_expired
    return DueTicks(tuple(claims), expired + _range(schedule, kept_from, tick, TickReason.MissedRunLimit))


def _before(schedule: Ticks, tick: datetime) -> datetime | None:
    return schedule.previous(tick - timedelta(microseconds=1))


def _range(schedule: Ticks, watermark: datetime, last: datetime | None, reason: TickReason) -> tuple[TickRange, ...]:
    """The range of all ticks in (watermark, last], where `last` is a tick or None; empty if there are none."""
    if last is None or last <= watermark:
        return ()
    first = schedule.next(watermark)
    assert first is not None
    count, exact = schedule.count(watermark, last)
    return (TickRange(min(first, last), last, max(count, 1), exact, reason),)
