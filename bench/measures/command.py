"""How long a person waits for `kubectl leasedjob --help`, beside Python doing nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Final

from bench.model import Aim, Result, Scale, difference, rows, turns

MAIN: Final = "from leasedjob.cli.kubectl import main; main()"


def _run(*arguments: str) -> Callable[[], float]:
    """Takes milliseconds from start to end of a Python process."""

    def take() -> float:
        began = perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        return (perf_counter() - began) * 1000

    return take


def measure(scale: Scale) -> Result:
    """Milliseconds from start to end."""
    found = turns(
        {
            "python": _run("-c", "pass"),
            "python, imports click": _run("-c", "import click"),
            "kubectl leasedjob --help": _run("-c", MAIN, "--help"),
            "kubectl leasedjob run --help": _run("-c", MAIN, "run", "--help"),
        },
        scale.of(20, 2),
    )
    more = difference(found["kubectl leasedjob --help"], found["python"])
    return Result(
        "command",
        "start to end of a command (less is better)",
        rows(found, "ms", {name: "python" for name in found if name != "python"}),
        (Aim("kubectl leasedjob --help over bare Python, ms", more, 250),),
        {"bytecode": "cached"},
    )
