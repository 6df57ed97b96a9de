"""Two replicas, both active: what one of them leaves undone the other one does, at the same tick."""

from __future__ import annotations

import signal
import threading
from datetime import UTC, datetime, timedelta

import psycopg

from tests.cluster.faults import Faults
from tests.e2e.conftest import Release
from tests.e2e.jobs import leased_job
from tests.e2e.kube import Kubectl
from tests.e2e.test_path import next_minute, rows

JOBS = 10
TICKS = 2


def test_a_replica_killed_at_the_tick_loses_and_doubles_nothing(
    kubectl: Kubectl,
    cluster_kubectl: Kubectl,
    namespace: str,
    db: psycopg.Connection,
    node_faults: Faults,
    release: Release,
) -> None:
    system = cluster_kubectl.within(release.namespace)
    names = [f"job-{n}" for n in range(JOBS)]
    if next_minute() - datetime.now(UTC) < timedelta(seconds=10):
        threading.Event().wait(11)  # so that all objects exist before the tick that is counted first
    kubectl.apply(*(leased_job(n, "print('ran')") for n in names))
    kubectl.wait("all are accepted", lambda: all(_ready(j) for j in kubectl.items("leasedjobs")), timeout=20)
    first = next_minute()
    operators = [p for p in system.items("pods", "-l", "app.kubernetes.io/component=operator") if _is_ready(p)]
    assert len(operators) == 2, "both replicas are ready"
    containers = [p["status"]["containerStatuses"][0]["containerID"] for p in operators]
    for number, victim in enumerate(containers):
        tick = first + timedelta(minutes=number)
        threading.Event().wait(max(0.0, (tick - datetime.now(UTC)).total_seconds()))
        node_faults.signal_container(victim, signal.SIGKILL)
        kubectl.wait(
            f"every job's run of {tick} is recorded",
            lambda tick=tick: len(_done(db, namespace, tick)) == JOBS,
            timeout=50,
        )
    for name in names:
        found = [r for r in rows(db, namespace, name) if r["tick"] < first + timedelta(minutes=TICKS)]
        assert [r["tick"] for r in found] == [first + timedelta(minutes=n) for n in range(TICKS)]
        assert {(r["status"], r["attempt"]) for r in found} == {("SUCCESS", 1)}
    late = [
        (r["started_at"] - r["tick"]).total_seconds()
        for n in names
        for r in rows(db, namespace, n)
        if r["tick"] >= first
    ]
    print(f"claimed after the tick: median {sorted(late)[len(late) // 2]:.3f} s, at most {max(late):.3f} s")
    kubectl("delete", "leasedjobs", "--all", "--wait=false")
    system.wait("both replicas are back", lambda: sum(map(_is_ready, system.items("pods"))) >= 2, timeout=120)


def _ready(job: dict) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _is_ready(pod: dict) -> bool:
    conditions = pod["status"].get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _done(db: psycopg.Connection, namespace: str, tick: datetime) -> list[tuple]:
    return db.execute(
        "SELECT job_name FROM job_scheduler WHERE namespace = %s AND tick = %s AND status = 'SUCCESS'",
        (namespace, tick),
    ).fetchall()
