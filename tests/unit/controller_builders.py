"""Builders of what the controller observes: Pods as the API server shows them, rows, views. One place for all tests.

Times are seconds after `T0`. A Pod's dict is what kubelet and API server write: `facts` sees real shapes.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from leasedjob import protocol
from leasedjob.controller.cache import Entry
from leasedjob.controller.facts import PodFacts, pod_facts
from leasedjob.controller.model import JobView, ManualRun, Policy
from leasedjob.controller.settings import Settings
from leasedjob.controller.spec import derive
from leasedjob.identity import JobSchedulerType, RunIdentity, run_key_for, short_hash, tick_of
from leasedjob.lease.rows import JobSchedulerStatus, Run
from leasedjob.lease.trust import Timing
from leasedjob.protocol import Seen, Testimony
from leasedjob.schedule import Timetable

Json = dict[str, Any]

T0 = datetime(2026, 7, 20, 3, 0, 0, tzinfo=UTC)
CLUSTER = "cluster-a"
OTHER_CLUSTER = "cluster-b"
NAMESPACE = "billing"
JOB = "nightly"
CODE = f"{NAMESPACE}/{JOB}"
JOB_UID = "0e6a7c1e-0000-4000-8000-00000000a001"
TIMING = Timing(duration=900, heartbeat=60, grace=60, pre_stop=10)
HOURLY = Timetable.of(["0 * * * *"])


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def rfc(seconds: float | None) -> str | None:
    """As Kubernetes writes a time: cut to whole seconds."""
    return None if seconds is None else at(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")


def lease_id_of(tick: datetime | None = T0, salt: str = "") -> UUID:
    return UUID(hashlib.md5(f"{tick}{salt}".encode(), usedforsecurity=False).hexdigest())


# --- container statuses ----------------------------------------------------------------------------------------------


def running(since: float = 2) -> Json:
    return {"running": {"startedAt": rfc(since)}}


def waiting(reason: str = "PodInitializing", message: str = "") -> Json:
    return {"waiting": {"reason": reason, **({"message": message} if message else {})}}


def ended(
    code: int = 0, finished: float = 30, *, reason: str = "", message: str = "", started: float | None = 2
) -> Json:
    """A container that ran and ended."""
    return {
        "terminated": {
            "exitCode": code,
            "reason": reason or ("Completed" if code == 0 else "Error"),
            **({"message": message} if message else {}),
            "startedAt": rfc(started),
            "finishedAt": rfc(finished),
            "containerID": "containerd://5e1f",
        }
    }


def unknown() -> Json:
    """What the kubelet writes for a container that it could not find any more."""
    return {
        "terminated": {
            "exitCode": 137,
            "reason": "ContainerStatusUnknown",
            "message": "The container could not be located when the pod was terminated",
            "startedAt": None,
            "finishedAt": None,
        }
    }


def never_made() -> Json:
    """The same, for a container that the kubelet never made: its status has no container id."""
    state = unknown()
    state["terminated"]["containerID"] = ""
    return state


def status(name: str, state: Json, *, last: Json | None = None, restarts: int = 0) -> Json:
    return {
        "name": name,
        "state": state,
        "lastState": last or {},
        "ready": "running" in state,
        "started": "running" in state,
        "restartCount": restarts,
        "image": "x",
        "imageID": "",
        **({} if "waiting" in state or "" in _ids(state) else {"containerID": "containerd://5e1f"}),
    }


def _ids(state: Json) -> list[Any]:
    return [part["containerID"] for part in state.values() if "containerID" in part]


# --- testimony -------------------------------------------------------------------------------------------------------


def said(
    seen: Seen = Seen.LEASED,
    *,
    beat: float = 30.5,
    until: float = 700,
    final: bool = True,
    lease: UUID | None = None,
    attempt: int = 1,
    **more: Any,
) -> str:
    """The sidecar's termination message."""
    return Testimony(
        lease_id=str(lease or lease_id_of()),
        attempt=attempt,
        seen=seen,
        beat=at(beat).timestamp(),
        until=at(until).timestamp(),
        final=final,
        **more,
    ).to_json()


def holder(message: str | None = None, *, code: int = 0, finished: float = 31) -> Json:
    """The state of a sidecar that has ended, with its testimony (default: leased to the end)."""
    text = said() if message is None else message
    return ended(code, finished, message=text)


# --- Pods ------------------------------------------------------------------------------------------------------------


def pod(
    *,
    phase: str = "Succeeded",
    workload: Json | dict[str, Json] | None = None,
    hold: Json | None = None,
    hold_last: Json | None = None,
    adopt: Json | None = None,
    gate: Json | None = None,
    init: dict[str, Json] | None = None,
    sidecars: dict[str, Json] | None = None,
    lease: UUID | None = None,
    attempt: int = 1,
    tick: datetime | None = T0,
    name: str | None = None,
    uid: str | None = None,
    created: float = 0,
    deleted: float | None = None,
    grace: int = 60,
    disrupted: tuple[str, float] | None = None,
    conditions: list[Json] | None = None,
    reason: str = "",
    message: str = "",
    version: int = 100,
    containers: list[str] | None = None,
    job: str = JOB,
    namespace: str = NAMESPACE,
    timing: Timing = TIMING,
    node: str = "node1",
) -> Json:
    """A run's Pod: by default one that adopted its lease, ran to exit 0 at second 30 and was leased to the end.

    `workload`: the state of its one container `main`, or states by name. `deleted`: when the deletion was asked for.
    """
    lease = lease or lease_id_of(tick)
    name = name or f"{job}-{str(lease)[:8]}-{attempt}"
    states = workload if workload is not None else ended(0, 30)
    if {"running", "waiting", "terminated"} & states.keys():
        states = {"main": states}
    inits = [
        status(protocol.CONTAINER_ADOPT, adopt or ended(0, 1)),
        status(protocol.CONTAINER_HOLD, hold or holder(), last=hold_last),
        *(status(n, s) for n, s in (init or {}).items()),
        *(status(n, s) for n, s in (sidecars or {}).items()),
        status(protocol.CONTAINER_GATE, gate or ended(0, 2)),
    ]
    probe = timing.probe
    metadata: Json = {
        "name": name,
        "namespace": namespace,
        "uid": uid or f"pod-{str(lease)[:8]}-{attempt}",
        "resourceVersion": str(version),
        "creationTimestamp": rfc(created),
        "labels": {protocol.LABEL_MANAGED: "true", protocol.LABEL_CLUSTER: short_hash(CLUSTER)},
        "annotations": {
            protocol.ANNOTATION_JOB: job,
            protocol.ANNOTATION_CODE: f"{namespace}/{job}",
            protocol.ANNOTATION_TYPE: "SCHEDULE",
            **({protocol.ANNOTATION_RUN_KEY: run_key_for(tick)} if tick else {}),
            protocol.ANNOTATION_LEASE: str(lease),
            protocol.ANNOTATION_ATTEMPT: str(attempt),
            protocol.ANNOTATION_CLAIM: "d1g35t",
            protocol.ANNOTATION_FINISH: '{"exitZeroOnStop":"Retry","pendingDeadlineSeconds":900}',
        },
        "ownerReferences": [{"apiVersion": "leasedjob.io/v1alpha1", "kind": "LeasedJob", "name": job, "uid": JOB_UID}],
    }
    if deleted is not None:
        metadata |= {"deletionTimestamp": rfc(deleted + grace), "deletionGracePeriodSeconds": grace}
    found = list(conditions or [])
    if disrupted:
        found.append(
            {
                "type": "DisruptionTarget",
                "status": "True",
                "reason": disrupted[0],
                "lastTransitionTime": rfc(disrupted[1]),
            }
        )
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": n,
                    "image": "x",
                    "livenessProbe": {
                        "httpGet": {"port": protocol.PROBE_PORT},
                        "periodSeconds": probe.period,
                        "failureThreshold": probe.threshold,
                        "timeoutSeconds": probe.timeout,
                    },
                }
                for n in (containers if containers is not None else states)
            ],
            "initContainers": [
                {"name": protocol.CONTAINER_ADOPT},
                {"name": protocol.CONTAINER_HOLD, "restartPolicy": "Always"},
                *({"name": n} for n in init or {}),
                *({"name": n, "restartPolicy": "Always"} for n in sidecars or {}),
                {"name": protocol.CONTAINER_GATE},
            ],
        },
        "status": {
            "phase": phase,
            **({"reason": reason} if reason else {}),
            **({"message": message} if message else {}),
            "conditions": found,
            "initContainerStatuses": inits,
            "containerStatuses": [status(n, s) for n, s in states.items()],
        },
    }


def facts(**options: Any) -> PodFacts:
    found = pod_facts(pod(**options))
    assert found is not None
    return found


def running_pod(**options: Any) -> Json:
    """A Pod whose workload runs under its sidecar."""
    return pod(**{"phase": "Running", "workload": running(3), "hold": running(1)} | options)


def pending_pod(**options: Any) -> Json:
    """A Pod that no node has started yet: no statuses at all."""
    body = pod(**{"phase": "Pending", "node": ""} | options)
    for key in ("initContainerStatuses", "containerStatuses"):
        del body["status"][key]
    return body


def facts_of(body: Json) -> PodFacts:
    found = pod_facts(body)
    assert found is not None
    return found


# --- rows ------------------------------------------------------------------------------------------------------------


def run(
    status: JobSchedulerStatus = JobSchedulerStatus.RUNNING,
    *,
    tick: datetime | None = T0,
    run_key: str | None = None,
    kind: JobSchedulerType = JobSchedulerType.SCHEDULE,
    id: UUID | None = None,
    pod_uid: str | None = None,
    started: float = 0,
    created: float | None = None,
    expires: float | None = None,
    code: str = CODE,
    cluster: str = CLUSTER,
    **more: Any,
) -> Run:
    """A row; RUNNING and unadopted by default, claimed at second `started`."""
    if kind is JobSchedulerType.SCHEDULE and run_key is None:
        assert tick is not None
        run_key = run_key_for(tick)
    if run_key is not None and tick is T0 and tick_of(run_key) != T0:
        tick = tick_of(run_key)
    identity = RunIdentity(kind, code, run_key)
    created = started if created is None else created
    over = status is not JobSchedulerStatus.RUNNING
    row = Run(
        id=id or lease_id_of(tick, "" if tick else str(run_key)),
        lock_key=identity.lock_key,
        identity=identity,
        name=JOB,
        status=status,
        outcome=None,
        attempt=1,
        failures=0,
        interruptions=0,
        backoff_limit=0,
        interruption_limit=20,
        fencing_token=1,
        lease_ms=60_000 if pod_uid is None else 900_000,
        run_lease_ms=900_000,
        cluster=cluster,
        namespace=NAMESPACE,
        job_name=JOB,
        job_uid=JOB_UID,
        tenant="t",
        holder=f"{cluster}/{NAMESPACE}/p" if pod_uid else "",
        pod_name=f"{JOB}-p" if pod_uid else None,
        pod_uid=pod_uid,
        claim_token=UUID(int=7) if pod_uid is None and not over else None,
        tick=tick,
        manual=False,
        created_at=at(created),
        started_at=at(started),
        adopted_at=at(started + 1) if pod_uid else None,
        finished_at=at(started + 30) if over else None,
        stop_requested_at=None,
        retry_at=None,
        reason="",
        data=None,
        modified_at=at(started),
        changed_at=at(started),
        expires_at=at(expires if expires is not None else started + (60 if pod_uid is None else 900)),
        db_now=at(started),
        held_here=not over,
    )
    return replace(row, **more)


def adopted(body: Json, **more: Any) -> Run:
    """The RUNNING row that this Pod holds."""
    seen = facts_of(body)
    tick = tick_of(seen.run_key)
    return run(**{"tick": tick, "pod_uid": seen.uid, "attempt": seen.attempt, "id": UUID(seen.lease_id)} | more)


# --- a job's view ----------------------------------------------------------------------------------------------------


def policy(**more: Any) -> Policy:
    return Policy(**{"type": JobSchedulerType.SCHEDULE, "timing": TIMING, "schedule": HOURLY} | more)


INITIAL_KEY = RunIdentity(JobSchedulerType.INITIAL, CODE, None).lock_key


def view(
    *rows: Run,
    pods: list[Json] | tuple[Json, ...] = (),
    now: float = 10,
    manual: list[ManualRun] | tuple[ManualRun, ...] = (),
    watermark: datetime | None = T0,
    fresh: bool = True,
    cluster: str = CLUSTER,
    **of_policy: Any,
) -> JobView:
    """What was observed; the watermark stands at T0 by default, so that nothing is due within the hour."""
    return JobView(
        cluster=cluster,
        code=CODE,
        policy=policy(**of_policy),
        watermark=watermark,
        initial_lock_key=INITIAL_KEY,
        now=at(now),
        rows={r.id: r for r in rows},
        pods=tuple(facts_of(p) for p in pods),
        manual=tuple(manual),
        fresh=fresh,
        uid=JOB_UID,
    )


def manual_run(key: str = "manual/billing/now/u1", *, cancel: bool = False) -> ManualRun:
    lock = RunIdentity(JobSchedulerType.SCHEDULE, CODE, key).lock_key
    return ManualRun(uid="u1", name="now", run_key=key, lock_key=lock, tick=tick_of(key), cancel=cancel)


# --- objects ---------------------------------------------------------------------------------------------------------

TEMPLATE: Json = {"spec": {"containers": [{"name": "main", "image": "busybox"}]}}


def job_body(spec: Json | None = None, *, name: str = JOB, generation: int = 1, version: int = 10, **more: Any) -> Json:
    return {
        "apiVersion": "leasedjob.io/v1alpha1",
        "kind": "LeasedJob",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": more.pop("uid", JOB_UID),
            "creationTimestamp": rfc(-3600),
            "generation": generation,
            "resourceVersion": str(version),
        },
        "spec": {"schedule": "0 * * * *", "template": TEMPLATE} | (spec or {}),
        **more,
    }


def run_body(
    spec: Json | None = None, *, name: str = "now", uid: str = "u1", version: int = 20, created: float = 0, **more: Any
) -> Json:
    return {
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": uid,
            "creationTimestamp": rfc(created),
            "generation": 1,
            "resourceVersion": str(version),
        },
        "spec": {"jobName": JOB} | (spec or {}),
        **more,
    }


def entry(body: Json | None = None, settings: Settings | None = None, **more: Any) -> Entry:
    """A LeasedJob as the cache holds it, with what follows from its spec."""
    body = job_body() if body is None else body
    meta = body["metadata"]
    found = Entry(meta["namespace"], meta["name"], uid=meta["uid"], body=body, created_at=at(-3600))
    derive(found, settings or Settings())
    for name, value in more.items():
        setattr(found, name, value)
    return found
