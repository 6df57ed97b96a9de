"""The loser's ways out: whoever can't have a lease ends, says why, holds no slot, and counts as nothing."""

from __future__ import annotations

import base64
import copy
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from leasedjob import protocol
from leasedjob.identity import JobSchedulerType, RunIdentity, pod_name, run_key_for
from leasedjob.lease.rows import AdoptVerdict
from tests.controller.control_plane import Bench, Json, Kubelet, wait_until


def _claimed(bench: Bench, job: str = "job", **spec: Any) -> tuple[str, Json]:
    """A run whose Pod has not adopted yet: the LeasedJobRun's name, and the Pod."""
    bench.apply(job, suspend=True, **spec)
    run = bench.run_now(job)["metadata"]["name"]
    return run, bench.pod_for(job)


def _nothing_counted(row: Json) -> bool:
    return (row["failures"], row["interruptions"]) == (0, 0)


def _attempts(bench: Bench, row: Json, attempt: int) -> list[Json]:
    """The Pods that were made for this attempt of a run."""
    wanted = {protocol.ANNOTATION_LEASE: str(row["id"]), protocol.ANNOTATION_ATTEMPT: str(attempt)}
    return [p for p in bench.pods() if wanted.items() <= p["metadata"].get("annotations", {}).items()]


def _succeed(bench: Bench, job: str, attempt: int) -> None:
    kubelet = Kubelet(bench, bench.pod_for(job, attempt))
    kubelet.run()
    kubelet.end(0)
    row = bench.row_when(job, lambda r: r["status"] == "SUCCESS", "the next attempt succeeds")
    assert row["attempt"] == attempt
    assert _nothing_counted(row)


def test_the_claim_was_lost(bench: Bench) -> None:
    """The claim expired and was taken again; the first Pod comes late."""
    bench.operator()
    run, pod = _claimed(bench)
    late = Kubelet(bench, pod)
    row = bench.rows("job")[-1]
    bench.sql(
        "UPDATE leasedjob.job_scheduler SET changed_at = clock_timestamp(),"
        " modified_at = clock_timestamp() - interval '2 minutes' WHERE id = %s",
        row["id"],
    )
    second = bench.pod_for("job", 2)
    assert late.adopt().verdict is AdoptVerdict.LOST
    wait_until("the late Pod is deleted", lambda: bench.deleting(pod))
    late.refuse()
    assert bench.deleting(second) is False
    _succeed(bench, "job", 2)
    wait_until("the run shows it", lambda: bench.run_status(run).get("phase") == "Succeeded")


def test_the_token_is_wrong(bench: Bench) -> None:
    bench.operator()
    run, pod = _claimed(bench)
    kubelet = Kubelet(bench, pod)
    kubelet.claim_token = uuid4()
    answer = kubelet.adopt()
    assert answer.verdict is AdoptVerdict.LOST
    kubelet.refuse(message=f'{{"adopt":"lost","message":"{answer.reason}"}}')
    row = bench.row_when("job", lambda r: r["status"] == "FAIL", "released", seconds=60)
    assert "the claim token is not the one of attempt 1" in row["reason"]
    assert _nothing_counted(row)
    wait_until("shown", lambda: "claim token" in bench.run_status(run).get("message", ""))
    _succeed(bench, "job", 2)


def test_adopted_twice_by_a_copied_pod(bench: Bench) -> None:
    """Somebody copies the Pod's manifest: one of the two gets the lease, whatever happens to the other."""
    bench.operator()
    run, pod = _claimed(bench)
    twin = copy.deepcopy({k: pod[k] for k in ("apiVersion", "kind", "metadata", "spec") if k in pod})
    twin["metadata"] = {
        "name": "a-copy", "labels": pod["metadata"]["labels"], "annotations": pod["metadata"]["annotations"],
    }  # fmt: skip
    original = Kubelet(bench, pod)
    bench.core.create_namespaced_pod(bench.namespace, twin)
    copied = Kubelet(bench, next(p for p in bench.pods() if p["metadata"]["name"] == "a-copy"))
    # The copy ends first, before anybody has adopted: that is no word about the claim.
    copied.refuse(code=1, message="could not start")
    assert original.adopt().verdict is AdoptVerdict.ADOPTED
    assert copied.adopt().verdict is AdoptVerdict.TAKEN
    original.start()
    original.end(0)
    row = bench.row_when("job", lambda r: r["status"] != "RUNNING", "recorded")
    assert (row["status"], row["attempt"]) == ("SUCCESS", 1)
    wait_until("shown", lambda: bench.run_status(run).get("phase") == "Succeeded")


def _first_pod_name(bench: Bench, job: str, tick: datetime) -> str:
    identity = RunIdentity.of(
        type=JobSchedulerType.SCHEDULE, code=f"{bench.namespace}/{job}", run_key=run_key_for(tick)
    )
    return pod_name(job, identity.lock_key, 1)


def _stranger(bench: Bench, name: str, annotations: dict[str, str] | None = None) -> None:
    bench.core.create_namespaced_pod(
        bench.namespace,
        {
            "metadata": {"name": name, "annotations": annotations or {}},
            "spec": {"containers": [{"name": "main", "image": "example/stranger:1"}]},
        },
    )


def test_the_pods_name_is_taken(bench: Bench) -> None:
    """By a stranger, and by a leftover of an earlier object with the same name: the next attempt has another name."""
    tick = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=1)
    names = {job: _first_pod_name(bench, job, tick) for job in ("stranger", "leftover")}
    _stranger(bench, names["stranger"])
    _stranger(
        bench,
        names["leftover"],
        {
            protocol.ANNOTATION_JOB: "leftover",
            protocol.ANNOTATION_LEASE: str(uuid4()),
            protocol.ANNOTATION_ATTEMPT: "1",
            protocol.ANNOTATION_CLAIM: "0" * 32,
        },
    )
    bench.operator()
    for job in names:
        bench.apply(job, schedule="0 * * * *", suspend=True)
        bench.run_now(job, tick=tick.strftime("%Y-%m-%dT%H:%M:%SZ"))
    for job in names:
        row = bench.row_when(job, lambda r: r["status"] == "FAIL", "released", seconds=60)
        assert row["reason"].startswith("PodNotCreated: PodNameTaken")
        assert names[job] in row["reason"]
        assert _nothing_counted(row)
    for job in names:
        # Of the two Pods of that job only one is ours.
        row = bench.rows(job)[-1]
        pod = wait_until("attempt 2", lambda row=row: _attempts(bench, row, 2))[0]
        kubelet = Kubelet(bench, pod)
        kubelet.run()
        kubelet.end(0)
        row = bench.row_when(job, lambda r: r["status"] == "SUCCESS", "attempt 2 succeeds")
        assert _nothing_counted(row)
    there = {p["metadata"]["name"] for p in bench.pods()}
    assert names["stranger"] in there, "a stranger's Pod is left alone"


def test_a_loser_holds_no_slot(bench: Bench) -> None:
    """A Forbid job whose Pod can't adopt: between its attempts, and after its last, the next run can start."""
    bench.operator()
    _, pod = _claimed(bench, pendingDeadlineSeconds=5)
    Kubelet(bench, pod).refuse()
    row = bench.row_when("job", lambda r: r["status"] == "FAIL" and r["retry_at"] is None, "given up", seconds=60)
    assert "NotAdopted" in row["reason"] or "PendingDeadline" in row["reason"]
    assert _nothing_counted(row)
    run = bench.run_now("job")["metadata"]["name"]

    def newest() -> Json | None:
        return next((p for p in bench.pods() if p["metadata"]["uid"] != pod["metadata"]["uid"]), None)

    kubelet = Kubelet(bench, wait_until("a Pod of the next run", newest))
    kubelet.run()
    kubelet.end(0)
    wait_until("the next run succeeds", lambda: bench.run_status(run).get("phase") == "Succeeded")
    assert bench.status("job").get("activeCount", 0) == 0


def test_a_pod_that_is_deleted_before_it_adopts_is_repeated(bench: Bench) -> None:
    """Gracefully, and by force without a trace."""
    bench.operator()
    _, graceful = _claimed(bench, "graceful")
    _, forced = _claimed(bench, "forced")
    Kubelet(bench, graceful)
    bench.core.delete_namespaced_pod(graceful["metadata"]["name"], bench.namespace, grace_period_seconds=20)
    bench.core.delete_namespaced_pod(forced["metadata"]["name"], bench.namespace, grace_period_seconds=0)
    _succeed(bench, "graceful", 2)
    again = wait_until(
        "a new Pod of the same claim",
        lambda: next(
            (p for p in bench.pods() if p["metadata"]["annotations"][protocol.ANNOTATION_JOB] == "forced"
             and p["metadata"]["uid"] != forced["metadata"]["uid"]), None,
        ),
    )  # fmt: skip
    kubelet = Kubelet(bench, again)
    kubelet.run()
    kubelet.end(0)
    assert _nothing_counted(bench.row_when("forced", lambda r: r["status"] == "SUCCESS", "done"))


def test_the_namespaces_credential_was_deleted_or_changed(bench: Bench) -> None:
    """The Secret is gone, the role's password was changed by its owner: the next attempts' Pods can adopt again."""
    bench.operator()
    _, pod = _claimed(bench)
    kubelet = Kubelet(bench, pod)
    secret = bench.core.read_namespaced_secret("leasedjob-sidecar", bench.namespace)
    user = base64.b64decode(secret.data["user"]).decode()
    bench.sql(f"ALTER ROLE \"{user}\" PASSWORD 'something else'")
    kubelet.refuse(message='{"adopt":"refused_login","message":"the database refused the login"}')
    second = Kubelet(bench, bench.pod_for("job", 2))
    assert second.run().verdict is AdoptVerdict.ADOPTED
    second.end(0)
    bench.row_when("job", lambda r: r["status"] == "SUCCESS", "done")

    bench.core.delete_namespaced_secret("leasedjob-sidecar", bench.namespace)
    bench.run_now("job")
    row = bench.row_when("job", lambda r: r["status"] == "RUNNING", "the next run")
    (third,) = wait_until("its Pod", lambda: _attempts(bench, row, 1))
    # The kubelet would wait for the Secret; whoever gives up makes the operator look.
    Kubelet(bench, third).refuse(message='{"adopt":"refused_login","message":"no credential"}')
    wait_until("the Secret is back", lambda: [
        s for s in bench.core.list_namespaced_secret(bench.namespace).items if s.metadata.name == "leasedjob-sidecar"
    ])  # fmt: skip
    (fourth,) = wait_until("its next attempt", lambda: _attempts(bench, row, 2))
    assert Kubelet(bench, fourth).run().verdict is AdoptVerdict.ADOPTED
