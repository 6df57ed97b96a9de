"""A real Redis and a real Kafka broker (KRaft mode), for tests. Both end with the process that started them.

Neither is a Python package: LEASEDJOB_TEST_REDIS names redis-server, or it is on the path; LEASEDJOB_TEST_KAFKA names
the folder with Kafka's jars, or they are in the cache. `make integration` brings both.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from select import select
from types import TracebackType
from typing import Final, Self

import pytest

from tests.cluster import jars
from tests.cluster.layout import REPOSITORY, Cache

REDIS: Final = os.environ.get("LEASEDJOB_TEST_REDIS") or shutil.which("redis-server")
UP_SECONDS: Final = 90.0
# Small, and quick to start: C1 alone is enough for a broker that lives for a minute.
JAVA: Final = ("java", "-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")


def kafka_jars() -> Path | None:
    """The folder with Kafka's jars, if it is here and there is a Java to run them."""
    named = os.environ.get("LEASEDJOB_TEST_KAFKA")
    found = Path(named) if named else jars.folder(Cache.from_env())
    return found if found.is_dir() and shutil.which("java") else None


def need(what: str, present: object) -> None:
    """Skips a test that can't be run here; in CI that is an error."""
    if present:
        return
    missing = f"{what} IS NOT TESTED: `make integration` says why it can't be had"
    if os.environ.get("CI") == "true":
        pytest.fail(missing)
    pytest.skip(missing)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class _Server:
    """A process with a folder and a port of its own. A context manager."""

    what: str

    def __init__(self) -> None:
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix=f"leasedjob-{self.what.lower()}-"))
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def answers(self) -> bool:
        raise NotImplementedError

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def start(self) -> None:
        """Also again, on the same port with the same data."""
        with (self.folder / "log").open("ab") as log:
            # A killed test runs no clean-up: the kernel does it.
            words = ["setpriv", "--pdeathsig", "KILL", *self.command()]
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        until = time.monotonic() + UP_SECONDS
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > until:
                self.stop()
                raise AssertionError(f"{self.what} did not start:\n{self.log[-3000:]}")
            time.sleep(0.05)

    def freeze(self) -> None:
        """From now on it accepts connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """As a crash does. What was written stays, for another start."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class RedisServer(_Server):
    what = "Redis"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        assert REDIS is not None
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--maxmemory-policy"]
        return [REDIS, *words, "noeviction", "--save", "", "--appendonly", "yes", "--appendfsync", "no"]

    def answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=2) as line:
            line.sendall(b"PING\r\n")
            return line.recv(16).startswith(b"+PONG")
        return False


class KafkaBroker(_Server):
    """One broker that is its own controller."""

    what = "Kafka"

    def __init__(self) -> None:
        super().__init__()
        self._controller = free_port()

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _java(self, main: str, *words: str) -> list[str]:
        settings = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.showDateTime=true")
        return [*JAVA, *settings, "-cp", f"{kafka_jars()}/*", main, *words]

    def command(self) -> list[str]:
        return self._java("kafka.Kafka", str(self.folder / "settings"))

    def start(self) -> None:
        if not (self.folder / "settings").exists():
            self._format()
        super().start()

    def _format(self) -> None:
        settings = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller}",
            "listeners": f"CLIENTS://{self.servers},CONTROLLER://127.0.0.1:{self._controller}",
            "advertised.listeners": f"CLIENTS://{self.servers}",
            "listener.security.protocol.map": "CLIENTS:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "CLIENTS",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": self.folder / "data",
            "auto.create.topics.enable": "false",
            "log.cleaner.dedupe.buffer.size": 4 << 20,
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 2,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 1,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            # A group of one or two need not wait for more, nor long for one that was killed.
            "group.initial.rebalance.delay.ms": 0,
            "group.min.session.timeout.ms": 1000,
            "num.network.threads": 2,
            "num.io.threads": 2,
            "background.threads": 2,
        }
        (self.folder / "settings").write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        identity = base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=").replace("-", "A")
        words = self._java("kafka.tools.StorageTool", "format", "-t", identity, "-c", str(self.folder / "settings"))
        done = subprocess.run(words, capture_output=True, text=True, timeout=UP_SECONDS, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def answers(self) -> bool:
        # An ApiVersions request: version 0, no client id. The broker answers when it has registered.
        body = b"\x00\x12\x00\x00\x00\x00\x00\x07\xff\xff"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=2) as line:
            line.sendall(len(body).to_bytes(4) + body)
            return line.recv(8)[4:] == b"\x00\x00\x00\x07"
        return False


# --- one broker for all test processes of a run ---


def shared_kafka(folder: Path) -> str:
    """The address of the run's broker; whoever asks first starts it.

    Args:
        folder: one that the run's test processes share.
    """
    # pytest-xdist: the process that gives out the tests outlives those that run them.
    run = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    address = folder / "kafka"
    with (folder / "kafka.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            words = ["setsid", "--fork", sys.executable, "-m", "tests.queues", str(run), str(address)]
            with (folder / "kafka.log").open("wb") as log:
                subprocess.run(words, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
            until = time.monotonic() + 2 * UP_SECONDS
            while not address.exists():
                assert time.monotonic() < until, (folder / "kafka.log").read_text()
                time.sleep(0.05)
    text = address.read_text()
    assert text, (folder / "kafka.log").read_text()
    return text


def _keep(run: int, address: Path) -> None:
    """Runs a broker until the process `run` has ended."""
    with _fate_of(run) as fate:
        text = ""
        try:
            with KafkaBroker() as broker:
                text = broker.servers
                _publish(address, text)
                select([fate], [], [])
        finally:
            if not text:
                _publish(address, "")


@contextlib.contextmanager
def _fate_of(pid: int) -> Iterator[int]:
    """Something that becomes readable when the process ends."""
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _publish(address: Path, text: str) -> None:
    """The run's folder may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        partial = address.with_suffix(".partial")
        partial.write_text(text)
        partial.rename(address)


if __name__ == "__main__":
    _keep(int(sys.argv[1]), Path(sys.argv[2]))
