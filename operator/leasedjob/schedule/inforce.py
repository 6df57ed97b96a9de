"""Which ticks a code has: those of every schedule that was in force, each as long as it was. Pure.

Several clusters may have one code with different schedules: as long as an edit takes to reach all of them, or longer. A
tick is due if it is one of a schedule that was in force then, anywhere; where schedules meet it is one tick. Whatever
passes ticks counts them here, so that each is in one range, whoever's schedule it was of.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

from leasedjob.errors import InvalidScheduleError
from leasedjob.schedule.due import DueTicks, TickRange, TickReason, passed_over
from leasedjob.schedule.evaluation import ClockChangePolicy, Schedule
from leasedjob.schedule.timetable import Timetable

MAX_LOOKED_UP: Final = 50_000
"""Ticks of schedules in different zones that are compared one by one; beyond that a count is a least one."""

_INSTANT: Final = timedelta(microseconds=1)


def written(timetable: Timetable | None) -> str:
    """All that decides which instants are ticks, as text that `read` understands. None: no ticks at all."""
    if timetable is None:
        return '{"schedules":[]}'
    text: dict[str, Any] = {
        "schedules": [s.expression for s in timetable.schedules],
        "timeZone": timetable.time_zone,
        "clockChangePolicy": timetable.policy.value,
    }
    if timetable.not_before is not None:
        text["notBefore"] = timetable.not_before.isoformat()
    if timetable.not_after is not None:
        text["notAfter"] = timetable.not_after.isoformat()
    return json.dumps(text, separators=(",", ":"))


@lru_cache(maxsize=4096)
def read(text: str, code: str) -> Timetable | None:
    """What `written` has written. None: no ticks.

    Raises ValueError for what this version, or its time zones, can't read.
    """
    try:
        said = json.loads(text)
        if not said["schedules"]:
            return None
        if unknown := said.keys() - {"schedules", "timeZone", "clockChangePolicy", "notBefore", "notAfter"}:
            raise ValueError(f"not known: {sorted(unknown)}")
        return Timetable.of(
            said["schedules"],
            said["timeZone"],
            policy=ClockChangePolicy(said["clockChangePolicy"]),
            code=code,
            not_before=_instant(said.get("notBefore")),
            not_after=_instant(said.get("notAfter")),
        )
    except (InvalidScheduleError, KeyError, TypeError) as e:
        raise ValueError(str(e)) from e


def _instant(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


@dataclass(frozen=True, slots=True)
class InForce:
    """A schedule of a code, and for how long: its ticks in (since, until] count.

    Attributes:
        key: its hash, as clusters register it.
        known: False: nobody knows any more what its ticks were.
        ticks: None: none (or not known).
        until: None: it is in force.
    """

    key: str
    known: bool
    ticks: Timetable | None
    since: datetime
    until: datetime | None = None

    @classmethod
    def of(cls, key: str, text: str | None, code: str, since: datetime, until: datetime | None) -> InForce:
        """From its text, which may be missing, or more than this version can read."""
        if text is not None:
            try:
                return cls(key, True, read(text, code), since, until)
            except ValueError:
                pass
        return cls(key, False, None, since, until)

    def next(self, after: datetime) -> datetime | None:
        found = None if self.ticks is None else self.ticks.next(max(after, self.since))
        return None if found is None or (self.until is not None and found > self.until) else found

    def previous(self, before_or_at: datetime) -> datetime | None:
        at = before_or_at if self.until is None else min(before_or_at, self.until)
        found = None if self.ticks is None else self.ticks.previous(at)
        return None if found is None or found <= self.since else found

    def has(self, instant: datetime) -> bool:
        """Whether `instant` is a tick of it, and counts."""
        return self.previous(instant) == instant

    def overlaps(self, after: datetime, through: datetime) -> bool:
        """Whether any of (after, through] is in its time."""
        return self.since < through and (self.until is None or self.until > after)

    def _cuts(self) -> Iterable[datetime]:
        yield self.since
        if self.until is not None:
            yield self.until
        if self.ticks is not None and self.ticks.not_before is not None:
            yield self.ticks.not_before - _INSTANT
        if self.ticks is not None and self.ticks.not_after is not None:
            yield self.ticks.not_after


@dataclass(frozen=True, slots=True)
class CodeTicks:
    """All ticks of a code. It answers as a Timetable does, but for jitter."""

    schedules: tuple[InForce, ...]

    @classmethod
    def after(cls, watermark: datetime, schedules: Sequence[InForce]) -> CodeTicks:
        """Those that the watermark has not passed. It says from when ticks count: where nothing was in force at it,
        what came first counts from it on."""
        first = min((s.since for s in schedules), default=watermark)
        if first > watermark:
            schedules = [replace(s, since=watermark) if s.since == first else s for s in schedules]
        return cls(tuple(schedules))

    def next(self, after: datetime) -> datetime | None:
        return min((t for s in self.schedules if (t := s.next(after)) is not None), default=None)

    def previous(self, before_or_at: datetime) -> datetime | None:
        return max((t for s in self.schedules if (t := s.previous(before_or_at)) is not None), default=None)

    def count(self, after: datetime, through: datetime) -> tuple[int, bool]:
        """How many ticks are in (after, through], and whether that is exact: not if a schedule is unknown."""
        if after >= through:
            return 0, True
        inner = {cut for s in self.schedules for cut in s._cuts() if after < cut < through}
        total, exact = 0, True
        for low, high in pairwise(sorted({after, through, *inner})):
            there = [s for s in self.schedules if s.overlaps(low, high)]
            exact &= all(s.known for s in there)
            found, sure = _count_together(tuple(s.ticks for s in there if s.ticks is not None), low, high)
            total, exact = total + found, exact and sure
        return total, exact

    def start_of(self, tick: datetime) -> datetime:
        return tick

    def latest_started(self, now: datetime) -> datetime | None:
        return self.previous(now)

    def since(self, key: str, watermark: datetime) -> datetime:
        """From when ticks of the schedule with this hash count, if it is in force: those that are later."""
        return max([watermark, *(s.since for s in self.schedules if s.key == key and s.until is None)])

    def elsewhere(self, tick: datetime, key: str) -> bool:
        """Whether it is a tick of a schedule that is in force, and that isn't the one with this hash."""
        return any(s.until is None and s.key != key and s.has(tick) for s in self.schedules)

    # --- what is passed -----------------------------------------------------------------------------------------------

    def widened(self, due: DueTicks, watermark: datetime, key: str) -> tuple[tuple[TickRange, ...], ...]:
        """What each claim of `due` passes; what is recorded, if there is none.

        `due` is of one schedule, the one with this hash. Ticks of other schedules that lie in one of its ranges share
        its fate. Those between its ticks are passed because it goes on: it has no business with them.
        """
        if len(self.schedules) == 1 and self.schedules[0].key == key:
            return (due.dropped, *(() for _ in due.claims[1:]))
        ranges: list[TickRange] = []
        start = watermark
        for r in due.dropped:
            ranges += passed_over(self, start, r.last, r.reason)
            start = max(start, r.last)
        if not due.claims:
            return (tuple(ranges),)
        found: list[tuple[TickRange, ...]] = []
        for tick in due.claims:
            found.append((*ranges, *self._between(start, tick, key)))
            ranges, start = [], tick
        return tuple(found)

    def left(self, watermark: datetime, now: datetime, key: str) -> tuple[TickRange, ...]:
        """Ticks of schedules that were, and that nothing has passed yet: those before the next tick of the one with
        this hash. Nothing as long as others are in force, whose cluster may be about to claim one."""
        if any(s.until is None and s.key != key for s in self.schedules) or all(
            s.until is None for s in self.schedules
        ):
            return ()
        following = min((t for s in self.schedules if s.until is None and (t := s.next(watermark))), default=None)
        limit = now if following is None or following > now else following - _INSTANT
        return passed_over(self, watermark, limit, TickReason.ScheduleEdited)

    def _between(self, after: datetime, tick: datetime, key: str) -> tuple[TickRange, ...]:
        before = tick - _INSTANT
        if after >= before:
            return ()
        there = [s for s in self.schedules if s.key != key and s.until is None]
        differ = any((first := s.next(after)) is not None and first <= before for s in there)
        reason = TickReason.SpecDiffers if differ else TickReason.ScheduleEdited
        return passed_over(self, after, before, reason)


@lru_cache(maxsize=1024)
def _merged(schedules: tuple[Schedule, ...]) -> Timetable:
    return Timetable(schedules)


def _count_together(timetables: Sequence[Timetable], after: datetime, through: datetime) -> tuple[int, bool]:
    """How many ticks in (after, through] any of these has; bounds are the caller's concern, and hold throughout."""
    by_zone: dict[tuple[str, ClockChangePolicy], dict[Schedule, None]] = {}
    for t in timetables:
        if (t.not_before is None or t.not_before <= through) and (t.not_after is None or t.not_after > after):
            by_zone.setdefault((t.time_zone, t.policy), {}).update(dict.fromkeys(t.schedules))
    together = [_merged(tuple(schedules)) for schedules in by_zone.values()]
    counted = sorted(((t.count(after, through), t) for t in together), key=lambda c: c[0][0], reverse=True)
    if not counted:
        return 0, True
    total, exact = counted[0][0]
    for place, ((ticks, sure), one) in enumerate(counted[1:], 1):
        if ticks > MAX_LOOKED_UP:
            return total, False
        exact &= sure
        at = one.next(after)
        while at is not None and at <= through:
            total += not any(other.matches(at) for _, other in counted[:place])
            at = one.next(at)
    return total, exact
