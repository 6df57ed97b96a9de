"""What a Pod's object proves. Pure: a dict as the API server sent it in, one frozen value out.

Only what the kubelet wrote is evidence of an end. A Pod that is gone, or whose phase says Failed while a container has
no `terminated` state (a lost node, the Pod garbage collector), proves nothing about its workload.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from leasedjob import protocol
from leasedjob.lease.rows import Outcome
from leasedjob.protocol import Testimony

Json = Mapping[str, Any]
MAX_ATTEMPT_DIGITS: Final = 9  # the column is an integer; anybody may write an annotation


def parse_time(text: str | None) -> datetime | None:
    """An RFC 3339 time as Kubernetes writes it, aware and in UTC; None for None or what can't be read."""
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text)
        return at.astimezone(UTC) if at.tzinfo else None  # a time without a zone is nobody's
    except (ValueError, OverflowError):
        return None


@dataclass(frozen=True, slots=True)
class ContainerEnd:
    """A `terminated` state, as the kubelet wrote it."""

    exit_code: int
    reason: str
    message: str
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class ContainerFacts:
    name: str
    started: bool  # it runs or has run
    end: ContainerEnd | None
    waiting: str  # reason of the waiting state, "" if it isn't waiting
    waiting_message: str
    restarts: int


@dataclass(frozen=True, slots=True)
class PodFacts:
    """One attempt's Pod."""

    name: str
    namespace: str
    uid: str
    resource_version: str
    created_at: datetime | None
    lease_id: str
    attempt: int
    claim_digest: str
    code: str
    run_key: str | None
    job_name: str
    job_uid: str
    finish_policy: str
    node: str
    phase: str
    reason: str
    message: str
    unschedulable: str  # the scheduler's message, "" if scheduled
    stop_requested_at: datetime | None  # when the deletion was asked for, or the disruption noted
    deleting: bool
    disrupted: str  # reason of a DisruptionTarget condition
    adopt: ContainerFacts | None
    hold: ContainerFacts | None
    gate: ContainerFacts | None
    user_init: tuple[ContainerFacts, ...]
    user_sidecars: tuple[ContainerFacts, ...]  # init containers that go on; stopped after the workload
    workload: tuple[ContainerFacts, ...]
    workload_count: int
    soonest_stop: float  # seconds of the sidecar's silence after which the kubelet may stop the workload, at least
    testimony: Testimony | None

    @property
    def finished(self) -> bool:
        """The kubelet has said that this Pod is over."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def workload_started(self) -> bool:
        """Some workload container runs or has run."""
        return any(c.started for c in self.workload)

    @property
    def workload_ended(self) -> bool:
        """Every workload container has a `terminated` state written by the kubelet."""
        return len(self.workload) == self.workload_count > 0 and all(c.end for c in self.workload)

    @property
    def sidecar_ended(self) -> bool:
        return self.finished and (self.hold is None or self.hold.end is not None or not self.hold.started)

    @property
    def workload_complete(self) -> bool:
        """Every workload container runs or has run."""
        return len(self.workload) == self.workload_count > 0 and all(c.started for c in self.workload)


def _end(state: Json) -> ContainerEnd | None:
    t = state.get("terminated")
    if not t:
        return None
    return ContainerEnd(
        exit_code=int(t.get("exitCode", -1)),
        reason=t.get("reason") or "",
        message=t.get("message") or "",
        finished_at=parse_time(t.get("finishedAt")),
    )


def _container(status: Json) -> ContainerFacts:
    state: Json = status.get("state") or {}
    last: Json = status.get("lastState") or {}
    waiting: Json = state.get("waiting") or {}
    end = _end(state)
    # A container that was never made gets a `terminated` state as well (ContainerStatusUnknown), but never had an id.
    ran = end is not None and bool((state.get("terminated") or {}).get("containerID") or status.get("containerID"))
    return ContainerFacts(
        name=status.get("name", ""),
        started=bool(state.get("running")) or ran or bool(last.get("terminated")),
        end=end,
        waiting=waiting.get("reason") or "",
        waiting_message=waiting.get("message") or "",
        restarts=int(status.get("restartCount") or 0),
    )


def _testimony(status: Json | None) -> Testimony | None:
    """The newest termination message of the sidecar that can be read; a restarted sidecar's last one counts."""
    if status is None:
        return None
    for key in ("state", "lastState"):
        end = _end(status.get(key) or {})
        if end and (testimony := Testimony.from_json(end.message)) and _well_formed(testimony):
            return testimony
    return None


def _well_formed(t: Testimony) -> bool:
    """Whether every value has its type: anything else proves nothing, and must not stop whoever reads it."""
    times = (t.beat, t.until, *(() if t.fenced_at is None else (t.fenced_at,)))
    words = (t.lease_id, t.reason, *(w for w in (t.outcome, t.failed_probe) if w is not None))
    return (
        all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in times)
        and all(isinstance(w, str) for w in words)
        and isinstance(t.attempt, int)
        and isinstance(t.final, bool)
        and (t.outcome is None or t.outcome in Outcome.__members__.values())
    )


def _soonest_stop(containers: list[Json]) -> float:
    """By the liveness probes: a closed port fails at once, so the last needed probe may come this soon."""
    probes = [c["livenessProbe"] for c in containers if c.get("livenessProbe")]
    waits = [(int(p.get("failureThreshold") or 3) - 1) * int(p.get("periodSeconds") or 10) for p in probes]
    return float(min(waits, default=0))


def _stop(meta: Json, conditions: list[Json]) -> tuple[datetime | None, str]:
    """When a stop was asked for, and the disruption's reason. The drain notice is no evidence: ends have it too."""
    times: list[datetime] = []
    deletion = parse_time(meta.get("deletionTimestamp"))
    if deletion:
        times.append(deletion - timedelta(seconds=int(meta.get("deletionGracePeriodSeconds") or 0)))
    disrupted = ""
    for c in conditions:
        if c.get("type") == "DisruptionTarget" and c.get("status") == "True":
            disrupted = c.get("reason") or "DisruptionTarget"
            if at := parse_time(c.get("lastTransitionTime")):
                times.append(at)
    return (min(times) if times else None), disrupted


def pod_facts(pod: Json) -> PodFacts | None:
    """The facts of `pod`; None if it isn't a run's Pod (labels and annotations that anyone may write are not believed
    here: the lease row decides whether id, attempt and UID belong together)."""
    meta: Json = pod.get("metadata") or {}
    spec: Json = pod.get("spec") or {}
    status: Json = pod.get("status") or {}
    notes: Json = meta.get("annotations") or {}
    lease_id = notes.get(protocol.ANNOTATION_LEASE)
    attempt = notes.get(protocol.ANNOTATION_ATTEMPT, "")
    if not lease_id or not attempt.isdecimal() or len(attempt) > MAX_ATTEMPT_DIGITS:
        return None
    inits = {s.get("name"): s for s in status.get("initContainerStatuses") or []}
    conditions = status.get("conditions") or []
    stop_at, disrupted = _stop(meta, conditions)
    unschedulable = next(
        (c.get("message") or c.get("reason") or "" for c in conditions
         if c.get("type") == "PodScheduled" and c.get("status") == "False"),
        "",
    )  # fmt: skip
    ours = {protocol.CONTAINER_ADOPT, protocol.CONTAINER_HOLD, protocol.CONTAINER_GATE}
    lasting = {c.get("name") for c in spec.get("initContainers") or [] if c.get("restartPolicy") == "Always"}
    owner: Json = next((o for o in meta.get("ownerReferences") or [] if o.get("kind") == "LeasedJob"), {})

    def init(name: str) -> ContainerFacts | None:
        return _container(inits[name]) if name in inits else None

    return PodFacts(
        name=meta.get("name", ""),
        namespace=meta.get("namespace", ""),
        uid=meta.get("uid", ""),
        resource_version=meta.get("resourceVersion", ""),
        created_at=parse_time(meta.get("creationTimestamp")),
        lease_id=lease_id,
        attempt=int(attempt),
        claim_digest=notes.get(protocol.ANNOTATION_CLAIM, ""),
        code=notes.get(protocol.ANNOTATION_CODE, ""),
        run_key=notes.get(protocol.ANNOTATION_RUN_KEY) or None,
        job_name=notes.get(protocol.ANNOTATION_JOB, ""),
        job_uid=owner.get("uid", ""),
        finish_policy=notes.get(protocol.ANNOTATION_FINISH, ""),
        node=spec.get("nodeName") or "",
        phase=status.get("phase") or "Pending",
        reason=status.get("reason") or "",
        message=status.get("message") or "",
        unschedulable=unschedulable,
        stop_requested_at=stop_at,
        deleting=bool(meta.get("deletionTimestamp")),
        disrupted=disrupted,
        adopt=init(protocol.CONTAINER_ADOPT),
        hold=init(protocol.CONTAINER_HOLD),
        gate=init(protocol.CONTAINER_GATE),
        user_init=tuple(_container(s) for n, s in inits.items() if n not in ours | lasting),
        user_sidecars=tuple(_container(s) for n, s in inits.items() if n in lasting - ours),
        workload=tuple(_container(s) for s in status.get("containerStatuses") or []),
        workload_count=len(spec.get("containers") or []),
        soonest_stop=_soonest_stop(spec.get("containers") or []),
        testimony=_testimony(inits.get(protocol.CONTAINER_HOLD)),
    )
