"""Two replicas, and the one that has claimed a tick's runs is killed: by how much their Pods are later.

Beside it, at the same tick, another pair of replicas with as many objects, of which none is killed. The other replica
stands still until the claims are committed, so that it is the victim that has them.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from bench.database import Database, database
from bench.measures.burst import from_then_on, next_tick, sleep_until
from bench.model import Aim, Result, Row, Scale, difference
from bench.plane import JOBS, Operator, Plane, leased_job, until

REGISTERED: Final = "SELECT count(*) FROM leasedjob.job_registration WHERE namespace = %s"
CLAIMED: Final = "SELECT count(*) FROM leasedjob.job_scheduler WHERE namespace = %s"


@contextlib.contextmanager
def pair(plane: Plane, base: Database, namespace: str) -> Iterator[tuple[Operator, Operator]]:
    """Two replicas that serve one namespace."""
    first, second = (plane.operator(base, LEASEDJOB_NAMESPACES=namespace) for _ in range(2))
    with first.running(), second.running():
        for replica in (first, second):
            until("a replica is ready", replica.ready)
        yield first, second


def turn(plane: Plane, base: Database, number: int, objects: int) -> tuple[float, float]:
    """Of one tick: seconds until the last Pod of the pair that lives, and of the one of which one died."""
    living, dying = (plane.namespace(f"{name}-{number}") for name in ("living", "dying"))

    def made(namespace: str) -> list[datetime]:
        return plane.pods_made(namespace, tick - timedelta(seconds=5))

    with pair(plane, base, living), pair(plane, base, dying) as (victim, other):
        tick = next_tick(12)
        for namespace in (living, dying):
            bodies = [leased_job(f"job-{n}", schedule=from_then_on(tick)) for n in range(objects)]
            plane.post(JOBS.format(namespace), bodies, concurrency=10)
        both = (living, dying)
        until("all are registered", lambda: all(base.ask(REGISTERED, name) == objects for name in both))
        sleep_until(tick - timedelta(seconds=0.3))
        other.process.send_signal(signal.SIGSTOP)
        try:
            with base.connected() as ask:
                until("the tick is claimed", lambda: ask(CLAIMED, dying), every=0.002)
            victim.process.kill()
        finally:
            other.process.send_signal(signal.SIGCONT)
        until("all Pods are there", lambda: all(len(made(name)) == objects for name in both), every=1.0)
        found = [max((at - tick).total_seconds() for at in made(namespace)) for namespace in (living, dying)]
    for namespace in (living, dying):
        plane.clear(JOBS.format(namespace))
        plane.clear(f"/api/v1/namespaces/{namespace}/pods")
    return found[0], found[1]


def measure(scale: Scale) -> Result:
    """Seconds from the tick."""
    objects, rounds = scale.of(10, 2), scale.of(3, 1)
    with database() as base, tempfile.TemporaryDirectory() as folder, Plane(Path(folder)) as plane:
        turns = [turn(plane, base, number, objects) for number in range(rounds)]
        settings: dict[str, Any] = base.settings
    living, dying = [t[0] for t in turns], [t[1] for t in turns]
    return Result(
        "failover",
        "of two operators the one that has claimed is killed at the tick (less is better)",
        (
            Row(f"none killed: tick to the last of {objects} Pods", "s", tuple(living)),
            Row(f"one killed: tick to the last of {objects} Pods", "s", tuple(dying)),
        ),
        (Aim("added delay, s", difference(dying, living), 1.0),),
        {**settings, "killed": "SIGKILL, as soon as the claims are committed", "at the same tick": "both pairs"},
    )
