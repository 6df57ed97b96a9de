"""After the database was restored to an earlier point: nothing that it has forgotten is given out or done twice.

    restored point ──────── lost ──────── as_of (now) ──── begins_at
                   unknown: what ran,                  holders of before stop by
                   which numbers were given out        themselves until here

What is not known is decided on the safe side: it may have happened. docs/howto-restore.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from psycopg import errors as pg
from psycopg.rows import DictRow, dict_row

from leasedjob.errors import LeasedJobError
from leasedjob.lease.database import translated
from leasedjob.lease.statements import statement

if TYPE_CHECKING:
    from psycopg import Connection

# Far more than can have been given out meanwhile, and nine million such jumps stay below 2^53, up to which a JSON
# number is exact everywhere.
TOKEN_JUMP: Final = 1_000_000_000
ATTEMPT_JUMP: Final = 1_000
LONGEST_LEASE: Final = timedelta(minutes=15)
LOCK_TIMEOUT: Final = "30s"


class OperatorsConnectedError(LeasedJobError):
    """An operator works on the database that was restored."""


class RestoreRefusedError(LeasedJobError, ValueError):
    """What was said of the restore can't be true."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What was done, or would be.

    Args:
        as_of: up to when the database that is lost may have given something out: ticks up to here are decided.
        begins_at: no run begins before.
        token_from, token_to: the largest fencing token that this database knows, and the one after which it goes on.
        running: runs that a Pod held; they get no further attempt.
        claims: runs whose Pod had not taken its lease; ended.
        waiting: runs that waited for their next attempt; ended.
        library: runs of programs that use the library alone; ended.
        codes: LeasedJobs whose ticks up to `as_of` are in the ledger now.
        backfills: backfills that had not come to their end; they end.
        roles: database roles of namespaces that this server lacks; the operator makes new ones.
    """

    as_of: datetime
    begins_at: datetime
    token_from: int
    token_to: int
    running: int
    claims: int
    waiting: int
    library: int
    codes: int
    backfills: int
    roles: tuple[str, ...]


def after_restore(
    connection: Connection[Any],
    *,
    as_of: datetime | None = None,
    longest_lease: timedelta = LONGEST_LEASE,
    token_above: int = 0,
    dry_run: bool = False,
    force: bool = False,
) -> Restored:
    """Says that this database was restored to an earlier point.

    Args:
        connection: in autocommit, as the owner of the schema.
        as_of: aware; when the database that is lost has last answered anybody. Default: now, which is always right.
        longest_lease: the longest lease of any LeasedJob; where the database knows a longer one, that counts.
        token_above: a fencing token that somebody has seen: the next one is larger.
        dry_run: change nothing.
        force: also while operators are connected.

    Raises:
        OperatorsConnectedError: they are, and `force` is not set.
        RestoreRefusedError: `as_of` is later than now, or earlier than what the database has recorded.
        DatabaseUnavailableError: the tables are locked elsewhere for half a minute.
    """
    parameters = {
        "as_of": as_of,
        "longest_ms": round(longest_lease.total_seconds() * 1000),
        "tokens": TOKEN_JUMP,
        "token_above": token_above,
        "attempts": ATTEMPT_JUMP,
        "dry_run": dry_run,
    }
    with translated(), connection.cursor(row_factory=dict_row) as cursor:
        if not (force or dry_run) and (names := _operators(connection)):
            raise OperatorsConnectedError(
                f"{len(names)} sessions of operators are connected to this database: scale them to 0 first, in every "
                "cluster (--force goes on all the same)"
            )
        try:
            with connection.transaction():
                cursor.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
                row = cursor.execute(statement("after_restore"), parameters).fetchone()
        except pg.InvalidParameterValue as error:
            raise RestoreRefusedError(error.diag.message_primary or str(error)) from error
    assert row is not None
    return Restored(**{**row, "roles": tuple(row["roles"])})


def after_move(connection: Connection[Any]) -> tuple[str, ...]:
    """Says that this database was copied to another server, and that nothing was lost.

    Returns:
        The roles of namespaces that this server lacks; the operator makes new ones.
    """
    with translated(), connection.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(statement("after_move")).fetchone()
    assert row is not None
    return tuple(row["roles"])


def _operators(connection: Connection[Any]) -> list[DictRow]:
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement("operator_sessions")).fetchall()
