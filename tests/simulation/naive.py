"""What a schedule means, said without any of the package's code: every minute of the year is looked at.

Minutes are counted from the epoch, in UTC. A day of a zone is a number too, so that looking is cheap.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from importlib.resources import files
from zoneinfo import ZoneInfo

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY_ZERO = date(1970, 1, 1)
MINUTES = 24 * 60


def minute_of(at: datetime) -> int:
    """The minute that `at` is in."""
    return int((at - EPOCH) // timedelta(minutes=1))


def instant_of(minute: int) -> datetime:
    return EPOCH + timedelta(minutes=minute)


@dataclass(frozen=True)
class Cron:
    """The values of the five fields; None is a star."""

    minutes: frozenset[int]
    hours: frozenset[int] | None = None
    days: frozenset[int] | None = None
    months: frozenset[int] | None = None
    weekdays: frozenset[int] | None = None  # 0 is Sunday

    @property
    def text(self) -> str:
        fields = (self.minutes, self.hours, self.days, self.months, self.weekdays)
        return " ".join("*" if values is None else ",".join(map(str, sorted(values))) for values in fields)

    @property
    def fixed(self) -> bool:
        """Whether it names times of the day, rather than distances in real time."""
        return self.hours is not None and len(self.hours) < 24

    def on(self, day: date) -> bool:
        by_day = self.days is None or day.day in self.days
        by_weekday = self.weekdays is None or day.isoweekday() % 7 in self.weekdays
        both = self.days is not None and self.weekdays is not None
        due = (by_day or by_weekday) if both else (by_day and by_weekday)
        return due and (self.months is None or day.month in self.months)

    def at(self, minute_of_day: int) -> bool:
        hour, minute = divmod(minute_of_day, 60)
        return minute in self.minutes and (self.hours is None or hour in self.hours)


@dataclass(frozen=True)
class Calendar:
    """The local times that a zone's clocks show, minute after minute."""

    first: int
    days: tuple[int, ...]  # number of the local day
    times: tuple[int, ...]  # minute of the local day
    seen_before: frozenset[int]  # minutes that show a local time for the second time
    leaps: dict[int, tuple[tuple[int, int], ...]]  # minute -> (day, time) of the local times that it leaps over


@lru_cache(maxsize=16)
def calendar(zone: str, first: int, last: int) -> Calendar:
    with files("tzdata").joinpath("zoneinfo", *zone.split("/")).open("rb") as stream:
        info = ZoneInfo.from_file(stream)
    days, times, again, leaps = [], [], set(), {}
    reached: int | None = None
    for minute in range(first, last):
        local = instant_of(minute).astimezone(info).replace(tzinfo=None)
        day, time = (local.date() - DAY_ZERO).days, local.hour * 60 + local.minute
        days.append(day)
        times.append(time)
        shown = day * MINUTES + time
        if reached is not None and shown <= reached:
            again.add(minute)
        elif reached is not None and shown > reached + 1:
            leaps[minute] = tuple(divmod(n, MINUTES) for n in range(reached + 1, shown))
        reached = shown if reached is None else max(reached, shown)
    return Calendar(first, tuple(days), tuple(times), frozenset(again), leaps)


@dataclass(frozen=True)
class Table:
    """Schedules of one object, and when they count."""

    crons: tuple[Cron, ...]
    zone: str
    run_once: bool = True
    not_before: int | None = None  # minutes
    not_after: int | None = None
    jitter_seconds: int = 0

    def has(self, year: tuple[int, int], tick: int) -> bool:
        return self.ticks(year, tick - 1, tick) == [tick]

    def ticks(self, year: tuple[int, int], after: int, through: int) -> list[int]:
        """Every minute in (after, through] that is a tick."""
        shown = calendar(self.zone, *year)
        after = max(after, (self.not_before or 0) - 1)
        through = through if self.not_after is None else min(through, self.not_after)
        begin, end = max(0, after + 1 - shown.first), min(len(shown.days), through + 1 - shown.first)
        found: set[int] = set()
        for cron in self.crons:
            on = {day: cron.on(DAY_ZERO + timedelta(days=day)) for day in set(shown.days[begin:end])}
            at = [cron.at(time) for time in range(MINUTES)]
            due = {
                shown.first + index
                for index, (day, time) in enumerate(
                    zip(shown.days[begin:end], shown.times[begin:end], strict=True), begin
                )
                if at[time] and on[day]
            }
            if cron.fixed and self.run_once:
                due -= shown.seen_before
                for minute, leapt in shown.leaps.items():
                    if begin <= minute - shown.first < end and any(
                        cron.at(time) and cron.on(DAY_ZERO + timedelta(days=day)) for day, time in leapt
                    ):
                        due.add(minute)
            found |= due
        return sorted(found)
