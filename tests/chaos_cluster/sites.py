"""The two clusters: brought up side by side, with the product's images and two operators each."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from tests.chaos_cluster import clocks
from tests.chaos_cluster.manifests import NAMESPACE
from tests.cluster import images, lifecycle, source
from tests.cluster.layout import REPOSITORY, Cache
from tests.cluster.onenode import Node
from tests.cluster.progress import ClusterError, Progress
from tests.cluster.source import Cluster
from tests.e2e.kube import Helm, Json, Kubectl

SYSTEM: Final = "leasedjob-system"
RELEASE: Final = "leasedjob"
SECRET: Final = "leasedjob-database"
OPERATORS: Final = "app.kubernetes.io%2Fcomponent%3Doperator"
JOBS: Final = f"/apis/leasedjob.io/v1alpha1/namespaces/{NAMESPACE}/leasedjobs"
FRESH_SECONDS: Final = 1.0
WEIGHT: Final = 20  # of a cluster's containers, in processes
T = TypeVar("T")


class Api:
    """Lists of an API server, over one connection: a process of kubectl for each look would cost too much.

    Whoever looks within a second of somebody else sees what that one saw.
    """

    def __init__(self, node: Node) -> None:
        self._host = node.address
        pki = node.folder / "pki"
        self._tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._tls.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, list[Json]]] = {}
        self._connection: http.client.HTTPSConnection | None = None

    def items(self, path: str) -> list[Json]:
        """The objects of a collection. Raises OSError where there is no answer."""
        with self._lock:
            at, found = self._seen.get(path, (0.0, []))
            if time.monotonic() - at < FRESH_SECONDS:
                return found
            found = self._list(path)
            self._seen[path] = time.monotonic(), found
            return found

    def patch(self, path: str, change: Json) -> None:
        """A merge patch of an object."""
        with self._lock:
            self._ask("PATCH", path, json.dumps(change), {"Content-Type": "application/merge-patch+json"})

    def delete(self, path: str) -> None:
        with self._lock:
            self._ask("DELETE", path)

    def _list(self, path: str) -> list[Json]:
        found: list[Json] = self._ask("GET", path)["items"]
        return found

    def _ask(self, method: str, path: str, body: str | None = None, headers: dict[str, str] | None = None) -> Json:
        if self._connection is None:
            self._connection = http.client.HTTPSConnection(self._host, 6443, timeout=10, context=self._tls)
        try:
            self._connection.request(method, path, body, {"Accept": "application/json", **(headers or {})})
            answer = self._connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            self._connection = None
            raise OSError(f"{method} {path}: {error}") from error
        if answer.status not in (200, 201, 202):
            raise OSError(f"{method} {path}: {answer.status} {content[:200]!r}")
        found: Json = json.loads(content)
        return found


@dataclass(frozen=True, slots=True)
class Site:
    """One cluster with a release in it. `kubectl` works where the jobs are, `system` where the operators are."""

    name: str
    node: Node
    kubectl: Kubectl
    system: Kubectl
    api: Api

    def operators(self) -> list[Json]:
        """Their Pods that aren't going, in the order of their names."""
        return _staying(self.api.items(f"/api/v1/namespaces/{SYSTEM}/pods?labelSelector={OPERATORS}"))

    def all_pods(self) -> list[Json]:
        """Pods of runs."""
        return self.api.items(f"/api/v1/namespaces/{NAMESPACE}/pods")

    def pods(self) -> list[Json]:
        """Those whose workload runs, in the order of their names."""
        return [pod for pod in _staying(self.all_pods()) if running(pod, "main")]

    def jobs(self) -> list[Json]:
        return self.api.items(JOBS)

    def suspend(self) -> bool:
        """All jobs; True when they are."""
        for job in self.jobs():
            if not job["spec"].get("suspend"):
                self.api.patch(f"{JOBS}/{job['metadata']['name']}", {"spec": {"suspend": True}})
        return True

    def delete(self, pod: Json) -> None:
        """With its grace period."""
        meta = pod["metadata"]
        self.api.delete(f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}")


def _staying(pods: Sequence[Json]) -> list[Json]:
    kept = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    return sorted(kept, key=lambda pod: str(pod["metadata"]["name"]))


def running(pod: Json, container: str) -> str | None:
    """The id of a container that runs, whichever kind it is of."""
    status = pod["status"]
    for each in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        if each["name"] == container and "running" in each.get("state", {}):
            return str(each["containerID"])
    return None


def backing_off(pod: Json) -> bool:
    """Whether its kubelet waits before it starts a container again."""
    states = [status.get("state", {}) for status in pod["status"].get("containerStatuses") or []]
    return any(state.get("waiting", {}).get("reason") == "CrashLoopBackOff" for state in states)


def at_once(*calls: Callable[[], T]) -> list[T]:
    """What the calls give; all are done before the first error is raised."""
    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        started = [pool.submit(call) for call in calls]
    return [call.result() for call in started]


def obstacle() -> str:
    """Why it can't be had here; empty where it can."""
    machine = source.observe()
    if machine.kubeconfig:
        return "a cluster that somebody has named is not broken on purpose: unset LEASEDJOB_KUBECONFIG"
    return "" if machine.linux and machine.root else "clusters whose nodes can be broken need Linux and root"


def _weigh(node: Node) -> None:
    """All containers of a cluster together count as one process to the machine's scheduler. Where others are busy too
    they would get a fraction of what their kubelet gets, and leases would run out for want of a processor."""
    for file, factor in (("cpu/{}/cpu.shares", 1024), ("{}/cpu.weight", 100)):  # cgroup v1, v2
        path = lifecycle.CGROUP_ROOT / file.format(node.cgroup)
        if path.exists():
            path.write_text(str(WEIGHT * factor))


def bring_up(names: Sequence[str], cache: Cache, progress: Progress) -> tuple[list[Cluster], str, list[str]]:
    """Clusters with the images in them; an image that has the package, and the chart's values for the images.

    Raises:
        ClusterError: they can't be had here.
    """
    if reason := obstacle():
        raise ClusterError(reason)
    archives = images.project_archives(cache, progress)
    base = images.base_archive(cache, progress)
    by_target = {image.target: (image, archive) for image, archive in archives.items()}
    files = {"operator": clocks.OPERATOR_FILE, "sidecar": clocks.SIDECAR_FILE}
    clocked = {target: clocks.clocked(*by_target[target], file, cache, progress) for target, file in files.items()}
    wanted = [base, *(archive for _, archive in clocked.values())]

    def one(name: str) -> Cluster:
        node = lifecycle.up(cache, name, progress)
        _weigh(node)
        lifecycle.load(node, wanted, progress)
        found = source.find(cache, name)
        if found is None:
            raise ClusterError(f"cluster {name} is not there")
        return found

    clusters = at_once(*(lambda name=name: one(name) for name in names))
    values = [f"image.tag={clocked['operator'][0]}", f"sidecar.image.tag={clocked['sidecar'][0]}"]
    workloads = f"{by_target['operator'][0].name}-clock"
    return clusters, workloads, [word for value in values for word in ("--set-string", value)]


def install(
    cluster: Cluster, values: Sequence[str], database: Json, folder: Path
) -> Site:  # fmt: skip
    """The chart, anew.

    Args:
        database: what the Secret of the database says.
        folder: for the file with the values.
    """
    assert cluster.node is not None
    every = Kubectl(cluster)
    helm = Helm(cluster)
    helm.run("uninstall", RELEASE, "-n", SYSTEM, "--wait", "--timeout=60s", "--ignore-not-found")
    for name in (NAMESPACE, SYSTEM):
        if every.find("namespace", name):
            every("delete", "namespace", name, "--wait=true", "--timeout=120s", timeout=130)
        every.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    site = Site(cluster.name, cluster.node, every.within(NAMESPACE), every.within(SYSTEM), Api(cluster.node))
    site.system.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": database})
    merged: dict[str, Any] = {
        "clusterName": cluster.name,
        "database": {"existingSecret": SECRET},
        "logLevel": "DEBUG",
        "extraEnv": [],
        "extraVolumes": [{"name": "clock", "emptyDir": {"medium": "Memory"}}],
        "extraVolumeMounts": [{"name": "clock", "mountPath": str(Path(clocks.OPERATOR_FILE).parent)}],
    }
    file = folder / f"{cluster.name}.json"
    file.write_text(json.dumps(merged))
    chart = str(REPOSITORY / "charts" / "leasedjob")
    helm("install", RELEASE, chart, "-n", SYSTEM, "-f", str(file), "--wait", "--timeout=180s", *values)
    return site


def tear_down(names: Sequence[str], cache: Cache, progress: Progress) -> None:
    at_once(*(lambda name=name: lifecycle.down(cache, name, progress) for name in names))


class Logs:
    """The logs of operators, kept beside the records: followed, for a Pod's log goes with it."""

    def __init__(self, sites: Sequence[Site], folder: Path) -> None:
        self._sites, self._folder = sites, folder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)

    def start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        self._thread.start()

    def stop(self) -> None:
        """Once more, and no more."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            last = self._stop.wait(15)
            for site in self._sites:
                # The node's own files, which cost its API server nothing; those of earlier containers, too.
                for path in (site.node.folder / "log" / "pods").glob(f"{SYSTEM}_*/operator/*.log"):
                    self._copy(path, self._folder / f"{site.name}-{path.parts[-3].split('_')[1]}-{path.name}")
            if last:
                return

    @staticmethod
    def _copy(source_file: Path, target: Path) -> None:
        try:
            with source_file.open("rb") as file:
                file.seek(target.stat().st_size if target.exists() else 0)
                with target.open("ab") as copy:
                    copy.write(file.read())
        except OSError:
            return
