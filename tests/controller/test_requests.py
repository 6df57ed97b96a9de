"""What a person sees of runs that were asked for, cancelled or refused: results, reasons, Events, and the log."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from leasedjob.lease import SyncJobSchedulerService
from leasedjob.lease.rows import AdoptVerdict, Outcome
from tests.controller.control_plane import Bench, Kubelet, wait_until

pytestmark = [pytest.mark.integration]
DAILY = "0 3 * * *"


def events(bench: Bench) -> list[Any]:
    return list(bench.core.list_namespaced_event(bench.namespace).items)


def said(bench: Bench) -> list[tuple[str, str, int]]:
    """Reason, type and count of every Event."""
    return sorted((e.reason, e.type, e.count) for e in events(bench))


def asked(bench: Bench, job: str, tick: str | None = None) -> str:
    name: str = bench.run_now(job, tick=tick)["metadata"]["name"]
    return name


def status_when(bench: Bench, run: str, *phases: str) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        status = bench.run_status(run)
        return status if status.get("phase") in phases else None

    answer: dict[str, Any] = wait_until(f"{run} is {' or '.join(phases)}", found, 60)
    return answer


def yesterday() -> str:
    return (datetime.now(UTC) - timedelta(days=1)).strftime("%Y-%m-%dT03:00:00Z")


def test_a_cancelled_run_is_called_so_once_and_is_nothing_to_warn_of(bench: Bench) -> None:
    bench.apply("job", schedule=DAILY, suspend=True, backoffLimit=3)
    for number in (1, 2):
        bench.operator(f"op-{number}")
    run = asked(bench, "job")
    kubelet = Kubelet(bench, bench.pod_for("job"))
    kubelet.run()
    status_when(bench, run, "Running")
    bench.cancel(run)
    wait_until("the Pod is deleted", lambda: bench.deleting(kubelet.pod), 60)
    kubelet.end(143)
    status_when(bench, run, "Cancelled")
    wait_until("the LeasedJob says so", lambda: bench.status("job").get("lastResult") == "Cancelled", 60)
    assert "lastFailureTime" not in bench.status("job")
    wait_until("a person is told", lambda: ("RunCancelled", "Normal", 1) in said(bench), 60)
    assert {(reason, kind) for reason, kind, _ in said(bench)} == {("RunStarted", "Normal"), ("RunCancelled", "Normal")}
    assert all(count == 1 for *_, count in said(bench))


def test_a_cancelled_run_that_waits_for_its_next_attempt(bench: Bench) -> None:
    bench.apply("job", schedule=DAILY, suspend=True, backoffLimit=3)
    bench.operator()
    run = asked(bench, "job")
    kubelet = Kubelet(bench, bench.pod_for("job"))
    kubelet.run()
    kubelet.end(1)
    wait_until("it waits", lambda: bench.run_status(run).get("reason") == "WaitingForRetry", 60)
    bench.cancel(run)
    status_when(bench, run, "Cancelled")
    wait_until("a person is told", lambda: ("RunCancelled", "Normal", 1) in said(bench), 60)
    assert bench.status("job")["lastResult"] == "Cancelled"


def test_what_a_workload_reports_itself_is_told_as_well_and_once(bench: Bench) -> None:
    bench.apply("job", schedule=DAILY, suspend=True)
    for number in (1, 2):
        bench.operator(f"op-{number}")
    for outcome, phase in ((Outcome.COMPLETE, "Succeeded"), (Outcome.FAIL, "Failed")):
        run = asked(bench, "job")
        row = bench.row_when("job", lambda r, run=run: f"/{run}/" in str(r["run_key"]), "is claimed", seconds=60)
        pod = wait_until(
            "its Pod",
            lambda row=row: next((p for p in bench.pods() if str(row["id"]) in json.dumps(p["metadata"])), None),
            60,
        )
        kubelet = Kubelet(bench, pod)
        kubelet.run()
        status_when(bench, run, "Running")
        assert kubelet.report(outcome)
        status_when(bench, run, phase)
        kubelet.end(0)
    wait_until("both are told", lambda: {"RunSucceeded", "RunFailed"} <= {r for r, *_ in said(bench)}, 60)
    assert [(r, kind, n) for r, kind, n in said(bench) if r != "RunStarted"] == [
        ("RunFailed", "Warning", 1),
        ("RunSucceeded", "Normal", 1),
    ]


def test_a_time_that_is_no_tick_is_refused_and_the_nearest_are_named(bench: Bench) -> None:
    bench.apply("job", schedule=DAILY)
    bench.apply("once", type="Initial", suspend=True)
    bench.operator()
    refused = status_when(bench, asked(bench, "job", "2026-07-20T03:30:00Z"), "Refused")
    assert refused["reason"] == "NotATick"
    assert "the nearest: 2026-07-20T03:00:00Z and 2026-07-21T03:00:00Z" in refused["message"]
    once = status_when(bench, asked(bench, "once", "2026-07-20T03:00:00Z"), "Refused")
    assert (once["reason"], "type Initial" in once["message"]) == ("NotATick", True)
    assert bench.rows("job") == bench.rows("once") == []


def test_a_tick_that_succeeded_a_moment_ago_is_refused_and_the_one_that_ran_it_succeeded(bench: Bench) -> None:
    """Also within the second that the API server's times are cut to."""
    bench.apply("job", schedule=DAILY)
    bench.operator()
    tick = yesterday()
    first = asked(bench, "job", tick)
    kubelet = Kubelet(bench, bench.pod_for("job"))
    kubelet.run()
    followed = asked(bench, "job", tick)  # while it goes on
    status_when(bench, followed, "Running")
    kubelet.end(0)
    bench.row_when("job", lambda r: r["status"] == "SUCCESS", "has succeeded", seconds=60)
    again = [asked(bench, "job", tick) for _ in range(3)]
    for run in again:
        status = status_when(bench, run, "Refused", "Succeeded")
        assert (status["phase"], status["reason"]) == ("Refused", "AlreadySucceeded")
    for run in (first, followed):
        assert status_when(bench, run, "Refused", "Succeeded")["phase"] == "Succeeded"
    assert len(bench.rows("job")) == 1


def test_a_tick_whose_records_were_deleted_is_refused_and_the_schedule_goes_on(bench: Bench) -> None:
    bench.apply("job", schedule=DAILY)
    operator = bench.operator()
    ticks = [(datetime.now(UTC) - timedelta(days=n)).strftime("%Y-%m-%dT03:00:00Z") for n in (3, 2)]
    for tick in ticks:
        done = asked(bench, "job", tick)
        kubelet = Kubelet(bench, bench.pod_for("job"))
        kubelet.run()
        kubelet.end(0)
        status_when(bench, done, "Succeeded")
        bench.gone(kubelet.pod)
    jobs = SyncJobSchedulerService(bench.postgres.conninfo(bench.database))
    jobs._settle_seconds = 0.0
    (pruned,) = jobs.prune(timedelta(microseconds=1), keep_last=1)
    assert pruned.rows == 1
    before = bench.status("job")["lastSuccessfulTime"]
    operator.stop()
    bench.operator("op-2")
    status = status_when(bench, asked(bench, "job", ticks[0]), "Refused")
    assert status["reason"] == "Pruned"
    assert status_when(bench, asked(bench, "job", ticks[1]), "Refused")["reason"] == "AlreadySucceeded"
    assert bench.status("job")["lastSuccessfulTime"] == before
    bench.patch("job", schedule="* * * * *")
    kubelet = Kubelet(bench, bench.pod_for("job", seconds=120))
    assert kubelet.run().verdict is AdoptVerdict.ADOPTED


def test_pods_that_are_refused_again_and_again_are_one_event_with_a_count(bench: Bench) -> None:
    template = {
        "spec": {
            "containers": [
                {"name": "main", "image": "example/main:1", "volumeMounts": [{"name": "missing", "mountPath": "/x"}]}
            ]
        }
    }
    bench.apply("bad", schedule=DAILY, suspend=True, template=template)
    for number in (1, 2):
        bench.operator(f"op-{number}")
    asked(bench, "bad")

    def counted() -> bool:
        found = [e for e in events(bench) if e.reason == "PodNotCreated"]
        return bool(found) and found[0].count >= 3

    wait_until("it was tried three times", counted, 90)
    (event,) = [e for e in events(bench) if e.reason == "PodNotCreated"]
    assert "volumeMounts[0].name" in event.message
    assert (event.type, event.involved_object.name) == ("Warning", "bad")
    assert event.last_timestamp > event.first_timestamp
    bench.row_when("bad", lambda row: row["attempt"] >= 3, "the attempts rise, the Event's words stay", seconds=90)


def test_each_decision_is_one_line_of_the_log(bench: Bench) -> None:
    bench.apply("job", schedule=DAILY, suspend=True)
    operator = bench.operator("op-debug", LEASEDJOB_LOG_LEVEL="DEBUG")
    bench.whole_run("job", seconds=60)
    log = operator.log.read_text()
    where = f"{bench.namespace}/job: manual/{bench.namespace}/"
    lines = [line for line in log.splitlines() if where in line]
    for words in ("to be claimed: asked for by a LeasedJobRun", "the database answers claimed", "ends as complete"):
        assert [line for line in lines if words in line and "DEBUG" in line], words
    assert f"{bench.namespace}/job: nothing more to do now" in log
