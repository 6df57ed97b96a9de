"""Checkpoints on a real PostgreSQL: in the work's own transaction, and closed to attempts of before."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from leasedjob.workload import AsyncCheckpoints, Checkpoints, Run, StaleFencingTokenError, find_run

from .conftest import Database
from .workload_parts import LONG

pytestmark = pytest.mark.integration


def attempt(number: int) -> Run:
    """An attempt of one run, each with a larger token."""
    run = find_run({}, code="a", run_key="2026-07-20T03:00:00Z")
    return replace(run, attempt=number, fencing_token=100 + number)


@pytest.fixture
def connection(empty_database: Database) -> psycopg.Connection[Any]:
    connection = empty_database.connect(autocommit=False)
    Checkpoints.install(connection)
    Checkpoints.install(connection)
    connection.execute("CREATE TABLE done (item integer PRIMARY KEY)")
    connection.commit()
    return connection


def test_the_next_attempt_begins_where_the_one_before_has_ended(connection: psycopg.Connection[Any]) -> None:
    first = Checkpoints(attempt(1))
    assert first.take(connection) is None
    connection.commit()
    for item in range(3):
        connection.execute("INSERT INTO done VALUES (%s)", (item,))
        first.save(connection, {"next": item + 1})
        connection.commit()
    connection.execute("INSERT INTO done VALUES (3)")
    first.save(connection, {"next": 4})
    connection.rollback()  # the Pod was killed here
    second = Checkpoints(attempt(2))
    assert second.take(connection) == {"next": 3}
    assert connection.execute("SELECT max(item) AS m FROM done").fetchone() == {"m": 2}, "neither ahead nor behind"
    row = connection.execute("SELECT attempt, fencing_token FROM leasedjob_checkpoint").fetchone()
    assert row == {"attempt": 1, "fencing_token": 102}


def test_an_attempt_of_before_saves_nothing_any_more(connection: psycopg.Connection[Any]) -> None:
    first, second = Checkpoints(attempt(1)), Checkpoints(attempt(2))
    first.take(connection)
    first.save(connection, 1)
    second.take(connection)
    connection.commit()
    for late in (lambda: first.save(connection, 2), lambda: first.take(connection)):
        connection.execute("INSERT INTO done VALUES (1)")
        with pytest.raises(StaleFencingTokenError, match="token 101 is too old"):
            late()
        connection.rollback()
    assert second.take(connection) == 1
    assert connection.execute("SELECT * FROM done").fetchall() == []


def test_taking_it_waits_for_a_transaction_that_still_runs(
    connection: psycopg.Connection[Any], empty_database: Database
) -> None:
    first = Checkpoints(attempt(1))
    first.take(connection)
    connection.commit()
    first.save(connection, 7)  # and is about to commit
    other = empty_database.connect(autocommit=True)
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.append(Checkpoints(attempt(2)).take(other)))
    thread.start()
    watching = empty_database.connect()
    waiting = "SELECT count(*) AS n FROM pg_locks WHERE NOT granted"
    while watching.execute(waiting).fetchone() == {"n": 0}:
        assert thread.is_alive()
    connection.commit()
    thread.join(LONG)
    assert taken == [7]


@pytest.mark.parametrize("data", [float("nan"), object()])
def test_what_is_no_json_is_refused(connection: psycopg.Connection[Any], data: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        Checkpoints(attempt(1)).save(connection, data)


async def test_asynchronous_connections(empty_database: Database) -> None:
    async with await psycopg.AsyncConnection.connect(empty_database.dsn) as connection:
        await AsyncCheckpoints.install(connection)
        first, second = AsyncCheckpoints(attempt(1)), AsyncCheckpoints(attempt(2))
        assert await first.take(connection) is None
        await first.save(connection, ["a"])
        assert await second.take(connection) == ["a"]
        with pytest.raises(StaleFencingTokenError):
            await first.save(connection, ["b"])


async def test_connections_with_cursors_of_another_kind_and_in_a_pipeline(empty_database: Database) -> None:
    with psycopg.connect(empty_database.dsn, cursor_factory=psycopg.RawCursor) as connection, connection.pipeline():
        Checkpoints.install(connection)
        Checkpoints(attempt(1)).save(connection, 1)
    async with (
        await psycopg.AsyncConnection.connect(empty_database.dsn, cursor_factory=psycopg.AsyncRawCursor) as other,
        other.pipeline(),
    ):
        assert await AsyncCheckpoints(attempt(2)).take(other) == 1
        with pytest.raises(StaleFencingTokenError):
            await AsyncCheckpoints(attempt(1)).save(other, 2)
