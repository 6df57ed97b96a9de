"""One heartbeat on an open connection, beside a plain UPDATE of the same row; and how many are HOT updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final
from uuid import UUID

import psycopg

from bench.database import database
from bench.model import Aim, Result, Row, Scale, rows, turns
from leasedjob.lease import JobAcquireOptions, SyncJobSchedulerService
from leasedjob.lease.database import connect_sync
from leasedjob.lease.store import SidecarStore

_BARE: Final = (
    b"UPDATE leasedjob.job_scheduler SET modified_at = clock_timestamp()"
    b" WHERE id = %s AND owner_token = %s AND status = 'RUNNING'"
)


def _updates(connection: psycopg.Connection[Any]) -> tuple[int, int]:
    """(updates, HOT updates) of the lease table so far."""
    connection.execute("SELECT pg_stat_force_next_flush()")
    row = connection.execute(
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'job_scheduler'"
    ).fetchone()
    assert row is not None
    return int(row["n_tup_upd"]), int(row["n_tup_hot_upd"])


def measure(scale: Scale) -> Result:
    """Milliseconds for one beat, the mean of a turn; every beat is of the next of many live leases."""
    leases, rounds = scale.of(100, 3), scale.of(30, 2)
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(database())
        bare = stack.enter_context(psycopg.connect(base.dsn, autocommit=True, prepare_threshold=None))
        mine = stack.enter_context(connect_sync(base.credentials))
        jobs = SyncJobSchedulerService(lambda: contextlib.nullcontext(mine))
        held: list[tuple[UUID, UUID]] = []
        for number in range(leases):
            acquired = jobs.acquire(JobAcquireOptions(code="bench/beats", run_key=str(number)))
            assert acquired.acquired
            held.append((acquired.id, acquired.owner_token))
        sidecar = SidecarStore(mine)

        def turn(beat: Callable[[UUID, UUID], object]) -> float:
            began = perf_counter()
            for id, token in held:
                assert beat(id, token)
            return (perf_counter() - began) / leases * 1000

        before = _updates(mine)
        found = turns(
            {
                "bare UPDATE": lambda: turn(lambda id, token: bare.execute(_BARE, (id, token)).rowcount),
                "heartbeat": lambda: turn(lambda id, token: sidecar.heartbeat(id, token).held),
            },
            rounds,
        )
        bare.execute("SELECT pg_stat_force_next_flush()")
        after = _updates(mine)
        settings = base.settings
    hot = 100 * (after[1] - before[1]) / (after[0] - before[0])
    return Result(
        "heartbeat",
        "one heartbeat (less is better)",
        (*rows(found, "ms", {"heartbeat": "bare UPDATE"}), Row("HOT updates", "%", (hot,))),
        (Aim("HOT updates, %", hot, 95, at_least=True),),
        {**settings, "live leases": leases},
    )
