"""Command lines of kind (sigs.k8s.io/kind), which runs Kubernetes inside a container engine."""

from __future__ import annotations

from pathlib import Path

VERSION = "v0.33.0"
START_SECONDS = 300


def cluster_name(name: str) -> str:
    return f"leasedjob-{name}"


def environment(engine: str) -> dict[str, str]:
    """What kind needs to know about the engine: docker is its default."""
    return {} if engine == "docker" else {"KIND_EXPERIMENTAL_PROVIDER": engine}


def install_command(go: str) -> list[str]:
    """Builds kind from its Go module, where it is not installed; GOBIN says where to."""
    return [go, "install", f"sigs.k8s.io/kind@{VERSION}"]


def create_command(kind: str, name: str, kubeconfig: Path) -> list[str]:
    """Creates a cluster whose kubeconfig is a file of its own: the user's stays as it is."""
    wait = f"{START_SECONDS}s"
    return [kind, "create", "cluster", "--name", cluster_name(name), "--kubeconfig", str(kubeconfig), "--wait", wait]


def list_command(kind: str) -> list[str]:
    return [kind, "get", "clusters"]


def export_command(kind: str, name: str, kubeconfig: Path) -> list[str]:
    return [kind, "export", "kubeconfig", "--name", cluster_name(name), "--kubeconfig", str(kubeconfig)]


def delete_command(kind: str, name: str, kubeconfig: Path) -> list[str]:
    return [kind, "delete", "cluster", "--name", cluster_name(name), "--kubeconfig", str(kubeconfig)]


def save_command(engine: str, image: str, archive: Path) -> list[str]:
    return [engine, "save", "-o", str(archive), image]


def load_command(kind: str, cluster: str, archive: Path) -> list[str]:
    """An archive works with every engine; `load docker-image` only with docker. `cluster` is kind's own name."""
    return [kind, "load", "image-archive", "--name", cluster, str(archive)]


def gateway_command(engine: str) -> list[str]:
    """Prints the addresses under which the nodes, and so the Pods, reach this machine."""
    return [engine, "network", "inspect", "kind", "--format", "{{range .IPAM.Config}}{{.Gateway}} {{end}}"]


def first_ipv4(text: str | None) -> str | None:
    return next((a for a in (text or "").split() if a.count(".") == 3), None)
