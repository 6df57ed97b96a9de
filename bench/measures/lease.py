"""Acquire and complete: whole cycles per second, one after the other on one connection.

The peers send the same two statements: psycopg without the library (no prepared statements, as the library must for
PgBouncer), psycopg as it comes (it prepares a statement that is used often), and pgbench, which has no Python in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Final
from uuid import uuid4

import psycopg
from psycopg import conninfo

from bench.database import Database, database
from bench.model import Aim, Result, Scale, ratio, rows, turns
from bench.proc import Meter
from leasedjob.identity import RunIdentity
from leasedjob.lease import JobAcquireOptions, JobSchedulerService, SyncJobSchedulerService
from leasedjob.lease.database import connect_async, connect_sync
from leasedjob.lease.statements import statement
from leasedjob.testing.postgres import embedded_bin

CODE: Final = "bench/cycles"
_PGBENCH: Final = """
\\set n random(1, 9000000000000000000)
SELECT (a.job).id AS id FROM leasedjob.acquire('pgbench-' || :n, 'SCHEDULE', 'bench/cycles', 'pgbench-' || :n, '',
    900000, lpad(to_hex(:n), 32, '0')::uuid, 'pgbench') a \\gset
SELECT leasedjob.finish(':id', lpad(to_hex(:n), 32, '0')::uuid, 'complete', NULL);
"""
_numbers = itertools.count(1)


def _keys(cycles: int) -> list[tuple[str, str]]:
    """Run keys with their lock keys: what the library computes within the turn, a peer gets before it."""
    run_keys = [f"bare-{next(_numbers)}" for _ in range(cycles)]
    return [(key, RunIdentity.of(code=CODE, run_key=key).lock_key) for key in run_keys]


def _acquire_parameters(run_key: str, lock_key: str) -> dict[str, Any]:
    return {
        "lock_key": lock_key,
        "type": "SCHEDULE",
        "code": CODE,
        "run_key": run_key,
        "name": "",
        "lease_ms": 900_000,
        "token": uuid4(),
        "holder": "bench",
    }


def _bare(connection: psycopg.Connection[Any], keys: list[tuple[str, str]]) -> None:
    acquire, finish = statement("acquire"), statement("finish")
    for run_key, lock_key in keys:
        asked = _acquire_parameters(run_key, lock_key)
        row = connection.execute(acquire, asked).fetchone()
        assert row is not None
        assert row[0] == "acquired"
        ended = {"id": row[1], "token": asked["token"], "outcome": "complete", "data": None}
        done = connection.execute(finish, ended).fetchone()
        assert done is not None
        assert done[0]


async def _bare_async(connection: psycopg.AsyncConnection[Any], keys: list[tuple[str, str]]) -> None:
    acquire, finish = statement("acquire"), statement("finish")
    for run_key, lock_key in keys:
        asked = _acquire_parameters(run_key, lock_key)
        row = await (await connection.execute(acquire, asked)).fetchone()
        assert row is not None
        assert row[0] == "acquired"
        ended = {"id": row[1], "token": asked["token"], "outcome": "complete", "data": None}
        done = await (await connection.execute(finish, ended)).fetchone()
        assert done is not None
        assert done[0]


def _options() -> JobAcquireOptions:
    return JobAcquireOptions(code=CODE, run_key=f"library-{next(_numbers)}")


def _library(jobs: SyncJobSchedulerService, cycles: int) -> None:
    for _ in range(cycles):
        acquired = jobs.acquire(_options())
        assert acquired.acquired
        assert jobs.complete(acquired.lease)


async def _library_async(jobs: JobSchedulerService, cycles: int) -> None:
    for _ in range(cycles):
        acquired = await jobs.acquire(_options())
        assert acquired.acquired
        assert await jobs.complete(acquired.lease)


def _pgbench(base: Database, cycles: int) -> float:
    parameters = conninfo.conninfo_to_dict(base.dsn)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "cycle.sql")
        script.write_text(_PGBENCH, encoding="utf-8")
        done = subprocess.run(
            [embedded_bin() / "pgbench", "--no-vacuum", "--client=1", f"--transactions={cycles}", f"--file={script}"],
            env={
                **os.environ,
                "PGHOST": str(parameters["host"]),
                "PGPORT": str(parameters["port"]),
                "PGDATABASE": str(parameters["dbname"]),
                "PGUSER": str(parameters["user"]),
                "PGPASSWORD": str(parameters["password"]),
            },
            capture_output=True,
            text=True,
            check=True,
        )
    found = re.search(r"tps = ([\d.]+) \(without initial", done.stdout)
    assert found, done.stdout
    return float(found[1])


def _rate(cycles: int, work: Callable[[], object]) -> float:
    began = perf_counter()
    work()
    return cycles / (perf_counter() - began)


def measure(scale: Scale) -> Result:
    """Cycles per second of one client."""
    cycles, rounds = scale.of(50, 5), scale.of(120, 2)
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(database())
        runner = stack.enter_context(asyncio.Runner())
        bare = stack.enter_context(psycopg.connect(base.dsn, autocommit=True, prepare_threshold=None))
        prepared = stack.enter_context(psycopg.connect(base.dsn, autocommit=True))
        mine = stack.enter_context(connect_sync(base.credentials))
        bare_async = runner.run(psycopg.AsyncConnection.connect(base.dsn, autocommit=True, prepare_threshold=None))
        mine_async = runner.run(connect_async(base.credentials))
        stack.callback(lambda: runner.run(mine_async.close()))
        stack.callback(lambda: runner.run(bare_async.close()))

        @contextlib.asynccontextmanager
        async def one() -> AsyncIterator[psycopg.AsyncConnection[Any]]:
            yield mine_async

        sync_jobs = SyncJobSchedulerService(lambda: contextlib.nullcontext(mine))
        async_jobs = JobSchedulerService(one)

        meter = Meter()

        def bare_turn(name: str, connection: psycopg.Connection[Any]) -> float:
            keys = _keys(cycles)
            with meter.of(name, connection.info.backend_pid):
                return _rate(cycles, lambda: _bare(connection, keys))

        def library_turn() -> float:
            with meter.of("leasedjob", mine.info.backend_pid):
                return _rate(cycles, lambda: _library(sync_jobs, cycles))

        def bare_async_turn() -> float:
            keys = _keys(cycles)
            with meter.of("psycopg, async", bare_async.info.backend_pid):
                return _rate(cycles, lambda: runner.run(_bare_async(bare_async, keys)))

        def library_async_turn() -> float:
            with meter.of("leasedjob, async", mine_async.info.backend_pid):
                return _rate(cycles, lambda: runner.run(_library_async(async_jobs, cycles)))

        found = turns(
            {
                "psycopg": lambda: bare_turn("psycopg", bare),
                "leasedjob": library_turn,
                "psycopg, async": bare_async_turn,
                "leasedjob, async": library_async_turn,
                "psycopg, prepared": lambda: bare_turn("psycopg, prepared", prepared),
                "pgbench": lambda: _pgbench(base, cycles),
            },
            rounds,
        )
        settings = base.settings
    peers = {
        "leasedjob": "psycopg",
        "leasedjob, async": "psycopg, async",
        "psycopg, prepared": "psycopg",
        "pgbench": "psycopg",
    }
    used = meter.after_warm_up(1e6 / cycles, found)
    used_peers = {f"{name}, processor": f"{peer}, processor" for name, peer in peers.items() if name != "pgbench"}
    return Result(
        "lease",
        "acquire + complete, cycles per second of one client (more is better)",
        rows(found, "cycles/s", peers) + rows(used, "us/cycle", used_peers),
        (
            Aim("leasedjob / psycopg", ratio(found["leasedjob"], found["psycopg"]), 0.85, at_least=True),
            Aim("the same, async", ratio(found["leasedjob, async"], found["psycopg, async"]), 0.85, at_least=True),
        ),
        {
            **settings,
            "cycles a turn": cycles,
            "psycopg": psycopg.__version__,
            "processor": "of client and database session",
        },
    )
