"""The Pod of one attempt, built from the template. Pure: knows no client and no clock.

The template is kept as written; what is added stands under reserved names (`leasedjob-…`), and what is set is what the
fence and the stopping budget need: restartPolicy, terminationGracePeriodSeconds, preStop where the template has none,
the liveness probe, and each container's identity variables.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from leasedjob import protocol
from leasedjob.identity import label_value, pod_name, short_hash
from leasedjob.lease.trust import Timing

Json = dict[str, Any]
RESTRICTED: Final[Mapping[str, Any]] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
SIDECAR_UID: Final = 65532
ADOPT_SECONDS: Final = 45  # below a claim's 60 s, so that adopt's own message comes first


@dataclass(frozen=True, slots=True)
class Attempt:
    """The claim that a Pod is built for."""

    lease_id: str
    claim_token: str
    lock_key: str
    run_type: str
    code: str
    run_key: str | None
    tick: datetime | None
    number: int
    fencing_token: int
    setbacks: int = 0  # earlier attempts of the run that did take the lease


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What the chart says of the parts that are added to a Pod."""

    image: str
    pull_policy: str
    resources: Mapping[str, Any]
    pull_secrets: Sequence[str]
    secret: str


@dataclass(frozen=True, slots=True)
class Owner:
    name: str
    namespace: str
    uid: str
    api_version: str = f"{protocol.GROUP}/{protocol.VERSION}"


def claim_digest(token: str) -> str:
    """What stands in the Pod's annotation, so that AlreadyExists can be told from a stranger's Pod."""
    return hashlib.sha256(token.encode()).hexdigest()[:32]


def cluster_label(cluster: str) -> str:
    return short_hash(cluster)


def rfc3339(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def build_pod(
    *,
    owner: Owner,
    template: Mapping[str, Any],
    attempt: Attempt,
    timing: Timing,
    sidecar: Sidecar,
    cluster: str,
    active_deadline_seconds: int | None,
    finish_policy: str,
    trace_parent: str = "",
) -> Json:
    """The manifest of the attempt's Pod.

    Args:
        finish_policy: kept in an annotation for the day the LeasedJob is gone.
        trace_parent: what the workload's spans are children of; "": nothing is traced.
    """
    meta = template.get("metadata") or {}
    spec: Json = copy.deepcopy(dict(template.get("spec") or {}))
    containers: list[Json] = spec["containers"]
    own_probes = {c["name"]: _resolved(c) for c in containers if c.get("livenessProbe")}
    deadlines = [d for d in (active_deadline_seconds, spec.get("activeDeadlineSeconds")) if d is not None]
    deadline = min(deadlines, default=None)
    for c in containers:
        identity = identity_env(attempt, containers=len(containers), deadline=deadline)
        _dress_workload(c, attempt, timing, identity + _trace_env(trace_parent))
    # The end of an init container is never the run's, so it is told of no workload containers.
    init_identity = identity_env(attempt, containers=0, deadline=deadline) + _trace_env(trace_parent)
    user_init = [_with_identity(c, init_identity) for c in spec.get("initContainers") or []]
    pod_security = spec.get("securityContext") or {}
    spec |= {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": timing.grace,
        "initContainers": [
            _adopt(attempt, timing, sidecar, pod_security),
            _hold(attempt, timing, sidecar, pod_security, own_probes),
            *user_init,
            _gate(sidecar, pod_security),
        ],
        "volumes": [
            *(spec.get("volumes") or []),
            {"name": protocol.VOLUME_HANDOFF, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {"name": protocol.VOLUME_DATABASE, "secret": {"secretName": sidecar.secret, "defaultMode": 0o444}},
        ],
    }
    if deadline is not None:
        spec["activeDeadlineSeconds"] = deadline
    wanted = [*(spec.get("imagePullSecrets") or []), *({"name": n} for n in sidecar.pull_secrets)]
    if wanted:
        spec["imagePullSecrets"] = list({s.get("name"): s for s in wanted}.values())
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(owner.name, attempt.lock_key, attempt.number),
            "namespace": owner.namespace,
            "labels": {
                **(meta.get("labels") or {}),
                protocol.LABEL_MANAGED: "true",
                protocol.LABEL_CLUSTER: cluster_label(cluster),
                protocol.LABEL_CODE: short_hash(attempt.code),
                protocol.LABEL_JOB: label_value(owner.name),
            },
            "annotations": {
                **(meta.get("annotations") or {}),
                protocol.ANNOTATION_JOB: owner.name,
                protocol.ANNOTATION_CODE: attempt.code,
                protocol.ANNOTATION_TYPE: attempt.run_type,
                **({protocol.ANNOTATION_RUN_KEY: attempt.run_key} if attempt.run_key else {}),
                protocol.ANNOTATION_LEASE: attempt.lease_id,
                protocol.ANNOTATION_ATTEMPT: str(attempt.number),
                protocol.ANNOTATION_CLAIM: claim_digest(attempt.claim_token),
                protocol.ANNOTATION_FINISH: finish_policy,
            },
            "ownerReferences": [
                {
                    "apiVersion": owner.api_version,
                    "kind": "LeasedJob",
                    "name": owner.name,
                    "uid": owner.uid,
                    "controller": True,
                    "blockOwnerDeletion": False,  # nothing of ours ever delays a deletion
                }
            ],
        },
        "spec": spec,
    }


def identity_env(attempt: Attempt, *, containers: int, deadline: int | None) -> list[Json]:
    """What the workload learns of its run."""
    values = {
        protocol.ENV_TYPE: attempt.run_type,
        protocol.ENV_CODE: attempt.code,
        protocol.ENV_RUN_KEY: attempt.run_key or "",
        protocol.ENV_SCHEDULED_TIME: rfc3339(attempt.tick) if attempt.tick else "",
        protocol.ENV_IDEMPOTENCY_KEY: attempt.lock_key,
        protocol.ENV_ATTEMPT: str(attempt.number),
        protocol.ENV_FENCING_TOKEN: str(attempt.fencing_token),
        protocol.ENV_SIDECAR_URL: f"http://127.0.0.1:{protocol.REPORT_PORT}",
        protocol.ENV_CONTAINERS: str(containers),
        protocol.ENV_ACTIVE_DEADLINE: "" if deadline is None else str(deadline),
    }
    return [{"name": k, "value": v} for k, v in values.items()]


def _trace_env(trace_parent: str) -> list[Json]:
    return [{"name": protocol.ENV_TRACE_PARENT, "value": trace_parent}] if trace_parent else []


def _with_identity(container: Json, identity: list[Json]) -> Json:
    """Ours stand first, so that the template's own variables may refer to them, and can't be replaced."""
    names = {e["name"] for e in identity}
    container["env"] = identity + [e for e in container.get("env") or [] if e.get("name") not in names]
    return container


def _dress_workload(container: Json, attempt: Attempt, timing: Timing, identity: list[Json]) -> None:
    _with_identity(container, identity)
    probe = timing.probe
    container["livenessProbe"] = {
        "httpGet": {
            "path": protocol.probe_path(attempt.lease_id, attempt.number, container["name"]),
            "port": protocol.PROBE_PORT,
            "scheme": "HTTP",
        },
        "periodSeconds": probe.period,
        "failureThreshold": probe.threshold,
        "timeoutSeconds": probe.timeout,
    }
    lifecycle = container.get("lifecycle") or {}
    if timing.pre_stop and not lifecycle.get("preStop"):
        container["lifecycle"] = {**lifecycle, "preStop": {"sleep": {"seconds": timing.pre_stop}}}
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")


def _resolved(container: Json) -> Json:
    """The container's own liveness probe with its named port as a number: the sidecar knows no port names."""
    probe: Json = copy.deepcopy(container["livenessProbe"])
    ports = {p.get("name"): p.get("containerPort") for p in container.get("ports") or []}
    for kind in ("httpGet", "tcpSocket"):
        if kind in probe and isinstance(probe[kind].get("port"), str):
            name = probe[kind]["port"]
            probe[kind]["port"] = ports.get(name) or int(name)
    return probe


def _security(pod_security: Mapping[str, Any]) -> Json:
    """`restricted`, without a fixed UID where the platform or the Pod assigns a non-root one."""
    context = dict(RESTRICTED)
    if pod_security.get("runAsUser") == 0:
        context |= {"runAsUser": SIDECAR_UID, "runAsGroup": SIDECAR_UID}
    return context


def _ours(name: str, verb: str, sidecar: Sidecar, pod_security: Mapping[str, Any]) -> Json:
    return {
        "name": name,
        "image": sidecar.image,
        "imagePullPolicy": sidecar.pull_policy,
        "command": ["leasedjob-sidecar", verb],
        "resources": dict(sidecar.resources),
        "securityContext": _security(pod_security),
        "terminationMessagePath": protocol.TERMINATION_LOG,
    }


def _database_mounts() -> list[Json]:
    return [
        {"name": protocol.VOLUME_HANDOFF, "mountPath": protocol.MOUNT_HANDOFF},
        {"name": protocol.VOLUME_DATABASE, "mountPath": protocol.MOUNT_DATABASE, "readOnly": True},
    ]


def _field(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _adopt(attempt: Attempt, timing: Timing, sidecar: Sidecar, pod_security: Mapping[str, Any]) -> Json:
    return _ours(protocol.CONTAINER_ADOPT, "adopt", sidecar, pod_security) | {
        "env": [
            {"name": protocol.ENV_LEASE_ID, "value": attempt.lease_id},
            {"name": protocol.ENV_CLAIM_TOKEN, "value": attempt.claim_token},
            {"name": protocol.ENV_ATTEMPT, "value": str(attempt.number)},
            {"name": protocol.ENV_TIMING, "value": timing.to_json()},
            {"name": protocol.ENV_ADOPT_DEADLINE, "value": str(ADOPT_SECONDS)},
            _field(protocol.ENV_POD_UID, "metadata.uid"),
            _field(protocol.ENV_POD_NAME, "metadata.name"),
        ],
        "volumeMounts": _database_mounts(),
    }


def _hold(
    attempt: Attempt, timing: Timing, sidecar: Sidecar, pod_security: Mapping[str, Any], own_probes: Json
) -> Json:
    env = [
        {"name": protocol.ENV_LEASE_ID, "value": attempt.lease_id},
        {"name": protocol.ENV_ATTEMPT, "value": str(attempt.number)},
        {"name": protocol.ENV_TIMING, "value": timing.to_json()},
        _field(protocol.ENV_POD_UID, "metadata.uid"),
        _field(protocol.ENV_POD_NAME, "metadata.name"),
    ]
    if own_probes:
        env.append({"name": protocol.ENV_USER_PROBES, "value": json.dumps(own_probes, separators=(",", ":"))})
    return _ours(protocol.CONTAINER_HOLD, "hold", sidecar, pod_security) | {
        "restartPolicy": "Always",
        "env": env,
        "volumeMounts": _database_mounts(),
        "lifecycle": {"preStop": {"exec": {"command": ["leasedjob-sidecar", "drain"]}}},
    }


def _gate(sidecar: Sidecar, pod_security: Mapping[str, Any]) -> Json:
    return _ours(protocol.CONTAINER_GATE, "gate", sidecar, pod_security)
