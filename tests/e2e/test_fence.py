"""The fence on a real kubelet: a workload whose lease is lost has stopped before the lease expires."""

from __future__ import annotations

import signal
from pathlib import Path

import psycopg

from leasedjob import protocol
from leasedjob.lease.trust import Timing
from tests.cluster.faults import Faults
from tests.e2e.conftest import Measured, Release
from tests.e2e.jobs import SHORT, run_of
from tests.e2e.kube import Kubectl
from tests.e2e.marks import marked_job, read
from tests.e2e.test_path import _running, rows

TIMING = Timing(SHORT["lease"]["durationSeconds"], SHORT["lease"]["heartbeatSeconds"], 6, 0)


def test_cut_off_from_the_database_it_stops_before_its_lease_expires(
    open_kubectl: Kubectl,
    db: psycopg.Connection,
    node_faults: Faults,
    release: Release,
    marks: Path,
    measured: Measured,
) -> None:
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    kubectl.apply(marked_job("cut", marks), run_of("cut", "now"))
    pod = kubectl.wait("the workload runs", lambda: _running(kubectl, "cut"), timeout=60)
    kubectl.wait("it has marked its start", lambda: read(marks, 1))
    node_faults.partition(pod["status"]["podIP"], release.postgres.port)
    before = rows(db, namespace, "cut")[0]
    again = kubectl.wait(
        "the run is claimed again",
        lambda: next((r for r in rows(db, namespace, "cut") if r["attempt"] == 2), None),
        timeout=TIMING.duration + 40,
    )
    first = read(marks, 1)
    kubectl.wait("the second workload marks its start", lambda: read(marks, 2), timeout=60)
    second = read(marks, 2)
    # The lease could be renewed until the cut; then it ran out, by the database's clock, which is this machine's.
    expiry = db.execute(
        "SELECT extract(epoch FROM %s + %s * interval '1 millisecond')", (before["modified_at"], before["lease_ms"])
    ).fetchone()
    assert expiry is not None
    assert first[-1]["at"] < float(expiry[0])
    # Its Pod's end is seen and the run released, so nobody waits for the expiry; but nobody claims before that end.
    assert again["started_at"].timestamp() > first[-1]["at"]
    assert second[0]["at"] > first[-1]["at"], "the two workloads did not overlap"
    assert any(m["what"] == "term" for m in first), "it was stopped gracefully: SIGTERM came"
    assert again["lock_key"] == before["lock_key"] == first[0]["key"] == second[0]["key"]
    assert second[0]["token"] > first[0]["token"]
    assert again["interruptions"] == 1
    assert again["failures"] == 0
    trusted = before["modified_at"].timestamp() + TIMING.trust
    measured.loss("cut off from the database, SIGTERM ignored, from the trust's end", first[-1]["at"] - trusted, TIMING)
    measured(
        f"cut off from the database: the workload ended {float(expiry[0]) - first[-1]['at']:.1f} s before the lease's"
        f" expiry, the next one began {second[0]['at'] - first[-1]['at']:.1f} s after that end"
    )
    kubectl("delete", "leasedjob", "cut", "--timeout=30s")


def test_a_sidecar_that_is_killed_once_recovers_and_the_workload_lives(
    open_kubectl: Kubectl, db: psycopg.Connection, node_faults: Faults, marks: Path
) -> None:
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    # The kubelet takes some seconds to restart a sidecar; the default detection of 20 s has room for that.
    timing = {**SHORT, "lease": {"durationSeconds": 200, "heartbeatSeconds": 10}}
    kubectl.apply(marked_job("killed-once", marks, timing=timing), run_of("killed-once", "now"))
    pod = kubectl.wait("the workload runs", lambda: _running(kubectl, "killed-once"), timeout=60)
    hold = next(s for s in pod["status"]["initContainerStatuses"] if s["name"] == protocol.CONTAINER_HOLD)
    row = rows(db, namespace, "killed-once")[0]
    node_faults.signal_container(hold["containerID"], signal.SIGKILL)
    kubectl.wait(
        "a heartbeat of the restarted sidecar, same token and attempt",
        lambda: (
            rows(db, namespace, "killed-once")[0]["modified_at"] > row["modified_at"]
            and _restarts(kubectl, pod["metadata"]["name"]) == 1
        ),
        timeout=40,
    )
    count = len(read(marks, 1))
    kubectl.wait("the workload goes on past detection", lambda: len(read(marks, 1)) > count + 18 * 25, timeout=60)
    now = rows(db, namespace, "killed-once")[0]
    assert (now["attempt"], now["owner_token"]) == (1, row["owner_token"])
    assert not any(m["what"] == "term" for m in read(marks, 1))
    kubectl("delete", "leasedjob", "killed-once", "--timeout=30s")


def _restarts(kubectl: Kubectl, pod: str) -> int:
    statuses = kubectl.json("get", "pod", pod)["status"]["initContainerStatuses"]
    return int(next(s for s in statuses if s["name"] == protocol.CONTAINER_HOLD)["restartCount"])
