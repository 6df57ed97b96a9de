"""Kafka, so that no record is lost when a consumer stops, and none that was recorded as processed comes again.

    consumer = KafkaConsumer(["orders"], handle, state, group_id="billing", servers="kafka:9092")
    shutdown.add(consumer)
    await consumer.start()

    async def handle(record, idempotency_key): ...      # the key goes to the sink

The extra `kafka` brings aiokafka. Offsets are committed by hand, and only those of records that `handle` has returned
from: never on a timer, which is ahead of the work. Before a partition goes to another consumer, the record in hand is
finished and committed. From the first moment of draining no further record is begun.

Delivery is at least once: a consumer that is killed had processed records whose offsets weren't committed yet. The
idempotency key, unique at the sink, makes the effect happen once.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

try:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener
    from aiokafka.errors import (
        CommitFailedError,
        IllegalStateError,
        InvalidTopicError,
        KafkaError,
        MessageSizeTooLargeError,
        RecordListTooLargeError,
        TopicAuthorizationFailedError,
        UnknownTopicOrPartitionError,
    )
except ModuleNotFoundError as error:
    error.add_note("it comes with: pip install 'leasedjob[kafka]'")
    raise

from leasedjob.errors import DrainingError, MessageRefusedError, PublisherUnavailableError
from leasedjob.workload.draining import ShutdownState
from leasedjob.workload.outbox.publisher import OutboxMessage
from leasedjob.workload.phases import Phase

_log: Final = logging.getLogger("leasedjob.workload")
IDEMPOTENCY_HEADER: Final = "idempotency-key"
TYPE_HEADER: Final = "type"
POLL_SECONDS: Final = 0.5
LOOK_SECONDS: Final = 0.1
AGAIN_SECONDS: Final = 1.0  # until a fault of Kafka's is tried again
GIVE_UP_SECONDS: Final = 5.0  # for the end of a start that a stop has met
LONGEST_SECONDS: Final = 30.0  # between two tries of one record
RECORDS: Final = 100  # of one partition at a time
COMMIT_SECONDS: Final = 1.0
# A record in hand may take so long before its partition is taken away, and given to another consumer, all the same.
REBALANCE_SECONDS: Final = 30.0
_CONSUMER_OURS: Final = frozenset({"bootstrap_servers", "group_id", "enable_auto_commit", "max_poll_records"})
_PRODUCER_OURS: Final = frozenset({"bootstrap_servers", "acks", "enable_idempotence"})
# The sink won't take this record, however often it is sent.
_REFUSED: Final = (
    InvalidTopicError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)

Work = Callable[[Any, str], Awaitable[object] | object]
Poison = Callable[[Any, Exception], Awaitable[object] | object]


@dataclass(slots=True)
class _Batch:
    """Records of one partition that a task works through."""

    records: Sequence[Any]
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # begin no further record
    running: Any = None  # the record in hand
    done: int | None = None  # the offset behind the last one that was processed and isn't committed yet
    committed_at: float = field(default_factory=time.monotonic)
    task: asyncio.Task[None] | None = None


class KafkaConsumer:
    """Consumes topics as a member of a group, and stops in Phase.CONSUMERS.

    The records of a partition are processed one after the other, the partitions side by side. A record whose `work`
    raises is tried again, with pauses of 1 s to 30 s, and those behind it wait: nothing is skipped, unless `poison` is
    given, which gets the record after `tries` failures; when it returns, the record counts as processed.

    Args:
        topics: their names.
        work: is given each record (aiokafka's ConsumerRecord) and its idempotency key: the header `idempotency-key`,
            or topic, partition and offset. A coroutine function runs on the loop, a plain function in a thread.
        state: whose draining ends the consuming.
        group_id: the group.
        servers: "host:port", or several.
        poison: what becomes of a record that fails again and again, as putting it into another topic.
        tries: how often a record is tried before `poison` gets it.
        commit_seconds: while a batch (100 records) lasts, offsets are committed at this interval, and at its end.
        options: further options of AIOKafkaConsumer: security, `max_poll_interval_ms`… Different from its own defaults:
            `auto_offset_reset` is "earliest", so that a new group loses nothing, and `rebalance_timeout_ms` 30,000.
        name: for log lines; default "consumer <group>".

    Raises:
        ValueError: an argument is out of range, or `options` has one of those above.
    """

    phase: Final = Phase.CONSUMERS

    def __init__(
        self,
        topics: Collection[str],
        work: Work,
        state: ShutdownState,
        *,
        group_id: str,
        servers: str | Sequence[str],
        poison: Poison | None = None,
        tries: int = 5,
        commit_seconds: float = COMMIT_SECONDS,
        options: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        if isinstance(topics, str) or not topics:
            raise ValueError(f"topics must be names of topics, one at least, not {topics!r}")
        if not isinstance(group_id, str) or not group_id.strip():
            raise ValueError(
                f"group_id must be text that isn't blank, not {group_id!r}: without a group nothing is committed"
            )
        if isinstance(tries, bool) or not isinstance(tries, int) or tries < 1:
            raise ValueError(f"tries must be a whole number, 1 or more, not {tries!r}")
        if not (math.isfinite(commit_seconds) and commit_seconds >= 0):
            raise ValueError(f"commit_seconds must be 0 or more, not {commit_seconds!r}")
        _refuse(_CONSUMER_OURS, options)
        self.name = name or f"consumer {group_id}"
        self._topics, self._work, self._state, self._group = tuple(topics), work, state, group_id
        self._poison, self._tries, self._commit_seconds = poison, tries, commit_seconds
        self._options = {
            "auto_offset_reset": "earliest",
            "rebalance_timeout_ms": int(REBALANCE_SECONDS * 1000),
            **(options or {}),
            "bootstrap_servers": servers,
            "group_id": group_id,
            "enable_auto_commit": False,
        }
        self._consumer: Any = None
        self._polling: asyncio.Task[None] | None = None
        self._batches: dict[Any, _Batch] = {}  # partition -> what is worked on
        self._ending = asyncio.Event()
        self._starting = asyncio.Lock()
        self._leaving = self._joined = False
        self._error: Exception | None = None
        self._forget: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Joins the group and begins to consume, on the running event loop.

        Raises:
            aiokafka.errors.KafkaConnectionError: no server answers.
            RuntimeError: it was started before.
            DrainingError: a stop has begun, before or meanwhile.
        """
        if self._consumer is not None:
            raise RuntimeError(f"{self.name} was started before")
        if self._state.is_draining():
            raise DrainingError(f"{self.name} is not to be started: {self._state.reason}")
        loop = asyncio.get_running_loop()
        self._forget = self._state.signal.call(lambda: loop.call_soon_threadsafe(self._end))
        async with self._starting:
            consumer = AIOKafkaConsumer(**self._options)
            consumer.subscribe(topics=self._topics, listener=_Listener(self))
            joining = loop.create_task(consumer.start())
            ending = loop.create_task(self._ending.wait())
            try:
                await asyncio.wait([joining, ending], return_when=asyncio.FIRST_COMPLETED)
                if self._ending.is_set():
                    raise DrainingError(f"{self.name} is not to be started: {self._state.reason}")
                await joining
            except BaseException:
                # Leaves the group, where it has got so far: the others would wait for it.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GIVE_UP_SECONDS):
                        await consumer.stop()
                joining.cancel()
                await asyncio.gather(joining, return_exceptions=True)
                raise
            finally:
                ending.cancel()
            self._consumer = consumer
            self._polling = loop.create_task(self._poll(), name=f"{self.name}: polling")

    async def stop(self) -> None:
        """Finishes the records in hand, commits what was processed, and leaves the group.

        Raises:
            Exception: consuming had ended before, with this.
        """
        self._forget()
        self._end()
        async with self._starting:
            pass
        if self._consumer is None:
            return
        if self._polling is not None:
            await asyncio.wait([self._polling])
        while tasks := [batch.task for batch in self._batches.values() if batch.task is not None]:
            await asyncio.wait(tasks)
        self._leaving = True
        await self._consumer.stop()
        self._leaving = False
        if self._error is not None:
            raise self._error

    async def idle(self, seconds: float) -> bool:
        """Returns True when its partitions have been consumed to their ends for so long; False when a stop has begun.

        For a run that works off what there is, and ends. Kafka has to say it: while it doesn't answer, this waits.
        """
        since: float | None = None
        while not self._ending.is_set():
            if not await self._at_the_end():
                since = None
            elif time.monotonic() - (since := since or time.monotonic()) >= seconds:
                return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), LOOK_SECONDS)
        return False

    async def _at_the_end(self) -> bool:
        if not self._joined or self._batches:
            return False
        try:
            partitions = list(self._consumer.assignment())
            ends = await self._consumer.end_offsets(partitions)
            positions = [await self._consumer.position(partition) >= ends[partition] for partition in partitions]
        except (IllegalStateError, KafkaError) as error:
            _log.debug("%s: no end of its partitions is known: %s", self.name, error)
            return False
        return all(positions) and self._joined and not self._batches

    def in_hand(self) -> Sequence[str]:
        """The records that are processed, and those whose offsets aren't committed yet."""
        lines = []
        for partition, batch in self._batches.items():
            where = f"{partition.topic}/{partition.partition}"
            if batch.running is not None:
                lines.append(f"record {where} offset {batch.running.offset}")
            if batch.done is not None:
                lines.append(f"the commit of {where} up to offset {batch.done - 1}, which come again")
        if not lines and self._leaving:
            lines.append(f"leaving group {self._group}; all that was processed is committed")
        return lines

    # --- polling ---

    def _end(self) -> None:
        self._ending.set()
        for batch in self._batches.values():
            batch.ended.set()
        if self._polling is not None:
            self._polling.cancel()  # what it has fetched was not begun, nor is it committed

    async def _poll(self) -> None:
        try:
            while True:
                await self._poll_once()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Ends the program: a consumer that has ended in silence would be noticed by nobody."""
        _log.error("%s: consuming has ended", self.name, exc_info=error)
        self._error = self._error or error
        self._end()
        self._state.begin(f"{self.name} has failed: {type(error).__name__}: {error}")

    async def _poll_once(self) -> None:
        idle = [partition for partition in self._consumer.assignment() if partition not in self._batches]
        if not idle:
            busy = [batch.task for batch in self._batches.values() if batch.task is not None]
            if busy:
                await asyncio.wait(busy, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(POLL_SECONDS / 10)  # it has no partition, or not yet
            return
        try:
            found = await self._consumer.getmany(*idle, timeout_ms=int(POLL_SECONDS * 1000), max_records=RECORDS)
        except KafkaError as error:
            if not error.retriable:
                raise
            _log.warning("%s: Kafka fails; it is asked again: %s", self.name, error)
            await asyncio.sleep(AGAIN_SECONDS)
            return
        for partition, records in found.items():
            batch = self._batches[partition] = _Batch(records)
            batch.task = asyncio.get_running_loop().create_task(
                self._work_through(partition, batch), name=f"{self.name}: {partition.topic}/{partition.partition}"
            )

    async def _revoke(self, partitions: Collection[Any]) -> None:
        """Before these go to another consumer: no further record is begun, the one in hand ends and is committed."""
        self._joined = False
        batches = [batch for partition, batch in self._batches.items() if partition in partitions]
        for batch in batches:
            batch.ended.set()
        if tasks := [batch.task for batch in batches if batch.task is not None]:
            await asyncio.wait(tasks)

    # --- one partition ---

    async def _work_through(self, partition: Any, batch: _Batch) -> None:
        try:
            for record in batch.records:
                if batch.ended.is_set():
                    break
                batch.running = record
                processed = await self._process(record, batch)
                batch.running = None
                if not processed:
                    break
                batch.done = record.offset + 1
                if time.monotonic() - batch.committed_at >= self._commit_seconds:
                    await self._commit(partition, batch)
            await self._commit(partition, batch)
        except Exception as error:
            # Going on would commit what lies behind a record that was not processed.
            self._fail(error)
        finally:
            del self._batches[partition]

    async def _process(self, record: Any, batch: _Batch) -> bool:
        """Until it is done; False if it isn't, and is not to be tried again here."""
        key, failures = _key_of(record), 0
        where = f"{record.topic}/{record.partition} offset {record.offset}"
        while True:
            try:
                await _call(self._work, record, key)
                return True
            except Exception as error:
                if batch.ended.is_set() and isinstance(error, DrainingError):
                    return False  # it has given up by itself
                failures += 1
                if self._poison is not None and failures >= self._tries:
                    _log.exception("%s: record %s has failed %d times: it is put aside", self.name, where, failures)
                    if await self._put_aside(self._poison, record, error):
                        return True
                else:
                    _log.exception(
                        "%s: record %s has failed; it is tried again, those behind it wait", self.name, where
                    )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(batch.ended.wait(), min(2.0 ** (failures - 1), LONGEST_SECONDS))
            if batch.ended.is_set():
                return False

    async def _put_aside(self, poison: Poison, record: Any, error: Exception) -> bool:
        try:
            await _call(poison, record, error)
        except Exception:
            _log.exception("%s: the record could not be put aside; it is tried again", self.name)
            return False
        return True

    async def _commit(self, partition: Any, batch: _Batch) -> None:
        if (offset := batch.done) is None:
            return
        try:
            await self._consumer.commit({partition: offset})
        except (CommitFailedError, IllegalStateError) as error:
            where = f"{partition.topic}/{partition.partition}"
            _log.warning("%s: %s is another's now; records before %d come again: %s", self.name, where, offset, error)
            batch.ended.set()
        batch.done = None
        batch.committed_at = time.monotonic()


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, consumer: KafkaConsumer) -> None:
        self._consumer = consumer

    async def on_partitions_revoked(self, revoked: Collection[Any]) -> None:
        await self._consumer._revoke(revoked)

    async def on_partitions_assigned(self, assigned: Collection[Any]) -> None:
        self._consumer._joined = True


class KafkaProducer:
    """Sends records, each under an idempotency key. Closed in Phase.POOLS: after relays and consumers, which use it.

    Every in-sync replica has a record (`acks=all`) when `send` returns, and the client's own retries don't double it
    (`enable_idempotence`).

    Args:
        servers: "host:port", or several.
        options: further options of AIOKafkaProducer: security, `compression_type`, `linger_ms`…
        name: for log lines.

    Raises:
        ValueError: `options` has one of those above.
    """

    phase: Final = Phase.POOLS

    def __init__(
        self, *, servers: str | Sequence[str], options: Mapping[str, Any] | None = None, name: str = "kafka producer"
    ) -> None:
        _refuse(_PRODUCER_OURS, options)
        self.name = name
        self._options = {**(options or {}), "bootstrap_servers": servers, "acks": "all", "enable_idempotence": True}
        self._producer: Any = None
        self._starting = asyncio.Lock()
        self._sending: dict[object, str] = {}

    async def start(self) -> None:
        """Connects, on the running event loop.

        Raises:
            aiokafka.errors.KafkaConnectionError: no server answers.
        """
        async with self._starting:
            producer = AIOKafkaProducer(**self._options)
            try:
                await producer.start()
            except BaseException:
                await producer.stop()
                raise
            self._producer = producer

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        idempotency_key: str,
        key: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Returns when the record is written, with aiokafka's RecordMetadata.

        Args:
            topic: must exist, or be made by the broker.
            value: None is a tombstone.
            idempotency_key: goes into the header `idempotency-key`.
            key: records with the same one are in one partition, in this order.
            headers: further ones.

        Raises:
            ValueError: the idempotency key is blank, or `headers` has another one.
            RuntimeError: the producer was not started.
            aiokafka.errors.KafkaError: it isn't written, or nobody knows.
        """
        if not isinstance(idempotency_key, str) or not idempotency_key.strip():
            raise ValueError(f"idempotency_key must be text that isn't blank, not {idempotency_key!r}")
        if (headers or {}).get(IDEMPOTENCY_HEADER, idempotency_key) != idempotency_key:
            raise ValueError(f"headers: {IDEMPOTENCY_HEADER} must be the key {idempotency_key!r} or left out")
        if self._producer is None:
            raise RuntimeError(f"{self.name} was not started")
        sent = {**(headers or {}), IDEMPOTENCY_HEADER: idempotency_key}
        self._sending[record := object()] = f"a record for {topic} with key {idempotency_key}"
        try:
            return await self._producer.send_and_wait(
                topic, value, key=key, headers=[(name, text.encode()) for name, text in sent.items()]
            )
        finally:
            del self._sending[record]

    async def stop(self) -> None:
        """Sends what waits, and closes the connections."""
        async with self._starting:  # a start that is under way ends first
            if self._producer is not None:
                await self._producer.stop()

    def in_hand(self) -> Sequence[str]:
        """What isn't acknowledged yet."""
        return list(self._sending.values())


class KafkaPublisher:
    """An outbox publisher: the payload as JSON, keyed by the partition key, with the idempotency key in a header.

    The type goes into the header `type`. Rows of one partition key stay in order: the relay has one of them in hand at
    a time.

    Args:
        producer: started by whoever made it.
    """

    def __init__(self, producer: KafkaProducer) -> None:
        self._producer = producer

    async def publish(self, message: OutboxMessage) -> None:
        """Returns when every in-sync replica has the record."""
        headers = {TYPE_HEADER: message.type, **message.headers}
        key = None if message.partition_key is None else message.partition_key.encode()
        try:
            await self._producer.send(
                message.topic, message.body(), idempotency_key=message.idempotency_key, key=key, headers=headers
            )
        except _REFUSED as error:
            raise MessageRefusedError(f"Kafka: {error!r}") from error
        except ValueError as error:
            raise MessageRefusedError(str(error), final=True) from error
        except KafkaError as error:
            raise PublisherUnavailableError(f"Kafka: {error!r}") from error


def _refuse(ours: frozenset[str], options: Mapping[str, Any] | None) -> None:
    if taken := sorted(ours & set(options or {})):
        raise ValueError(
            f"options: {', '.join(taken)} can't be given: this adapter decides it, or takes it as an argument"
        )


def _key_of(record: Any) -> str:
    """The sender's, or one that is the same each time this record is delivered."""
    for name, value in record.headers:
        if name == IDEMPOTENCY_HEADER and value:
            text: str = value.decode(errors="replace")
            return text
    return f"{record.topic}/{record.partition}/{record.offset}"


async def _call(function: Callable[[Any, Any], Awaitable[object] | object], record: Any, second: object) -> None:
    if inspect.iscoroutinefunction(function):
        await function(record, second)
        return
    given = await asyncio.to_thread(function, record, second)
    if inspect.isawaitable(given):
        await given
