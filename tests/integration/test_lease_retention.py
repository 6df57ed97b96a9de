"""Deleting old runs while others claim, acquire and end them: what succeeded once never runs again.

What pruning means for a caller is in test_lease_contract.py.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from leasedjob.cli import leasedjob
from leasedjob.controller.retention import Retention
from leasedjob.errors import DatabaseUnavailableError
from leasedjob.identity import RunIdentity, run_key_for, tick_of
from leasedjob.lease import (
    JobAcquired,
    JobAcquireOptions,
    JobSchedulerService,
    NotAcquired,
    SyncJobSchedulerService,
    retention,
)
from leasedjob.lease.core import Ask, Pause
from leasedjob.lease.rows import ClaimVerdict, JobSchedulerStatus, Outcome, OverlapRule
from leasedjob.lease.store import OperatorStore

from .conftest import CLUSTER, CODE, Database, claim, claimed, registered, request
from .lease_backends import eager

pytestmark = pytest.mark.integration
AT_ONCE = timedelta(microseconds=1)
OLD = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
def jobs(database: Database) -> SyncJobSchedulerService:
    return eager(SyncJobSchedulerService(database.dsn))


def done(jobs: SyncJobSchedulerService, key: str, code: str = "sync") -> JobAcquired:
    result = jobs.acquire(JobAcquireOptions(code=code, run_key=key))
    assert isinstance(result, JobAcquired)
    assert jobs.complete(result.lease)
    return result


# --- ticks -----------------------------------------------------------------------------------------------------------

KEYS = [
    "2026-07-20T03:00:00Z",
    "2026-07-20T03:00:00Z#r1",
    "2024-02-29T23:59:59Z#r999999999",
    "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:59Z",
    *("2023-02-29T00:00:00Z", "2026-04-31T00:00:00Z", "1900-02-29T00:00:00Z", "2000-02-29T00:00:00Z"),
    *("2026-13-01T00:00:00Z", "2026-00-01T00:00:00Z", "2026-01-00T00:00:00Z", "2026-01-32T00:00:00Z"),
    *("2026-01-01T24:00:00Z", "2026-01-01T23:60:00Z", "2026-01-01T23:59:60Z", "0000-01-01T00:00:00Z"),
    *("2026-01-01T00:00:00Z\n", " 2026-01-01T00:00:00Z", "2026-01-01T00:00:00z", "2026-01-01 00:00:00Z"),
    *("2026-01-01T00:00:00Z#r0", "2026-01-01T00:00:00Z#r01", "2026-01-01T00:00:00Z#r1234567890", "", "k"),
    "٢٠٢٦-01-01T00:00:00Z",
]


def test_the_database_reads_a_tick_as_the_library_does(database: Database) -> None:
    generator = random.Random(7)
    keys = KEYS + [
        f"{generator.choice((1, 4, 1999, 2024, 9999)):04d}-{generator.randrange(14):02d}-{generator.randrange(33):02d}"
        f"T{generator.randrange(25):02d}:{generator.randrange(61):02d}:{generator.randrange(62):02d}Z"
        for _ in range(2_000)
    ]
    rows = database.rows("SELECT k, leasedjob.tick_of(k) AS tick FROM unnest(%s::text[]) k", keys)
    assert {row["k"]: row["tick"] for row in rows} == {key: tick_of(key) for key in keys}
    assert sum(row["tick"] is not None for row in rows) > 100


# --- what an operator's runs need ------------------------------------------------------------------------------------


async def test_runs_of_an_operator_go_behind_the_watermark(
    store: OperatorStore, database: Database, jobs: SyncJobSchedulerService, minute: datetime
) -> None:
    await registered(store, policy="Allow")
    ticks = [minute + timedelta(minutes=n) for n in range(4)]
    for tick in ticks[:3]:
        run = await claimed(store, tick, on_overlap=OverlapRule.ALLOW)
        assert run.id is not None
        assert run.attempt is not None
        outcome = Outcome.FAIL if tick == ticks[1] else Outcome.COMPLETE
        assert await store.end_attempt(run.id, run.attempt, None, outcome, counts=True, reason="", retry_ms=10**7)
    # The one with a retry left stays, and the mark never passes what may still be claimed.
    (pruned,) = jobs.prune(AT_ONCE, keep_last=0)
    assert (pruned.code, pruned.rows, pruned.through) == (CODE, 2, ticks[2])
    (left,) = (await store.recent_runs(CLUSTER, [CODE], 10))[CODE]
    assert (left.tick, left.status) == (ticks[1], JobSchedulerStatus.FAIL)
    database.due(left.id)
    assert (await claimed(store, ticks[1], on_overlap=OverlapRule.ALLOW)).attempt == 2
    # By schedule and by name.
    assert (await claim(store, request(ticks[0]))).verdict is ClaimVerdict.PAST
    answers = await store.claim_runs(
        CLUSTER, [request(ticks[2], manual=True, reopen=True), request(ticks[3]), request(ticks[0], manual=True)]
    )
    assert [answer.verdict for answer in answers] == [
        ClaimVerdict.PRUNED,
        ClaimVerdict.OVERLAP_SKIPPED,
        ClaimVerdict.PRUNED,
    ]
    assert database.watermark() == ticks[3]


async def test_a_tick_that_ran_by_name_before_its_turn_does_not_hide_the_ones_before_it(
    store: OperatorStore, jobs: SyncJobSchedulerService, minute: datetime
) -> None:
    await registered(store)
    first = await claimed(store, minute)
    assert first.id is not None
    assert await store.end_attempt(first.id, 1, None, Outcome.COMPLETE, counts=True, reason="")
    by_name = await claimed(store, minute + timedelta(minutes=2), manual=True)
    assert by_name.id is not None
    assert await store.end_attempt(by_name.id, 1, None, Outcome.COMPLETE, counts=True, reason="")
    (pruned,) = jobs.prune(AT_ONCE, keep_last=0)
    assert (pruned.rows, pruned.through) == (1, minute)
    assert (await claimed(store, minute + timedelta(minutes=1))).attempt == 1


async def test_the_runs_that_a_status_shows_stay(
    store: OperatorStore, jobs: SyncJobSchedulerService, minute: datetime
) -> None:
    await registered(store, policy="Allow")
    for n in range(12):
        run = await claimed(store, minute + timedelta(seconds=n), on_overlap=OverlapRule.ALLOW)
        assert run.id is not None
        assert await store.end_attempt(run.id, 1, None, Outcome.COMPLETE, counts=True, reason="")
    before = [run.id for run in (await store.recent_runs(CLUSTER, [CODE], retention.KEEP_LAST))[CODE]]
    (pruned,) = jobs.prune(AT_ONCE)
    assert pruned.rows == 2
    assert [run.id for run in (await store.recent_runs(CLUSTER, [CODE], 100))[CODE]] == before


# --- while others are at it ------------------------------------------------------------------------------------------


def test_nothing_is_deleted_while_a_transaction_from_before_the_mark_is_open(
    database: Database, jobs: SyncJobSchedulerService
) -> None:
    done(jobs, run_key_for(OLD))
    early = database.connect(autocommit=False)
    early.execute("SELECT 1")
    with ThreadPoolExecutor(1) as thread:
        pruning = thread.submit(jobs.prune, AT_ONCE, keep_last=0)
        while not database.rows("SELECT code FROM leasedjob.pruned_through"):
            assert not pruning.done()
            time.sleep(0.01)
        time.sleep(0.5)
        assert len(database.rows("SELECT id FROM leasedjob.job_scheduler")) == 1
        early.rollback()
        (pruned,) = pruning.result(60)
    assert pruned.rows == 1
    assert database.rows("SELECT id FROM leasedjob.job_scheduler") == []


def test_a_transaction_that_does_not_end_is_named_and_nothing_is_deleted() -> None:
    now = 0.0

    def carry_out() -> None:
        nonlocal now
        talk = retention.prune(AT_ONCE, 0, dry_run=False, settle=60, clock=lambda: now, patience=600)
        step: Any = next(talk)
        assert (step.name, step.long) == ("mark_pruned", True)
        step = talk.send([{"code": "a", "rows": 1, "through": OLD, "marked_at": OLD}])
        while True:
            if isinstance(step, Pause):
                now += step.seconds
                step = talk.send([])
            else:
                assert step.name == "open_since"
                step = talk.send([{"transactions": 3}])

    with pytest.raises(DatabaseUnavailableError, match="3 transactions"):
        carry_out()
    assert now > 660


def test_a_row_that_is_locked_is_left_for_the_next_time(database: Database, jobs: SyncJobSchedulerService) -> None:
    result = done(jobs, run_key_for(OLD))
    stranger = database.connect(autocommit=False)
    blocker = threading.Event()

    class Holding(SyncJobSchedulerService):
        """The stranger comes after the mark, so that he is not waited for."""

        def _ask(self, ask: Ask) -> Any:
            if ask.name == "delete_pruned" and not blocker.is_set():
                stranger.execute("SELECT FROM leasedjob.job_scheduler WHERE id = %s FOR UPDATE", (result.id,))
                blocker.set()
            return super()._ask(ask)

    (pruned,) = eager(Holding(database.dsn)).prune(AT_ONCE, keep_last=0)
    assert pruned.rows == 0
    stranger.rollback()
    again = jobs.acquire(JobAcquireOptions(code="sync", run_key=run_key_for(OLD)))
    assert again.acquired is False
    assert again.reason is NotAcquired.COMPLETED  # still known
    assert [item.rows for item in jobs.prune(AT_ONCE, keep_last=0)] == [1]


def test_many_rows_go_some_at_a_time(
    database: Database, jobs: SyncJobSchedulerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(25):
        done(jobs, run_key_for(OLD + timedelta(days=n)))
    asked: Counter[str] = Counter()

    class Counting(SyncJobSchedulerService):
        def _ask(self, ask: Ask) -> Any:
            asked[ask.name] += 1
            if ask.name == "delete_pruned":
                ask.parameters["limit"] = 10
            return super()._ask(ask)

    monkeypatch.setattr(retention.prune, "__kwdefaults__", {**retention.prune.__kwdefaults__, "batch": 10})
    assert [item.rows for item in eager(Counting(database.dsn)).prune(AT_ONCE, keep_last=0)] == [25]
    assert asked == {"mark_pruned": 1, "open_since": 1, "delete_pruned": 3}


def test_racing_claims_never_run_what_has_succeeded(database: Database, jobs: SyncJobSchedulerService) -> None:
    """Every actor asks for the same old runs again and again, while two prune: each run succeeds at most once."""
    keys = [run_key_for(OLD + timedelta(hours=n)) for n in range(150)]
    succeeded: Counter[str] = Counter()
    lock = threading.Lock()
    over = threading.Event()
    reasons: Counter[str] = Counter()

    def act(seed: int) -> None:
        generator = random.Random(seed)
        with psycopg.connect(database.dsn, autocommit=True, prepare_threshold=None) as mine:
            own = SyncJobSchedulerService(lambda: contextlib.nullcontext(mine))  # type: ignore[arg-type]
            while not over.is_set():
                key = generator.choice(keys)
                result = own.acquire(JobAcquireOptions(code="sync", run_key=key))
                if not result.acquired:
                    with lock:
                        reasons[result.reason] += 1
                elif generator.random() < 0.3:
                    own.fail(result.lease)
                else:
                    with lock:
                        succeeded[key] += 1
                    assert own.complete(result.lease)

    def prune() -> int:
        gone = 0
        while not over.is_set():
            gone += sum(item.rows for item in jobs.prune(AT_ONCE, keep_last=20))
        return gone

    with ThreadPoolExecutor(8) as threads:
        actors = [threads.submit(act, n) for n in range(6)]
        pruners = [threads.submit(prune) for _ in range(2)]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.1)
            with lock:
                busy = sum(succeeded.values()) < 30 or reasons["pruned"] < 300
            if not busy:
                break
        over.set()
        for actor in actors:
            actor.result(60)
        gone = sum(pruner.result(60) for pruner in pruners)
    assert gone > 0
    assert reasons["pruned"] > 0
    assert max(succeeded.values()) == 1


# --- the operator ----------------------------------------------------------------------------------------------------


async def test_operators_prune_by_themselves(
    database: Database, jobs: SyncJobSchedulerService, caplog: pytest.LogCaptureFixture
) -> None:
    for day in range(12):
        done(jobs, run_key_for(OLD + timedelta(days=day)))
    database.rows(
        "UPDATE leasedjob.job_scheduler SET created_at = created_at - interval '91 days', "
        "finished_at = finished_at - interval '91 days'"
    )
    caplog.set_level("INFO")
    await Retention(eager(JobSchedulerService(database.dsn)), 92, 0).step()
    assert not caplog.records
    await Retention(eager(JobSchedulerService(database.dsn)), 90, 0).step()
    assert [record.getMessage() for record in caplog.records] == [
        "deleted 2 runs of 1 codes that ended more than 90 days ago"
    ]
    await Retention(eager(JobSchedulerService("host=127.0.0.1 port=1")), 90, 90).step()
    assert caplog.records[-1].levelname == "WARNING"


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line(
    database: Database,
    jobs: SyncJobSchedulerService,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(SyncJobSchedulerService, "_settle_seconds", 0.0)
    for day in range(3):
        done(jobs, run_key_for(OLD + timedelta(days=day)))
    database.rows(
        "UPDATE leasedjob.job_scheduler SET created_at = created_at - interval '91 days', "
        "finished_at = finished_at - interval '91 days'"
    )
    words = ["prune", "--older-than", "90d", "--keep-last", "1", "--database-url", database.dsn]
    assert leasedjob.run([*words, "--dry-run"]) == 0
    none = "0 records of ticks that did not run"
    assert capsys.readouterr().out.splitlines() == [
        "sync: would delete 2 up to 2020-01-02T00:00:00Z",
        "would delete 2 runs of 1 codes",
        f"would delete {none}",
    ]
    assert leasedjob.run(words) == 0
    assert capsys.readouterr().out.splitlines() == [
        "sync: deleted 2 up to 2020-01-02T00:00:00Z",
        "deleted 2 runs of 1 codes",
        f"deleted {none}",
    ]
    assert leasedjob.run(words) == 0
    assert capsys.readouterr().out.splitlines() == ["deleted 0 runs of 0 codes", f"deleted {none}"]
    assert leasedjob.run(["prune", "--older-than", "1d", "--database-url", "host=127.0.0.1 port=1"]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--older-than", "90"],
        ["--older-than", "0d"],
        ["--older-than", "-1d"],
        ["--older-than", "1y"],
        ["--older-than", "1.5d"],
        ["--older-than", "1d", "--keep-last", "-1"],
        ["--older-than", "1d", "--keep-last", "x"],
    ],
)
def test_usage_errors(words: list[str]) -> None:
    with pytest.raises(SystemExit) as done:
        leasedjob.run(["prune", *words])
    assert done.value.code == 2


def test_identities_are_what_marks_are_about() -> None:
    assert tick_of(RunIdentity.of(code="x", run_key=run_key_for(OLD, 3)).run_key) == OLD
