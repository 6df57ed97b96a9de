"""Properties of schedules, judged by an oracle that walks from minute to minute through the zone's local times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from leasedjob.errors import InvalidScheduleError
from leasedjob.schedule import (
    ClockChangePolicy,
    MissedRunPolicy,
    Schedule,
    TickReason,
    Timetable,
    clock_changes,
    load_zone,
    preview,
    ticks_due,
    zone_names,
)

MINUTE = timedelta(minutes=1)
# The hard ones change at midnight, by half an hour, two hours or a day.
PLAIN_ZONES = ("Etc/UTC", "Europe/Paris", "America/Denver", "Europe/Dublin", "America/St_Johns")
HARD_ZONES = (
    "Pacific/Chatham",  # changes at a quarter to three: CronJob's steps by the hour go astray there
    "Africa/Cairo",
    "Africa/Casablanca",
    "America/Havana",
    "America/Nuuk",
    "America/Santiago",
    "Antarctica/Troll",
    "Asia/Beirut",
    "Asia/Gaza",
    "Atlantic/Azores",
    "Australia/Lord_Howe",
    "Pacific/Apia",
)
BOUNDS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))


@dataclass(frozen=True)
class Case:
    """An expression together with what it means, said a second time and in the simplest way."""

    expression: str
    values: tuple[frozenset[int], ...]
    star_days: bool
    real_time: bool

    def due(self, wall: datetime) -> bool:
        minutes, hours, days, months, weekdays = self.values
        by_date, by_weekday = wall.day in days, wall.isoweekday() % 7 in weekdays
        day = (by_date and by_weekday) if self.star_days else (by_date or by_weekday)
        return wall.minute in minutes and wall.hour in hours and wall.month in months and day


@st.composite
def items(draw: st.DrawFn, low: int, high: int) -> tuple[str, frozenset[int], bool]:
    """One list item: its text, its values, whether it has a step."""
    first = draw(st.integers(low, high))
    last = draw(st.integers(first, high))
    match draw(st.sampled_from(["number", "number", "range", "range-step", "star-step", "open-step"])):
        case "number":
            return str(first), frozenset([first]), False
        case "range":
            return f"{first}-{last}", frozenset(range(first, last + 1)), False
        case "range-step":
            step = draw(st.integers(1, last - first + 1))
            return f"{first}-{last}/{step}", frozenset(range(first, last + 1, step)), True
        case "star-step":
            step = draw(st.integers(2, high - low + 1))
            return f"*/{step}", frozenset(range(low, high + 1, step)), True
        case _:
            step = draw(st.integers(1, high - first + 1))
            return f"{first}/{step}", frozenset(range(first, high + 1, step)), True


@st.composite
def cases(draw: st.DrawFn) -> Case:
    texts, values, stars, stepped = [], [], [], []
    for low, high in BOUNDS:
        if draw(st.booleans()):
            texts.append(draw(st.sampled_from(["*", "?", "*/1"])))
            values.append(frozenset(range(low, high + 1)))
            stars.append(True)
            stepped.append(False)
        else:
            parts = draw(st.lists(items(low, high), min_size=1, max_size=3))
            texts.append(",".join(text for text, _, _ in parts))
            values.append(frozenset().union(*(found for _, found, _ in parts)))
            stars.append(False)
            stepped.append(any(step for _, _, step in parts))
    real_time = stars[1] or stepped[1] or len(values[1]) == 24
    return Case(" ".join(texts), tuple(values), stars[2] or stars[4], real_time)


@st.composite
def instants(draw: st.DrawFn, zone: str) -> datetime:
    """An instant, more often than not near one of the zone's clock changes."""
    at = draw(st.datetimes(datetime(2005, 1, 1), datetime(2045, 1, 1)))  # noqa: DTZ001
    at = at.replace(tzinfo=UTC)
    if draw(st.integers(0, 3)):
        changes = clock_changes(load_zone(zone), at, at + timedelta(days=400))
        if changes:
            at = draw(st.sampled_from(changes)).at + timedelta(seconds=draw(st.integers(-40 * 3600, 3 * 3600)))
    return at


def parse(case: Case, zone: str, policy: ClockChangePolicy) -> Schedule:
    schedule = read(case.expression, zone, policy)
    if isinstance(schedule, str):
        assert "never fires" in schedule
        assume(False)
    assert isinstance(schedule, Schedule)
    return schedule


def read(expression: str, zone: str, policy: ClockChangePolicy) -> Schedule | str:
    """The schedule, or why it is refused."""
    try:
        return Schedule.parse(expression, zone, policy=policy)
    except InvalidScheduleError as refusal:
        return str(refusal)


def walk(case: Case, zone: str, policy: ClockChangePolicy, after: datetime, through: datetime) -> Iterator[datetime]:
    """Every tick in (after, through], by looking at each minute of the window and of a day before it."""
    with files("tzdata").joinpath("zoneinfo", *zone.split("/")).open("rb") as stream:
        info = ZoneInfo.from_file(stream)
    once = policy is ClockChangePolicy.RunOnce and not case.real_time
    instant = (after - timedelta(hours=26)).replace(second=0, microsecond=0)
    reached = (instant - MINUTE).astimezone(info).replace(tzinfo=None, fold=0)
    while instant <= through:
        wall = instant.astimezone(info).replace(tzinfo=None, fold=0)
        if not once:
            due = case.due(wall)
        else:
            due = False
            while reached < wall:  # every local time that has been passed since: one, none (repeated), many (skipped)
                reached += MINUTE
                due = due or case.due(reached)
        if due and instant > after:
            yield instant
        instant += MINUTE


def enumerate_ticks(schedule: Schedule | Timetable, after: datetime, through: datetime) -> list[datetime]:
    found = []
    tick = schedule.next(after)
    while tick is not None and tick <= through:
        found.append(tick)
        tick = schedule.next(tick)
    return found


COMMON = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.filter_too_much])


@COMMON
@given(case=cases(), zone=st.sampled_from(PLAIN_ZONES + HARD_ZONES), data=st.data())
def test_run_once_agrees_with_walking(case: Case, zone: str, data: st.DataObject) -> None:
    schedule = parse(case, zone, ClockChangePolicy.RunOnce)
    after = data.draw(instants(zone))
    through = after + timedelta(hours=40)
    expected = list(walk(case, zone, ClockChangePolicy.RunOnce, after, through))
    assert enumerate_ticks(schedule, after, through) == expected
    assert schedule.count(after, through) == (len(expected), True)
    last = schedule.previous(through)
    assert last == expected[-1] if expected else last is None or last <= after


@COMMON
@given(case=cases(), zone=st.sampled_from(PLAIN_ZONES), data=st.data())
def test_kubernetes_agrees_with_walking_where_changes_are_whole_hours_away_from_midnight(
    case: Case, zone: str, data: st.DataObject
) -> None:
    # St John's changed its clocks at one minute past midnight until 2011
    schedule = parse(case, zone, ClockChangePolicy.Kubernetes)
    after = data.draw(instants(zone).filter(lambda at: at.year > 2012))
    through = after + timedelta(hours=40)
    expected = list(walk(case, zone, ClockChangePolicy.Kubernetes, after, through))
    assert enumerate_ticks(schedule, after, through) == expected
    assert schedule.count(after, through) == (len(expected), True)


@COMMON
@given(
    case=cases(),
    zone=st.sampled_from(sorted(zone_names())) | st.sampled_from(HARD_ZONES),
    policy=st.sampled_from(ClockChangePolicy),
    data=st.data(),
)
def test_next_and_previous(case: Case, zone: str, policy: ClockChangePolicy, data: st.DataObject) -> None:
    schedule = parse(case, zone, policy)
    after = data.draw(instants(zone).filter(lambda at: at.year > 2024))  # CronJob goes astray less often since
    tick = schedule.next(after)
    assert tick is not None
    assert tick > after
    assert tick.utcoffset() == timedelta(0)
    assert (tick.second, tick.microsecond) == (0, 0)
    assert schedule.matches(tick)
    assert schedule.previous(tick) == tick
    assert schedule.next(tick - timedelta(microseconds=1)) == tick or policy is ClockChangePolicy.Kubernetes
    assert schedule.preview(after, 1) == (tick,)
    if policy is ClockChangePolicy.RunOnce:
        before = schedule.previous(tick - timedelta(microseconds=1))
        assert before is None or before <= after
        assert before is None or schedule.next(before) == tick
        assert schedule.count(after, tick) == (1, True)


@COMMON
@given(
    case=cases(),
    zone=st.sampled_from(PLAIN_ZONES + HARD_ZONES),
    policy=st.sampled_from(MissedRunPolicy),
    hours=st.integers(0, 24 * 40),
    limit=st.integers(1, 5),
    deadline=st.none() | st.integers(10, 100_000),
    data=st.data(),
)
def test_every_tick_of_a_gap_is_claimed_or_dropped_once(
    case: Case, zone: str, policy: MissedRunPolicy, hours: int, limit: int, deadline: int | None, data: st.DataObject
) -> None:
    schedule = parse(case, zone, ClockChangePolicy.RunOnce)
    watermark = data.draw(instants(zone))
    now = watermark + timedelta(hours=hours)
    due = ticks_due(
        schedule, watermark, now, policy, limit=limit, starting_deadline=deadline, on_time=timedelta(seconds=5)
    )
    ticks = enumerate_ticks(schedule, watermark, now)
    ranges = [[tick for tick in ticks if found.first <= tick <= found.last] for found in due.dropped]
    assert sorted([*due.claims, *(tick for found in ranges for tick in found)]) == ticks
    for found, inside in zip(due.dropped, ranges, strict=True):
        assert (found.first, found.last, found.count, found.count_is_exact) == (
            inside[0],
            inside[-1],
            len(inside),
            True,
        )
        if found.reason is TickReason.StartingDeadline:
            assert deadline is not None
            assert now - found.last > timedelta(seconds=deadline)
    assert list(due.claims) == sorted(due.claims)
    assert len(due.claims) <= (limit if policy is MissedRunPolicy.RunAll else 1)
    assert all(deadline is None or now - tick <= timedelta(seconds=deadline) for tick in due.claims)


@settings(COMMON, max_examples=40)
@given(
    several=st.lists(cases(), min_size=1, max_size=3),
    zone=st.sampled_from(PLAIN_ZONES + HARD_ZONES),
    bounds=st.tuples(st.none() | st.integers(0, 2400), st.none() | st.integers(0, 2400)),
    jitter=st.sampled_from([0, 1, 60, 7200]),
    data=st.data(),
)
def test_a_timetable_agrees_with_walking_and_fires_as_it_is_previewed(
    several: list[Case], zone: str, bounds: tuple[int | None, int | None], jitter: int, data: st.DataObject
) -> None:
    for case in several:
        parse(case, zone, ClockChangePolicy.RunOnce)
    after = data.draw(instants(zone))
    first, last = (None if minutes is None else after + minutes * MINUTE for minutes in bounds)
    assume(first is None or last is None or first <= last)
    timetable = Timetable.of(
        [case.expression for case in several], zone, code="shop/orders", not_before=first, not_after=last,
        jitter_seconds=jitter,
    )  # fmt: skip
    through = after + timedelta(hours=40)
    walked = {tick for case in several for tick in walk(case, zone, ClockChangePolicy.RunOnce, after, through)}
    expected = sorted(t for t in walked if (first is None or t >= first) and (last is None or t <= last))
    assert enumerate_ticks(timetable, after, through) == expected
    assert timetable.count(after, through) == (len(expected), True)
    assert [line.tick for line in preview(timetable, after, len(expected))] == expected
    # a tick is due at its start, and at no instant before it
    for earlier, tick in pairwise([after, *expected[:20]]):
        start = timetable.start_of(tick)
        for now, claims in ((start - timedelta(microseconds=1), ()), (start, (tick,))):
            due = ticks_due(timetable, earlier, now, MissedRunPolicy.Skip, on_time=timedelta(0))
            assert due.claims == claims
            assert due.dropped == ()


@COMMON
@given(text=st.text(max_size=40) | st.text(alphabet="0123456789*/-,?HLW#@ ()", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    schedule = read(text, "Etc/UTC", ClockChangePolicy.RunOnce)
    if isinstance(schedule, str):
        assert schedule.startswith("schedule: ")
        assert schedule.isprintable()
    else:
        assert schedule.next(datetime(2027, 1, 1, tzinfo=UTC)) is not None


@pytest.mark.parametrize("zone", HARD_ZONES)
def test_kubernetes_preview_ends(zone: str) -> None:
    """CRON-02: no search goes round for ever, wherever it starts."""
    for expression in ("30 0 * * *", "0 0 1 * *", "*/30 5 29 2 *", "45 23 * * 0"):
        schedule = Schedule.parse(expression, zone, policy=ClockChangePolicy.Kubernetes)
        for change in clock_changes(
            load_zone(zone), datetime(2005, 1, 1, tzinfo=UTC), datetime(2040, 1, 1, tzinfo=UTC)
        ):
            assert len(schedule.preview(change.at - timedelta(days=1), 3)) == 3
