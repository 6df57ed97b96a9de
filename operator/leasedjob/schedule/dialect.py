"""The cron dialect: an expression becomes the set of local minutes at which it is due. Pure.

The rule is docs/decisions/0004-cron-dialect.md. What CronJob accepts (the standard parser of robfig/cron v3) means the
same here; what it would read with a wider meaning than was written, and what can never be due, is refused with a
message that names the field.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

from leasedjob.errors import InvalidScheduleError

MAX_LENGTH: Final = 1024
"""Longest expression in characters; the longest useful one (every minute of an hour as a list) has under 300."""

MACROS: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}

_MONTH_NAMES = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTHS = {name: number for number, name in enumerate(_MONTH_NAMES, 1)}
_WEEKDAYS = {name: number for number, name in enumerate(("sun", "mon", "tue", "wed", "thu", "fri", "sat"))}
_LONGEST_MONTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_NUMBER = re.compile(r"\+?([0-9]+)")
_HASHED = re.compile(r"H(?:\(([^()]*)\))?")


@dataclass(frozen=True, slots=True)
class _Position:
    """One of the five fields: its name in messages, its values, and where `H` may fall."""

    name: str
    low: int
    high: int  # the end of `*` and of an open step such as `5/20`
    top: int  # the largest number that may be written
    hash_high: int  # `H` alone falls into low..hash_high
    names: dict[str, int]
    each: str  # when it begins anew


_POSITIONS: Final = (
    _Position("minute", 0, 59, 59, 59, {}, "hour"),
    _Position("hour", 0, 23, 23, 23, {}, "day"),
    _Position("day of month", 1, 31, 31, 28, {}, "month"),  # 28: a hashed day has to come in every month
    _Position("month", 1, 12, 12, 12, _MONTHS, "year"),
    _Position("day of week", 0, 6, 7, 6, _WEEKDAYS, "week"),  # 7 is Sunday too
)


@dataclass(frozen=True, slots=True)
class Fields:
    """What an expression says, as bit sets: bit n stands for the value n.

    `either_day` is cron's rule for days: with day of month and day of week both restricted a day is due when either
    matches. `real_time` says that the hour is a wildcard or has a step, so that the schedule keeps its real distances
    through a clock change.
    """

    minutes: int
    hours: int
    days: int
    months: int
    weekdays: int  # bit 0 is Sunday
    either_day: bool
    real_time: bool


@dataclass(frozen=True, slots=True)
class _Field:
    bits: int
    star: bool  # a star that no step above 1 has cleared: the field restricts nothing
    stepped: bool
    smallest: int  # the smallest value; where `H` decides, the largest that it may be for some code


def parse_fields(expression: str, *, code: str = "", field: str = "schedule") -> Fields:
    """Read `expression`.

    `code` is the job's code: `H` is a hash of it, so that every cluster finds the same minute.
    `field` is the name of the resource's field, for messages: `schedule` or `schedules[i]`.

    Raises InvalidScheduleError; its message names the resource's field, the cron field and what was written.
    """
    if not isinstance(expression, str):
        raise InvalidScheduleError(field, "must be text")
    if len(expression) > MAX_LENGTH:
        raise InvalidScheduleError(field, f"is {len(expression)} characters long, at most {MAX_LENGTH} are read")
    texts = _five_fields(expression, field)
    parsed: list[_Field] = []
    for number, (position, text) in enumerate(zip(_POSITIONS, texts, strict=True), 1):
        try:
            parsed.append(_parse_field(text, position, code))
        except _Refusal as refusal:
            raise InvalidScheduleError(field, f"{position.name} (field {number}): {refusal}") from None
    minutes, hours, days, months, weekdays = parsed
    fields = Fields(
        minutes=minutes.bits,
        hours=hours.bits,
        days=days.bits,
        months=months.bits,
        weekdays=weekdays.bits,
        either_day=not (days.star or weekdays.star),
        real_time=hours.star or hours.stepped or hours.bits == (1 << 24) - 1,
    )
    if not fields.either_day and not _date_exists(days.smallest, fields.months):
        raise InvalidScheduleError(
            field, f"never fires: no month of {_quoted(texts[3])} has a day of month {_quoted(texts[2])}"
        )
    return fields


class _Refusal(Exception):
    """Why one cron field is refused; the caller adds which one."""


def _five_fields(expression: str, field: str) -> list[str]:
    text = expression.strip()
    if not text:
        raise InvalidScheduleError(field, "is empty")
    if text.upper().startswith(("TZ=", "CRON_TZ=")):
        prefix = text.partition("=")[0]
        raise InvalidScheduleError(field, f"a {prefix}= prefix is not supported; put the zone into timeZone")
    if text.startswith("@"):
        if text in MACROS:
            return MACROS[text].split()
        if text.lower().startswith("@every"):
            raise InvalidScheduleError(
                field,
                "@every is not supported, because it counts from whenever a process started; "
                "write a step such as */15 in the minute or hour field",
            )
        raise InvalidScheduleError(field, f"{_quoted(text)} is not one of the macros {', '.join(MACROS)}")
    texts = text.split()
    if len(texts) != 5:
        problem = f"has {len(texts)} field{'s' * (len(texts) != 1)} instead of five"
        if len(texts) in (6, 7):
            problem += " (seconds and years are not supported)"
        raise InvalidScheduleError(field, f"{problem}: {', '.join(p.name for p in _POSITIONS)}")
    return texts


def _parse_field(text: str, position: _Position, code: str) -> _Field:
    bits, star, stepped, smallest = 0, False, False, position.top
    for item in text.split(","):
        if not item:
            continue  # CronJob drops empty items of a list, `1,` is `1`
        item_field = _parse_item(item, position, code)
        bits |= item_field.bits
        star |= item_field.star
        stepped |= item_field.stepped
        smallest = min(smallest, item_field.smallest)
    if not bits:
        raise _Refusal("names no value")
    if position.name == "day of week" and bits & 1 << 7:
        bits = bits & ~(1 << 7) | 1
    return _Field(bits, star, stepped, smallest)


def _parse_item(item: str, position: _Position, code: str) -> _Field:
    base, *steps = item.split("/")
    if len(steps) > 1:
        raise _Refusal(f"{_quoted(item)} has more than one step")
    step = _step(steps[0], item) if steps else 1

    hashed = _HASHED.fullmatch(base)
    if hashed:
        first, last = _hash_range(hashed.group(1), position)
        _check_step(step, first, last, item, position)
        if not steps:
            value = first + _hash(code, position.name) % (last - first + 1)
            return _Field(1 << value, star=False, stepped=False, smallest=last)
        # every `step` within the range, from a hashed place within the first step
        start = first + _hash(code, position.name) % step
        if hashed.group(1) is None:
            last = position.high
        return _Field(_bits(start, last, step), star=False, stepped=True, smallest=first + step - 1)

    if base in ("*", "?"):
        _check_step(step, position.low, position.high, item, position)
        bits = _bits(position.low, position.high, step)
        return _Field(bits, star=step == 1, stepped=bool(steps), smallest=position.low)

    low_text, dash, high_text = base.partition("-")
    if "-" in high_text:
        raise _Refusal(f"{_quoted(item)} has more than one hyphen")
    if dash:
        return _range(low_text, high_text, step, position, code, item)
    first = last = _value(low_text, position)
    if steps:  # `5/20` goes on to the end of the field
        last = max(first, position.high)
    _check_step(step, first, last, item, position)
    return _Field(_bits(first, last, step), star=False, stepped=bool(steps), smallest=first)


def _range(low_text: str, high_text: str, step: int, position: _Position, code: str, item: str) -> _Field:
    if low_text in ("*", "?"):
        raise _Refusal(f"{_quoted(item)}: a wildcard can't begin a range")
    first = position.low if low_text == "H" else _value(low_text, position)
    last = position.high if high_text == "H" else _value(high_text, position)
    if first > last:
        raise _Refusal(f"range {_quoted(item)} ends before it begins; write a wrap-around as two ranges with a comma")
    # Judged before a hashed end is placed, so that the verdict is the same for every code.
    _check_step(step, first, last, item, position)
    smallest = last if low_text == "H" else first
    if low_text == "H":
        first += _hash(code, position.name) % (last - first + 1)
    if high_text == "H":
        last = first + _hash(code, position.name) % (last - first + 1)
    return _Field(_bits(first, last, step), star=False, stepped="/" in item, smallest=smallest)


def _value(text: str, position: _Position) -> int:
    named = position.names.get(text.lower())
    if named is not None:
        return named
    number = _NUMBER.fullmatch(text)
    if number is None:
        raise _Refusal(_unreadable(text, position))
    digits = number.group(1).lstrip("0") or "0"
    value = int(digits) if len(digits) <= 4 else 10_000
    if value < position.low:
        raise _Refusal(f"{_quoted(text)} is below {position.low}")
    if value > position.top:
        raise _Refusal(f"{_quoted(text)} is above {position.high}")
    return value


def _unreadable(text: str, position: _Position) -> str:
    upper = text.upper()
    if "#" in text:
        return f"{_quoted(text)}: # (the n-th weekday of a month) is not supported"
    if re.fullmatch(r"LW?|WL|([0-9]+|[A-Z]{3})L", upper):
        return f"{_quoted(text)}: L (the last day) is not supported"
    if re.fullmatch(r"[0-9]+W|W", upper):
        return f"{_quoted(text)}: W (the nearest weekday) is not supported"
    expected = f"a number from {position.low} to {position.high}"
    if position.names:
        expected += f" or one of {', '.join(position.names)}"
    return f"{_quoted(text)} is not {expected}"


def _step(text: str, item: str) -> int:
    number = _NUMBER.fullmatch(text)
    if number is None:
        raise _Refusal(f"the step in {_quoted(item)} is not a number")
    digits = number.group(1).lstrip("0")
    if not digits:
        raise _Refusal(f"the step in {_quoted(item)} is 0")
    return int(digits) if len(digits) <= 4 else 10_000


def _check_step(step: int, first: int, last: int, item: str, position: _Position) -> None:
    # `*/60` is once a round and says so; `*/90` reads as every 90 minutes and would be once an hour
    if step > last - first + 1:
        raise _Refusal(
            f"the step in {_quoted(item)} is wider than its range of {last - first + 1}, and the field begins anew "
            f"each {position.each}: the step would never be taken"
        )


def _hash_range(inner: str | None, position: _Position) -> tuple[int, int]:
    if inner is None:
        return position.low, position.hash_high
    low_text, dash, high_text = inner.partition("-")
    if not dash or "-" in high_text:
        raise _Refusal(f"{_quoted(f'H({inner})')} needs a range such as H({position.low}-{position.hash_high})")
    first, last = _value(low_text, position), _value(high_text, position)
    if first > last:
        raise _Refusal(f"range in {_quoted(f'H({inner})')} ends before it begins")
    return first, last


def _hash(code: str, field_name: str) -> int:
    """A number that depends on the code and the field alone; changing this moves every schedule with an `H`."""
    digest = hashlib.sha256(f"{code}\n{field_name}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def _bits(first: int, last: int, step: int) -> int:
    bits = 0
    for value in range(first, last + 1, step):
        bits |= 1 << value
    return bits


def _date_exists(day: int, months: int) -> bool:
    return any(months >> month & 1 and day <= longest for month, longest in enumerate(_LONGEST_MONTHS, 1))


def _quoted(text: str) -> str:
    """`text` for a message: quoted, one line, cut."""
    shown = text if len(text) <= 64 else text[:61] + "..."
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in shown) + '"'
