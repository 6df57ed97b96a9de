"""From the outbox to BullMQ and Kafka, on real servers: what was committed arrives, and its effect happens once."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.queues import REDIS, RedisServer, need

from leasedjob.errors import MessageRefusedError
from leasedjob.identity import bullmq_job_id
from leasedjob.workload import (
    OutboxMessage,
    OutboxRelay,
    Patience,
    ShutdownState,
    enqueue_once,
    install_outbox,
    outbox_status,
)
from leasedjob.workload.bullmq import BullMQPublisher, BullMQQueue, BullMQWorker
from leasedjob.workload.kafka import KafkaConsumer, KafkaProducer, KafkaPublisher

from .conftest import Database
from .test_queue_kafka import create
from .workload_parts import LONG, Processes, processes

pytestmark = pytest.mark.integration
_numbers = itertools.count(1)
KEYS = 4
QUICK = Patience(first_wait=0.01, longest_wait=0.02, first_pause=0.01, longest_pause=0.02)
# Relay, producer, consumer and pool in one program, as in a service: the parts stop in the order of their phases.
SERVICE = """
import asyncio, os
from psycopg_pool import AsyncConnectionPool
from leasedjob.workload import *
from leasedjob.workload.kafka import KafkaConsumer, KafkaProducer, KafkaPublisher
from leasedjob.workload.pools import AsyncPsycopgPool
state = ShutdownState.listening()

async def main():
    pool = AsyncConnectionPool(os.environ["DATABASE"], open=False, min_size=1, max_size=6)
    await pool.open()
    topic, servers = os.environ["TOPIC"], os.environ["SERVERS"]

    async def work(record, idempotency_key):
        async with pool.connection() as connection:
            await connection.execute("INSERT INTO begun VALUES (%s, %s)", (record.key.decode(), int(record.value)))
            await connection.execute("INSERT INTO effect VALUES (%s) ON CONFLICT DO NOTHING", (idempotency_key,))
        await asyncio.sleep(0.01)

    async with GracefulShutdown(state) as shutdown:
        shutdown.add(AsyncPsycopgPool(pool))
        producer = KafkaProducer(servers=servers)
        shutdown.add(producer)
        await producer.start()
        relay = OutboxRelay(pool.connection, KafkaPublisher(producer), state, batch=10, interval=0.05)
        shutdown.add(relay)
        consumer = KafkaConsumer(
            [topic], work, state, group_id=topic, servers=servers,
            options={"session_timeout_ms": 30000, "heartbeat_interval_ms": 200},
        )
        shutdown.add(consumer)
        relay.start()
        await consumer.start()
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
def name() -> str:
    """Of a topic or a queue that no other test uses."""
    return f"outbox-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def outbox(empty_database: Database) -> Database:
    with empty_database.connect() as connection:
        install_outbox(connection)
        connection.execute("CREATE TABLE begun (key text, item integer, id serial)")
        connection.execute("CREATE TABLE effect (idempotency_key text PRIMARY KEY)")
    return empty_database


def put(outbox: Database, topic: str, items: range) -> None:
    with outbox.connect(autocommit=False) as connection:
        for item in items:
            enqueue_once(connection, f"item/{item}", "item", item, topic=topic, partition_key=f"key-{item % KEYS}")


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LONG):
        while not condition():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("stops", [5, pytest.param(50, marks=pytest.mark.soak)])
async def test_at_random_instants_what_was_committed_arrives_in_order_and_its_effect_happens_once(
    run: Processes, kafka_servers: str, outbox: Database, name: str, stops: int
) -> None:
    chance = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    await create(kafka_servers, name)
    env = {"SERVERS": kafka_servers, "TOPIC": name, "DATABASE": outbox.dsn}
    sent = 0
    service = run.python(SERVICE, env)
    for _ in range(stops):
        following = run.python(SERVICE, env)
        put(outbox, name, range(sent, sent := sent + 40))
        if chance.random() < 0.8:
            await asyncio.to_thread(service.line, "works")
        await asyncio.sleep(chance.uniform(0, 0.3))  # the instant is what is tested
        service.signal(signal.SIGTERM)
        assert await asyncio.to_thread(service.wait) in (0, -signal.SIGTERM), service.err
        service = following
    await until(lambda: len(outbox.rows("SELECT 1 FROM effect")) == sent)
    await asyncio.to_thread(service.line, "works")
    service.signal(signal.SIGTERM)
    assert await asyncio.to_thread(service.wait) == 0, service.err
    assert service.out[-1] == "background done consumers done pools done"
    by_key: dict[str, list[int]] = defaultdict(list)
    for row in outbox.rows("SELECT key, item FROM begun ORDER BY id"):
        by_key[row["key"]].append(row["item"])
    # Nobody was killed: nothing was published or processed twice, either.
    assert by_key == {f"key-{key}": list(range(key, sent, KEYS)) for key in range(KEYS)}


def message(topic: str, payload: Any = 1, **changes: Any) -> OutboxMessage:
    values: dict[str, Any] = {
        "id": 1,
        "idempotency_key": "item/1",
        "type": "paid",
        "payload": payload,
        "topic": topic,
        "partition_key": "order-7",
        "created_at": datetime.now(UTC),
    }
    return OutboxMessage(**{**values, **changes})


async def test_a_message_becomes_a_record_with_its_key(kafka_servers: str, name: str) -> None:
    await create(kafka_servers, name)
    producer = KafkaProducer(servers=kafka_servers)
    await producer.start()
    await KafkaPublisher(producer).publish(message(name, {"order": 7}, headers={"trace": "t"}))
    await KafkaPublisher(producer).publish(message(name, None, idempotency_key="item/2", partition_key=None))
    seen: dict[str, Any] = {}

    async def work(record: Any, idempotency_key: str) -> None:
        seen[idempotency_key] = record

    consumer = KafkaConsumer([name], work, ShutdownState(), group_id=name, servers=kafka_servers)
    await consumer.start()
    await until(lambda: len(seen) == 2)
    await consumer.stop()
    await producer.stop()
    first, second = seen["item/1"], seen["item/2"]
    assert (first.key, first.value) == (b"order-7", b'{"order":7}')
    assert dict(first.headers) == {"type": b"paid", "trace": b"t", "idempotency-key": b"item/1"}
    assert (second.key, second.value) == (None, b"null")


async def test_a_record_that_kafka_never_takes_is_refused(kafka_servers: str, name: str) -> None:
    await create(kafka_servers, name)
    producer = KafkaProducer(servers=kafka_servers)
    await producer.start()
    with pytest.raises(MessageRefusedError, match="MessageSizeTooLarge"):
        await KafkaPublisher(producer).publish(message(name, "x" * (2 << 20)))
    with pytest.raises(MessageRefusedError, match="headers: idempotency-key"):
        await KafkaPublisher(producer).publish(message(name, headers={"idempotency-key": "other"}))
    await producer.stop()


async def test_from_the_outbox_into_a_queue(redis_server: RedisServer, outbox: Database, name: str) -> None:
    queue = BullMQQueue(name, connection=redis_server.url)
    relay = OutboxRelay(outbox.dsn, BullMQPublisher({name: queue}, options={"attempts": 3}))
    put(outbox, name, range(3))
    with outbox.connect() as connection:
        enqueue_once(connection, "object", "paid", {"order": 7}, topic=name, headers={"trace": "t"})
    assert (await relay.flush()).published == 4
    # As after a relay that was killed before its commit.
    outbox.rows("UPDATE leasedjob_outbox SET published_at = NULL")
    assert (await relay.flush()).published == 4
    seen: dict[str, Any] = {}

    async def work(job: Any, idempotency_key: str) -> None:
        assert idempotency_key not in seen
        seen[idempotency_key] = job

    worker = BullMQWorker(name, work, ShutdownState(), connection=redis_server.url)
    worker.start()
    await until(lambda: len(seen) == 4)
    await worker.stop()
    await queue.stop()
    job = seen["object"]
    assert (job.id, job.name, job.opts["attempts"]) == (bullmq_job_id("object"), "paid", 3)
    assert job.data == {"order": 7, "headers": {"trace": "t"}, "idempotencyKey": "object"}
    assert seen["item/1"].data == {"payload": 1, "idempotencyKey": "item/1"}


async def test_a_message_without_a_queue_is_refused(redis_server: RedisServer, name: str) -> None:
    queue = BullMQQueue(name, connection=redis_server.url)
    publisher = BullMQPublisher({name: queue})
    with pytest.raises(MessageRefusedError, match="topic 'other' has no queue; there are outbox-"):
        await publisher.publish(message("other"))
    with pytest.raises(MessageRefusedError, match="data: idempotencyKey must be the key") as refused:
        await publisher.publish(message(name, {"idempotencyKey": "other"}))
    assert refused.value.final
    await queue.stop()


async def test_while_redis_is_away_no_try_is_spent(outbox: Database, name: str) -> None:
    need("REDIS", REDIS)
    with RedisServer() as redis:
        queue = BullMQQueue(name, connection=redis.url, seconds=0.3)
        relay = OutboxRelay(outbox.dsn, BullMQPublisher({name: queue}), patience=QUICK)
        put(outbox, name, range(1))
        redis.freeze()
        done = await relay.flush()
        assert (done.published, done.refused, done.parked) == (0, 0, 0)
        redis.thaw()
        outbox.rows("UPDATE leasedjob_outbox SET next_try_at = now() WHERE next_try_at IS NOT NULL")
        assert (await relay.flush()).published == 1
        with outbox.connect() as connection:
            assert outbox_status(connection).parked == 0
        await queue.stop()
