"""The relay, stopped and killed at random instants; and the forbidden ways, each with what it loses or doubles.

The sink has two tables: `delivered` takes each delivery as it comes, `effects` has the idempotency key unique.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator

import psycopg
import pytest

from leasedjob.workload import OutboxMessage, OutboxRelay, enqueue_once, install_outbox

from .conftest import Database
from .workload_parts import LONG, Process, Processes, processes

pytestmark = pytest.mark.integration
EACH = 60  # messages for each stop
KEYS = 7

BEGIN = """
import asyncio, logging, os, sys, psycopg
from psycopg_pool import AsyncConnectionPool
from leasedjob.workload import *

OUTBOX, SECONDS = os.environ["OUTBOX"], float(os.environ.get("SECONDS", "0.002"))
SILENT = int(os.environ.get("SILENT", "1000000"))  # from this message on the sink takes what it gets, and answers never
# Two seconds for the relay, and then the process ends by itself.
BUDGET = ShutdownBudget(total=5, pre_stop=0, http=1, intervals=1, background=2, consumers=0.5, pools=0.5, sidecar=2)
MARK = "UPDATE leasedjob_outbox SET published_at = now() WHERE id = %s"

async def publish(key):
    await asyncio.sleep(SECONDS)
    async with await psycopg.AsyncConnection.connect(OUTBOX) as sink:
        await sink.execute("INSERT INTO delivered (key) VALUES (%s)", (key,))
        await sink.execute("INSERT INTO effects VALUES (%s) ON CONFLICT DO NOTHING", (key,))
    print("published", key, flush=True)
    if int(key) >= SILENT:
        await asyncio.sleep(300)

async def claim(connection, most=10):
    cursor = await connection.execute(
        "SELECT id, idempotency_key FROM leasedjob_outbox WHERE published_at IS NULL ORDER BY id LIMIT %s"
        " FOR UPDATE SKIP LOCKED", (most,))
    return await cursor.fetchall()

async def one_batch():
    async with await psycopg.AsyncConnection.connect(OUTBOX) as connection:
        for id, key in await claim(connection):
            await publish(key)
            await connection.execute(MARK, (id,))
"""
SDK = (
    BEGIN
    + """
async def main():
    state = ShutdownState.listening()
    async with GracefulShutdown(state) as shutdown:
        relay = OutboxRelay(OUTBOX, lambda message: publish(message.idempotency_key), state, interval=0.02, batch=10)
        shutdown.add(relay)
        relay.start()
        print("begins", flush=True)
        (report,) = await shutdown.finished()
        print(report.outcome, flush=True)
asyncio.run(main())
"""
)
# It never looks at the flag: when the stop's time is over the process ends by itself, in the middle of a batch.
ENDLESS = (
    BEGIN
    + """
async def main():
    state = ShutdownState.listening()
    async with GracefulShutdown(state, BUDGET) as shutdown:
        async def relay():
            while True:
                await one_batch()
        running = asyncio.create_task(relay())
        shutdown.on_stop(Phase.BACKGROUND, "relay", lambda: asyncio.wait([running]))
        print("begins", flush=True)
        await shutdown.finished()
        await running
asyncio.run(main())
"""
)
# It looks at the flag, but first it wants to be through with what is there.
ONE_MORE = (
    BEGIN
    + """
async def main():
    state = ShutdownState.listening()
    async with GracefulShutdown(state, BUDGET) as shutdown:
        async def relay():
            left = True
            while left or not state.is_draining():
                await one_batch()
                async with await psycopg.AsyncConnection.connect(OUTBOX) as connection:
                    left = await claim(connection, 1)
        running = asyncio.create_task(relay())
        shutdown.on_stop(Phase.BACKGROUND, "relay", lambda: asyncio.wait([running]))
        print("begins", flush=True)
        await shutdown.finished()
        await running
asyncio.run(main())
"""
)
# The mark is committed before the message is sent.
MARKED_FIRST = (
    BEGIN
    + """
async def main():
    state = ShutdownState.listening()
    print("begins", flush=True)
    while not state.is_draining():
        async with await psycopg.AsyncConnection.connect(OUTBOX) as connection:
            batch = await claim(connection)
            for id, key in batch:
                await connection.execute(MARK, (id,))
        for id, key in batch:
            state.signal.raise_if_set()
            await publish(key)
asyncio.run(main())
"""
)
# The transaction that claims ends before the message is sent, so nothing is claimed.
NOT_CLAIMED = (
    BEGIN
    + """
async def main():
    state = ShutdownState.listening()
    print("begins", flush=True)
    while not state.is_draining():
        await asyncio.sleep(0.01)
        async with await psycopg.AsyncConnection.connect(OUTBOX) as connection:
            batch = await claim(connection)
        for id, key in batch:
            await publish(key)
            async with await psycopg.AsyncConnection.connect(OUTBOX) as connection:
                await connection.execute(MARK, (id,))
asyncio.run(main())
"""
)
# A relay whose marks need the pool. WHEN is "first" or "last".
POOL = (
    BEGIN
    + """
async def main():
    state = ShutdownState.listening()
    pool = AsyncConnectionPool(OUTBOX, min_size=1, open=False)
    await pool.open()
    async def relay():
        while not state.is_draining():
            async with pool.connection() as connection:
                batch = await claim(connection)
            for id, key in batch:
                await publish(key)
                async with pool.connection() as connection:
                    await connection.execute(MARK, (id,))
    async with GracefulShutdown(state) as shutdown:
        running = asyncio.create_task(relay())
        phase = {"first": Phase.BACKGROUND, "last": Phase.POOLS}[os.environ["WHEN"]]
        shutdown.on_stop(phase, "pool", pool.close)
        shutdown.on_stop(Phase.BACKGROUND, "relay", lambda: asyncio.wait([running]))
        print("begins", flush=True)
        await shutdown.finished()
        await running
asyncio.run(main())
"""
)


@pytest.fixture
def run() -> Iterator[Processes]:
    yield from processes()


class Parts:
    """An outbox with messages, and the sink."""

    def __init__(self, run: Processes, database: Database) -> None:
        self._run, self._database = run, database
        self.connection = database.connect()
        install_outbox(self.connection)
        self.connection.execute("CREATE TABLE delivered (id bigint GENERATED ALWAYS AS IDENTITY, key text)")
        self.connection.execute("CREATE TABLE effects (key text PRIMARY KEY)")
        self.keys: list[str] = []

    def put(self, count: int) -> None:
        with psycopg.connect(self._database.dsn) as connection:
            for number in range(len(self.keys), len(self.keys) + count):
                self.keys.append(f"{number}")
                key = f"key {number % KEYS}"
                assert enqueue_once(connection, f"{number}", "t", number, topic="orders", partition_key=key)

    def start(self, program: str, **env: str) -> Process:
        return self._run.python(program, {"OUTBOX": self._database.dsn, **env})

    def delivered(self) -> list[str]:
        return [row["key"] for row in self._database.rows("SELECT key FROM delivered ORDER BY id")]

    def effects(self) -> set[str]:
        return {row["key"] for row in self._database.rows("SELECT key FROM effects")}

    def doubled(self) -> list[str]:
        return [key for key, times in Counter(self.delivered()).items() if times > 1]

    def marked(self) -> set[str]:
        statement = "SELECT idempotency_key AS key FROM leasedjob_outbox WHERE published_at IS NOT NULL"
        return {row["key"] for row in self._database.rows(statement)}

    def finish(self) -> None:
        """Another relay does the rest."""
        with psycopg.connect(self._database.dsn, autocommit=True) as sink:

            def publish(message: OutboxMessage) -> None:
                sink.execute("INSERT INTO delivered (key) VALUES (%s)", (message.idempotency_key,))
                sink.execute("INSERT INTO effects VALUES (%s) ON CONFLICT DO NOTHING", (message.idempotency_key,))

            end = time.monotonic() + LONG
            while len(self.marked()) < len(self.keys):  # the server may not know yet that who was killed is gone
                assert time.monotonic() < end
                asyncio.run(OutboxRelay(self._database.dsn, publish).flush())


@pytest.fixture
def parts(run: Processes, empty_database: Database) -> Parts:
    return Parts(run, empty_database)


@pytest.mark.parametrize("stops", [10, pytest.param(50, marks=pytest.mark.soak)])
def test_stopped_at_random_instants_nothing_is_lost_or_delivered_twice(parts: Parts, stops: int) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    midway = 0
    for _ in range(stops):
        parts.put(EACH)
        process = parts.start(SDK)
        if chance.random() < 0.9:
            process.line("begins")
        time.sleep(chance.uniform(0, 0.3))  # the instant is what is tested
        process.signal(signal.SIGTERM)
        code = process.wait()
        ends = {0: process.out[-1:] == ["done"], -signal.SIGTERM: process.out == [], 1: "DrainingError" in process.err}
        assert ends.get(code), (code, process.out, process.err)
        midway += 0 < len(parts.marked()) < len(parts.keys)
        assert parts.marked() == set(parts.delivered()), "what was delivered is marked, and nothing else"
        assert parts.doubled() == []
    assert midway, "stopped with something in hand"
    parts.finish()
    delivered = parts.delivered()
    assert sorted(delivered, key=int) == parts.keys, "each once"
    for number in range(KEYS):
        of_key = [key for key in parts.keys if int(key) % KEYS == number]
        assert [key for key in delivered if int(key) % KEYS == number] == of_key, "in its order"
    assert parts.effects() == set(parts.keys)
    print(f"{stops} stops: {len(delivered)} deliveries of {len(parts.keys)} messages, none lost, none twice")


@pytest.mark.parametrize("stops", [5, pytest.param(25, marks=pytest.mark.soak)])
def test_killed_at_random_instants_no_effect_is_lost_or_doubled(parts: Parts, stops: int) -> None:
    """Two relays, killed without a word: a delivery may come twice, its effect doesn't."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    parts.put(EACH)
    for _ in range(stops):
        parts.put(EACH)
        pair = [parts.start(SDK), parts.start(SDK)]
        pair[0].line("begins")
        time.sleep(chance.uniform(0, 0.3))
        for process in pair:
            process.signal(chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGKILL]))
            process.wait()
        assert parts.marked() <= parts.effects(), "nothing is marked that wasn't delivered"
    parts.finish()
    assert parts.effects() == set(parts.keys)
    print(f"{stops} kills of two: {len(parts.delivered())} deliveries of {len(parts.keys)} messages, none lost")


def test_killed_between_publishing_and_marking_it_is_delivered_again(parts: Parts) -> None:
    parts.put(10)
    process = parts.start(SDK, SECONDS="0.2")
    process.line("published 3")
    process.signal(signal.SIGKILL)
    process.wait()
    assert parts.marked() == set()
    parts.finish()
    assert {"0", "1", "2", "3"} <= set(parts.doubled())
    assert parts.effects() == set(parts.keys), "by its idempotency key it is taken once"


class TestForbidden:
    """Ways to relay that look right until the process is stopped."""

    @pytest.mark.parametrize(
        "program", [pytest.param(ENDLESS, id="an endless loop"), pytest.param(ONE_MORE, id="one batch more")]
    )
    def test_a_loop_that_begins_another_batch_is_cut_in_its_middle(self, parts: Parts, program: str) -> None:
        parts.put(30)
        process = parts.start(program, SECONDS="0.04", SILENT="15")
        process.line("published 3")
        process.signal(signal.SIGTERM)
        assert process.wait() == 143
        assert "cut off: relay" in process.err
        parts.finish()
        assert parts.doubled() == ["10", "11", "12", "13", "14", "15"]

    def test_the_relay_under_the_same_stop_is_not(self, parts: Parts) -> None:
        parts.put(30)
        program = SDK.replace("GracefulShutdown(state)", "GracefulShutdown(state, BUDGET)")
        process = parts.start(program, SECONDS="0.04", SILENT="15")
        process.line("published 3")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0, process.err
        assert process.out[-1] == "done"
        assert parts.marked() == {f"{n}" for n in range(10)}, "the batch in hand, and no other"
        parts.finish()
        assert parts.doubled() == []

    def test_marked_before_it_is_sent_it_is_lost(self, parts: Parts) -> None:
        parts.put(20)
        process = parts.start(MARKED_FIRST, SECONDS="0.1")
        process.line("published 3")
        process.signal(signal.SIGTERM)
        process.wait()
        parts.put(1)
        parts.finish()
        lost = set(parts.keys) - parts.effects()
        assert lost
        assert lost <= {f"{n}" for n in range(4, 10)}

    def test_sent_outside_the_transaction_that_claims_it_two_relays_send_it(self, parts: Parts) -> None:
        pair = [parts.start(NOT_CLAIMED, SECONDS="0.2") for _ in range(2)]
        for process in pair:
            process.line("begins")
        parts.put(10)
        for process in pair:
            process.line("published")
            process.signal(signal.SIGTERM)
        for process in pair:
            assert process.wait() == 0
        assert parts.doubled(), "the first one of all, at the least"

    @pytest.mark.parametrize(("when", "twice"), [("first", 1), ("last", 0)])
    def test_a_pool_that_is_closed_first_leaves_what_was_sent_without_a_mark(
        self, parts: Parts, when: str, twice: int
    ) -> None:
        parts.put(20)
        process = parts.start(POOL, SECONDS="0.2", WHEN=when)
        process.line("published 1")
        process.signal(signal.SIGTERM)
        process.wait()
        assert ("PoolClosed" in process.err) == bool(twice)
        parts.finish()
        assert len(parts.doubled()) == twice
