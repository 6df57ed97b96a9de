"""`leasedjob exec` and the workload SDK in a run's Pod, on a real kubelet.

The image is the operator's: it is built from this working tree and has the package, as a workload's own image has after
`pip install leasedjob`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import psycopg
import pytest

from leasedjob import protocol
from tests.e2e.conftest import RELEASE_NAMESPACE, Measured, Release
from tests.e2e.jobs import NEVER, container, leased_job, run_of
from tests.e2e.kube import Kubectl
from tests.e2e.test_path import phase, pods, rows

TIMING: dict[str, Any] = {
    "lease": {"durationSeconds": 90, "heartbeatSeconds": 4},
    "shutdown": {"preStopSeconds": 4, "terminationGracePeriodSeconds": 30},
}
# The first attempt works until it is stopped, and then needs some seconds; the next one has nothing left to do. A shell
# stands in between, which passes nothing on by itself.
WORK = """
import os, signal, sys, time
if os.environ["LEASEDJOB_ATTEMPT"] != "1":
    sys.exit(0)
def term(*_):
    print("SIGTERM", time.time(), flush=True)
    end = time.monotonic() + 5
    while (left := end - time.monotonic()) > 0:
        time.sleep(left)
    print("finished", time.time(), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, term)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def image(cluster_kubectl: Kubectl, release: Release) -> str:
    """The operator's image, as the release runs it."""
    found = cluster_kubectl.within(RELEASE_NAMESPACE).items("deployments")
    name: str = found[0]["spec"]["template"]["spec"]["containers"][0]["image"]
    return name


def wrapped(image: str, *command: str) -> dict[str, Any]:
    return container("", image=image, command=["leasedjob", "exec", "--", *command])


def test_a_failure_shows_its_exit_code_and_the_end_of_stderr(
    kubectl: Kubectl, namespace: str, db: psycopg.Connection, image: str
) -> None:
    program = "echo working; echo one >&2; echo no such order >&2; exit 3"
    job = leased_job("fails", containers=[wrapped(image, "sh", "-c", program)], schedule=NEVER, **TIMING)
    kubectl.apply(job, run_of("fails", "now"))
    kubectl.wait("the run has failed", lambda: phase(kubectl, "now") == "Failed", timeout=120)
    (row,) = rows(db, namespace, "fails")
    assert (row["status"], row["outcome"], row["failures"], row["attempt"]) == ("FAIL", "fail", 1, 1)
    assert row["data"] == {
        "exitCode": 3,
        "error": "the command exited with 3: no such order",
        "stderr": "one\nno such order",
    }
    (pod,) = pods(kubectl, "fails")
    (main,) = pod["status"]["containerStatuses"]
    assert main["state"]["terminated"]["exitCode"] == 3, "the command's own"
    (run,) = kubectl.json("get", "lj", "fails")["status"]["recentRuns"]
    assert (run["reason"], run["message"]) == ("Reported", "the command exited with 3: no such order")
    log = kubectl.logs(pod["metadata"]["name"], "main")
    assert "working" in log
    assert "no such order" in log, "standard error goes to the log as before"
    kubectl.wait(
        "an Event says it",
        lambda: any("the command exited with 3: no such order" in e["message"] for e in _events(kubectl)),
    )


def test_a_deleted_pod_s_command_is_drained_and_the_next_attempt_succeeds(
    kubectl: Kubectl, namespace: str, db: psycopg.Connection, image: str, measured: Measured
) -> None:
    line = f"python3 -c '{WORK}' && echo finished the line"
    job = leased_job("drained", containers=[wrapped(image, "sh", "-c", line)], schedule=NEVER, **TIMING)
    kubectl.apply(job, run_of("drained", "now"))
    name = kubectl.wait("its Pod", lambda: pods(kubectl, "drained"), timeout=60)[0]["metadata"]["name"]
    kubectl.wait("the command runs", lambda: "ready" in kubectl.run("logs", name, "-c", "main").stdout, timeout=60)
    logs = kubectl.argv("logs", "-f", name, "-c", "main")
    follow = subprocess.Popen(logs, stdout=subprocess.PIPE, stderr=sys.stderr, text=True)
    asked = time.time()
    kubectl("delete", "pod", name, "--wait=false")
    out, _ = follow.communicate(timeout=90)
    marks = {w[0]: float(w[1]) for w in map(str.split, out.splitlines()) if w[0] in ("SIGTERM", "finished") and w[1:2]}
    assert marks["finished"] - marks["SIGTERM"] >= 5, "it finished what it had in hand"
    assert "stopped: signal; exit code 143" in out, "the shell's; what it stood for had its time"
    row = kubectl.wait("it succeeded", lambda: next(iter(_succeeded(db, namespace, "drained")), None), timeout=90)
    assert (row["attempt"], row["failures"], row["interruptions"]) == (2, 0, 1)
    assert row["data"] == {"exitCode": 0}
    assert row["started_at"].timestamp() > marks["finished"], "and nobody began before"
    measured(
        f"leasedjob exec, Pod deleted: SIGTERM after {marks['SIGTERM'] - asked:.1f} s (preStop 4), the work's end after"
        f" {marks['finished'] - asked:.1f}, the next attempt after {row['started_at'].timestamp() - asked:.1f}"
    )


SERVICE = """
import asyncio, sys, time
from leasedjob.workload import *

async def main():
    state = ShutdownState.listening()
    run = current_run()
    print("run", run.mode, run.attempt, flush=True)
    if run.attempt > 1:
        await asyncio.to_thread(run.complete, {"attempts": run.attempt})
        return
    def mark(what):
        sys.stdout.write(f"{what} {time.time()}\\n")  # at once: several threads write
        sys.stdout.flush()
    state.signal.call(lambda: mark("notice"))
    state.stopping.call(lambda: mark("stop"))
    async def iterate():
        mark("began")
        await asyncio.sleep(7)
        mark("ended")
    async def serve():
        mark("closing")
    async with GracefulShutdown(state) as shutdown:
        intervals = IntervalRegistry(state)
        intervals.add("work", 0.5, iterate)
        shutdown.add(intervals)
        shutdown.on_stop(Phase.HTTP, "api", serve)
        shutdown.on_stop(Phase.POOLS, "pool", lambda: mark("pool"))
        await shutdown.finished()
    await asyncio.to_thread(run.release, {"at": 1})

asyncio.run(main())
"""


def test_a_service_on_the_sdk_hears_the_notice_first_finishes_its_iteration_and_gives_the_run_back(
    kubectl: Kubectl, namespace: str, db: psycopg.Connection, image: str, measured: Measured
) -> None:
    service = container("", image=image, command=["python3", "-c", SERVICE])
    kubectl.apply(leased_job("service", containers=[service], schedule=NEVER, **TIMING), run_of("service", "now"))
    name = kubectl.wait("its Pod", lambda: pods(kubectl, "service"), timeout=60)[0]["metadata"]["name"]
    kubectl.wait("an iteration", lambda: "began" in kubectl.run("logs", name, "-c", "main").stdout, timeout=60)
    follow = subprocess.Popen(kubectl.argv("logs", "-f", name, "-c", "main"), stdout=subprocess.PIPE, text=True)
    asked = time.time()
    kubectl("delete", "pod", name, "--wait=false")
    out, _ = follow.communicate(timeout=90)
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["run", "sidecar", "1"]
    at = {words[0]: float(words[1]) for words in lines[1:]}
    assert [words[0] for words in lines].count("began") == [words[0] for words in lines].count("ended"), out
    assert at["stop"] - at["notice"] >= 3, "preStop is 4 s"
    assert at["closing"] >= at["stop"], "a server serves until then"
    assert at["pool"] >= at["ended"], "the pool closes last"
    row = kubectl.wait("it succeeded", lambda: next(iter(_succeeded(db, namespace, "service")), None), timeout=90)
    assert (row["attempt"], row["interruptions"], row["failures"]) == (2, 1, 0)
    assert row["data"] == {"attempts": 2}
    after = " ".join(f"{what} {at[what] - asked:.1f}" for what in ("notice", "stop", "ended", "pool"))
    measured(f"SDK service, Pod deleted, seconds after: {after}")


def _succeeded(db: psycopg.Connection, namespace: str, job: str) -> list[dict[str, Any]]:
    return [r for r in rows(db, namespace, job) if r["status"] == "SUCCESS"]


def _events(kubectl: Kubectl) -> list[dict[str, Any]]:
    return [{"message": e.get("message") or e.get("note") or ""} for e in kubectl.items("events")]


def test_the_variables_of_the_workload(kubectl: Kubectl, image: str) -> None:
    """Two containers: the success of one is not the run's."""
    both = [wrapped(image, "true") | {"name": "first"}, wrapped(image, "sleep", "4") | {"name": "second"}]
    kubectl.apply(
        leased_job("two", containers=both, schedule=NEVER, activeDeadlineSeconds=300, **TIMING), run_of("two", "now")
    )
    kubectl.wait("the run has ended", lambda: phase(kubectl, "now") in ("Succeeded", "Failed"), timeout=120)
    assert phase(kubectl, "now") == "Succeeded"
    (pod,) = pods(kubectl, "two")
    env = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}
    assert (env[protocol.ENV_CONTAINERS], env[protocol.ENV_ACTIVE_DEADLINE]) == ("2", "300")
    (run,) = kubectl.json("get", "lj", "two")["status"]["recentRuns"]
    assert run["reason"] == "Completed", "by the exit codes of both"
