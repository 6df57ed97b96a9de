"""The server for tests starts wherever its programs are installed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psycopg
import pytest

from leasedjob.testing import postgres
from leasedjob.testing.postgres import PostgresServer


@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0, reason="only root hands the server to another account")
def test_programs_in_a_folder_that_the_servers_account_cannot_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a virtual environment in root's home."""
    tmp_path.chmod(0o700)
    package = postgres.embedded_bin().parents[1]
    for folder in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(folder, tmp_path / folder.name, symlinks=True)
    monkeypatch.setattr(postgres, "embedded_bin", lambda: tmp_path / package.name / "pginstall" / "bin")
    with PostgresServer() as server, psycopg.connect(server.conninfo()) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
