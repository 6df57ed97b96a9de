"""The fence on a real kubelet: a workload whose lease is lost has stopped before the lease expires."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from leasedjob import protocol
from leasedjob.lease.trust import Timing
from tests.cluster.faults import Faults
from tests.e2e.conftest import Release
from tests.e2e.jobs import NEVER, SHORT, container, leased_job, run_of
from tests.e2e.kube import Json, Kubectl
from tests.e2e.test_path import _running, rows

TIMING = Timing(SHORT["lease"]["durationSeconds"], SHORT["lease"]["heartbeatSeconds"], 6, 0)

# Writes a line each 50 ms to a file of its own on the volume, so that its last moment is known however it ends.
MARKS = """
    import json, os, signal, time
    path = f"/marks/{os.environ['LEASEDJOB_ATTEMPT']}"
    def mark(what):
        with open(path, "a") as f:
            f.write(json.dumps({"at": time.time(), "what": what, "token": int(os.environ["LEASEDJOB_FENCING_TOKEN"]),
                                "key": os.environ["LEASEDJOB_IDEMPOTENCY_KEY"]}) + "\\n")
    signal.signal(signal.SIGTERM, lambda *_: mark("term"))
    mark("start")
    while True:
        mark("alive")
        time.sleep(0.05)
"""


@pytest.fixture
def open_kubectl(cluster_kubectl: Kubectl) -> Iterator[Kubectl]:
    """A namespace without Pod Security, for a hostPath volume that outlives Pods."""
    name = f"e2e-{uuid.uuid4().hex[:10]}"
    body = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "labels": {"leasedjob.io/test": "true"}},
    }
    cluster_kubectl.apply(body)
    yield cluster_kubectl.within(name)
    cluster_kubectl.run("delete", "namespace", name, "--wait=false")


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    """A folder of this machine that the workload's containers write to."""
    folder = tmp_path / "marks"
    folder.mkdir()
    folder.chmod(0o777)
    for parent in folder.parents[:3]:
        parent.chmod(0o755)
    return folder


def read(folder: Path, attempt: int) -> list[Json]:
    path = folder / str(attempt)
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def marked_job(name: str, folder: Path, program: str = MARKS, timing: Json = SHORT) -> Json:
    mount = [{"name": "marks", "mountPath": "/marks"}]
    volume = [{"name": "marks", "hostPath": {"path": str(folder)}}]
    main = container(program, volumeMounts=mount)
    return leased_job(name, containers=[main], schedule=NEVER, pod={"volumes": volume}, **timing)


def test_cut_off_from_the_database_it_stops_before_its_lease_expires(
    open_kubectl: Kubectl, db: psycopg.Connection, node_faults: Faults, release: Release, marks: Path
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
    print(
        f"trust ended {trusted - before['modified_at'].timestamp():.1f} s after the last heartbeat; workload ended"
        f" {first[-1]['at'] - trusted:.1f} s later (fence budget {TIMING.fence_budget:.0f} s),"
        f" {float(expiry[0]) - first[-1]['at']:.1f} s before the lease's expiry;"
        f" the next workload began {second[0]['at'] - first[-1]['at']:.1f} s after it"
    )
    kubectl("delete", "leasedjob", "cut", "--timeout=30s")


def test_a_sidecar_that_is_killed_once_recovers_and_the_workload_lives(
    open_kubectl: Kubectl, db: psycopg.Connection, node_faults: Faults, marks: Path
) -> None:
    import signal

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
