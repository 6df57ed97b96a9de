"""The next ticks as people look at them: in any zone, with what clock changes do to them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from leasedjob.schedule import zones
from leasedjob.schedule.evaluation import ClockEffect, Schedule
from leasedjob.schedule.timetable import Timetable
from leasedjob.schedule.zones import ClockChange

_NO_CHANGES: Final[tuple[ClockChange, ...]] = ()


@dataclass(frozen=True, slots=True)
class Upcoming:
    """One tick of a preview.

    Attributes:
        tick: the instant, in UTC: what the run is called after.
        local: the same instant in the zone that was asked for.
        start: when the run starts, in UTC; later than `tick` only with jitter.
        schedules: the expressions that name this tick; more than one where schedules meet.
        effect: what a clock change makes of it; None: nothing.
        wall: with an effect, the local time (naive, in the schedule's own zone) that the schedule names.
        changes: the clock changes of the schedule's own zone since the tick before it, and up to it.
        left_out: the schedule's local times (naive) that those changes skip and that are not run, at most one per
            schedule and change: the first. Only under `clockChangePolicy: Kubernetes`.
    """

    tick: datetime
    local: datetime
    start: datetime
    schedules: tuple[str, ...]
    effect: ClockEffect | None = None
    wall: datetime | None = None
    changes: tuple[ClockChange, ...] = _NO_CHANGES
    left_out: tuple[datetime, ...] = ()


def preview(schedule: Schedule | Timetable, after: datetime, n: int, zone: str | None = None) -> tuple[Upcoming, ...]:
    """The first `n` ticks strictly later than `after`, fewer if there are no more.

    Args:
        after: aware; ValueError if it isn't.
        zone: an IANA name, for `local`; default the schedule's own.

    Raises InvalidScheduleError (field `timeZone`) for a zone that isn't one.
    """
    if after.tzinfo is None:
        raise ValueError(f"a naive datetime names no instant: {after}")
    timetable = schedule if isinstance(schedule, Timetable) else Timetable((schedule,))
    own = timetable.schedules[0].zone
    shown = own if zone is None else zones.load_zone(zone)
    lines: list[Upcoming] = []
    for tick in timetable.preview(after, n):
        named = [s for s in timetable.schedules if s.matches(tick)]
        effect, wall = next((found for s in named if (found := s.clock_effect(tick)) is not None), (None, None))
        lines.append(
            Upcoming(
                tick=tick,
                local=tick.astimezone(shown),
                start=timetable.start_of(tick),
                schedules=tuple(dict.fromkeys(s.expression for s in named)),
                effect=effect,
                wall=wall,
                changes=zones.clock_changes(own, after, tick),
                left_out=timetable.left_out(after, tick),
            )
        )
        after = tick
    return tuple(lines)
