"""The cron dialect: what is accepted, with which meaning, and what is refused in which words."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from leasedjob.errors import InvalidScheduleError
from leasedjob.schedule import MACROS, Schedule

SUNDAY = datetime(2027, 1, 31, tzinfo=UTC)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def ticks(expression: str, after: str, n: int) -> list[str]:
    found = Schedule.parse(expression).preview(at(after), n)
    return [tick.strftime("%Y-%m-%d %H:%M") for tick in found]


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        pytest.param("30 5 * * *", "2027-01-01 05:30", ["2027-01-02 05:30"], id="strictly-later"),
        pytest.param("30 5 * * *", "2027-01-01 05:29:59", ["2027-01-01 05:30"], id="seconds-before"),
        pytest.param(
            "5/20 * * * *",
            "2027-01-01 00:00",
            ["2027-01-01 00:05", "2027-01-01 00:25", "2027-01-01 00:45"],
            id="N/step",
        ),
        pytest.param("10-20/5 0 * * *", "2027-01-01 00:10", ["2027-01-01 00:15", "2027-01-01 00:20"], id="range-step"),
        pytest.param("1,,3, 0 * * *", "2027-01-01", ["2027-01-01 00:01", "2027-01-01 00:03"], id="empty-list-items"),
        pytest.param("0 6 ? * 1", "2027-02-01", ["2027-02-01 06:00", "2027-02-08 06:00"], id="question-mark"),
        pytest.param("0 6 * * 7", "2027-02-01", ["2027-02-07 06:00", "2027-02-14 06:00"], id="7-is-sunday"),
        pytest.param(
            "0 6 * * 5-7", "2027-02-01", ["2027-02-05 06:00", "2027-02-06 06:00", "2027-02-07 06:00"], id="5-to-7"
        ),
        pytest.param(
            "0 6 * * 1/2",
            "2027-02-01 07:00",
            ["2027-02-03 06:00", "2027-02-05 06:00", "2027-02-08 06:00"],
            id="dow-open",
        ),
        pytest.param("  0  6 * * 1 ", "2027-02-01", ["2027-02-01 06:00"], id="extra-blanks"),
        pytest.param("0\t6\t*\t*\t1", "2027-02-01", ["2027-02-01 06:00"], id="tabs"),
        pytest.param("0 6 * * mon-fri", "2027-02-05 07:00", ["2027-02-08 06:00"], id="lower-case-names"),
        pytest.param("0 6 * JUL,Dec SUN", "2027-07-01", ["2027-07-04 06:00"], id="names-of-any-case"),
        pytest.param("0 0 */24 * *", "2027-01-01 01:00", ["2027-01-25 00:00"], id="step-in-days"),
        pytest.param("*/60 */24 * * *", "2027-01-01", ["2027-01-02 00:00"], id="step-of-the-whole-field"),
        pytest.param("+5 007 * * *", "2027-01-01", ["2027-01-01 07:05"], id="plus-and-leading-zeros"),
        pytest.param("0 0 31 * *", "2027-01-31", ["2027-03-31 00:00", "2027-05-31 00:00"], id="short-months-left-out"),
        pytest.param("59 23 31 12 *", "2027-12-31 23:58", ["2027-12-31 23:59", "2028-12-31 23:59"], id="end-of-year"),
        pytest.param("0 0 29 2 *", "2024-02-29", ["2028-02-29 00:00"], id="leap-day"),
        pytest.param("0 0 29 2 *", "2096-02-29", ["2104-02-29 00:00"], id="leap-day-over-2100"),
    ],
)
def test_meaning(expression: str, after: str, expected: list[str]) -> None:
    assert ticks(expression, after, len(expected)) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        # CRON-08: with both day fields restricted either matches ...
        pytest.param("10 3 29 2 5", ["2027-02-05", "2027-02-12", "2027-02-19", "2027-02-26"], id="either"),
        # ... a step clears the star, so this is restricted too ...
        pytest.param("10 3 */31 2 5", ["2027-02-01", "2027-02-05", "2027-02-12", "2027-02-19"], id="step-restricts"),
        # ... but a step of 1 doesn't, nor does a list with a star in it
        pytest.param("10 3 */1 2 5", ["2027-02-05", "2027-02-12", "2027-02-19", "2027-02-26"], id="step-1-is-a-star"),
        pytest.param("10 3 1,* 2 5", ["2027-02-05", "2027-02-12", "2027-02-19", "2027-02-26"], id="star-in-a-list"),
        pytest.param("10 3 15 2 *", ["2027-02-15", "2028-02-15"], id="day-of-month-alone"),
        pytest.param("10 3 1-31 2 5", ["2027-02-01", "2027-02-02", "2027-02-03"], id="a-full-range-is-no-star"),
    ],
)
def test_day_rule(expression: str, expected: list[str]) -> None:
    assert [tick[:10] for tick in ticks(expression, "2027-01-31", len(expected))] == expected


def test_both_day_fields_restricted_is_warned_of() -> None:
    assert "either" in Schedule.parse("10 3 29 2 5").warnings[0]
    assert Schedule.parse("10 3 29 2 *").warnings == ()


@pytest.mark.parametrize("macro", MACROS)
def test_macros_are_their_five_fields(macro: str) -> None:
    assert Schedule.parse(macro).preview(SUNDAY, 5) == Schedule.parse(MACROS[macro]).preview(SUNDAY, 5)


def test_weekly_is_sunday() -> None:
    assert ticks("@weekly", "2027-02-01", 2) == ["2027-02-07 00:00", "2027-02-14 00:00"]


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        # CRON-10 and its kind
        pytest.param("0 6 L * *", ["day of month", '"L"', "not supported"], id="L"),
        pytest.param("0 6 LW * *", ["day of month", "not supported"], id="LW"),
        pytest.param("0 6 L-3 * *", ["day of month", "not supported"], id="L-3"),
        pytest.param("0 6 15W * *", ["day of month", '"15W"', "W"], id="W"),
        pytest.param("0 6 * * 2#3", ["day of week", '"2#3"', "#"], id="hash-sign"),
        pytest.param("0 6 * * friL", ["day of week", "L (the last day)"], id="last-friday"),
        pytest.param("0 22-2 * * *", ["hour", "22-2", "two ranges"], id="wrap-around-hours"),
        pytest.param("0 0 * * fri-mon", ["day of week", "fri-mon"], id="wrap-around-days"),
        pytest.param("0 0 * * sat-sun", ["day of week", "sat-sun"], id="wrap-around-weekend"),
        pytest.param("*/0 * * * *", ["minute", "is 0"], id="step-0"),
        pytest.param("*/61 * * * *", ["minute", "wider"], id="step-above-field"),
        pytest.param("* 0-5/7 * * *", ["hour", "wider"], id="step-above-range"),
        pytest.param("50/20 * * * *", ["minute", "wider"], id="step-above-open-range"),
        pytest.param("*/-5 * * * *", ["minute", "not a number"], id="negative-step"),
        pytest.param("*/ * * * *", ["minute", "not a number"], id="no-step"),
        pytest.param("*/5/5 * * * *", ["minute", "more than one step"], id="two-steps"),
        pytest.param("1-2-3 * * * *", ["minute", "more than one hyphen"], id="two-hyphens"),
        pytest.param("*-5 * * * *", ["minute", "wildcard"], id="range-from-star"),
        pytest.param("-5 * * * *", ["minute"], id="negative"),
        pytest.param("5- * * * *", ["minute"], id="open-range"),
        pytest.param("0 0 6 * * *", ["6 fields", "seconds"], id="seconds"),
        pytest.param("0 0 6 * * * 2027", ["7 fields", "years"], id="year"),
        pytest.param("0 6 * *", ["4 fields", "five"], id="four-fields"),
        pytest.param("61 * * * *", ["minute", '"61"', "above 59"], id="minute-61"),
        pytest.param("0 24 * * *", ["hour", "above 23"], id="hour-24"),
        pytest.param("0 0 0 * *", ["day of month", "below 1"], id="day-0"),
        pytest.param("0 0 * 13 *", ["month", "above 12"], id="month-13"),
        pytest.param("0 0 * * 8", ["day of week", "above"], id="weekday-8"),
        pytest.param("9" * 500 + " * * * *", ["minute", "above 59"], id="500-digits"),
        pytest.param("٥ * * * *", ["minute", "not a number"], id="digits-of-another-script"),
        pytest.param("1_0 * * * *", ["minute"], id="underscore"),
        pytest.param("0 0 * * monday", ["day of week", "sun, mon"], id="long-name"),
        pytest.param("jan * * * *", ["minute"], id="name-in-the-wrong-field"),
        pytest.param(", * * * *", ["minute", "no value"], id="empty-list"),
        pytest.param("* * * * *\0", ["day of week"], id="nul"),
        pytest.param("", ["empty"], id="empty"),
        pytest.param(" \t ", ["empty"], id="blank"),
        pytest.param("* " * 2000, ["characters"], id="too-long"),
        # CRON-11
        pytest.param("CRON_TZ=Asia/Tokyo", ["prefix", "timeZone"], id="CRON_TZ-alone"),
        pytest.param("TZ=", ["prefix", "timeZone"], id="TZ-alone"),
        pytest.param("TZ=Europe/Oslo 30 1 * * *", ["prefix", "timeZone"], id="TZ"),
        pytest.param("CRON_TZ=Mars/Base 0 1 * * *", ["prefix", "timeZone"], id="CRON_TZ-unknown"),
        # CRON-18
        pytest.param("@every 45m", ["@every", "not supported"], id="every"),
        pytest.param("@every 0s", ["@every", "not supported"], id="every-0"),
        pytest.param("@every 1500ms", ["@every", "not supported"], id="every-1500ms"),
        pytest.param("@reboot", ["macros", "@daily"], id="reboot"),
        pytest.param("@Daily", ["macros", "@daily"], id="macro-of-another-case"),
        pytest.param("@daily 5", ["macros"], id="macro-and-more"),
        # CRON-06
        pytest.param("0 4 31 6,9 *", ["never fires", '"31"', '"6,9"'], id="31-june"),
        pytest.param("5 5 30 2 *", ["never fires"], id="30-february"),
        pytest.param("5 5 31 2,4,6,9,11 ?", ["never fires"], id="31-of-every-short-month"),
        pytest.param("5 5 30/1 2 */1", ["never fires"], id="steps-of-1"),
        pytest.param("5 5 H(29-31) 2 *", ["never fires"], id="hashed-day-that-may-not-exist"),
        # H
        pytest.param("H(5) * * * *", ["minute", "H(0-59)"], id="H-without-range"),
        pytest.param("H(30-20) * * * *", ["minute", "before it begins"], id="H-wrap-around"),
        pytest.param("H(0-9)/11 * * * *", ["minute", "wider"], id="H-step-too-wide"),
        pytest.param("h * * * *", ["minute"], id="lower-case-h"),
        pytest.param("H5 * * * *", ["minute"], id="H-and-more"),
    ],
)
def test_refused(expression: str, words: list[str]) -> None:
    with pytest.raises(InvalidScheduleError) as caught:
        Schedule.parse(expression)
    assert caught.value.field == "schedule"
    message = str(caught.value)
    assert message.startswith("schedule: ")
    assert all(word in message for word in words), message
    assert len(message) < 400
    assert message.isprintable()


@pytest.mark.parametrize("value", [None, 5, b"* * * * *", ["* * * * *"]])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(InvalidScheduleError, match="text"):
        Schedule.parse(value)  # type: ignore[arg-type]


def test_the_message_names_the_field_that_the_expression_came_from() -> None:
    with pytest.raises(InvalidScheduleError, match=r"^schedules\[2\]: minute") as caught:
        Schedule.parse("61 * * * *", field="schedules[2]")
    assert caught.value.field == "schedules[2]"


def test_either_day_rule_saves_a_date_that_never_comes() -> None:
    assert ticks("0 0 30 2 mon", "2027-02-01", 1) == ["2027-02-08 00:00"]


class TestHash:
    """`H` is a hash of the job's code: constant for ever, the same in every cluster, spread over many jobs."""

    def minute(self, expression: str, code: str) -> int:
        tick = Schedule.parse(f"{expression} * * * *", code=code).next(SUNDAY)
        assert tick is not None
        return tick.minute

    @pytest.mark.parametrize(
        ("code", "expected"),
        [("shop/sync-orders", "57 18 16 * *"), ("shop/billing", "41 1 19 * *"), ("", "55 8 16 * *")],
    )
    def test_vectors(self, code: str, expected: str) -> None:
        # From `printf '%s\\n%s' CODE FIELD | sha256sum`, first 16 digits. A change moves every user's hashed schedules.
        assert Schedule.parse("H H H * *", code=code).fields == Schedule.parse(expected).fields

    def test_spread(self) -> None:
        seen = {self.minute("H", f"shop/job-{n}") for n in range(600)}
        assert len(seen) == 60

    def test_fields_are_independent(self) -> None:
        pairs = set()
        for n in range(300):
            fields = Schedule.parse("H H * * *", code=f"shop/job-{n}").fields
            pairs.add((fields.minutes.bit_length(), fields.hours.bit_length()))
        assert len(pairs) > 200

    def test_step_keeps_its_distance(self) -> None:
        for n in range(50):
            found = Schedule.parse("H/15 * * * *", code=f"j{n}").preview(SUNDAY, 9)
            assert {b - a for a, b in pairwise(found)} == {timedelta(minutes=15)}

    def test_range(self) -> None:
        assert {self.minute("H(10-12)", f"j{n}") for n in range(60)} == {10, 11, 12}

    def test_step_in_a_range(self) -> None:
        for n in range(50):
            fields = Schedule.parse("H(0-29)/10 * * * *", code=f"j{n}").fields
            assert fields.minutes.bit_count() == 3
            assert fields.minutes.bit_length() <= 30

    def test_hashed_days_come_in_every_month(self) -> None:
        for n in range(60):
            months = [tick.month for tick in Schedule.parse("0 0 H * *", code=f"j{n}").preview(SUNDAY, 12)]
            assert sorted(months) == list(range(1, 13))

    @pytest.mark.parametrize("expression", ["H-30", "30-H", "H-H", "5,H", "H-30/20", "30-H/2", "H,H/20"])
    def test_stands_wherever_a_number_may(self, expression: str) -> None:
        for n in range(100):  # accepted for one code is accepted for every code
            assert Schedule.parse(f"{expression} * * * *", code=f"j{n}").fields.minutes

    @pytest.mark.parametrize("days", ["H", "H/28", "29,H(30-31)", "H(1-29)", "H(20-29)/10"])
    def test_verdict_on_a_date_is_the_same_for_every_code(self, days: str) -> None:
        for n in range(100):
            assert Schedule.parse(f"0 0 {days} 2 *", code=f"j{n}").next(SUNDAY) is not None

    def test_an_hour_by_hash_is_a_fixed_time(self) -> None:
        assert not Schedule.parse("H H * * *", code="a").fields.real_time
        assert Schedule.parse("H H/6 * * *", code="a").fields.real_time


def test_value_semantics() -> None:
    one = Schedule.parse("*/5 * * * *", "Europe/Paris", code="a")
    assert one == Schedule.parse("*/5 * * * *", "Europe/Paris", code="a")
    assert hash(one) == hash(Schedule.parse("*/5 * * * *", "Europe/Paris", code="a"))
    assert one != Schedule.parse("*/5 * * * *", "Europe/Rome", code="a")
    assert one != Schedule.parse("*/6 * * * *", "Europe/Paris", code="a")
    assert "Europe/Paris" in repr(one)


def test_naive_instants_are_refused() -> None:
    schedule = Schedule.parse("* * * * *")
    for call in (schedule.next, schedule.previous, schedule.matches):
        with pytest.raises(ValueError, match="naive"):
            call(datetime(2027, 1, 1))  # noqa: DTZ001


def test_the_ends_of_time() -> None:
    schedule = Schedule.parse("0 0 29 2 *", "Pacific/Kiritimati")
    assert schedule.next(datetime.max.replace(tzinfo=UTC)) is None
    assert schedule.previous(datetime.min.replace(tzinfo=UTC)) is None
    assert schedule.next(datetime(9997, 1, 1, tzinfo=UTC)) is None
    assert schedule.previous(datetime.max.replace(tzinfo=UTC)) is not None
