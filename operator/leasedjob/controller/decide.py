"""From what was observed of one LeasedJob to what has to be done. Pure: no clock, no I/O.

Order matters and is kept: attempts that have ended are finalized before anything is claimed, and Pods are cleaned up
whether or not anything can be created.

A decision may rest on stale caches; every statement that follows from it carries its own condition (id, attempt, token,
Pod UID, the database's clock), so that a stale decision changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, assert_never

from leasedjob.api.v1alpha1 import ConcurrencyPolicy, ExitZeroOnStop
from leasedjob.controller.facts import PodFacts
from leasedjob.controller.model import JobView, Policy
from leasedjob.controller.outcome import (
    Outcome,
    Result,
    Undecided,
    adoption_refusal,
    joined,
    outcome,
    waiting_reason,
)
from leasedjob.identity import JobSchedulerType, pod_name, run_key_for
from leasedjob.lease.rows import (
    INTERRUPTION_LIMIT,
    REASON_CANCELLED,
    REASON_JOB_DELETED,
    JobSchedulerStatus,
    OverlapRule,
    Run,
)
from leasedjob.schedule import (
    CodeTicks,
    DueTicks,
    MissedRunPolicy,
    TickRange,
    TickReason,
    Ticks,
    passed_over,
    ticks_due,
)

LAUNCH_GRACE: Final = timedelta(seconds=0.6)  # how long a claim's own replica has for its Pod before another one helps
LAUNCH_PATIENCE: Final = timedelta(seconds=10)  # the same, while Pods that others create keep coming
ON_TIME: Final = timedelta(seconds=60)  # a tick that is started later than this was missed
NOT_HELD: Final = "LeaseNotHeld"
PREDECESSOR_GRACE: Final = timedelta(seconds=10)  # for other clusters to claim what a deleted object has left
SUSPENDED_EVERY: Final = timedelta(hours=1)
EXPIRY_MARGIN: Final = timedelta(milliseconds=20)
LAUNCH_RETRY_SECONDS: Final = (
    5,
    10,
    20,
    40,
    60,
)  # a Pod that was refused starts within a minute after the cause is gone


@dataclass(frozen=True, slots=True)
class End:
    """Finalize an adopted attempt. `retry_ms`: -1 backoff by the row's counters, None no more attempts."""

    run: Run
    pod_uid: str
    result: Result
    reason: str
    message: str
    retry_ms: int | None
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReleaseClaim:
    run: Run
    reason: str
    message: str
    retry_ms: int | None


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends a run for good: an adopted one is asked to stop, anything else gets no further attempt at once."""

    run: Run
    reason: str


@dataclass(frozen=True, slots=True)
class DeletePod:
    pod: PodFacts
    reason: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Create the Pod of a claim that has none."""

    run: Run


@dataclass(frozen=True, slots=True)
class Claim:
    """Try to become the holder. `previous`: the row; a Pod of this cluster that held it is looked up first."""

    type: JobSchedulerType
    run_key: str | None
    tick: datetime | None
    overlap: OverlapRule
    manual: bool = False
    previous: Run | None = None
    dropped: tuple[TickRange, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordTicks:
    """Write ticks down that don't run. `suspended`: by spec.suspend, so only if no other cluster is active."""

    through: datetime
    ranges: tuple[TickRange, ...]
    suspended: bool = False


@dataclass(frozen=True, slots=True)
class SuspendFailing:
    """Suspend the schedule, if the last `limit` runs have failed; `run` is the latest, which has."""

    run: Run
    limit: int


Action = End | ReleaseClaim | Stop | DeletePod | Launch | Claim | RecordTicks | SuspendFailing


def told(action: Action) -> str:
    """An action in one line, for the log: which run or Pod, what is done, and why."""
    match action:
        case End(run=run):
            return f"{which(run)}: ends as {action.result}: {action.reason} {action.message}".rstrip()
        case ReleaseClaim(run=run):
            return f"{which(run)}: the claim is given back: {action.reason} {action.message}".rstrip()
        case Stop(run=run):
            return f"{which(run)}: is to stop: {action.reason}"
        case DeletePod(pod=pod):
            return f"{run_name(pod.run_key)}, attempt {pod.attempt}: Pod {pod.name} goes: {action.reason}"
        case Launch(run=run):
            return f"{which(run)}: gets its Pod: claimed, and none is there"
        case Claim(previous=previous):
            if previous is not None:
                return f"{which(previous)}: to be claimed again: {previous.reason or 'its lease has expired'}"
            why = "asked for by a LeasedJobRun" if action.manual else "due"
            return f"{run_name(action.run_key)}: to be claimed: {why}, overlap: {action.overlap}"
        case RecordTicks():
            ranges = "; ".join(f"{r.count} {r.reason}" for r in action.ranges) or "it has been run already"
            return f"{run_key_for(action.through)}: ticks up to here are passed over: {ranges}"
        case SuspendFailing(run=run):
            return f"{which(run)}: has failed: the schedule is suspended if the last {action.limit} runs have"
        case _:
            assert_never(action)


def run_name(run_key: str | None) -> str:
    """A run for a person."""
    return run_key or "the initial run"


def which(run: Run) -> str:
    """An attempt for a person."""
    return f"{run_name(run.identity.run_key)}, attempt {run.attempt}"


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. `wake_at`: when to look again if nothing happens. `waits`: what isn't done, and why, in words."""

    actions: tuple[Action, ...]
    wake_at: datetime | None
    waits: tuple[str, ...] = ()


@dataclass(slots=True)
class _Wake:
    """The earliest time at which something may change by itself, and what is waited for."""

    at: datetime | None = None
    waits: list[str] = field(default_factory=list)

    def by(self, at: datetime | None) -> None:
        if at is not None and (self.at is None or at < self.at):
            self.at = at

    def because(self, text: str) -> None:
        self.waits.append(text)


def decide(job: JobView) -> Decision:
    """All that has to be done for `job` now, and when to look again if nothing happens."""
    wake = _Wake()
    actions: list[Action] = []
    cancelled = {m.lock_key for m in job.manual if m.cancel}
    for run in sorted(job.rows.values(), key=lambda r: (r.created_at, r.lock_key)):
        if run.status is JobSchedulerStatus.RUNNING:
            actions += _running(job, run, run.lock_key in cancelled, wake)
        elif run.status is JobSchedulerStatus.FAIL and run.retry_at is not None:
            actions += _retry(job, run, run.lock_key in cancelled, wake)
    actions += losers(job)
    actions += history(job)
    if job.watermark is not None:
        actions += _manual(job, wake)
        actions += _initial(job)
        actions += _failing(job)
        actions += _ticks(job, wake)
    actions.sort(key=lambda a: isinstance(a, Claim | Launch))  # stable: what ends and what is tidied up comes first
    return Decision(tuple(actions), wake.at, tuple(wake.waits))


# --- a run that is held ----------------------------------------------------------------------------------------------


def _running(job: JobView, run: Run, cancelled: bool, wake: _Wake) -> Iterator[Action]:
    expired = run.expires_at <= job.now
    if cancelled and run.stop_requested_at is None:
        yield Stop(run, REASON_CANCELLED)
        return
    if run.cluster != job.cluster:
        if expired:
            yield from _reclaim(job, run, wake)
        else:
            wake.by(run.expires_at + EXPIRY_MARGIN)
        return
    if run.pod_uid is None:
        yield from _claimed(job, run, expired, wake)
    else:
        yield from _adopted(job, run, expired, wake)


def _claimed(job: JobView, run: Run, expired: bool, wake: _Wake) -> Iterator[Action]:
    """The claim is ours and no Pod has adopted it. A claim is always released *before* its Pod is deleted, so that the
    Pod can't adopt it on its way out."""
    pod = _pod_of_attempt(job, run)
    deadline = run.started_at + timedelta(seconds=job.policy.pending_deadline)
    if expired:
        yield from _reclaim(job, run, wake)
        return
    wake.by(run.expires_at + EXPIRY_MARGIN)
    if pod is None:
        # Crash window: claim committed, Pod not created. Any replica of this cluster launches it.
        at = _helped_from(job, run)
        if job.fresh and job.now >= at:
            yield Launch(run)
        else:
            wake.by(at)
        return
    if refusal := adoption_refusal(pod):
        yield ReleaseClaim(run, "NotAdopted", refusal, _relaunch_ms(job, run))
    elif pod.deleting or (pod.finished and pod.stop_requested_at is not None):
        yield ReleaseClaim(run, "Interrupted", "the Pod was stopped before it took the lease", _interrupt_ms(run))
    elif pod.finished:  # the kubelet would not admit it (OutOfcpu, ...)
        why, message = waiting_reason(pod)
        yield ReleaseClaim(run, "NotAdopted", joined(why, message), _relaunch_ms(job, run))
    elif job.now >= deadline:
        why, message = waiting_reason(pod)
        yield ReleaseClaim(run, "PendingDeadlineExceeded", joined(why, message), None)
        yield DeletePod(pod, "PendingDeadlineExceeded")
    else:
        wake.by(deadline)


def _helped_from(job: JobView, run: Run) -> datetime:
    """From when on another replica launches a claim. At a tick that many objects share the winner has many Pods to
    create; while they keep coming it lives."""
    if job.helped_at is None or job.helped_at + LAUNCH_GRACE <= job.now:
        return run.started_at + LAUNCH_GRACE
    return max(run.started_at + LAUNCH_GRACE, min(job.now + LAUNCH_GRACE, run.started_at + LAUNCH_PATIENCE))


def _adopted(job: JobView, run: Run, expired: bool, wake: _Wake) -> Iterator[Action]:
    pod = next((p for p in job.pods if p.uid == run.pod_uid), None)
    # Crash window: workload exited, outcome not written. The Pod still says how it ended, also after the lease's end.
    deadline = run.started_at + timedelta(seconds=job.policy.pending_deadline)
    if pod is not None:
        ended = outcome(
            pod, exit_zero_on_stop=job.policy.exit_zero_on_stop
        )  # fmt: skip
        if isinstance(ended, Outcome):
            yield _end(run, pod, ended)
            return
        wake.because(f"{which(run)}: no outcome: {ended.why}")
        if not pod.deleting and not pod.finished:
            if run.stop_requested_at is not None:
                yield DeletePod(pod, "StopRequested")
            elif not pod.workload_complete:
                if job.now >= deadline:
                    why, message = waiting_reason(pod)
                    yield Stop(run, f"PendingDeadlineExceeded: {joined(why, message)}")
                    return
                else:
                    wake.by(deadline)
    if expired:
        yield from _reclaim(job, run, wake)
    else:
        wake.by(run.expires_at + EXPIRY_MARGIN)


def _end(run: Run, pod: PodFacts, ended: Outcome) -> End:
    result, reason, message = ended.result, ended.reason, ended.message
    # A run that was asked to stop has no further attempt, and the database keeps why: see close_attempt.
    if result is Result.RELEASE and run.interruptions + 1 > INTERRUPTION_LIMIT:
        result, reason = Result.ENDED, "InterruptionLimitExceeded"
        message = f"interrupted more than {INTERRUPTION_LIMIT} times; the last time: {message}"
    retry = {Result.COMPLETE: None, Result.FAIL: -1, Result.RELEASE: 0, Result.ENDED: None}[result]
    return End(run, pod.uid, result, reason, message, retry, ended.data)


def _retry(job: JobView, run: Run, cancelled: bool, wake: _Wake) -> Iterator[Action]:
    assert run.retry_at is not None
    if cancelled:
        yield Stop(run, REASON_CANCELLED)
    elif _launch_given_up(job, run) and not job.cordoned:
        yield Stop(run, f"PendingDeadlineExceeded: {run.reason}")
    elif run.retry_at <= job.now:
        yield from _reclaim(job, run, wake)
    else:
        wake.because(f"{which(run)}: the next attempt is at {run.retry_at:%H:%M:%S} UTC: {run.reason}")
        wake.by(run.retry_at)


def _launch_given_up(job: JobView, run: Run) -> bool:
    """A run whose Pods were refused for as long as the pending deadline: it ends, and its slot is free."""
    refused = run.adopted_at is None and run.failures == 0 and run.interruptions == 0
    return refused and job.now >= run.created_at + timedelta(seconds=job.policy.pending_deadline)


def _reclaim(job: JobView, run: Run, wake: _Wake) -> Iterator[Action]:
    if job.watermark is None:
        return
    if _of_a_predecessor(job, run) and run.stop_requested_at is None:
        # Its ticks ended with that object, as its retries did. A cluster that still has its own object goes first.
        if job.now >= run.expires_at + PREDECESSOR_GRACE:
            yield Stop(run, REASON_JOB_DELETED)
        else:
            wake.by(run.expires_at + PREDECESSOR_GRACE)
    elif job.cordoned:
        wake.because(f"{which(run)}: the next attempt is another cluster's: {job.cordoned}")
    else:
        # A later tick may have begun when this lease had expired, so here the policy has to be asked as well. Which of
        # two runs is given up is only decided when one of them begins.
        overlap = OverlapRule.ALLOW if job.policy.concurrency is ConcurrencyPolicy.ALLOW else OverlapRule.WAIT
        identity = run.identity
        yield Claim(identity.type, identity.run_key, run.tick, overlap, manual=run.manual, previous=run)


def _of_a_predecessor(job: JobView, run: Run) -> bool:
    """Crash window: a LeasedJob was deleted while its Pod ran, the attempt's end was never seen, and an object of the
    same name was created since. What has to happen once ever (Initial) doesn't end with the object."""
    held_here = run.status is JobSchedulerStatus.RUNNING and run.cluster == job.cluster
    return (
        held_here
        and job.uid != ""
        and run.job_uid not in ("", job.uid)
        and run.identity.type is JobSchedulerType.SCHEDULE
    )


def launch_retry_ms(job: JobView, attempt: int, first_claimed: datetime, setbacks: int = 0) -> int | None:
    """When a claim whose Pod could not be had is tried again; None when it has been tried for long enough.

    Args:
        attempt: the claim's number within its run.
        first_claimed: when the run was first claimed.
        setbacks: attempts of the run that did take the lease, and failed or were interrupted. With any, the time since
            the first claim says nothing of how long Pods have been refused, so the delays are added up instead.
    """
    tries = max(1, attempt - setbacks)
    delay = LAUNCH_RETRY_SECONDS[min(tries, len(LAUNCH_RETRY_SECONDS)) - 1]
    if setbacks == 0:
        waited = (job.now - first_claimed).total_seconds()
    else:
        earlier = LAUNCH_RETRY_SECONDS[: tries - 1]
        waited = sum(earlier) + (tries - 1 - len(earlier)) * LAUNCH_RETRY_SECONDS[-1]
    return None if waited + delay >= job.policy.pending_deadline else delay * 1000


def _relaunch_ms(job: JobView, run: Run) -> int | None:
    return launch_retry_ms(job, run.attempt, run.created_at, run.failures + run.interruptions)


def _interrupt_ms(run: Run) -> int | None:
    return None if run.interruptions + 1 > INTERRUPTION_LIMIT else 1000


def _pod_of_attempt(job: JobView, run: Run) -> PodFacts | None:
    mine = [p for p in job.pods if p.lease_id == str(run.id) and p.attempt == run.attempt]
    # Anybody may copy a Pod; the name that follows from run and attempt can't be had twice.
    name = pod_name(run.job_name, run.lock_key, run.attempt)
    return next((p for p in mine if p.name == name), mine[0] if mine else None)


# --- what starts -----------------------------------------------------------------------------------------------------


def _active(job: JobView) -> list[Run]:
    """Runs that overlap with a new one: held, or failed with attempts left. The database decides by the same rule."""
    return [
        r
        for r in job.rows.values()
        if (r.status is JobSchedulerStatus.RUNNING and r.expires_at > job.now)
        or (r.status is JobSchedulerStatus.FAIL and r.retry_at is not None)
    ]


def _overlap(policy: Policy, *, manual: bool) -> OverlapRule:
    match policy.concurrency:
        case ConcurrencyPolicy.ALLOW:
            return OverlapRule.ALLOW
        case ConcurrencyPolicy.REPLACE:
            return OverlapRule.REPLACE
        case ConcurrencyPolicy.FORBID:
            # RunAll promises every tick its run, so an overlapping one waits its turn instead of being skipped.
            return OverlapRule.WAIT if manual or policy.missed is MissedRunPolicy.RunAll else OverlapRule.SKIP


def _must_wait(job: JobView, overlap: OverlapRule) -> bool:
    """The database would answer "wait", and for Replace has already been asked to stop the runs in the way."""
    active = _active(job)
    if not active or overlap in (OverlapRule.ALLOW, OverlapRule.SKIP):
        return False
    # Runs that wait for a retry are given up by the database when it is asked: only those that run are waited for.
    held = [r for r in active if r.status is JobSchedulerStatus.RUNNING]
    return overlap is OverlapRule.WAIT or (bool(held) and all(r.stop_requested_at for r in held))


def manual_waits(job: JobView) -> bool:
    """Whether a run that somebody asks for now has to wait for another one to end."""
    return _must_wait(job, _overlap(job.policy, manual=True))


def _manual(job: JobView, wake: _Wake) -> Iterator[Action]:
    overlap = _overlap(job.policy, manual=True)
    for m in job.manual:
        if m.cancel or m.refusal or job.run_with_key(m.lock_key) is not None:
            continue
        if job.cordoned:
            wake.because(f"LeasedJobRun {m.name}: {job.cordoned}")
            continue
        if _must_wait(job, overlap):
            wake.because(f"LeasedJobRun {m.name}: another run is active")
            continue
        yield Claim(JobSchedulerType.SCHEDULE, m.run_key, m.tick, overlap, manual=True)
        if overlap is not OverlapRule.ALLOW:
            return


def _initial(job: JobView) -> Iterator[Action]:
    if job.policy.type is not JobSchedulerType.INITIAL or job.policy.suspend or job.cordoned:
        return
    if job.run_with_key(job.initial_lock_key) is None:
        yield Claim(JobSchedulerType.INITIAL, None, None, OverlapRule.ALLOW)


def _failing(job: JobView) -> Iterator[SuspendFailing]:
    """Runs that the schedule started count; what was stopped because somebody wanted it has not failed."""
    if job.policy.suspend_after is None or job.suspended:
        return
    ended = [
        r
        for r in job.rows.values()
        if r.terminal and not r.manual and r.tick is not None and not r.stopped_as and r.reason != REASON_JOB_DELETED
    ]
    latest = max(ended, key=lambda r: r.created_at, default=None)
    if latest is not None and latest.status is JobSchedulerStatus.FAIL:
        yield SuspendFailing(latest, job.policy.suspend_after)


def _suspended(job: JobView, schedule: Ticks, watermark: datetime, wake: _Wake) -> Iterator[RecordTicks]:
    """Ticks of a suspended code are written down, some time after the first of them: they grow one range, and a
    resume writes down what is left."""
    first, latest = schedule.next(watermark), schedule.previous(job.now)
    if first is None:
        return
    if latest is None or latest < first or job.now < first + SUSPENDED_EVERY:
        wake.by(first + SUSPENDED_EVERY)
        return
    reason = TickReason.SuspendedAfterFailures if job.suspended else TickReason.Suspended
    yield RecordTicks(latest, passed_over(schedule, watermark, job.now, reason), suspended=not job.suspended)


def _ticks(job: JobView, wake: _Wake) -> Iterator[Action]:
    policy = job.policy
    if policy.type is not JobSchedulerType.SCHEDULE or policy.schedule is None:
        return
    assert job.watermark is not None
    if policy.suspend or job.suspended:
        yield from _suspended(job, job.ticks or policy.schedule, job.watermark, wake)
        return
    if job.cordoned:
        # Neither run nor recorded: another cluster does that, or this one when the cordon ends.
        wake.because(f"its ticks are another cluster's: {job.cordoned}")
        return
    wake.by(policy.schedule.next_start(job.now))
    due = ticks_due(
        policy.schedule,
        # An edit fires no old tick, wherever the watermark stands.
        job.watermark if job.ticks is None else job.ticks.since(job.schedule_hash, job.watermark),
        job.now,
        policy.missed,
        limit=policy.missed_limit,
        starting_deadline=policy.starting_deadline,
        on_time=ON_TIME,
    )
    passes = _passes(job, due)
    if not due.claims:
        ranges = passes[0] if due.dropped or job.ticks is None else _left(job, job.ticks)
        if ranges:
            yield RecordTicks(max(r.last for r in ranges), ranges)
        return
    overlap = _overlap(policy, manual=False)
    active = _active(job)
    if overlap is OverlapRule.SKIP and active and all(r.manual and r.tick is not None for r in active):
        overlap = OverlapRule.WAIT  # past ticks that a person asked for, by name or as a backfill, cost no later one
    if _must_wait(job, overlap):
        wake.because(f"{run_key_for(due.claims[0])}: another run is active")
        return
    if job.run_of_tick(due.claims[0]) is not None:
        # Somebody ran this very tick by name: it is decided, and those after it are not held up by it.
        yield RecordTicks(due.claims[0], passes[0])
        return
    ticks = due.claims if overlap is OverlapRule.ALLOW else due.claims[:1]
    for tick, dropped in zip(ticks, passes, strict=False):
        yield Claim(JobSchedulerType.SCHEDULE, run_key_for(tick), tick, overlap, dropped=dropped)


def _passes(job: JobView, due: DueTicks) -> tuple[tuple[TickRange, ...], ...]:
    """What each claim passes; what is recorded, if there is none."""
    if job.ticks is None or job.watermark is None:
        return (due.dropped, *(() for _ in due.claims[1:]))
    return job.ticks.widened(due, job.watermark, job.schedule_hash)


def _left(job: JobView, ticks: CodeTicks) -> tuple[TickRange, ...]:
    """What an edit left behind that has come to every cluster by now."""
    assert job.watermark is not None
    return ticks.left(job.watermark, job.now, job.schedule_hash)


# --- what is tidied up -----------------------------------------------------------------------------------------------


def losers(job: JobView) -> Iterator[DeletePod]:
    """Pods whose claim or lease is another's by now, or nobody's: they would wait for ever, or have been fenced."""
    for pod in job.pods:
        run = _row_of(job, pod)
        if run is None or pod.finished or pod.deleting:
            continue
        held = run.status is JobSchedulerStatus.RUNNING and run.attempt == pod.attempt
        if not held and (run.attempt > pod.attempt or not pod.workload_started):
            yield DeletePod(pod, NOT_HELD)


def history(job: JobView) -> Iterator[DeletePod]:
    """Finished Pods beyond the history limits. A Pod that has still to be finalized is evidence and stays."""
    closed = [p for p in job.pods if p.finished and not p.deleting and _closed(job, p)]
    closed.sort(key=lambda p: (p.created_at.timestamp() if p.created_at else 0.0, p.name), reverse=True)
    for phase, keep in (("Succeeded", job.policy.keep_successful), ("Failed", job.policy.keep_failed)):
        for pod in [p for p in closed if p.phase == phase][keep:]:
            yield DeletePod(pod, "HistoryLimit")


def _row_of(job: JobView, pod: PodFacts) -> Run | None:
    return next((r for r in job.rows.values() if str(r.id) == pod.lease_id), None)


def _closed(job: JobView, pod: PodFacts) -> bool:
    run = _row_of(job, pod)
    if run is None:
        # Its row is older than what is kept in memory, or foreign; a young Pod's row may not have been read yet.
        return pod.created_at is not None and job.now - pod.created_at > timedelta(minutes=10)
    return run.attempt != pod.attempt or run.status is not JobSchedulerStatus.RUNNING


def orphan(pod: PodFacts, run: Run, *, exit_zero_on_stop: ExitZeroOnStop) -> End | None:
    """Crash window: the LeasedJob was deleted while its Pod ran. The Pod carries what finalizing needs."""
    if run.status is not JobSchedulerStatus.RUNNING or run.pod_uid != pod.uid or run.attempt != pod.attempt:
        return None
    ended = outcome(pod, exit_zero_on_stop=exit_zero_on_stop)
    return None if isinstance(ended, Undecided) else _end(run, pod, ended)


__all__ = [
    "Action",
    "Claim",
    "Decision",
    "DeletePod",
    "End",
    "Launch",
    "RecordTicks",
    "ReleaseClaim",
    "Stop",
    "SuspendFailing",
    "decide",
    "history",
    "manual_waits",
    "orphan",
    "told",
]
