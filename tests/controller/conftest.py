"""One control plane and one PostgreSQL for all tests here; a namespace, a database and a cluster name for each."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from leasedjob.lease.migrate import migrate
from leasedjob.testing.postgres import PostgresServer
from tests.controller.control_plane import Bench, ControlPlane


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    plane = ControlPlane(tmp_path_factory.mktemp("control-plane"))
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        with psycopg.connect(server.create_database("migrated"), autocommit=True) as connection:
            migrate(connection)
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A failure shows what the operators logged."""
    report = yield
    bench = getattr(item, "funcargs", {}).get("bench")
    if report.when == "call" and report.failed and bench is not None:
        for operator in bench.operators:
            if operator.log.exists():
                report.sections.append((f"log of operator {operator.name}", operator.tail(60)))
    return report


@pytest.fixture
def bench(plane: ControlPlane, postgres: PostgresServer, tmp_path: Path) -> Iterator[Bench]:
    name = f"t_{uuid4().hex[:12]}"
    postgres.create_database(name, template="migrated")
    bench = Bench(plane, postgres, name, tmp_path, cluster=name)
    try:
        yield bench
    finally:
        bench.close()
        postgres.drop_database(name)
