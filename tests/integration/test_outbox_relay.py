"""OutboxRelay on a real PostgreSQL: claim, publish, mark, commit; and what becomes of what can't be published."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from leasedjob.errors import DatabaseUnavailableError, MessageRefusedError, PublisherUnavailableError
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
