"""What a tenant's credential and token can do, and all that it can't (G8).

A tenant is one namespace of one cluster. `shop` attacks, `bank` is attacked; both belong to the same database.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from leasedjob.errors import DatabaseRefusedError, DatabaseUnavailableError
from leasedjob.lease.database import Credentials, connect_async, connect_sync
from leasedjob.lease.rows import AdoptVerdict, Beat, Outcome
from leasedjob.lease.store import OperatorStore, SidecarStore
from leasedjob.lease.tenants import Slot, TenantRole, drop_slot, ensure_tenant, role_name, tenant_of, tenant_roles

from .conftest import CLUSTER, Database, claimed, registered

pytestmark = pytest.mark.integration
LOST = Beat(held=False, stop_requested=False, busy=False)
PASSWORD = "correct horse battery staple"


@dataclass
class Tenant:
    """A tenant's role, a session of it, and a run that it holds."""

    role: TenantRole
    dsn: str
    session: psycopg.Connection[dict[str, object]]
    id: UUID
    claim_token: UUID
    token: UUID

    @property
    def sidecar(self) -> SidecarStore:
        return SidecarStore(self.session)


async def make_tenant(database: Database, namespace: str, *, slot: Slot = Slot.A, limit: int = 20) -> TenantRole:
    connection = await connect_async(database.credentials)
    try:
        return await ensure_tenant(connection, CLUSTER, namespace, password=PASSWORD, slot=slot, connection_limit=limit)
    finally:
        await connection.close()


def login(database: Database, role: str, password: str = PASSWORD) -> psycopg.Connection[dict[str, object]]:
    connection = connect_sync(Credentials.from_conninfo(database.server.conninfo(database.name, role, password)))
    database.opened.append(connection)
    return connection


async def tenant_with_run(database: Database, store: OperatorStore, namespace: str, tick: datetime) -> Tenant:
    role = await make_tenant(database, namespace)
    code = f"{namespace}/job"
    await registered(store, code, namespace=namespace)
    result = await claimed(store, tick, code=code, namespace=namespace, tenant=tenant_of(CLUSTER, namespace))
    assert result.id is not None
    assert result.owner_token is not None
    session = login(database, role.role)
    return Tenant(
        role,
        database.server.conninfo(database.name, role.role, PASSWORD),
        session,
        result.id,
        result.owner_token,
        uuid4(),
    )


@pytest.fixture
async def shop(database: Database, store: OperatorStore, minute: datetime) -> Tenant:
    tenant = await tenant_with_run(database, store, "shop", minute)
    answer = tenant.sidecar.adopt(tenant.id, tenant.claim_token, tenant.token, pod_uid="shop-1", pod_name="shop-1")
    assert answer.verdict is AdoptVerdict.ADOPTED
    return tenant


@pytest.fixture
async def bank(database: Database, store: OperatorStore, minute: datetime) -> Tenant:
    return await tenant_with_run(database, store, "bank", minute)


# --- what it can do --------------------------------------------------------------------------------------------------


def test_a_tenant_adopts_beats_and_finishes_its_own_run(shop: Tenant, database: Database) -> None:
    assert shop.sidecar.heartbeat(shop.id, shop.token) == Beat(held=True, stop_requested=False, busy=False)
    assert shop.sidecar.finish(shop.id, shop.token, Outcome.COMPLETE, {"rows": 1})
    assert database.row(shop.id)["status"] == "SUCCESS"


async def test_both_slots_work_until_one_is_dropped(shop: Tenant, database: Database) -> None:
    second = await make_tenant(database, "shop", slot=Slot.B)
    assert second.role != shop.role.role
    assert Slot.A.other is second.slot
    session = login(database, second.role)
    for one in (shop.session, session):
        assert SidecarStore(one).heartbeat(shop.id, shop.token).held

    connection = await connect_async(database.credentials)
    assert await tenant_roles(connection, CLUSTER, "shop") == sorted([shop.role.role, second.role])
    assert await drop_slot(connection, CLUSTER, "shop", Slot.A)
    assert not await drop_slot(connection, CLUSTER, "shop", Slot.A)
    assert await tenant_roles(connection, CLUSTER, "shop") == [second.role]
    await connection.close()

    with pytest.raises((DatabaseRefusedError, psycopg.Error)):
        shop.sidecar.heartbeat(shop.id, shop.token)
    assert SidecarStore(session).heartbeat(shop.id, shop.token).held
    with pytest.raises(DatabaseRefusedError):
        login(database, shop.role.role)


async def test_many_tenants_at_once_all_get_their_role(database: Database) -> None:
    """Two replicas, ten namespaces, all in the same second: the grants change the same rows of the catalogue."""
    names = [f"team-{n}" for n in range(10)] * 2
    roles = await asyncio.gather(*(make_tenant(database, name) for name in names))
    assert len({role.role for role in roles}) == 10


async def test_ensure_again_sets_the_new_password(database: Database) -> None:
    role = await make_tenant(database, "shop")
    connection = await connect_async(database.credentials)
    again = await ensure_tenant(connection, CLUSTER, "shop", password="another")
    await connection.close()
    assert again == role
    with pytest.raises(DatabaseRefusedError, match="refused the login"):
        login(database, role.role)
    login(database, role.role, "another").execute("SELECT 1")


async def test_many_replicas_ensure_one_tenant_at_once(database: Database) -> None:
    roles = await asyncio.gather(*(make_tenant(database, "shop", slot=slot) for slot in (Slot.A, Slot.B) * 4))
    assert {role.role for role in roles} == {role_name(database.name, "east/shop", slot) for slot in Slot}
    login(database, roles[0].role).execute("SELECT 1")


async def test_the_password_reaches_the_server_only_as_its_verifier(database: Database) -> None:
    database.server.execute(
        sql.SQL("ALTER DATABASE {} SET log_statement = 'all'").format(sql.Identifier(database.name))
    )
    await make_tenant(database, "shop")
    log = database.server.log
    assert "SCRAM-SHA-256$" in log
    assert PASSWORD not in log


def test_the_owner_is_no_superuser(database: Database) -> None:
    (row,) = database.rows("SELECT rolsuper, rolcreaterole FROM pg_roles WHERE rolname = current_user")
    assert row == {"rolsuper": False, "rolcreaterole": True}


def test_role_names_differ_by_database_tenant_and_slot() -> None:
    names = {
        role_name(database, tenant, slot)
        for database in ("one", "two")
        for tenant in ("east/shop", "west/shop", "east/bank")
        for slot in Slot
    }
    assert len(names) == 12
    assert all(len(name) <= 63 for name in names)


# --- another tenant's run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["claim", "own"])
def test_another_tenants_claim_is_refused_even_with_its_token(
    shop: Tenant, bank: Tenant, database: Database, token: str
) -> None:
    before = database.row(bank.id)
    shown = bank.claim_token if token == "claim" else shop.token
    answer = shop.sidecar.adopt(bank.id, shown, uuid4(), pod_uid="shop-2", pod_name="shop-2")
    assert answer.verdict is AdoptVerdict.REFUSED
    assert (answer.attempt, answer.fencing_token, answer.lock_key) == (None, None, None)
    assert database.row(bank.id) == before


def test_another_tenants_lease_is_neither_extended_nor_finished_with_its_token(
    shop: Tenant, bank: Tenant, database: Database
) -> None:
    bank.sidecar.adopt(bank.id, bank.claim_token, bank.token, pod_uid="b", pod_name="b")
    before = database.row(bank.id)
    for token in (bank.claim_token, bank.token):
        assert shop.sidecar.heartbeat(bank.id, token) == LOST
        for outcome in Outcome:
            assert shop.sidecar.finish(bank.id, token, outcome) is False
    assert database.row(bank.id) == before
    assert bank.sidecar.finish(bank.id, bank.token, Outcome.COMPLETE)
    assert shop.sidecar.finish(bank.id, bank.token, Outcome.COMPLETE) is False


def test_a_transaction_that_stays_open_holds_up_nobody(shop: Tenant, bank: Tenant, database: Database) -> None:
    """A lock on another's row would make its heartbeats late; none is taken for a stranger."""
    bank.sidecar.adopt(bank.id, bank.claim_token, bank.token, pod_uid="b", pod_name="b")
    with shop.session.transaction():
        shop.sidecar.heartbeat(shop.id, shop.token)
        shop.sidecar.heartbeat(bank.id, bank.token)
        shop.sidecar.adopt(bank.id, bank.token, uuid4(), pod_uid="x", pod_name="x")
        shop.sidecar.finish(bank.id, bank.token, Outcome.FAIL)
        assert bank.sidecar.heartbeat(bank.id, bank.token).held


def test_a_wrong_token_locks_nothing_of_ones_own_namespace_either(shop: Tenant, database: Database) -> None:
    other = login(database, shop.role.role)
    with other.transaction():
        SidecarStore(other).heartbeat(shop.id, uuid4())
        SidecarStore(other).adopt(shop.id, uuid4(), uuid4(), pod_uid="x", pod_name="x")
        assert shop.sidecar.heartbeat(shop.id, shop.token).held


async def test_an_open_transaction_of_a_tenant_does_not_hold_up_the_operator(
    shop: Tenant, bank: Tenant, store: OperatorStore, minute: datetime
) -> None:
    with shop.session.transaction():
        assert shop.sidecar.heartbeat(shop.id, shop.token).held
        assert await store.renew_claims(CLUSTER, [shop.id, bank.id]) == {bank.id}
        assert await store.request_stop([shop.id], reason="Cancelled") == set()


# --- everything else that SQL offers is tried in test_tenant_attacks.py -----------------------------------------------


async def test_objects_in_a_tenants_temporary_schema_do_not_mislead_the_functions(
    shop: Tenant, bank: Tenant, database: Database
) -> None:
    """pg_temp is searched last, so a temporary table or function never stands in for a real one."""
    shop.session.execute("CREATE TEMP TABLE job_scheduler (id uuid, tenant text)")
    shop.session.execute("CREATE TEMP TABLE tenant_role (role name, tenant text)")
    shop.session.execute("INSERT INTO tenant_role VALUES (session_user, 'east/bank')")
    shop.session.execute(
        "CREATE FUNCTION pg_temp.may_touch(text) RETURNS boolean LANGUAGE sql RETURN true; SET search_path = pg_temp"
    )
    answer = shop.sidecar.adopt(bank.id, bank.claim_token, uuid4(), pod_uid="x", pod_name="x")
    assert answer.verdict is AdoptVerdict.REFUSED
    assert shop.sidecar.heartbeat(shop.id, shop.token).held


async def test_a_tenants_own_settings_do_not_weaken_the_functions(shop: Tenant, bank: Tenant) -> None:
    for setting in (
        "timezone = 'Pacific/Kiritimati'",
        "datestyle = 'German, DMY'",
        "intervalstyle = 'sql_standard'",
        "row_security = off",
        "quote_all_identifiers = on",
        "enable_indexscan = off",
        "plan_cache_mode = force_generic_plan",
        "transform_null_equals = on",
    ):
        shop.session.execute(f"SET {setting}".encode())
    assert shop.sidecar.heartbeat(shop.id, shop.token).held
    assert shop.sidecar.heartbeat(bank.id, bank.claim_token) == LOST


async def test_a_tenant_that_loses_its_role_loses_its_runs(shop: Tenant, database: Database) -> None:
    database.rows("DELETE FROM leasedjob.tenant_role WHERE role = %s", shop.role.role)
    assert shop.sidecar.heartbeat(shop.id, shop.token) == LOST


async def test_the_connection_limit_is_the_tenants_own(database: Database) -> None:
    limited, other = await make_tenant(database, "shop", limit=2), await make_tenant(database, "bank")
    for _ in range(2):
        login(database, limited.role)
    with pytest.raises(DatabaseUnavailableError, match="connection limit"):
        login(database, limited.role)
    login(database, other.role).execute("SELECT 1")


async def test_the_functions_of_a_tenant_are_exactly_four(database: Database) -> None:
    role = await make_tenant(database, "shop")
    rows = database.rows(
        """
        SELECT p.proname, p.prosecdef, p.proconfig
          FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
         WHERE n.nspname = 'leasedjob' AND has_function_privilege(%s, p.oid, 'EXECUTE')
        """,
        role.role,
    )
    assert {row["proname"] for row in rows} == {"adopt", "heartbeat", "finish", "report_shutdown"}
    for row in rows:
        assert row["prosecdef"]
        assert row["proconfig"] == ["search_path=leasedjob, pg_temp"]


async def test_nothing_of_the_schema_is_public(database: Database) -> None:
    rows = database.rows(
        """
        SELECT p.proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
         WHERE n.nspname = 'leasedjob' AND has_function_privilege('public', p.oid, 'EXECUTE')
        UNION ALL
        SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE n.nspname = 'leasedjob' AND c.relkind IN ('r', 'S') AND has_table_privilege('public', c.oid, 'SELECT')
        """
    )
    assert rows == []


async def test_an_owner_without_createrole_is_told_what_is_missing(database: Database) -> None:
    name = f"plain_{database.name}"
    database.server.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'x'").format(sql.Identifier(name)))
    database.rows(f"GRANT ALL ON SCHEMA leasedjob TO {name}")
    database.rows(f"GRANT ALL ON ALL TABLES IN SCHEMA leasedjob TO {name}")
    connection = await connect_async(Credentials.from_conninfo(database.server.conninfo(database.name, name, "x")))
    with pytest.raises(DatabaseRefusedError, match="permission denied to create role"):
        await ensure_tenant(connection, CLUSTER, "shop", password="y")
    await connection.close()


async def test_a_database_that_denies_connect_to_public(database: Database) -> None:
    database.server.execute(sql.SQL("REVOKE CONNECT ON DATABASE {} FROM PUBLIC").format(sql.Identifier(database.name)))
    role = await make_tenant(database, "shop")
    login(database, role.role).execute("SELECT 1")
    connection = await connect_async(database.credentials)
    assert await drop_slot(connection, CLUSTER, "shop", Slot.A)
    await connection.close()
