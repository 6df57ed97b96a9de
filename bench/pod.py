"""The processes of one run's Pod, and of the peer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import IO, Final

from psycopg import conninfo

from leasedjob import protocol
from leasedjob.lease.trust import Timing

# As in the images: no bytecode is written, and output isn't held back.
_PYTHON: Final = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "LANG": "C.UTF-8",
    "PATH": os.environ["PATH"],
}

# It connects, asks one thing, and stays connected.
_BARE: Final = """
import sys, psycopg
connection = psycopg.connect(sys.argv[1], autocommit=True)
connection.execute("SELECT 1").fetchone()
print("ready", file=sys.stderr, flush=True)
sys.stdin.read()
"""


def _read_until(stream: IO[str], word: str) -> None:
    heard: list[str] = []
    for line in stream:
        heard.append(line)
        if word in line:
            return
    raise AssertionError("the process ended before it was ready:\n" + "".join(heard))


@contextmanager
def started(*command: str, env: dict[str, str], ready: str) -> Iterator[tuple[subprocess.Popen[str], float]]:
    """A process that has said `ready` on stderr, and the seconds that this took. It is killed at the end."""
    began = perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**_PYTHON, "PATH": os.environ["PATH"], **env},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        _read_until(process.stderr, ready)
        yield process, perf_counter() - began
    finally:
        process.kill()
        process.communicate()


@contextmanager
def bare(dsn: str) -> Iterator[tuple[subprocess.Popen[str], float]]:
    """The peer: a Python process that imports psycopg and connects."""
    with started("-c", _BARE, dsn, env={}, ready="ready") as running:
        yield running


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Pod:
    """One attempt's files and environment.

    Args:
        dsn: of the tenant's role.
    """

    directory: Path
    dsn: str
    lease_id: str
    claim_token: str
    attempt: int
    timing: Timing
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    probe_port: int = field(default_factory=_free_port)
    report_port: int = field(default_factory=_free_port)

    def _env(self, verb: str) -> dict[str, str]:
        credentials = self.directory / "database"
        credentials.mkdir(exist_ok=True)
        for name, value in conninfo.conninfo_to_dict(self.dsn).items():
            (credentials / name).write_text(str(value), encoding="utf-8")
        message = self.directory / f"{verb}.message"
        message.write_text("", encoding="utf-8")
        return {
            protocol.ENV_LEASE_ID: self.lease_id,
            protocol.ENV_CLAIM_TOKEN: self.claim_token,
            protocol.ENV_POD_UID: self.uid,
            protocol.ENV_POD_NAME: f"pod-{self.uid[:8]}",
            protocol.ENV_TIMING: self.timing.to_json(),
            protocol.ENV_ADOPT_DEADLINE: "20",
            "LEASEDJOB_SIDECAR_HANDOFF_FILE": str(self.directory / "lease.json"),
            "LEASEDJOB_SIDECAR_DATABASE_DIR": str(credentials),
            "LEASEDJOB_SIDECAR_TERMINATION_LOG": str(message),
            "LEASEDJOB_SIDECAR_PROBE_PORT": str(self.probe_port),
            "LEASEDJOB_SIDECAR_REPORT_PORT": str(self.report_port),
        }

    def adopt(self) -> float:
        """Seconds from the start of the init container's process to its end, with the lease adopted."""
        env = {**_PYTHON, "PATH": os.environ["PATH"], **self._env("adopt")}
        began = perf_counter()
        subprocess.run(
            [sys.executable, "-m", "leasedjob.sidecar.main", "adopt"], env=env, check=True, stderr=subprocess.DEVNULL
        )
        return perf_counter() - began

    @contextmanager
    def hold(self) -> Iterator[tuple[subprocess.Popen[str], float]]:
        """The sidecar, from the moment at which it says that it holds the lease."""
        command = ("-m", "leasedjob.sidecar.main", "hold")
        with started(*command, env=self._env("hold"), ready="leasedjob-hold: leased") as running:
            yield running
