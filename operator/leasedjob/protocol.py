"""What operator, sidecar and workload agree on: names, paths, ports and the testimony.

Pure constants and small values; imports nothing but the standard library, so that every part may import it.
A change here is a change of the wire format between an operator and Pods that are already running.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Final

GROUP: Final = "leasedjob.io"
VERSION: Final = "v1alpha1"
FIELD_MANAGER: Final = "leasedjob"

# --- labels and annotations of a run's Pod ---------------------------------------------------------------------------
# Labels hold hashes or checked values (63 characters, restricted alphabet); annotations hold the exact text.
LABEL_MANAGED: Final = "leasedjob.io/managed"  # "true": what the operator watches
LABEL_REQUEST: Final = "leasedjob.io/request"  # of a ConfigMap in the operator's namespace that asks something
REQUEST_CLUSTERS: Final = "clusters"
ANSWER_KEY: Final = "answer"  # of its data
LABEL_CLUSTER: Final = "leasedjob.io/cluster-hash"
LABEL_CODE: Final = "leasedjob.io/code-hash"
LABEL_JOB: Final = "leasedjob.io/job"  # the LeasedJob's name, or its hash where it is too long for a label
ANNOTATION_JOB: Final = "leasedjob.io/job-name"
ANNOTATION_CODE: Final = "leasedjob.io/code"
ANNOTATION_TYPE: Final = "leasedjob.io/type"
ANNOTATION_RUN_KEY: Final = "leasedjob.io/run-key"
ANNOTATION_LEASE: Final = "leasedjob.io/lease-id"
ANNOTATION_ATTEMPT: Final = "leasedjob.io/attempt"
ANNOTATION_CLAIM: Final = "leasedjob.io/claim-digest"  # SHA-256 of the claim token: AlreadyExists is ours if it agrees
ANNOTATION_FINISH: Final = "leasedjob.io/finish-policy"  # JSON: what finalizing needs when the LeasedJob is gone

# --- containers, volumes and ports that the operator adds ------------------------------------------------------------
CONTAINER_ADOPT: Final = "leasedjob-adopt"
CONTAINER_HOLD: Final = "leasedjob-hold"
CONTAINER_GATE: Final = "leasedjob-gate"
RESERVED_PREFIX: Final = "leasedjob-"
VOLUME_HANDOFF: Final = "leasedjob-handoff"
VOLUME_DATABASE: Final = "leasedjob-database"
MOUNT_HANDOFF: Final = "/run/leasedjob"
MOUNT_DATABASE: Final = "/etc/leasedjob/database"
HANDOFF_FILE: Final = f"{MOUNT_HANDOFF}/lease.json"
TERMINATION_LOG: Final = "/dev/termination-log"
PROBE_PORT: Final = 17890  # on the Pod's address; asked by the kubelet's liveness probes; read only
REPORT_PORT: Final = 17891  # on 127.0.0.1 only; drain notice, gate, the workload's report

# --- environment of the sidecar parts --------------------------------------------------------------------------------
ENV_LEASE_ID: Final = "LEASEDJOB_LEASE_ID"
ENV_CLAIM_TOKEN: Final = "LEASEDJOB_CLAIM_TOKEN"
ENV_POD_UID: Final = "LEASEDJOB_POD_UID"
ENV_POD_NAME: Final = "LEASEDJOB_POD_NAME"
ENV_TIMING: Final = "LEASEDJOB_TIMING"  # JSON, see lease.trust.Timing.to_json
ENV_USER_PROBES: Final = "LEASEDJOB_USER_PROBES"  # JSON: container name -> its own httpGet/tcpSocket livenessProbe
ENV_ADOPT_DEADLINE: Final = "LEASEDJOB_ADOPT_SECONDS"  # how long adopt retries, seconds

# --- environment of the workload -------------------------------------------------------------------------------------
ENV_TYPE: Final = "LEASEDJOB_TYPE"
ENV_CODE: Final = "LEASEDJOB_CODE"
ENV_RUN_KEY: Final = "LEASEDJOB_RUN_KEY"
ENV_SCHEDULED_TIME: Final = "LEASEDJOB_SCHEDULED_TIME"
ENV_IDEMPOTENCY_KEY: Final = "LEASEDJOB_IDEMPOTENCY_KEY"
ENV_ATTEMPT: Final = "LEASEDJOB_ATTEMPT"
ENV_FENCING_TOKEN: Final = "LEASEDJOB_FENCING_TOKEN"
ENV_SIDECAR_URL: Final = "LEASEDJOB_SIDECAR_URL"
ENV_CONTAINERS: Final = "LEASEDJOB_CONTAINERS"  # of the workload here: the success of one of several isn't the run's
ENV_TRACE_PARENT: Final = "TRACEPARENT"  # W3C Trace Context, where OpenTelemetry's SDKs look for it
ENV_ACTIVE_DEADLINE: Final = "LEASEDJOB_ACTIVE_DEADLINE_SECONDS"  # of the attempt; "" where there is none

# --- how long a program took to stop: workload -> sidecar -> database -> operator ------------------------------------
SHUTDOWN_METRIC: Final = "app_shutdown_duration_seconds"
SHUTDOWN_BUCKETS: Final = (0.1, 0.5, 1, 2, 5, 10, 15, 20, 25, 30, 45, 60)
SHUTDOWN_PHASES: Final = ("http", "intervals", "background", "consumers", "pools")
SHUTDOWN_OUTCOMES: Final = ("done", "failed", "cut", "skipped")
SHUTDOWN_MOST: Final = 16  # phases in one report
SHUTDOWN_SECONDS: Final = 86_400  # no stop takes longer

# --- exit codes ------------------------------------------------------------------------------------------------------
EXIT_NOT_MINE: Final = 75  # adopt, gate: the lease is not ours (EX_TEMPFAIL); nothing ran


def probe_path(lease_id: str, attempt: int, container: str) -> str:
    """The path of a workload container's liveness probe: only this lease and attempt is answered with 200."""
    return f"/v1/lease/{lease_id}/{attempt}/{container}"


@dataclass(frozen=True, slots=True)
class PhaseEnd:
    """One phase of a program's stop.

    Args:
        phase, outcome: of SHUTDOWN_PHASES and SHUTDOWN_OUTCOMES, or a later version's word, at most 32 characters.
        seconds: from the beginning of its stage to its last part's end.
    """

    phase: str
    outcome: str
    seconds: float

    @classmethod
    def parse(cls, raw: object) -> tuple[PhaseEnd, ...]:
        """The entries of a report.

        Raises:
            ValueError: it is none; the message names the entry.
        """
        if not isinstance(raw, list) or len(raw) > SHUTDOWN_MOST:
            raise ValueError(f"phases must be a list of at most {SHUTDOWN_MOST}")
        return tuple(cls._one(number, entry) for number, entry in enumerate(raw))

    @classmethod
    def _one(cls, number: int, entry: object) -> PhaseEnd:
        if not isinstance(entry, dict):
            raise ValueError(f"phases[{number}] must be an object")
        words = [entry.get("phase"), entry.get("outcome")]
        for name, word in zip(("phase", "outcome"), words, strict=True):
            if not isinstance(word, str) or not 1 <= len(word) <= 32:
                raise ValueError(f"phases[{number}].{name} must be a text of 1 to 32 characters")
        seconds = entry.get("seconds")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= SHUTDOWN_SECONDS:
            raise ValueError(f"phases[{number}].seconds must be a number from 0 to {SHUTDOWN_SECONDS}")
        return cls(str(words[0]), str(words[1]), float(seconds))

    @staticmethod
    def to_json(ends: Sequence[PhaseEnd]) -> str:
        """What `parse` reads."""
        return json.dumps([asdict(end) for end in ends], separators=(",", ":"))


class Seen(StrEnum):
    """What the sidecar saw."""

    LEASED = "leased"  # it held the lease and answered so, up to `beat`
    FENCED = "fenced"  # it has said "not leased"; sticky
    REPORTED = "reported"  # the workload reported an outcome; `recorded` says whether the database has it


@dataclass(frozen=True, slots=True)
class Testimony:
    """The sidecar's termination message.

    It is rewritten every second while the sidecar lives, so that a sidecar that is killed after the workload's end has
    still testified. Times are seconds since the epoch by the node's wall clock, the clock of the kubelet's own
    `finishedAt`, and are compared with nothing else.
    """

    lease_id: str
    attempt: int
    seen: Seen
    beat: float  # when the sidecar last ran and answered
    until: float  # the trust deadline that it would have answered by, in the same clock
    final: bool = False  # written at SIGTERM: the workload had ended by then
    fenced_at: float | None = None
    reason: str = ""  # why fenced, for people; at most 512 characters
    outcome: str | None = None  # for REPORTED: complete, fail or release
    recorded: bool | None = None  # for REPORTED: False if no answer of the database came: it may or may not have it
    failed_probe: str | None = None  # container whose own liveness probe failed: the kubelet stops it, not the fence
    version: int = 1

    def to_json(self) -> str:
        """Compact JSON, below the kubelet's 4,096 byte limit for a termination message."""
        return json.dumps({k: v for k, v in asdict(self).items() if v is not None}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | None) -> Testimony | None:
        """The testimony in `text`, or None where there is none (anything unreadable proves nothing)."""
        try:
            raw = json.loads(text or "")
            raw["seen"] = Seen(raw["seen"])
            known = {k: raw[k] for k in cls.__slots__ if k in raw}
            return cls(**known)
        except (ValueError, TypeError, KeyError):
            return None
