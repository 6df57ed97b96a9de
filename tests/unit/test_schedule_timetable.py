"""Several schedules on one object, the time in which they count, jitter, and the preview of it all."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest

from leasedjob.errors import InvalidScheduleError
from leasedjob.schedule import ClockChangePolicy, ClockEffect, Schedule, Timetable, clock_changes, load_zone, preview

ONCE, KUBERNETES = ClockChangePolicy.RunOnce, ClockChangePolicy.Kubernetes
INSTANT = timedelta(microseconds=1)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def texts(ticks: tuple[datetime, ...]) -> list[str]:
    return [tick.strftime("%Y-%m-%dT%H:%M") for tick in ticks]


def test_where_schedules_meet_there_is_one_tick() -> None:
    timetable = Timetable.of(["0 3 * * *", "0 */3 * * 1"])
    assert texts(timetable.preview(at("2027-03-14T12:00"), 4)) == [
        "2027-03-15T00:00",
        "2027-03-15T03:00",
        "2027-03-15T06:00",
        "2027-03-15T09:00",
    ]
    assert timetable.count(at("2027-03-14T12:00"), at("2027-03-16T03:00")) == (9, True)
    (met,) = preview(timetable, at("2027-03-15T00:00"), 1)
    assert met.schedules == ("0 3 * * *", "0 */3 * * 1")


def test_bounds_belong_to_the_time_in_which_ticks_count() -> None:
    timetable = Timetable.of(
        ["0 3 * * *"], not_before=at("2027-03-02T03:00"), not_after=at("2027-03-04T03:00"), jitter_seconds=10
    )
    ticks = ("2027-03-02T03:00", "2027-03-03T03:00", "2027-03-04T03:00")
    assert texts(timetable.preview(at("2027-01-01"), 9)) == list(ticks)
    assert [timetable.matches(at(f"2027-03-0{day}T03:00")) for day in range(1, 6)] == [False, True, True, True, False]
    assert timetable.previous(at("2027-03-02T02:59")) is None
    assert timetable.previous(at("2028-01-01")) == at("2027-03-04T03:00")
    assert timetable.next(at("2027-03-04T03:00")) is None
    assert timetable.count(at("2020-01-01"), at("2030-01-01"))[0] == 3
    assert timetable.count(at("2027-03-05"), at("2030-01-01"))[0] == 0
    assert timetable.next_start(at("2027-03-05")) is None


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        ({"expressions": []}, "schedules", "at least one"),
        ({"expressions": ["0 3 * * *", "0 3 30 2 *"]}, "schedules[1]", "never fires"),
        ({"expressions": ["0 3 * * *"], "jitter_seconds": -1}, "jitterSeconds", "at least 0"),
        (
            {"expressions": ["0 3 * * *"], "not_before": at("2027-01-02"), "not_after": at("2027-01-01")},
            "notAfter",
            "earlier than notBefore",
        ),
    ],
)
def test_refusals_name_the_field(arguments: dict[str, object], field: str, words: str) -> None:
    with pytest.raises(InvalidScheduleError, match=words) as refusal:
        Timetable.of(**arguments)  # type: ignore[arg-type]
    assert refusal.value.field == field


def test_warnings_say_which_schedule() -> None:
    assert Timetable.of(["0 3 13 * 5"]).warnings == Schedule.parse("0 3 13 * 5").warnings
    warnings = Timetable.of(["0 3 13 * 5", "0 4 * * *", "0 4 * * *"]).warnings
    never = Timetable.of(["0 3 29 2 *"], not_before=at("2025-01-01"), not_after=at("2027-12-31"))
    assert never.warnings == ("no tick lies between notBefore and notAfter",)
    assert [text.partition(":")[0] for text in warnings] == ['"0 3 13 * 5"', '"0 4 * * *" is written more than once']


@pytest.mark.parametrize("policy", ClockChangePolicy)
@pytest.mark.parametrize("zone", ["Europe/Paris", "Australia/Lord_Howe", "America/Havana", "Pacific/Apia"])
def test_the_count_of_several_schedules_is_what_walking_finds(zone: str, policy: ClockChangePolicy) -> None:
    dice = random.Random(7)
    pool = ("20 2 * * *", "*/20 2 * * *", "0 */2 * * *", "15,45 1-3 * * 0,6", "7 * * * *", "0 0 1 * *", "30 0 * * *")
    changes = clock_changes(load_zone(zone), at("2008-01-01"), at("2030-01-01"))
    if policy is KUBERNETES:  # where a change touches midnight CronJob's own search goes astray, and the count doesn't
        changes = tuple(
            c for c in changes if 1 <= (c.at + c.before).hour <= 22 and abs(c.after - c.before).seconds == 3600
        )
    for _ in range(25 if changes else 0):
        timetable = Timetable.of(dice.sample(pool, dice.randint(2, 4)), zone, policy=policy)
        after = dice.choice(changes).at + timedelta(minutes=dice.randint(-3000, 200))
        through = after + timedelta(minutes=dice.randint(0, 60 * 24 * 20))
        found, tick = 0, timetable.next(after)
        while tick is not None and tick <= through:
            found, tick = found + 1, timetable.next(tick)
        assert timetable.count(after, through) == (found, True), (timetable.expression, after, through)


def test_counting_a_long_gap_is_bounded() -> None:
    timetable = Timetable.of(["* * * * *", "30 2 * * *"], "Europe/Paris")
    found, exact = timetable.count(at("1900-01-01"), at("2027-01-01"))
    assert not exact
    assert found == 20_000 * 1440


# --- jitter ----------------------------------------------------------------------------------------------------------


def test_a_start_moves_and_its_tick_does_not() -> None:
    timetable = Timetable.of(["*/15 * * * *"], code="shop/orders", jitter_seconds=600)
    ticks = timetable.preview(at("2027-01-01"), 200)
    assert ticks == Schedule.parse("*/15 * * * *").preview(at("2027-01-01"), 200)
    delays = [timetable.start_of(tick) - tick for tick in ticks]
    assert min(delays) >= timedelta(0)
    assert max(delays) < timedelta(seconds=600)
    assert len(set(delays)) > 150
    assert max(delays) - min(delays) > timedelta(seconds=500)
    same = Timetable.of(["*/15 * * * *"], code="shop/orders", jitter_seconds=600)
    assert [same.start_of(tick) - tick for tick in ticks] == delays
    other = Timetable.of(["*/15 * * * *"], code="shop/others", jitter_seconds=600)
    assert [other.start_of(tick) - tick for tick in ticks] != delays


def test_the_start_of_a_tick_is_pinned() -> None:
    """Changing the hash would make clusters of two versions disagree."""
    timetable = Timetable.of(["0 3 * * *"], "Etc/UTC", code="shop/orders", jitter_seconds=3600)
    assert timetable.start_of(at("2026-07-20T03:00")) == at("2026-07-20T03:10:54.961")


@pytest.mark.parametrize("jitter", [1, 59, 60, 61, 3600, 86_400])
@pytest.mark.parametrize("expressions", [["* * * * *"], ["*/7 * * * *", "0 3 * * *"], ["20 2 * * *"]])
def test_starts_keep_the_order_of_their_ticks(expressions: list[str], jitter: int) -> None:
    timetable = Timetable.of(expressions, "Europe/Paris", code="x", jitter_seconds=jitter)
    ticks = timetable.preview(at("2026-10-23T20:00"), 3800)
    ticks = tuple(tick for tick in ticks if tick < at("2026-10-28"))
    starts = [timetable.start_of(tick) for tick in ticks]
    assert all(tick <= start < following for tick, start, following in zip(ticks, starts, ticks[1:], strict=False))
    now = at("2026-10-24T21:00")
    for _ in range(40):  # the latest start and the next one, told by looking at all of them
        begun = [tick for tick, start in zip(ticks, starts, strict=True) if start <= now]
        assert not begun or timetable.latest_started(now) == begun[-1]
        assert timetable.next_start(now) == min(start for start in starts if start > now)
        waiting = [tick for tick, start in zip(ticks, starts, strict=True) if start > now]
        assert list(timetable.ahead(now, 2)) == waiting[:2]
        now += timedelta(minutes=13, seconds=17)


# --- preview ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zone", "expression", "policy", "after", "marks"),
    [
        pytest.param(
            "America/Denver", "40 2 * * *", ONCE, "2027-03-13T12:00",
            [("2027-03-14T09:00", ClockEffect.MovedAfterGap, "2027-03-14T02:40"), ("2027-03-15T08:40", None, None)],
            id="moved",
        ),
        pytest.param(
            "America/Denver", "40 2 * * *", KUBERNETES, "2027-03-13T12:00",
            [("2027-03-15T08:40", None, None)],
            id="left-out",
        ),
        pytest.param(
            "Europe/Paris", "20 2 * * *", ONCE, "2026-10-24T12:00",
            [("2026-10-25T00:20", ClockEffect.FirstOfRepeated, "2026-10-25T02:20"), ("2026-10-26T01:20", None, None)],
            id="first",
        ),
        pytest.param(
            "Europe/Paris", "20 2 * * *", KUBERNETES, "2026-10-24T12:00",
            [("2026-10-25T00:20", ClockEffect.Doubled, "2026-10-25T02:20"),
             ("2026-10-25T01:20", ClockEffect.Doubled, "2026-10-25T02:20"), ("2026-10-26T01:20", None, None)],
            id="doubled",
        ),
        pytest.param(
            "Africa/Cairo", "0 5 * * 4", KUBERNETES, "2027-04-29T12:00",
            [("2027-04-30T02:00", ClockEffect.Displaced, "2027-04-30T05:00"), ("2027-05-06T02:00", None, None)],
            id="displaced",
        ),
        pytest.param(
            "Europe/Paris", "20 * * * *", ONCE, "2026-10-25T00:00",
            [("2026-10-25T00:20", None, None), ("2026-10-25T01:20", None, None)],
            id="real-time",
        ),
    ],
)  # fmt: skip
def test_preview_marks_clock_changes(
    zone: str, expression: str, policy: ClockChangePolicy, after: str, marks: list[tuple[str, ClockEffect, str]]
) -> None:
    schedule = Schedule.parse(expression, zone, policy=policy)
    shown = preview(schedule, at(after), len(marks), "Asia/Kolkata")
    found = [(f"{u.tick:%Y-%m-%dT%H:%M}", u.effect, u.wall and f"{u.wall:%Y-%m-%dT%H:%M}") for u in shown]
    assert found == marks
    assert [u.tick for u in shown] == list(schedule.preview(at(after), len(marks)))
    assert all(u.local == u.tick and u.local.utcoffset() == timedelta(hours=5, minutes=30) for u in shown)
    seen = [change for u in shown for change in u.changes]
    assert seen == list(clock_changes(load_zone(zone), at(after), shown[-1].tick))


def test_preview_names_what_is_left_out() -> None:
    schedule = Schedule.parse("40 2 * * *", "America/Denver", policy=KUBERNETES)
    first, second = preview(schedule, at("2027-03-13T12:00"), 2)
    assert [f"{wall:%m-%d %H:%M}" for wall in first.left_out] == ["03-14 02:40"]
    assert second.left_out == ()


def test_preview_ends_with_the_timetable_and_wants_an_instant_and_a_zone() -> None:
    timetable = Timetable.of(["0 3 * * *"], not_after=at("2027-03-02T03:00"))
    assert len(preview(timetable, at("2027-03-01"), 5)) == 2
    with pytest.raises(ValueError, match="naive"):
        preview(timetable, datetime(2027, 1, 1), 1)  # noqa: DTZ001
    with pytest.raises(InvalidScheduleError, match="Europe/Rome"):
        preview(timetable, at("2027-01-01"), 1, "Europe/rome")
