"""The operator's pool against a real server: rotation, restarts, limits, and what a fault looks like."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from leasedjob.errors import DatabaseRefusedError, DatabaseUnavailableError
from leasedjob.lease.database import Credentials, Pool
from leasedjob.lease.store import OperatorStore
from leasedjob.testing.postgres import PostgresServer

from .conftest import CLUSTER, Database

pytestmark = pytest.mark.integration


async def backend(pool: Pool) -> int:
    """The process id of the server's end of a pooled connection."""
    async with pool.connection() as connection:
        return connection.info.backend_pid


async def test_a_connection_is_used_again(database: Database) -> None:
    async with Pool(database.credentials) as pool:
        assert await backend(pool) == await backend(pool)


async def test_no_more_connections_than_allowed(database: Database) -> None:
    async with Pool(database.credentials, max_size=2) as pool:
        open_now = most = 0

        async def use() -> None:
            nonlocal open_now, most
            async with pool.connection() as connection:
                open_now += 1
                most = max(most, open_now)
                await connection.execute("SELECT pg_sleep(0.01)")
                open_now -= 1

        await asyncio.gather(*(use() for _ in range(12)))
        assert most == 2
        rows = database.rows(
            "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = %s AND application_name = 'leasedjob'",
            database.name,
        )
        assert rows[0]["n"] == 2


async def test_a_session_that_the_server_ended_is_noticed_before_it_is_used(database: Database) -> None:
    async with Pool(database.credentials) as pool:
        first = await backend(pool)
        database.rows("SELECT pg_terminate_backend(%s, 5000)", first)
        async with pool.connection() as connection:
            await connection.execute("SELECT 1")
        assert await backend(pool) != first


async def test_an_old_and_an_idle_connection_are_replaced(database: Database) -> None:
    for limits in ({"max_lifetime": 0.0}, {"max_idle": 0.0}):
        async with Pool(database.credentials, **limits) as pool:
            assert await backend(pool) != await backend(pool)


async def test_a_statement_that_was_cut_short_does_not_spoil_the_next(database: Database) -> None:
    async with Pool(database.credentials, max_size=1) as pool:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), pool.connection() as connection:
                await connection.execute("SELECT pg_sleep(60)")
        async with pool.connection() as connection:
            cursor = await connection.execute("SELECT 7 AS seven")
            assert await cursor.fetchone() == {"seven": 7}


async def test_an_open_transaction_is_not_handed_on(database: Database) -> None:
    async with Pool(database.credentials, max_size=1) as pool:
        async with pool.connection() as connection:
            await connection.execute("BEGIN")
        async with pool.connection() as connection:
            assert connection.info.transaction_status.name == "IDLE"


async def test_an_error_in_the_block_keeps_the_connection(database: Database) -> None:
    async with Pool(database.credentials) as pool:
        first = await backend(pool)
        with pytest.raises(psycopg.errors.DivisionByZero):
            async with pool.connection() as connection:
                await connection.execute("SELECT 1/0")
        assert await backend(pool) == first


async def test_the_real_cause_is_told_at_once(database: Database) -> None:
    started = time.monotonic()
    for text, error, match in (
        ("host=127.0.0.1 port=1", DatabaseUnavailableError, "nothing listens"),
        (
            database.server.conninfo(database.name, "leasedjob_owner", "wrong"),
            DatabaseRefusedError,
            "refused the login",
        ),
        (database.server.conninfo("absent"), DatabaseRefusedError, "database name"),
        (database.dsn + " sslmode=require", DatabaseRefusedError, "TLS"),
    ):
        async with Pool(Credentials.from_conninfo(text)) as pool:
            with pytest.raises(error, match=match):
                await OperatorStore(pool.connection).active_rows(CLUSTER)
    assert time.monotonic() - started < 10


async def test_a_rotated_password_is_picked_up(database: Database, tmp_path: Path) -> None:
    name = f"rotating_{database.name}"
    role = sql.Identifier(name)
    database.server.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'one'").format(role))
    for file, content in {
        "host": database.server.address,
        "port": str(database.server.port),
        "dbname": database.name,
        "user": name,
        "password": "one",
    }.items():
        (tmp_path / file).write_text(content)
    async with Pool(Credentials.from_directory(tmp_path)) as pool:
        first = await backend(pool)
        database.server.execute(sql.SQL("ALTER ROLE {} PASSWORD 'two'").format(role))
        database.server.execute(f"SELECT pg_terminate_backend({first}, 5000)")
        with pytest.raises(DatabaseRefusedError, match="rotated Secret"):
            await backend(pool)
        (tmp_path / "password").write_text("two")
        assert await backend(pool) != first


async def test_a_restart_of_the_server_costs_one_error_at_most() -> None:
    with PostgresServer(durable=True) as server:
        async with Pool(Credentials.from_conninfo(server.conninfo()), max_size=3) as pool:
            await asyncio.gather(*(backend(pool) for _ in range(3)))
            server.kill()
            with pytest.raises(DatabaseUnavailableError):
                await backend(pool)
            server.start()
            for _ in range(3):
                await backend(pool)


async def test_a_statement_past_its_time_is_a_passing_fault(database: Database) -> None:
    stranger = database.connect(autocommit=False)
    stranger.execute("LOCK TABLE leasedjob.job_registration IN ACCESS EXCLUSIVE MODE")
    async with Pool(database.credentials) as pool:
        with pytest.raises(DatabaseUnavailableError, match="did not answer active_rows within"):
            await OperatorStore(pool.connection, timeout=0.3).active_rows(CLUSTER)
        stranger.rollback()
        assert await OperatorStore(pool.connection).active_rows(CLUSTER) == []
