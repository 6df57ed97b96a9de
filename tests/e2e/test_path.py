"""From `kubectl apply` to a recorded outcome, by real kubectl on a real cluster."""

from __future__ import annotations

import subprocess
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from leasedjob import protocol
from tests.cluster.layout import REPOSITORY
from tests.e2e.jobs import NEVER, leased_job, run_of
from tests.e2e.kube import Json, Kubectl

ECHO = """
    import os
    for name, value in sorted(os.environ.items()):
        if name.startswith("LEASEDJOB_"):
            print(f"{name}={value}")
"""


def rows(db: psycopg.Connection, namespace: str, job: str) -> list[dict[str, Any]]:
    """The lease rows of a job, oldest first."""
    cursor = db.cursor(row_factory=psycopg.rows.dict_row)
    return cursor.execute(
        "SELECT * FROM job_scheduler WHERE namespace = %s AND job_name = %s ORDER BY created_at", (namespace, job)
    ).fetchall()


def succeeded(db: psycopg.Connection, namespace: str, job: str) -> list[dict[str, Any]]:
    return [r for r in rows(db, namespace, job) if r["status"] == "SUCCESS"]


def result(kubectl: Kubectl, job: str) -> str | None:
    """What `kubectl get leasedjobs` shows as Last Result."""
    return (kubectl.json("get", "lj", job).get("status") or {}).get("lastResult")


def phase(kubectl: Kubectl, run: str) -> str | None:
    return (kubectl.json("get", "ljr", run).get("status") or {}).get("phase")


def pods(kubectl: Kubectl, job: str) -> list[Json]:
    return kubectl.items("pods", "-l", f"{protocol.LABEL_JOB}={job}")


def seconds_of(text: str) -> datetime:
    return datetime.fromisoformat(text)


def test_ticks_run_at_their_second_and_are_recorded(kubectl: Kubectl, namespace: str, db: psycopg.Connection) -> None:
    kubectl.apply(leased_job("echo", ECHO))
    found = kubectl.wait(
        "two SUCCESS rows",
        lambda: (
            [r for r in rows(db, namespace, "echo") if r["status"] == "SUCCESS"][1:] and rows(db, namespace, "echo")
        ),
        timeout=200,
    )[:2]
    first, second = found
    assert second["tick"] - first["tick"] == timedelta(minutes=1)
    assert second["fencing_token"] > first["fencing_token"]
    made = {p["metadata"]["annotations"][protocol.ANNOTATION_RUN_KEY]: p for p in pods(kubectl, "echo")}
    for row in found:
        assert row["attempt"] == 1
        assert row["run_key"] == row["tick"].strftime("%Y-%m-%dT%H:%M:%SZ")
        # Pod times are cut to seconds: the same second means a skew below one.
        pod = made[row["run_key"]]
        assert seconds_of(pod["metadata"]["creationTimestamp"]) == row["tick"]
        seen = dict(line.split("=", 1) for line in kubectl.logs(pod["metadata"]["name"], "main").splitlines())
        assert seen[protocol.ENV_RUN_KEY] == row["run_key"]
        assert seen[protocol.ENV_SCHEDULED_TIME] == row["run_key"]
        assert seen[protocol.ENV_IDEMPOTENCY_KEY] == row["lock_key"]
        assert seen[protocol.ENV_CODE] == f"{namespace}/echo"
        assert seen[protocol.ENV_ATTEMPT] == "1"
        assert int(seen[protocol.ENV_FENCING_TOKEN]) == row["fencing_token"]
    kubectl.wait("status shows it", lambda: result(kubectl, "echo") == "Success")
    header, line, *_ = kubectl("get", "leasedjobs").splitlines()
    assert header.split("  ")[0] == "NAME"
    for column in ("SCHEDULE", "TIME ZONE", "SUSPEND", "ACTIVE", "LAST SCHEDULE", "LAST RESULT", "AGE"):
        assert column in header
    assert line.startswith("echo")
    assert "* * * * *" in line
    assert "Etc/UTC" in line
    wide = kubectl("get", "lj", "-o", "wide").splitlines()[0]
    for column in ("NEXT", "HOLDER", "CODE"):
        assert column in wide


def test_initial_runs_once_and_not_again_when_applied_anew(
    kubectl: Kubectl, namespace: str, db: psycopg.Connection
) -> None:
    job = leased_job("seed", ECHO, type="Initial")
    kubectl.apply(job)
    kubectl.wait("SUCCESS", lambda: succeeded(db, namespace, "seed"), timeout=60)
    kubectl("delete", "leasedjob", "seed", "--timeout=30s")
    kubectl.wait("its Pod is gone", lambda: not pods(kubectl, "seed"), timeout=60)
    kubectl.apply(job)
    kubectl.wait(
        "accepted", lambda: (kubectl.json("get", "lj", "seed").get("status") or {}).get("lastResult") == "Success"
    )
    # A marker that is later than any run of the new object would be.
    kubectl.apply(leased_job("after", ECHO, type="Initial"))
    kubectl.wait("the marker's run", lambda: succeeded(db, namespace, "after"))
    (row,) = rows(db, namespace, "seed")
    assert (row["attempt"], row["status"]) == (1, "SUCCESS")
    assert not pods(kubectl, "seed")


def test_a_deleted_pod_is_drained_and_its_run_goes_on_at_once(
    kubectl: Kubectl, namespace: str, db: psycopg.Connection
) -> None:
    program = """
        import os, signal, sys, time
        print("started attempt", os.environ["LEASEDJOB_ATTEMPT"])
        def term(*_):
            print("SIGTERM", time.time())
            time.sleep(6)
            print("drained", time.time())
            sys.exit(0)
        signal.signal(signal.SIGTERM, term)
        while True:
            signal.pause()
    """
    timing = {
        "lease": {"durationSeconds": 60, "heartbeatSeconds": 2},
        "shutdown": {"preStopSeconds": 4, "terminationGracePeriodSeconds": 20},
    }
    kubectl.apply(leased_job("slow", program, schedule=NEVER, **timing), run_of("slow", "now"))
    pod = kubectl.wait("the workload runs", lambda: _running(kubectl, "slow"), timeout=60)
    name = pod["metadata"]["name"]
    follow = subprocess.Popen(kubectl.argv("logs", "-f", name, "-c", "main"), stdout=subprocess.PIPE, text=True)
    sidecar = subprocess.Popen(
        kubectl.argv("logs", "-f", name, "-c", protocol.CONTAINER_HOLD), stdout=subprocess.PIPE, text=True
    )
    kubectl.wait(
        "a heartbeat",
        lambda: rows(db, namespace, "slow")[0]["modified_at"] > rows(db, namespace, "slow")[0]["adopted_at"],
    )
    asked = time.time()
    kubectl("delete", "pod", name, "--wait=false")
    out, _ = follow.communicate(timeout=60)
    told, _ = sidecar.communicate(timeout=60)
    marks = {
        line.split()[0]: float(line.split()[1]) for line in out.splitlines() if line.startswith(("SIGTERM", "drained"))
    }
    assert marks["SIGTERM"] - asked >= 4, "preStop comes first"
    assert marks["drained"] - marks["SIGTERM"] >= 6, "and the workload has the rest of the grace period"
    assert "drain" in told.lower(), told
    row = kubectl.wait(
        "attempt 2 is adopted",
        lambda: next((r for r in rows(db, namespace, "slow") if r["attempt"] == 2 and r["pod_uid"]), None),
        timeout=30,
    )
    assert row["interruptions"] == 1
    assert row["failures"] == 0
    # Heartbeats went on while it drained, and the next attempt came only when the workload had ended.
    assert row["started_at"].timestamp() >= marks["drained"]
    assert row["started_at"].timestamp() - marks["drained"] < 8
    kubectl("patch", "leasedjobrun", "now", "--type=merge", "-p", '{"spec":{"cancel":true}}')
    kubectl.wait("cancelled", lambda: phase(kubectl, "now") == "Cancelled", timeout=60)


def _running(kubectl: Kubectl, job: str, attempt: int | None = None) -> Json | None:
    for pod in pods(kubectl, job):
        states = [s["state"] for s in pod["status"].get("containerStatuses") or []]
        wanted = attempt is None or pod["metadata"]["annotations"][protocol.ANNOTATION_ATTEMPT] == str(attempt)
        if wanted and states and all("running" in s for s in states) and "deletionTimestamp" not in pod["metadata"]:
            return pod
    return None


EXAMPLES = {
    "01-hello": ("hello", "Success", 100),
    "02-initial": ("create-tables", "Success", 60),
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(kubectl: Kubectl, example: str) -> None:
    name, wanted, seconds = EXAMPLES[example]
    kubectl("apply", "-f", str(REPOSITORY / "examples" / example))
    kubectl.wait(
        f"{example}: {wanted}",
        lambda: result(kubectl, name) == wanted,
        timeout=seconds,
    )


def test_example_with_retries(kubectl: Kubectl, namespace: str, db: psycopg.Connection) -> None:
    kubectl("apply", "-f", str(REPOSITORY / "examples" / "03-retries"))
    row = kubectl.wait(
        "a run that succeeded after failures",
        lambda: next((r for r in rows(db, namespace, "flaky") if r["status"] == "SUCCESS" and r["failures"] > 0), None),
        timeout=240,
    )
    assert row["attempt"] == row["failures"] + 1
    kubectl("delete", "-f", str(REPOSITORY / "examples" / "03-retries"))


def test_example_that_is_drained(kubectl: Kubectl, namespace: str, db: psycopg.Connection) -> None:
    kubectl("apply", "-f", str(REPOSITORY / "examples" / "04-drained"))
    pod = kubectl.wait("its workload runs", lambda: _running(kubectl, "drained"), timeout=100)
    began = time.monotonic()
    kubectl("delete", "pod", pod["metadata"]["name"], timeout=90)
    assert time.monotonic() - began <= 64, "the grace period of 60 s and 4 s"
    kubectl.wait("the next attempt runs", lambda: _running(kubectl, "drained", 2), timeout=30)
    kubectl("delete", "-f", str(REPOSITORY / "examples" / "04-drained"))


def test_run_now_and_cancel(kubectl: Kubectl, namespace: str, db: psycopg.Connection) -> None:
    kubectl.apply(leased_job("task", "import time\ntime.sleep(600)", schedule=NEVER, **QUICK), run_of("task", "one"))
    kubectl.wait("running", lambda: _running(kubectl, "task"), timeout=60)
    kubectl.apply(run_of("task", "two"))
    kubectl.wait(
        "the second waits for the first (Forbid)",
        lambda: (kubectl.json("get", "ljr", "two").get("status") or {}).get("reason") == "Overlap",
    )
    kubectl("patch", "leasedjobrun", "one", "--type=merge", "-p", '{"spec":{"cancel":true}}')
    kubectl.wait("cancelled", lambda: phase(kubectl, "one") == "Cancelled", timeout=60)
    kubectl.wait("the second runs", lambda: phase(kubectl, "two") == "Running", timeout=60)
    first, second = rows(db, namespace, "task")
    assert (first["status"], first["reason"], first["retry_at"]) == ("FAIL", "Cancelled", None)
    assert second["fencing_token"] > first["fencing_token"]
    kubectl("delete", "leasedjob", "task", "--timeout=30s")


QUICK = {
    "lease": {"durationSeconds": 60, "heartbeatSeconds": 5},
    "shutdown": {"preStopSeconds": 0, "terminationGracePeriodSeconds": 5},
}


def next_minute() -> datetime:
    return (datetime.now(UTC) + timedelta(minutes=1)).replace(second=0, microsecond=0)
