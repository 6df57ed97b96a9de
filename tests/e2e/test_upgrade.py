"""From an earlier release to this one, back, and forth again, while jobs run and a Pod works through all of it.

A folder outside of the cluster's logs holds what each workload did (tests/e2e/marks.py). Afterwards every tick is
accounted for once, by that folder, by the lease rows and by the ledger.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from leasedjob import protocol
from leasedjob.lease.migrate import migrations
from tests.cluster import images, lifecycle
from tests.cluster.layout import REPOSITORY, Cache
from tests.cluster.progress import Progress
from tests.cluster.source import Cluster
from tests.e2e.conftest import Measured, Release, create_owned_database, database_secret
from tests.e2e.jobs import SHORT, run_of
from tests.e2e.kube import Helm, Json, Kubectl, write_json
from tests.e2e.marks import PRELUDE, ends_with, finish, marked_job, own, read
from tests.e2e.test_path import next_minute, phase, rows
from tests.upgrade.releases import CHART, KeptRelease, kept_releases

pytestmark = pytest.mark.node

RELEASES = kept_releases()
DBNAME = "leasedjob_upgrade"
MINUTE = timedelta(minutes=1)
OPERATORS = "app.kubernetes.io/component=operator"

# Each run marks its start and its end; what it does in between depends on the job.
BRIEF = PRELUDE + '    mark("start")\n    time.sleep(1)\n    mark("end")\n'
REPORTS = (
    PRELUDE
    + """
    mark("start")
    lease = ask("/v1/lease")
    mark("lease", status=lease[0], state=lease[1].get("state"))
    told = ask("/v1/outcome", {"outcome": "complete", "data": {"rows": 42}})
    mark("told", status=told[0])
    sys.exit(3)
"""
)
TWICE = (
    PRELUDE + '    mark("start")\n    mark("end")\n    sys.exit(0 if os.environ["LEASEDJOB_ATTEMPT"] == "2" else 7)\n'
)
LONG = PRELUDE + '    mark("start")\n    time.sleep(65)\n    mark("end")\n'
REPLACED = (
    PRELUDE
    + """
    signal.signal(signal.SIGTERM, lambda *_: (mark("end"), os._exit(0)))
    mark("start")
    while not os.path.exists("/marks/finish"):
        time.sleep(0.2)
    mark("end")
"""
)
TICKING: dict[str, tuple[str, Json]] = {  # job: its program and what is special about it
    "reports": (REPORTS, {}),
    "twice": (TWICE, {"backoffLimit": 1, "concurrencyPolicy": "Allow"}),
    "forbids": (LONG, {"concurrencyPolicy": "Forbid"}),
    "allows": (LONG, {"concurrencyPolicy": "Allow"}),
    "replaces": (REPLACED, {"concurrencyPolicy": "Replace", **SHORT}),
}
NEWER = {"suspendAfterFailures": 3}  # what the oldest kept release doesn't know
HELD = ends_with(143, needs=600)  # until the test says so


@dataclass
class Site:
    """The release that is upgraded, in place of the shared one: same name, same namespace, a database of its own."""

    helm: Helm
    system: Kubectl
    release: Release
    earlier: KeptRelease
    charts: dict[bool, str]
    values: dict[bool, str]
    sidecars: dict[bool, str]  # of Pods that each of the two starts
    operators: set[str] = field(default_factory=set)

    def _helm(self, *words: str) -> None:
        place = ["-n", self.release.namespace, "--wait", "--timeout=180s"]
        try:
            self.helm(*words, *place, timeout=240)
        except AssertionError as error:
            logs = self.system.run("logs", "--prefix", "--tail=60", "-l", OPERATORS).stdout
            raise AssertionError(f"{error}\n{self.system.run('get', 'pods').stdout}\n{logs}") from error

    def install(self) -> None:
        """The earlier release."""
        self._helm("install", self.release.name, self.charts[False], "-f", self.values[False])

    def upgrade(self) -> None:
        """To this one; the chart brings definitions and schema with it."""
        self._helm("upgrade", self.release.name, self.charts[True], "-f", self.values[True])

    def rollback(self) -> None:
        self._helm("rollback", self.release.name, "1")

    def knows(self, *fields: str) -> bool:
        """Whether the earlier release's definitions have these fields."""
        text = (Path(self.charts[False]) / "templates" / "crds" / "leasedjobs.yaml").read_text()
        return all(f" {name}:\n" in text for name in fields)

    def watch(self) -> None:
        """Every operator's containers have started once, so far."""
        for pod in self.system.items("pods", "-l", OPERATORS):
            self.operators.add(pod["metadata"]["name"])
            for status in pod["status"].get("containerStatuses", []):
                ended = (status.get("lastState") or {}).get("terminated")
                assert status["restartCount"] == 0, f"{pod['metadata']['name']}: {ended}"


def kept_values(helm: Helm, release: Release) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(helm("get", "values", release.name, "-n", release.namespace, "-o", "json"))
    return values


@pytest.fixture
def site_of(
    cluster: Cluster, cache: Cache, helm: Helm, cluster_kubectl: Kubectl, release: Release, tmp_path: Path
) -> Iterator[Callable[[KeptRelease], Site]]:
    """Puts an earlier release in the place of the shared one; that one is there again afterwards."""
    if cluster.node is None:
        pytest.skip("an earlier release's images are built for the one-node cluster alone")
    node = cluster.node
    system = cluster_kubectl.within(release.namespace)
    shared = write_json(tmp_path / "shared.json", kept_values(helm, release))
    place = ("-n", release.namespace)

    def remove() -> None:
        helm("uninstall", release.name, *place, "--wait", "--timeout=60s", "--ignore-not-found")
        system.wait("no operator", lambda: not system.items("pods", "-l", OPERATORS), timeout=60)

    def put(earlier: KeptRelease) -> Site:
        sources = earlier.unpack(tmp_path / earlier.name)
        archives = images.release_archives(earlier.name, sources, cache, Progress())
        lifecycle.load(node, list(archives.values()), Progress())
        present = kept_values(helm, release)
        tags = {False: earlier.name, True: present["sidecar"]["image"]["tag"]}
        former = {"image": {"tag": earlier.name}, "sidecar": {"image": {"tag": earlier.name}}}
        former["database"] = present["database"]
        remove()
        create_owned_database(release.postgres, DBNAME)
        system.apply(database_secret(release.postgres, DBNAME))
        return Site(
            helm, system, release, earlier,
            charts={False: str(sources / CHART), True: str(REPOSITORY / CHART)},
            values={
                False: str(write_json(tmp_path / "former.json", former)),
                True: str(write_json(tmp_path / "present.json", present)),
            },
            sidecars={current: f"leasedjob/sidecar:{tag}" for current, tag in tags.items()},
        )  # fmt: skip

    yield put
    remove()
    system.apply(database_secret(release.postgres, release.dbname))
    chart = str(REPOSITORY / CHART)
    helm("install", release.name, chart, *place, "-f", str(shared), "--wait", "--timeout=120s")


@pytest.fixture
def upgraded(release: Release) -> Iterator[Callable[[], psycopg.Connection]]:
    """Opens the database of the release that is upgraded."""
    with contextlib.ExitStack() as stack:

        def connect() -> psycopg.Connection:
            path = "-c search_path=leasedjob"
            return stack.enter_context(
                psycopg.connect(release.postgres.conninfo(DBNAME), autocommit=True, options=path)
            )

        yield connect


class Heartbeats:
    """Looks each quarter of a second at a row that is held, on a connection of its own."""

    def __init__(self, connection: psycopg.Connection, namespace: str, job: str) -> None:
        self._connection = connection
        self._who = (namespace, job)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.worst = 0.0
        self.fencing: set[int] = set()

    def __enter__(self) -> Heartbeats:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        asked = (
            "SELECT extract(epoch FROM clock_timestamp() - modified_at), fencing_token FROM job_scheduler "
            "WHERE namespace = %s AND job_name = %s"
        )
        while not self._stop.wait(0.25):
            for age, token in self._connection.execute(asked, self._who).fetchall():
                self.worst = max(self.worst, float(age))
                self.fencing.add(token)


def until(moment: datetime) -> None:
    threading.Event().wait(max(0.0, (moment - datetime.now(UTC)).total_seconds()))


def before_the_next_minute(lead: float) -> datetime:
    """Waits until `lead` seconds before a minute; that minute."""
    minute = next_minute()
    if (minute - datetime.now(UTC)).total_seconds() < lead:
        minute += MINUTE
    until(minute - timedelta(seconds=lead))
    return minute


@dataclass
class Work:
    """What runs meanwhile, in one namespace."""

    kubectl: Kubectl
    db: psycopg.Connection
    folder: Path
    brief: int
    first: dict[str, datetime] = field(default_factory=dict)  # each job's first tick

    @property
    def jobs(self) -> dict[str, tuple[str, Json]]:
        return {f"brief-{n}": (BRIEF, {}) for n in range(self.brief)} | TICKING

    def begin(self) -> None:
        """All objects are there and accepted before the tick that is counted first."""
        made = [marked_job(n, own(self.folder, n), p, **{"timing": {}, "schedule": "* * * * *", **more})
                for n, (p, more) in self.jobs.items()]  # fmt: skip
        seed = marked_job("seed", own(self.folder, "seed"), BRIEF, type="Initial")
        del seed["spec"]["schedule"]
        minute = next_minute()
        if (minute - datetime.now(UTC)).total_seconds() < 20:
            until(minute + timedelta(seconds=1))
        self.kubectl.apply(*made, seed)
        self.kubectl.wait(
            "all are accepted",
            lambda: all(accepted(j) for j in self.kubectl.items("leasedjobs")),
            timeout=40,
        )
        self.first = {
            job["metadata"]["name"]: first_tick(job)
            for job in self.kubectl.items("leasedjobs")
            if job["metadata"]["name"] in self.jobs
        }

    def add(self, name: str, **spec: Any) -> None:
        """One more that ticks each minute, while others do already."""
        self.kubectl.apply(marked_job(name, own(self.folder, name), BRIEF, schedule="* * * * *", **spec))
        self.kubectl.wait(f"{name} is accepted", lambda: accepted(self.kubectl.json("get", "lj", name)), timeout=40)
        self.first[name] = first_tick(self.kubectl.json("get", "lj", name))

    def hold(self, name: str) -> Json:
        """A Pod that works until it is told; as it runs now."""
        self.kubectl.apply(marked_job(name, own(self.folder, name), HELD), run_of(name, f"{name}-now"))
        self.kubectl.wait(f"{name} runs", lambda: read(self.folder / name, 1), timeout=90)
        return self.pod(name)

    def report(self, name: str) -> Json:
        """A run now that reports its outcome by its sidecar and then exits otherwise; its Pod."""
        self.kubectl.apply(marked_job(name, own(self.folder, name), REPORTS), run_of(name, f"{name}-now"))
        self.kubectl.wait(
            f"{name} has reported",
            lambda: (
                [(r["status"], r["data"]) for r in rows(self.db, self.kubectl.namespace, name)]
                == [("SUCCESS", {"rows": 42})]
            ),
            timeout=90,
        )
        return self.pod(name)

    def pod(self, job: str) -> Json:
        (pod,) = self.kubectl.items("pods", "-l", f"{protocol.LABEL_JOB}={job}")
        return pod

    def end(self, name: str) -> None:
        """Lets it end; its outcome is recorded, and shown."""
        finish(self.folder / name)
        self.kubectl.wait(
            f"{name} succeeds",
            lambda: [r["status"] for r in rows(self.db, self.kubectl.namespace, name)] == ["SUCCESS"],
            timeout=60,
        )
        self.kubectl.wait(
            f"{name}'s run says so", lambda: phase(self.kubectl, f"{name}-now") == "Succeeded", timeout=60
        )

    def stop(self) -> datetime:
        """No more ticks; which one was the last."""
        if (next_minute() - datetime.now(UTC)).total_seconds() < 20:
            until(next_minute() + timedelta(seconds=3))
        self.kubectl("patch", "leasedjobs", *self.first, "--type=merge", "-p", '{"spec":{"suspend":true}}')
        self.kubectl.wait(
            "all are seen to be suspended",
            lambda: all(
                j["status"].get("observedGeneration") == j["metadata"]["generation"]
                for j in self.kubectl.items("leasedjobs")
            ),
            timeout=40,
        )
        last = next_minute() - MINUTE
        assert all(r["first"] > last for r in self.suspended()), "no tick came in between"
        finish(self.folder / "replaces")
        return last

    def suspended(self) -> list[dict[str, Any]]:
        """Ranges of the ledger that are there because the test itself has stopped the schedules."""
        return [
            r
            for job in self.first
            for r in ranges(self.db, f"{self.kubectl.namespace}/{job}")
            if r["reason"] == "Suspended"
        ]


def first_tick(job: Json) -> datetime:
    """The first minute that is later than the object."""
    created = datetime.fromisoformat(job["metadata"]["creationTimestamp"])
    return created.replace(second=0, microsecond=0) + MINUTE


def accepted(job: Json) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def undisturbed(before: Json, now: Json) -> None:
    """The same Pod, and none of its containers has started again."""
    assert now["metadata"]["uid"] == before["metadata"]["uid"]
    for kind in ("containerStatuses", "initContainerStatuses"):
        assert [s["restartCount"] for s in now["status"].get(kind, [])] == [0] * len(now["status"].get(kind, []))
    assert [s["containerID"] for s in now["status"]["containerStatuses"]] == [
        s["containerID"] for s in before["status"]["containerStatuses"]
    ]


def sidecar_image(pod: Json) -> str:
    (image,) = {
        c["image"] for c in pod["spec"]["initContainers"] if c["name"] == protocol.CONTAINER_HOLD
    }  # fmt: skip
    return str(image)


def ranges(db: psycopg.Connection, code: str) -> list[dict[str, Any]]:
    cursor = db.cursor(row_factory=psycopg.rows.dict_row)
    return cursor.execute("SELECT * FROM tick_ledger WHERE code = %s ORDER BY first", (code,)).fetchall()


def account(work: Work, job: str, last: datetime) -> dict[str, int]:
    """Every minute from the first to the last tick is decided, and decided once."""
    first = work.first[job]
    namespace = work.kubectl.namespace
    found = [r for r in rows(work.db, namespace, job) if r["tick"] is not None]
    ticks = Counter(r["tick"] for r in found)
    for entry in ranges(work.db, f"{namespace}/{job}"):
        if entry["reason"] == "Suspended":
            assert entry["first"] > last
            continue
        covered = [entry["first"] + n * MINUTE for n in range(int((entry["last"] - entry["first"]) / MINUTE) + 1)]
        assert entry["count"] == len(covered), entry
        assert entry["kind"] == "skipped", entry
        assert job == "forbids", f"{job} has nothing to skip for: {entry}"
        ticks.update(covered)
    wanted = [first + n * MINUTE for n in range(int((last - first) / MINUTE) + 1)]
    assert ticks == Counter(wanted), f"{job}: lost {set(wanted) - set(ticks)}, doubled {ticks - Counter(wanted)}"
    counted = work.db.execute(
        "SELECT kind, count FROM tick_count WHERE code = %s", (f"{namespace}/{job}",)
    ).fetchall()  # fmt: skip
    by_kind: Counter[str] = Counter()
    for entry in ranges(work.db, f"{namespace}/{job}"):
        by_kind[entry["kind"]] += entry["count"]
    assert dict(counted) == dict(by_kind), "the counts beside the ranges say the same"
    return {"runs": len(found), "skipped": ticks.total() - len(found)}


def recorded(work: Work, job: str) -> None:
    """What the workloads did is what the rows say: each run once, by the attempt and with the token of its row."""
    found = [r for r in rows(work.db, work.kubectl.namespace, job) if r["tick"] is not None]
    seen: dict[str, list[tuple[int, float, int]]] = {}
    tokens: dict[str, list[int]] = {}
    for attempt in (1, 2, 3):
        for mark in read(work.folder / job, attempt):
            if mark["what"] == "start":
                seen.setdefault(mark["key"], []).append((attempt, mark["at"], mark["token"]))
                tokens.setdefault(mark["key"], []).append(mark["token"])
    for row in found:
        begun = seen.pop(row["lock_key"], [])
        attempts = [attempt for attempt, _, _ in begun]
        if job == "replaces" and not begun:
            continue  # replaced before its workload could start
        assert attempts == list(range(1, row["attempt"] + 1)), f"{job} {row['tick']}: {begun}"
        mine = tokens[row["lock_key"]]
        assert mine == sorted(set(mine)), "tokens grow"
        assert mine[-1] == row["fencing_token"]
    assert not seen, f"{job}: runs without a row {seen}"


def all_ended(work: Work) -> bool:
    running = work.db.execute(
        "SELECT count(*) FROM job_scheduler WHERE namespace = %s AND status = 'RUNNING'", (work.kubectl.namespace,)
    ).fetchone()
    return running == (0,)


def exercise(
    site: Site, work: Work, db: psycopg.Connection, second: psycopg.Connection, measured: Measured, settle: bool
) -> None:
    """Up, down and up again; with `settle` also a minute in each state, else as fast as it goes."""
    namespace = work.kubectl.namespace

    def move(what: str, step: Callable[[], None]) -> None:
        minute = before_the_next_minute(12.0)
        began = time.monotonic()
        step()
        measured(f"{site.earlier.name}, {what}: {time.monotonic() - began:.0f} s, the tick of {minute:%H:%M} within")
        site.watch()
        until(minute + timedelta(seconds=3))

    former, present = site.sidecars[False], site.sidecars[True]
    work.begin()
    through = work.hold("through")
    assert sidecar_image(through) == former
    with Heartbeats(second, namespace, "through") as beats:
        if settle:
            until(next_minute() + timedelta(seconds=20))
        move("upgrade", site.upgrade)
        assert applied(db) == [m.version for m in migrations()]
        later = work.hold("later")
        assert sidecar_image(later) == present
        work.add("newer", **NEWER)
        if settle:
            until(next_minute() + timedelta(seconds=20))
        move("rollback", site.rollback)
        assert applied(db) == [m.version for m in migrations()], "migrations aren't undone"
        back = work.hold("back")
        assert sidecar_image(back) == former, "the earlier operator starts runs on the later schema"
        assert sidecar_image(work.report("told")) == former
        spec = work.kubectl.json("get", "lj", "newer")["spec"]
        assert all(name in spec for name in NEWER) == site.knows(*NEWER), "a field that isn't named is dropped"
        undisturbed(later, work.pod("later"))
        work.end("later")  # its outcome is the earlier operator's to record
        if settle:
            until(next_minute() + timedelta(seconds=20))
        if settle:
            move("second upgrade", site.upgrade)
            until(next_minute() + timedelta(seconds=20))
        else:
            site.upgrade()
        for name, before in {"through": through, "back": back}.items():
            undisturbed(before, work.pod(name))
        work.end("back")
    last = work.stop()
    work.end("through")
    work.kubectl.wait("everything has ended", lambda: all_ended(work), timeout=150)
    every = SHORT["lease"]["heartbeatSeconds"]
    measured(f"{site.earlier.name}: at most {beats.worst:.1f} s without a heartbeat, which comes each {every} s")
    assert len(beats.fencing) == 1, "one holder from beginning to end"
    assert beats.worst < SHORT["lease"]["durationSeconds"] / 2
    total: Counter[str] = Counter()
    for job in work.first:
        total.update(account(work, job, last))
        recorded(work, job)
        if job != "replaces":
            ended = {(r["status"], r["attempt"]) for r in rows(db, namespace, job)}
            assert ended == {("SUCCESS", 2 if job == "twice" else 1)}, f"{job}: {ended}"
    reports = rows(db, namespace, "reports")
    assert {json.dumps(r["data"]) for r in reports} == {'{"rows": 42}'}, "each reported by its sidecar, old or new"
    (seed,) = rows(db, namespace, "seed")
    assert (seed["attempt"], seed["status"]) == (1, "SUCCESS")
    assert len(read(work.folder / "seed", 1)) == 2, "what runs once in a lifetime has not run again"
    assert total["skipped"] > 0
    site.watch()
    assert len(site.operators) >= 4, "two of each release, at least"
    measured(f"{site.earlier.name}: {total['runs']} runs and {total['skipped']} skipped ticks, none lost, none doubled")


def applied(db: psycopg.Connection) -> list[int]:
    return [v for (v,) in db.execute("SELECT version FROM schema_migration ORDER BY version").fetchall()]


def test_an_upgrade_and_the_way_back_under_load(
    site_of: Callable[[KeptRelease], Site],
    upgraded: Callable[[], psycopg.Connection],
    open_kubectl: Kubectl,
    marks: Path,
    measured: Measured,
) -> None:
    site = site_of(RELEASES[0])
    site.install()
    db = upgraded()
    assert applied(db) == list(range(1, site.earlier.schema + 1))
    exercise(site, Work(open_kubectl, db, marks, brief=4), db, upgraded(), measured, settle=False)


@pytest.mark.soak
@pytest.mark.parametrize("earlier", RELEASES, ids=lambda r: r.name)
def test_upgrades_with_many_jobs(
    earlier: KeptRelease,
    site_of: Callable[[KeptRelease], Site],
    upgraded: Callable[[], psycopg.Connection],
    open_kubectl: Kubectl,
    marks: Path,
    measured: Measured,
) -> None:
    site = site_of(earlier)
    site.install()
    db = upgraded()
    exercise(site, Work(open_kubectl, db, marks, brief=20), db, upgraded(), measured, settle=True)
