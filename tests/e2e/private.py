"""A release of a test's own: its namespaces, a PostgreSQL and poolers in front of it that the test may stop, and TLS.

The shared release leaves namespaces with this prefix alone. PgBouncer speaks TLS to its clients; the PostgreSQL behind
it is the one that the other tests use, which is built without.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from leasedjob.testing.postgres import PostgresServer
from tests.cluster import packages
from tests.cluster.database import NETWORKS
from tests.cluster.layout import REPOSITORY, Cache
from tests.cluster.progress import Progress
from tests.cluster.source import Cluster
from tests.e2e.kube import Helm, Json, Kubectl, write_json

PREFIX = "own-"  # as in the shared release's excludeNamespaces
DBNAME = "leasedjob"
OWNER, OWNER_PASSWORD = "leasedjob_owner", "owner"
SECRET = "leasedjob-database"
NOBODY = 65534
ASK_READYZ = """
import urllib.error, urllib.request
try:
    print(urllib.request.urlopen("http://127.0.0.1:8080/readyz", timeout=5).read().decode())
except urllib.error.HTTPError as refusal:
    print(refusal.read().decode())
"""
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


class Certificates:
    """An authority, a stranger, and certificates of the first one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("ca", "stranger"):
            _openssl(
                folder, "req", "-x509", *_KEY, "-days", "2", "-subj", f"/CN={name}", "-keyout", f"{name}.key",
                "-out", f"{name}.crt", "-addext", "keyUsage=critical,keyCertSign,cRLSign",
            )  # fmt: skip

    def authority(self, name: str = "ca") -> str:
        """The PEM."""
        return (self.folder / f"{name}.crt").read_text()

    def issue(self, name: str, alternative: str, *, days: int = 2) -> tuple[Path, Path]:
        """Certificate and key for `alternative` ("IP:…" or "DNS:…"); with days < 0 it has expired."""
        _openssl(
            self.folder, "req", *_KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr",
            "-addext", f"subjectAltName={alternative}",
        )  # fmt: skip
        _openssl(
            self.folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key",
            "-days", str(days), "-copy_extensions", "copy", "-out", f"{name}.crt",
        )  # fmt: skip
        return self.folder / f"{name}.crt", self.folder / f"{name}.key"


@dataclass
class Pooler:
    """A PgBouncer in transaction mode, with two server connections for each role."""

    program: Path
    folder: Path
    host: str
    server: PostgresServer
    certificate: tuple[Path, Path]
    port: int = 0
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Until it listens."""
        if not self.port:
            with socket.socket() as probe:
                probe.bind((self.host, 0))
                self.port = probe.getsockname()[1]
        self.folder.mkdir(exist_ok=True)
        (self.folder / "users").write_text(f'"postgres" "{self.server.password}"\n')
        for source, name in zip(self.certificate, ("server.crt", "server.key"), strict=True):
            shutil.copy(source, self.folder / name)
        settings = {
            "listen_addr": self.host,
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "scram-sha-256",
            "auth_file": self.folder / "users",
            "auth_user": "postgres",
            "auth_query": "SELECT usename, passwd FROM pg_shadow WHERE usename = $1",
            "pool_mode": "transaction",
            "default_pool_size": 2,
            "client_tls_sslmode": "require",
            "client_tls_cert_file": self.folder / "server.crt",
            "client_tls_key_file": self.folder / "server.key",
            "server_tls_sslmode": "disable",
            "server_login_retry": 1,
            "server_connect_timeout": 3,
            "query_wait_timeout": 5,
            "logfile": self.folder / "log",
        }
        (self.folder / "ini").write_text(
            f"[databases]\n* = host={self.server.address} port={self.server.port}\n[pgbouncer]\n"
            + "".join(f"{name} = {value}\n" for name, value in settings.items())
        )
        account: dict[str, Any] = {}
        if os.geteuid() == 0:  # it refuses to run as root
            account = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
            for path in (self.folder, *self.folder.iterdir()):
                shutil.chown(path, NOBODY, NOBODY)
        (self.folder / "server.key").chmod(0o600)
        self._process = subprocess.Popen([str(self.program), "-q", str(self.folder / "ini")], **account)
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), timeout=2):
                return
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        """Cuts every client off."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@dataclass
class OwnDatabase:
    """A PostgreSQL of the test's own on this machine, its authority, and the poolers in front of it."""

    host: str
    server: PostgresServer
    certificates: Certificates
    folder: Path
    program: Path
    poolers: list[Pooler] = field(default_factory=list)

    def pooler(self, name: str, alternative: str = "", *, days: int = 2) -> Pooler:
        """A running one; its certificate is good unless told otherwise."""
        certificate = self.certificates.issue(name, alternative or f"IP:{self.host}", days=days)
        pooler = Pooler(self.program, self.folder / f"pooler-{name}", self.host, self.server, certificate)
        self.poolers.append(pooler)
        pooler.start()
        return pooler

    def sql(self, statement: str, *parameters: Any) -> list[dict[str, Any]]:
        """As superuser, past the poolers."""
        with psycopg.connect(
            self.server.conninfo(DBNAME), autocommit=True, row_factory=psycopg.rows.dict_row
        ) as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    def secret(self, name: str, port: int, user: str, password: str, *, authority: str = "ca") -> Json:
        """A Secret with a credential that is used over verified TLS."""
        values = {
            "host": self.host,
            "port": str(port),
            "dbname": DBNAME,
            "user": user,
            "password": password,
            "sslmode": "verify-full",
            "ca.crt": self.certificates.authority(authority),
        }
        return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": values}


@contextlib.contextmanager
def own_database(cluster: Cluster, cache: Cache) -> Iterator[OwnDatabase]:
    assert cluster.host_address is not None
    with tempfile.TemporaryDirectory(prefix="leasedjob-own-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        for sub in ("tools", "tls"):
            (folder / sub).mkdir()
        given = os.environ.get("LEASEDJOB_TEST_PGBOUNCER") or shutil.which("pgbouncer")
        program = Path(given) if given else packages.pgbouncer(folder / "tools", cache, Progress())
        server = stack.enter_context(PostgresServer(address=cluster.host_address, allow=NETWORKS))
        server.create_owner(OWNER, OWNER_PASSWORD)
        server.create_database(DBNAME, owner=OWNER)
        own = OwnDatabase(cluster.host_address, server, Certificates(folder / "tls"), folder, program)
        try:
            yield own
        finally:
            for pooler in own.poolers:
                pooler.stop()


@dataclass(frozen=True, slots=True)
class OwnRelease:
    """A release in namespaced mode."""

    name: str
    system: Kubectl
    namespaces: tuple[Kubectl, ...]

    def operator(self) -> Json:
        """Its one Pod."""
        (pod,) = self.system.items("pods", "-l", "app.kubernetes.io/component=operator")
        return pod

    def restarts(self) -> int:
        return sum(int(s["restartCount"]) for s in self.operator()["status"]["containerStatuses"])

    def readyz(self) -> str:
        """What it answers: "ok", or why it isn't ready. Asked from within: kubectl shows no body of a refusal."""
        name = self.operator()["metadata"]["name"]
        return self.system.run("exec", name, "-c", "operator", "--", "python3", "-c", ASK_READYZ).stdout.strip()

    def told(self, words: str) -> bool:
        """Whether it isn't ready, and says so in these words; its kubelet is made to look at its Secrets meanwhile."""
        self.touch(self.system, self.operator()["metadata"]["name"])
        return words in self.readyz()

    def ready(self) -> bool:
        """As `told`, once it is."""
        self.touch(self.system, self.operator()["metadata"]["name"])
        return self.readyz() == "ok"

    @staticmethod
    def touch(kubectl: Kubectl, pod: str) -> None:
        """A change makes a Pod's kubelet look at it and at the Secrets that it mounts, now and not within a minute."""
        kubectl("annotate", "pod", pod, f"leasedjob.io/touched={time.time()}", "--overwrite")


def images_of(helm: Helm, name: str, namespace: str) -> dict[str, Any]:
    """The values of an installed release that name this working tree's images."""
    import json

    values = json.loads(helm("get", "values", name, "-n", namespace, "-o", "json"))
    return {k: values[k] for k in ("global", "image", "sidecar", "postgresql") if k in values}


@contextlib.contextmanager
def own_release(
    kubectl: Kubectl, helm: Helm, own: OwnDatabase, operator: Pooler, sidecars: Pooler, images: dict[str, Any],
    namespaces: int = 1, **values: Any,
) -> Iterator[OwnRelease]:  # fmt: skip
    """The chart in namespaced mode, its operator behind one pooler and its runs' sidecars behind another; the operator
    as an account that no image knows, in the root group, as some platforms assign them."""
    key = uuid.uuid4().hex[:6]
    name = f"lj-{key}"
    names = [f"{PREFIX}{key}-{n}" for n in range(namespaces)]
    labels = {"leasedjob.io/test": "true", "pod-security.kubernetes.io/enforce": "restricted"}
    system = f"{PREFIX}{key}-system"
    for each in (system, *names):
        kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": each, "labels": labels}})
    try:
        kubectl.within(system).apply(own.secret(SECRET, operator.port, OWNER, OWNER_PASSWORD))
        assigned = 1000730000 + int(key, 16) % 10000
        merged = {
            **images,
            "watchNamespaces": names,
            "clusterName": key,
            "crds": {"enabled": False},
            "replicas": 1,
            "database": {"existingSecret": SECRET},
            "podSecurityContext": {"runAsUser": assigned, "runAsGroup": 0, "fsGroup": assigned},
            "extraEnv": [{"name": "LEASEDJOB_ROTATION_CHECK_SECONDS", "value": "2"}],
            **values,
            "sidecar": {
                **images.get("sidecar", {}),
                "database": {"port": sidecars.port},
                "secret": {"create": True},
            },
        }
        file = str(write_json(own.folder / f"{name}.json", merged))
        chart = str(REPOSITORY / "charts" / "leasedjob")
        helm("install", name, chart, "-n", system, "-f", file, "--wait", "--timeout=180s")
        yield OwnRelease(name, kubectl.within(system), tuple(kubectl.within(each) for each in names))
    finally:
        for each in names:
            kubectl.within(each).run("delete", "leasedjobs", "--all", "--timeout=30s")
        helm.run("uninstall", name, "-n", system, "--ignore-not-found")
        kubectl.run("delete", "namespace", system, *names, "--wait=false")
