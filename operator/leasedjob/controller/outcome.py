"""The outcome of one attempt, from its Pod. Pure; the table of docs/guarantees.md, row by row.

The sidecar's testimony comes first: exit codes alone never make a SUCCESS. Nothing is decided before the kubelet has
written how every workload container ended and the sidecar has ended as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

from leasedjob import protocol
from leasedjob.api.v1alpha1 import ExitZeroOnStop
from leasedjob.controller.facts import ContainerEnd, ContainerFacts, PodFacts
from leasedjob.protocol import Seen, Testimony

MESSAGE_LIMIT: Final = 1024  # characters of an error text that are kept in status and row
REPORTED: Final = "Reported"
STOP_SLACK: Final = timedelta(seconds=2)  # most by which a node's clock may be behind the API server's
UNKNOWN_EXIT_CODE: Final = 255  # containerd's, together with the reason "Unknown"
BEAT_SLACK: Final = timedelta(seconds=3)  # a beat each second, the kubelet's times cut to seconds, and one late write


class Result(StrEnum):
    COMPLETE = "complete"  # SUCCESS
    FAIL = "fail"  # FAIL, counts against backoffLimit
    RELEASE = "release"  # FAIL {released: true}, claimable at once, doesn't count
    ENDED = "ended"  # FAIL, doesn't count and isn't repeated


@dataclass(frozen=True, slots=True)
class Outcome:
    result: Result
    reason: str
    message: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Undecided:
    """Nothing may be written: not yet, or never, because the Pod's end proves nothing; then the lease has to expire."""

    why: str


def cut(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """The *end* of a long text, which is where errors stand; U+0000 can't be stored and is shown as its picture."""
    text = text.replace("\x00", "\u2400").encode("utf-8", "replace").decode()
    return text if len(text) <= limit else "…" + text[-(limit - 1) :]


def _leased_to_the_end(t: Testimony, pod: PodFacts) -> bool:
    """The sidecar answered "leased" until the last workload container had ended.

    A final testimony was written at SIGTERM, which the kubelet sends to a sidecar only after the workload (unless it
    restarts the sidecar alone: then the workload's end is later). One that was cut off (137) holds if the sidecar was
    seen alive when the workload ended: had it been frozen or gone, the kubelet would have needed at least
    `soonest_stop` before it stopped anything. A second of that is lost to times that are cut to seconds.
    """
    if t.seen is not Seen.LEASED:
        return False
    ends = [c.end.finished_at for c in pod.workload if c.end]
    last = max((e for e in ends if e), default=None)
    if last is None:
        return t.final
    slack = min(BEAT_SLACK.total_seconds(), pod.soonest_stop - 1)
    return last.timestamp() <= (t.beat + max(0.0, slack) if t.final else min(t.beat + slack, t.until))


def _ahead(t: Testimony, pod: PodFacts) -> bool:
    """Whether the sidecar says that it was alive after its kubelet saw its end: the two clocks differ, or the node's
    was set back, and its times can't be compared with the workload's end."""
    gone = pod.hold.end.finished_at if pod.hold and pod.hold.end else None
    return gone is not None and t.beat > (gone + BEAT_SLACK).timestamp()


def _stopped_before_exit(pod: PodFacts) -> bool:
    """A deletion or disruption came before the last workload container had ended .

    The stop is the API server's time and the end the node's, each cut to a second: an end that came up to STOP_SLACK
    before the stop counts as brought about by it. An interruption is repeated, which is the safe reading.
    """
    if pod.stop_requested_at is None:
        return False
    ends = [c.end.finished_at for c in pod.workload if c.end and c.end.finished_at]
    return not ends or max(ends) >= pod.stop_requested_at - STOP_SLACK


def _describe(name: str, end: ContainerEnd) -> str:
    reason = f" ({end.reason})" if end.reason and end.reason not in ("Error", "Completed") else ""
    return f"container {name} exited with {end.exit_code}{reason}"


def _unknown(end: ContainerEnd) -> bool:
    """Whether nobody saw how the container ended: the kubelet's word for it, and containerd's, which after a crash of
    the node or of itself finds that what had run is gone."""
    return end.reason == "ContainerStatusUnknown" or (end.reason == "Unknown" and end.exit_code == UNKNOWN_EXIT_CODE)


def outcome(pod: PodFacts, *, exit_zero_on_stop: ExitZeroOnStop = ExitZeroOnStop.RETRY) -> Outcome | Undecided:
    """What this Pod's attempt came to. Applies to Pods that adopted the lease; a claim that no Pod adopted is released,
    not finalized. Why a run was asked to stop (cancelled, replaced, its pending deadline) stands in its row."""
    if not pod.finished:
        return Undecided("the Pod has not ended")
    if not pod.sidecar_ended:
        if pod.workload_ended:
            return Undecided("the sidecar has not ended")
        return Undecided("the Pod is over, but not by its kubelet's word: its node may be lost")
    t = pod.testimony
    if t and (t.lease_id, t.attempt) != (pod.lease_id, pod.attempt):
        t = None
    if t and t.seen is Seen.REPORTED and t.outcome:
        result = Result(t.outcome)
        return Outcome(result, REPORTED, cut(t.reason), {"released": True} if result is Result.RELEASE else {})
    if not pod.workload_started:
        return _never_started(pod, t)
    if not pod.workload_ended:
        return Undecided("a workload container has no end written by the kubelet")
    if pod.reason == "DeadlineExceeded":
        return Outcome(Result.FAIL, "DeadlineExceeded", cut(pod.message), _exits(pod))
    if t is None:
        return Undecided("the sidecar left no testimony")
    if t.seen is Seen.FENCED:
        return Outcome(Result.RELEASE, "Fenced", cut(t.reason), {"released": True, "fencedAt": t.fenced_at})
    if not _leased_to_the_end(t, pod):
        return Undecided("the sidecar was gone before the workload ended")
    if _ahead(t, pod):
        return Undecided("the sidecar's clock is not its kubelet's")
    failed = [c for c in (*pod.user_init, *pod.workload) if c.end and c.end.exit_code != 0]
    if _stopped_before_exit(pod):
        if not failed and exit_zero_on_stop is ExitZeroOnStop.SUCCESS:
            return Outcome(Result.COMPLETE, "CompletedOnStop", "", _exits(pod))
        why = f"stopped ({pod.disrupted or 'the Pod was deleted'}) before its end"
        return Outcome(Result.RELEASE, "Interrupted", why, {"released": True, **_exits(pod)})
    if any(_unknown(c.end) for c in failed if c.end):
        return Outcome(Result.RELEASE, "ContainerStatusUnknown", cut(pod.message), {"released": True, **_exits(pod)})
    if t.failed_probe:
        return Outcome(Result.FAIL, "LivenessProbeFailed", cut(t.reason), _exits(pod))
    if failed:
        return _failed(pod, failed)
    return Outcome(Result.COMPLETE, "Completed", "", _exits(pod))


def _failed(pod: PodFacts, failed: list[ContainerFacts]) -> Outcome:
    ends = [(c.name, c.end) for c in failed if c.end]
    name, first = min(ends, key=lambda e: e[1].finished_at.timestamp() if e[1].finished_at else 0.0)
    tail = cut(first.message)
    message = _describe(name, first) + (f": {tail}" if tail else "")
    return Outcome(Result.FAIL, first.reason or "Error", cut(message), _exits(pod))


def _exits(pod: PodFacts) -> dict[str, Any]:
    containers = [
        {"name": c.name, "exitCode": c.end.exit_code, "reason": c.end.reason}
        for c in (*pod.user_init, *pod.workload)
        if c.end
    ]
    return {"containers": containers} if containers else {}


def _never_started(pod: PodFacts, t: Testimony | None) -> Outcome:
    """The Pod adopted the lease, is over, and no workload container ever ran."""
    if t and t.seen is Seen.FENCED:
        return Outcome(Result.RELEASE, "Fenced", cut(t.reason), {"released": True})
    if pod.reason == "DeadlineExceeded":
        return Outcome(Result.FAIL, "DeadlineExceeded", cut(pod.message), _exits(pod))
    for c in pod.user_init:
        if c.end and c.end.exit_code != 0 and pod.stop_requested_at is None:
            tail = cut(c.end.message)
            return Outcome(
                Result.FAIL,
                "InitContainerFailed",
                cut(f"init {_describe(c.name, c.end)}" + (f": {tail}" if tail else "")),
                _exits(pod),
            )
    if pod.stop_requested_at is not None:
        return Outcome(Result.RELEASE, "Interrupted", "stopped before the workload began", {"released": True})
    why, message = waiting_reason(pod)
    return Outcome(Result.RELEASE, "NeverStarted", cut(joined(why, message)), {"released": True})


def joined(reason: str, message: str) -> str:
    """`<Reason>: <message>`, as rows and Events keep both."""
    return f"{reason}: {message}" if message else reason


def reported_error(data: Any) -> str:
    """What a workload, or `leasedjob exec`, said of its failure: the `error` in what it reported; "" if nothing."""
    error = data.get("error") if isinstance(data, dict) else None
    return cut(error) if isinstance(error, str) else ""


def waiting_reason(pod: PodFacts) -> tuple[str, str]:
    """Why a Pod's workload doesn't run yet: (reason, message), as a person would look for it."""
    if pod.unschedulable:
        return "Unschedulable", pod.unschedulable
    containers = [c for c in (pod.adopt, pod.hold, *pod.user_init, *pod.user_sidecars, pod.gate, *pod.workload) if c]
    for c in containers:
        if c.waiting and c.waiting not in ("PodInitializing", "ContainerCreating"):
            return c.waiting, c.waiting_message
    if pod.reason:
        return pod.reason, pod.message
    for c in containers:
        if c.end and c.end.exit_code != 0:
            return c.end.reason or "Error", c.end.message
    for c in containers:
        if c.waiting:
            return c.waiting, c.waiting_message
    return pod.phase, pod.message


def adoption_refusal(pod: PodFacts) -> str | None:
    """Adopt's last word if the Pod is over because it could not take the claim; None if that isn't why."""
    a = pod.adopt
    if not pod.finished or a is None or a.end is None or a.end.exit_code == 0:
        return None
    if a.end.exit_code == protocol.EXIT_NOT_MINE and a.end.message:
        return cut(a.end.message, 512)
    return cut(f"leasedjob-adopt exited with {a.end.exit_code} {a.end.reason}: {a.end.message}", 512)
