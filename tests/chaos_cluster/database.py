"""PostgreSQL where no commit may be lost: a primary, a synchronous standby, and an address that follows the primary."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, LiteralString, Self

import psycopg
from psycopg.rows import dict_row

from leasedjob.lease.migrate import migrate
from leasedjob.testing.postgres import PostgresServer
from tests.chaos.proxy import FaultyProxy
from tests.chaos_cluster.records import Change, Range
from tests.chaos_cluster.waiting import wait_for

DBNAME: Final = "leasedjob"
OWNER, OWNER_PASSWORD = "leasedjob_owner", "owner"
SETTINGS: Final = {"max_connections": "400", "wal_retrieve_retry_interval": "1s"}
_JUDGES: Final = (Path(__file__).parent / "judges.sql").read_text()


class NotNowError(Exception):
    """It can't be done now; the message says why."""


class Replicated:
    """Use as a context manager. All of it commits to disk, and a commit is answered when the standby has it, too.

    Args:
        folder: of the servers' data.
        address: where clients connect.
        doors: how many addresses (ports) there are, each of which can be cut by itself.
    """

    def __init__(self, folder: Path, address: str, doors: int) -> None:
        self._folder = folder
        self._servers = [self._server("one"), self._server("two")]
        self._servers[1].password = self._servers[0].password
        self._folders = {id(server): folder / name for server, name in zip(self._servers, ("one", "two"), strict=True)}
        self._stack = contextlib.ExitStack()
        self._address, self._count = address, doors
        self.doors: list[FaultyProxy] = []
        self._lock = threading.RLock()  # one thing is done to the servers at a time

    def _server(self, name: str) -> PostgresServer:
        return PostgresServer(directory=self._folder / name, durable=True, settings=SETTINGS)

    @property
    def primary(self) -> PostgresServer:
        return self._servers[0]

    @property
    def _standby(self) -> PostgresServer:
        return self._servers[1]

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder.chmod(0o755)
        for server in self._servers:
            self._stack.callback(server.stop)
        self.primary.start()
        self.primary.create_owner(OWNER, OWNER_PASSWORD)
        self.primary.create_database(DBNAME, owner=OWNER)
        with psycopg.connect(self.owner_conninfo(), autocommit=True) as connection:
            migrate(connection)
            connection.execute(_JUDGES.encode())
        self._attach()
        self.doors = [
            self._stack.enter_context(FaultyProxy(self.primary.address, self.primary.port, address=self._address))
            for _ in range(self._count)
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._stack.close()

    def owner_conninfo(self, door: int | None = None) -> str:
        """Past the doors, or through one."""
        dsn = self.primary.conninfo(DBNAME, OWNER, OWNER_PASSWORD)
        return dsn if door is None else f"{dsn} host={self._address} port={self.doors[door].port}"

    # --- faults ------------------------------------------------------------------------------------------------------

    def restart(self, seconds: float) -> None:
        """The primary crashes, and comes back after so long."""
        with self._lock:
            self.primary.kill()
            time.sleep(seconds)
            self.primary.start()

    def promote(self) -> None:
        """The primary is lost, the standby takes its place, and what was the primary becomes its standby.

        Raises:
            NotNowError: the standby hasn't got everything.
        """
        with self._lock:
            if not wait_for(self._standby_has_everything, seconds=20):
                raise NotNowError("no synchronous standby is attached")
            self.primary.kill()
            self._execute(self._standby, "SELECT pg_promote(true, 60)")
            # Without a standby of its own a new primary would answer no commit.
            self._execute(self._standby, "ALTER SYSTEM RESET synchronous_standby_names")
            self._execute(self._standby, "SELECT pg_reload_conf()")
            self._servers.reverse()
            for door in self.doors:
                door.leads_to(self.primary.address, self.primary.port)
            self._attach()

    def _standby_has_everything(self) -> bool:
        return bool(self._asked(self.primary, "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"))

    def _attach(self) -> None:
        """Makes the standby anew from the primary, and the primary wait for it from then on."""
        standby, primary = self._standby, self.primary
        folder = self._folders[id(standby)]
        shutil.rmtree(folder / "data", ignore_errors=True)
        folder.mkdir(exist_ok=True)
        owner = primary.directory.stat()
        os.chown(folder, owner.st_uid, owner.st_gid)
        copy = primary._spawn(
            str(primary._programs() / "pg_basebackup"),
            *("-d", primary.conninfo(), "-D", str(folder / "data"), "-X", "stream", "-R", "-c", "fast"),
        )
        if copy.wait(120) != 0:
            raise RuntimeError("pg_basebackup failed")
        standby.start()
        streams = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
        if not wait_for(lambda: bool(self._asked(primary, streams)), seconds=60):
            raise RuntimeError("the standby doesn't stream")
        self._execute(primary, "ALTER SYSTEM SET synchronous_standby_names = '*'")
        self._execute(primary, "SELECT pg_reload_conf()")

    @staticmethod
    def _execute(server: PostgresServer, statement: LiteralString) -> None:
        with psycopg.connect(server.conninfo(), autocommit=True) as connection:
            connection.execute(statement)

    @staticmethod
    def _asked(server: PostgresServer, question: LiteralString) -> Any:
        with psycopg.connect(server.conninfo(), autocommit=True) as connection:
            row = connection.execute(question).fetchone()
        return None if row is None else row[0]

    # --- what it knows -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def connection(self) -> Iterator[psycopg.Connection[dict[str, Any]]]:
        """As superuser, past the doors."""
        with psycopg.connect(self.primary.conninfo(DBNAME), autocommit=True, row_factory=dict_row) as connection:
            yield connection

    def changes(self) -> list[Change]:
        with self.connection() as connection:
            rows = connection.execute(
                """SELECT seq, extract(epoch FROM at)::float8 AS at, key, code, coalesce(run_key, '') AS run_key,
                          manual, status, coalesce(outcome, '') AS outcome, token, attempt, owner::text AS owner,
                          adopted,
                          extract(epoch FROM modified_at)::float8 AS modified,
                          extract(epoch FROM modified_at)::float8 + lease_ms / 1000.0::float8 AS until, retry, reason,
                          cluster
                     FROM chaos.change ORDER BY seq"""
            )
            return [Change(**row) for row in rows]

    def ranges(self) -> list[Range]:
        with self.connection() as connection:
            rows = connection.execute(
                """SELECT code, extract(epoch FROM first)::float8 AS first, extract(epoch FROM last)::float8 AS last,
                          count, exact, kind, reason, extract(epoch FROM decided_at)::float8 AS decided_at
                     FROM leasedjob.tick_ledger ORDER BY code, first"""
            )
            return [Range(**row) for row in rows]

    def open_runs(self) -> list[dict[str, Any]]:
        """Runs that have neither succeeded nor failed for good."""
        with self.connection() as connection:
            return connection.execute(
                """SELECT code, run_key, status::text AS status, attempt, reason, cluster, pod_name,
                          round(extract(epoch FROM clock_timestamp() - modified_at)::numeric, 1) AS age
                     FROM leasedjob.job_scheduler
                    WHERE status = 'RUNNING' OR retry_at IS NOT NULL ORDER BY code, run_key"""
            ).fetchall()

    def watermarks(self) -> dict[str, float]:
        """Up to which tick each code is decided."""
        with self.connection() as connection:
            rows = connection.execute(
                "SELECT code, extract(epoch FROM watermark)::float8 AS at FROM leasedjob.job_code"
            ).fetchall()
        return {row["code"]: row["at"] for row in rows}

    def succeeded(self) -> set[tuple[str, str]]:
        """Code and run key of each run that has."""
        with self.connection() as connection:
            rows = connection.execute(
                "SELECT code, run_key FROM leasedjob.job_scheduler WHERE status = 'SUCCESS'"
            ).fetchall()
        return {(row["code"], row["run_key"]) for row in rows}
