"""Why a tick ran, did not run, or has not run yet. Pure: the one place that says so in words.

What counts, in this order: the tick's own row; the ledger; what lies ahead of the watermark and what it waits for; and
for what lies behind it without a record, whether the record was deleted or the tick never counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, assert_never

from leasedjob.api.v1alpha1 import Explanation, LedgerKind, LedgerRange, RunOutcome, RunStatus, Verdict
from leasedjob.controller.decide import which
from leasedjob.controller.facts import parse_time
from leasedjob.controller.model import Policy
from leasedjob.identity import JobSchedulerType, run_key_for
from leasedjob.lease.rows import REASON_RESTORED, CodeState, JobSchedulerStatus, LedgerEntry, Run
from leasedjob.schedule import InForce, TickReason

_TICK_KEY: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)(?:#r([1-9]\d{0,8}))?")

SAID: Final = {
    "Overlap": "another run was active, and concurrencyPolicy is Forbid",
    TickReason.Suspended: "spec.suspend was true",
    TickReason.SuspendedAfterFailures: "so many runs in a row had failed that the schedule was suspended",
    TickReason.StartingDeadline: "nobody could start it before startingDeadlineSeconds were over",
    TickReason.MissedRunPolicy: "it was missed, and missedRunPolicy starts only the latest tick, or none",
    TickReason.MissedRunLimit: "more ticks were missed than missedRunLimit",
    TickReason.SpecDiffers: "it was a tick of another cluster's schedule, and nobody there had started it yet when a "
    "later tick of this cluster's was decided",
    TickReason.ScheduleEdited: "it was due and not decided yet when the schedule was edited",
    TickReason.JobDeleted: "it was due, by the LeasedJob that had this name before, and not decided yet when that was "
    "found deleted",
    REASON_RESTORED: "the database was restored to an earlier point, and what became of the tick is not known",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one tick, or of one run.

    Args:
        now: the database's clock.
        tick: None for a run that has none.
        run_key: of the run that is asked for; None for type Initial.
        policy: None where the object isn't accepted.
        problem: why the object isn't Ready, reason and message.
        run, shown: its row, and how that is shown.
        reruns: further runs of the tick, the latest first.
        entry: the ledger's range that the tick is in.
        in_force: the schedules of the code that were in force at the tick, in any cluster, as far as that is known.
        active: other runs of the code that are active.
        waiting: why the workload of its Pod doesn't run yet, reason and message.
        cordoned: why this cluster takes no new runs.
    """

    now: datetime
    tick: datetime | None
    run_key: str | None
    policy: Policy | None
    problem: tuple[str, str] | None
    state: CodeState | None
    run: Run | None
    shown: RunStatus | None = None
    reruns: tuple[RunStatus, ...] = ()
    entry: LedgerEntry | None = None
    in_force: tuple[InForce, ...] = ()
    active: tuple[Run, ...] = ()
    waiting: tuple[str, str] | None = None
    cordoned: str = ""


def tick_of(run_key: str) -> datetime | None:
    """The tick that a key names, also that of a rerun; None for any other key."""
    match = _TICK_KEY.fullmatch(run_key)
    return parse_time(match[1]) if match else None


def ledger_range(entry: LedgerEntry) -> LedgerRange:
    """A range as it is shown."""
    return LedgerRange(
        from_=entry.first,
        to=entry.last,
        count=entry.count,
        exact=None if entry.count_is_exact else False,
        kind=LedgerKind(entry.kind.capitalize()),
        reason=entry.reason,
        decided_by=entry.decided_by or None,
        decided_at=entry.decided_at,
    )


def explain(e: Evidence) -> Explanation:
    """The verdict, and the decision in words."""
    if e.run is not None:
        return _of_run(e, e.run)
    if e.tick is None:
        return _of_no_run(e)
    if e.run_key is not None and e.run_key != run_key_for(e.tick):
        return _said(e, Verdict.NO_SUCH_RUN, "NoSuchRun", f"no run {e.run_key} is recorded")
    if e.entry is not None and not _was_no_tick(e, e.tick):
        return _of_ledger(e, e.entry)
    if e.entry is not None:
        return _of_no_tick_then(e, e.tick)
    if e.tick > (e.state.watermark if e.state else e.tick) and _elsewhere(e, e.tick):
        text = "it is no tick of this cluster's schedule, but of one that another cluster has: that one decides it"
        return _said(e, Verdict.PENDING, TickReason.SpecDiffers, text)
    if e.policy is not None and e.policy.schedule is None:
        return _said(e, Verdict.NOT_A_TICK, "NotATick", "a LeasedJob of type Initial has no ticks")
    if e.policy is not None and e.policy.schedule is not None and not e.policy.schedule.matches(e.tick):
        return _of_no_tick(e, e.tick)
    if e.tick > e.now:
        return _ahead(e, e.tick)
    if e.state is None or e.tick > e.state.watermark:
        return _due(e, e.tick)
    return _behind(e, e.tick, e.state)


def _said(e: Evidence, verdict: Verdict, reason: str, message: str, **more: Any) -> Explanation:
    return Explanation(
        verdict=verdict,
        reason=reason,
        message=message,
        tick=e.tick,
        run=e.shown,
        failures=e.run.failures if e.run else None,
        interruptions=e.run.interruptions if e.run else None,
        reruns=list(e.reruns) or None,
        range=ledger_range(e.entry) if e.entry else None,
        watermark=e.state.watermark if e.state else None,
        **more,
    )


def _of_run(e: Evidence, run: Run) -> Explanation:
    name, holder = which(run), run.holder or run.cluster or "nobody"
    word = run.reason.partition(":")[0]
    match run.status:
        case JobSchedulerStatus.SUCCESS:
            return _said(e, Verdict.RAN, RunOutcome.SUCCESS, f"{name} succeeded at {_at(run.finished_at)}, by {holder}")
        case JobSchedulerStatus.FAIL if run.retry_at is None:
            shown = e.shown.outcome if e.shown and e.shown.outcome else RunOutcome.FAILED
            why = f": {run.reason}" if run.reason else ""
            text = f"{name} ended at {_at(run.finished_at)} as {shown}, by {holder}, and none follows{why}"
            return _said(e, Verdict.RAN, word or shown, text)
        case JobSchedulerStatus.FAIL:
            text = f"{name} has ended, and the next one may begin at {_at(run.retry_at)}: {run.reason or 'it failed'}"
            return _said(e, Verdict.RETRYING, word or "WaitingForRetry", text)
        case JobSchedulerStatus.RUNNING if run.expires_at < e.now:
            text = (
                f"the lease of {name}, held by {holder}, ran out at {_at(run.expires_at)}: the run is claimed again as "
                "soon as an operator can"
            )
            return _said(e, Verdict.PENDING, "LeaseExpired", text)
        case JobSchedulerStatus.RUNNING if run.pod_uid is None and run.job_uid:
            waiting = e.waiting or ("Claimed", "its Pod has not taken the lease yet")
            text = f"{name} was claimed by {run.cluster} at {_at(run.started_at)}: {': '.join(w for w in waiting if w)}"
            return _said(e, Verdict.PENDING, waiting[0], text)
        case JobSchedulerStatus.RUNNING if e.waiting is not None:
            text = f"{name} is held by {holder}, and its workload waits: {': '.join(w for w in e.waiting if w)}"
            return _said(e, Verdict.PENDING, e.waiting[0], text)
        case JobSchedulerStatus.RUNNING:
            stop = f"; it is to stop: {run.stop_reason}" if run.stop_requested_at else ""
            text = (
                f"{name} runs since {_at(run.adopted_at or run.started_at)}, held by {holder}; its lease holds until "
                f"{_at(run.expires_at)} unless it is extended{stop}"
            )
            return _said(e, Verdict.RUNNING, word or "Adopted", text)
        case _:
            assert_never(run.status)


def _of_no_run(e: Evidence) -> Explanation:
    if e.run_key is not None or e.policy is None or e.policy.type is not JobSchedulerType.INITIAL:
        return _said(e, Verdict.NO_SUCH_RUN, "NoSuchRun", f"no run {e.run_key or 'of type Initial'} is recorded")
    if e.policy.suspend:
        return _said(e, Verdict.PENDING, "Suspended", "it runs once, ever, and spec.suspend is true")
    return _said(e, Verdict.PENDING, "NotClaimed", "it runs once, ever, and has not been claimed yet")


def _of_ledger(e: Evidence, entry: LedgerEntry) -> Explanation:
    verdict = {"skipped": Verdict.SKIPPED, "missed": Verdict.MISSED}.get(entry.kind, Verdict.DROPPED)
    why = SAID.get(entry.reason, entry.reason)
    many = "" if entry.count == 1 else f", one of {'' if entry.count_is_exact else 'at least '}{entry.count} ticks"
    text = f"{why}{many}; decided by {entry.decided_by} at {_at(entry.decided_at)}"
    return _said(e, verdict, entry.reason, text)


def _of_no_tick(e: Evidence, tick: datetime) -> Explanation:
    assert e.policy is not None
    assert e.policy.schedule is not None
    schedule = e.policy.schedule
    before, after = schedule.previous(tick), schedule.next(tick)
    nearest = " and ".join(run_key_for(t) for t in (before, after) if t is not None) or "none"
    text = f'no tick of "{schedule.expression}" in {schedule.time_zone}; the nearest: {nearest}'
    return _said(e, Verdict.NOT_A_TICK, "NotATick", text, previous_tick=before, next_tick=after)


def _was_no_tick(e: Evidence, tick: datetime) -> bool:
    """Whether it is known that no schedule that was in force then had it."""
    return bool(e.in_force) and all(s.known and not s.has(tick) for s in e.in_force)


def _of_no_tick_then(e: Evidence, tick: datetime) -> Explanation:
    found = sorted({t for s in e.in_force for t in (s.previous(tick), s.next(tick)) if t is not None})
    before, after = ([t for t in found if t < tick], [t for t in found if t > tick])
    nearest = " and ".join(run_key_for(t) for t in (*before[-1:], *after[:1])) or "none"
    named = ", ".join(dict.fromkeys(f'"{s.ticks.expression}" in {s.ticks.time_zone}' for s in e.in_force if s.ticks))
    text = f"no tick of what was in force then, {named or 'no schedule'}; the nearest: {nearest}"
    shown = {"previous_tick": before[-1] if before else None, "next_tick": after[0] if after else None}
    return _said(replace(e, entry=None), Verdict.NOT_A_TICK, "NotATick", text, **shown)


def _elsewhere(e: Evidence, tick: datetime) -> bool:
    """Whether it is a tick of a schedule that is in force, though not of this cluster's."""
    own = e.policy.schedule if e.policy else None
    mine = own is not None and own.matches(tick)
    return not mine and any(s.until is None and s.has(tick) for s in e.in_force)


def _hindrance(e: Evidence) -> tuple[str, str] | None:
    """Why no tick of the schedule starts anything now."""
    if e.problem is not None:
        return e.problem
    if e.policy is not None and e.policy.suspend:
        return "Suspended", "spec.suspend is true"
    if e.state is not None and e.state.suspension is not None:
        s = e.state.suspension
        said = f"{s.runs} runs in a row had failed at {_at(s.since)}, the last one {s.reason or 'without a reason'}"
        return TickReason.SuspendedAfterFailures, said
    return None


def _ahead(e: Evidence, tick: datetime) -> Explanation:
    start = e.policy.schedule.start_of(tick) if e.policy and e.policy.schedule else tick
    text = f"it has not come yet: it is due in {_span(tick - e.now)}"
    if start > tick:
        text += f", and starts at {_at(start)}"
    if why := _hindrance(e):
        text += f"; as things are nothing would start then: {why[1]}"
    return _said(e, Verdict.PENDING, "Future", text)


def _due(e: Evidence, tick: datetime) -> Explanation:
    """It counts, has come, and nobody has decided it."""
    start = e.policy.schedule.start_of(tick) if e.policy and e.policy.schedule else tick
    elsewhere = e.state is not None and e.state.active_elsewhere
    why = _hindrance(e)
    if why is not None and why[0] in (TickReason.Suspended, TickReason.SuspendedAfterFailures):
        if why[0] == TickReason.Suspended and elsewhere:
            text = "spec.suspend is true here; a cluster that is active with this code decides it"
            return _said(e, Verdict.PENDING, "Suspended", text)
        return _said(e, Verdict.SKIPPED, why[0], f"{why[1]}; it is not in the ledger yet")
    if why is not None:
        return _said(e, Verdict.PENDING, why[0], f"the LeasedJob is not Ready, so nothing starts: {why[1]}")
    if start > e.now:
        return _said(e, Verdict.PENDING, "Jitter", f"jitterSeconds moves its start to {_at(start)}")
    if e.cordoned:
        text = f"it is due since {_span(e.now - start)}, and another cluster's, if one has this code: {e.cordoned}"
        return _said(e, Verdict.PENDING, "ClusterCordoned", text)
    if e.active:
        run = e.active[0]
        return _said(e, Verdict.PENDING, "Overlap", f"it waits for {which(run)}, held by {run.holder or run.cluster}")
    return _said(e, Verdict.PENDING, "Due", f"it is due since {_span(e.now - start)}, and not decided yet")


def _behind(e: Evidence, tick: datetime, state: CodeState) -> Explanation:
    """It is decided, and there is no record of it."""
    marks = [t for t in (state.pruned_through, state.ledger_through) if t is not None]
    if marks and tick <= max(marks):
        text = f"records up to {_at(max(marks))} were deleted, so what became of it is not known any more"
        return _said(e, Verdict.PRUNED, "Pruned", text)
    if any(not s.known for s in e.in_force):
        text = (
            f"it lies before the watermark, {_at(state.watermark)}, and there is no record of it: the schedule of that "
            "time was registered by an earlier release, which didn't keep it, so nobody can say whether it was due"
        )
        return _said(e, Verdict.BEFORE_WATERMARK, "NotRecorded", text)
    text = (
        f"it lies before the watermark, {_at(state.watermark)}, and was never due: ticks count from the LeasedJob's "
        "creation, and from an edit of its schedule or a resume on"
    )
    return _said(e, Verdict.BEFORE_WATERMARK, "BeforeWatermark", text)


def _at(when: datetime | None) -> str:
    return "an unknown time" if when is None else run_key_for(when.replace(microsecond=0))


def _span(how_long: timedelta) -> str:
    seconds = int(how_long.total_seconds())
    for size, word in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {word}"
    return f"{max(seconds, 0)} s"
