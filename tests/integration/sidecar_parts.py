"""A run's Pod without Kubernetes: the sidecar's real processes, a probe, and a network that can break."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from psycopg import AsyncConnection, conninfo

from leasedjob import protocol
from leasedjob.http1 import HttpError, ask
from leasedjob.lease.store import OperatorStore
from leasedjob.lease.tenants import ensure_tenant
from leasedjob.lease.trust import Timing

from .conftest import CLUSTER, NAMESPACE, Database, claimed, registered

# 12 s of lease, of which 4.76 s are trusted: detection 2 s, grace 0 s, 5 s of margin. Too short for a real Pod.
SHORT = Timing(duration=12, heartbeat=1, grace=0, pre_stop=0)
# Calm enough that nothing ends during a test.
CALM = Timing(duration=120, heartbeat=2, grace=1, pre_stop=0)
PASSWORD = "s'ecret pass"


class Proxy:
    """A TCP proxy whose `mode` may change at any moment, also for open connections.

    pass      forwards both ways
    hole      takes connections and bytes, and forwards nothing (a partition without a reset)
    mute      forwards what the client sends, and swallows the answers (half open)
    refuse    resets new connections at once
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self.mode = "pass"
        self.delay = 0.0  # seconds, for each chunk of an answer
        self.lose_answer_to = b""  # the next request with these bytes is carried out, and its answer never delivered
        self.lost_answers = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._losing: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def leads_to(self, host: str, port: int) -> None:
        """New connections go there."""
        self._target = (host, port)

    def reset(self) -> None:
        """Cuts every open connection with a reset."""
        connections, self._open = self._open, []
        for connection in connections:
            self._kill(connection)

    def close(self) -> None:
        self._listener.close()
        self.reset()

    @staticmethod
    def _kill(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.mode == "refuse":
                self._kill(client)
                continue
            self._open.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        if self.mode == "hole":
            with contextlib.suppress(OSError):
                while client.recv(65536):
                    pass
            return
        try:
            server = socket.create_connection(self._target)
        except OSError:
            self._kill(client)
            return
        self._open.append(server)
        threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()
        self._pump(client, server, False)

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(65536):
                if answers and self.delay:
                    time.sleep(self.delay)
                if answers and source in self._losing:
                    self._losing.discard(source)
                    self.lost_answers += 1
                    self._kill(sink)
                    return
                if not answers and self.lose_answer_to and self.lose_answer_to in data:
                    self.lose_answer_to = b""
                    self._losing.add(sink)
                if self.mode == "hole" or (self.mode == "mute" and answers):
                    continue
                sink.sendall(data)
        except OSError:
            pass
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Pod:
    """One attempt's Pod: its files, environment and processes."""

    directory: Path
    database: Database
    proxy: Proxy
    lease_id: str
    claim_token: str
    timing: Timing
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    attempt: int = 1
    extra: dict[str, str] = field(default_factory=dict)
    hold: subprocess.Popen[bytes] | None = None
    probe_port: int = field(default_factory=free_port)
    report_port: int = field(default_factory=free_port)

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "PYTHONWARNINGS": "error",
            protocol.ENV_LEASE_ID: self.lease_id,
            protocol.ENV_CLAIM_TOKEN: self.claim_token,
            protocol.ENV_POD_UID: self.uid,
            protocol.ENV_POD_NAME: f"pod-{self.uid[:8]}",
            protocol.ENV_TIMING: self.timing.to_json(),
            protocol.ENV_ADOPT_DEADLINE: "20",
            "LEASEDJOB_SIDECAR_HANDOFF_FILE": str(self.directory / "lease.json"),
            "LEASEDJOB_SIDECAR_DATABASE_DIR": str(self.directory / "database"),
            "LEASEDJOB_SIDECAR_PROBE_PORT": str(self.probe_port),
            "LEASEDJOB_SIDECAR_REPORT_PORT": str(self.report_port),
            "LEASEDJOB_SIDECAR_GATE_SECONDS": "10",
            **self.extra,
        }

    def start(self, verb: str) -> subprocess.Popen[bytes]:
        env = {**self.env, "LEASEDJOB_SIDECAR_TERMINATION_LOG": str(self.message_file(verb))}
        # The kubelet makes the message file before the container starts; a restarted container gets a new one.
        self.message_file(verb).write_text("")
        log = (self.directory / f"{verb}.log").open("ab")
        with log:
            return subprocess.Popen(
                [sys.executable, "-m", "leasedjob.sidecar.main", verb], env=env, stdout=log, stderr=log
            )

    def run(self, verb: str, *, seconds: float = 30) -> int:
        """Runs a verb to its end; its exit code."""
        process = self.start(verb)
        try:
            return process.wait(seconds)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def message_file(self, verb: str) -> Path:
        return self.directory / f"{verb}.message"

    def message(self, verb: str) -> dict[str, Any]:
        text = self.message_file(verb).read_text()
        loaded: dict[str, Any] = json.loads(text) if text else {}
        return loaded

    def log(self, verb: str) -> str:
        return (self.directory / f"{verb}.log").read_text()

    def handoff(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.directory / "lease.json").read_text())
        return loaded

    # --- hold ---

    def begin_hold(self) -> None:
        """Starts hold and waits until it answers."""
        self.hold = self.start("hold")
        until = time.monotonic() + 15
        while time.monotonic() < until:
            with contextlib.suppress(OSError, HttpError):
                self.view()
                self.probe()
                return
            assert self.hold.poll() is None, self.log("hold")
            time.sleep(0.02)  # until it listens there is nothing to wait on
        raise AssertionError(self.log("hold"))

    def adopt_and_hold(self) -> Pod:
        assert self.run("adopt") == 0, self.log("adopt")
        self.begin_hold()
        return self

    def signal(self, number: int) -> None:
        assert self.hold is not None
        self.hold.send_signal(number)

    def freeze(self, seconds: float) -> None:
        """SIGSTOP, so long, SIGCONT: the length of the freeze is what is tested."""
        self.signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.hold is not None:
            self.hold.kill()
            self.hold.wait()

    def end(self, *, seconds: float = 5) -> protocol.Testimony:
        """SIGTERM, and the testimony that is left."""
        assert self.hold is not None
        self.hold.terminate()
        assert self.hold.wait(seconds) == 0, self.log("hold")
        return self.testimony()

    def testimony(self) -> protocol.Testimony:
        testimony = protocol.Testimony.from_json(self.message_file("hold").read_text())
        assert testimony is not None, self.message_file("hold").read_text()
        return testimony

    def probe(self, container: str = "main", *, attempt: int | None = None, seconds: float = 2) -> int:
        path = protocol.probe_path(self.lease_id, self.attempt if attempt is None else attempt, container)
        status, _ = ask("127.0.0.1", self.probe_port, "GET", path, seconds=seconds)
        return status

    def view(self, *, revision: int | None = None, wait: float = 0) -> dict[str, Any]:
        query = "" if revision is None else f"?revision={revision}&wait={wait}"
        status, body = ask("127.0.0.1", self.report_port, "GET", f"/v1/lease{query}", seconds=wait + 5)
        assert status == 200
        loaded: dict[str, Any] = json.loads(body)
        return loaded

    def await_view(self, wanted: Callable[[dict[str, Any]], bool], *, seconds: float = 15) -> dict[str, Any]:
        """Waits on the sidecar's own long poll until its state is as wanted."""
        until = time.monotonic() + seconds
        view = self.view()
        while not wanted(view):
            left = until - time.monotonic()
            assert left > 0, (view, self.log("hold"))
            view = self.view(revision=view["revision"], wait=min(left, 1.0))
        return view

    def await_beats(self, more: int = 1, *, seconds: float = 15) -> dict[str, Any]:
        goal = self.view()["heartbeats"]["answered"] + more
        return self.await_view(lambda v: bool(v["heartbeats"]["answered"] >= goal), seconds=seconds)

    def post(self, body: object, *, seconds: float = 30, raw: bytes | None = None) -> tuple[int, dict[str, Any]]:
        return post(self.report_port, "/v1/outcome", json.dumps(body).encode() if raw is None else raw, seconds)

    # --- the database's view ---

    def lease_left(self) -> float:
        """Seconds until the lease ends, by the database's clock."""
        (row,) = self.database.rows(
            "SELECT extract(epoch FROM modified_at + lease_ms * interval '1 ms' - clock_timestamp())::float8 AS left"
            "  FROM leasedjob.job_scheduler WHERE id = %s",
            uuid.UUID(self.lease_id),
        )
        return float(row["left"])

    def left_when_fenced(self) -> float:
        """How much of the lease was left when the answer became no; database and sidecar share this machine's clock."""
        self.await_view(lambda v: bool(v["state"] == "fenced"))
        until = time.monotonic() + 5
        while (fenced_at := self.testimony().fenced_at) is None:
            assert time.monotonic() < until
            time.sleep(0.02)  # a file has no signal to wait on
        row = self.row()
        ends: float = row["modified_at"].timestamp() + row["lease_ms"] / 1000
        return ends - fenced_at

    def row(self) -> dict[str, Any]:
        return self.database.row(uuid.UUID(self.lease_id))

    def clean_up(self) -> None:
        if self.hold is not None and self.hold.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.hold.send_signal(signal.SIGCONT)
            self.kill()


def post(port: int, path: str, body: bytes, seconds: float) -> tuple[int, dict[str, Any]]:
    """A POST with a body, by a client that knows nothing of the sidecar's own."""
    from http.client import HTTPConnection

    connection = HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        connection.request("POST", path, body)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def write_credentials(directory: Path, database: Database, port: int, user: str, password: str) -> None:
    """The mounted Secret."""
    directory.mkdir(exist_ok=True)
    for name, value in {
        "host": "127.0.0.1",
        "port": str(port),
        "dbname": database.name,
        "username": user,
        "password": password,
        "sslmode": "disable",
    }.items():
        new = directory / f"{name}.new"
        new.write_text(value)
        new.rename(directory / name)


class Pods:
    """Makes Pods for one test, each with a fresh claim, and ends their processes."""

    def __init__(self, tmp: Path, database: Database, store: OperatorStore) -> None:
        self._tmp, self.database, self.store = tmp, database, store
        self._made: list[Pod] = []
        self._proxies: list[Proxy] = []
        self.user = ""

    async def tenant(self, *, password: str = PASSWORD, slot: str = "a", namespace: str = NAMESPACE) -> str:
        connection = await AsyncConnection.connect(self.database.dsn, autocommit=True)
        async with connection:
            return (await ensure_tenant(connection, CLUSTER, namespace, password=password, slot=slot)).role

    async def pod(self, tick: Any, timing: Timing = SHORT, *, extra: dict[str, str] | None = None) -> Pod:
        """A Pod whose claim was just made; nothing runs yet."""
        self.user = self.user or await self.tenant()
        await registered(self.store)
        result = await claimed(self.store, tick, run_lease_ms=timing.duration * 1000)
        return self.for_claim(result, timing, extra=extra)

    def for_claim(self, result: Any, timing: Timing = SHORT, *, extra: dict[str, str] | None = None) -> Pod:
        """Another Pod that shows the same claim."""
        target = conninfo.conninfo_to_dict(self.database.dsn)
        proxy = Proxy(str(target["host"]), int(str(target["port"])))
        directory = self._tmp / f"pod-{len(self._made)}"
        directory.mkdir()
        write_credentials(directory / "database", self.database, proxy.port, self.user, PASSWORD)
        pod = Pod(
            directory,
            self.database,
            proxy,
            str(result.id),
            str(result.owner_token),
            timing,
            attempt=result.attempt,
            extra=extra or {},
        )
        self._made.append(pod)
        self._proxies.append(proxy)
        return pod

    def rival(self, pod: Pod) -> Pod:
        """A Pod with another UID that shows the same claim."""
        claim = SimpleNamespace(id=pod.lease_id, owner_token=pod.claim_token, attempt=pod.attempt)
        return self.for_claim(claim, pod.timing)

    def clean_up(self) -> None:
        for pod in self._made:
            pod.clean_up()
        for proxy in self._proxies:
            proxy.close()


def pods_for(tmp: Path, database: Database, store: OperatorStore) -> Iterator[Pods]:
    pods = Pods(tmp, database, store)
    yield pods
    pods.clean_up()
