"""Carrying decisions out: the database first, then the API server, then an Event by whoever changed something.

Each statement and request carries its own condition, so that an action decided on stale observations does nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, assert_never
from uuid import UUID

from leasedjob.controller.batch import Batcher
from leasedjob.controller.cache import Cache, Entry, Key
from leasedjob.controller.clock import DatabaseClock
from leasedjob.controller.decide import (
    NOT_HELD,
    Action,
    Claim,
    DeletePod,
    End,
    Launch,
    RecordTicks,
    ReleaseClaim,
    Stop,
    SuspendFailing,
    launch_retry_ms,
    run_name,
    which,
)
from leasedjob.controller.events import EventReason, Recorder
from leasedjob.controller.facts import PodFacts, pod_facts
from leasedjob.controller.kube import Kube, KubeError
from leasedjob.controller.launches import Launches
from leasedjob.controller.manual import RequestReason, note_of
from leasedjob.controller.metrics import Metrics
from leasedjob.controller.model import JobView, Policy
from leasedjob.controller.outcome import REPORTED, Result, cut, joined, reported_error
from leasedjob.controller.pods import Attempt, Owner, Sidecar, build_pod
from leasedjob.controller.settings import Settings
from leasedjob.controller.skew import WorkloadSkew
from leasedjob.controller.tenants import TenantSecrets
from leasedjob.controller.tracing import trace_parent
from leasedjob.errors import DatabaseRefusedError, SchemaMissingError
from leasedjob.identity import RunIdentity, run_key_for
from leasedjob.lease.rows import (
    BUSY_SCHEDULES_CHANGED,
    REASON_AFTER_FAILURES,
    REASON_CANCELLED,
    REASON_OVERLAP,
    REASON_REPLACED,
    REASON_STARTING_DEADLINE,
    ClaimRequest,
    ClaimResult,
    ClaimVerdict,
    JobSchedulerStatus,
    Outcome,
    Run,
)
from leasedjob.lease.store import OperatorStore
from leasedjob.lease.tenants import tenant_of
from leasedjob.protocol import ANNOTATION_CLAIM, ANNOTATION_LEASE, LABEL_CLUSTER
from leasedjob.schedule import TickRange

log = logging.getLogger(__name__)
CREATE_TRIES: Final = (0.0, 0.3, 1.0, 2.0, 4.0)  # seconds before each try of a Pod's creation, while the claim lives
DOOMED: Final = 600.0  # seconds for which nothing is claimed in a namespace that goes, if it takes that long
WANTED_STOPS: Final = {REASON_CANCELLED: EventReason.RUN_CANCELLED, REASON_REPLACED: EventReason.RUN_REPLACED}
SUSPENDED_AGAIN: Final = 600.0  # seconds after which a suspended cluster asks again whether its ticks are its own
JUDGED: Final = 3600.0  # for which a failed run isn't counted again
SETTLE: Final = 5.0  # seconds within which an action's effect should be observed


@dataclass(frozen=True, slots=True)
class Progress:
    """What an action did.

    Args:
        refresh: rows to read again.
        watermark: the code's watermark, if the answer told.
        leave_for: seconds for which the same action isn't repeated (its effect is on its way).
        again_in: seconds after which it is tried again (it could not be done now).
    """

    refresh: Sequence[UUID] = ()
    watermark: datetime | None = None
    leave_for: float = 0.0
    again_in: float | None = None


def _reason(reason: str, message: str) -> str:
    """What the row keeps: `<Reason>: <message>`, the end of a long message."""
    return joined(reason, cut(message))


def _start(policy: Policy, tick: datetime) -> datetime:
    return tick if policy.schedule is None else policy.schedule.start_of(tick)


def _deadline_ms(policy: Policy, tick: datetime | None) -> int | None:
    """startingDeadlineSeconds as the database judges it, from the tick: jitter comes on top."""
    if policy.starting_deadline is None:
        return None
    later = timedelta(0) if tick is None else _start(policy, tick) - tick
    return policy.starting_deadline * 1000 + later // timedelta(milliseconds=1)


@dataclass(slots=True)
class Actor:
    settings: Settings
    kube: Kube
    store: OperatorStore
    tenants: TenantSecrets
    events: Recorder
    clock: DatabaseClock
    metrics: Metrics
    cache: Cache = field(init=False)
    skew: WorkloadSkew = field(init=False)
    cordoned: str = ""  # why this cluster takes no new runs
    _claims: Batcher[ClaimRequest, ClaimResult] = field(init=False)
    launches: Launches[Key] = field(init=False)

    def __post_init__(self) -> None:
        self.skew = WorkloadSkew(lambda seconds: self.metrics.workload_skew_seconds.observe(seconds))
        self._claims = Batcher(self._claim_many, owner=lambda request: request.identity.code)
        self.launches = Launches(self.settings.pod_concurrency, self.settings.pods_per_second)

    async def act(self, entry: Entry, view: JobView, action: Action | object) -> Progress:
        match action:
            case End():
                return await self._end(entry, action)
            case ReleaseClaim():
                return await self._release(entry, action)
            case Stop():
                return await self._stop(entry, action)
            case DeletePod():
                return await self._delete(entry, action)
            case Launch():
                with self.launches.expected():
                    return await self._launch(entry, view, action.run)
            case Claim():
                with self.launches.expected():
                    return await self._claim(entry, view, action)
            case RecordTicks():
                return await self._record(entry, view, action)
            case SuspendFailing():
                return await self._suspend(entry, action)
            case _:
                raise AssertionError(f"no such action: {action!r}")

    # --- ends --------------------------------------------------------------------------------------------------------

    async def end(self, action: End) -> bool:
        """Writes an attempt's outcome; True if this call changed the row."""
        outcome = {
            Result.COMPLETE: Outcome.COMPLETE,
            Result.FAIL: Outcome.FAIL,
            Result.RELEASE: Outcome.RELEASE,
            Result.ENDED: Outcome.FAIL,
        }[action.result]
        return await self.store.end_attempt(
            action.run.id,
            action.run.attempt,
            action.pod_uid,
            outcome,
            counts=action.result is Result.FAIL,
            reason=_reason(action.reason, action.message),
            retry_ms=action.retry_ms,
            data=action.data or None,
        )

    async def _end(self, entry: Entry, action: End) -> Progress:
        if await self.end(action):
            run = action.run
            if action.result is Result.COMPLETE:
                self.events.record(entry.body, EventReason.RUN_SUCCEEDED, which(run), once="end")
            elif not run.stop_reason:  # else its row says why, and tells everybody: see ended_elsewhere
                reason = EventReason.RUN_INTERRUPTED if action.result is Result.RELEASE else EventReason.RUN_FAILED
                text = f"{which(run)}: {_reason(action.reason, action.message)}"
                self.events.record(entry.body, reason, text, warning=True, once="end")
        return Progress(refresh=[action.run.id], leave_for=SETTLE)

    async def _stop(self, entry: Entry, action: Stop) -> Progress:
        run = action.run
        done = await self.store.request_stop([run.id], reason=action.reason)
        works = run.status is JobSchedulerStatus.RUNNING and run.pod_uid is not None
        if run.id in done and not works:  # that was its end; one that works ends later, and then says so
            self._stopped(entry, run, action.reason)
        return Progress(refresh=[run.id], leave_for=SETTLE)

    def ended_elsewhere(self, entry: Entry, run: Run) -> None:
        """An attempt has ended that was asked to stop, or that its own Pod recorded as the workload reported it. Every
        replica sees that in the row; it counts once."""
        if run.status is not JobSchedulerStatus.SUCCESS and run.stop_reason:
            self._stopped(entry, run, run.reason)
        elif not run.reason:  # an operator always gives one
            reason = {
                Outcome.COMPLETE: EventReason.RUN_SUCCEEDED,
                Outcome.RELEASE: EventReason.RUN_INTERRUPTED,
            }.get(run.outcome or Outcome.FAIL, EventReason.RUN_FAILED)
            good = reason is EventReason.RUN_SUCCEEDED
            text = which(run) if good else f"{which(run)}: {joined(REPORTED, reported_error(run.data))}"
            self.events.record(entry.body, reason, text, warning=not good, once="end")

    def _stopped(self, entry: Entry, run: Run, why: str) -> None:
        """A run has ended because it was asked to. That somebody wanted it so is nothing to warn of."""
        reason = WANTED_STOPS.get(why.partition(":")[0])
        text = f"{which(run)}: {why}"
        self.events.record(entry.body, reason or EventReason.RUN_FAILED, text, warning=not reason, once="end")

    async def _release(self, entry: Entry, action: ReleaseClaim) -> Progress:
        run = action.run
        if run.claim_token is None:
            return Progress(refresh=[run.id], again_in=0.5)
        reason = _reason(action.reason, action.message)
        self.tenants.forget(run.namespace)  # its credential may be why
        if await self.store.release_claim(run.id, run.claim_token, reason=reason, retry_ms=action.retry_ms):
            # without the attempt, so that what is tried again and again is counted
            text = f"{run_name(run.identity.run_key)}: {reason}"
            self.events.record(entry.body, EventReason.CLAIM_RELEASED, text, warning=True)
        return Progress(refresh=[run.id], leave_for=SETTLE)

    async def _delete(self, entry: Entry, action: DeletePod) -> Progress:
        pod = action.pod
        if action.reason == NOT_HELD and await self._holds(pod):
            return Progress(refresh=[UUID(pod.lease_id)], leave_for=SETTLE)
        gone = not await self.kube.delete_pod(pod.namespace, pod.name, pod.uid)
        if not gone and action.reason not in ("HistoryLimit", "StopRequested"):  # a stopped run's end says why
            self.events.record(entry.body, EventReason.POD_DELETED, f"{pod.name}: {action.reason}", once="Pod")
        return Progress(leave_for=30.0)

    async def _holds(self, pod: PodFacts) -> bool:
        """Whether the row, read now, says that this Pod's attempt is the current one: the row in memory may be older
        than a claim that another replica has just made."""
        run = (await self.store.runs_by_id(self.settings.cluster, [UUID(pod.lease_id)])).get(UUID(pod.lease_id))
        return run is not None and run.status is JobSchedulerStatus.RUNNING and run.attempt == pod.attempt

    async def _record(self, entry: Entry, view: JobView, action: RecordTicks) -> Progress:
        record = self.store.record_suspended if action.suspended else self.store.record_ticks
        answer = await record(self.settings.cluster, entry.code, action.through, action.ranges, version=view.version)
        if answer.recorded:
            await self._missed(entry, action.ranges)
            return Progress(watermark=answer.watermark)
        entry.state_stale = True  # the code's schedules may have changed
        # Another cluster may be active with the code, where these ticks are due.
        return Progress(watermark=answer.watermark, again_in=SUSPENDED_AGAIN if action.suspended else 0.5)

    async def _suspend(self, entry: Entry, action: SuspendFailing) -> Progress:
        busy, suspended = await self.store.suspend_failing(self.settings.cluster, entry.code, action.limit)
        if busy:
            return Progress(again_in=0.2)
        entry.state_stale = True
        if suspended:
            text = f"{action.limit} failed runs in a row, the last: {which(action.run)}: {action.run.reason}"
            self.events.record(
                entry.body, EventReason.SUSPENDED_AFTER_FAILURES, cut(text), warning=True, once=str(action.run.id)
            )
        return Progress(leave_for=JUDGED)

    async def _missed(self, entry: Entry, ranges: Sequence[TickRange]) -> None:
        for r in ranges:
            entry.state_stale = True
            if r.reason.kind == "skipped":  # the condition says so, each hour's Event would not
                self.metrics.ticks_skipped.labels(r.reason.value).inc(r.count)
                continue
            self.metrics.ticks_missed.labels(r.reason.value).inc(r.count)
            if r.reason.kind == "dropped":  # whoever edited the schedule knows
                continue
            text = f"{r.count} missed from {run_key_for(r.first)} to {run_key_for(r.last)}: {r.reason}"
            self.events.record(entry.body, EventReason.TICK_MISSED, text, warning=True, once="tick")

    # --- starts ------------------------------------------------------------------------------------------------------

    async def _claim_many(self, wanted: Sequence[ClaimRequest]) -> Sequence[ClaimResult]:
        asked = datetime.now(UTC)
        if self.cordoned:  # it came while the decision was made
            return [ClaimResult(verdict=ClaimVerdict.CORDONED, db_now=self.clock.now()) for _ in wanted]
        results = await self.store.claim_runs(self.settings.cluster, wanted)
        self.metrics.claim_seconds.observe((datetime.now(UTC) - asked).total_seconds())
        return results

    async def _claim(self, entry: Entry, view: JobView, action: Claim) -> Progress:
        previous = action.previous
        if entry.doomed:
            return Progress(leave_for=DOOMED)
        if previous is not None and not await self._previous_is_over(view, previous):
            return Progress(refresh=[previous.id], again_in=1.0)
        request = self.request_for(entry, view, action)
        result = await self._claims.ask(request)
        self.metrics.claims.labels(result.verdict.value).inc()
        return await self._verdict(entry, view, action, request.identity, result)

    def request_for(self, entry: Entry, view: JobView, action: Claim, *, reopen: bool = False) -> ClaimRequest:
        """What the database is asked. `reopen`: a failed run without a retry left may be claimed again."""
        policy = view.policy
        return ClaimRequest(
            identity=RunIdentity(action.type, entry.code, action.run_key),
            tick=action.tick,
            name=entry.name,
            namespace=entry.namespace,
            job_name=entry.name,
            job_uid=entry.uid,
            tenant=tenant_of(self.settings.cluster, entry.namespace),
            run_lease_ms=policy.timing.duration * 1000,
            on_overlap=action.overlap,
            starting_deadline_ms=_deadline_ms(policy, action.tick),
            backoff_limit=policy.backoff_limit,
            manual=action.manual,
            reopen=reopen,
            dropped=action.dropped,
            version=view.version,
        )

    async def _verdict(
        self, entry: Entry, view: JobView, action: Claim, identity: RunIdentity, result: ClaimResult
    ) -> Progress:
        said = f" ({result.reason})" if result.reason else ""
        key = run_name(identity.run_key)
        log.debug("%s/%s: %s: the database answers %s%s", entry.namespace, entry.name, key, result.verdict, said)
        note = ""
        progress = Progress(refresh=[result.id] if result.id else (), watermark=result.watermark, leave_for=SETTLE)
        match result.verdict:
            case ClaimVerdict.CLAIMED:
                entry.notes.pop(identity.lock_key, None)
                entry.started |= {m.uid for m in view.manual if m.lock_key == identity.lock_key}
                assert result.id is not None
                await self._missed(entry, action.dropped)
                # Crash window: claim committed, Pod not created. Another replica finds the claim and launches it.
                await self.launch_claimed(entry, view, action, identity, result)
                return progress
            case ClaimVerdict.HELD | ClaimVerdict.COMPLETED | ClaimVerdict.EXHAUSTED | ClaimVerdict.BACKOFF:
                if result.verdict is ClaimVerdict.COMPLETED:
                    note = note_of(RequestReason.ALREADY_SUCCEEDED)
                elif result.verdict is ClaimVerdict.EXHAUSTED:
                    note = note_of(RequestReason.ALREADY_FAILED)
            case ClaimVerdict.FUTURE:
                note = note_of(RequestReason.TICK_IN_THE_FUTURE)
                if not action.manual and action.tick is not None:
                    wait = (action.tick - result.db_now).total_seconds()
                    return Progress(again_in=max(0.001, wait))
            case ClaimVerdict.PAST:
                pass
            case ClaimVerdict.PRUNED:
                note = note_of(RequestReason.PRUNED)
            case ClaimVerdict.MISSED:
                entry.state_stale = True
                self.metrics.ticks_missed.labels(REASON_STARTING_DEADLINE).inc()
                text = f"{identity.run_key}: the starting deadline had passed"
                self.events.record(entry.body, EventReason.TICK_MISSED, text, warning=True, once="tick")
            case ClaimVerdict.OVERLAP_SKIPPED:
                entry.state_stale = True
                self.metrics.ticks_skipped.labels(REASON_OVERLAP).inc()
                text = f"{identity.run_key}: a run is still active"
                self.events.record(entry.body, EventReason.TICK_SKIPPED, text, once="tick")
            case ClaimVerdict.OVERLAP_WAIT:
                entry.state_stale |= result.reason == REASON_AFTER_FAILURES
                if action.manual:
                    entry.notes[identity.lock_key] = note_of(RequestReason.OVERLAP)
                return Progress(again_in=2.0)
            case ClaimVerdict.CORDONED:  # and it is known here in a moment
                return Progress(again_in=2.0)
            case ClaimVerdict.BUSY:
                entry.state_stale |= result.reason == BUSY_SCHEDULES_CHANGED
                return Progress(again_in=0.1)
            case ClaimVerdict.UNREGISTERED:
                # Another replica has heard of a deletion that this one has not: ask, before the object is registered
                # anew and a run starts for something that is gone.
                body = await self.kube.get_object("leasedjobs", entry.namespace, entry.name)
                if body is None:
                    self.cache.job_gone(entry.body)
                elif body["metadata"]["uid"] != entry.uid:
                    self.cache.job_seen(body)
                else:
                    entry.registered = None
                return Progress(again_in=0.5)
            case _:
                assert_never(result.verdict)
        if action.manual and note and action.previous is None:
            entry.notes[identity.lock_key] = note
        return progress

    async def _previous_is_over(self, view: JobView, previous: Run) -> bool:
        """Before a run that this cluster held is claimed again its Pod is looked up, past every cache.

        A Pod that has ended says what came of the attempt, and is finalized instead. One that still runs although its
        lease has expired was fenced (or its node is lost): it is deleted, and the fence, not the deletion, is what the
        next attempt relies on.
        """
        if previous.cluster != view.cluster or previous.pod_name is None:
            return True
        body = await self.kube.get_pod(previous.namespace, previous.pod_name)
        if body is None or body["metadata"]["uid"] != previous.pod_uid:
            return True
        known = self.cache.pods.get(previous.pod_uid or "")
        self.cache.pod_seen(body)
        facts = pod_facts(body)
        if facts is None:
            return True
        if facts.finished and (known is None or not known.finished):
            return False  # news: decide again with it
        if not facts.finished and not facts.deleting:
            await self.kube.delete_pod(facts.namespace, facts.name, facts.uid)
        return True

    async def _launch(self, entry: Entry, view: JobView, run: Run) -> Progress:
        if run.claim_token is None:
            return Progress(refresh=[run.id], again_in=1.0)
        attempt = Attempt(
            str(run.id),
            str(run.claim_token),
            run.lock_key,
            run.identity.type.value,
            run.identity.code,
            run.identity.run_key,
            run.tick,
            run.attempt,
            run.fencing_token,
            run.failures + run.interruptions,
        )
        await self._create(entry, view, attempt, run.created_at)
        return Progress(refresh=[run.id], leave_for=10.0)

    async def launch_claimed(
        self, entry: Entry, view: JobView, action: Claim, identity: RunIdentity, result: ClaimResult
    ) -> None:
        """Creates the Pod of a claim that was just made."""
        attempt = Attempt(
            str(result.id),
            str(result.owner_token),
            identity.lock_key,
            identity.type.value,
            identity.code,
            identity.run_key,
            action.tick,
            result.attempt or 1,
            result.fencing_token or 0,
            action.previous.failures + action.previous.interruptions if action.previous else 0,
        )
        first = action.previous.created_at if action.previous else result.db_now
        created = await self._create(entry, view, attempt, first)
        if created and action.tick is not None and action.previous is None and not action.manual:
            late = self.clock.now() - _start(view.policy, action.tick)
            self.metrics.skew_seconds.observe(max(0.0, late.total_seconds()))
            self.skew.expect(attempt.lease_id, _start(view.policy, action.tick))

    async def _create(self, entry: Entry, view: JobView, attempt: Attempt, first_claimed: datetime) -> bool:
        """Creates the attempt's Pod, or releases the claim with the reason why not. True if the Pod exists."""
        policy = view.policy
        pod = build_pod(
            owner=Owner(entry.name, entry.namespace, entry.uid),
            template=entry.template,
            attempt=attempt,
            timing=policy.timing,
            sidecar=Sidecar(
                self.settings.sidecar_image,
                self.settings.sidecar_pull_policy,
                entry.sidecar_resources or self.settings.sidecar_resources,
                (*self.settings.image_pull_secrets, *entry.pull_secrets),
                self.settings.sidecar_secret,
            ),
            cluster=view.cluster,
            active_deadline_seconds=policy.active_deadline,
            finish_policy=policy.finish_policy(),
            trace_parent=trace_parent(attempt.lease_id, attempt.number) if self.settings.otlp_endpoint else "",
        )
        refusal = "NamespaceTerminating: the namespace is being terminated" if entry.doomed else ""
        final = entry.doomed
        for delay in () if entry.doomed else CREATE_TRIES:
            await asyncio.sleep(delay)
            try:
                await self.tenants.ensure(entry.namespace)
                async with self.launches.turn(entry.key):
                    body = await self.kube.create_pod(pod)
            except KubeError as e:
                if e.status == 409 and e.reason == "AlreadyExists":
                    refusal = await self._already_there(pod)
                    if not refusal:
                        return True
                    break
                refusal = f"{e.reason or 'PodRefused'}: {e.message}"
                final = "being terminated" in e.message
                if final:
                    self._doom(entry.namespace)
                again = e.transient or e.status == 409  # 409: two Pods were counted against a quota at once
                if not again or "admission webhook" in e.message or "failed calling webhook" in e.message:
                    break
            except (DatabaseRefusedError, SchemaMissingError) as e:
                refusal = f"SidecarCredential: {e}"
                break
            else:
                self.cache.pod_seen(body, own=True)
                self.metrics.pods_created.inc()
                text = f"{run_name(attempt.run_key)}, attempt {attempt.number}: Pod {pod['metadata']['name']}"
                self.events.record(entry.body, EventReason.RUN_STARTED, text, once="attempt")
                return True
        # The claim goes back at once. If a Pod was created all the same (an answer was lost), it can't adopt any more.
        wait = None if final else launch_retry_ms(view, attempt.number, first_claimed, attempt.setbacks)
        reason = _reason("PodNotCreated", refusal)
        await self.store.release_claim(UUID(attempt.lease_id), UUID(attempt.claim_token), reason=reason, retry_ms=wait)
        self.metrics.pods_refused.inc()
        # The refusal may name the Pod, and its name ends in the attempt: without that each try says the same and is
        # counted.
        name: str = pod["metadata"]["name"]
        text = cut(refusal.replace(name, name.rpartition("-")[0]))
        self.events.record(entry.body, EventReason.POD_NOT_CREATED, text, warning=True)
        return False

    def _doom(self, namespace: str) -> None:
        """A namespace that is being terminated stays so, and takes its LeasedJobs with it: nobody asks again."""
        for entry in self.cache.jobs.values():
            if entry.namespace == namespace:
                entry.doomed = True

    async def _already_there(self, pod: dict[str, Any]) -> str:
        """A Pod of that name exists: "" if it is this claim's, else whose it is. Another attempt has another name."""
        meta = pod["metadata"]
        there = await self.kube.get_pod(meta["namespace"], meta["name"])
        if there is None:
            return "PodNameTaken: a Pod of this name was just deleted"
        notes = there["metadata"].get("annotations") or {}
        ours = meta["annotations"]
        if all(notes.get(a) == ours[a] for a in (ANNOTATION_LEASE, ANNOTATION_CLAIM)):
            self.cache.pod_seen(there)
            return ""
        if (there["metadata"].get("labels") or {}).get(LABEL_CLUSTER) not in (None, meta["labels"][LABEL_CLUSTER]):
            return (
                f"PodNameTaken: another operator has created Pod {meta['name']} for this run: two releases serve this "
                "namespace (watchNamespaces and excludeNamespaces say which one does)"
            )
        return f"PodNameTaken: Pod {meta['name']} exists and belongs to something else"
