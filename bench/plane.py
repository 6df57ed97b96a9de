"""A real API server on a real etcd, without nodes, for what needs no kubelet; operators, Kubernetes' controllers.

Without a scheduler and a kubelet every Pod stays Pending, as on a cluster whose nodes are cordoned. Times of requests
are the API server's own, to the microsecond, from its audit log: no observer has to be fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
from tests.cluster import binaries
from tests.cluster.layout import Cache
from tests.cluster.progress import Progress
from tests.controller.control_plane import ControlPlane, free_port

from bench.database import OWNER, PASSWORD, Database
from leasedjob.protocol import GROUP, VERSION

Json = dict[str, Any]
AGENT: Final = "leasedjob-bench"  # what the bench itself writes is told apart by it
_POLICY: Final = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [
        {"level": "None", "users": ["system:apiserver"]},
        {"level": "Metadata", "verbs": ["create", "update", "patch", "delete"]},
        {"level": "None"},
    ],
}
INHERITED: Final = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
JOBS: Final = f"/apis/{GROUP}/{VERSION}/namespaces/{{}}/leasedjobs"


@dataclass(frozen=True, slots=True)
class Write:
    """One request that wrote, as the API server logged it."""

    verb: str
    resource: str
    sub: str
    namespace: str
    agent: str
    status: int
    received: datetime
    answered: datetime

    @property
    def made_a_pod(self) -> bool:
        return self.verb == "create" and self.resource == "pods" and not self.sub and self.status == 201


class Plane:
    """The control plane of a measure."""

    def __init__(self, folder: Path) -> None:
        policy = folder / "audit.json"
        policy.write_text(json.dumps(_POLICY), encoding="utf-8")
        self.folder, self._audit = folder, folder / "audit.log"
        flags = (f"--audit-policy-file={policy}", f"--audit-log-path={self._audit}", "--audit-log-maxsize=2000")
        self.control = ControlPlane(folder, flags=flags)
        self.url = f"https://127.0.0.1:{self.control.port}"
        self.tls: ssl.SSLContext

    def __enter__(self) -> Plane:
        try:
            self.control.start()
        except BaseException:
            self.control.stop()
            raise
        self.tls = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        return self

    def __exit__(self, *_: object) -> None:
        self.control.stop()

    # --- requests of the bench ---------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def session(self, connections: int) -> Any:
        connector = aiohttp.TCPConnector(limit=connections, ssl=self.tls)
        head = {"Authorization": f"Bearer {self.control.token}", "User-Agent": AGENT}
        async with aiohttp.ClientSession(connector=connector, headers=head) as session:
            yield session

    def post(self, path: str, bodies: Sequence[Json], *, concurrency: int = 100) -> float:
        """POSTs all of them, so many at a time; the seconds that this took."""

        async def all_of_them() -> float:
            async with self.session(concurrency) as session:
                left = iter(bodies)

                async def some() -> None:
                    for body in left:
                        while True:
                            async with session.post(self.url + path, json=body) as answer:
                                text = await answer.read()
                            if answer.status != 429:
                                break
                            await asyncio.sleep(0.2)
                        assert answer.status == 201, text

                began = time.perf_counter()
                await asyncio.gather(*(some() for _ in range(concurrency)))
                return time.perf_counter() - began

        return asyncio.run(all_of_them())

    def call(self, method: str, path: str, body: Json | None = None) -> Json:
        async def one() -> Json:
            async with self.session(1) as session, session.request(method, self.url + path, json=body) as answer:
                found: Json = await answer.json()
                assert answer.status < 400, found
                return found

        return asyncio.run(one())

    def pods(self, namespace: str) -> list[Json]:
        """As the API server has them, page by page."""
        found: list[Json] = []
        more = ""
        while True:
            page = self.call("GET", f"/api/v1/namespaces/{namespace}/pods?limit=500&continue={more}")
            found += page["items"]
            more = page["metadata"].get("continue") or ""
            if not more:
                return found

    def namespace(self, name: str) -> str:
        self.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        return name

    def clear(self, path: str) -> None:
        """Deletes everything below a path."""
        self.call("DELETE", path, {"kind": "DeleteOptions", "gracePeriodSeconds": 0, "propagationPolicy": "Background"})

    # --- the log -----------------------------------------------------------------------------------------------------

    def writes(self, since: datetime) -> list[Write]:
        """What others than the bench have written since."""
        found = []
        with self._audit.open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue  # it is being written
                what = entry.get("objectRef") or {}
                write = Write(
                    entry["verb"],
                    what.get("resource", ""),
                    what.get("subresource", ""),
                    what.get("namespace", ""),
                    entry.get("userAgent", ""),
                    (entry.get("responseStatus") or {}).get("code", 0),
                    datetime.fromisoformat(entry["requestReceivedTimestamp"]),
                    datetime.fromisoformat(entry["stageTimestamp"]),
                )
                if write.received >= since:
                    found.append(write)
        return found

    def pods_made(self, namespace: str, since: datetime) -> list[datetime]:
        """When each Pod of the namespace was there, in order."""
        return sorted(w.answered for w in self.writes(since) if w.made_a_pod and w.namespace == namespace)

    # --- other programs ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def controllers(self, *flags: str) -> Iterator[None]:
        """Kubernetes' own CronJob and Job controllers."""
        folder = binaries.ensure(Cache.from_env(), Progress(), (binaries.kube(),))
        command = [
            str(folder / "kube-controller-manager"), f"--kubeconfig={self.control.kubeconfig()}",
            "--controllers=cronjob-controller,job-controller", "--leader-elect=false", f"--secure-port={free_port()}",
            *flags,
        ]  # fmt: skip
        with (self.folder / "controllers.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            yield
        finally:
            process.kill()
            process.wait()

    def bare_kopf(self, count: int) -> Process:
        """A kopf operator that only watches; not started yet."""
        port = free_port()
        program = ("-m", "bench.bare_kopf", str(self.control.kubeconfig()), str(port), str(count))
        return Process(self.folder / "kopf.log", {**INHERITED, "USER": "bench", "LANG": "C.UTF-8"}, program, port)

    def operator(self, base: Database, **environment: str) -> Operator:
        """An operator on this control plane; not started yet."""
        return Operator(self, base, environment)


class Process:
    """A Python process with a port that answers /readyz.

    Args:
        program: arguments of Python.
    """

    def __init__(self, log: Path, env: dict[str, str], program: tuple[str, ...], health: int) -> None:
        self.log, self.health = log, health
        self._env, self._program = env, program
        self.process: subprocess.Popen[bytes]

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """From its start to its orderly end."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self._program], env=self._env, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield self
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
        return answers(self.health, "/readyz")


class Operator(Process):
    """One operator process.

    Args:
        environment: settings beside those that it needs.
    """

    def __init__(self, plane: Plane, base: Database, environment: dict[str, str]) -> None:
        health, folder = free_port(), Path(tempfile.mkdtemp(prefix="operator-", dir=plane.folder))
        credentials = folder / "database"
        credentials.mkdir()
        parts = {"host": base.server.address, "port": str(base.server.port), "dbname": base.name, "user": OWNER}
        for name, value in {**parts, "password": PASSWORD}.items():
            (credentials / name).write_text(value, encoding="utf-8")
        env = {
            **INHERITED,
            "LANG": "C.UTF-8",
            "POD_NAME": folder.name,
            "USER": "bench",
            "LEASEDJOB_CLUSTER": "bench",
            "LEASEDJOB_DATABASE_DIR": str(credentials),
            "LEASEDJOB_KUBECONFIG": str(plane.control.kubeconfig()),
            "LEASEDJOB_HEALTH_PORT": str(health),
            "LEASEDJOB_METRICS_PORT": str(free_port()),
            **environment,
        }
        super().__init__(folder / "log", env, ("-c", "from leasedjob.controller.main import main; main()"), health)

    def profiled(self, into: Path) -> Operator:
        """Lets it write down where its time went, when it ends."""
        self._program = ("-m", "bench.watched")
        self._env["LEASEDJOB_BENCH_PROFILE"] = str(into)
        return self


def answers(port: int, path: str) -> bool:
    """Whether a probe is answered with 200."""
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def until(what: str, probe: Callable[[], object], *, seconds: float = 120, every: float = 0.1) -> float:
    """Waits; the seconds that it took."""
    began = time.monotonic()
    while not probe():
        if time.monotonic() - began > seconds:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(every)
    return time.monotonic() - began


def leased_job(name: str, **spec: Any) -> Json:
    """About 1.5 kB, as objects are that people write."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "LeasedJob",
        "metadata": {"name": name},
        "spec": {**spec, "template": {"spec": workload()}},
    }


def workload() -> Json:
    """What every side runs."""
    env = [{"name": f"SETTING_{n}", "value": f"a value that says something, number {n}"} for n in range(15)]
    return {"containers": [{"name": "main", "image": "example/main:1", "env": env, "command": ["run", "--all"]}]}


def now() -> datetime:
    return datetime.now(UTC)


def percentile(values: Iterable[float], share: float) -> float:
    """The value that this share of them is not above."""
    found = sorted(values)
    return found[min(len(found) - 1, max(0, -(-round(len(found) * share * 1000) // 1000) - 1))]
