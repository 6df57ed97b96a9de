"""The outbox behind PgBouncer in transaction mode: nothing depends on a session."""

from __future__ import annotations

import asyncio
from collections import Counter

import psycopg
import pytest
from psycopg import conninfo
from tests.pooler import PGBOUNCER, pooled

from leasedjob.workload import OutboxMessage, OutboxRelay, enqueue_once, install_outbox, outbox_status

from .conftest import OWNER, OWNER_PASSWORD, Database

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(PGBOUNCER is None, reason="PgBouncer is not installed"),
]
RELAYS = 6
MESSAGES = 200


async def test_many_relays_over_three_server_connections(empty_database: Database) -> None:
    taken: list[str] = []

    async def publish(message: OutboxMessage) -> None:
        await asyncio.sleep(0.001)
        taken.append(message.idempotency_key)

    users = {OWNER: OWNER_PASSWORD}
    with pooled(empty_database.server, empty_database.name, users, size=3) as port:
        through = conninfo.make_conninfo(empty_database.dsn, port=str(port))
        with psycopg.connect(through) as connection:
            install_outbox(connection)
            for number in range(MESSAGES):
                enqueue_once(connection, f"{number}", "t", 1, topic="orders", partition_key=f"{number % 5}")
        relays = [OutboxRelay(through, publish, batch=7, interval=0.01) for _ in range(RELAYS)]
        running = [asyncio.create_task(relay.run()) for relay in relays]
        async with await psycopg.AsyncConnection.connect(through, autocommit=True) as connection:
            while (await outbox_status(connection)).pending:
                await asyncio.sleep(0.01)
        await asyncio.gather(*(relay.stop() for relay in relays))
        await asyncio.gather(*running)
    assert Counter(taken) == Counter(f"{number}" for number in range(MESSAGES))
    for key in range(5):
        of_key = [int(name) for name in taken if int(name) % 5 == key]
        assert of_key == sorted(of_key)
