"""What is due after a gap: which missed ticks start, which are dropped, and why."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from leasedjob.schedule import DueTicks, MissedRunPolicy, Schedule, TickRange, TickReason, ticks_due

LATEST, ALL, SKIP = MissedRunPolicy.RunLatest, MissedRunPolicy.RunAll, MissedRunPolicy.Skip
ON_TIME = timedelta(seconds=5)
HOURLY = Schedule.parse("0 * * * *")


def at(text: str) -> datetime:
    return datetime.fromisoformat(f"2027-03-01T{text}").replace(tzinfo=UTC)


def due(
    policy: MissedRunPolicy,
    watermark: str,
    now: str,
    *,
    deadline: int | None = None,
    limit: int = 100,
    schedule: Schedule = HOURLY,
) -> DueTicks:
    return ticks_due(schedule, at(watermark), at(now), policy, limit=limit, starting_deadline=deadline, on_time=ON_TIME)


def dropped(first: str, last: str, count: int, reason: TickReason) -> TickRange:
    return TickRange(at(first), at(last), count, True, reason)


@pytest.mark.parametrize("policy", MissedRunPolicy)
class TestOnTime:
    def test_nothing_is_due_between_ticks(self, policy: MissedRunPolicy) -> None:
        assert due(policy, "03:00", "03:59:59.999999") == DueTicks()

    def test_a_tick_is_due_at_its_instant(self, policy: MissedRunPolicy) -> None:
        assert due(policy, "03:00", "04:00") == DueTicks((at("04:00"),))

    def test_the_watermark_itself_is_not_due(self, policy: MissedRunPolicy) -> None:
        assert due(policy, "04:00", "04:00:01") == DueTicks()

    def test_a_watermark_ahead_of_the_clock_is_nothing(self, policy: MissedRunPolicy) -> None:
        assert due(policy, "09:00", "04:00") == DueTicks()

    def test_a_late_first_look_keeps_its_time(self, policy: MissedRunPolicy) -> None:
        assert due(policy, "03:00", "04:00:04", deadline=10) == DueTicks((at("04:00"),))


class TestRunLatest:
    def test_one_catches_up_for_all(self) -> None:
        assert due(LATEST, "03:00", "09:20") == DueTicks(
            (at("09:00"),), (dropped("04:00", "08:00", 5, TickReason.MissedRunPolicy),)
        )

    def test_within_the_deadline(self) -> None:
        assert due(LATEST, "03:00", "04:10", deadline=600) == DueTicks((at("04:00"),))

    def test_past_the_deadline(self) -> None:
        assert due(LATEST, "03:00", "04:10:00.000001", deadline=600) == DueTicks(
            (), (dropped("04:00", "04:00", 1, TickReason.StartingDeadline),)
        )

    def test_all_past_the_deadline(self) -> None:
        assert due(LATEST, "03:00", "09:20", deadline=600) == DueTicks(
            (), (dropped("04:00", "09:00", 6, TickReason.StartingDeadline),)
        )

    def test_after_five_hours_away(self) -> None:
        """CRON-13: 150 ticks missed, one run, the rest in one range."""
        found = due(LATEST, "00:00", "05:01", schedule=Schedule.parse("*/2 * * * *"))
        assert found == DueTicks((at("05:00"),), (dropped("00:02", "04:58", 149, TickReason.MissedRunPolicy),))


class TestRunAll:
    def test_oldest_first(self) -> None:
        assert due(ALL, "03:00", "06:20") == DueTicks((at("04:00"), at("05:00"), at("06:00")))

    def test_limit_keeps_the_most_recent(self) -> None:
        assert due(ALL, "03:00", "09:20", limit=2) == DueTicks(
            (at("08:00"), at("09:00")), (dropped("04:00", "07:00", 4, TickReason.MissedRunLimit),)
        )

    def test_limit_that_is_just_enough(self) -> None:
        assert due(ALL, "03:00", "05:20", limit=2) == DueTicks((at("04:00"), at("05:00")))

    def test_deadline(self) -> None:
        assert due(ALL, "03:00", "06:00", deadline=3600) == DueTicks(
            (at("05:00"), at("06:00")), (dropped("04:00", "04:00", 1, TickReason.StartingDeadline),)
        )

    def test_deadline_and_limit(self) -> None:
        assert due(ALL, "03:00", "09:00", deadline=3 * 3600, limit=2) == DueTicks(
            (at("08:00"), at("09:00")),
            (
                dropped("04:00", "05:00", 2, TickReason.StartingDeadline),
                dropped("06:00", "07:00", 2, TickReason.MissedRunLimit),
            ),
        )


class TestSkip:
    def test_late_is_dropped(self) -> None:
        assert due(SKIP, "03:00", "05:00:05.000001") == DueTicks(
            (), (dropped("04:00", "05:00", 2, TickReason.MissedRunPolicy),)
        )

    def test_the_one_on_time_starts(self) -> None:
        assert due(SKIP, "03:00", "05:00:05") == DueTicks(
            (at("05:00"),), (dropped("04:00", "04:00", 1, TickReason.MissedRunPolicy),)
        )


def test_edit_never_fires_an_old_tick() -> None:
    """CRON-15: the watermark moves to the edit, so no old time is due, nor a new one that has passed today."""
    edited = Schedule.parse("15 6 * * *")
    assert due(LATEST, "14:00", "14:00:01", schedule=edited) == DueTicks()
    assert due(LATEST, "14:00", "22:30:01", schedule=edited) == DueTicks()
    assert edited.next(at("14:00")) == at("06:15") + timedelta(days=1)


def test_resume_replays_nothing() -> None:
    """CRON-14: the watermark moves to the resume at 12:07."""
    schedule = Schedule.parse("*/20 * * * *")
    assert due(LATEST, "12:07", "12:19:59", schedule=schedule) == DueTicks()
    assert due(LATEST, "12:07", "12:20", schedule=schedule) == DueTicks((at("12:20"),))


@pytest.mark.parametrize("policy", MissedRunPolicy)
def test_time_does_not_grow_with_the_ticks(policy: MissedRunPolicy) -> None:
    """CRON-13: 400 days of `* * * * *`; the aim is 5 ms on a quiet machine, ten times that is a broken bound."""
    schedule = Schedule.parse("* * * * *", "Europe/Paris")
    now = datetime(2027, 11, 3, 12, 0, 30, tzinfo=UTC)
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        found = ticks_due(schedule, now - timedelta(days=400), now, policy, on_time=ON_TIME)
        taken.append(time.perf_counter() - started)
    assert min(taken) < 0.05
    claimed = len(found.claims)
    assert claimed == {LATEST: 1, ALL: 100, SKIP: 0}[policy]
    assert sum(r.count for r in found.dropped) + claimed == 400 * 1440
    assert all(r.count_is_exact for r in found.dropped)


def test_a_gap_of_centuries_is_counted_at_least() -> None:
    schedule = Schedule.parse("0 0 * * *")
    now = datetime(2427, 1, 1, 12, tzinfo=UTC)
    (gap,) = ticks_due(schedule, datetime(2027, 1, 1, tzinfo=UTC), now, LATEST, on_time=ON_TIME).dropped
    assert not gap.count_is_exact
    assert gap.count == 20_000
    assert gap.first == datetime(2027, 1, 2, tzinfo=UTC)
