"""What earlier releases ask the database for is answered by the present schema as by their own."""

from __future__ import annotations

import tarfile
from datetime import timedelta

import psycopg
import pytest
from psycopg._queries import PostgresQuery
from psycopg.adapt import Transformer
from psycopg.rows import DictRow
from tests.upgrade.releases import KeptRelease, kept_releases

from leasedjob.lease import statements
from leasedjob.lease.migrate import migrate, migrations

from .conftest import Database

pytestmark = pytest.mark.integration


def described(connection: psycopg.Connection[DictRow], sql: str) -> dict[str, int]:
    """Column -> type of what a statement answers, without running it."""
    query = PostgresQuery(Transformer(connection))
    query.convert(sql, _Anything())
    prepared = connection.pgconn.prepare(b"", query.query, query.types)
    if prepared.error_message:
        raise AssertionError(prepared.error_message.decode())
    answer = connection.pgconn.describe_prepared(b"")
    return {(answer.fname(n) or b"").decode(): answer.ftype(n) for n in range(answer.nfields)}


class _Anything(dict[str, object]):
    """A value for each parameter that a statement names: NULL, but where the server can't tell its type."""

    def __missing__(self, key: str) -> object:
        return timedelta() if key == "age" else None

    def __contains__(self, key: object) -> bool:
        return True


@pytest.mark.parametrize("release", kept_releases(), ids=lambda r: r.name)
def test_each_statement_of_a_kept_release_is_answered_with_the_same_columns(
    empty_database: Database, release: KeptRelease
) -> None:
    with tarfile.open(release.archive, "r:xz") as archive:
        file = archive.extractfile("operator/leasedjob/lease/statements.sql")
        assert file is not None
        asked = statements.parse(file.read().decode())
    assert len(asked) > 10
    connection = empty_database.connect()
    migrate(connection, migrations()[: release.schema])
    before = {name: described(connection, sql) for name, sql in asked.items()}
    migrate(connection)
    for name, sql in asked.items():
        # More columns are fine: rows are read by name.
        assert described(connection, sql).items() >= before[name].items(), name
