"""One run: brings everything up, lets it work while harm is done, heals, waits until all is decided, and collects."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psycopg

from tests.chaos_cluster import holders, plan, sites, tether
from tests.chaos_cluster.database import DBNAME, OWNER, OWNER_PASSWORD, NotNowError, Replicated
from tests.chaos_cluster.harm import Harm, NobodyError
from tests.chaos_cluster.holders import Holding
from tests.chaos_cluster.manifests import Real, manifest
from tests.chaos_cluster.records import Done, Evidence, Job, Line, read
from tests.chaos_cluster.sites import Logs, Site, at_once
from tests.chaos_cluster.waiting import wait_for
from tests.cluster.layout import Cache
from tests.cluster.onenode import HOST_ADDRESS, HOST_BRIDGE
from tests.cluster.progress import ClusterError, Progress
from tests.e2e.kube import Json

HOLDERS: Final = 160
CODES: Final = 80
PROCESSES: Final = 8
DOORS: Final = 5  # of the database: the clusters', and four of the holders
STUCK_SECONDS: Final = 240.0  # without any step forward, once all is healed: something is stuck
MINUTE: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is run."""

    seed: int
    minutes: float
    folder: Path

    @property
    def longest(self) -> float:
        """Seconds that a workload takes at most: some last over their next tick, and all end soon after the end."""
        return 40.0 if self.minutes < 10 else 100.0


def run(settings: Settings, cache: Cache, progress: Progress, *, keep: bool = False) -> Evidence:
    """Args:
    keep: the clusters are left running at the end.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="leasedjob-chaos-") as name, contextlib.ExitStack() as stack:
            work = Path(name)
            work.chmod(0o755)
            return _Run(settings, work, cache, progress, stack).run()
    finally:
        if not keep:
            sites.tear_down(plan.CLUSTERS, cache, progress)


class _Run:
    def __init__(
        self, settings: Settings, work: Path, cache: Cache, progress: Progress, stack: contextlib.ExitStack
    ) -> None:
        self._settings, self._work, self._cache, self._progress = settings, work, cache, progress
        self._stack = stack
        self._stop = threading.Event()
        self._done: list[Done] = []
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._last = 0.0  # the last tick that is looked at
        self._jobs = plan.jobs(settings.seed, settings.longest)

    def run(self) -> Evidence:
        say, settings = self._progress.say, self._settings
        shutil.rmtree(settings.folder, ignore_errors=True)
        settings.folder.mkdir(parents=True)
        faults = plan.faults(settings.seed, settings.minutes)
        with ThreadPoolExecutor(1) as beside:
            starting = beside.submit(self._start_database)
            try:
                clusters, image, values = sites.bring_up(plan.CLUSTERS, self._cache, self._progress)
            except BaseException:
                self._stop.set()
                raise
            database = starting.result()
        recorder = self._recorder()
        secret = {
            "host": HOST_ADDRESS,
            "port": str(database.doors[0].port),
            "dbname": DBNAME,
            "user": OWNER,
            "password": OWNER_PASSWORD,
        }
        installed = at_once(*(lambda c=cluster: sites.install(c, values, secret, self._work) for cluster in clusters))
        say("operators are ready")
        by_name = {site.name: site for site in installed}
        logs = Logs(installed, settings.folder / "logs")
        logs.start()
        self._stack.callback(logs.stop)
        since = self._create(installed, recorder, image)
        holding = self._hold(database, recorder, since)
        begin = time.time()
        say(f"{len(self._jobs)} LeasedJobs, {holding.holders} simulated holders; the harm begins: {len(faults)} faults")

        def kept(until: float | None) -> Evidence:
            evidence = Evidence(
                jobs=self._asked_for(since, holding),
                until=until or self._last,
                changes=database.changes(),
                ranges=database.ranges(),
                lines=read(self._lines, Line),
                faults=sorted(self._done, key=lambda done: done.number),
                addresses={site.name: site.node.address for site in installed},
                settings={
                    "seed": settings.seed,
                    "minutes": settings.minutes,
                    "what": f"2 clusters with 2 operators each, {len(self._jobs)} LeasedJobs, {holding.holders}"
                    f" simulated holders of {holding.codes} codes",
                    "begin": begin,
                    "jobs": [asdict(job) for job in self._jobs],
                    "plan": [asdict(fault) for fault in faults],
                    "at the end": self._at_end(installed, database),
                },
            )
            evidence.save(settings.folder)
            return evidence

        try:
            self._harm(Harm(by_name, database, lambda: self._processes, self._stop), faults, begin)
            say("all is healed")
            until = self._settle(installed, database, holding)
        except BaseException:  # what was seen by then can be judged, too
            self._last = self._last or time.time()
            with contextlib.suppress(Exception):
                kept(None)
            raise
        say("all is decided and ended" if until else "SOMETHING IS STUCK")
        return kept(until)

    # --- what works --------------------------------------------------------------------------------------------------

    def _start_database(self) -> Replicated:
        """As soon as there is the host's address, which comes with the clusters."""
        bridge = Path(f"/sys/class/net/{HOST_BRIDGE}")
        wait_for(lambda: bridge.exists() or self._stop.is_set(), seconds=900, every=0.2)
        if not bridge.exists():
            raise ClusterError("the clusters brought no address of the host's")
        database = self._stack.enter_context(Replicated(self._work / "postgresql", HOST_ADDRESS, DOORS))
        self._progress.say("PostgreSQL: a primary and its synchronous standby")
        return database

    @property
    def _lines(self) -> Path:
        return self._work / "lines.jsonl"

    def _recorder(self) -> tuple[str, int]:
        process = tether.start(
            "tests.chaos_cluster.recorder", HOST_ADDRESS, "0", str(self._lines),
            log=self._settings.folder / "recorder.log",
        )  # fmt: skip
        self._stack.callback(tether.end, process)
        assert process.stdout is not None
        return HOST_ADDRESS, int(process.stdout.readline())

    def _create(self, installed: Sequence[Site], recorder: tuple[str, int], image: str) -> float:
        """All LeasedJobs in each cluster, within one minute, so that it's clear which tick is the first; an instant
        between."""
        while time.time() % MINUTE > 30:
            time.sleep(0.2)
        since = time.time()
        objects = [manifest(job, recorder=recorder, image=image) for job in self._jobs]
        at_once(*(lambda site=site: site.kubectl.apply(*objects) for site in installed))
        assert time.time() // MINUTE == since // MINUTE, "the machine was too slow to create them within half a minute"
        accepted = wait_for(lambda: not any(_waiting(site) for site in installed), seconds=120)
        assert accepted, f"not accepted: {[_waiting(site) for site in installed]}"
        return since

    def _hold(self, database: Replicated, recorder: tuple[str, int], since: float) -> Holding:
        holding = Holding(
            dsns=[database.owner_conninfo(door) for door in range(1, DOORS)],
            recorder=recorder,
            first=(int(since // MINUTE) + 1) * MINUTE,
            processes=PROCESSES,
            holders=HOLDERS,
            codes=CODES,
            lease=15.0,
            heartbeat=3.0,
            work=25.0,
            failing=0.1,
            seed=self._settings.seed,
        )
        holding.save(self._work)
        self._processes = [self._holder(number) for number in range(PROCESSES)]
        ended = threading.Event()

        def watch() -> None:
            """Another process in the place of one that was killed."""
            while not ended.wait(0.5):
                for number, process in enumerate(self._processes):
                    if process.poll() not in (None, 0) and not ended.is_set():
                        tether.end(process)
                        self._processes[number] = self._holder(number)

        watcher = threading.Thread(target=watch, name="holders", daemon=True)
        watcher.start()

        def end() -> None:
            ended.set()
            watcher.join()
            for process in self._processes:
                tether.end(process)

        self._stack.callback(end)
        return holding

    def _holder(self, number: int) -> subprocess.Popen[bytes]:
        log = self._settings.folder / "holders.log"
        return tether.start("tests.chaos_cluster.holders", str(self._work), str(number), log=log)

    def _asked_for(self, since: float, holding: Holding) -> list[Job]:
        def real(job: Real) -> Job:
            timing = job.timing
            return Job(
                code=job.code, policy=job.policy, every=job.every, offset=job.offset, since=since, lease=timing.lease,
                budget=min(20.0, timing.lease / 10) + timing.grace + 5, simulated=False, deadline=job.deadline,
                missed=job.missed, jitter=job.jitter,
            )  # fmt: skip

        simulated = [
            Job(
                code=code,
                policy="",
                every=1,
                offset=0,
                since=since,
                lease=holding.lease,
                budget=holders.STOPPING,
                simulated=True,
            )
            for code in sorted({holding.code(number) for number in range(holding.holders)})
        ]
        return [*map(real, self._jobs), *simulated]

    # --- harm --------------------------------------------------------------------------------------------------------

    def _harm(self, harm: Harm, faults: Sequence[plan.Fault], begin: float) -> None:
        """Each fault in a thread of its own, at its time; returns when all are healed, at the end of the minutes."""
        threads = []
        try:
            for fault in faults:
                time.sleep(max(0.0, begin + fault.at - time.time()))
                thread = threading.Thread(target=self._do, args=(harm, fault), name=f"fault-{fault.number}")
                thread.start()
                threads.append(thread)
            time.sleep(max(0.0, begin + self._settings.minutes * MINUTE - time.time()))
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _do(self, harm: Harm, fault: plan.Fault) -> None:
        begin, target, note = time.time(), "", ""
        try:
            context = harm.does(fault)
            begin = time.time()
            with context as target:
                self._progress.say(f"  {fault.number:3} {fault.kind} {fault.cluster} {target} {fault.seconds:.0f} s")
                self._stop.wait(fault.seconds)
        except (NobodyError, NotNowError) as error:
            note = str(error)
        except Exception as error:  # whatever could not be done is told, and no verdict
            note = f"{type(error).__name__}: {error}"[:500]
        if note:
            self._progress.say(f"  {fault.number:3} {fault.kind} {fault.cluster} NOT DONE: {note}")
        cluster, _, name = target.split(" ")[0].rpartition("/")
        done = Done(
            number=fault.number, kind=fault.kind, cluster=cluster or fault.cluster, target=name, begin=begin,
            end=time.time(), note=note,
        )  # fmt: skip
        with self._lock:
            self._done.append(done)
            with (self._settings.folder / "faults.jsonl").open("a") as file:
                file.write(json.dumps(asdict(done)) + "\n")

    # --- the end -----------------------------------------------------------------------------------------------------

    def _settle(self, installed: Sequence[Site], database: Replicated, holding: Holding) -> float | None:
        """Until every tick up to now is decided and nothing is open; the last of those ticks, or None if nothing went
        forward any more before that. However slow the machine is, it isn't hurried."""
        for site in installed:  # one that waits longer and longer before its next start is started anew
            with contextlib.suppress(OSError):
                for pod in site.operators():
                    if sites.backing_off(pod):
                        site.delete(pod)
        self._last = float(time.time() // MINUTE * MINUTE)
        (self._work / "last").write_text(str(self._last))
        codes = {job.code: job for job in self._jobs}

        seen, since = list[Any](), time.monotonic()

        def undecided() -> list[tuple[str, float]]:
            marks = database.watermarks()
            return [(c, marks.get(c, 0.0)) for c, job in codes.items() if marks.get(c, 0.0) < self._latest_tick(job)]

        def forward() -> bool:
            """Whether the last step is no longer ago, of those ticks alone: others go on coming."""
            nonlocal seen, since
            last = f"{datetime.fromtimestamp(self._last, UTC):%Y-%m-%dT%H:%M:%SZ}"
            with contextlib.suppress(psycopg.Error):
                runs = [(run["code"], run["run_key"], run["status"], run["attempt"]) for run in database.open_runs()]
                if (now := [undecided(), [run for run in runs if run[1] <= last]]) != seen:
                    seen, since = now, time.monotonic()
            return time.monotonic() - since < STUCK_SECONDS

        def within(probe: Callable[[], bool]) -> bool:
            while not wait_for(probe, seconds=5):
                if not forward():
                    return False
            return True

        complete = within(lambda: not undecided())
        for site in installed:
            within(site.suspend)
        complete &= within(lambda: not database.open_runs())
        complete &= within(lambda: all(process.poll() == 0 for process in self._processes))
        # Whoever is still there and should not be is heard of.
        wait_for(lambda: not any(site.pods() for site in installed), seconds=30)
        return self._last if complete else None

    def _latest_tick(self, job: Real) -> int:
        minutes = int(self._last // MINUTE)
        return (minutes - (minutes - job.offset) % job.every) * MINUTE

    def _at_end(self, installed: Sequence[Site], database: Replicated) -> dict[str, Any]:
        return {
            "open runs": [{k: str(v) for k, v in row.items()} for row in database.open_runs()],
            "pods": {
                site.name: site.kubectl.run("get", "pods", "-A", "-o", "wide").stdout.splitlines() for site in installed
            },
        }


def _waiting(site: Site) -> list[str]:
    """LeasedJobs that aren't accepted, with what is said of them."""

    def conditions(job: Json) -> list[Json]:
        found: list[Json] = (job.get("status") or {}).get("conditions") or []
        return found

    return [
        f"{job['metadata']['name']}: {[c.get('message') for c in conditions(job)]}"
        for job in site.jobs()
        if not any(c["type"] == "Ready" and c["status"] == "True" for c in conditions(job))
    ]
