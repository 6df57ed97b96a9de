"""Tenants: one cluster and namespace, and the login roles of its sidecars.

A tenant's role may execute adopt, heartbeat and finish, which judge `session_user` and the token, and nothing else. A
tenant has two slots, a and b, so that a password is rotated without a gap: the free slot gets the new password, the
Secret is written, and the old slot is dropped once no Pod uses it any more (docs/decisions/0002-tenant-roles.md).

The operator's role needs CREATEROLE, and it owns the schema; it needs to be no superuser.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from psycopg import sql
from psycopg.rows import dict_row

from leasedjob.errors import DatabaseRefusedError
from leasedjob.lease.database import FaultKind, translated
from leasedjob.lease.statements import statement

if TYPE_CHECKING:
    from psycopg import AsyncConnection

DEFAULT_CONNECTION_LIMIT: Final = 20
SIDECAR_FUNCTIONS: Final = (
    "adopt(uuid, uuid, uuid, text, text)",
    "heartbeat(uuid, uuid)",
    "finish(uuid, uuid, text, jsonb)",
)
# What an honest sidecar never reaches; a session may change them for itself.
_ROLE_SETTINGS: Final = {
    "statement_timeout": "30s",
    "lock_timeout": "5s",
    "idle_in_transaction_session_timeout": "10s",
    "synchronous_commit": "on",
}

# Grants to several roles change one row of the catalogue (the schema's, a function's); whoever comes second fails with
# "tuple concurrently updated". Readers, such as adopt, don't wait for this lock.
ONE_AT_A_TIME: Final = "LOCK TABLE leasedjob.tenant IN SHARE ROW EXCLUSIVE MODE"


class Slot(StrEnum):
    """One of a tenant's two roles."""

    A = "a"
    B = "b"

    @property
    def other(self) -> Slot:
        """The slot that a rotation goes to."""
        return Slot.B if self is Slot.A else Slot.A


@dataclass(frozen=True, slots=True)
class TenantRole:
    """A role that can log in now."""

    tenant: str
    role: str
    slot: Slot


def tenant_of(cluster: str, namespace: str) -> str:
    """The tenant's name. A namespace holds no "/", so no two pairs share one."""
    return f"{cluster}/{namespace}"


def role_name(database: str, tenant: str, slot: Slot) -> str:
    """`leasedjob_<16 hexadecimal digits>_<slot>`. Roles belong to the server, so the database is part of the hash."""
    digest = hashlib.sha256(f"{database}\n{tenant}".encode()).hexdigest()[:16]
    return f"leasedjob_{digest}_{slot}"


async def ensure_tenant(
    connection: AsyncConnection[Any],
    cluster: str,
    namespace: str,
    *,
    password: str,
    slot: Slot | str = Slot.A,
    connection_limit: int = DEFAULT_CONNECTION_LIMIT,
) -> TenantRole:
    """Creates or resets the role of this slot with this password. Idempotent; any number of replicas may call it.

    Args:
        connection: in autocommit, as the owner of the schema.
        password: sent to the server only as its SCRAM verifier.
        connection_limit: how many sessions the role may have at once.

    Raises:
        DatabaseRefusedError: the operator's role lacks CREATEROLE, or the tenant may not connect to the database.
    """
    slot = Slot(slot)
    tenant = tenant_of(cluster, namespace)
    with translated():
        role = role_name(await database_name(connection), tenant, slot)
        verifier = connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
        async with connection.transaction(), connection.cursor(row_factory=dict_row) as cursor:
            await cursor.execute("SET LOCAL lock_timeout = '10s'")
            await cursor.execute(ONE_AT_A_TIME)
            await cursor.execute(statement("remember_tenant"), {"tenant": tenant})
            state = await (await cursor.execute(statement("role_state"), {"role": role})).fetchone()
            name = sql.Identifier(role)
            verb = sql.SQL("ALTER" if state and state["present"] else "CREATE")
            await cursor.execute(
                sql.SQL("{} ROLE {} LOGIN CONNECTION LIMIT {} PASSWORD {}").format(
                    verb, name, sql.Literal(connection_limit), sql.Literal(verifier)
                )
            )
            for setting, value in _ROLE_SETTINGS.items():
                await cursor.execute(
                    sql.SQL("ALTER ROLE {} SET {} TO {}").format(name, sql.Identifier(setting), sql.Literal(value))
                )
            await cursor.execute(sql.SQL("GRANT USAGE ON SCHEMA leasedjob TO {}").format(name))
            for function in SIDECAR_FUNCTIONS:
                await cursor.execute(
                    sql.SQL("GRANT EXECUTE ON FUNCTION leasedjob.{} TO {}").format(sql.SQL(function), name)
                )
            state = await (await cursor.execute(statement("role_state"), {"role": role})).fetchone()
            if not state or not state["may_connect"]:
                # Only where PUBLIC was denied the database; it takes the database's owner to grant it.
                await cursor.execute(
                    sql.SQL("GRANT CONNECT ON DATABASE {} TO {}").format(
                        sql.Identifier(await database_name(connection)), name
                    )
                )
                state = await (await cursor.execute(statement("role_state"), {"role": role})).fetchone()
                if not state or not state["may_connect"]:
                    raise DatabaseRefusedError(
                        "the tenant's role may not connect: the operator's role needs CONNECT WITH GRANT OPTION on the "
                        "database, or PUBLIC needs CONNECT",
                        FaultKind.REFUSED_LOGIN,
                    )
            await cursor.execute(statement("remember_tenant_role"), {"role": role, "tenant": tenant})
    return TenantRole(tenant, role, slot)


async def drop_slot(connection: AsyncConnection[Any], cluster: str, namespace: str, slot: Slot | str) -> bool:
    """Removes the role of this slot; its open sessions can do nothing any more. False if there was none."""
    tenant = tenant_of(cluster, namespace)
    with translated():
        role = role_name(await database_name(connection), tenant, Slot(slot))
        async with connection.transaction(), connection.cursor(row_factory=dict_row) as cursor:
            await cursor.execute("SET LOCAL lock_timeout = '10s'")
            await cursor.execute(ONE_AT_A_TIME)
            await cursor.execute(statement("remember_tenant"), {"tenant": tenant})
            await cursor.execute(statement("forget_tenant_role"), {"role": role})
            state = await (await cursor.execute(statement("role_state"), {"role": role})).fetchone()
            if not state or not state["present"]:
                return False
            name = sql.Identifier(role)
            for function in SIDECAR_FUNCTIONS:
                await cursor.execute(
                    sql.SQL("REVOKE ALL ON FUNCTION leasedjob.{} FROM {}").format(sql.SQL(function), name)
                )
            await cursor.execute(sql.SQL("REVOKE ALL ON SCHEMA leasedjob FROM {}").format(name))
            await cursor.execute(
                sql.SQL("REVOKE ALL ON DATABASE {} FROM {}").format(
                    sql.Identifier(await database_name(connection)), name
                )
            )
            await cursor.execute(sql.SQL("DROP ROLE {}").format(name))
            return True


async def tenant_roles(connection: AsyncConnection[Any], cluster: str, namespace: str) -> list[str]:
    """The names of the tenant's roles, in order."""
    with translated():
        async with connection.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(statement("tenant_roles"), {"tenant": tenant_of(cluster, namespace)})
            return [row["role"] for row in await cursor.fetchall()]


async def database_name(connection: AsyncConnection[Any]) -> str:
    """The database as the server names it; a pooler may know it by another name."""
    async with connection.cursor(row_factory=dict_row) as cursor:
        row = await (await cursor.execute(statement("current_database"))).fetchone()
        assert row is not None
        return str(row["name"])
