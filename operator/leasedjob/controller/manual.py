"""LeasedJobRuns that ask for one run: what they ask for, and what became of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from leasedjob.api.fields import unknown_in_run
from leasedjob.api.problem import Problem, Reason
from leasedjob.api.v1alpha1 import ConditionStatus, LeasedJobRunStatus, RunPhase, manual_run_key
from leasedjob.controller.conditions import condition
from leasedjob.controller.facts import parse_time
from leasedjob.controller.model import ManualRun, Policy
from leasedjob.errors import InvalidJobIdentityOptionsError
from leasedjob.identity import JobSchedulerType, RunIdentity, run_key_for
from leasedjob.lease.rows import REASON_CANCELLED, REASON_RESTORED, JobSchedulerStatus, Run

Json = Mapping[str, Any]
FINAL: Final = frozenset({"Succeeded", "Failed", "Cancelled", "Refused"})


class RequestReason(StrEnum):
    """Every `reason` of a LeasedJobRun, beside those for which attempts end and Pods wait."""

    NOT_CLAIMED = "Pending"
    JOB_NOT_READY = "JobNotReady"
    OVERLAP = "Overlap"
    CORDONED = "ClusterCordoned"
    CLAIMED = "Claimed"
    ADOPTED = "Adopted"
    WAITING_FOR_RETRY = "WaitingForRetry"
    COMPLETED = "Completed"
    CANCELLED = REASON_CANCELLED
    FAILED = "Failed"  # of an attempt whose workload gave no reason
    INVALID_SPEC = "InvalidSpec"
    INVALID_TICK = "InvalidTick"
    NOT_A_TICK = "NotATick"
    TICK_IN_THE_FUTURE = "TickInTheFuture"
    ALREADY_SUCCEEDED = "AlreadySucceeded"
    ALREADY_FAILED = "AlreadyFailed"
    PRUNED = "Pruned"
    PLANNING = "Planning"  # of a backfill, as what follows
    PLANNED = "Planned"
    TOO_MANY_TICKS = "TooManyTicks"
    BACKFILLING = "Backfilling"
    RUNS_FAILED = "RunsFailed"


WAITS: Final = (RequestReason.OVERLAP, RequestReason.CORDONED, RequestReason.NOT_CLAIMED)
SAID: Final = {
    RequestReason.OVERLAP: "another run of this job is active",
    RequestReason.CORDONED: "this cluster takes no new runs",
    RequestReason.TICK_IN_THE_FUTURE: "this tick has not come yet",
    RequestReason.ALREADY_SUCCEEDED: "this run is recorded as SUCCESS",
    RequestReason.ALREADY_FAILED: "this run has used up its attempts",
    RequestReason.PRUNED: "records of this time were deleted, so whether it ran is not known any more",
}


def note_of(reason: RequestReason) -> str:
    """Why a request doesn't start, as `<Reason>: <message>`."""
    return f"{reason}: {SAID[reason]}"


def phase_of(body: Json) -> str:
    return str((body.get("status") or {}).get("phase") or "")


def asks_for_one_run(body: Json) -> bool:
    """Whether it asks for one run, and not for a backfill or something else about runs. One of a later version, which
    says more than this version can read, is left to that version's operators."""
    spec = body.get("spec") or {}
    return spec.get("action") in (None, "Run") and spec.get("backfill") is None and not unknown_in_run(spec)


def run_key(body: Json) -> tuple[str, datetime | None]:
    """The run key that a LeasedJobRun stands for, and its tick.

    With a tick: that tick's own run, which a recorded SUCCESS closes. Without: a run of its own, named by the object.

    Raises ValueError for a tick that can't be read.
    """
    meta, spec = body["metadata"], body.get("spec") or {}
    if spec.get("tick"):
        tick = parse_time(spec["tick"])
        if tick is None or tick.microsecond:
            raise ValueError(_about_tick(f"{spec['tick']!r} is not an RFC 3339 time on a whole second"))
        return run_key_for(tick), tick
    return manual_run_key(meta["namespace"], meta["name"], meta["uid"]), None


def tick_refusal(policy: Policy, tick: datetime) -> str:
    """Why the job can't run `tick`, as `<Reason>: <message>`; "" if it is a tick of its schedule."""
    schedule = policy.schedule
    if schedule is None:
        why = "a LeasedJob of type Initial has no ticks; without a tick this starts a run of its own"
    elif schedule.matches(tick):
        return ""
    else:
        found = (schedule.previous(tick), schedule.next(tick))
        nearest = " and ".join(run_key_for(t) for t in found if t is not None) or "none"
        said = f'is no tick of "{schedule.expression}" in {schedule.time_zone}'
        why = f"{run_key_for(tick)} {said}; the nearest: {nearest}"
    return f"{RequestReason.NOT_A_TICK}: {_about_tick(why)}"


def _about_tick(message: str) -> str:
    return str(Problem("spec.tick", Reason.INVALID_SPEC, message))


def requests(code: str, bodies: Iterable[Json], policy: Policy | None = None) -> tuple[ManualRun, ...]:
    """The requests that are not done yet, oldest first. `policy`: of their LeasedJob, None if it isn't accepted."""
    found = []
    for body in bodies:
        if phase_of(body) in FINAL or not code or not asks_for_one_run(body):
            continue
        try:
            key, tick = run_key(body)
            lock = RunIdentity.of(type=JobSchedulerType.SCHEDULE, code=code, run_key=key).lock_key
        except (ValueError, InvalidJobIdentityOptionsError):
            continue  # refused by `status`
        meta = body["metadata"]
        cancel = bool((body.get("spec") or {}).get("cancel"))
        refusal = tick_refusal(policy, tick) if policy is not None and tick is not None else ""
        found.append(ManualRun(meta["uid"], meta["name"], key, lock, tick, cancel, refusal))
    return tuple(found)


def behind(old: Json, new: Json) -> bool:
    """Whether `new` was computed from an older row than `old`: an earlier attempt, or before its adoption. A database
    that was restored has really gone back, and says so."""
    if new.get("reason") == REASON_RESTORED:
        return False
    mine, theirs = int(new.get("attempt") or 0), int(old.get("attempt") or 0)
    not_yet = new.get("phase") == "Pending" and new.get("reason") != RequestReason.WAITING_FOR_RETRY
    return mine < theirs or (mine == theirs and not_yet and old.get("reason") == RequestReason.ADOPTED)


def status(
    body: Json,
    *,
    code: str,
    run: Run | None,
    problem: str,
    note: str,
    now: datetime,
    waiting: tuple[str, str] | None = None,
    mine: bool = False,
) -> dict[str, Any]:
    """The status of a LeasedJobRun.

    Args:
        run: its row, None if no claim was made yet.
        problem: why its LeasedJob can't run at all ("" if it can).
        note: why the claim was refused or waits, as `<Reason>: <message>` ("" if it wasn't).
        waiting: why its Pod's workload doesn't run yet, reason and message; None if it runs, or no Pod is known.
        mine: this process claimed the run for it.
    """
    old: Json = body.get("status") or {}
    meta, spec = body["metadata"], body.get("spec") or {}
    cancel = bool(spec.get("cancel"))
    try:
        key, tick = run_key(body)
    except ValueError as e:
        return _with(old, meta, "Refused", RequestReason.INVALID_TICK, str(e), now)
    facts: dict[str, Any] = {"code": code or None, "run_key": key}
    if run is None:
        if cancel:
            return _with(old, meta, "Cancelled", RequestReason.CANCELLED, "cancelled before it began", now, facts)
        if note:
            reason, _, message = note.partition(": ")
            waits = reason in WAITS
            return _with(old, meta, "Pending" if waits else "Refused", reason, message or reason, now, facts)
        if problem:
            return _with(old, meta, "Pending", RequestReason.JOB_NOT_READY, problem, now, facts)
        return _with(old, meta, "Pending", RequestReason.NOT_CLAIMED, "not claimed yet", now, facts)
    # A tick's run may have ended before anybody asked for it. No clock tells: it is this object's run if the object has
    # no tick, if it was claimed for the object, or if it was seen going on since.
    if run.terminal and tick is not None and not mine and not old.get("attempt"):
        succeeded = run.status is JobSchedulerStatus.SUCCESS
        already = RequestReason.ALREADY_SUCCEEDED if succeeded else RequestReason.ALREADY_FAILED
        return _with(old, meta, "Refused", already, SAID[already], now, facts)
    # The other replica may have seen already who adopted this attempt.
    seen = old if old.get("attempt") == run.attempt else {}
    facts |= {
        "attempt": run.attempt,
        "start_time": run.started_at,
        "pod_name": run.pod_name or seen.get("podName"),
        "holder": run.holder or seen.get("holder"),
    }
    if run.status is JobSchedulerStatus.SUCCESS:
        return _with(old, meta, "Succeeded", RequestReason.COMPLETED, "", now, facts, run.finished_at)
    if run.status is JobSchedulerStatus.FAIL and run.retry_at is None:
        cancelled = run.stopped_as == REASON_CANCELLED
        reason = run.reason.partition(":")[0] or RequestReason.FAILED
        return _with(old, meta, "Cancelled" if cancelled else "Failed", reason, run.reason, now, facts, run.finished_at)
    if run.status is JobSchedulerStatus.FAIL:
        return _with(old, meta, "Pending", RequestReason.WAITING_FOR_RETRY, run.reason, now, facts)
    if waiting is not None:
        return _with(old, meta, "Pending", waiting[0], waiting[1], now, facts)
    if run.pod_uid is not None:
        return _with(old, meta, "Running", RequestReason.ADOPTED, "", now, facts)
    return _with(old, meta, "Pending", RequestReason.CLAIMED, "", now, facts)


def answer(
    body: Json, phase: str, reason: str, message: str, now: datetime, facts: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The status of a LeasedJobRun that asks for something else than one run."""
    return _with(body.get("status") or {}, body["metadata"], phase, reason, message, now, facts)


def _with(
    old: Json,
    meta: Json,
    phase: str,
    reason: str,
    message: str,
    now: datetime,
    facts: dict[str, Any] | None = None,
    completed: datetime | None = None,
) -> dict[str, Any]:
    done = phase in FINAL
    truth = ConditionStatus.TRUE if phase == "Succeeded" else ConditionStatus.FALSE if done else ConditionStatus.UNKNOWN
    generation = int(meta.get("generation") or 1)
    result = LeasedJobRunStatus(
        observed_generation=generation,
        conditions=[condition(old, "Succeeded", truth, reason or phase, message, generation, now)],
        phase=RunPhase(phase),
        reason=reason or None,
        message=message or None,
        completion_time=(completed or now) if done else None,
        **(facts or {}),
    )
    return result.model_dump(mode="json", by_alias=True, exclude_none=True)
