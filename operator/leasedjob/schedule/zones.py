"""Time zones from the packaged IANA data, and where their clocks change. Pure but for reading package data, once.

The host's own zone files are never read, so that a name means the same in every image and on every machine.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from importlib.resources import files
from typing import Final
from zoneinfo import ZoneInfo

from leasedjob.errors import InvalidScheduleError

DEFAULT_ZONE: Final = "Etc/UTC"
FIELD: Final = "timeZone"
_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class ClockChange:
    """A change of a zone's offset from UTC: at `at` (UTC) the offset goes from `before` to `after`."""

    at: datetime
    before: timedelta
    after: timedelta

    @property
    def skips(self) -> bool:
        """Whether local times are skipped (else they are repeated)."""
        return self.after > self.before


@cache
def zone_names() -> frozenset[str]:
    """Every IANA name in the packaged data, links included."""
    return frozenset(files("tzdata").joinpath("zones").read_text(encoding="utf-8").split())


def load_zone(name: str) -> ZoneInfo:
    """The zone called `name`, an IANA name in its exact spelling.

    Raises InvalidScheduleError with field `timeZone`.
    """
    # The list decides before anything is opened: no path, no "Local", no other spelling where file names ignore case.
    if not isinstance(name, str) or name not in zone_names():
        raise InvalidScheduleError(FIELD, _problem(name))
    return _load(name)


@cache
def _load(name: str) -> ZoneInfo:
    resource = files("tzdata").joinpath("zoneinfo", *name.split("/"))
    with resource.open("rb") as stream:
        return ZoneInfo.from_file(stream, key=name)


def _problem(name: object) -> str:
    if not isinstance(name, str):
        return "must be text"
    if not name:
        return f"is empty; leave it out for {DEFAULT_ZONE}"
    shown = name if len(name) <= 64 else name[:61] + "..."
    shown = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in shown)
    said = f'"{shown}" is not an IANA time zone name'
    folded = {known.lower(): known for known in zone_names()}
    if name.lower() in folded:
        return f'{said}; did you mean "{folded[name.lower()]}"?'
    close = difflib.get_close_matches(name, zone_names(), n=1, cutoff=0.8) if len(name) <= 64 else []
    if close:
        return f'{said}; did you mean "{close[0]}"?'
    return f"{said} such as Europe/Rome (abbreviations and offsets are none)"


def offset_at(zone: ZoneInfo, instant: datetime) -> timedelta:
    """The offset from UTC at `instant` (aware)."""
    offset = instant.astimezone(zone).utcoffset()
    assert offset is not None
    return offset


def offsets_of(zone: ZoneInfo, wall: datetime) -> tuple[timedelta, timedelta]:
    """The offsets before and after the clock change that skips or repeats `wall` (naive local time, fold 0).

    First > second: the local time is repeated. First < second: it is skipped. Equal: neither (PEP 495).
    """
    first, second = zone.utcoffset(wall), zone.utcoffset(wall.replace(fold=1))
    assert first is not None
    assert second is not None
    return first, second


def change_at_wall(zone: ZoneInfo, wall: datetime, offsets: tuple[timedelta, timedelta]) -> datetime:
    """The instant (UTC, naive) of the clock change that skips or repeats the naive local time `wall`."""
    before, after = offsets
    # Skipped: the change lies in (wall - after, wall - before]. Repeated: in (wall - before, wall - after].
    low, high = sorted((wall - before, wall - after))
    return _change_in(zone, low, high, after)


def _change_in(zone: ZoneInfo, low: datetime, high: datetime, after: timedelta) -> datetime:
    """The first second in (low, high] from which on the zone has the offset `after`; naive UTC throughout."""
    seconds = int((high - low).total_seconds())
    good, bad = seconds, 0
    while good - bad > 1:
        middle = (good + bad) // 2
        if offset_at(zone, (low + timedelta(seconds=middle)).replace(tzinfo=UTC)) == after:
            good = middle
        else:
            bad = middle
    return low + timedelta(seconds=good)


def clock_changes(zone: ZoneInfo, after: datetime, through: datetime) -> tuple[ClockChange, ...]:
    """The clock changes in (after, through], oldest first. The first look at a zone's year takes about 0.5 ms."""
    after, through = after.astimezone(UTC), through.astimezone(UTC)
    return tuple(
        change
        for year in range(after.year, through.year + 1)
        for change in _changes_of_year(zone, year)
        if after < change.at <= through
    )


@lru_cache(maxsize=8192)
def _changes_of_year(zone: ZoneInfo, year: int) -> tuple[ClockChange, ...]:
    found: list[ClockChange] = []
    at = datetime(year, 1, 1, tzinfo=UTC) - timedelta(seconds=1)  # a change at the first second belongs to the year
    end = datetime(year + 1, 1, 1, tzinfo=UTC) - timedelta(seconds=1)
    offset = offset_at(zone, at)
    while at < end:
        following = min(at + _DAY, end)
        new = offset_at(zone, following)
        if new != offset:
            change = _change_in(zone, at.replace(tzinfo=None), following.replace(tzinfo=None), new)
            found.append(ClockChange(change.replace(tzinfo=UTC), offset, new))
        at, offset = following, new
    return tuple(found)
