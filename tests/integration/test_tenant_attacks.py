"""Every attempt of `tenant_attacks`, one after the other, on one database; nobody else is harmed by any of them."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.rows import dict_row

from leasedjob.errors import DatabaseRefusedError
from leasedjob.lease.database import Credentials, connect_async, connect_sync, operator_pool
from leasedjob.lease.rows import AdoptVerdict
from leasedjob.lease.store import OperatorStore, SidecarStore
from leasedjob.lease.tenants import (
    Slot,
    end_overdue_sessions,
    ensure_tenant,
    retire_slot,
    role_name,
    switch_slot,
    tenant_of,
    tenant_state,
)
from leasedjob.testing.postgres import PostgresServer

from . import tenant_attacks
from .conftest import CLUSTER, OWNER, OWNER_PASSWORD, claimed, registered
from .tenant_attacks import GROUPS, Answer, Attack

pytestmark = pytest.mark.integration
PASSWORD = "correct horse battery staple"
_numbers = itertools.count(1)


@dataclass
class Held:
    """A run that a tenant holds, and one that is claimed for it."""

    id: UUID
    token: UUID
    claim: UUID
    claim_token: UUID


@dataclass
class Arena:
    """One database with two tenants, `shop` and `bank`, and the sessions of those who aren't to be disturbed."""

    server: PostgresServer
    name: str
    owner: psycopg.Connection[Any]
    shop: Held
    bank: Held
    shop_session: psycopg.Connection[Any]
    bank_session: psycopg.Connection[Any]

    @property
    def credentials(self) -> Credentials:
        """Of the operator."""
        return Credentials.from_conninfo(self.server.conninfo(self.name, OWNER, OWNER_PASSWORD))

    def role(self, namespace: str, slot: Slot = Slot.A) -> str:
        return role_name(self.name, tenant_of(CLUSTER, namespace), slot)

    def login(self, namespace: str, slot: Slot = Slot.A, password: str = PASSWORD) -> psycopg.Connection[Any]:
        return connect_sync(
            Credentials.from_conninfo(self.server.conninfo(self.name, self.role(namespace, slot), password))
        )

    def row(self, held: Held) -> dict[str, Any]:
        with self.owner.cursor(row_factory=dict_row) as cursor:
            row = cursor.execute("SELECT * FROM leasedjob.job_scheduler WHERE id = %s", (held.id,)).fetchone()
        assert row is not None
        return {k: v for k, v in row.items() if k != "modified_at"}

    def unharmed(self, before: dict[str, Any]) -> None:
        """The other tenant holds what it held, beats, and can log in; the operator's statements work."""
        assert self.row(self.bank) == before
        assert SidecarStore(self.bank_session).heartbeat(self.bank.id, self.bank.token).held
        self.login("bank").close()
        renewed = self.owner.execute("SELECT leasedjob.renew_claims(%s, %s)", (CLUSTER, [self.bank.claim])).fetchone()
        assert renewed == ([self.bank.claim],)

    def words(self) -> dict[str, str]:
        """What the words in capitals stand for; longer ones first."""
        return {
            "BANK_CLAIM_TOKEN": str(self.bank.claim_token),
            "BANK_CLAIM": str(self.bank.claim),
            "BANK_ID": str(self.bank.id),
            "BANK_TOKEN": str(self.bank.token),
            "BANK_ROLE": self.role("bank"),
            "BANK_PID": str(self.bank_session.info.backend_pid),
            "OPERATOR_PID": str(self.owner.info.backend_pid),
            "OWN_ID": str(self.shop.id),
            "OWN_TOKEN": str(self.shop.token),
            "OWN_ROLE": self.role("shop"),
            "OTHER_SLOT": self.role("shop", Slot.B),
            "OWNER": OWNER,
        }


async def _tenants(credentials: Credentials) -> dict[str, Held]:
    """Makes the tenants' roles; for each a lease that is adopted below, and a claim."""
    connection = await connect_async(credentials)
    for namespace, slot in (("shop", Slot.A), ("shop", Slot.B), ("bank", Slot.A)):
        await ensure_tenant(connection, CLUSTER, namespace, password=PASSWORD, slot=slot)
    await connection.close()
    tick = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=10)
    held = {}
    async with operator_pool(credentials) as pool:
        store = OperatorStore(pool.connection)
        for namespace in ("shop", "bank"):
            claims = []
            for job in ("held", "claimed"):
                code = f"{namespace}/{job}"
                await registered(store, code, namespace=namespace)
                claims.append(
                    await claimed(store, tick, code=code, namespace=namespace, tenant=tenant_of(CLUSTER, namespace))
                )
            first, second = claims
            assert first.id is not None
            assert first.owner_token is not None
            assert second.id is not None
            assert second.owner_token is not None
            held[namespace] = Held(first.id, first.owner_token, second.id, second.owner_token)
    return held


@pytest.fixture(scope="module")
def arena(server: PostgresServer, template: str) -> Iterator[Arena]:
    name = f"arena_{os.getpid()}_{next(_numbers)}"
    server.create_database(name, template=template, owner=OWNER)
    dsn = server.conninfo(name, OWNER, OWNER_PASSWORD)
    held = asyncio.run(_tenants(Credentials.from_conninfo(dsn)))
    owner = psycopg.connect(dsn, autocommit=True)
    owner.execute("UPDATE leasedjob.job_scheduler SET lease_ms = 3600000")  # on a busy machine this may take a while
    arena = Arena(server, name, owner, held["shop"], held["bank"], owner, owner)
    arena.shop_session, arena.bank_session = arena.login("shop"), arena.login("bank")
    for session, mine in ((arena.shop_session, arena.shop), (arena.bank_session, arena.bank)):
        token = uuid4()
        answer = SidecarStore(session).adopt(mine.id, mine.token, token, pod_uid=str(token), pod_name="pod")
        assert answer.verdict is AdoptVerdict.ADOPTED
        mine.token = token
    yield arena
    for session in (arena.shop_session, arena.bank_session, owner):
        session.close()
    server.drop_database(name)


ATTEMPTS = [
    pytest.param(attack, id=f"{group}: {attack.title}")
    for group, attacks in GROUPS.items()
    for attack in attacks
    if attack.sql and not attack.own
]
ON_ITSELF = [pytest.param(attack, id=attack.title) for attacks in GROUPS.values() for attack in attacks if attack.own]


def attempt(arena: Arena, session: psycopg.Connection[Any], attack: Attack) -> None:
    """Makes the attempt and checks that it is answered as the list says."""
    *before, last = attack.sql
    for word, value in arena.words().items():
        before = [text.replace(word, value) for text in before]
        last = last.replace(word, value)
    for text in before:
        session.execute(text.encode())
    if attack.answer is Answer.REFUSED:
        with pytest.raises(psycopg.Error) as caught:
            session.execute(last.encode())
        assert caught.value.sqlstate == attack.state, caught.value
        return
    cursor = session.execute(last.encode())
    if attack.gives is not None:
        row = cursor.fetchone()
        assert row is not None
        assert tuple(row.values()) == attack.gives


@pytest.mark.parametrize("attack", ATTEMPTS)
def test_attempt(arena: Arena, attack: Attack) -> None:
    before = arena.row(arena.bank)
    with arena.login("shop") as session:
        attempt(arena, session, attack)
        arena.unharmed(before)
        session.rollback()
    assert SidecarStore(arena.shop_session).heartbeat(arena.shop.id, arena.shop.token).held


@pytest.mark.parametrize("attack", ON_ITSELF)
def test_what_it_does_to_itself_hurts_nobody_else_and_heals(arena: Arena, attack: Attack) -> None:
    before = arena.row(arena.bank)
    with arena.login("shop", Slot.A) as session:
        attempt(arena, session, attack)
        arena.unharmed(before)

    async def heal() -> None:
        connection = await connect_async(arena.credentials)
        await ensure_tenant(connection, CLUSTER, "shop", password=PASSWORD)
        await connection.close()

    asyncio.run(heal())
    with arena.login("shop") as session:
        assert session.execute("SHOW default_transaction_isolation").fetchone() == {
            "default_transaction_isolation": "read committed"
        }


@pytest.mark.parametrize("how", ["sleeps", "stays open", "keeps its own row locked"])
def test_a_transaction_that_stays_open_is_ended(arena: Arena, how: str) -> None:
    """Whatever the session has set for itself; a session that is merely idle is left alone."""
    session, idle = arena.login("shop"), arena.login("shop")
    pid = session.info.backend_pid
    for setting in ("statement_timeout", "idle_in_transaction_session_timeout", "lock_timeout"):
        session.execute(f"SET {setting} = 0".encode())
    session.autocommit = False
    if how == "keeps its own row locked":
        SidecarStore(session).adopt(arena.shop.claim, arena.shop.claim_token, uuid4(), pod_uid="x", pod_name="x")
    elif how == "stays open":
        session.execute("SELECT count(*) FROM pg_class")
    else:
        session.pgconn.send_query(b"SELECT pg_sleep(1000000)")

    def sessions() -> int:
        row = arena.owner.execute("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", (pid,)).fetchone()
        assert row is not None
        return int(row[0])

    async def end(longest: timedelta) -> list[str]:
        connection = await connect_async(arena.credentials)
        try:
            return await end_overdue_sessions(connection, longest=longest)
        finally:
            await connection.close()

    assert asyncio.run(end(timedelta(minutes=1))) == [], "a minute is allowed"
    assert sessions() == 1
    for _ in range(1000):
        if arena.role("shop") in asyncio.run(end(timedelta(0))):
            break  # a statement that was just sent may not have begun
        arena.owner.execute("SELECT pg_sleep(0.01)")
    for _ in range(6000):
        if not sessions():
            break
        arena.owner.execute("SELECT pg_sleep(0.01)")
    assert not sessions()
    session.close()
    idle.execute("SELECT 1")
    idle.close()
    arena.unharmed(arena.row(arena.bank))


def test_a_rotated_password_opens_nothing(arena: Arena) -> None:
    """As the operator does it, in a namespace of its own; test_tenant_rotation.py has the details."""

    async def rotate() -> None:
        connection = await connect_async(arena.credentials)
        await ensure_tenant(connection, CLUSTER, "rotated", password=PASSWORD, slot=Slot.A)
        await ensure_tenant(connection, CLUSTER, "rotated", password="new", slot=Slot.B)
        state = await tenant_state(connection, CLUSTER, "rotated")
        assert await switch_slot(connection, CLUSTER, "rotated", overlap=timedelta(0), decided_on=state)
        assert await retire_slot(connection, CLUSTER, "rotated")
        await connection.close()

    asyncio.run(rotate())
    with pytest.raises(DatabaseRefusedError):
        arena.login("rotated")
    arena.login("rotated", Slot.B, "new").close()


def test_the_pages_advice_closes_what_it_says(server: PostgresServer, template: str) -> None:
    name = f"advised_{os.getpid()}_{next(_numbers)}"
    server.create_database(name, template=template, owner=OWNER)
    advice = tenant_attacks.HEAD.partition("```sql\n")[2].partition("```")[0]
    with psycopg.connect(server.conninfo(name), autocommit=True) as superuser:
        for line in advice.splitlines():
            if line.startswith(("REVOKE", "GRANT")):  # the rest is the whole server's
                line = line.replace("DATABASE leasedjob", f"DATABASE {name}").replace("TO leasedjob ", f"TO {OWNER} ")
                superuser.execute(line.encode())
    credentials = Credentials.from_conninfo(server.conninfo(name, OWNER, OWNER_PASSWORD))
    held = asyncio.run(_tenants(credentials))["shop"]
    role = role_name(name, tenant_of(CLUSTER, "shop"), Slot.A)
    with connect_sync(Credentials.from_conninfo(server.conninfo(name, role, PASSWORD))) as session:
        answer = SidecarStore(session).adopt(held.id, held.token, uuid4(), pod_uid="x", pod_name="x")
        assert answer.verdict is AdoptVerdict.ADOPTED
        for closed in ("CREATE TEMP TABLE mine (x int)", "SELECT lo_create(0)", "SELECT lo_from_bytea(0, '')"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                session.execute(closed.encode())
    server.drop_database(name)


def test_the_page_says_what_was_tried() -> None:
    assert tenant_attacks.PAGE.read_text() == tenant_attacks.page(), "run python -m tests.integration.tenant_attacks"


def test_the_tests_that_the_list_names_exist() -> None:
    here = Path(__file__).parent
    text = "".join((here / name).read_text() for name in ("test_tenants.py", Path(__file__).name))
    named = [attack.test for attacks in GROUPS.values() for attack in attacks if attack.test]
    assert [name for name in named if f"def {name}(" not in text] == []


def test_whatever_else_a_migration_adds_is_refused(arena: Arena) -> None:
    """Every table, view, sequence and function of the schema, listed or not; the four functions of a tenant apart."""
    rights = """
        SELECT p.oid::regprocedure::text AS name, has_function_privilege(p.oid, 'EXECUTE') AS open
          FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
         WHERE n.nspname = 'leasedjob' AND p.proname NOT IN ('adopt', 'heartbeat', 'finish', 'report_shutdown')
        UNION ALL
        SELECT c.relname, has_table_privilege(c.oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
          FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE n.nspname = 'leasedjob' AND c.relkind IN ('r', 'v', 'm')
        UNION ALL
        SELECT c.relname, has_sequence_privilege(c.oid, 'USAGE, SELECT, UPDATE')
          FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE n.nspname = 'leasedjob' AND c.relkind = 'S'
        """
    with arena.login("shop") as session:
        rows = session.execute(rights.encode()).fetchall()
    assert len(rows) > 25
    assert [row["name"] for row in rows if row["open"]] == []
