"""What a migration may do while the release before is at work: nothing that holds heartbeats up."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import DictRow
from tests.upgrade.releases import kept_releases

from leasedjob.errors import DatabaseUnavailableError
from leasedjob.lease import migrate as module
from leasedjob.lease.migrate import Migration, migrate, migrations

from .conftest import Database

pytestmark = pytest.mark.integration

# Of the lock modes, those that a heartbeat's UPDATE waits for.
HOLDS_UP = {"ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock"}
# Published, so they stay: what they read under a lock is small by its nature.
ACCEPTED = {
    (4, "tenant"),  # a row for each namespace, and a heartbeat doesn't write it
    (7, "tick_ledger"),  # ranges, not ticks: a row for each time that a schedule stood still
    (7, "job_code"),  # a row for each object
    (9, "tenant"),
    (13, "job_registration"),  # a row for each object and cluster
}
TABLES = """
    SELECT c.oid, c.relname, pg_relation_filenode(c.oid) AS file
      FROM pg_class c WHERE c.relnamespace = 'leasedjob'::regnamespace AND c.relkind IN ('r', 'p')
"""
LOCKS = """
    SELECT c.relname, l.mode FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
     WHERE l.pid = pg_backend_pid() AND l.granted AND c.oid = ANY (%s)
"""
READ = "SELECT relname, seq_scan FROM pg_stat_xact_user_tables WHERE relid = ANY (%s)"


def offences(connection: psycopg.Connection[DictRow], step: Migration) -> set[str]:
    """The tables that a migration reads or rewrites as a whole while nobody may write them; it is applied."""

    def read() -> dict[str, int]:
        """How often each table was read as a whole, also by what the server has not added up yet."""
        return {row["relname"]: row["seq_scan"] for row in connection.execute(READ, (tables,)).fetchall()}

    with connection.transaction():
        before = {row["oid"]: row for row in connection.execute(TABLES).fetchall()}
        tables = list(before)
        had = read()
        connection.execute(step.sql)
        after = {row["oid"]: row["file"] for row in connection.execute(TABLES).fetchall()}
        held = {r["relname"] for r in connection.execute(LOCKS, (tables,)).fetchall() if r["mode"] in HOLDS_UP}
        has = read()
    rewritten = {row["relname"] for oid, row in before.items() if after.get(oid) != row["file"]}
    return {table for table in held if has.get(table, 0) > had.get(table, 0)} | rewritten


@pytest.mark.parametrize("step", migrations()[1:], ids=str)
def test_no_migration_reads_or_rewrites_a_table_that_it_keeps_from_being_written(
    empty_database: Database, step: Migration
) -> None:
    """Whatever their number of rows, then, a heartbeat waits for a moment only."""
    connection = empty_database.connect()
    migrate(connection, migrations()[: step.version - 1])
    found = offences(connection, step)
    assert {t for t in found if (step.version, t) not in ACCEPTED} == set()


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("job_scheduler", "CREATE INDEX later ON leasedjob.job_scheduler (created_at)"),
        ("job_scheduler", "ALTER TABLE leasedjob.job_scheduler ADD COLUMN later float NOT NULL DEFAULT random()"),
        ("job_scheduler", "ALTER TABLE leasedjob.job_scheduler ADD CHECK (attempt > 0)"),
        ("job_scheduler", "ALTER TABLE leasedjob.job_scheduler ALTER COLUMN pod_name SET NOT NULL"),
        (
            "job_scheduler",
            "LOCK TABLE leasedjob.job_scheduler IN EXCLUSIVE MODE; "
            "CREATE TABLE leasedjob.copy AS SELECT count(*) FROM leasedjob.job_scheduler",
        ),
        ("run_transition", "ALTER TABLE leasedjob.run_transition ALTER COLUMN attempt TYPE bigint"),
    ],
)
def test_a_migration_that_would_is_seen(empty_database: Database, table: str, text: Any) -> None:
    connection = empty_database.connect()
    migrate(connection)
    assert offences(connection, Migration(len(migrations()) + 1, "later", text)) == {table}


@pytest.mark.parametrize(
    "text",
    [
        "ALTER TABLE leasedjob.job_scheduler ADD COLUMN later text NOT NULL DEFAULT 'x'",
        "ALTER TABLE leasedjob.job_scheduler ADD CHECK (attempt > 0) NOT VALID",
        "CREATE TABLE leasedjob.later (id bigint PRIMARY KEY); CREATE INDEX ON leasedjob.later (id)",
    ],
)
def test_a_migration_that_is_done_in_a_moment_passes(empty_database: Database, text: Any) -> None:
    connection = empty_database.connect()
    migrate(connection)
    assert offences(connection, Migration(len(migrations()) + 1, "later", text)) == set()


class Beats:
    """Heartbeats of held runs, each as soon as the one before is answered, on connections of their own."""

    def __init__(self, database: Database, held: list[tuple[UUID, UUID]], connections: int) -> None:
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._beat, args=(database.connect(), held[n::connections]))
            for n in range(connections)
        ]
        self.took: list[tuple[float, float]] = []  # when it was sent, and how long it took
        self.lost = 0
        self.failed: list[BaseException] = []

    def __enter__(self) -> Beats:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _beat(self, connection: psycopg.Connection[DictRow], held: list[tuple[UUID, UUID]]) -> None:
        try:
            while not self._over.is_set():
                for run, token in held:
                    began = time.monotonic()
                    row = connection.execute(
                        "SELECT held FROM leasedjob.heartbeat(%s, %s)", (run, token)
                    ).fetchone()  # fmt: skip
                    self.lost += not (row and row["held"])
                    self.took.append((began, time.monotonic() - began))
                    time.sleep(0.002)
        except BaseException as error:
            self.failed.append(error)
            raise

    def worst(self, since: float = 0.0, until: float = float("inf")) -> float:
        """The slowest one that was under way between two moments."""
        return max((took for began, took in self.took if began <= until and began + took >= since), default=0.0)


def filled(database: Database, ended: int, running: int) -> list[tuple[UUID, UUID]]:
    """Rows as years leave them behind, and some that are held; id and token of these."""
    connection = database.connect()
    insert = """
        INSERT INTO leasedjob.job_scheduler (lock_key, type, code, run_key, status, tick, started_at, adopted_at,
                                             finished_at, lease_ms, run_lease_ms, cluster, namespace, job_name, tenant)
        SELECT %(kind)s || n, 'SCHEDULE', 'shop/job-' || n %% 500, %(kind)s || n,
               %(status)s::leasedjob.job_scheduler_status,
               clock_timestamp() - n * interval '1 minute', clock_timestamp(), clock_timestamp(),
               CASE WHEN %(status)s <> 'RUNNING' THEN clock_timestamp() END,
               900000, 900000, 'east', 'shop', 'job-' || n %% 500, 'east/shop'
          FROM generate_series(1, %(count)s) n
        RETURNING id, owner_token
    """
    connection.execute(
        insert.replace("RETURNING id, owner_token", ""), {"kind": "e", "status": "SUCCESS", "count": ended}
    )
    connection.execute("VACUUM (ANALYZE) leasedjob.job_scheduler")
    rows = connection.execute(insert, {"kind": "r", "status": "RUNNING", "count": running}).fetchall()
    return [(row["id"], row["owner_token"]) for row in rows]


def test_a_migration_that_waits_holds_heartbeats_up_for_a_moment_only(empty_database: Database) -> None:
    """Somebody's transaction has written a row and stays open: whoever asks for a lock on the table waits for it, and
    whoever comes later waits behind. A lease of some seconds must outlast that."""
    connection = empty_database.connect()
    migrate(connection, migrations()[:9])
    held = filled(empty_database, 10, 3)
    stranger = empty_database.connect(autocommit=False)
    stranger.execute("UPDATE leasedjob.job_scheduler SET name = 'x' WHERE lock_key = 'e1'")
    done: list[int] = []

    def run() -> None:
        done.append(0)
        try:
            migrate(connection)
        except DatabaseUnavailableError:
            return
        done.append(1)

    with Beats(empty_database, held, 2) as beats:
        migrating = threading.Thread(target=run)
        began = time.monotonic()
        migrating.start()
        while not empty_database.rows(
            "SELECT 1 AS one FROM pg_locks WHERE NOT granted AND relation = 'leasedjob.job_scheduler'::regclass"
        ):
            assert time.monotonic() - began < 60, "it asks for the lock"
            time.sleep(0.01)
        time.sleep(6)  # a good deal longer than it may wait in one go
        assert migrating.is_alive(), "and goes on asking"
        stranger.rollback()
        migrating.join(60)
        assert not migrating.is_alive()
    assert done == [0, 1], "applied once the way was free"
    assert not beats.failed
    assert not beats.lost
    assert beats.worst() < 4 * float(module.LOCK_WAIT.removesuffix("s")), "no heartbeat waited for the whole time"
    assert len(beats.took) > 100


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_migrations_of_a_large_table_hold_no_heartbeat_up(empty_database: Database) -> None:
    """A million rows, the schema of the oldest release that is kept, and 200 runs that are held meanwhile."""
    connection = empty_database.connect()
    first = min(release.schema for release in kept_releases())
    migrate(connection, migrations()[:first])
    held = filled(empty_database, 1_000_000, 200)
    (size,) = empty_database.rows("SELECT pg_total_relation_size('leasedjob.job_scheduler') AS bytes")
    print(f"{size['bytes'] / 2**20:.0f} MiB of rows and indexes")
    with Beats(empty_database, held, 4) as beats:
        time.sleep(10)
        before = time.monotonic()
        quiet = [took for _, took in beats.took]
        for step in migrations()[first:]:
            began = time.monotonic()
            migrate(connection, migrations()[: step.version])
            ended = time.monotonic()
            print(f"{step}: {ended - began:.3f} s; slowest heartbeat meanwhile {beats.worst(began, ended):.3f} s")
            time.sleep(1)
        after = time.monotonic()
    usual = statistics.quantiles(quiet, n=1000)[-1]
    print(f"without a migration: 99.9 % of {len(quiet)} heartbeats within {usual:.3f} s, slowest {max(quiet):.3f} s")
    assert not beats.failed
    assert not beats.lost
    assert beats.worst(before, after) < 2, "a lease of a few seconds outlasts that"
