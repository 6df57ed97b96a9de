"""A year on virtual time: two clusters, edits, suspends, outages, crashes. Every tick is accounted for exactly once."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.simulation import account as accounts
from tests.simulation import store, world
from tests.simulation.account import Account
from tests.simulation.naive import Cron, Table, minute_of
from tests.simulation.store import MemoryStore, Store
from tests.simulation.world import Dice, Spec, World

from leasedjob.api.v1alpha1 import ConcurrencyPolicy
from leasedjob.controller import act, decide
from leasedjob.controller.left import left_by
from leasedjob.controller.model import JobView
from leasedjob.schedule import CodeTicks, MissedRunPolicy, Schedule, TickReason, Timetable, inforce

BEGIN = datetime(2026, 12, 31, 23, 30, 17, tzinfo=UTC)
YEAR = timedelta(days=365)
SEED = int(os.environ.get("LEASEDJOB_SIMULATION_SEED", "20270101"))
# With no clock change near midnight, where CronJob's own search is no plain reading of the fields.
ZONES = ("Etc/UTC", "Europe/Paris", "America/Denver", "Asia/Kolkata")


def a_cron(dice: random.Random, every: int) -> Cron:
    """About once in so many minutes."""
    if every < 60:
        count = 60 // every
        some = dice.sample(range(60), count) if dice.random() < 0.3 else range(dice.randrange(every), 60, every)
        hours = None if dice.random() < 0.8 else frozenset(range(24)) - {dice.randrange(24)}
        return Cron(frozenset(some), hours)
    minutes = frozenset(dice.sample(range(60), dice.choice([1, 1, 2])))
    if every < 1440:
        hours = None if every == 60 else frozenset(range(dice.randrange(3), 24, every // 60))
        return Cron(minutes, hours, weekdays=None if dice.random() < 0.7 else frozenset(dice.sample(range(7), 4)))
    night = frozenset(dice.sample(range(4), dice.choice([1, 2])))  # where clocks change
    days = frozenset(dice.sample(range(1, 32), 3)) if dice.random() < 0.2 else None
    return Cron(minutes, night, days, weekdays=frozenset(dice.sample(range(7), 3)) if dice.random() < 0.3 else None)


def a_table(dice: random.Random, every: int) -> Table:
    crons = tuple(a_cron(dice, every) for _ in range(dice.choice([1, 1, 1, 1, 1, 2])))
    if dice.random() < 0.2:
        crons += (a_cron(dice, 1440),)
    return Table(
        crons,
        dice.choice(ZONES),
        run_once=dice.random() < 0.7,
        jitter_seconds=dice.choice([0, 0, 0, 0, 20, 600]),
    )


def a_spec(dice: random.Random, every: int) -> Spec:
    return Spec(
        a_table(dice, every),
        concurrency=dice.choice(list(ConcurrencyPolicy)),
        missed=dice.choice(list(MissedRunPolicy)),
        limit=dice.choice([2, 8]),
        deadline=dice.choice([None, None, 30, 600, 7200]),
        backoff_limit=dice.choice([0, 0, 1]),
    )


class Change:
    """What people do to a spec, now and then to its schedule."""

    def __init__(self, every: dict[str, int]) -> None:
        self.every = every

    def __call__(self, dice: random.Random, code: str, old: Spec) -> Spec:
        new = a_spec(dice, self.every[code])
        match dice.choice(["all", "table", "policy", "bounds", "jitter", "nothing"]):
            case "all":
                return new
            case "table":
                return replace(old, table=new.table)
            case "policy":
                return replace(new, table=old.table)
            case "jitter":
                return replace(old, table=replace(old.table, jitter_seconds=dice.choice([0, 45, 3600])))
            case "bounds" if self.every[code] >= 60:  # one that is due often would have few ticks left
                now = minute_of(BEGIN) + dice.randrange(365 * 1440)
                bounds = {"not_before": now} if dice.random() < 0.5 else {"not_after": now}
                return replace(old, table=replace(old.table, **{"not_before": None, "not_after": None, **bounds}))
            case _:
                return replace(old)


def simulate(
    rows: Store,
    seed: int,
    every: dict[str, int],
    length: timedelta,
    dice: Dice | None = None,
    *,
    begin: datetime = BEGIN,
) -> Account:
    chance = random.Random(seed)
    specs = {code: a_spec(chance, often) for code, often in every.items()}
    year_of = World(rows, specs, Change(every), seed=seed, begin=begin, end=begin + length, dice=dice)
    year_of.run()
    year = (minute_of(begin) - 1, minute_of(begin + length) + 3 * 1440)
    total = Account()
    for code, events in year_of.history.items():
        total += accounts.account(code, events, rows, year, year_of.end, timedelta(hours=4))
    print(
        f"seed {seed}: {year_of.looks} looks, {total.ticks} ticks, {total.runs} runs, {total.differed} while schedules "
        f"differed, {total.ranges}"
    )
    return total


def objects(name: str, counts: dict[int, int]) -> dict[str, int]:
    """code -> about how many minutes lie between its ticks."""
    return {f"sim/{name}-{every}-{n}": every for every, count in counts.items() for n in range(count)}


# Of everything enough for a month.
BUSY = Dice(suspends=1 / 4, asleep=4.0, edits=1 / 8, deletes=1 / 15, alone=0.3)
OFTEN = {4: 2, 10: 2, 60: 3, 720: 4, 1440: 6}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("month", [1, 3, 10], ids=["January", "March", "October"])  # two of them with a clock change
def test_a_month_of_ten_thousands_of_ticks(month: int) -> None:
    begin = datetime(2027, month, 7, 3, 30, 17, tzinfo=UTC)
    total = simulate(MemoryStore(begin), SEED + month, objects("m", OFTEN), timedelta(days=26), BUSY, begin=begin)
    assert total.problems == [], total.problems[:20]
    assert total.ticks > 20_000
    assert total.differed > 100


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_year_of_300_000_ticks() -> None:
    """Most of it suspended or without an operator; `test_years_that_are_busier` has more runs."""
    began = time.process_time()
    total = simulate(MemoryStore(BEGIN), SEED, objects("y", OFTEN), YEAR, Dice(suspends=1 / 2, asleep=14.0))
    print(f"{time.process_time() - began:.0f} s of CPU")
    assert total.problems == [], total.problems[:20]
    assert total.ticks > 300_000
    assert total.differed > 1000


# --- the account can fail --------------------------------------------------------------------------------------------
FORTNIGHT = timedelta(days=14)
FEW = {"sim/a": 15, "sim/b": 20, "sim/c": 60, "sim/d": 720}
SOME = Dice(suspends=1 / 4, asleep=1.0, edits=1 / 4, deletes=1 / 7, alone=0.3, fails=0.2, long=0.2)


def a_fortnight(seed: int) -> Account:
    world.timetable.cache_clear()
    return simulate(MemoryStore(BEGIN), seed, FEW, FORTNIGHT, SOME)


def test_a_fortnight_has_no_problems() -> None:
    total = a_fortnight(20)
    assert total.problems == []
    assert total.runs > 300
    assert set(total.ranges) >= {"Overlap", "Suspended", "StartingDeadline", "MissedRunPolicy"}


def nothing_dropped(mp: pytest.MonkeyPatch) -> None:
    real = decide.ticks_due
    mp.setattr(decide, "ticks_due", lambda *a, **k: replace(real(*a, **k), dropped=()))


def a_range_too_many(mp: pytest.MonkeyPatch) -> None:
    real = Timetable.count
    mp.setattr(Timetable, "count", lambda self, after, through: (real(self, after, through)[0] + 1, True))


def a_tick_off_by_a_minute(mp: pytest.MonkeyPatch) -> None:
    real = Schedule.previous

    def previous(self: Schedule, at: datetime) -> datetime | None:
        found = real(self, at)
        return found and found - timedelta(minutes=1) if found and found.hour == 3 else found

    mp.setattr(Schedule, "previous", previous)


def a_repeated_hour_twice(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Schedule, "next", lambda self, after: self._next_real_time(after))
    mp.setattr(Schedule, "previous", lambda self, at: self._previous_real_time(at))


def an_edit_that_writes_nothing(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(store.MemoryStore, "register", _without_passed(store.MemoryStore.register))


def _without_passed(real: Any) -> Any:
    return lambda self, cluster, job, passed: real(self, cluster, job, passed and replace(passed, ranges=()))


def an_edit_that_moves_no_watermark(mp: pytest.MonkeyPatch) -> None:
    def same_hash(real: Any) -> Any:
        return lambda self, cluster, code, born, spec: replace(real(self, cluster, code, born, spec), schedule_hash="")

    mp.setattr(World, "_registration", same_hash(World._registration))


def a_resume_that_replays(mp: pytest.MonkeyPatch) -> None:
    def never_suspended(real: Any) -> Any:
        return lambda self, cluster, code, born, spec: replace(real(self, cluster, code, born, spec), suspended=False)

    def silent(job: Any, schedule: Any, watermark: Any, wake: Any) -> Iterator[Any]:
        return iter(())

    mp.setattr(World, "_registration", never_suspended(World._registration))
    mp.setattr(decide, "_suspended", silent)


def a_stale_range_that_is_written(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(store, "_stale", lambda watermark, ranges: False)
    mp.setattr(
        store.MemoryStore, "_write",
        lambda self, code, ranges: code.ledger.extend(
            store.Range(r.first, r.last, r.count, True, "missed", str(r.reason)) for r in ranges
        ),
    )  # fmt: skip


def a_watermark_that_stands_still(mp: pytest.MonkeyPatch) -> None:
    """A tick that was skipped is asked for again, and runs when the other run has ended."""
    real = store.MemoryStore._claim

    def claim(self: Any, cluster: str, request: Any, waiting: set[str]) -> Any:
        before = self._codes[request.identity.code].watermark
        answer = real(self, cluster, request, waiting)
        if answer.verdict == "overlap_skipped":
            self._codes[request.identity.code].watermark = before
        return answer

    mp.setattr(store.MemoryStore, "_claim", claim)


def a_start_that_is_early(mp: pytest.MonkeyPatch) -> None:
    """An operator whose clock is ahead, and a database that believes it."""
    real = store.MemoryStore._fresh

    def fresh(self: Any, request: Any, *rest: Any) -> str:
        verdict = real(self, request, *rest)
        return "insert" if verdict == "future" else verdict

    mp.setattr(store.MemoryStore, "_fresh", fresh)
    mp.setattr(world, "JobView", lambda **k: JobView(**{**k, "now": k["now"] + timedelta(seconds=40)}))


def a_deadline_that_is_not_judged(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(act, "_deadline_ms", lambda policy, tick: None)
    real = decide.ticks_due
    mp.setattr(decide, "ticks_due", lambda *a, **k: real(*a, **{**k, "starting_deadline": None}))


def a_jitter_that_is_forgotten(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Timetable, "start_of", lambda self, tick: tick)


def late_ticks_that_are_not_skipped(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(decide, "ON_TIME", timedelta(hours=1))


def a_tick_that_nobody_wakes_for(mp: pytest.MonkeyPatch) -> None:
    real = Timetable.next_start
    mp.setattr(Timetable, "next_start", lambda self, now: real(self, now) and None)


def other_clusters_ticks_that_are_not_counted(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(CodeTicks, "_between", lambda self, after, tick, key: ())


def ticks_where_schedules_meet_counted_twice(mp: pytest.MonkeyPatch) -> None:
    def count(timetables: Any, after: datetime, through: datetime) -> tuple[int, bool]:
        return sum(t.count(after, through)[0] for t in timetables), True

    mp.setattr(inforce, "_count_together", count)


def an_edit_that_fires_an_old_tick(mp: pytest.MonkeyPatch) -> None:
    """Where another cluster is active with the code, the watermark alone doesn't prevent it."""
    mp.setattr(CodeTicks, "since", lambda self, key, watermark: watermark)


def a_deleted_object_that_leaves_nothing(mp: pytest.MonkeyPatch) -> None:
    def left(state: Any, wanted: Any, now: datetime) -> Any:
        found = left_by(state, wanted, now)
        return found and replace(found, ranges=tuple(r for r in found.ranges if r.reason != TickReason.JobDeleted))

    mp.setattr(world, "left_by", left)


def schedules_of_before_that_are_believed(mp: pytest.MonkeyPatch) -> None:
    """What an edit elsewhere has made wrong is not refused."""
    real = store.MemoryStore._put_in_force

    def put(self: Any, code: Any, at: datetime) -> None:
        real(self, code, at)
        code.version = 0

    mp.setattr(store.MemoryStore, "_put_in_force", put)


def a_schedule_that_is_not_kept(mp: pytest.MonkeyPatch) -> None:
    """As it was before registrations had the schedule's own text."""
    mp.setattr(world, "written", lambda timetable: None)


def a_schedule_that_ends_with_its_suspension(mp: pytest.MonkeyPatch) -> None:
    """Where it is suspended in all clusters nothing is in force, and nobody counts."""
    real = store.MemoryStore._put_in_force

    def put(self: Any, code: Any, at: datetime) -> None:
        there = code.registrations
        code.registrations = {name: g for name, g in there.items() if not g.suspended}
        real(self, code, at)
        code.registrations = there

    mp.setattr(store.MemoryStore, "_put_in_force", put)


MISTAKES = (
    nothing_dropped,
    a_range_too_many,
    a_tick_off_by_a_minute,
    an_edit_that_writes_nothing,
    an_edit_that_moves_no_watermark,
    a_resume_that_replays,
    a_stale_range_that_is_written,
    a_watermark_that_stands_still,
    a_start_that_is_early,
    a_deadline_that_is_not_judged,
    a_jitter_that_is_forgotten,
    late_ticks_that_are_not_skipped,
    a_tick_that_nobody_wakes_for,
    other_clusters_ticks_that_are_not_counted,
    ticks_where_schedules_meet_counted_twice,
    an_edit_that_fires_an_old_tick,
    a_deleted_object_that_leaves_nothing,
    schedules_of_before_that_are_believed,
    a_schedule_that_is_not_kept,
    a_schedule_that_ends_with_its_suspension,
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, mistake: Callable[[pytest.MonkeyPatch], None]) -> None:
    mistake(monkeypatch)
    assert any(a_fortnight(seed).problems for seed in (20, 13, 17))  # what each has of policies differs


def test_a_local_time_that_is_run_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In October, in Paris; the fortnight of the others has no clock change."""
    a_repeated_hour_twice(monkeypatch)
    world.timetable.cache_clear()
    daily = Table((Cron(frozenset([20]), frozenset([2])),), "Europe/Paris")
    begin = datetime(2027, 10, 28, tzinfo=UTC)
    memory = MemoryStore(begin)
    few = World(memory, {"d": Spec(daily)}, lambda *_: Spec(daily), seed=1, begin=begin, end=begin + timedelta(days=6))
    few.run()
    year = (minute_of(begin) - 1440, minute_of(few.end) + 1440)
    found = accounts.account("d", few.history["d"], memory, year, few.end, timedelta(hours=4))
    assert found.problems


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", range(4))
def test_years_that_are_busier(number: int) -> None:
    seed = random.SystemRandom().randrange(10**9)
    total = simulate(MemoryStore(BEGIN), seed, objects("y", {4: 2, 10: 3, 60: 6, 720: 8, 1440: 12}), YEAR, Dice())
    assert total.problems == [], total.problems[:20]
    assert total.ticks > 300_000
