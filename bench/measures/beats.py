"""2,000 live leases of one program, kept by the library over 20 connections: how late heartbeats are.

The hard case: all of them were acquired at one instant, so all their heartbeats are due at one instant, too. A beat is
due one interval after the one before was sent; it is late by the time from then until its answer is there. The peer
keeps the same number of timers over the same number of connections, and sends a plain UPDATE of the row.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from itertools import pairwise
from statistics import quantiles
from time import monotonic
from typing import Final
from uuid import UUID

from psycopg.rows import DictRow

from bench.database import database
from bench.model import Aim, Result, Scale, rows
from leasedjob.lease import JobAcquireOptions, JobExecutionLease, JobSchedulerService
from leasedjob.lease.core import Ask
from leasedjob.lease.database import Pool

_BARE: Final = (
    b"UPDATE leasedjob.job_scheduler SET modified_at = clock_timestamp()"
    b" WHERE id = %s AND owner_token = %s AND status = 'RUNNING'"
)


class _Timed(JobSchedulerService):
    """The service, with a stop-watch at its statements."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool.connection)
        self.sent: defaultdict[UUID, list[tuple[float, float]]] = defaultdict(list)  # and answered

    async def _ask(self, ask: Ask) -> list[DictRow]:
        began = monotonic()
        rows = await super()._ask(ask)
        if ask.name in ("acquire", "heartbeat"):
            id = rows[0]["id"] if ask.name == "acquire" else ask.parameters["id"]
            self.sent[id].append((began, monotonic()))
        return rows


def _lateness(sent: dict[UUID, list[tuple[float, float]]], interval: float) -> list[float]:
    """Of each beat, seconds."""
    return [answered - (before + interval) for beats in sent.values() for (before, _), (_, answered) in pairwise(beats)]


async def _library(pool: Pool, leases: int, interval: float, seconds: float) -> list[float]:
    jobs = _Timed(pool)
    over = asyncio.Event()

    async def work(lease: JobExecutionLease) -> None:
        await over.wait()

    def options(number: int) -> JobAcquireOptions:
        return JobAcquireOptions(
            code="bench/beats",
            run_key=str(number),
            lease_ms=round(interval * 3000),
            heartbeat_ms=round(interval * 1000),
        )

    running = [asyncio.create_task(jobs.run_exclusive(options(number), work)) for number in range(leases)]
    while len(jobs.sent) < leases:
        await asyncio.sleep(0.05)
    await asyncio.sleep(seconds)
    found = _lateness(jobs.sent, interval)
    over.set()
    await asyncio.gather(*running)  # raises where a lease was lost
    return found


async def _bare(pool: Pool, interval: float, seconds: float) -> list[float]:
    async with pool.connection() as connection:
        cursor = await connection.execute(
            "UPDATE leasedjob.job_scheduler SET status = 'RUNNING', finished_at = NULL RETURNING id, owner_token"
        )
        held = [(row["id"], row["owner_token"]) for row in await cursor.fetchall()]
    sent: defaultdict[UUID, list[tuple[float, float]]] = defaultdict(list)
    ends = monotonic() + seconds + interval

    async def beat(id: UUID, token: UUID) -> None:
        due = monotonic()
        while due < ends:
            await asyncio.sleep(max(0.0, due - monotonic()))
            began = monotonic()
            async with pool.connection() as connection:
                await connection.execute(_BARE, (id, token))
            sent[id].append((began, monotonic()))
            due = began + interval

    await asyncio.gather(*(beat(id, token) for id, token in held))
    return _lateness(sent, interval)


def measure(scale: Scale) -> Result:
    """Milliseconds by which beats are late."""
    leases, connections = scale.of(2000, 10), scale.of(20, 2)
    interval, intervals = scale.of(10_000, 300) / 1000, scale.of(3, 2)
    found: dict[str, list[float]] = {}

    async def both() -> None:
        async with Pool(base.credentials, max_size=connections) as pool:
            found["bare UPDATE"] = []
            found["library"] = await _library(pool, leases, interval, interval * intervals)
            found["bare UPDATE"] = await _bare(pool, interval, interval * intervals)

    with database() as base:
        asyncio.run(both())
        settings = base.settings
    figures: dict[str, list[float]] = {}
    for name, seconds in found.items():
        late = [max(0.0, second) * 1000 for second in seconds]
        cut = quantiles(late, n=100, method="inclusive")
        figures |= {
            f"{name}, half of them": [cut[49]],
            f"{name}, 99 of 100": [cut[98]],
            f"{name}, the latest": [max(late)],
        }
    peers = {name: name.replace("library", "bare UPDATE") for name in figures if name.startswith("library")}
    latest = figures["library, the latest"][0] / (interval * 1000)
    return Result(
        "beats",
        f"heartbeats of {leases:,} leases on {connections} connections (less is better)",
        rows(figures, "ms late", peers),
        (Aim("latest beat of the library / interval", latest, 0.1),),
        {
            **settings,
            "interval": f"{interval:g} s",
            "watched for": f"{interval * intervals:g} s",
            "beats": len(found["library"]),
        },
    )
