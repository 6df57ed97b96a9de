"""Named statements, and the numbering of migrations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import leasedjob.lease
from leasedjob.lease.migrate import Migration, MigrationChangedError, migrations, missing
from leasedjob.lease.statements import names, parse, statement

LEASE = Path(leasedjob.lease.__file__).parent


def test_every_statement_is_used_and_every_use_exists() -> None:
    used: set[str] = set()
    for source in LEASE.glob("*.py"):
        text = source.read_text(encoding="utf-8")
        used |= set(re.findall(r"(?:statement|_rows|_value|_row|Ask)\(\s*\"([a-z_]+)\"", text))
    assert used == names()


def test_statements_carry_no_comment_and_no_semicolon() -> None:
    for name in names():
        assert not statement(name).startswith("--")
        assert ";" not in statement(name)


@pytest.mark.parametrize(
    "text",
    [
        "-- name: a\n-- Says what.\nSELECT 1;\n-- name: a\n-- Again.\nSELECT 2;",
        "-- name: a\nSELECT 1;",
        "-- name: a\n-- Says what.\n",
    ],
)
def test_a_malformed_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="statement a"):
        parse(text)


def test_migrations_are_numbered_without_a_gap() -> None:
    assert [migration.version for migration in migrations()] == list(range(1, len(migrations()) + 1))
    assert str(migrations()[0]) == "0001_lease"


def test_missing_and_changed() -> None:
    one, two = Migration(1, "one", "SELECT 1"), Migration(2, "two", "SELECT 2")
    row = {"version": 1, "name": "one", "checksum": one.checksum}
    assert missing([], [one, two]) == [one, two]
    assert missing([row], [one, two]) == [two]
    assert missing([row, {"version": 9, "name": "later", "checksum": "x"}], [one]) == []
    with pytest.raises(MigrationChangedError):
        missing([{**row, "checksum": "other"}], [one])
