"""`leasedjob outbox`, as a person types it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from leasedjob.workload import enqueue_once, install_outbox

from .conftest import Database
from .workload_parts import LONG, environment

pytestmark = pytest.mark.integration


def outbox(*words: str, **env: str) -> tuple[int, list[str], str]:
    """Exit code, lines of stdout, stderr."""
    command = [sys.executable, "-m", "leasedjob", "outbox", *words]
    done = subprocess.run(command, env=environment(env), capture_output=True, text=True, timeout=LONG, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_from_install_to_retry(empty_database: Database) -> None:
    url = {"LEASEDJOB_DATABASE_URL": empty_database.dsn}
    code, _, error = outbox("status", **url)
    assert (code, error) == (
        4,
        "leasedjob outbox: there is no outbox in this database: call install_outbox, or `leasedjob outbox install` "
        '(relation "leasedjob_outbox" does not exist)\n',
    )
    assert outbox("install", **url) == (0, ["the outbox is installed"], "")
    connection = empty_database.connect()
    for key in ("a", "b", "c", "d"):
        enqueue_once(connection, key, "paid", 1, topic="orders", partition_key=key if key == "a" else None)
    connection.execute(
        "UPDATE leasedjob_outbox SET parked_at = '2026-07-20T03:00:00Z', tries = 10, error = E'HTTP 422:\\n\\tno such'"
        " WHERE id < 4"
    )
    code, lines, _ = outbox("status", "--database-url", empty_database.dsn)
    assert (code, lines[:3]) == (0, ["pending 1", "waiting 0", "parked 3"])
    assert lines[3].startswith("lag ")
    code, lines, _ = outbox("parked", "--limit", "2", **url)
    assert (code, lines) == (
        0,
        [
            "IDEMPOTENCY_KEY\tTYPE\tTOPIC\tPARTITION_KEY\tTRIES\tPARKED_AT\tERROR",
            "a\tpaid\torders\ta\t10\t2026-07-20 03:00:00+00:00\tHTTP 422: no such",
            "b\tpaid\torders\t\t10\t2026-07-20 03:00:00+00:00\tHTTP 422: no such",
        ],
    )
    assert outbox("retry", "b", "nobody", **url) == (0, ["put back 1"], "")
    assert outbox("retry", "--all", **url) == (0, ["put back 2"], "")


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("status",), 2, "say where the database is: --database-url, --database-dir or $LEASEDJOB_DATABASE_URL"),
        (("retry", "--database-url", "host=127.0.0.1"), 2, "one of the arguments KEY --all is required"),
        (("retry", "--all", "a", "--database-url", "host=127.0.0.1"), 2, "not allowed with argument --all"),
        (("parked", "--limit", "0", "--database-url", "host=127.0.0.1"), 2, "must be a number above 0"),
        ((), 2, "the following arguments are required: WHAT"),
        (("status", "--database-url", "host=127.0.0.1 port=1"), 3, "nothing listens at the database's address"),
        (("status", "--database-url", "mysql://a"), 3, "the database uri is not a PostgreSQL connection string"),
    ],
)
def test_what_is_wrong_is_said(words: tuple[str, ...], code: int, text: str) -> None:
    got, lines, error = outbox(*words)
    assert (got, lines) == (code, [])
    assert text in error


def test_it_is_done_in_one_transaction(empty_database: Database) -> None:
    """A role without the right changes nothing, and is told why."""
    install_outbox(empty_database.connect())
    server, role = empty_database.server, "reader_of_the_outbox"
    server.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'a'")
    try:
        code, _, error = outbox("retry", "--all", "--database-url", server.conninfo(empty_database.name, role, "a"))
        assert code == 3
        assert "permission denied for table leasedjob_outbox" in error
    finally:
        server.execute(f"DROP ROLE {role}")
