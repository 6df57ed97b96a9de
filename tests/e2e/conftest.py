"""A real cluster, a PostgreSQL that its Pods reach, the chart installed in it, and a namespace for each test.

Cluster, images, PostgreSQL and release are shared by all processes of a run (`pytest -n`); `make e2e` has brought the
first three up, and here they are only found. Tests are kept apart by namespace: `kubectl` works in the test's own.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from leasedjob.lease.trust import Timing
from tests.cluster import database, faults, source
from tests.cluster.database import Database
from tests.cluster.database import create_owned as create_owned_database
from tests.cluster.layout import REPOSITORY, Cache
from tests.cluster.progress import ClusterError, Progress
from tests.cluster.release import SECRET as DATABASE_SECRET
from tests.cluster.release import secret as database_secret
from tests.cluster.source import Cluster
from tests.e2e.kube import Helm, Kubectl
from tests.e2e.marks import shared_folder
from tests.e2e.private import PREFIX

CLUSTER = os.environ.get("LEASEDJOB_TEST_CLUSTER", "test")
RELEASE = "leasedjob"
RELEASE_NAMESPACE = "leasedjob-system"
# A workload in this image has python3; it is in every cluster that the harness brings up.
IMAGE = "leasedjob.io/python:1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


class Measured:
    """Takes down what a test measured; the run's summary shows it."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._properties = request.node.user_properties

    def __call__(self, text: str) -> None:
        print(text)
        self._properties.append(("measured", text))

    def loss(self, what: str, seconds: float, timing: Timing) -> None:
        """How long a workload ran on after its lease was lost, beside the time that the rule allows for it."""
        self(
            f"{what}: {seconds:.1f} s from the loss to the workload's end; fence budget {timing.fence_budget:.0f} s"
            f" (detection {timing.probe.detection} + {timing.containers} x grace {timing.grace} + 5), heartbeat"
            f" {timing.heartbeat} s"
        )


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Measured:
    return Measured(request)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [r for reports in terminalreporter.stats.values() for r in reports if isinstance(r, pytest.TestReport)]
    lines = [text for r in reports if r.when == "call" for name, text in r.user_properties if name == "measured"]
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(str(line))


@pytest.fixture(scope="session")
def cache() -> Cache:
    return Cache.from_env()


@pytest.fixture(scope="session")
def cluster(cache: Cache) -> Cluster:
    """The running test cluster. Without one the tests are skipped, or fail where CI=true: there it must exist."""
    reason = f"no cluster {CLUSTER!r} is up: run `make cluster-up`, or `make e2e` that does all of it"
    try:
        found = source.find(cache, CLUSTER)
    except ClusterError as error:
        found, reason = None, str(error)
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return found


@pytest.fixture(scope="session")
def helm(cluster: Cluster) -> Helm:
    return Helm(cluster)


@pytest.fixture(scope="session")
def cluster_kubectl(cluster: Cluster) -> Kubectl:
    """kubectl in the namespace `default`; for what isn't a test's own."""
    return Kubectl(cluster)


@pytest.fixture(scope="session")
def postgres(cluster: Cluster, cache: Cache) -> Database:
    """The PostgreSQL that Pods reach, with its superuser; shared, so tests neither stop nor reconfigure it."""
    try:
        return database.up(cluster, cache, Progress())
    except ClusterError as error:
        pytest.skip(str(error))


@dataclass(frozen=True, slots=True)
class Release:
    """The installed chart: its name, namespace and database."""

    name: str
    namespace: str
    dbname: str
    postgres: Database

    @property
    def conninfo(self) -> str:
        """The operator's database, as superuser."""
        return self.postgres.conninfo(self.dbname)


def install(kubectl: Kubectl, helm: Helm, postgres: Database, values: list[str]) -> Release:
    """The chart, anew, on an empty database; what an earlier run left is removed first."""
    helm.run("uninstall", RELEASE, "-n", RELEASE_NAMESPACE, "--wait", "--timeout=60s")
    old = kubectl("get", "namespaces", "-l", "leasedjob.io/test=true", "-o", "name").split()
    old += kubectl("get", "namespace", RELEASE_NAMESPACE, "-o", "name", "--ignore-not-found").split()
    if old:
        kubectl("delete", *old, "--wait=true", "--timeout=120s", timeout=130)
    for kind in ("leasedjobs", "leasedjobruns"):
        kubectl("delete", "crd", f"{kind}.leasedjob.io", "--ignore-not-found", "--timeout=60s", timeout=70)
    dbname = "leasedjob_e2e"
    create_owned_database(postgres, dbname)
    kubectl("create", "namespace", RELEASE_NAMESPACE)
    kubectl("label", "namespace", RELEASE_NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    kubectl.within(RELEASE_NAMESPACE).apply(database_secret(postgres, dbname))
    chart = str(REPOSITORY / "charts" / "leasedjob")
    place = ["-n", RELEASE_NAMESPACE, "--wait", "--timeout=120s"]
    try:
        mine = f"database.existingSecret={DATABASE_SECRET},excludeNamespaces={{{PREFIX}*}},statusPage.enabled=true"
        helm("install", RELEASE, chart, *place, "--set", mine, *values)
    except AssertionError as error:
        system = kubectl.within(RELEASE_NAMESPACE)
        seen = [system.run(*words.split()).stdout for words in ("get pods -o wide", "get events", "describe pods")]
        logs = system.run("logs", "--prefix", "--all-containers", "-l", f"app.kubernetes.io/instance={RELEASE}").stdout
        raise AssertionError("\n".join([str(error), *seen, logs])) from error
    return Release(RELEASE, RELEASE_NAMESPACE, dbname, postgres)


@pytest.fixture(scope="session")
def release(cluster: Cluster, cache: Cache, helm: Helm, cluster_kubectl: Kubectl, postgres: Database) -> Release:
    """The chart installed with two replicas, once for each run of the tests, by whichever process comes first.

    LEASEDJOB_E2E_RUN names a run that consists of several calls of pytest.
    """
    run = os.environ.get("LEASEDJOB_E2E_RUN") or os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
    stamp = cache.root / f"e2e-{CLUSTER}.json"
    with (cache.root / f"e2e-{CLUSTER}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and json.loads(stamp.read_text()) == run:
            return Release(RELEASE, RELEASE_NAMESPACE, "leasedjob_e2e", postgres)
        values = source.deliver(cluster, cache, Progress())
        installed = install(cluster_kubectl, helm, postgres, values)
        stamp.write_text(json.dumps(run))
        return installed


@pytest.fixture(scope="session", autouse=True)
def environment(request: pytest.FixtureRequest) -> Iterator[None]:
    """KUBECONFIG and KUBECTL for programs that a test starts by itself; the release is there before any test. Tests
    that bring up a pair of clusters have nothing to do with this one."""
    if all(item.get_closest_marker("pair") for item in request.session.items):
        yield
        return
    cluster: Cluster = request.getfixturevalue("cluster")
    request.getfixturevalue("release")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        patch.setenv("KUBECTL", cluster.kubectl)
        yield


@pytest.fixture
def namespace(cluster_kubectl: Kubectl) -> Iterator[str]:
    """A new namespace under the `restricted` Pod Security profile; its removal isn't waited for."""
    name = f"e2e-{uuid.uuid4().hex[:10]}"
    labels = {"leasedjob.io/test": "true", "pod-security.kubernetes.io/enforce": "restricted"}
    cluster_kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    yield name
    cluster_kubectl.run("delete", "namespace", name, "--wait=false")


@pytest.fixture
def kubectl(cluster_kubectl: Kubectl, namespace: str) -> Kubectl:
    """kubectl in the test's own namespace."""
    return cluster_kubectl.within(namespace)


@pytest.fixture
def open_kubectl(cluster_kubectl: Kubectl) -> Iterator[Kubectl]:
    """kubectl in a namespace of the test's own without Pod Security, for a hostPath volume that outlives Pods."""
    name = f"e2e-{uuid.uuid4().hex[:10]}"
    labels = {"leasedjob.io/test": "true"}
    cluster_kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    yield cluster_kubectl.within(name)
    cluster_kubectl.run("delete", "namespace", name, "--wait=false")


@pytest.fixture
def marks(cluster: Cluster, tmp_path: Path) -> Path:
    """A folder of this machine that the workload's containers write to (tests/e2e/marks.py)."""
    if cluster.node is None:
        pytest.skip("Pods can share a folder with the test only in the one-node cluster")
    return shared_folder(tmp_path)


@pytest.fixture
def db(release: Release) -> Iterator[psycopg.Connection]:
    """The operator's database as superuser, autocommit, with the schema `leasedjob` on the search path."""
    with psycopg.connect(release.conninfo, autocommit=True, options="-c search_path=leasedjob") as connection:
        yield connection


@pytest.fixture
def node_faults(cluster: Cluster) -> Iterator[faults.Faults]:
    """Faults in a one-node cluster: partitions, a stopped kubelet, frozen containers. All are healed at the end."""
    if cluster.node is None:
        pytest.skip("faults can be made only in the one-node cluster")
    made = faults.Faults(cluster.node)
    yield made
    made.heal()
