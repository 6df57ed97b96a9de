"""What runs beside the reconciles: reading changed rows, renewing claims, comparing the watch with lists."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from leasedjob.controller.cache import Entry
from leasedjob.controller.engine import DATABASE_FAULTS, Engine
from leasedjob.controller.kube import CRD_BASE, KubeError
from leasedjob.controller.pods import cluster_label
from leasedjob.lease.rows import CLAIM_LEASE_MS, JobSchedulerStatus, Run
from leasedjob.protocol import LABEL_CLUSTER

log = logging.getLogger(__name__)
POLL_SECONDS: Final = 1.0
FULL_POLL_SECONDS: Final = 30.0
OVERLAP: Final = timedelta(seconds=10)  # transactions commit in another order than they read the clock
RENEW_SECONDS: Final = 15.0
WATCH_BEGINS_SECONDS: Final = 4.0
STALE_AFTER: Final = 180.0  # seconds for which lists may show what the watch does not, before the process is unhealthy
STUCK_AFTER: Final = 10.0  # the same, before the watch begins anew


async def forever(name: str, seconds: float, step: Callable[[], Awaitable[None]]) -> None:
    """Runs `step` every `seconds`. A step that fails is logged once per kind and tried again, slower: a loop never ends
    while the process lives."""
    trouble = ""
    delay = seconds
    while True:
        try:
            async with asyncio.timeout(120):
                await step()
            if trouble:
                log.info("%s: works again", name)
            trouble, delay = "", seconds
        except (KubeError, *DATABASE_FAULTS, TimeoutError) as e:
            if str(e) != trouble:
                log.warning("%s: %s", name, e or type(e).__name__)
            trouble, delay = str(e), min(10.0, max(delay, 0.5) * 1.5)
        except Exception:
            log.exception("%s failed", name)
            delay = 10.0
        await asyncio.sleep(delay)


class Poller:
    """Keeps the rows in memory: what sidecars, other replicas and other clusters changed."""

    def __init__(self, engine: Engine, health: Health) -> None:
        self._engine = engine
        self._health = health
        self._since: datetime | None = None
        self._full_at = 0.0

    async def step(self) -> None:
        engine = self._engine
        cluster = engine.settings.cluster
        try:
            # Asked for itself: a quiet cluster has no rows to read it from, and its ticks are to be asked for in time.
            asked = datetime.now(UTC)
            now = await engine.store.database_now()
            engine.clock.observe(asked, datetime.now(UTC), now)
            if self._since is None or time.monotonic() >= self._full_at:
                rows = await engine.store.active_rows(cluster)
                self._full_at = time.monotonic() + FULL_POLL_SECONDS
                complete = True
                self._since = self._since or engine.clock.now()
            else:
                rows = await engine.store.changed_since(cluster, self._since - OVERLAP)
                complete = False
        except DATABASE_FAULTS as e:
            self._health.database = str(e)
            engine.metrics.database_up.set(0)
            engine.metrics.database_errors.inc()
            raise
        if self._health.database:
            engine.hurry()  # what waits for its next try need not wait any longer
        self._health.database = ""
        engine.metrics.database_up.set(1)
        if rows and not complete:
            self._since = max(self._since, max(r.changed_at for r in rows))
        self._take(rows, complete)

    def _take(self, rows: list[Run], complete: bool) -> None:
        engine = self._engine
        by_code: defaultdict[str, list[Run]] = defaultdict(list)
        for run in rows:
            by_code[run.identity.code].append(run)
        active = 0
        touched = engine.cache.jobs.values() if complete else [e for c in by_code for e in engine.cache.with_code(c)]
        for entry in touched:
            if not entry.rows_loaded:
                continue
            mine = by_code.get(entry.code, [])
            news = [run for run in mine if engine.row_seen(entry, run)]
            if complete:
                active += sum(r.held_here for r in mine)
                missing = {r.id for r in entry.rows.values() if not r.terminal} - {r.id for r in mine}
                if missing:
                    news += [entry.rows[i] for i in missing]
                    for i in missing:  # it ended, or was pruned: read it again at the next look
                        entry.handled.pop(f"row {i}", None)
                        del entry.rows[i]
                    entry.rows_loaded = False
            if news:
                engine.mark(entry.key)
        if complete:
            engine.metrics.active_runs.set(active)
            engine.metrics.jobs.set(len(engine.cache.jobs))


class Renewer:
    """Extends the claims of this cluster whose Pods are still pending; any replica does it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def step(self) -> None:
        engine = self._engine
        now = engine.clock.now()
        pending: list[tuple[Entry, Run]] = []
        for entry in engine.cache.jobs.values():
            if entry.policy is None:
                continue
            deadline = timedelta(seconds=entry.policy.pending_deadline)
            pending += [
                (entry, r)
                for r in entry.rows.values()
                if r.status is JobSchedulerStatus.RUNNING
                and r.cluster == engine.settings.cluster
                and r.pod_uid is None
                and now < r.started_at + deadline
            ]
        if not pending:
            return
        renewed = await engine.store.renew_claims(engine.settings.cluster, {r.id for _, r in pending})
        until = now + timedelta(milliseconds=CLAIM_LEASE_MS)
        for entry, run in pending:
            if run.id in renewed and entry.rows.get(run.id) is run:
                entry.rows[run.id] = replace(run, expires_at=until)


@dataclass
class Health:
    """What the probes answer: `live` says that a restart would help, `ready` that this replica starts runs."""

    listed: bool = False
    database: str = "the database has not been asked yet"
    seen: Counter[str] = field(default_factory=Counter)  # watch events by kind of object
    silent_since: dict[str, float] = field(default_factory=dict)
    stuck: asyncio.Event = field(default_factory=asyncio.Event)  # the watch should begin anew

    def event(self, kind: str) -> None:
        """The watch delivered something."""
        self.seen[kind] += 1
        self.silent_since.pop(kind, None)

    def staleness(self) -> float:
        """Seconds for which a watch has been silent although lists show changes; 0 if none is."""
        return max((time.monotonic() - since for since in self.silent_since.values()), default=0.0)

    def live(self) -> str | None:
        """None if healthy, else why not. A database or an API server that can't be reached is no reason to restart."""
        if self.staleness() > STALE_AFTER:
            return f"silent watch: {', '.join(sorted(self.silent_since))}, for {self.staleness():.0f} s"
        return None

    def ready(self) -> str | None:
        if not self.listed:
            return "LeasedJobs and Pods have not been listed yet"
        return self.database or None


class Comparer:
    """Compares what the watch delivered with a list, so that a silent watch is noticed, healed, and if it stays silent
    makes the process unhealthy. The first comparison is the initial list."""

    def __init__(self, engine: Engine, health: Health) -> None:
        self._engine = engine
        self._health = health
        self._before: dict[str, int] = {}

    def _scopes(self) -> list[str | None]:
        return list(self._engine.settings.namespaces) or [None]

    async def _list(self, kind: str, base: str, plural: str, selector: str) -> None:
        kube, cache = self._engine.kube, self._engine.cache
        bodies: list[dict[str, Any]] = []
        oldest: int | None = None
        for namespace in self._scopes():
            page_version, found = await kube.list(base, plural, namespace, label_selector=selector)
            bodies += found
            oldest = page_version if oldest is None else min(oldest, page_version)
        differences = cache.compare(kind, bodies, oldest or 0)
        health = self._health
        if not bodies:
            health.silent_since.pop(kind, None)  # there is nothing that a watch that began anew could deliver
        if differences and health.listed and health.seen[kind] == self._before.get(kind):
            # What changes in this very moment differs rightly, and its event, a moment later, ends the suspicion.
            log.warning("a list of %s showed %d changes that the watch has not", plural, differences)
            health.silent_since.setdefault(kind, time.monotonic())
        self._before[kind] = health.seen[kind]

    async def step(self) -> None:
        first = not self._health.listed
        await self._compare()
        if first:
            # The watch lists for itself a moment later; what is deleted in between shows in neither.
            await asyncio.sleep(WATCH_BEGINS_SECONDS)
            await self._compare()

    async def _compare(self) -> None:
        selector = f"{LABEL_CLUSTER}={cluster_label(self._engine.settings.cluster)}"
        await self._list("jobs", CRD_BASE, "leasedjobs", "")
        await self._list("runs", CRD_BASE, "leasedjobruns", "")
        await self._list("pods", "/api/v1", "pods", selector)
        if not self._health.listed:
            self._health.listed = True
            self._engine.begin()
        else:
            await self._engine.forget_absent()
        if self._health.staleness() > STUCK_AFTER:
            self._health.stuck.set()
        self._engine.metrics.watch_lag_seconds.set(self._health.staleness())
