"""The schema is upgraded while programs of an earlier version hold leases: they beat and end as before.

The statements are written out as earlier versions send them: what a version has sent once must be understood for good.
"""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from leasedjob.identity import RunIdentity, run_key_for
from leasedjob.lease import JobAcquireOptions, JobLease, NotAcquired, SyncJobSchedulerService
from leasedjob.lease.migrate import Migration, check, migrate, migrations

from .conftest import CLUSTER, CODE, UID, Database

pytestmark = pytest.mark.integration

SENT = {
    "register": "SELECT * FROM leasedjob.register_jobs(%(cluster)s, %(jobs)s::jsonb)",
    "claim": "SELECT * FROM leasedjob.claim_runs(%(cluster)s, %(requests)s::jsonb) ORDER BY ordinal",
    "renew": "SELECT leasedjob.renew_claims(%(cluster)s, %(ids)s::uuid[]) AS renewed",
    "adopt": "SELECT * FROM leasedjob.adopt(%(id)s, %(claim_token)s, %(new_token)s, %(pod_uid)s, %(pod_name)s)",
    "heartbeat": "SELECT * FROM leasedjob.heartbeat(%(id)s, %(token)s)",
    "finish": "SELECT leasedjob.finish(%(id)s, %(token)s, %(outcome)s, %(data)s::jsonb) AS recorded",
    "end_attempt": "SELECT leasedjob.end_attempt(%(id)s, %(attempt)s, %(pod_uid)s, %(outcome)s, %(counts)s, "
    "%(retry_ms)s, %(reason)s, %(data)s::jsonb) AS changed",
    # From 0002 on.
    "acquire": "SELECT a.verdict, (a.job).id, (a.job).status, (a.job).attempt, (a.job).fencing_token "
    "FROM leasedjob.acquire(%(lock_key)s, %(type)s::leasedjob.job_scheduler_type, %(code)s, %(run_key)s, %(name)s, "
    "%(lease_ms)s, %(token)s, %(holder)s) a",
}
RUN_KEY = "2026-07-20T03:00:00Z"


class Program:
    """One of an earlier version, with a connection of its own that stays open over the upgrade."""

    def __init__(self, database: Database) -> None:
        self.connection: psycopg.Connection[dict[str, Any]] = database.connect()

    def ask(self, statement: str, /, **parameters: Any) -> dict[str, Any]:
        row = self.connection.execute(SENT[statement], parameters).fetchone()
        assert row is not None
        return row

    def acquire(self, token: UUID, run_key: str = RUN_KEY) -> dict[str, Any]:
        identity = RunIdentity.of(code="sync", run_key=run_key)
        return self.ask(
            "acquire",
            lock_key=identity.lock_key,
            type="SCHEDULE",
            code=identity.code,
            run_key=identity.run_key,
            name="",
            lease_ms=900_000,
            token=token,
            holder="old",
        )

    def claim(self, tick: datetime) -> dict[str, Any]:
        identity = RunIdentity.of(code=CODE, run_key=run_key_for(tick))
        request = {
            "ordinal": 0,
            "type": "SCHEDULE",
            "code": CODE,
            "run_key": identity.run_key,
            "lock_key": identity.lock_key,
            "tick": tick.isoformat(),
            "name": "",
            "namespace": "shop",
            "job_name": "sync-orders",
            "job_uid": UID,
            "tenant": "east/shop",
            "lease_ms": 60_000,
            "run_lease_ms": 900_000,
            "on_overlap": "allow",
            "starting_deadline_ms": None,
            "backoff_limit": 1,
            "interruption_limit": 20,
            "manual": False,
            "reopen": False,
            "dropped": [],
        }
        return self.ask("claim", cluster=CLUSTER, requests=json.dumps([request]))

    def register(self) -> None:
        job = {
            "ordinal": 0,
            "code": CODE,
            "uid": UID,
            "namespace": "shop",
            "name": "sync-orders",
            "created_at": (datetime.now(UTC) - timedelta(days=1)).isoformat(),
            "schedule_hash": "s",
            "spec_hash": "s",
            "policy": "Allow",
            "suspended": False,
        }
        assert not self.ask("register", cluster=CLUSTER, jobs=json.dumps([job]))["busy"]


def adopted(program: Program, claim: dict[str, Any]) -> UUID:
    token = uuid4()
    answer = program.ask(
        "adopt", id=claim["id"], claim_token=claim["owner_token"], new_token=token, pod_uid="pod", pod_name="pod"
    )
    assert answer["verdict"] == "adopted"
    return token


@pytest.mark.parametrize("version", range(1, len(migrations())), ids=lambda n: f"from-{migrations()[n - 1]}")
def test_holders_of_an_earlier_schema_go_on(empty_database: Database, version: int, minute: datetime) -> None:
    first, rest = migrations()[:version], migrations()[version:]
    migrate(empty_database.connect(), first)
    old = Program(empty_database)
    old.register()
    held, waiting, pending = (old.claim(minute + timedelta(seconds=n)) for n in range(3))
    assert {claim["verdict"] for claim in (held, waiting, pending)} == {"claimed"}
    token = adopted(old, held)
    library = uuid4()
    acquired = old.acquire(library) if version >= 2 else None

    over = threading.Event()
    beats: list[bool] = []

    def beat() -> None:
        beating = Program(empty_database)
        while not over.is_set():
            beats.append(beating.ask("heartbeat", id=held["id"], token=token)["held"])

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        assert migrate(empty_database.connect()) == list(rest)
        check(empty_database.connect())
    finally:
        over.set()
        beating.join(60)
    assert len(beats) > 1
    assert all(beats)

    # An operator's run: renewed, adopted, finished by its Pod; another one ended by the operator, and claimed again.
    assert old.ask("renew", cluster=CLUSTER, ids=[waiting["id"], pending["id"]])["renewed"] != []
    assert old.ask("finish", id=held["id"], token=token, outcome="complete", data='{"rows": 1}')["recorded"]
    assert empty_database.row(held["id"])["status"] == "SUCCESS"
    token = adopted(old, waiting)
    assert old.ask("heartbeat", id=waiting["id"], token=token)["held"]
    assert old.ask(
        "end_attempt",
        id=waiting["id"],
        attempt=1,
        pod_uid="pod",
        outcome="fail",
        counts=True,
        retry_ms=0,
        reason="Error",
        data=None,
    )["changed"]
    again = old.claim(minute + timedelta(seconds=1))
    assert (again["verdict"], again["attempt"]) == ("claimed", 2)
    assert again["fencing_token"] > pending["fencing_token"]
    assert old.claim(minute)["verdict"] == "completed"

    # A program of the library, and one of this version beside it.
    new = SyncJobSchedulerService(empty_database.dsn)
    if acquired is None:
        assert old.acquire(library)["verdict"] == "acquired"
    else:
        assert acquired["verdict"] == "acquired"
        assert old.acquire(library)["attempt"] == 1  # its answer was lost: it finds its own row
    rival = new.acquire(JobAcquireOptions(code="sync", run_key=RUN_KEY))
    assert not rival.acquired
    assert rival.reason is NotAcquired.HELD
    row = empty_database.rows("SELECT * FROM leasedjob.job_scheduler WHERE code = 'sync'")[0]
    assert old.ask("heartbeat", id=row["id"], token=library)["held"]
    assert new.heartbeat(JobLease(row["id"], library))
    assert old.ask("finish", id=row["id"], token=library, outcome="complete", data=None)["recorded"]
    assert old.acquire(uuid4())["verdict"] == "completed"


def test_an_upgrade_that_fails_leaves_holders_where_they_were(empty_database: Database) -> None:
    connection = empty_database.connect()
    migrate(connection)
    old, token = Program(empty_database), uuid4()
    acquired = old.acquire(token)
    broken = Migration(len(migrations()) + 1, "broken", "DELETE FROM leasedjob.job_scheduler; SELECT 1/0")
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate(connection, (*migrations(), broken))
    assert old.ask("heartbeat", id=acquired["id"], token=token)["held"]
    assert old.ask("finish", id=acquired["id"], token=token, outcome="fail", data=None)["recorded"]
    assert old.acquire(uuid4())["attempt"] == 2
