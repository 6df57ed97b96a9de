"""A timetable: one or several schedules of one object, the time in which they count, and how late a start may be. Pure.

Where several schedules meet they are one tick, because a tick is an instant. All of them have one zone and one policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Final

from leasedjob.errors import InvalidScheduleError
from leasedjob.schedule import zones
from leasedjob.schedule.evaluation import END, MAX_GAP, ClockChangePolicy, Schedule

MAX_SCHEDULES: Final = 10
"""Schedules of one object."""

MAX_JITTER_SECONDS: Final = 86_400

_INSTANT: Final = timedelta(microseconds=1)
_MILLISECOND: Final = timedelta(milliseconds=1)
_MINUTE: Final = timedelta(minutes=1)
_DAYS: Final = timedelta(days=2)  # more than any zone moves its clocks at once


@dataclass(frozen=True)
class Timetable:
    """All that says which instants are an object's ticks, and when each of them starts.

    Attributes:
        schedules: at least one; all with the same zone, policy and code.
        not_before: no tick is earlier; aware. None: no bound.
        not_after: no tick is later; aware. None: no bound.
        jitter: a tick starts less than this much later, and before the next one; its run key stays the tick.

    It answers as a Schedule does: instants in and out are aware, out in UTC.
    """

    schedules: tuple[Schedule, ...]
    not_before: datetime | None = None
    not_after: datetime | None = None
    jitter: timedelta = timedelta(0)

    @classmethod
    def of(
        cls,
        expressions: Sequence[str],
        time_zone: str = zones.DEFAULT_ZONE,
        *,
        policy: ClockChangePolicy = ClockChangePolicy.RunOnce,
        code: str = "",
        fields: Sequence[str] = (),
        not_before: datetime | None = None,
        not_after: datetime | None = None,
        jitter_seconds: int = 0,
    ) -> Timetable:
        """Read every schedule. `fields` are the resource's fields that they came from; default `schedules[i]`.

        Raises InvalidScheduleError, with `.field` the field at fault.
        """
        named = fields or [f"schedules[{index}]" for index in range(len(expressions))]
        schedules = tuple(
            Schedule.parse(expression, time_zone, policy=policy, code=code, field=field)
            for expression, field in zip(expressions, named, strict=True)
        )
        if not schedules:
            raise InvalidScheduleError("schedules", "needs at least one schedule")
        if jitter_seconds < 0:
            raise InvalidScheduleError("jitterSeconds", f"is {jitter_seconds}, but must be at least 0")
        if not_before is not None and not_after is not None and not_before > not_after:
            raise InvalidScheduleError("notAfter", "is earlier than notBefore")
        return cls(
            schedules,
            None if not_before is None else not_before.astimezone(UTC),
            None if not_after is None else not_after.astimezone(UTC),
            timedelta(seconds=jitter_seconds),
        )

    @property
    def expression(self) -> str:
        """The schedules as they were written, for people."""
        return ", ".join(schedule.expression for schedule in self.schedules)

    @property
    def time_zone(self) -> str:
        return self.schedules[0].time_zone

    @property
    def policy(self) -> ClockChangePolicy:
        return self.schedules[0].policy

    @property
    def code(self) -> str:
        return self.schedules[0].code

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person may not have meant, in words; the timetable is valid all the same."""
        if len(self.schedules) == 1:
            found = list(self.schedules[0].warnings)
        else:
            found = [f'"{s.expression}": {text}' for s in self.schedules for text in s.warnings]
            twice = sorted({s.expression for s in self.schedules if self.schedules.count(s) > 1})
            found += [f'"{expression}" is written more than once' for expression in twice]
        # No refusal: with an H in the schedule it would depend on the code.
        if self.not_before is not None and self.not_after is not None and self.next(self.not_before - _INSTANT) is None:
            found.append("no tick lies between notBefore and notAfter")
        return tuple(found)

    # --- ticks --------------------------------------------------------------------------------------------------------

    def next(self, after: datetime) -> datetime | None:
        """The first tick strictly later than `after`; None if there is none."""
        if self.not_before is not None and after < self.not_before:
            after = self.not_before - _INSTANT
        if len(self.schedules) == 1:
            found = self.schedules[0].next(after)
        else:
            found = min((tick for s in self.schedules if (tick := s.next(after)) is not None), default=None)
        if found is not None and self.not_after is not None and found > self.not_after:
            return None
        return found

    def previous(self, before_or_at: datetime) -> datetime | None:
        """The latest tick at or before `before_or_at`; None if there is none."""
        if self.not_after is not None:
            before_or_at = min(before_or_at, self.not_after)
        if len(self.schedules) == 1:
            found = self.schedules[0].previous(before_or_at)
        else:
            found = max((tick for s in self.schedules if (tick := s.previous(before_or_at)) is not None), default=None)
        if found is not None and self.not_before is not None and found < self.not_before:
            return None
        return found

    def matches(self, instant: datetime) -> bool:
        """Whether `instant` is a tick."""
        return self.previous(instant) == instant

    def preview(self, after: datetime, n: int) -> tuple[datetime, ...]:
        """The first `n` ticks strictly later than `after`, fewer if there are no more."""
        found: list[datetime] = []
        while len(found) < n and (tick := self.next(after)) is not None:
            found.append(tick)
            after = tick
        return tuple(found)

    def count(self, after: datetime, through: datetime) -> tuple[int, bool]:
        """How many ticks are in (after, through], and whether that is exact; as `Schedule.count`."""
        if self.not_before is not None:
            after = max(after, self.not_before - _INSTANT)
        if self.not_after is not None:
            through = min(through, self.not_after)
        if len(self.schedules) == 1 or after >= through:
            return self.schedules[0].count(after, through)
        start = max(after, through - MAX_GAP)
        return self._count(start.astimezone(UTC), min(through.astimezone(UTC), END)), start == after

    def left_out(self, after: datetime, through: datetime) -> tuple[datetime, ...]:
        """The local times (naive) that clock changes in (after, through] skip and that are not run for it."""
        return tuple(sorted({wall for s in self.schedules for wall in s.left_out(after, through)}))

    def _count(self, start: datetime, through: datetime) -> int:
        """Away from clock changes a tick is a local time that any schedule names; around them ticks are looked up.

        Under the policy Kubernetes local times are counted there too, as `Schedule.count` does.
        """
        zone = self.schedules[0].zone
        once = self.policy is ClockChangePolicy.RunOnce
        total = 0
        wall = start.astimezone(zone).replace(tzinfo=None)
        for change in zones.clock_changes(zone, start - _DAYS, through):
            width = abs(change.after - change.before)
            if change.at + (width if once else timedelta(0)) <= start:
                continue
            before = max(start, change.at - (width if once else timedelta(0)) - _MINUTE)
            total += self._count_walls(wall, before.astimezone(zone).replace(tzinfo=None))
            start = before
            if once:
                end = min(through, change.at + width)
                while (tick := self.next(start)) is not None and tick <= end:
                    total, start = total + 1, tick
                start = end
                wall = start.astimezone(zone).replace(tzinfo=None)
            else:
                wall = change.at.replace(tzinfo=None) + change.after - _MINUTE
        return total + self._count_walls(wall, through.astimezone(zone).replace(tzinfo=None))

    def _count_walls(self, after: datetime, through: datetime) -> int:
        """How many local times in (after, through] any schedule names; naive."""
        if after >= through:
            return 0
        total = self._rank(through) - self._rank(after)
        year, month = after.year, after.month
        while (year, month) <= (through.year, through.month):
            first = after.day if (year, month) == (after.year, after.month) else 1
            last = through.day - 1 if (year, month) == (through.year, through.month) else 31
            due = [s.days_due(year, month) for s in self.schedules]
            for day in range(first, last + 1):
                total += self._minutes(sum(1 << index for index, days in enumerate(due) if days >> day & 1)).bit_count()
            year, month = (year + 1, 1) if month == 12 else (year, month + 1)
        return total

    def _rank(self, wall: datetime) -> int:
        """How many local times of its day are named and at or before `wall`."""
        due = sum(
            1 << index for index, s in enumerate(self.schedules) if s.days_due(wall.year, wall.month) >> wall.day & 1
        )
        return (self._minutes(due) & ((2 << (wall.hour * 60 + wall.minute)) - 1)).bit_count()

    def _minutes(self, due: int) -> int:
        """The minutes of a day on which these schedules are due, bit n for the n-th; `due` has a bit per schedule."""
        found = self._by_due.get(due)
        if found is None:
            found = 0
            for index, schedule in enumerate(self.schedules):
                if due >> index & 1:
                    found |= schedule.minutes_due
            self._by_due[due] = found
        return found

    @cached_property
    def _by_due(self) -> dict[int, int]:
        return {}

    # --- starts -------------------------------------------------------------------------------------------------------

    def start_of(self, tick: datetime) -> datetime:
        """When the run of `tick` starts: at the tick, or later by a jitter that follows from code and tick alone.

        Every cluster finds the same instant. Starts keep the order of their ticks: each is before the next tick.
        """
        if not self.jitter:
            return tick
        window = self.jitter
        following = self.next(tick)
        if following is not None:
            window = min(window, following - tick)
        said = f"{self.code}\n{tick.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}\njitter"
        digest = hashlib.sha256(said.encode("utf-8", "surrogatepass")).digest()
        return tick + int.from_bytes(digest[:8], "big") % (window // _MILLISECOND) * _MILLISECOND

    def latest_started(self, now: datetime) -> datetime | None:
        """The latest tick whose start is at or before `now`."""
        tick = self.previous(now)
        if tick is None or not self.jitter or self.start_of(tick) <= now:
            return tick
        return self.previous(tick - _INSTANT)  # it starts before `tick`, which is before `now`

    def ahead(self, now: datetime, n: int) -> tuple[datetime, ...]:
        """The next `n` ticks whose start is later than `now`; the first may be earlier than `now` itself."""
        pending = self.previous(now) if self.jitter else None
        if pending is not None and self.start_of(pending) > now:
            return self.preview(pending - _INSTANT, n)
        return self.preview(now, n)

    def next_start(self, now: datetime) -> datetime | None:
        """The first start strictly later than `now`."""
        if not self.jitter:
            return self.next(now)
        return next((self.start_of(tick) for tick in self.ahead(now, 1)), None)
