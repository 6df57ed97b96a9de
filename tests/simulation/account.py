"""Whether every tick of a simulated history is accounted for exactly once, and whether anything ran at a wrong instant.

It is told what was put into force and when, what was started and when, and what the store has in the end. What is due
follows from `naive` alone. It knows nothing of how anything was decided.

What is due: a tick of a schedule that is in force at its time, in any cluster. In force are the schedules of clusters
where the object is registered and not suspended; where it is suspended in all of them, theirs. Where schedules meet it
is one tick. Nothing is left open.
"""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from leasedjob.schedule import TickReason
from tests.simulation.naive import Table, instant_of, minute_of
from tests.simulation.store import Store
from tests.simulation.world import History, Spec

ON_TIME = timedelta(seconds=60)  # for missedRunPolicy Skip
MINUTE = timedelta(minutes=1)


@dataclass
class Account:
    """What was found."""

    ticks: int = 0  # due, and to be accounted for
    runs: int = 0
    in_ranges: int = 0
    differed: int = 0  # of which: due while the clusters' schedules differed
    ranges: Counter[str] = field(default_factory=Counter)  # by reason
    problems: list[str] = field(default_factory=list)

    def __iadd__(self, other: Account) -> Account:
        self.ticks += other.ticks
        self.runs += other.runs
        self.in_ranges += other.in_ranges
        self.differed += other.differed
        self.ranges += other.ranges
        self.problems += other.problems
        return self


@dataclass
class InForce:
    """(since, until] in minutes."""

    table: Table
    since: int
    until: int | None = None


def same_ticks(table: Table) -> Table:
    return replace(table, jitter_seconds=0)


def in_force(history: History) -> list[InForce]:
    """Which schedules were in force when."""
    found: list[InForce] = []
    specs: dict[str, Spec] = {}
    for entry in history.registered:
        if entry.spec is None:
            specs.pop(entry.cluster, None)
        else:
            specs[entry.cluster] = entry.spec
        active = [spec for spec in specs.values() if not spec.suspend] or list(specs.values())
        wanted = {same_ticks(spec.table) for spec in active}
        there = [one for one in found if one.until is None]
        for one in there:
            if one.table not in wanted:
                one.until = max(one.since, minute_of(entry.at))
        found += [InForce(table, minute_of(entry.at)) for table in wanted - {one.table for one in there}]
    return found


def delay(code: str, tick: int, following: int | None, jitter_seconds: int) -> timedelta:
    """docs/decisions/0004: a hash of code and tick, within the smaller of jitter and distance to the next tick."""
    window = jitter_seconds * 1000
    if following is not None:
        window = min(window, (following - tick) * 60_000)
    if not window:
        return timedelta(0)
    text = f"{code}\n{instant_of(tick):%Y-%m-%dT%H:%M:%SZ}\njitter"
    return timedelta(milliseconds=int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) % window)


def account(
    code: str, history: History, store: Store, year: tuple[int, int], end: datetime, late: timedelta
) -> Account:
    """Args:
    year: the first and the last minute that are simulated.
    late: how much before the end everything has to be decided.
    """
    found = Account()
    say = lambda text: found.problems.append(f"{code}: {text}")  # noqa: E731
    schedules = in_force(history)
    times: Counter[int] = Counter()
    for one in schedules:
        ticks = one.table.ticks(year, one.since, minute_of(end) if one.until is None else one.until)
        times.update(ticks)
    due = sorted(times)
    watermark = minute_of(store.watermark(code))
    last = minute_of(end - late)
    if undecided := [tick for tick in due if watermark < tick <= last]:
        say(f"{len(undecided)} ticks were never decided, the first at {instant_of(undecided[0])}")
    strict = due[: bisect_right(due, watermark)]

    runs: dict[int, int] = Counter(minute_of(row.tick) for row in store.all_rows(code) if row.tick is not None)
    ranges = sorted(store.ledger(code), key=lambda r: r.first)
    for one, two in itertools.pairwise(ranges):
        if one.last >= two.first:
            say(f"ranges overlap: {one} and {two}")
    for r in ranges:
        first, through = minute_of(r.first), minute_of(r.last)
        inside = strict[bisect_left(strict, first) : bisect_right(strict, through)]
        if not r.exact or len(inside) != r.count:
            say(f"{r} holds {len(inside)} ticks")
        found.in_ranges += len(inside)
        found.ranges[r.reason] += r.count
        if doubly := [tick for tick in inside if runs.get(tick)]:
            say(f"{len(doubly)} ticks are in {r} and have a run, the first at {instant_of(doubly[0])}")
    starts = [minute_of(r.first) for r in ranges]
    for tick in strict:
        place = bisect_right(starts, tick) - 1
        in_range = place >= 0 and tick <= minute_of(ranges[place].last)
        if not in_range and runs.get(tick, 0) != 1:
            say(f"{instant_of(tick)} has {runs.get(tick, 0)} runs and is in no range")
    found.ticks, found.runs = len(strict), len(runs)
    found.differed = _differed(schedules, strict)
    if wrong := sorted(runs.keys() - times.keys()):
        say(f"{len(wrong)} runs of ticks that were not due, the first at {instant_of(wrong[0])}")

    for at, r in history.passed:
        ends = (r.first, r.last) if r.reason is TickReason.ScheduleEdited else ()
        if any(_still(one, year, tick, at) for one in schedules for tick in ends):
            say(f"{r} was said at {at}, when the schedule had not been edited")
    _started(code, history, year, say, set(runs))
    return found


def _still(one: InForce, year: tuple[int, int], tick: datetime, at: datetime) -> bool:
    """Whether it was a tick of a schedule that is in force at this time, and for longer."""
    if one.since >= min(minute_of(tick), minute_of(at)) or (one.until is not None and one.until <= minute_of(at)):
        return False
    return one.table.has(year, minute_of(tick))


def _differed(schedules: list[InForce], due: list[int]) -> int:
    """How many ticks were due while more than one schedule was in force."""
    changes = sorted([(s.since, 1) for s in schedules] + [(s.until, -1) for s in schedules if s.until is not None])
    many, began, total = 0, 0, 0
    for at, change in changes:
        if many > 1:
            total += bisect_right(due, at) - bisect_right(due, began)
        many, began = many + change, at
    return total + (len(due) - bisect_right(due, began) if many > 1 else 0)


def _started(code: str, history: History, year: tuple[int, int], say: object, runs: set[int]) -> None:
    assert callable(say)
    ticks_of: dict[Table, list[int]] = {}
    seen: set[datetime] = set()
    for start in history.started:
        if start.tick in seen:
            say(f"{start.tick} was claimed for the first time twice")
        seen.add(start.tick)
        known = [e.spec for e in history.registered if e.cluster == start.cluster and e.done <= start.at]
        spec = known[-1]
        if spec is None:
            say(f"{start.tick} was started by {start.cluster}, where it was not registered")
            continue
        table = same_ticks(spec.table)
        ticks = ticks_of.get(table) or ticks_of.setdefault(table, table.ticks(year, year[0] - 1, year[1]))
        tick = minute_of(start.tick)
        place = bisect_left(ticks, tick)
        if instant_of(tick) != start.tick or place >= len(ticks) or ticks[place] != tick:
            say(f"{start.tick} was run and is no tick of {[cron.text for cron in table.crons]} in {table.zone}")
            continue
        _in_time(code, start.tick, start.at, spec, tick, ticks[place + 1] if place + 1 < len(ticks) else None, say)
    if runs != {minute_of(tick) for tick in seen}:
        say("runs that nobody started, or starts without a run")


def _in_time(
    code: str, tick: datetime, at: datetime, spec: Spec, minute: int, following: int | None, say: object
) -> None:
    assert callable(say)
    start = tick + delay(code, minute, following, spec.table.jitter_seconds)
    if at < start - timedelta(milliseconds=50):  # an operator's idea of the database's clock may be that much ahead
        say(f"{tick} was started at {at}, before {start}")
    if at < tick:
        say(f"{tick} was started at {at}, too early")
    if spec.deadline is not None and at > start + timedelta(seconds=spec.deadline):
        say(f"{tick} was started at {at}, after its deadline of {spec.deadline} s")
    if spec.missed == "Skip" and at > start + ON_TIME + timedelta(seconds=1):
        say(f"{tick} was started at {at}, and missed runs are to be skipped")
    if spec.suspend:
        say(f"{tick} was started at {at} by a cluster where it is suspended")
