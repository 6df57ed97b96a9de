"""The search that CronJob makes (robfig/cron v3.0.1), for `clockChangePolicy: Kubernetes`. Pure.

CronJob's behaviour at a clock change is what this search happens to do. In most zones that is plain: a skipped local
time is not run and a repeated one is run twice. Where a change touches midnight (Cairo, Beirut), or moves the clock by
half an hour (Lord Howe), the search steps over its own checks: a day is left out, or a time on the wrong day is taken.
Whoever asks for CronJob's behaviour gets that too, so the search is made in the same order here; away from clock
changes it agrees with the plain reading of the fields, which is faster to compute.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from leasedjob.schedule.dialect import Fields
from leasedjob.schedule.zones import clock_changes

_DAY: Final = timedelta(days=1)
_HOUR: Final = timedelta(hours=1)
_SEARCH_YEARS: Final = 5
_MAX_STEPS: Final = 20_000  # five years of days, each with its hours or minutes, take fewer


def undisturbed(zone: ZoneInfo, after: datetime, found: datetime) -> bool:
    """Whether the search from `after` surely meets no clock change that could lead it astray before `found`.

    It steps by days from midnight to midnight, and by hours only on its first and last day.
    """
    for change in clock_changes(zone, after - _DAY, found + _DAY):
        if change.at < after + _DAY or change.at > found - _DAY:
            return False
        moved = abs(change.after - change.before)
        for offset in (change.before, change.after):
            wall = change.at + offset
            since_midnight = timedelta(hours=wall.hour, minutes=wall.minute, seconds=wall.second)
            if since_midnight <= moved or since_midnight >= _DAY - moved:
                return False
    return True


def search(fields: Fields, zone: ZoneInfo, after: datetime) -> datetime | None:
    """robfig's next activation strictly later than `after`.

    None where it finds none within five years, or would go round for ever (a day left out of the calendar, as in Samoa
    in 2011).
    """
    time = _Time(zone, after.astimezone(UTC).replace(microsecond=0) + timedelta(seconds=1))
    last_year = time.wall.year + _SEARCH_YEARS
    # `moved` is set by the first step and stays set: only the first step resets the smaller parts.
    moved = False

    # One round of the outer loop checks every part from the largest to the smallest. A part that wraps round begins a
    # new one; it notices that by the part's value being the first again, which a clock change can hide.
    while time.wall.year <= last_year and time.steps < _MAX_STEPS:
        wrapped = False
        while not fields.months >> time.wall.month & 1 and time.steps < _MAX_STEPS:
            if not moved:
                moved = True
                time.set_wall(time.wall.replace(day=1, hour=0, minute=0, second=0))
            time.add_month()
            if time.wall.month == 1:
                wrapped = True
                break
        if wrapped:
            continue

        while not _day_is_due(fields, time.wall) and time.steps < _MAX_STEPS:
            if not moved:
                moved = True
                time.set_wall(time.wall.replace(hour=0, minute=0, second=0))
            time.set_wall(time.wall + _DAY)
            hour = time.wall.hour
            if hour > 12:
                time.add((24 - hour) * _HOUR)
            elif hour:
                time.add(-hour * _HOUR)
            if time.wall.day == 1:
                wrapped = True
                break
        if wrapped:
            continue

        while not fields.hours >> time.wall.hour & 1:
            if not moved:
                moved = True
                time.set_wall(time.wall.replace(minute=0, second=0))
            time.add(_HOUR)
            if time.wall.hour == 0:
                wrapped = True
                break
        if wrapped:
            continue

        while not fields.minutes >> time.wall.minute & 1:
            if not moved:
                moved = True
                time.add(-timedelta(seconds=time.utc.second))
            time.add(timedelta(minutes=1))
            if time.wall.minute == 0:
                wrapped = True
                break
        if wrapped:
            continue

        if time.wall.second:
            moved = True
            time.add(timedelta(seconds=60 - time.wall.second))
            continue  # the second has come round to 0

        return time.utc if time.steps < _MAX_STEPS else None
    return None


class _Time:
    """A point in time that can be set by its local reading, as Go's time package does it."""

    __slots__ = ("steps", "utc", "wall", "zone")

    def __init__(self, zone: ZoneInfo, utc: datetime) -> None:
        self.zone = zone
        self.steps = 0
        self._set(utc)

    def _set(self, utc: datetime) -> None:
        self.steps += 1
        self.utc = utc
        self.wall = utc.astimezone(self.zone).replace(tzinfo=None, fold=0)

    def add(self, duration: timedelta) -> None:
        """Go on by real time."""
        self._set(self.utc + duration)

    def set_wall(self, wall: datetime) -> None:
        """Go to a local time. As in Go, the offset that holds at the same reading of UTC is the first guess."""
        as_utc = wall.replace(tzinfo=UTC)
        guess = self._offset(as_utc)
        self._set(as_utc - self._offset(as_utc - guess))

    def add_month(self) -> None:
        """The same local reading a month later, an overlong day flowing over into the month after."""
        wall = self.wall
        year, month = (wall.year + 1, 1) if wall.month == 12 else (wall.year, wall.month + 1)
        self.set_wall(wall.replace(year=year, month=month, day=1) + timedelta(days=wall.day - 1))

    def _offset(self, utc: datetime) -> timedelta:
        offset = utc.astimezone(self.zone).utcoffset()
        assert offset is not None
        return offset


def _day_is_due(fields: Fields, wall: datetime) -> bool:
    by_date = fields.days >> wall.day & 1
    by_weekday = fields.weekdays >> (wall.isoweekday() % 7) & 1
    return bool(by_date | by_weekday if fields.either_day else by_date & by_weekday)
