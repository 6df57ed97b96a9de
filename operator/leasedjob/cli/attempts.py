"""The attempts of a LeasedJob's runs, as their Pods tell. Pure, but for `of_job`, which asks the API server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from leasedjob.cli.output import parse_time
from leasedjob.identity import label_value
from leasedjob.protocol import ANNOTATION_ATTEMPT, ANNOTATION_JOB, ANNOTATION_RUN_KEY, LABEL_JOB, RESERVED_PREFIX

if TYPE_CHECKING:
    from leasedjob.cli.cluster import Cluster

Object = dict[str, Any]
DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One Pod of a run.

    Attributes:
        run_key: "" for type Initial.
        started: when the first workload container began; None where none has.
        ended: when the last of them ended; None while one runs.
        exit_code: the first that isn't 0, else 0; None while one runs, or where the kubelet said nothing.
        reason: of that end, or why the Pod waits.
    """

    run_key: str
    number: int
    pod: str
    node: str
    created: datetime | None
    started: datetime | None
    ended: datetime | None
    exit_code: int | None
    reason: str
    containers: tuple[str, ...]
    default_container: str
    waits: bool


def of_job(cluster: Cluster, name: str) -> list[Attempt]:
    """The attempts whose Pods are still in this cluster, the oldest first."""
    pods = cluster.list_all("pods", labels=f"{LABEL_JOB}={label_value(name)}")
    return attempts(pods, name)


def attempts(pods: Iterable[Object], name: str) -> list[Attempt]:
    """The attempts of the LeasedJob `name` among `pods`, the oldest first."""
    found = [attempt for pod in pods if _notes(pod).get(ANNOTATION_JOB) == name for attempt in _attempt(pod)]
    return sorted(found, key=lambda a: (a.created is not None, a.created or 0, a.run_key, a.number))


def _attempt(pod: Mapping[str, Any]) -> Iterable[Attempt]:
    notes, spec, status = _notes(pod), pod.get("spec") or {}, pod.get("status") or {}
    number = notes.get(ANNOTATION_ATTEMPT, "")
    if not number.isdecimal():
        return
    workload = [c["name"] for c in spec.get("containers") or [] if not c["name"].startswith(RESERVED_PREFIX)]
    states = [c.get("state") or {} for c in status.get("containerStatuses") or [] if c.get("name") in workload]
    ends = [state["terminated"] for state in states if state.get("terminated")]
    started = [at for state in states for kind in ("running", "terminated") if (at := _started(state.get(kind)))]
    over = len(ends) == len(workload)
    bad = next((end for end in ends if end.get("exitCode")), None)
    end = bad or (ends[0] if ends else {})
    waiting: Mapping[str, Any] = next((state["waiting"] for state in states if state.get("waiting")), {})
    yield Attempt(
        run_key=notes.get(ANNOTATION_RUN_KEY, ""),
        number=int(number),
        pod=pod["metadata"]["name"],
        node=spec.get("nodeName") or "",
        created=parse_time(pod["metadata"].get("creationTimestamp")),
        started=min(started, default=None),
        ended=max((at for e in ends if (at := parse_time(e.get("finishedAt")))), default=None) if over else None,
        exit_code=int(end.get("exitCode", 0)) if over else None,
        reason=str((end.get("reason") if over else waiting.get("reason")) or status.get("reason") or ""),
        containers=tuple(workload),
        default_container=notes.get(DEFAULT_CONTAINER, ""),
        waits=not started and status.get("phase") not in ("Succeeded", "Failed"),
    )


def _started(state: Mapping[str, Any] | None) -> datetime | None:
    return parse_time((state or {}).get("startedAt"))


def _notes(pod: Mapping[str, Any]) -> dict[str, str]:
    return pod["metadata"].get("annotations") or {}
