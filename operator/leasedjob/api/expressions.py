"""The rules on scalars and on timing: CEL beside its Python twin. Pure.

CEL's `matches` is RE2; every pattern here means the same in Python's `re` with `re.ASCII`, so one text serves both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from leasedjob.api.structural import Rule
from leasedjob.identity import MAX_CODE_LENGTH, js_trim, utf16_length
from leasedjob.lease.trust import PRE_STOP_PROBLEM, TRUST_PROBLEM, Timing, probe_for


def quoted(text: str) -> str:
    """`text` as a CEL string literal."""
    return json.dumps(text)


def matches(pattern: str) -> str:
    """CEL: `self` matches `pattern` somewhere."""
    return f"self.matches({quoted(pattern)})"


def matcher(pattern: str) -> Callable[[str], bool]:
    compiled = re.compile(pattern, re.ASCII)
    return lambda text: compiled.search(text) is not None


# --- code ------------------------------------------------------------------------------------------------------------
CODE_RULES: Final = (
    Rule(
        cel="!self.contains('\\u0000')",
        holds=lambda code: "\0" not in code,
        message="must not contain U+0000, which PostgreSQL can't store",
    ),
    Rule(  # JavaScript's white space, which is what trims a code: RE2's \s and \v, the Unicode separators and U+FEFF
        cel="self.matches('[^\\\\s\\\\v\\\\p{Z}\\\\x{FEFF}]')",
        holds=lambda code: js_trim(code) != "",
        message="must not be blank",
    ),
    Rule(  # a character beyond U+FFFF counts twice
        cel=f"self.size() + self.findAll('[\\\\x{{10000}}-\\\\x{{10FFFF}}]').size() <= {MAX_CODE_LENGTH}",
        holds=lambda code: utf16_length(code) <= MAX_CODE_LENGTH,
        message=f"must be at most {MAX_CODE_LENGTH} UTF-16 code units long",
    ),
)

# --- timeZone --------------------------------------------------------------------------------------------------------
ZONE: Final = r"^[A-Za-z0-9_+-][A-Za-z0-9_.+-]*(/[A-Za-z0-9_+-][A-Za-z0-9_.+-]*)*$"
TIME_ZONE_RULES: Final = (
    Rule(
        cel="self.lowerAscii() != 'local'",
        holds=lambda zone: zone.lower() != "local",
        message="must not be Local: an operator's own zone differs between clusters; use an IANA name",
    ),
    Rule(
        cel=f"!self.contains('..') && {matches(ZONE)}",
        holds=lambda zone: ".." not in zone and re.fullmatch(ZONE, zone) is not None,
        message="must be an IANA name such as Europe/Paris or Etc/UTC",
    ),
)

# --- schedule --------------------------------------------------------------------------------------------------------
# A rule refuses only what the evaluator (leasedjob.schedule) refuses as well. What a pattern can't see is left to the
# evaluator: dates that never come, ranges such as 1-wed, the width of some steps, and text beyond printable ASCII.
_PLAIN: Final = r"^[\t\n\f\r -~]*$"
_FIVE: Final = r"^\s*(\S+\s+){4}\S+\s*$"
_MACRO: Final = r"^\s*@(yearly|annually|monthly|weekly|daily|midnight|hourly)\s*$"
_MONTHS: Final = "(?i:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)"
_DAYS: Final = "(?i:sun|mon|tue|wed|thu|fri|sat)"


@dataclass(frozen=True, slots=True)
class _Field:
    """One of the five fields.

    `value` and `star_step` are patterns of a value and of a star's step. A number has one way to match after leading
    zeros: RE2 takes linear time for any pattern, but Python's backtracking would try 2**n ways for n numbers that have
    two.
    """

    name: str
    value: str
    star_step: str
    low: int
    high: int
    size: int  # the widest step
    each: str  # when it begins anew


_FIELDS: Final = (
    _Field("minute", r"[0-9]|[1-5][0-9]", r"[1-9]|[1-5][0-9]|60", 0, 59, 60, "hour"),
    _Field("hour", r"[0-9]|1[0-9]|2[0-3]", r"[1-9]|1[0-9]|2[0-4]", 0, 23, 24, "day"),
    _Field("day of month", r"[1-9]|[12][0-9]|3[01]", r"[1-9]|[12][0-9]|3[01]", 1, 31, 31, "month"),
    _Field("month", rf"[1-9]|1[0-2]|{_MONTHS}", r"[1-9]|1[0-2]", 1, 12, 12, "year"),
    _Field("day of week", rf"[0-7]|{_DAYS}", r"[1-7]", 0, 7, 7, "week"),
)


def _field_pattern(position: int) -> str:
    """A well-formed field at `position`, whatever stands in the others."""
    field = _FIELDS[position]
    single = rf"\+?0*({field.value})"
    ends = rf"({single}|H)"
    hashed = rf"H\({single}-{single}\)"
    item = rf"([*?](/\+?0*({field.star_step}))?|({ends}(-{ends})?|{hashed})(/\+?0*[1-9][0-9]*)?)"
    return rf"^\s*(\S+\s+){{{position}}},*{item}(,+{item})*,*(\s|$)"


def _above(number: int) -> str:
    """A pattern of the numbers above `number`, which is below 100, without leading zeros."""
    tens, ones = divmod(number, 10)
    parts = [rf"{tens or ''}[{ones + 1}-9]"] if ones < 9 else []
    if tens:
        parts += [f"[{tens + 1}-9][0-9]"] if tens < 9 else []
        parts.append("[1-9][0-9]{2,}")
    else:
        parts.append("[1-9][0-9]+")
    return "|".join(parts)


def _hints(position: int) -> tuple[tuple[str, str], ...]:
    """What is likely to be wrong with a malformed field: (a pattern of the schedule, what is said), likeliest first."""
    field = _FIELDS[position]
    start = rf"^\s*(\S+\s+){{{position}}}"
    item, end = r"(\S*,)?", r"(,\S*)?(\s|$)"
    zero = "" if field.low == 0 else "|0+"
    wide = f"a step can't be wider than the field, which begins anew each {field.each}: at most */{field.size}"
    if field.name == "minute":
        wide += "; every 90 minutes is two LeasedJobs, with 0 */3 * * * and 30 1-23/3 * * *"
    return (
        (rf"{start}\S*#", "# (the n-th weekday of a month) is not supported"),
        (rf"{start}{item}([0-9]+|[A-Za-z]{{3}})?(LW?|WL){end}", "L (the last day) is not supported"),
        (rf"{start}{item}[0-9]*W{end}", "W (the nearest weekday) is not supported"),
        (rf"{start}(\S*[^/,\s])?/\+?0+{end}", "a step of 0 is never taken"),
        (rf"{start}{item}[*?]/\+?0*({_above(field.size)}){end}", wide),
        (
            rf"{start}(\S*[,(-])?\+?(0*({_above(field.high)}){zero})([,)/-]\S*)?(\s|$)",
            f"a number is out of range: {field.low} to {field.high}",
        ),
        (rf"{start}{item}h([(,/-]\S*)?(\s|$)", "a hash is written H, not h"),
    )


def _field_rule(position: int) -> Rule:
    field = _FIELDS[position]
    where = f"{field.name} (field {position + 1}): "
    pattern, hints = _field_pattern(position), _hints(position)
    otherwise = f"{where}numbers from {field.low} to {field.high}, lists, ranges, steps, * and H are read, and no more"

    def explain(text: str) -> str:
        return next((where + said for pattern, said in hints if matcher(pattern)(text)), otherwise)

    chain = "".join(f"{matches(hint)} ? {quoted(where + said)} : " for hint, said in hints)
    return Rule(
        cel=_judged(matches(pattern)),
        holds=_unless_judged(matcher(pattern)),
        message=otherwise,
        explain=explain,
        explain_cel=chain + quoted(otherwise),
    )


def _judged(cel: str) -> str:
    """`cel` for five fields of plain text; anything else is another rule's business."""
    return f"self.contains('@') || self.contains('TZ=') || !{matches(_PLAIN)} || !{matches(_FIVE)} || {cel}"


def _is_judged(text: str) -> bool:
    return "@" not in text and "TZ=" not in text and matcher(_PLAIN)(text) and matcher(_FIVE)(text)


def _unless_judged(holds: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda text: not _is_judged(text) or holds(text)


_DESCENDING: Final = "a range ends before it begins: write two ranges, such as 22-23,0-2"
_NAMES: Final = (
    "jan feb mar apr may jun jul aug sep oct nov dec sun mon tue wed thu fri sat"  # positions give the order
)


def _numbers_ascend(text: str) -> bool:
    return all(int(low) <= int(high) for low, high in re.findall(r"\b([0-9]{1,9})-([0-9]{1,9})\b", text, re.ASCII))


def _names_ascend(text: str) -> bool:
    pairs = re.findall(r"([A-Za-z]{3})-([A-Za-z]{3})", text)
    return all(_NAMES.find(low.lower()) <= _NAMES.find(high.lower()) for low, high in pairs)


SCHEDULE_RULES: Final = (
    Rule(
        cel="!self.contains('TZ=')",
        holds=lambda text: "TZ=" not in text,
        message="must not contain TZ= or CRON_TZ=: set timeZone instead",
    ),
    Rule(
        cel="!self.lowerAscii().contains('@every')",
        holds=lambda text: "@every" not in text.lower(),
        message="must not be @every: its ticks would depend on when an operator started; use a step: */15",
    ),
    Rule(
        cel=f"!self.contains('@') || self.lowerAscii().contains('@every') || !{matches(_PLAIN)} || {matches(_MACRO)}",
        holds=lambda text: (
            "@" not in text or "@every" in text.lower() or not matcher(_PLAIN)(text) or matcher(_MACRO)(text)
        ),
        message="is an unknown macro; known are @hourly, @daily, @midnight, @weekly, @monthly, @yearly, @annually",
    ),
    Rule(
        cel=f"self.contains('@') || self.contains('TZ=') || !{matches(_PLAIN)} || {matches(_FIVE)}",
        holds=lambda text: "@" in text or "TZ=" in text or not matcher(_PLAIN)(text) or matcher(_FIVE)(text),
        message="must have five fields: minute, hour, day of month, month, day of week (no seconds, no year)",
    ),
    *(_field_rule(position) for position in range(len(_FIELDS))),
    Rule(
        cel=_judged(
            "self.findAll('\\\\b[0-9]{1,9}-[0-9]{1,9}\\\\b').all(r, int(r.split('-')[0]) <= int(r.split('-')[1]))"
        ),
        holds=_unless_judged(_numbers_ascend),
        message=_DESCENDING,
    ),
    Rule(
        cel=_judged(
            "self.lowerAscii().findAll('[a-z]{3}-[a-z]{3}').all(r, "
            f"{quoted(_NAMES)}.indexOf(r.split('-')[0]) <= {quoted(_NAMES)}.indexOf(r.split('-')[1]))"
        ),
        holds=_unless_judged(_names_ascend),
        message=_DESCENDING,
    ),
)

# --- lease and shutdown ----------------------------------------------------------------------------------------------
# detection by budget = min(20, duration / 10), from the one function that also builds the probe
DETECTION: Final = tuple(probe_for(10 * budget).detection for budget in range(21))
_DURATION: Final = "self.lease.durationSeconds"
_GRACE: Final = "self.shutdown.terminationGracePeriodSeconds"
_CONTAINERS: Final = "size(self.template.spec.containers)"
_DETECTION: Final = f"{list(DETECTION)}[{_DURATION} < 200 ? {_DURATION} / 10 : 20]"
_HEARTBEAT: Final = (
    f"(has(self.lease.heartbeatSeconds) ? self.lease.heartbeatSeconds : ({_DURATION} < 180 ? {_DURATION} / 3 : 60))"
)


def trust_holds(duration: int, heartbeat: int, grace: int, containers: int = 1) -> bool:
    """`Timing.problem`'s rule for the trust window in whole numbers, as CEL has to say it (all seconds)."""
    detection = DETECTION[duration // 10 if duration < 200 else 20]
    return 98 * duration >= 100 * (detection + containers * grace + 5 + 2 * heartbeat)


class Timed(Protocol):
    """What has a timing."""

    @property
    def timing(self) -> Timing: ...


def _timing_holds(spec: Timed) -> bool:
    timing = spec.timing
    return trust_holds(timing.duration, timing.heartbeat, timing.grace, timing.containers)


def _format(text: str, *numbers: str) -> str:
    """CEL: `text` with the numbers at its `%d`, in one step (see `Rule.explain_cel`)."""
    return f"{quoted(text)}.format([{', '.join(numbers)}])"


TRUST_RULE: Final = Rule(
    cel=f"98 * {_DURATION} >= 100 * ({_DETECTION} + {_CONTAINERS} * {_GRACE} + 5 + 2 * {_HEARTBEAT})",
    holds=_timing_holds,
    field="lease.durationSeconds",
    message="leaves less than two heartbeats of trust: 98 % of it must be at least detection (a tenth, at most 20) + "
    "shutdown.terminationGracePeriodSeconds for each workload container + 5 + 2 * lease.heartbeatSeconds",
    explain=lambda spec: spec.timing.trust_problem() or "",
    explain_cel=_format(
        TRUST_PROBLEM,
        _DURATION,
        f"98 * {_DURATION} / 100 - {_DETECTION} - {_CONTAINERS} * {_GRACE} - 5",
        _DETECTION,
        _CONTAINERS,
        _GRACE,
        f"2 * {_HEARTBEAT}",
        _HEARTBEAT,
        _GRACE,
    ),
)
PRE_STOP_RULE: Final = Rule(  # not on shutdown itself: a default there is judged before its own fields have theirs
    cel=f"self.shutdown.preStopSeconds <= {_GRACE} - 5",
    holds=lambda spec: spec.timing.pre_stop_problem() is None,
    field="shutdown.preStopSeconds",
    message="must be at most shutdown.terminationGracePeriodSeconds - 5, the time to stop in",
    explain=lambda spec: spec.timing.pre_stop_problem() or "",
    explain_cel=_format(PRE_STOP_PROBLEM, "self.shutdown.preStopSeconds", _GRACE),
)
