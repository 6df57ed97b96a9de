"""The evaluator against croniter, where the two dialects agree, and where they don't: docs/decisions/0004.

Another implementation, by other people, with another way to search: what both say is not a mistake that was made twice.
"""

from __future__ import annotations

import random
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from croniter import croniter
from tests.properties.test_schedule_robfig import QUESTIONS, SEED, an_expression, near_a_change

from leasedjob.errors import InvalidScheduleError
from leasedjob.schedule import MACROS, Schedule, load_zone, zone_names
from leasedjob.schedule.dialect import parse_fields

REFUSED = "refused"


def in_both_dialects(expression: str) -> bool:
    """Without what the two are known to read differently; see `test_where_the_dialects_differ`."""
    if expression in MACROS:
        return True
    minute, hour, day, month, weekday = expression.split()
    marks = any("?" in field for field in (minute, hour, month))
    open_step = re.search(r"(^|,)[0-9]+/", weekday)
    # a star in a list, or with a step of 1: whether the field is restricted
    half_star = any(re.search(r"\*/1(,|$)|\*,|,\*(,|$)|\?.", field) for field in (day, weekday))
    return not (marks or open_step or half_star or known_otherwise(expression))


def known_otherwise(expression: str) -> bool:
    """Beside a star with a step, weekdays that are all named restrict nothing to croniter, so that the days decide
    alone. And of a list with a 29th or later it passes over days in the month after a shorter one."""
    try:
        fields = parse_fields(expression)
    except InvalidScheduleError:
        return False
    every_day = fields.either_day and (fields.days.bit_count() == 31 or fields.weekdays.bit_count() == 7)
    return every_day or (fields.days >> 29 > 0 and 1 < fields.days.bit_count() < 31)


def by_croniter(expression: str, zone: str, at: datetime) -> datetime | str:
    try:
        found: Any = croniter(expression, at.astimezone(load_zone(zone))).get_next(datetime)
    except ValueError:  # the base of what it raises
        return REFUSED
    assert isinstance(found, datetime)
    return found.astimezone(UTC)


def by_leasedjob(expression: str, zone: str, at: datetime) -> datetime | str:
    try:
        found = Schedule.parse(expression, zone).next(at)
    except InvalidScheduleError:
        return REFUSED
    assert found is not None
    return found


def same_offset(zone: str, *instants: datetime) -> bool:
    return len({at.astimezone(load_zone(zone)).utcoffset() for at in instants}) == 1


@pytest.mark.parametrize(
    "enough",
    [QUESTIONS // 4, pytest.param(QUESTIONS, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])],  # a slow oracle
)
def test_agrees_away_from_clock_changes(enough: int) -> None:
    seed = SEED if enough < QUESTIONS else random.SystemRandom().randrange(10**9)
    print(f"seed {seed}: LEASEDJOB_ORACLE_SEED repeats it")
    dice = random.Random(seed)
    everywhere = sorted(zone_names())
    compared = refused = 0
    while compared < enough:
        expression, zone = an_expression(dice), dice.choice(everywhere)
        if not in_both_dialects(expression):
            continue
        at = datetime(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=dice.randrange(30 * 365 * 86_400))
        ours, theirs = by_leasedjob(expression, zone, at), by_croniter(expression, zone, at)
        if near_a_change(zone, *(x for x in (at, ours, theirs) if isinstance(x, datetime))):
            continue
        if isinstance(ours, datetime) and not same_offset(zone, at, ours):
            continue  # croniter may answer with the offset of the time that it began at
        assert ours == theirs, (expression, zone, at)
        compared += 1
        refused += ours == REFUSED
    assert refused < compared // 50


FRIDAY = datetime(2027, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("expression", "ours", "theirs"),
    [
        pytest.param("0 6 L * *", REFUSED, "2027-01-31T06:00", id="L"),
        pytest.param("0 6 * * 2#3", REFUSED, "2027-01-19T06:00", id="nth-weekday"),
        pytest.param("0 6 * * l5", REFUSED, "2027-01-29T06:00", id="last-weekday"),
        pytest.param("0 0 6 * * *", REFUSED, "2027-01-06T00:00", id="seconds"),
        pytest.param("*/90 * * * *", REFUSED, "2027-01-01T01:00", id="a-step-that-is-never-taken"),
        pytest.param("@Weekly", REFUSED, "2027-01-03T00:00", id="macro-in-capitals"),
        pytest.param("1,,3 * * * *", "2027-01-01T00:01", REFUSED, id="empty-list-item"),
        pytest.param("+5 0 * * *", "2027-01-01T00:05", REFUSED, id="plus"),
        pytest.param("? 6 * * *", "2027-01-01T06:00", REFUSED, id="question-mark-in-minute"),
        pytest.param("H * * * *", "2027-01-01T00:55", REFUSED, id="hash-without-more"),
    ],
)
def test_where_the_dialects_differ(expression: str, ours: str, theirs: str) -> None:
    """CronJob's parser, not croniter's, is the measure; should croniter change its mind, the note has to."""
    said = by_leasedjob(expression, "Etc/UTC", FRIDAY), by_croniter(expression, "Etc/UTC", FRIDAY)
    assert tuple(x if isinstance(x, str) else f"{x:%Y-%m-%dT%H:%M}" for x in said) == (ours, theirs)


@pytest.mark.parametrize(
    ("expression", "zone", "after", "ours", "theirs"),
    [
        ("40 2 * * *", "America/Denver", "2027-03-14T08:00", "2027-03-14T09:00", "2027-03-14T09:40"),
        ("20 2 * * *", "Europe/Paris", "2026-10-25T00:30", "2026-10-26T01:20", "2026-10-26T02:20"),
        ("0 5 */20 * 0-6", "Etc/UTC", "2027-01-02T12:00", "2027-01-03T05:00", "2027-01-21T05:00"),
        ("28 9 1,9,30 * *", "Etc/UTC", "2043-02-17T13:35", "2043-03-01T09:28", "2043-03-09T09:28"),
        ("16 8 16 5 *", "Europe/Luxembourg", "2026-12-30T18:51", "2027-05-16T06:16", "2027-05-16T05:16"),
    ],
)
def test_where_answers_differ(expression: str, zone: str, after: str, ours: str, theirs: str) -> None:
    at = datetime.fromisoformat(after).replace(tzinfo=UTC)
    said = by_leasedjob(expression, zone, at), by_croniter(expression, zone, at)
    assert tuple(f"{x:%Y-%m-%dT%H:%M}" for x in said) == (ours, theirs)
