"""The lease tables' own functions, on a real PostgreSQL whose clock stands where it is put.

The migrations are applied as they are, but for the one function that they read the time with. Everything else, locks
and statements included, is what an operator uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any, LiteralString, TypeVar, cast
from uuid import UUID

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import dict_row

from leasedjob.lease.migrate import migrate, migrations
from leasedjob.lease.rows import (
    ClaimRequest,
    ClaimResult,
    CodeState,
    Outcome,
    Passed,
    Recorded,
    Registered,
    Registration,
    Run,
)
from leasedjob.lease.store import OperatorStore
from leasedjob.schedule import TickRange
from tests.simulation.store import RECENT, Range

T = TypeVar("T")
CLOCK = "clock_timestamp()"
STANDING = "public.standing_clock()"


def _on_the_standing_clock(migration: str) -> LiteralString:
    return cast(LiteralString, migration.replace(CLOCK, STANDING))


class PostgresStore:
    """As MemoryStore.

    Args:
        dsn: an empty database that the role owns.
    """

    def __init__(self, dsn: str, now: datetime) -> None:
        self.now = now
        self._told: datetime | None = None
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(
                "CREATE FUNCTION public.standing_clock() RETURNS timestamptz LANGUAGE sql VOLATILE "
                "AS $$ SELECT current_setting('simulation.now')::timestamptz $$"
            )
            connection.execute("SELECT set_config('simulation.now', %s, false)", [now.isoformat()])
            migrate(
                connection, [replace(m, sql=cast(LiteralString, m.sql.replace(CLOCK, STANDING))) for m in migrations()]
            )
        self._runner = asyncio.Runner()
        self._connection: AsyncConnection[Any] = self._runner.run(AsyncConnection.connect(dsn, autocommit=True))
        self._store = OperatorStore(self._held)

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[AsyncConnection[Any]]:
        yield self._connection

    def close(self) -> None:
        self._runner.run(self._connection.close())
        self._runner.close()

    def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        async def asking() -> T:
            if self._told != self.now:
                await self._connection.execute("SELECT set_config('simulation.now', %s, false)", [self.now.isoformat()])
                self._told = self.now
            return await question

        return self._runner.run(asking())

    def _rows(self, query: LiteralString, *parameters: Any) -> list[dict[str, Any]]:
        async def asking() -> list[dict[str, Any]]:
            async with self._connection.cursor(row_factory=dict_row) as cursor:
                await cursor.execute(query, parameters)
                return await cursor.fetchall()

        return self._ask(asking())

    # --- as MemoryStore -----------------------------------------------------------------------------------------------

    def register(self, cluster: str, job: Registration, passed: Passed | None) -> Registered:
        wanted = None if passed is None else {job.code: passed}
        (answer,) = self._ask(self._store.register_jobs(cluster, [job], wanted))
        return answer

    def unregister(self, cluster: str, code: str) -> None:
        self._rows("SELECT leasedjob.unregister_jobs(%s, %s)", cluster, [code])

    def state(self, cluster: str, code: str) -> CodeState | None:
        return self._ask(self._store.code_states(cluster, [code])).get(code)

    def claim(self, cluster: str, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        return self._ask(self._store.claim_runs(cluster, requests))

    def record(
        self,
        cluster: str,
        code: str,
        through: datetime,
        ranges: Sequence[TickRange],
        *,
        suspended: bool,
        version: int | None,
    ) -> Recorded:
        record = self._store.record_suspended if suspended else self._store.record_ticks
        return self._ask(record(cluster, code, through, ranges, version=version))

    def rows(self, cluster: str, code: str) -> list[Run]:
        found = {run.id: run for run in self._ask(self._store.recent_runs(cluster, [code], RECENT))[code]}
        active = self._rows(
            "SELECT id FROM leasedjob.job_scheduler WHERE code = %s AND (status = 'RUNNING' OR retry_at IS NOT NULL)",
            code,
        )
        older = {row["id"] for row in active} - found.keys()
        found |= self._ask(self._store.runs_by_id(cluster, older))
        return list(found.values())

    def all_rows(self, code: str) -> list[Run]:
        return self._ask(self._store.recent_runs("", [code], 1_000_000))[code]

    def adopt(self, id: UUID, claim_token: UUID, token: UUID, pod: str) -> bool:
        (row,) = self._rows("SELECT verdict FROM leasedjob.adopt(%s, %s, %s, %s, %s)", id, claim_token, token, pod, pod)
        return bool(row["verdict"] == "adopted")

    def beat(self, id: UUID, token: UUID) -> tuple[bool, bool]:
        (row,) = self._rows("SELECT * FROM leasedjob.heartbeat(%s, %s)", id, token)
        return row["held"], row["stop_requested"]

    def finish(self, id: UUID, token: UUID, outcome: Outcome) -> bool:
        (row,) = self._rows("SELECT leasedjob.finish(%s, %s, %s, NULL) AS recorded", id, token, outcome.value)
        return bool(row["recorded"])

    def stop(self, id: UUID, reason: str) -> None:
        self._rows("SELECT leasedjob.request_stop(%s, %s)", [id], reason)

    def ledger(self, code: str) -> list[Range]:
        rows = self._rows(
            "SELECT first, last, count, exact, kind, reason FROM leasedjob.tick_ledger WHERE code = %s ORDER BY first",
            code,
        )
        return [Range(**row) for row in rows]

    def watermark(self, code: str) -> datetime:
        (row,) = self._rows("SELECT watermark FROM leasedjob.job_code WHERE code = %s", code)
        watermark: datetime = row["watermark"]
        return watermark
