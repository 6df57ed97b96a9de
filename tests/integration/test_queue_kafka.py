"""Kafka's records on a real broker: no record is lost or processed twice by a stop; the forbidden ways do both."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaConnectionError, NoOffsetForPartitionError
from tests.queues import KafkaBroker, free_port, kafka_jars, need

from leasedjob.workload import DrainingError, Phase, ShutdownState
from leasedjob.workload.kafka import KafkaConsumer, KafkaProducer

from .conftest import Database
from .workload_parts import LONG, Processes, processes

pytestmark = pytest.mark.integration
PARTITIONS = 3
WORK = """
import asyncio, os, psycopg
from leasedjob.workload import *
from leasedjob.workload.kafka import KafkaConsumer
state = ShutdownState.listening()

async def work(record, idempotency_key):
    async with await psycopg.AsyncConnection.connect(os.environ["SINK"], autocommit=True) as sink:
        await sink.execute("INSERT INTO begun VALUES (%s, %s)", (int(record.value), record.partition))
        await sink.execute("INSERT INTO effect VALUES (%s) ON CONFLICT DO NOTHING", (idempotency_key,))
    await asyncio.sleep(0.02)

async def main():
    consumer = KafkaConsumer(
        [os.environ["TOPIC"]], work, state, group_id=os.environ["TOPIC"], servers=os.environ["SERVERS"],
        options={"session_timeout_ms": 30000, "heartbeat_interval_ms": 200},
    )
    async with GracefulShutdown(state) as shutdown:
        shutdown.add(consumer)
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
async def topic(kafka_servers: str, kafka_topic: str) -> str:
    """A topic that no other test uses."""
    await create(kafka_servers, kafka_topic)
    return kafka_topic


async def create(servers: str, name: str, partitions: int = PARTITIONS) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name, partitions, 1)])
    finally:
        await admin.close()


@pytest.fixture
async def producer(kafka_servers: str) -> AsyncIterator[KafkaProducer]:
    sending = KafkaProducer(servers=kafka_servers)
    await sending.start()
    yield sending
    await sending.stop()


@pytest.fixture
def sink(empty_database: Database) -> Database:
    with empty_database.connect() as connection:
        connection.execute("CREATE TABLE begun (item integer, partition integer, id serial)")
        connection.execute("CREATE TABLE effect (idempotency_key text PRIMARY KEY)")
    return empty_database


async def send(producer: KafkaProducer, topic: str, items: range) -> None:
    for item in items:
        await producer.send(topic, b"%d" % item, idempotency_key=f"item/{item}", key=b"%d" % (item % 7))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LONG):
        while not condition():
            await asyncio.sleep(0.02)


async def committed(servers: str, group: str, topic: str) -> int:
    """How many records of a topic a group has committed."""
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        offsets = await admin.list_consumer_group_offsets(group)
    finally:
        await admin.close()
    return sum(found.offset for partition, found in offsets.items() if partition.topic == topic)


# --- stopped at any instant ---


@pytest.mark.parametrize("stops", [10, pytest.param(50, marks=pytest.mark.soak)])
async def test_at_random_instants_no_record_is_lost_or_processed_twice(
    run: Processes, kafka_servers: str, topic: str, producer: KafkaProducer, sink: Database, stops: int
) -> None:
    chance = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    env = {"SERVERS": kafka_servers, "TOPIC": topic, "SINK": sink.dsn}
    sent = 0
    consumer = run.python(WORK, env)
    for _ in range(stops):
        following = run.python(WORK, env)  # as in a rollout: one starts while the other is stopped
        if chance.random() < 0.8:
            await asyncio.to_thread(consumer.line, "works")
        more = max(0, 30 - (sent - len(sink.rows("SELECT 1 FROM effect"))))  # a stop meets records, whenever it comes
        await send(producer, topic, range(sent, sent := sent + more))
        await asyncio.sleep(chance.uniform(0, 0.3))  # the instant is what is tested
        consumer.signal(signal.SIGTERM)
        assert await asyncio.to_thread(consumer.wait) in (0, -signal.SIGTERM), consumer.err
        consumer = following
    await until(lambda: len(sink.rows("SELECT 1 FROM effect")) == sent)
    await asyncio.to_thread(consumer.line, "works")
    consumer.signal(signal.SIGTERM)
    assert await asyncio.to_thread(consumer.wait) == 0, consumer.err
    assert consumer.out[-1] == "consumers done"
    begun = sink.rows("SELECT item, partition FROM begun ORDER BY id")
    assert Counter(row["item"] for row in begun) == Counter(range(sent)), "each record was processed once"
    for partition in range(PARTITIONS):
        items = [row["item"] for row in begun if row["partition"] == partition]
        assert items == sorted(items), "in the order of its partition"
    assert await committed(kafka_servers, topic, topic) == sent


async def test_a_killed_consumer_s_records_come_again_and_their_effect_happens_once(
    run: Processes, kafka_servers: str, topic: str, producer: KafkaProducer, sink: Database
) -> None:
    await send(producer, topic, range(5))
    env = {"SERVERS": kafka_servers, "TOPIC": topic, "SINK": sink.dsn}
    work = WORK.replace('"session_timeout_ms": 30000', '"session_timeout_ms": 1500')
    killed = run.python(work.replace("asyncio.sleep(0.02)", "asyncio.sleep(300)"), env)
    await until(lambda: sink.rows("SELECT 1 FROM effect"))
    killed.signal(signal.SIGKILL)
    killed.wait()
    run.python(work, env)
    await until(lambda: len(sink.rows("SELECT 1 FROM effect")) == 5)
    begun = Counter(row["item"] for row in sink.rows("SELECT item FROM begun"))
    assert set(begun) == set(range(5))
    assert max(begun.values()) == 2, "what the killed one had in hand"


# --- what is forbidden ---


def plain(servers: str, topic: str, **options: Any) -> AIOKafkaConsumer:
    return AIOKafkaConsumer(topic, bootstrap_servers=servers, group_id=topic, auto_offset_reset="earliest", **options)


async def rest(servers: str, topic: str) -> list[int]:
    """What is left for the next consumer of the group, which reads until it has met the end of each partition."""
    items: list[int] = []
    async with plain(servers, topic, enable_auto_commit=False) as consumer:
        partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        await until(lambda: set(consumer.assignment()) == set(partitions))
        ends = await consumer.end_offsets(partitions)
        while any([await consumer.position(partition) < ends[partition] for partition in partitions]):
            for records in (await consumer.getmany(timeout_ms=200)).values():
                items += [int(record.value) for record in records]
    return sorted(items)


async def test_a_commit_ahead_of_the_work_loses_records(
    kafka_servers: str, topic: str, producer: KafkaProducer
) -> None:
    await send(producer, topic, range(30))
    processed: list[int] = []
    async with plain(kafka_servers, topic, enable_auto_commit=True) as consumer:  # as it is by default
        found = await consumer.getmany(timeout_ms=int(LONG * 1000))
        fetched = [int(record.value) for records in found.values() for record in records]
        processed += fetched[:1]  # then comes the stop, and the positions are committed
    lost = set(fetched) - set(processed)
    assert len(lost) == len(fetched) - 1 > 0
    assert set(await rest(kafka_servers, topic)).isdisjoint(lost), "nobody gets them again"


async def test_closing_without_a_commit_doubles_records(
    kafka_servers: str, topic: str, producer: KafkaProducer
) -> None:
    await send(producer, topic, range(10))
    processed: list[int] = []
    async with plain(kafka_servers, topic, enable_auto_commit=False) as consumer:
        while len(processed) < 10:
            for records in (await consumer.getmany(timeout_ms=200)).values():
                processed += [int(record.value) for record in records]
    assert sorted(processed) == await rest(kafka_servers, topic) == list(range(10))


async def test_the_consumer_commits_what_it_has_processed_and_nothing_else(
    kafka_servers: str, topic: str, producer: KafkaProducer
) -> None:
    await send(producer, topic, range(30))
    state = ShutdownState()
    processed: list[int] = []
    go_on = asyncio.Event()

    async def work(record: Any, _key: str) -> None:
        if len(processed) >= 5:
            await go_on.wait()
        processed.append(int(record.value))

    consumer = KafkaConsumer([topic], work, state, group_id=topic, servers=kafka_servers)
    assert consumer.phase is Phase.CONSUMERS
    await consumer.start()
    await until(lambda: len(processed) == 5 and len(consumer.in_hand()) >= PARTITIONS)
    state.begin()
    stopping = asyncio.create_task(consumer.stop())
    await asyncio.sleep(0.2)
    assert not stopping.done(), "it waits for the records in hand"
    assert any(line.startswith(f"record {topic}/") for line in consumer.in_hand())
    go_on.set()
    await stopping
    assert consumer.in_hand() == []
    assert 5 < len(processed) <= 5 + PARTITIONS, "those in hand, and none more"
    assert await committed(kafka_servers, topic, topic) == len(processed)
    assert sorted([*processed, *await rest(kafka_servers, topic)]) == list(range(30))


# --- partitions that come and go ---


async def test_before_a_partition_is_revoked_its_record_in_hand_is_finished_and_committed(
    kafka_servers: str, topic: str, producer: KafkaProducer
) -> None:
    await send(producer, topic, range(200))
    processed: list[tuple[str, int]] = []

    def consumer(name: str, state: ShutdownState) -> KafkaConsumer:
        async def work(record: Any, _key: str) -> None:
            await asyncio.sleep(0.01)
            processed.append((name, int(record.value)))

        # Nothing but a revocation or the end of a batch commits.
        options = {"heartbeat_interval_ms": 100}
        return KafkaConsumer(
            [topic], work, state, group_id=topic, servers=kafka_servers, commit_seconds=LONG, options=options
        )

    states = [ShutdownState() for _ in range(3)]
    members = [consumer(str(number), state) for number, state in enumerate(states)]
    await members[0].start()
    await until(lambda: len(processed) > 10)
    for member in members[1:]:
        await member.start()
    await until(lambda: len({name for name, _ in processed}) == 3 or len(processed) >= 200)
    states[0].begin()
    await members[0].stop()
    await until(lambda: len(processed) >= 200)
    for member in members[1:]:
        await member.stop()
    assert Counter(item for _, item in processed) == Counter(range(200))
    assert len({name for name, _ in processed}) == 3, "the partitions were shared"
    assert await committed(kafka_servers, topic, topic) == 200


# --- records that fail ---


async def test_a_record_that_fails_is_tried_again_and_those_behind_it_wait(
    kafka_servers: str, topic: str, producer: KafkaProducer
) -> None:
    for item in range(4):
        await producer.send(topic, b"%d" % item, idempotency_key=f"item/{item}", key=b"one")
    tries: list[int] = []

    def work(record: Any, _key: str) -> None:  # a plain function: in a thread
        tries.append(int(record.value))
        if tries == [0, 1]:
            raise ConnectionError("the sink was away")

    consumer = KafkaConsumer([topic], work, ShutdownState(), group_id=topic, servers=kafka_servers)
    await consumer.start()
    await until(lambda: len(tries) == 5)
    await consumer.stop()
    assert tries == [0, 1, 1, 2, 3]
    assert await committed(kafka_servers, topic, topic) == 4


async def test_a_record_that_fails_always_is_not_skipped_but_put_aside_where_that_is_asked_for(
    kafka_servers: str, topic: str, producer: KafkaProducer
) -> None:
    for item in range(3):
        await producer.send(topic, b"%d" % item, idempotency_key=f"item/{item}", key=b"one")
    tries: list[int] = []

    async def work(record: Any, _key: str) -> None:
        tries.append(int(record.value))
        if record.value == b"1":
            raise ValueError("not this one")

    state = ShutdownState()
    strict = KafkaConsumer([topic], work, state, group_id=topic, servers=kafka_servers)
    await strict.start()
    await until(lambda: tries == [0, 1, 1])
    state.begin()
    await strict.stop()
    assert await committed(kafka_servers, topic, topic) == 1

    async def poison(record: Any, error: Exception) -> None:
        aside.append((int(record.value), str(error)))

    aside: list[tuple[int, str]] = []
    tries.clear()
    lenient = KafkaConsumer(
        [topic], work, ShutdownState(), group_id=topic, servers=kafka_servers, poison=poison, tries=1
    )
    await lenient.start()
    await until(lambda: tries == [1, 2])
    await lenient.stop()
    assert aside == [(1, "not this one")]
    assert await committed(kafka_servers, topic, topic) == 3


async def test_a_long_record_may_give_up_by_itself_and_comes_again(
    kafka_servers: str, topic: str, producer: KafkaProducer
) -> None:
    await send(producer, topic, range(1))
    state, begun = ShutdownState(), asyncio.Event()

    async def work(_record: Any, _key: str) -> None:
        begun.set()
        await state
        state.signal.raise_if_set()

    consumer = KafkaConsumer([topic], work, state, group_id=topic, servers=kafka_servers)
    await consumer.start()
    await begun.wait()
    state.begin()
    await consumer.stop()
    assert await rest(kafka_servers, topic) == [0]


async def test_a_consumer_that_can_not_go_on_ends_the_program(
    kafka_servers: str, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = ShutdownState()
    options = {"auto_offset_reset": "none"}  # and no offset was ever committed
    consumer = KafkaConsumer([topic], print, state, group_id=topic, servers=kafka_servers, options=options)
    await consumer.start()
    async with asyncio.timeout(LONG):
        assert (await state).startswith(f"consumer {topic} has failed: NoOffsetForPartitionError")
    assert "consuming has ended" in caplog.text
    with pytest.raises(NoOffsetForPartitionError):
        await consumer.stop()


# --- keys ---


async def test_the_key_reaches_whoever_processes_the_record(
    kafka_servers: str, topic: str, producer: KafkaProducer
) -> None:
    sent = await producer.send(topic, b"a", idempotency_key="order/7", key=b"7", headers={"trace": "t"})
    async with plain(kafka_servers, topic):  # somebody else's record has no such header
        other = await producer._producer.send_and_wait(topic, b"b", key=b"7")
    seen: list[tuple[str, dict[str, bytes], bytes | None]] = []

    async def work(record: Any, idempotency_key: str) -> None:
        seen.append((idempotency_key, dict(record.headers), record.key))

    consumer = KafkaConsumer([topic], work, ShutdownState(), group_id=topic, servers=kafka_servers)
    await consumer.start()
    await until(lambda: len(seen) == 2)
    await consumer.stop()
    assert seen[0] == ("order/7", {"trace": b"t", "idempotency-key": b"order/7"}, b"7")
    assert seen[1][0] == f"{topic}/{other.partition}/{other.offset}"
    assert sent.partition == other.partition


# --- until there is nothing to do ---


async def test_a_consumer_says_when_there_is_nothing_to_do(
    kafka_servers: str, topic: str, producer: KafkaProducer
) -> None:
    await send(producer, topic, range(10))
    processed: list[int] = []

    async def work(record: Any, _key: str) -> None:
        await asyncio.sleep(0.05)
        processed.append(int(record.value))

    consumer = KafkaConsumer([topic], work, ShutdownState(), group_id=topic, servers=kafka_servers)
    await consumer.start()
    assert await consumer.idle(0.2)
    assert sorted(processed) == list(range(10))
    assert await committed(kafka_servers, topic, topic) == 10
    await consumer.stop()
    assert not await consumer.idle(0), "a stop has begun"


# --- Kafka is away ---

DOWN = """
import asyncio, logging, os
from leasedjob.workload import *
from leasedjob.workload.kafka import KafkaConsumer, KafkaProducer
state = ShutdownState.listening()
logging.basicConfig()

async def work(record, idempotency_key):
    print("begun", flush=True)
    await state
    print("done", flush=True)

async def main():
    servers = os.environ["SERVERS"]
    consumer = KafkaConsumer(["down"], work, state, group_id="down", servers=servers)
    producer = KafkaProducer(servers=servers)
    budget = ShutdownBudget(total=40, pre_stop=0, consumers=1, pools=1)
    async with GracefulShutdown(state, budget) as shutdown:
        shutdown.on_stop(Phase.POOLS, "database", lambda: print("closed", flush=True))
        shutdown.add(consumer)
        shutdown.add(producer)
        await producer.start()
        await consumer.start()
        report = await shutdown.finished()
    print(*(f"{line.phase} {line.outcome}" for line in report), flush=True)

asyncio.run(main())
"""


async def test_where_kafka_is_away_the_phase_is_cut_and_named_and_the_record_comes_again(run: Processes) -> None:
    need("KAFKA", kafka_jars())
    with KafkaBroker() as broker:
        await create(broker.servers, "down", 1)
        sending = KafkaProducer(servers=broker.servers)
        await sending.start()
        await sending.send("down", b"1", idempotency_key="item/1")
        consumer = run.python(DOWN, {"SERVERS": broker.servers})
        await asyncio.to_thread(consumer.line, "begun")
        broker.freeze()
        state = ShutdownState()
        early = KafkaConsumer(["down"], print, state, group_id="early", servers=broker.servers)
        starting = asyncio.create_task(early.start())
        await asyncio.sleep(0.1)
        assert not starting.done()
        state.begin("SIGTERM")
        await early.stop()
        with pytest.raises(DrainingError, match="consumer early is not to be started: SIGTERM"):
            await starting
        late = asyncio.create_task(sending.send("down", b"2", idempotency_key="item/2"))
        consumer.signal(signal.SIGTERM)
        assert await asyncio.to_thread(consumer.wait) == 0, consumer.err
        assert consumer.out[:3] == ["begun", "done", "closed"]
        assert consumer.out[3].startswith("consumers cut pools "), consumer.err
        assert "consumer down was cut off after 1.0 s; dropped: the commit of down/0 up to offset 0" in consumer.err
        assert sending.in_hand() == ["a record for down with key item/2"]
        broker.thaw()
        await late
        await sending.stop()
        assert sending.in_hand() == []


async def test_a_consumer_that_finds_no_broker_says_so() -> None:
    servers = f"127.0.0.1:{free_port()}"
    consumer = KafkaConsumer(["a"], print, ShutdownState(), group_id="g", servers=servers)
    with pytest.raises(KafkaConnectionError, match="Unable to bootstrap"):
        await consumer.start()
    await consumer.stop()
    producer = KafkaProducer(servers=servers)
    with pytest.raises(KafkaConnectionError, match="Unable to bootstrap"):
        await producer.start()
    await producer.stop()


# --- bad input ---


async def test_what_is_refused_names_the_field(kafka_servers: str) -> None:
    state = ShutdownState()

    def consumer(**changes: Any) -> KafkaConsumer:
        return KafkaConsumer(
            **{"topics": ["a"], "work": print, "state": state, "group_id": "g", "servers": kafka_servers, **changes}
        )

    for changes, text in (
        ({"topics": "orders"}, "topics must be names"),
        ({"topics": []}, "topics must be names"),
        ({"group_id": " "}, "group_id must be text"),
        ({"tries": 0}, "tries must be"),
        ({"commit_seconds": float("nan")}, "commit_seconds must be"),
        ({"options": {"enable_auto_commit": True}}, "options: enable_auto_commit can't be given"),
    ):
        with pytest.raises(ValueError, match=text):
            consumer(**changes)
    with pytest.raises(ValueError, match="options: acks can't be given"):
        KafkaProducer(servers=kafka_servers, options={"acks": 0})
    producer = KafkaProducer(servers=kafka_servers)
    with pytest.raises(RuntimeError, match="not started"):
        await producer.send("a", b"", idempotency_key="k")
    with pytest.raises(ValueError, match="idempotency_key must be text"):
        await producer.send("a", b"", idempotency_key="")
    with pytest.raises(ValueError, match="headers: idempotency-key"):
        await producer.send("a", b"", idempotency_key="k", headers={"idempotency-key": "other"})
    state.begin()
    with pytest.raises(DrainingError, match="begun by hand"):
        await consumer().start()
