"""A PostgreSQL on this machine that the Pods of a test cluster reach; it lives until the cluster is removed.

It runs beside the cluster, not in it, so that tests can cut one off from the other, and so that every process of a test
run shares it. Needs the project's own packages (`leasedjob.testing`), unlike the rest of this package.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.cluster.layout import Cache
from tests.cluster.network import Part
from tests.cluster.progress import ClusterError, Progress, wait_for
from tests.cluster.source import Cluster

BASE_PORT = 15432
OWNER = "leasedjob_owner"  # of the operator's database
OWNER_PASSWORD = "owner"
# Addresses of the one-node clusters, and the ranges in which kind's networks lie.
NETWORKS = ("10.99.0.0/16", "10.88.0.0/16", "172.16.0.0/12", "192.168.0.0/16", "10.89.0.0/16")


@dataclass(frozen=True, slots=True)
class Database:
    """Where the server is; `user` is its superuser."""

    host: str
    port: int
    password: str
    directory: str
    pid: int
    user: str = "postgres"

    @property
    def part(self) -> Part:
        """What a cluster can be cut off from."""
        return Part("PostgreSQL", (self.host,), (self.port,))

    def conninfo(self, dbname: str = "postgres") -> str:
        return f"host={self.host} port={self.port} user={self.user} password={self.password} dbname={dbname}"


def _state(cache: Cache, name: str) -> Path:
    return cache.clusters / f"{name}.postgres.json"


def find(cache: Cache, name: str) -> Database | None:
    """The running server of that cluster."""
    try:
        database = Database(**json.loads(_state(cache, name).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return database if _alive(database) else None


def of_cluster(cache: Cache, name: str) -> Database | None:
    """The running server that a cluster's releases use: its own, or that of the pair that it belongs to."""
    return find(cache, name) or find(cache, name.removesuffix("-a").removesuffix("-b"))


def _alive(database: Database) -> bool:
    """Whether the process is there and is that server: a number alone may have been given to another process."""
    try:
        return database.directory.encode() in Path(f"/proc/{database.pid}/cmdline").read_bytes()
    except OSError:
        return False


def up(cluster: Cluster, cache: Cache, progress: Progress, *, name: str = "") -> Database:
    """The server of that cluster, started if it isn't running. Raises ClusterError where Pods couldn't reach it.

    Args:
        name: whose it is, where several clusters share one; default: the cluster's.
    """
    if cluster.host_address is None:
        raise ClusterError(f"it isn't known how Pods of {cluster.kubeconfig} reach this machine")
    name = name or cluster.name
    with (cache.clusters / f".{name}.postgres.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (running := find(cache, name)) is not None:
            return running
        down(cache, name, progress)
        from leasedjob.testing.postgres import PostgresServer

        # Not in the cache: the server's account couldn't look into root's home.
        directory = Path(tempfile.mkdtemp(prefix=f"leasedjob-{name}-postgres-"))
        server = PostgresServer(
            address=cluster.host_address,
            port=BASE_PORT + (cluster.node.index if cluster.node else 0),
            directory=directory,
            allow=NETWORKS,
            settings={"max_connections": "300"},
            password=secrets.token_urlsafe(16),
        )
        server.start()
        pid = int((directory / "data" / "postmaster.pid").read_text().splitlines()[0])
        database = Database(cluster.host_address, server.port, server.password, str(directory), pid)
        state = _state(cache, name)
        state.touch(mode=0o600)
        state.write_text(json.dumps(asdict(database)))
        progress.say(f"PostgreSQL for cluster {name}: {database.host}:{database.port}")
        return database


def down(cache: Cache, name: str, progress: Progress) -> None:
    """Stops the server of that cluster and removes its data; nothing happens where there is none."""
    state = _state(cache, name)
    try:
        database = Database(**json.loads(state.read_text()))
    except (OSError, ValueError, TypeError):
        return
    if _alive(database):
        with contextlib.suppress(ProcessLookupError):
            os.kill(database.pid, signal.SIGINT)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(database.pid, 0)
        log = Path(database.directory) / "log"
        wait_for("PostgreSQL to stop", lambda: not _alive(database), timeout=30, log=log)
        progress.say(f"PostgreSQL of cluster {name} is stopped")
    shutil.rmtree(database.directory, ignore_errors=True)
    state.unlink(missing_ok=True)


def create_owned(database: Database, dbname: str, *, anew: bool = True) -> None:
    """A database that belongs to the operator's role.

    Args:
        anew: one of that name that exists is removed; else it is left as it is.
    """
    import psycopg  # not needed to start and stop clusters

    with psycopg.connect(database.conninfo(), autocommit=True) as connection:
        if connection.execute("SELECT FROM pg_roles WHERE rolname = %s", (OWNER,)).fetchone() is None:
            connection.execute(f"CREATE ROLE {OWNER} LOGIN CREATEROLE PASSWORD '{OWNER_PASSWORD}'".encode())
        if anew:
            connection.execute(f"DROP DATABASE IF EXISTS {dbname} WITH (FORCE)".encode())
        elif connection.execute("SELECT FROM pg_database WHERE datname = %s", (dbname,)).fetchone() is not None:
            return
        connection.execute(f"CREATE DATABASE {dbname} OWNER {OWNER}".encode())
