"""What the CRD's rules can't see: Ready=False with a reason that names the field, and no effect on other objects."""

from __future__ import annotations

import time
from typing import Any

import pytest

from leasedjob import protocol
from tests.controller.control_plane import GROUP, VERSION, Bench, Json, Kubelet, wait_until

# Each is accepted by the API server, and then said to be unusable: (spec, words of the message).
UNUSABLE: dict[str, tuple[Json, tuple[str, ...]]] = {
    "a date that never comes": ({"schedule": "0 0 30 2 *"}, ("spec.schedule",)),
    "a zone that doesn't exist": ({"timeZone": "Mars/Olympus_Mons"}, ("spec.timeZone", "Mars/Olympus_Mons")),
    "a step wider than its range": ({"schedule": "0 0 1-5/9 * *"}, ("spec.schedule",)),
    "a text that is no schedule": ({"schedule": "5-mon * * * *"}, ("spec.schedule",)),
}  # fmt: skip


def _create(bench: Bench, name: str, spec: Json) -> Json | None:
    """Applies it; None if the API server refuses."""
    from kubernetes.client import ApiException

    try:
        return bench.apply(name, **spec)
    except ApiException as e:
        if e.status == 422:
            return None
        raise


def _message(bench: Bench, run: str) -> str:
    return str(bench.run(run).get("status", {}).get("message", ""))


def test_every_kind_names_its_field_and_others_go_on(bench: Bench) -> None:
    bench.operator()
    made: dict[str, tuple[str, ...]] = {}
    for n, (case, (spec, words)) in enumerate(UNUSABLE.items()):
        if _create(bench, f"bad-{n}", spec) is not None:  # refused at once is as good
            made[f"bad-{n}"] = words
            assert case
    assert made, "the CRD sees everything? then these cases belong to its own tests"
    bench.apply("good", suspend=True)
    for job, words in made.items():
        found = wait_until(f"{job} is judged", lambda job=job: bench.ready_condition(job))
        assert found["status"] == "False", (job, found)
        assert all(w in found["message"] for w in words), found
        assert not bench.status(job).get("nextScheduleTime")
        run = bench.run_now(job)["metadata"]["name"]
        wait_until(
            "its run waits and says why",
            lambda run=run: "not Ready" in bench.run(run).get("status", {}).get("message", ""),
        )
        assert bench.rows(job) == []
    bench.run_now("good")
    kubelet = Kubelet(bench, bench.pod_for("good"))
    kubelet.run()
    kubelet.end(0)
    bench.row_when("good", lambda r: r["status"] == "SUCCESS", "done")
    # A correction is enough.
    job = next(iter(made))
    bench.patch(job, schedule="0 4 * * *", timeZone="Etc/UTC")
    wait_until("corrected", lambda: bench.ready_condition(job).get("status") == "True")
    bench.pod_for(job)


@pytest.mark.parametrize("length", [62, 63, 253])
def test_long_names(bench: Bench, length: int) -> None:
    """Names up to what the API server takes, two of them alike but for the end: each has its own code and Pod."""
    bench.operator()
    stem = ("n" * 50 + ".") * 5 if length == 253 else "n" * length
    names = [f"{stem[: length - 1]}{end}" for end in "ab"]
    for name in names:
        bench.apply(name, suspend=True)
        bench.run_now(name, name=f"run-{length}-{name[-1]}")
    pods = {}
    for name in names:
        pods[name] = bench.pod_for(name)
        kubelet = Kubelet(bench, pods[name])
        kubelet.run()
        kubelet.end(0)
        bench.row_when(name, lambda r: r["status"] == "SUCCESS", "done")
        wait_until("shown", lambda name=name: bench.status(name).get("lastResult") == "Success")
    one, two = (p["metadata"] for p in pods.values())
    assert one["name"] != two["name"]
    assert len(one["name"]) <= 63
    codes = [bench.status(n)["code"] for n in names]
    assert len(set(codes)) == 2
    assert all(len(c) <= 64 for c in codes)


def test_codes_of_any_signs(bench: Bench) -> None:
    """Each has a lease of its own, valid labels, and stands unchanged in an annotation and in the database."""
    bench.operator()
    dash = "d" * 25 + "-"  # with the namespace in front of it, the 63rd sign or nearby
    codes = ["EU West", "EU/West", "EU_West", "_x", "größe", "x" * 52, dash, f"{dash}x"]
    for n, code in enumerate(codes):
        bench.apply(f"job-{n}", code=code, suspend=True)
        bench.run_now(f"job-{n}")
    found = {}
    for n, code in enumerate(codes):
        meta = bench.pod_for(f"job-{n}")["metadata"]
        (row,) = bench.rows(f"job-{n}")
        found[row["lock_key"]] = row["code"]
        assert meta["annotations"][protocol.ANNOTATION_CODE] == row["code"]
        assert row["code"] == f"{bench.namespace}/{code}" or len(f"{bench.namespace}/{code}") > 64
        wait_until("shown", lambda n=n: bench.status(f"job-{n}").get("code"))
        assert bench.status(f"job-{n}")["code"] == row["code"]
    assert len(found) == len(set(found.values())) == len(codes)


def test_requests_that_can_not_be_met(bench: Bench) -> None:
    """Runs of nothing, of the future, of what has succeeded: each says so and stays."""
    bench.operator()
    bench.apply("job", suspend=True, schedule="0 * * * *")

    def phase(run: str) -> Any:
        status = bench.run(run).get("status", {})
        return (status.get("phase"), status.get("reason")) if status else None

    nothing = bench.run_now("no-such-job")["metadata"]["name"]
    wait_until(
        "there is no such job",
        lambda: "there is no LeasedJob" in bench.run(nothing).get("status", {}).get("message", ""),
    )
    future = bench.run_now("job", tick="2199-01-01T00:00:00Z")["metadata"]["name"]
    wait_until("the future is refused", lambda: phase(future) == ("Refused", "TickInTheFuture"))
    first = bench.run_now("job", tick="2026-01-01T00:00:00Z")["metadata"]["name"]
    kubelet = Kubelet(bench, bench.pod_for("job"))
    kubelet.run()
    kubelet.end(0)
    wait_until("succeeded", lambda: (phase(first) or ("",))[0] == "Succeeded")
    time.sleep(1.1)  # creation times are whole seconds
    again = bench.run_now("job", tick="2026-01-01T00:00:00Z")["metadata"]["name"]
    wait_until("a success is not repeated", lambda: phase(again) == ("Refused", "AlreadySucceeded"))
    assert len(bench.rows("job")) == 1


def test_status_stays_small_whatever_workloads_say(bench: Bench) -> None:
    bench.operator()
    bench.apply("noisy", suspend=True, concurrencyPolicy="Allow", failedRunsHistoryLimit=20)
    for _ in range(12):
        bench.run_now("noisy")
    pods = wait_until("twelve Pods", lambda: len(p := bench.pods()) == 12 and p)
    for pod in pods:
        kubelet = Kubelet(bench, pod)
        kubelet.run()
        kubelet.end(1, message="<&>\x00" * 900)
    wait_until("all have failed", lambda: all(r["status"] == "FAIL" for r in bench.rows("noisy")))
    wait_until("shown", lambda: len(bench.status("noisy").get("recentRuns") or []) == 10)
    wait_until("none is active", lambda: not bench.status("noisy").get("active"))
    import json

    assert len(json.dumps(bench.status("noisy"))) < 64 * 1024


def test_an_object_that_was_edited_into_nonsense_keeps_its_run(bench: Bench) -> None:
    """What runs goes on and is recorded; nothing new starts until the object is corrected."""
    bench.operator()
    bench.apply("job", suspend=True)
    bench.run_now("job")
    kubelet = Kubelet(bench, bench.pod_for("job"))
    kubelet.run()
    bench.patch("job", timeZone="Mars/Olympus_Mons")
    wait_until("judged", lambda: bench.ready_condition("job").get("status") == "False")
    assert not bench.deleting(kubelet.pod)
    kubelet.end(0)
    assert bench.row_when("job", lambda r: r["status"] != "RUNNING", "recorded")["status"] == "SUCCESS"


def test_an_object_that_is_being_deleted_starts_nothing(bench: Bench) -> None:
    """Somebody else's finalizer keeps it: what was asked for is not started, and its code is free."""
    bench.operator()
    bench.apply("job", suspend=True)
    wait_until("known", lambda: bench.ready_condition("job").get("status") == "True")
    body = {"metadata": {"finalizers": ["example.com/keep"]}}
    bench.custom.patch_namespaced_custom_object(GROUP, VERSION, bench.namespace, "leasedjobs", "job", body)
    bench.delete("job")
    wait_until("unregistered", lambda: not bench.sql("SELECT FROM leasedjob.job_registration"))
    run = bench.run_now("job")["metadata"]["name"]
    wait_until("told", lambda: "there is no LeasedJob" in _message(bench, run))
    assert bench.rows("job") == []
    body = {"metadata": {"finalizers": []}}
    bench.custom.patch_namespaced_custom_object(GROUP, VERSION, bench.namespace, "leasedjobs", "job", body)
