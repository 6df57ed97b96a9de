"""A sidecar's side of the lease tables: four statements, one round trip each. See `leasedjob.lease.store`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from psycopg.rows import DictRow, dict_row

from leasedjob.lease import jsonsafe
from leasedjob.lease.database import translated
from leasedjob.lease.held import Adoption, AdoptVerdict, Beat, Outcome
from leasedjob.lease.statements import statement
from leasedjob.protocol import PhaseEnd

if TYPE_CHECKING:
    from psycopg import Connection


class SidecarStore:
    """A run's Pod's side, on one open connection of a tenant's role.

    Args:
        connection: in autocommit; the caller opens and closes it.
    """

    def __init__(self, connection: Connection[Any]) -> None:
        self._connection = connection

    def _row(self, name: str, **parameters: Any) -> DictRow:
        with translated(), self._connection.cursor(row_factory=dict_row) as cursor:
            row = cursor.execute(statement(name), parameters).fetchone()
            assert row is not None
            return row

    def adopt(self, id: UUID, claim_token: UUID, new_token: UUID, *, pod_uid: str, pod_name: str) -> Adoption:
        """Takes the claim over and rotates its token.

        Idempotent for the same Pod uid and new token: asking again extends the lease, as a heartbeat would.
        """
        row = self._row(
            "adopt", id=id, claim_token=claim_token, new_token=new_token, pod_uid=pod_uid, pod_name=pod_name
        )
        return Adoption(verdict=AdoptVerdict(row.pop("verdict")), reason=row.pop("reason") or "", **row)

    def heartbeat(self, id: UUID, token: UUID) -> Beat:
        """Extends the lease, if it is held and unexpired by the database's clock."""
        return Beat(**self._row("heartbeat", id=id, token=token))

    def finish(self, id: UUID, token: UUID, outcome: Outcome, data: Any = None) -> bool:
        """Records the holder's own outcome; True also if the same outcome was recorded before with this token.

        Accepted after expiry as long as nobody reclaimed. False: the lease is lost.

        Args:
            data: kept with the row; made storable and at most 256 KiB by `jsonsafe`.

        Raises:
            DatabaseUnavailableError: with kind "busy" where the row is locked elsewhere: ask again.
        """
        encoded = None if data is None else jsonsafe.dumps(data)
        return bool(self._row("finish", id=id, token=token, outcome=outcome.value, data=encoded)["recorded"])

    def report_shutdown(self, id: UUID, token: UUID, report: UUID, ends: Sequence[PhaseEnd]) -> bool:
        """Keeps how a program of the Pod has stopped, also after the run's end. False: the lease is somebody else's.

        Args:
            report: makes asking again count once.
        """
        phases = PhaseEnd.to_json(ends)
        return bool(self._row("report_shutdown", id=id, token=token, report=report, phases=phases)["taken"])
