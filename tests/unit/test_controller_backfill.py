"""What a backfill does about each tick, and which ticks it is about."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.unit import controller_builders as b

from leasedjob.api.v1alpha1 import BackfillSpec, PlannedAction, Reprocess
from leasedjob.controller.backfill import Planned, TickRuns, TickSpan, planned
from leasedjob.identity import RunIdentity, run_key_for
from leasedjob.lease.rows import JobSchedulerStatus, Run

RUNNING, SUCCESS, FAIL = JobSchedulerStatus.RUNNING, JobSchedulerStatus.SUCCESS, JobSchedulerStatus.FAIL
NONE, FAILED, ALL = Reprocess.NONE, Reprocess.FAILED, Reprocess.ALL
RUN, RETRY, REPROCESS, SKIP = PlannedAction.RUN, PlannedAction.RETRY, PlannedAction.REPROCESS, PlannedAction.SKIP

good, bad, active = b.run(SUCCESS), b.run(FAIL), b.run(RUNNING)
retrying = b.run(FAIL, retry_at=b.at(900))


@pytest.mark.parametrize(
    ("runs", "pruned", "reprocess", "expected"),
    [
        ((), False, NONE, (RUN, 0, "")),
        ((), False, ALL, (RUN, 0, "")),
        ((), True, NONE, (SKIP, 0, "Pruned")),
        ((good,), False, NONE, (SKIP, 0, "Succeeded")),
        ((good,), False, FAILED, (SKIP, 0, "Succeeded")),
        ((good,), False, ALL, (REPROCESS, 1, "")),
        ((good,), True, ALL, (SKIP, 0, "Pruned")),
        ((good,), True, NONE, (SKIP, 0, "Succeeded")),
        ((good, good), False, ALL, (REPROCESS, 2, "")),
        ((bad,), False, NONE, (SKIP, 0, "Failed")),
        ((bad,), False, FAILED, (RETRY, 0, "")),
        ((bad,), False, ALL, (RETRY, 0, "")),
        ((bad,), True, FAILED, (SKIP, 0, "Pruned")),
        # its latest run decides
        ((good, bad), False, NONE, (SKIP, 0, "Failed")),
        ((good, bad), False, FAILED, (RETRY, 1, "")),
        ((good, bad), False, ALL, (RETRY, 1, "")),
        ((bad, good), False, FAILED, (SKIP, 0, "Succeeded")),
        ((active,), False, ALL, (SKIP, 0, "Active")),
        ((retrying,), False, FAILED, (SKIP, 0, "Active")),
        ((good, active), False, ALL, (SKIP, 0, "Active")),
    ],
)
def test_what_is_done_about_a_tick(
    runs: tuple[Run, ...], pruned: bool, reprocess: Reprocess, expected: tuple[PlannedAction, int, str]
) -> None:
    found = planned(TickRuns(b.T0, runs, pruned), reprocess)
    assert (found.action, found.number, found.reason) == expected


def test_a_rerun_is_another_run_with_another_idempotency_key() -> None:
    keys = [Planned(b.T0, REPROCESS, n).run_key for n in range(3)]
    assert keys == ["2026-07-20T03:00:00Z", "2026-07-20T03:00:00Z#r1", "2026-07-20T03:00:00Z#r2"]
    assert len({RunIdentity.of(code=b.CODE, run_key=k).idempotency_key for k in keys}) == 3


def test_as_a_dry_run_shows_it() -> None:
    assert planned(TickRuns(b.T0, (good,)), ALL).shown().to_json() == {
        "tick": "2026-07-20T03:00:00Z", "action": "Reprocess", "runKey": "2026-07-20T03:00:00Z#r1",
    }  # fmt: skip
    assert planned(TickRuns(b.T0, (good,)), NONE).shown().to_json() == {
        "tick": "2026-07-20T03:00:00Z", "action": "Skip", "reason": "Succeeded",
    }  # fmt: skip


def test_both_ends_are_included_and_it_goes_on_behind_what_is_decided() -> None:
    last = b.T0 + timedelta(hours=3)
    span = TickSpan.of(BackfillSpec(from_=run_key_for(b.T0), to=run_key_for(last)))
    every = [b.T0 + timedelta(hours=n) for n in range(4)]
    assert list(span.ticks(b.HOURLY, span.start)) == every
    assert list(span.ticks(b.HOURLY, every[1])) == every[2:]
    assert list(span.ticks(b.HOURLY, last)) == []
    assert span.count(b.HOURLY, 10) == 4
    assert span.count(b.HOURLY, 2) == 3, "no more than one beyond the limit is counted"
