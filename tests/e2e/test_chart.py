"""The chart on a real cluster: `helm test`, the operator's rights, and the PostgreSQL for trying out over its life."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.layout import REPOSITORY
from tests.e2e.conftest import Release
from tests.e2e.kube import Helm, Kubectl, write_json

CHART = str(REPOSITORY / "charts" / "leasedjob")


@pytest.fixture(scope="session")
def images(helm: Helm, release: Release) -> dict[str, Any]:
    """The values that name this working tree's images, as the shared release has them."""
    values = json.loads(helm("get", "values", release.name, "-n", release.namespace, "-o", "json"))
    return {k: values[k] for k in ("global", "image", "sidecar", "postgresql") if k in values}


@pytest.fixture
def own(helm: Helm, namespace: str) -> Iterator[str]:
    """The name of a release of the test's own in its namespace."""
    name = f"lj-{uuid.uuid4().hex[:6]}"
    yield name
    helm.run("uninstall", name, "-n", namespace, "--ignore-not-found")


def beside(images: dict[str, Any], namespace: str, **more: Any) -> dict[str, Any]:
    """Values for a release that can live beside the shared one: it watches its own namespace alone."""
    return {
        **images,
        "watchNamespaces": [namespace],
        "clusterName": namespace,
        "crds": {"enabled": False},
        "replicas": 1,
        **more,
    }


def test_helm_test_succeeds_and_leaves_nothing(helm: Helm, cluster_kubectl: Kubectl, release: Release) -> None:
    said = helm.run("test", release.name, "-n", release.namespace, "--timeout=120s")
    assert said.returncode == 0, said.stdout + said.stderr
    assert "the schema is current" in said.stdout + said.stderr
    assert "custom resources are served" in said.stdout + said.stderr
    system = cluster_kubectl.within(release.namespace)
    assert not system.items("pods", "-l", "app.kubernetes.io/component=test")


@pytest.mark.parametrize(
    "words",
    [
        "update leasedjobs.leasedjob.io",
        "delete leasedjobs.leasedjob.io",
        "create leasedjobs.leasedjob.io",
        "update pods",
        "patch pods",
        "get secrets",
        "list secrets",
        "delete secrets",
        "get secrets/other",
        "get pods --subresource=log",
        "create pods --subresource=exec",
        "create serviceaccounts --subresource=token",
        "list namespaces",
        "get namespaces/default",
        "get configmaps",
        "update customresourcedefinitions",
        "create rolebindings",
    ],
)
def test_the_operator_may_not(cluster_kubectl: Kubectl, release: Release, words: str) -> None:
    account = f"system:serviceaccount:{release.namespace}:{release.name}"
    asked = cluster_kubectl.run("auth", "can-i", *words.split(), f"--as={account}")
    assert asked.stdout.strip() == "no", asked.stdout + asked.stderr


def test_without_the_database_secret_the_install_says_so(
    helm: Helm, images: dict[str, Any], own: str, namespace: str, tmp_path: Path
) -> None:
    values = beside(images, namespace, database={"existingSecret": "absent"}, migrations={"waitSeconds": 2})
    file = str(write_json(tmp_path / "values.json", values))
    done = helm.run("install", own, CHART, "-n", namespace, "-f", file, "--wait", "--timeout=90s")
    assert done.returncode != 0
    assert "database credentials in /etc/leasedjob/database can't be read" in done.stdout + done.stderr


def test_the_embedded_database_keeps_password_and_pod_over_upgrades(
    helm: Helm, kubectl: Kubectl, images: dict[str, Any], own: str, namespace: str, tmp_path: Path
) -> None:
    name = f"{own}-leasedjob"
    embedded = {"postgresql": {**images.get("postgresql", {}), "embedded": True}}

    def state() -> tuple[str, str]:
        secret = kubectl.json("get", "secret", f"{name}-postgresql")
        pod = kubectl.json("get", "pod", f"{name}-postgresql-0")
        return secret["data"]["password"], pod["metadata"]["uid"]

    def to(verb: str, **more: Any) -> None:
        file = str(write_json(tmp_path / "values.json", beside(images, namespace, **embedded, **more)))
        helm(verb, own, CHART, "-n", namespace, "-f", file, "--wait", "--timeout=180s")

    to("install")
    first = state()
    helm("test", own, "-n", namespace, "--timeout=120s")
    to("upgrade", podAnnotations={"changed": "yes"}, commonLabels={"team": "batch"})
    assert state() == first
    # Another start of the server on the same data, without a proper end.
    kubectl("exec", f"{name}-postgresql-0", "--", "sh", "-c", "kill -INT 1")
    kubectl.wait(
        "the database's second start",
        lambda: (
            kubectl.json("get", "pod", f"{name}-postgresql-0")["status"]["containerStatuses"][0]["restartCount"] == 1
        ),
    )
    kubectl("wait", "--for=condition=Ready", "pod", f"{name}-postgresql-0", "--timeout=60s", timeout=70)
    helm("test", own, "-n", namespace, "--timeout=120s")

    helm("uninstall", own, "-n", namespace, "--wait", "--timeout=120s")
    left = kubectl(
        "get",
        "all,secrets,roles,rolebindings,serviceaccounts,pvc",
        "-l",
        f"app.kubernetes.io/instance={own}",
        "-o",
        "name",
    )
    gone = [n for n in left.split() if not n.startswith("pod/")]  # Pods may still be stopping
    assert gone == [f"secret/{name}-postgresql"]
    # Installed again: the Secret that was left serves the new, empty database.
    to("install")
    assert state()[0] == first[0]
