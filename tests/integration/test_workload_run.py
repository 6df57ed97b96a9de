"""current_run with a real lease: beside a real sidecar, and with a database alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from leasedjob import protocol
from leasedjob.errors import (
    DatabaseUnavailableError,
    LostJobLeaseError,
    OutcomeRefusedError,
    RunNotAcquiredError,
    SidecarUnavailableError,
)
from leasedjob.lease.store import OperatorStore
from leasedjob.protocol import Seen
from leasedjob.workload import Mode, Run, find_run
from leasedjob.workload.sidecar import Sidecar

from .conftest import CODE, Database
from .sidecar_parts import CALM, SHORT, Pod, Pods, free_port, pods_for
from .workload_parts import LONG

pytestmark = pytest.mark.integration

KEY = "2026-07-20T03:00:00Z"


@pytest.fixture
def pods(tmp_path: Path, database: Database, store: OperatorStore) -> Iterator[Pods]:
    yield from pods_for(tmp_path, database, store)


def run_in(pod: Pod, deadline: int | None = None) -> Run:
    """The run as a workload container of this Pod sees it."""
    row = pod.row()
    return find_run(
        {
            protocol.ENV_TYPE: "SCHEDULE",
            protocol.ENV_CODE: row["code"],
            protocol.ENV_RUN_KEY: row["run_key"],
            protocol.ENV_SCHEDULED_TIME: row["run_key"],
            protocol.ENV_IDEMPOTENCY_KEY: row["lock_key"],
            protocol.ENV_ATTEMPT: str(row["attempt"]),
            protocol.ENV_FENCING_TOKEN: str(row["fencing_token"]),
            protocol.ENV_SIDECAR_URL: f"http://127.0.0.1:{pod.report_port}",
            protocol.ENV_ACTIVE_DEADLINE: "" if deadline is None else str(deadline),
        }
    )


class TestBesideASidecar:
    async def test_complete_is_recorded_at_once(self, pods: Pods, minute: datetime) -> None:
        pod = await pods.pod(minute, CALM)
        pod.adopt_and_hold()
        before = datetime.now(UTC)
        run = run_in(pod, deadline=100)
        assert (run.mode, run.code, run.attempt, run.scheduled_time) == (Mode.SIDECAR, CODE, 1, minute)
        assert run.deadline is not None
        assert before + timedelta(seconds=40) < run.deadline < datetime.now(UTC) + timedelta(seconds=100)
        await asyncio.to_thread(run.complete, {"rows": 42, "bad": "a\0b"})
        row = pod.row()
        assert (row["status"], row["data"]) == ("SUCCESS", {"rows": 42, "bad": "a\ufffdb"})
        with pytest.raises(OutcomeRefusedError):
            await asyncio.to_thread(run_in(pod).fail, "another process says otherwise")
        assert pod.end(seconds=LONG).seen is Seen.REPORTED

    @pytest.mark.parametrize("outcome", ["fail", "release"])
    async def test_what_makes_it_claimable_is_recorded_at_the_end(
        self, outcome: str, pods: Pods, minute: datetime
    ) -> None:
        pod = await pods.pod(minute, CALM)
        pod.adopt_and_hold()
        run = run_in(pod)
        say = {"fail": lambda: run.fail(OSError("no route")), "release": lambda: run.release({"at": 17})}[outcome]
        await asyncio.to_thread(say)
        assert pod.row()["status"] == "RUNNING"
        pod.end(seconds=LONG)
        row = pod.row()
        data = {"fail": {"error": "no route", "type": "OSError"}, "release": {"at": 17, "released": True}}[outcome]
        assert (row["outcome"], row["data"]) == (outcome, data)

    async def test_a_lost_lease_is_heard_of_and_nothing_can_be_reported(
        self, pods: Pods, minute: datetime, database: Database
    ) -> None:
        pod = await pods.pod(minute, SHORT)
        pod.adopt_and_hold()
        run = run_in(pod)
        database.rows(
            "UPDATE leasedjob.job_scheduler SET owner_token = gen_random_uuid() WHERE id = %s::uuid", pod.lease_id
        )
        assert await asyncio.to_thread(run.lost.wait, LONG)
        with pytest.raises(LostJobLeaseError):
            run.raise_if_lost()
        with pytest.raises(LostJobLeaseError):
            await asyncio.to_thread(run.complete)
        assert pod.row()["status"] == "RUNNING"

    async def test_a_report_outlasts_a_database_that_is_away(self, pods: Pods, minute: datetime) -> None:
        pod = await pods.pod(minute, CALM)
        pod.adopt_and_hold()
        pod.await_beats(1)
        pod.proxy.mode = "refuse"
        pod.proxy.reset()
        reporting = asyncio.create_task(asyncio.to_thread(run_in(pod).complete))
        await asyncio.to_thread(pod.await_view, lambda v: bool(v["heartbeats"]["failed"] >= 1))
        assert not reporting.done()
        pod.proxy.mode = "pass"
        await reporting
        assert pod.row()["status"] == "SUCCESS"

    async def test_two_listeners_share_one_question(self, pods: Pods, minute: datetime) -> None:
        pod = await pods.pod(minute, CALM)
        pod.adopt_and_hold()
        sidecar = Sidecar(f"http://127.0.0.1:{pod.report_port}")
        seen: list[str] = []
        sidecar.subscribe(lambda view: seen.append(f"a {view.draining}"))
        sidecar.subscribe(lambda view: seen.append(f"b {view.draining}"))
        assert pod.run("drain") == 0
        until = time.monotonic() + LONG
        while not {"a True", "b True"} <= set(seen):
            assert time.monotonic() < until, seen
            await asyncio.sleep(0.02)


def test_a_sidecar_that_is_not_there() -> None:
    sidecar = Sidecar(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(SidecarUnavailableError, match="does not answer"):
        sidecar.look()
    from leasedjob.lease.rows import Outcome

    with pytest.raises(SidecarUnavailableError, match="may not be recorded"):
        sidecar.report(Outcome.COMPLETE, seconds=0.5)
    for url in ("", "https://x:1", "http://127.0.0.1"):
        with pytest.raises(ValueError, match="not a sidecar's address"):
            Sidecar(url)


class TestWithADatabase:
    def test_it_takes_the_run_and_records_its_end(self, database: Database) -> None:
        run = find_run({}, code="a", run_key=KEY, database=database.dsn)
        assert (run.mode, run.attempt) == (Mode.DATABASE, 1)
        (row,) = database.rows("SELECT * FROM leasedjob.job_scheduler")
        assert (row["status"], row["fencing_token"], row["lock_key"]) == (
            "RUNNING",
            run.fencing_token,
            run.idempotency_key,
        )
        with pytest.raises(RunNotAcquiredError):
            find_run({}, code="a", run_key=KEY, database=database.dsn)
        run.complete({"rows": 42})
        (row,) = database.rows("SELECT * FROM leasedjob.job_scheduler")
        assert (row["status"], row["data"]) == ("SUCCESS", {"rows": 42})
        with pytest.raises(RunNotAcquiredError):
            find_run({}, code="a", run_key=KEY, database=database.dsn)

    def test_a_failure_and_a_release_leave_it_to_the_next_one(self, database: Database) -> None:
        for attempt, end in enumerate(("fail", "release", "raise"), start=1):
            run = find_run({"LEASEDJOB_DATABASE_URL": database.dsn}, code="a", run_key=KEY)
            assert run.attempt == attempt
            if end == "fail":
                run.fail("no route")
            elif end == "release":
                run.release({"at": 17})
            else:
                with pytest.raises(OSError, match="disk"), run:
                    raise OSError("disk full")
            (row,) = database.rows("SELECT * FROM leasedjob.job_scheduler")
            assert (row["status"], row["data"]) == (
                "FAIL",
                {
                    "fail": {"error": "no route"},
                    "release": {"at": 17, "released": True},
                    "raise": {"error": "disk full", "type": "OSError"},
                }[end],
            )

    def test_a_run_that_somebody_else_has_now_is_lost(self, database: Database) -> None:
        run = find_run({}, code="a", run_key=KEY, database=database.dsn)
        database.rows("UPDATE leasedjob.job_scheduler SET owner_token = gen_random_uuid()")
        for _ in range(2):
            with pytest.raises(LostJobLeaseError):
                run.complete()
        (row,) = database.rows("SELECT * FROM leasedjob.job_scheduler")
        assert row["status"] == "RUNNING"

    def test_no_database(self) -> None:
        with pytest.raises(DatabaseUnavailableError):
            find_run({}, code="a", run_key=KEY, database=f"postgresql://127.0.0.1:{free_port()}/x")
