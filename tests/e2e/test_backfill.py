"""A backfill across both operator replicas; a run now, and its cancel in the middle; why a tick did, or didn't, run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from tests.e2e.conftest import Release
from tests.e2e.jobs import SHORT, leased_job, run_of
from tests.e2e.kube import Kubectl
from tests.e2e.test_path import phase, pods, rows

LAST = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(hours=12)
DAILY = f"{LAST.minute} {LAST.hour} * * *"  # not while the tests run
TICKS = 30
FINAL = ("Succeeded", "Failed", "Cancelled", "Refused")


def key(tick: datetime) -> str:
    return tick.strftime("%Y-%m-%dT%H:%M:%SZ")


def ended(kubectl: Kubectl, run: str, *, timeout: float = 60) -> dict[str, Any]:
    kubectl.wait(f"{run} has ended", lambda: phase(kubectl, run) in FINAL, timeout=timeout)
    status: dict[str, Any] = kubectl.json("get", "ljr", run)["status"]
    return status


def why(kubectl: Kubectl, job: str, name: str, **about: Any) -> dict[str, Any]:
    kubectl.apply(run_of(job, name, action="Explain", **about))
    found: dict[str, Any] = ended(kubectl, name)["explanation"]
    return found


def at_once(found: list[dict[str, Any]]) -> int:
    events = sorted([(r["created_at"], 1) for r in found] + [(r["finished_at"], -1) for r in found])
    most = now = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most


def test_thirty_ticks_two_at_a_time_across_two_replicas(
    kubectl: Kubectl, cluster_kubectl: Kubectl, namespace: str, db: psycopg.Connection, release: Release
) -> None:
    """The replica that is drained in the middle leaves nothing behind that the other one doesn't take up."""
    program = "import os; print(os.environ['LEASEDJOB_RUN_KEY'])"
    kubectl.apply(leased_job("past", program, schedule=DAILY, concurrencyPolicy="Allow", successfulRunsHistoryLimit=40))
    ticks = [LAST - timedelta(days=n) for n in range(TICKS)][::-1]
    spec = {"from": key(ticks[0]), "to": key(ticks[-1]), "maxActive": 2}
    kubectl.apply(run_of("past", "fill", backfill=spec))
    kubectl.wait("ten runs have ended", lambda: len(rows(db, namespace, "past")) > 10, timeout=180)
    system = cluster_kubectl.within(release.namespace)
    victim = system.items("pods", "-l", "app.kubernetes.io/component=operator")[0]["metadata"]["name"]
    system("delete", "pod", victim, "--wait=false")
    status = ended(kubectl, "fill", timeout=400)
    assert status["phase"] == "Succeeded", status
    counts = status["backfill"]
    assert (counts["ticks"], counts["planned"], counts["succeeded"]) == (TICKS, TICKS, TICKS)
    found = rows(db, namespace, "past")
    assert [r["run_key"] for r in found] == [key(t) for t in ticks]
    assert {(r["status"], r["manual"]) for r in found} == {("SUCCESS", True)}
    assert at_once(found) == 2
    took = (found[-1]["finished_at"] - found[0]["created_at"]).total_seconds()
    print(f"{TICKS} ticks, two at a time: {took:.0f} s, {took / TICKS * 2:.1f} s for each run")
    oldest = next(p for p in pods(kubectl, "past") if key(ticks[0]) in str(p["metadata"]["annotations"]))
    assert kubectl.logs(oldest["metadata"]["name"], "main").strip() == key(ticks[0])

    found_again = why(kubectl, "past", "why-ran", tick=key(ticks[3]))
    assert (found_again["verdict"], found_again["run"]["attempt"]) == ("Ran", 1)
    assert why(kubectl, "past", "why-not", tick=key(ticks[3] + timedelta(minutes=1)))["verdict"] == "NotATick"
    before = why(kubectl, "past", "why-before", tick=key(ticks[0] - timedelta(days=1)))
    assert before["verdict"] == "BeforeWatermark"


def test_a_run_now_and_its_cancel_in_the_middle(kubectl: Kubectl, namespace: str, db: psycopg.Connection) -> None:
    program = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("begun")
        time.sleep(3600)
    """
    kubectl.apply(leased_job("long", program, schedule=DAILY, **SHORT))
    kubectl.apply(run_of("long", "now"))
    kubectl.wait("it runs", lambda: phase(kubectl, "now") == "Running", timeout=90)
    kubectl.wait("it works", lambda: "begun" in kubectl.logs(pods(kubectl, "long")[0]["metadata"]["name"], "main"))
    (row,) = rows(db, namespace, "long")
    assert why(kubectl, "long", "why-now", runKey=row["run_key"])["verdict"] == "Running"
    kubectl("patch", "ljr", "now", "--type=merge", "-p", '{"spec":{"cancel":true}}')
    status = ended(kubectl, "now")
    assert (status["phase"], status["reason"]) == ("Cancelled", "Cancelled")
    (row,) = rows(db, namespace, "long")
    assert (row["status"], row["retry_at"], row["reason"]) == ("FAIL", None, "Cancelled")

    # the same of a run that nobody asked for by an object: by its tick
    kubectl.apply(run_of("long", "named", tick=key(LAST)))
    kubectl.wait("it runs", lambda: phase(kubectl, "named") == "Running", timeout=90)
    kubectl.apply(run_of("long", "stop", action="Cancel", tick=key(LAST)))
    assert ended(kubectl, "stop")["reason"] == "Cancelled"
    assert ended(kubectl, "named")["phase"] == "Cancelled"
    kubectl.apply(run_of("long", "again", action="Forget", tick=key(LAST)))
    assert ended(kubectl, "again")["reason"] == "Forgotten"
    kubectl.wait(
        "the next attempt runs",
        lambda: rows(db, namespace, "long")[-1]["attempt"] == 2 and rows(db, namespace, "long")[-1]["pod_uid"],
        timeout=90,
    )
