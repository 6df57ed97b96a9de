"""Carries a backfill out: plans it beside the reconciles, starts as many runs as may be active, tells how far it is.

See `leasedjob.controller.backfill` for what is done about each tick.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from leasedjob.api.v1alpha1 import (
    MAX_BACKFILL_TICKS,
    MAX_PLAN,
    MAX_RUNS,
    BackfillSpec,
    BackfillStatus,
    ConcurrencyPolicy,
    PlannedAction,
    Reprocess,
    RunPhase,
)
from leasedjob.controller.act import Actor
from leasedjob.controller.answers import AGAIN, SOON, Answers, Json
from leasedjob.controller.backfill import Plan, Planned, TickSpan, decided
from leasedjob.controller.cache import Cache, Entry
from leasedjob.controller.decide import Claim
from leasedjob.controller.events import EventReason
from leasedjob.controller.manual import RequestReason, note_of
from leasedjob.controller.model import JobView
from leasedjob.controller.repair import RepairReason
from leasedjob.identity import JobSchedulerType
from leasedjob.lease.rows import (
    REASON_CANCELLED,
    BackfillState,
    BackfillStep,
    ClaimVerdict,
    CodeState,
    OverlapRule,
)
from leasedjob.lease.store import OperatorStore
from leasedjob.schedule import Timetable

LOOK_AT: Final = 5_000  # ticks that need no run, at one look


class Backfiller:
    """Each look at a backfill goes on from where the database says that it is, whoever brought it there."""

    def __init__(self, store: OperatorStore, actor: Actor, answers: Answers, cluster: str) -> None:
        self._store = store
        self._actor = actor
        self._answers = answers
        self._cluster = cluster
        self._plans: dict[str, asyncio.Task[Plan]] = {}  # by the uid of what asks

    @property
    def _cache(self) -> Cache:
        return self._actor.cache

    async def stop(self) -> None:
        """Gives up what is being planned."""
        plans, self._plans = self._plans, {}
        for task in plans.values():
            task.cancel()
        await asyncio.gather(*plans.values(), return_exceptions=True)

    async def go_on(
        self, entry: Entry, view: JobView, state: CodeState, body: Json, spec: BackfillSpec
    ) -> timedelta | None:
        schedule, uid = view.policy.schedule, body["metadata"]["uid"]
        progress = await self._store.look_at_backfill(uid)
        if progress is None:
            refused = self._refusal(view, spec)
            if refused is not None:
                return await self._answers.say(body, entry, RunPhase.REFUSED, *refused)
        assert schedule is not None
        span = TickSpan.of(spec)
        if progress is None:
            plan = self._planned(uid, entry, schedule, span, spec, state)
            if plan is None:
                return await self._answers.say(
                    body, entry, RunPhase.PENDING, RequestReason.PLANNING, "its ticks are looked up"
                )
            if plan.ticks > MAX_BACKFILL_TICKS:
                text = f"spec.backfill: more than {MAX_BACKFILL_TICKS} ticks; ask for them in parts"
                return await self._answers.say(body, entry, RunPhase.REFUSED, RequestReason.TOO_MANY_TICKS, text)
            counts = BackfillStatus(
                ticks=plan.ticks,
                planned=plan.to_run,
                running=0,
                succeeded=0,
                failed=0,
                skipped=plan.ticks - plan.to_run,
            )
            if spec.dry_run:
                counts = counts.model_copy(update={"plan": plan.first})
                text = f"{plan.to_run} of {plan.ticks} ticks would run"
                return await self._answers.say(
                    body, entry, RunPhase.SUCCEEDED, RequestReason.PLANNED, text, backfill=counts
                )
            await self._store.begin_backfill(
                self._cluster, uid, entry.code, through=span.start, ticks=plan.ticks, planned=plan.to_run
            )
            text = f"{plan.to_run} of {plan.ticks} ticks from {spec.from_} to {spec.to} are to run"
            self._actor.events.record(
                entry.body, EventReason.BACKFILL_STARTED, f"{text}: {body['metadata']['name']}", once=uid
            )
            progress = await self._store.look_at_backfill(uid)
            assert progress is not None
        waits = await self._start_some(entry, view, state, body, spec, span, progress)
        progress = await self._store.look_at_backfill(uid) or progress
        return await self._tell_progress(entry, body, schedule, span, progress, waits)

    def _refusal(self, view: JobView, spec: BackfillSpec) -> tuple[RequestReason, str] | None:
        """Why a backfill never begins, as reason and message."""
        schedule, span = view.policy.schedule, TickSpan.of(spec)
        if schedule is None:
            return RequestReason.NOT_A_TICK, "spec.backfill: a LeasedJob of type Initial has no ticks"
        if span.last > view.now:
            return RequestReason.TICK_IN_THE_FUTURE, f"spec.backfill.to: {spec.to} has not come yet"
        return None

    def _planned(
        self, uid: str, entry: Entry, schedule: Timetable, span: TickSpan, spec: BackfillSpec, state: CodeState
    ) -> Plan | None:
        """The plan, or None while it is being made: that may take seconds, and no due tick waits for it."""
        for gone in self._plans.keys() - self._cache.runs.keys():
            self._plans.pop(gone).cancel()
        task = self._plans.get(uid)
        if task is None:
            task = asyncio.create_task(self._plan(entry, schedule, span, spec, state), name=f"plan {uid}")
            self._plans[uid] = task
            task.add_done_callback(lambda _: self._cache.changed(entry.key))
        if not task.done():
            return None
        del self._plans[uid]
        return task.result()

    async def _plan(
        self, entry: Entry, schedule: Timetable, span: TickSpan, spec: BackfillSpec, state: CodeState
    ) -> Plan:
        plan = Plan()
        plan.ticks = await asyncio.to_thread(span.count, schedule, MAX_BACKFILL_TICKS)
        if plan.ticks > MAX_BACKFILL_TICKS:
            return plan
        ticks = span.ticks(schedule, span.start)
        async for found in decided(self._store, self._cluster, entry.code, ticks, spec.reprocess, state.pruned_through):
            plan.to_run += found.action is not PlannedAction.SKIP
            if len(plan.first) < MAX_PLAN:
                plan.first.append(found.shown())
        return plan

    async def _start_some(
        self,
        entry: Entry,
        view: JobView,
        state: CodeState,
        body: Json,
        spec: BackfillSpec,
        span: TickSpan,
        progress: BackfillState,
    ) -> str:
        """Starts as many runs as may be active; why no more are started, "" if that is all."""
        assert view.policy.schedule is not None
        if view.cordoned:
            return view.cordoned
        uid, at, skipped, looked = body["metadata"]["uid"], progress.through, 0, 0
        room = spec.max_active - len(progress.active)
        if room <= 0:
            return ""
        ticks = span.ticks(view.policy.schedule, at)
        page = 500 if spec.reprocess is Reprocess.NONE else 100
        passed: datetime | None = None
        async for found in decided(
            self._store, self._cluster, entry.code, ticks, spec.reprocess, state.pruned_through, page=page
        ):
            if found.action is PlannedAction.SKIP:
                passed, skipped, looked = found.tick, skipped + 1, looked + 1
                if looked >= LOOK_AT:
                    break
                continue
            step, why = await self._start(entry, view, uid, spec, found, at, skipped)
            if step is not BackfillStep.ASKED or why:
                return why
            at, skipped, passed, room = found.tick, 0, None, room - 1
            if room <= 0:
                return ""
        if passed is not None:
            await self._store.step_backfill(
                self._cluster, uid, after=at, through=passed, skipped=skipped, limit=spec.max_active, request=None
            )
        return ""

    async def _start(
        self,
        entry: Entry,
        view: JobView,
        uid: str,
        spec: BackfillSpec,
        found: Planned,
        after: datetime,
        skipped: int,
    ) -> tuple[BackfillStep, str]:
        """Asks for one run; what became of that, and why it has to wait, if it has."""
        alone = view.policy.concurrency is not ConcurrencyPolicy.ALLOW or entry.spec_differs
        action = Claim(
            JobSchedulerType.SCHEDULE,
            found.run_key,
            found.tick,
            OverlapRule.WAIT if alone else OverlapRule.ALLOW,
            manual=True,
        )
        request = self._actor.request_for(entry, view, action, reopen=found.action is PlannedAction.RETRY)
        step, result = await self._store.step_backfill(
            self._cluster,
            uid,
            after=after,
            through=found.tick,
            skipped=skipped,
            limit=spec.max_active,
            request=request,
        )
        if step is not BackfillStep.ASKED or result is None:
            return step, ""
        self._actor.metrics.claims.labels(result.verdict.value).inc()
        match result.verdict:
            case ClaimVerdict.CLAIMED:
                assert result.id is not None
                # Crash window: claim committed, Pod not created. Another replica finds the claim and launches it.
                await self._actor.launch_claimed(entry, view, action, request.identity, result)
                entry.doubtful.add(result.id)
                return step, ""
            case ClaimVerdict.CORDONED:
                return step, note_of(RequestReason.CORDONED)
            case ClaimVerdict.OVERLAP_WAIT:
                return step, f"{found.run_key}: another run of this job is active"
            case ClaimVerdict.UNREGISTERED:
                entry.registered = None
                return step, "the LeasedJob is being registered"
            case _:
                return step, f"{found.run_key}: {result.verdict}"

    async def _tell_progress(
        self,
        entry: Entry,
        body: Json,
        schedule: Timetable,
        span: TickSpan,
        progress: BackfillState,
        waits: str,
    ) -> timedelta | None:
        done = not progress.active and next(span.ticks(schedule, progress.through), None) is None
        counts = _counts(progress)
        ended = progress.succeeded + progress.failed
        text = f"{ended} of {ended + len(progress.active) + _left(progress)} runs have ended, {progress.failed} failed"
        if not done:
            running = bool(progress.active) or not waits
            phase = RunPhase.RUNNING if running else RunPhase.PENDING
            reason = RequestReason.BACKFILLING if running else RequestReason.OVERLAP
            again = await self._answers.say(body, entry, phase, reason, waits or text, backfill=counts)
            return SOON if again == SOON or (not progress.active and not waits) else AGAIN
        good = progress.failed == 0
        phase = RunPhase.SUCCEEDED if good else RunPhase.FAILED
        reason = RequestReason.COMPLETED if good else RequestReason.RUNS_FAILED
        text = (
            f"{progress.succeeded} runs succeeded, {progress.failed} failed, {progress.skipped} ticks were left alone"
        )
        self._actor.events.record(
            entry.body,
            EventReason.BACKFILL_ENDED,
            f"{body['metadata']['name']}: {text}",
            warning=not good,
            once=body["metadata"]["uid"],
        )
        return await self._answers.say(body, entry, phase, reason, text, backfill=counts)

    async def cancelled(self, entry: Entry, body: Json) -> timedelta | None:
        """No further run begins; those that are active are stopped, and it is over when they have ended."""
        progress = await self._store.look_at_backfill(body["metadata"]["uid"])
        if progress is None:
            return await self._answers.say(
                body, entry, RunPhase.CANCELLED, RequestReason.CANCELLED, "cancelled before it began"
            )
        ids: list[UUID] = [id for id, _ in progress.active]
        if ids:
            await self._store.request_stop(ids, reason=REASON_CANCELLED)
            entry.doubtful.update(ids)
            self._cache.changed(entry.key)
            text = f"{len(ids)} active runs are to stop"
            await self._answers.say(
                body, entry, RunPhase.RUNNING, RepairReason.STOPPING, text, backfill=_counts(progress)
            )
            return AGAIN
        text = f"{progress.succeeded + progress.failed} of {progress.planned} runs had begun"
        return await self._answers.say(
            body, entry, RunPhase.CANCELLED, RequestReason.CANCELLED, text, backfill=_counts(progress)
        )


def _left(progress: BackfillState) -> int:
    """Runs of the plan that have not begun."""
    return max(0, progress.planned - progress.succeeded - progress.failed - len(progress.active))


def _counts(progress: BackfillState) -> BackfillStatus:
    return BackfillStatus(
        ticks=progress.ticks,
        planned=progress.planned,
        running=len(progress.active),
        succeeded=progress.succeeded,
        failed=progress.failed,
        skipped=progress.skipped,
        through=progress.through.astimezone(UTC),
        current=[key for _, key in progress.active][:MAX_RUNS],
    )
