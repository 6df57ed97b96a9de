"""A database that was restored to an earlier point, and one that has moved: real backups, real servers.

Between backup and loss the database gave things out that the restored one doesn't know. None of them may be given out,
or done, a second time.
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.rows import dict_row

from leasedjob.cli import leasedjob
from leasedjob.cli import restored as verb
from leasedjob.errors import DatabaseUnavailableError
from leasedjob.identity import JobSchedulerType, RunIdentity, run_key_for
from leasedjob.lease import JobAcquireOptions, JobNotAcquired, NotAcquired, SyncJobSchedulerService, restore
from leasedjob.lease.database import Credentials, connect_async, connect_sync, operator_pool
from leasedjob.lease.migrate import migrate
from leasedjob.lease.restore import OperatorsConnectedError, Restored, RestoreRefusedError, after_restore
from leasedjob.lease.rows import Asked, ClaimVerdict, JobSchedulerStatus, Outcome
from leasedjob.lease.store import OperatorStore, SidecarStore
from leasedjob.lease.tenants import ensure_tenant, tenant_state
from leasedjob.testing.postgres import PostgresServer, embedded_bin

from .conftest import (
    CLUSTER,
    CODE,
    NAMESPACE,
    OWNER,
    OWNER_PASSWORD,
    UID,
    Database,
    claim,
    claimed,
    registered,
    request,
)

pytestmark = pytest.mark.integration
INITIAL = "shop/once"


@pytest.fixture
def backup(database: Database, tmp_path: Path) -> Any:
    """Two steps: `take()` makes a backup, `restore()` puts it in the database's place."""
    dump = str(tmp_path / "dump")
    superuser = database.server.conninfo(database.name)

    class Backup:
        def take(self) -> None:
            tool("pg_dump", "--format=custom", f"--file={dump}", f"--dbname={superuser}")

        def restore(self) -> None:
            database.server.drop_database(database.name)
            database.server.create_database(database.name, owner=OWNER)
            tool("pg_restore", f"--dbname={superuser}", dump)

    return Backup()


def tell(database: Database, **options: Any) -> Restored:
    with connect_sync(database.credentials) as connection:
        return after_restore(connection, **options)


def begin(database: Database) -> None:
    """As if the time in which nothing begins were over."""
    database.rows("UPDATE leasedjob.restore SET begins_at = clock_timestamp()")


async def adopted(
    store: OperatorStore, sidecar: SidecarStore, tick: datetime, code: str = CODE, pod: str = "pod-1"
) -> Any:
    """A run that a Pod holds: (claim, its token, the Pod's uid)."""
    result = await claimed(store, tick, code=code)
    token = uuid4()
    assert result.id is not None
    assert result.owner_token is not None
    answer = sidecar.adopt(result.id, result.owner_token, token, pod_uid=pod, pod_name=pod)
    assert answer.verdict == "adopted", answer
    return result, token


async def later() -> datetime:
    """A tick after now that is due already."""
    tick = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=1)
    while datetime.now(UTC) <= tick:
        await asyncio.sleep(0.05)
    return tick


def tool(name: str, *arguments: str, given: bytes | None = None) -> tuple[bytes, bytes]:
    """What one of PostgreSQL's programs said."""
    done = subprocess.run(
        [str(embedded_bin() / name), *arguments], input=given, capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def folders(top: Path) -> tuple[Path, Path]:
    """For the archived log and for the copy, which the server's account may write."""
    for folder in (top, *top.parents):  # pytest's own, one more of them where several workers test
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)
    made = (top / "archive", top / "copy")
    for folder in made:
        folder.mkdir()
        folder.chmod(0o777)
    return made


def give_to_the_server(server: PostgresServer, copy: Path) -> None:
    """A base backup that another account has made is the server's, and begins as a recovery."""
    (copy / "data" / "recovery.signal").touch()
    if server._account is not None:
        owner = f"{server._account.pw_uid}:{server._account.pw_gid}"
        subprocess.run(["chown", "-R", owner, str(copy)], check=True)


def recovered(dsn: str) -> bool:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute("SELECT NOT pg_is_in_recovery()").fetchone() == (True,)


async def test_nothing_is_given_out_or_done_twice(
    database: Database, backup: Any, minute: datetime, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = [CODE, "shop/claim", "shop/retry", "shop/done"]
    async with operator_pool(database.credentials, max_size=4) as pool:
        store = OperatorStore(pool.connection)
        with connect_sync(database.credentials) as connection:
            sidecar = SidecarStore(connection)
            await registered(store, *codes)
            held, token = await adopted(store, sidecar, minute)
            unadopted = await claimed(store, minute, code="shop/claim")
            retry, retry_token = await adopted(store, sidecar, minute, "shop/retry", "pod-2")
            assert sidecar.finish(retry.id, retry_token, Outcome.RELEASE)
            done, done_token = await adopted(store, sidecar, minute, "shop/done", "pod-3")
            assert sidecar.finish(done.id, done_token, Outcome.COMPLETE)
            backup.take()

            # What the backup doesn't know.
            assert sidecar.finish(held.id, token, Outcome.COMPLETE)
            again, again_token = await adopted(store, sidecar, minute, "shop/retry", "pod-4")
            assert again.attempt == 2
            assert sidecar.finish(again.id, again_token, Outcome.COMPLETE)
            new, _ = await adopted(store, sidecar, minute + timedelta(minutes=1))
            await registered(store, "shop/new")
            newest = await claimed(store, minute, code="shop/new")
            largest = newest.fencing_token
            assert largest is not None

    backup.restore()
    lost_at = datetime.now(UTC)
    assert leasedjob.run(["restored", "--dry-run", "--database-url", database.dsn]) == 0
    assert "nothing was changed" in capsys.readouterr().out
    assert database.rows("SELECT FROM leasedjob.restore") == []
    assert leasedjob.run(["restored", "--database-url", database.dsn]) == 0
    said = capsys.readouterr().out
    assert "1 that a Pod held, 1 that no Pod had taken, 1 that waited for their next attempt, 0 of the library" in said

    async with operator_pool(database.credentials, max_size=4) as pool:
        store = OperatorStore(pool.connection)
        with connect_sync(database.credentials) as connection:
            sidecar = SidecarStore(connection)
            await registered(store, *codes, "shop/new")
            # G4 and G3: ticks of before are decided, and it is written down why, also of what the backup didn't know.
            assert (await claim(store, request(minute + timedelta(minutes=1)))).verdict is ClaimVerdict.PAST
            assert (await claim(store, request(minute, "shop/new"))).verdict is ClaimVerdict.PAST
            assert (await claim(store, request(minute, "shop/done"))).verdict is ClaimVerdict.COMPLETED
            ((kind, reason, first, last, _),) = database.ledger()
            assert (kind, reason) == ("missed", "Restored")
            assert minute < first < last
            assert last >= lost_at
            # Runs that were under way get no further attempt, and their holders hold nothing.
            for code in ("shop/claim", "shop/retry"):
                assert (await claim(store, request(minute, code))).verdict is ClaimVerdict.EXHAUSTED
            assert database.row(unadopted.id)["reason"].startswith("Restored")
            assert not sidecar.heartbeat(held.id, token).held
            assert not sidecar.finish(held.id, token, Outcome.COMPLETE)
            assert not sidecar.heartbeat(new.id, uuid4()).held
            # But whoever sees the Pod may say how it ended.
            assert await store.end_attempt(
                held.id, 1, pod_uid="pod-1", outcome=Outcome.COMPLETE, counts=False, reason="Completed"
            )
            assert database.row(held.id)["status"] == JobSchedulerStatus.SUCCESS

            # G2: nothing begins while somebody may trust a lease of before.
            tick = await later()
            waits = await claim(store, request(tick))
            assert (waits.verdict, waits.reason) == (ClaimVerdict.OVERLAP_WAIT, "Restored")
            begin(database)
            # G5: numbers go on above all that were given out.
            first_after = await claim(store, request(tick))
            assert first_after.verdict is ClaimVerdict.CLAIMED
            assert first_after.fencing_token is not None
            assert first_after.fencing_token > largest
            assert await store.forget_run(
                retry.id, asked=Asked(cluster=CLUSTER, action="Forget", by="shop/x", request="1")
            )
            reopened = await claim(store, request(minute, "shop/retry"))
            assert reopened.attempt == 1 + restore.ATTEMPT_JUMP + 1
            assert database.row(retry.id)["attempt"] == reopened.attempt
            assert (reopened.fencing_token or 0) > first_after.fencing_token


async def test_a_run_that_runs_once_ever_is_not_begun_anew(database: Database, backup: Any) -> None:
    wanted = request(None, INITIAL, identity=RunIdentity.of(code=INITIAL, type=JobSchedulerType.INITIAL))
    backup.take()
    async with operator_pool(database.credentials, max_size=2) as pool:
        store = OperatorStore(pool.connection)
        await registered(store, INITIAL)
        assert (await claim(store, wanted)).verdict is ClaimVerdict.CLAIMED
    backup.restore()
    tell(database)
    begin(database)
    async with operator_pool(database.credentials, max_size=2) as pool:
        store = OperatorStore(pool.connection)
        await registered(store, INITIAL, "shop/once-later", created_at=datetime.now(UTC) - timedelta(hours=1))
        answer = await claim(store, wanted)
        assert (answer.verdict, answer.reason) == (ClaimVerdict.EXHAUSTED, "Restored")
        assert database.row(answer.id)["status"] == JobSchedulerStatus.FAIL
        assert (await claim(store, wanted)).verdict is ClaimVerdict.EXHAUSTED
        # One that is created after the restore is new.
        code = "shop/once-more"
        await registered(store, code, created_at=datetime.now(UTC))
        fresh = request(None, code, identity=RunIdentity.of(code=code, type=JobSchedulerType.INITIAL))
        assert (await claim(store, fresh)).verdict is ClaimVerdict.CLAIMED


def test_the_library_after_a_restore(database: Database, backup: Any, minute: datetime) -> None:
    jobs = SyncJobSchedulerService(database.dsn)
    before, after = run_key_for(minute), run_key_for(minute + timedelta(minutes=1))
    first = jobs.acquire(JobAcquireOptions(code="report", run_key=before))
    assert first.acquired
    backup.take()
    assert jobs.complete(first.lease)
    second = jobs.acquire(JobAcquireOptions(code="report", run_key=after))
    assert second.acquired
    assert jobs.complete(second.lease)
    backup.restore()
    assert tell(database).library == 1
    held = jobs.acquire(JobAcquireOptions(code="report", run_key="free form"))
    assert isinstance(held, JobNotAcquired)
    assert held.reason is NotAcquired.HELD
    begin(database)
    for key in (before, after):
        answer = jobs.acquire(JobAcquireOptions(code="report", run_key=key))
        assert isinstance(answer, JobNotAcquired)
        assert answer.reason is NotAcquired.PRUNED
    coming = run_key_for(datetime.now(UTC).replace(microsecond=0) + timedelta(minutes=1))
    third = jobs.acquire(JobAcquireOptions(code="report", run_key=coming))
    assert third.acquired
    assert third.fencing_token > second.fencing_token


async def test_backfills_of_before_end(database: Database, backup: Any, minute: datetime) -> None:
    async with operator_pool(database.credentials, max_size=2) as pool:
        await registered(OperatorStore(pool.connection))
    database.rows(
        "INSERT INTO leasedjob.backfill (uid, cluster, code, through, ticks, planned)"
        " VALUES ('u', 'east', %s, %s, 9, 9)",
        CODE,
        minute,
    )
    done = tell(database)
    assert done.backfills == 1
    assert database.rows("SELECT through FROM leasedjob.backfill") == [{"through": done.as_of}]


def test_what_cannot_be_true_is_refused(
    database: Database, minute: datetime, capsys: pytest.CaptureFixture[str]
) -> None:
    database.rows("INSERT INTO leasedjob.job_code (code, watermark) VALUES (%s, %s)", CODE, minute)
    with pytest.raises(RestoreRefusedError, match="the database has records of"):
        tell(database, as_of=minute - timedelta(seconds=1))
    with pytest.raises(RestoreRefusedError, match="lies in the future"):
        tell(database, as_of=datetime.now(UTC) + timedelta(hours=1))
    assert leasedjob.run(["restored", "--as-of", "2020-01-01T00:00:00Z", "--database-url", database.dsn]) == 4
    assert "as-of is too early" in capsys.readouterr().err
    for words in (
        ["--as-of", "yesterday"],
        ["--as-of", "2026-07-20T03:00:00"],
        ["--longest-lease", "0"],
        ["--token-above", "-1"],
    ):
        with pytest.raises(SystemExit) as ended:
            leasedjob.run(["restored", *words])
        assert ended.value.code == 2
    assert timedelta(seconds=verb.LONGEST_LEASE) == restore.LONGEST_LEASE


def test_not_while_operators_are_connected(database: Database) -> None:
    database.connect(application_name="leasedjob-operator").execute("SELECT 1")
    with pytest.raises(OperatorsConnectedError, match="scale them to 0"):
        tell(database)
    tell(database, dry_run=True)
    assert database.rows("SELECT FROM leasedjob.restore") == []
    tell(database, force=True)


def test_the_wait_and_the_token_that_were_asked_for(database: Database, minute: datetime) -> None:
    as_of = datetime.now(UTC) - timedelta(minutes=1)
    done = tell(database, as_of=as_of, longest_lease=timedelta(hours=1), token_above=5_000_000_000)
    assert (done.as_of, done.begins_at, done.token_to) == (as_of, as_of + timedelta(hours=1), 5_000_000_000)
    again = tell(database)
    assert again.token_from == 5_000_000_000
    assert again.token_to == 5_000_000_000 + restore.TOKEN_JUMP


def test_a_lock_held_elsewhere_changes_nothing(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "LOCK_TIMEOUT", "100ms")
    blocker = database.connect(autocommit=False)
    blocker.execute("LOCK TABLE leasedjob.job_scheduler IN ROW EXCLUSIVE MODE")
    with pytest.raises(DatabaseUnavailableError):
        tell(database)
    assert database.rows("SELECT last_value < 1000 AS low FROM leasedjob.fencing_token") == [{"low": True}]


# --- whole servers ---------------------------------------------------------------------------------------------------


async def test_to_a_point_in_time(tmp_path: Path, minute: datetime) -> None:
    """A base backup and the archived log, recovered to a moment before the loss, as a managed database does it."""
    archive, copy = folders(tmp_path)
    settings = {
        "wal_level": "replica",
        "archive_mode": "on",
        "archive_command": f"cp %p {archive}/%f",
        "max_wal_senders": "2",
    }
    with PostgresServer(settings=settings, durable=True) as server:
        server.create_owner(OWNER, OWNER_PASSWORD)
        server.create_database("lj", owner=OWNER)
        dsn = server.conninfo("lj", OWNER, OWNER_PASSWORD)
        with psycopg.connect(dsn, autocommit=True) as connection:
            migrate(connection)
        tool("pg_basebackup", f"--dbname={server.conninfo()}", f"--pgdata={copy / 'data'}", "--checkpoint=fast")
        async with operator_pool(Credentials.from_conninfo(dsn), max_size=2) as pool:
            store = OperatorStore(pool.connection)
            await registered(store)
            known = await claimed(store, minute)
            with psycopg.connect(dsn, autocommit=True, row_factory=dict_row) as connection:
                row = connection.execute("SELECT clock_timestamp() AS at").fetchone()
                assert row is not None
                point = row["at"]
            await asyncio.sleep(0.01)
            await registered(store, "shop/other")
            lost = await claimed(store, minute, code="shop/other")
        server.execute("SELECT pg_switch_wal()")
        password = server.password
    give_to_the_server(server, copy)
    recovery = {
        "restore_command": f"cp {archive}/%f %p",
        "recovery_target_time": point.isoformat(),
        "recovery_target_action": "promote",
    }
    with PostgresServer(directory=copy, settings=recovery, durable=True, password=password) as server:
        dsn = server.conninfo("lj", OWNER, OWNER_PASSWORD)
        deadline = time.monotonic() + 60
        while not recovered(dsn):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        assert leasedjob.run(["restored", "--database-url", dsn]) == 0
        async with operator_pool(Credentials.from_conninfo(dsn), max_size=2) as pool:
            store = OperatorStore(pool.connection)
            await registered(store, CODE, "shop/other")
            assert (await claim(store, request(minute))).verdict is ClaimVerdict.EXHAUSTED
            assert (await claim(store, request(minute, "shop/other"))).verdict is ClaimVerdict.PAST
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute("UPDATE leasedjob.restore SET begins_at = clock_timestamp()")
            tick = await later()
            after = await claim(store, request(tick, "shop/other"))
            assert (after.fencing_token or 0) > (lost.fencing_token or 0) > (known.fencing_token or 0)


async def test_the_database_moves_to_another_server(
    database: Database, minute: datetime, capsys: pytest.CaptureFixture[str]
) -> None:
    """As docs/howto-restore.md has it: operators stopped, dump, restore, the operators' Secret changed. Nothing was
    lost, so nothing has to be told but which roles are missing; leases go on."""
    async with operator_pool(database.credentials, max_size=2) as pool:
        store = OperatorStore(pool.connection)
        await registered(store)
        with connect_sync(database.credentials) as connection:
            held, token = await adopted(store, SidecarStore(connection), minute)
        async with await connect_async(database.credentials) as connection_:
            await ensure_tenant(connection_, CLUSTER, NAMESPACE, password="old")
    with PostgresServer() as target:
        target.create_owner(OWNER, OWNER_PASSWORD)
        target.create_database(database.name, owner=OWNER)
        dsn = target.conninfo(database.name, OWNER, OWNER_PASSWORD)
        source = database.server.conninfo(database.name, OWNER, OWNER_PASSWORD)
        dump, _ = tool("pg_dump", "--schema=leasedjob", f"--dbname={source}")
        # Rights of roles that the new server lacks can't be granted; everything else must be as it was.
        _, said = tool("psql", "--no-psqlrc", "--quiet", f"--dbname={dsn}", given=dump)
        assert all(b'role "leasedjob_' in line for line in said.splitlines() if b"ERROR" in line), said
        moved = Credentials.from_conninfo(dsn)
        async with await connect_async(moved) as connection_:
            state = await tenant_state(connection_, CLUSTER, NAMESPACE)
            assert state.in_force  # says the copy, and the role isn't there
        assert leasedjob.run(["moved", "--database-url", dsn]) == 0
        assert "1 roles of namespaces are not on this server" in capsys.readouterr().out
        async with await connect_async(moved) as connection_:
            assert not (await tenant_state(connection_, CLUSTER, NAMESPACE)).in_force
            role = await ensure_tenant(connection_, CLUSTER, NAMESPACE, password="new")
        # The lease that was held is held, by the same token; and no number was given out twice.
        with psycopg.connect(
            target.conninfo(database.name, role.role, "new"),
            autocommit=True,
            prepare_threshold=None,
            row_factory=dict_row,
        ) as connection:
            assert SidecarStore(connection).heartbeat(held.id, token).held
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute("SELECT leasedjob.request_stop('{}', 'no')")
        async with operator_pool(moved, max_size=2) as pool:
            store = OperatorStore(pool.connection)
            assert (await claim(store, request(minute))).verdict is ClaimVerdict.HELD
            assert UID in {row["uid"] for row in await _registrations(pool)}


async def _registrations(pool: Any) -> list[dict[str, Any]]:
    async with pool.connection() as connection, connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute("SELECT uid FROM leasedjob.job_registration")
        rows: list[dict[str, Any]] = await cursor.fetchall()
        return rows
