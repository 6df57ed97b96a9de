"""enqueue_once on a real PostgreSQL: in the caller's own transaction, whatever kind of connection that one has."""

from __future__ import annotations

import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as aio

from leasedjob.errors import IdempotencyKeyReusedError, InvalidOutboxMessageError
from leasedjob.workload.outbox import (
    OutboxStatus,
    enqueue_once,
    install_outbox,
    outbox_status,
    parked_messages,
    prune_outbox,
    retry_parked,
)

from .conftest import OWNER, OWNER_PASSWORD, Database
from .workload_parts import LONG

pytestmark = pytest.mark.integration


class Caller:
    """An application with one kind of connection."""

    def __init__(self, connection: Any, close: Callable[[], Any]) -> None:
        self.connection, self._close = connection, close

    async def do(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await _given(operation(self.connection, *args, **kwargs))

    async def execute(self, statement: str) -> None:
        text = sqlalchemy.text(statement) if isinstance(self.connection, SQLALCHEMY) else statement
        await _given(self.connection.execute(text))

    async def commit(self) -> None:
        await _given(self.connection.commit())

    async def rollback(self) -> None:
        await _given(self.connection.rollback())

    async def close(self) -> None:
        await _given(self._close())


SQLALCHEMY = (
    sqlalchemy.Connection,
    orm.Session,
    orm.scoped_session,
    aio.AsyncConnection,
    aio.AsyncSession,
    aio.async_scoped_session,
)


async def _given(value: Any) -> Any:
    return await value if isinstance(value, Awaitable) else value


def _url(database: Database, driver: str) -> sqlalchemy.URL:
    server = database.server
    return sqlalchemy.URL.create(
        f"postgresql+{driver}", OWNER, OWNER_PASSWORD, server.address, server.port, database.name
    )


async def _caller(kind: str, database: Database, stack: AsyncExitStack) -> Caller:
    if kind == "psycopg":
        connection = psycopg.connect(database.dsn)
        return Caller(connection, connection.close)
    if kind == "psycopg async":
        asynchronous = await psycopg.AsyncConnection.connect(database.dsn)
        return Caller(asynchronous, asynchronous.close)
    library, _, what = kind.partition(" ")
    if what.startswith("async"):
        engine = aio.create_async_engine(_url(database, library))
        stack.push_async_callback(engine.dispose)
        made: Any = {
            "async session": lambda: aio.AsyncSession(engine),
            "async scoped session": lambda: aio.async_scoped_session(aio.async_sessionmaker(engine), lambda: 1),
            "async connection": lambda: aio.AsyncConnection(engine),
        }[what]()
        if what == "async connection":
            await made.start()
        return Caller(made, made.close)
    plain = sqlalchemy.create_engine(_url(database, library))
    stack.callback(plain.dispose)
    made = {
        "session": lambda: orm.Session(plain),
        "scoped session": lambda: orm.scoped_session(orm.sessionmaker(plain)),
        "connection": plain.connect,
    }[what]()
    return Caller(made, made.close)


KINDS = [
    "psycopg",
    "psycopg async",
    "psycopg session",
    "psycopg scoped session",
    "psycopg connection",
    "psycopg async session",
    "psycopg async scoped session",
    "psycopg async connection",
    "asyncpg async session",
]


@pytest.fixture
async def caller(empty_database: Database, request: pytest.FixtureRequest) -> AsyncIterator[Caller]:
    async with AsyncExitStack() as stack:
        caller = await _caller(getattr(request, "param", "psycopg"), empty_database, stack)
        stack.push_async_callback(caller.close)
        await caller.do(install_outbox)
        await caller.execute("CREATE TABLE orders (id integer PRIMARY KEY)")
        await caller.commit()
        yield caller


MESSAGE: dict[str, Any] = {"topic": "orders", "partition_key": "order-7", "headers": {"traceparent": "00-1-1-01"}}
PAYLOAD = {"order": 7, "text": "Grüße: ☕ %s :x ::y", "nothing": None, "price": 1.25, "list": [True]}


@pytest.mark.parametrize("caller", KINDS, indirect=True)
class TestEveryKindOfConnection:
    async def test_it_is_part_of_the_callers_transaction(self, caller: Caller, empty_database: Database) -> None:
        await caller.execute("INSERT INTO orders VALUES (7)")
        assert await caller.do(enqueue_once, "k", "paid", PAYLOAD, **MESSAGE) is True
        assert empty_database.rows("SELECT id FROM leasedjob_outbox") == []
        await caller.rollback()
        assert empty_database.rows("SELECT id FROM leasedjob_outbox") == []
        await caller.execute("INSERT INTO orders VALUES (7)")
        assert await caller.do(enqueue_once, "k", "paid", PAYLOAD, **MESSAGE) is True, "the first one never was"
        await caller.commit()
        (row,) = empty_database.rows("SELECT * FROM leasedjob_outbox, orders AS o")
        assert row["payload"] == PAYLOAD
        assert (row["idempotency_key"], row["type"], row["topic"]) == ("k", "paid", "orders")
        assert (row["partition_key"], row["headers"]) == ("order-7", {"traceparent": "00-1-1-01"})
        assert row["published_at"] is None

    async def test_the_same_message_is_put_in_once(self, caller: Caller, empty_database: Database) -> None:
        assert await caller.do(enqueue_once, "k", "paid", PAYLOAD, **MESSAGE) is True
        assert await caller.do(enqueue_once, "k", "paid", dict(reversed(PAYLOAD.items())), **MESSAGE) is False
        await caller.commit()
        other = {**MESSAGE, "headers": {"traceparent": "00-2-2-01"}}
        assert await caller.do(enqueue_once, "k", "paid", PAYLOAD, **other) is False, "another trace, the same effect"
        await caller.commit()
        assert len(empty_database.rows("SELECT id FROM leasedjob_outbox")) == 1

    async def test_another_message_under_the_same_key_is_an_error(
        self, caller: Caller, empty_database: Database
    ) -> None:
        await caller.do(enqueue_once, "k", "paid", PAYLOAD, **MESSAGE)
        for arguments, field in (
            (("k", "paid", {"order": 8}, MESSAGE), "payload"),
            (("k", "shipped", PAYLOAD, MESSAGE), "type"),
            (("k", "paid", PAYLOAD, {**MESSAGE, "topic": "o"}), "topic"),
            (("k", "paid", PAYLOAD, {**MESSAGE, "partition_key": None}), "partition_key"),
            (("k", "shipped", 1, MESSAGE), "type and payload"),
        ):
            *positional, keywords = arguments
            with pytest.raises(IdempotencyKeyReusedError, match=f"another {field} was put into the outbox under the"):
                await caller.do(enqueue_once, *positional, **keywords)
        await caller.execute("INSERT INTO orders VALUES (7)")
        await caller.commit()
        assert len(empty_database.rows("SELECT * FROM orders")) == 1, "the transaction was still usable"

    async def test_looking_after_it(self, caller: Caller, empty_database: Database) -> None:
        for key in ("a", "b", "c", "d"):
            await caller.do(enqueue_once, key, "t", key)
        await caller.execute("UPDATE leasedjob_outbox SET parked_at = now(), tries = 10, error = 'no' WHERE id < 3")
        await caller.execute(
            "UPDATE leasedjob_outbox SET published_at = now() - interval '8 days' WHERE idempotency_key = 'c'"
        )
        await caller.commit()
        first, second = await caller.do(parked_messages)
        assert (first.idempotency_key, first.topic, first.payload) == ("a", "t", "a")
        assert (second.tries, second.error) == (10, "no")
        assert second.parked_at.tzinfo is not None
        status = await caller.do(outbox_status)
        assert (status.pending, status.waiting, status.parked) == (1, 0, 2)
        assert 0 <= status.lag < LONG
        assert await caller.do(retry_parked, ["b", "nobody"]) == 1
        assert await caller.do(retry_parked, None) == 1
        assert await caller.do(prune_outbox, timedelta(days=9)) == 0
        assert await caller.do(prune_outbox, timedelta(days=7)) == 1
        await caller.commit()
        rows = empty_database.rows("SELECT idempotency_key, tries FROM leasedjob_outbox ORDER BY id")
        assert rows == [{"idempotency_key": key, "tries": 0} for key in ("a", "b", "d")]
        await caller.execute("UPDATE leasedjob_outbox SET published_at = now()")
        assert await caller.do(outbox_status) == OutboxStatus(0, 0, 0, 0.0)


async def test_what_is_not_given(caller: Caller, empty_database: Database) -> None:
    await caller.do(enqueue_once, "k", "paid", None)
    await caller.commit()
    (row,) = empty_database.rows("SELECT topic, partition_key, payload, headers, lane FROM leasedjob_outbox")
    assert row == {"topic": "paid", "partition_key": None, "payload": None, "headers": {}, "lane": None}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ((None, "t", 1), "idempotency_key must be a string, not NoneType"),
        ((b"k", "t", 1), "idempotency_key must be a string, not bytes"),
        (("", "t", 1), "idempotency_key must not be blank"),
        (("\u3000", "t", 1), "idempotency_key must not be blank"),
        (("k" * 256, "t", 1), "idempotency_key must be at most 255 characters long, not 256"),
        (("k\n", "t", 1), "idempotency_key must not contain control characters"),
        (("k\0", "t", 1), "idempotency_key must not contain control characters"),
        (("k\ud800", "t", 1), "idempotency_key must not contain control characters or lone surrogates"),
        ((" k", "t", 1), "idempotency_key must not begin or end with white space"),
        (("k", "", 1), "type must not be blank"),
        (("k", "t", 1, {"topic": 5}), "topic must be a string"),
        (("k", "t", 1, {"partition_key": ""}), "partition_key must not be blank"),
        (("k", "t", float("nan")), "payload must be JSON"),
        (("k", "t", {1, 2}), "payload must be JSON: Object of type set"),
        (("k", "t", ["\0"]), "payload must not contain U\\+0000"),
        (("k", "t", ["\\\0"]), "payload must not contain U\\+0000"),
        (("k", "t", "\ud800"), "payload must be JSON"),
        (("k", "t", 1, {"headers": {"a b": "c"}}), "headers: 'a b' is not the name"),
        (("k", "t", 1, {"headers": {"a": "c\r\nd"}}), "headers: the value of a must be text"),
        (("k", "t", 1, {"headers": [("a", "b")]}), "headers must be a mapping"),
    ],
)
async def test_bad_input_is_refused_before_any_sql(caller: Caller, message: tuple[Any, ...], text: str) -> None:
    *positional, keywords = message if isinstance(message[-1], dict) else (*message, {})
    with pytest.raises(InvalidOutboxMessageError, match=text):
        await caller.do(enqueue_once, *positional, **keywords)
    assert caller.connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE


async def test_text_that_only_looks_like_a_null_is_taken(caller: Caller, empty_database: Database) -> None:
    await caller.do(enqueue_once, "k", "t", ["\\u0000", "\\\\u0000"])
    await caller.commit()
    (row,) = empty_database.rows("SELECT payload FROM leasedjob_outbox")
    assert row["payload"] == ["\\u0000", "\\\\u0000"]


def test_connections_of_other_kinds_are_refused() -> None:
    with pytest.raises(TypeError, match=r"connection must be a connection of psycopg 3 .* not builtins\.str"):
        enqueue_once("postgresql://", "k", "t", 1)  # type: ignore[call-overload]


def test_it_looks_like_a_function() -> None:
    assert list(inspect.signature(enqueue_once).parameters) == [  # type: ignore[arg-type]
        "connection", "idempotency_key", "type", "payload", "topic", "partition_key", "headers",
    ]  # fmt: skip
    assert "in the caller's transaction" in (enqueue_once.__doc__ or "")


def test_two_transactions_with_one_key(caller: Caller, empty_database: Database) -> None:
    """The second one waits for the first one's end, and then knows whether it is the first."""
    for end, answers in (("rollback", [True]), ("commit", [False])):
        with psycopg.connect(empty_database.dsn) as one, psycopg.connect(empty_database.dsn) as two:
            assert enqueue_once(one, end, "t", 1) is True
            answer: list[bool] = []

            def ask(two: Any = two, key: str = end, answer: list[bool] = answer) -> None:
                answer.append(enqueue_once(two, key, "t", 1))

            thread = threading.Thread(target=ask)
            thread.start()
            watching = empty_database.connect()
            while watching.execute("SELECT count(*) AS n FROM pg_locks WHERE NOT granted").fetchone() == {"n": 0}:
                assert thread.is_alive()
            getattr(one, end)()
            thread.join(LONG)
            assert answer == answers


def test_any_number_install_it_at_once(empty_database: Database) -> None:
    errors: list[BaseException] = []
    connections = [empty_database.connect() for _ in range(8)]
    barrier = threading.Barrier(len(connections))

    def install(connection: psycopg.Connection[Any]) -> None:
        try:
            barrier.wait(LONG)
            install_outbox(connection)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=install, args=(connection,)) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert errors == []


def test_a_role_that_may_only_use_the_table(caller: Caller, empty_database: Database) -> None:
    server, role = empty_database.server, "application_of_the_outbox"
    server.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'a'")
    try:
        empty_database.rows(f"GRANT SELECT, INSERT ON leasedjob_outbox TO {role}")
        with psycopg.connect(server.conninfo(empty_database.name, role, "a")) as connection:
            install_outbox(connection)
            assert enqueue_once(connection, "k", "t", 1)
            assert not enqueue_once(connection, "k", "t", 1)
    finally:
        server.execute(f"DROP OWNED BY {role}", empty_database.name)
        server.execute(f"DROP ROLE {role}")


async def test_a_connection_with_rows_and_adapters_of_its_own(empty_database: Database) -> None:
    connection = empty_database.connect()  # rows as dicts, autocommit
    install_outbox(connection)
    connection.prepare_threshold = 0
    assert enqueue_once(connection, "k", "t", {"a": 1})
    assert not enqueue_once(connection, "k", "t", {"a": 1.0}), "the same number"
    prepared = connection.execute("SELECT count(*) AS n FROM pg_prepared_statements WHERE statement ~ '^.INSERT'")
    assert prepared.fetchone() == {"n": 0}, "nothing that a pooler would lose"


@pytest.mark.parametrize("factory", [psycopg.RawCursor, psycopg.ClientCursor])
def test_a_connection_whose_cursors_are_of_another_kind(empty_database: Database, factory: Any) -> None:
    with psycopg.connect(empty_database.dsn, cursor_factory=factory) as connection:
        install_outbox(connection)
        assert enqueue_once(connection, "k", "t", {"a": "100 %s"})
        assert not enqueue_once(connection, "k", "t", {"a": "100 %s"})


async def test_in_a_pipeline(empty_database: Database) -> None:
    with psycopg.connect(empty_database.dsn) as connection, connection.pipeline():
        install_outbox(connection)
        assert enqueue_once(connection, "k", "t", 1)
        assert not enqueue_once(connection, "k", "t", 1)
        with pytest.raises(IdempotencyKeyReusedError):
            enqueue_once(connection, "k", "t", 2)
        assert enqueue_once(connection, "l", "t", 1), "the transaction is still usable"
    async with await psycopg.AsyncConnection.connect(empty_database.dsn) as other, other.pipeline():
        assert [await enqueue_once(other, key, "t", 1) for key in "klm"] == [False, False, True]
    with psycopg.connect(empty_database.dsn) as connection:
        connection.execute("DROP TABLE leasedjob_outbox")
        with pytest.raises(psycopg.errors.UndefinedTable):
            enqueue_once(connection, "k", "t", 1)
