"""From an object's spec to what decisions are made from."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.unit import controller_builders as b

from leasedjob.api.v1alpha1 import ConcurrencyPolicy, ExitZeroOnStop
from leasedjob.controller.cache import Entry
from leasedjob.controller.model import FinishPolicy, Monitoring, Policy
from leasedjob.controller.settings import Settings
from leasedjob.controller.spec import derive
from leasedjob.identity import JobSchedulerType, RunIdentity
from leasedjob.lease.rows import Registration
from leasedjob.lease.trust import Timing
from leasedjob.schedule import ClockChangePolicy, MissedRunPolicy, Timetable


def entry(spec: b.Json | None = None, **more: Any) -> Entry:
    return b.entry(b.job_body(spec), **more)


def registration(spec: b.Json | None = None, **more: Any) -> Registration:
    found = entry(spec, **more).registration
    assert found is not None
    return found


def test_the_defaults() -> None:
    found = entry()
    assert found.problem is None
    assert found.code == b.CODE
    assert found.policy == Policy(
        type=JobSchedulerType.SCHEDULE,
        timing=Timing(900, 60, 60, 10),
        schedule=Timetable.of(["0 * * * *"], code=b.CODE),
    )
    assert found.template == b.TEMPLATE
    assert found.initial_lock_key == RunIdentity(JobSchedulerType.INITIAL, b.CODE, None).lock_key
    assert (found.pull_secrets, found.sidecar_resources) == ((), None)


def test_every_field() -> None:
    found = entry(
        {
            "schedule": None,
            "schedules": ["H 3 * * *", "30 4 * * 1"],
            "notBefore": "2026-07-20T03:00:00Z",
            "notAfter": "2099-07-20T03:00:00Z",
            "jitterSeconds": 600,
            "timeZone": "Europe/Paris",
            "clockChangePolicy": "Kubernetes",
            "suspend": True,
            "startingDeadlineSeconds": 100,
            "concurrencyPolicy": "Replace",
            "missedRunPolicy": "RunAll",
            "missedRunLimit": 7,
            "suspendAfterFailures": 4,
            "backoffLimit": 2,
            "pendingDeadlineSeconds": 300,
            "activeDeadlineSeconds": 3600,
            "lease": {"durationSeconds": 300, "heartbeatSeconds": 20},
            "shutdown": {
                "preStopSeconds": 5,
                "terminationGracePeriodSeconds": 30,
                "exitZeroOnStop": "Success",
            },
            "successfulRunsHistoryLimit": 0,
            "failedRunsHistoryLimit": 9,
            "sidecar": {"resources": {"limits": {"cpu": "1"}}, "imagePullSecrets": [{"name": "s"}]},
            "monitoring": {"pingURL": "https://monitor.example/1", "graceSeconds": 600},
        }
    )
    expected = Policy(
        type=JobSchedulerType.SCHEDULE,
        timing=Timing(300, 20, 30, 5),
        schedule=Timetable.of(
            ["H 3 * * *", "30 4 * * 1"],
            "Europe/Paris",
            policy=ClockChangePolicy.Kubernetes,
            code=b.CODE,
            not_before=datetime(2026, 7, 20, 3, tzinfo=UTC),
            not_after=datetime(2099, 7, 20, 3, tzinfo=UTC),
            jitter_seconds=600,
        ),
        suspend=True,
        starting_deadline=100,
        concurrency=ConcurrencyPolicy.REPLACE,
        missed=MissedRunPolicy.RunAll,
        missed_limit=7,
        suspend_after=4,
        backoff_limit=2,
        pending_deadline=300,
        active_deadline=3600,
        exit_zero_on_stop=ExitZeroOnStop.SUCCESS,
        keep_successful=0,
        keep_failed=9,
        monitoring=Monitoring("https://monitor.example/1", None, timedelta(minutes=10)),
    )
    assert found.policy == expected
    default = entry().policy
    assert default is not None
    same = [f.name for f in fields(Policy) if getattr(default, f.name) == getattr(expected, f.name)]
    assert same == ["type"], "a field that this test doesn't set"
    assert (found.pull_secrets, found.sidecar_resources) == (("s",), {"limits": {"cpu": "1"}})


def test_initial() -> None:
    body = b.job_body({"type": "Initial"})
    del body["spec"]["schedule"]
    found = b.entry(body)
    assert found.policy is not None
    assert (found.policy.type, found.policy.schedule) == (JobSchedulerType.INITIAL, None)


class TestProblems:
    @pytest.mark.parametrize(
        ("spec", "reason", "field"),
        [
            ({"schedule": "61 * * * *"}, "InvalidSchedule", "schedule"),
            ({"schedule": None}, "InvalidSchedule", "schedule"),
            ({"timeZone": "Mars/Olympus"}, "UnknownTimeZone", "timeZone"),
            ({"lease": {"durationSeconds": 60}}, "InvalidTiming", "lease"),
            ({"shutdown": {"preStopSeconds": 55, "terminationGracePeriodSeconds": 30}}, "InvalidTiming", "shutdown"),
            ({"template": {"spec": {"containers": []}}}, "InvalidTemplate", "containers"),
            ({"template": None}, "InvalidTemplate", "template"),
            ({"template": {"spec": b.TEMPLATE["spec"] | {"hostNetwork": True}}}, "InvalidTemplate", "hostNetwork"),
            ({"code": "x" * 65}, "InvalidCode", "code"),
            ({"code": 17}, "InvalidCode", "code"),
            ({"backoffLimit": -1}, "InvalidSpec", "backoffLimit"),
            ({"suspend": "yes", "backoffLimit": "two"}, "InvalidSpec", "suspend"),
        ],
    )
    def test_they_name_the_field(self, spec: b.Json, reason: str, field: str) -> None:
        found = entry(spec)
        assert found.problem is not None
        assert found.problem[0] == reason
        assert field in found.problem[1]
        assert (found.policy, found.registration) == (None, None)

    def test_of_several_kinds(self) -> None:
        found = entry({"schedule": "?", "backoffLimit": -1})
        assert found.problem is not None
        assert "schedule" in found.problem[1]
        assert "backoffLimit" in found.problem[1]

    @pytest.mark.parametrize("spec", [None, {}, [], "x"])
    def test_a_spec_that_is_none(self, spec: Any) -> None:
        body = b.job_body()
        body["spec"] = spec
        assert b.entry(body).problem is not None

    def test_the_code_is_known_all_the_same(self) -> None:
        """So that its Pods' rows are found and another object with its code waits."""
        assert entry({"schedule": "?", "code": "mine"}).code == f"{b.NAMESPACE}/mine"
        assert entry({"schedule": "?"}).code == b.CODE

    def test_an_edit_mends_it_and_an_edit_breaks_it(self) -> None:
        found = entry({"schedule": "?"})
        found.body = b.job_body(generation=2)
        derive(found, Settings())
        assert found.problem is None
        assert found.policy is not None
        found.body = b.job_body({"schedule": "?"}, generation=3)
        derive(found, Settings())
        assert found.problem is not None
        assert found.policy is None


def test_once_for_each_generation() -> None:
    found = entry()
    policy = found.policy
    found.body = b.job_body(version=99, status={"code": "x"})
    derive(found, Settings())
    assert found.policy is policy, "a write of the status is no edit"
    found.body = b.job_body({"suspend": True}, generation=2)
    derive(found, Settings())
    assert found.policy is not None
    assert found.policy.suspend


def test_a_field_of_a_later_version_is_not_passed_over() -> None:
    """Its definition is newer than the operator, and its user relies on it."""
    found = entry({"onlyOnHolidays": True, "lease": {"durationSeconds": 300, "later": 1}})
    assert found.problem is not None
    reason, message = found.problem
    assert reason == "UnknownField"
    assert message.startswith(("spec.lease.later, spec.onlyOnHolidays: ", "spec.onlyOnHolidays, spec.lease.later: "))
    assert "upgrade" in message
    assert found.policy is found.registration is None
    found.body = b.job_body(generation=2)
    derive(found, Settings())
    assert found.problem is None


FULL: b.Json = {
    "schedule": "H 3 * * 1-5", "timeZone": "Europe/Paris", "clockChangePolicy": "Kubernetes", "backoffLimit": 2,
    "lease": {"durationSeconds": 300, "heartbeatSeconds": 20},
}  # fmt: skip


class TestRegistration:
    def test_whose_it_is(self) -> None:
        found = registration()
        assert (found.code, found.uid, found.namespace, found.name) == (b.CODE, b.JOB_UID, b.NAMESPACE, b.JOB)
        assert (found.policy, found.suspended, found.created_at) == ("Forbid", False, b.at(-3600))

    @pytest.mark.parametrize(
        ("spec", "schedule", "whole"),
        [
            ({}, False, False),
            ({"schedule": "0 * * * *"}, False, False),
            ({"schedule": "1 * * * *"}, True, True),
            ({"timeZone": "Europe/Paris"}, True, True),
            ({"timeZone": "Etc/UTC"}, False, None),
            ({"clockChangePolicy": "Kubernetes"}, True, True),
            ({"schedule": None, "schedules": ["0 * * * *"]}, True, True),
            ({"notBefore": "2026-07-20T03:00:00Z"}, True, True),
            ({"notAfter": "2099-07-20T03:00:00Z"}, True, True),
            ({"jitterSeconds": 60}, False, True),
            ({"backoffLimit": 3}, False, True),
            ({"template": {"spec": {"containers": [{"name": "main", "image": "other"}]}}}, False, True),
            ({"suspend": True}, False, False),
            ({"sidecar": {"resources": {"limits": {"cpu": "2"}}}}, False, False),
        ],
    )
    def test_what_its_hashes_see(self, spec: b.Json, schedule: bool, whole: bool | None) -> None:
        """The schedule's moves the watermark; the other shows that two clusters differ."""
        before, after = registration(), registration(spec)
        assert (before.schedule_hash != after.schedule_hash) is schedule
        if whole is not None:
            assert (before.spec_hash != after.spec_hash) is whole

    def test_they_are_stable(self) -> None:
        one = registration({"timeZone": "Etc/UTC", "backoffLimit": 1})
        two = registration({"backoffLimit": 1, "timeZone": "Etc/UTC"})
        assert one == two

    def test_they_are_the_same_in_every_version(self) -> None:
        """A version that computes them otherwise takes each object for edited when it is rolled out: the watermark
        moves, and ticks that are due then are lost."""
        plain, full = registration(), registration(FULL)
        assert (plain.schedule_hash, plain.spec_hash) == (
            "271a031206f7afb171a6394f455ab1f5",
            "252c1dcd465a24da88670552b3ce12c3",
        )
        assert (full.schedule_hash, full.spec_hash) == (
            "3452bc1ca03f8084bcadfe76246748eb",
            "22ec4d24584e8f670676c5c0c7c273f5",
        )

    def test_a_shared_code(self) -> None:
        settings = Settings(shared_codes=frozenset({"shared"}))
        assert entry({"code": "shared"}, settings=settings).code == "shared"
        assert entry({"code": "shared"}).code == f"{b.NAMESPACE}/shared"

    @pytest.mark.parametrize("name", ["n" * 62, "n" * 63, "n" * 253])
    def test_a_long_name(self, name: str) -> None:
        found = b.entry(b.job_body(name=name))
        assert found.problem is None
        assert len(found.code) <= 64


@pytest.mark.parametrize("stop", list(ExitZeroOnStop))
def test_a_pod_carries_what_finalizing_needs(stop: ExitZeroOnStop) -> None:
    policy = b.policy(exit_zero_on_stop=stop)
    assert FinishPolicy.from_json(policy.finish_policy()) == FinishPolicy(stop)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "x", '{"exitZeroOnStop":"?"}'])
def test_an_annotation_that_can_t_be_read_means_the_defaults(text: str) -> None:
    assert FinishPolicy.from_json(text) == FinishPolicy()
