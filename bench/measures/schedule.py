"""Parse and next, beside cronsim and croniter; and the latest missed tick after a long gap.

Each figure goes over the same expressions, zones and instants; no instant comes twice, so nobody's cache answers. The
peers get the start in the schedule's zone, which is how they are told of zones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from time import perf_counter
from typing import Final
from zoneinfo import ZoneInfo

from bench.model import Aim, Result, Row, Scale, ratio, rows, turns
from leasedjob.schedule import MissedRunPolicy, Schedule, ticks_due

EXPRESSIONS: Final = (
    "* * * * *",
    "*/5 * * * *",
    "0 * * * *",
    "0 3 * * *",
    "30 9 * * 1-5",
    "15 4 1,15 * *",
    "0 0 1 1 *",
    "0 12 29 2 *",
)
ZONES: Final = ("Etc/UTC", "Europe/Rome", "America/New_York", "Asia/Kolkata")
START: Final = datetime(2026, 1, 1, tzinfo=UTC)
STEP: Final = timedelta(hours=7, minutes=13, seconds=29)
GAP: Final = timedelta(days=400)

Next = Callable[[str, str, datetime], datetime | None]


def _leasedjob(expression: str, zone: str, after: datetime) -> datetime | None:
    return Schedule.parse(expression, zone).next(after)


def _peers() -> dict[str, Next]:
    """Those that are installed; `make bench` installs both."""
    found: dict[str, Next] = {}
    try:
        cronsim = import_module("cronsim").CronSim

        def by_cronsim(expression: str, zone: str, after: datetime) -> datetime | None:
            tick: datetime = next(cronsim(expression, after.astimezone(ZoneInfo(zone))))
            return tick

        found["cronsim"] = by_cronsim
    except ImportError:
        pass
    try:
        croniter = import_module("croniter").croniter

        def by_croniter(expression: str, zone: str, after: datetime) -> datetime | None:
            tick: datetime = croniter(expression, after.astimezone(ZoneInfo(zone))).get_next(datetime)
            return tick

        found["croniter"] = by_croniter
    except ImportError:
        pass
    return found


def _starts(instants: int) -> Iterator[list[datetime]]:
    """The instants of one turn after the other."""
    for turn in itertools.count():
        yield [START + STEP * number + timedelta(minutes=turn) for number in range(instants)]


def _each(call: Next, instants: int) -> Callable[[], float]:
    """Takes microseconds for one parse and one next, the mean over every expression, zone and instant."""
    all_starts = _starts(instants)
    count = len(EXPRESSIONS) * len(ZONES) * instants

    def take() -> float:
        starts = next(all_starts)
        began = perf_counter()
        for expression in EXPRESSIONS:
            for zone in ZONES:
                for start in starts:
                    call(expression, zone, start)
        return (perf_counter() - began) / count * 1e6

    return take


def _next_alone(instants: int) -> Callable[[], float]:
    parsed = [Schedule.parse(expression, zone) for expression in EXPRESSIONS for zone in ZONES]
    all_starts = _starts(instants)

    def take() -> float:
        starts = next(all_starts)
        began = perf_counter()
        for schedule in parsed:
            for start in starts:
                schedule.next(start)
        return (perf_counter() - began) / (len(parsed) * instants) * 1e6

    return take


def _missed(policy: MissedRunPolicy) -> Callable[[], float]:
    """Takes milliseconds for what is due after the gap; the schedule is parsed anew, as after a restart."""
    now = START + timedelta(seconds=17)

    def take() -> float:
        began = perf_counter()
        schedule = Schedule.parse("* * * * *", "Europe/Rome")
        due = ticks_due(schedule, now - GAP, now, policy, on_time=timedelta(seconds=5))
        took = (perf_counter() - began) * 1000
        assert due.claims
        assert due.claims[-1] == START
        assert len(due.claims) + sum(dropped.count for dropped in due.dropped) == GAP // timedelta(minutes=1)
        return took

    return take


def _agree(calls: Mapping[str, Next]) -> None:
    """All name the same tick, or the figures would compare different work."""
    for expression in EXPRESSIONS:
        for zone in ZONES:
            answers = {
                tick and tick.astimezone(UTC) for tick in (call(expression, zone, START) for call in calls.values())
            }
            assert len(answers) == 1, (expression, zone, answers)


def measure(scale: Scale) -> Result:
    """Microseconds for parse and next; milliseconds for the latest missed tick."""
    instants, rounds = scale.of(3, 2), scale.of(100, 2)
    calls = {**_peers(), "leasedjob": _leasedjob}
    _agree(calls)
    found = turns(
        {
            **{name: _each(call, instants) for name, call in calls.items()},
            "leasedjob, next alone": _next_alone(instants),
        },
        rounds,
    )
    peer = next(iter(calls))
    table = rows(found, "us", {name: peer for name in calls if name != peer})
    missed = turns({str(policy): _missed(policy) for policy in (MissedRunPolicy.RunLatest, MissedRunPolicy.RunAll)}, 30)
    latest = missed[str(MissedRunPolicy.RunLatest)]
    table += tuple(Row(f"after 400 days, {name}", "ms", tuple(values)) for name, values in missed.items())
    aims = [Aim("latest missed tick after 400 days of * * * * *, ms", median(latest), 5)]
    if "cronsim" in found:
        aims.insert(0, Aim("leasedjob / cronsim, parse + next", ratio(found["leasedjob"], found["cronsim"]), 1.5))
    return Result(
        "schedule",
        "parse + next, mean of all expressions, zones and instants (less is better)",
        table,
        tuple(aims),
        {
            "expressions": len(EXPRESSIONS),
            "zones": len(ZONES),
            "instants": instants,
            **{name: _version(name) for name in ("cronsim", "croniter")},
        },
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
