"""BullMQ's jobs on a real Redis: no job is lost or done twice, however a worker stops; the forbidden ways do both."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from bullmq import Queue, Worker
from tests.queues import REDIS, RedisServer, need

from leasedjob.identity import bullmq_job_id
from leasedjob.workload import DrainingError, Phase, ShutdownState
from leasedjob.workload.bullmq import BullMQQueue, BullMQWorker

from .conftest import Database
from .workload_parts import LONG, Processes, processes

pytestmark = pytest.mark.integration
_numbers = itertools.count(1)
WAITING = 12
# Short, so that what a dead worker had in hand is noticed soon.
QUICK = {"lockDuration": 1000, "stalledInterval": 300}
# Between the effect and the job's end something can happen, as always.
WORK = """
import asyncio, os, psycopg
from leasedjob.workload import *
from leasedjob.workload.bullmq import BullMQWorker
state = ShutdownState.listening()

async def work(job, idempotency_key):
    async with await psycopg.AsyncConnection.connect(os.environ["SINK"], autocommit=True) as sink:
        await sink.execute("INSERT INTO begun VALUES (%s)", (job.data["item"],))
        await sink.execute("INSERT INTO effect VALUES (%s) ON CONFLICT DO NOTHING", (idempotency_key,))
    await asyncio.sleep(0.02)

async def main():
    options = {"lockDuration": 1000, "stalledInterval": 300}
    worker = BullMQWorker(
        os.environ["QUEUE"], work, state, connection=os.environ["REDIS"], concurrency=3, options=options
    )
    async with GracefulShutdown(state) as shutdown:
        shutdown.add(worker)
        worker.start()
        print("works", flush=True)
        report = await shutdown.finished()
    print(*(f"{line.phase} {line.outcome}" for line in report), flush=True)

try:
    asyncio.run(main())
except DrainingError:
    print("stopped before it began")
"""


@pytest.fixture
def run() -> Iterator[Processes]:
    yield from processes()


@pytest.fixture
def queue(redis_server: RedisServer) -> str:
    """The name of a queue that no other test uses."""
    return f"queue-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
async def jobs(redis_server: RedisServer, queue: str) -> AsyncIterator[BullMQQueue]:
    adding = BullMQQueue(queue, connection=redis_server.url)
    yield adding
    await adding.stop()


@pytest.fixture
async def seen(redis_server: RedisServer, queue: str) -> AsyncIterator[Any]:
    """The queue as BullMQ shows it."""
    view = Queue(queue, {"connection": redis_server.url})
    yield view
    await view.close()


@pytest.fixture
def sink(empty_database: Database) -> Database:
    with empty_database.connect() as connection:
        connection.execute("CREATE TABLE begun (item integer)")
        connection.execute("CREATE TABLE effect (idempotency_key text PRIMARY KEY)")
    return empty_database


async def until(condition: Any) -> None:
    """Waits for an async or plain condition."""
    async with asyncio.timeout(LONG):
        while True:
            given = condition()
            if await given if asyncio.iscoroutine(given) else given:
                return
            await asyncio.sleep(0.02)


async def counts(seen: Any) -> dict[str, int]:
    found = await seen.getJobCounts("wait", "active", "delayed", "completed", "failed")
    return {state: count for state, count in found.items() if count}


def environment(redis_server: RedisServer, queue: str, sink: Database) -> dict[str, str]:
    return {"REDIS": redis_server.url, "QUEUE": queue, "SINK": sink.dsn}


# --- stopped at any instant ---


@pytest.mark.parametrize("stops", [10, pytest.param(50, marks=pytest.mark.soak)])
async def test_at_random_instants_no_job_is_lost_or_begun_twice(
    run: Processes, redis_server: RedisServer, queue: str, jobs: BullMQQueue, seen: Any, sink: Database, stops: int
) -> None:
    chance = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    env = environment(redis_server, queue, sink)
    items = itertools.count()
    worker = run.python(WORK, env)
    for _ in range(stops):
        following = run.python(WORK, env)  # as in a rollout: one starts while the other is stopped
        if chance.random() < 0.8:
            await asyncio.to_thread(worker.line, "works")
        while await seen.getWaitingCount() < WAITING:  # a stop meets jobs, whenever it comes
            await jobs.add("item", {"item": (item := next(items))}, idempotency_key=f"item/{item}")
        await asyncio.sleep(chance.uniform(0, 0.1))  # the instant is what is tested
        worker.signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait) in (0, -signal.SIGTERM), worker.err
        worker = following
    count = next(items)
    await until(lambda: len(sink.rows("SELECT 1 FROM effect")) == count)
    await asyncio.to_thread(worker.line, "works")
    worker.signal(signal.SIGTERM)
    assert await asyncio.to_thread(worker.wait) == 0, worker.err
    assert worker.out[-1] == "background done"
    begun = Counter(row["item"] for row in sink.rows("SELECT item FROM begun"))
    assert begun == Counter(range(count)), "each job was begun once: a stop cut none off"
    assert await counts(seen) == {"completed": count}


async def test_a_killed_worker_s_job_runs_again_and_its_effect_happens_once(
    run: Processes, redis_server: RedisServer, queue: str, jobs: BullMQQueue, seen: Any, sink: Database
) -> None:
    await jobs.add("item", {"item": 1}, idempotency_key="item/1")
    slow = WORK.replace("asyncio.sleep(0.02)", "asyncio.sleep(300)")
    env = environment(redis_server, queue, sink)
    killed = run.python(slow, env)
    await until(lambda: sink.rows("SELECT 1 FROM effect"))
    killed.signal(signal.SIGKILL)
    run.python(WORK, env)

    async def done() -> bool:
        return await counts(seen) == {"completed": 1}

    await until(done)
    assert [row["item"] for row in sink.rows("SELECT item FROM begun")] == [1, 1]
    assert len(sink.rows("SELECT 1 FROM effect")) == 1


# --- what is forbidden ---


class Sink:
    """Effects in memory: those of a sink that knows keys, and those of one that doesn't."""

    def __init__(self) -> None:
        self.effects: list[Any] = []
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def half(self, job: Any, _key: str = "") -> None:
        """The effect, and then more to do."""
        self.effects.append(job.data["item"])
        self.begun.set()
        await self.go_on.wait()


async def test_a_forced_close_drops_a_job_that_is_then_done_twice(
    redis_server: RedisServer, queue: str, jobs: BullMQQueue, seen: Any
) -> None:
    sink = Sink()
    await jobs.add("item", {"item": 1}, idempotency_key="item/1")
    options = {"connection": redis_server.url, **QUICK}
    worker = Worker(queue, sink.half, options)
    await sink.begun.wait()
    await worker.close(force=True)
    sink.go_on.set()
    await asyncio.sleep(0)
    assert await counts(seen) == {"active": 1}, "it is nobody's job now"
    other = Worker(queue, sink.half, options)
    await until(lambda: len(sink.effects) == 2)
    await other.close()
    assert sink.effects == [1, 1]


async def test_the_worker_waits_for_the_job_that_runs(
    redis_server: RedisServer, queue: str, jobs: BullMQQueue, seen: Any
) -> None:
    sink, state = Sink(), ShutdownState()
    await jobs.add("item", {"item": 1}, idempotency_key="item/1")
    worker = BullMQWorker(queue, sink.half, state, connection=redis_server.url, options=QUICK)
    assert worker.phase is Phase.BACKGROUND
    worker.start()
    await sink.begun.wait()
    state.begin()
    stopping = asyncio.create_task(worker.stop())
    other = BullMQWorker(queue, sink.half, ShutdownState(), connection=redis_server.url, options=QUICK)
    other.start()
    await asyncio.sleep(2.5)  # longer than its lock: another worker would take it for stalled if nobody renewed that
    assert not stopping.done()
    assert [line.split()[0] for line in worker.in_hand()] == ["job"]
    sink.go_on.set()
    await stopping
    assert worker.in_hand() == []
    await other.stop()
    assert sink.effects == [1]
    assert await counts(seen) == {"completed": 1}


async def test_bullmq_s_own_loop_lets_a_lock_go_while_its_close_waits_for_the_job(
    redis_server: RedisServer, queue: str, jobs: BullMQQueue
) -> None:
    """Why the loop is ours: without this a part of it would be enough."""
    sink = Sink()
    await jobs.add("item", {"item": 1}, idempotency_key="item/1")
    options = {"connection": redis_server.url, **QUICK, "concurrency": 2}
    worker = Worker(queue, sink.half, options)
    await sink.begun.wait()
    await until(lambda: worker.waiting is not None)
    closing = asyncio.create_task(worker.close())
    other = Worker(queue, sink.half, options)
    await until(lambda: len(sink.effects) == 2)
    sink.go_on.set()
    await closing
    await other.close()
    assert sink.effects == [1, 1], "begun a second time while it ran"


async def test_a_job_without_an_idempotency_key_does_its_work_twice_when_it_is_tried_again(
    redis_server: RedisServer, queue: str, seen: Any
) -> None:
    charged: list[int] = []

    async def charge(job: Any, *_: object) -> None:
        charged.append(job.data["order"])
        if job.attemptsMade == 0:
            raise ConnectionError("the answer was lost")

    await seen.add("charge", {"order": 7}, {"attempts": 2})
    worker = Worker(queue, charge, {"connection": redis_server.url})
    await until(lambda: len(charged) == 2)
    await worker.close()
    assert charged == [7, 7]

    charged.clear()
    ours = BullMQWorker(queue, charge, ShutdownState(), connection=redis_server.url)
    ours.start()
    await seen.add("charge", {"order": 8}, {"attempts": 2})
    await seen.add("charge", ["order", 9], {"attempts": 2})
    await seen.add("charge", {"order": 10, "idempotencyKey": " "}, {"attempts": 2})

    async def refused() -> bool:
        return int(await seen.getFailedCount()) == 3

    await until(refused)
    await ours.stop()
    assert charged == []
    for job in await seen.getFailed():
        assert "has no idempotencyKey in its data" in job.failedReason
        assert job.attemptsMade == 1, "it isn't tried again"


async def test_a_key_makes_the_effect_of_a_second_try_the_same_one(
    redis_server: RedisServer, queue: str, jobs: BullMQQueue, caplog: pytest.LogCaptureFixture
) -> None:
    charged: dict[str, int] = {}
    tries: list[int] = []

    def charge(job: Any, idempotency_key: str) -> str:  # a plain function: in a thread
        tries.append(job.attemptsMade)
        charged.setdefault(idempotency_key, job.data["order"])
        if job.attemptsMade == 0:
            raise ConnectionError("the answer was lost")
        return "paid"

    options = {"drainDelay": 14}  # so long it waits for a job
    worker = BullMQWorker(queue, charge, ShutdownState(), connection=redis_server.url, options=options)
    worker.start()
    ids = [
        await jobs.add("charge", {"order": 7}, idempotency_key="charge/7", options={"attempts": 2}) for _ in range(3)
    ]
    assert set(ids) == {bullmq_job_id("charge/7")}
    await until(lambda: len(tries) == 2)
    await worker.stop()
    assert "doesn't answer" not in caplog.text, "a fetch that only waits is ended at once"
    assert (tries, charged) == ([0, 1], {"charge/7": 7})


# --- fetched while draining ---


class LateWorker(BullMQWorker):
    """Draining begins when the last fetch has brought its job."""

    def start(self) -> None:
        super().start()
        fetch = self._worker.moveToActive

        async def late(token: str) -> Any:
            if (job := await fetch(token)) is not None:
                self._state.begin("SIGTERM")
                await asyncio.sleep(0.05)  # the loop hears of it
            return job

        self._worker.moveToActive = late


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="its only attempt"),
        pytest.param({"attempts": 3}, id="the first of three"),
        pytest.param({"removeOnFail": True}, id="failed jobs are removed"),
    ],
)
async def test_a_job_fetched_while_draining_fails_as_draining_and_another_worker_gets_it(
    redis_server: RedisServer, queue: str, jobs: BullMQQueue, seen: Any, options: dict[str, Any]
) -> None:
    worked: list[tuple[str, int]] = []

    async def work(job: Any, _key: str) -> None:
        worked.append((job.name, job.attemptsMade))

    await jobs.add("item", {"item": 1}, idempotency_key="item/1", options=options)
    state = ShutdownState()
    draining = LateWorker(queue, work, state, connection=redis_server.url)
    draining.start()
    await state
    await draining.stop()
    assert worked == [], "it was not begun"
    (job,) = await seen.getWaiting()
    assert job.attemptsMade == 1
    if "attempts" in options:
        assert job.failedReason == "draining"
    else:  # it was in the set of failed jobs for a moment
        reasons = [fields.get("failedReason") for _, fields in await seen.client.xrange(seen.keys["events"])]
        assert "draining" in reasons
    other = BullMQWorker(queue, work, ShutdownState(), connection=redis_server.url)
    other.start()
    await until(lambda: worked)
    await other.stop()
    assert worked == [("item", 1)]


async def test_a_worker_frees_what_another_one_left_failed_as_draining(
    redis_server: RedisServer, queue: str, jobs: BullMQQueue, seen: Any
) -> None:
    async def fail(job: Any, _token: str) -> None:
        raise RuntimeError("draining" if job.data["item"] == 1 else "broken")

    for item in (1, 2):
        await jobs.add("item", {"item": item}, idempotency_key=f"item/{item}")
    left = Worker(queue, fail, {"connection": redis_server.url})

    async def failed() -> bool:
        return int(await seen.getFailedCount()) == 2

    await until(failed)
    await left.close()
    worked: list[int] = []

    async def work(job: Any, _key: str) -> None:
        worked.append(job.data["item"])

    worker = BullMQWorker(queue, work, ShutdownState(), connection=redis_server.url)
    worker.start()
    await until(lambda: worked)
    await worker.stop()
    assert worked == [1], "what has failed for another reason stays failed"


# --- until there is nothing to do ---


async def test_a_worker_says_when_there_is_nothing_to_do(
    redis_server: RedisServer, queue: str, jobs: BullMQQueue
) -> None:
    worked: list[int] = []

    async def work(job: Any, _key: str) -> None:
        await asyncio.sleep(0.1)
        worked.append(job.data["item"])

    for item in range(5):
        await jobs.add("item", {"item": item}, idempotency_key=f"item/{item}")
    options = {"drainDelay": 0.1}
    worker = BullMQWorker(queue, work, ShutdownState(), connection=redis_server.url, options=options)
    worker.start()
    assert await worker.idle(0.3)
    assert sorted(worked) == list(range(5))
    await worker.stop()
    assert not await worker.idle(0), "a stop has begun"


# --- Redis is away ---

DOWN = """
import asyncio, os
from leasedjob.workload import *
from leasedjob.workload.bullmq import BullMQWorker
state = ShutdownState.listening()

async def work(job, idempotency_key):
    print("begun", flush=True)
    await state
    print("done", flush=True)

async def main():
    worker = BullMQWorker("down", work, state, connection=os.environ["REDIS"])
    budget = ShutdownBudget(total=40, pre_stop=0, http=1, intervals=1, background=1, consumers=1)
    async with GracefulShutdown(state, budget) as shutdown:
        shutdown.on_stop(Phase.POOLS, "database", lambda: print("closed", flush=True))
        shutdown.add(worker)
        worker.start()
        report = await shutdown.finished()
    print(*(f"{line.phase} {line.outcome}" for line in report), flush=True)

import logging
logging.basicConfig()
asyncio.run(main())
"""


async def test_where_redis_is_away_the_phase_is_cut_and_named_and_the_job_is_not_lost(run: Processes) -> None:
    need("REDIS", REDIS)
    with RedisServer() as redis:
        adding = BullMQQueue("down", connection=redis.url)
        await adding.add("item", {"item": 1}, idempotency_key="item/1")
        worker = run.python(DOWN, {"REDIS": redis.url})
        await asyncio.to_thread(worker.line, "begun")
        redis.freeze()
        worker.signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait) == 0, worker.err
        assert worker.out[-3:] == ["done", "closed", "background cut pools done"]
        assert f"queue down was cut off after 1.0 s; dropped: job {bullmq_job_id('item/1')} (item)" in worker.err
        redis.thaw()
        seen = Queue("down", {"connection": redis.url})
        assert await counts(seen) in ({"active": 1}, {"completed": 1}), "its end was not recorded, or just so"
        await seen.close()
        await adding.stop()


async def test_a_worker_that_finds_no_redis_waits_for_it_and_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    need("REDIS", REDIS)
    monkeypatch.setattr("leasedjob.workload.bullmq.FETCH_SECONDS", 0.3)
    redis = RedisServer()
    worked = asyncio.Event()

    async def work(_job: Any, _key: str) -> None:
        worked.set()

    connection = {"host": "127.0.0.1", "port": redis.port}
    lost = BullMQWorker("early", work, ShutdownState(), connection=connection)
    lost.start()
    idle = asyncio.create_task(lost.idle(0))
    await asyncio.sleep(0.3)
    assert not idle.done(), "nobody said that there is nothing to do"
    async with asyncio.timeout(LONG):
        await lost.stop()
    assert not await idle
    worker = BullMQWorker("early", work, ShutdownState(), connection=connection)
    worker.start()
    with redis:
        jobs = BullMQQueue("early", connection=connection)
        await jobs.add("item", idempotency_key="item/1")
        await asyncio.wait_for(worked.wait(), LONG)
        await worker.stop()
        await jobs.stop()


async def test_adding_ends_in_time_where_redis_does_not_answer() -> None:
    need("REDIS", REDIS)
    with RedisServer() as redis:
        jobs = BullMQQueue("slow", connection=redis.url, seconds=0.3)
        await jobs.add("item", idempotency_key="item/1")
        redis.freeze()
        with pytest.raises(TimeoutError):
            await jobs.add("item", idempotency_key="item/2")
        redis.thaw()
        await jobs.add("item", idempotency_key="item/2")
        await jobs.stop()


# --- bad input ---


async def test_what_is_refused_names_the_field(redis_server: RedisServer, queue: str, jobs: BullMQQueue) -> None:
    state = ShutdownState()
    with pytest.raises(ValueError, match="idempotency_key must be text"):
        await jobs.add("item", idempotency_key=" ")
    with pytest.raises(ValueError, match="data must be a mapping"):
        await jobs.add("item", [1], idempotency_key="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="data: idempotencyKey must be the key 'a'"):
        await jobs.add("item", {"idempotencyKey": "b"}, idempotency_key="a")
    with pytest.raises(ValueError, match="options: jobId"):
        await jobs.add("item", idempotency_key="a", options={"jobId": "7"})
    with pytest.raises(ValueError, match="concurrency must be"):
        BullMQWorker(queue, print, state, connection=redis_server.url, concurrency=0)
    with pytest.raises(ValueError, match="options: autorun"):
        BullMQWorker(queue, print, state, connection=redis_server.url, options={"autorun": True})
    with pytest.raises(ValueError, match="connection must be"):
        BullMQWorker(queue, print, state, connection="http://redis")
    worker = BullMQWorker(queue, print, state, connection=redis_server.url)
    state.begin()
    with pytest.raises(DrainingError, match="begun by hand"):
        worker.start()
    await worker.stop()
