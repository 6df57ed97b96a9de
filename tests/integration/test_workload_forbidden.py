"""The forbidden ways of stopping, and the SDK's beside each of them, stopped at random instants.

Every unit of work has two effects at a sink with a unique key: it `began`, and it `ended`. A unit that has the one
without the other when its program is gone is lost halfway: nobody goes on with it, and whoever repeats it does the
first half twice. docs/explanation/forbidden-stops.md has the numbers that these tests print.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from leasedjob import http1

from .conftest import Database
from .workload_parts import LONG, Process, Processes, processes

pytestmark = pytest.mark.integration
STOPS = [10, pytest.param(50, marks=pytest.mark.soak)]
AT_ONCE = 5
GRACE_SECONDS = 4.0  # what a kubelet would give; the units of work below take a tenth of it

PRELUDE = """
import asyncio, logging, os, sys, threading, time, uuid
import psycopg
from psycopg_pool import AsyncConnectionPool
from leasedjob.workload import *
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
URL, FORBIDDEN = os.environ["LEASEDJOB_DATABASE_URL"], sys.argv[1] == "forbidden"
BUDGET = ShutdownBudget.within(4, 0) if FORBIDDEN else ShutdownBudget()  # a busy machine has its time
pool = AsyncConnectionPool(URL, open=False, min_size=2, max_size=4, kwargs={"autocommit": True})
async def effect(unit, what):
    async with pool.connection() as connection:
        await connection.execute("INSERT INTO effect VALUES (%s, %s)", (unit, what))
async def unit(name=None):
    name = name or uuid.uuid4().hex
    await effect(name, "began")
    await asyncio.sleep(0.3)
    await effect(name, "ended")
def ready(*more):
    print("ready", *more, flush=True)
"""
# Clearing an interval without awaiting the iteration that runs.
INTERVAL = (
    PRELUDE
    + """
async def main():
    state = ShutdownState.listening()
    await pool.open()
    if FORBIDDEN:
        async def iterate():
            while True:
                await asyncio.sleep(0.03)
                await unit()
        task = asyncio.create_task(iterate())
        ready()
        await state
        task.cancel()
        await pool.close()
        return
    async with GracefulShutdown(state, BUDGET) as shutdown:
        intervals = IntervalRegistry(state)
        shutdown.on_stop(Phase.POOLS, "database", pool.close)
        shutdown.add(intervals)
        intervals.add("work", 0.03, unit)
        ready()
        await shutdown.finished()
asyncio.run(main())
"""
)
# The same with APScheduler: shutdown(wait=True) cancels the coroutines that run.
APSCHEDULER = (
    PRELUDE
    + """
from apscheduler.schedulers.asyncio import AsyncIOScheduler
logging.getLogger("apscheduler").setLevel(logging.CRITICAL)
async def main():
    from leasedjob.workload.apscheduler import SchedulerJobs
    state = ShutdownState.listening()
    await pool.open()
    scheduler = AsyncIOScheduler(timezone="UTC")
    if FORBIDDEN:
        scheduler.add_job(unit, "interval", seconds=0.03, args=[None])
        scheduler.start()
        ready()
        await state
        scheduler.shutdown(wait=True)
        await asyncio.sleep(0)
        await pool.close()
        return
    async with GracefulShutdown(state, BUDGET) as shutdown:
        shutdown.on_stop(Phase.POOLS, "database", pool.close)
        shutdown.add(SchedulerJobs(scheduler, state))
        scheduler.add_job(unit, "interval", seconds=0.03, args=[None])
        scheduler.start()
        ready()
        await shutdown.finished()
asyncio.run(main())
"""
)
# The pool is closed first, while the iteration still needs it.
POOL = (
    PRELUDE
    + """
async def main():
    from leasedjob.workload.pools import AsyncPsycopgPool
    state = ShutdownState.listening()
    await pool.open()
    async with GracefulShutdown(state, BUDGET) as shutdown:
        intervals = IntervalRegistry(state)
        if FORBIDDEN:
            shutdown.on_stop(Phase.BACKGROUND, "database", pool.close)
        else:
            shutdown.add(AsyncPsycopgPool(pool))
        shutdown.add(intervals)
        intervals.add("work", 0.03, unit)
        ready()
        await shutdown.finished()
asyncio.run(main())
"""
)
# A loop that doesn't look at the flag is ended by force, whatever it is doing.
LOOP = (
    PRELUDE
    + """
async def main():
    state = ShutdownState.listening()
    await pool.open()
    async def work():
        while FORBIDDEN or not state.is_draining():
            await unit()
    working = asyncio.create_task(work())
    async def finish():
        await working
    async with GracefulShutdown(state, BUDGET) as shutdown:
        shutdown.on_stop(Phase.POOLS, "database", pool.close)
        shutdown.on_stop(Phase.BACKGROUND, "loop", finish)
        ready()
        await shutdown.finished()
asyncio.run(main())
"""
)
# A server whose task is cancelled drops the requests in flight.
HTTP = (
    PRELUDE
    + """
import uvicorn
from leasedjob.workload.asgi import UvicornServer
async def app(scope, receive, send):
    await unit(scope["path"][1:])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
async def main():
    state = ShutdownState.listening()
    await pool.open()
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off")
    server = UvicornServer(config, state)
    if FORBIDDEN:
        await server.start()
        ready(*server.ports)
        await state
        for task in server._server.server_state.tasks | {server._serving}:
            task.cancel()
        await asyncio.sleep(0)
        return
    async with GracefulShutdown(state, BUDGET) as shutdown:
        shutdown.on_stop(Phase.POOLS, "database", pool.close)
        shutdown.add(server)
        await server.start()
        ready(*server.ports)
        await shutdown.finished()
asyncio.run(main())
"""
)


@dataclass(frozen=True)
class Tally:
    """What became of the units of work."""

    done: int
    lost: int


@pytest.fixture
def run() -> Iterator[Processes]:
    yield from processes()


class Stops:
    """Starts a program so many times, a few at once, and stops each at a random instant, as a kubelet does."""

    def __init__(self, run: Processes, database: Database, stops: int) -> None:
        self._run, self._database, self._stops = run, database, stops
        seed = random.randrange(2**32)
        print("seed", seed)
        self._chance = random.Random(seed)
        with database.connect(autocommit=True) as connection:
            connection.execute("CREATE TABLE effect (unit text, what text, PRIMARY KEY (unit, what))")

    def __call__(self, program: str, way: str, load: Callable[[Process, str], None] | None = None) -> Tally:
        self._database.connect(autocommit=True).execute("TRUNCATE effect")
        stops = self._stops if way == "allowed" else self._stops // 2
        instants = [self._chance.uniform(0.1, 1.0) for _ in range(stops)]
        with ThreadPoolExecutor(AT_ONCE) as at_once:
            for _ in at_once.map(lambda instant: self._one(program, way, instant, load), instants):
                pass
        (row,) = self._database.rows(
            "SELECT count(*) FILTER (WHERE n = 2) AS done, count(*) FILTER (WHERE n = 1) AS lost"
            "  FROM (SELECT count(*) AS n FROM effect GROUP BY unit) AS units"
        )
        tally = Tally(row["done"], row["lost"])
        print(f"{way}: {stops} stops, {tally.done} units done, {tally.lost} lost halfway")
        return tally

    def _one(self, program: str, way: str, instant: float, load: Callable[[Process, str], None] | None) -> None:
        process = self._run.start([sys.executable, "-c", program, way], {"LEASEDJOB_DATABASE_URL": self._database.dsn})
        ready = process.line("ready")
        if load is not None:
            load(process, ready)
        time.sleep(instant)  # the instant is what is tested
        process.signal(signal.SIGTERM)
        try:
            process.wait(seconds=GRACE_SECONDS if way == "forbidden" else LONG)
        except subprocess.TimeoutExpired:
            process.signal(signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize(
    "program", [INTERVAL, APSCHEDULER, POOL, LOOP], ids=["interval", "apscheduler", "pool", "loop"]
)
def test_the_forbidden_way_loses_work_halfway_and_this_one_does_not(
    run: Processes, empty_database: Database, program: str, stops: int
) -> None:
    stop = Stops(run, empty_database, stops)
    allowed = stop(program, "allowed")
    assert allowed.lost == 0
    assert allowed.done > 0
    assert stop(program, "forbidden").lost > 0


@pytest.mark.parametrize("stops", STOPS)
def test_requests_in_flight_are_finished(run: Processes, empty_database: Database, stops: int) -> None:
    """Who got an answer got the whole work, who got none got nothing of it and may ask another Pod."""
    stop = Stops(run, empty_database, stops)
    answered: list[str] = []
    refused: list[str] = []
    asking: list[Future[None]] = []
    clients = ThreadPoolExecutor(3 * AT_ONCE)

    def load(process: Process, ready: str) -> None:
        port = int(ready.split()[1])

        def ask(client: int) -> None:
            number = 0
            while not process.ended():
                number += 1
                name = f"{process.pid}-{id(process)}-{client}-{number}"
                try:
                    status, _ = http1.ask("127.0.0.1", port, "GET", f"/{name}", seconds=LONG)
                except (OSError, http1.HttpError):
                    refused.append(name)
                    return
                assert status == 200
                answered.append(name)

        asking.extend(clients.submit(ask, client) for client in range(3))

    with clients:
        allowed = stop(HTTP, "allowed", load)
        for future in asking:
            future.result()
        units = {row["unit"] for row in empty_database.rows("SELECT unit FROM effect")}
        assert allowed.lost == 0
        assert units == set(answered)
        assert not units & set(refused)
        forbidden = stop(HTTP, "forbidden", load)
    assert forbidden.lost > 0
