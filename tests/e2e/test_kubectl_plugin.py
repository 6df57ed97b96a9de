"""`kubectl leasedjob`, found and started by a real kubectl, with the operator at work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from leasedjob.cli.exits import Exit
from tests.cluster.progress import clean_environment
from tests.cluster.source import Cluster
from tests.e2e.jobs import NEVER, SHORT, leased_job
from tests.e2e.kube import Kubectl

Plugin = Callable[..., subprocess.CompletedProcess[str]]
FOR_EVER = """
    import time
    while True:
        time.sleep(1)
"""


@pytest.fixture
def plugin(cluster: Cluster, namespace: str) -> Plugin:
    """`kubectl leasedjob VERB ...` in the test's namespace; the plugin is found on the PATH, as at a user's."""

    def run(*words: str, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
        argv = [cluster.kubectl, "leasedjob", *words, "-n", namespace]
        return subprocess.run(
            [*argv, "--kubeconfig", str(kubeconfig or cluster.kubeconfig)],
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
            env=with_plugin_on_path(),
        )

    return run


def with_plugin_on_path() -> dict[str, str]:
    environment = dict(clean_environment())
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    return environment


def test_run_waits_for_success_and_the_lists_show_it(kubectl: Kubectl, plugin: Plugin) -> None:
    kubectl.apply(leased_job("good", "print('done')", schedule=NEVER, **SHORT))
    done = plugin("run", "good", "--reason", "a test", "--wait", "--timeout", "120")
    assert done.returncode == Exit.OK, done.stderr
    name = done.stdout.split()[0].partition("/")[2]
    assert done.stdout == f"leasedjobrun.leasedjob.io/{name} Succeeded\n"
    made = kubectl.json("get", "ljr", name)
    assert made["spec"] == {"jobName": "good", "reason": "a test", "cancel": False}

    # The LeasedJob's own status is another write, a moment later.
    kubectl.wait("the list to say Success", lambda: " Success " in plugin("list").stdout, timeout=30, every=1)
    header, line = plugin("list").stdout.splitlines()
    assert header.startswith("NAME ")
    assert line.split()[0] == "good"
    (run,) = json.loads(plugin("runs", "good", "-o", "json").stdout)
    assert run["runKey"] == made["status"]["runKey"]
    assert run["outcome"] == "Success"
    assert plugin("list", "-o", "name").stdout == "leasedjob.leasedjob.io/good\n"


def test_a_failure_and_its_exit_code(kubectl: Kubectl, plugin: Plugin) -> None:
    kubectl.apply(leased_job("bad", "raise SystemExit(3)", schedule=NEVER, **SHORT))
    done = plugin("run", "bad", "--wait", "--timeout", "120")
    assert done.returncode == Exit.RUN_FAILED, done.stderr
    assert done.stdout.endswith(" Failed\n")
    assert "3" in done.stderr.splitlines()[-1]


def test_a_tick_that_has_succeeded_is_refused(kubectl: Kubectl, plugin: Plugin) -> None:
    kubectl.apply(leased_job("once", "print('done')", schedule="0 0 * * *", **SHORT))
    tick = (datetime.now(UTC) - timedelta(days=1)).strftime("%Y-%m-%dT00:00:00Z")
    done = plugin("run", "once", "--tick", tick, "--wait", "--timeout", "120")
    assert done.returncode == Exit.OK, done.stderr
    again = plugin("run", "once", "--tick", tick, "--wait", "--timeout", "60")
    assert again.returncode == Exit.RUN_REFUSED, again.stderr
    assert len([p for p in kubectl.items("pods") if p["metadata"]["name"].startswith("once")]) == 1


def test_cancel_stops_a_run_and_it_stays_stopped(kubectl: Kubectl, plugin: Plugin) -> None:
    kubectl.apply(leased_job("long", FOR_EVER, schedule=NEVER, backoffLimit=3, **SHORT))
    started = plugin("run", "long", "-o", "name")
    assert started.returncode == Exit.OK, started.stderr
    name = started.stdout.strip().partition("/")[2]
    kubectl("wait", "--for=jsonpath={.status.phase}=Running", f"ljr/{name}", "--timeout=90s", timeout=100)
    done = plugin("cancel", name, "--wait", "--timeout", "120")
    assert done.returncode == Exit.OK, done.stderr
    assert done.stdout == f"leasedjobrun.leasedjob.io/{name} Cancelled\n"
    again = plugin("cancel", name)
    assert again.returncode == Exit.OK
    assert "has already ended: Cancelled" in again.stdout


FIRST_FAILS = """
    import os, time
    print("attempt", os.environ["LEASEDJOB_ATTEMPT"], "begins", flush=True)
    time.sleep(3)
    print("it ends", flush=True)
    raise SystemExit(4 if os.environ["LEASEDJOB_ATTEMPT"] == "1" else 0)
"""


def test_logs_and_timeline_of_a_run_with_two_attempts(kubectl: Kubectl, plugin: Plugin) -> None:
    kubectl.apply(leased_job("twice", FIRST_FAILS, schedule=NEVER, backoffLimit=1, failedRunsHistoryLimit=2, **SHORT))
    nothing = plugin("logs", "twice")
    assert nothing.returncode == Exit.NOT_FOUND
    assert "it has not run yet" in nothing.stderr
    assert plugin("run", "twice").returncode == Exit.OK
    kubectl.wait("a Pod", lambda: kubectl.items("pods"))
    followed = plugin("logs", "twice", "-f")  # from before the start to the end
    assert followed.returncode == Exit.OK, followed.stderr
    assert followed.stdout == "attempt 1 begins\nit ends\n"
    kubectl.wait("success", lambda: " Success" in plugin("list").stdout, timeout=120, every=1)
    assert plugin("logs", "twice", "--tail", "1").stdout == "it ends\n"
    assert plugin("logs", "twice").stdout == "attempt 2 begins\nit ends\n"
    assert plugin("logs", "twice", "--attempt", "1").stdout == "attempt 1 begins\nit ends\n"
    assert plugin("logs", "twice", "-c", "leasedjob-hold").returncode == Exit.OK
    unknown = plugin("logs", "twice", "-c", "nix")
    assert (unknown.returncode, len(unknown.stderr.splitlines())) == (Exit.REFUSED, 1)

    lines = [line.split("|") for line in plugin("timeline", "twice").stdout.splitlines() if "#" in line]
    assert [line[0].split()[-3:-1] for line in lines] == [["Ended", "Error"], ["#2", "Success"]]
    assert lines[0][1].rstrip().endswith("x")
    assert lines[1][1].index("=") > lines[0][1].rindex("x"), "the second attempt came after the first"


def test_what_is_not_there_and_who_may_not(
    kubectl: Kubectl, plugin: Plugin, cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    missing = plugin("run", "nothing")
    assert missing.returncode == Exit.NOT_FOUND
    assert f"LeasedJob nothing not found in namespace {namespace}" in missing.stderr
    assert plugin("cancel", "nothing").returncode == Exit.NOT_FOUND

    kubectl("create", "serviceaccount", "nobody")
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    token = kubectl("create", "token", "nobody").strip()
    for user in config["users"]:
        user["user"] = {"token": token}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    for words in (("run", "x"), ("list",), ("list", "-A"), ("cancel", "x"), ("runs", "x"), ("why", "x"), ("logs", "x")):
        refused = plugin(*words, kubeconfig=tmp_path / "kubeconfig")
        assert refused.returncode == Exit.NO_ACCESS, refused.stderr
        assert len(refused.stderr.splitlines()) == 1
        assert "is forbidden" in refused.stderr


def test_kubectl_completes_the_plugin_s_words(kubectl: Kubectl, cluster: Cluster, namespace: str) -> None:
    kubectl.apply(leased_job("alpha", schedule=NEVER), leased_job("beta", schedule=NEVER))
    place = ["-n", namespace, "--kubeconfig", str(cluster.kubeconfig)]

    def complete(*words: str) -> list[str]:
        argv = [cluster.kubectl, "__complete", "leasedjob", *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True, env=with_plugin_on_path())
        return [line.partition("\t")[0] for line in done.stdout.splitlines()]

    assert complete("r") == ["run", "runs", "resume", "release", ":4"]
    # Completion gives up early and silently, so on a busy machine it is asked again.
    kubectl.wait("both names", lambda: complete("run", *place, "") == ["alpha", "beta", ":4"])
    kubectl.wait("one name", lambda: complete("run", *place, "b") == ["beta", ":4"])
