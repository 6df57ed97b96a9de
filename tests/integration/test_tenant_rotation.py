"""The two slots of a tenant on a real server: one current, one on its way out, and no way back for a late replica."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from uuid import uuid4

import psycopg
import pytest

from leasedjob.errors import DatabaseRefusedError, DatabaseUnavailableError
from leasedjob.lease.database import Credentials, connect_async, connect_sync
from leasedjob.lease.rows import AdoptVerdict
from leasedjob.lease.store import OperatorStore, SidecarStore
from leasedjob.lease.tenants import (
    Slot,
    ensure_tenant,
    retire_slot,
    role_name,
    switch_slot,
    tenant_of,
    tenant_state,
    tenants_with_news,
)

from .conftest import CLUSTER, NAMESPACE, Database, claimed, registered

pytestmark = pytest.mark.integration
AT_ONCE = timedelta(0)
LATER = timedelta(minutes=10)
DAY = timedelta(days=1)
Connection = psycopg.AsyncConnection[dict[str, object]]


@pytest.fixture
async def owner(database: Database) -> AsyncIterator[Connection]:
    connection = await connect_async(database.credentials)
    yield connection  # type: ignore[misc]
    await connection.close()


def login(database: Database, slot: Slot, password: str) -> psycopg.Connection[dict[str, object]]:
    role = role_name(database.name, tenant_of(CLUSTER, NAMESPACE), slot)
    connection = connect_sync(Credentials.from_conninfo(database.server.conninfo(database.name, role, password)))
    database.opened.append(connection)
    return connection


async def ensure(owner: Connection, slot: Slot, password: str, **more: object) -> None:
    await ensure_tenant(owner, CLUSTER, NAMESPACE, slot=slot, password=password, **more)  # type: ignore[arg-type]


async def test_a_whole_rotation_with_a_lease_that_is_held_throughout(
    owner: Connection, database: Database, store: OperatorStore, minute: datetime
) -> None:
    first = await tenant_state(owner, CLUSTER, NAMESPACE)
    assert (first.slot, first.overlapping, first.in_force) == (Slot.A, False, frozenset())
    await ensure(owner, Slot.A, "one", decided_on=first)
    await registered(store)
    run = await claimed(store, minute)
    assert run.id is not None
    assert run.owner_token is not None
    token = uuid4()
    old = login(database, Slot.A, "one")
    answer = SidecarStore(old).adopt(run.id, run.owner_token, token, pod_uid="p", pod_name="p")
    assert answer.verdict is AdoptVerdict.ADOPTED

    first = await tenant_state(owner, CLUSTER, NAMESPACE)
    await ensure(owner, Slot.B, "two", decided_on=first)
    first = await tenant_state(owner, CLUSTER, NAMESPACE)
    assert await switch_slot(owner, CLUSTER, NAMESPACE, overlap=AT_ONCE, decided_on=first)
    second = await tenant_state(owner, CLUSTER, NAMESPACE)
    assert (second.slot, second.in_force) == (Slot.B, frozenset(Slot))
    assert second.overlapping
    assert second.retirable
    new = login(database, Slot.B, "two")
    for session in (old, new):
        assert SidecarStore(session).heartbeat(run.id, token).held

    assert await retire_slot(owner, CLUSTER, NAMESPACE)
    # Its session was ended, which a sidecar takes for "try again": never for "not yours".
    with pytest.raises(DatabaseUnavailableError, match="ended by an administrator"):
        SidecarStore(old).heartbeat(run.id, token)
    with pytest.raises(DatabaseRefusedError):
        login(database, Slot.A, "one")
    assert SidecarStore(new).heartbeat(run.id, token).held
    last = await tenant_state(owner, CLUSTER, NAMESPACE)
    assert (last.slot, last.overlapping, last.in_force) == (Slot.B, False, frozenset({Slot.B}))
    assert last.age >= second.age


async def test_the_former_slot_works_until_its_time_is_over(owner: Connection, database: Database) -> None:
    state = await tenant_state(owner, CLUSTER, NAMESPACE)
    await ensure(owner, Slot.A, "one")
    await ensure(owner, Slot.B, "two")
    assert await switch_slot(owner, CLUSTER, NAMESPACE, overlap=LATER, decided_on=state)
    assert await retire_slot(owner, CLUSTER, NAMESPACE), "there is nothing to do yet"
    login(database, Slot.A, "one").execute("SELECT 1")
    state = await tenant_state(owner, CLUSTER, NAMESPACE)
    assert state.overlapping
    assert not state.retirable
    assert state.in_force == frozenset(Slot)


async def test_a_replica_that_was_held_up_undoes_nothing(owner: Connection, database: Database) -> None:
    """It saw slot a as the current one, was frozen, and goes on when slot b is current and slot a is disabled."""
    seen = await tenant_state(owner, CLUSTER, NAMESPACE)
    await ensure(owner, Slot.A, "one")
    await ensure(owner, Slot.B, "two", decided_on=seen)
    with pytest.raises(DatabaseUnavailableError, match="changed meanwhile"):
        await ensure(owner, Slot.B, "another password for it", decided_on=seen)
    now = await tenant_state(owner, CLUSTER, NAMESPACE)
    assert await switch_slot(owner, CLUSTER, NAMESPACE, overlap=AT_ONCE, decided_on=now)
    assert await retire_slot(owner, CLUSTER, NAMESPACE)
    for slot in Slot:
        with pytest.raises(DatabaseUnavailableError, match="changed meanwhile") as caught:
            await ensure(owner, slot, "late", decided_on=seen)
        assert caught.value.kind == "busy"
        assert not await switch_slot(owner, CLUSTER, NAMESPACE, overlap=AT_ONCE, decided_on=seen)
    with pytest.raises(DatabaseRefusedError):
        login(database, Slot.A, "late")
    login(database, Slot.B, "two").execute("SELECT 1")


async def test_the_slots_go_round(owner: Connection, database: Database) -> None:
    for number, slot in enumerate((Slot.B, Slot.A, Slot.B)):
        state = await tenant_state(owner, CLUSTER, NAMESPACE)
        assert state.slot is slot.other
        await ensure(owner, slot, f"password {number}", decided_on=state)
        state = await tenant_state(owner, CLUSTER, NAMESPACE)
        assert await switch_slot(owner, CLUSTER, NAMESPACE, overlap=AT_ONCE, decided_on=state)
        assert await retire_slot(owner, CLUSTER, NAMESPACE)
        login(database, slot, f"password {number}").execute("SELECT 1")
        with pytest.raises(DatabaseRefusedError):
            login(database, slot.other, f"password {number - 1}")


async def test_a_session_that_makes_objects_does_not_hold_up_its_end(owner: Connection, database: Database) -> None:
    """Temporary tables and large objects belong to the role; it is disabled, not dropped, so they hold up nothing."""
    state = await tenant_state(owner, CLUSTER, NAMESPACE)
    await ensure(owner, Slot.A, "one")
    session = login(database, Slot.A, "one")
    session.execute("CREATE TEMP TABLE mine (x int)")
    session.execute("SELECT lo_create(0)")
    session.execute("SET statement_timeout = 0")
    await ensure(owner, Slot.B, "two")
    assert await switch_slot(owner, CLUSTER, NAMESPACE, overlap=AT_ONCE, decided_on=state)
    assert await retire_slot(owner, CLUSTER, NAMESPACE)
    with pytest.raises(psycopg.OperationalError):
        session.execute("SELECT 1")


async def test_who_has_news(owner: Connection, database: Database) -> None:
    async def news(rotate_after: timedelta) -> list[str]:
        return await tenants_with_news(owner, CLUSTER, in_use={NAMESPACE, "bank"}, rotate_after=rotate_after)

    state = await tenant_state(owner, CLUSTER, NAMESPACE)
    await tenant_state(owner, CLUSTER, "bank")
    await tenant_state(owner, f"{CLUSTER}/west", NAMESPACE)  # a cluster whose name begins like ours
    await tenant_state(owner, "other", NAMESPACE)
    assert await news(DAY) == []
    database.rows(
        "UPDATE leasedjob.tenant SET slot_since = slot_since - interval '25 hours' WHERE tenant <> %s",
        tenant_of(CLUSTER, "bank"),
    )
    assert await news(DAY) == [NAMESPACE]
    assert await news(timedelta(0)) == [], "rotation is off"

    state = await tenant_state(owner, CLUSTER, NAMESPACE)
    assert state.age > DAY
    assert await switch_slot(owner, CLUSTER, NAMESPACE, overlap=LATER, decided_on=state)
    assert await news(timedelta(milliseconds=1)) == ["bank"], "not again while the former slot still works"
    database.rows("UPDATE leasedjob.tenant SET retire_at = clock_timestamp() WHERE retire_at IS NOT NULL")
    assert await news(timedelta(0)) == [NAMESPACE], "what was begun is brought to its end"
    assert await retire_slot(owner, CLUSTER, NAMESPACE)
    assert await news(timedelta(0)) == []


async def test_a_namespace_that_nobody_uses_has_news_while_its_old_credential_works(
    owner: Connection, database: Database, store: OperatorStore, minute: datetime
) -> None:
    async def news() -> list[str]:
        return await tenants_with_news(owner, CLUSTER, in_use=(), rotate_after=DAY)

    await tenant_state(owner, CLUSTER, NAMESPACE)
    database.rows("UPDATE leasedjob.tenant SET slot_since = slot_since - interval '25 hours'")
    assert await news() == [], "it has no credential"
    await ensure(owner, Slot.A, "one")
    await registered(store)
    run = await claimed(store, minute)
    assert await news() == [], "its LeasedJob is gone, but a run of it isn't"
    assert run.id is not None
    assert run.owner_token is not None
    assert await store.release_claim(run.id, run.owner_token, reason="x")
    assert await news() == [NAMESPACE]
    state = await tenant_state(owner, CLUSTER, NAMESPACE)
    assert await switch_slot(owner, CLUSTER, NAMESPACE, overlap=AT_ONCE, decided_on=state)
    assert await retire_slot(owner, CLUSTER, NAMESPACE)
    with pytest.raises(DatabaseRefusedError):
        login(database, Slot.A, "one")
    database.rows("UPDATE leasedjob.tenant SET slot_since = slot_since - interval '25 hours'")
    assert await news() == [], "once is enough"


async def test_a_role_that_somebody_dropped_is_no_obstacle(owner: Connection, database: Database) -> None:
    state = await tenant_state(owner, CLUSTER, NAMESPACE)
    await ensure(owner, Slot.B, "two")
    assert await switch_slot(owner, CLUSTER, NAMESPACE, overlap=AT_ONCE, decided_on=state)
    assert await retire_slot(owner, CLUSTER, NAMESPACE)
    assert not (await tenant_state(owner, CLUSTER, NAMESPACE)).overlapping
