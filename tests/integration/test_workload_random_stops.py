"""Stopped and killed at random instants: no item is lost or done twice, no checkpoint is ahead of the work."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from leasedjob import protocol

from .conftest import Database
from .workload_parts import Process, Processes, processes

pytestmark = pytest.mark.integration
ITEMS = 60
STEPS = 8

WORK = f"""
import os, sys, psycopg
from leasedjob.workload import *
state = ShutdownState.listening()
run = current_run()
checkpoints = Checkpoints(run)
with psycopg.connect(os.environ["LEASEDJOB_DATABASE_URL"]) as connection:
    first = checkpoints.take(connection) or 0
    connection.commit()
    print("begins", first, flush=True)
    for item in range(first, {ITEMS}):
        if state.is_draining():
            sys.exit(3)
        connection.execute("INSERT INTO done VALUES (%s, %s)", (item, run.fencing_token))
        connection.execute("SELECT pg_sleep(0.01)")
        checkpoints.save(connection, item + 1)
        connection.commit()
"""
# The same by Cascade, on both kinds of connections in turn.
CASCADE = f"""
import asyncio, os, sys, psycopg
from leasedjob.workload import *
state = ShutdownState.listening()
run = current_run()
url = os.environ["LEASEDJOB_DATABASE_URL"]
def synchronous():
    cascade = Cascade(run, state)
    with GracefulShutdown(state) as shutdown, psycopg.connect(url) as connection:
        shutdown.add(cascade)
        print("begins", run.has_checkpoint(connection), flush=True)
        for item in cascade.items(connection, range({ITEMS})):
            with item as number:
                connection.execute("INSERT INTO done VALUES (%s, %s)", (number, run.fencing_token))
                connection.execute("SELECT pg_sleep(0.01)")
async def asynchronous():
    cascade = AsyncCascade(run, state)
    async with GracefulShutdown(state) as shutdown, await psycopg.AsyncConnection.connect(url) as connection:
        shutdown.add(cascade)
        print("begins", await run.has_checkpoint(connection), flush=True)
        async for item in cascade.items(connection, range({ITEMS})):
            async with item as number:
                await connection.execute("INSERT INTO done VALUES (%s, %s)", (number, run.fencing_token))
                await connection.execute("SELECT pg_sleep(0.01)")
try:
    asyncio.run(asynchronous()) if run.attempt % 2 else synchronous()
except DrainingError:
    sys.exit(3)
"""
# The checkpoint in a transaction of its own, before the work's: what is killed in between is lost.
FORBIDDEN = f"""
import os, sys, time, psycopg
from leasedjob.workload import *
checkpoints = Checkpoints(current_run())
with psycopg.connect(os.environ["LEASEDJOB_DATABASE_URL"]) as connection:
    first = checkpoints.take(connection) or 0
    connection.commit()
    for item in range(first, {STEPS}):
        checkpoints.save(connection, item + 1)
        connection.commit()
        print("between", item, flush=True)
        if item == 3 and current_run().attempt == 1:
            time.sleep(300)
        connection.execute("INSERT INTO done VALUES (%s, 0)", (item,))
        connection.commit()
"""


class Attempts:
    """One run, each attempt a process with a larger token."""

    def __init__(self, run: Processes, database: Database, program: Path) -> None:
        self._run, self._database, self._program = run, database, program
        self.count = 0

    def start(self) -> Process:
        self.count += 1
        return self._run.start(
            [sys.executable, str(self._program)],
            {
                "LEASEDJOB_DATABASE_URL": self._database.dsn,
                protocol.ENV_TYPE: "SCHEDULE",
                protocol.ENV_CODE: "a",
                protocol.ENV_RUN_KEY: "b",
                protocol.ENV_IDEMPOTENCY_KEY: "v2:key",
                protocol.ENV_ATTEMPT: str(self.count),
                protocol.ENV_FENCING_TOKEN: str(self.count),
            },
        )


@pytest.fixture
def run() -> Iterator[Processes]:
    yield from processes()


@pytest.fixture
def attempts(run: Processes, empty_database: Database, tmp_path: Path, request: pytest.FixtureRequest) -> Attempts:
    from leasedjob.workload import Checkpoints

    program = tmp_path / "program.py"
    program.write_text(request.param)
    with empty_database.connect() as connection:
        Checkpoints.install(connection)
        connection.execute("CREATE TABLE done (item integer PRIMARY KEY, token bigint NOT NULL)")
    return Attempts(run, empty_database, program)


def items(database: Database) -> list[int]:
    return [row["item"] for row in database.rows("SELECT item FROM done ORDER BY item")]


def in_step(database: Database) -> bool:
    """The checkpoint and the work agree."""
    (row,) = database.rows(  # in one statement: the last commit of a process that was killed may still be under way
        "SELECT coalesce((SELECT coalesce(data->>'done', data::text)::int FROM leasedjob_checkpoint), 0) AS next,"
        "       coalesce((SELECT array_agg(item ORDER BY item) FROM done), '{}') AS items"
    )
    return bool(row["items"] == list(range(row["next"])))


@pytest.mark.parametrize("attempts", [WORK, CASCADE], ids=["checkpoints", "cascade"], indirect=True)
@pytest.mark.parametrize("stops", [10, pytest.param(50, marks=pytest.mark.soak)])
def test_at_random_instants_nothing_is_lost_or_doubled(
    attempts: Attempts, empty_database: Database, stops: int
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(stops):
        process = attempts.start()
        if chance.random() < 0.8:
            process.line("begins")
        time.sleep(chance.uniform(0, 0.12))  # the instant is what is tested
        process.signal(chance.choice([signal.SIGTERM, signal.SIGKILL]))
        assert process.wait() in (0, 3, -signal.SIGTERM, -signal.SIGKILL), process.err
        assert in_step(empty_database)
    last = attempts.start()
    assert last.wait() == 0, last.err
    assert items(empty_database) == list(range(ITEMS))
    tokens = [row["token"] for row in empty_database.rows("SELECT token FROM done ORDER BY item")]
    assert tokens == sorted(tokens), "an attempt began where the one before had ended"


@pytest.mark.parametrize("attempts", [FORBIDDEN], indirect=True)
def test_a_checkpoint_outside_the_work_s_transaction_loses_an_item(
    attempts: Attempts, empty_database: Database
) -> None:
    process = attempts.start()
    process.line("between 3")
    process.signal(signal.SIGKILL)
    process.wait()
    assert attempts.start().wait() == 0
    assert items(empty_database) == [0, 1, 2, *range(4, STEPS)], "item 3 is lost"
