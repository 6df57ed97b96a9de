"""The real plugin, the real operator and a real API server: what a person asks, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from kubernetes import client

from leasedjob.cli import kubectl
from leasedjob.cli.exits import Exit
from leasedjob.protocol import ANNOTATION_ATTEMPT, ANNOTATION_LEASE
from tests.controller.control_plane import GROUP, VERSION, Bench, Kubelet, wait_until
from tests.controller.test_policies import HOURLY, after_outage, hour, key, ledger

pytestmark = [pytest.mark.integration]
Plugin = Callable[..., Result]


@pytest.fixture
def plugin(bench: Bench) -> Plugin:
    """`kubectl leasedjob VERB ...` in the test's namespace. In this process: starting one takes a second each time, and
    is tested in tests/e2e."""

    def run(*words: str, stdin: str = "", kubeconfig: Path | None = None) -> Result:
        where = ["-n", bench.namespace, "--kubeconfig", str(kubeconfig or bench.plane.kubeconfig())]
        done = CliRunner().invoke(kubectl.plugin, [*words, *where], prog_name=kubectl.PROGRAM, input=stdin)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    return run


def ok(done: Result) -> str:
    assert done.exit_code == Exit.OK, done.stderr
    return done.stdout


def registered(bench: Bench, *jobs: str) -> None:
    for job in jobs:
        wait_until(f"{job} is registered", lambda job=job: bench.ready_condition(job).get("status") == "True", 60)


def row_of(bench: Bench, job: str, run_key: str) -> Any:
    return next((row for row in bench.rows(job) if row["run_key"] == run_key), None)


def carried_out(bench: Bench, job: str, run_key: str, *, attempt: int = 1, code: int = 0) -> Kubelet:
    """The kubelet's part of a run, from its Pod to its end."""

    def mine() -> Any:
        row = row_of(bench, job, run_key)
        wanted = {ANNOTATION_LEASE: str(row and row["id"]), ANNOTATION_ATTEMPT: str(attempt)}
        return next((p for p in bench.pods() if p["metadata"]["annotations"].items() >= wanted.items()), None)

    kubelet = Kubelet(bench, wait_until(f"the Pod of {run_key}", mine, 60))
    kubelet.run()
    kubelet.end(code)
    return kubelet


# --- converting -------------------------------------------------------------------------------------------------------


def test_a_live_cronjob_becomes_a_leasedjob_that_the_cluster_takes(bench: Bench, plugin: Plugin) -> None:
    batch = client.BatchV1Api(bench.plane.api())
    pod = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "example/main:1", "args": ["a\nb\n"]}]}
    body = {
        "metadata": {"name": "nightly", "labels": {"app": "shop"}},
        "spec": {
            "schedule": "30 2 * * *",
            "timeZone": "Europe/Rome",
            "jobTemplate": {"spec": {"template": {"spec": pod}}},
        },
    }
    batch.create_namespaced_cron_job(bench.namespace, body)
    done = plugin("convert", "cronjob/nightly", "--not-before", "2100-01-01T00:00:00Z")
    job = yaml.safe_load(ok(done))
    assert "warning: cronjob/nightly: spec.timeZone" in done.stderr
    assert job["spec"]["template"]["spec"] == {
        **pod,
        "containers": [{**pod["containers"][0], "imagePullPolicy": "IfNotPresent"}],
    }
    assert job["spec"]["notBefore"] == "2100-01-01T00:00:00Z"
    assert ok(plugin("lint", "-", stdin=done.stdout)).endswith(": ok\n")
    bench.custom.create_namespaced_custom_object(
        GROUP, VERSION, bench.namespace, "leasedjobs", job, field_validation="Strict"
    )
    bench.operator()
    registered(bench, "nightly")
    first = wait_until("its first tick is shown", lambda: bench.status("nightly").get("nextScheduleTime"), 60)
    (line,) = json.loads(ok(plugin("preview", "nightly", "--count", "1", "-o", "json")))
    assert line["tick"] == first == "2100-01-01T01:30:00Z"
    assert plugin("convert", "cronjob/nix").exit_code == Exit.NOT_FOUND


# --- a newcomer's errors ----------------------------------------------------------------------------------------------


def test_who_may_not_is_told_in_one_line(bench: Bench, plugin: Plugin) -> None:
    bench.apply("job", schedule=HOURLY)
    bench.core.create_namespaced_service_account(bench.namespace, {"metadata": {"name": "nobody"}})
    token = bench.core.create_namespaced_service_account_token("nobody", bench.namespace, {"spec": {"audiences": []}})
    config = bench.plane.kubeconfig(token=token.status.token)
    for words in (("get", "job"), ("why", "job"), ("logs", "job"), ("suspend", "job"), ("convert", "cronjob/x")):
        done = plugin(*words, kubeconfig=config)
        assert (done.exit_code, len(done.stderr.splitlines())) == (Exit.NO_ACCESS, 1), done.stderr
        assert "is forbidden" in done.stderr
    assert plugin("get", "job", "--context", "nowhere").exit_code == Exit.UNREACHABLE


# --- state ------------------------------------------------------------------------------------------------------------


def test_suspend_resume_and_why_now(bench: Bench, plugin: Plugin) -> None:
    bench.apply("job", schedule=HOURLY)
    assert "No operator has looked at it yet" in ok(plugin("why", "job"))
    bench.operator()
    registered(bench, "job")
    wait_until("the next tick is shown", lambda: bench.status("job").get("nextScheduleTime"), 60)
    assert "Nothing runs, because no tick is due" in ok(plugin("why", "job"))
    assert ok(plugin("suspend", "job")) == "leasedjob.leasedjob.io/job suspended\n"
    wait_until("it is suspended", lambda: bench.ready_condition("job").get("reason") == "Suspended", 60)
    assert "spec.suspend is true" in ok(plugin("why", "job"))
    assert "Suspended" in ok(plugin("get", "job"))
    assert ok(plugin("resume", "job")) == "leasedjob.leasedjob.io/job resumed\n"
    wait_until("it is accepted", lambda: bench.ready_condition("job").get("reason") == "Accepted", 60)


def test_suspend_warns_of_who_applies_the_field(bench: Bench, plugin: Plugin) -> None:
    body = bench.apply("job", schedule=HOURLY)
    applied = {
        "apiVersion": body["apiVersion"],
        "kind": body["kind"],
        "metadata": {"name": "job"},
        "spec": {"suspend": False},
    }
    bench.plane.custom().patch_namespaced_custom_object(
        GROUP, VERSION, bench.namespace, "leasedjobs", "job", applied,
        field_manager="some-tool", force=True, _content_type="application/apply-patch+yaml",
    )  # fmt: skip
    done = plugin("suspend", "job")
    assert "warning: the field manager some-tool keeps job" in done.stderr
    assert ok(done).endswith("suspended\n")


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_named_tick_is_run_and_every_verb_shows_it(bench: Bench, plugin: Plugin) -> None:
    bench.apply("job", schedule=HOURLY)
    bench.operator()
    registered(bench, "job")
    tick = key(hour(1))
    ok(plugin("run", "job", "--at", tick))
    kubelet = carried_out(bench, "job", tick)
    wait_until("the status shows it", lambda: bench.status("job").get("lastResult") == "Success", 60)
    name = kubelet.pod["metadata"]["name"]
    lines = ok(plugin("timeline", "job")).splitlines()
    assert lines[1].split("|")[0].split()[:3] == [tick, "#1", "Success"]
    assert name in ok(plugin("runs", "job"))
    assert tick in ok(plugin("get", "job"))
    (run,) = json.loads(ok(plugin("timeline", "job", "-o", "json")))["runs"]
    assert [pod["podName"] for pod in run["pods"]] == [name]
    again = plugin("run", "job", "--at", tick)
    assert again.exit_code == Exit.RUN_REFUSED


def test_why_has_six_different_answers(bench: Bench, plugin: Plugin) -> None:
    recent = (datetime.now(UTC) - timedelta(minutes=3)).replace(second=0, microsecond=0)
    bench.apply("job", schedule=HOURLY, missedRunPolicy="RunLatest")
    bench.apply("busy", schedule=HOURLY, lease={"durationSeconds": 600, "heartbeatSeconds": 60})
    after_outage(bench, 3, "job", "busy")
    Kubelet(bench, bench.pod_for("busy", seconds=60)).run()
    carried_out(bench, "job", key(hour()))
    wait_until("it has run", lambda: (row_of(bench, "job", key(hour())) or {}).get("status") == "SUCCESS", 60)
    # While the schedule's own run is active, another tick comes due.
    bench.patch("busy", schedule=f"{recent.minute} * * * *")
    following = key(recent + timedelta(hours=1))
    wait_until("the edit is seen", lambda: bench.status("busy").get("nextScheduleTime") == following, 60)
    bench.operators[-1].stop()
    bench.sql(
        "UPDATE leasedjob.job_code SET watermark = %s WHERE code = %s",
        recent - timedelta(minutes=1), f"{bench.namespace}/busy",
    )  # fmt: skip
    bench.sql(  # as if it had been edited earlier
        "UPDATE leasedjob.code_schedule SET since = %s WHERE code = %s AND until IS NULL",
        recent - timedelta(minutes=1), f"{bench.namespace}/busy",
    )  # fmt: skip
    bench.operator("again")
    wait_until("the busy one has skipped it", lambda: ("skipped", "Overlap", 1) in ledger(bench, "busy"), 60)

    def why(job: str, tick: str) -> Any:
        return json.loads(ok(plugin("why", job, "--at", tick, "-o", "json")))

    ran, skipped = why("job", key(hour())), why("busy", key(recent))
    missed, pending = why("job", key(hour(1))), why("job", key(hour(-1)))
    before, never = why("job", key(hour(30))), why("job", key(hour(1) + timedelta(minutes=1)))
    verdicts = [answer["verdict"] for answer in (ran, skipped, missed, pending, before, never)]
    assert verdicts == ["Ran", "Skipped", "Missed", "Pending", "BeforeWatermark", "NotATick"]
    assert len({answer["words"][0] for answer in (ran, skipped, missed, pending, before, never)}) == 6
    assert (ran["run"]["outcome"], skipped["reason"], missed["reason"]) == ("Success", "Overlap", "MissedRunPolicy")
    assert skipped["range"]["from"] == key(recent)
    assert (never["previousTick"], never["nextTick"]) == (key(hour(1)), key(hour()))
    assert plugin("why", "job", "--run-key", "nonsense").stdout.startswith("NoSuchRun")
    left = bench.custom.list_namespaced_custom_object(GROUP, VERSION, bench.namespace, "leasedjobruns")["items"]
    assert [run for run in left if run["spec"].get("action")] == [], "questions are taken back"


def test_a_backfill_and_what_it_leaves_alone(bench: Bench, plugin: Plugin) -> None:
    bench.apply("job", schedule=HOURLY, concurrencyPolicy="Allow")
    bench.operator()
    registered(bench, "job")
    ok(plugin("run", "job", "--at", key(hour(2))))
    carried_out(bench, "job", key(hour(2)))
    wait_until("it succeeded", lambda: (row_of(bench, "job", key(hour(2))) or {}).get("status") == "SUCCESS", 60)
    span = ("--from", key(hour(3)), "--to", key(hour(1)))

    planned = ok(plugin("backfill", "job", *span, "--dry-run")).splitlines()
    assert [line.split()[1] for line in planned[1:]] == ["Run", "Skip", "Run"]
    assert len(bench.rows("job")) == 1, "a dry run starts nothing"
    started = ok(plugin("backfill", "job", *span, "--max-active", "2", "-o", "name")).strip().partition("/")[2]
    for number in (3, 1):
        carried_out(bench, "job", key(hour(number)))
    wait_until("it is done", lambda: bench.run_status(started).get("phase") == "Succeeded", 60)
    assert bench.run_status(started)["backfill"].items() >= {"ticks": 3, "succeeded": 2, "skipped": 1}.items()
    assert sorted(row["run_key"] for row in bench.rows("job")) == [key(hour(n)) for n in (3, 2, 1)]

    again = ok(
        plugin("backfill", "job", "--from", key(hour(2)), "--to", key(hour(2)), "--reprocess", "all", "-o", "name")
    )
    carried_out(bench, "job", f"{key(hour(2))}#r1")
    name = again.strip().partition("/")[2]
    wait_until("the rerun is done", lambda: bench.run_status(name).get("phase") == "Succeeded", 60)
    answer = json.loads(ok(plugin("why", "job", "--at", key(hour(2)), "-o", "json")))
    assert [run["runKey"] for run in answer["reruns"]] == [f"{key(hour(2))}#r1"]


# --- repair -----------------------------------------------------------------------------------------------------------


def audit(bench: Bench) -> list[Any]:
    return bench.sql("SELECT action FROM leasedjob.audit ORDER BY 1")


def test_forget_lets_a_failed_run_begin_anew(bench: Bench, plugin: Plugin) -> None:
    bench.apply("job", schedule=HOURLY)
    bench.operator()
    registered(bench, "job")
    tick = key(hour(1))
    ok(plugin("run", "job", "--at", tick))
    carried_out(bench, "job", tick, code=3)
    failed = wait_until("it failed", lambda: (r := row_of(bench, "job", tick)) and r["status"] == "FAIL" and r, 60)
    refused = plugin("forget", "job", "--at", tick)
    assert (refused.exit_code, "--yes" in refused.stderr) == (Exit.USAGE, True)
    assert audit(bench) == []
    done = plugin("forget", "job", "--at", tick, "--yes", "--reason", "the table is back")
    assert "will be forgotten" in done.stderr
    ok(done)
    assert len(audit(bench)) == 1
    ok(plugin("run", "job", "--at", tick))
    carried_out(bench, "job", tick, attempt=2)
    row = wait_until("it succeeded", lambda: (r := row_of(bench, "job", tick)) and r["status"] == "SUCCESS" and r, 60)
    assert row["attempt"] > failed["attempt"]
    assert row["fencing_token"] > failed["fencing_token"]
    never = plugin("forget", "job", "--at", tick, "--yes")
    assert (never.exit_code, "never forgotten" in never.stderr) == (Exit.REFUSED, True)


def test_release_ends_an_attempt_and_the_next_one_follows(bench: Bench, plugin: Plugin) -> None:
    bench.apply("job", schedule=HOURLY)
    bench.operator()
    registered(bench, "job")
    tick = key(hour(1))
    ok(plugin("run", "job", "--at", tick))
    kubelet = Kubelet(bench, wait_until("its Pod", lambda: bench.pod_for("job", 1), 60))
    kubelet.run()
    wait_until("it is held", lambda: (row_of(bench, "job", tick) or {}).get("pod_uid"), 60)
    before = row_of(bench, "job", tick)
    done = plugin("release", "job", "--at", tick, "-y", "--reason", "hangs")
    assert "next attempt" in done.stderr
    ok(done)
    wait_until("its Pod is stopped", lambda: bench.deleting(kubelet.pod), 60)
    kubelet.end(143)
    carried_out(bench, "job", tick, attempt=2)
    row = wait_until("it succeeded", lambda: (r := row_of(bench, "job", tick)) and r["status"] == "SUCCESS" and r, 60)
    assert row["fencing_token"] > before["fencing_token"]
    assert len(audit(bench)) == 1


def test_a_run_of_the_schedule_is_cancelled_by_its_key(bench: Bench, plugin: Plugin) -> None:
    bench.apply("job", schedule=HOURLY, backoffLimit=3)
    after_outage(bench, 1, "job")
    kubelet = Kubelet(bench, bench.pod_for("job", seconds=60))
    kubelet.run()
    wait_until("it is held", lambda: (row_of(bench, "job", key(hour())) or {}).get("pod_uid"), 60)
    assert "cancelled" in ok(plugin("cancel", f"job/{key(hour())}"))
    wait_until("its Pod is stopped", lambda: bench.deleting(kubelet.pod), 60)
    kubelet.end(143)
    wait_until("it is cancelled", lambda: bench.status("job").get("lastResult") == "Cancelled", 60)


def test_resume_ends_a_suspension_after_failures_and_spec_stays(bench: Bench, plugin: Plugin) -> None:
    bench.apply("job", schedule=HOURLY, suspendAfterFailures=1)
    after_outage(bench, 1, "job")
    carried_out(bench, "job", key(hour()), code=1)
    wait_until("it is suspended", lambda: bench.ready_condition("job").get("reason") == "SuspendedAfterFailures", 60)
    spec = bench.job("job")["spec"]
    assert "kubectl leasedjob resume" in ok(plugin("why", "job"))
    ok(plugin("resume", "job", "--reason", "repaired"))
    wait_until("it is accepted", lambda: bench.ready_condition("job").get("reason") == "Accepted", 60)
    assert bench.job("job")["spec"] == spec
