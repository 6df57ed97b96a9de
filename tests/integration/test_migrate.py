"""Migrations on a real database."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psycopg
import pytest
from psycopg import sql

from leasedjob.errors import DatabaseUnavailableError, SchemaMissingError
from leasedjob.lease import migrate as module
from leasedjob.lease.database import connect_async
from leasedjob.lease.migrate import (
    Migration,
    MigrationChangedError,
    SchemaAheadError,
    check,
    check_async,
    install_schema,
    migrate,
    migrations,
    pending,
)
from leasedjob.lease.store import OperatorStore

from .conftest import CLUSTER, OWNER, Database, registered

pytestmark = pytest.mark.integration


def test_an_empty_database_is_brought_up_to_date_once(empty_database: Database) -> None:
    connection = empty_database.connect()
    assert pending(connection) == list(migrations())
    with pytest.raises(SchemaMissingError, match=r"leasedjob migrate.*0001_lease"):
        check(connection)
    assert migrate(connection) == list(migrations())
    assert migrate(connection) == []
    assert pending(connection) == []
    check(connection)
    rows = empty_database.rows("SELECT version, name, checksum FROM leasedjob.schema_migration ORDER BY version")
    assert [(row["version"], row["checksum"]) for row in rows] == [(m.version, m.checksum) for m in migrations()]


async def test_check_async_agrees(empty_database: Database) -> None:
    connection = await connect_async(empty_database.credentials)
    with pytest.raises(SchemaMissingError, match="leasedjob migrate"):
        await check_async(connection)
    install_schema(empty_database.connect())
    await check_async(connection)
    await connection.close()


async def test_a_store_without_the_schema_names_the_command(empty_database: Database) -> None:
    from leasedjob.lease.database import connections

    store = OperatorStore(connections(empty_database.credentials))
    with pytest.raises(SchemaMissingError, match="leasedjob migrate"):
        await store.active_rows(CLUSTER)
    with pytest.raises(SchemaMissingError, match="leasedjob migrate"):
        await registered(store)


def test_migrators_at_the_same_time_apply_each_file_once(empty_database: Database) -> None:
    start = threading.Barrier(4)

    def run(_: int) -> list[Migration]:
        with psycopg.connect(empty_database.dsn, autocommit=True) as connection:
            start.wait()
            return migrate(connection)

    with ThreadPoolExecutor(4) as threads:
        applied = [migration for done in threads.map(run, range(4)) for migration in done]
    assert sorted(applied, key=lambda migration: migration.version) == list(migrations())


def test_a_changed_file_is_refused_and_nothing_is_applied(database: Database) -> None:
    connection = database.connect()
    first = migrations()[0]
    changed = (replace(first, sql=first.sql + "\n-- edited"), Migration(2, "more", "CREATE TABLE leasedjob.more ()"))
    for act in (lambda: migrate(connection, changed), lambda: pending(connection, changed)):
        with pytest.raises(MigrationChangedError, match="0001_lease"):
            act()
    assert database.rows("SELECT to_regclass('leasedjob.more') AS more") == [{"more": None}]


def test_a_later_migration_is_applied_on_top_and_a_broken_one_leaves_nothing(database: Database) -> None:
    connection = database.connect()
    good = Migration(len(migrations()) + 1, "more", "CREATE TABLE leasedjob.more (x integer)")
    broken = Migration(len(migrations()) + 2, "broken", "CREATE TABLE leasedjob.half (); SELECT 1/0")
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate(connection, (*migrations(), good, broken))
    assert database.rows("SELECT to_regclass('leasedjob.half')::text AS half") == [{"half": None}]
    assert pending(connection, (*migrations(), good, broken)) == [broken]


def test_a_database_that_is_ahead_is_current(database: Database) -> None:
    database.rows("INSERT INTO leasedjob.schema_migration (version, name, checksum) VALUES (9999, 'later', 'x')")
    check(database.connect())


def test_a_database_that_is_too_far_ahead_says_who_has_to_be_upgraded(database: Database) -> None:
    """A later version has taken something away: older ones must stop, and not fail somewhere in the middle."""
    known = len(migrations())
    add = "INSERT INTO leasedjob.schema_migration (version, name, checksum) VALUES (%s, %s, 'x')"
    connection = database.connect()
    connection.execute(add, (known + 1, "more"))
    connection.execute(add, (known + 2, f"needs_{known:04d}_less"))
    check(connection)
    connection.execute(add, (known + 3, f"needs_{known + 1:04d}_even_less"))
    for act in (check, pending, migrate):
        with pytest.raises(SchemaAheadError, match=rf"up to {known:04d}.*needs_{known + 1:04d}_even_less.*upgrade"):
            act(connection)
    # The version that the migration came with can.
    later = (*migrations(), Migration(known + 1, "more", "SELECT 1"))
    with pytest.raises(MigrationChangedError):  # of which this test has only the name
        pending(connection, later)


def test_a_lock_that_is_not_free_is_a_passing_fault(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT", "50ms")
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.1)
    stranger = database.connect(autocommit=False)
    stranger.execute("LOCK TABLE leasedjob.schema_migration IN ACCESS SHARE MODE")
    more = (*migrations(), Migration(len(migrations()) + 1, "more", "SELECT 1"))
    # Readers don't stand in the way ...
    assert [str(m) for m in migrate(database.connect(), more)] == [str(more[-1])]
    stranger.execute("LOCK TABLE leasedjob.schema_migration IN ROW EXCLUSIVE MODE")
    last = (*more, Migration(len(more) + 1, "last", "SELECT 1"))
    # ... but another migrator does.
    with pytest.raises(DatabaseUnavailableError):
        migrate(database.connect(), last)
    stranger.rollback()
    assert len(migrate(database.connect(), last)) == 1


def test_an_advisory_lock_of_a_stranger_does_not_hold_up_a_migration(database: Database) -> None:
    stranger = database.connect()
    stranger.execute("SELECT pg_advisory_lock(%s)", (module._BOOTSTRAP_LOCK,))
    more = (*migrations(), Migration(len(migrations()) + 1, "more", "SELECT 1"))
    assert len(migrate(database.connect(), more)) == 1


def test_a_schema_that_was_made_beforehand_needs_no_right_to_create_one(empty_database: Database) -> None:
    name = sql.Identifier(empty_database.name)
    empty_database.server.execute(
        sql.SQL("CREATE SCHEMA leasedjob AUTHORIZATION {}").format(sql.Identifier(OWNER)), empty_database.name
    )
    empty_database.server.execute(sql.SQL("ALTER DATABASE {} OWNER TO postgres").format(name))
    assert migrate(empty_database.connect()) == list(migrations())


def test_without_the_right_to_create_a_schema_the_message_says_so(empty_database: Database) -> None:
    from leasedjob.errors import DatabaseRefusedError

    name = sql.Identifier(empty_database.name)
    empty_database.server.execute(sql.SQL("ALTER DATABASE {} OWNER TO postgres").format(name))
    with pytest.raises(DatabaseRefusedError, match="permission denied for database"):
        migrate(empty_database.connect())
