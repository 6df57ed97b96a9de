"""A tick at which 1,000 objects are due: one claim of all of them, beside the same rows by one bare INSERT.

Two pairs. From Python to Python: both begin with the same values, encode them as JSON, send them on an asynchronous
connection, and end with ids and tokens. SQL alone: both are one statement with the same JSON document, encoded before
the clock starts: each side its own.

The peer is the least that a program could do which wants these rows: the same table with the same indexes, the same
commit to disk, a conflict with an existing row skipped. It asks nothing (no watermark, overlap, deadline, or
registration), takes no lock of a code, and moves no watermark.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from time import perf_counter
from typing import Any, Final

import psycopg

from bench.database import Database, database
from bench.model import Aim, Result, Scale, ratio, rows, turns
from bench.proc import Meter
from leasedjob.identity import RunIdentity, run_key_for
from leasedjob.lease.database import Pool, operator_pool
from leasedjob.lease.rows import ClaimRequest, ClaimVerdict, OverlapRule, Registration
from leasedjob.lease.statements import statement
from leasedjob.lease.store import OperatorStore, claims_document
from leasedjob.lease.tenants import tenant_of

CLUSTER: Final = "bench"
NAMESPACE: Final = "bench"
UID: Final = "7c5b1d1e-0000-4000-8000-000000000001"
_COLUMNS: Final = (
    "lock_key, type, code, run_key, name, backoff_limit, interruption_limit, lease_ms, run_lease_ms, cluster, "
    "namespace, job_name, job_uid, tenant, tick, manual"
)
_TYPES: Final = (
    "lock_key text, type leasedjob.job_scheduler_type, code text, run_key text, name text, backoff_limit integer, "
    "interruption_limit integer, lease_ms bigint, run_lease_ms bigint, cluster text, namespace text, job_name text, "
    "job_uid text, tenant text, tick timestamptz, manual boolean"
)
_RETURNED: Final = "id, owner_token, attempt, fencing_token, modified_at"
BARE: Final = (
    f"INSERT INTO leasedjob.job_scheduler ({_COLUMNS}) "
    f"SELECT {_COLUMNS} FROM jsonb_to_recordset(%s::jsonb) AS r ({_TYPES}) "
    f"ON CONFLICT (lock_key) DO NOTHING RETURNING {_RETURNED}"
).encode()


def _codes(count: int) -> list[str]:
    return [f"{NAMESPACE}/job-{number:05}" for number in range(count)]


def _requests(codes: list[str], tick: datetime) -> list[ClaimRequest]:
    return [
        ClaimRequest(
            identity=RunIdentity.of(code=code, run_key=run_key_for(tick)),
            tick=tick,
            name=code,
            namespace=NAMESPACE,
            job_name=code.rpartition("/")[2],
            job_uid=UID,
            tenant=tenant_of(CLUSTER, NAMESPACE),
            run_lease_ms=900_000,
            on_overlap=OverlapRule.SKIP,
        )
        for code in codes
    ]


def _document(requests: list[ClaimRequest]) -> str:
    """The rows that the bare INSERT writes, as JSON: a key for each of its columns."""
    return json.dumps(
        [
            {
                "lock_key": request.identity.lock_key,
                "type": request.identity.type.value,
                "code": request.identity.code,
                "run_key": request.identity.run_key,
                "name": request.name,
                "backoff_limit": request.backoff_limit,
                "interruption_limit": request.interruption_limit,
                "lease_ms": request.lease_ms,
                "run_lease_ms": request.run_lease_ms,
                "cluster": CLUSTER,
                "namespace": request.namespace,
                "job_name": request.job_name,
                "job_uid": request.job_uid,
                "tenant": request.tenant,
                "tick": None if request.tick is None else request.tick.isoformat(),
                "manual": request.manual,
            }
            for request in requests
        ]
    )


class Claims:
    """One figure after the other, each with a tick of its own; what a turn claimed is ended before the next."""

    def __init__(self, base: Database, codes: list[str], ticks: Iterator[datetime]) -> None:
        self._base, self._codes, self._ticks = base, codes, ticks
        self.meter = Meter()

    def settle(self) -> None:
        """Ends what runs, and leaves the table clean and analysed, so that no turn pays for the one before."""
        self._base.execute(
            "UPDATE leasedjob.job_scheduler SET status = 'SUCCESS', outcome = 'complete',"
            " finished_at = clock_timestamp() WHERE status = 'RUNNING'"
        )
        self._base.execute("VACUUM (ANALYZE) leasedjob.job_scheduler, leasedjob.job_code")

    def store(self, runner: asyncio.Runner, pool: Pool) -> float:
        requests = _requests(self._codes, next(self._ticks))
        store = OperatorStore(pool.connection)

        async def claim() -> float:
            async with pool.connection() as connection:  # the one that the store gets next
                session = connection.info.backend_pid
            with self.meter.of("claim_runs", session):
                began = perf_counter()
                results = await store.claim_runs(CLUSTER, requests)
                took = perf_counter() - began
            assert all(result.verdict is ClaimVerdict.CLAIMED for result in results)
            return took

        return self._settled(runner.run(claim()))

    def function(self, connection: psycopg.Connection[Any]) -> float:
        requests = _requests(self._codes, next(self._ticks))
        parameters = {"cluster": CLUSTER, **claims_document(requests)}
        with self.meter.of("claim_runs, SQL alone", connection.info.backend_pid):
            began = perf_counter()
            found = connection.execute(statement("claim_runs"), parameters).fetchall()
            took = perf_counter() - began
        assert [row[1] for row in found] == ["claimed"] * len(self._codes)
        return self._settled(took)

    def bare(self, connection: psycopg.Connection[Any]) -> float:
        document = _document(_requests(self._codes, next(self._ticks)))
        with self.meter.of("bare INSERT, SQL alone", connection.info.backend_pid):
            began = perf_counter()
            found = connection.execute(BARE, (document,)).fetchall()
            took = perf_counter() - began
        assert len(found) == len(self._codes)
        return self._settled(took)

    def bare_async(self, runner: asyncio.Runner, connection: psycopg.AsyncConnection[Any]) -> float:
        requests = _requests(self._codes, next(self._ticks))

        async def insert() -> float:
            with self.meter.of("bare INSERT", connection.info.backend_pid):
                began = perf_counter()
                cursor = await connection.execute(BARE, (_document(requests),))
                found = await cursor.fetchall()
                took = perf_counter() - began
            assert len(found) == len(self._codes)
            return took

        return self._settled(runner.run(insert()))

    def _settled(self, took: float) -> float:
        self.settle()
        return took * 1000


def measure(scale: Scale) -> Result:
    """Milliseconds for the whole batch."""
    due, history, rounds = scale.of(1000, 20), scale.of(20, 2), scale.of(15, 2)
    codes = _codes(due)
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    ticks = (now - timedelta(days=1) + timedelta(minutes=number) for number in itertools.count())
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(database())
        runner = stack.enter_context(asyncio.Runner())
        pool = operator_pool(base.credentials)
        stack.callback(lambda: runner.run(pool.close()))
        store = OperatorStore(pool.connection)
        bare = stack.enter_context(psycopg.connect(base.dsn, autocommit=True, prepare_threshold=None))
        bare_async = runner.run(psycopg.AsyncConnection.connect(base.dsn, autocommit=True, prepare_threshold=None))
        stack.callback(lambda: runner.run(bare_async.close()))
        created = now - timedelta(days=2)
        jobs = [
            Registration(
                code=code,
                uid=UID,
                namespace=NAMESPACE,
                name=code.rpartition("/")[2],
                created_at=created,
                schedule_hash="schedule",
                spec_hash="spec",
                policy="Forbid",
            )
            for code in codes
        ]
        runner.run(store.register_jobs(CLUSTER, jobs))
        claims = Claims(base, codes, ticks)
        for _ in range(history):
            claims.bare(bare)
        claims.meter = Meter()
        found = turns(
            {
                "bare INSERT": lambda: claims.bare_async(runner, bare_async),
                "claim_runs": lambda: claims.store(runner, pool),
                "bare INSERT, SQL alone": lambda: claims.bare(bare),
                "claim_runs, SQL alone": lambda: claims.function(bare),
            },
            rounds,
        )
        settings = base.settings
    peers = {"claim_runs": "bare INSERT", "claim_runs, SQL alone": "bare INSERT, SQL alone"}
    used = claims.meter.after_warm_up(1000, found)
    used_peers = {f"{name}, processor": f"{peer}, processor" for name, peer in peers.items()}
    return Result(
        "claim",
        f"a batch claim of {due:,} due runs (less is better)",
        rows(found, "ms", peers) + rows(used, "ms", used_peers),
        tuple(Aim(f"{name} / {peer}", ratio(found[name], found[peer]), 1.5) for name, peer in peers.items()),
        {
            **settings,
            "due": due,
            "finished runs of each code before": history,
            "policy": "Forbid",
            "processor": "of client and database session",
        },
    )
