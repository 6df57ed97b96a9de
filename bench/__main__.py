"""The lease core on a real PostgreSQL, durable as in production: a batch of claims, whole runs, heartbeats.

Numbers of one machine, from one process with one connection; medians, so that a busy moment doesn't count.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import psycopg

from leasedjob.identity import RunIdentity, run_key_for
from leasedjob.lease.database import Credentials, connect_sync, operator_pool
from leasedjob.lease.migrate import migrate
from leasedjob.lease.rows import ClaimRequest, ClaimVerdict, Outcome, OverlapRule, Registration
from leasedjob.lease.store import OperatorStore, SidecarStore
from leasedjob.lease.tenants import tenant_of
from leasedjob.testing.postgres import PostgresServer

CLUSTER, NAMESPACE, UID = "bench", "bench", "uid"
BATCH = 1_000
ROUNDS = 5
RUNS = 500
BEATS = 2_000


def report(what: str, value: float, unit: str, against: str = "") -> None:
    print(f"{what:<58} {value:>10.1f} {unit:<8} {against}", flush=True)


def median_seconds(action: Callable[[], object], rounds: int) -> float:
    """The median of some timed calls."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def code(number: int) -> str:
    return f"{NAMESPACE}/job-{number:05d}"


def request(number: int, tick: datetime) -> ClaimRequest:
    return ClaimRequest(
        identity=RunIdentity.of(code=code(number), run_key=run_key_for(tick)),
        tick=tick,
        name=code(number),
        namespace=NAMESPACE,
        job_name=f"job-{number:05d}",
        job_uid=UID,
        tenant=tenant_of(CLUSTER, NAMESPACE),
        run_lease_ms=900_000,
        on_overlap=OverlapRule.ALLOW,
    )


async def claims(credentials: Credentials, connection: psycopg.Connection) -> list[float]:
    """Batches of due runs, one for each of many codes, against one bare INSERT of as many such rows."""
    first = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(hours=2)
    async with operator_pool(credentials, max_size=2) as pool:
        store = OperatorStore(pool.connection)
        created = first - timedelta(days=1)
        jobs = [
            Registration(
                code=code(n),
                uid=UID,
                namespace=NAMESPACE,
                name=f"job-{n:05d}",
                created_at=created,
                schedule_hash="s",
                spec_hash="s",
                policy="Allow",
            )
            for n in range(BATCH)
        ]
        await store.register_jobs(CLUSTER, jobs)
        times = []
        for round_ in range(ROUNDS):
            wanted = [request(n, first + timedelta(minutes=round_)) for n in range(BATCH)]
            began = time.perf_counter()
            results = await store.claim_runs(CLUSTER, wanted)
            times.append(time.perf_counter() - began)
            assert {r.verdict for r in results} == {ClaimVerdict.CLAIMED}
    claimed = statistics.median(times)
    columns = [
        row[0]
        for row in connection.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = 'leasedjob.job_scheduler'::regclass AND attnum > 0 "
            "AND NOT attisdropped AND attidentity = '' AND attgenerated = '' ORDER BY attnum"
        )
    ]
    copied = [{"id": "gen_random_uuid()", "lock_key": "lock_key || %(suffix)s"}.get(c, c) for c in columns]
    insert = (
        f"INSERT INTO leasedjob.job_scheduler ({', '.join(columns)}) SELECT {', '.join(copied)} FROM "
        f"leasedjob.job_scheduler WHERE lock_key NOT LIKE '%%#%%' ORDER BY created_at DESC LIMIT {BATCH} "
        "ON CONFLICT (lock_key) DO NOTHING"
    )
    bare = median_seconds(lambda: connection.execute(insert.encode(), {"suffix": f"#{uuid4()}"}), ROUNDS)
    ratio = f"{claimed / bare:.2f} x one bare INSERT of {BATCH} such rows ({bare * 1000:.1f} ms)"
    report(f"claim {BATCH} due runs of {BATCH} codes in one call", claimed * 1000, "ms", ratio)
    return times


def whole_runs(credentials: Credentials, connection: psycopg.Connection) -> None:
    """adopt, heartbeat, finish of claimed runs, one after the other, as one sidecar does them."""
    rows = connection.execute(
        "SELECT id, owner_token FROM leasedjob.job_scheduler WHERE lock_key NOT LIKE '%%#%%' LIMIT %s", (RUNS + 1,)
    ).fetchall()
    connection.execute("UPDATE leasedjob.job_scheduler SET modified_at = clock_timestamp()")
    with connect_sync(credentials) as sidecar_connection:
        sidecar = SidecarStore(sidecar_connection)
        began = time.perf_counter()
        for id_, claim_token in rows[:RUNS]:
            token = uuid4()
            sidecar.adopt(id_, claim_token, token, pod_uid=str(uuid4()), pod_name="bench")
            sidecar.heartbeat(id_, token)
            assert sidecar.finish(id_, token, Outcome.COMPLETE, {"n": 1})
        report("adopt + heartbeat + finish", RUNS / (time.perf_counter() - began), "runs/s")
        id_, claim_token = rows[RUNS]
        token = uuid4()
        sidecar.adopt(id_, claim_token, token, pod_uid="u", pod_name="bench")
        before = updates(connection)
        beat = median_seconds(lambda: sidecar.heartbeat(id_, token), BEATS)
        report("heartbeat, one at a time", beat * 1000, "ms")
        after = updates(connection)
        if after[0] > before[0]:
            share = 100 * (after[1] - before[1]) / (after[0] - before[0])
            report("heartbeats that were HOT updates", share, "%", "aim: all but a few")


def updates(connection: psycopg.Connection) -> tuple[int, int]:
    """(updates, HOT updates) of the lease table so far."""
    connection.execute("SELECT pg_stat_force_next_flush()")
    row = connection.execute(
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'job_scheduler'"
    ).fetchone()
    assert row is not None
    return int(row[0]), int(row[1])


def main() -> int:
    with TemporaryDirectory(prefix="leasedjob-bench-") as folder, PostgresServer(durable=True) as server:
        conninfo = server.create_database("bench")
        files = {"host": server.address, "port": str(server.port), "dbname": "bench", "user": "postgres"}
        for name, value in {**files, "password": server.password}.items():
            (Path(folder) / name).write_text(value)
        credentials = Credentials.from_directory(Path(folder))
        with psycopg.connect(conninfo, autocommit=True) as connection:
            migrate(connection)
            version = connection.execute("SHOW server_version").fetchone()
            print(f"PostgreSQL {version[0] if version else '?'}, durable; Python {sys.version.split()[0]}")
            times = asyncio.run(claims(credentials, connection))
            whole_runs(credentials, connection)
            print(json.dumps({"claim_ms": [round(t * 1000, 1) for t in times]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
