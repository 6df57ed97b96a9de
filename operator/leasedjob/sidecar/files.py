"""The files of a run's Pod: the handoff from adopt to hold, hold's memory for its successor, the termination message.

Handoff and memory lie in a volume in memory that the workload doesn't mount; they hold the owner token. A file is
replaced as a whole, so a reader never sees half of one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final

from leasedjob.lease.held import Outcome
from leasedjob.lease.trust import Timing
from leasedjob.sidecar.fence import NEVER, Fenced, Lease, Report, State, Suspicion

MESSAGE_LIMIT: Final = 1000  # bytes; far below the kubelet's 4,096, which all containers of a large Pod share


class Stage(StrEnum):
    PROPOSED = "proposed"  # written before adopt is called: a restarted adopt asks again with the same token
    ADOPTED = "adopted"


@dataclass(frozen=True, slots=True)
class Handoff:
    """What adopt leaves to hold. Times are CLOCK_BOOTTIME, valid within the boot that `boot_id` names.

    Args:
        sent: when the answered adopt request was sent; None before.
        trusted_until: sent + trust; until then hold may say "leased" without having heartbeated itself.
    """

    lease_id: str
    token: str
    pod_uid: str
    state: Stage
    boot_id: str
    sent: float | None = None
    trusted_until: float | None = None
    attempt: int = 0
    lease_ms: int = 0
    fencing_token: int = 0
    lock_key: str = ""
    timing: Timing | None = None

    @property
    def lease(self) -> Lease | None:
        """The lease, if it was adopted."""
        if self.state is not Stage.ADOPTED or self.timing is None:
            return None
        return Lease(self.lease_id, self.attempt, self.fencing_token, self.lock_key, self.lease_ms, self.timing)

    def write(self, path: str) -> None:
        write_whole(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: str) -> Handoff | None:
        """The handoff, or None where there is none that can be read."""
        raw = _read_json(path)
        if raw is None:
            return None
        try:
            raw["state"] = Stage(raw["state"])
            raw["timing"] = Timing(**raw["timing"]) if raw.get("timing") else None
            return cls(**{f.name: raw[f.name] for f in fields(cls) if f.name in raw})
        except (KeyError, TypeError, ValueError):
            return None


def write_memory(path: str, state: State, boot_id: str) -> None:
    """Leaves to a successor in this Pod what it must know. A report that isn't recorded yet is not among it: whoever
    made it has had no answer and makes it again."""
    if state.lease is None:
        return
    report = state.report
    write_whole(
        path,
        json.dumps(
            {
                "boot_id": boot_id,
                "lease_id": state.lease.lease_id,
                "attempt": state.lease.attempt,
                "trusted_until": state.trusted_until if state.trusted_until > NEVER else None,
                "fenced": asdict(state.fenced) if state.fenced else None,
                "recorded": report.outcome if report and report.recorded else None,
                "draining": state.draining,
                "well_at": state.well_at,
                "asked": dict(state.asked),
                "suspicions": {k: asdict(v) for k, v in state.suspicions.items()},
                "gap": asdict(state.gap) if state.gap else None,
                "unhealthy": dict(state.unhealthy),
            }
        ),
    )


def read_memory(path: str, lease: Lease, boot_id: str) -> State | None:
    """What a predecessor of this lease, attempt and boot left; None otherwise."""
    raw = _read_json(path)
    if raw is None:
        return None
    try:
        if (raw["boot_id"], raw["lease_id"], raw["attempt"]) != (boot_id, lease.lease_id, lease.attempt):
            return None
        until = raw["trusted_until"]
        return State(
            lease=lease,
            trusted_until=NEVER if until is None else float(until),
            fenced=Fenced(**raw["fenced"]) if raw["fenced"] else None,
            report=Report(Outcome(raw["recorded"]), recorded=True) if raw["recorded"] else None,
            draining=bool(raw["draining"]),
            well_at=raw["well_at"],
            asked=_floats(raw["asked"]),
            suspicions={str(k): Suspicion(**v) for k, v in raw["suspicions"].items()},
            gap=Suspicion(**raw["gap"]) if raw["gap"] else None,
            unhealthy={str(k): str(v) for k, v in raw["unhealthy"].items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _floats(raw: Mapping[str, Any]) -> dict[str, float]:
    return {str(k): float(v) for k, v in raw.items()}


def _read_json(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            raw = json.load(file)
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) else None


def write_whole(path: str, text: str) -> None:
    """Replaces the file; readable by its owner only."""
    temporary = f"{path}.new"
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    os.rename(temporary, path)


def write_message(path: str, text: str) -> None:
    """Writes the termination message in place (it is a mounted file: it can't be renamed over).

    One write, padded with blanks to the length that the file had, so that a process that is killed at any moment leaves
    the old text or the new one. A failure is ignored: there is nobody to tell, and the caller has more important work.
    """
    data = text.encode("utf-8", "replace")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(fd, data.ljust(os.fstat(fd).st_size), 0)
        finally:
            os.close(fd)
    except OSError:
        pass


def failure_message(verb: str, verdict: str, message: str) -> str:
    """The termination message of a verb that gave up: one line of JSON, `{"<verb>": verdict, "message": ...}`."""
    while True:
        text = json.dumps({verb: verdict, "message": message}, separators=(",", ":"))
        if len(text) <= MESSAGE_LIMIT:
            return text
        message = message[: len(message) * 3 // 4]
