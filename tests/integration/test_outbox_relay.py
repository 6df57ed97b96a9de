"""OutboxRelay on a real PostgreSQL: claim, publish, mark, commit; and what becomes of what can't be published."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from leasedjob.errors import (
    DatabaseUnavailableError,
    MessageRefusedError,
    OutboxMissingError,
    PublisherUnavailableError,
)
from leasedjob.workload import (
    CallablePublisher,
    GracefulShutdown,
    OutboxMessage,
    OutboxRelay,
    Patience,
    ShutdownState,
    enqueue_once,
    install_outbox,
    parked_messages,
    retry_parked,
)
from leasedjob.workload.outbox import Relayed

from .conftest import Database
from .workload_parts import LONG

pytestmark = pytest.mark.integration
QUICK = Patience(max_tries=3, first_wait=0.01, longest_wait=0.02, first_pause=0.01, longest_pause=0.02)
SLOW = Patience(max_tries=3, first_wait=300, longest_wait=300, first_pause=300, longest_pause=300)


class Outbox:
    """The outbox of one test, with its application."""

    def __init__(self, database: Database) -> None:
        self.dsn = database.dsn
        self.connection = database.connect()
        install_outbox(self.connection)

    def put(self, *keys: str, partition_key: str | None = None, topic: str = "orders") -> None:
        for key in keys:
            assert enqueue_once(self.connection, key, "t", {"key": key}, topic=topic, partition_key=partition_key)

    def rows(self, columns: str) -> dict[str, tuple[Any, ...]]:
        found = self.connection.execute(f"SELECT idempotency_key AS k, {columns} FROM leasedjob_outbox ORDER BY id")  # type: ignore[arg-type]
        return {row["k"]: tuple(row.values())[1:] for row in found}

    def published(self) -> set[str]:
        return {key for (key, (done,)) in self.rows("published_at IS NOT NULL").items() if done}

    def due(self) -> None:
        self.connection.execute("UPDATE leasedjob_outbox SET next_try_at = now() WHERE next_try_at IS NOT NULL")


class Sink:
    """A publisher that takes everything but what it was told not to take."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.seen: list[OutboxMessage] = []

    async def publish(self, message: OutboxMessage) -> None:
        self.seen.append(message)
        await asyncio.sleep(0)
        if (error := self.errors.get(message.idempotency_key) or self.errors.get("*")) is not None:
            raise error
        self.taken.append(message.idempotency_key)


@pytest.fixture
def outbox(empty_database: Database) -> Outbox:
    return Outbox(empty_database)


@pytest.fixture
def sink() -> Sink:
    return Sink()


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def test_what_is_committed_is_published_and_marked(outbox: Outbox, sink: Sink) -> None:
    outbox.put("a", "b", partition_key="p")
    with psycopg.connect(outbox.dsn) as connection:
        enqueue_once(connection, "never", "t", 1, topic="orders")
        connection.rollback()
    done = await OutboxRelay(outbox.dsn, sink).flush()
    assert done == Relayed(claimed=2, published=2)
    (first, second) = sink.seen
    assert (first.idempotency_key, first.type, first.payload, first.topic) == ("a", "t", {"key": "a"}, "orders")
    assert (first.partition_key, first.headers, first.tries) == ("p", {}, 0)
    assert first.id < second.id
    assert first.body() == b'{"key":"a"}'
    assert outbox.published() == {"a", "b"}
    assert await OutboxRelay(outbox.dsn, sink).flush() == Relayed()
    assert sink.taken == ["a", "b"]


class TestPublishers:
    """Whatever publishes, and wherever it runs."""

    async def _published(self, outbox: Outbox, publisher: Any) -> None:
        outbox.put("a", "b")
        assert await OutboxRelay(outbox.dsn, publisher).flush() == Relayed(claimed=2, published=2)
        assert outbox.published() == {"a", "b"}

    async def test_a_coroutine_function(self, outbox: Outbox) -> None:
        taken = []

        async def publish(message: OutboxMessage) -> None:
            taken.append((message.idempotency_key, threading.current_thread()))

        await self._published(outbox, publish)
        assert taken == [(key, threading.main_thread()) for key in ("a", "b")]

    async def test_a_function_has_a_thread(self, outbox: Outbox) -> None:
        taken = []

        def publish(message: OutboxMessage) -> None:
            taken.append((message.idempotency_key, threading.current_thread()))

        await self._published(outbox, publish)
        assert [key for key, _ in taken] == ["a", "b"]
        assert threading.main_thread() not in [thread for _, thread in taken]

    async def test_an_object(self, outbox: Outbox) -> None:
        class Broker:
            def __init__(self) -> None:
                self.taken: list[str] = []

            def publish(self, message: OutboxMessage) -> Awaitable[object]:
                self.taken.append(message.idempotency_key)
                return asyncio.sleep(0)

        broker = Broker()
        await self._published(outbox, broker)
        assert broker.taken == ["a", "b"]

    async def test_errors_that_say_unavailable_are_named(self, outbox: Outbox) -> None:
        def publish(message: OutboxMessage) -> None:
            raise KeyError("the broker")

        outbox.put("a")
        named = OutboxRelay(outbox.dsn, CallablePublisher(publish, unavailable=(LookupError,)), patience=QUICK)
        assert (await named.flush()).unavailable == 1
        assert outbox.rows("tries, error") == {"a": (0, "KeyError: 'the broker'")}

    def test_anything_else_is_refused(self) -> None:
        with pytest.raises(TypeError, match="publisher must have a method publish or be a function, not str"):
            OutboxRelay("", "kafka")  # type: ignore[arg-type]


class TestRefused:
    async def test_it_waits_and_its_partition_key_with_it(self, outbox: Outbox, sink: Sink) -> None:
        outbox.put("a1", "a2", partition_key="a")
        outbox.put("b1", partition_key="b")
        outbox.put("loose")
        sink.errors["a1"] = MessageRefusedError("no such order")
        relay = OutboxRelay(outbox.dsn, sink, patience=SLOW)
        assert await relay.flush() == Relayed(claimed=4, published=2, refused=1)
        assert sink.taken == ["b1", "loose"]
        sink.errors.clear()
        outbox.put("a3", partition_key="a")
        assert await relay.flush() == Relayed(), "not before its time, and nothing before it"
        assert outbox.rows("tries, error")["a1"] == (1, "no such order")
        outbox.due()
        assert await relay.flush() == Relayed(claimed=3, published=3)
        assert sink.taken == ["b1", "loose", "a1", "a2", "a3"]
        assert [message.tries for message in sink.seen if message.idempotency_key == "a1"] == [0, 1]

    async def test_after_its_tries_it_is_parked_and_the_rest_goes_on(
        self, outbox: Outbox, sink: Sink, caplog: pytest.LogCaptureFixture
    ) -> None:
        outbox.put("a1", "a2", "a3", partition_key="a")
        sink.errors["a2"] = ValueError("can't\0 digest it")
        relay = OutboxRelay(outbox.dsn, sink, patience=QUICK)
        total = Relayed()
        while len(outbox.published()) < 2:
            total += await relay.flush()
        assert (total.refused, total.parked, total.published) == (2, 1, 2)
        assert sink.taken == ["a1", "a3"], "what is parked doesn't hold up its partition key"
        (parked,) = parked_messages(outbox.connection)
        assert (parked.idempotency_key, parked.tries) == ("a2", 3)
        assert parked.error == "ValueError: can't\ufffd digest it"
        assert "is parked after 3 tries, until retry_parked is called: ValueError" in caplog.text
        assert await relay.flush() == Relayed(), "it isn't tried any more"
        outbox.put("a4", partition_key="a")
        sink.errors.clear()
        assert retry_parked(outbox.connection, ["a2"]) == 1
        assert await relay.flush() == Relayed(claimed=2, published=2)
        assert sink.taken == ["a1", "a3", "a2", "a4"], "before what came later"
        assert parked_messages(outbox.connection) == []

    async def test_for_good(self, outbox: Outbox, sink: Sink) -> None:
        outbox.put("a", "b", partition_key="p")
        sink.errors["a"] = MessageRefusedError("too large", final=True)
        assert await OutboxRelay(outbox.dsn, sink).flush() == Relayed(claimed=2, published=1, parked=1)
        (parked,) = parked_messages(outbox.connection)
        assert (parked.idempotency_key, parked.tries, parked.error) == ("a", 1, "too large")

    async def test_thousands_behind_it_hold_nobody_else_up(self, outbox: Outbox, sink: Sink) -> None:
        outbox.put("poison", partition_key="hot")
        outbox.connection.execute(
            "INSERT INTO leasedjob_outbox (idempotency_key, type, topic, partition_key, payload)"
            " SELECT 'hot' || n, 't', 'orders', 'hot', '1' FROM generate_series(1, 5000) AS n"
        )
        outbox.put("other", partition_key="cold")
        outbox.put("loose")
        sink.errors["poison"] = MessageRefusedError("no")
        relay = OutboxRelay(outbox.dsn, sink, patience=SLOW)
        done = await relay.flush()
        assert (done.published, done.refused) == (2, 1)
        assert sink.taken == ["other", "loose"]


class TestUnavailable:
    @pytest.mark.parametrize(
        "error",
        [PublisherUnavailableError("down"), ConnectionRefusedError("down"), TimeoutError("down"), BrokenPipeError()],
    )
    async def test_no_try_is_spent_however_long_it_lasts(self, outbox: Outbox, sink: Sink, error: Exception) -> None:
        outbox.put(*(f"k{n}" for n in range(20)))
        sink.errors["*"] = error
        relay = OutboxRelay(outbox.dsn, sink, patience=QUICK)
        seen: set[str] = set()
        for _ in range(10):
            outbox.due()
            before = len(sink.seen)
            done = await relay.flush()
            assert (done.published, done.refused, done.parked) == (0, 0, 0)
            assert done.pause > 0
            assert len(sink.seen) - before == done.unavailable <= 2, "the batch is left alone"
            seen |= {message.idempotency_key for message in sink.seen[before:]}
        assert {tries for tries, _ in outbox.rows("tries, parked_at").values()} == {0}
        sink.errors.clear()
        while len(outbox.published()) < 20:
            outbox.due()
            await relay.flush()
        assert sorted(sink.taken) == sorted(f"k{n}" for n in range(20))

    async def test_one_message_that_the_server_chokes_on_is_found_out(self, outbox: Outbox, sink: Sink) -> None:
        outbox.put("poison", "behind", partition_key="p")
        sink.errors["poison"] = PublisherUnavailableError("500 Internal Server Error")
        relay = OutboxRelay(outbox.dsn, sink, patience=SLOW)
        tries = []
        for n in range(4):
            outbox.put(f"other{n}")
            outbox.due()
            await relay.flush()
            tries.append(outbox.rows("tries")["poison"][0])
        assert tries == [0, 1, 2, 3], "the first time it could have been the server"
        (parked,) = parked_messages(outbox.connection)
        assert (parked.idempotency_key, parked.error) == ("poison", "500 Internal Server Error")
        await relay.flush()
        assert sorted(sink.taken) == ["behind", "other0", "other1", "other2", "other3"]

    async def test_a_sink_that_says_when_is_believed(self, outbox: Outbox, sink: Sink) -> None:
        outbox.put("a", "b", "c")
        sink.errors["a"] = PublisherUnavailableError("429 Too Many Requests", retry_after=7)
        done = await OutboxRelay(outbox.dsn, sink).flush()
        assert (done.pause, done.unavailable, len(sink.seen)) == (7, 1, 1)
        assert outbox.rows("tries, next_try_at IS NOT NULL") == {"a": (0, True), "b": (0, False), "c": (0, False)}

    async def test_a_message_has_its_time(self, outbox: Outbox) -> None:
        taken = []

        async def publish(message: OutboxMessage) -> None:
            if message.idempotency_key == "slow":
                await asyncio.sleep(LONG)
            taken.append(message.idempotency_key)

        outbox.put("slow", "quick")
        relay = OutboxRelay(outbox.dsn, publish, patience=QUICK, message_seconds=0.05)
        assert await relay.flush() == Relayed(claimed=2, published=1, unavailable=1)
        assert taken == ["quick"]
        assert outbox.rows("tries, error")["slow"] == (0, "TimeoutError: ")


class TestABatch:
    async def test_it_has_a_size_and_an_order(self, outbox: Outbox, sink: Sink) -> None:
        outbox.put("a1", partition_key="a")
        outbox.put("b1", partition_key="b")
        outbox.put("c")
        outbox.put("a2", partition_key="a")
        sizes = []

        async def publish(message: OutboxMessage) -> None:
            sizes.append(len(relay.in_hand()))
            await sink.publish(message)

        relay = OutboxRelay(outbox.dsn, publish, batch=3)
        assert await relay.flush() == Relayed(claimed=4, published=4)
        assert sizes == [3, 3, 3, 1]
        assert sink.taken == ["a1", "b1", "c", "a2"]

    async def test_several_at_once_but_not_of_one_partition_key(self, outbox: Outbox) -> None:
        for n in range(4):
            for key in "abc":
                outbox.put(f"{key}{n}", partition_key=key)
        hand: list[str] = []
        most: list[int] = []
        taken: list[str] = []

        async def publish(message: OutboxMessage) -> None:
            hand.append(message.partition_key or "")
            assert len(set(hand)) == len(hand), hand
            most.append(len(hand))
            await asyncio.sleep(0.01)
            hand.remove(message.partition_key or "")
            taken.append(message.idempotency_key)

        await OutboxRelay(outbox.dsn, publish, concurrency=2).flush()
        assert max(most) == 2
        for key in "abc":
            assert [name for name in taken if name[0] == key] == [f"{key}{n}" for n in range(4)]

    async def test_its_time_is_limited(self, outbox: Outbox) -> None:
        async def publish(message: OutboxMessage) -> None:
            await asyncio.sleep(0.2)

        outbox.put("a", "b", "c")
        relay = OutboxRelay(outbox.dsn, publish, batch_seconds=0.1)
        done = await relay.flush()
        assert done == Relayed(claimed=3 + 2 + 1, published=3), "what wasn't begun belongs to the next one"

    async def test_topics(self, outbox: Outbox, sink: Sink) -> None:
        outbox.put("a1", topic="a", partition_key="p")
        outbox.put("b1", topic="b", partition_key="p")
        outbox.put("c1", topic="c")
        sink.errors["a1"] = MessageRefusedError("no")
        relay = OutboxRelay(outbox.dsn, sink, topics=["a", "b"], patience=SLOW)
        assert await relay.flush() == Relayed(claimed=2, published=1, refused=1)
        assert sink.taken == ["b1"], "another topic is another order"

    @pytest.mark.parametrize(
        ("wrong", "text"),
        [
            ({"batch": 0}, "batch must be a whole number from 1 to 1000, not 0"),
            ({"batch": 1001}, "batch must be"),
            ({"batch": 1.5}, "batch must be"),
            ({"concurrency": True}, "concurrency must be a whole number"),
            ({"interval": 0}, "interval must be a positive number of seconds, not 0"),
            ({"interval": float("inf")}, "interval must be"),
            ({"message_seconds": -1}, "message_seconds must be"),
            ({"message_seconds": 10}, "batch_seconds and message_seconds must be at most 18 together, not 20"),
            ({"retention": timedelta()}, "retention must be positive"),
            ({"topics": "orders"}, "topics must be several topics, not one string"),
        ],
    )
    def test_wrong_numbers_are_named(self, wrong: dict[str, Any], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            OutboxRelay("", print, **wrong)


class TestItsLife:
    """Draining, stopping, and being cut off."""

    async def test_it_looks_again_and_again_and_sooner_if_it_is_woken(self, outbox: Outbox, sink: Sink) -> None:
        relay = OutboxRelay(outbox.dsn, sink, interval=0.02)
        relay.start()
        with pytest.raises(RuntimeError, match="outbox is running"):
            relay.start()
        outbox.put("a")
        await until(lambda: sink.taken == ["a"])
        await relay.stop()
        slow = OutboxRelay(outbox.dsn, sink, interval=10 * LONG)
        slow.start()
        await until(lambda: outbox.published() == {"a"})
        began = time.monotonic()
        outbox.put("b")
        while sink.taken != ["a", "b"]:  # the first look may come before or after
            slow.wake()
            await asyncio.sleep(0.02)
        assert time.monotonic() - began < LONG
        await slow.stop()
        assert await slow.flush() == Relayed(), "it is stopped"

    async def test_a_batch_is_finished_and_none_begins(self, outbox: Outbox) -> None:
        """Four at a time, and draining begins while the second one is published."""
        state = ShutdownState()
        taken: list[str] = []

        async def publish(message: OutboxMessage) -> None:
            await asyncio.sleep(0.01)
            taken.append(message.idempotency_key)
            if len(taken) == 2:
                state.notice("a notice")

        outbox.put(*(f"k{n}" for n in range(12)))
        async with GracefulShutdown(state) as shutdown:
            relay = OutboxRelay(outbox.dsn, publish, state, batch=4)
            shutdown.add(relay)
            relay.start()
            (report,) = await shutdown.finished()
        assert taken == ["k0", "k1", "k2", "k3"]
        assert outbox.published() == set(taken)
        assert (report.phase, report.outcome, report.parts) == ("background", "done", ("outbox",))
        assert relay.in_hand() == []

    async def test_started_while_draining_it_does_nothing(self, outbox: Outbox, sink: Sink) -> None:
        state = ShutdownState()
        state.notice("")
        outbox.put("a")
        await OutboxRelay(outbox.dsn, sink, state).run()
        assert await OutboxRelay(outbox.dsn, sink, state).flush() == Relayed()
        assert sink.seen == []

    def test_in_a_program_without_an_event_loop(self, outbox: Outbox) -> None:
        state = ShutdownState()
        taken: list[str] = []

        def publish(message: OutboxMessage) -> None:
            taken.append(message.idempotency_key)
            time.sleep(0.01)
            state.begin()

        outbox.put("a", "b", "c")
        with GracefulShutdown(state) as shutdown:
            relay = OutboxRelay(outbox.dsn, publish, state, batch=2)
            shutdown.add(relay)
            relay.start()
            assert shutdown.wait(LONG)
        assert taken == ["a", "b"]
        assert outbox.published() == {"a", "b"}

    async def test_cancelled_before_it_began_it_can_be_stopped(self, outbox: Outbox, sink: Sink) -> None:
        relay = OutboxRelay(outbox.dsn, sink)
        relay.start()
        assert relay._task is not None
        relay._task.cancel()
        await asyncio.wait_for(relay.stop(), LONG)
        assert sink.seen == []

    @pytest.mark.parametrize("how", ["the stop", "the task"])
    async def test_cut_off_it_marks_what_was_published(self, outbox: Outbox, how: str) -> None:
        taken: list[str] = []

        async def publish(message: OutboxMessage) -> None:
            if len(taken) == 2:
                hanging.set()
                await asyncio.sleep(LONG)
            taken.append(message.idempotency_key)

        hanging = asyncio.Event()
        outbox.put("a", "b", "c", "d")
        relay = OutboxRelay(outbox.dsn, publish, message_seconds=8)
        running = asyncio.create_task(relay.run())
        await hanging.wait()
        assert [text.split(" (")[0] for text in relay.in_hand()] == ["row 1", "row 2", "row 3", "row 4"]
        stopping = asyncio.create_task(relay.stop()) if how == "the stop" else running
        await asyncio.sleep(0.01)
        assert not stopping.done(), "the batch is in hand"
        stopping.cancel()
        await asyncio.wait([stopping, running])
        assert stopping.cancelled()
        assert taken == ["a", "b"]
        assert outbox.published() == {"a", "b"}
        assert outbox.rows("tries, next_try_at")["c"] == (0, None)

    async def test_at_the_end_of_its_time_a_stop_cuts_by_itself(
        self, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A plain function, which nothing can interrupt."""
        monkeypatch.setattr("leasedjob.workload.outbox.relay.STOP_SECONDS", 0.05)
        hanging, go_on = threading.Event(), threading.Event()

        def publish(message: OutboxMessage) -> None:
            if message.idempotency_key == "b":
                hanging.set()
                go_on.wait(LONG)

        outbox.put("a", "b")
        relay = OutboxRelay(outbox.dsn, publish)
        relay.start()
        await until(hanging.is_set)
        await relay.stop()
        assert outbox.published() == {"a"}
        go_on.set()


class TestTheDatabase:
    async def test_a_lost_connection(self, outbox: Outbox, sink: Sink, caplog: pytest.LogCaptureFixture) -> None:
        """The message is published again, under the same key, and nothing is lost."""
        end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'leasedjob-outbox'"

        async def publish(message: OutboxMessage) -> None:
            await sink.publish(message)
            if len(sink.taken) == 1:
                outbox.connection.execute(end)

        outbox.put("a", "b")
        relay = OutboxRelay(outbox.dsn, publish, interval=0.01)
        relay.start()
        await until(lambda: outbox.published() == {"a", "b"})
        await relay.stop()
        assert sink.taken == ["a", "b", "a", "b"]
        assert (
            "published, but not marked, so that they are published again under the same keys: row 1 (t to"
            in caplog.text
        )

    async def test_a_mark_that_fails_leaves_no_transaction_on_the_connection(
        self, outbox: Outbox, sink: Sink, caplog: pytest.LogCaptureFixture
    ) -> None:
        outbox.put("a")
        outbox.connection.execute("ALTER TABLE leasedjob_outbox ADD CONSTRAINT no CHECK (published_at IS NULL)")
        async with await psycopg.AsyncConnection.connect(outbox.dsn, autocommit=True) as connection:
            relay = OutboxRelay(lambda: nullcontext(connection), sink)
            with pytest.raises(psycopg.errors.CheckViolation):
                await relay.flush()
            assert connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
            assert "but not marked" in caplog.text
            outbox.connection.execute("ALTER TABLE leasedjob_outbox DROP CONSTRAINT no")
            assert (await relay.flush()).published == 1
        assert outbox.published() == {"a"}

    async def test_flush_says_what_is_wrong(self, outbox: Outbox, sink: Sink) -> None:
        with pytest.raises(DatabaseUnavailableError):
            await OutboxRelay("host=127.0.0.1 port=1", sink).flush()
        outbox.connection.execute("DROP TABLE leasedjob_outbox")
        with pytest.raises(OutboxMissingError, match="leasedjob outbox install"):
            await OutboxRelay(outbox.dsn, sink).flush()

    async def test_without_the_table_it_says_so_once_and_waits_for_it(
        self, empty_database: Database, sink: Sink, caplog: pytest.LogCaptureFixture
    ) -> None:
        relay = OutboxRelay(empty_database.dsn, sink, interval=0.01)
        relay.start()
        missing = "there is no outbox in this database: call install_outbox, or `leasedjob outbox install` (relation"
        await until(lambda: missing in caplog.text)
        outbox = Outbox(empty_database)
        outbox.put("a")
        await until(lambda: sink.taken == ["a"])
        await relay.stop()
        assert caplog.text.count("there is no outbox") == 1

    @pytest.mark.parametrize("autocommit", [True, False])
    async def test_connections_of_a_pool_whatever_they_are_set_to(
        self, outbox: Outbox, sink: Sink, autocommit: bool
    ) -> None:
        outbox.put("a", partition_key="p")
        async with AsyncConnectionPool(
            outbox.dsn,
            kwargs={
                "autocommit": autocommit,
                "row_factory": dict_row,
                "prepare_threshold": 0,
                "options": "-c default_transaction_isolation=serializable",
            },
            min_size=1,
            max_size=1,
            open=False,
        ) as pool:
            used: list[psycopg.AsyncConnection[Any]] = []
            levels = []

            @asynccontextmanager
            async def connections() -> AsyncIterator[psycopg.AsyncConnection[Any]]:
                async with pool.connection() as connection:
                    used.append(connection)
                    yield connection

            async def publish(message: OutboxMessage) -> None:
                await sink.publish(message)
                level = await used[-1].execute("SHOW transaction_isolation", prepare=False)
                levels.append(await level.fetchone())

            relay = OutboxRelay(connections, publish)
            assert (await relay.flush()).published == 1
            assert outbox.published() == {"a"}
            assert levels == [{"transaction_isolation": "read committed"}]
            sink.errors["b"] = RuntimeError("no")
            outbox.put("b", partition_key="p")
            assert (await relay.flush()).refused == 1
            async with pool.connection() as connection:
                assert connection.autocommit is autocommit
                row = await (await connection.execute("SHOW transaction_isolation")).fetchone()
                assert row == {"transaction_isolation": "serializable"}, "left as it was"
                prepared = "SELECT count(*) AS n FROM pg_prepared_statements WHERE statement ~ 'leasedjob_outbox'"
                row = await (await connection.execute(prepared, prepare=False)).fetchone()
                assert row == {"n": 0}

    async def test_a_relay_that_is_frozen_doesn_t_keep_its_messages(
        self, outbox: Outbox, sink: Sink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The server ends its transaction; another relay takes over, and the frozen one goes on once it can."""
        monkeypatch.setattr("leasedjob.workload.outbox.running.LEAST_IDLE_SECONDS", 0.3)
        frozen, thawed = threading.Event(), threading.Event()

        def publish(message: OutboxMessage) -> None:
            frozen.set()
            thawed.wait(LONG)

        outbox.put("a", "b", partition_key="p")
        relay = OutboxRelay(outbox.dsn, publish, interval=0.01, batch_seconds=0.05, message_seconds=0.05)
        relay.start()
        await until(frozen.is_set)
        other = OutboxRelay(outbox.dsn, sink, interval=0.01)
        other.start()
        await until(lambda: sink.taken == ["a", "b"])
        thawed.set()
        await until(lambda: "published, but not marked" in caplog.text)
        outbox.put("c")
        await until(lambda: outbox.published() == {"a", "b", "c"})
        await asyncio.gather(relay.stop(), other.stop())

    async def test_what_was_published_long_ago_goes(
        self, outbox: Outbox, sink: Sink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("leasedjob.workload.outbox.running.PRUNE_SECONDS", 0.01)
        monkeypatch.setattr("leasedjob.workload.outbox.running.PRUNE_ROWS", 2)
        outbox.put("a", "b", "c", "d", "new")
        outbox.connection.execute(
            "UPDATE leasedjob_outbox SET published_at = now() - interval '2 days' WHERE idempotency_key <> 'new'"
        )
        relay = OutboxRelay(outbox.dsn, sink, interval=0.01, retention=timedelta(days=1))
        relay.start()
        await until(lambda: set(outbox.rows("1")) == {"new"})
        await relay.stop()
        assert outbox.published() == {"new"}


async def test_metrics(outbox: Outbox, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import REGISTRY

    def value(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"leasedjob_outbox_{name}", {"relay": "measured", **labels})

    monkeypatch.setattr("leasedjob.workload.outbox.running.STATUS_SECONDS", 0.01)
    outbox.put("a", "b", "poison", "down")
    outbox.put("elsewhere", topic="elsewhere")
    sink.errors = {"poison": MessageRefusedError("no", final=True), "down": ConnectionError()}
    relay = OutboxRelay(outbox.dsn, sink, name="measured", interval=0.01, patience=SLOW, topics=["orders"])
    relay.start()
    await until(lambda: (value("waiting"), value("parked"), value("pending")) == (1, 1, 1))
    assert 0 < (value("lag_seconds") or 0) < LONG
    await relay.stop()
    outcomes = {name: value("messages_total", outcome=name) for name in ("published", "refused", "parked")}
    assert outcomes == {"published": 2, "refused": 0, "parked": 1}
    assert value("messages_total", outcome="unavailable") == 1
