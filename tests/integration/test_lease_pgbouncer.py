"""The stores and the service behind PgBouncer in transaction mode: nothing depends on a session.

Needs PgBouncer, which is no Python package: LEASEDJOB_TEST_PGBOUNCER, or `pgbouncer` on the path.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from leasedjob.errors import DatabaseUnavailableError
from leasedjob.lease import JobAcquireOptions, JobExecutionLease, JobSchedulerService
from leasedjob.lease.database import Credentials, connect_async, connect_sync, operator_pool
from leasedjob.lease.migrate import migrate
from leasedjob.lease.rows import AdoptVerdict, Outcome
from leasedjob.lease.store import OperatorStore, SidecarStore
from leasedjob.lease.tenants import Slot, ensure_tenant, role_name, tenant_of

from .conftest import CLUSTER, NAMESPACE, OWNER, OWNER_PASSWORD, Database, claimed, registered

PGBOUNCER = os.environ.get("LEASEDJOB_TEST_PGBOUNCER") or shutil.which("pgbouncer")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(PGBOUNCER is None, reason="PgBouncer is not installed"),
]
POOL_SIZE = 2
SIDECARS = 20
TENANT_PASSWORD = "tenant"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that an unprivileged PgBouncer can read; it refuses to run as root."""
    with tempfile.TemporaryDirectory(prefix="leasedjob-pgbouncer-") as name:
        path = Path(name)
        path.chmod(0o777)
        yield path


@pytest.fixture
async def through(database: Database, folder: Path) -> AsyncIterator[Credentials]:
    """Credentials of the owner through a running pooler; the tenant of CLUSTER and NAMESPACE can log in, too."""
    assert PGBOUNCER is not None
    direct = await connect_async(database.credentials)
    tenant = await ensure_tenant(direct, CLUSTER, NAMESPACE, password=TENANT_PASSWORD)
    await direct.close()
    (folder / "users").write_text(f'"{OWNER}" "{OWNER_PASSWORD}"\n"{tenant.role}" "{TENANT_PASSWORD}"\n')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "auth_type": "scram-sha-256",
        "auth_file": folder / "users",
        "pool_mode": "transaction",
        "default_pool_size": POOL_SIZE,
        "unix_socket_dir": "",
        "logfile": folder / "log",
    }
    (folder / "ini").write_text(
        f"[databases]\n{database.name} = host={database.server.address} port={database.server.port} "
        f"dbname={database.name}\n[pgbouncer]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())
    )
    unprivileged: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    process = await asyncio.to_thread(
        subprocess.Popen, [PGBOUNCER, "-q", str(folder / "ini")], stderr=subprocess.DEVNULL, **unprivileged
    )
    credentials = Credentials.from_conninfo(database.dsn, port=str(port))
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                await (await connect_async(credentials)).close()
                break
            except DatabaseUnavailableError:
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)  # it tells nobody when it listens
        yield credentials
    finally:
        process.terminate()
        process.wait(timeout=10)


async def test_the_path_of_many_runs_over_two_server_connections(
    through: Credentials, database: Database, minute: datetime
) -> None:
    role = role_name(database.name, tenant_of(CLUSTER, NAMESPACE), Slot.A)
    async with operator_pool(through, max_size=10) as pool:
        store = OperatorStore(pool.connection)
        codes = [f"{NAMESPACE}/job-{n}" for n in range(SIDECARS)]
        await registered(store, *codes)
        claims = await asyncio.gather(*(claimed(store, minute, code=code) for code in codes))
        tenant = Credentials.from_conninfo(through.conninfo(), user=role, password=TENANT_PASSWORD)
        connections = [connect_sync(tenant) for _ in claims]
        held = []
        for claim, connection in zip(claims, connections, strict=True):
            assert claim.id is not None
            assert claim.owner_token is not None
            token = uuid4()
            answer = SidecarStore(connection).adopt(
                claim.id, claim.owner_token, token, pod_uid=str(token), pod_name="pod"
            )
            assert answer.verdict is AdoptVerdict.ADOPTED
            held.append((SidecarStore(connection), claim.id, token))
        for _ in range(5):
            for sidecar, id, token in held:
                assert sidecar.heartbeat(id, token).held
        for connection in connections[:5]:
            connection.close()  # as a killed sidecar would
        for sidecar, id, token in held[5:]:
            assert sidecar.finish(id, token, Outcome.COMPLETE)
        assert len(await store.active_rows(CLUSTER)) == 5
        for connection in connections[5:]:
            connection.close()


async def test_the_library_and_the_migrations(through: Credentials) -> None:
    async with operator_pool(through, max_size=10) as pool:
        service = JobSchedulerService(pool.connection)

        async def work(lease: JobExecutionLease) -> int:
            return lease.attempt

        outcomes = await asyncio.gather(
            *(service.run_exclusive(JobAcquireOptions(code="x", run_key=str(n // 3)), work) for n in range(30))
        )
        assert sum(outcome.acquired for outcome in outcomes) == 10
    with psycopg.connect(through.conninfo(), autocommit=True, prepare_threshold=None) as connection:
        assert migrate(connection) == []
