"""What runs beside the reconciles: reading changed rows, renewing claims, comparing the watch with lists."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from leasedjob.controller.cache import Entry
from leasedjob.controller.decide import run_name
from leasedjob.controller.definitions import Definitions, OldDefinitionsError
from leasedjob.controller.engine import DATABASE_FAULTS, SCHEMA_FAULTS, Engine
from leasedjob.controller.kube import CRD_BASE, KubeError
from leasedjob.controller.pings import Ping, Pinger, Signal, signal_of
from leasedjob.controller.pods import cluster_label
from leasedjob.controller.tracing import Tracer
from leasedjob.lease.rows import CLAIM_LEASE_MS, JobSchedulerStatus, Run, Transition
from leasedjob.protocol import LABEL_CLUSTER

log = logging.getLogger(__name__)
POLL_SECONDS: Final = 1.0
FULL_POLL_SECONDS: Final = 30.0
OVERLAP: Final = timedelta(seconds=10)  # transactions commit in another order than they read the clock
RENEW_SECONDS: Final = 15.0
EXPORT_SECONDS: Final = 10.0
TELL_SECONDS: Final = 2.0
TAKEN: Final = 500  # transitions at a time
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
        except (KubeError, OldDefinitionsError, *DATABASE_FAULTS, TimeoutError) as e:
            said = str(e) or type(e).__name__
            if said != trouble:
                log.warning("%s: %s", name, said)
            delay = min(10.0, delay * 1.5) if trouble else 0.5
            trouble = said
        except Exception:
            log.exception("%s failed", name)
            trouble, delay = "a bug", 10.0
        await asyncio.sleep(delay)


class Poller:
    """Keeps the rows in memory: what sidecars, other replicas and other clusters changed."""

    def __init__(self, engine: Engine, health: Health) -> None:
        self._engine = engine
        self._health = health
        self._since: datetime | None = None
        self._news_since: datetime | None = None
        self._told: dict[str, datetime] = {}  # codes whose ledger or suspension changed, and when
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
                await engine.store.check_schema()
                self._health.schema = ""
                rows = await engine.store.active_rows(cluster)
                self._full_at = time.monotonic() + FULL_POLL_SECONDS
                complete = True
                self._since = self._since or engine.clock.now()
            else:
                rows = await engine.store.changed_since(cluster, self._since - OVERLAP)
                complete = False
            news = await engine.store.codes_with_news(cluster, (self._news_since or now) - OVERLAP)
            self._news_since = now
        except DATABASE_FAULTS as e:
            if isinstance(e, SCHEMA_FAULTS):
                self._full_at = 0.0  # ask for it again, and not only when it is due
                self._health.schema = str(e)
                self._health.admit(engine)
            self._health.database = str(e)
            engine.metrics.database_up.set(0)
            raise
        if self._health.database:
            engine.hurry()  # what waits for its next try need not wait any longer
        self._health.database, self._health.database_at = "", time.monotonic()
        engine.metrics.database_up.set(1)
        self._health.admit(engine)
        if rows and not complete:
            self._since = max(self._since, max(r.changed_at for r in rows))
        self._take(rows, complete)
        self._take_news(news)

    def _take_news(self, news: Mapping[str, datetime]) -> None:
        """Codes whose ledger or suspension somebody has changed: what is known of them is read again."""
        engine = self._engine
        for code, at in news.items():
            if self._told.get(code) != at:
                for entry in engine.cache.with_code(code):
                    entry.state_stale = True
                    engine.mark(entry.key)
        self._told = dict(news)

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
                # They have ended, or were pruned; it is read again at the next look.
                entry.doubtful |= missing
                news += [entry.rows[i] for i in missing]
            if news:
                engine.mark(entry.key)
        if complete:
            engine.metrics.active_runs.set(active)


class ShutdownExporter:
    """Counts how workloads of this cluster have stopped; each report is taken by one replica."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def step(self) -> None:
        engine = self._engine
        for ends in await engine.store.take_shutdown_reports(engine.settings.cluster):
            engine.metrics.stopped(ends)


class Teller:
    """Tells of what has become of this cluster's runs, in metrics and to monitors; each transition is taken by one
    replica."""

    def __init__(self, engine: Engine, pinger: Pinger, tracer: Tracer) -> None:
        self._engine = engine
        self._pinger = pinger
        self._tracer = tracer

    async def step(self) -> None:
        engine = self._engine
        if not engine.fresh:
            return  # which monitor is to be told stands in objects that are not known yet
        while taken := await engine.store.take_transitions(engine.settings.cluster, limit=TAKEN):
            for transition in taken:
                engine.metrics.became(transition)
                self._trace(transition)
                self._ping(transition)
            if len(taken) < TAKEN:
                break

    def _trace(self, transition: Transition) -> None:
        entry = self._engine.cache.jobs.get((transition.namespace, transition.job_name))
        self._tracer.tell(transition, entry.rows.get(transition.run_id) if entry else None)

    def _ping(self, transition: Transition) -> None:
        entry = self._engine.cache.jobs.get((transition.namespace, transition.job_name))
        signal = signal_of(transition)
        if entry is None or entry.uid != transition.job_uid or entry.policy is None or signal is None:
            return
        if entry.policy.monitoring.pings:
            word = transition.reason.partition(":")[0] if signal is Signal.FAIL else ""
            text = f"{run_name(transition.run_key)}, attempt {transition.attempt}" + (f": {word}" if word else "")
            self._pinger.tell(Ping(entry.body, entry.policy.monitoring, signal, str(transition.run_id), text))


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
    unread: str = "LeasedJobs and Pods have not been listed yet"  # why not all that is to be watched is
    definitions: str = "the served definitions have not been read yet"
    schema: str = "the database's schema has not been read yet"
    cluster: str = "the database has not been asked whether the cluster's name is its own"
    database: str = "the database has not been asked yet"
    database_at: float | None = None  # when it last answered, by time.monotonic()
    seen: Counter[str] = field(default_factory=Counter)  # watch events by kind of object
    silent_since: dict[str, float] = field(default_factory=dict)
    scopes: frozenset[str | None] = frozenset()  # what may be watched: namespaces, or None for all of them
    renew: asyncio.Event = field(default_factory=asyncio.Event)  # the watch should begin, or begin anew

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
        return self.unread or self.definitions or self.database or self.schema or self.cluster or None

    def admit(self, engine: Engine) -> None:
        """Lets the engine work while everything that its work rests on is known to be as this version needs it. A
        database or an API server that is away for a while is no reason to stop: each object waits for itself."""
        if self.listed and not self.definitions and not self.schema and not self.cluster:
            engine.begin()
        else:
            engine.hold()


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of object that is watched."""

    name: str  # as the cache calls it
    base: str
    plural: str
    selector: str = ""


_Lists = dict[str, tuple[int, list[Mapping[str, Any]]]]  # by kind: resource version and objects


class Comparer:
    """Compares what the watch delivered with a list, so that a silent watch is noticed, healed, and if it stays silent
    makes the process unhealthy. The first comparison is the initial list, and says where the watch may begin: one that
    is refused at its start would be given up for ever."""

    def __init__(self, engine: Engine, health: Health) -> None:
        self._engine = engine
        self._health = health
        self._definitions = Definitions(engine.kube)
        self._before: dict[str, int] = {}
        self._refused = ""
        selector = f"{LABEL_CLUSTER}={cluster_label(engine.settings.cluster)}"
        self._kinds = (
            _Kind("jobs", CRD_BASE, "leasedjobs"),
            _Kind("runs", CRD_BASE, "leasedjobruns"),
            _Kind("pods", "/api/v1", "pods", selector),
        )

    async def step(self) -> None:
        health = self._health
        first = not health.listed
        try:
            await self._compare()
        except KubeError as e:
            if not health.listed:
                health.unread = f"LeasedJobs and Pods can't be listed and watched: {e}"
            raise
        try:
            await self._definitions.check()
            health.definitions = ""
        except OldDefinitionsError as e:
            health.definitions = str(e)
            raise
        finally:
            health.admit(self._engine)
        if first:
            # The watch lists for itself a moment later; what is deleted in between shows in neither.
            await asyncio.sleep(WATCH_BEGINS_SECONDS)
            await self._compare()

    async def _compare(self) -> None:
        health, engine = self._health, self._engine
        found, refused = await self._read_all()
        self._tell(refused)
        scopes = frozenset(found)
        more = bool(scopes - health.scopes)
        health.scopes = scopes
        if not found:
            raise next(iter(refused.values()))
        for kind in self._kinds:
            self._take(kind, [lists[kind.name] for lists in found.values()], scopes, watched=not more)
        if health.listed and not health.cluster:  # else what is registered under the name may be somebody else's
            await engine.forget_absent(_namespaces(scopes))
        health.listed = True
        if more or health.staleness() > STUCK_AFTER:
            health.renew.set()
        engine.metrics.watch_lag_seconds.set(health.staleness())

    async def _read_all(self) -> tuple[dict[str | None, _Lists], dict[str | None, KubeError]]:
        """What each scope has; or why it can't be read, if this isn't a passing fault. A namespace that went, and the
        right with it, must not be the end of the others."""
        found: dict[str | None, _Lists] = {}
        refused: dict[str | None, KubeError] = {}
        for scope in self._engine.settings.namespaces or (None,):
            try:
                found[scope] = await self._read(scope)
            except KubeError as e:
                if e.status not in (401, 403, 404):
                    raise
                refused[scope] = e
        return found, refused

    async def _read(self, scope: str | None) -> _Lists:
        kube, brief = self._engine.kube, self._engine.cache.brief
        lists = {
            k.name: await kube.list(k.base, k.plural, scope, label_selector=k.selector, keep=brief)
            for k in self._kinds
        }  # fmt: skip
        if scope not in self._health.scopes:
            for k in self._kinds:
                await kube.try_watch(k.base, k.plural, scope, label_selector=k.selector, since=lists[k.name][0])
        return lists

    def _tell(self, refused: dict[str | None, KubeError]) -> None:
        said = "; ".join(f"{f'namespace {scope}: ' if scope else ''}{why}" for scope, why in refused.items())
        if said and said != self._refused and len(refused) < len(self._engine.settings.namespaces):
            log.warning("not everything can be listed and watched: %s", said)
        self._refused = said
        self._health.unread = f"LeasedJobs and Pods can't be listed and watched: {said}" if said else ""

    def _take(
        self,
        kind: _Kind,
        lists: list[tuple[int, list[Mapping[str, Any]]]],
        scopes: frozenset[str | None],
        *,
        watched: bool,
    ) -> None:
        """Hands one kind's lists to the cache. `watched`: all of them should have been delivered by the watch."""
        health = self._health
        bodies = [body for _, listed in lists for body in listed]
        oldest = min(at for at, _ in lists)
        differences = self._engine.cache.compare(kind.name, bodies, oldest, _namespaces(scopes))
        if not bodies:
            health.silent_since.pop(kind.name, None)  # there is nothing that a watch that began anew could deliver
        if differences and watched and health.seen[kind.name] == self._before.get(kind.name):
            # What changes in this very moment differs rightly, and its event, a moment later, ends the suspicion.
            log.warning("a list of %s showed %d changes that the watch has not", kind.plural, differences)
            health.silent_since.setdefault(kind.name, time.monotonic())
        self._before[kind.name] = health.seen[kind.name]


def _namespaces(scopes: frozenset[str | None]) -> frozenset[str] | None:
    """The namespaces of these scopes; None where they are all of the cluster."""
    return None if None in scopes else frozenset(s for s in scopes if s is not None)
