"""The rules on scalars and on timing: CEL beside its Python twin. Pure.

CEL's `matches` is RE2; every pattern here means the same in Python's `re` with `re.ASCII`, so one text serves both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final, Protocol

from leasedjob.api.structural import Rule
from leasedjob.identity import MAX_CODE_LENGTH, js_trim, utf16_length
from leasedjob.lease.trust import STOP_MARGIN_SECONDS, Timing, probe_for


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
        message="code must not contain U+0000, which PostgreSQL can't store",
    ),
    Rule(  # JavaScript's white space, which is what trims a code: RE2's \s and \v, the Unicode separators and U+FEFF
        cel="self.matches('[^\\\\s\\\\v\\\\p{Z}\\\\x{FEFF}]')",
        holds=lambda code: js_trim(code) != "",
        message="code must not be blank",
    ),
    Rule(  # a character beyond U+FFFF counts twice
        cel=f"self.size() + self.findAll('[\\\\x{{10000}}-\\\\x{{10FFFF}}]').size() <= {MAX_CODE_LENGTH}",
        holds=lambda code: utf16_length(code) <= MAX_CODE_LENGTH,
        message=f"code must be at most {MAX_CODE_LENGTH} UTF-16 code units long",
    ),
)

# --- timeZone --------------------------------------------------------------------------------------------------------
ZONE: Final = r"^[A-Za-z0-9_+-][A-Za-z0-9_.+-]*(/[A-Za-z0-9_+-][A-Za-z0-9_.+-]*)*$"
TIME_ZONE_RULES: Final = (
    Rule(
        cel="self.lowerAscii() != 'local'",
        holds=lambda zone: zone.lower() != "local",
        message="timeZone must not be Local: an operator's own zone differs between clusters; use an IANA name",
    ),
    Rule(
        cel=f"!self.contains('..') && {matches(ZONE)}",
        holds=lambda zone: ".." not in zone and re.fullmatch(ZONE, zone) is not None,
        message="timeZone must be an IANA name such as Europe/Paris or Etc/UTC",
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
# Name, a value, a step of a star. A number has one way to match after leading zeros: RE2 takes linear time for any
# pattern, but Python's backtracking would try 2**n ways for n numbers that have two.
_FIELDS: Final = (
    ("minute", r"[0-9]|[1-5][0-9]", r"[1-9]|[1-5][0-9]|60"),
    ("hour", r"[0-9]|1[0-9]|2[0-3]", r"[1-9]|1[0-9]|2[0-4]"),
    ("day of month", r"[1-9]|[12][0-9]|3[01]", r"[1-9]|[12][0-9]|3[01]"),
    ("month", rf"[1-9]|1[0-2]|{_MONTHS}", r"[1-9]|1[0-2]"),
    ("day of week", rf"[0-7]|{_DAYS}", r"[1-7]"),
)


def _field_pattern(position: int) -> str:
    """A well-formed field at `position`, whatever stands in the others."""
    _, value, star_step = _FIELDS[position]
    single = rf"\+?0*({value})"
    ends = rf"({single}|H)"
    hashed = rf"H\({single}-{single}\)"
    item = rf"([*?](/\+?0*({star_step}))?|({ends}(-{ends})?|{hashed})(/\+?0*[1-9][0-9]*)?)"
    return rf"^\s*(\S+\s+){{{position}}},*{item}(,+{item})*,*(\s|$)"


def _judged(cel: str) -> str:
    """`cel` for five fields of plain text; anything else is another rule's business."""
    return f"self.contains('@') || self.contains('TZ=') || !{matches(_PLAIN)} || !{matches(_FIVE)} || {cel}"


def _is_judged(text: str) -> bool:
    return "@" not in text and "TZ=" not in text and matcher(_PLAIN)(text) and matcher(_FIVE)(text)


def _unless_judged(holds: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda text: not _is_judged(text) or holds(text)


_DESCENDING: Final = "schedule has a range that ends before it begins: write two ranges, such as 22-23,0-2"
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
        message="schedule must not contain TZ= or CRON_TZ=: set timeZone instead",
    ),
    Rule(
        cel="!self.lowerAscii().contains('@every')",
        holds=lambda text: "@every" not in text.lower(),
        message="schedule must not be @every: its ticks would depend on when an operator started; use a step: */15",
    ),
    Rule(
        cel=f"!self.contains('@') || self.lowerAscii().contains('@every') || !{matches(_PLAIN)} || {matches(_MACRO)}",
        holds=lambda text: (
            "@" not in text or "@every" in text.lower() or not matcher(_PLAIN)(text) or matcher(_MACRO)(text)
        ),
        message="schedule has an unknown macro; known are @hourly, @daily, @midnight, @weekly, @monthly, @yearly, "
        "@annually",
    ),
    Rule(
        cel=f"self.contains('@') || self.contains('TZ=') || !{matches(_PLAIN)} || {matches(_FIVE)}",
        holds=lambda text: "@" in text or "TZ=" in text or not matcher(_PLAIN)(text) or matcher(_FIVE)(text),
        message="schedule must have five fields: minute, hour, day of month, month, day of week (no seconds, no year)",
    ),
    *(
        Rule(
            cel=_judged(matches(_field_pattern(position))),
            holds=_unless_judged(matcher(_field_pattern(position))),
            message=f"schedule has a malformed {name} (field {position + 1}): numbers in range, names, lists, ranges, "
            "steps above 0, * and H are accepted; L, W and # are not",
        )
        for position, (name, _, _) in enumerate(_FIELDS)
    ),
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
_DETECTION: Final = f"{list(DETECTION)}[{_DURATION} < 200 ? {_DURATION} / 10 : 20]"
_HEARTBEAT: Final = (
    f"(has(self.lease.heartbeatSeconds) ? self.lease.heartbeatSeconds : ({_DURATION} < 180 ? {_DURATION} / 3 : 60))"
)


def trust_holds(duration: int, heartbeat: int, grace: int) -> bool:
    """`Timing.problem`'s rule for the trust window in whole numbers, as CEL has to say it (all seconds)."""
    detection = DETECTION[duration // 10 if duration < 200 else 20]
    return 98 * duration >= 100 * (detection + grace + 5 + 2 * heartbeat)


class Timed(Protocol):
    """What has a timing."""

    @property
    def timing(self) -> Timing: ...


def _timing_holds(spec: Timed) -> bool:
    timing = spec.timing
    return trust_holds(timing.duration, timing.heartbeat, timing.grace)


def _timing_problem(spec: Timed) -> str:
    return spec.timing.problem() or ""


TRUST_RULE: Final = Rule(
    cel=f"98 * {_DURATION} >= 100 * ({_DETECTION} + {_GRACE} + 5 + 2 * {_HEARTBEAT})",
    holds=_timing_holds,
    field="lease.durationSeconds",
    message="lease.durationSeconds leaves less than two heartbeats of trust: 98 % of it must be at least detection "
    "(a tenth, at most 20) + shutdown.terminationGracePeriodSeconds + 5 + 2 * lease.heartbeatSeconds",
    explain=_timing_problem,
)
PRE_STOP_RULE: Final = Rule(  # not on shutdown itself: a default there is judged before its own fields have theirs
    cel=f"self.shutdown.preStopSeconds <= {_GRACE} - 5",
    holds=lambda spec: spec.timing.pre_stop <= spec.timing.grace - STOP_MARGIN_SECONDS,
    field="shutdown.preStopSeconds",
    message="shutdown.preStopSeconds must be at most shutdown.terminationGracePeriodSeconds - 5, the time to stop in",
)
