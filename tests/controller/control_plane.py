"""A real API server with a real etcd, and no kubelet: the tests play the kubelet, second by second.

What the operator sees is exactly what an API server would show it; how Pods end is written by the test, which makes
every row of the outcome table and every crash window reachable in a moment.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import urllib3
import yaml
from kubernetes import client

from leasedjob import protocol
from leasedjob.lease.database import Credentials, connect_sync
from leasedjob.lease.rows import Adoption, AdoptVerdict, Outcome
from leasedjob.lease.store import SidecarStore
from leasedjob.lease.trust import Timing
from leasedjob.protocol import Seen, Testimony
from leasedjob.testing.postgres import PostgresServer
from tests.cluster import binaries
from tests.cluster.layout import REPOSITORY, Cache
from tests.cluster.progress import Progress

Json = dict[str, Any]
GROUP, VERSION = protocol.GROUP, protocol.VERSION
NODE = "node-1"  # nobody stands behind it; a Pod that is bound to it is removed only by whoever plays its kubelet


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(what: str, probe: Callable[[], Any], seconds: float = 30.0, every: float = 0.05) -> Any:
    """The first true answer of `probe`; an AssertionError that names what was waited for after `seconds`."""
    deadline = time.monotonic() + seconds
    last: object = None
    while time.monotonic() < deadline:
        last = probe()
        if last:
            return last
        time.sleep(every)
    raise AssertionError(f"not within {seconds} s: {what} (last: {last!r})")


class ControlPlane:
    """etcd and kube-apiserver on the loopback, every request allowed to the one token.

    Args:
        flags: further ones of the API server.
    """

    def __init__(self, folder: Path, *, flags: Sequence[str] = ()) -> None:
        self.folder = folder
        self._flags = flags
        self.token = secrets.token_hex(16)
        self.port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        bin_ = binaries.ensure(Cache.from_env(), Progress(), (binaries.ETCD, binaries.kube()))
        client_port, peer_port = free_port(), free_port()
        (self.folder / "tokens.csv").write_text(f"{self.token},admin,admin,system:masters\n")
        self._certificates()
        etcd = f"http://127.0.0.1:{client_port}"
        self._spawn(
            "etcd", bin_ / "etcd", f"--data-dir={self.folder}/etcd", f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}", f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
            "--unsafe-no-fsync", "--log-level=error",
        )  # fmt: skip
        self._spawn(
            "kube-apiserver", bin_ / "kube-apiserver", f"--etcd-servers={etcd}", f"--secure-port={self.port}",
            "--bind-address=127.0.0.1", f"--tls-cert-file={self.folder}/server.crt",
            f"--tls-private-key-file={self.folder}/server.key", f"--token-auth-file={self.folder}/tokens.csv",
            f"--service-account-key-file={self.folder}/sa.key",
            f"--service-account-signing-key-file={self.folder}/sa.key",
            "--service-account-issuer=https://kubernetes.default.svc", "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount", "--service-cluster-ip-range=10.96.0.0/16", *self._flags,
        )  # fmt: skip
        api = client.VersionApi(self.api())

        def answers() -> bool:
            with contextlib.suppress(client.ApiException, urllib3.exceptions.HTTPError):
                api.get_code()
                return self.core().read_namespace("kube-system") is not None
            return False

        wait_until("the API server answers", answers, 90, 0.1)
        self.core().create_node({"metadata": {"name": NODE}})
        for crd in sorted((REPOSITORY / "crds").glob("*.yaml")):
            client.ApiextensionsV1Api(self.api()).create_custom_resource_definition(yaml.safe_load(crd.read_text()))
        for plural in ("leasedjobs", "leasedjobruns"):
            wait_until(f"{plural} are served", lambda plural=plural: self._served(plural), 30, 0.1)

    def _certificates(self) -> None:
        """A CA and a server certificate that Python's strict verification accepts, and a key for service accounts."""

        def openssl(*argv: str) -> None:
            subprocess.run(["openssl", *argv], check=True, capture_output=True, cwd=self.folder)

        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        openssl(
            "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=test-ca", "-days", "2",
            "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        )  # fmt: skip
        openssl("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=kube-apiserver")
        (self.folder / "server.ext").write_text(
            "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\nextendedKeyUsage=serverAuth\n"
            "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\nsubjectAltName=IP:127.0.0.1,DNS:localhost\n"
        )
        openssl(
            "x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
            "-days", "2", "-out", "server.crt", "-extfile", "server.ext",
        )  # fmt: skip
        openssl("genrsa", "-out", "sa.key", "2048")

    def _served(self, plural: str) -> bool:
        try:
            self.custom().list_cluster_custom_object(GROUP, VERSION, plural)
        except client.ApiException:
            return False
        return True

    def _spawn(self, name: str, *argv: object) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen([str(a) for a in argv], stdout=log, stderr=log, start_new_session=True)
            )

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def api(self) -> client.ApiClient:
        settings = client.Configuration(host=f"https://127.0.0.1:{self.port}")
        settings.ssl_ca_cert = str(self.folder / "ca.crt")
        settings.api_key = {"BearerToken": f"Bearer {self.token}"}
        return client.ApiClient(settings)

    def core(self) -> client.CoreV1Api:
        return client.CoreV1Api(self.api())

    def custom(self) -> client.CustomObjectsApi:
        return client.CustomObjectsApi(self.api())

    def kubeconfig(self, port: int | None = None, *, token: str = "") -> Path:
        """A kubeconfig for this server, or for a proxy in front of it; for whoever has `token`, or who may do all."""
        token = token or self.token
        path = self.folder / f"kubeconfig-{port or self.port}-{token[-8:]}"
        cluster = {
            "server": f"https://127.0.0.1:{port or self.port}",
            "certificate-authority": str(self.folder / "ca.crt"),
        }
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": cluster}],
                    "users": [{"name": "u", "user": {"token": token}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )
        return path


class OperatorProcess:
    """One real operator process."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.health, self.metrics = free_port(), free_port()
        self.log = folder / f"{name}.log"
        self._environment = {
            **os.environ,
            **environment,
            "POD_NAME": name,
            "LEASEDJOB_HEALTH_PORT": str(self.health),
            "LEASEDJOB_METRICS_PORT": str(self.metrics),
            "PYTHONWARNINGS": "ignore",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = self.log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from leasedjob.controller.main import main; main()"],
            env=self._environment,
            stdout=log,
            stderr=log,
        )
        log.close()

    def probe(self, path: str, timeout: float = 2.0) -> tuple[int, str]:
        """Status and text of /healthz or /readyz; status 0 where nobody answers."""
        import urllib.error
        import urllib.request

        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health}{path}", timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as e:
            with e:
                return e.code, e.read().decode()
        except OSError as e:
            return 0, str(e)

    def ready(self) -> bool:
        return self.probe("/readyz")[0] == 200

    @property
    def resident_kib(self) -> int:
        """Memory that the process holds now."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1])

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        self._process = None

    def stop(self) -> int | None:
        """Orderly; the exit code."""
        if self._process is None:
            return None
        self.signal(signal.SIGTERM)
        try:
            code = self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"operator {self.name} did not stop within 30 s:\n{self.tail()}") from None
        self._process = None
        return code

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Bench:
    """One namespace of one test: the API server, a database of its own, and as many operators as the test starts."""

    def __init__(
        self, plane: ControlPlane, postgres: PostgresServer, database: str, folder: Path, cluster: str
    ) -> None:
        self.plane, self.postgres, self.database, self.folder, self.cluster = plane, postgres, database, folder, cluster
        self.core, self.custom = plane.core(), plane.custom()
        self.namespace = f"t-{uuid4().hex[:10]}"
        self.core.create_namespace({"metadata": {"name": self.namespace}})
        self.credentials = folder / "database"
        self.credentials.mkdir()
        values = {
            "host": postgres.address, "port": str(postgres.port), "dbname": database,
            "user": "postgres", "password": postgres.password,
        }  # fmt: skip
        for name, value in values.items():
            (self.credentials / name).write_text(value)
        self.operators: list[OperatorProcess] = []

    # --- operators ---------------------------------------------------------------------------------------------------

    def operator(self, name: str = "op-1", *, start: bool = True, **environment: str) -> OperatorProcess:
        settings = {
            "LEASEDJOB_CLUSTER": self.cluster,
            "LEASEDJOB_NAMESPACES": self.namespace,
            "LEASEDJOB_DATABASE_DIR": str(self.credentials),
            "LEASEDJOB_KUBECONFIG": str(self.plane.kubeconfig()),
            **environment,
        }
        operator = OperatorProcess(name, self.folder, settings)
        self.operators.append(operator)
        if start:
            operator.start()
            self.wait_ready(operator)
        return operator

    @staticmethod
    def wait_ready(operator: OperatorProcess) -> None:
        def ready() -> bool:
            assert operator.alive, f"operator {operator.name} ended:\n{operator.tail()}"
            return operator.ready()

        wait_until(f"operator {operator.name} is ready", ready, 60, 0.1)

    def close_operators(self) -> None:
        for operator in self.operators:
            operator.kill()

    def close(self) -> None:
        self.close_operators()
        with contextlib.suppress(client.ApiException):
            for plural in ("leasedjobs", "leasedjobruns"):
                self.custom.delete_collection_namespaced_custom_object(GROUP, VERSION, self.namespace, plural)
            self.core.delete_collection_namespaced_pod(self.namespace, grace_period_seconds=0)

    # --- objects -----------------------------------------------------------------------------------------------------

    def apply(self, name: str, **spec: Any) -> Json:
        """Creates a LeasedJob; `spec` in the API's own names. Timing is short unless given."""
        template = spec.pop("template", None) or {"spec": {"containers": [{"name": "main", "image": "example/main:1"}]}}
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "LeasedJob",
            "metadata": {"name": name},
            "spec": {
                **({} if spec.get("type") == "Initial" else {"schedule": "* * * * *"}),
                "lease": {"durationSeconds": 40, "heartbeatSeconds": 5},
                "shutdown": {"preStopSeconds": 0, "terminationGracePeriodSeconds": 5},
                **spec,
                "template": template,
            },
        }
        return self.custom.create_namespaced_custom_object(GROUP, VERSION, self.namespace, "leasedjobs", body)

    def patch(self, name: str, **spec: Any) -> Json:
        return self.custom.patch_namespaced_custom_object(
            GROUP, VERSION, self.namespace, "leasedjobs", name, {"spec": spec}
        )

    def delete(self, name: str) -> None:
        self.custom.delete_namespaced_custom_object(GROUP, VERSION, self.namespace, "leasedjobs", name)

    def run_now(self, job: str, *, name: str = "", tick: str | None = None) -> Json:
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "LeasedJobRun",
            "metadata": {"name": name or f"{job}-{uuid4().hex[:6]}"},
            "spec": {"jobName": job, **({"tick": tick} if tick else {})},
        }
        return self.custom.create_namespaced_custom_object(GROUP, VERSION, self.namespace, "leasedjobruns", body)

    def cancel(self, run: str) -> None:
        self.custom.patch_namespaced_custom_object(
            GROUP, VERSION, self.namespace, "leasedjobruns", run, {"spec": {"cancel": True}}
        )

    def job(self, name: str) -> Json:
        return self.custom.get_namespaced_custom_object(GROUP, VERSION, self.namespace, "leasedjobs", name)

    def run(self, name: str) -> Json:
        return self.custom.get_namespaced_custom_object(GROUP, VERSION, self.namespace, "leasedjobruns", name)

    def run_status(self, name: str) -> Json:
        return self.run(name).get("status") or {}

    def status(self, name: str) -> Json:
        return self.job(name).get("status") or {}

    def ready_condition(self, name: str) -> Json:
        return next((c for c in self.status(name).get("conditions") or [] if c["type"] == "Ready"), {})

    def pods(self) -> list[Json]:
        found = self.plane.api().call_api(
            "GET",
            f"https://127.0.0.1:{self.plane.port}/api/v1/namespaces/{self.namespace}/pods",
            header_params={"Authorization": f"Bearer {self.plane.token}", "Accept": "application/json"},
        )
        import json

        return list(json.loads(found.read())["items"])

    def pod_for(self, job: str, attempt: int | None = None, *, seconds: float = 30) -> Json:
        """The Pod of the job's newest attempt, or of the attempt with that number, once it is there."""

        def found() -> Json | None:
            mine = [p for p in self.pods() if p["metadata"]["annotations"].get(protocol.ANNOTATION_JOB) == job]
            if attempt is not None:
                mine = [p for p in mine if p["metadata"]["annotations"][protocol.ANNOTATION_ATTEMPT] == str(attempt)]
            return max(mine, key=lambda p: p["metadata"]["creationTimestamp"], default=None)

        return wait_until(f"a Pod of {job}, attempt {attempt or 'any'}", found, seconds)

    def whole_run(self, job: str, *, seconds: float = 30) -> str:
        """A run that somebody asks for, from its request to its recorded SUCCESS; the LeasedJobRun's name."""
        run = self.run_now(job)["metadata"]["name"]
        row = wait_until(
            f"{run} is claimed",
            lambda: next((r for r in self.rows(job) if f"/{run}/" in str(r["run_key"])), None),
            seconds,
        )
        lease = str(row["id"])
        pod = wait_until(
            f"the Pod of {run}",
            lambda: next(
                (
                    p
                    for p in self.pods()
                    if (p["metadata"].get("annotations") or {}).get(protocol.ANNOTATION_LEASE) == lease
                ),
                None,
            ),
            seconds,
        )
        kubelet = Kubelet(self, pod)
        kubelet.run()
        kubelet.end(0)
        wait_until(f"{run} is shown", lambda: self.run(run).get("status", {}).get("phase") == "Succeeded", seconds)
        return str(run)

    def set_status(self, pod: Json, status: Json) -> None:
        self.core.patch_namespaced_pod_status(pod["metadata"]["name"], self.namespace, {"status": status})

    def deleting(self, pod: Json) -> bool:
        """Somebody asked for the Pod's deletion."""
        uid = pod["metadata"]["uid"]
        mine = [p for p in self.pods() if p["metadata"]["uid"] == uid]
        return not mine or bool(mine[0]["metadata"].get("deletionTimestamp"))

    def gone(self, pod: Json) -> None:
        """The kubelet lets go of a Pod that was deleted."""
        self.core.delete_namespaced_pod(pod["metadata"]["name"], self.namespace, grace_period_seconds=0)

    # --- the database ------------------------------------------------------------------------------------------------

    def rows(self, job: str) -> list[Json]:
        """Lease rows of a job, oldest first."""
        with psycopg.connect(self.postgres.conninfo(self.database), row_factory=psycopg.rows.dict_row) as connection:
            return connection.execute(
                "SELECT *, leasedjob.expires_at(modified_at, lease_ms) AS expires_at FROM leasedjob.job_scheduler"
                " WHERE namespace = %s AND job_name = %s ORDER BY created_at",
                (self.namespace, job),
            ).fetchall()

    def sql(self, statement: str, *parameters: Any) -> list[Any]:
        with psycopg.connect(self.postgres.conninfo(self.database), autocommit=True) as connection:
            cursor = connection.execute(statement, parameters)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def row_when(self, job: str, probe: Callable[[Json], bool], what: str, *, seconds: float = 30) -> Json:
        """The job's newest row, once `probe` is true for it."""

        def found() -> Json | None:
            rows = self.rows(job)
            return rows[-1] if rows and probe(rows[-1]) else None

        return wait_until(f"{job}: {what}", found, seconds)


class Kubelet:
    """Plays the kubelet and the sidecar for one Pod: adopts with the Pod's own credentials, and writes statuses."""

    def __init__(self, bench: Bench, pod: Json) -> None:
        self.bench, self.pod = bench, pod
        spec, notes = pod["spec"], pod["metadata"]["annotations"]
        self.lease_id = UUID(notes[protocol.ANNOTATION_LEASE])
        self.attempt = int(notes[protocol.ANNOTATION_ATTEMPT])
        adopt = next(c for c in spec["initContainers"] if c["name"] == protocol.CONTAINER_ADOPT)
        environment = {e["name"]: e.get("value") for e in adopt["env"]}
        self.claim_token = UUID(environment[protocol.ENV_CLAIM_TOKEN])
        self.timing = Timing.from_json(environment[protocol.ENV_TIMING])
        self.token = uuid4()
        self.workload = [c["name"] for c in spec["containers"]]
        if not spec.get("nodeName"):
            name = pod["metadata"]["name"]
            binding = {"metadata": {"name": name}, "target": {"apiVersion": "v1", "kind": "Node", "name": NODE}}
            bench.core.create_namespaced_pod_binding(name, bench.namespace, binding, _preload_content=False)

    @contextlib.contextmanager
    def sidecar(self) -> Iterator[SidecarStore]:
        secret = self.bench.core.read_namespaced_secret("leasedjob-sidecar", self.bench.namespace)
        folder = self.bench.folder / f"secret-{self.pod['metadata']['uid']}"
        folder.mkdir(exist_ok=True)
        for name, value in secret.data.items():
            (folder / name).write_bytes(base64.b64decode(value))
        with connect_sync(Credentials.from_directory(folder)) as connection:
            yield SidecarStore(connection)

    def adopt(self) -> Adoption:
        with self.sidecar() as store:
            answer = store.adopt(
                self.lease_id,
                self.claim_token,
                self.token,
                pod_uid=self.pod["metadata"]["uid"],
                pod_name=self.pod["metadata"]["name"],
            )
        if answer.verdict is AdoptVerdict.ADOPTED:
            self.bench.set_status(
                self.pod,
                {
                    "phase": "Pending",
                    "initContainerStatuses": [
                        self._ended(protocol.CONTAINER_ADOPT, 0),
                        self._running(protocol.CONTAINER_HOLD),
                    ],
                },
            )
        return answer

    def heartbeat(self) -> bool:
        with self.sidecar() as store:
            return store.heartbeat(self.lease_id, self.token).held

    def report(self, outcome: Outcome, data: Any = None) -> bool:
        with self.sidecar() as store:
            return store.finish(self.lease_id, self.token, outcome, data)

    def report_shutdown(self, *ends: protocol.PhaseEnd) -> bool:
        with self.sidecar() as store:
            return store.report_shutdown(self.lease_id, self.token, uuid4(), ends)

    def start(self) -> None:
        """The workload runs."""
        self.bench.set_status(
            self.pod,
            {
                "phase": "Running",
                "startTime": _now(),
                "initContainerStatuses": [
                    self._ended(protocol.CONTAINER_ADOPT, 0),
                    self._running(protocol.CONTAINER_HOLD),
                    self._ended(protocol.CONTAINER_GATE, 0),
                ],
                "containerStatuses": [self._running(n) for n in self.workload],
            },
        )

    def run(self) -> Adoption:
        answer = self.adopt()
        assert answer.verdict is AdoptVerdict.ADOPTED, answer
        self.start()
        return answer

    def testimony(self, seen: Seen = Seen.LEASED, **more: Any) -> Testimony:
        now = time.time()
        values: Json = {
            "lease_id": str(self.lease_id), "attempt": self.attempt, "seen": seen,
            "beat": now, "until": now + 100, "final": True,
        }  # fmt: skip
        return Testimony(**{**values, **more})

    def end(
        self,
        *codes: int,
        testimony: Testimony | str | None = "default",
        hold_code: int = 0,
        reason: str = "",
        pod_reason: str = "",
        message: str = "",
        hold: bool = True,
    ) -> None:
        """Every workload container ends with its code (one for all, or one each), then the sidecar, then the Pod."""
        exits = codes if len(codes) == len(self.workload) else codes[:1] * len(self.workload)
        t = self.testimony() if testimony == "default" else testimony
        text = t.to_json() if isinstance(t, Testimony) else (t or "")
        holds = [self._ended(protocol.CONTAINER_HOLD, hold_code, message=text)] if hold else []
        self.bench.set_status(
            self.pod,
            {
                "phase": "Succeeded" if not any(exits) else "Failed",
                **({"reason": pod_reason} if pod_reason else {}),
                "initContainerStatuses": [
                    self._ended(protocol.CONTAINER_ADOPT, 0),
                    *holds,
                    self._ended(protocol.CONTAINER_GATE, 0),
                ],
                "containerStatuses": [
                    self._ended(n, code, reason=reason or ("Error" if code else "Completed"), message=message)
                    for n, code in zip(self.workload, exits, strict=True)
                ],
            },
        )

    def refuse(self, code: int = 75, message: str = '{"adopt":"lost","message":"the claim is lost"}') -> None:
        """Adopt gives up: nothing runs, the Pod is Failed."""
        self.bench.set_status(
            self.pod,
            {
                "phase": "Failed",
                "initContainerStatuses": [self._ended(protocol.CONTAINER_ADOPT, code, reason="Error", message=message)],
                "containerStatuses": [self._waiting(n, "PodInitializing") for n in self.workload],
            },
        )

    def never_started(self) -> None:
        """The kubelet ends a Pod whose workload never ran, and the sidecar with it."""
        self.bench.set_status(
            self.pod,
            {
                "phase": "Failed",
                "initContainerStatuses": [
                    self._ended(protocol.CONTAINER_ADOPT, 0),
                    self._ended(protocol.CONTAINER_HOLD, 0, message=self.testimony().to_json()),
                ],
                "containerStatuses": [self._waiting(n, "PodInitializing") for n in self.workload],
            },
        )

    def waiting(self, reason: str, message: str = "", *, adopted: bool) -> None:
        """The workload can't start, as with an image that doesn't exist."""
        inits = [self._ended(protocol.CONTAINER_ADOPT, 0), self._running(protocol.CONTAINER_HOLD)] if adopted else []
        self.bench.set_status(
            self.pod,
            {
                "phase": "Pending",
                "initContainerStatuses": inits,
                "containerStatuses": [self._waiting(n, reason, message) for n in self.workload],
            },
        )

    @staticmethod
    def _base(name: str) -> Json:
        return {"name": name, "image": "i", "imageID": "i", "ready": False, "restartCount": 0}

    def _running(self, name: str) -> Json:
        return {**self._base(name), "ready": True, "started": True, "state": {"running": {"startedAt": _now()}}}

    def _waiting(self, name: str, reason: str, message: str = "") -> Json:
        return {**self._base(name), "state": {"waiting": {"reason": reason, "message": message}}}

    def _ended(self, name: str, code: int, *, reason: str = "", message: str = "") -> Json:
        ended = {
            "exitCode": code, "reason": reason or ("Error" if code else "Completed"), "message": message,
            "startedAt": _now(-1), "finishedAt": _now(), "containerID": f"containerd://{uuid4().hex}",
        }  # fmt: skip
        return {**self._base(name), "state": {"terminated": ended}}


def _now(offset: float = 0.0) -> str:
    return (datetime.now(UTC) + timedelta(seconds=offset)).strftime("%Y-%m-%dT%H:%M:%SZ")
