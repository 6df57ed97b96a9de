"""LeasedJob and LeasedJobRun as values: defaults, timing, run keys, and a status that can't outgrow its object."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from leasedjob.api.problem import Problem, Reason
from leasedjob.api.v1alpha1 import (
    BackfillSpec,
    ConcurrencyPolicy,
    Condition,
    ConditionStatus,
    ExitZeroOnStop,
    JobType,
    LeasedJobRunSpec,
    LeasedJobRunStatus,
    LeasedJobSpec,
    LeasedJobStatus,
    Reprocess,
    RunPhase,
    RunStatus,
    bounded,
    manual_run_key,
    parse_run,
)
from leasedjob.identity import JobSchedulerType
from leasedjob.lease.trust import Timing
from leasedjob.schedule import ClockChangePolicy, MissedRunPolicy

TEMPLATE: dict[str, Any] = {"spec": {"containers": [{"name": "main", "image": "i:1"}]}}
NOW = datetime(2026, 7, 20, 3, tzinfo=UTC)


def spec(**fields: Any) -> LeasedJobSpec:
    return LeasedJobSpec.model_validate({"schedule": "0 3 * * *", "template": TEMPLATE, **fields})


def test_defaults_are_the_products() -> None:
    job = spec()
    assert (job.type, job.time_zone, job.suspend, job.code) == (JobType.SCHEDULE, "Etc/UTC", False, None)
    assert job.clock_change_policy == ClockChangePolicy.RunOnce
    assert job.concurrency_policy == ConcurrencyPolicy.FORBID
    assert (job.missed_run_policy, job.missed_run_limit) == (MissedRunPolicy("RunLatest"), 100)
    assert (job.starting_deadline_seconds, job.active_deadline_seconds, job.pending_deadline_seconds) == (
        None,
        None,
        900,
    )
    assert (job.backoff_limit, job.successful_runs_history_limit, job.failed_runs_history_limit) == (0, 3, 1)
    assert job.timing == Timing(duration=900, heartbeat=60, grace=60, pre_stop=10)
    assert job.shutdown.exit_zero_on_stop == ExitZeroOnStop.RETRY
    assert job.sidecar is None


def test_the_default_heartbeat_is_a_third_of_a_short_lease() -> None:
    job = spec(lease={"durationSeconds": 100}, shutdown={"preStopSeconds": 2, "terminationGracePeriodSeconds": 10})
    assert job.timing == Timing(duration=100, heartbeat=33, grace=10, pre_stop=2)


def test_the_schedule_comes_parsed() -> None:
    schedule = spec(timeZone="Europe/Paris", clockChangePolicy="Kubernetes").schedule_for("ns/name")
    assert schedule is not None
    assert schedule.next(NOW) == datetime(2026, 7, 21, 1, tzinfo=UTC)
    assert schedule.policy == ClockChangePolicy.Kubernetes
    assert LeasedJobSpec.model_validate({"type": "Initial", "template": TEMPLATE}).schedule_for("ns/name") is None


def test_types_are_those_of_the_identity() -> None:
    assert JobType.INITIAL.scheduler_type is JobSchedulerType.INITIAL
    assert JobType.SCHEDULE.scheduler_type is JobSchedulerType.SCHEDULE


def test_a_code_is_trimmed() -> None:
    assert spec(code=" \ufeffsync orders\n").code == "sync orders"


def test_the_sidecars_overrides_go_out_as_they_came_in() -> None:
    sidecar = {
        "resources": {"limits": {"cpu": 1, "memory": "64Mi"}, "claims": [{"name": "x"}]},
        "imagePullSecrets": [{"name": "registry"}],
    }
    job = spec(sidecar=sidecar)
    assert job.sidecar is not None
    assert job.sidecar.to_json() == sidecar


def test_a_spec_does_not_change_and_ignores_fields_of_tomorrow() -> None:
    job = spec(fieldOfTomorrow=1)
    with pytest.raises(ValidationError):
        job.suspend = True


def test_messages_of_bad_timing_have_the_numbers() -> None:
    with pytest.raises(
        ValidationError, match=r"60 s leave -11 s of trust .* two heartbeats need 40: .*heartbeatSeconds \(20\)"
    ):
        spec(lease={"durationSeconds": 60})


# --- LeasedJobRun ----------------------------------------------------------------------------------------------------
def test_a_run_reads_its_tick() -> None:
    run = parse_run({"spec": {"jobName": "j", "tick": "2026-07-20T03:00:00Z", "reason": "again"}})
    assert isinstance(run, LeasedJobRunSpec)
    assert run.tick_time == NOW
    assert not run.cancel
    assert manual_run_key("ns", "n", "uid-1") == "manual/ns/n/uid-1"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"jobName": None}, "spec.jobName"),
        ({"jobName": ""}, "spec.jobName"),
        ({"tick": "2026-07-20T03:00:00+02:00"}, "spec.tick"),
        ({"tick": "2026-02-30T03:00:00Z"}, "spec.tick"),
        ({"tick": "now"}, "spec.tick"),
        ({"cancel": "yes"}, "spec.cancel"),
    ],
)
def test_a_bad_run_names_its_field(change: dict[str, Any], field: str) -> None:
    problems = parse_run({"spec": {"jobName": "j", **change}})
    assert isinstance(problems, list)
    assert [(problem.field, problem.reason) for problem in problems] == [(field, Reason.INVALID_SPEC)]
    assert str(problems[0]) == f"{field}: {problems[0].message}"
    assert not problems[0].message.startswith(field.removeprefix("spec."))


MONTH = {"from": "2026-07-01T00:00:00Z", "to": "2026-07-31T00:00:00Z"}


@pytest.mark.parametrize(
    "change",
    [
        {"backfill": MONTH},
        {"action": "Run", "backfill": {**MONTH, "reprocess": "All", "maxActive": 100, "dryRun": True}},
        {"backfill": {"from": MONTH["to"], "to": MONTH["to"]}, "cancel": True},
        {"action": "Explain"},
        {"action": "Explain", "tick": MONTH["to"]},
        {"action": "Cancel", "runKey": f"{MONTH['to']}#r1"},
        {"action": "Release", "tick": MONTH["to"], "force": True},
        {"action": "Forget", "runKey": "manual/a/b/c"},
        {"action": "Resume", "reason": "repaired"},
    ],
)
def test_what_may_be_asked(change: dict[str, Any]) -> None:
    found = parse_run({"spec": {"jobName": "j", **change}})
    assert isinstance(found, LeasedJobRunSpec), found


def test_what_a_backfill_leaves_out() -> None:
    found = parse_run({"spec": {"jobName": "j", "backfill": MONTH}})
    assert isinstance(found, LeasedJobRunSpec)
    assert found.action is None
    assert found.backfill == BackfillSpec(
        from_=MONTH["from"], to=MONTH["to"], reprocess=Reprocess.NONE, max_active=1, dry_run=False
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"action": "Delete"}, "spec.action"),
        ({"backfill": {"from": MONTH["from"]}}, "spec.backfill.to"),
        ({"backfill": {**MONTH, "from": "yesterday"}}, "spec.backfill.from"),
        ({"backfill": {"from": MONTH["to"], "to": MONTH["from"]}}, "spec.backfill.to"),
        ({"backfill": {**MONTH, "maxActive": 0}}, "spec.backfill.maxActive"),
        ({"backfill": {**MONTH, "maxActive": 101}}, "spec.backfill.maxActive"),
        ({"backfill": {**MONTH, "reprocess": "failed"}}, "spec.backfill.reprocess"),
        ({"backfill": MONTH, "tick": MONTH["to"]}, "spec.backfill"),
        ({"backfill": MONTH, "action": "Explain"}, "spec.backfill"),
        ({"runKey": "2026-07-01T00:00:00Z#r1"}, "spec.runKey"),
        ({"action": "Resume", "runKey": "k"}, "spec.runKey"),
        ({"action": "Cancel", "runKey": "k", "tick": MONTH["to"]}, "spec.runKey"),
        ({"action": "Resume", "tick": MONTH["to"]}, "spec.tick"),
        ({"action": "Cancel", "tick": MONTH["to"], "force": True}, "spec.force"),
        ({"action": "Release", "cancel": True}, "spec.cancel"),
    ],
)
def test_what_may_not_be_asked_names_its_field(change: dict[str, Any], field: str) -> None:
    problems = parse_run({"spec": {"jobName": "j", **change}})
    assert isinstance(problems, list)
    assert [problem.field for problem in problems] == [field]


def test_a_run_without_a_spec_is_a_problem() -> None:
    assert parse_run({}) == [Problem("spec", Reason.INVALID_SPEC, "is required")]


# --- status ----------------------------------------------------------------------------------------------------------
def stored_size(text: str) -> int:
    """Bytes of `text` in JSON as Go writes it, without the quotes."""
    encoded = json.dumps(text, ensure_ascii=False)[1:-1].encode()
    return len(encoded) + 5 * sum(encoded.count(c) for c in b"<>&")


@given(st.text(), st.integers(8, 64))
def test_bounded_text_fits_as_it_is_stored(text: str, limit: int) -> None:
    cut = bounded(text, limit)
    assert stored_size(cut) <= limit
    assert len(cut) <= limit
    if cut.endswith("…") and not text.endswith("…"):
        assert stored_size(text) > limit - 6


@pytest.mark.parametrize(
    ("text", "limit", "wanted"),
    [
        ("short", 64, "short"),
        ("12345678", 8, "12345678"),
        ("123456789", 8, "12345…"),
        ("a\0b\x1bc\nd", 64, "a b c\nd"),
        ("<<<<", 24, "<<<<"),
        ("<<<<<", 24, "<<<…"),
        ("<&", 8, "…"),
        ("éééé", 8, "éééé"),
        ("ééééé", 8, "éé…"),
    ],
)
def test_bounded_text_is_cut_with_an_ellipsis(text: str, limit: int, wanted: str) -> None:
    assert bounded(text, limit) == wanted


@pytest.mark.parametrize("text", ["x", "<&>", '"\\', "😀", "\0\x1b", "\n"])
def test_the_largest_status_is_below_64_kib(text: str) -> None:
    huge = text * 300_000
    run = RunStatus(
        run_key=huge,
        attempt=2**31 - 1,
        outcome=huge,
        reason=huge,
        message=huge,
        holder=huge,
        pod_name=huge,
        scheduled_time=NOW,
        start_time=NOW,
        completion_time=NOW,
    )
    condition = Condition(
        type=huge,
        status=ConditionStatus.FALSE,
        last_transition_time=NOW,
        reason=huge,
        message=huge,
        observed_generation=9,
    )
    status = LeasedJobStatus(
        observed_generation=2**53,
        code=huge,
        conditions=[condition] * 8,
        next_schedule_time=NOW,
        next_schedule_times=[NOW] * 5,
        last_schedule_time=NOW,
        last_successful_time=NOW,
        last_failure_time=NOW,
        last_result=huge,
        active_count=2**31,
        holder=huge,
        active=[run] * 10,
        recent_runs=[run] * 10,
    )
    encoded = json.dumps(status.to_json(), ensure_ascii=False).encode()
    assert len(encoded) + 5 * sum(encoded.count(c) for c in b"<>&") < 64 * 1024


def test_more_runs_than_a_status_holds_are_a_mistake_of_the_caller() -> None:
    run = RunStatus(run_key="k")
    with pytest.raises(ValidationError, match="recent_runs"):
        LeasedJobStatus(recent_runs=[run] * 11)


def test_times_are_written_as_kubernetes_writes_them() -> None:
    local = datetime(2026, 7, 20, 5, 0, 0, 999_999, tzinfo=timezone(timedelta(hours=2)))
    status = LeasedJobStatus(last_schedule_time=local, next_schedule_times=[local])
    assert status.to_json() == {
        "lastScheduleTime": "2026-07-20T03:00:00Z",
        "nextScheduleTimes": ["2026-07-20T03:00:00Z"],
    }


def test_a_status_is_read_back() -> None:
    status = LeasedJobRunStatus(phase=RunPhase.REFUSED, reason="AlreadySucceeded", run_key="k", start_time=NOW)
    assert LeasedJobRunStatus.model_validate(status.to_json()) == status
