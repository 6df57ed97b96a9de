"""Every crash window of docs/guarantees.md, with a process that really dies in it.

Where a process has to die between two of its own steps, a proxy holds its next request while the test kills it.
"""

from __future__ import annotations

import signal
import time
from datetime import UTC, datetime, timedelta

import pytest

from leasedjob import protocol
from leasedjob.identity import run_key_for
from leasedjob.lease.rows import AdoptVerdict, Outcome
from leasedjob.protocol import Seen
from tests.controller.control_plane import Bench, Json, Kubelet, wait_until
from tests.controller.proxy import ApiProxy, TcpProxy


def _through(bench: Bench, proxy: ApiProxy) -> dict[str, str]:
    return {"LEASEDJOB_KUBECONFIG": str(bench.plane.kubeconfig(proxy.port))}


def _running(bench: Bench, job: str = "job", **spec: object) -> Kubelet:
    bench.apply(job, suspend=True, **spec)
    bench.run_now(job)
    kubelet = Kubelet(bench, bench.pod_for(job))
    kubelet.run()
    return kubelet


def _known(bench: Bench, job: str) -> None:
    wait_until(f"{job} is accepted", lambda: bench.ready_condition(job).get("status") == "True")


def _pods_of(bench: Bench, row: Json) -> list[Json]:
    return [p for p in bench.pods() if p["metadata"]["annotations"][protocol.ANNOTATION_LEASE] == str(row["id"])]


@pytest.mark.parametrize("helper", ["another replica", "the same one, restarted"])
def test_killed_between_claim_and_pod(bench: Bench, helper: str) -> None:
    with ApiProxy(bench.plane) as proxy:
        stalled = proxy.rule(lambda r: r.creates("pods"), hold=True)
        victim = bench.operator("victim", **_through(bench, proxy))
        bench.apply("job", suspend=True)
        bench.run_now("job")
        stalled.wait_seen()
        row = bench.row_when("job", lambda r: r["status"] == "RUNNING", "claimed")
        victim.kill()
        assert bench.pods() == []
        if helper == "another replica":
            bench.operator("second")
        else:
            stalled.release()
            victim.start()
        pod = bench.pod_for("job")
        assert Kubelet(bench, pod).run().verdict is AdoptVerdict.ADOPTED
    after = bench.rows("job")[-1]
    assert (after["id"], after["attempt"], after["fencing_token"]) == (row["id"], 1, row["fencing_token"])
    assert len(bench.pods()) == 1


def test_killed_when_the_answer_to_the_pods_creation_is_lost(bench: Bench) -> None:
    with ApiProxy(bench.plane) as proxy:
        proxy.rule(lambda r: r.creates("pods"), lose=True, times=1)
        bench.operator("unlucky", **_through(bench, proxy))
        bench.apply("job", suspend=True)
        bench.run_now("job")
        assert Kubelet(bench, bench.pod_for("job")).run().verdict is AdoptVerdict.ADOPTED
    assert len(bench.pods()) == 1
    assert bench.rows("job")[-1]["attempt"] == 1


def test_killed_between_pod_and_status(bench: Bench) -> None:
    with ApiProxy(bench.plane) as proxy:
        victim = bench.operator("victim", **_through(bench, proxy))
        bench.apply("job", suspend=True)
        _known(bench, "job")
        stalled = proxy.rule(lambda r: r.writes_status(), hold=True)
        run = bench.run_now("job")["metadata"]["name"]
        pod = bench.pod_for("job")
        stalled.wait_seen()
        victim.kill()
    assert not bench.status("job").get("active")
    bench.operator("second")
    wait_until("the job shows it", lambda: bench.status("job").get("active"))
    wait_until("the run shows it", lambda: bench.run(run).get("status", {}).get("attempt") == 1)
    Kubelet(bench, pod).run()
    wait_until("both show that it runs", lambda: bench.run_status(run).get("phase") == "Running")


@pytest.mark.parametrize(
    "ticks", [2, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(1500)])], ids=["2 ticks", "50 ticks"]
)
def test_killed_between_pod_and_status_at_every_tick(bench: Bench, ticks: int) -> None:
    """What the watches say is three seconds late, the first two statuses are refused as conflicts, and then the process
    dies, at each tick: one row and one Pod for each, in order, and the last one is shown in the end."""
    latest = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=20)  # the next one: in 40 minutes
    hourly = f"{latest.minute} * * * *"
    bench.apply("job", schedule=hourly, missedRunPolicy="RunAll", successfulRunsHistoryLimit=ticks + 1)
    first = bench.operator("before")
    _known(bench, "job")
    first.stop()
    bench.sql("UPDATE leasedjob.job_code SET watermark = %s", latest - timedelta(hours=ticks))
    with ApiProxy(bench.plane) as proxy:
        proxy.watch_delay = 3.0
        operator = bench.operator("victim", start=False, **_through(bench, proxy))
        for n in range(ticks):
            conflicts = proxy.rule(lambda r: r.writes_status(), answer=(409, "Conflict", "modified"), times=2)
            stalled = proxy.rule(lambda r: r.writes_status(), hold=True)
            operator.start()
            row = wait_until(f"tick {n + 1}", lambda n=n: len(r := bench.rows("job")) > n and r[-1], 60)
            pod = wait_until("its Pod", lambda row=row: _pods_of(bench, row), 60)[0]
            conflicts.wait_seen(2, 60)
            stalled.wait_seen(1, 60)
            operator.kill()
            stalled.release()
            assert len(bench.rows("job")) == n + 1
            kubelet = Kubelet(bench, pod)
            kubelet.run()
            kubelet.end(0)
        operator.start()
        bench.row_when("job", lambda r: r["status"] == "SUCCESS", "the last one", seconds=60)
        wait_until("shown", lambda: bench.status("job").get("lastScheduleTime") == run_key_for(latest), 60)
        wait_until("shown as done", lambda: bench.status("job").get("lastResult") == "Success", 60)
        bench.close()
    rows = bench.rows("job")
    assert [r["tick"] for r in rows] == [latest - timedelta(hours=n) for n in reversed(range(ticks))]
    assert {(r["status"], r["attempt"]) for r in rows} == {("SUCCESS", 1)}
    assert "reconcile of" not in operator.log.read_text(), "no error that nobody expected"


@pytest.mark.parametrize("later", [False, True], ids=["before the lease's end", "after the lease's end"])
def test_killed_between_the_workloads_exit_and_its_outcome(bench: Bench, later: bool) -> None:
    """An image that reports nothing ends while no operator runs."""
    victim = bench.operator("victim")
    kubelet = _running(bench, lease={"durationSeconds": 20, "heartbeatSeconds": 2})
    victim.kill()
    kubelet.end(0)
    expires = bench.rows("job")[-1]["expires_at"]
    if later:
        wait_until("the lease has expired", lambda: bench.sql("SELECT clock_timestamp() > %s", expires)[0][0], 30, 0.3)
    assert bench.rows("job")[-1]["status"] == "RUNNING"
    victim.start()
    row = bench.row_when("job", lambda r: r["status"] != "RUNNING" or r["attempt"] > 1, "recorded")
    assert (row["status"], row["attempt"]) == ("SUCCESS", 1)


def test_killed_between_outcome_and_the_pods_removal(bench: Bench) -> None:
    with ApiProxy(bench.plane) as proxy:
        victim = bench.operator("victim", **_through(bench, proxy))
        kubelet = _running(bench, successfulRunsHistoryLimit=0)
        stalled = proxy.rule(lambda r: r.method == "DELETE", hold=True)
        kubelet.end(0)
        bench.row_when("job", lambda r: r["status"] == "SUCCESS", "recorded")
        stalled.wait_seen()
        victim.kill()
    assert not bench.deleting(kubelet.pod)
    bench.operator("second")
    wait_until("removed", lambda: bench.deleting(kubelet.pod))
    assert bench.rows("job")[-1]["status"] == "SUCCESS"


def test_adopted_twice_by_the_same_pod_and_then_killed(bench: Bench) -> None:
    """Adopted, not yet holding: a restarted adopt shows the same proposed token, and is told the same again."""
    bench.operator()
    bench.apply("job", suspend=True)
    bench.run_now("job")
    kubelet = Kubelet(bench, bench.pod_for("job"))
    first, second = kubelet.adopt(), kubelet.adopt()
    assert first.verdict is second.verdict is AdoptVerdict.ADOPTED
    assert first.fencing_token == second.fencing_token
    kubelet.start()
    kubelet.end(0)
    assert bench.row_when("job", lambda r: r["status"] == "SUCCESS", "recorded")["attempt"] == 1


def test_a_heartbeat_whose_answer_is_lost_counts_in_the_database_only(bench: Bench) -> None:
    bench.operator()
    kubelet = _running(bench)
    before = bench.rows("job")[-1]["expires_at"]
    assert kubelet.heartbeat()  # the answer to this one is what gets lost
    after = bench.rows("job")[-1]["expires_at"]
    assert after > before
    assert kubelet.heartbeat(), "the next one tells"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_replaced_during_a_tick(bench: Bench, number: signal.Signals) -> None:
    """The replica that won a run is killed, or frozen, before its Pod exists; the other one goes on, exactly once."""
    with ApiProxy(bench.plane) as proxy:
        stalled = proxy.rule(lambda r: r.creates("pods"), hold=True)
        victim = bench.operator("victim", **_through(bench, proxy))
        bench.apply("job", type="Initial")
        stalled.wait_seen()
        victim.signal(number)
        bench.operator("second")
        kubelet = Kubelet(bench, bench.pod_for("job"))
        kubelet.run()
        kubelet.end(0)
        bench.row_when("job", lambda r: r["status"] == "SUCCESS", "done by the other one")
        stalled.release()
        victim.signal(signal.SIGCONT)
        if number is signal.SIGSTOP:
            wait_until("thawed and ready", victim.ready)
            run = bench.run_now("job")["metadata"]["name"]  # a sign that it keeps up
            wait_until("seen", lambda: bench.run(run).get("status"))
    row = next(r for r in bench.rows("job") if r["type"] == "INITIAL")
    assert (row["status"], row["attempt"]) == ("SUCCESS", 1)
    assert len(_pods_of(bench, row)) == 1


def test_deleted_with_a_claim_and_no_pod(bench: Bench) -> None:
    with ApiProxy(bench.plane) as proxy:
        stalled = proxy.rule(lambda r: r.creates("pods"), hold=True)
        bench.operator("stalled", **_through(bench, proxy))
        bench.apply("job", suspend=True)
        bench.run_now("job")
        stalled.wait_seen()
        bench.delete("job")
        bench.operator("other", LEASEDJOB_COMPARE_SECONDS="2")
        row = bench.row_when("job", lambda r: r["status"] == "FAIL", "released")
        assert (row["reason"], row["retry_at"], row["failures"]) == ("JobDeleted", None, 0)
        wait_until("unregistered", lambda: not bench.sql("SELECT FROM leasedjob.job_registration"))
        stalled.release()
        wait_until("what comes late is deleted", lambda: any(r.method == "DELETE" for r in proxy.requests))
        wait_until("no Pod", lambda: not bench.pods())
    assert bench.rows("job")[-1]["attempt"] == 1


@pytest.mark.parametrize(
    ("code", "status"), [(0, "SUCCESS"), (3, "FAIL")], ids=["the workload succeeds", "the workload fails"]
)
def test_deleted_while_its_pod_runs(bench: Bench, code: int, status: str) -> None:
    bench.operator()
    kubelet = _running(bench, backoffLimit=5)
    bench.delete("job")
    wait_until("unregistered", lambda: not bench.sql("SELECT FROM leasedjob.job_registration"))
    assert bench.rows("job")[-1]["status"] == "RUNNING", "the Pod goes on until it is stopped or ends"
    assert kubelet.heartbeat()
    kubelet.end(code)
    row = bench.row_when("job", lambda r: r["status"] != "RUNNING", "recorded")
    assert (row["status"], row["retry_at"], row["attempt"]) == (status, None, 1)


def test_deleted_while_no_operator_runs(bench: Bench) -> None:
    """One whose Pod has ended meanwhile, one with a claim only, one that waits for its retry."""
    with ApiProxy(bench.plane) as proxy:
        victim = bench.operator("victim", **_through(bench, proxy))
        ended = _running(bench, "ended")
        failing = _running(bench, "failing", backoffLimit=5)
        failing.end(1)
        bench.row_when("failing", lambda r: r["retry_at"] is not None, "waits for its retry")
        stalled = proxy.rule(lambda r: r.creates("pods"), hold=True)
        bench.apply("claimed", suspend=True)
        bench.run_now("claimed")
        stalled.wait_seen()
        victim.kill()
    for job in ("ended", "failing", "claimed"):
        bench.delete(job)
    ended.end(0)
    bench.operator("after", LEASEDJOB_COMPARE_SECONDS="2")
    assert bench.row_when("ended", lambda r: r["status"] != "RUNNING", "recorded")["status"] == "SUCCESS"
    claimed = bench.row_when("claimed", lambda r: r["status"] == "FAIL", "the claim is released")
    assert (claimed["reason"], claimed["retry_at"]) == ("JobDeleted", None)
    row = bench.row_when("failing", lambda r: r["retry_at"] is None, "the retry is given up")
    assert row["reason"] == "JobDeleted"
    wait_until("unregistered", lambda: not bench.sql("SELECT FROM leasedjob.job_registration"))


def test_deleted_and_created_anew_at_once(bench: Bench) -> None:
    """`kubectl replace --force`: a replica that has heard of the deletion only must not end the new object's run."""
    with ApiProxy(bench.plane) as proxy:
        bench.operator("prompt")
        bench.operator("late", **_through(bench, proxy))
        bench.apply("job", suspend=True)
        _known(bench, "job")
        for _ in range(3):
            bench.delete("job")
            bench.apply("job", type="Schedule", suspend=True)
            bench.run_now("job")
            kubelet = Kubelet(bench, bench.pod_for("job"))
            kubelet.run()
            kubelet.end(0)
            bench.row_when("job", lambda r: r["status"] == "SUCCESS", "done")
            bench.core.delete_namespaced_pod(kubelet.pod["metadata"]["name"], bench.namespace, grace_period_seconds=0)
    assert [r["status"] for r in bench.rows("job")] == ["SUCCESS"] * 3


def test_a_replica_that_has_not_heard_of_the_deletion_starts_nothing(bench: Bench) -> None:
    with ApiProxy(bench.plane) as proxy:
        deaf = bench.operator("deaf", **_through(bench, proxy))
        bench.apply("job", suspend=True, backoffLimit=3)
        bench.run_now("job")
        kubelet = Kubelet(bench, bench.pod_for("job"))
        kubelet.run()
        kubelet.end(1)
        bench.row_when("job", lambda r: r["retry_at"] is not None, "a retry is due in 10 s")
        proxy.silent = True
        other = bench.operator("other")
        wait_until("the other one has it, too", lambda: other.ready())
        bench.delete("job")
        row = bench.row_when("job", lambda r: r["status"] == "FAIL" and r["retry_at"] is None, "given up")
        assert row["reason"] == "JobDeleted"
        asked = len([r for r in proxy.requests if r.creates("pods")])
        # What the deaf one would have started, it would have started when the retry was due.
        wait_until("the retry's time is over", lambda: time.time() > row["finished_at"].timestamp() + 13, 30, 0.3)
        assert deaf.alive
        assert len([r for r in proxy.requests if r.creates("pods")]) == asked
        assert bench.rows("job")[-1]["attempt"] == 1
        assert not bench.sql("SELECT FROM leasedjob.job_registration"), "not registered again"


def test_the_commit_of_a_claim_is_of_unknown_fate(bench: Bench) -> None:
    """The connection is cut again and again while runs are claimed and recorded: each run has one Pod per attempt."""
    with TcpProxy(bench.postgres.address, bench.postgres.port) as proxy:
        (bench.credentials / "host").write_text("127.0.0.1")
        (bench.credentials / "port").write_text(str(proxy.port))
        bench.operator(
            LEASEDJOB_SIDECAR_DATABASE_HOST=bench.postgres.address,
            LEASEDJOB_SIDECAR_DATABASE_PORT=str(bench.postgres.port),
        )
        jobs = [f"job-{n}" for n in range(6)]
        for job in jobs:
            bench.apply(job, suspend=True)
        for job in jobs:
            bench.run_now(job)
            proxy.cut()
        for job in jobs:
            kubelet = Kubelet(bench, bench.pod_for(job))
            kubelet.run()
            kubelet.end(0)
            proxy.cut()
        for job in jobs:
            bench.row_when(job, lambda r: r["status"] == "SUCCESS", "recorded")
    for job in jobs:
        (row,) = bench.rows(job)
        assert row["attempt"] == len(_pods_of(bench, row)) == 1


def test_a_reported_outcome_survives_the_operator(bench: Bench) -> None:
    """The workload reports, then everything dies: the row is final, and nobody starts it again."""
    victim = bench.operator("victim")
    kubelet = _running(bench)
    victim.kill()
    assert kubelet.report(Outcome.COMPLETE, {"rows": 1})
    kubelet.end(137, testimony=kubelet.testimony(Seen.REPORTED, outcome="complete"), hold_code=137)
    victim.start()
    wait_until("shown", lambda: bench.status("job").get("lastResult") == "Success")
    (row,) = bench.rows("job")
    assert (row["status"], row["attempt"], row["data"]) == ("SUCCESS", 1, {"rows": 1})
