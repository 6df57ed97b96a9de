"""The fence wherever the lease may be lost, on a real kubelet.

A lease is "stolen" by giving its row another owner token, which is what a reclaim does to its former holder: the next
heartbeat touches no row.
"""

from __future__ import annotations

import json
import signal
import time
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from leasedjob import protocol
from leasedjob.lease.trust import Timing
from tests.cluster.faults import Faults
from tests.e2e.conftest import Measured, Release
from tests.e2e.jobs import NEVER, SHORT, container, leased_job, run_of
from tests.e2e.kube import Json, Kubectl
from tests.e2e.marks import ends_with, marked_job, read
from tests.e2e.test_path import _running, pods, rows

GRACE = SHORT["shutdown"]["terminationGracePeriodSeconds"]
TIMING = Timing(SHORT["lease"]["durationSeconds"], SHORT["lease"]["heartbeatSeconds"], GRACE, 0)
# From the loss: until the next heartbeat, until the kubelet has noticed, the grace period, and 4 s for the kubelet.
STOPPED_WITHIN = TIMING.heartbeat + TIMING.probe.detection + GRACE + 4


def steal(db: psycopg.Connection, namespace: str, job: str) -> None:
    db.execute(
        "UPDATE job_scheduler SET owner_token = gen_random_uuid(), changed_at = clock_timestamp()"
        " WHERE namespace = %s AND job_name = %s AND status = 'RUNNING'",
        (namespace, job),
    )


def ended(kubectl: Kubectl, pod: str) -> Json | None:
    found = kubectl.find("pod", pod)
    return found if found and found["status"]["phase"] in ("Succeeded", "Failed") else None


def reached(db: psycopg.Connection, namespace: str, job: str, attempt: int) -> Json | None:
    return next((r for r in rows(db, namespace, job) if r["attempt"] >= attempt), None)


def start(kubectl: Kubectl, job: Json, folder: Path) -> Json:
    kubectl.apply(job, run_of(job["metadata"]["name"], "now"))
    pod: Json = kubectl.wait("the workload runs", lambda: _running(kubectl, job["metadata"]["name"]), timeout=60)
    kubectl.wait("it has marked its start", lambda: read(folder, 1))
    return pod


@pytest.mark.parametrize("code", [0, 143])
def test_a_workload_whose_lease_is_another_s_stops_and_is_no_success(
    open_kubectl: Kubectl,
    db: psycopg.Connection,
    marks: Path,
    code: int,
    measured: Measured,
) -> None:
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    pod = start(kubectl, marked_job("stolen", marks, ends_with(code)), marks)
    began = time.time()
    steal(db, namespace, "stolen")
    kubectl.wait("the Pod has ended", lambda: ended(kubectl, pod["metadata"]["name"]), timeout=STOPPED_WITHIN + 15)
    last = read(marks, 1)[-1]
    assert [m["what"] for m in read(marks, 1)][-2:] == ["term", "end"]
    assert last["at"] - began <= STOPPED_WITHIN
    measured.loss(f"lease lost, exit {code}", last["at"] - began, TIMING)
    # Nobody else finished it: released by the operator, and tried again.
    row = kubectl.wait("attempt 2", lambda: reached(db, namespace, "stolen", 2), timeout=TIMING.duration + 30)
    assert row["status"] != "SUCCESS"
    assert row["failures"] == 0
    assert row["interruptions"] == 1
    kubectl("delete", "leasedjob", "stolen", "--timeout=30s")


def test_a_workload_that_ignores_sigterm_is_killed_before_its_lease_expires(
    open_kubectl: Kubectl,
    db: psycopg.Connection,
    marks: Path,
    measured: Measured,
) -> None:
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    pod = start(kubectl, marked_job("deaf", marks), marks)
    row = rows(db, namespace, "deaf")[0]
    began = time.time()
    steal(db, namespace, "deaf")
    kubectl.wait("the Pod has ended", lambda: ended(kubectl, pod["metadata"]["name"]), timeout=STOPPED_WITHIN + 15)
    first = read(marks, 1)
    assert any(m["what"] == "term" for m in first)
    expiry = row["modified_at"] + timedelta(milliseconds=row["lease_ms"])
    assert first[-1]["at"] < expiry.timestamp()
    assert first[-1]["at"] - began <= STOPPED_WITHIN
    measured.loss("lease lost, SIGTERM ignored", first[-1]["at"] - began, TIMING)
    kubectl("delete", "leasedjob", "deaf", "--timeout=30s")


@pytest.mark.parametrize("fault", ["frozen", "killed for good"])
def test_without_its_sidecar_a_workload_is_stopped_and_repeated_after_the_expiry(
    open_kubectl: Kubectl,
    db: psycopg.Connection,
    node_faults: Faults,
    marks: Path,
    fault: str,
    measured: Measured,
) -> None:
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    pod = start(kubectl, marked_job("lonely", marks, ends_with(0)), marks)
    name = pod["metadata"]["name"]
    began = time.time()

    def strike() -> bool:
        """Freezes the sidecar, or kills it as often as it comes back; true when the workload has ended."""
        now = kubectl.find("pod", name)
        if now is None or any("terminated" in s["state"] for s in now["status"].get("containerStatuses") or []):
            return True
        hold = next(s for s in now["status"]["initContainerStatuses"] if s["name"] == protocol.CONTAINER_HOLD)
        if "running" in hold["state"]:
            try:
                sign = signal.SIGSTOP if fault == "frozen" else signal.SIGKILL
                node_faults.signal_container(hold["containerID"], sign)
            except (AssertionError, ProcessLookupError):
                pass  # it ended between the look and the strike
        return False

    kubectl.wait("the workload has ended", strike, timeout=STOPPED_WITHIN + 20, every=0.2)
    last = read(marks, 1)[-1]
    row = kubectl.wait("attempt 2", lambda: reached(db, namespace, "lonely", 2), timeout=TIMING.duration + 40)
    measured.loss(f"sidecar {fault}", last["at"] - began, TIMING)
    assert [m["what"] for m in read(marks, 1)][-2:] == ["term", "end"], (
        "it trapped SIGTERM and exited 0, which is no SUCCESS"
    )
    assert row["failures"] == 0
    assert row["started_at"].timestamp() > last["at"]
    kubectl("delete", "leasedjob", "lonely", "--timeout=30s")


def test_a_lease_lost_during_the_users_init_containers_keeps_the_workload_from_starting(
    kubectl: Kubectl, namespace: str, db: psycopg.Connection
) -> None:
    init = container("import time\ntime.sleep(14)", name="prepare")
    job = leased_job(
        "init", containers=[container("print('ran')")], schedule=NEVER, pod={"initContainers": [init]}, **SHORT
    )
    kubectl.apply(job, run_of("init", "now"))
    row = kubectl.wait(
        "adopted", lambda: next((r for r in rows(db, namespace, "init") if r["pod_uid"]), None), timeout=60
    )
    steal(db, namespace, "init")
    pod = kubectl.wait("the Pod has failed", lambda: ended(kubectl, row["pod_name"]), timeout=60)
    gate = next(s for s in pod["status"]["initContainerStatuses"] if s["name"] == protocol.CONTAINER_GATE)
    assert gate["state"]["terminated"]["exitCode"] == protocol.EXIT_NOT_MINE
    assert all("startedAt" not in (s["state"].get("terminated") or {}) or s["state"]["terminated"]["startedAt"] is None
               for s in pod["status"]["containerStatuses"])  # fmt: skip
    assert kubectl.run("logs", row["pod_name"], "-c", "main").stdout == ""
    kubectl("delete", "leasedjob", "init", "--timeout=30s")


def test_a_lease_lost_after_the_deletion_began_changes_nothing_of_the_stop(
    open_kubectl: Kubectl,
    db: psycopg.Connection,
    marks: Path,
) -> None:
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    pod = start(kubectl, marked_job("late", marks), marks)
    began = time.time()
    kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")
    steal(db, namespace, "late")
    kubectl.wait_gone(f"pod/{pod['metadata']['name']}", timeout=GRACE + 15)
    last = read(marks, 1)[-1]
    assert last["at"] - began <= GRACE + 4
    row = rows(db, namespace, "late")[0]
    assert row["status"] != "SUCCESS"
    kubectl("delete", "leasedjob", "late", "--timeout=30s")


def test_two_containers_that_ignore_sigterm_are_both_dead_before_the_lease_expires(
    open_kubectl: Kubectl,
    db: psycopg.Connection,
    node_faults: Faults,
    release: Release,
    marks: Path,
    measured: Measured,
) -> None:
    """The kubelet stops first the one whose probe failed first, and the other one when that has ended."""
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    timing = Timing(50, 4, 12, 0, containers=2)
    assert timing.problem() is None
    spec = {
        "lease": {"durationSeconds": timing.duration, "heartbeatSeconds": timing.heartbeat},
        "shutdown": {"preStopSeconds": 0, "terminationGracePeriodSeconds": timing.grace},
    }
    job = marked_job("pair", marks, timing=spec)
    (first,) = job["spec"]["template"]["spec"]["containers"]
    program = first["command"][-1].replace("/marks/{", "/marks/2-{")
    second = {**first, "name": "second", "command": [*first["command"][:-1], program]}
    job["spec"]["template"]["spec"]["containers"] = [first, second]
    pod = start(kubectl, job, marks)
    node_faults.partition(pod["status"]["podIP"], release.postgres.port)
    row = rows(db, namespace, "pair")[0]
    kubectl.wait("the Pod has ended", lambda: ended(kubectl, pod["metadata"]["name"]), timeout=timing.duration + 30)
    ends = [read(marks, 1)[-1]["at"], read_second(marks)[-1]["at"]]
    beat = row["modified_at"].timestamp()
    measured.loss("two deaf containers, the later one, from the trust's end", max(ends) - beat - timing.trust, timing)
    measured(f"two deaf containers: {max(ends) - min(ends):.1f} s between their ends")
    assert max(ends) < beat + row["lease_ms"] / 1000, "before its lease expires"
    kubectl("delete", "leasedjob", "pair", "--timeout=30s")


def read_second(folder: Path) -> list[Json]:
    return [json.loads(line) for line in (folder / "2-1").read_text().splitlines() if line.endswith("}")]


def test_two_containers_and_a_probe_of_the_user(kubectl: Kubectl, namespace: str, db: psycopg.Connection) -> None:
    """The user's own liveness probe is performed by the sidecar: when it fails the kubelet stops that container; the
    other one goes on to its end, as in any Pod, and the attempt has failed."""
    served = """
        import http.server, time
        began = time.time()
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200 if time.time() - began < 12 else 500)
                self.end_headers()
            def log_message(self, *_): pass
        http.server.HTTPServer(("127.0.0.1", 8080), Handler).serve_forever()
    """
    probe = {"httpGet": {"path": "/alive", "port": "web"}, "periodSeconds": 1, "failureThreshold": 2}
    ports = [{"name": "web", "containerPort": 8080}]
    containers = [
        container(served, name="served", livenessProbe=probe, ports=ports),
        container("import time\ntime.sleep(25)", name="other"),
    ]
    kubectl.apply(leased_job("probed", containers=containers, schedule=NEVER, **SHORT), run_of("probed", "now"))
    kubectl.wait("both run", lambda: _running(kubectl, "probed"), timeout=60)
    row = kubectl.wait(
        "a recorded failure",
        lambda: next((r for r in rows(db, namespace, "probed") if r["status"] == "FAIL"), None),
        timeout=60,
    )
    assert row["attempt"] == 1
    assert row["failures"] == 1
    assert row["reason"].startswith("LivenessProbeFailed")
    assert (row["finished_at"] - row["adopted_at"]).total_seconds() > 10, "it lived while its probe was answered"
    kubectl("delete", "leasedjob", "probed", "--timeout=30s")
    kubectl.wait("nothing is left", lambda: not pods(kubectl, "probed"), timeout=60)
