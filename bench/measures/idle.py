"""Up to 10,000 objects with nothing due: memory, processor, writes to the API server, and from start to ready.

Beside it, for each number of objects, a kopf operator that watches the same objects and does nothing with them.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.database import Database, database
from bench.model import Aim, Result, Row, Scale, ratios
from bench.plane import JOBS, Operator, Plane, Process, leased_job, now, until
from bench.proc import memory, processor_seconds

SIZES: Final = (100, 1000, 3000, 10_000)
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
    sizes = SIZES if not scale.quick else (20, 50)
    seconds = scale.of(60, 5)
    found: dict[int, dict[str, Idle]] = {}
    with database() as base, tempfile.TemporaryDirectory() as folder, Plane(Path(folder)) as plane:
        namespace, before = plane.namespace("idle"), 0
        for turn, size in enumerate(sizes):
            operator = fill(plane, base, namespace, before, size)
            sides: dict[str, Process] = {"kopf": plane.bare_kopf(size), "operator": operator}
            found[size] = {}
            for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
                found[size][name] = watched(plane, sides[name], seconds if size == sizes[-1] else seconds / 3)
            before = size
        settings: dict[str, Any] = base.settings
    return Result(
        "idle",
        f"{sizes[-1]:,} objects, and fewer, nothing due (less is better)",
        *_table(found),
        {
            **settings,
            "objects": "LeasedJobs of about 1.5 kB with a status; a yearly schedule",
            "ready": "operator: /readyz; kopf: every object handled",
            "processor and writes": f"over {seconds} s (fewer objects: a third), {SETTLE:g} s after the last write",
        },
    )


def _table(found: dict[int, dict[str, Idle]]) -> tuple[tuple[Row, ...], tuple[Aim, ...]]:
    table: list[Row] = []
    for size, sides in found.items():
        theirs, mine = sides["kopf"], sides["operator"]
        for field, unit in (("resident", "MiB"), ("unshared", "MiB"), ("ready", "s")):
            one, other = (getattr(theirs, field),), (getattr(mine, field),)
            table.append(Row(f"{size:,}: kopf, {field}", unit, one))
            table.append(Row(f"{size:,}: operator, {field}", unit, other, ratios(other, one), "kopf"))
        table.append(Row(f"{size:,}: kopf, processor", "% of a core", (theirs.processor,)))
        table.append(Row(f"{size:,}: operator, processor", "% of a core", (mine.processor,)))
        table.append(Row(f"{size:,}: operator, API writes", "a minute", (mine.writes,)))
    most = found[max(found)]
    theirs, mine = most["kopf"], most["operator"]
    return tuple(table), (
        Aim("operator / kopf, resident", mine.resident / theirs.resident, 1.4),
        Aim("operator, resident, MiB", mine.resident, 300),
        Aim("operator, % of a core", mine.processor, 2.0),
        Aim("operator, API writes a minute", max(sides["operator"].writes for sides in found.values()), 0),
        Aim("operator / kopf, start to ready", mine.ready / theirs.ready, 2.0),
    )
