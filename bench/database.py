"""A PostgreSQL of its own for a measure, with the schema, as an operator's role sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from leasedjob.lease.database import Credentials
from leasedjob.lease.migrate import migrate
from leasedjob.testing.postgres import PostgresServer

OWNER: Final = "leasedjob_owner"
PASSWORD: Final = "owner"
NAME: Final = "bench"


@dataclass(frozen=True, slots=True)
class Database:
    """The server, and how its owner connects."""

    server: PostgresServer
    dsn: str
    name: str = NAME

    @property
    def credentials(self) -> Credentials:
        return Credentials.from_conninfo(self.dsn)

    @property
    def settings(self) -> dict[str, Any]:
        """What a reader has to know of the server."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:

            def shown(name: str) -> str:
                row = connection.execute(f"SHOW {name}").fetchone()
                return str(row[0]) if row else ""

            return {
                "PostgreSQL": shown("server_version").split()[0],
                **{name: shown(name) for name in ("fsync", "synchronous_commit", "shared_buffers")},
                "transport": "TCP on the loopback, no TLS",
            }

    def ask(self, statement: str, *parameters: Any) -> Any:
        """The first value of the answer."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            row = connection.execute(statement.encode(), parameters or None).fetchone()
            return row[0] if row else None

    def rows(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            return connection.execute(statement.encode(), parameters or None).fetchall()

    @contextlib.contextmanager
    def connected(self) -> Iterator[Callable[..., Any]]:
        """`ask` over one connection, for what is asked often."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:

            def ask(statement: str, *parameters: Any) -> Any:
                row = connection.execute(statement.encode(), parameters or None).fetchone()
                return row[0] if row else None

            yield ask

    def execute(self, statement: str, *parameters: Any) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(statement.encode(), parameters or None)


@contextlib.contextmanager
def database() -> Iterator[Database]:
    """A durable server with an empty schema. Autovacuum is off: it would fall into some turns and not into others."""
    with PostgresServer(durable=True, settings={"autovacuum": "off", "shared_buffers": "128MB"}) as server:
        server.create_owner(OWNER, PASSWORD)
        server.create_database(NAME, owner=OWNER)
        dsn = server.conninfo(NAME, OWNER, PASSWORD)
        with psycopg.connect(dsn, autocommit=True) as connection:
            migrate(connection)
        yield Database(server, dsn)
