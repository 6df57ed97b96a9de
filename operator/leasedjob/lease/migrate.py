"""Migrations: numbered SQL files, forward only, each in one transaction, each safe with the previous version running.

An applied file never changes: its checksum is kept and compared. A database that is ahead of this version is fine, as
long as it has everything that this version knows, and nothing in it asks for more: a migration that takes away what
older versions use is called `needs_NNNN_…`, by the migration that its users have to know.
"""

from __future__ import annotations

import hashlib
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, LiteralString

from psycopg.errors import LockNotAvailable
from psycopg.rows import DictRow, dict_row

from leasedjob.errors import LeasedJobError, SchemaMissingError
from leasedjob.lease.database import translated
from leasedjob.lease.statements import statement

if TYPE_CHECKING:
    from psycopg import AsyncConnection, Connection

LOCK_TIMEOUT: Final = "10s"  # for the turn among migrators, whom nobody else waits for
# Whoever waits for a lock on a table holds up everybody who comes after, heartbeats too. So a step waits for a moment,
# gives up, lets them through, and tries again; any lease outlasts that.
LOCK_WAIT: Final = "1s"
PAUSE_SECONDS: Final = 1.0
PATIENCE_SECONDS: Final = 30.0
# Serialises the very first migration, when there is no table to lock. Later ones lock the table: any role that may
# connect can hold an advisory lock, and must not be able to hold up a migration.
_BOOTSTRAP_LOCK: Final = 0x1EA5ED10B
_FILE: Final = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
_NEEDS: Final = re.compile(r"needs_(\d{4})(?:_|$)")


class MigrationChangedError(LeasedJobError):
    """A migration that this database has was applied from another text than the one in this package."""


class SchemaAheadError(LeasedJobError):
    """A later version has taken away something that this version uses."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered file."""

    version: int
    name: str
    sql: LiteralString

    @property
    def checksum(self) -> str:
        """SHA-256 of its text, in hexadecimal."""
        return hashlib.sha256(self.sql.encode()).hexdigest()

    def __str__(self) -> str:
        return f"{self.version:04d}_{self.name}"


@cache
def migrations() -> tuple[Migration, ...]:
    """All that this version knows, in order; their numbers have no gap."""
    found = [
        Migration(int(match[1]), match[2], entry.read_text(encoding="utf-8"))
        for entry in resources.files(__package__).joinpath("migrations").iterdir()
        if (match := _FILE.fullmatch(entry.name))
    ]
    found.sort(key=lambda migration: migration.version)
    if [migration.version for migration in found] != list(range(1, len(found) + 1)):
        raise ValueError("migration numbers must be 1, 2, 3, ... without a gap")
    return tuple(found)


def missing(applied: Sequence[Mapping[str, Any]], known: Sequence[Migration] | None = None) -> list[Migration]:
    """What of `known` is not among the rows of `schema_migration`. Pure.

    Raises:
        MigrationChangedError: an applied file has another checksum.
        SchemaAheadError: an applied file that isn't among `known` asks for a later version.
    """
    known = migrations() if known is None else known
    by_version = {row["version"]: row for row in applied}
    newest = known[-1].version if known else 0
    for version in sorted(by_version.keys() - {m.version for m in known}):
        name = str(by_version[version]["name"])
        if (asked := _NEEDS.match(name)) and int(asked[1]) > newest:
            raise SchemaAheadError(
                f"the database's schema is ahead of this version, which knows migrations up to {newest:04d}: "
                f"{version:04d}_{name} is for versions that know {asked[1]}; upgrade what says this"
            )
    lacking = []
    for migration in known:
        row = by_version.get(migration.version)
        if row is None:
            lacking.append(migration)
        elif row["checksum"] != migration.checksum:
            raise MigrationChangedError(
                f"the database has migration {migration} from another text than this version's: "
                f"checksum {row['checksum'][:12]}, here {migration.checksum[:12]}"
            )
    return lacking


def _applied(connection: Connection[Any]) -> list[DictRow] | None:
    """The rows of schema_migration; None where the table is absent."""
    with connection.cursor(row_factory=dict_row) as cursor:
        state = cursor.execute(statement("schema_exists")).fetchone()
        if not state or not state["migrations"]:
            return None
        return cursor.execute(statement("applied_migrations")).fetchall()


def pending(connection: Connection[Any], known: Sequence[Migration] | None = None) -> list[Migration]:
    """What `migrate` would apply.

    Raises:
        MigrationChangedError: see `missing`.
    """
    with translated():
        return missing(_applied(connection) or [], known)


def check(connection: Connection[Any]) -> None:
    """Nothing if the schema is current.

    Raises:
        SchemaMissingError: it is absent or lacks a migration; the message names `leasedjob migrate`.
        MigrationChangedError, SchemaAheadError: see `missing`.
    """
    if lacking := pending(connection):
        raise SchemaMissingError("missing: " + ", ".join(map(str, lacking)))


async def check_async(connection: AsyncConnection[Any]) -> None:
    """As `check`, asynchronous."""
    with translated():
        async with connection.cursor(row_factory=dict_row) as cursor:
            state = await (await cursor.execute(statement("schema_exists"))).fetchone()
            present = bool(state and state["migrations"])
            rows = await (await cursor.execute(statement("applied_migrations"))).fetchall() if present else []
    if lacking := missing(rows):
        raise SchemaMissingError("missing: " + ", ".join(map(str, lacking)))


def migrate(connection: Connection[Any], known: Sequence[Migration] | None = None) -> list[Migration]:
    """Brings the schema up to this version; what was applied now. Any number may run at the same time.

    Args:
        connection: in autocommit, with the role that is to own the schema.
        known: default: this version's migrations.

    Raises:
        MigrationChangedError, SchemaAheadError: see `missing`; nothing was applied.
        DatabaseUnavailableError: a lock was not to be had for 30 s, or the database can't answer. Try again.
    """
    done: list[Migration] = []
    with translated():
        _bootstrap(connection)
        give_up = time.monotonic() + PATIENCE_SECONDS
        while missing(_applied(connection) or [], known):
            try:
                step = _step(connection, known)
            except LockNotAvailable:
                if time.monotonic() >= give_up:
                    raise
                time.sleep(PAUSE_SECONDS * random.uniform(0.5, 1.5))
                continue
            if step is not None:
                done.append(step)
            give_up = time.monotonic() + PATIENCE_SECONDS
    return done


def _step(connection: Connection[Any], known: Sequence[Migration] | None) -> Migration | None:
    """Applies the first one that is lacking, in one transaction; None where another migrator was faster."""
    with connection.transaction():
        connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
        connection.execute("LOCK TABLE leasedjob.schema_migration IN SHARE ROW EXCLUSIVE MODE")
        lacking = missing(_applied(connection) or [], known)
        if not lacking:
            return None
        step = lacking[0]
        connection.execute(f"SET LOCAL lock_timeout = '{LOCK_WAIT}'")
        connection.execute(step.sql)
        connection.execute(
            statement("record_migration"), {"version": step.version, "name": step.name, "checksum": step.checksum}
        )
    return step


def _bootstrap(connection: Connection[Any]) -> None:
    if _applied(connection) is not None:
        return
    with connection.transaction(), connection.cursor(row_factory=dict_row) as cursor:
        cursor.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", (_BOOTSTRAP_LOCK,))
        state = cursor.execute(statement("schema_exists")).fetchone()
        # CREATE SCHEMA asks for the right to create even where the schema exists, so it isn't asked then.
        if state and not state["schema"]:
            cursor.execute("CREATE SCHEMA leasedjob")
        cursor.execute(
            """
            CREATE TABLE IF NOT EXISTS leasedjob.schema_migration (
                version    integer PRIMARY KEY,
                name       text NOT NULL,
                applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
                checksum   text NOT NULL
            )
            """
        )


def install_schema(connection: Connection[Any]) -> list[Migration]:
    """`migrate`, by the name that a library user looks for."""
    return migrate(connection)
