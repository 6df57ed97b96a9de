"""A real PostgreSQL for each test process, and a database of its own, with the schema, for each test.

Everything runs as the kind of role that an operator has: it owns the schema and has CREATEROLE, and is no superuser.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import conninfo, sql
from psycopg.rows import DictRow, dict_row
from tests.queues import REDIS, RedisServer, kafka_jars, need, shared_kafka

from leasedjob.identity import RunIdentity, run_key_for
from leasedjob.lease.database import Credentials, Pool, connect_sync, operator_pool
from leasedjob.lease.migrate import migrate
from leasedjob.lease.rows import ClaimRequest, ClaimResult, ClaimVerdict, OverlapRule, Registration
from leasedjob.lease.store import OperatorStore, SidecarStore
from leasedjob.lease.tenants import tenant_of
from leasedjob.testing.postgres import PostgresServer

POSTGRES_15 = "LEASEDJOB_TEST_POSTGRES15_BIN"
OWNER = "leasedjob_owner"
OWNER_PASSWORD = "owner"
TEMPLATE = "leasedjob_template"

CLUSTER = "east"
NAMESPACE = "shop"
CODE = "shop/sync-orders"
UID = "7c5b1d1e-0000-4000-8000-000000000001"
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    """The server; LEASEDJOB_TEST_POSTGRES_BIN names the programs of another version."""
    other = os.environ.get("LEASEDJOB_TEST_POSTGRES_BIN")
    with PostgresServer(bin=Path(other) if other else None) as running:
        running.create_owner(OWNER, OWNER_PASSWORD)
        yield running


def postgres_15() -> Path | None:
    """The programs of the oldest PostgreSQL that is supported: named, or Debian's."""
    named = os.environ.get(POSTGRES_15)
    found = Path(named) if named else Path("/usr/lib/postgresql/15/bin")
    return found if (found / "postgres").exists() else None


@pytest.fixture(scope="session")
def server_15() -> Iterator[PostgresServer]:
    """The same on PostgreSQL 15; `make integration` brings it where it isn't installed."""
    programs = postgres_15()
    if programs is None:
        missing = f"POSTGRESQL 15 IS NOT TESTED: install postgresql-15, or name its programs in {POSTGRES_15}"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    with PostgresServer(bin=programs) as running:
        running.create_owner(OWNER, OWNER_PASSWORD)
        yield running


def make_template(server: PostgresServer) -> str:
    """The name of a database with the whole schema, to be copied."""
    server.create_database(TEMPLATE, owner=OWNER)
    with psycopg.connect(server.conninfo(TEMPLATE, OWNER, OWNER_PASSWORD), autocommit=True) as connection:
        migrate(connection)
    return TEMPLATE


@pytest.fixture(scope="session")
def template(server: PostgresServer) -> str:
    """See make_template."""
    return make_template(server)


@pytest.fixture(scope="session")
def template_15(server_15: PostgresServer) -> str:
    """See make_template; of PostgreSQL 15."""
    return make_template(server_15)


@dataclass
class Database:
    """One test's database, seen by its owner."""

    server: PostgresServer
    name: str
    opened: list[psycopg.Connection[Any]] = field(default_factory=list)

    @property
    def dsn(self) -> str:
        return self.server.conninfo(self.name, OWNER, OWNER_PASSWORD)

    @property
    def credentials(self) -> Credentials:
        return Credentials.from_conninfo(self.dsn)

    def connect(self, *, autocommit: bool = True, **parameters: Any) -> psycopg.Connection[DictRow]:
        """A connection of its own, closed at the end of the test."""
        text = conninfo.make_conninfo(self.dsn, **parameters)
        connection = psycopg.connect(text, autocommit=autocommit, row_factory=dict_row)
        self.opened.append(connection)
        return connection

    def rows(self, statement: str, *parameters: Any) -> list[dict[str, Any]]:
        with psycopg.connect(self.dsn, autocommit=True, row_factory=dict_row) as connection:
            cursor = connection.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

    def row(self, id: UUID | None) -> dict[str, Any]:
        """The lease row."""
        (row,) = self.rows("SELECT * FROM leasedjob.job_scheduler WHERE id = %s", id)
        return row

    def age(self, id: UUID | None, seconds: float) -> None:
        """Moves the row's last heartbeat into the past, as if this much time had gone by since."""
        self.rows(
            "UPDATE leasedjob.job_scheduler SET modified_at = modified_at - %s * interval '1 second' WHERE id = %s",
            seconds,
            id,
        )

    def due(self, id: UUID | None) -> None:
        """Lets a row's retry be due now."""
        self.rows("UPDATE leasedjob.job_scheduler SET retry_at = clock_timestamp() WHERE id = %s", id)

    def watermark(self, code: str = CODE) -> datetime:
        (row,) = self.rows("SELECT watermark FROM leasedjob.job_code WHERE code = %s", code)
        watermark: datetime = row["watermark"]
        return watermark

    def ledger(self, code: str = CODE) -> list[tuple[Any, ...]]:
        """(kind, reason, first, last, count) of each entry, oldest first."""
        return [
            (row["kind"], row["reason"], row["first"], row["last"], row["count"])
            for row in self.rows("SELECT * FROM leasedjob.tick_ledger WHERE code = %s ORDER BY first, kind", code)
        ]


@pytest.fixture
def empty_database(server: PostgresServer) -> Iterator[Database]:
    """A database without the schema, owned by the operator's role."""
    yield from _database(server, "template1")


@pytest.fixture
def database(server: PostgresServer, template: str) -> Iterator[Database]:
    """A database with the schema."""
    yield from _database(server, template)


def _database(server: PostgresServer, template: str) -> Iterator[Database]:
    name = f"test_{os.getpid()}_{next(_numbers)}"
    server.create_database(name, template=template, owner=OWNER)
    database = Database(server, name)
    yield database
    for connection in database.opened:
        connection.close()
    server.drop_database(name)


@pytest.fixture
async def store(database: Database) -> AsyncIterator[OperatorStore]:
    """An operator's store on a pool, as the operator makes it."""
    async with operator_pool(database.credentials, max_size=4) as pool:
        yield OperatorStore(pool.connection)


async def warm(pool: Pool, size: int) -> None:
    """Opens that many connections, so that a race is decided in the server."""
    async with AsyncExitStack() as stack:
        for _ in range(size):
            await stack.enter_async_context(pool.connection())


@pytest.fixture
def sidecar(database: Database) -> Iterator[SidecarStore]:
    """A sidecar's store, with the owner's role; tenants have tests of their own."""
    connection = connect_sync(database.credentials)
    yield SidecarStore(connection)
    connection.close()


@pytest.fixture
def minute() -> datetime:
    """The last whole minute but ten: a tick that is due, with room for later ones."""
    return datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=10)


def registration(code: str = CODE, **changes: Any) -> Registration:
    """A job that was created long ago."""
    values: dict[str, Any] = {
        "code": code,
        "uid": UID,
        "namespace": NAMESPACE,
        "name": code.rpartition("/")[2],
        "created_at": datetime.now(UTC) - timedelta(days=1),
        "schedule_hash": "schedule-1",
        "spec_hash": "spec-1",
        "policy": "Forbid",
    }
    return Registration(**{**values, **changes})


def request(tick: datetime | None, code: str = CODE, **changes: Any) -> ClaimRequest:
    """A scheduled run of that tick."""
    values: dict[str, Any] = {
        "identity": RunIdentity.of(code=code, run_key=run_key_for(tick)) if tick else None,
        "tick": tick,
        "name": code,
        "namespace": NAMESPACE,
        "job_name": code.rpartition("/")[2],
        "job_uid": UID,
        "tenant": tenant_of(CLUSTER, NAMESPACE),
        "run_lease_ms": 900_000,
        "on_overlap": OverlapRule.SKIP,
    }
    return ClaimRequest(**{**values, **changes})


async def registered(store: OperatorStore, *codes: str, cluster: str = CLUSTER, **changes: Any) -> None:
    """Registers these codes, CODE by default."""
    answers = await store.register_jobs(cluster, [registration(code, **changes) for code in codes or (CODE,)])
    assert not any(answer.busy for answer in answers)


async def claim(store: OperatorStore, wanted: ClaimRequest, *, cluster: str = CLUSTER) -> ClaimResult:
    """The answer to one request."""
    (result,) = await store.claim_runs(cluster, [wanted])
    return result


async def claimed(
    store: OperatorStore, tick: datetime | None, *, cluster: str = CLUSTER, **changes: Any
) -> ClaimResult:
    """A claim that must succeed."""
    result = await claim(store, request(tick, **changes), cluster=cluster)
    assert result.verdict is ClaimVerdict.CLAIMED, result
    return result


def lock_row(connection: psycopg.Connection[Any], table: str, column: str, value: Any) -> None:
    """Locks one row in a transaction that stays open on `connection` until it is closed or rolled back."""
    connection.execute(
        sql.SQL("SELECT FROM leasedjob.{} WHERE {} = %s FOR UPDATE").format(
            sql.Identifier(table), sql.Identifier(column)
        ),
        (value,),
    )


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A Redis; tests take queues of their own."""
    need("REDIS", REDIS)
    with RedisServer() as running:
        yield running


@pytest.fixture(scope="session")
def kafka_servers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a Kafka broker that all test processes share; tests take topics and groups of their own."""
    need("KAFKA", kafka_jars())
    own = tmp_path_factory.getbasetemp()
    return shared_kafka(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture
def kafka_topic() -> str:
    """A name for a topic, or the beginning of several, that no other test uses."""
    return f"topic-{os.getpid()}-{next(_numbers)}"
