"""Every row of the outcome table (docs/guarantees.md), from a Pod's last status to the lease row."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from leasedjob.lease.rows import AdoptVerdict, Outcome
from leasedjob.protocol import Seen
from tests.controller.control_plane import Bench, Json, Kubelet, wait_until

Ending = Callable[[Bench, Kubelet], None]


def _begin(bench: Bench, name: str = "job", **spec: Any) -> Kubelet:
    bench.operator()
    bench.apply(name, suspend=True, **spec)
    bench.run_now(name)
    kubelet = Kubelet(bench, bench.pod_for(name))
    kubelet.run()
    return kubelet


def _delete(bench: Bench, kubelet: Kubelet) -> None:
    bench.core.delete_namespaced_pod(kubelet.pod["metadata"]["name"], bench.namespace, grace_period_seconds=30)


def deleted_then(code: int) -> Ending:
    def ending(bench: Bench, kubelet: Kubelet) -> None:
        _delete(bench, kubelet)
        kubelet.end(code)

    return ending


def ends(*codes: int, **how: Any) -> Ending:
    return lambda _, kubelet: kubelet.end(*codes, **how)


def fenced(code: int) -> Ending:
    return lambda _, k: k.end(code, testimony=k.testimony(Seen.FENCED, fenced_at=time.time(), reason="no heartbeat"))


def killed_sidecar(beat_age: float) -> Ending:
    def ending(_: Bench, k: Kubelet) -> None:
        k.end(0, testimony=k.testimony(final=False, beat=time.time() - beat_age), hold_code=137)

    return ending


def reported(outcome: Outcome, code: int, *, recorded: bool) -> Ending:
    def ending(_: Bench, k: Kubelet) -> None:
        if recorded:
            assert k.report(outcome, {"rows": 42})
        k.end(code, testimony=k.testimony(Seen.REPORTED, outcome=outcome.value))

    return ending


def _is(status: str, reason: str = "", *, failures: int = 0, interruptions: int = 0, retry: bool = False) -> Any:
    return status, reason, failures, interruptions, retry


TABLE: dict[str, tuple[Ending, Any]] = {
    "reported complete, recorded by the sidecar": (reported(Outcome.COMPLETE, 143, recorded=True), _is("SUCCESS")),
    "reported complete, not recorded": (reported(Outcome.COMPLETE, 137, recorded=False), _is("SUCCESS", "Reported")),
    "reported fail, exit 0": (reported(Outcome.FAIL, 0, recorded=False), _is("FAIL", "Reported", failures=1)),
    "reported release": (
        reported(Outcome.RELEASE, 0, recorded=False),
        _is("FAIL", "Reported", interruptions=1, retry=True),
    ),
    "fenced, exit 143": (fenced(143), _is("FAIL", "Fenced", interruptions=1, retry=True)),
    "fenced, traps SIGTERM and exits 0": (fenced(0), _is("FAIL", "Fenced", interruptions=1, retry=True)),
    "leased to the end, exit 0": (ends(0), _is("SUCCESS", "Completed")),
    "leased to the end, sidecar 143": (ends(0, hold_code=143), _is("SUCCESS", "Completed")),
    "leased, the sidecar killed after the workload": (killed_sidecar(0.5), _is("SUCCESS", "Completed")),
    "leased to the end, exit 1": (
        ends(1, message="boom"),
        _is("FAIL", "Error: container main exited with 1: boom", failures=1),
    ),
    "leased to the end, OOMKilled": (ends(137, reason="OOMKilled"), _is("FAIL", "OOMKilled", failures=1)),
    "leased to the end, stopped, exit 0": (deleted_then(0), _is("FAIL", "Interrupted", interruptions=1, retry=True)),
    "leased to the end, stopped, exit 143": (
        deleted_then(143),
        _is("FAIL", "Interrupted", interruptions=1, retry=True),
    ),
    "active deadline, exit 0": (ends(0, pod_reason="DeadlineExceeded"), _is("FAIL", "DeadlineExceeded", failures=1)),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_outcome(bench: Bench, case: str) -> None:
    ending, (status, reason, failures, interruptions, retry) = TABLE[case]
    kubelet = _begin(bench)
    ending(bench, kubelet)
    row = bench.row_when("job", lambda r: r["status"] != "RUNNING" or r["attempt"] > 1, case)
    if retry:
        # Claimable at once: the same run, a new attempt, a larger fencing token.
        row = bench.row_when("job", lambda r: r["attempt"] == 2 and r["status"] == "RUNNING", f"{case}: claimed again")
        assert row["interruptions"] == interruptions
        assert row["failures"] == 0
        wait_until("a Pod of attempt 2", lambda: bench.pod_for("job", 2))
        return
    assert row["status"] == status
    assert row["reason"].startswith(reason)
    assert (row["failures"], row["interruptions"], row["retry_at"]) == (failures, interruptions, None)


def test_exit_0_on_a_stop_may_mean_success(bench: Bench) -> None:
    shutdown = {"preStopSeconds": 0, "terminationGracePeriodSeconds": 5, "exitZeroOnStop": "Success"}
    deleted_then(0)(bench, _begin(bench, shutdown=shutdown))
    assert bench.row_when("job", lambda r: r["status"] != "RUNNING", "final")["status"] == "SUCCESS"


def test_two_workload_containers_all_have_to_succeed(bench: Bench) -> None:
    template = {"spec": {"containers": [{"name": "a", "image": "example/a:1"}, {"name": "b", "image": "example/b:1"}]}}
    _begin(bench, template=template).end(0, 3)
    row = bench.row_when("job", lambda r: r["status"] != "RUNNING", "final")
    assert (row["status"], row["failures"]) == ("FAIL", 1)
    assert "container b exited with 3" in row["reason"]


def test_without_testimony_nothing_is_written_until_the_lease_expires(bench: Bench) -> None:
    kubelet = _begin(bench, lease={"durationSeconds": 20, "heartbeatSeconds": 2})
    row = bench.rows("job")[-1]
    kubelet.end(0, testimony=None, hold_code=137)
    again = bench.row_when("job", lambda r: r["attempt"] == 2, "reclaimed", seconds=40)
    assert again["started_at"] >= row["expires_at"]
    assert again["interruptions"] == 1
    assert again["fencing_token"] > row["fencing_token"]


def test_an_attempt_whose_end_nobody_saw_is_not_repeated_by_a_new_object_of_its_name(bench: Bench) -> None:
    """The LeasedJob is deleted, and its Pod with it, while no operator runs; then it is created anew."""
    operator = bench.operator()
    bench.apply("job", suspend=True, lease={"durationSeconds": 20, "heartbeatSeconds": 2})
    bench.run_now("job")
    kubelet = Kubelet(bench, bench.pod_for("job"))
    kubelet.run()
    operator.kill()
    bench.delete("job")
    bench.gone(kubelet.pod)
    bench.apply("job", suspend=True)
    operator.start()
    row = bench.row_when("job", lambda r: r["status"] != "RUNNING" or r["attempt"] > 1, "ended", seconds=60)
    assert (row["status"], row["attempt"], row["reason"], row["retry_at"]) == ("FAIL", 1, "JobDeleted", None)
    assert row["finished_at"] >= row["started_at"] + timedelta(seconds=20), "not before its lease had expired"
    bench.run_now("job", name="after")
    assert Kubelet(bench, bench.pod_for("job")).run().verdict is AdoptVerdict.ADOPTED
    assert [(r["attempt"], r["status"]) for r in bench.rows("job")] == [(1, "FAIL"), (1, "RUNNING")]


def test_a_frozen_sidecars_old_testimony_is_no_success(bench: Bench) -> None:
    kubelet = _begin(bench, lease={"durationSeconds": 20, "heartbeatSeconds": 2})
    killed_sidecar(9.0)(bench, kubelet)
    row = bench.row_when("job", lambda r: r["attempt"] == 2, "reclaimed after expiry", seconds=40)
    assert row["status"] == "RUNNING"


def test_adopted_but_never_started_ends_at_the_pending_deadline(bench: Bench) -> None:
    bench.operator()
    bench.apply("job", suspend=True, pendingDeadlineSeconds=6)
    bench.run_now("job")
    pod = bench.pod_for("job")
    kubelet = Kubelet(bench, pod)
    assert kubelet.adopt().verdict is AdoptVerdict.ADOPTED
    kubelet.waiting("ImagePullBackOff", 'Back-off pulling image "nowhere/none:1"', adopted=True)

    def shown() -> bool:
        run: Json = (bench.status("job").get("active") or [{}])[0]
        return run.get("reason") == "ImagePullBackOff" and "nowhere/none" in run.get("message", "")

    wait_until("the reason is in status", shown)
    wait_until("the Pod is deleted", lambda: bench.deleting(pod))
    assert bench.rows("job")[-1]["status"] == "RUNNING"
    kubelet.never_started()
    row = bench.row_when("job", lambda r: r["status"] == "FAIL", "ended")
    assert row["reason"].startswith("PendingDeadlineExceeded")
    assert (row["failures"], row["retry_at"]) == (0, None)


def test_not_adopted_the_claim_is_released_before_the_pod_is_deleted(bench: Bench) -> None:
    bench.operator()
    bench.apply("job", suspend=True, pendingDeadlineSeconds=6)
    bench.run_now("job")
    pod = bench.pod_for("job")
    kubelet = Kubelet(bench, pod)
    kubelet.waiting("ErrImagePull", "no such sidecar image", adopted=False)
    row = bench.row_when("job", lambda r: r["status"] == "FAIL", "released")
    assert row["retry_at"] is None
    assert row["reason"].startswith("PendingDeadlineExceeded")
    assert (row["failures"], row["interruptions"]) == (0, 0)
    assert kubelet.adopt().verdict is AdoptVerdict.LOST
    wait_until("the Pod is deleted", lambda: bench.deleting(pod))


def test_a_loser_reaches_a_final_state_and_holds_no_slot(bench: Bench) -> None:
    bench.operator()
    bench.apply("job", suspend=True)
    bench.run_now("job")
    pod = bench.pod_for("job")
    Kubelet(bench, pod).refuse()
    row = bench.row_when("job", lambda r: r["status"] == "FAIL", "released")
    assert "NotAdopted" in row["reason"]
    assert "the claim is lost" in row["reason"]
    assert (row["failures"], row["interruptions"]) == (0, 0)
    second = bench.pod_for("job", 2, seconds=20)
    assert Kubelet(bench, second).run().verdict is AdoptVerdict.ADOPTED
