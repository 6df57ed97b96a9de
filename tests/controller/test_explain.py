"""Why a tick ran or not; failures that suspend a schedule; the ledger of a suspension; repair: by real operators."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from leasedjob.identity import RunIdentity
from leasedjob.lease.rows import Outcome
from tests.controller.control_plane import Bench, Kubelet, wait_until
from tests.controller.test_backfill import answer, ask, daily, key, node, ticks

pytestmark = [pytest.mark.integration]


def explained(bench: Bench, job: str, **about: Any) -> dict[str, Any]:
    status = answer(bench, ask(bench, job, action="Explain", **about))
    assert (status["phase"], status["reason"]) == ("Succeeded", "Explained"), status
    found: dict[str, Any] = status["explanation"]
    return found


def registered(bench: Bench, job: str) -> str:
    """The code, once an operator has registered the object."""
    code = f"{bench.namespace}/{job}"
    wait_until(
        "it is registered", lambda: bench.sql("SELECT code FROM leasedjob.job_registration WHERE code = %s", code), 60
    )
    return code


def set_watermark(bench: Bench, code: str, to: datetime) -> None:
    bench.sql("UPDATE leasedjob.job_code SET watermark = %s WHERE code = %s", to, code)


def test_the_kinds_of_an_answer(bench: Bench) -> None:
    bench.apply("job", schedule=daily(), backoffLimit=1, lease={"durationSeconds": 900})
    operator = bench.operator()
    code = registered(bench, "job")
    ran, failed, skipped, missed, held = ticks(5)
    with node(bench):
        assert answer(bench, ask(bench, "job", tick=key(ran)))["phase"] == "Succeeded"
    operator.stop()
    bench.sql(
        "INSERT INTO leasedjob.tick_ledger (code, first, last, count, kind, reason, decided_by)"
        " VALUES (%s, %s, %s, 1, 'skipped', 'Overlap', 'east'), (%s, %s, %s, 1, 'missed', 'StartingDeadline', 'east')",
        code, skipped, skipped, code, missed, missed,
    )  # fmt: skip
    bench.operator("op-2")

    found = explained(bench, "job", tick=key(ran))
    assert (found["verdict"], found["reason"], found["run"]["outcome"]) == ("Ran", "Success", "Success")
    assert found["run"]["attempt"] == 1
    assert found["run"]["holder"] in found["message"]

    found = explained(bench, "job", tick=key(skipped))
    assert (found["verdict"], found["reason"], found["range"]["decidedBy"]) == ("Skipped", "Overlap", "east")
    assert "concurrencyPolicy is Forbid" in found["message"]
    found = explained(bench, "job", tick=key(missed))
    assert (found["verdict"], found["reason"]) == ("Missed", "StartingDeadline")

    ahead = datetime.now(UTC).replace(second=0, microsecond=0) + timedelta(hours=12)
    found = explained(bench, "job", tick=bench.status("job")["nextScheduleTime"])
    assert (found["verdict"], found["reason"]) == ("Pending", "Future")
    assert "due in 11 h" in found["message"] or "due in 12 h" in found["message"], (ahead, found)
    found = explained(bench, "job", tick=key(failed))
    assert (found["verdict"], "was never due" in found["message"]) == ("BeforeWatermark", True)
    found = explained(bench, "job", tick=key(ran + timedelta(minutes=1)))
    assert (found["verdict"], found["previousTick"]) == ("NotATick", key(ran))
    assert found["nextTick"] == key(failed)
    found = explained(bench, "job", runKey=f"{key(ran)}#r1")
    assert (found["verdict"], found["tick"]) == ("NoSuchRun", key(ran))

    run = ask(bench, "job", tick=key(held))
    row = bench.row_when("job", lambda r: r["run_key"] == key(held), "is claimed", seconds=60)
    assert explained(bench, "job", tick=key(held))["verdict"] == "Pending"
    body = wait_until(
        "its Pod",
        lambda: next((p for p in bench.pods() if str(row["id"]) in str(p["metadata"]["annotations"])), None),
        60,
    )
    pod = Kubelet(bench, body)
    pod.run()
    answer(bench, run, "Running")
    found = explained(bench, "job", tick=key(held))
    assert (found["verdict"], found["run"]["podName"]) == ("Running", body["metadata"]["name"])
    pod.end(1)
    wait_until("it waits", lambda: bench.run_status(run).get("reason") == "WaitingForRetry", 60)
    found = explained(bench, "job", tick=key(held))
    assert (found["verdict"], found["failures"]) == ("Retrying", 1)


def test_a_year_of_suspension_and_its_resume(bench: Bench) -> None:
    """Every tick of it is in one range, and none is replayed."""
    bench.apply("job", schedule="* * * * *", suspend=True)
    operator = bench.operator()
    code = registered(bench, "job")
    operator.stop()
    start = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(days=365)
    set_watermark(bench, code, start)
    bench.operator("op-2")
    wait_until("it is written down", lambda: bench.status("job").get("skippedTicks", 0) > 525_000, 60)
    (first,) = bench.status("job")["ledger"]
    assert (first["from"], first["kind"], first["reason"]) == (
        key(start + timedelta(minutes=1)),
        "Skipped",
        "Suspended",
    )
    found = explained(bench, "job", tick=key(start + timedelta(days=100)))
    assert (found["verdict"], found["reason"]) == ("Skipped", "Suspended")
    assert found["range"]["count"] == first["count"]

    bench.patch("job", suspend=False)
    wait_until("it is resumed", lambda: bench.ready_condition("job")["reason"] == "Accepted", 60)
    ((count, rows, last),) = bench.sql("SELECT sum(count), count(*), max(last) FROM leasedjob.tick_ledger")
    ((watermark,),) = bench.sql("SELECT watermark FROM leasedjob.job_code WHERE code = %s", code)
    assert rows == 1
    assert count == (last - start) // timedelta(minutes=1), "each tick once"
    claimed = [r["tick"] for r in bench.rows("job")]
    assert all(t > last for t in claimed), "a resume replays nothing"
    assert watermark >= last


def test_an_edit_writes_down_what_it_leaves_behind(bench: Bench) -> None:
    """A run is active and the policy lets ticks wait for it; then the schedule is edited."""
    bench.apply("job", schedule=daily(), missedRunPolicy="RunAll")
    operator = bench.operator()
    code = registered(bench, "job")
    ask(bench, "job")
    kubelet = Kubelet(bench, bench.pod_for("job"))
    kubelet.run()
    operator.stop()
    set_watermark(bench, code, datetime.now(UTC) - timedelta(days=3, hours=1))
    bench.operator("op-2")
    wait_until("it is seen", lambda: bench.ready_condition("job").get("reason") == "Accepted", 60)
    later = datetime.now(UTC) + timedelta(hours=11)
    bench.patch("job", schedule=f"{later.minute} {later.hour} * * *")
    wait_until("the edit is seen", lambda: bench.status("job").get("droppedTicks") == 3, 60)
    (entry,) = bench.status("job")["ledger"]
    assert (entry["kind"], entry["reason"], entry["count"]) == ("Dropped", "ScheduleEdited", 3)
    assert explained(bench, "job", tick=entry["from"])["verdict"] == "Dropped"


# What is done to an object while nobody runs, and what the ledger then says of the three ticks that nobody had decided.
LEFT = {
    "edited": ({"schedule": "0 0 1 1 *"}, "Dropped", "ScheduleEdited"),
    "moved": ({"timeZone": "Asia/Kolkata"}, "Dropped", "ScheduleEdited"),
    "counted": ({"clockChangePolicy": "Kubernetes"}, "Dropped", "ScheduleEdited"),
    "ended": ({"notAfter": "2026-01-01T00:00:00Z"}, "Dropped", "ScheduleEdited"),
    "several": ({"schedule": None, "schedules": ["0 0 1 1 *", "0 0 2 2 *"]}, "Dropped", "ScheduleEdited"),
    "resumed": ({"suspend": False}, "Skipped", "Suspended"),
    "anew": (None, "Dropped", "JobDeleted"),
    "once": (None, "Dropped", "JobDeleted"),
}


def test_what_is_done_while_no_operator_runs_leaves_no_tick_unsaid(bench: Bench) -> None:
    for job in LEFT:
        bench.apply(job, schedule=daily(), suspend=job == "resumed")
    operator = bench.operator()
    codes = {job: registered(bench, job) for job in LEFT}
    operator.stop()
    for code in codes.values():
        set_watermark(bench, code, datetime.now(UTC) - timedelta(days=3, hours=1))
    bench.sql("UPDATE leasedjob.code_schedule SET since = since - interval '4 days'")
    for job, (change, _, _) in LEFT.items():
        if change is None:
            bench.delete(job)
            bench.apply(job, **({"type": "Initial", "suspend": True} if job == "once" else {"schedule": "0 0 1 1 *"}))
        else:
            bench.patch(job, **change)
    bench.operator("op-2")
    expected = ticks(3)
    for job, (_, kind, reason) in LEFT.items():
        wait_until(f"{job} is written down", lambda job=job: bench.status(job).get("ledger"), 60)
        (entry,) = bench.status(job)["ledger"]
        assert (entry["kind"], entry["reason"], entry["count"]) == (kind, reason, 3), job
        assert (entry["from"], entry["to"]) == (key(expected[0]), key(expected[-1])), job
        found = explained(bench, job, tick=key(expected[1]))
        assert (found["verdict"], found["reason"], found["range"]["count"]) == (kind, reason, 3), job
        found = explained(bench, job, tick=key(expected[1] + timedelta(minutes=1)))
        assert found["verdict"] == "NotATick", "in the range's time, but of no schedule of then"
        assert (found["previousTick"], found["nextTick"]) == (key(expected[1]), key(expected[2])), job
        assert [r for r in bench.rows(job) if r["tick"]] == [], "nothing old was started"


@pytest.fixture
def west(bench: Bench, tmp_path: Path) -> Iterator[Bench]:
    """The same database, seen from another cluster: another namespace whose objects share their codes by name."""
    other = Bench(bench.plane, bench.postgres, bench.database, _folder(tmp_path), cluster="west")
    try:
        yield other
    finally:
        other.close()


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "west"
    folder.mkdir()
    return folder


def test_clusters_whose_schedules_differ(bench: Bench, west: Bench) -> None:
    """Each claims its own ticks; those that it passes are the other one's, and said to be."""
    shared = {"LEASEDJOB_SHARED_CODES": '["shared/differs"]'}
    bench.apply("job", code="shared/differs", schedule=daily())
    elsewhere = datetime.now(UTC) - timedelta(hours=1)
    west.apply("job", code="shared/differs", schedule=f"{elsewhere.minute} {elsewhere.hour} * * *")
    operators = [bench.operator("east", **shared), west.operator("west", **shared)]
    wait_until("both are registered", lambda: len(bench.sql("SELECT code FROM leasedjob.job_registration")) == 2, 60)
    for operator in operators:
        operator.stop()
    # As if both had been registered three days ago, and nobody had run since.
    set_watermark(bench, "shared/differs", datetime.now(UTC) - timedelta(days=3, minutes=30))
    bench.sql("UPDATE leasedjob.code_schedule SET since = since - interval '4 days'")
    west.operator("west-2", **shared)
    row = west.row_when("job", lambda r: r["tick"] is not None, "the latest tick of west is claimed", seconds=60)
    assert row["tick"] == elsewhere.replace(second=0, microsecond=0)
    wait_until("it is written down", lambda: len(west.status("job").get("ledger") or []) == 2, 60)
    differ, missed = west.status("job")["ledger"]
    assert (missed["reason"], missed["count"]) == ("MissedRunPolicy", 4), "two of its own and two that lie between"
    assert (differ["kind"], differ["reason"], differ["count"]) == ("Missed", "SpecDiffers", 1)
    bench.operator("east-2", **shared)
    found = explained(bench, "job", tick=differ["from"])
    assert (found["verdict"], found["reason"]) == ("Missed", "SpecDiffers")
    assert "another cluster's schedule" in found["message"]
    found = explained(bench, "job", tick=key(row["tick"] + timedelta(days=1)))
    assert (found["verdict"], found["reason"]) == ("Pending", "SpecDiffers")
    # An edit brings them together; what is to come is both's.
    west.patch("job", schedule=daily())
    in_force = "SELECT id FROM leasedjob.code_schedule WHERE until IS NULL"
    wait_until("they agree", lambda: len(bench.sql(in_force)) == 1, 60)
    wait_until("west knows", lambda: west.status("job").get("observedGeneration") == 2, 60)
    found = explained(west, "job", tick=key(row["tick"] + timedelta(days=1)))
    assert found["verdict"] == "NotATick"


def failed_runs(bench: Bench, code: str, count: int) -> None:
    """Runs of the schedule that have failed for good, one a minute until now."""
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    for n in range(count):
        tick = now - timedelta(minutes=count - n)
        lock = RunIdentity.of(code=code, run_key=key(tick)).lock_key
        bench.sql(
            "INSERT INTO leasedjob.job_scheduler (lock_key, type, code, run_key, status, lease_ms, run_lease_ms, tick,"
            " namespace, job_name, cluster, pod_uid, finished_at, reason)"
            " VALUES (%s, 'SCHEDULE', %s, %s, 'FAIL', 1, 1, %s, 'n', 'job', 'elsewhere', 'p', now(), 'Error: exit 1')",
            lock, code, key(tick), tick,
        )  # fmt: skip


def test_failures_suspend_the_schedule_in_both_clusters_and_a_resume_ends_it_in_both(bench: Bench, west: Bench) -> None:
    shared = {"LEASEDJOB_SHARED_CODES": '["shared/breaks"]'}
    for place in (bench, west):
        place.apply("job", code="shared/breaks", suspendAfterFailures=2, startingDeadlineSeconds=3600)
    operators = [bench.operator("east", **shared), west.operator("west", **shared)]
    wait_until("both are registered", lambda: len(bench.sql("SELECT code FROM leasedjob.job_registration")) == 2, 60)
    for operator in operators:
        operator.stop()
    bench.sql("DELETE FROM leasedjob.job_scheduler")  # of a tick meanwhile
    failed_runs(bench, "shared/breaks", 2)
    bench.operator("east-2", **shared)
    west.operator("west-2", **shared)
    for place in (bench, west):
        wait_until(
            f"{place.cluster} is suspended",
            lambda place=place: place.ready_condition("job").get("reason") == "SuspendedAfterFailures",
            60,
        )
    condition = west.ready_condition("job")
    assert condition["status"] == "False"
    assert "2 failed runs in a row" in condition["message"]
    assert "kubectl leasedjob resume" in condition["message"]
    assert "nextScheduleTime" not in bench.status("job")
    assert not bench.job("job")["spec"].get("suspend"), "spec is nobody's but its owner's"
    events = [e for p in (bench, west) for e in p.core.list_namespaced_event(p.namespace).items]
    assert [e.reason for e in events].count("SuspendedAfterFailures") == 1, "whoever found it says so, once"

    # it holds when a tick comes
    tick = datetime.now(UTC).replace(second=0, microsecond=0) + timedelta(minutes=1)
    wait_until("a tick has gone by", lambda: datetime.now(UTC) > tick + timedelta(seconds=2), 90)
    assert bench.sql("SELECT code FROM leasedjob.job_scheduler WHERE tick >= %s", tick) == []
    found = explained(west, "job", tick=key(tick))
    assert (found["verdict"], found["reason"]) == ("Skipped", "SuspendedAfterFailures")

    status = answer(west, ask(west, "job", action="Resume", reason="repaired"))
    assert (status["phase"], status["reason"]) == ("Succeeded", "Resumed")
    for place in (bench, west):
        wait_until(
            f"{place.cluster} goes on",
            lambda place=place: place.ready_condition("job").get("reason") == "Accepted",
            60,
        )
    (entry,) = [e for e in bench.status("job")["ledger"] if e["reason"] == "SuspendedAfterFailures"]
    assert entry["count"] >= 1
    ((at,),) = bench.sql("SELECT resumed_at FROM leasedjob.job_code")
    late = bench.sql("SELECT code FROM leasedjob.job_scheduler WHERE tick >= %s AND tick < %s", tick, at)
    assert late == [], "nothing is replayed"
    assert bench.sql("SELECT action, did, why FROM leasedjob.audit") == [("Resume", "Resumed", "repaired")]


def test_a_run_of_the_schedule_is_cancelled_by_name(bench: Bench) -> None:
    bench.apply("job", schedule="* * * * *", lease={"durationSeconds": 900})
    bench.operator()
    kubelet = Kubelet(bench, bench.pod_for("job", seconds=120))
    kubelet.run()
    bench.patch("job", suspend=True)
    (row,) = bench.rows("job")
    status = answer(bench, ask(bench, "job", action="Cancel", runKey="2026-01-01T00:00:00Z"))
    assert (status["phase"], status["reason"]) == ("Refused", "NoSuchRun")
    request = ask(bench, "job", action="Cancel", tick=row["run_key"], reason="wrong data")
    wait_until("the Pod is deleted", lambda: bench.deleting(kubelet.pod), 60)
    kubelet.end(143)
    status = answer(bench, request)
    assert (status["phase"], status["reason"], status["runKey"]) == ("Succeeded", "Cancelled", row["run_key"])
    (row,) = bench.rows("job")
    assert (row["status"], row["retry_at"], row["reason"]) == ("FAIL", None, "Cancelled")
    line = bench.sql("SELECT action, did, run_key, attempt, why, asked_by FROM leasedjob.audit")
    assert line == [("Cancel", "Cancelled", row["run_key"], 1, "wrong data", f"{bench.namespace}/{request}")]

    # and forgotten: the run is claimed again, with the next attempt
    status = answer(bench, ask(bench, "job", action="Forget", tick=row["run_key"]))
    assert (status["phase"], status["reason"]) == ("Succeeded", "Forgotten")
    second = Kubelet(bench, bench.pod_for("job", 2, seconds=60))
    second.run()
    second.end(0)
    after = bench.row_when("job", lambda r: r["status"] == "SUCCESS", "has succeeded", seconds=60)
    assert (after["id"], after["attempt"]) == (row["id"], 2)
    assert after["fencing_token"] > row["fencing_token"]
    status = answer(bench, ask(bench, "job", action="Forget", tick=row["run_key"]))
    assert (status["phase"], status["reason"]) == ("Refused", "AlreadySucceeded")


def test_release_stops_the_pod_and_the_run_goes_on(bench: Bench) -> None:
    bench.apply("job", schedule=daily(), lease={"durationSeconds": 900})
    for number in (1, 2):
        bench.operator(f"op-{number}")
    (tick,) = ticks(1)
    ask(bench, "job", tick=key(tick))
    kubelet = Kubelet(bench, bench.pod_for("job"))
    kubelet.run()
    request = ask(bench, "job", action="Release")  # the only active run
    wait_until("the Pod is deleted", lambda: bench.deleting(kubelet.pod), 60)
    kubelet.end(143)
    second = Kubelet(bench, bench.pod_for("job", 2, seconds=60))
    assert second.run().attempt == 2
    status = answer(bench, request)
    assert (status["phase"], status["reason"], status["attempt"]) == ("Succeeded", "Released", 1)
    assert bench.sql("SELECT action, did, attempt FROM leasedjob.audit") == [("Release", "PodDeleted", 1)]


def test_release_of_a_run_whose_pod_was_deleted_by_force_lets_its_lease_run_out(bench: Bench) -> None:
    """Its containers may still be at work: their heartbeats are refused from then on, and nothing begins before the
    lease has run out."""
    bench.apply("job", schedule=daily(), lease={"durationSeconds": 40, "heartbeatSeconds": 5})
    for number in (1, 2):
        bench.operator(f"op-{number}")
    (tick,) = ticks(1)
    ask(bench, "job", tick=key(tick))
    kubelet = Kubelet(bench, bench.pod_for("job"))
    kubelet.run()
    bench.gone(kubelet.pod)
    assert kubelet.heartbeat()
    request = ask(bench, "job", action="Release", tick=key(tick))
    status = answer(bench, request, "Running")
    wait_until("it is fenced", lambda: bench.run_status(request).get("reason") == "Fenced", 60)
    assert not kubelet.heartbeat()
    assert not kubelet.report(Outcome.COMPLETE)
    until = bench.rows("job")[0]["expires_at"]
    second = bench.pod_for("job", 2, seconds=90)
    (row,) = bench.rows("job")
    assert row["started_at"] > until, "not before the lease had run out"
    Kubelet(bench, second).run()
    status = answer(bench, request)
    assert (status["phase"], status["reason"]) == ("Succeeded", "Released")
    assert bench.sql("SELECT did, attempt FROM leasedjob.audit") == [("Fenced", 1)]


def test_release_by_force_ends_the_lease_at_once(bench: Bench) -> None:
    bench.apply("job", schedule=daily(), lease={"durationSeconds": 3600})
    bench.operator()
    (tick,) = ticks(1)
    ask(bench, "job", tick=key(tick))
    kubelet = Kubelet(bench, bench.pod_for("job"))
    kubelet.run()
    bench.gone(kubelet.pod)
    status = answer(bench, ask(bench, "job", action="Release", tick=key(tick), force=True))
    assert (status["phase"], status["reason"]) == ("Succeeded", "Released")
    assert "by force" in status["message"]
    assert not kubelet.heartbeat()
    assert Kubelet(bench, bench.pod_for("job", 2, seconds=60)).run().attempt == 2


def test_past_ticks_that_a_person_asks_for_cost_the_schedule_no_tick(bench: Bench) -> None:
    """Under Forbid a tick that comes while only such runs are active waits for them instead of being skipped."""
    bench.apply("job", schedule="* * * * *", lease={"durationSeconds": 900})
    bench.operator()
    code = registered(bench, "job")
    past = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(hours=1)
    run = ask(bench, "job", tick=key(past))
    wait_until("it is claimed", lambda: [r for r in bench.rows("job") if r["manual"]], 60)
    pod = wait_until("its Pod", lambda: bench.pods(), 60)[0]
    kubelet = Kubelet(bench, pod)
    kubelet.run()
    first = datetime.now(UTC).replace(second=0, microsecond=0) + timedelta(minutes=1)
    wait_until("a tick has come", lambda: datetime.now(UTC) > first + timedelta(seconds=2), 90)
    found = explained(bench, "job", tick=key(first))
    assert (found["verdict"], found["reason"]) == ("Pending", "Overlap")
    assert bench.sql("SELECT code FROM leasedjob.tick_ledger WHERE code = %s", code) == []
    kubelet.end(0)
    answer(bench, run, "Succeeded")
    row = bench.row_when("job", lambda r: not r["manual"], "the tick has its run", seconds=60)
    assert row["tick"] == first
