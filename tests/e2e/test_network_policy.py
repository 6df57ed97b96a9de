"""The chart's NetworkPolicies, enforced, in a namespace that denies everything else: installation, test, a run."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.database import Database, create_owned
from tests.cluster.faults import Faults
from tests.cluster.layout import REPOSITORY
from tests.cluster.release import secret as database_secret
from tests.e2e.conftest import Release
from tests.e2e.jobs import IMAGE, NEVER, leased_job, run_of
from tests.e2e.kube import Helm, Json, Kubectl, write_json
from tests.e2e.network_policies import Engine
from tests.e2e.private import images_of
from tests.e2e.test_path import phase

pytestmark = pytest.mark.node
CHART = str(REPOSITORY / "charts" / "leasedjob")
DENY: Json = {
    "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "deny-everything"},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
}  # fmt: skip
OUT: Json = {
    "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "out"},
    "spec": {"podSelector": {"matchLabels": {"out": "yes"}}, "policyTypes": ["Egress"], "egress": [{}]},
}  # fmt: skip
TRY = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 4).close(); print('through')"


@pytest.fixture
def engine(cluster_kubectl: Kubectl, node_faults: Faults) -> Iterator[Engine]:
    with Engine(cluster_kubectl, node_faults).running() as engine:
        yield engine
    assert len(engine.errors) < 5, engine.errors
    assert engine.denied > 0, "nothing was ever refused: is anything enforced?"


def stranger(kubectl: Kubectl, name: str, **labels: str) -> None:
    """A Pod that does nothing, in which something can be tried."""
    container: Json = {
        "name": "main", "image": IMAGE, "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", "import time; time.sleep(600)"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }  # fmt: skip
    security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"containers": [container], "securityContext": security, "terminationGracePeriodSeconds": 0}
    kubectl.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec})
    kubectl("wait", "--for=condition=Ready", "pod", name, "--timeout=60s", timeout=70)


def through(kubectl: Kubectl, pod: str, host: str, port: int) -> bool:
    return "through" in kubectl.run("exec", pod, "--", "python3", "-c", TRY, host, str(port)).stdout


def test_what_the_chart_allows_is_enough_and_nothing_else_gets_through(
    helm: Helm, cluster_kubectl: Kubectl, postgres: Database, release: Release, engine: Engine, namespace: str,
    kubectl: Kubectl, tmp_path: Path,
) -> None:  # fmt: skip
    name, dbname = f"lj-{uuid.uuid4().hex[:6]}", f"policies_{uuid.uuid4().hex[:6]}"
    create_owned(postgres, dbname)
    secret = database_secret(postgres, dbname)
    host = str(secret["stringData"]["host"])
    port = int(secret["stringData"]["port"])
    images = images_of(helm, release.name, release.namespace)
    values: dict[str, Any] = {
        **images, "watchNamespaces": [namespace], "clusterName": namespace, "crds": {"enabled": False}, "replicas": 1,
        "database": {"existingSecret": secret["metadata"]["name"]},
        "sidecar": {**images.get("sidecar", {}), "secret": {"create": True}},
        "networkPolicy": {
            "enabled": True, "runNamespaces": [namespace],
            "database": {"ports": [port], "to": [{"ipBlock": {"cidr": f"{host}/32"}}]},
            "metrics": {"from": [{"podSelector": {"matchLabels": {"may": "scrape"}}}]},
        },
    }  # fmt: skip
    kubectl.apply(DENY, secret)
    file = str(write_json(tmp_path / "values.json", values))
    try:
        # The migration, the operator's start and `helm test` each need the database, the API server or a name.
        helm("install", name, CHART, "-n", namespace, "-f", file, "--wait", "--timeout=180s")
        said = helm.run("test", name, "-n", namespace, "--timeout=120s")
        assert said.returncode == 0, said.stdout + said.stderr
        assert "a ready operator answers" in said.stdout + said.stderr
        # A run: its sidecar reaches the database, its workload nothing.
        tried = """
            import socket
            try:
                socket.create_connection(("10.96.0.1", 443), 4)
                raise SystemExit("the API server was reached")
            except TimeoutError:
                print("denied")
        """
        kubectl.apply(leased_job("job", tried, schedule=NEVER))
        kubectl.apply(run_of("job", "now"))
        kubectl.wait("the run's success", lambda: phase(kubectl, "now") == "Succeeded", timeout=120)

        # And what nobody allowed. Those with the label may go out: whether they get in is for the other end to say.
        kubectl.apply(OUT)
        stranger(kubectl, "stranger")
        stranger(kubectl, "passer", out="yes")
        stranger(kubectl, "prometheus", out="yes", may="scrape")
        (operator,) = kubectl.items("pods", "-l", "app.kubernetes.io/component=operator")
        pod = operator["metadata"]["name"]
        service = kubectl.json("get", "service", f"{name}-leasedjob-metrics")["spec"]["clusterIP"]
        node = cluster_kubectl.json("get", "nodes")["items"][0]["status"]["addresses"]
        address = next(a["address"] for a in node if a["type"] == "InternalIP")
        kubelet = (address, 10250)
        kubectl.wait("what may go out goes out", lambda: through(kubectl, "passer", *kubelet))
        assert not through(kubectl, "stranger", host, port)
        assert not through(kubectl, "passer", service, 8081)
        assert through(kubectl, "prometheus", service, 8081)
        assert through(kubectl, pod, host, port)
        assert through(kubectl, pod, "10.96.0.1", 443)
        assert not through(kubectl, pod, *kubelet)
    finally:
        helm.run("uninstall", name, "-n", namespace, "--ignore-not-found")
