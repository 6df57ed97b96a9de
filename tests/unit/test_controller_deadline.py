"""By when a job has to succeed again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit import controller_builders as b

from leasedjob.controller.cache import Entry
from leasedjob.controller.deadline import deadline_of, last_success, success_deadline
from leasedjob.lease.rows import JobSchedulerStatus, LedgerEntry
from leasedjob.schedule import TickReason, Timetable

CREATED = datetime(2026, 7, 1, tzinfo=UTC)


def instant(text: str) -> datetime:
    return datetime.fromisoformat(f"2026-07-{text}:00+00:00")


def ledger(last: str, reason: TickReason) -> LedgerEntry:
    at = instant(last)
    return LedgerEntry(
        code=b.CODE, first=at, last=at, count=1, count_is_exact=True, kind=reason.kind, reason=reason.value,
        decided_by="east", decided_at=at,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "success", "deadline"),
    [
        ("0 * * * *", "20T10:05", "20T12:00"),  # the tick of 11:00 has until that of 12:00
        ("0 * * * *", "20T11:00", "20T13:00"),
        ("0 3 * * *", "20T03:40", "22T03:00"),
        ("0 3 * * mon-fri", "17T03:40", "21T03:00"),  # a Friday: Monday's tick has until Tuesday
        ("* * * * *", "20T10:00", "20T10:06"),  # a minute would be no time for anybody to act in
    ],
)
def test_a_tick_has_until_the_next_one(schedule: str, success: str, deadline: str) -> None:
    found = success_deadline(Timetable.of([schedule]), success=instant(success), created=CREATED)
    assert found == instant(deadline)


def test_a_grace_of_ones_own() -> None:
    hourly, grace = Timetable.of(["0 * * * *"]), timedelta(minutes=20)
    assert success_deadline(hourly, success=instant("20T10:05"), created=CREATED, grace=grace) == instant("20T11:20")


def test_a_job_that_never_succeeded_counts_from_its_creation() -> None:
    assert success_deadline(b.HOURLY, success=None, created=instant("20T09:30")) == instant("20T11:00")


def test_a_success_before_the_creation_is_a_predecessors() -> None:
    found = success_deadline(b.HOURLY, success=instant("01T00:00"), created=instant("20T09:30"))
    assert found == instant("20T11:00")


def test_jitter_comes_on_top() -> None:
    late = Timetable.of(["0 * * * *"], jitter_seconds=3000, code="shop/x")
    found = success_deadline(late, success=instant("20T10:55"), created=CREATED)
    assert found == late.start_of(instant("20T12:00")) > instant("20T12:00")


@pytest.mark.parametrize(
    ("reason", "deadline"),
    [
        (TickReason.Suspended, "20T17:00"),
        (TickReason.SuspendedAfterFailures, "20T17:00"),
        (TickReason.ScheduleEdited, "20T17:00"),
        (TickReason.StartingDeadline, "20T12:00"),
        (TickReason.MissedRunPolicy, "20T12:00"),
    ],
)
def test_only_ticks_that_somebody_wanted_not_to_run_are_excused(reason: TickReason, deadline: str) -> None:
    found = success_deadline(
        b.HOURLY, success=instant("20T10:05"), created=CREATED, ledger=[ledger("20T15:00", reason)]
    )
    assert found == instant(deadline)


def test_no_deadline_where_no_tick_comes_any_more() -> None:
    over = Timetable.of(["0 * * * *"], not_after=instant("20T10:00"))
    assert success_deadline(over, success=instant("20T10:05"), created=CREATED) is None


def test_the_last_tick_of_all_has_the_least_grace() -> None:
    over = Timetable.of(["0 * * * *"], not_after=instant("20T11:00"))
    assert success_deadline(over, success=instant("20T10:05"), created=CREATED) == instant("20T11:05")


def entry(**spec: Any) -> Entry:
    found = b.entry(b.job_body({"schedule": "0 * * * *", **spec}))
    found.created_at = CREATED
    return found


def test_the_latest_success_of_rows_and_status_counts() -> None:
    job = entry()
    assert last_success(job) is None
    job.body = {**job.body, "status": {"lastSuccessfulTime": "2026-07-20T01:02:03Z"}}
    assert last_success(job) == datetime(2026, 7, 20, 1, 2, 3, tzinfo=UTC)
    done, failed = (
        b.run(JobSchedulerStatus.SUCCESS, finished_at=b.at(60)),
        b.run(JobSchedulerStatus.FAIL, finished_at=b.at(999)),
    )
    job.rows = {done.id: done}
    assert last_success(job) == b.at(60)
    job.rows = {failed.id: failed}
    assert last_success(job) == datetime(2026, 7, 20, 1, 2, 3, tzinfo=UTC)


def test_a_jobs_deadline_follows_from_its_spec() -> None:
    done = b.run(JobSchedulerStatus.SUCCESS, finished_at=b.at(60))  # 03:01

    def deadline(**spec: Any) -> datetime | None:
        job = entry(**spec)
        job.rows = {done.id: done}
        return deadline_of(job)

    assert deadline() == instant("20T05:00")
    assert deadline(monitoring={"graceSeconds": 600}) == instant("20T04:10")
    assert deadline(suspend=True) is None
    assert deadline(schedule="not one") is None
    assert deadline(type="Initial", schedule=None) is None


def test_what_the_ledger_says_is_asked() -> None:
    job = entry()
    job.state = SimpleNamespace(ledger=(ledger("20T15:00", TickReason.Suspended),))  # type: ignore[assignment]
    assert deadline_of(job) == instant("20T17:00")
