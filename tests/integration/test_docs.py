"""The documentation's SQL, and its shell blocks that are marked `run`, are run on a real PostgreSQL.

Python and crontabs of the two guides: test_guide_library.py, test_guide_workload.py. What needs no database:
tests/unit/test_docs_blocks.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from itertools import groupby
from pathlib import Path

import psycopg
import pytest
from tests.docs_blocks import Block, blocks

from leasedjob.lease.database import Credentials, connect_async
from leasedjob.lease.migrate import migrate
from leasedjob.lease.tenants import Slot, ensure_tenant, retire_slot, switch_slot, tenant_state
from leasedjob.testing.postgres import PostgresServer, embedded_bin
from leasedjob.workload import install_outbox

pytestmark = pytest.mark.integration
DATABASE, OWNER, PASSWORD = "leasedjob", "leasedjob", "…"  # as the pages have them
RUNNABLE = [b for b in blocks("sql", "sh") if b.language == "sql" or b.mark("run") is not None]
PAGES = [(page, list(found)) for page, found in groupby(RUNNABLE, key=lambda block: block.page)]


@pytest.fixture(scope="module")
def docs_server() -> Iterator[PostgresServer]:
    """One of its own: pages change roles and the server's settings."""
    with PostgresServer() as server:
        yield server


class Reader:
    """Somebody who follows a page: a folder, a database, an environment."""

    def __init__(self, server: PostgresServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        for name in (DATABASE, "elsewhere"):
            server.drop_database(name)
        with psycopg.connect(server.conninfo(), autocommit=True) as connection:
            present = {row[0] for row in connection.execute("SELECT rolname FROM pg_roles").fetchall()}
            for role in present - {"postgres"}:
                if not role.startswith("pg_"):
                    connection.execute(f'DROP OWNED BY "{role}"'.encode())
                    connection.execute(f'DROP ROLE "{role}"'.encode())

    def prepare(self, text: str) -> None:
        """What a page takes for granted, unless it makes it itself."""
        with psycopg.connect(self.server.conninfo(), autocommit=True) as connection:
            role = connection.execute("SELECT FROM pg_roles WHERE rolname = %s", (OWNER,)).fetchone()
            database = connection.execute("SELECT FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone()
        if role is None and f"CREATE ROLE {OWNER} " not in text:
            self.server.create_owner(OWNER, PASSWORD)
        if database is None and f"CREATE DATABASE {DATABASE} " not in text:
            self.server.create_database(DATABASE, owner=OWNER)
            self.server.create_database("elsewhere", owner=OWNER)
            database = ()
        if database is not None:
            with psycopg.connect(self.url(DATABASE), autocommit=True) as connection:
                if connection.execute("SELECT to_regnamespace('leasedjob')").fetchone() == (None,):
                    migrate(connection)
                    # In `public`, where programs look for it: the owner has the schema's name, and would make it there.
                    with psycopg.connect(self.server.conninfo(DATABASE), autocommit=True) as own:
                        install_outbox(own)

    def url(self, name: str) -> str:
        return self.server.conninfo(name, OWNER, PASSWORD)

    def run(self, block: Block) -> None:
        programs = [str(Path(sys.executable).parent), str(embedded_bin()), os.environ["PATH"]]
        environment = {
            **os.environ,
            "PATH": os.pathsep.join(programs),
            "LEASEDJOB_DATABASE_URL": self.url(DATABASE),
            "OLD": self.url(DATABASE),
            "NEW": self.url("elsewhere"),
        }
        if block.language == "sql":
            where = self.server.conninfo(DATABASE if "CREATE DATABASE" not in block.text else "postgres")
            command = ["psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", f"--dbname={where}", "--file=-"]
        else:
            command = ["bash", "-euo", "pipefail", "-s"]
        done = subprocess.run(
            command, input=block.text, env=environment, cwd=self.folder, capture_output=True, text=True, check=False,
            timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(("page", "found"), PAGES, ids=[page for page, _ in PAGES])
def test_the_blocks_of_a_page_do_what_they_say(
    docs_server: PostgresServer, tmp_path: Path, page: str, found: list[Block]
) -> None:
    reader = Reader(docs_server, tmp_path)
    for block in found:
        reader.prepare(block.text)
        reader.run(block)


def test_a_wrong_block_would_be_noticed(docs_server: PostgresServer, tmp_path: Path) -> None:
    reader = Reader(docs_server, tmp_path)
    reader.prepare("")
    for language, text in (("sql", "SELECT nothing FROM leasedjob.job_scheduler;"), ("sh", "leasedjob migrate --chek")):
        with pytest.raises(AssertionError):
            reader.run(Block("p", 1, language, (), text))


async def test_a_second_login_for_the_operator(docs_server: PostgresServer, tmp_path: Path) -> None:
    """docs/howto-database.md: it acts as the owner, for namespaces' roles that the first one made, too."""
    reader = Reader(docs_server, tmp_path)
    (grant,) = [b for b in blocks("sql") if b.page == "docs/howto-database.md" and "leasedjob_b" in b.text]
    reader.prepare(grant.text)
    async with await connect_async(Credentials.from_conninfo(reader.url(DATABASE))) as connection:
        await ensure_tenant(connection, "east", "shop", password="first")
    reader.run(grant)
    second = Credentials.from_conninfo(docs_server.conninfo(DATABASE, "leasedjob_b", PASSWORD))
    async with await connect_async(second) as connection:
        state = await tenant_state(connection, "east", "shop")
        await ensure_tenant(connection, "east", "shop", password="second", slot=Slot.B, decided_on=state)
        state = await tenant_state(connection, "east", "shop")
        assert await switch_slot(connection, "east", "shop", overlap=timedelta(0), decided_on=state)
        assert await retire_slot(connection, "east", "shop")
        await connection.execute("CREATE TABLE leasedjob.made_later (id integer)")
        cursor = await connection.execute("SELECT tableowner FROM pg_tables WHERE tablename = 'made_later'")
        assert await cursor.fetchone() == {"tableowner": OWNER}
