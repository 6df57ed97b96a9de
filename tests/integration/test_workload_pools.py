"""Pools of psycopg_pool, closed in the last phase, on a real PostgreSQL."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool, NullConnectionPool, PoolClosed

from leasedjob.workload import GracefulShutdown, Phase, ShutdownState, pools
from leasedjob.workload.phases import Outcome
from leasedjob.workload.pools import AsyncPsycopgPool, PsycopgPool

from .conftest import Database
from .workload_parts import LONG

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("kind", [ConnectionPool, NullConnectionPool])
def test_it_is_closed_last_and_waits_for_a_connection_that_is_out(
    empty_database: Database, kind: type[ConnectionPool]
) -> None:
    state = ShutdownState()
    worked, may_end = threading.Event(), threading.Event()
    with kind(empty_database.dsn, min_size=0, max_size=2, open=True) as pool:
        part = PsycopgPool(pool)
        assert part.phase is Phase.POOLS

        def forgotten() -> None:  # no part of the program waits for it
            with pool.connection() as connection:
                worked.set()
                may_end.wait(LONG)
                connection.execute("SELECT 1")

        def finish() -> None:
            with pool.connection() as connection:
                connection.execute("SELECT 1")

        thread = threading.Thread(target=forgotten)
        with GracefulShutdown(state) as shutdown:
            shutdown.add(part)
            shutdown.on_stop(Phase.CONSUMERS, "consumer", finish)
            thread.start()
            assert worked.wait(LONG)
            assert part.in_hand() == ["1 connection in use"]
            state.begin()
            assert not shutdown.wait(0.3)
            may_end.set()
            assert shutdown.wait(LONG)
            assert [line.outcome for line in shutdown.report()] == [Outcome.DONE, Outcome.DONE]
        thread.join(LONG)
        assert part.in_hand() == []
        with pytest.raises(PoolClosed):
            pool.getconn()


async def test_an_asynchronous_one(empty_database: Database) -> None:
    state = ShutdownState()
    async with AsyncConnectionPool(empty_database.dsn, min_size=1, max_size=2, open=False) as pool:
        part = AsyncPsycopgPool(pool)
        async with GracefulShutdown(state) as shutdown:
            shutdown.add(part)
            async with pool.connection() as connection:
                state.begin()
                await asyncio.sleep(0.1)
                assert part.in_hand() == ["1 connection in use"]
                assert not pool.closed
                await connection.execute("SELECT 1")
            (line,) = await shutdown.finished()
            assert line.outcome is Outcome.DONE
        assert pool.closed


def test_a_connection_that_never_comes_back_is_named(
    empty_database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "WAIT_SECONDS", 0.2)
    with ConnectionPool(empty_database.dsn, min_size=1, max_size=2, open=True) as pool:
        connection = pool.getconn()
        with caplog.at_level(logging.WARNING):
            PsycopgPool(pool).stop()
        assert "database is closed with 1 connection in use" in caplog.text
        assert pool.closed
        pool.putconn(connection)
        assert connection.closed


def test_one_that_was_closed_before(empty_database: Database) -> None:
    pool = ConnectionPool(empty_database.dsn, min_size=1, open=True)
    pool.close()
    PsycopgPool(pool).stop()
