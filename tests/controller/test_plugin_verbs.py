"""The real plugin, the real operator and a real API server: what a person asks, and what comes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from leasedjob.cli.exits import Exit
from leasedjob.protocol import ANNOTATION_ATTEMPT, ANNOTATION_LEASE
from tests.controller.control_plane import GROUP, VERSION, Bench, Kubelet, wait_until
from tests.controller.test_policies import HOURLY, hour, key

pytestmark = [pytest.mark.integration]
Done = subprocess.CompletedProcess[str]
Plugin = Callable[..., Done]


@pytest.fixture
def plugin(bench: Bench) -> Plugin:
    """`kubectl leasedjob VERB ...` in the test's namespace, in a process of its own."""

    def run(*words: str, stdin: str = "", kubeconfig: Path | None = None) -> Done:
        where = ["-n", bench.namespace, "--kubeconfig", str(kubeconfig or bench.plane.kubeconfig())]
        return subprocess.run(
            [Path(sys.executable).parent / "kubectl-leasedjob", *words, *where],
            input=stdin, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    return run


def ok(done: Done) -> str:
    assert done.returncode == Exit.OK, f"{done.args}: {done.stderr}"
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
    assert plugin("convert", "cronjob/nix").returncode == Exit.NOT_FOUND


# --- a newcomer's errors ----------------------------------------------------------------------------------------------


def test_who_may_not_is_told_in_one_line(bench: Bench, plugin: Plugin) -> None:
    bench.apply("job", schedule=HOURLY)
    bench.core.create_namespaced_service_account(bench.namespace, {"metadata": {"name": "nobody"}})
    token = bench.core.create_namespaced_service_account_token("nobody", bench.namespace, {"spec": {"audiences": []}})
    config = bench.plane.kubeconfig(token=token.status.token)
    for words in (("get", "job"), ("why", "job"), ("logs", "job"), ("suspend", "job"), ("convert", "cronjob/x")):
        done = plugin(*words, kubeconfig=config)
        assert (done.returncode, len(done.stderr.splitlines())) == (Exit.NO_ACCESS, 1), done.stderr
        assert "is forbidden" in done.stderr
    assert plugin("get", "job", "--context", "nowhere").returncode == Exit.UNREACHABLE


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
    assert again.returncode == Exit.RUN_REFUSED
