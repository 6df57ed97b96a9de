"""Where a cluster comes from: a pure choice, and the cluster that follows from it.

In this order: a kubeconfig that the user names (`LEASEDJOB_KUBECONFIG`, or `make ... KUBECONFIG=path`; never the
default context), kind where a container engine answers, a one-node Kubernetes on Linux as root.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from tests.cluster import binaries, images, kind, lifecycle, onenode
from tests.cluster.layout import Cache
from tests.cluster.onenode import Node
from tests.cluster.progress import ClusterError, Progress, clean_environment, output

KUBECONFIG_VARIABLE = "LEASEDJOB_KUBECONFIG"
REGISTRY_VARIABLE = "LEASEDJOB_REGISTRY"
FORCE_VARIABLE = "LEASEDJOB_CLUSTER_FROM"  # kind or one-node: leave the others out
ENGINES = ("docker", "podman")


class Source(StrEnum):
    USER = "kubeconfig"
    KIND = "kind"
    ONE_NODE = "one-node"


@dataclass(frozen=True, slots=True)
class Machine:
    """What was observed of this machine."""

    kubeconfig: str | None  # that the user named
    engine: str | None  # a container engine that answers
    linux: bool
    root: bool
    forced: str | None = None
    kubernetes: str | None = None  # the version that is asked for


@dataclass(frozen=True, slots=True)
class Choice:
    """The source, or None and the reasons."""

    source: Source | None
    reason: str


def choose(machine: Machine) -> Choice:
    """The first source that this machine can have."""
    if machine.kubeconfig:
        return Choice(Source.USER, f"the cluster of {machine.kubeconfig}")
    if machine.forced not in (None, "", Source.KIND, Source.ONE_NODE):
        return Choice(None, f"{FORCE_VARIABLE}={machine.forced}: must be {Source.KIND} or {Source.ONE_NODE}")
    # A version that is asked for by name is built from source: kind's images are of versions of their own.
    if machine.engine and machine.forced != Source.ONE_NODE and not machine.kubernetes:
        return Choice(Source.KIND, f"kind, because {machine.engine} answers")
    if machine.linux and machine.root and machine.forced != Source.KIND:
        return Choice(Source.ONE_NODE, "a one-node Kubernetes in namespaces of its own")
    if machine.kubernetes:
        reason = f"Kubernetes {machine.kubernetes} is built from source here: that needs Linux and root, and no "
        return Choice(
            None, f"{reason}{FORCE_VARIABLE}={Source.KIND}; a cluster of yours is used by {KUBECONFIG_VARIABLE}"
        )
    lines = [
        "no cluster can be had on this machine. One of these helps:",
        f"  - name a cluster: {KUBECONFIG_VARIABLE}=path-of-a-kubeconfig, or make ... KUBECONFIG=path",
        "  - start Docker or podman (neither `docker info` nor `podman info` gets an answer): kind is used then",
        "  - on Linux, run this as root: a one-node Kubernetes is built then"
        + ("" if machine.linux else " (this is not Linux)"),
    ]
    return Choice(None, "\n".join(lines))


def engine_answers(engine: str) -> bool:
    """Whether the engine behind the client answers; a client alone is no engine."""
    wanted = "{{.ServerVersion}}" if engine == "docker" else "{{.Version.Version}}"
    return bool((output([engine, "info", "--format", wanted], timeout=15) or "").strip())


def observe(env: Mapping[str, str] = os.environ) -> Machine:
    engine = next((e for e in ENGINES if shutil.which(e) and engine_answers(e)), None)
    return Machine(
        kubeconfig=env.get(KUBECONFIG_VARIABLE) or None,
        engine=engine,
        linux=sys.platform == "linux",
        root=os.geteuid() == 0,
        forced=env.get(FORCE_VARIABLE) or None,
        kubernetes=binaries.kubernetes_asked(env),
    )


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that can be used, wherever it comes from."""

    name: str
    source: Source
    kubeconfig: Path
    kubectl: str
    helm: str
    host_address: str | None  # where Pods reach this machine; None: they can't, or it isn't known
    node: Node | None = None  # for a one-node cluster: faults can be made in it


# --- up, find, down --------------------------------------------------------------------------------------------------
def up(cache: Cache, name: str, progress: Progress, env: Mapping[str, str] = os.environ) -> Cluster:
    """A usable cluster of that name. Raises ClusterError that says what is missing."""
    machine = observe(env)
    choice = choose(machine)
    if choice.source is None:
        raise ClusterError(choice.reason)
    progress.say(f"cluster: {choice.reason}")
    if choice.source is Source.ONE_NODE:
        return _of_node(lifecycle.up(cache, name, progress))
    if choice.source is Source.USER:
        return _of_the_version(_of_user(cache, name, Path(machine.kubeconfig or ""), progress), machine.kubernetes)
    return _of_kind(cache, name, machine.engine or "docker", progress)


def find(cache: Cache, name: str, env: Mapping[str, str] = os.environ) -> Cluster | None:
    """The cluster that `up` would use, if it is there already; starts and builds nothing."""
    quiet = Progress()
    asked = binaries.kubernetes_asked(env)
    if named := env.get(KUBECONFIG_VARIABLE):
        return _of_the_version(_of_user(cache, name, Path(named), quiet), asked)
    node = lifecycle.find(cache, name)
    if node is not None and lifecycle.healthy(node):
        return _of_the_version(_of_node(node), asked)
    if (engine := _kind_engine(cache, name)) is not None:
        cluster = _kind_cluster(cache, name, engine, quiet)
        return _of_the_version(cluster, asked) if _answers(cluster.kubectl, cluster.kubeconfig) else None
    return None


def _of_the_version(cluster: Cluster, asked: str | None) -> Cluster:
    """The cluster, if its Kubernetes is of the minor version that is asked for."""
    if asked is not None:
        argv = [cluster.kubectl, "--kubeconfig", str(cluster.kubeconfig), "get", "--raw", "/version"]
        lifecycle.same_minor(f"the cluster of {cluster.kubeconfig}", server_version(output(argv, timeout=20)), asked)
    return cluster


def server_version(answer: str | None) -> str:
    """1.37.2 from what an API server says of its version; empty where that can't be read."""
    try:
        return str(json.loads(answer or "")["gitVersion"]).removeprefix("v")
    except (ValueError, KeyError, TypeError):
        return ""


def down(cache: Cache, name: str, progress: Progress) -> None:
    """Removes a cluster that `up` made; a cluster that the user named is left alone."""
    if (engine := _kind_engine(cache, name)) is None:
        lifecycle.down(cache, name, progress)
        return
    folder = _kind_folder(cache, name)
    environment = clean_environment(**kind.environment(engine))
    argv = kind.delete_command(_kind_program(cache, progress), name, folder / "kubeconfig")
    progress.run(argv, what="kind delete cluster", log=cache.logs / "kind.log", timeout=120, env=environment)
    shutil.rmtree(folder)
    progress.say(f"cluster {name} is removed")


def _of_node(node: Node) -> Cluster:
    kubectl, helm = str(node.binaries / "kubectl"), str(node.binaries / "helm")
    return Cluster(node.name, Source.ONE_NODE, node.kubeconfig, kubectl, helm, onenode.HOST_ADDRESS, node)


def _clients(cache: Cache, progress: Progress) -> tuple[str, str]:
    """kubectl and helm: the user's own, else built from source."""
    kubectl, helm = shutil.which("kubectl"), shutil.which("helm")
    if kubectl and helm:
        return kubectl, helm
    kube = binaries.kube()
    wanted = replace(kube, programs={"kubectl": kube.programs["kubectl"]})
    built = binaries.ensure(cache, progress, (wanted, binaries.HELM))
    return kubectl or str(built / "kubectl"), helm or str(built / "helm")


def _answers(kubectl: str, kubeconfig: Path) -> bool:
    """Whether the API server of a kubeconfig answers within 15 s."""
    argv = [kubectl, "--kubeconfig", str(kubeconfig), "get", "--raw", "/version", "--request-timeout=15s"]
    return output(argv, timeout=20) is not None


def _of_user(cache: Cache, name: str, kubeconfig: Path, progress: Progress) -> Cluster:
    kubeconfig = kubeconfig.expanduser().absolute()
    if not kubeconfig.is_file():
        raise ClusterError(f"there is no kubeconfig {kubeconfig}")
    for node in lifecycle.find_all(cache):
        if node.kubeconfig == kubeconfig:
            return _of_node(node)
    kubectl, helm = _clients(cache, progress)
    if not _answers(kubectl, kubeconfig):
        raise ClusterError(
            f"the cluster of {kubeconfig} does not answer; try: kubectl --kubeconfig {kubeconfig} version"
        )
    return Cluster(name, Source.USER, kubeconfig, kubectl, helm, None)


def _kind_folder(cache: Cache, name: str) -> Path:
    return cache.clusters / f"{name}-kind"


def _kind_engine(cache: Cache, name: str) -> str | None:
    """The engine of the kind cluster that was made under that name; None where none was."""
    try:
        return str(json.loads((_kind_folder(cache, name) / "kind.json").read_text())["engine"])
    except (OSError, ValueError, KeyError):
        return None


def _kind_program(cache: Cache, progress: Progress) -> str:
    if found := shutil.which("kind"):
        return found
    folder = cache.root / "bin" / f"kind-{kind.VERSION}"
    if not (folder / "kind").exists():
        progress.say(f"building kind {kind.VERSION}")
        command = kind.install_command(binaries.get_go(cache, progress))
        environment = clean_environment(GOBIN=str(folder), GOFLAGS="", CGO_ENABLED="0")
        progress.run(command, what="building kind", log=cache.logs / "kind.log", timeout=600, env=environment)
    return str(folder / "kind")


def _of_kind(cache: Cache, name: str, engine: str, progress: Progress) -> Cluster:
    folder = _kind_folder(cache, name)
    kubeconfig = folder / "kubeconfig"
    program = _kind_program(cache, progress)
    environment = clean_environment(**kind.environment(engine))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kind.json").write_text(json.dumps({"engine": engine}))
    if kind.cluster_name(name) in (output(kind.list_command(program), env=environment) or "").split():
        argv = kind.export_command(program, name, kubeconfig)
    else:
        progress.say(f"creating the kind cluster {kind.cluster_name(name)} (its node image may have to be pulled)")
        argv = kind.create_command(program, name, kubeconfig)
    seconds = 2 * kind.START_SECONDS
    progress.run(argv, what="kind", log=cache.logs / "kind.log", timeout=seconds, env=environment)
    return _kind_cluster(cache, name, engine, progress)


def _kind_cluster(cache: Cache, name: str, engine: str, progress: Progress) -> Cluster:
    kubectl, helm = _clients(cache, progress)
    address = kind.first_ipv4(output(kind.gateway_command(engine)))
    return Cluster(name, Source.KIND, _kind_folder(cache, name) / "kubeconfig", kubectl, helm, address)


# --- images ----------------------------------------------------------------------------------------------------------
def current_context(kubeconfig: Path, kubectl: str) -> str:
    return (output([kubectl, "--kubeconfig", str(kubeconfig), "config", "current-context"]) or "").strip()


def deliver(cluster: Cluster, cache: Cache, progress: Progress, env: Mapping[str, str] = os.environ) -> list[str]:
    """Builds the images and brings them to the cluster; the chart's values that name them, as `--set` arguments."""
    tag = images.project_tag(images.base_key())
    if cluster.node is not None:
        archives = images.project_archives(cache, progress).values()
        lifecycle.load(cluster.node, [images.base_archive(cache, progress), *archives], progress)
        return chart_values(tag)
    engine = next((e for e in ENGINES if shutil.which(e) and engine_answers(e)), None)
    if engine is None:
        raise ClusterError("building images for this cluster needs Docker or podman, and neither answers")
    context = current_context(cluster.kubeconfig, cluster.kubectl)
    registry = env.get(REGISTRY_VARIABLE, "").rstrip("/")
    if not registry and not context.startswith("kind-"):
        raise ClusterError(
            f"the cluster of {cluster.kubeconfig} must be able to pull the images: set {REGISTRY_VARIABLE} to a "
            f"registry that it pulls from and that `{engine} push` may write to"
        )
    wanted = images.project_images(tag, registry or "docker.io")
    log = cache.logs / "images.log"
    for image in wanted:
        progress.say(f"building {image.name} with {engine}")
        command = images.engine_build_command(engine, image)
        progress.run(command, what=f"building {image.target}", log=log, timeout=images.BUILD_SECONDS)
        if registry:
            progress.run([engine, "push", image.name], what=f"pushing {image.name}", log=log, timeout=600)
    if not registry:
        progress.say("loading the images into kind")
        _load_kind(cache, engine, context.removeprefix("kind-"), wanted, progress)
    return chart_values(tag, registry)


def _load_kind(cache: Cache, engine: str, name: str, wanted: list[images.Image], progress: Progress) -> None:
    program = _kind_program(cache, progress)
    environment = clean_environment(**kind.environment(engine))
    base = f"docker.io/library/{images.PUBLIC_BASE_IMAGE}"
    log = cache.logs / "kind.log"
    # A build need not leave its base among the engine's images.
    for argv in ([engine, "pull", base], [engine, "tag", base, images.BASE_IMAGE]):
        progress.run(argv, what=f"{argv[1]} of the base image", log=log, timeout=300)
    with tempfile.TemporaryDirectory(prefix="leasedjob-images-") as folder:
        for number, name_of_image in enumerate([*(i.name for i in wanted), base, images.BASE_IMAGE]):
            archive = Path(folder) / f"{number}.tar"
            for argv in (kind.save_command(engine, name_of_image, archive), kind.load_command(program, name, archive)):
                progress.run(argv, what=f"loading {name_of_image}", log=log, timeout=300, env=environment)


def chart_values(tag: str, registry: str = "") -> list[str]:
    """`--set` arguments for the chart: the images of this working tree."""
    values = [f"image.tag={tag}", f"sidecar.image.tag={tag}"]
    if registry:
        values.append(f"global.imageRegistry={registry}")
    return [argument for value in values for argument in ("--set-string", value)]
