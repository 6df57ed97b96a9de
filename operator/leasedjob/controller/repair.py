"""What a person asks to be done to a run: one step at a time, from what is observed. Pure.

    Cancel    a stop request; done when the run has ended
    Release   give a claim back; else delete the Pod with its grace period; else fence the holder: the lease runs out
    Forget    a FAIL is claimable again

The order in Release is what keeps G2: the lease ends early only where nothing can be at work, or where somebody has
said, with force, that nothing is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, assert_never

from leasedjob.api.v1alpha1 import MAX_GRACE_SECONDS, RunAction, RunPhase
from leasedjob.controller.decide import which
from leasedjob.controller.facts import PodFacts
from leasedjob.lease.rows import REASON_CANCELLED, JobSchedulerStatus, Run

Json = Mapping[str, Any]
LONGEST_STOP: Final = timedelta(seconds=MAX_GRACE_SECONDS + 4)  # within which a Pod is gone where its node works


class RepairReason(StrEnum):
    """Every `reason` of a LeasedJobRun with an action."""

    NO_SUCH_RUN = "NoSuchRun"
    NOT_RUNNING = "NotRunning"
    STILL_RUNNING = "StillRunning"
    ALREADY_SUCCEEDED = "AlreadySucceeded"
    AMBIGUOUS = "Ambiguous"
    STOPPING = "Stopping"
    FENCED = "Fenced"
    CANCELLED = "Cancelled"
    RELEASED = "Released"
    FORGOTTEN = "Forgotten"
    RESUMED = "Resumed"
    NOT_SUSPENDED = "NotSuspended"
    EXPLAINED = "Explained"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the object says now; a final phase ends it."""

    phase: RunPhase
    reason: RepairReason
    message: str


class Step(StrEnum):
    """What is to be done; then the rows are read again."""

    CANCEL = "cancel"
    RELEASE = "release"
    DELETE_POD = "delete the Pod"
    FORGET = "forget"


@dataclass(frozen=True, slots=True)
class Observed:
    """The run that a request is about.

    Args:
        cluster: this operator's.
        pod: the Pod that has adopted the present attempt; None if the API server has none, or it is elsewhere.
        before: the request's own status.
    """

    now: datetime
    cluster: str
    run: Run | None
    pod: PodFacts | None
    before: Json
    force: bool = False

    @property
    def began(self) -> bool:
        """This request has done something to the attempt that its status names."""
        return self.before.get("reason") in (RepairReason.STOPPING, RepairReason.FENCED)


def next_step(action: RunAction, seen: Observed) -> Step | Answer:
    """The step, or what there is to say; each step changes what the next call sees."""
    run = seen.run
    if run is None:
        return _refused(RepairReason.NO_SUCH_RUN, "no such run is recorded: to run a tick, name it without an action")
    match action:
        case RunAction.CANCEL:
            return _cancel(seen, run)
        case RunAction.RELEASE:
            return _release(seen, run)
        case RunAction.FORGET:
            return _forget(run)
        case RunAction.RUN | RunAction.EXPLAIN | RunAction.RESUME:
            raise AssertionError(f"{action} is about no run's state")
        case _:
            assert_never(action)


def _refused(reason: RepairReason, message: str) -> Answer:
    return Answer(RunPhase.REFUSED, reason, message)


def _cancel(seen: Observed, run: Run) -> Step | Answer:
    if run.status is JobSchedulerStatus.SUCCESS:
        late = " before it could be stopped" if seen.began else ""
        return _refused(RepairReason.ALREADY_SUCCEEDED, f"{which(run)} has succeeded{late}")
    if run.terminal:
        if run.stopped_as == REASON_CANCELLED or seen.began:
            return Answer(RunPhase.SUCCEEDED, RepairReason.CANCELLED, f"{which(run)} was the last: {run.reason}")
        return _refused(RepairReason.NOT_RUNNING, f"{which(run)} has ended, and none follows: {run.reason}")
    if run.stop_requested_at is None:
        return Step.CANCEL
    return Answer(RunPhase.RUNNING, RepairReason.STOPPING, f"{which(run)} is to stop, within its grace period")


def _release(seen: Observed, run: Run) -> Step | Answer:
    over = run.status is not JobSchedulerStatus.RUNNING or run.attempt != seen.before.get("attempt", run.attempt)
    if over and seen.began:
        what = "is over" if run.attempt == seen.before.get("attempt") else "has begun"
        return Answer(RunPhase.SUCCEEDED, RepairReason.RELEASED, f"{which(run)} {what}")
    if over:
        return _refused(RepairReason.NOT_RUNNING, f"{which(run)} holds no lease: {run.reason or run.status}")
    if seen.force:
        return Step.RELEASE
    if seen.before.get("reason") != RepairReason.FENCED:
        pod = seen.pod
        if pod is None or run.cluster != seen.cluster or pod.finished:
            return Step.RELEASE
        if not pod.deleting:
            return Step.DELETE_POD
        if seen.now >= _gone_by(pod):
            return Step.RELEASE  # its node doesn't stop it
        text = f"Pod {pod.name} is being stopped; {which(run)} ends with it"
        return Answer(RunPhase.RUNNING, RepairReason.STOPPING, text)
    until = f"{run.expires_at:%H:%M:%S} UTC"
    text = (
        f"no heartbeat extends the lease of {which(run)} any more: its holder, {run.holder}, loses it, and the next "
        f"attempt begins at {until} at the latest"
    )
    return Answer(RunPhase.RUNNING, RepairReason.FENCED, text)


def _gone_by(pod: PodFacts) -> datetime:
    """When a Pod that is being deleted is gone if its node works."""
    asked = pod.stop_requested_at
    return datetime.max.replace(tzinfo=UTC) if asked is None else asked + LONGEST_STOP


def _forget(run: Run) -> Step | Answer:
    match run.status:
        case JobSchedulerStatus.SUCCESS:
            return _refused(RepairReason.ALREADY_SUCCEEDED, f"{which(run)} has succeeded: that is never forgotten")
        case JobSchedulerStatus.RUNNING:
            return _refused(RepairReason.STILL_RUNNING, f"{which(run)} has not failed: cancel or release it first")
        case JobSchedulerStatus.FAIL:
            return Step.FORGET
        case _:
            assert_never(run.status)
