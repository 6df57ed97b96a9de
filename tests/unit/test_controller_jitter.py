"""jitterSeconds: the start moves, the run key doesn't."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from tests.unit import controller_builders as b

from leasedjob.controller.act import _deadline_ms
from leasedjob.controller.decide import Claim, Decision, RecordTicks, decide
from leasedjob.identity import run_key_for
from leasedjob.schedule import MissedRunPolicy, Timetable

TIMETABLE = Timetable.of(["0 * * * *"], code=b.CODE, jitter_seconds=1800)
(TICK, FOLLOWING) = TIMETABLE.preview(b.T0, 2)
START = TIMETABLE.start_of(TICK)
INSTANT = timedelta(microseconds=1)


def decided(now: datetime, watermark: datetime = TICK - INSTANT, **policy: Any) -> Decision:
    view = b.view(watermark=watermark, now=(now - b.T0).total_seconds(), schedule=TIMETABLE, **policy)
    assert view.now == now
    return decide(view)


def test_a_tick_waits_for_its_start_and_keeps_its_name() -> None:
    assert TICK < START < TICK + timedelta(seconds=1800)
    before = decided(START - INSTANT)
    assert before.actions == ()
    assert before.wake_at == START
    (claim,) = decided(START).actions
    assert isinstance(claim, Claim)
    assert (claim.tick, claim.run_key) == (TICK, run_key_for(TICK))
    done = decided(START, watermark=TICK)
    assert done.actions == ()
    assert done.wake_at == TIMETABLE.start_of(FOLLOWING)


def test_the_starting_deadline_counts_from_the_start() -> None:
    for missed in (MissedRunPolicy.RunAll, MissedRunPolicy.RunLatest):
        (claim,) = decided(START + timedelta(seconds=60), starting_deadline=60, missed=missed).actions
        assert isinstance(claim, Claim)
        (late,) = decided(START + timedelta(seconds=61), starting_deadline=60, missed=missed).actions
        assert isinstance(late, RecordTicks)
    # the database judges from the tick
    policy = b.policy(schedule=TIMETABLE, starting_deadline=60)
    assert _deadline_ms(policy, TICK) == 60_000 + (START - TICK) // timedelta(milliseconds=1)
    assert _deadline_ms(policy, None) == 60_000
    assert _deadline_ms(b.policy(schedule=TIMETABLE), TICK) is None


def test_what_skip_takes_for_missed_counts_from_the_start() -> None:
    (claim,) = decided(START + timedelta(seconds=59), missed=MissedRunPolicy.Skip).actions
    assert isinstance(claim, Claim)
    (late,) = decided(START + timedelta(seconds=61), missed=MissedRunPolicy.Skip).actions
    assert isinstance(late, RecordTicks)


def test_two_clusters_find_the_same_start() -> None:
    body = b.job_body({"jitterSeconds": 1800})
    east, west = b.entry(body).policy, b.entry(body).policy
    assert east is not None
    assert west is not None
    assert east.schedule == west.schedule == TIMETABLE
