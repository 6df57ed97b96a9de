"""Processes that end when whoever started them does, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[2]


def tether() -> None:
    """In the child: the process ends as soon as its standard input does."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=wait, name="tether", daemon=True).start()


def start(module: str, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
    """A child that calls `tether`. Its output is piped, its errors go to `log`."""
    with log.open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
