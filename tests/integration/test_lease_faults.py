"""Faults between the lease and its holder: locks of strangers, lost answers, dead connections, wrong clocks, and a
database that lost what it had acknowledged. The right outcome, a clear error, and nothing that stays RUNNING for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, LiteralString
from uuid import uuid4

import psycopg
import pytest
from tests.chaos.proxy import Fault, FaultyProxy

from leasedjob.errors import DatabaseUnavailableError, LostJobLeaseError
from leasedjob.lease import JobAcquireOptions, JobExecutionLease, JobSchedulerService
from leasedjob.lease.database import Credentials, Pool, connect_sync, connections
from leasedjob.lease.migrate import migrate
from leasedjob.lease.rows import AdoptVerdict, Outcome
from leasedjob.lease.store import OperatorStore, SidecarStore
from leasedjob.testing.postgres import PostgresServer

from .conftest import CLUSTER, OWNER, OWNER_PASSWORD, Database, lock_row, registered, request

pytestmark = pytest.mark.integration
LEASE = 3.0  # seconds: long enough for a machine that is busy with other tests
LOST_ANSWERS = 30


@pytest.fixture
def proxy(server: PostgresServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(server.address, server.port) as running:
        yield running


@pytest.fixture
async def service(database: Database, proxy: FaultyProxy) -> AsyncIterator[JobSchedulerService]:
    """The service behind the proxy, on a pool."""
    async with Pool(Credentials.from_conninfo(database.dsn, port=str(proxy.port)), timeout=2) as pool:
        yield JobSchedulerService(pool.connection)


def options(run_key: str = "a", *, lease: float = LEASE, **other: Any) -> JobAcquireOptions:
    values: dict[str, Any] = {"lease_ms": round(lease * 1000), "heartbeat_ms": round(lease * 1000 / 5), **other}
    return JobAcquireOptions(code="faults", run_key=run_key, **values)


def working(seconds: float, seen: list[JobExecutionLease] | None = None) -> Callable[[JobExecutionLease], Any]:
    """Work that takes so long."""

    async def work(lease: JobExecutionLease) -> int:
        if seen is not None:
            seen.append(lease)
        await asyncio.sleep(seconds)
        return lease.attempt

    return work


async def started(seen: list[JobExecutionLease]) -> JobExecutionLease:
    async with asyncio.timeout(60):
        while not seen:
            await asyncio.sleep(0.01)
    return seen[0]


# --- locks of strangers ----------------------------------------------------------------------------------------------


async def test_a_row_that_is_locked_for_two_leases_costs_its_owner_only(database: Database) -> None:
    """The owner is told before its lease ends; others neither wait nor take it; then it is taken and done."""
    jobs = JobSchedulerService(connections(database.credentials))
    lease = 2.0
    seen: list[JobExecutionLease] = []
    running = asyncio.create_task(jobs.run_exclusive(options(lease=lease), working(60, seen)))
    other = asyncio.create_task(jobs.run_exclusive(options("other"), working(2.5 * lease)))
    mine = await started(seen)
    stranger = database.connect(autocommit=False)
    lock_row(stranger, "job_scheduler", "id", mine.id)
    locked_at = time.monotonic()

    with pytest.raises(LostJobLeaseError, match="no heartbeat"):
        await running
    while time.monotonic() < locked_at + 2 * lease:
        asked = time.monotonic()
        assert not (await jobs.acquire(options(lease=lease))).acquired
        assert time.monotonic() - asked < lease  # it doesn't wait for the lock
        await asyncio.sleep(0.2)
    stranger.rollback()

    assert (await jobs.run_exclusive(options(), working(0))).result == 2
    assert (await other).result == 1
    rows = database.rows("SELECT status, attempt FROM leasedjob.job_scheduler ORDER BY attempt")
    assert [(row["status"], row["attempt"]) for row in rows] == [("SUCCESS", 1), ("SUCCESS", 2)]


async def test_a_table_that_is_locked_for_half_a_lease_costs_nothing(database: Database) -> None:
    jobs = JobSchedulerService(connections(database.credentials))
    lease = 4.0
    seen: list[JobExecutionLease] = []
    running = asyncio.create_task(jobs.run_exclusive(options(lease=lease), working(lease, seen)))
    await started(seen)
    stranger = database.connect(autocommit=False)
    await asyncio.to_thread(stranger.execute, "LOCK TABLE leasedjob.job_scheduler IN ACCESS EXCLUSIVE MODE")
    await asyncio.sleep(lease / 2)
    stranger.rollback()
    assert (await running).result == 1


# --- answers that are lost -------------------------------------------------------------------------------------------


async def test_the_answer_to_acquire_is_lost(
    service: JobSchedulerService, proxy: FaultyProxy, database: Database
) -> None:
    """The statement is committed, and nobody hears of it: asking again finds the own row, not a stranger's."""
    for n in range(LOST_ANSWERS):
        proxy.lose_answers("leasedjob.acquire")
        acquired = await service.acquire(options(str(n), lease=600))
        assert acquired.acquired
        assert acquired.attempt == 1
        assert await service.complete(acquired.lease)
    assert proxy.lost == LOST_ANSWERS
    rows = database.rows("SELECT status, attempt FROM leasedjob.job_scheduler")
    assert [(row["status"], row["attempt"]) for row in rows] == [("SUCCESS", 1)] * LOST_ANSWERS


@pytest.mark.parametrize("method", ["complete", "fail"])
async def test_the_answer_to_an_end_is_lost(
    service: JobSchedulerService, proxy: FaultyProxy, database: Database, method: str
) -> None:
    """It is recorded once, and never as the opposite."""
    for n in range(LOST_ANSWERS):
        acquired = await service.acquire(options(str(n), lease=600))
        assert acquired.acquired
        proxy.lose_answers("leasedjob.finish")
        assert await getattr(service, method)(acquired.lease, {"n": n})
    assert proxy.lost == LOST_ANSWERS
    status = {"complete": "SUCCESS", "fail": "FAIL"}[method]
    rows = database.rows("SELECT status, attempt, data FROM leasedjob.job_scheduler ORDER BY started_at")
    assert [(r["status"], r["attempt"], r["data"]) for r in rows] == [
        (status, 1, {"n": n}) for n in range(LOST_ANSWERS)
    ]


async def test_the_answers_to_a_claim_and_to_an_adoption_are_lost(
    database: Database, proxy: FaultyProxy, minute: datetime
) -> None:
    """The operator finds its claims among the active rows, with what a Pod needs; the Pod asks again."""
    through = Credentials.from_conninfo(database.dsn, port=str(proxy.port))
    codes = [f"shop/job-{n:02}" for n in range(LOST_ANSWERS)]
    async with Pool(through) as pool:
        store = OperatorStore(pool.connection)
        await registered(store, *codes)
        for code in codes:
            proxy.lose_answers("leasedjob.claim_batch")
            with pytest.raises(DatabaseUnavailableError):
                await store.claim_runs(CLUSTER, [request(minute, code)])
        found = await store.active_rows(CLUSTER)
        assert sorted(run.identity.code for run in found) == codes
        assert all(run.held_here and run.attempt == 1 for run in found)
    for run in found:
        assert run.claim_token is not None
        token, pod = uuid4(), str(uuid4())
        for lost in (True, False):
            connection = connect_sync(through)
            sidecar = SidecarStore(connection)
            with contextlib.suppress(DatabaseUnavailableError), connection:
                if lost:
                    proxy.lose_answers("leasedjob.adopt")
                answer = sidecar.adopt(run.id, run.claim_token, token, pod_uid=pod, pod_name="pod")
        assert answer.verdict is AdoptVerdict.ADOPTED
        with connect_sync(through) as connection:
            assert SidecarStore(connection).finish(run.id, token, Outcome.COMPLETE)
    assert proxy.lost == 2 * LOST_ANSWERS
    assert database.rows("SELECT id FROM leasedjob.job_scheduler WHERE status <> 'SUCCESS' OR attempt <> 1") == []


# --- connections that end or hang ------------------------------------------------------------------------------------


async def test_a_connection_that_a_firewall_forgot_costs_no_lease(
    service: JobSchedulerService, proxy: FaultyProxy, database: Database
) -> None:
    """No packet of the open connections arrives any more, and nobody is told; a new connection would work."""
    seen: list[JobExecutionLease] = []
    lease = 2 * LEASE
    running = asyncio.create_task(service.run_exclusive(options(lease=lease), working(2 * lease, seen)))
    mine = await started(seen)
    first = database.row(mine.id)["modified_at"]
    async with asyncio.timeout(60):
        while database.row(mine.id)["modified_at"] == first:  # right after a heartbeat
            await asyncio.sleep(0.02)
    proxy.strand()
    assert (await running).result == 1


async def test_without_any_way_to_the_database_the_loss_is_told_before_the_lease_ends(
    service: JobSchedulerService, proxy: FaultyProxy, database: Database
) -> None:
    seen: list[JobExecutionLease] = []
    told: list[float] = []

    async def work(lease: JobExecutionLease) -> None:
        seen.append(lease)
        try:
            await asyncio.sleep(60)
        finally:
            (row,) = database.rows(
                "SELECT extract(epoch FROM leasedjob.expires_at(modified_at, lease_ms) - clock_timestamp()) AS left"
                "  FROM leasedjob.job_scheduler"
            )
            told.append(float(row["left"]))

    running = asyncio.create_task(service.run_exclusive(options(), work))
    await started(seen)
    proxy.breaks(Fault.DROP)
    asyncio.get_running_loop().call_later(3 * LEASE, proxy.breaks, Fault.NONE)
    with pytest.raises(LostJobLeaseError):
        await running
    assert told[0] > 0


@pytest.mark.parametrize("leases", [2, pytest.param(20, marks=pytest.mark.soak)])
async def test_sessions_that_are_ended_all_the_time_cost_nothing(
    service: JobSchedulerService, database: Database, leases: int
) -> None:
    """Ownership is a row, not a session: the same attempt and token to the end."""
    seen: list[JobExecutionLease] = []
    running = asyncio.create_task(service.run_exclusive(options(), working(leases * LEASE, seen)))
    mine = await started(seen)
    while not running.done():
        database.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = %s AND application_name = 'leasedjob'",
            database.name,
        )
        await asyncio.sleep(LEASE / 5)
    assert (await running).result == 1
    row = database.row(mine.id)
    assert (row["status"], row["fencing_token"], row["owner_token"]) == (
        "SUCCESS", mine.fencing_token, mine.owner_token,
    )  # fmt: skip


async def test_a_restart_of_the_server_costs_nothing_that_it_does_not_last() -> None:
    with PostgresServer(durable=True) as server:
        dsn = _with_schema(server, "restarted")
        async with Pool(Credentials.from_conninfo(dsn)) as pool:
            jobs = JobSchedulerService(pool.connection)
            seen: list[JobExecutionLease] = []
            running = asyncio.create_task(jobs.run_exclusive(options(lease=20), working(3, seen)))
            await started(seen)
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(1)
            await asyncio.to_thread(server.start)
            assert (await running).result == 1


async def test_many_that_start_together_wait_for_connections_and_leave_others_alone() -> None:
    """150 programs, 60 connections of which 10 are another application's: all of them get through."""
    settings = {"max_connections": "60", "superuser_reserved_connections": "3"}
    with PostgresServer(settings=settings) as server:
        dsn = _with_schema(server, "crowded")
        with contextlib.ExitStack() as stack:
            others = [stack.enter_context(psycopg.connect(dsn, autocommit=True)) for _ in range(10)]
            jobs = JobSchedulerService(connections(Credentials.from_conninfo(dsn)))
            outcomes = await asyncio.gather(
                *(jobs.run_exclusive(options(str(n), lease=600), working(0.1)) for n in range(150))
            )
            assert [outcome.result for outcome in outcomes] == [1] * 150
            assert [other.execute("SELECT 1").fetchone() for other in others] == [(1,)] * 10
            rows = others[0].execute("SELECT DISTINCT status::text, attempt FROM leasedjob.job_scheduler").fetchall()
            assert rows == [("SUCCESS", 1)]


# --- clocks ----------------------------------------------------------------------------------------------------------

_WITH_ANOTHER_CLOCK = """
import asyncio, datetime, sys, time
dsn, shift = sys.argv[1], float(sys.argv[2])
right = time.time
time.time = lambda: right() + shift
time.time_ns = lambda: int(time.time() * 1e9)
class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)
datetime.datetime = Shifted
from leasedjob.lease import JobAcquireOptions, JobSchedulerService
from leasedjob.lease.database import Credentials, connections

async def main():
    jobs = JobSchedulerService(connections(Credentials.from_conninfo(dsn)))
    def options(key):
        return JobAcquireOptions(code="clocks", run_key=key, lease_ms=60_000, heartbeat_ms=100)
    assert not (await jobs.acquire(options("held"))).acquired, "stole"
    async def work(lease):
        await asyncio.sleep(0.5)
        return lease.attempt
    assert (await jobs.run_exclusive(options("free"), work)).result == 1
    assert (await jobs.run_exclusive(options("expired"), work)).result == 2

asyncio.run(main())
"""


@pytest.mark.parametrize("minutes", [-10, 10])
async def test_a_clock_that_is_wrong_by_minutes_neither_steals_nor_loses(database: Database, minutes: int) -> None:
    jobs = JobSchedulerService(connections(database.credentials))
    held, expired = [
        await jobs.acquire(JobAcquireOptions(code="clocks", run_key=key, lease_ms=60_000))
        for key in ("held", "expired")
    ]
    assert held.acquired
    assert expired.acquired
    database.age(expired.id, 61)
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", _WITH_ANOTHER_CLOCK, database.dsn, str(minutes * 60)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = database.rows("SELECT run_key, modified_at - clock_timestamp() AS ahead FROM leasedjob.job_scheduler")
    assert len(rows) == 3
    assert all(-300 < row["ahead"].total_seconds() <= 0 for row in rows)  # every time in it is the database's


# --- a database that lost commits ------------------------------------------------------------------------------------


@contextlib.contextmanager
def standby_of(primary: PostgresServer) -> Iterator[PostgresServer]:
    """An asynchronous replica of a running server."""
    with tempfile.TemporaryDirectory(prefix="leasedjob-standby-") as name:
        folder = Path(name)
        os.chown(folder, primary.directory.stat().st_uid, primary.directory.stat().st_gid)
        copy = primary._spawn(
            str(primary._programs() / "pg_basebackup"),
            *("-d", primary.conninfo(), "-D", str(folder / "data"), "-X", "stream", "-R", "-c", "fast"),
        )
        assert copy.wait(120) == 0
        standby = PostgresServer(directory=folder, durable=True)
        standby.password = primary.password
        with standby:
            yield standby


async def test_an_owner_whose_acquire_was_lost_by_a_failover_stops(proxy: FaultyProxy) -> None:
    """The replica never got the commit and is promoted: the owner's next heartbeat finds no row. It doesn't bring its
    row back, and somebody else takes the run. (One owner at a time needs a replica that is synchronous.)"""
    with PostgresServer(durable=True) as primary:
        dsn = _with_schema(primary, "shipped")
        with (
            standby_of(primary) as standby,
            contextlib.closing(psycopg.connect(standby.conninfo(), autocommit=True)) as there,
        ):
            await _until(there, "SELECT EXISTS (SELECT FROM pg_stat_wal_receiver WHERE status = 'streaming')")
            there.execute("ALTER SYSTEM SET primary_conninfo = ''")
            there.execute("SELECT pg_reload_conf()")
            await _until(there, "SELECT NOT EXISTS (SELECT FROM pg_stat_wal_receiver)")

            proxy.leads_to(primary.address, primary.port)
            async with Pool(Credentials.from_conninfo(dsn, port=str(proxy.port))) as pool:
                jobs = JobSchedulerService(pool.connection)
                seen: list[JobExecutionLease] = []
                running = asyncio.create_task(
                    jobs.run_exclusive(options(lease=60, heartbeat_ms=200), working(60, seen))
                )
                await started(seen)
                await asyncio.to_thread(primary.kill)
                there.execute("SELECT pg_promote()")
                await _until(there, "SELECT NOT pg_is_in_recovery()")
                proxy.leads_to(standby.address, standby.port)
                with pytest.raises(LostJobLeaseError):
                    await running
                assert (await jobs.run_exclusive(options(), working(0))).result == 1


def _with_schema(server: PostgresServer, name: str) -> str:
    """A new database with the schema; its owner's connection string."""
    server.create_owner(OWNER, OWNER_PASSWORD)
    server.create_database(name, owner=OWNER)
    dsn = server.conninfo(name, OWNER, OWNER_PASSWORD)
    with psycopg.connect(dsn, autocommit=True) as connection:
        migrate(connection)
    return dsn


async def _until(connection: psycopg.Connection[Any], question: LiteralString) -> None:
    async with asyncio.timeout(60):
        while connection.execute(question).fetchone() != (True,):
            await asyncio.sleep(0.05)
