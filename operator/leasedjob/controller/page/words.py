"""How times are written: relative first, since a person asks how long; the instant beside it. Pure.

`static/page.js` writes relative times on by the same rules, each second.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final

from leasedjob.controller.page.markup import Html, el, join
from leasedjob.schedule import load_zone

NONE: Final = "–"


def span(seconds: float) -> str:
    """At most two units: 42 s, 5 min 3 s, 45 min, 3 h 5 min, 2 d 4 h, 40 d."""
    whole = max(0, int(seconds))
    for size, unit, finer, finer_unit, until in ((86_400, "d", 3_600, "h", 8), (3_600, "h", 60, "min", 10)):
        if whole >= size:
            count, rest = divmod(whole, size)
            more = rest // finer
            return f"{count} {unit} {more} {finer_unit}" if more and count < until else f"{count} {unit}"
    minutes, rest = divmod(whole, 60)
    if not minutes:
        return f"{whole} s"
    return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"


def relative(at: datetime, now: datetime) -> str:
    """`in 5 min`, or `5 min ago`."""
    seconds = (at - now).total_seconds()
    return f"in {span(seconds)}" if seconds > 0 else f"{span(-seconds)} ago"


def instant(at: datetime, zone: tzinfo = UTC, name: str = "UTC") -> str:
    """The whole of it: 2026-07-20 03:00:00 UTC."""
    local = at.astimezone(zone)
    return f"{local:%Y-%m-%d %H:%M:%S} {name}"


def brief(at: datetime, now: datetime) -> str:
    """As short as it is clear, in UTC: of today without the date, and a whole minute without seconds."""
    local, today = at.astimezone(UTC), now.astimezone(UTC)
    clock = f"{local:%H:%M:%S}" if local.second else f"{local:%H:%M}"
    if local.date() == today.date():
        return f"{clock} UTC"
    day = f"{local:%d %b}" if abs(at - now) < timedelta(days=180) else f"{local:%d %b %Y}"
    return f"{day} {clock} UTC"


def both(at: datetime, zone: str = "") -> str:
    """The instant in UTC, and in a job's own zone where that is another one."""
    shown = instant(at)
    if zone and zone not in ("UTC", "Etc/UTC"):
        shown += f" · {instant(at, load_zone(zone), zone)}"
    return shown


def when(at: datetime | None, now: datetime, zone: str = "") -> Html:
    """A time: relative, which goes on by itself, and the instant. Hovering shows it whole, and in `zone`."""
    if at is None:
        return el("span", NONE, class_="none")
    moving = el("time", relative(at, now), datetime=_iso(at), data_rel=True, title=both(at, zone))
    return join(moving, " ", el("span", brief(at, now), class_="sub"))


def left(until: datetime, now: datetime) -> Html:
    """What is left until then, counting down, and the instant; where it has passed, for how long it has."""
    seconds = (until - now).total_seconds()
    shown = f"{span(seconds)} left" if seconds > 0 else f"ran out {span(-seconds)} ago"
    moving = el("time", shown, datetime=_iso(until), data_left=True, title=both(until))
    return join(moving, " ", el("span", f"until {brief(until, now)}", class_="sub"))


def moment(at: datetime, zone: str = "") -> Html:
    """The instant alone."""
    return el("time", instant(at), datetime=_iso(at), title=both(at, zone))


def _iso(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
