"""Whether every tick of a simulated history is accounted for exactly once, and whether anything ran at a wrong instant.

It is told what was put into force and when, what was started and when, and what the store has in the end. What is due
follows from `naive` alone. It knows nothing of how anything was decided.

Left open, because nothing can be said of them: ticks while the clusters' schedules differ (each cluster has its own),
and ticks that were undecided when an edit came to operators none of which knew the schedule before.
"""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

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
    open: int = 0  # of which nothing can be said
    ranges: Counter[str] = field(default_factory=Counter)  # by reason
    problems: list[str] = field(default_factory=list)

    def __iadd__(self, other: Account) -> Account:
        self.ticks += other.ticks
        self.runs += other.runs
        self.in_ranges += other.in_ranges
        self.open += other.open
        self.ranges += other.ranges
        self.problems += other.problems
        return self


@dataclass(frozen=True)
class Span:
    """(after, through] in minutes. `table`: in force in every cluster; None: they differ."""

    after: int
    through: int
    table: Table | None


def same_ticks(table: Table) -> Table:
    return replace(table, jitter_seconds=0)


def spans(history: History, end: datetime) -> list[Span]:
    """Which schedule was in force when."""
    found: list[Span] = []
    tables: dict[str, Table] = {}
    begin, shared = minute_of(history.created), None
    for entry in history.registered:
        tables[entry.cluster] = same_ticks(entry.spec.table)
        now = next(iter(tables.values())) if len(set(tables.values())) == 1 else None
        if now != shared:
            at = minute_of(entry.at)
            if shared is None and not found and begin == minute_of(history.created):
                shared = now  # the first registration: in force since the object was created
                continue
            found.append(Span(begin, max(begin, at), shared))
            begin, shared = max(begin, at), now
    found.append(Span(begin, minute_of(end), shared))
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
    due: list[int] = []  # ticks to be accounted for
    maybe: set[int] = set()  # ticks of which nothing can be said
    for span in spans(history, end):
        if span.table is not None:
            due += span.table.ticks(year, span.after, span.through)
            # an edit is in force some milliseconds before it is written: its own minute may be decided either way
            maybe |= {span.after, span.through}
        else:
            for table in {same_ticks(entry.spec.table) for entry in history.registered}:
                maybe.update(table.ticks(year, span.after - 1, span.through))
    for after, through in history.unknown:
        maybe.update(due[bisect_right(due, minute_of(after)) : bisect_right(due, minute_of(through))])
    watermark = minute_of(store.watermark(code))
    last = minute_of(end - late)
    if (undecided := [tick for tick in due if watermark < tick <= last]) and not set(undecided) <= maybe:
        say(f"{len(undecided)} ticks were never decided, the first at {instant_of(undecided[0])}")
    strict = [tick for tick in dict.fromkeys(due) if tick <= watermark and tick not in maybe]
    found.open = len(maybe & set(due))

    runs: dict[int, int] = Counter(minute_of(row.tick) for row in store.all_rows(code) if row.tick is not None)
    ranges = sorted(store.ledger(code), key=lambda r: r.first)
    for one, two in itertools.pairwise(ranges):
        if one.last >= two.first:
            say(f"ranges overlap: {one} and {two}")
    for r in ranges:
        first, through = minute_of(r.first), minute_of(r.last)
        inside = strict[bisect_left(strict, first) : bisect_right(strict, through)]
        loose = sum(first <= tick <= through for tick in maybe) if len(inside) != r.count else 0
        if not r.exact or not len(inside) <= r.count <= len(inside) + loose:
            say(f"{r} holds {len(inside)} ticks, and {loose} of which nothing can be said")
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

    _started(code, history, year, say, set(runs))
    return found


def _started(code: str, history: History, year: tuple[int, int], say: object, runs: set[int]) -> None:
    assert callable(say)
    ticks_of: dict[Table, list[int]] = {}
    seen: set[datetime] = set()
    for start in history.started:
        if start.tick in seen:
            say(f"{start.tick} was claimed for the first time twice")
        seen.add(start.tick)
        in_force = [e.spec for e in history.registered if e.cluster == start.cluster and e.at <= start.at]
        spec = in_force[-1]
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
