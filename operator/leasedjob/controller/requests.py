"""What LeasedJobRuns ask for beside one run: explanations, repair, a resume, backfills.

Each look at an object goes one step further, from what is observed, until its phase is final. Whatever changes
something is one statement with its own condition, so replicas may meet here; each says what it finds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, assert_never

from leasedjob.api.fields import unknown_in_run
from leasedjob.api.v1alpha1 import (
    MAX_RUNS,
    Explanation,
    LeasedJobRunSpec,
    RunAction,
    RunPhase,
    RunStatus,
    parse_run,
)
from leasedjob.controller import manual
from leasedjob.controller.act import Actor
from leasedjob.controller.answers import SOON, Answers, Json, Problem
from leasedjob.controller.backfill import runs_of
from leasedjob.controller.backfiller import Backfiller
from leasedjob.controller.cache import Cache, Entry
from leasedjob.controller.clock import DatabaseClock
from leasedjob.controller.decide import which
from leasedjob.controller.events import EventReason, Recorder
from leasedjob.controller.explain import Evidence, explain, tick_of
from leasedjob.controller.facts import PodFacts
from leasedjob.controller.manual import RequestReason
from leasedjob.controller.model import JobView
from leasedjob.controller.repair import Answer, Observed, RepairReason, Step, next_step
from leasedjob.controller.status import StatusWriter, run_status, waiting_of
from leasedjob.errors import DatabaseUnavailableError
from leasedjob.identity import JobSchedulerType, RunIdentity, run_key_for
from leasedjob.lease.database import FaultKind
from leasedjob.lease.rows import (
    REASON_CANCELLED,
    Asked,
    CodeState,
    Passed,
    Released,
    Run,
)
from leasedjob.lease.store import OperatorStore
from leasedjob.schedule import CodeTicks, InForce, TickReason, passed_over

log = logging.getLogger(__name__)
POD_DELETED: Final = "PodDeleted"  # what an audit line says of a Pod that was stopped


@dataclass(frozen=True, slots=True)
class _About:
    """The run that an action is about."""

    run_key: str | None  # None: type Initial
    tick: datetime | None
    lock_key: str


class Requests:
    """Carries out what LeasedJobRuns of one object ask for, beside runs of their own."""

    def __init__(
        self,
        store: OperatorStore,
        actor: Actor,
        status: StatusWriter,
        clock: DatabaseClock,
        events: Recorder,
        cluster: str,
    ) -> None:
        self._store = store
        self._actor = actor
        self._clock = clock
        self._events = events
        self._cluster = cluster
        self._answers = Answers(status, clock)
        self._backfiller = Backfiller(store, actor, self._answers, cluster)

    async def stop(self) -> None:
        """Gives up what is being planned."""
        await self._backfiller.stop()

    @property
    def _cache(self) -> Cache:
        return self._actor.cache

    async def carry_out(
        self, entry: Entry, view: JobView, state: CodeState | None, problem: Problem | None
    ) -> datetime | None:
        """Goes on with every request that isn't done; when to look again if nothing happens.

        Args:
            problem: why the LeasedJob isn't Ready, reason and message.
        """
        wake: datetime | None = None
        for body in self._cache.runs_for(entry.key):
            if manual.phase_of(body) in manual.FINAL or manual.asks_for_one_run(body):
                continue
            if unknown_in_run(body.get("spec") or {}):
                continue  # of a later version, whose operator knows what is asked
            try:
                again = await self._one(entry, view, state, problem, body)
            except DatabaseUnavailableError as e:
                if e.kind != FaultKind.BUSY:
                    raise
                again = SOON
            if again is not None:
                at = self._clock.now() + again
                wake = at if wake is None else min(wake, at)
        return wake

    async def _one(
        self, entry: Entry, view: JobView, state: CodeState | None, problem: Problem | None, body: Json
    ) -> timedelta | None:
        spec = parse_run(body)
        if not isinstance(spec, LeasedJobRunSpec):
            message = "; ".join(str(p) for p in spec[:8])
            return await self._answers.say(body, entry, RunPhase.REFUSED, RequestReason.INVALID_SPEC, message)
        if not entry.code:
            return await self._answers.not_ready(body, entry, problem)
        if spec.backfill is not None:
            if spec.cancel:
                return await self._backfiller.cancelled(entry, body)
            if problem is not None or state is None or view.watermark is None:
                return await self._answers.not_ready(body, entry, problem)
            return await self._backfiller.go_on(entry, view, state, body, spec.backfill)
        match spec.action:
            case RunAction.EXPLAIN:
                return await self._explain(entry, view, state, problem, body, spec)
            case RunAction.RESUME:
                return await self._resume(entry, view, state, problem, body, spec)
            case RunAction.CANCEL | RunAction.RELEASE | RunAction.FORGET:
                return await self._repair(entry, view, body, spec, spec.action)
            case RunAction.RUN | None:
                raise AssertionError("carried out as a run")
            case _:
                assert_never(spec.action)

    def _asked(self, entry: Entry, body: Json, spec: LeasedJobRunSpec) -> Asked:
        meta = body["metadata"]
        return Asked(
            cluster=self._cluster,
            action=str(spec.action or RunAction.RUN),
            by=f"{meta['namespace']}/{meta['name']}",
            request=meta["uid"],
            why=spec.reason or "",
        )

    # --- which run ---------------------------------------------------------------------------------------------------

    def _about(self, entry: Entry, view: JobView, spec: LeasedJobRunSpec) -> _About | str:
        """The run that is named, or the only one that can be meant; else why there is none, in words."""
        tick = spec.tick_time
        key = run_key_for(tick) if tick else spec.run_key
        if key is not None:
            lock = RunIdentity.of(type=JobSchedulerType.SCHEDULE, code=entry.code, run_key=key).lock_key
            return _About(key, tick or tick_of(key), lock)
        if view.policy.type is JobSchedulerType.INITIAL:
            return _About(None, None, entry.initial_lock_key)
        if spec.action is RunAction.EXPLAIN:
            latest = view.policy.schedule.previous(view.now) if view.policy.schedule else None
            if latest is None:
                return "the schedule has had no tick yet: name one"
            return _About(
                run_key_for(latest), latest, RunIdentity.of(code=entry.code, run_key=run_key_for(latest)).lock_key
            )
        active = [r for r in view.rows.values() if not r.terminal]
        if len(active) == 1:
            return _About(active[0].identity.run_key, active[0].tick, active[0].lock_key)
        names = ", ".join(sorted(r.identity.run_key or "" for r in active)[:5])
        return f"name a run by tick or runKey: {f'several are active: {names}' if active else 'none is active'}"

    async def _row(self, lock_key: str) -> Run | None:
        return (await self._store.runs_by_key(self._cluster, [lock_key])).get(lock_key)

    def _pod(self, view: JobView, run: Run | None) -> PodFacts | None:
        if run is None:
            return None
        return next((p for p in view.pods if p.lease_id == str(run.id) and p.attempt == run.attempt), None)

    # --- explain -----------------------------------------------------------------------------------------------------

    async def _explain(
        self,
        entry: Entry,
        view: JobView,
        state: CodeState | None,
        problem: Problem | None,
        body: Json,
        spec: LeasedJobRunSpec,
    ) -> timedelta | None:
        about = self._about(entry, view, spec)
        if isinstance(about, str):
            return await self._answers.say(body, entry, RunPhase.REFUSED, RepairReason.AMBIGUOUS, about)
        explanation = await self._explained(entry, view, state, problem, about)
        facts = {"explanation": explanation, "run_key": about.run_key}
        message = f"{explanation.verdict}: {explanation.message}"
        return await self._answers.say(body, entry, RunPhase.SUCCEEDED, RepairReason.EXPLAINED, message, **facts)

    async def explained(
        self, entry: Entry, view: JobView, state: CodeState | None, problem: Problem | None, run_key: str
    ) -> Explanation:
        """What became of a run, or why there was none; nothing is written."""
        lock = RunIdentity.of(type=JobSchedulerType.SCHEDULE, code=entry.code, run_key=run_key).lock_key
        return await self._explained(entry, view, state, problem, _About(run_key, tick_of(run_key), lock))

    async def _explained(
        self, entry: Entry, view: JobView, state: CodeState | None, problem: Problem | None, about: _About
    ) -> Explanation:
        run = await self._row(about.lock_key)
        reruns: Sequence[RunStatus] = ()
        ledger = None
        in_force: tuple[InForce, ...] = ()
        if about.tick is not None:
            ledger = await self._store.ledger_at(entry.code, about.tick)
            in_force = await self._store.schedules_at(entry.code, about.tick)
            (found,) = await runs_of(self._store, self._cluster, entry.code, [about.tick], None)
            reruns = [self._shown(view, r) for r in found.runs[1:][::-1] if r.lock_key != about.lock_key]
        return explain(
            Evidence(
                now=self._clock.now(),
                tick=about.tick,
                run_key=about.run_key,
                policy=entry.policy,
                problem=problem,
                state=state,
                run=run,
                shown=self._shown(view, run) if run else None,
                reruns=tuple(reruns[:MAX_RUNS]),
                entry=ledger,
                in_force=in_force,
                active=tuple(r for r in view.rows.values() if not r.terminal and r.lock_key != about.lock_key),
                waiting=waiting_of(run, view.pods),
                cordoned=view.cordoned,
            )
        )

    def _shown(self, view: JobView, run: Run) -> RunStatus:
        return run_status(run, self._pod(view, run))

    # --- repair ------------------------------------------------------------------------------------------------------

    async def _repair(
        self, entry: Entry, view: JobView, body: Json, spec: LeasedJobRunSpec, action: RunAction
    ) -> timedelta | None:
        before: Json = body.get("status") or {}
        if before.get("runKey") is not None and before.get("attempt"):  # the run that this request has begun with
            spec = spec.model_copy(update={"tick": None, "run_key": before["runKey"] or None})
        about = self._about(entry, view, spec)
        if isinstance(about, str):
            return await self._answers.say(body, entry, RunPhase.REFUSED, RepairReason.AMBIGUOUS, about)
        asked = self._asked(entry, body, spec)
        run = await self._row(about.lock_key)
        seen = Observed(self._clock.now(), self._cluster, run, self._pod(view, run), before, force=spec.force is True)
        found = next_step(action, seen)
        facts: dict[str, Any] = {"run_key": about.run_key or ""}
        if run is not None:
            # of the attempt that the request began with
            facts["attempt"] = before.get("attempt") or run.attempt
            facts["holder"] = run.holder or run.cluster or None
        if isinstance(found, Answer):
            return await self._answers.say(body, entry, found.phase, found.reason, found.message, **facts)
        assert run is not None
        phase, reason, message = RunPhase.RUNNING, RepairReason.STOPPING, ""
        match found:
            case Step.CANCEL:
                if not await self._store.cancel_run(run.id, reason=REASON_CANCELLED, asked=asked):
                    return SOON
                message = f"{which(run)} is to stop, within its grace period"
            case Step.DELETE_POD:
                assert seen.pod is not None
                await self._store.write_audit(run.id, POD_DELETED, asked=asked)
                await self._actor.kube.delete_pod(seen.pod.namespace, seen.pod.name, seen.pod.uid)
                message = f"Pod {seen.pod.name} is being stopped; {which(run)} ends with it"
            case Step.RELEASE:
                did = await self._store.release_run(run.id, run.attempt, force=seen.force, asked=asked)
                phase, reason, message = self._released(did, run)
                if did is Released.NOTHING:
                    return SOON
            case Step.FORGET:
                if not await self._store.forget_run(run.id, asked=asked):
                    return SOON
                phase, reason = RunPhase.SUCCEEDED, RepairReason.FORGOTTEN
                message = (
                    f"{which(run)} is forgotten: attempt {run.attempt + 1} may begin, its failures count from zero"
                )
            case _:
                assert_never(found)
        self._tell(entry, found, spec, f"{message}; asked for by LeasedJobRun {body['metadata']['name']}")
        entry.doubtful.add(run.id)
        again = await self._answers.say(body, entry, phase, reason, message, **facts)
        self._cache.changed(entry.key)
        return again

    @staticmethod
    def _released(did: Released, run: Run) -> tuple[RunPhase, RepairReason, str]:
        match did:
            case Released.GIVEN_BACK:
                text = f"the claim of {which(run)} is given back: nothing ran under it"
                return RunPhase.SUCCEEDED, RepairReason.RELEASED, text
            case Released.ENDED:
                text = (
                    f"the lease of {which(run)}, held by {run.holder}, has ended by force: whoever asked answers for "
                    "it that the workload has stopped; else the fencing token is the only protection"
                )
                return RunPhase.SUCCEEDED, RepairReason.RELEASED, text
            case Released.FENCED:
                text = (
                    f"no heartbeat extends the lease of {which(run)} any more: its holder, {run.holder}, loses it, and "
                    f"the next attempt begins at {run.expires_at:%H:%M:%S} UTC at the latest"
                )
                return RunPhase.RUNNING, RepairReason.FENCED, text
            case Released.NOTHING:
                return RunPhase.RUNNING, RepairReason.STOPPING, ""
            case _:
                assert_never(did)

    def _tell(self, entry: Entry, step: Step, spec: LeasedJobRunSpec, text: str) -> None:
        reason = {
            Step.CANCEL: EventReason.RUN_CANCELLED,
            Step.DELETE_POD: EventReason.RUN_RELEASED,
            Step.RELEASE: EventReason.RUN_RELEASED,
            Step.FORGET: EventReason.RUN_FORGOTTEN,
        }[step]
        if step is Step.CANCEL:
            log.info("%s/%s: %s", entry.namespace, entry.name, text)  # the run's end has an Event of its own
            return
        why = f" ({spec.reason})" if spec.reason else ""
        self._events.record(entry.body, reason, text + why, warning=spec.force is True, once="request")

    # --- resume ------------------------------------------------------------------------------------------------------

    async def _resume(
        self,
        entry: Entry,
        view: JobView,
        state: CodeState | None,
        problem: Problem | None,
        body: Json,
        spec: LeasedJobRunSpec,
    ) -> timedelta | None:
        also = "; spec.suspend is true: that stays" if view.policy.suspend and entry.policy else ""
        if state is None or entry.policy is None or problem is not None:
            return await self._answers.not_ready(body, entry, problem)
        if state.suspension is None:
            text = f"the schedule was not suspended after failures{also}"
            return await self._answers.say(body, entry, RunPhase.SUCCEEDED, RepairReason.NOT_SUSPENDED, text)
        now = self._clock.now()
        ticks = CodeTicks.after(state.watermark, state.schedules)
        ranges = passed_over(ticks, state.watermark, now, TickReason.SuspendedAfterFailures)
        busy, resumed, watermark = await self._store.resume_code(
            entry.code, Passed(at=now, ranges=ranges, version=state.version), self._asked(entry, body, spec)
        )
        entry.state_stale = True
        if busy:
            return SOON
        if watermark is not None:
            entry.watermark = watermark
        left = sum(r.count for r in ranges)
        text = f"resumed; ticks count from now, and the {left} meanwhile are not run{also}"
        if resumed:
            why = f" ({spec.reason})" if spec.reason else ""
            self._events.record(entry.body, EventReason.SCHEDULE_RESUMED, text + why, once=body["metadata"]["uid"])
        self._cache.changed(entry.key)
        return await self._answers.say(body, entry, RunPhase.SUCCEEDED, RepairReason.RESUMED, text)
