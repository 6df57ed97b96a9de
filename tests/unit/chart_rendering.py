"""The chart, rendered by a real helm: fixtures and what is read from the manifests.

Helm is the one that HELM names, the one on PATH, or the test cluster's. Where there is none the tests are skipped, and
say so; with CI=true it is built.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster import binaries
from tests.cluster.layout import Cache
from tests.cluster.progress import Progress

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "charts" / "leasedjob"

Json = dict[str, Any]
CLUSTER_SCOPED = {
    "ClusterRole",
    "ClusterRoleBinding",
    "Namespace",
    "PersistentVolume",
    "PriorityClass",
    "CustomResourceDefinition",
}
EXISTING: Json = {"database": {"existingSecret": "lj-database"}}
EMBEDDED: Json = {"postgresql": {"embedded": True}}
NAMESPACED: Json = {**EXISTING, "watchNamespaces": ["team-b", "team-a"], "clusterName": "east"}
VARIANTS: dict[str, Json] = {
    "existing Secret": EXISTING,
    "embedded": EMBEDDED,
    "embedded with a Secret of one's own": {**EMBEDDED, **EXISTING},
    "namespaced": NAMESPACED,
    "namespaced, embedded": {**EMBEDDED, "watchNamespaces": ["team-a"], "clusterName": "east"},
    "policies, embedded": {**EMBEDDED, "networkPolicy": {"enabled": True, "runNamespaces": ["team-a"]}},
    "everything set": {
        **EXISTING,
        "commonLabels": {"team": "batch"},
        "podLabels": {"mesh": "off"},
        "podAnnotations": {"note": "yes"},
        "global": {"imageRegistry": "registry.example:5000", "imagePullSecrets": ["pull-a"]},
        "imagePullSecrets": ["pull-b"],
        "sidecar": {"imagePullSecrets": ["pull-c"], "database": {"host": "db.example", "port": 6432}},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
        "priorityClassName": "high",
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraEnvFrom": [{"configMapRef": {"name": "more", "optional": True}}],
        "deploymentAnnotations": {"reloader": "yes"},
        "extraObjects": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "own", "namespace": "other"}},
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-own', namespace: other}\n",
        ],
        "networkPolicy": {"enabled": True, "runNamespaces": ["team-a"]},
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        "metrics": {
            "podMonitor": {"enabled": True},
            "service": {"annotations": {"a": "b"}},
            "prometheusRule": {"enabled": True},
            "dashboard": {"enabled": True},
        },
        "monitoring": {"pingHosts": ["hc.example"]},
        "statusPage": {"enabled": True, "hosts": ["jobs.example"]},
        "serviceAccount": {"annotations": {"a": "b"}},
        "crds": {"annotations": {"a": "b"}},
        "migrations": {"mode": "initContainer"},
        "database": {"existingSecret": "lj-database", "ca": {"existingSecret": "db-ca", "key": "root.crt"}},
    },
}


@pytest.fixture(scope="session")
def helm_program() -> str:
    """The path of helm."""
    if found := os.environ.get("HELM") or shutil.which("helm"):
        return found
    cache = Cache.from_env()
    built = cache.binaries(binaries.cache_key()) / "helm"
    if os.environ.get("CI") == "true":
        binaries.ensure(cache, Progress(), (binaries.HELM,))
    if not built.exists():
        pytest.skip(
            "THE CHART IS NOT TESTED for want of helm: put it on PATH, name it in HELM, or run `make cluster-up`"
        )
    return str(built)


@pytest.fixture(scope="session")
def helm_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("helm")


@pytest.fixture
def helm(helm_program: str, helm_home: Path, tmp_path: Path) -> Any:
    """Runs helm with values; returns the finished process. No kubeconfig: a template must not need a cluster."""
    count = itertools.count()

    def run(*args: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        file = tmp_path / f"values-{next(count)}.yaml"
        file.write_text(yaml.safe_dump(dict(values or {})))
        env = {"HOME": str(helm_home), "PATH": os.environ.get("PATH", "")}
        return subprocess.run(
            [helm_program, *args, "--values", str(file)],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def rendered() -> dict[str, str]:
    return {}


@pytest.fixture
def text(helm: Any, rendered: dict[str, str]) -> Any:
    """The manifests as text. Renderings are remembered, unless `fresh`."""

    def render(
        values: Mapping[str, Any],
        chart: Path = CHART,
        name: str = "lj",
        *,
        namespace: str = "leasedjob-system",
        fresh: bool = False,
    ) -> str:
        key = json.dumps([values, str(chart), name, namespace])
        if key in rendered and not fresh:
            return rendered[key]
        done = helm("template", name, str(chart), "--namespace", namespace, values=values)
        assert done.returncode == 0, done.stderr
        rendered[key] = done.stdout
        return rendered[key]

    return render


@pytest.fixture
def render(text: Any) -> Any:
    def objects(values: Mapping[str, Any], **more: Any) -> list[Json]:
        return [o for o in yaml.safe_load_all(text(values, **more)) if o]

    return objects


@pytest.fixture
def refusal(helm: Any) -> Any:
    """What helm says about values that it has to refuse."""

    def say(values: Mapping[str, Any]) -> str:
        done = helm("template", "lj", str(CHART), values=values)
        assert done.returncode != 0, "accepted"
        return str(done.stderr)

    return say


def one(objects: list[Json], kind: str, name_part: str = "") -> Json:
    found = [o for o in objects if o["kind"] == kind and name_part in o["metadata"]["name"]]
    assert len(found) == 1, [o["metadata"]["name"] for o in found]
    return found[0]


def pods(objects: list[Json]) -> Iterator[tuple[str, Json]]:
    for o in objects:
        spec = o.get("spec") or {}
        if o["kind"] == "Pod":
            yield o["metadata"]["name"], spec
        elif isinstance(spec.get("template"), dict) and "spec" in spec["template"]:
            yield o["metadata"]["name"], spec["template"]["spec"]


def containers(pod: Json) -> list[Json]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def hooks(o: Json) -> set[str]:
    return set((o["metadata"].get("annotations") or {}).get("helm.sh/hook", "").split(",")) - {""}


def operator_env(objects: list[Json]) -> dict[str, str]:
    pod = one(objects, "Deployment")["spec"]["template"]["spec"]
    return {e["name"]: e["value"] for e in pod["containers"][0]["env"] if "value" in e}


def rules(role: Json) -> set[tuple[str, str, str, tuple[str, ...]]]:
    """(group, resource, verb, names) of a role."""
    return {
        (g, r, v, tuple(rule.get("resourceNames", ())))
        for rule in role["rules"]
        for g in rule["apiGroups"]
        for r in rule["resources"]
        for v in rule["verbs"]
    }
