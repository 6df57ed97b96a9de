"""Which ticks a code has where its clusters' schedules differ, and what each claim passes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leasedjob.schedule import (
    ClockChangePolicy,
    CodeTicks,
    InForce,
    MissedRunPolicy,
    TickReason,
    Timetable,
    passed_over,
    ticks_due,
    written,
)
from leasedjob.schedule.inforce import read

CODE = "shop/sync"
T0 = datetime(2026, 3, 28, tzinfo=UTC)  # the night after it Europe's clocks change
HOUR = timedelta(hours=1)
ON_TIME = timedelta(seconds=60)


def at(hours: float) -> datetime:
    return T0 + hours * HOUR


def timetable(*expressions: str, zone: str = "Etc/UTC", **more: object) -> Timetable:
    return Timetable.of(expressions, zone, code=CODE, **more)  # type: ignore[arg-type]


def schedule(
    key: str, ticks: Timetable | None, since: float = -1, until: float | None = None, *, known: bool = True
) -> InForce:
    return InForce(key, known, ticks, at(since), None if until is None else at(until))


def all_of(*schedules: InForce) -> CodeTicks:
    return CodeTicks(schedules)


EVEN, ODD = timetable("0 */2 * * *"), timetable("0 1-23/2 * * *")


@pytest.mark.parametrize(
    "one",
    [
        None,
        EVEN,
        timetable("H H(1-4) * * *", "@daily", zone="Europe/Paris", policy=ClockChangePolicy.Kubernetes),
        timetable("0 0 1 * *", not_before=at(1), not_after=at(1.5)),
        timetable("5 4 * * 7", not_before=datetime(2026, 5, 1, tzinfo=UTC)),
    ],
)
def test_what_is_written_can_be_read(one: Timetable | None) -> None:
    assert read(written(one), CODE) == one


def test_jitter_moves_no_tick_and_is_not_written() -> None:
    assert written(timetable("0 * * * *", jitter_seconds=60)) == written(timetable("0 * * * *"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"schedules":["0 * * * *"],"timeZone":"Mars/Base","clockChangePolicy":"RunOnce"}',
        '{"schedules":["0 * * * * *"],"timeZone":"Etc/UTC","clockChangePolicy":"RunOnce"}',
        '{"schedules":["0 * * * *"],"timeZone":"Etc/UTC","clockChangePolicy":"RunTwice"}',
        '{"schedules":["0 * * * *"],"timeZone":"Etc/UTC","clockChangePolicy":"RunOnce","every":2}',
    ],
)
def test_what_a_later_release_has_written_is_not_known(text: str) -> None:
    assert not InForce.of("k", text, CODE, T0, None).known
    assert all_of(InForce.of("k", text, CODE, T0, None)).count(T0, at(1)) == (0, False)


def test_a_schedule_counts_as_long_as_it_is_in_force() -> None:
    one = schedule("a", EVEN, 0, 6)
    assert one.next(at(-9)) == at(2), "what it has at `since` itself was before it"
    assert one.previous(at(99)) == at(6)
    assert one.next(at(6)) is None
    assert one.previous(at(1.9)) is None
    assert [one.has(at(h)) for h in (0, 1, 2, 6, 8)] == [False, False, True, True, False]
    assert all_of(one).count(at(-9), at(99)) == (3, True)


def test_where_nothing_was_in_force_the_watermark_says_from_when_ticks_count() -> None:
    one, two = schedule("a", EVEN, 5, 8), schedule("b", ODD, 8)
    assert CodeTicks.after(at(0), [one, two]).count(at(0), at(11)) == (6, True)
    assert CodeTicks.after(at(6), [one, two]).schedules == (one, two)
    assert CodeTicks.after(at(6), []).next(at(0)) is None


def test_where_schedules_meet_is_one_tick() -> None:
    paris = timetable("0 1-23/2 * * *", zone="Europe/Paris")  # even hours in UTC, until its clocks change
    both = all_of(schedule("a", EVEN), schedule("b", paris))
    assert both.count(at(0), at(24)) == (12, True)
    assert all_of(schedule("a", EVEN), schedule("b", ODD)).count(at(0), at(24)) == (24, True)
    assert all_of(schedule("a", EVEN), schedule("b", EVEN)).count(at(0), at(24)) == (12, True)


def test_two_of_every_minute_in_different_zones_are_counted_in_bounded_time() -> None:
    both = all_of(schedule("a", timetable("* * * * *")), schedule("b", timetable("* * * * *", zone="Asia/Kolkata")))
    count, exact = both.count(at(0), at(24 * 400))
    assert (count, exact) == (24 * 400 * 60, False), "at least"


expressions = st.sampled_from(["*/7 * * * *", "0 * * * *", "30 2 * * *", "0,30 1-3 * * *", "15 */5 * * 6", "H * * * *"])
tables = st.builds(
    lambda texts, zone, low, high: timetable(
        *texts, zone=zone, not_before=None if low is None else at(low), not_after=None if high is None else at(high)
    ),
    st.lists(expressions, min_size=1, max_size=2, unique=True),
    st.sampled_from(["Etc/UTC", "Europe/Paris", "Asia/Kolkata"]),
    st.none() | st.integers(-5, 10),
    st.none() | st.integers(11, 50),
)
schedules = st.builds(
    lambda key, table, since, length: InForce(key, True, table, at(since), length and at(since + length)),
    st.sampled_from("abc"),
    tables,
    st.integers(-5, 30),
    st.none() | st.integers(1, 30),
)


@settings(max_examples=60)
@given(st.lists(schedules, min_size=1, max_size=3), st.integers(-6, 30), st.integers(1, 40))
def test_counting_is_going_from_tick_to_tick(found: list[InForce], after: int, hours: int) -> None:
    ticks = all_of(*found)
    begin, end = at(after), at(after + hours)
    seen: list[datetime] = []
    tick = ticks.next(begin)
    while tick is not None and tick <= end:
        seen.append(tick)
        tick = ticks.next(tick)
    assert ticks.count(begin, end) == (len(seen), True)
    for tick, following in pairwise(seen):
        assert ticks.previous(following - timedelta(microseconds=1)) == tick
    assert seen == sorted({t for s in found for t in seen if s.has(t)})


# --- what a claim passes ---------------------------------------------------------------------------------------------


def widened(ticks: CodeTicks, own: Timetable, now: float, policy: MissedRunPolicy) -> list[list[tuple[int, str]]]:
    """Count and reason of what each claim passes, of the schedule "a" whose code is decided up to T0."""
    key, mark = "a", 0.0
    since = ticks.since(key, at(mark))
    due = ticks_due(own, since, at(now), policy, on_time=ON_TIME)
    return [[(r.count, r.reason.value) for r in passed] for passed in ticks.widened(due, at(mark), key)]


def test_alone_a_claim_passes_what_it_missed() -> None:
    assert widened(all_of(schedule("a", EVEN)), EVEN, 8, MissedRunPolicy.RunLatest) == [[(3, "MissedRunPolicy")]]
    assert widened(all_of(schedule("a", EVEN)), EVEN, 8, MissedRunPolicy.RunAll) == [[]] * 4


def test_what_lies_in_a_range_shares_its_fate_and_what_lies_behind_it_is_passed() -> None:
    differ = all_of(schedule("a", EVEN), schedule("b", ODD))
    assert widened(differ, EVEN, 8, MissedRunPolicy.RunLatest) == [[(6, "MissedRunPolicy"), (1, "SpecDiffers")]]
    assert widened(differ, EVEN, 2, MissedRunPolicy.RunLatest) == [[(1, "SpecDiffers")]]
    assert widened(differ, EVEN, 4.5, MissedRunPolicy.RunAll) == [[(1, "SpecDiffers")], [(1, "SpecDiffers")]]
    assert widened(differ, EVEN, 8.5, MissedRunPolicy.Skip) == [[(8, "MissedRunPolicy")]]


def test_an_edit_fires_no_old_tick_and_what_it_left_is_passed() -> None:
    edited = all_of(schedule("b", ODD, -1, 4.5), schedule("a", EVEN, 4.5))
    assert widened(edited, EVEN, 6, MissedRunPolicy.RunAll) == [[(2, "ScheduleEdited")]]
    assert edited.since("a", at(0)) == at(4.5)
    assert edited.since("a", at(5)) == at(5)


def test_what_was_left_is_written_without_waiting_for_a_tick() -> None:
    edited = all_of(schedule("b", ODD, -1, 4.5), schedule("a", EVEN, 4.5))
    (left,) = edited.left(at(0), at(5), "a")
    assert (left.first, left.last, left.count, left.reason) == (at(1), at(3), 2, TickReason.ScheduleEdited)
    assert edited.left(at(3), at(5), "a") == ()
    assert all_of(schedule("a", EVEN)).left(at(0), at(5), "a") == (), "those are due"
    pending = all_of(schedule("b", ODD, -1, 4.5), schedule("a", EVEN, 1.5))
    assert [(r.first, r.last) for r in pending.left(at(0), at(5), "a")] == [(at(1), at(1))], "its own next tick is due"
    still = all_of(schedule("b", ODD, -1, 4.5), schedule("a", EVEN, 4.5), schedule("c", ODD, 4.5))
    assert still.left(at(0), at(5), "a") == (), "another cluster has another one, and decides"


@settings(max_examples=60)
@given(
    st.lists(schedules, max_size=2),
    tables,
    st.integers(-5, 20),
    st.integers(0, 30),
    st.sampled_from(list(MissedRunPolicy)),
    st.sampled_from([None, 600, 20_000]),
)
def test_claims_and_what_they_pass_are_all_ticks_once(
    others: list[InForce], own: Timetable, since: int, hours: int, policy: MissedRunPolicy, deadline: int | None
) -> None:
    ticks = all_of(InForce("own", True, own, at(since), None), *others)
    now, mark = at(hours), at(0)
    due = ticks_due(own, ticks.since("own", mark), now, policy, limit=3, starting_deadline=deadline, on_time=ON_TIME)
    passes = ticks.widened(due, mark, "own")
    assert len(passes) == max(1, len(due.claims))
    through = due.claims[-1] if due.claims else max((r.last for p in passes for r in p), default=mark)
    ranges = [r for p in passes for r in p]
    assert sum(r.count for r in ranges) + len(due.claims) == ticks.count(mark, through)[0]
    for one, two in pairwise(ranges):
        assert one.last < two.first
    for claim, passed in zip(due.claims, passes, strict=False):
        assert all(r.last < claim for r in passed)
        assert not any(r.first <= claim <= r.last for r in ranges)
    assert all(r == passed_over(ticks, r.first - timedelta(microseconds=1), r.last, r.reason)[0] for r in ranges)
