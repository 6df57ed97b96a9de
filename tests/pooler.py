"""PgBouncer in transaction mode, for tests.

It is no Python package: LEASEDJOB_TEST_PGBOUNCER names it, or it is on the path.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psycopg

from leasedjob.testing.postgres import PostgresServer

PGBOUNCER: Final = os.environ.get("LEASEDJOB_TEST_PGBOUNCER") or shutil.which("pgbouncer")


@contextlib.contextmanager
def pooled(server: PostgresServer, database: str, users: Mapping[str, str], *, size: int) -> Iterator[int]:
    """A running pooler in front of one database; its port on 127.0.0.1.

    Args:
        users: name -> password.
        size: server connections for each user.
    """
    assert PGBOUNCER is not None
    with tempfile.TemporaryDirectory(prefix="leasedjob-pgbouncer-") as name:
        folder = Path(name)
        folder.chmod(0o777)  # it refuses to run as root
        (folder / "users").write_text("".join(f'"{user}" "{password}"\n' for user, password in users.items()))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": port,
            "auth_type": "scram-sha-256",
            "auth_file": folder / "users",
            "pool_mode": "transaction",
            "default_pool_size": size,
            "max_client_conn": 1000,
            "unix_socket_dir": "",
            "logfile": folder / "log",
        }
        (folder / "ini").write_text(
            f"[databases]\n{database} = host={server.address} port={server.port} dbname={database}\n[pgbouncer]\n"
            + "".join(f"{key} = {value}\n" for key, value in settings.items())
        )
        unprivileged: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
        process = subprocess.Popen([PGBOUNCER, "-q", str(folder / "ini")], stderr=subprocess.DEVNULL, **unprivileged)
        try:
            user, password = next(iter(users.items()))
            deadline = time.monotonic() + 30
            while True:  # it tells nobody when it listens
                try:
                    psycopg.connect(host="127.0.0.1", port=port, dbname=database, user=user, password=password).close()
                    break
                except psycopg.OperationalError:
                    assert process.poll() is None, (folder / "log").read_text()
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            yield port
        finally:
            process.terminate()
            process.wait(timeout=10)
