"""Tenants: one cluster and namespace, and the login roles of its sidecars.

A tenant's role may execute adopt, heartbeat, finish and report_shutdown, which judge `session_user` and the token, and
nothing else. A tenant has two slots, a and b, so that a password is rotated without a gap: the free slot gets the new
password, the Secret is written, and the old slot is disabled when every Pod has had time to see it
(docs/decisions/0008-rotation.md). Which slot is current, and since when, is a row with the database's
time; each change carries the state that it was decided on, so replicas can't undo each other's steps.

The operator's role needs CREATEROLE, and it owns the schema; it needs to be no superuser.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from psycopg import sql
from psycopg.rows import DictRow, dict_row

from leasedjob.errors import DatabaseRefusedError, DatabaseUnavailableError
from leasedjob.lease.database import FaultKind, translated
from leasedjob.lease.statements import statement

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from psycopg import AsyncConnection, AsyncCursor

DEFAULT_CONNECTION_LIMIT: Final = 20
SESSIONS_END_TRIES: Final = 40
SESSIONS_END_SECONDS: Final = 0.05  # between two of them
SIDECAR_FUNCTIONS: Final = (
    "adopt(uuid, uuid, uuid, text, text)",
    "heartbeat(uuid, uuid)",
    "finish(uuid, uuid, text, jsonb)",
    "report_shutdown(uuid, uuid, uuid, jsonb)",
)
# What an honest sidecar never reaches. A session may change them for itself, so the operator looks after it, too
# (`end_overdue_sessions`).
LONGEST_TRANSACTION: Final = timedelta(seconds=60)
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


@dataclass(frozen=True, slots=True)
class TenantState:
    """What the database says of a tenant's slots.

    Args:
        slot: the current one: what new Pods use.
        generation: the number of this state; setting a password makes another one, too.
        age: of the current slot's credential, by the database's clock.
        overlapping: the former slot still works, for Pods that haven't seen the new credential.
        retirable: its time is over.
        in_force: the slots whose roles speak for the tenant.
    """

    slot: Slot
    generation: int
    age: timedelta
    overlapping: bool
    retirable: bool
    in_force: frozenset[Slot]


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
    decided_on: TenantState | None = None,
) -> TenantRole:
    """Creates or resets the role of this slot with this password. Idempotent; any number of replicas may call it.

    Args:
        connection: in autocommit, as the owner of the schema.
        password: sent to the server only as its SCRAM verifier.
        connection_limit: how many sessions the role may have at once.
        decided_on: the state that must still hold: a replica that was held up must not undo what came after.

    Raises:
        DatabaseRefusedError: the operator's role lacks CREATEROLE, or the tenant may not connect to the database.
        DatabaseUnavailableError: with kind "busy" where `decided_on` holds no more: look again.
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
            if decided_on is not None:
                parameters = {"tenant": tenant, "generation": decided_on.generation}
                if await (await cursor.execute(statement("next_generation"), parameters)).fetchone() is None:
                    raise DatabaseUnavailableError(f"the slots of {tenant} have changed meanwhile", FaultKind.BUSY)
            state = await (await cursor.execute(statement("role_state"), {"role": role})).fetchone()
            name = sql.Identifier(role)
            verb = sql.SQL("ALTER" if state and state["present"] else "CREATE")
            await cursor.execute(
                sql.SQL("{} ROLE {} LOGIN CONNECTION LIMIT {} PASSWORD {}").format(
                    verb, name, sql.Literal(connection_limit), sql.Literal(verifier)
                )
            )
            # The operator sees and ends a tenant's sessions as a member of its role.
            await cursor.execute(sql.SQL("GRANT {} TO CURRENT_USER").format(name))
            await cursor.execute(sql.SQL("ALTER ROLE {} RESET ALL").format(name))  # a role may change its own defaults
            for setting, value in _ROLE_SETTINGS.items():
                await cursor.execute(
                    sql.SQL("ALTER ROLE {} SET {} TO {}").format(name, sql.Identifier(setting), sql.Literal(value))
                )
            await cursor.execute(sql.SQL("GRANT USAGE ON SCHEMA leasedjob TO {}").format(name))
            await cursor.execute(sql.SQL("GRANT EXECUTE ON FUNCTION {} TO {}").format(_functions(), name))
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


async def tenant_state(connection: AsyncConnection[Any], cluster: str, namespace: str) -> TenantState:
    """Which slot is current, and so on; a tenant that isn't known yet is remembered."""
    tenant = tenant_of(cluster, namespace)
    with translated():
        names = {role_name(await database_name(connection), tenant, slot): slot for slot in Slot}
        async with connection.cursor(row_factory=dict_row) as cursor:
            row = await (await cursor.execute(statement("tenant_state"), {"tenant": tenant})).fetchone()
            if row is None:
                await cursor.execute(statement("remember_tenant"), {"tenant": tenant})
                row = await (await cursor.execute(statement("tenant_state"), {"tenant": tenant})).fetchone()
            assert row is not None
            roles, slot = row.pop("roles"), Slot(row.pop("slot"))
            return TenantState(slot=slot, in_force=frozenset(names[role] for role in roles if role in names), **row)


async def switch_slot(
    connection: AsyncConnection[Any], cluster: str, namespace: str, *, overlap: timedelta, decided_on: TenantState
) -> bool:
    """The Secret names the other slot: it is current from now on, and the former one's time ends after `overlap`.
    False if `decided_on` holds no more.

    A switch to a slot that isn't in force leaves the tenant without a credential, until somebody needs one."""
    parameters = {
        "tenant": tenant_of(cluster, namespace),
        "slot": decided_on.slot.other,
        "generation": decided_on.generation,
        "overlap_ms": round(overlap.total_seconds() * 1000),
    }
    with translated():
        async with connection.cursor(row_factory=dict_row) as cursor:
            return await (await cursor.execute(statement("switch_slot"), parameters)).fetchone() is not None


async def retire_slot(connection: AsyncConnection[Any], cluster: str, namespace: str) -> bool:
    """Disables the former slot, once its time is over, and ends its sessions. True if nothing is left to do.

    First it can't log in any more, then its sessions end, and only then it no longer speaks for the tenant: a heartbeat
    that is under way fails, and is sent again with the new credential, but is never answered "not yours".
    """
    tenant = tenant_of(cluster, namespace)
    with translated():
        names = {slot: role_name(await database_name(connection), tenant, slot) for slot in Slot}
        async with connection.transaction(), connection.cursor(row_factory=dict_row) as cursor:
            if (role := await _retiring(cursor, tenant, names)) is None:
                return True
            name = sql.Identifier(role)
            if await _present(cursor, role):
                await cursor.execute(sql.SQL("ALTER ROLE {} NOLOGIN PASSWORD NULL CONNECTION LIMIT 0").format(name))
        async with connection.transaction(), connection.cursor(row_factory=dict_row) as cursor:
            if (role := await _retiring(cursor, tenant, names)) is None:
                return True
            name = sql.Identifier(role)
            if await _present(cursor, role):
                await cursor.execute(sql.SQL("GRANT {} TO CURRENT_USER").format(name))
                await cursor.execute(statement("end_sessions"), {"role": role})
        if await _sessions(connection, role):
            return False
        async with connection.transaction(), connection.cursor(row_factory=dict_row) as cursor:
            if (role := await _retiring(cursor, tenant, names)) is None:
                return True
            if await _present(cursor, role):
                await _revoke(cursor, sql.Identifier(role))
            await cursor.execute(statement("forget_tenant_role"), {"role": role})
            await cursor.execute(statement("slot_retired"), {"tenant": tenant})
            return True


async def _sessions(connection: AsyncConnection[Any], role: str) -> int:
    """How many sessions the role still has, once there are none or a moment has passed."""
    left = 0
    for _ in range(SESSIONS_END_TRIES):
        # Each time in a transaction of its own: within one the server shows the same picture.
        async with connection.cursor(row_factory=dict_row) as cursor:
            row = await (await cursor.execute(statement("sessions_of"), {"role": role})).fetchone()
        left = int(row["sessions"]) if row is not None else 0
        if not left:
            break
        await asyncio.sleep(SESSIONS_END_SECONDS)
    return left


async def _retiring(cursor: AsyncCursor[DictRow], tenant: str, names: Mapping[Slot, str]) -> str | None:
    """The role that is to be disabled now, if there is one; under the lock from here on."""
    await cursor.execute("SET LOCAL lock_timeout = '10s'")
    await cursor.execute(ONE_AT_A_TIME)
    row = await (await cursor.execute(statement("tenant_state"), {"tenant": tenant})).fetchone()
    return names[Slot(row["slot"]).other] if row is not None and row["retirable"] else None


async def _present(cursor: AsyncCursor[DictRow], role: str) -> bool:
    state = await (await cursor.execute(statement("role_state"), {"role": role})).fetchone()
    return bool(state and state["present"])


def _functions() -> sql.Composed:
    return sql.SQL(", ").join(sql.SQL("leasedjob.{}").format(sql.SQL(function)) for function in SIDECAR_FUNCTIONS)


async def _revoke(cursor: AsyncCursor[DictRow], name: sql.Identifier) -> None:
    """Takes a role's rights on the schema away."""
    await cursor.execute(sql.SQL("REVOKE ALL ON FUNCTION {} FROM {}").format(_functions(), name))
    await cursor.execute(sql.SQL("REVOKE ALL ON SCHEMA leasedjob FROM {}").format(name))


async def end_overdue_sessions(
    connection: AsyncConnection[Any], *, longest: timedelta = LONGEST_TRANSACTION
) -> list[str]:
    """Ends tenants' sessions whose transaction is older than `longest`; the role of each. No sidecar's is that old."""
    parameters = {"longest_ms": round(longest.total_seconds() * 1000)}
    with translated():
        async with connection.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(statement("end_overdue_sessions"), parameters)
            return [str(row["role"]) for row in await cursor.fetchall() if row["told"]]


async def tenants_with_news(
    connection: AsyncConnection[Any],
    cluster: str,
    *,
    in_use: Collection[str],
    rotate_after: timedelta,
    limit: int = 100,
) -> list[str]:
    """Namespaces of this cluster whose credential is old, or whose former slot is to be disabled.

    Args:
        in_use: the namespaces with LeasedJobs. Others are named if their old credential works still and nothing runs.
        rotate_after: zero: credentials don't grow old.
    """
    parameters = {
        "cluster": cluster,
        "in_use": [tenant_of(cluster, namespace) for namespace in in_use],
        "rotate_after_ms": round(rotate_after.total_seconds() * 1000),
        "limit": limit,
    }
    with translated():
        async with connection.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(statement("tenants_with_news"), parameters)
            found = [str(row["tenant"]).removeprefix(f"{cluster}/") for row in await cursor.fetchall()]
    return [namespace for namespace in found if "/" not in namespace]


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
            await _revoke(cursor, name)
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
