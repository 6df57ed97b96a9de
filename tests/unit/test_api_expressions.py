"""The rules that are arithmetic or grammar: what CEL says agrees with the library and with the cron evaluator."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasedjob.api.expressions import (
    CODE_RULES,
    DETECTION,
    SCHEDULE_RULES,
    TIME_ZONE_RULES,
    TRUST_RULE,
    trust_holds,
)
from leasedjob.errors import InvalidScheduleError
from leasedjob.lease.trust import Timing, default_heartbeat, probe_for
from leasedjob.schedule import Schedule, zone_names

DURATIONS = (*range(20, 320), *range(320, 86_401, 293), 86_400)


def broken(rules: tuple, value: object) -> list[str]:  # type: ignore[type-arg]
    return [rule.message for rule in rules if rule.holds is not None and not rule.holds(value)]


# --- the trust window ------------------------------------------------------------------------------------------------
def test_detection_table_is_the_probes() -> None:
    for duration in range(20, 86_401):
        assert DETECTION[duration // 10 if duration < 200 else 20] == probe_for(duration).detection, duration


@pytest.mark.parametrize("containers", [1, 2, 3])
@pytest.mark.parametrize("grace", range(5, 61, 5))
def test_whole_numbers_judge_the_trust_window_as_the_library_does(grace: int, containers: int) -> None:
    for duration in DURATIONS:
        edge = int(Timing(duration, 1, grace, 0, containers).trust // 2)  # the longest heartbeat that fits
        for heartbeat in {1, *(max(1, edge + step) for step in (-1, 0, 1)), default_heartbeat(duration)}:
            timing = Timing(duration, heartbeat, grace, 0, containers)
            assert trust_holds(duration, heartbeat, grace, containers) == (timing.problem() is None), timing


def _python(cel: str) -> str:
    """The CEL expression of the trust rule as Python: its arithmetic, `? :` and `has` are all there is in it."""
    text = cel.replace("has(self.lease.heartbeatSeconds)", "(heartbeat is not None)")
    for path, name in (
        ("self.lease.durationSeconds", "duration"),
        ("self.lease.heartbeatSeconds", "heartbeat"),
        ("self.shutdown.terminationGracePeriodSeconds", "grace"),
        ("size(self.template.spec.containers)", "containers"),
    ):
        text = text.replace(path, name)
    text = text.replace("/", "//")
    while match := re.search(
        r"([(\[])([^()\[\]?:]*(?:\([^()]*\))?) \? ([^()\[\]?:]+) : ([^()\[\]?:]+|\(.*?\))([)\]])", text
    ):
        condition, yes, no = match[2], match[3], match[4]
        text = f"{text[: match.start()]}{match[1]}({yes}) if ({condition}) else ({no}){match[5]}{text[match.end() :]}"
    return text


@pytest.mark.parametrize("containers", [1, 2, 5])
def test_the_text_of_the_rule_is_that_formula(containers: int) -> None:
    code = compile(_python(TRUST_RULE.cel), "<rule>", "eval")
    for duration in DURATIONS[::7]:
        for grace in (5, 33, 60):
            edge = max(1, int(Timing(duration, 1, grace, 0, containers).trust // 2))
            for heartbeat in (None, edge, edge + 1):
                used = default_heartbeat(duration) if heartbeat is None else heartbeat
                names = {"duration": duration, "heartbeat": heartbeat, "grace": grace, "containers": containers}
                assert eval(code, {}, names) == (Timing(duration, used, grace, 0, containers).problem() is None), names


@pytest.mark.parametrize("containers", [1, 2, 5])
def test_what_the_rule_says_has_the_librarys_numbers(containers: int) -> None:
    text, _, numbers = TRUST_RULE.explain_cel.rpartition(".format(")
    code = compile(_python(numbers.removesuffix(")")), "<numbers>", "eval")
    for duration in DURATIONS[::7]:
        for grace in (5, 33, 60):
            for heartbeat in (None, 1, duration):
                used = default_heartbeat(duration) if heartbeat is None else heartbeat
                names = {"duration": duration, "heartbeat": heartbeat, "grace": grace, "containers": containers}
                got = eval(code, {}, names)
                if (said := Timing(duration, used, grace, 0, containers).trust_problem()) is not None:
                    assert json.loads(text) % tuple(got) == said


# --- schedule --------------------------------------------------------------------------------------------------------
def refused_by_evaluator(text: str) -> bool:
    try:
        Schedule.parse(text)
    except InvalidScheduleError:
        return True
    return False


_number = st.integers(-1, 70).map(str)
_name = st.sampled_from(
    ["jan", "DEC", "mon", "Sun", "fri", "sat", "foo", "H", "h", "L", "W", "15W", "2#3", "+5", "007", ""]
)
_atom = st.one_of(_number, _name, st.sampled_from(["*", "?"]))
_range = st.one_of(
    _atom,
    st.builds("{}-{}".format, _atom, _atom),
    st.builds("H({}-{})".format, _number, _number),
    st.builds("H({})".format, _atom),
)
_item = st.one_of(
    _range, st.builds("{}/{}".format, _range, st.integers(-1, 100)), st.builds("{}/{}".format, _range, _name)
)
_cron_field = st.lists(_item, min_size=1, max_size=3).map(",".join)
_blank = st.sampled_from([" ", "  ", "\t", "\n", "\r", "\u00a0", "\x0b", "\x1f"])
_cron = st.builds(
    lambda fields, blank, lead: lead + blank.join(fields) + lead,
    st.lists(_cron_field, min_size=4, max_size=6),
    _blank,
    st.sampled_from(["", " ", "\t", "\u2003"]),
)
_macro = st.builds("{}{}{}".format, _blank, st.sampled_from(["@daily", "@Daily", "@every 5m", "@hourly x"]), _blank)


@given(st.one_of(_cron, _macro, st.text(max_size=40)))
def test_rules_refuse_no_schedule_that_the_evaluator_accepts(text: str) -> None:
    messages = broken(SCHEDULE_RULES, text)
    if messages and text:  # an empty one is the schema's business
        assert refused_by_evaluator(text), (text, messages)


@given(st.lists(_cron_field, min_size=5, max_size=5))
def test_what_rules_miss_is_only_what_a_pattern_cannot_see(fields: list[str]) -> None:
    text = " ".join(fields)
    try:
        Schedule.parse(text)
    except InvalidScheduleError as error:
        if not broken(SCHEDULE_RULES, text):
            said = str(error)
            known = ("never fires", "wider than its range", "ends before it begins", "names no value", "is below")
            assert any(reason in said for reason in known), said


@given(st.integers(0, 4), st.integers(1, 200))
def test_a_number_that_is_too_large_is_called_so(position: int, number: int) -> None:
    fields = ["0", "0", "1", "1", "1"]
    size = (60, 24, 31, 12, 7)[position]
    top = (59, 23, 31, 12, 7)[position]
    for text, limit, said in ((f"{number}", top, "out of range"), (f"*/{number}", size, "a step can't be wider")):
        schedule = " ".join([*fields[:position], text, *fields[position + 1 :]])
        found = [rule.explain(schedule) for rule in SCHEDULE_RULES if rule.explain and not rule.holds(schedule)]  # type: ignore[misc]
        assert (bool(found) and said in found[0]) == (number > limit), (schedule, found)


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "part",
    [
        "0",
        "00,",
        "1,",
        ",",
        ",,1",
        "1-",
        "00-00,",
        "H(",
        "H(0-00),",
        "*/01,",
        "00/01,",
        "+0",
        "x ",
        " ",
        "\t",
        "jan,",
        "7",
    ],
)
@pytest.mark.parametrize("end", ["", "x", " x", "-x", "/x", ",x", " * * * *", "x * * * *", "/0 * * * *", ", ,x * * *"])
def test_no_text_takes_long(part: str, end: str) -> None:
    text = (part * 1024)[: 1024 - len(end)] + end
    for schedule in (text, f"* * * * {text[:1000]}", f"* * {text[:1000]} * *"):
        for rule in SCHEDULE_RULES:
            if rule.holds is not None and not rule.holds(schedule) and rule.explain is not None:
                rule.explain(schedule)
    broken(TIME_ZONE_RULES, text)


# --- time zone and code ----------------------------------------------------------------------------------------------
def test_rules_accept_every_time_zone() -> None:
    assert [zone for zone in zone_names() if broken(TIME_ZONE_RULES, zone)] == []


@given(st.text(max_size=40))
def test_zone_rules_refuse_no_zone_and_no_path_passes(text: str) -> None:
    if ".." in text or text.startswith("/") or text.lower() == "local":
        assert broken(TIME_ZONE_RULES, text)


@pytest.mark.parametrize("blank", ["\t", "\n", "\v", "\f", "\r", " ", "\u00a0", "\u1680", "\u2028", "\u3000", "\ufeff"])
def test_a_code_of_javascripts_blanks_is_blank(blank: str) -> None:
    assert broken(CODE_RULES, blank * 2) == ["must not be blank"]
    assert broken(CODE_RULES, f"{blank}x{blank}") == []
