"""LeasedJobRuns: what they ask for, and what became of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit import controller_builders as b

from leasedjob.api.v1alpha1 import LeasedJobRunStatus, manual_run_key
from leasedjob.controller import manual
from leasedjob.controller.decide import Claim, decide
from leasedjob.identity import JobSchedulerType, RunIdentity
from leasedjob.lease.rows import JobSchedulerStatus, Run
from leasedjob.schedule import Timetable

RUNNING, SUCCESS, FAIL = JobSchedulerStatus.RUNNING, JobSchedulerStatus.SUCCESS, JobSchedulerStatus.FAIL
TICK = "2026-07-20T03:00:00Z"
OWN_KEY = manual_run_key(b.NAMESPACE, "now", "u1")


def status(body: b.Json | None = None, run: Run | None = None, **more: Any) -> b.Json:
    options: b.Json = {"code": b.CODE, "problem": "", "note": "", "now": b.at(100)}
    found = manual.status(body or b.run_body(), run=run, **options | more)
    LeasedJobRunStatus.model_validate(found)
    (condition,) = found["conditions"]
    assert condition["type"] == "Succeeded"
    truth = {"Succeeded": "True", "Failed": "False", "Cancelled": "False", "Refused": "False"}
    assert condition["status"] == truth.get(found["phase"], "Unknown")
    assert condition["reason"] == found["reason"]
    assert ("completionTime" in found) == (found["phase"] in manual.FINAL)
    return found


def own(status: JobSchedulerStatus = RUNNING, **more: Any) -> Run:
    return b.run(status, run_key=OWN_KEY, tick=None, manual=True, **more)


class TestKeys:
    def test_without_a_tick_it_is_a_run_of_its_own(self) -> None:
        assert manual.run_key(b.run_body()) == (OWN_KEY, None)

    def test_with_a_tick_it_is_that_tick_s_run(self) -> None:
        assert manual.run_key(b.run_body({"tick": TICK})) == (TICK, b.T0)
        assert manual.run_key(b.run_body({"tick": "2026-07-20T05:00:00+02:00"})) == (TICK, b.T0)

    @pytest.mark.parametrize(
        "tick", ["yesterday", "2026-07-20", "2026-07-20T03:00:00", "2026-07-20T03:00:00.5Z", "x" * 99]
    )
    def test_a_tick_that_can_t_be_read(self, tick: str) -> None:
        with pytest.raises(ValueError, match=r"spec\.tick"):
            manual.run_key(b.run_body({"tick": tick}))
        found = status(b.run_body({"tick": tick}))
        assert (found["phase"], found["reason"]) == ("Refused", "InvalidTick")
        assert manual.requests(b.CODE, [b.run_body({"tick": tick})]) == ()


class TestRequests:
    def test_what_is_asked_for(self) -> None:
        (found,) = manual.requests(b.CODE, [b.run_body({"cancel": True})])
        assert (found.uid, found.name, found.run_key, found.tick, found.cancel) == ("u1", "now", OWN_KEY, None, True)
        assert found.lock_key == RunIdentity.of(type=JobSchedulerType.SCHEDULE, code=b.CODE, run_key=OWN_KEY).lock_key

    def test_in_their_order(self) -> None:
        bodies = [b.run_body(uid=u) for u in ("u3", "u1", "u2")]
        assert [m.uid for m in manual.requests(b.CODE, bodies)] == ["u3", "u1", "u2"]

    @pytest.mark.parametrize("phase", sorted(manual.FINAL))
    def test_what_is_done_asks_for_nothing(self, phase: str) -> None:
        assert manual.requests(b.CODE, [b.run_body(status={"phase": phase})]) == ()

    @pytest.mark.parametrize("phase", ["", "Pending", "Running"])
    def test_what_is_not_done_does(self, phase: str) -> None:
        assert len(manual.requests(b.CODE, [b.run_body(status={"phase": phase})])) == 1

    def test_a_job_without_a_code_has_none(self) -> None:
        assert manual.requests("", [b.run_body()]) == ()

    def test_one_bad_request_does_not_spoil_the_others(self) -> None:
        bodies = [b.run_body({"tick": "?"}, uid="u1"), b.run_body(uid="u2")]
        assert [m.uid for m in manual.requests(b.CODE, bodies)] == ["u2"]


class TestTicks:
    """Only what the schedule names can be run as a tick."""

    def test_a_tick(self) -> None:
        assert manual.tick_refusal(b.policy(), b.T0) == ""

    def test_the_nearest_are_named(self) -> None:
        rome = b.policy(schedule=Timetable.of(["30 4 * * *"], "Europe/Rome"))
        assert manual.tick_refusal(rome, b.T0) == (
            'NotATick: spec.tick: 2026-07-20T03:00:00Z is no tick of "30 4 * * *" in Europe/Rome; '
            "the nearest: 2026-07-20T02:30:00Z and 2026-07-21T02:30:00Z"
        )

    def test_a_job_that_runs_once_has_none(self) -> None:
        found = manual.tick_refusal(b.policy(type=JobSchedulerType.INITIAL, schedule=None), b.T0)
        assert found.startswith("NotATick: spec.tick: a LeasedJob of type Initial has no ticks")

    def test_it_is_refused(self) -> None:
        (asked,) = manual.requests(b.CODE, [b.run_body({"tick": "2026-07-20T03:00:01Z"})], b.policy())
        found = status(b.run_body({"tick": "2026-07-20T03:00:01Z"}), note=asked.refusal)
        assert (found["phase"], found["reason"]) == ("Refused", "NotATick")
        assert "the nearest: 2026-07-20T03:00:00Z and 2026-07-20T04:00:00Z" in found["message"]

    def test_what_runs_goes_on_when_the_schedule_is_edited(self) -> None:
        """And can still be cancelled."""
        body = b.run_body({"tick": TICK, "cancel": True})
        (asked,) = manual.requests(b.CODE, [body], b.policy(schedule=Timetable.of(["30 * * * *"])))
        assert asked.refusal
        assert asked.cancel
        assert status(body, b.run(pod_uid="p"), note=asked.refusal)["phase"] == "Running"

    def test_a_job_that_is_not_accepted_has_not_said_what_its_ticks_are(self) -> None:
        (asked,) = manual.requests(b.CODE, [b.run_body({"tick": "2026-07-20T03:00:01Z"})])
        assert asked.refusal == ""

    def test_nothing_is_claimed_for_it(self) -> None:
        (asked,) = manual.requests(b.CODE, [b.run_body({"tick": "2026-07-20T02:59:59Z"})], b.policy())
        assert [a for a in decide(b.view(manual=(asked,))).actions if isinstance(a, Claim)] == []
        assert [a for a in decide(b.view(manual=(replace(asked, refusal=""),))).actions if isinstance(a, Claim)]


class TestStatus:
    @pytest.mark.parametrize(
        ("options", "phase", "reason", "message"),
        [
            ({}, "Pending", "Pending", "not claimed yet"),
            ({"problem": "LeasedJob x is not Ready"}, "Pending", "JobNotReady", "LeasedJob x is not Ready"),
            ({"note": "Overlap: another run is active"}, "Pending", "Overlap", "another run is active"),
            ({"note": "AlreadySucceeded: it is SUCCESS"}, "Refused", "AlreadySucceeded", "it is SUCCESS"),
            ({"note": "TickInTheFuture: not yet"}, "Refused", "TickInTheFuture", "not yet"),
            ({"note": "AlreadyFailed"}, "Refused", "AlreadyFailed", "AlreadyFailed"),
        ],
    )
    def test_before_its_claim(self, options: b.Json, phase: str, reason: str, message: str) -> None:
        found = status(**options)
        assert (found["phase"], found["reason"], found["message"]) == (phase, reason, message)
        assert (found["runKey"], found["code"]) == (OWN_KEY, b.CODE)

    def test_cancelled_before_it_began(self) -> None:
        assert status(b.run_body({"cancel": True}), note="Overlap: x")["phase"] == "Cancelled"

    @pytest.mark.parametrize(
        ("run", "phase", "reason"),
        [
            (own(), "Pending", "Claimed"),
            (own(pod_uid="p"), "Running", "Adopted"),
            (own(SUCCESS, pod_uid="p"), "Succeeded", "Completed"),
            (own(FAIL, pod_uid="p", reason="OOMKilled: container main exited with 137"), "Failed", "OOMKilled"),
            (own(FAIL, pod_uid="p"), "Failed", "Failed"),
            (own(FAIL, pod_uid="p", retry_at=b.at(200), reason="Error: x"), "Pending", "WaitingForRetry"),
            (own(FAIL, reason="Cancelled"), "Cancelled", "Cancelled"),
            (own(FAIL, pod_uid="p", reason="Cancelled: by a person"), "Cancelled", "Cancelled"),
            (own(FAIL, reason="PendingDeadlineExceeded: no room"), "Failed", "PendingDeadlineExceeded"),
        ],
    )
    def test_with_its_row(self, run: Run, phase: str, reason: str) -> None:
        found = status(run=run)
        assert (found["phase"], found["reason"]) == (phase, reason)
        assert found["attempt"] == 1
        assert found["startTime"] == b.rfc(0)
        if phase in manual.FINAL:
            assert found["completionTime"] == b.rfc(30), "of the run, not of this look at it"

    def test_a_cancel_that_came_too_late(self) -> None:
        assert status(b.run_body({"cancel": True}), own(SUCCESS, pod_uid="p"))["phase"] == "Succeeded"

    @pytest.mark.parametrize(
        ("run", "phase", "reason"),
        [
            (b.run(SUCCESS), "Refused", "AlreadySucceeded"),
            (b.run(FAIL), "Refused", "AlreadyFailed"),
            (b.run(FAIL, retry_at=b.at(200)), "Pending", "WaitingForRetry"),
            (b.run(pod_uid="p"), "Running", "Adopted"),
        ],
    )
    def test_the_run_of_a_tick_that_was_there_before(self, run: Run, phase: str, reason: str) -> None:
        found = status(b.run_body({"tick": TICK}, created=60), run)
        assert (found["phase"], found["reason"]) == (phase, reason)

    @pytest.mark.parametrize("created", [0, 30, 60])
    def test_it_was_there_before_whatever_the_clocks_say(self, created: int) -> None:
        """Also in the second in which it ended."""
        body = b.run_body({"tick": TICK}, created=created)
        assert status(body, b.run(SUCCESS))["reason"] == "AlreadySucceeded"
        assert status(body, b.run(FAIL, reason="Cancelled"))["reason"] == "AlreadyFailed"

    @pytest.mark.parametrize("created", [0, 30, 60])
    def test_a_run_that_was_claimed_for_it_is_its_own(self, created: int) -> None:
        body = b.run_body({"tick": TICK}, created=created)
        assert status(body, b.run(SUCCESS), mine=True)["phase"] == "Succeeded"
        assert status(body, b.run(FAIL), mine=True)["phase"] == "Failed"

    @pytest.mark.parametrize("row", [b.run(), b.run(pod_uid="p"), b.run(FAIL, retry_at=b.at(200))])
    def test_a_run_of_a_tick_that_was_seen_going_on_is_followed(self, row: Run) -> None:
        seen = status(b.run_body({"tick": TICK}, created=20), row)
        assert seen["phase"] in ("Pending", "Running")
        assert status(b.run_body({"tick": TICK}, created=20, status=seen), b.run(SUCCESS))["phase"] == "Succeeded"
        assert status(b.run_body({"tick": TICK}, created=20, status=seen), b.run(FAIL))["phase"] == "Failed"

    @pytest.mark.parametrize(("row", "phase"), [(own(SUCCESS, pod_uid="p"), "Succeeded"), (own(FAIL), "Failed")])
    def test_its_own_run_is_never_taken_for_an_earlier_one(self, row: Run, phase: str) -> None:
        """The database's clock is a minute behind the API server's."""
        assert status(b.run_body(created=60), row)["phase"] == phase

    def test_who_took_an_attempt_over_is_not_forgotten_by_a_replica_that_has_not_seen_it(self) -> None:
        told = status(run=own(attempt=1, pod_uid="p", pod_name="now-1", holder="c/n/now-1"))
        assert status(b.run_body(status=told), own(attempt=1))["podName"] == "now-1"
        assert status(b.run_body(status=told), own(attempt=1))["holder"] == "c/n/now-1"
        assert "podName" not in status(b.run_body(status=told), own(attempt=2))

    def test_the_condition_keeps_its_transition_time(self) -> None:
        before = status(run=own())
        body = b.run_body(status=before)
        after = status(body, own(pod_uid="p"), now=b.at(500))
        assert after["conditions"][0]["lastTransitionTime"] == b.rfc(100)
        over = status(b.run_body(status=after), own(SUCCESS, pod_uid="p"), now=b.at(500))
        assert over["conditions"][0]["lastTransitionTime"] == b.rfc(500)

    @pytest.mark.parametrize("text", ["x" * 300_000, "<&>" * 100_000, "\x00\x1b" * 9000, "ü" * 9000])
    def test_it_is_bounded(self, text: str) -> None:
        row = replace(own(FAIL, pod_uid="p"), reason=f"Error: {text}", holder=text, pod_name=text)
        stored = repr(status(run=row)).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
        assert len(stored.encode()) < 8192
        status(problem=text)
        status(note=f"Overlap: {text}")
