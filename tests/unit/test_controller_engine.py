"""What an object's reconcile does next: which of the wanted actions, and when the others."""

from __future__ import annotations

from datetime import UTC, datetime

from tests.unit import controller_builders as b

from leasedjob.controller.cache import Entry
from leasedjob.controller.decide import Claim, OverlapRule
from leasedjob.controller.engine import _name, _open
from leasedjob.lease.rows import JobSchedulerType

NOW = 1_000.0
CLAIM = Claim(JobSchedulerType.SCHEDULE, "2026-07-20T03:00:00Z", b.T0, OverlapRule.SKIP)
LATER = Claim(JobSchedulerType.SCHEDULE, "2026-07-20T03:01:00Z", b.T0, OverlapRule.SKIP)


def entry(**handled: float) -> Entry:
    made = Entry(b.NAMESPACE, b.JOB, b.JOB_UID, b.job_body(), datetime(2026, 7, 20, tzinfo=UTC))
    made.handled = {k.replace("_CLAIM", _name(CLAIM)): t for k, t in handled.items()}
    return made


def test_what_nobody_has_tried_is_taken() -> None:
    assert _open(entry(), [CLAIM, LATER], NOW) == ([CLAIM, LATER], [])


def test_what_was_taken_a_moment_ago_is_left_alone_and_asks_for_no_look() -> None:
    assert _open(entry(_CLAIM=NOW + 1), [CLAIM, LATER], NOW) == ([LATER], [])


def test_what_could_not_be_done_waits_for_its_time() -> None:
    held = entry(**{"again _CLAIM": NOW + 0.5})
    assert _open(held, [CLAIM, LATER], NOW) == ([LATER], [NOW + 0.5])
    assert _open(held, [CLAIM], NOW + 0.5) == ([CLAIM], [])


def test_what_waited_and_is_not_wanted_any_more_asks_for_no_look() -> None:
    """Else an object whose claim was answered elsewhere would be looked at again, and again, without a pause."""
    held = entry(**{"again _CLAIM": NOW + 0.5})
    assert _open(held, [], NOW) == ([], [])
    assert _open(held, [LATER], NOW + 60) == ([LATER], [])
    assert held.handled == {}
