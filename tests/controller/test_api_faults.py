"""The API server slow, silent, refusing; Pods that nobody lets be created; a replica that was frozen for a while."""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kubernetes import client

from leasedjob.controller.loops import WATCH_BEGINS_SECONDS
from tests.controller.control_plane import Bench, Json, Kubelet, wait_until
from tests.controller.proxy import ApiProxy, Request


def _through(bench: Bench, proxy: ApiProxy) -> dict[str, str]:
    return {"LEASEDJOB_KUBECONFIG": str(bench.plane.kubeconfig(proxy.port))}


def _run_of(bench: Bench, job: str, seconds: float = 30) -> tuple[str, Json]:
    """Asks for a run; the LeasedJobRun's name and its row."""
    run = bench.run_now(job)["metadata"]["name"]

    def row() -> Json | None:
        return next((r for r in bench.rows(job) if f"/{run}/" in str(r["run_key"])), None)

    return run, wait_until(f"{run} is claimed", row, seconds)


def _pod_of(bench: Bench, row: Json, seconds: float = 30) -> Json:
    return wait_until(
        "its Pod",
        lambda: next(
            (p for p in bench.pods() if str(row["id"]) in (p["metadata"].get("annotations") or {}).values()), None
        ),
        seconds,
    )


def _refused(bench: Bench, job: str, *words: str) -> Json:
    """A run of `job` can't have a Pod: the slot is given back with the reason, which the run's status shows."""
    run, _ = _run_of(bench, job)
    row = bench.row_when(job, lambda r: r["status"] == "FAIL" and r["reason"], "released", seconds=60)
    assert row["reason"].startswith("PodNotCreated"), row["reason"]
    assert all(w in row["reason"] for w in words), row["reason"]
    assert (row["failures"], row["interruptions"]) == (0, 0)
    wait_until("the run shows it", lambda: words[0] in bench.run(run).get("status", {}).get("message", ""))
    return row


def _goes_on(bench: Bench, job: str) -> None:
    """The refused run starts within a minute after its cause is gone."""
    row = bench.row_when(job, lambda r: r["status"] == "RUNNING", "claimed again", seconds=60)
    pod = wait_until("its Pod", lambda: next(
        (p for p in bench.pods() if str(bench.rows(job)[-1]["id"]) in p["metadata"]["annotations"].values()
         and not p["metadata"].get("deletionTimestamp")), None), 60)  # fmt: skip
    kubelet = Kubelet(bench, pod)
    kubelet.run()
    kubelet.end(0)
    done = bench.row_when(job, lambda r: r["status"] == "SUCCESS", "done")
    assert done["id"] == row["id"]
    assert (done["failures"], done["interruptions"]) == (0, 0)


# --- Pods that are refused -------------------------------------------------------------------------------------------


def test_a_full_quota(bench: Bench) -> None:
    """History is tidied up although nothing can be created, and what that frees is used."""
    bench.operator()
    bench.apply("job", suspend=True, successfulRunsHistoryLimit=1)
    bench.whole_run("job")
    body = {"metadata": {"name": "pods"}, "spec": {"hard": {"pods": "1"}}}
    bench.core.create_namespaced_resource_quota(bench.namespace, body)

    def used(count: int) -> None:  # nobody counts here but us
        status = {"status": {"hard": {"pods": "1"}, "used": {"pods": str(count)}}}
        bench.core.patch_namespaced_resource_quota_status("pods", bench.namespace, status)

    used(1)
    bench.patch("job", successfulRunsHistoryLimit=0)
    wait_until("history is tidied up", lambda: all(p["metadata"].get("deletionTimestamp") for p in bench.pods()))
    for pod in bench.pods():
        bench.gone(pod)
    _refused(bench, "job", "exceeded quota")
    used(0)
    _goes_on(bench, "job")


@contextlib.contextmanager
def _admission(bench: Bench, expression: str) -> Iterator[None]:
    """A policy that lets Pods of this namespace through only where `expression` holds."""
    api = client.AdmissionregistrationV1Api(bench.plane.api())
    name = f"deny-{bench.namespace}"
    api.create_validating_admission_policy(
        {
            "metadata": {"name": name},
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {
                    "resourceRules": [
                        {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                    ]
                },
                "validations": [{"expression": expression, "message": "no such image here"}],
            },
        }
    )
    api.create_validating_admission_policy_binding(
        {
            "metadata": {"name": name},
            "spec": {
                "policyName": name,
                "validationActions": ["Deny"],
                "matchResources": {
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": bench.namespace}}
                },
            },
        }
    )
    try:
        yield
    finally:
        api.delete_validating_admission_policy_binding(name)
        api.delete_validating_admission_policy(name)


def _in_force(bench: Bench) -> None:
    probe = {"metadata": {"name": "probe"}, "spec": {"containers": [{"name": "c", "image": "bad/c:1"}]}}

    def denies() -> bool:
        try:
            bench.core.create_namespaced_pod(bench.namespace, probe, dry_run="All")
        except client.ApiException as e:
            return "no such image here" in str(e.body)
        return False

    wait_until("the policy is in force", denies, 30, 0.3)


def test_a_policy_that_denies_and_a_template_that_is_corrected(bench: Bench) -> None:
    """Other objects keep their time; a corrected template is what the next attempt is made of."""
    bench.operator()

    def template(image: str) -> Json:
        return {"spec": {"containers": [{"name": "main", "image": image}]}}

    with _admission(bench, "object.spec.containers.all(c, c.image.startsWith('good/'))"):
        _in_force(bench)
        bench.apply("bad", suspend=True, template=template("bad/main:1"))
        bench.apply("good", suspend=True, template=template("good/main:1"))
        _refused(bench, "bad", "no such image here")
        bench.whole_run("good")
        bench.patch("bad", template=template("good/main:2"))
        _goes_on(bench, "bad")
        images = [p["spec"]["containers"][0]["image"] for p in bench.pods()]
        assert "good/main:2" in images


@pytest.mark.parametrize("policy", ["Forbid", "Allow"])
def test_thirty_ticks_that_are_refused(bench: Bench, policy: str) -> None:
    """Nothing piles up, each is tried ever more slowly, the text of the refusal is shown, and another object keeps its
    minute; when the reason is gone, what is due runs."""
    first = bench.operator("before")
    at = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=20)
    template = {"spec": {"containers": [{"name": "main", "image": "bad/main:1"}]}}
    bench.apply(
        "job", schedule=f"{at.minute} * * * *", missedRunPolicy="RunAll", concurrencyPolicy=policy, template=template
    )
    bench.apply("good", suspend=True, template={"spec": {"containers": [{"name": "main", "image": "good/main:1"}]}})
    for job in ("job", "good"):
        wait_until("registered", lambda job=job: bench.ready_condition(job).get("status") == "True")
    first.stop()
    bench.sql("UPDATE leasedjob.job_code SET watermark = %s WHERE code LIKE '%%/job'", at - timedelta(hours=30))
    refused = 30 if policy == "Allow" else 1
    with (
        ApiProxy(bench.plane) as proxy,
        _admission(bench, "object.spec.containers.all(c, !c.image.startsWith('bad/'))"),
    ):
        _in_force(bench)
        operator = bench.operator("after", **_through(bench, proxy))

        def released() -> list[Json]:
            return [r for r in bench.rows("job") if r["reason"].startswith("PodNotCreated")]

        wait_until("all are refused", lambda: len(released()) == refused, 60)
        bench.whole_run("good")
        assert bench.sql("SELECT max(attempt) FROM leasedjob.job_scheduler")[0][0] <= 4
        asked = len([r for r in proxy.requests if r.creates("pods")])
        assert asked <= 4 * refused + 1
        assert len(bench.rows("job")) == refused
        shown = wait_until("shown", lambda: bench.status("job").get("recentRuns"))
        assert "no such image here" in shown[0]["message"]
        assert len(shown) == min(10, refused)
        assert [p for p in bench.pods() if "good/" not in p["spec"]["containers"][0]["image"]] == []
        assert operator.ready()
        bench.close_operators()
    bench.operator("healed")
    wait_until("each has its Pod", lambda: len(
        [p for p in bench.pods() if "bad/" in p["spec"]["containers"][0]["image"]]) == refused, 90, 0.5)  # fmt: skip
    assert {r["failures"] for r in bench.rows("job")} == {0}


def test_a_webhook_that_never_answers(bench: Bench) -> None:
    bench.operator()
    bench.apply("job", suspend=True)
    bench.apply("other", suspend=True)
    api = client.AdmissionregistrationV1Api(bench.plane.api())
    name = f"silent-{bench.namespace}"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        api.create_validating_webhook_configuration(
            {
                "metadata": {"name": name},
                "webhooks": [
                    {
                        "name": "silent.example.com",
                        "clientConfig": {"url": f"https://127.0.0.1:{silent.getsockname()[1]}/"},
                        "rules": [
                            {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                        ],
                        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": bench.namespace}},
                        "timeoutSeconds": 2,
                        "failurePolicy": "Fail",
                        "sideEffects": "None",
                        "admissionReviewVersions": ["v1"],
                    }
                ],
            }
        )
        try:
            wait_until("the webhook is in force", lambda: _slow_dry_run(bench), 30, 0.3)
            _refused(bench, "job", "failed calling webhook")
        finally:
            api.delete_validating_webhook_configuration(name)
    _goes_on(bench, "job")
    bench.whole_run("other")


def _slow_dry_run(bench: Bench) -> bool:
    probe = {"metadata": {"name": "probe"}, "spec": {"containers": [{"name": "c", "image": "good/c:1"}]}}
    try:
        bench.core.create_namespaced_pod(bench.namespace, probe, dry_run="All")
    except client.ApiException:
        return True
    return False


def test_a_namespace_that_is_terminating(bench: Bench) -> None:
    """No Pod can be created any more: the run ends with the reason, nobody asks again for this or another object of the
    namespace, and the Pod that runs is still recorded."""
    with ApiProxy(bench.plane) as proxy:
        bench.operator(**_through(bench, proxy))
        _terminating(bench, proxy)
        bench.close_operators()


def _terminating(bench: Bench, proxy: ApiProxy) -> None:
    bench.apply("runs", suspend=True)
    bench.apply("starts", suspend=True)
    _, row = _run_of(bench, "runs")
    kubelet = Kubelet(bench, _pod_of(bench, row))
    kubelet.run()
    run = bench.run_now("starts", name="late")  # accepted before the namespace goes
    assert run
    bench.core.delete_namespace(bench.namespace)
    bench.row_when("starts", lambda r: True, "claimed")
    for pod in bench.pods():
        if pod["metadata"]["uid"] != kubelet.pod["metadata"]["uid"]:
            bench.gone(pod)  # created in time; the namespace takes it
    row = bench.row_when("starts", lambda r: r["status"] == "FAIL" and r["retry_at"] is None, "ended", seconds=60)
    assert "being terminated" in row["reason"]
    assert row["failures"] == 0
    asked = len([r for r in proxy.requests if r.creates("pods")])
    bench.sql("UPDATE leasedjob.job_scheduler SET retry_at = clock_timestamp(), changed_at = clock_timestamp()"
              " WHERE job_name = 'starts'")  # fmt: skip
    kubelet.end(0)
    assert bench.row_when("runs", lambda r: r["status"] != "RUNNING", "recorded")["status"] == "SUCCESS"
    time.sleep(2)  # long enough for what is due to be claimed
    assert len([r for r in proxy.requests if r.creates("pods")]) == asked


# --- the server itself -----------------------------------------------------------------------------------------------


def test_two_seconds_for_each_call(bench: Bench) -> None:
    with ApiProxy(bench.plane) as proxy:
        bench.operator(**_through(bench, proxy))
        slow = proxy.rule(lambda r: not r.watch, delay=2.0)
        for job in ("a", "b", "c"):
            bench.apply(job, suspend=True)
        runs = [_run_of(bench, job) for job in ("a", "b", "c")]
        for _, row in runs:
            kubelet = Kubelet(bench, _pod_of(bench, row))
            kubelet.run()
            kubelet.end(0)
        for run, row in runs:
            wait_until("shown", lambda run=run: bench.run(run).get("status", {}).get("phase") == "Succeeded", 60)
            assert row["attempt"] == 1
        assert slow.seen
        bench.close()


def test_too_many_requests_and_faults_of_the_server(bench: Bench) -> None:
    """429, 500, 503 and lost answers by turns: every call is tried again, and nothing happens twice."""
    faults = itertools.cycle(
        [
            {"answer": (429, "TooManyRequests", "slow down")},
            {},
            {},
            {"answer": (500, "InternalError", "etcdserver: request timed out")},
            {},
            {},
            {"lose": True},
            {},
        ]
    )
    lock = threading.Lock()

    def by_turns(r: Request) -> bool:
        with lock:
            fault: dict[str, Any] = next(faults)
        rule.answer, rule.lose = fault.get("answer"), fault.get("lose", False)
        return not r.watch and bool(fault)

    with ApiProxy(bench.plane) as proxy:
        operator = bench.operator(**_through(bench, proxy))
        rule = proxy.rule(by_turns)
        jobs = ["a", "b", "c", "d"]
        for job in jobs:
            bench.apply(job, suspend=True)
        runs = {job: _run_of(bench, job, 60) for job in jobs}
        for _, row in runs.values():
            kubelet = Kubelet(bench, _pod_of(bench, row, 60))
            kubelet.run()
            kubelet.end(0)
        for job, (run, _) in runs.items():
            wait_until("shown", lambda run=run: bench.run(run).get("status", {}).get("phase") == "Succeeded", 60)
            assert [r["attempt"] for r in bench.rows(job)] == [1], job
        assert len(bench.pods()) == len(jobs)
        assert operator.ready()
        bench.close()


def test_conflicts_on_status(bench: Bench) -> None:
    """Somebody else writes the object all the time: what is true is shown in the end."""
    with ApiProxy(bench.plane) as proxy:
        conflicts = proxy.rule(lambda r: r.writes_status(), answer=(409, "Conflict", "the object has been modified"))
        bench.operator(**_through(bench, proxy))
        bench.apply("job", suspend=True)
        run, row = _run_of(bench, "job")
        kubelet = Kubelet(bench, _pod_of(bench, row))
        kubelet.run()
        kubelet.end(0)
        bench.row_when("job", lambda r: r["status"] == "SUCCESS", "recorded all the same")
        conflicts.wait_seen()
        conflicts.release()
        wait_until("shown", lambda: bench.run(run).get("status", {}).get("phase") == "Succeeded", 60)
        wait_until("shown", lambda: bench.status("job").get("lastResult") == "Success", 60)
        bench.close()


def test_a_silent_watch_is_healed_by_lists(bench: Bench) -> None:
    with ApiProxy(bench.plane) as proxy:
        operator = bench.operator(LEASEDJOB_COMPARE_SECONDS="3", **_through(bench, proxy))
        proxy.silent = True
        bench.apply("job", suspend=True)
        bench.whole_run("job")
        wait_until("the log says so", lambda: "that the watch has not" in operator.log.read_text())
        assert operator.ready()
        bench.close()


def test_a_watch_that_is_cut_and_expired(bench: Bench) -> None:
    """Connections are reset, and the next watches are told 410 Gone: nothing that happened meanwhile is missed."""
    with ApiProxy(bench.plane) as proxy:
        operator = bench.operator(LEASEDJOB_COMPARE_SECONDS="3", **_through(bench, proxy))
        gone = proxy.rule(lambda r: r.watch, answer=(410, "Expired", "too old resource version"))
        proxy.cut()
        bench.apply("job", suspend=True)
        run = bench.run_now("job")["metadata"]["name"]
        gone.wait_seen(3)
        gone.release()
        row = bench.row_when("job", lambda r: True, "claimed", seconds=60)
        kubelet = Kubelet(bench, _pod_of(bench, row))
        kubelet.run()
        kubelet.end(0)
        wait_until("shown", lambda: bench.run(run).get("status", {}).get("phase") == "Succeeded")
        wait_until("the watch begins anew", lambda: "begins anew" in operator.log.read_text(), 30)
        bench.whole_run("job")
        bench.close()


def test_a_watch_that_is_reset_at_each_try(bench: Bench) -> None:
    """Five times in a row for each kind: the watch itself comes back, without a comparison, and misses nothing."""
    with ApiProxy(bench.plane) as proxy:
        operator = bench.operator(LEASEDJOB_COMPARE_SECONDS="3600", **_through(bench, proxy))
        time.sleep(WATCH_BEGINS_SECONDS + 1)  # the first comparison is followed by another one
        resets = proxy.rule(lambda r: r.watch, reset=True, times=15)
        proxy.cut()
        bench.apply("job", suspend=True)
        resets.wait_seen(15, 60)
        wait_until("known", lambda: bench.ready_condition("job").get("status") == "True", 60)
        bench.whole_run("job")
        assert operator.ready()
        assert "begins anew" not in operator.log.read_text()
        bench.close()


# --- replicas --------------------------------------------------------------------------------------------------------


def test_a_replica_that_was_frozen_changes_nothing_when_it_thaws(bench: Bench) -> None:
    """Its memory is of a run that has ended, been repeated and been tidied up meanwhile."""
    frozen = bench.operator("frozen")
    bench.operator("awake")
    bench.apply("job", suspend=True, backoffLimit=1, failedRunsHistoryLimit=0, successfulRunsHistoryLimit=0)
    run, row = _run_of(bench, "job")
    pod = _pod_of(bench, row)
    wait_until("both know it", lambda: bench.status("job").get("activeCount") == 1)
    frozen.signal(signal.SIGSTOP)
    since = time.monotonic()
    kubelet = Kubelet(bench, pod)
    kubelet.run()
    kubelet.end(1)
    second = bench.pod_for("job", 2)
    kubelet = Kubelet(bench, second)
    kubelet.run()
    kubelet.end(0)
    bench.row_when("job", lambda r: r["status"] == "SUCCESS", "done")
    before = _final(bench)
    time.sleep(max(0.0, 25 - (time.monotonic() - since)))  # long enough for its timers to be due
    frozen.signal(signal.SIGCONT)
    wait_until("thawed", frozen.ready)
    bench.apply("sign", suspend=True)
    bench.whole_run("sign")
    assert _final(bench) == before
    assert bench.run_status(run).get("phase") == "Succeeded"
    assert len(bench.rows("job")) == 1


def _final(bench: Bench) -> Json:
    (row,) = bench.rows("job")
    return {k: row[k] for k in ("id", "status", "attempt", "failures", "fencing_token", "finished_at", "reason")}


def test_an_operator_stops_in_good_order(bench: Bench) -> None:
    """SIGTERM: it ends what it began, takes on nothing new, and is gone in seconds with exit code 0."""
    operator = bench.operator()
    bench.apply("job", suspend=True)
    bench.whole_run("job")
    since = time.monotonic()
    assert operator.stop() == 0
    assert time.monotonic() - since < 15
    assert "ended by itself" not in operator.log.read_text()
