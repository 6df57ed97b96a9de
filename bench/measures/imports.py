"""What it costs to import each part of a run's Pod, beside psycopg alone. Each in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from statistics import median
from typing import Final

from bench.model import Aim, Result, Row, Scale, ratios, turns

# `hold` and `adopt` import the driver when they first connect, after the ports are open.
PARTS: Final = {
    "psycopg": "psycopg",
    "drain": "leasedjob.sidecar.drain",
    "gate": "leasedjob.sidecar.gate",
    "hold": "leasedjob.sidecar.hold",
    "hold, connecting": "leasedjob.sidecar.hold, leasedjob.lease.database, leasedjob.lease.holder",
    "adopt": "leasedjob.sidecar.adopt",
    "adopt, connecting": "leasedjob.sidecar.adopt, leasedjob.lease.database, leasedjob.lease.holder",
    "workload": "leasedjob.workload",
    "workload, in use": "leasedjob.workload.run, leasedjob.workload.draining, leasedjob.workload.shutdown",
    "workload, every name": "leasedjob.workload; from leasedjob.workload import *",
    "exec": "leasedjob.workload.verbs",
}
_PROGRAM: Final = """
import sys, time
before, began = len(sys.modules), time.perf_counter()
import {names}
print((time.perf_counter() - began) * 1000, len(sys.modules) - before, "psycopg" in sys.modules)
"""


def _take(names: str, counts: dict[str, str], part: str) -> Callable[[], float]:
    def take() -> float:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM.format(names=names)], check=True, capture_output=True, text=True
        )
        milliseconds, modules, driver = done.stdout.split()
        counts[part] = f"{modules} modules, {'with' if driver == 'True' else 'without'} the driver"
        return float(milliseconds)

    return take


def measure(scale: Scale) -> Result:
    """Milliseconds for the import statements."""
    counts: dict[str, str] = {}
    found = turns({part: _take(names, counts, part) for part, names in PARTS.items()}, scale.of(20, 2))
    return Result(
        "imports",
        "importing the parts of a run's Pod (less is better)",
        tuple(
            Row(f"{part} ({counts[part]})", "ms", tuple(values))
            if part == "psycopg"
            else Row(f"{part} ({counts[part]})", "ms", tuple(values), ratios(values, found["psycopg"]), "psycopg")
            for part, values in found.items()
        ),
        (Aim("importing leasedjob.workload over bare Python, ms", median(found["workload"]), 60),),
        {"bytecode": "cached"},
    )
