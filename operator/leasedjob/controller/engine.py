"""The level-based reconcile: observe, decide, act, write status. One path for watch events, due ticks and the rest.

Whoever marks an object (`mark`) says only "look at it"; what has to be done follows from what is observed. At most one
reconcile of an object runs at a time; what arrives meanwhile leads to one more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from leasedjob.api.v1alpha1 import Explanation
from leasedjob.controller import manual
from leasedjob.controller.act import Actor, Progress
from leasedjob.controller.agenda import Agenda
from leasedjob.controller.batch import Batcher
from leasedjob.controller.cache import Cache, Entry, Key
from leasedjob.controller.clock import DatabaseClock
from leasedjob.controller.decide import Action, Claim, Decision, DeletePod, Launch, decide, orphan, told
from leasedjob.controller.events import EventReason
from leasedjob.controller.facts import PodFacts
from leasedjob.controller.kube import Kube, KubeError
from leasedjob.controller.left import left_by
from leasedjob.controller.metrics import Metrics
from leasedjob.controller.model import FinishPolicy, JobView
from leasedjob.controller.requests import Requests
from leasedjob.controller.settings import Settings
from leasedjob.controller.spec import derive
from leasedjob.controller.status import ReadyReason, StatusWriter
from leasedjob.errors import DatabaseRefusedError, DatabaseUnavailableError, SchemaMissingError
from leasedjob.lease.database import FaultKind
from leasedjob.lease.migrate import MigrationChangedError, SchemaAheadError
from leasedjob.lease.rows import CodeState, JobSchedulerStatus, Passed, Registered, Registration, Run
from leasedjob.lease.store import OperatorStore
from leasedjob.schedule import CodeTicks

log = logging.getLogger(__name__)
ROUNDS: Final = 12  # decisions in one reconcile; each acts on what the one before changed
RECENT: Final = 10  # terminal runs kept in memory and shown in status
CONFLICT_RETRY: Final = timedelta(seconds=2)  # for a status that was written elsewhere, if no event tells of it
CLOCK_MARGIN: Final = timedelta(milliseconds=20)  # by which this process's idea of the database's clock may be ahead
BACKOFF: Final = (0.2, 30.0)  # seconds, first and longest, after a fault that may pass
SCHEMA_FAULTS: Final = (SchemaMissingError, SchemaAheadError, MigrationChangedError)
DATABASE_FAULTS: Final = (DatabaseUnavailableError, DatabaseRefusedError, *SCHEMA_FAULTS)


class Engine:
    """Owns the queue of objects to look at.

    Args:
        ready: awaited before the first reconcile: objects and Pods were listed once.
    """

    def __init__(
        self,
        settings: Settings,
        kube: Kube,
        store: OperatorStore,
        actor: Actor,
        clock: DatabaseClock,
        metrics: Metrics,
        status: StatusWriter,
    ) -> None:
        self.settings = settings
        self.kube = kube
        self.store = store
        self.actor = actor
        self.clock = clock
        self.metrics = metrics
        self.status = status
        self.cache = Cache(self.mark, settings.serves)
        self.agenda: Agenda[Key] = Agenda(clock.now, self.mark)
        self.fresh = False  # everything was listed once, and may be worked with
        self._stopping = False
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._again: set[Key] = set()
        self._absent: set[tuple[str, str]] = set()  # code and uid without an object, at the last comparison
        self.requests = Requests(store, actor, status, clock, actor.events, settings.cluster)
        self._register = Batcher(self._register_many)
        self._states = Batcher(self._states_many, limit=200)
        self._by_id = Batcher(self._runs_many)
        self._recent = Batcher(self._recent_many, limit=200)

    # --- the queue ---------------------------------------------------------------------------------------------------

    def mark(self, key: Key) -> None:
        """Look at this object soon."""
        if not self.fresh or key in self._running:
            self._again.add(key)
        else:
            task = asyncio.create_task(self._reconcile(key), name=f"reconcile {key[0]}/{key[1]}")
            self._running[key] = task
            task.add_done_callback(lambda _: self._done(key))

    def _done(self, key: Key) -> None:
        del self._running[key]
        if key in self._again:
            self._again.discard(key)
            self.mark(key)

    def hurry(self) -> None:
        """A fault that may have hit every object is over."""
        for key in [k for k, e in self.cache.jobs.items() if e.backoff]:
            self.mark(key)

    def cordon(self, why: str) -> None:
        """This cluster takes no new runs, for this reason; "": it does."""
        if why == self.actor.cordoned:
            return
        log.warning("%s", why or f"cluster {self.settings.cluster} is no longer cordoned")
        self.actor.cordoned = why
        self.metrics.cluster_cordoned.set(1 if why else 0)
        for key in list(self.cache.jobs):
            self.mark(key)

    def begin(self) -> None:
        """Everything was listed once: what isn't in the cache doesn't exist."""
        if self.fresh or self._stopping:
            return
        self.fresh = True
        waiting, self._again = self._again, set()
        for key in waiting | set(self.cache.jobs) | set(self.cache.pods_of):
            self.mark(key)

    def hold(self) -> None:
        """Nothing new until `begin`: what was taken for granted is no longer true. What runs ends."""
        self.fresh = False

    async def stop(self) -> None:
        """Let running reconciles end what they began (bounded), take on nothing new."""
        self._stopping, self.fresh = True, False
        if self._running:
            _, late = await asyncio.wait(list(self._running.values()), timeout=10)
            for task in late:
                task.cancel()
        await self.requests.stop()

    # --- round trips that are shared ---------------------------------------------------------------------------------

    async def _register_many(self, wanted: Sequence[tuple[Registration, Passed | None]]) -> Sequence[Registered]:
        passed = {r.code: p for r, p in wanted if p is not None}
        return await self.store.register_jobs(self.settings.cluster, [r for r, _ in wanted], passed)

    async def _states_many(self, codes: Sequence[str]) -> Sequence[CodeState | None]:
        found = await self.store.code_states(self.settings.cluster, set(codes))
        return [found.get(code) for code in codes]

    async def _runs_many(self, ids: Sequence[UUID]) -> Sequence[Run | None]:
        found = await self.store.runs_by_id(self.settings.cluster, set(ids))
        return [found.get(i) for i in ids]

    async def _recent_many(self, codes: Sequence[str]) -> Sequence[list[Run]]:
        found = await self.store.recent_runs(self.settings.cluster, set(codes), RECENT)
        return [found.get(c, []) for c in codes]

    # --- rows --------------------------------------------------------------------------------------------------------

    def row_seen(self, entry: Entry, run: Run) -> bool:
        """Takes a row over if it is news; True if it was."""
        old = entry.rows.get(run.id)
        if old is not None and (run.changed_at, run.modified_at) <= (old.changed_at, old.modified_at):
            return False
        entry.rows[run.id] = run
        _decided_by(entry, run)
        if old is not None and _ended_since(old, run):
            self.actor.ended_elsewhere(entry, run)
        if run.terminal and (old is None or not old.terminal):
            _forget_old(entry)
        return old is None or run.changed_at > old.changed_at

    async def refresh(self, entry: Entry, ids: Sequence[UUID]) -> None:
        for id, run in zip(ids, await asyncio.gather(*(self._by_id.ask(i) for i in ids)), strict=True):
            if run is None:
                entry.rows.pop(id, None)
            elif run.identity.code == entry.code:
                self.row_seen(entry, run)

    # --- the reconcile -----------------------------------------------------------------------------------------------

    async def _reconcile(self, key: Key) -> None:
        entry = self.cache.jobs.get(key)
        try:
            if entry is None:
                self.agenda.set(key, None)
            await self._unregister_removed()
            if entry is None:
                await self._orphans(key)
                return
            async with asyncio.timeout(300):
                await self._look_at(entry)
            entry.backoff = 0.0
        except (KubeError, *DATABASE_FAULTS, TimeoutError) as e:
            self._later(entry, key, e)
        except asyncio.CancelledError:
            raise
        except Exception as e:
            # A broken invariant of one object is logged and retried slowly; it never stops the others.
            log.exception("reconcile of %s/%s failed", *key)
            self.metrics.reconcile_errors.inc()
            self._later(entry, key, e, at_least=10.0)

    def _later(self, entry: Entry | None, key: Key, why: Exception, at_least: float = 0.0) -> None:
        delay = BACKOFF[0]
        busy = isinstance(why, DatabaseUnavailableError) and why.kind == FaultKind.BUSY
        if busy:  # the other replica is at the same row: ordinary, and over in a moment
            log.debug("%s/%s: %s", *key, why)
        elif entry is not None:
            entry.backoff = min(BACKOFF[1], max(entry.backoff * 2, BACKOFF[0], at_least))
            delay = entry.backoff
            if entry.trouble != str(why):
                log.warning("%s/%s: %s", *key, why)
            entry.trouble = str(why)[:1024]
        self.agenda.set(key, self.clock.now() + timedelta(seconds=max(delay, at_least)))

    async def _look_at(self, entry: Entry) -> None:
        self.actor.skew.look(self.cache.pods_for(entry.key), self.clock.now())
        generation = entry.generation
        self._derive(entry)
        if entry.warning and entry.generation != generation:
            once = f"generation {entry.generation}"
            warning = EventReason.SCHEDULE_WARNING
            self.actor.events.record(entry.body, warning, entry.warning, warning=True, once=once)
        if entry.problem and entry.generation != generation:
            once = f"generation {entry.generation}"
            self.actor.events.record(entry.body, *entry.problem, warning=True, once=once)
        conflict = self._conflict(entry)
        if entry.problem is None and conflict is None:
            if not await self._registered(entry):
                self.agenda.set(entry.key, self.clock.now() + timedelta(milliseconds=200))
                return
            wake = await self._rounds(entry)
            self.agenda.set(entry.key, wake)
        else:
            await self._current(entry)
            await self._settle_pods(entry)
        await self.actor.launches.calm()  # what is shown can wait, Pods can't
        await self._state(entry)
        if self.cache.runs_of.get(entry.key):
            problem = _problem(entry, conflict)
            if again := await self.requests.carry_out(entry, self._view(entry), entry.state, problem):
                self.agenda.sooner(entry.key, again)
        entry.trouble = ""
        if not await self.status.write(entry, self._view(entry), self.cache.runs_for(entry.key), conflict):
            self.agenda.sooner(entry.key, self.clock.now() + CONFLICT_RETRY)

    def _derive(self, entry: Entry) -> None:
        before = entry.code
        derive(entry, self.settings)
        if entry.code != before or entry.key not in self.cache.by_code.get(entry.code, ()):
            self.cache.index_code(entry, before)

    def _conflict(self, entry: Entry) -> Entry | None:
        """The older object with the same code, if there is one: it works, this one doesn't."""
        if not entry.code:
            return None
        oldest = min(self.cache.with_code(entry.code), key=lambda e: (e.created_at, e.uid), default=entry)
        return None if oldest is entry else oldest

    async def _registered(self, entry: Entry) -> bool:
        wanted = entry.registration
        assert wanted is not None
        await self._state(entry)
        if entry.registered != wanted:
            answer = await self._register.ask((wanted, left_by(entry.state, wanted, self.clock.now() - CLOCK_MARGIN)))
            entry.state_stale = True
            if answer.busy:
                return False
            entry.registered, entry.spec_differs = wanted, answer.spec_differs
            if answer.watermark is not None:
                entry.watermark = answer.watermark
        if not entry.rows_loaded:
            for run in await self._recent.ask(entry.code):
                entry.rows[run.id] = run
                _decided_by(entry, run)
            entry.rows_loaded = True
        return True

    async def _state(self, entry: Entry) -> None:
        """What the database knows of the code beside its runs, read again where it is known to have changed."""
        if not entry.state_stale or not entry.code:
            return
        entry.state_stale = False
        try:
            entry.state = await self._states.ask(entry.code)
        except BaseException:
            entry.state_stale = True
            raise
        known = entry.state.watermark if entry.state and entry.registered else None
        if known is not None and (entry.watermark is None or known > entry.watermark):
            entry.watermark = known

    def _view(self, entry: Entry) -> JobView:
        assert entry.policy is not None or entry.problem is not None
        now = self.clock.now()
        waits = manual.RequestReason.OVERLAP
        return JobView(
            cluster=self.settings.cluster,
            code=entry.code,
            policy=entry.policy or self.status.no_policy,
            watermark=entry.watermark if entry.registered else None,
            initial_lock_key=entry.initial_lock_key,
            now=now,
            rows=entry.rows,
            pods=self.cache.pods_for(entry.key),
            manual=tuple(
                m
                for m in manual.requests(entry.code, self.cache.runs_for(entry.key), entry.policy)
                if m.cancel or entry.notes.get(m.lock_key, waits).startswith(waits)
            ),
            fresh=self.fresh,
            uid=entry.uid,
            suspended=entry.state is not None and entry.state.suspension is not None,
            cordoned=self.actor.cordoned,
            helped_at=now - timedelta(seconds=min(3600.0, time.monotonic() - self.cache.helped_at)),
            schedule_hash=entry.registered.schedule_hash if entry.registered else "",
            ticks=CodeTicks.after(entry.state.watermark, entry.state.schedules) if entry.state else None,
            version=entry.state.version if entry.state else None,
        )

    async def _rounds(self, entry: Entry) -> datetime | None:
        """Decide and act until nothing is left to do; when to look again."""
        await self._current(entry)
        decision, soon = Decision((), None), list[float]()
        for _ in range(ROUNDS):
            await self._state(entry)
            view = self._view(entry)
            decision = decide(view)
            todo, soon = _open(entry, decision.actions, time.monotonic())
            if log.isEnabledFor(logging.DEBUG):
                for action in todo:
                    log.debug("%s/%s: %s", entry.namespace, entry.name, told(action))
            if not todo:
                break
            starts = [a for a in todo if isinstance(a, Claim | Launch)]
            others = [a for a in todo if not isinstance(a, Claim | Launch)]
            for action in others:
                await self._act(entry, view, action)
            if any(not isinstance(a, DeletePod) for a in others):
                continue  # rows have changed: decide anew before anything starts
            await asyncio.gather(*(self._act(entry, view, a) for a in starts))
        else:  # each round had something to do, and so may the next
            soon = [time.monotonic() + 1.0]
        wake = decision.wake_at
        for wait in decision.waits:
            log.debug("%s/%s: %s", entry.namespace, entry.name, wait)
        log.debug(
            "%s/%s: nothing more to do now; the next look is at %s", entry.namespace, entry.name, wake or "an event"
        )
        if soon:
            at = self.clock.now() + timedelta(seconds=max(0.0, min(soon) - time.monotonic()))
            wake = at if wake is None else min(wake, at)
        return wake

    async def _current(self, entry: Entry) -> None:
        """Rows that this decision rests on: of Pods that have none in memory, of leases that seem to have expired
        (heartbeats don't announce themselves), and of runs that are active here and not in the database."""
        now = self.clock.now()
        unknown = {UUID(p.lease_id) for p in self.cache.pods_for(entry.key) if _is_uuid(p.lease_id)} - set(entry.rows)
        unknown -= {UUID(k[4:]) for k, t in entry.handled.items() if k.startswith("row ") and t > time.monotonic()}
        stale = {
            r.id for r in entry.rows.values() if r.status is JobSchedulerStatus.RUNNING and r.expires_at <= now
        }  # fmt: skip
        for missing in unknown:
            entry.handled[f"row {missing}"] = time.monotonic() + 60
        if wanted := unknown | stale | entry.doubtful:
            await self.refresh(entry, sorted(wanted))
            entry.doubtful -= wanted

    async def _act(self, entry: Entry, view: JobView, action: object) -> None:
        progress: Progress = await self.actor.act(entry, view, action)
        name = _name(action)
        if progress.again_in is not None:
            entry.handled[f"again {name}"] = time.monotonic() + progress.again_in
        elif progress.leave_for:
            entry.handled[name] = time.monotonic() + progress.leave_for
        if progress.watermark is not None and (entry.watermark is None or progress.watermark > entry.watermark):
            entry.watermark = progress.watermark
        if progress.refresh:
            await self.refresh(entry, progress.refresh)

    async def explanation(self, key: Key, run_key: str) -> Explanation | None:
        """What became of a run of this object, or why there was none; None where there is no such object, or its code
        isn't known. Nothing is changed."""
        entry = self.cache.jobs.get(key)
        if entry is None or not entry.code:
            return None
        problem = _problem(entry, self._conflict(entry))
        return await self.requests.explained(entry, self._view(entry), entry.state, problem, run_key)

    # --- Pods without a LeasedJob ------------------------------------------------------------------------------------

    async def _settle_pods(self, entry: Entry) -> None:
        """An object that isn't Ready starts nothing; attempts of its that end are still recorded."""
        for pod in self.cache.pods_for(entry.key):
            await self._finish_orphan(pod)

    async def _orphans(self, key: Key) -> None:
        for body in self.cache.runs_for(key):
            await self.status.write_run(body, "", None, f"there is no LeasedJob {key[1]} in this namespace")
        for pod in self.cache.pods_for(key):
            await self._finish_orphan(pod)

    async def _finish_orphan(self, pod: PodFacts) -> None:
        if not pod.finished or not _is_uuid(pod.lease_id):
            return
        run = await self._by_id.ask(UUID(pod.lease_id))
        if run is None or run.namespace != pod.namespace:
            return
        policy = FinishPolicy.from_json(pod.finish_policy)
        end = orphan(pod, run, exit_zero_on_stop=policy.exit_zero_on_stop)
        if end is not None:
            await self.actor.end(end)
            if not self.cache.with_code(run.identity.code):
                await self.store.unregister_objects(self.settings.cluster, {run.identity.code: run.job_uid})

    async def forget_absent(self, namespaces: Collection[str] | None = None) -> None:
        """Unregisters what was deleted while no operator watched. Waits until every object's code is known.

        Args:
            namespaces: those whose objects are known; None: all.
        """
        if any(e.generation < 0 for e in self.cache.jobs.values()):
            return
        registered = await self.store.registrations(self.settings.cluster)
        absent = {
            (code, uid)
            for code, (where, uid) in registered.items()
            if (namespaces is None or where in namespaces) and not self.cache.with_code(code)
        }
        # Twice in a row: another replica may have registered an object that this one has not seen yet.
        twice, self._absent = absent & self._absent, absent
        await self.store.unregister_objects(self.settings.cluster, dict(twice))

    async def _unregister_removed(self) -> None:
        """LeasedJobs that are gone: their claims without a Pod are released, their retries given up, unless another
        cluster has the code too."""
        removed, self.cache.removed = self.cache.removed, []
        gone = {e.code: e.uid for e in removed if e.code}
        try:
            done = await self.store.unregister_objects(self.settings.cluster, gone)
        except DATABASE_FAULTS:
            self.cache.removed += removed
            raise
        if left := [e for e in removed if e.code in gone.keys() - done]:
            self.cache.removed += left
            self.agenda.set(left[0].key, self.clock.now() + timedelta(milliseconds=500))


def _problem(entry: Entry, conflict: Entry | None) -> tuple[str, str] | None:
    """Why the object isn't Ready, reason and message."""
    if conflict is not None:
        return (
            ReadyReason.CODE_CONFLICT,
            f"its code belongs to the older LeasedJob {conflict.namespace}/{conflict.name}",
        )
    return entry.problem


def _is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


def _open(entry: Entry, actions: Sequence[Action], now: float) -> tuple[list[Action], list[float]]:
    """Which actions may be taken, and when those may that could not be done a moment ago (monotonic, seconds). What was
    taken a moment ago, and whose effect hasn't been observed yet, is neither.

    Only what is wanted now has a time: an action that waits may not be wanted any more when its time has come.
    """
    entry.handled = {k: t for k, t in entry.handled.items() if t > now}
    again = [(a, entry.handled.get(f"again {_name(a)}")) for a in actions]
    todo = [a for a, at in again if at is None and _name(a) not in entry.handled]
    return todo, [at for _, at in again if at is not None]


def _name(action: object) -> str:
    """A name for "this very action", for a short memory of what was just done."""
    match action:
        case DeletePod(pod=pod):
            return f"delete {pod.uid}"
        case Launch(run=run):
            return f"launch {run.id} {run.attempt}"
        case Claim(run_key=key, previous=previous):
            return f"claim {key} {previous.attempt if previous else 0}"
        case _:
            held = getattr(action, "run", None)
            return f"{type(action).__name__} {held.id} {held.attempt}" if held else type(action).__name__


def _ended_since(old: Run, run: Run) -> bool:
    """Whether the attempt that a Pod carried out when `old` was read has ended."""
    running = JobSchedulerStatus.RUNNING
    same = old.attempt == run.attempt and run.pod_uid is not None
    return same and old.status is running and run.status is not running


def _decided_by(entry: Entry, run: Run) -> None:
    """A tick that the schedule started has moved the watermark, whichever replica or cluster asked for it."""
    if run.tick is not None and not run.manual and entry.watermark is not None and run.tick > entry.watermark:
        entry.watermark = run.tick


def _forget_old(entry: Entry) -> None:
    """Keeps every row that isn't terminal, those of Pods still there, and the newest terminal ones."""
    terminal = sorted((r for r in entry.rows.values() if r.terminal), key=lambda r: r.started_at, reverse=True)
    for run in terminal[2 * RECENT :]:
        del entry.rows[run.id]
