"""Where the page's facts come from: the engine's memory, in slices, and a few small queries.

Nothing is done while nobody looks. What somebody looks at is at most some seconds old, however many look, and one
thread does the work that takes more than a moment, so that a due tick never waits for a page.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Final, Generic, TypeVar

from leasedjob.controller.cache import Entry
from leasedjob.controller.engine import DATABASE_FAULTS, Engine
from leasedjob.controller.gauges import Gauges
from leasedjob.controller.loops import Health
from leasedjob.controller.page.model import PAGE, About, Job, Leases, Seen, Snapshot, Source, job_of, snapshot_of
from leasedjob.controller.page.query import Window
from leasedjob.lease.rows import Run

log = logging.getLogger(__name__)
T = TypeVar("T")
SLICE: Final = 50  # jobs looked at before others may go on
SNAPSHOT_SECONDS: Final = 2.0  # for which one serves everybody
DATABASE_SECONDS: Final = 5.0  # the same of what the database said
ASK_SECONDS: Final = 10.0  # for which the database is waited for
LOOK_SECONDS: Final = 120.0  # that looking at all jobs may take, on a machine that has other things to do
OLD_AFTER: Final = 30.0  # what is older than that was not brought up to date in time
FIRST_SECONDS: Final = 15.0  # for which a page waits that has nothing to show yet
DATABASE_PATIENCE: Final = 3.0  # the same for what only the database knows
LEASES: Final = 500
RUNS: Final = 1000
AUDIT: Final = 20
ABOUTS: Final = 100  # jobs of which the database's word is kept
SILENT_AFTER: Final = 15.0  # the database is asked every second


class Kept(Generic[T]):
    """An answer that is kept for a while and asked for once at a time. While it can't be had the last one stays.

    Args:
        seconds: for which it is kept.
        limit: seconds that asking may take.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]], seconds: float, limit: float) -> None:
        self._ask = ask
        self._seconds = seconds
        self._limit = limit
        self._task: asyncio.Task[None] | None = None
        self._tried = -seconds
        self.value: T | None = None
        self.at: float | None = None  # by time.monotonic()
        self.fault = ""

    async def get(self, patience: float = FIRST_SECONDS) -> T | None:
        """The answer; one that is too old is asked for anew, and waited for only where there is none.

        Args:
            patience: seconds that are waited for the first one.
        """
        now = time.monotonic()
        if self._task is None and now - self._tried >= self._seconds:
            self._tried = now
            self._task = asyncio.create_task(self._renew())
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=patience if self.at is None else 0.5)
        return self.value

    async def _renew(self) -> None:
        try:
            async with asyncio.timeout(self._limit):
                self.value = await self._ask()
            self.at, self.fault = time.monotonic(), ""
        except (*DATABASE_FAULTS, TimeoutError) as e:
            self.fault = str(e) or "no answer in time"
        except Exception:  # a fault of the page's own is nobody's run
            log.exception("the status page can't be brought up to date")
            self.fault = "a fault of the page, which is in the operator's log"
        finally:
            self._task = None

    async def close(self) -> None:
        """Gives up what is being asked."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


class Observer:
    """All that the page reads.

    Args:
        worker: where what follows is worked out.
    """

    def __init__(self, engine: Engine, health: Health, gauges: Gauges, worker: Executor) -> None:
        self._engine = engine
        self._health = health
        self._gauges = gauges
        self._worker = worker
        self._jobs: dict[str, Job] = {}  # by uid
        self._snapshot = Kept(self._look, SNAPSHOT_SECONDS, LOOK_SECONDS)
        self._leases = Kept(self._ask_leases, DATABASE_SECONDS, ASK_SECONDS)
        self._runs = {window: Kept(self._runs_of(window), DATABASE_SECONDS, ASK_SECONDS) for window in Window}
        self._abouts: OrderedDict[str, Kept[About]] = OrderedDict()

    async def close(self) -> None:
        """Gives up what is being asked."""
        await self._snapshot.close()
        await self._leases.close()
        for runs in self._runs.values():
            await runs.close()
        for about in self._abouts.values():
            await about.close()

    # --- memory ------------------------------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot | None:
        """All jobs; None where they can't be had in time."""
        return await self._snapshot.get()

    async def _look(self) -> Snapshot:
        engine = self._engine
        seen: list[Seen] = []
        for number, entry in enumerate(list(engine.cache.jobs.values()), start=1):
            seen.append(self._seen(entry))
            if number % SLICE == 0:
                await asyncio.sleep(0)
        now, taken, fresh = engine.clock.now(), time.monotonic(), engine.fresh
        ready = self._health.ready() or ""
        waits = "" if ready == self._health.database else ready
        cluster, identity = engine.settings.cluster, engine.settings.identity
        before = self._jobs

        def work() -> tuple[dict[str, Job], Snapshot]:
            jobs = {s.uid: j if (j := before.get(s.uid)) and j.seen is s else job_of(s, cluster) for s in seen}
            found = snapshot_of(
                jobs.values(), cluster=cluster, identity=identity, now=now, taken=taken, fresh=fresh, waits=waits
            )
            return jobs, found

        self._jobs, snapshot = await asyncio.get_running_loop().run_in_executor(self._worker, work)
        return snapshot

    def _seen(self, entry: Entry) -> Seen:
        """What is known of a job; the very same value as before if nothing has changed."""
        seen = Seen(
            namespace=entry.namespace,
            name=entry.name,
            uid=entry.uid,
            created_at=entry.created_at,
            generation=entry.generation,
            code=entry.code,
            body=entry.body,
            policy=entry.policy,
            problem=entry.problem,
            warning=entry.warning,
            state=entry.state,
            watermark=entry.watermark,
            spec_differs=entry.spec_differs,
            loaded=entry.rows_loaded,
            rows=tuple(entry.rows.values()),
            pods=self._engine.cache.pods_for(entry.key),
            times=self._gauges.states.get(entry.key),
        )
        before = self._jobs.get(entry.uid)
        return before.seen if before is not None and _same(before.seen, seen) else seen

    # --- the database ------------------------------------------------------------------------------------------------

    async def leases(self) -> Leases | None:
        """What is held, in all clusters; None where the database has not said."""
        return await self._leases.get(DATABASE_PATIENCE)

    async def _ask_leases(self) -> Leases:
        store, cluster = self._engine.store, self._engine.settings.cluster
        held, total = await store.held_leases(cluster, limit=LEASES)
        return Leases(tuple(held), total, tuple(await store.known_clusters()))

    async def runs(self, window: Window) -> tuple[list[Run], bool] | None:
        """Runs of all clusters that changed in the window, and those that are held; whether there are more."""
        return await self._runs[window].get(DATABASE_PATIENCE)

    def _runs_of(self, window: Window) -> Callable[[], Awaitable[tuple[list[Run], bool]]]:
        async def ask() -> tuple[list[Run], bool]:
            store, cluster = self._engine.store, self._engine.settings.cluster
            changed = await store.runs_since(cluster, self._engine.clock.now() - window.length, limit=RUNS)
            held, _ = await store.held_leases(cluster, limit=LEASES)
            known = {run.id for run in changed}
            return changed + [run for run in held if run.id not in known], len(changed) == RUNS

        return ask

    async def about(self, code: str) -> About | None:
        """What the database says of one job."""
        kept = self._abouts.pop(code, None)
        if kept is None:

            async def ask() -> About:
                store = self._engine.store
                return About(tuple(await store.registered_by(code)), tuple(await store.audit(code, limit=AUDIT)))

            kept = Kept(ask, DATABASE_SECONDS, ASK_SECONDS)
        self._abouts[code] = kept
        if len(self._abouts) > ABOUTS:
            _, oldest = self._abouts.popitem(last=False)
            await oldest.close()
        return await kept.get(DATABASE_PATIENCE)

    # --- how fresh it is ---------------------------------------------------------------------------------------------

    def sources(self) -> tuple[Source, ...]:
        """When the database and the API server answered last."""
        engine, health, now = self._engine, self._health, time.monotonic()
        database = None if health.database_at is None else now - health.database_at
        asked = self._leases.fault or max(runs.fault for runs in self._runs.values())
        fault = health.database or health.schema or asked
        kube = None if engine.kube.answered_at is None else now - engine.kube.answered_at
        silence = engine.kube.silence
        if not silence and health.staleness() > SILENT_AFTER:
            silence = f"the watch of {', '.join(sorted(health.silent_since))} is silent"
        patience = 2 * engine.settings.compare_seconds + 30
        taken = None if self._snapshot.at is None else now - self._snapshot.at
        late = taken is None or taken > OLD_AFTER
        looked = (Source(PAGE, taken, self._snapshot.fault, True),) if late or self._snapshot.fault else ()
        return (
            *looked,
            Source("The database", database, fault, bool(fault) or database is None or database > SILENT_AFTER),
            Source("The API server", kube, silence, bool(silence) or kube is None or kube > patience),
        )


def _same(a: Seen, b: Seen) -> bool:
    """Whether nothing has changed: bodies are compared by identity, for they are large and always replaced."""
    return (
        a.body is b.body
        and a.rows == b.rows
        and a.pods == b.pods
        and a.state is b.state
        and a.policy is b.policy
        and a.times == b.times
        and a.watermark == b.watermark
        and a.problem == b.problem
        and (a.code, a.generation, a.warning, a.spec_differs, a.loaded)
        == (b.code, b.generation, b.warning, b.spec_differs, b.loaded)
    )
