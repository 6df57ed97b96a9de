"""A schedule: which instants are its ticks. Pure.

The search runs over bit sets in local wall time (month, day, hour, minute), which has no clock changes, and only its
answer is mapped to UTC:

    wall time that occurs once       -> that instant
    wall time that occurs twice      -> RunOnce, fixed time: the first; else both
    wall time that is skipped        -> RunOnce, fixed time: the first instant after the gap; else none

For a fixed-time schedule that map never goes backwards, so the next tick is the image of the next wall time. A schedule
in real time has the two passes of a repeated hour to look at. `ClockChangePolicy.Kubernetes` is robfig/cron's search
itself, see `kubernetes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from leasedjob.schedule import kubernetes, zones
from leasedjob.schedule.dialect import Fields, parse_fields

_MINUTE: Final = timedelta(minutes=1)
_DAY: Final = timedelta(days=1)
_FIRST_YEAR: Final = 2  # a year of room at both ends of what datetime can hold
_LAST_YEAR: Final = 9998
MAX_GAP: Final = timedelta(days=20_000)  # the longest gap that is counted; more than 54 years
END: Final = datetime(_LAST_YEAR, 12, 31, tzinfo=UTC)
_LENGTHS: Final = (0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_EVERY_SEVENTH: Final = sum(1 << n for n in range(0, 35, 7))


class ClockChangePolicy(StrEnum):
    """What a fixed-time schedule does when a clock change skips or repeats its local time."""

    RunOnce = "RunOnce"  # runs exactly once: first instant after the gap, first of two occurrences
    Kubernetes = "Kubernetes"  # as CronJob does: a skipped time is not run, a repeated one is run twice


class ClockEffect(StrEnum):
    """What a clock change makes of a tick."""

    MovedAfterGap = "MovedAfterGap"  # RunOnce: its local time is skipped, it runs at the first instant after the gap
    FirstOfRepeated = "FirstOfRepeated"  # RunOnce: its local time comes twice, it runs at the first occurrence only
    Doubled = "Doubled"  # Kubernetes: one of the two runs of a local time that comes twice
    Displaced = "Displaced"  # Kubernetes: CronJob's search comes to a time that the schedule doesn't name


@dataclass(frozen=True, slots=True)
class Schedule:
    """A parsed schedule in its zone. Equal if all that was written is equal.

    Every instant that goes in or comes out is aware; what comes out is in UTC and has no seconds.
    """

    expression: str
    time_zone: str
    policy: ClockChangePolicy
    code: str
    fields: Fields = field(repr=False, compare=False)
    _zone: ZoneInfo = field(repr=False, compare=False)
    # By the weekday of a month's first (0 is Monday): the days that the weekday field names, bit n for day n.
    _weekdays: tuple[int, ...] = field(repr=False, compare=False)

    @classmethod
    def parse(
        cls,
        expression: str,
        time_zone: str = zones.DEFAULT_ZONE,
        *,
        policy: ClockChangePolicy = ClockChangePolicy.RunOnce,
        code: str = "",
        field: str = "schedule",
    ) -> Schedule:
        """Read a schedule by the dialect of docs/decisions/0004-cron-dialect.md.

        `time_zone` is an IANA name. `code` is the job's code, which `H` is a hash of. `field` is the resource's field
        that the expression came from, for messages.

        Raises InvalidScheduleError, with `.field` the field at fault (`field` or `timeZone`).
        """
        fields = parse_fields(expression, code=code, field=field)
        zone = zones.load_zone(time_zone)
        return cls(
            expression, time_zone, ClockChangePolicy(policy), code, fields, zone, _days_of_weekdays(fields.weekdays)
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person may not have meant, in words; the schedule is valid all the same."""
        if self.fields.either_day:
            return ("day of month and day of week are both restricted: a day is due when either matches",)
        return ()

    def next(self, after: datetime) -> datetime | None:
        """The first tick strictly later than `after`; None if there is none before the year 9999.

        Raises ValueError if `after` is naive, as the other methods do.
        """
        after = _utc(after)
        if after.year > _LAST_YEAR:
            return None
        if self.policy is ClockChangePolicy.Kubernetes:
            return self._next_kubernetes(after)
        return self._next_real_time(after) if self.fields.real_time else self._next_once(after)

    def previous(self, before_or_at: datetime) -> datetime | None:
        """The latest tick at or before `before_or_at`; None if there is none."""
        before_or_at = min(_utc(before_or_at), END)
        if before_or_at.year <= _FIRST_YEAR:
            return None
        if self.policy is ClockChangePolicy.RunOnce and not self.fields.real_time:
            return self._previous_once(before_or_at)
        found = self._previous_real_time(before_or_at)
        if self.policy is ClockChangePolicy.Kubernetes:
            # after a clock change robfig's search may come to instants that its fields don't name
            while found is not None and (later := self._next_kubernetes(found)) is not None and later <= before_or_at:
                found = later
        return found

    def matches(self, instant: datetime) -> bool:
        """Whether `instant` is a tick."""
        return self.previous(instant) == instant

    def preview(self, after: datetime, n: int) -> tuple[datetime, ...]:
        """The first `n` ticks strictly later than `after`, fewer if there are no more."""
        found: list[datetime] = []
        tick = self.next(after)
        while tick is not None and len(found) < n:
            found.append(tick)
            tick = self.next(tick)
        return tuple(found)

    def count(self, after: datetime, through: datetime) -> tuple[int, bool]:
        """How many ticks are in (after, through], and whether that is exact.

        It is arithmetic on the bit sets, so it takes time by the months in between and not by the ticks. Of more than
        20,000 days only the last ones are counted, and the number is "at least". Under the policy Kubernetes the ticks
        are counted by their fields, without what CronJob's search makes of a clock change at midnight.
        """
        after, through = _utc(after), min(_utc(through), END)
        start = max(after, through - MAX_GAP)
        if start >= through:
            return 0, True
        once = self.policy is ClockChangePolicy.RunOnce and not self.fields.real_time
        total = self._count_once(start, through) if once else self._count_real_time(start, through)
        return total, start == after

    def left_out(self, after: datetime, through: datetime) -> tuple[datetime, ...]:
        """The local times (naive) that the clock changes in (after, through] skip and that are not run for it.

        Only under the policy Kubernetes and for fixed times, so that such a skip can be shown; at most one per change,
        the first.
        """
        if self.policy is not ClockChangePolicy.Kubernetes or self.fields.real_time:
            return ()
        found: list[datetime] = []
        for change in zones.clock_changes(self._zone, _utc(after), min(_utc(through), END)):
            at = change.at.replace(tzinfo=None)
            wall = self._wall_after(at + change.before - _MINUTE)
            if wall is not None and wall < at + change.after:
                found.append(wall)
        return tuple(found)

    @property
    def zone(self) -> ZoneInfo:
        return self._zone

    def days_due(self, year: int, month: int) -> int:
        """The days of a month that the fields name, bit n for day n."""
        return self._days(year, month) if self.fields.months >> month & 1 else 0

    @property
    def minutes_due(self) -> int:
        """The minutes of a day that the fields name, bit n for the n-th minute."""
        return sum(self.fields.minutes << 60 * hour for hour in range(24) if self.fields.hours >> hour & 1)

    def clock_effect(self, tick: datetime) -> tuple[ClockEffect, datetime] | None:
        """What a clock change has made of this tick, with the local time (naive) that the schedule names for it.

        None where clocks change nothing, or the schedule follows real time.
        """
        tick = _utc(tick)
        local = tick.astimezone(self._zone)
        wall = local.replace(tzinfo=None, fold=0)
        once = self.policy is ClockChangePolicy.RunOnce
        if not once and self._wall_at_or_before(wall) != wall:
            return ClockEffect.Displaced, wall
        if self.fields.real_time:
            return None
        offsets = zones.offsets_of(self._zone, wall)
        if offsets[0] > offsets[1]:
            return (ClockEffect.FirstOfRepeated if once else ClockEffect.Doubled), wall
        before = zones.offset_at(self._zone, tick - timedelta(seconds=1))
        if once and before < offsets[0]:
            skipped = self._wall_after(tick.replace(tzinfo=None) + before - _MINUTE)
            if skipped is not None and skipped < wall:
                return ClockEffect.MovedAfterGap, skipped
        return None

    def start_of(self, tick: datetime) -> datetime:
        """When the run of `tick` starts: at the tick. A timetable may say otherwise."""
        return tick

    def latest_started(self, now: datetime) -> datetime | None:
        """The latest tick whose start is at or before `now`."""
        return self.previous(now)

    # --- ticks by wall time -------------------------------------------------------------------------------------------

    def _next_once(self, after: datetime) -> datetime | None:
        wall = self._wall_after(self._reached(after))
        return None if wall is None else self._once(wall)

    def _previous_once(self, at: datetime) -> datetime | None:
        wall = self._wall_at_or_before(self._reached(at))
        return None if wall is None else self._once(wall)

    def _reached(self, instant: datetime) -> datetime:
        """The latest wall time that the zone's clocks have shown by `instant`; they may show an earlier one now."""
        local = instant.astimezone(self._zone)
        wall = local.replace(tzinfo=None, second=0, microsecond=0, fold=0)
        if local.fold:
            offsets = zones.offsets_of(self._zone, wall)
            return zones.change_at_wall(self._zone, wall, offsets) + offsets[0] - _MINUTE
        return wall

    def _once(self, wall: datetime) -> datetime:
        offsets = zones.offsets_of(self._zone, wall)
        if offsets[0] < offsets[1]:
            return zones.change_at_wall(self._zone, wall, offsets).replace(tzinfo=UTC)
        return (wall - offsets[0]).replace(tzinfo=UTC)

    def _next_real_time(self, after: datetime) -> datetime | None:
        wall = after.astimezone(self._zone).replace(tzinfo=None, second=0, microsecond=0, fold=0)
        found = self._first_shown(wall, after)
        offsets = zones.offsets_of(self._zone, wall)
        if offsets[0] > offsets[1]:
            # within a repeated hour: its second pass shows earlier wall times again
            change = zones.change_at_wall(self._zone, wall, offsets)
            change_utc = change.replace(tzinfo=UTC)
            if after < change_utc and (found is None or found >= change_utc):
                found = self._first_shown(change + offsets[1] - _MINUTE, change_utc - _MINUTE)
        return found

    def _first_shown(self, wall: datetime, after: datetime) -> datetime | None:
        """The first instant later than `after` at which a matching wall time later than `wall` is shown."""
        candidate = self._wall_after(wall)
        while candidate is not None:
            first, second = zones.offsets_of(self._zone, candidate)
            if first < second:  # skipped
                end = zones.change_at_wall(self._zone, candidate, (first, second)) + second
                candidate = self._wall_after(end - _MINUTE)
                continue
            instant = (candidate - first).replace(tzinfo=UTC)
            return instant if instant > after else (candidate - second).replace(tzinfo=UTC)
        return None

    def _previous_real_time(self, at: datetime) -> datetime | None:
        wall = at.astimezone(self._zone).replace(tzinfo=None, second=0, microsecond=0, fold=0)
        found = self._last_shown(wall, at)
        offsets = zones.offsets_of(self._zone, wall)
        if offsets[0] > offsets[1]:
            change = zones.change_at_wall(self._zone, wall, offsets)
            change_utc = change.replace(tzinfo=UTC)
            if at >= change_utc and (found is None or found < change_utc):
                found = self._last_shown(change + offsets[0] - _MINUTE, change_utc - _MINUTE)
        return found

    def _last_shown(self, wall: datetime, at: datetime) -> datetime | None:
        """The last instant at or before `at` at which a matching wall time not later than `wall` is shown."""
        candidate = self._wall_at_or_before(wall)
        while candidate is not None:
            first, second = zones.offsets_of(self._zone, candidate)
            if first < second:  # skipped
                start = zones.change_at_wall(self._zone, candidate, (first, second)) + first
                candidate = self._wall_at_or_before(start - _MINUTE)
                continue
            instant = (candidate - second).replace(tzinfo=UTC)
            return instant if instant <= at else (candidate - first).replace(tzinfo=UTC)
        return None

    def _next_kubernetes(self, after: datetime) -> datetime | None:
        ideal = self._next_real_time(after)
        if ideal is None or kubernetes.undisturbed(self._zone, after, ideal):
            return ideal
        found = kubernetes.search(self.fields, self._zone, after)
        # robfig gives up after five years; a rare date is due all the same
        return ideal if found is None else found

    # --- counting -----------------------------------------------------------------------------------------------------

    def _count_once(self, after: datetime, through: datetime) -> int:
        total = self._count_walls(self._reached(after), self._reached(through))
        for change in zones.clock_changes(self._zone, after, through):
            if change.skips:
                # the skipped times are one tick, and that is also the first time after the gap if it is due itself
                at = change.at.replace(tzinfo=None)
                skipped = self._count_walls(at + change.before - _MINUTE, at + change.after - _MINUTE)
                if skipped:
                    total -= self._count_walls(at + change.before - _MINUTE, at + change.after) - 1
        return total

    def _count_real_time(self, after: datetime, through: datetime) -> int:
        total = 0
        wall = after.astimezone(self._zone).replace(tzinfo=None)
        for change in zones.clock_changes(self._zone, after, through):
            at = change.at.replace(tzinfo=None)
            total += self._count_walls(wall, at + change.before - _MINUTE)
            wall = at + change.after - _MINUTE
        return total + self._count_walls(wall, through.astimezone(self._zone).replace(tzinfo=None))

    def _count_walls(self, after: datetime, through: datetime) -> int:
        """How many matching wall times are in (after, through]."""
        return max(0, self._rank(through) - self._rank(after) + self._count_days(after, through) * self._per_day)

    @property
    def _per_day(self) -> int:
        return self.fields.minutes.bit_count() * self.fields.hours.bit_count()

    def _rank(self, wall: datetime) -> int:
        """How many matching wall times of its day are at or before `wall`."""
        fields = self.fields
        if not (fields.months >> wall.month & 1 and self._days(wall.year, wall.month) >> wall.day & 1):
            return 0
        rank = (fields.hours & ((1 << wall.hour) - 1)).bit_count() * fields.minutes.bit_count()
        if fields.hours >> wall.hour & 1:
            rank += (fields.minutes & ((2 << wall.minute) - 1)).bit_count()
        return rank

    def _count_days(self, first: datetime, last: datetime) -> int:
        """How many days from that of `first` up to, without, that of `last` are due."""
        total = 0
        year, month = first.year, first.month
        while (year, month) <= (last.year, last.month):
            if self.fields.months >> month & 1:
                days = self._days(year, month)
                if (year, month) == (last.year, last.month):
                    days &= (1 << last.day) - 1
                if (year, month) == (first.year, first.month):
                    days = days >> first.day << first.day
                total += days.bit_count()
            year, month = (year + 1, 1) if month == 12 else (year, month + 1)
        return total

    # --- the search in wall time --------------------------------------------------------------------------------------

    def _days(self, year: int, month: int) -> int:
        """The days of a month that are due, bit n for day n."""
        fields = self.fields
        by_weekday = self._weekdays[date(year, month, 1).weekday()]
        days = fields.days | by_weekday if fields.either_day else fields.days & by_weekday
        length = _LENGTHS[month]
        if month == 2 and year % 4 == 0 and (year % 100 != 0 or year % 400 == 0):
            length = 29
        return days & ((2 << length) - 2)

    def _wall_after(self, wall: datetime) -> datetime | None:
        """The first matching wall time strictly later than `wall` (naive, whole minute)."""
        fields = self.fields
        year, month, day, hour, minute = wall.year, wall.month, wall.day, wall.hour, wall.minute
        if fields.months >> month & 1:
            days = self._days(year, month)
            if days >> day & 1:
                if fields.hours >> hour & 1 and (minutes := fields.minutes >> (minute + 1)):
                    return _wall(year, month, day, hour, minute + 1 + _lowest(minutes))
                if hours := fields.hours >> (hour + 1):
                    return _wall(year, month, day, hour + 1 + _lowest(hours), _lowest(fields.minutes))
            days = days >> (day + 1) << (day + 1)
        else:
            days = 0
        while not days:
            month += 1
            if month > 12:
                year, month = year + 1, 1
                if year > _LAST_YEAR:
                    return None
            if fields.months >> month & 1:
                days = self._days(year, month)
        return _wall(year, month, _lowest(days), _lowest(fields.hours), _lowest(fields.minutes))

    def _wall_at_or_before(self, wall: datetime) -> datetime | None:
        """The last matching wall time at or before `wall` (naive, whole minute)."""
        fields = self.fields
        year, month, day, hour, minute = wall.year, wall.month, wall.day, wall.hour, wall.minute
        if fields.months >> month & 1:
            days = self._days(year, month)
            if days >> day & 1:
                if fields.hours >> hour & 1 and (minutes := fields.minutes & ((2 << minute) - 1)):
                    return _wall(year, month, day, hour, _highest(minutes))
                if hours := fields.hours & ((1 << hour) - 1):
                    return _wall(year, month, day, _highest(hours), _highest(fields.minutes))
            days &= (1 << day) - 1
        else:
            days = 0
        while not days:
            month -= 1
            if month < 1:
                year, month = year - 1, 12
                if year < _FIRST_YEAR:
                    return None
            if fields.months >> month & 1:
                days = self._days(year, month)
        return _wall(year, month, _highest(days), _highest(fields.hours), _highest(fields.minutes))


def _utc(instant: datetime) -> datetime:
    if instant.tzinfo is None:
        raise ValueError(f"a naive datetime names no instant: {instant}")
    return instant.astimezone(UTC)


def _wall(year: int, month: int, day: int, hour: int, minute: int) -> datetime:
    return datetime(year, month, day, hour, minute)  # noqa: DTZ001 - local time is naive until it is mapped


@lru_cache(maxsize=128)
def _days_of_weekdays(weekdays: int) -> tuple[int, ...]:
    """For each weekday of a month's first (0 is Monday): bit n for each day n that falls on one of `weekdays`."""
    months: list[int] = []
    for first in range(7):
        days = 0
        for weekday in range(7):  # 0 is Sunday, as in the field
            if weekdays >> weekday & 1:
                days |= _EVERY_SEVENTH << (1 + (weekday - 1 - first) % 7)
        months.append(days & ((1 << 32) - 2))
    return tuple(months)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _highest(bits: int) -> int:
    return bits.bit_length() - 1
