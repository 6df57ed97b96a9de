"""Many operating system processes that want the same runs: `python -m tests.chaos.crew FOLDER`.

FOLDER/plan.json says what they do. The process loads everything once and forks the workers; one that dies is followed
by another. FOLDER/pids has a line for each: its number and its process id. A file FOLDER/drain tells the workers to
begin nothing new, and to end when every run that began has ended. SIGTERM ends everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class Layer(StrEnum):
    """Which of the two faces of the lease the workers use."""

    LIBRARY = "library"  # JobSchedulerService
    OPERATOR = "operator"  # OperatorStore and SidecarStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a crew does.

    Args:
        dsns: ways to the leases; process n takes the n-th, and begins anew at the end.
        sink: the way to the sink, which no fault breaks.
        keys: how many run keys there are.
        codes: the keys are of so many jobs (operator).
        tasks: that one process does at a time.
        lease, heartbeat: of a run, seconds.
        work: how long a run takes at most, seconds; 0: it is done at once.
        timeout: of one statement, seconds.
        giving_up: share of the runs that end as failed or released at the first try.
        stubborn: share of the owners that don't look at their trust, and don't care when they are told of a loss.
        base: of the ticks, seconds since the epoch (operator).
        forbid: one run of a job at a time (operator).
        batch: requests in one claim (operator).
    """

    layer: Layer
    processes: int
    dsns: list[str]
    sink: str
    keys: int = 10_000
    codes: int = 50
    tasks: int = 4
    lease: float = 1.0
    heartbeat: float = 0.3
    work: float = 1.5
    timeout: float = 2.0
    giving_up: float = 0.1
    stubborn: float = 0.3
    base: int = 0
    forbid: bool = True
    batch: int = 50

    def save(self, folder: Path) -> None:
        (folder / "plan.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Plan:
        values: dict[str, Any] = json.loads((folder / "plan.json").read_text())
        return cls(**{**values, "layer": Layer(values["layer"])})


def _work(plan: Plan, folder: Path, number: int) -> None:
    from tests.chaos import library, operators

    random.seed(os.getpid())
    worker = {Layer.LIBRARY: library.work, Layer.OPERATOR: operators.work}[plan.layer]
    asyncio.run(worker(plan, folder, number))


def _fork(plan: Plan, folder: Path, number: int) -> int:
    pid = os.fork()
    if pid:
        with (folder / "pids").open("a") as file:
            file.write(f"{number} {pid}\n")
        return pid
    code = 0
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _work(plan, folder, number)
    except BaseException:
        (folder / f"crash-{os.getpid()}").write_text(traceback.format_exc())
        code = 1
    os._exit(code)


def main(folder: Path) -> int:
    """0 if every worker ended by itself, or was killed and followed by one that did."""
    from tests.chaos import library, operators  # noqa: F401 (loaded once, before the workers are forked)

    plan = Plan.load(folder)
    running = {_fork(plan, folder, number): number for number in range(plan.processes)}

    def end(*_: object) -> None:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(2)

    signal.signal(signal.SIGTERM, end)
    failed = 0
    while running:
        pid, status = os.wait()
        number = running.pop(pid)
        if os.WIFSIGNALED(status):
            running[_fork(plan, folder, number)] = number
        elif os.WEXITSTATUS(status):
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
