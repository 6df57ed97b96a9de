"""`kubectl leasedjob dashboard` through a real API server and kubelet to the page of the installed operator."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from leasedjob.cli.exits import Exit
from tests.cluster.source import Cluster
from tests.e2e.conftest import Release
from tests.e2e.jobs import NEVER, SHORT, leased_job
from tests.e2e.kube import Kubectl
from tests.e2e.test_kubectl_plugin import with_plugin_on_path

Process = subprocess.Popen[str]
RIGHTS = {
    "list": {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    "forward": {"apiGroups": [""], "resources": ["pods/portforward"], "verbs": ["get", "create"]},
}


@contextlib.contextmanager
def dashboard(cluster: Cluster, *words: str, kubeconfig: Path | None = None) -> Iterator[tuple[str, Process]]:
    """The command, and the URL that it prints; "" where it ends without one."""
    argv = [cluster.kubectl, "leasedjob", "dashboard", "--no-browser", *words]
    process = subprocess.Popen(
        [*argv, "--kubeconfig", str(kubeconfig or cluster.kubeconfig)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=with_plugin_on_path(),
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.communicate()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def shows(url: str, words: str) -> bool:
    try:
        return words in get(url)
    except OSError:  # the Pod that it led to is gone; the next connection leads to another one
        return False


def test_the_page_is_reached_until_ctrl_c(
    cluster: Cluster, kubectl: Kubectl, release: Release, cluster_kubectl: Kubectl, namespace: str
) -> None:
    kubectl.apply(leased_job("seen", "print('done')", schedule=NEVER, **SHORT))
    with dashboard(cluster, "seen", "-n", namespace) as (url, process):
        assert url.startswith("http://127.0.0.1:")
        assert url.endswith(f"/jobs/{namespace}/seen")
        base = url.removesuffix(f"/jobs/{namespace}/seen")
        kubectl.wait("the job is shown", lambda: shows(url, "seen"), timeout=90)
        assert len(get(f"{base}/static/page.css")) > 5_000
        for path in ("/", "/timeline", "/not-run", "/leases", "/clusters"):
            assert "LeasedJob" in get(base + path)

        # Its Pod goes, as in an upgrade: the page stays.
        system = cluster_kubectl.within(release.namespace)
        pods = system.items("pods", "-l", "app.kubernetes.io/component=operator")
        first = min(pod["metadata"]["name"] for pod in pods)
        system("delete", "pod", first, "--wait=true", timeout=120)
        kubectl.wait("another Pod shows it", lambda: shows(url, "seen"), timeout=90)

        process.send_signal(signal.SIGINT)
        assert process.wait(30) == Exit.OK
        with pytest.raises(OSError, match="refused"):
            get(base)


@pytest.mark.parametrize("rights", [("list", "forward"), ("list",)], ids=["enough", "too few"])
def test_the_rights_that_it_needs(
    cluster: Cluster, cluster_kubectl: Kubectl, release: Release, tmp_path: Path, rights: tuple[str, ...]
) -> None:
    system = cluster_kubectl.within(release.namespace)
    name = f"onlooker-{len(rights)}"
    place = {"name": name, "namespace": release.namespace}
    system.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": place},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": place,
            "rules": [RIGHTS[right] for right in rights],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": place,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", **place}],
        },
    )
    config: Any = yaml.safe_load(Path(cluster.kubeconfig).read_text())
    config["users"] = [{"name": "u", "user": {"token": system("create", "token", name).strip()}}]
    for context in config["contexts"]:
        context["context"]["user"] = "u"
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(yaml.safe_dump(config))
    with dashboard(cluster, "--operator-namespace", release.namespace, kubeconfig=kubeconfig) as (url, process):
        if "forward" in rights:
            assert "LeasedJob" in get(url)
            return
        assert url == ""
        assert process.wait(60) == Exit.REFUSED
        assert process.stderr is not None
        assert "get and create pods/portforward" in process.stderr.read()
