"""Heartbeats of many leases: while an open transaction holds vacuum back for an hour, and 2,000 over 20 connections."""

from __future__ import annotations

import asyncio
import time
from statistics import quantiles

import pytest
from bench import report
from bench.measures import beats
from bench.model import Scale

from leasedjob.lease import JobAcquireOptions, JobLease, JobSchedulerService
from leasedjob.lease.database import Pool

from .conftest import Database

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(1800)]
LEASES = 300
INTERVAL = 5.0  # seconds
BEATS = round(3600 / INTERVAL)


async def test_an_hour_of_versions_leaves_heartbeats_fast(database: Database) -> None:
    stranger = database.connect(autocommit=False)
    stranger.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    stranger.execute("SELECT count(*) FROM leasedjob.job_scheduler")  # from here on no version may be removed
    async with Pool(database.credentials, max_size=20) as pool:
        jobs = JobSchedulerService(pool.connection)
        held: list[JobLease] = []
        for n in range(LEASES):
            acquired = await jobs.acquire(JobAcquireOptions(code="bloat", run_key=str(n), lease_ms=3_600_000))
            assert acquired.acquired
            held.append(acquired.lease)

        async def beat(lease: JobLease) -> float:
            began = time.monotonic()
            assert await jobs.heartbeat(lease)
            return time.monotonic() - began

        for _ in range(BEATS):
            took = await asyncio.gather(*map(beat, held))
    late = quantiles(took, n=100)[98]
    (size,) = database.rows("SELECT pg_table_size('leasedjob.job_scheduler') AS bytes")
    (stat,) = database.rows("SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'job_scheduler'")
    print(f"p99 {late * 1000:.0f} ms, {size['bytes'] / 2**20:.0f} MiB, {stat}")
    assert late < INTERVAL / 2


def test_two_thousand_leases_on_twenty_connections_beat_in_time() -> None:
    """No heartbeat is late by more than a tenth of its interval; no lease is lost."""
    result = beats.measure(Scale())
    print(report.table(result))
    assert all(aim.met for aim in result.aims)
