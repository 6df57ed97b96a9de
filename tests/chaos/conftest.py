"""A durable PostgreSQL for each test process, and a database with schema, judge's trigger and sink for each test."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from leasedjob.lease.migrate import migrate
from leasedjob.testing.postgres import PostgresServer
from tests.chaos.arena import install_judges

OWNER = "leasedjob_owner"
PASSWORD = "owner"
TEMPLATE = "chaos_template"
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Arena:
    """One run's database."""

    server: PostgresServer
    name: str

    @property
    def dsn(self) -> str:
        return self.server.conninfo(self.name, OWNER, PASSWORD)

    def through(self, port: int) -> str:
        """The same by another port."""
        return f"{self.dsn} port={port}"

    def patch(self, function: str, old: str, new: str) -> None:
        """Replaces text in a function of this database, whatever its parameters: the product with a mistake."""
        query = """
            SELECT pg_get_functiondef(p.oid) FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
             WHERE n.nspname || '.' || p.proname = %s"""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            found = [text for (text,) in connection.execute(query, (function,)) if old in text]
            assert len(found) == 1, f"{function} has no such text any more, or more than one: {old}"
            connection.execute(found[0].replace(old, new).encode())


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    """fsync and synchronous_commit are on."""
    other = os.environ.get("LEASEDJOB_TEST_POSTGRES_BIN")
    settings = {"max_connections": "400"}
    with PostgresServer(bin=Path(other) if other else None, durable=True, settings=settings) as running:
        running.create_owner(OWNER, PASSWORD)
        running.create_database(TEMPLATE, owner=OWNER)
        with psycopg.connect(running.conninfo(TEMPLATE, OWNER, PASSWORD), autocommit=True) as connection:
            row = connection.execute("SHOW synchronous_commit").fetchone()
            assert row == ("on",)
            migrate(connection)
            install_judges(connection)
        yield running


@pytest.fixture
def arena(server: PostgresServer) -> Iterator[Arena]:
    name = f"chaos_{os.getpid()}_{next(_numbers)}"
    server.create_database(name, template=TEMPLATE, owner=OWNER)
    yield Arena(server, name)
    server.drop_database(name)
