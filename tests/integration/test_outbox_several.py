"""Several relays at one outbox: each message once, and those of a partition key in their order, whatever fails."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import dataclass, field

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leasedjob.errors import MessageRefusedError, PublisherUnavailableError
from leasedjob.workload import OutboxMessage, OutboxRelay, Patience, enqueue_once, install_outbox
from leasedjob.workload.outbox import table

from .conftest import Database
from .workload_parts import LONG

pytestmark = pytest.mark.integration
PATIENCE = Patience(max_tries=50, first_wait=0.001, longest_wait=0.02, first_pause=0.001, longest_pause=0.01)


@dataclass
class Sink:
    """Notes what it is given, and fails as it was told: n answers before a message is taken."""

    failures: dict[str, list[type[Exception]]] = field(default_factory=dict)
    chance: random.Random = field(default_factory=random.Random)
    taken: list[str] = field(default_factory=list)
    hand: set[str | None] = field(default_factory=set)

    async def publish(self, message: OutboxMessage) -> None:
        assert message.partition_key is None or message.partition_key not in self.hand, "two of one key at once"
        self.hand.add(message.partition_key)
        try:
            await asyncio.sleep(self.chance.choice((0, 0, 0.001, 0.003)))
            if answers := self.failures.get(message.idempotency_key):
                raise answers.pop()("told to")
            self.taken.append(message.idempotency_key)
        finally:
            self.hand.discard(message.partition_key)


async def relayed(sink: Sink, count: int, relays: list[OutboxRelay]) -> None:
    running = [asyncio.create_task(relay.run()) for relay in relays]
    end = time.monotonic() + LONG
    while len(sink.taken) < count:
        assert time.monotonic() < end, sink
        assert not any(task.done() for task in running)
        await asyncio.sleep(0.002)
    await asyncio.gather(*(relay.stop() for relay in relays))
    await asyncio.gather(*running)


@pytest.fixture
def outbox(empty_database: Database) -> psycopg.Connection[dict[str, object]]:
    connection = empty_database.connect()
    install_outbox(connection)
    return connection


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keys=st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=40),
    failing=st.dictionaries(
        st.integers(0, 39),
        st.lists(st.sampled_from([MessageRefusedError, PublisherUnavailableError]), min_size=1, max_size=3),
        max_size=6,
    ),
    relays=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 4)), min_size=2, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_whatever_fails(
    outbox: psycopg.Connection[dict[str, object]],
    empty_database: Database,
    keys: list[str | None],
    failing: dict[int, list[type[Exception]]],
    relays: list[tuple[int, int]],
    seed: int,
) -> None:
    outbox.execute("TRUNCATE leasedjob_outbox")
    for number, key in enumerate(keys):
        enqueue_once(outbox, f"{key}:{number}", "t", number, topic="orders", partition_key=key)
    failures = {f"{keys[n]}:{n}": list(answers) for n, answers in failing.items() if n < len(keys)}
    sink = Sink(failures, random.Random(seed))
    made = [
        OutboxRelay(empty_database.dsn, sink, batch=batch, concurrency=concurrency, interval=0.002, patience=PATIENCE)
        for batch, concurrency in relays
    ]
    asyncio.run(relayed(sink, len(keys), made))
    for key in ("a", "b", "c"):
        assert [name for name in sink.taken if name.startswith(key)] == [
            f"{key}:{n}" for n, other in enumerate(keys) if other == key
        ]
    assert len(sink.taken) == len(set(sink.taken)) == len(keys)
    left = outbox.execute("SELECT count(*) AS n FROM leasedjob_outbox WHERE published_at IS NULL").fetchone()
    assert left == {"n": 0}


async def test_while_applications_go_on_putting_in(empty_database: Database) -> None:
    """Four applications, which number the messages of a key one after the other; four relays."""
    keys, each, applications = "abcde", 60, 4
    with empty_database.connect() as connection:
        install_outbox(connection)
        connection.execute("CREATE TABLE entity (key text PRIMARY KEY, version integer NOT NULL)")
        connection.execute("INSERT INTO entity SELECT unnest(string_to_array('a,b,c,d,e', ',')), 0")
    seed = random.randrange(2**32)
    print("seed", seed)

    def application(number: int) -> None:
        chance = random.Random(seed + number)
        with psycopg.connect(empty_database.dsn) as connection:
            for _ in range(each):
                key = chance.choice(keys)
                row = connection.execute(
                    "UPDATE entity SET version = version + 1 WHERE key = %s RETURNING version", (key,)
                ).fetchone()
                assert row is not None
                enqueue_once(connection, f"{key}:{row[0]}", "t", row[0], topic="entities", partition_key=key)
                if chance.random() < 0.3:
                    time.sleep(chance.uniform(0, 0.003))
                if chance.random() < 0.1:
                    connection.rollback()
                else:
                    connection.commit()

    threads = [threading.Thread(target=application, args=(number,)) for number in range(applications)]
    for thread in threads:
        thread.start()
    chance = random.Random(seed)
    failures: dict[str, list[type[Exception]]] = {
        f"{chance.choice(keys)}:{chance.randrange(1, 40)}": [chance.choice([ValueError, ConnectionError])]
        for _ in range(20)
    }
    sink = Sink(failures, chance)
    relays = [
        OutboxRelay(empty_database.dsn, sink, batch=size, concurrency=2, interval=0.002, patience=PATIENCE)
        for size in (1, 3, 10, 50)
    ]
    running = [asyncio.create_task(relay.run()) for relay in relays]
    await asyncio.to_thread(lambda: [thread.join(LONG) for thread in threads])
    expected = {row["key"]: row["version"] for row in empty_database.rows("SELECT key, version FROM entity")}
    end = time.monotonic() + LONG
    while len(sink.taken) < sum(expected.values()):
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    await asyncio.gather(*(relay.stop() for relay in relays))
    await asyncio.gather(*running)
    for key, version in expected.items():
        taken = [int(name.split(":")[1]) for name in sink.taken if name.startswith(key)]
        assert taken == list(range(1, version + 1)), key


def test_a_key_that_began_to_wait_while_its_lane_was_being_locked(
    outbox: psycopg.Connection[dict[str, object]],
) -> None:
    """The statement that claims looks again: another relay may have been refused a message just before."""
    for key, partition_key in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        enqueue_once(outbox, key, "t", 1, topic="orders", partition_key=partition_key)
    outbox.execute("UPDATE leasedjob_outbox SET next_try_at = now() + interval '1 hour' WHERE idempotency_key = 'a1'")
    lanes = [row["lane"] for row in outbox.execute("SELECT DISTINCT lane FROM leasedjob_outbox")]
    rows = outbox.execute(table.CLAIM, {"batch": 50, "topics": None, "lanes": lanes}).fetchall()
    assert [row["idempotency_key"] for row in rows] == ["b1"]
