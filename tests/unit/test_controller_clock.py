"""The operator's estimate of the database's clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from leasedjob.controller.clock import DatabaseClock

NOON = datetime(2026, 7, 20, 12, tzinfo=UTC)


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def observed(*round_trips: tuple[float, float, float]) -> float:
    """The offset in seconds, after round trips of (asked, answered, the database's time), seconds after noon."""
    clock = DatabaseClock()
    for asked, answered, there in round_trips:
        clock.observe(NOON + seconds(asked), NOON + seconds(answered), NOON + seconds(there))
    return clock.offset.total_seconds()


@pytest.mark.parametrize("ahead", [-600.0, 600.0])
def test_a_machine_that_is_wrong_by_minutes_is_corrected(ahead: float) -> None:
    assert abs(observed((0, 0.01, ahead)) - ahead) <= 0.01


def test_clocks_that_agree_are_left_alone() -> None:
    assert observed((0, 0.2, 0.05), (1, 1.2, 1.15)) == 0


def test_a_slow_round_trip_spoils_nothing() -> None:
    assert observed((0, 0.01, 5.005), (1, 9, 13.9)) == observed((0, 0.01, 5.005))


def test_a_clock_that_is_set_is_followed() -> None:
    assert abs(observed((0, 0.01, 0), (3600, 3600.01, 0)) + 3600) <= 0.01


def test_a_clock_that_was_set_back_while_it_was_read_says_nothing() -> None:
    assert observed((0, 0.01, 5), (10, -3000, 15)) == observed((0, 0.01, 5))
