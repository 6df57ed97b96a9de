"""What a schedule does when the clock changes, by policy."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from leasedjob.schedule import ClockChange, ClockChangePolicy, Schedule, clock_changes, load_zone, zone_names

ONCE, KUBERNETES = ClockChangePolicy.RunOnce, ClockChangePolicy.Kubernetes


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def between(schedule: Schedule, after: datetime, through: datetime) -> list[datetime]:
    found = []
    tick = schedule.next(after)
    while tick is not None and tick <= through:
        found.append(tick)
        tick = schedule.next(tick)
    return found


@pytest.mark.parametrize(
    ("zone", "expression", "policy", "after", "through", "expected"),
    [
        # CRON-01
        pytest.param(
            "Europe/Paris", "20 2 * * *", ONCE, "2026-10-24T23:00", "2026-10-25T02:30", ["2026-10-25T00:20"],
            id="repeated-runs-at-its-first-occurrence",
        ),
        pytest.param(
            "Europe/Paris", "20 2 * * *", KUBERNETES, "2026-10-24T23:00", "2026-10-25T02:30",
            ["2026-10-25T00:20", "2026-10-25T01:20"],
            id="kubernetes-runs-a-repeated-time-twice",
        ),
        # CRON-02
        pytest.param(
            "America/Denver", "40 2 * * *", ONCE, "2027-03-14T08:00", "2027-03-15T10:00",
            ["2027-03-14T09:00", "2027-03-15T08:40"],
            id="skipped-runs-after-the-gap",
        ),
        pytest.param(
            "America/Denver", "40 2 * * *", KUBERNETES, "2027-03-14T08:00", "2027-03-15T10:00", ["2027-03-15T08:40"],
            id="kubernetes-leaves-a-skipped-time-out",
        ),
        pytest.param(
            "America/Denver", "*/20 2 * * *", ONCE, "2027-03-14T08:00", "2027-03-14T20:00", ["2027-03-14T09:00"],
            id="several-skipped-times-are-one-run",
        ),
        pytest.param(
            "America/Denver", "0,30 2,3 * * *", ONCE, "2027-03-14T08:00", "2027-03-14T20:00",
            ["2027-03-14T09:00", "2027-03-14T09:30"],
            id="skipped-time-meets-a-real-one",
        ),
        pytest.param(
            "Europe/Paris", "0 2-3 * * *", ONCE, "2026-10-24T23:00", "2026-10-25T03:00",
            ["2026-10-25T00:00", "2026-10-25T02:00"],
            id="range-of-hours-is-a-fixed-time",
        ),
        pytest.param(
            "Europe/Paris", "0 */2 * * *", ONCE, "2026-10-24T22:00", "2026-10-25T03:00",
            ["2026-10-25T00:00", "2026-10-25T01:00", "2026-10-25T03:00"],
            id="step-hour-follows-real-time",
        ),
        pytest.param(
            "America/Denver", "30 * * * *", ONCE, "2027-03-14T07:45", "2027-03-14T10:00",
            ["2027-03-14T08:30", "2027-03-14T09:30"],
            id="hourly-has-no-extra-run-after-the-gap",
        ),
        pytest.param(
            "Europe/Paris", "15 0-23 * * *", ONCE, "2026-10-24T23:30", "2026-10-25T02:30",
            ["2026-10-25T00:15", "2026-10-25T01:15", "2026-10-25T02:15"],
            id="every-hour-by-range-is-a-wildcard",
        ),
        pytest.param(
            "Australia/Lord_Howe", "15 2 * * *", ONCE, "2027-10-02T12:00", "2027-10-02T20:00", ["2027-10-02T15:30"],
            id="half-an-hour-skipped",
        ),
        pytest.param(
            "Australia/Lord_Howe", "45 1 * * *", ONCE, "2027-04-03T12:00", "2027-04-03T20:00", ["2027-04-03T14:45"],
            id="half-an-hour-repeated",
        ),
        pytest.param(
            "Africa/Cairo", "@daily", ONCE, "2027-04-29T12:00", "2027-04-30T12:00", ["2027-04-29T22:00"],
            id="midnight-skipped",
        ),
        pytest.param(
            "America/Havana", "30 0 * * *", ONCE, "2027-11-06T12:00", "2027-11-07T12:00", ["2027-11-07T04:30"],
            id="midnight-repeated",
        ),
        pytest.param(
            "Pacific/Apia", "0 9 * * *", ONCE, "2011-12-29T00:00", "2011-12-31T12:00",
            ["2011-12-29T19:00", "2011-12-30T10:00", "2011-12-30T19:00"],
            id="a-day-skipped",
        ),
        pytest.param(
            "Antarctica/Troll", "30 1 * * *", ONCE, "2027-03-27T12:00", "2027-03-28T12:00", ["2027-03-28T01:00"],
            id="two-hours-skipped",
        ),
        # CronJob's search doesn't look at the day again when midnight is skipped: a Thursday job runs on that Friday
        pytest.param(
            "Africa/Cairo", "0 5 * * 4", KUBERNETES, "2027-04-28T12:00", "2027-05-06T12:00",
            ["2027-04-29T03:00", "2027-04-30T02:00", "2027-05-06T02:00"],
            id="kubernetes-wrong-day",
        ),
        pytest.param(
            "Africa/Cairo", "0 5 * * 4", ONCE, "2027-04-28T12:00", "2027-05-06T12:00",
            ["2027-04-29T03:00", "2027-05-06T02:00"],
            id="right-day",
        ),
    ],
)  # fmt: skip
def test_table(
    zone: str, expression: str, policy: ClockChangePolicy, after: str, through: str, expected: list[str]
) -> None:
    schedule = Schedule.parse(expression, zone, policy=policy)
    found = between(schedule, at(after), at(through))
    assert [tick.strftime("%Y-%m-%dT%H:%M") for tick in found] == expected
    assert schedule.previous(at(through)) == found[-1]
    if policy is ONCE:
        assert schedule.count(at(after), at(through)) == (len(expected), True)


def test_repeated_time_is_not_run_again_from_anywhere_in_its_hour() -> None:
    """CRON-01: an operator that starts at 00:50Z, between the two occurrences, finds nothing new."""
    schedule = Schedule.parse("20 2 * * *", "Europe/Paris")
    tick, tomorrow = at("2026-10-25T00:20"), at("2026-10-26T01:20")
    for seconds in range(0, 3 * 3600, 10):
        now = tick + timedelta(seconds=seconds)
        assert schedule.next(now) == tomorrow
        assert schedule.previous(now) == tick
    assert not schedule.matches(at("2026-10-25T01:20"))


def test_short_intervals_keep_their_real_distance() -> None:
    """CRON-05: 15 ticks, ten real minutes apart, all distinct."""
    schedule = Schedule.parse("*/10 * * * *", "Europe/Paris")
    found = between(schedule, at("2026-10-24T23:49:59"), at("2026-10-25T02:10"))
    assert found == [at("2026-10-24T23:50") + n * timedelta(minutes=10) for n in range(15)]


def test_previous_looks_through_both_passes_of_a_repeated_hour() -> None:
    """In real time 00:50Z shows 02:50 and 01:10Z shows 02:10, an earlier local time at a later instant."""
    schedule = Schedule.parse("5,50 */2 * * *", "Europe/Paris")
    ticks = [at(f"2026-10-25T{time}") for time in ("00:05", "00:50", "01:05", "01:50")]
    assert between(schedule, at("2026-10-24T23:00"), at("2026-10-25T02:30")) == ticks
    for minute in range(150):
        now = at("2026-10-25T00:05") + timedelta(minutes=minute)
        assert schedule.previous(now) == max(tick for tick in ticks if tick <= now)
        assert schedule.next(now) == min([tick for tick in ticks if tick > now] or [at("2026-10-25T03:05")])


def test_kubernetes_loses_a_month_whose_first_midnight_is_missing() -> None:
    """robfig's answer: from 30 September 23:00 it steps to 30 October and 30 November, then days into December."""
    schedule = Schedule.parse("0 5 15 11 *", "America/Asuncion", policy=KUBERNETES)
    assert schedule.next(at("1984-08-01")) == at("1984-12-15T08:00")


def test_a_time_that_kubernetes_leaves_out_can_be_shown() -> None:
    """CRON-02: a skip is visible."""
    schedule = Schedule.parse("40 2 * * *", "America/Denver", policy=KUBERNETES)
    window = at("2027-01-01"), at("2028-01-01")
    assert [wall.isoformat() for wall in schedule.left_out(*window)] == ["2027-03-14T02:40:00"]
    assert Schedule.parse("40 2 * * *", "America/Denver").left_out(*window) == ()
    assert Schedule.parse("40 * * * *", "America/Denver", policy=KUBERNETES).left_out(*window) == ()
    assert Schedule.parse("40 3 * * *", "America/Denver", policy=KUBERNETES).left_out(*window) == ()


def test_preview_is_what_next_says() -> None:
    schedule = Schedule.parse("20 2 * * *", "Europe/Paris")
    after = at("2026-10-24T23:00")
    assert list(schedule.preview(after, 2)) == between(schedule, after, at("2026-10-26T02:00"))


def images(zone: ZoneInfo, change: ClockChange, wall: datetime) -> list[datetime]:
    """The instants at which the zone's clocks show `wall`, near `change`."""
    found = {(wall - offset).replace(tzinfo=UTC) for offset in (change.before, change.after)}
    return sorted(at for at in found if at.astimezone(zone).replace(tzinfo=None) == wall)


@pytest.mark.timeout(600)
def test_every_minute_of_every_clock_change_in_ten_years_runs_exactly_once() -> None:
    """A daily job at each local minute that a change skips or repeats, and some around, in every zone that changes its
    clocks. Zones share their changes: the same instant with the same offsets is the same test, of any of them."""
    first = datetime(2026, 12, 1, tzinfo=UTC)
    zones: dict[ClockChange, str] = {}
    for name in sorted(zone_names()):
        for change in clock_changes(load_zone(name), first, first.replace(year=first.year + 10)):
            zones.setdefault(change, name)
    assert len(zones) > 500
    checked = skipped = repeated = 0
    for change, name in zones.items():
        zone = load_zone(name)
        naive = change.at.replace(tzinfo=None)
        start, end = sorted((naive + change.before, naive + change.after))
        window = (change.at - timedelta(hours=25), change.at + timedelta(hours=25))
        wall = start - timedelta(minutes=3)
        while wall < end + timedelta(minutes=3):
            schedule = Schedule.parse(f"{wall.minute} {wall.hour} * * *", name)
            found = between(schedule, *window)
            today = images(zone, change, wall)
            skipped += not today
            repeated += len(today) == 2
            # once on this day: at its first occurrence, or where the gap ends; and the days before and after as ever
            expected = {today[0] if today else change.at}
            for day in (-1, 1):
                expected |= {tick for tick in images(zone, change, wall + timedelta(days=day)) if tick <= window[1]}
            assert found == sorted(tick for tick in expected if tick > window[0]), (name, wall)
            assert schedule.previous(window[1]) == found[-1], (name, wall)
            assert schedule.count(*window) == (len(found), True), (name, wall)
            checked += 1
            wall += timedelta(minutes=1)
    assert checked > 30_000
    assert min(skipped, repeated) > 10_000
