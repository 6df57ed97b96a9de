"""Pods that can't run: the reason is shown, the slot is free by the deadline, and a corrected template works."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.e2e.jobs import NEVER, container, leased_job, run_of
from tests.e2e.kube import Json, Kubectl
from tests.e2e.test_path import phase, rows, succeeded

DEADLINE = 25
TIMING = {
    "lease": {"durationSeconds": 60, "heartbeatSeconds": 5},
    "shutdown": {"preStopSeconds": 0, "terminationGracePeriodSeconds": 5},
    "pendingDeadlineSeconds": DEADLINE,
}
HELLO = "print('hello')"

UNABLE: dict[str, tuple[Json, Json, str]] = {
    "an image that does not exist": ({"image": "registry.invalid/none:1"}, {}, "ImagePull"),
    "a node that does not exist": ({}, {"nodeSelector": {"disk": "none"}}, "Unschedulable"),
    "a Secret that is missing": ({"envFrom": [{"secretRef": {"name": "missing"}}]}, {}, "CreateContainerConfigError"),
    "more than any node has": ({"resources": {"requests": {"memory": "4Ti"}}}, {}, "Unschedulable"),
}


def shown(kubectl: Kubectl, job: str) -> Json:
    runs = (kubectl.json("get", "lj", job).get("status") or {}).get("recentRuns") or [{}]
    return runs[0]


def text(run: Json) -> str:
    return f"{run.get('reason', '')} {run.get('message', '')}"


@pytest.mark.parametrize("case", UNABLE)
def test_a_pod_that_cannot_start(kubectl: Kubectl, namespace: str, db: psycopg.Connection, case: str) -> None:
    of_container, of_pod, reason = UNABLE[case]
    broken = leased_job("job", containers=[container(HELLO, **of_container)], schedule=NEVER, pod=of_pod, **TIMING)
    kubectl.apply(broken, run_of("job", "first"))
    kubectl.wait(f"status names {reason}", lambda: reason in text(shown(kubectl, "job")), timeout=DEADLINE + 20)
    # What waits behind it is not skipped but waits, and gets the corrected template.
    kubectl.apply(leased_job("job", HELLO, schedule=NEVER, **TIMING), run_of("job", "second"))
    kubectl.wait("the first has ended", lambda: phase(kubectl, "first") == "Failed", timeout=DEADLINE + 45)
    row = rows(db, namespace, "job")[0]
    assert (row["status"], row["retry_at"], row["failures"]) == ("FAIL", None, 0)
    assert "PendingDeadlineExceeded" in row["reason"]
    assert reason in row["reason"]
    kubectl.wait("the second succeeds", lambda: phase(kubectl, "second") == "Succeeded", timeout=60)
    kubectl("delete", "leasedjob", "job", "--timeout=30s")


def test_a_full_quota_is_waited_for_and_old_pods_are_cleaned_up(
    kubectl: Kubectl, namespace: str, db: psycopg.Connection
) -> None:
    limits = {"successfulRunsHistoryLimit": 1, "failedRunsHistoryLimit": 1}
    kubectl.apply(leased_job("job", HELLO, schedule=NEVER, **TIMING, **limits))
    for name in ("one", "two", "three"):
        kubectl.apply(run_of("job", name))
        kubectl.wait(f"{name} succeeds", lambda name=name: phase(kubectl, name) == "Succeeded", timeout=60)
    kubectl.wait("one Pod is kept", lambda: len(kubectl.items("pods")) == 1, timeout=30)
    kubectl.apply(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "full"}, "spec": {"hard": {"pods": "0"}}}
    )
    kubectl.apply(run_of("job", "four"))
    kubectl.wait("the refusal is shown", lambda: "exceeded quota" in text(shown(kubectl, "job")), timeout=30)
    assert rows(db, namespace, "job")[-1]["failures"] == 0
    kubectl("delete", "resourcequota", "full")
    kubectl.wait("it starts when there is room", lambda: phase(kubectl, "four") == "Succeeded", timeout=90)
    kubectl("delete", "leasedjob", "job", "--timeout=30s")


def test_what_pod_security_refuses_is_shown(kubectl: Kubectl, namespace: str, db: psycopg.Connection) -> None:
    privileged = container(HELLO, securityContext={"privileged": True})
    kubectl.apply(leased_job("job", containers=[privileged], schedule=NEVER, **TIMING), run_of("job", "one"))
    kubectl.wait("the refusal is shown", lambda: "violates PodSecurity" in text(shown(kubectl, "job")), timeout=30)
    kubectl.wait("it ends by the deadline", lambda: phase(kubectl, "one") == "Failed", timeout=DEADLINE + 60)
    kubectl("delete", "leasedjob", "job", "--timeout=30s")


def test_a_limit_range_and_a_quota_on_limits_are_met(kubectl: Kubectl, namespace: str, db: psycopg.Connection) -> None:
    limits: dict[str, Any] = {"cpu": "1", "memory": "256Mi"}
    kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": {"name": "bounds"},
            "spec": {"limits": [{"type": "Container", "max": limits, "default": limits}]},
        },
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "all"},
            "spec": {"hard": {"limits.cpu": "4", "limits.memory": "2Gi", "requests.cpu": "2", "pods": "5"}},
        },
    )
    kubectl.apply(leased_job("job", HELLO, schedule=NEVER, **TIMING), run_of("job", "one"))
    kubectl.wait("it succeeds", lambda: succeeded(db, namespace, "job"), timeout=60)
    kubectl("delete", "leasedjob", "job", "--timeout=30s")


@pytest.mark.parametrize("secret_first", [False, True], ids=["at once", "its credential first"])
def test_a_namespace_that_is_deleted_takes_everything_with_it(
    cluster_kubectl: Kubectl, db: psycopg.Connection, namespace: str, kubectl: Kubectl, secret_first: bool
) -> None:
    """Runs are under way and ticks become due: nothing holds it up, and in the end no run is held or tried again."""
    jobs = [
        leased_job(
            f"job-{n}", "import time\ntime.sleep(600)", schedule="* * * * *", concurrencyPolicy="Allow", **TIMING
        )
        for n in range(3)
    ]
    kubectl.apply(*jobs, *(run_of(f"job-{n}", f"run-{n}") for n in range(3)))
    kubectl.wait("all run", lambda: [phase(kubectl, f"run-{n}") for n in range(3)] == ["Running"] * 3, timeout=90)
    if secret_first:
        kubectl("delete", "secret", "leasedjob-sidecar")
    cluster_kubectl("delete", "namespace", namespace, "--wait=true", "--timeout=60s", timeout=70)
    kubectl.wait(
        "no run of it is held, or will be tried again",
        lambda: (
            not db.execute(
                "SELECT FROM job_scheduler WHERE namespace = %s AND (retry_at IS NOT NULL OR (status = 'RUNNING'"
                " AND NOT is_expired(modified_at, lease_ms)))",
                (namespace,),
            ).fetchall()
        ),
        timeout=100,
    )
