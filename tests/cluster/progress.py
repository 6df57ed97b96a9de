"""Steps with elapsed time, commands with a log and a time limit, waits that end with a message."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

REPORT_EVERY_SECONDS = 20.0
LOG_TAIL_LINES = 15


class ClusterError(Exception):
    """Something is missing or failed. The message says what, and how to get it or where the log is."""


class Progress:
    """Prints `[  12.3 s] text`; the time is counted from when the object was made."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        print(f"[{self.elapsed:6.1f} s] {text}", flush=True)

    def run(
        self,
        argv: Sequence[str],
        *,
        what: str,
        log: Path,
        timeout: float,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Runs `argv` with its output in `log`; says now and then that it still runs.

        Raises ClusterError with the end of the log where it fails or takes longer than `timeout` seconds.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with log.open("ab") as out:
            out.write(f"+ {' '.join(argv)}\n".encode())
            out.flush()
            try:
                process = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, cwd=cwd, env=env
                )
            except FileNotFoundError as missing:
                raise ClusterError(f"{what}: the program {argv[0]} is not installed") from missing
            try:
                while True:
                    spent = time.monotonic() - began
                    if spent >= timeout:
                        raise ClusterError(f"{what}: not done after {timeout:.0f} s; log: {log}")
                    try:
                        code = process.wait(min(REPORT_EVERY_SECONDS, timeout - spent))
                        break
                    except subprocess.TimeoutExpired:
                        self.say(f"  ... {what}: {time.monotonic() - began:.0f} s so far")
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if code != 0:
            raise ClusterError(f"{what} failed (exit {code}); log: {log}\n{tail(log)}")


def tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log, indented, for an error message; empty where there is none."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])


def wait_for(what: str, ready: Callable[[], bool], *, timeout: float, log: Path, every: float = 0.1) -> None:
    """Asks `ready` until it is true. Raises ClusterError naming `what` and `log` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not ready():
        if time.monotonic() >= deadline:
            raise ClusterError(f"waited {timeout:.0f} s for {what}; log: {log}\n{tail(log)}")
        time.sleep(every)


def output(argv: Sequence[str], *, timeout: float = 30, env: Mapping[str, str] | None = None) -> str | None:
    """Standard output of a short command, or None where it failed, is missing or hangs."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, env=env, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def succeeds(argv: Sequence[str], *, timeout: float = 30) -> bool:
    """Whether a short command ends with 0."""
    return output(argv, timeout=timeout) is not None


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment plus `extra`, without KUBECONFIG: a default context is never used by accident."""
    env = {k: v for k, v in os.environ.items() if k != "KUBECONFIG"}
    return env | extra


def fail(message: str) -> int:
    print(f"\nerror: {message}", file=sys.stderr, flush=True)
    return 1
