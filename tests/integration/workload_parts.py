"""Real processes of the workload SDK, waited for by what they print."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

LONG = 60.0  # seconds for what takes no time on an idle machine


class Process:
    """A process whose output is read as it comes."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        # A shell starts what it puts in the background with SIGINT and SIGQUIT ignored, also these tests.
        self._popen = subprocess.Popen(
            ["env", "--default-signal=INT,QUIT", *words],
            env=environment(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.out: list[str] = []
        self._err: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_out, daemon=True),
            threading.Thread(target=self._read_err, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_out(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _read_err(self) -> None:
        assert self._popen.stderr is not None
        self._err.extend(self._popen.stderr)

    def line(self, wanted: str, *, seconds: float = LONG) -> str:
        """Waits for a line that begins with `wanted`; lines before it are kept in `out`."""
        until = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line {wanted!r}; {self.out}\n{self.err}") from None
            if line is None:
                raise AssertionError(f"it ended before {wanted!r}; {self.out}\n{self.err}")
            self.out.append(line)
            if line.startswith(wanted):
                return line

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def ended(self) -> bool:
        return self._popen.poll() is not None

    def wait(self, *, seconds: float = LONG) -> int:
        """Its exit code, and all its output in `out` and `err`."""
        code = self._popen.wait(seconds)
        for reader in self._readers:
            reader.join(seconds)
        with contextlib.suppress(queue.Empty):
            while (line := self._lines.get_nowait()) is not None:
                self.out.append(line)
        return code

    @property
    def err(self) -> str:
        return "".join(self._err)

    def clean_up(self) -> None:
        # All of its session: a command under `leasedjob exec` has a process group of its own.
        for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) == self.pid:
                    os.kill(pid, signal.SIGKILL)
        self._popen.wait(LONG)
        for reader in self._readers:
            reader.join(LONG)
        for stream in (self._popen.stdout, self._popen.stderr):
            assert stream is not None
            stream.close()


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """The test's own, without anything of LeasedJob's or libpq's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LEASEDJOB_", "PG"))}
    return {**kept, "PYTHONUNBUFFERED": "1", **more}


class Processes:
    """Starts processes for one test, and ends those that still run."""

    def __init__(self) -> None:
        self._started: list[Process] = []

    def start(self, words: Sequence[str], env: Mapping[str, str] | None = None) -> Process:
        process = Process(words, env)
        self._started.append(process)
        return process

    def python(self, program: str, env: Mapping[str, str] | None = None) -> Process:
        return self.start([sys.executable, "-c", textwrap.dedent(program)], env)

    def leasedjob(self, *words: str, env: Mapping[str, str] | None = None) -> Process:
        return self.start([sys.executable, "-m", "leasedjob", *words], env)

    def clean_up(self) -> None:
        for process in self._started:
            process.clean_up()


def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.clean_up()
