"""What an operator and a sidecar do to the lease tables: one method, one statement, one round trip.

`OperatorStore` is asynchronous and runs with the role that owns the schema. `SidecarStore` is synchronous, runs with a
tenant's role and can do three things only. Neither keeps session state, so both work through PgBouncer in transaction
mode. Connections are in autocommit, so each method is one transaction.

Every method raises DatabaseUnavailableError, DatabaseRefusedError or SchemaMissingError where the database can't
answer (`leasedjob.lease.database.classify`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from leasedjob.lease.rows import (
    DEFAULT_BACKOFF,
    Adoption,
    Beat,
    ClaimRequest,
    ClaimResult,
    LedgerEntry,
    Outcome,
    Recorded,
    Registered,
    Registration,
    Run,
)

if TYPE_CHECKING:
    from psycopg import AsyncConnection, Connection

    from leasedjob.schedule.due import TickRange

Connect = Callable[[], AbstractAsyncContextManager["AsyncConnection[Any]"]]


class OperatorStore:
    """The operator's side.

    Args:
        connection: gives a connection for one statement: an AsyncConnectionPool's `connection`, or
            `leasedjob.lease.database.connections(credentials)`.
        timeout: seconds that one statement may take, connecting included; default 30.
    """

    def __init__(self, connection: Connect, *, timeout: float = 30.0) -> None:
        self._connection = connection
        self._timeout = timeout

    async def register_jobs(self, cluster: str, jobs: Sequence[Registration]) -> list[Registered]:
        """Registers or refreshes these jobs; one answer per job, in the order given."""
        raise NotImplementedError

    async def unregister_jobs(self, cluster: str, codes: Collection[str]) -> set[str]:
        """Forgets these jobs of this cluster; the codes that are done (the others were busy: ask again)."""
        raise NotImplementedError

    async def claim_runs(self, cluster: str, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        """Asks for all these runs in one round trip; one answer per request, in the order given."""
        raise NotImplementedError

    async def record_ticks(self, cluster: str, code: str, through: datetime, ranges: Sequence[TickRange]) -> Recorded:
        """Writes tick ranges to the ledger and moves the watermark to `through`, where nothing is to be claimed."""
        raise NotImplementedError

    async def renew_claims(self, cluster: str, ids: Collection[UUID]) -> set[UUID]:
        """Extends unadopted claims of this cluster; the ids that were extended."""
        raise NotImplementedError

    async def release_claim(self, id: UUID, claim_token: UUID, *, reason: str, retry_ms: int | None = 0) -> bool:
        """Gives an unadopted claim back: FAIL `{released: true}`, claimable again after `retry_ms` (None: never)."""
        raise NotImplementedError

    async def end_attempt(
        self,
        id: UUID,
        attempt: int,
        pod_uid: str | None,
        outcome: Outcome,
        *,
        counts: bool,
        reason: str,
        retry_ms: int | None = DEFAULT_BACKOFF,
        data: Mapping[str, Any] | None = None,
    ) -> bool:
        """Records how an attempt ended; True if this call changed the row.

        Accepted after expiry as long as nobody reclaimed.

        Args:
            pod_uid: the Pod that holds the lease; None for a claim that no Pod adopted.
            counts: a failure counts against the backoff limit; anything else of an adopted attempt that isn't
                COMPLETE counts as an interruption.
            retry_ms: milliseconds until the next attempt; None: no more; DEFAULT_BACKOFF: the run's own rule.
        """
        raise NotImplementedError

    async def request_stop(self, ids: Collection[UUID], *, reason: str) -> set[UUID]:
        """Asks RUNNING runs to stop for good (cancelled or replaced): their sidecars see it at the next heartbeat.

        However such an attempt then ends, there is no further one. The ids whose row now carries a stop request, or
        has ended, are returned; others were locked elsewhere: ask again.
        """
        raise NotImplementedError

    async def active_rows(self, cluster: str) -> list[Run]:
        """Every non-terminal row (RUNNING, or FAIL with a retry left) of codes that this cluster registered."""
        raise NotImplementedError

    async def changed_since(self, cluster: str, since: datetime) -> list[Run]:
        """Rows of registered codes with `changed_at` >= since, oldest change first, at most 1,000.

        Transactions may commit in another order than they read the clock: ask with an overlap of some seconds.
        """
        raise NotImplementedError

    async def recent_runs(self, cluster: str, codes: Collection[str], limit: int) -> dict[str, list[Run]]:
        """The last `limit` rows of each code, newest first."""
        raise NotImplementedError

    async def runs_by_id(self, cluster: str, ids: Collection[UUID]) -> dict[UUID, Run]:
        """These rows, where they exist; `cluster` only decides `held_here`."""
        raise NotImplementedError

    async def ledger(self, code: str, *, limit: int = 100) -> list[LedgerEntry]:
        """What did not run, newest first."""
        raise NotImplementedError

    async def watermarks(self, cluster: str) -> dict[str, datetime]:
        """The watermark of each code that this cluster registered."""
        raise NotImplementedError


class SidecarStore:
    """A run's Pod's side, on one open connection of a tenant's role.

    Args:
        connection: in autocommit; the caller opens and closes it.
    """

    def __init__(self, connection: Connection[Any]) -> None:
        self._connection = connection

    def adopt(self, id: UUID, claim_token: UUID, new_token: UUID, *, pod_uid: str, pod_name: str) -> Adoption:
        """Takes the claim over and rotates its token. Idempotent for the same Pod uid and new token."""
        raise NotImplementedError

    def heartbeat(self, id: UUID, token: UUID) -> Beat:
        """Extends the lease, if it is held and unexpired by the database's clock."""
        raise NotImplementedError

    def finish(self, id: UUID, token: UUID, outcome: Outcome, data: Any = None) -> bool:
        """Records the holder's own outcome; True also if the same outcome was recorded before with this token.

        Raises:
            DatabaseUnavailableError: with kind "busy" where the row is locked elsewhere: ask again.
        """
        raise NotImplementedError
