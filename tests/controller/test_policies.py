"""Concurrency, missed runs, deadlines, suspension, edits, conflicts, retries and history, through real operators.

Ticks are made due by putting the watermark back, so that no test waits for a minute to pass.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from leasedjob import protocol
from tests.controller.control_plane import Bench, Kubelet, OperatorProcess, wait_until

# Half an hour away from now: the latest tick is about thirty minutes old, and none comes while a test runs.
HOURLY = f"{(datetime.now(UTC).minute + 30) % 60} * * * *"


def hour(back: int = 0) -> datetime:
    """The latest tick of HOURLY, or one that is `back` hours older."""
    now = datetime.now(UTC)
    tick = now.replace(minute=int(HOURLY.split()[0]), second=0, microsecond=0)
    return (tick if tick <= now else tick - timedelta(hours=1)) - timedelta(hours=back)


def put_back(bench: Bench, job: str, hours: int) -> None:
    """Ticks of the last `hours` hours are undecided, as after an outage; operators have to be started afterwards."""
    bench.sql("UPDATE leasedjob.job_code SET watermark = %s WHERE code = %s", hour(hours), f"{bench.namespace}/{job}")


def after_outage(bench: Bench, hours: int, *jobs: str, operators: int = 1) -> list[OperatorProcess]:
    """Objects that are known, then `hours` hours without an operator, then operators again."""
    first = bench.operator("before")
    for job in jobs:
        wait_until(f"{job} is registered", lambda job=job: bench.ready_condition(job).get("status") == "True")
    first.stop()
    for job in jobs:
        put_back(bench, job, hours)
    return [bench.operator(f"after-{n}") for n in range(operators)]


def ledger(bench: Bench, job: str) -> list[Any]:
    """(kind, reason, count), oldest first."""
    return bench.sql(
        "SELECT kind, reason, count FROM leasedjob.tick_ledger WHERE code = %s ORDER BY first",
        f"{bench.namespace}/{job}",
    )


def run_keys(bench: Bench, job: str) -> list[str]:
    return [r["run_key"] for r in bench.rows(job)]


def key(tick: datetime) -> str:
    return tick.strftime("%Y-%m-%dT%H:%M:%SZ")


def events(bench: Bench, reason: str) -> list[Any]:
    return [e for e in bench.core.list_namespaced_event(bench.namespace).items if e.reason == reason]


# --- concurrency -----------------------------------------------------------------------------------------------------


def test_forbid_skips_allow_starts_and_replace_waits_for_the_end(bench: Bench) -> None:
    for policy in ("Forbid", "Allow", "Replace"):
        bench.apply(policy.lower(), schedule=HOURLY, concurrencyPolicy=policy, suspend=True)
    first = bench.operator("before")
    kubelets = {}
    for job in ("forbid", "allow", "replace"):
        bench.run_now(job)
        kubelets[job] = Kubelet(bench, bench.pod_for(job))
        kubelets[job].run()
    for job in kubelets:
        bench.patch(job, suspend=False)
        wait_until("resumed", lambda job=job: bench.ready_condition(job).get("reason") == "Accepted")
    first.stop()
    for job in kubelets:
        put_back(bench, job, 1)
    bench.operator("after")

    wait_until("Forbid: skipped", lambda: ledger(bench, "forbid") == [("skipped", "Overlap", 1)])
    assert len(bench.rows("forbid")) == 1
    wait_until("Allow: started", lambda: len(bench.rows("allow")) == 2)
    wait_until("Replace: asked to stop", lambda: bench.deleting(kubelets["replace"].pod))
    assert bench.rows("replace")[-1]["stop_requested_at"] is not None
    assert len(bench.rows("replace")) == 1, "no successor while the old lease is held"
    kubelets["replace"].end(143)
    old, new = wait_until("Replace: the successor", lambda: (r := bench.rows("replace")) and len(r) == 2 and r)
    assert (old["status"], old["reason"], old["retry_at"]) == ("FAIL", "Replaced", None)
    assert new["started_at"] >= old["finished_at"]
    assert new["fencing_token"] > old["fencing_token"]
    assert len(ledger(bench, "forbid")) == 1


# --- after an outage -------------------------------------------------------------------------------------------------


def test_after_an_outage_each_policy_does_what_it_says(bench: Bench) -> None:
    bench.apply("latest", schedule=HOURLY, missedRunPolicy="RunLatest")
    bench.apply("all", schedule=HOURLY, missedRunPolicy="RunAll", concurrencyPolicy="Allow")
    bench.apply("limit", schedule=HOURLY, missedRunPolicy="RunAll", missedRunLimit=2, concurrencyPolicy="Allow")
    bench.apply(
        "deadline", schedule=HOURLY, missedRunPolicy="RunAll", startingDeadlineSeconds=5400, concurrencyPolicy="Allow"
    )
    bench.apply("skip", schedule=HOURLY, missedRunPolicy="Skip")
    after_outage(bench, 5, "latest", "all", "limit", "deadline", "skip")
    wait_until("RunAll: five", lambda: len(bench.rows("all")) == 5)
    wait_until("RunLatest: one", lambda: len(bench.rows("latest")) == 1)
    wait_until("limit: two", lambda: len(bench.rows("limit")) == 2)
    wait_until("Skip: none, for the latest is minutes old", lambda: ledger(bench, "skip"))
    wait_until("deadline", lambda: bench.rows("deadline"))
    now = hour()
    assert run_keys(bench, "latest") == [key(now)]
    assert sorted(run_keys(bench, "all")) == [key(now - timedelta(hours=n)) for n in (4, 3, 2, 1, 0)]
    assert sorted(run_keys(bench, "limit")) == [key(now - timedelta(hours=1)), key(now)]
    assert ledger(bench, "latest") == [("missed", "MissedRunPolicy", 4)]
    assert ledger(bench, "all") == []
    assert ledger(bench, "limit") == [("missed", "MissedRunLimit", 3)]
    assert ledger(bench, "skip") == [("missed", "MissedRunPolicy", 5)]
    assert bench.rows("skip") == []
    lost = sum(count for kind, reason, count in ledger(bench, "deadline") if reason == "StartingDeadline")
    assert lost + len(bench.rows("deadline")) == 5, "each tick ran or is recorded"
    assert len(bench.rows("deadline")) in (1, 2)
    wait_until("a person is told", lambda: events(bench, "TickMissed"))


@pytest.mark.parametrize(
    ("schedule", "minutes", "gap"),
    [("*/2 * * * *", 2, timedelta(hours=5)), ("* * * * *", 1, timedelta(days=400))],
    ids=["five hours", "400 days"],
)
def test_a_long_outage_is_one_run_and_one_report(bench: Bench, schedule: str, minutes: int, gap: timedelta) -> None:
    """The latest tick runs, all before it are one line in the ledger, and the number of them costs no time."""
    bench.apply("job", schedule=schedule)
    first = bench.operator("before")
    wait_until("registered", lambda: bench.ready_condition("job").get("status") == "True")
    first.stop()
    for pod in bench.pods():  # of a minute that began just now
        bench.gone(pod)
    bench.sql("DELETE FROM leasedjob.tick_ledger")
    bench.sql("DELETE FROM leasedjob.job_scheduler")
    since = datetime.now(UTC).replace(second=30, microsecond=0) - gap
    since -= timedelta(minutes=since.minute % minutes)
    bench.sql("UPDATE leasedjob.job_code SET watermark = %s", since)
    began = time.monotonic()
    bench.operator("after")
    pod = bench.pod_for("job")
    print(f"{gap} of ticks: a Pod {time.monotonic() - began:.1f} s after the operator's start")
    row = bench.rows("job")[0]
    assert pod["metadata"]["annotations"][protocol.ANNOTATION_LEASE] == str(row["id"])
    reports = bench.sql("SELECT first, last, count, exact FROM leasedjob.tick_ledger WHERE kind = 'missed'")
    assert len(reports) == 1
    first_missed, last_missed, count, exact = reports[0]
    step = timedelta(minutes=minutes)
    assert first_missed == since.replace(second=0) + step
    assert last_missed == row["tick"] - step, "the run is that of the latest missed tick"
    if exact:
        assert count == (last_missed - first_missed) // step + 1
    assert count > 100
    told = wait_until("a person is told", lambda: events(bench, "TickMissed"))
    assert len(told) == 1


def test_run_all_goes_on_whichever_replica_won_a_tick(bench: Bench) -> None:
    """Forbid and RunAll: one after the other, each tick once, with two replicas; then the one that won last dies."""
    bench.apply("chain", schedule=HOURLY, missedRunPolicy="RunAll")
    one, two = after_outage(bench, 4, "chain", operators=2)
    for attempt in range(4):
        rows = wait_until(f"run {attempt + 1}", lambda n=attempt: len(r := bench.rows("chain")) == n + 1 and r)
        row = rows[-1]
        pod = wait_until("its Pod", lambda row=row: next(
            (p for p in bench.pods() if p["metadata"]["annotations"][protocol.ANNOTATION_LEASE] == str(row["id"])), None
        ))  # fmt: skip
        kubelet = Kubelet(bench, pod)
        kubelet.run()
        kubelet.end(0)
        if attempt == 1:
            one.kill()
        if attempt == 2:
            one.start()
            bench.wait_ready(one)
            two.kill()
    bench.row_when("chain", lambda r: r["status"] == "SUCCESS", "the last")
    assert [r["status"] for r in bench.rows("chain")] == ["SUCCESS"] * len(bench.rows("chain"))
    assert run_keys(bench, "chain")[:4] == [key(hour(n)) for n in (3, 2, 1, 0)]
    assert ledger(bench, "chain") == []
    assert not events(bench, "TickMissed")


@pytest.mark.soak
def test_three_hundred_objects_at_one_tick_are_each_claimed_once(bench: Bench) -> None:
    """A real tick, two replicas: one row and one Pod for each object, and nobody reports another's tick as missed."""
    operators = [bench.operator("op-1"), bench.operator("op-2")]
    at = datetime.now(UTC) + timedelta(seconds=75)  # time to create the objects
    tick = at.replace(second=0, microsecond=0)
    names = [f"tick-{n}" for n in range(300)]
    for name in names:
        bench.apply(name, schedule=f"{tick.minute} {tick.hour} * * *")
    assert datetime.now(UTC) < tick, "the objects came too late"

    def claimed() -> int:
        return int(bench.sql("SELECT count(*) FROM leasedjob.job_scheduler")[0][0])

    wait_until("300 claims", lambda: claimed() >= 300, 120, 0.5)
    wait_until("300 Pods", lambda: len(bench.pods()) >= 300, 60, 1)
    assert claimed() == 300
    assert bench.sql("SELECT max(attempt), min(tick), max(tick) FROM leasedjob.job_scheduler") == [(1, tick, tick)]
    leases = [p["metadata"]["annotations"][protocol.ANNOTATION_LEASE] for p in bench.pods()]
    assert len(leases) == len(set(leases)) == 300
    assert bench.sql("SELECT count(*) FROM leasedjob.tick_ledger") == [(0,)]
    assert not events(bench, "TickMissed")
    assert all(o.ready() for o in operators)


def test_a_person_runs_a_due_tick_and_the_schedule_goes_on(bench: Bench) -> None:
    bench.apply("mixed", schedule=HOURLY, missedRunPolicy="RunAll", suspend=True)
    first = bench.operator("before")
    wait_until("known", lambda: bench.ready_condition("mixed").get("reason") == "Suspended")
    bench.patch("mixed", suspend=False)
    wait_until("known", lambda: bench.ready_condition("mixed").get("reason") == "Accepted")
    bench.run_now("mixed", tick=key(hour(1)))
    kubelet = Kubelet(bench, bench.pod_for("mixed"))
    kubelet.run()
    kubelet.end(0)
    bench.row_when("mixed", lambda r: r["status"] == "SUCCESS", "the manual run")
    first.stop()
    put_back(bench, "mixed", 2)  # that tick is due, and has a row
    bench.operator("after")
    row = bench.row_when("mixed", lambda r: r["run_key"] == key(hour()), "the tick after it")
    assert (row["status"], row["manual"]) == ("RUNNING", False)
    assert len(bench.rows("mixed")) == 2
    assert ledger(bench, "mixed") == []


# --- suspension and edits --------------------------------------------------------------------------------------------


def test_resume_and_edit_start_nothing_old(bench: Bench) -> None:
    bench.operator()
    bench.apply("resumed", schedule=HOURLY, suspend=True, missedRunPolicy="RunAll")
    bench.apply("edited", schedule="0 0 1 1 *", missedRunPolicy="RunAll")
    for job in ("resumed", "edited"):
        wait_until("known", lambda job=job: bench.ready_condition(job).get("status") == "True")
        bench.sql(
            "UPDATE leasedjob.job_code SET watermark = clock_timestamp() - interval '10 hours' WHERE code = %s",
            f"{bench.namespace}/{job}",
        )
    bench.patch("resumed", suspend=False)
    bench.patch("edited", schedule=HOURLY)
    wait_until("resumed", lambda: bench.ready_condition("resumed").get("reason") == "Accepted")
    wait_until("edited", lambda: bench.status("edited").get("observedGeneration") == 2)
    # Whatever would start has started before a run that is asked for now.
    for job in ("resumed", "edited"):
        bench.run_now(job)
        bench.pod_for(job)
        assert [r["manual"] for r in bench.rows(job)] == [True]
        assert ledger(bench, job) == []
        assert parse(bench.status(job)["nextScheduleTime"]) > datetime.now(UTC) - timedelta(seconds=1)


def test_suspend_put_on_and_off_starts_nothing(bench: Bench) -> None:
    """Ticks that passed while it was suspended don't count, however often it is switched; a label is no edit."""
    bench.operator()
    bench.apply("switched", schedule=HOURLY, missedRunPolicy="RunAll")
    wait_until("known", lambda: bench.ready_condition("switched").get("status") == "True")
    for _ in range(5):
        bench.patch("switched", suspend=True)
        wait_until("suspended", lambda: bench.ready_condition("switched").get("reason") == "Suspended")
        bench.sql("UPDATE leasedjob.job_code SET watermark = clock_timestamp() - interval '3 days'")
        bench.patch("switched", suspend=False)
        wait_until("resumed", lambda: bench.ready_condition("switched").get("reason") == "Accepted")
    before = bench.status("switched")
    labelled = {"metadata": {"labels": {"team": "batch"}}}
    bench.custom.patch_namespaced_custom_object(
        protocol.GROUP, protocol.VERSION, bench.namespace, "leasedjobs", "switched", labelled
    )
    bench.run_now("switched")
    bench.pod_for("switched")
    assert [r["manual"] for r in bench.rows("switched")] == [True]
    assert ledger(bench, "switched") == []
    assert bench.status("switched")["nextScheduleTime"] == before["nextScheduleTime"]
    assert parse(before["nextScheduleTime"]) > datetime.now(UTC)


def parse(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def test_the_older_object_has_the_code_until_it_is_deleted(bench: Bench) -> None:
    bench.operator("op-1")
    bench.operator("op-2")
    bench.apply("older", code="shared", suspend=True)
    wait_until("older", lambda: bench.ready_condition("older").get("status") == "True")
    time.sleep(1.1)  # creation times are whole seconds
    bench.apply("younger", code="shared", suspend=True)
    found = wait_until("the conflict", lambda: (c := bench.ready_condition("younger")).get("status") == "False" and c)
    assert found["reason"] == "CodeConflict"
    assert f"{bench.namespace}/older" in found["message"]
    run = bench.run_now("younger")["metadata"]["name"]
    wait_until("the run says why", lambda: "not Ready" in bench.run(run).get("status", {}).get("message", ""))
    assert bench.rows("younger") == []
    bench.delete("older")
    wait_until("the code is free", lambda: bench.ready_condition("younger").get("status") == "True")
    bench.pod_for("younger")


# --- once, and again -------------------------------------------------------------------------------------------------


def test_an_initial_job_runs_once_ever(bench: Bench) -> None:
    bench.operator("op-1")
    two = bench.operator("op-2")
    bench.apply("setup", type="Initial")
    kubelet = Kubelet(bench, bench.pod_for("setup"))
    kubelet.run()
    kubelet.end(0)
    row = bench.row_when("setup", lambda r: r["status"] == "SUCCESS", "done")
    two.kill()
    two.start()
    bench.wait_ready(two)
    bench.delete("setup")
    wait_until("unregistered", lambda: not bench.sql("SELECT FROM leasedjob.job_registration"))
    bench.apply("setup", type="Initial")
    wait_until("accepted", lambda: bench.ready_condition("setup").get("status") == "True")
    wait_until("shown", lambda: bench.status("setup").get("lastResult") == "Success")
    assert [r["id"] for r in bench.rows("setup")] == [row["id"]]
    assert bench.rows("setup")[0]["attempt"] == 1


def test_a_failure_is_repeated_after_its_backoff_and_only_so_often(bench: Bench) -> None:
    bench.operator()
    bench.apply("flaky", suspend=True, backoffLimit=1)
    bench.run_now("flaky")
    kubelet = Kubelet(bench, bench.pod_for("flaky"))
    kubelet.run()
    kubelet.end(1)
    failed = bench.row_when("flaky", lambda r: r["status"] == "FAIL", "failed once")
    assert 9 <= (failed["retry_at"] - failed["finished_at"]).total_seconds() <= 11
    wait_until("shown as retrying", lambda: bench.status("flaky").get("lastResult") == "Retrying")
    second = bench.pod_for("flaky", 2)
    row = bench.rows("flaky")[-1]
    assert row["started_at"] >= failed["retry_at"]
    kubelet = Kubelet(bench, second)
    kubelet.run()
    kubelet.end(1)
    row = bench.row_when("flaky", lambda r: r["status"] == "FAIL" and r["failures"] == 2, "failed twice")
    assert row["retry_at"] is None
    wait_until("shown as failed", lambda: bench.status("flaky").get("lastResult") == "Failed")


def test_evictions_are_no_failures(bench: Bench) -> None:
    """Three times by the API that a node's drain uses, with one attempt to spare: the run goes on at once each time."""
    bench.operator()
    bench.apply("evicted", suspend=True, backoffLimit=1)
    bench.run_now("evicted")
    tokens = []
    for attempt in (1, 2, 3):
        pod = bench.pod_for("evicted", attempt)
        kubelet = Kubelet(bench, pod)
        tokens.append(kubelet.run().fencing_token)
        meta = {"name": pod["metadata"]["name"], "namespace": bench.namespace}
        bench.core.create_namespaced_pod_eviction(
            meta["name"], bench.namespace, {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
        )
        kubelet.end(143)
        row = bench.row_when("evicted", lambda r, n=attempt: r["attempt"] > n, "the next attempt")
        assert (row["failures"], row["interruptions"]) == (0, attempt)
    kubelet = Kubelet(bench, bench.pod_for("evicted", 4))
    tokens.append(kubelet.run().fencing_token)
    kubelet.end(0)
    row = bench.row_when("evicted", lambda r: r["status"] == "SUCCESS", "done")
    assert (row["attempt"], row["failures"], row["interruptions"]) == (4, 0, 3)
    assert tokens == sorted(set(tokens))


def test_a_run_is_cancelled_before_during_and_between_attempts(bench: Bench) -> None:
    bench.operator()
    for job in ("pending", "running", "retrying"):
        bench.apply(job, suspend=True, backoffLimit=3)
    runs = {job: bench.run_now(job)["metadata"]["name"] for job in ("pending", "running", "retrying")}
    pods = {job: bench.pod_for(job) for job in runs}
    running = Kubelet(bench, pods["running"])
    running.run()
    failing = Kubelet(bench, pods["retrying"])
    failing.run()
    failing.end(1)
    bench.row_when("retrying", lambda r: r["retry_at"] is not None, "waits for its retry")
    for run in runs.values():
        bench.cancel(run)
    wait_until("its Pod is stopped", lambda: bench.deleting(pods["running"]))
    running.end(0)
    for job, run in runs.items():
        wait_until(f"{job}: cancelled", lambda run=run: bench.run_status(run).get("phase") == "Cancelled")
        row = bench.rows(job)[-1]
        assert (row["status"], row["retry_at"]) == ("FAIL", None), job
    wait_until("the pending Pod is deleted", lambda: bench.deleting(pods["pending"]))


# --- history ---------------------------------------------------------------------------------------------------------


def test_history_is_kept_within_its_limits(bench: Bench) -> None:
    bench.operator()
    bench.apply("kept", suspend=True, successfulRunsHistoryLimit=1, failedRunsHistoryLimit=0, concurrencyPolicy="Allow")
    runs = [bench.run_now("kept") for _ in range(4)]
    pods = wait_until("four Pods", lambda: (p := bench.pods()) and len(p) == len(runs) and p)
    for n, pod in enumerate(pods):
        kubelet = Kubelet(bench, pod)
        kubelet.run()
        kubelet.end(n % 2)

    def tidy() -> bool:
        left = [p for p in bench.pods() if not p["metadata"].get("deletionTimestamp")]
        return [p["status"]["phase"] for p in left] == ["Succeeded"]

    wait_until("one Pod is left", tidy)
    wait_until("all are recorded", lambda: all(r["status"] != "RUNNING" for r in bench.rows("kept")))
