"""What runs in each run's Pod: `adopt`, then `hold`, beside a bare psycopg process that connects.

In each turn the peer and the sidecar are started one after the other, and looked at side by side after the first
heartbeat: by then `hold` has loaded the database driver and whatever else it will ever load. Processor time is taken
at the default heartbeat of 60 s, with the probes of a kubelet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from compileall import compile_dir
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

import psycopg
from psycopg import conninfo

import leasedjob
from bench.database import Database, database
from bench.model import Aim, Result, Row, Scale, ratio, ratios
from bench.pod import Pod, bare
from bench.proc import memory, processor_seconds
from leasedjob import protocol
from leasedjob.identity import RunIdentity, run_key_for
from leasedjob.lease.database import connect_async, connections
from leasedjob.lease.rows import ClaimRequest, ClaimVerdict, OverlapRule, Registration
from leasedjob.lease.store import OperatorStore
from leasedjob.lease.tenants import ensure_tenant, tenant_of
from leasedjob.lease.trust import Timing

CLUSTER: Final = "bench"
NAMESPACE: Final = "bench"
CODE: Final = "bench/sidecar"
UID: Final = "7c5b1d1e-0000-4000-8000-000000000001"
PASSWORD: Final = "bench"
BUSY: Final = Timing(duration=900, heartbeat=6, grace=60, pre_stop=10)  # more than 5 s apart: connects for each
CALM: Final = Timing(duration=900, heartbeat=60, grace=60, pre_stop=10)


class Runs:
    """Fresh claims of one job, each for a Pod of its own."""

    def __init__(self, base: Database, folder: Path) -> None:
        self._base, self._folder, self._number = base, folder, 0
        self._store = OperatorStore(connections(base.credentials))
        self._start = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(days=1)
        self.tenant_dsn = asyncio.run(self._prepare())

    async def _prepare(self) -> str:
        job = Registration(
            code=CODE,
            uid=UID,
            namespace=NAMESPACE,
            name="sidecar",
            created_at=self._start - timedelta(days=1),
            schedule_hash="schedule",
            spec_hash="spec",
            policy="Allow",
        )
        await self._store.register_jobs(CLUSTER, [job])
        async with await connect_async(self._base.credentials) as connection:
            role = await ensure_tenant(connection, CLUSTER, NAMESPACE, password=PASSWORD)
        return conninfo.make_conninfo(self._base.dsn, user=role.role, password=PASSWORD)

    def pod(self, timing: Timing) -> Pod:
        """A Pod whose run was claimed just now; nothing runs in it yet."""
        self._number += 1
        tick = self._start + timedelta(minutes=self._number)
        request = ClaimRequest(
            identity=RunIdentity.of(code=CODE, run_key=run_key_for(tick)),
            tick=tick,
            name=CODE,
            namespace=NAMESPACE,
            job_name="sidecar",
            job_uid=UID,
            tenant=tenant_of(CLUSTER, NAMESPACE),
            run_lease_ms=timing.duration * 1000,
            on_overlap=OverlapRule.ALLOW,
        )
        (claim,) = asyncio.run(self._store.claim_runs(CLUSTER, [request]))
        assert claim.verdict is ClaimVerdict.CLAIMED, claim
        directory = self._folder / str(self._number)
        directory.mkdir()
        assert claim.attempt is not None
        return Pod(directory, self.tenant_dsn, str(claim.id), str(claim.owner_token), claim.attempt, timing)


def _get(port: int, path: str) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def _until_beaten(pod: Pod) -> None:
    """Waits until the sidecar counts a heartbeat that was answered."""
    until = monotonic() + 30
    while monotonic() < until:
        connection = HTTPConnection("127.0.0.1", pod.report_port, timeout=5)
        try:
            connection.request("GET", "/v1/lease")
            body = connection.getresponse().read()
        finally:
            connection.close()
        if json.loads(body)["heartbeats"]["answered"]:
            return
        sleep(0.2)  # a heartbeat changes nothing that the long poll tells of
    raise AssertionError("no heartbeat within 30 s")


def _processor(pod: Pod, pid: int, seconds: int) -> float:
    """Processor seconds in so many seconds, with the kubelet's probe at its own interval."""
    path = protocol.probe_path(pod.lease_id, pod.attempt, "main")
    began, before = monotonic(), processor_seconds(pid)
    while (left := began + seconds - monotonic()) > 0:
        assert _get(pod.probe_port, path) == 200
        sleep(min(left, pod.timing.probe.period))
    return (processor_seconds(pid) - before) / (monotonic() - began)


def _sessions(base: Database) -> int:
    with psycopg.connect(base.dsn, autocommit=True) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE starts_with(application_name, 'leasedjob')"
        ).fetchone()
        assert row is not None
        return int(row[0])


def measure(scale: Scale) -> Result:
    """Memory in MiB, starts in milliseconds, processor in seconds per hour."""
    compile_dir(Path(leasedjob.__file__).parent, quiet=1)  # as in the images: else each start would compile
    rounds, seconds = scale.of(7, 1), scale.of(60, 2)
    names = ("resident", "unshared", "start")
    found: dict[str, list[float]] = {f"{side}, {name}": [] for name in names for side in ("psycopg", "hold")}
    adopts: list[float] = []
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(database())
        runs = Runs(base, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        for number in range(-1, rounds):
            pod = runs.pod(BUSY)
            adopted = pod.adopt()
            with bare(runs.tenant_dsn) as (peer, peer_start), pod.hold() as (hold, hold_start):
                assert _get(pod.probe_port, protocol.probe_path(pod.lease_id, pod.attempt, "main")) == 200
                _until_beaten(pod)
                theirs, mine = memory(peer.pid), memory(hold.pid)
            if number < 0:
                continue  # the first start reads everything from disk
            adopts.append(adopted * 1000)
            for side, start, size in (("psycopg", peer_start, theirs), ("hold", hold_start, mine)):
                found[f"{side}, resident"].append(size.resident)
                found[f"{side}, unshared"].append(size.unshared)
                found[f"{side}, start"].append(start * 1000)
        pod = runs.pod(CALM)
        pod.adopt()
        with pod.hold() as (hold, _):
            used = _processor(pod, hold.pid, seconds) * 3600
            sessions = _sessions(base)
        settings: dict[str, Any] = {"PostgreSQL": base.settings["PostgreSQL"], "psycopg": psycopg.__version__}
    return Result(
        "sidecar",
        "the sidecar's processes (less is better)",
        *_table(found, adopts, used, sessions),
        {
            **settings,
            "memory": "looked at after the first heartbeat",
            "start": "to connected (psycopg), to answering (hold), to the end of the process (adopt)",
            "processor": f"over {seconds} s at heartbeats of {CALM.heartbeat} s, probed every {CALM.probe.period} s",
        },
    )


def _table(
    found: dict[str, list[float]], adopts: list[float], used: float, sessions: int
) -> tuple[tuple[Row, ...], tuple[Aim, ...]]:
    table: list[Row] = []
    found_ratios: dict[str, float] = {}
    for name, unit in (("resident", "MiB"), ("unshared", "MiB"), ("start", "ms")):
        theirs, mine = found[f"psycopg, {name}"], found[f"hold, {name}"]
        found_ratios[name] = ratio(mine, theirs)
        table.append(Row(f"psycopg, {name}", unit, tuple(theirs)))
        table.append(Row(f"hold, {name}", unit, tuple(mine), ratios(mine, theirs), "psycopg"))
    starts = found["psycopg, start"]
    table.append(Row("adopt, start", "ms", tuple(adopts), ratios(adopts, starts), "psycopg"))
    table.append(Row("hold, processor", "s/h", (used,)))
    table.append(Row("hold, connections between heartbeats", "", (sessions,)))
    aims = (
        Aim("hold / psycopg, resident", found_ratios["resident"], 1.1),
        Aim("hold / psycopg, unshared", found_ratios["unshared"], 1.1),
        Aim("adopt / psycopg, start", ratio(adopts, starts), 1.5),
        Aim("connections between heartbeats", sessions, 0),
    )
    return tuple(table), aims
