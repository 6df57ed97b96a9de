"""JobSchedulerModule: from opening the pool to closing it last."""

from __future__ import annotations

import asyncio

import psycopg_pool
import pytest

from leasedjob.errors import DatabaseRefusedError, DatabaseUnavailableError, LeasedJobError, SchemaMissingError
from leasedjob.lease import (
    JobAcquireOptions,
    JobSchedulerModule,
    JobSchedulerModuleOptions,
    SyncJobSchedulerModule,
    SyncJobSchedulerService,
)
from leasedjob.lease.database import Pool

from .conftest import Database

pytestmark = pytest.mark.integration
OPTIONS = JobAcquireOptions(code="sync", run_key="k")


async def no_session_is_left(database: Database) -> None:
    """The server needs a moment to end a backend whose client has gone."""
    async with asyncio.timeout(10):
        while sessions(database):
            await asyncio.sleep(0.01)


def sessions(database: Database) -> int:
    (row,) = database.rows(
        "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = %s AND application_name = 'leasedjob'",
        database.name,
    )
    count: int = row["n"]
    return count


async def test_it_provides_the_service_and_closes_its_pool(database: Database) -> None:
    async with JobSchedulerModule(database.dsn) as jobs:
        assert (await jobs.service.acquire(OPTIONS)).acquired
        assert JobSchedulerModule.current() is jobs.service
        assert sessions(database) == 1
    await no_session_is_left(database)
    with pytest.raises(LeasedJobError, match="not open"):
        _ = jobs.service
    with pytest.raises(LeasedJobError, match="no global"):
        JobSchedulerModule.current()


async def test_the_last_global_one_is_current(database: Database) -> None:
    async with JobSchedulerModule(database.credentials) as outer:
        async with JobSchedulerModule(database.credentials, global_=False):
            assert JobSchedulerModule.current() is outer.service
        async with JobSchedulerModule(database.credentials, JobSchedulerModuleOptions(max_size=1)) as inner:
            assert JobSchedulerModule.current() is inner.service
        assert JobSchedulerModule.current() is outer.service


async def test_a_given_pool_stays_open(database: Database) -> None:
    async with Pool(database.credentials) as pool:
        async with JobSchedulerModule(pool) as jobs:
            assert (await jobs.service.acquire(OPTIONS)).acquired
        async with pool.connection() as connection:
            await connection.execute("SELECT 1")


async def test_a_missing_schema_names_the_command_and_leaves_nothing_open(empty_database: Database) -> None:
    with pytest.raises(SchemaMissingError, match="leasedjob migrate"):
        async with JobSchedulerModule(empty_database.dsn):
            raise AssertionError("opened")
    await no_session_is_left(empty_database)
    with pytest.raises(LeasedJobError, match="no global"):
        JobSchedulerModule.current()


async def test_the_cause_of_a_failed_start_is_told(database: Database) -> None:
    with pytest.raises(DatabaseUnavailableError, match="nothing listens"):
        await JobSchedulerModule("host=127.0.0.1 port=1").__aenter__()
    with pytest.raises(DatabaseRefusedError, match="refused the login"):
        await JobSchedulerModule(database.server.conninfo(database.name, "nobody", "x")).__aenter__()


# --- without an event loop -------------------------------------------------------------------------------------------


def test_the_synchronous_module(database: Database) -> None:
    with SyncJobSchedulerModule(database.dsn) as outer:
        assert isinstance(outer.service, SyncJobSchedulerService)
        assert SyncJobSchedulerModule.current() is outer.service
        assert outer.service.run_exclusive(OPTIONS, lambda lease: lease.attempt).result == 1
        with SyncJobSchedulerModule(database.credentials, global_=False):
            assert SyncJobSchedulerModule.current() is outer.service
        with pytest.raises(LeasedJobError, match="no global JobSchedulerModule"):
            JobSchedulerModule.current()
    with pytest.raises(LeasedJobError, match="not open"):
        _ = outer.service
    with pytest.raises(LeasedJobError, match="no global"):
        SyncJobSchedulerModule.current()


def test_the_synchronous_module_checks_the_schema(empty_database: Database) -> None:
    with (
        pytest.raises(SchemaMissingError, match="leasedjob migrate"),
        SyncJobSchedulerModule(empty_database.dsn),
    ):
        raise AssertionError("opened")
    with pytest.raises(DatabaseUnavailableError, match="nothing listens"):
        SyncJobSchedulerModule("host=127.0.0.1 port=1").__enter__()


# --- pools of psycopg ------------------------------------------------------------------------------------------------


def test_a_pool_of_psycopg_serves(database: Database) -> None:
    """As it comes: without autocommit."""
    with (
        psycopg_pool.ConnectionPool(database.dsn, min_size=1, open=True) as pool,
        SyncJobSchedulerModule(pool) as module,
    ):
        assert module.service.run_exclusive(OPTIONS, lambda lease: lease.attempt).result == 1
        assert not module.service.acquire(OPTIONS).acquired
    assert [row["status"] for row in database.rows("SELECT status FROM leasedjob.job_scheduler")] == ["SUCCESS"]


async def test_an_asynchronous_pool_of_psycopg_serves(database: Database) -> None:
    async with (
        psycopg_pool.AsyncConnectionPool(database.dsn, min_size=1, open=False) as pool,
        JobSchedulerModule(pool) as module,
    ):
        result = await module.service.acquire(OPTIONS)
        assert result.acquired
        assert await module.service.complete(result.lease)
    assert [row["status"] for row in database.rows("SELECT status FROM leasedjob.job_scheduler")] == ["SUCCESS"]
