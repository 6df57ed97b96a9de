"""A database that fails over, and one that has no room for everybody: the sidecars wait in their processes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import datetime
from pathlib import Path
from uuid import UUID

import psycopg
import pytest

from leasedjob.lease.database import Credentials, connect_async, connect_sync, operator_pool
from leasedjob.lease.migrate import migrate
from leasedjob.lease.rows import Outcome
from leasedjob.lease.store import OperatorStore, SidecarStore
from leasedjob.lease.tenants import ensure_tenant, tenant_of
from leasedjob.sidecar.adopt import Claim, adopt
from leasedjob.sidecar.link import connector
from leasedjob.sidecar.settings import Settings
from leasedjob.testing.postgres import PostgresServer

from .conftest import CLUSTER, NAMESPACE, OWNER, OWNER_PASSWORD, Database, claimed, registered
from .sidecar_parts import CALM, PASSWORD, Pods, write_credentials

pytestmark = pytest.mark.integration
RUNS = 150
NAMESPACES = 5


@pytest.fixture
async def own(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    """A server of the test's own, with a database and its schema; the parameter: settings."""
    with PostgresServer(settings=getattr(request, "param", None), durable=True) as server:
        server.create_owner(OWNER, OWNER_PASSWORD)
        server.create_database("leasedjob", owner=OWNER)
        database = Database(server, "leasedjob")
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            migrate(connection)
        yield database
        for connection in database.opened:
            connection.close()


async def test_starting_then_read_only_then_promoted(own: Database, tmp_path: Path, minute: datetime) -> None:
    """One Pod holds its lease, one adopts, while what was the primary comes back as a standby that first lets nobody
    in (57P03), then only reads (25006), and is then promoted."""
    server = own.server
    async with operator_pool(own.credentials) as pool:
        pods = Pods(tmp_path, own, OperatorStore(pool.connection))
        await registered(pods.store, f"{NAMESPACE}/held", f"{NAMESPACE}/late")
        pods.user = await pods.tenant()
        held, late = [
            pods.for_claim(await claimed(pods.store, minute, code=code, run_lease_ms=CALM.duration * 1000), CALM)
            for code in (f"{NAMESPACE}/held", f"{NAMESPACE}/late")
        ]
    adopting = None
    try:
        held.adopt_and_hold()
        server.stop()
        (server.directory / "data" / "standby.signal").touch()
        server.settings["hot_standby"] = "off"
        server.start()
        adopting = late.start("adopt")
        _await(lambda: "starting, stopping or failing over" in late.log("adopt"), late.log)
        held.await_view(lambda v: "starting, stopping or failing over" in str(v))

        server.stop()
        server.settings["hot_standby"] = "on"
        server.start()
        _await(lambda: "read-only" in late.log("adopt"), late.log)
        held.await_view(lambda v: "read-only" in str(v))
        assert held.probe() == 200, "the lease is trusted still"

        with psycopg.connect(server.conninfo(own.name), autocommit=True) as connection:
            connection.execute("SELECT pg_promote()")
        assert adopting.wait(30) == 0, late.log("adopt")
        held.await_beats(2, seconds=30)
        assert held.probe() == 200
        row = held.row()
        assert (row["attempt"], row["status"]) == (1, "RUNNING")
        assert late.row()["pod_uid"] == late.uid
    finally:
        if adopting is not None and adopting.poll() is None:
            adopting.kill()
        pods.clean_up()


@pytest.mark.parametrize("own", [{"max_connections": "60", "superuser_reserved_connections": "3"}], indirect=True)
async def test_more_runs_than_connections(own: Database, tmp_path: Path, minute: datetime) -> None:
    """150 runs of five namespaces start in one moment on a server with 60 connections, of which somebody else uses ten:
    nobody else loses one, and all runs finish."""
    server = own.server
    server.execute("CREATE ROLE elsewhere LOGIN PASSWORD 'x'")
    names = [f"team-{n}" for n in range(NAMESPACES)]
    direct = await connect_async(own.credentials)
    roles = {name: (await ensure_tenant(direct, CLUSTER, name, password=PASSWORD)).role for name in names}
    await direct.close()
    for name, role in roles.items():
        write_credentials(tmp_path / name, own, server.port, role, PASSWORD)
    claims = []
    async with operator_pool(own.credentials) as pool:
        store = OperatorStore(pool.connection)
        for n in range(RUNS):
            name = names[n % NAMESPACES]
            await registered(store, f"{name}/job-{n}", namespace=name)
            result = await claimed(
                store, minute, code=f"{name}/job-{n}", namespace=name, tenant=tenant_of(CLUSTER, name)
            )
            claims.append((name, str(result.id), str(result.owner_token)))

    at_once = threading.Barrier(RUNS)
    full = threading.Event()

    def run(name: str, id: str, token: str) -> bool:
        connect = connector(str(tmp_path / name))

        def noticing(seconds: float) -> psycopg.Connection[dict[str, object]]:
            try:
                return connect(seconds)
            except Exception as error:
                if "no free connection" in str(error):
                    full.set()
                raise

        at_once.wait(120)
        claim = Claim(id, token, f"uid-{id}", f"pod-{id}", CALM, 120.0)
        handoff = adopt(claim, Settings(handoff_file=str(tmp_path / f"{id}.json")), noticing)
        while True:  # as `hold` does: one more connection, and another try where there is none
            try:
                with closing(connect(10)) as connection:
                    return SidecarStore(connection).finish(UUID(id), UUID(handoff.token), Outcome.COMPLETE)
            except Exception:
                time.sleep(0.2)

    with ExitStack() as stack:
        others = [
            stack.enter_context(connect_sync(Credentials.from_conninfo(server.conninfo(own.name, "elsewhere", "x"))))
            for _ in range(10)
        ]
        with ThreadPoolExecutor(RUNS) as threads:
            loop = asyncio.get_running_loop()
            done = await asyncio.gather(*(loop.run_in_executor(threads, run, *claim) for claim in claims))
        assert all(done)
        assert full.is_set(), "the server was full"
        for other in others:
            other.execute("SELECT 1")
    states = own.rows("SELECT status, attempt, failures, count(*) FROM leasedjob.job_scheduler GROUP BY 1, 2, 3")
    assert states == [{"status": "SUCCESS", "attempt": 1, "failures": 0, "count": RUNS}]


def _await(probe: Callable[[], bool], log: Callable[[str], str]) -> None:
    until = time.monotonic() + 30
    while not probe():
        assert time.monotonic() < until, log("adopt")
        time.sleep(0.02)  # a file has no signal to wait on
