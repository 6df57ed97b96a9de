"""The operator goes and comes back, and everything can be deleted without it; objects as large as they may be."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.cluster.layout import REPOSITORY
from tests.e2e.conftest import Measured, Release
from tests.e2e.jobs import NEVER, SHORT, container, leased_job, run_of
from tests.e2e.kube import Helm, Json, Kubectl, write_json
from tests.e2e.test_path import phase, pods, rows, succeeded

UNTIL_TOLD = """
    import os, time
    while not os.path.exists("/tmp/finish"):
        time.sleep(0.1)
"""


def _finish(kubectl: Kubectl, job: str) -> None:
    """Lets the job's workload end by itself."""
    (pod,) = pods(kubectl, job)
    kubectl("exec", pod["metadata"]["name"], "-c", "main", "--", "touch", "/tmp/finish")


def _started(kubectl: Kubectl, *jobs: str) -> None:
    kubectl.apply(*(leased_job(j, UNTIL_TOLD, schedule=NEVER, **SHORT) for j in jobs), *(run_of(j, j) for j in jobs))
    kubectl.wait("all run", lambda: all(phase(kubectl, j) == "Running" for j in jobs), timeout=120)


@pytest.fixture
def without_operator(helm: Helm, release: Release, tmp_path: Path) -> Iterator[Any]:
    """Two functions: `uninstall` the shared release, `install` it as it was. It is there again in any case."""
    place = ("-n", release.namespace)
    values = write_json(
        tmp_path / "values.json", json.loads(helm("get", "values", release.name, *place, "-o", "json"))
    )  # fmt: skip

    def uninstall() -> None:
        helm("uninstall", release.name, *place, "--wait", "--timeout=60s")

    def install() -> None:
        chart = str(REPOSITORY / "charts" / "leasedjob")
        helm("install", release.name, chart, *place, "-f", str(values), "--wait", "--timeout=120s")

    yield uninstall, install
    if helm.run("status", release.name, *place).returncode != 0:
        install()


@pytest.mark.node
def test_uninstalled_in_mid_run_and_installed_again(
    kubectl: Kubectl,
    cluster_kubectl: Kubectl,
    namespace: str,
    db: psycopg.Connection,
    release: Release,
    without_operator: Any,
    measured: Measured,
) -> None:
    """Pods go on; what ends meanwhile is recorded afterwards; nothing runs twice; and no deletion waits for anybody."""
    uninstall, install = without_operator
    name = f"e2e-{uuid.uuid4().hex[:10]}"
    labels = {"leasedjob.io/test": "true", "pod-security.kubernetes.io/enforce": "restricted"}
    cluster_kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    taken = cluster_kubectl.within(name)
    _started(kubectl, "ends", "stays", "deleted", "orphaned")
    _started(taken, "one", "two", "three")
    uids = {j: rows(db, namespace, j)[0]["pod_uid"] for j in ("ends", "stays", "orphaned")}

    uninstall()
    system = cluster_kubectl.within(release.namespace)
    system.wait("no operator", lambda: not system.items("pods", "-l", "app.kubernetes.io/component=operator"))
    assert len(kubectl.items("leasedjobs")) == 4, "the definitions stay, and the objects with them"
    beat = rows(db, namespace, "stays")[0]["modified_at"]
    kubectl.wait("heartbeats go on", lambda: rows(db, namespace, "stays")[0]["modified_at"] > beat, timeout=30)

    for kind in ("leasedjobs", "leasedjobruns", "pods"):
        assert [o["metadata"].get("finalizers") for o in kubectl.items(kind)] == [None] * 4
    since = time.monotonic()
    kubectl("delete", "leasedjob", "deleted", "--cascade=foreground", "--timeout=60s", timeout=70)
    kubectl("delete", "leasedjob", "orphaned", "--cascade=orphan", "--timeout=20s", timeout=30)
    measured(f"without an operator: two LeasedJobs, one with its Pod, deleted in {time.monotonic() - since:.1f} s")
    since = time.monotonic()
    cluster_kubectl("delete", "namespace", name, "--wait=true", "--timeout=90s", timeout=100)
    measured(f"without an operator: a namespace with three running jobs deleted in {time.monotonic() - since:.1f} s")
    for job in ("ends", "orphaned"):
        _finish(kubectl, job)
        kubectl.wait(f"{job} has ended", lambda job=job: pods(kubectl, job)[0]["status"]["phase"] == "Succeeded")
        assert rows(db, namespace, job)[0]["status"] == "RUNNING", "nobody is there to record it"

    install()
    for job in ("ends", "orphaned"):
        kubectl.wait(f"{job} is recorded", lambda job=job: succeeded(db, namespace, job), timeout=90)
    kubectl.wait("and shown", lambda: phase(kubectl, "ends") == "Succeeded")
    (stays,) = rows(db, namespace, "stays")
    assert (stays["status"], stays["attempt"], stays["pod_uid"]) == ("RUNNING", 1, uids["stays"])
    _finish(kubectl, "stays")
    kubectl.wait("what went on all the time is recorded", lambda: succeeded(db, namespace, "stays"))
    for job, uid in uids.items():
        (row,) = rows(db, namespace, job)
        assert (row["attempt"], row["pod_uid"]) == (1, uid), job
        assert len(pods(kubectl, job)) == 1, job
    kubectl.wait(
        "what was deleted is held by nobody and not tried again",
        lambda: not db.execute(
            "SELECT FROM job_scheduler WHERE (namespace = %s OR namespace = %s) AND (retry_at IS NOT NULL OR"
            " (status = 'RUNNING' AND NOT is_expired(modified_at, lease_ms)))",
            (namespace, name),
        ).fetchall(),
        timeout=90,
    )  # fmt: skip
    assert [r["attempt"] for r in rows(db, namespace, "deleted")] == [1]


def test_a_template_of_200_kib_by_kubectl_apply(kubectl: Kubectl, namespace: str, db: psycopg.Connection) -> None:
    """kubectl stores it twice; the operator stores no copy, and the workload has all of it."""
    values = [{"name": f"V{n}", "value": f"{n:02d}" + "x" * 5118} for n in range(40)]
    program = "import os\nprint(sum(len(v) for k, v in os.environ.items() if k[0] == 'V' and k[1:].isdigit()))"
    large = leased_job("large", containers=[container(program, env=values)], schedule=NEVER, **SHORT)
    kubectl.apply(large, run_of("large", "now"))
    kubectl.wait("it succeeds", lambda: succeeded(db, namespace, "large"), timeout=90)
    (pod,) = pods(kubectl, "large")
    assert kubectl.logs(pod["metadata"]["name"], "main").strip() == str(40 * 5120)
    kubectl.apply(large)  # again, as people do: nothing runs
    notes: Json = kubectl.json("get", "lj", "large")["metadata"].get("annotations") or {}
    assert set(notes) == {"kubectl.kubernetes.io/last-applied-configuration"}
    assert sum(map(len, pod["metadata"]["annotations"].values())) < 2048
    assert len(rows(db, namespace, "large")) == 1
