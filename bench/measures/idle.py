"""10,000 objects with nothing due: memory, processor, writes to the API server, and from start to ready.

Beside it a kopf operator that watches the same objects and does nothing with them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.database import Database, database
from bench.model import Aim, Result, Row, Scale, ratio, ratios
from bench.plane import JOBS, Operator, Plane, Process, leased_job, now, until
from bench.proc import memory, processor_seconds

YEARLY: Final = "0 0 1 1 *"
SETTLE: Final = 12.0  # seconds without a write, after which it is idle


@dataclass(frozen=True, slots=True)
class Idle:
    """What was seen of one process."""

    ready: float  # seconds from its start
    resident: float  # MiB
    unshared: float
    processor: float  # percent of a core
    writes: float  # a minute


def quiet(plane: Plane, seconds: float, most: float = 900.0) -> None:
    """Until nobody but the bench has written for so long."""
    since, last, changed = now(), -1, time.monotonic()
    ends = changed + most
    while time.monotonic() - changed < seconds:
        assert time.monotonic() < ends, "it never stops writing"
        time.sleep(2.0)
        if (found := len(plane.writes(since))) != last:
            last, changed = found, time.monotonic()


def watched(plane: Plane, process: Process, seconds: float) -> Idle:
    """From its start until it has been idle for so many seconds."""
    with process.running():
        ready = until("it is ready", process.ready, seconds=600, every=0.05)
        quiet(plane, SETTLE)
        pid = process.process.pid
        size, used, since = memory(pid), processor_seconds(pid), now()
        time.sleep(seconds)
        return Idle(
            ready,
            size.resident,
            size.unshared,
            (processor_seconds(pid) - used) / seconds * 100,
            len(plane.writes(since)) / seconds * 60,
        )


def fill(plane: Plane, base: Database, namespace: str, before: int, count: int) -> Operator:
    """Objects up to this number, each known to the database and shown as accepted; the operator, which has ended."""
    operator = plane.operator(base)
    bodies = [leased_job(f"job-{n}", schedule=YEARLY) for n in range(before, count)]
    plane.post(JOBS.format(namespace), bodies, concurrency=20)
    with operator.running():
        until("the operator is ready", operator.ready, seconds=600)
        registered = "SELECT count(*) FROM leasedjob.job_registration"
        until("all are registered", lambda: base.ask(registered) == count, seconds=900, every=1.0)
        quiet(plane, SETTLE)
    return operator


def measure(scale: Scale) -> Result:
    """Each side is started anew with all objects there, and is looked at when it has nothing more to do."""
    count, rounds, seconds = scale.of(10_000, 50), scale.of(2, 1), scale.of(60, 5)
    found: dict[str, list[Idle]] = {"kopf": [], "operator": []}
    with database() as base, tempfile.TemporaryDirectory() as folder, Plane(Path(folder)) as plane:
        operator = fill(plane, base, plane.namespace("idle"), 0, count)
        sides: dict[str, Process] = {"kopf": plane.bare_kopf(count), "operator": operator}
        for turn in range(rounds):
            for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
                found[name].append(watched(plane, sides[name], seconds))
        settings: dict[str, Any] = base.settings
    return Result(
        "idle",
        f"{count:,} objects, nothing due (less is better)",
        *_table(found),
        {
            **settings,
            "objects": "LeasedJobs of about 1.5 kB with a status; a yearly schedule",
            "ready": "operator: /readyz; kopf: every object handled",
            "processor and writes": f"over {seconds} s, from {SETTLE:g} s after the last write on",
        },
    )


def _table(found: dict[str, list[Idle]]) -> tuple[tuple[Row, ...], tuple[Aim, ...]]:
    table: list[Row] = []

    def side(name: str, field: str) -> Sequence[float]:
        return [getattr(idle, field) for idle in found[name]]

    for field, unit in (("resident", "MiB"), ("unshared", "MiB"), ("ready", "s"), ("processor", "% of a core")):
        theirs, mine = side("kopf", field), side("operator", field)
        table.append(Row(f"kopf, {field}", unit, tuple(theirs)))
        if field == "processor":  # next to nothing: a ratio says nothing
            table.append(Row(f"operator, {field}", unit, tuple(mine)))
        else:
            table.append(Row(f"operator, {field}", unit, tuple(mine), ratios(mine, theirs), "kopf"))
    writes = side("operator", "writes")
    table.append(Row("operator, API writes", "a minute", tuple(writes)))
    return tuple(table), (
        Aim("operator / kopf, resident", ratio(side("operator", "resident"), side("kopf", "resident")), 1.4),
        Aim("operator, resident, MiB", max(side("operator", "resident")), 300),
        Aim("operator, % of a core", max(side("operator", "processor")), 2.0),
        Aim("operator, API writes a minute", max(writes), 0),
        Aim("operator / kopf, start to ready", ratio(side("operator", "ready"), side("kopf", "ready")), 2.0),
    )
