"""Two real clusters on one PostgreSQL: one job in both, a cordon, and what becomes of a lost cluster's runs.

The clusters are the pair `twin`, brought up for these tests alone (marker `pair`). Workloads of both write down what
happens to them in one folder of this machine, so that an overlap would be seen by somebody who is no part of it.
"""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest

from leasedjob import protocol
from leasedjob.lease.trust import Timing
from tests.cluster import database, pair
from tests.cluster.faults import Faults
from tests.cluster.layout import Cache
from tests.cluster.network import CLUSTER
from tests.cluster.pair import Pair
from tests.cluster.progress import ClusterError, Progress
from tests.cluster.release import RELEASE, SYSTEM
from tests.e2e.conftest import Measured
from tests.e2e.jobs import run_of
from tests.e2e.kube import Json, Kubectl
from tests.e2e.marks import PRELUDE, ends_with, finish, marked_job, own, read, said, shared_folder
from tests.e2e.test_kubectl_plugin import with_plugin_on_path
from tests.e2e.test_node import RETURNING, is_ready, node_ready
from tests.e2e.test_path import phase, rows, succeeded
from tests.e2e.test_stops import expiry, timing

pytestmark = pytest.mark.pair
NAME = "twin"
DBNAME = "leasedjob_pair"
LENGTH = Timing(24, 2, 5, 0)
SPEC = timing(LENGTH.duration, LENGTH.heartbeat, LENGTH.grace)
TAKEN_WITHIN = LENGTH.duration + 60.0
REPORTS = PRELUDE + (
    '    mark("start")\n'
    '    while not os.path.exists("/marks/finish"):\n'
    "        time.sleep(0.05)\n"
    '    mark("reported", answer=ask("/v1/outcome", {"outcome": "complete"})[0])\n'
)


@dataclass(frozen=True, slots=True)
class Side:
    """One cluster; `kubectl` works in the test's namespace, which both have."""

    name: str
    kubectl: Kubectl
    faults: Faults

    @property
    def system(self) -> Kubectl:
        return self.kubectl.within(SYSTEM)

    def pods(self, job: str) -> list[Json]:
        return self.kubectl.items("pods", "-l", f"{protocol.LABEL_JOB}={job}")

    def operators(self, replicas: int) -> None:
        """So many replicas of the operator, and all are ready."""
        self.system("scale", "deployment", RELEASE, f"--replicas={replicas}")
        self.operators_are_ready(replicas)

    def operators_are_ready(self, replicas: int = 1) -> None:
        selector = ("-l", "app.kubernetes.io/component=operator")
        self.system.wait(
            f"{replicas} operators of {self.name}",
            lambda: [is_ready(p) for p in self.system.items("pods", *selector)] == [True] * replicas,
            timeout=120,
        )

    def plugin(self, *words: str) -> str:
        """What `kubectl leasedjob WORDS` prints."""
        cluster = self.kubectl.cluster
        argv = [cluster.kubectl, "leasedjob", *words, "--kubeconfig", str(cluster.kubeconfig)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=90, check=False, env=with_plugin_on_path())
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def twins(cache: Cache) -> Iterator[Pair]:
    """Both clusters, with a release of one replica in each on an empty database."""
    progress = Progress()
    were_up = database.find(cache, NAME) is not None
    try:
        made = pair.up(cache, NAME, progress)
    except ClusterError as error:
        pytest.skip(str(error))
    try:
        database.create_owned(made.database, DBNAME)
        pair.install(made, cache, progress, {"replicas": 1}, dbname=DBNAME)
        yield made
    finally:
        if not were_up:
            pair.down(cache, NAME, progress)


@pytest.fixture
def db(twins: Pair) -> Iterator[psycopg.Connection]:
    with psycopg.connect(
        twins.database.conninfo(DBNAME), autocommit=True, options="-c search_path=leasedjob"
    ) as connection:
        yield connection


@pytest.fixture
def sides(twins: Pair) -> Iterator[tuple[Side, Side]]:
    """A namespace of one name in both, and no fault is left at the end."""
    name = f"e2e-{uuid.uuid4().hex[:10]}"
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    found = []
    for cluster in twins.clusters:
        assert cluster.node is not None
        Kubectl(cluster).apply(namespace)
        found.append(Side(cluster.name, Kubectl(cluster, name), Faults(cluster.node)))
    a, b = found
    yield a, b
    for side in found:
        side.faults.heal_everything()
    for side in found:
        side.kubectl.run("delete", "leasedjobs", "--all", "--wait=false")
        side.kubectl.run("delete", "namespace", name, "--wait=false")


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    """A folder of this machine that workloads of both clusters write to."""
    return shared_folder(tmp_path)


def everywhere(sides: tuple[Side, Side], *jobs: Json) -> None:
    """The same manifests in both, accepted by both operators."""
    for side in sides:
        side.kubectl.apply(*jobs)
    for side in sides:
        for job in jobs:
            side.kubectl.wait(
                f"{job['metadata']['name']} is accepted",
                lambda job=job, side=side: condition(side, job["metadata"]["name"], "Ready"),
            )


def condition(side: Side, job: str, kind: str) -> Json | None:
    status = side.kubectl.json("get", "lj", job).get("status") or {}
    return next((c for c in status.get("conditions") or [] if c["type"] == kind and c["status"] == "True"), None)


def reason(side: Side, run: str) -> str | None:
    return (side.kubectl.json("get", "ljr", run).get("status") or {}).get("reason")


def holders(side: Side, job: str) -> list[tuple[int, str]]:
    """Attempt and cluster of each active run, as the LeasedJob's status says them."""
    active = (side.kubectl.json("get", "lj", job).get("status") or {}).get("active") or []
    return [(run["attempt"], run["holder"].partition("/")[0]) for run in active]


def begin(side: Side, job: str, folder: Path) -> None:
    """A run of the job that this cluster holds, and whose workload has begun."""
    side.kubectl.apply(run_of(job, f"{job}-now"))
    side.kubectl.wait(f"{job} has begun in {side.name}", lambda: read(folder, 1), timeout=60)


def taken_over(side: Side, db: psycopg.Connection, job: str, folder: Path, before: Json) -> Json:
    """The row once this cluster holds the next attempt and its workload has begun."""

    def there() -> Json | None:
        (row,) = rows(db, side.kubectl.namespace, job)
        return row if row["attempt"] == before["attempt"] + 1 and row["pod_uid"] else None

    row: Json = side.kubectl.wait(f"{side.name} takes {job} over", there, timeout=TAKEN_WITHIN)
    assert row["cluster"] == side.name
    assert row["holder"].startswith(f"{side.name}/")
    assert row["fencing_token"] > before["fencing_token"]
    assert (row["failures"], row["interruptions"]) == (0, 1)
    side.kubectl.wait(f"{job} has begun in {side.name}", lambda: read(folder, before["attempt"] + 1), timeout=60)
    return row


def stopped_before(folder: Path, attempt: int) -> float:
    """Seconds between the former workload's last sign and the next one's first; it must not be negative."""
    between = float(read(folder, attempt + 1)[0]["at"] - read(folder, attempt)[-1]["at"])
    assert between > 0, f"attempts {attempt} and {attempt + 1} worked at once"
    return between


def by_run(folder: Path, attempt: int = 1) -> list[list[Json]]:
    """The marks of an attempt of several runs: a list for each run, in the order of their beginnings."""
    found: dict[str, list[Json]] = {}
    for mark in read(folder, attempt):
        found.setdefault(mark["key"], []).append(mark)
    return list(found.values())


def apart(folder: Path) -> None:
    """Two runs have worked, one after the other."""
    first, second = by_run(folder)
    assert first[-1]["at"] < second[0]["at"], "the first had stopped"
    assert first[0]["token"] < second[0]["token"]


def test_one_job_in_two_clusters(
    sides: tuple[Side, Side], db: psycopg.Connection, marks: Path, measured: Measured
) -> None:
    """The same manifests in both: a tick runs once; Forbid and Replace hold across; a cordon moves what begins."""
    a, b = sides
    namespace = a.kubectl.namespace
    folders = {name: own(marks, name) for name in ("ticking", "forbid", "replace", "moving")}
    everywhere(
        sides,
        marked_job("ticking", folders["ticking"], PRELUDE + '    mark("start")\n', SPEC, schedule="* * * * *"),
        marked_job("forbid", folders["forbid"], ends_with(), SPEC),
        marked_job("replace", folders["replace"], ends_with(143, needs=2), SPEC, concurrencyPolicy="Replace"),
        marked_job("moving", folders["moving"], ends_with(143, needs=1), SPEC),
    )
    since = datetime.now(UTC)
    for job in ("forbid", "replace", "moving"):
        begin(a, job, folders[job])

    # What is active in one cluster is in the way in the other.
    b.kubectl.apply(run_of("forbid", "forbid-too"), run_of("replace", "replace-too"))
    b.kubectl.wait("it waits", lambda: reason(b, "forbid-too") == "Overlap")
    b.kubectl.wait("the replacement runs", lambda: len(by_run(folders["replace"])) == 2, timeout=90)
    apart(folders["replace"])
    assert said(folders["replace"], 1, "term"), "it was told"
    finish(folders["forbid"])
    for side, run in ((a, "forbid-now"), (b, "forbid-too")):
        side.kubectl.wait(
            f"{run} succeeds", lambda side=side, run=run: phase(side.kubectl, run) == "Succeeded", timeout=60
        )
    apart(folders["forbid"])
    first, second = rows(db, namespace, "forbid")
    assert (first["cluster"], second["cluster"]) == (a.name, b.name)
    for side in sides:  # status follows from the database, so both say the same
        side.kubectl.wait("the holder is shown", lambda side=side: holders(side, "replace") == [(1, b.name)])
        assert b.name in side.kubectl("get", "lj", "replace", "-o", "wide")
        assert condition(side, "forbid", "SpecDiffers") is None

    # Cordoned by somebody who asks the other cluster: what is stopped there goes on here, and nothing begins there.
    assert b.plugin("cordon", a.name, "--reason", "a test") == f"cluster/{a.name} cordoned\n"
    a.kubectl.wait("its objects say so", lambda: condition(a, "moving", "Cordoned"))
    (before,) = rows(db, namespace, "moving")
    (pod,) = a.pods("moving")
    a.kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")
    taken_over(b, db, "moving", folders["moving"], before)
    stopped_before(folders["moving"], 1)
    finish(folders["moving"])
    a.kubectl.wait("it is shown in both", lambda: phase(a.kubectl, "moving-now") == "Succeeded", timeout=60)
    a.kubectl.apply(run_of("forbid", "forbid-later"))
    a.kubectl.wait("a request waits", lambda: reason(a, "forbid-later") == "ClusterCordoned")
    cordoned_at = datetime.now(UTC)
    tick = a.kubectl.wait("a tick", lambda: _done_since(db, namespace, since), timeout=120)
    assert [r["cluster"] for r in tick if r["started_at"] > cordoned_at] in ([], [b.name], [b.name] * 2)
    listed = a.plugin("clusters")
    assert any(
        line.startswith(a.name) and "Ready,Cordoned" in line and "a test" in line for line in listed.splitlines()
    )
    assert any(line.startswith(b.name) and " Ready " in line for line in listed.splitlines())
    assert a.plugin("uncordon") == f"cluster/{a.name} uncordoned\n"
    a.kubectl.wait("it begins", lambda: phase(a.kubectl, "forbid-later") == "Succeeded", timeout=60)

    finish(folders["replace"])
    ticks = rows(db, namespace, "ticking")
    starts = [m["key"] for m in said(folders["ticking"], 1, "start")]
    assert len({r["tick"] for r in ticks}) == len(ticks), "a tick has one run"
    assert len(set(starts)) == len(starts), "which began once"
    assert [r["attempt"] for r in ticks] == [1] * len(ticks)
    measured(f"two clusters: {len(ticks)} ticks, run by {', '.join(r['cluster'] for r in ticks)}")


def _done_since(db: psycopg.Connection, namespace: str, since: datetime) -> list[Json]:
    return [r for r in succeeded(db, namespace, "ticking") if r["tick"] > since]


def test_a_cluster_that_is_cut_off_from_the_database(
    twins: Pair, sides: tuple[Side, Side], db: psycopg.Connection, marks: Path, measured: Measured
) -> None:
    """Its workload is stopped before the other cluster's begins, by its own kubelet; and it comes back."""
    a, b = sides
    folder = own(marks, "cut")
    everywhere(sides, marked_job("cut", folder, ends_with(143, needs=2), SPEC))
    begin(a, "cut", folder)
    cut_at = time.time()
    cut = a.faults.cut(CLUSTER, twins.database.part)
    (before,) = rows(db, a.kubectl.namespace, "cut")
    row = taken_over(b, db, "cut", folder, before)
    assert row["started_at"].timestamp() >= expiry(before)
    between = stopped_before(folder, 1)
    assert said(folder, 1, "term"), "it was told to stop"
    measured.loss("cluster cut off from PostgreSQL", read(folder, 1)[-1]["at"] - cut_at, LENGTH)
    measured(
        f"cluster cut off: taken over {row['started_at'].timestamp() - expiry(before):.2f} s after the expiry; the old"
        f" workload had ended {between:.1f} s before the new one began"
    )
    a.faults.mend(cut)
    finish(folder)
    b.kubectl.wait("it succeeds", lambda: succeeded(db, b.kubectl.namespace, "cut"), timeout=60)
    a.operators_are_ready()
    a.kubectl.wait("it is shown where it began", lambda: phase(a.kubectl, "cut-now") == "Succeeded", timeout=60)
    a.kubectl.wait("its old Pod is done with", lambda: all(_over(p) for p in a.pods("cut")), timeout=60)
    a.kubectl.apply(run_of("cut", "again"))
    a.kubectl.wait("it works again", lambda: phase(a.kubectl, "again") == "Succeeded", timeout=60)
    (row, _) = rows(db, a.kubectl.namespace, "cut")
    assert (row["attempt"], row["status"]) == (2, "SUCCESS"), "and has changed nothing"


def _over(pod: Json) -> bool:
    return pod["status"].get("phase") in ("Failed", "Succeeded")


def test_a_cluster_that_stands_still_and_goes_on(
    sides: tuple[Side, Side], db: psycopg.Connection, marks: Path, measured: Measured
) -> None:
    """Its machine is suspended, control plane and all, for longer than its lease: what it then says is not recorded."""
    a, b = sides
    folder = own(marks, "frozen")
    # A busy machine is no machine that stands still.
    everywhere(sides, marked_job("frozen", folder, RETURNING.replace("before > 5", "before > 12"), SPEC))
    begin(a, "frozen", folder)
    a.faults.freeze_node(control_plane=True)
    (before,) = rows(db, a.kubectl.namespace, "frozen")
    row = taken_over(b, db, "frozen", folder, before)
    assert row["started_at"].timestamp() >= expiry(before)
    stopped_before(folder, 1)
    thawed = time.time()
    a.faults.thaw_node()
    (mark,) = a.kubectl.wait("the old workload is told", lambda: said(folder, 1, "returned"), timeout=60)
    assert (mark["view"]["leased"], mark["view"]["state"]) == (False, "fenced")
    assert mark["late"][0] == 409, "what it says of its work is not recorded"
    a.kubectl.wait("the node is ready", lambda: node_ready(a.kubectl), timeout=60)
    a.kubectl.wait("the old Pod is stopped", lambda: all(_over(p) for p in a.pods("frozen")), timeout=60)
    measured(f"cluster stood still: the old workload ended {read(folder, 1)[-1]['at'] - thawed:.1f} s after its thaw")
    again = rows(db, a.kubectl.namespace, "frozen")[0]
    assert (again["attempt"], again["status"], again["cluster"]) == (2, "RUNNING", b.name)
    finish(folder)
    b.kubectl.wait("it succeeds", lambda: succeeded(db, b.kubectl.namespace, "frozen"), timeout=60)
    a.operators_are_ready()


def test_a_node_that_dies_while_its_operator_is_away(
    sides: tuple[Side, Side], db: psycopg.Connection, marks: Path, measured: Measured
) -> None:
    """Without an operator runs go on, and what reports is recorded. What reports nothing, and what dies, is repeated by
    the other cluster when its lease has ended."""
    a, b = sides
    namespace = a.kubectl.namespace
    folders = {name: own(marks, name) for name in ("reports", "silent", "killed")}
    everywhere(
        sides,
        marked_job("reports", folders["reports"], REPORTS, SPEC),
        marked_job("silent", folders["silent"], ends_with(), SPEC),
        marked_job("killed", folders["killed"], ends_with(143, needs=1), SPEC),
    )
    for job, folder in folders.items():
        begin(a, job, folder)
    a.operators(0)
    started = {job: rows(db, namespace, job)[0]["modified_at"] for job in folders}
    for job in folders:
        a.kubectl.wait(
            f"{job} is held without an operator",
            lambda job=job: rows(db, namespace, job)[0]["modified_at"] > started[job],
            timeout=60,
        )
    for job in ("reports", "silent"):
        finish(folders[job])
    a.kubectl.wait("the report is recorded", lambda: succeeded(db, namespace, "reports"), timeout=60)
    a.kubectl.wait("the other one has ended", lambda: said(folders["silent"], 1, "end"), timeout=60)
    a.faults.crash()
    crashed = time.time()
    before = {job: rows(db, namespace, job)[0] for job in ("silent", "killed")}
    for job in before:
        row = taken_over(b, db, job, folders[job], before[job])
        assert row["started_at"].timestamp() >= expiry(before[job])
        stopped_before(folders[job], 1)
        measured(f"node killed, {job}: claimed again {row['started_at'].timestamp() - crashed:.1f} s after it")
    a.faults.recover()
    finish(folders["killed"])
    for job in folders:
        b.kubectl.wait(f"{job} succeeds", lambda job=job: succeeded(db, namespace, job), timeout=60)
    assert rows(db, namespace, "reports")[0]["attempt"] == 1, "not repeated"
    a.kubectl.wait("the node is ready", lambda: node_ready(a.kubectl), timeout=90)
    a.operators(1)
    for job in folders:
        a.kubectl.wait(
            f"{job} is shown where it began", lambda job=job: phase(a.kubectl, f"{job}-now") == "Succeeded", timeout=60
        )
