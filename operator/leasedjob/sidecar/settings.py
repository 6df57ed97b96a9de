"""Where the sidecar's parts find their files and ports: the protocol's values, which tests may replace."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from leasedjob import protocol


@dataclass(frozen=True, slots=True)
class Settings:
    handoff_file: str = protocol.HANDOFF_FILE
    database_dir: str = protocol.MOUNT_DATABASE
    termination_log: str = protocol.TERMINATION_LOG
    probe_port: int = protocol.PROBE_PORT
    report_port: int = protocol.REPORT_PORT
    gate_seconds: float = 60.0

    @property
    def memory_file(self) -> str:
        """What `hold` leaves to its successor in the same Pod, beside the handoff."""
        return os.path.join(os.path.dirname(self.handoff_file), "hold.json")

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """The protocol's values, or those of the LEASEDJOB_SIDECAR_* variables (for tests; not set in Pods)."""

        def at(name: str, default: str) -> str:
            return env.get(f"LEASEDJOB_SIDECAR_{name}") or default

        return cls(
            handoff_file=at("HANDOFF_FILE", protocol.HANDOFF_FILE),
            database_dir=at("DATABASE_DIR", protocol.MOUNT_DATABASE),
            termination_log=at("TERMINATION_LOG", protocol.TERMINATION_LOG),
            probe_port=int(at("PROBE_PORT", str(protocol.PROBE_PORT))),
            report_port=int(at("REPORT_PORT", str(protocol.REPORT_PORT))),
            gate_seconds=float(at("GATE_SECONDS", "60")),
        )
