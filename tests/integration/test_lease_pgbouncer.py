"""The stores and the service behind PgBouncer in transaction mode: nothing depends on a session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from uuid import uuid4

import psycopg
import pytest
from tests.pooler import PGBOUNCER, pooled

from leasedjob.lease import JobAcquireOptions, JobExecutionLease, JobSchedulerService
from leasedjob.lease.database import Credentials, connect_async, connect_sync, operator_pool
from leasedjob.lease.migrate import migrate
from leasedjob.lease.rows import AdoptVerdict, Outcome
from leasedjob.lease.store import OperatorStore, SidecarStore
from leasedjob.lease.tenants import Slot, ensure_tenant, role_name, tenant_of

from .conftest import CLUSTER, NAMESPACE, OWNER, OWNER_PASSWORD, Database, claimed, registered

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(PGBOUNCER is None, reason="PgBouncer is not installed"),
]
POOL_SIZE = 2
SIDECARS = 20
TENANT_PASSWORD = "tenant"


@pytest.fixture
async def through(database: Database) -> AsyncIterator[Credentials]:
    """Credentials of the owner through a running pooler; the tenant of CLUSTER and NAMESPACE can log in, too."""
    direct = await connect_async(database.credentials)
    tenant = await ensure_tenant(direct, CLUSTER, NAMESPACE, password=TENANT_PASSWORD)
    await direct.close()
    users = {OWNER: OWNER_PASSWORD, tenant.role: TENANT_PASSWORD}
    with pooled(database.server, database.name, users, size=POOL_SIZE) as port:
        yield Credentials.from_conninfo(database.dsn, port=str(port))


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
