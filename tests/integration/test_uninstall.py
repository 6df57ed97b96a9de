"""What the chart's README says of removing the database's part leaves nothing, and takes nothing of others away."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from leasedjob.lease.database import connect_async
from leasedjob.lease.tenants import Slot, ensure_tenant

from .conftest import CLUSTER, Database

pytestmark = pytest.mark.integration
README = Path(__file__).parents[2] / "charts" / "leasedjob" / "README.md"


def script() -> list[tuple[str, bool]]:
    """The README's statements, each with whether psql runs what it returns."""
    block = next(b for b in re.findall(r"```sql\n(.*?)```", README.read_text(), re.DOTALL) if "gone" in b)
    parts = re.findall(r"(.*?)(;|\\gexec)\s*", block, re.DOTALL)
    return [(text.strip(), end != ";") for text, end in parts]


async def test_the_schema_and_the_roles_go_and_those_of_others_stay(database: Database) -> None:
    connection = await connect_async(database.credentials)
    mine = set()
    for namespace, slot in (("shop", Slot.A), ("shop", Slot.B), ("bank", Slot.A)):
        mine.add((await ensure_tenant(connection, CLUSTER, namespace, password="p", slot=slot)).role)
    # a slot whose time is over: its role is there, and no tenant's any more
    await connection.execute("DELETE FROM leasedjob.tenant_role WHERE role::text LIKE '%\\_b'")
    await connection.close()
    strangers = {f"leasedjob_{database.name}_a", f"leasedjob_{database.name}_operator"}
    with psycopg.connect(database.dsn, autocommit=True) as session:
        for name in strangers:
            session.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)))
        assert mine | strangers <= roles(session)
        for text, runs_its_rows in script():
            answer = session.execute(text.encode())
            for (statement,) in answer.fetchall() if runs_its_rows else ():
                session.execute(statement)
        left = roles(session)
        for name in strangers:
            session.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))
        assert session.execute("SELECT FROM pg_namespace WHERE nspname = 'leasedjob'").fetchone() is None
    assert not mine & left
    assert strangers <= left


def roles(session: psycopg.Connection[tuple[str]]) -> set[str]:
    return {name for (name,) in session.execute("SELECT rolname FROM pg_roles WHERE rolname LIKE 'leasedjob%'")}
