"""`leasedjob migrate` and `leasedjob version`: arguments and exit codes, the latter on a real PostgreSQL."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from leasedjob import __version__
from leasedjob.cli import leasedjob
from leasedjob.cli.migrate import DEFAULT_DIRECTORY, ENV_URL, Exit
from leasedjob.lease.migrate import migrations
from leasedjob.testing.postgres import PostgresServer

NEWEST = str(migrations()[-1])


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name == ENV_URL or name.startswith("PG")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def url(server: PostgresServer) -> Iterator[str]:
    """An empty database."""
    name = f"cli_{uuid4().hex[:12]}"
    yield server.create_database(name)
    server.drop_database(name)


# --- on a real database -----------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_check_then_migrate_then_check(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert leasedjob.run(["migrate", "--check", "--database-url", url]) == Exit.PENDING
    assert capsys.readouterr().out == "".join(f"missing {step}\n" for step in migrations())
    assert leasedjob.run(["migrate", "--database-url", url]) == Exit.DONE
    applied = "".join(f"applied {step}\n" for step in migrations())
    assert capsys.readouterr().out == f"{applied}the schema is current: {NEWEST}\n"
    for words in (["migrate"], ["migrate", "--check"]):
        assert leasedjob.run([*words, "--database-url", url]) == Exit.DONE
        assert capsys.readouterr().out == f"the schema is current: {NEWEST}\n"


@pytest.mark.integration
def test_the_url_comes_from_the_environment_and_a_flag_wins(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_URL, url)
    assert leasedjob.run(["migrate"]) == Exit.DONE
    assert leasedjob.run(["migrate", "--database-dir", str(tmp_path / "nothing")]) == Exit.DATABASE


@pytest.mark.integration
def test_a_mounted_secret(server: PostgresServer, url: str, tmp_path: Path) -> None:
    dbname = url.partition("dbname=")[2].split()[0]
    values = {
        "host": server.address,
        "port": str(server.port),
        "dbname": dbname,
        "user": "postgres",
        "password": server.password,
    }
    for name, value in values.items():
        (tmp_path / name).write_text(value)
    assert leasedjob.run(["migrate", "--database-dir", str(tmp_path)]) == Exit.DONE


@pytest.mark.integration
def test_a_wrong_password_is_named_and_not_shown(server: PostgresServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert leasedjob.run(["migrate", "--database-url", server.conninfo(password="wr0ng-one")]) == Exit.DATABASE
    said = capsys.readouterr().err
    assert "password" in said
    assert "wr0ng-one" not in said
    assert len(said.splitlines()) == 1


@pytest.mark.integration
def test_a_migration_that_was_changed_is_refused(
    server: PostgresServer, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leasedjob.run(["migrate", "--database-url", url]) == Exit.DONE
    dbname = url.partition("dbname=")[2].split()[0]
    server.execute("UPDATE leasedjob.schema_migration SET checksum = 'other'", dbname)
    capsys.readouterr()
    for words in (["migrate"], ["migrate", "--check"]):
        assert leasedjob.run([*words, "--database-url", url]) == Exit.FAILED
        said = capsys.readouterr().err
        assert "from another text" in said
        assert len(said.splitlines()) == 1


@pytest.mark.integration
def test_wait_bridges_the_time_until_the_database_is_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    late = PostgresServer(port=port, password="late")
    command = [sys.executable, "-m", "leasedjob.cli.leasedjob", "migrate", "--wait", "60"]
    environment = {**os.environ, ENV_URL: late.conninfo()}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "trying again for" in process.stderr.readline()  # it has asked once, and nobody was there
        with late:
            out, _ = process.communicate(timeout=60)
    assert process.returncode == Exit.DONE
    assert f"the schema is current: {NEWEST}" in out


@pytest.mark.integration
def test_several_at_once_all_succeed(url: str) -> None:
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda: codes.append(leasedjob.run(["migrate", "--database-url", url])))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [Exit.DONE] * 4


# --- without one ------------------------------------------------------------------------------------------------------


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # bound, never listening
        taken.bind(("127.0.0.1", 0))
        url = f"host=127.0.0.1 port={taken.getsockname()[1]} dbname=x user=x"
        assert leasedjob.run(["migrate", "--database-url", url, "--wait", "0.2"]) == Exit.DATABASE
    first, last = capsys.readouterr().err.splitlines()
    assert "nothing listens at the database's address" in first
    assert first.endswith("trying again for 1 s")
    assert "trying again" not in last


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--database-dir", "/no/such/directory"], "/no/such/directory can't be read"),
        (["--database-url", "postgresql://not a host"], "not a PostgreSQL connection string"),
    ],
)
def test_unusable_credentials(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert leasedjob.run(["migrate", *words]) == Exit.DATABASE
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["migrate", "--chec"],
        ["migrate", "--wait"],
        ["migrate", "--wait", "-1"],
        ["migrate", "--wait", "soon"],
        ["migrate", "--wait", "nan"],
        ["migrate", "--database-url", "a", "--database-dir", "b"],
        ["version", "extra"],
    ],
)
def test_usage_errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        leasedjob.run(words)
    assert done.value.code == Exit.USAGE
    assert capsys.readouterr().err.startswith("usage: leasedjob")


def test_help_names_the_exit_codes_and_the_default_directory(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        leasedjob.run(["migrate", "--help"])
    assert done.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert DEFAULT_DIRECTORY in said
    assert all(f"{int(code)} " in said.partition("exit codes:")[2] for code in Exit)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert leasedjob.run(["version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_version_needs_neither_click_nor_a_database_driver() -> None:
    script = (
        "import sys; from leasedjob.cli import leasedjob; leasedjob.run(['version']); "
        "print(sorted({'click', 'rich', 'psycopg', 'kubernetes', 'pydantic'} & sys.modules.keys()))"
    )
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert out == f"{__version__}\n[]\n"
