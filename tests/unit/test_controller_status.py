"""What `kubectl get leasedjobs` shows: bounded, valid, and never behind what stands there."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit import controller_builders as b

from leasedjob.api.v1alpha1 import MAX_RUNS, LeasedJobStatus
from leasedjob.controller import manual
from leasedjob.controller.cache import Cache, Entry
from leasedjob.controller.clock import DatabaseClock
from leasedjob.controller.kube import Kube, KubeError
from leasedjob.controller.model import JobView
from leasedjob.controller.settings import Settings
from leasedjob.controller.spec import derive
from leasedjob.controller.status import INSIST_AFTER, StatusWriter, behind, job_status, outcome_of, run_status
from leasedjob.identity import JobSchedulerType
from leasedjob.lease.rows import REASON_RESTORED, CodeState, JobSchedulerStatus, LedgerEntry, Outcome, Run, Suspension

RUNNING, SUCCESS, FAIL = JobSchedulerStatus.RUNNING, JobSchedulerStatus.SUCCESS, JobSchedulerStatus.FAIL
HOUR = 3600.0


def shown(view: JobView, entry: Entry | None = None, conflict: Entry | None = None) -> b.Json:
    found = job_status(entry or b.entry(), view, conflict)
    assert LeasedJobStatus.model_validate(found).model_dump(mode="json", by_alias=True, exclude_none=True) == found
    return found


def stored_size(status: b.Json) -> int:
    """Bytes as the API server stores it: Go's encoder escapes <, > and &."""
    text = json.dumps(status, ensure_ascii=False, separators=(",", ":"))
    return len(text.encode()) + 5 * sum(text.count(c) for c in "<>&")


def runs(count: int, status: JobSchedulerStatus, **more: Any) -> list[Run]:
    return [b.run(status, tick=b.at(-HOUR * n), started=-HOUR * n, pod_uid=f"p{n}", **more) for n in range(count)]


class TestRuns:
    @pytest.mark.parametrize(
        ("row", "word"),
        [
            (b.run(), "Pending"),
            (b.run(pod_uid="p"), "Running"),
            (b.run(SUCCESS), "Success"),
            (b.run(FAIL), "Failed"),
            (b.run(FAIL, reason="Cancelled"), "Cancelled"),
            (b.run(FAIL, reason="Replaced"), "Replaced"),
            (b.run(FAIL, reason="PendingDeadlineExceeded: no room"), "Failed"),
            (b.run(SUCCESS, reason="Cancelled"), "Success"),
            (b.run(pod_uid="p", stop_reason="Cancelled"), "Running"),
            (b.run(FAIL, retry_at=b.at(5)), "Retrying"),
        ],
    )
    def test_the_word_for_it(self, row: Run, word: str) -> None:
        assert outcome_of(row) == word
        assert run_status(row, None).outcome == word

    def test_reason_and_message(self) -> None:
        found = run_status(b.run(FAIL, reason="OOMKilled: container main exited with 137: a: b"), None)
        assert (found.reason, found.message) == ("OOMKilled", "container main exited with 137: a: b")

    def test_a_long_message_does_not_hide_the_reason(self) -> None:
        found = run_status(b.run(FAIL, reason="Error: " + "x" * 5000), None)
        assert found.reason == "Error"

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ({"error": "no such order", "exitCode": 3}, "no such order"),
            ({"error": {"code": 3}}, None),
            ({"released": True}, None),
            ([1], None),
            (None, None),
        ],
    )
    def test_what_a_workload_reported_itself(self, data: Any, message: str | None) -> None:
        found = run_status(b.run(FAIL, outcome=Outcome.FAIL, data=data), None)
        assert (found.reason, found.message) == ("Reported", message)

    def test_why_it_does_not_start(self) -> None:
        body = b.running_pod(phase="Pending", workload=b.waiting("ImagePullBackOff", "no such image"))
        found = run_status(b.adopted(body), b.facts_of(body))
        assert (found.outcome, found.reason, found.message) == ("Pending", "ImagePullBackOff", "no such image")
        unadopted = run_status(b.run(), b.facts_of(b.pending_pod()))
        assert unadopted.outcome == "Pending"

    def test_a_running_one_has_no_end(self) -> None:
        assert run_status(b.run(pod_uid="p", finished_at=b.at(5)), None).completion_time is None


class TestWhole:
    def test_a_new_job(self) -> None:
        found = shown(b.view(now=10))
        assert found["observedGeneration"] == 1
        assert found["code"] == b.CODE
        assert found["nextScheduleTime"] == b.rfc(HOUR)
        assert found["nextScheduleTimes"] == [b.rfc(n * HOUR) for n in range(1, 6)]
        assert (found["active"], found["recentRuns"], found["activeCount"]) == ([], [], 0)
        assert "lastScheduleTime" not in found
        assert "lastResult" not in found
        (ready,) = found["conditions"]
        assert (ready["type"], ready["status"], ready["reason"]) == ("Ready", "True", "Accepted")

    def test_times_and_results(self) -> None:
        rows = [
            b.run(SUCCESS, tick=b.at(-2 * HOUR), started=-2 * HOUR, pod_uid="a"),
            b.run(FAIL, tick=b.at(-HOUR), started=-HOUR, pod_uid="b", reason="Error: x"),
            b.run(tick=b.T0, pod_uid="c"),
        ]
        found = shown(b.view(*rows))
        assert found["lastScheduleTime"] == b.rfc(0)
        assert found["lastSuccessfulTime"] == b.rfc(-2 * HOUR + 30)
        assert found["lastFailureTime"] == b.rfc(-HOUR + 30)
        assert (found["lastResult"], found["activeCount"]) == ("Running", 1)
        assert found["holder"] == f"{b.CLUSTER}/{b.NAMESPACE}/p"
        assert [r["runKey"] for r in found["active"]] == ["2026-07-20T03:00:00Z"]
        assert [r["outcome"] for r in found["recentRuns"]] == ["Running", "Failed", "Success"]

    @pytest.mark.parametrize("reason", ["Cancelled", "Replaced"])
    def test_what_was_not_wanted_any_more_has_not_failed(self, reason: str) -> None:
        found = shown(b.view(b.run(FAIL, pod_uid="b", reason=reason)))
        assert found["lastResult"] == reason
        assert "lastFailureTime" not in found
        assert "lastFailureTime" in shown(b.view(b.run(FAIL, pod_uid="b", reason="Error: x")))

    def test_a_manual_run_is_no_schedule_time(self) -> None:
        found = shown(b.view(b.run(SUCCESS, manual=True)))
        assert "lastScheduleTime" not in found
        assert found["lastResult"] == "Success"

    def test_an_initial_run(self) -> None:
        body = b.job_body({"type": "Initial"})
        del body["spec"]["schedule"]
        entry = b.entry(body)
        assert entry.problem is None
        row = b.run(SUCCESS, kind=JobSchedulerType.INITIAL, tick=None, pod_uid="p")
        found = shown(b.view(row, type=JobSchedulerType.INITIAL, schedule=None), entry)
        assert found["recentRuns"][0]["runKey"] == ""
        assert "nextScheduleTime" not in found

    @pytest.mark.parametrize("status", [RUNNING, SUCCESS, FAIL])
    def test_active_ones_are_shown_first_and_all_is_bounded(self, status: JobSchedulerStatus) -> None:
        old_active = b.run(tick=b.at(-1000 * HOUR), started=-1000 * HOUR, pod_uid="old")
        found = shown(b.view(*runs(30, status), old_active))
        assert len(found["recentRuns"]) == MAX_RUNS
        if status is not RUNNING:
            assert found["recentRuns"][0]["podName"] == old_active.pod_name
            assert len(found["active"]) == 1
        assert found["activeCount"] == (31 if status is RUNNING else 1)

    def test_suspended(self) -> None:
        entry = b.entry(b.job_body({"suspend": True}))
        found = shown(b.view(suspend=True), entry)
        assert "nextScheduleTime" not in found
        assert [(c["status"], c["reason"]) for c in found["conditions"]] == [("True", "Suspended")]

    def test_refused(self) -> None:
        entry = b.entry(b.job_body({"schedule": "every day"}))
        found = shown(b.view(), entry)
        (ready,) = found["conditions"]
        assert (ready["status"], ready["reason"]) == ("False", "InvalidSchedule")
        assert "spec.schedule" in ready["message"]
        assert "nextScheduleTime" not in found
        assert found["code"] == b.CODE

    def test_two_objects_with_one_code(self) -> None:
        other = b.entry(b.job_body({"code": b.JOB}, name="other", uid="u2"))
        found = shown(b.view(), other, conflict=b.entry())
        (ready,) = found["conditions"]
        assert (ready["status"], ready["reason"]) == ("False", "CodeConflict")
        assert "billing/nightly" in ready["message"]
        assert "nextScheduleTime" not in found

    def test_clusters_whose_specs_differ(self) -> None:
        found = shown(b.view(), b.entry(spec_differs=True))
        assert [c["type"] for c in found["conditions"]] == ["Ready", "SpecDiffers"]

    def test_the_generation_that_was_seen(self) -> None:
        found = shown(b.view(), b.entry(b.job_body(generation=7)))
        assert found["observedGeneration"] == 7
        assert found["conditions"][0]["observedGeneration"] == 7


class TestBounds:
    @pytest.mark.parametrize("filler", ["x", "<", "&", "\x00", "ü", "\n", '"', "\U0001f600", "\ud800"])
    def test_five_thousand_runs_with_huge_errors(self, filler: str) -> None:
        text = filler * (300 * 1024)
        rows = [
            b.run(
                status,
                run_key=f"manual/{n}/" + filler.replace("\ud800", "x") * 1000,
                tick=None,
                started=-n,
                pod_uid=f"p{n}",
                reason=f"{filler * 200}: {text}" if n % 25 == 0 else "",
                holder=text if n % 25 == 0 else "c/n/p",
                pod_name="p" * 253,
                id=b.lease_id_of(None, str(n)),
            )
            for n, status in enumerate([RUNNING, SUCCESS, FAIL, RUNNING] * 1250)
        ]
        entry = b.entry()
        entry.problem = ("InvalidSpec", text)
        entry.spec_differs = True
        found = job_status(entry, b.view(*rows), None)
        assert len(found["recentRuns"]) == MAX_RUNS
        assert len(found["active"]) == MAX_RUNS
        assert stored_size(found) < 64 * 1024
        LeasedJobStatus.model_validate(found)

    @given(st.text(max_size=2000), st.text(max_size=2000))
    def test_any_text_is_shown_or_cut(self, reason: str, holder: str) -> None:
        found = shown(b.view(*[replace(r, reason=reason, holder=holder) for r in runs(3, FAIL)]))
        assert stored_size(found) < 64 * 1024


class TestNeverBackwards:
    def test_times(self) -> None:
        body = b.job_body(
            status={
                "lastScheduleTime": b.rfc(900),
                "lastSuccessfulTime": b.rfc(901),
                "lastFailureTime": b.rfc(902),
            }
        )
        found = shown(b.view(b.run(SUCCESS), b.run(FAIL, tick=b.at(-HOUR), started=-HOUR)), b.entry(body))
        assert [found[k] for k in ("lastScheduleTime", "lastSuccessfulTime", "lastFailureTime")] == [
            b.rfc(900),
            b.rfc(901),
            b.rfc(902),
        ]
        later = shown(b.view(b.run(SUCCESS, tick=b.at(HOUR), started=HOUR)), b.entry(body))
        assert later["lastScheduleTime"] == b.rfc(HOUR)

    def test_the_transition_time_is_kept(self) -> None:
        before = shown(b.view(now=10))
        after = shown(b.view(now=500), b.entry(b.job_body(status=before)))
        assert after["conditions"][0]["lastTransitionTime"] == b.rfc(10)
        assert after == before, "an idle object is not written"

    def test_a_condition_of_another_controller_stays(self) -> None:
        other = {"type": "Reviewed", "status": "True", "reason": "R", "message": "", "lastTransitionTime": b.rfc(1)}
        stale = {**other, "type": "SpecDiffers"}
        found = shown(b.view(), b.entry(b.job_body(status={"conditions": [other, stale]})))
        assert [c["type"] for c in found["conditions"]] == ["Ready", "Reviewed"]
        assert found["conditions"][1] == other

    KEY = "2026-07-20T03:00:00Z"

    def one(self, outcome: str, attempt: int = 1, start: float = 0, key: str = KEY) -> b.Json:
        return {"recentRuns": [{"runKey": key, "attempt": attempt, "outcome": outcome, "startTime": b.rfc(start)}]}

    @pytest.mark.parametrize(
        ("old", "new", "back"),
        [
            (("Running", 1), ("Success", 1), False),
            (("Running", 1), ("Failed", 1), False),
            (("Pending", 1), ("Running", 1), False),
            (("Running", 1), ("Pending", 1), False),
            (("Retrying", 1), ("Pending", 2), False),
            (("Retrying", 1), ("Failed", 1), False),
            (("Success", 2), ("Success", 2), False),
            (("Failed", 1), ("Pending", 2), False),  # a person reopened it
            (("Success", 1), ("Running", 1), True),
            (("Failed", 1), ("Running", 1), True),
            (("Retrying", 1), ("Running", 1), True),
            (("Failed", 1), ("Retrying", 1), True),
            (("Pending", 2), ("Retrying", 1), True),
            (("Running", 2), ("Success", 1), True),
        ],
    )
    def test_a_run(self, old: tuple[str, int], new: tuple[str, int], back: bool) -> None:
        assert behind(self.one(*old), self.one(*new), b.at(10)) is back

    def test_a_run_that_was_not_read_here_yet(self) -> None:
        other = self.one("Success", start=-HOUR, key="2026-07-20T02:00:00Z")
        both = {"recentRuns": self.one("Running")["recentRuns"] + other["recentRuns"]}
        assert behind(both, other, b.at(2))
        assert behind(self.one("Running"), {"recentRuns": []}, b.at(2))
        assert not behind(other, both, b.at(2))

    def test_but_a_run_that_is_gone_does_not_stop_the_status_for_ever(self) -> None:
        """A database that was restored, or rows that were pruned."""
        assert not behind(self.one("Running"), {"recentRuns": []}, b.at(3600))

    @pytest.mark.parametrize("old", [("Success", 1), ("Success", 2), ("Running", 2)])
    def test_nor_does_one_of_which_a_restored_database_knows_less(self, old: tuple[str, int]) -> None:
        new = self.one("Failed", 1)
        assert behind(self.one(*old), new, b.at(10))
        new["recentRuns"][0]["reason"] = REASON_RESTORED
        assert not behind(self.one(*old), new, b.at(10))
        asked = {"phase": "Failed", "reason": REASON_RESTORED, "attempt": 1}
        assert not manual.behind({"phase": "Running", "reason": "Adopted", "attempt": 2}, asked)
        assert manual.behind({"phase": "Running", "reason": "Adopted", "attempt": 2}, {**asked, "reason": "Error"})

    def test_a_run_that_newer_ones_pushed_out(self) -> None:
        new = self.one("Running", start=30, key="2026-07-20T04:00:00Z")
        assert not behind(self.one("Success"), new, b.at(31))

    def test_nothing_there_yet(self) -> None:
        assert not behind({}, self.one("Running"), b.at(1))
        assert not behind({}, {}, b.at(1))

    @given(st.data())
    def test_what_two_replicas_write_only_goes_forward(self, data: st.DataObject) -> None:
        """Two replicas see the same history, each some way behind, and write in any order."""
        history = [
            [b.run()],
            [b.run(pod_uid="p")],
            [b.run(FAIL, pod_uid="p", retry_at=b.at(40), reason="Error: x")],
            [b.run(attempt=2, started=41, created=0)],
            [b.run(attempt=2, started=41, created=0, pod_uid="q")],
            [b.run(SUCCESS, attempt=2, started=41, created=0, pod_uid="q")],
        ]
        seen = [0, 0]
        body = b.job_body()
        furthest = -1
        for _ in range(12):
            who = data.draw(st.integers(0, 1))
            seen[who] = data.draw(st.integers(seen[who], len(history) - 1))
            entry = b.entry(body)
            new = job_status(entry, b.view(*history[seen[who]], now=50), None)
            if not behind(body.get("status") or {}, new, b.at(50)):
                body = b.job_body(status=new)
                # The first two differ only in whether the Pod is seen to run.
                assert seen[who] >= furthest or {seen[who], furthest} in ({0, 1}, {3, 4})
                furthest = seen[who]


# --- writing ---------------------------------------------------------------------------------------------------------


class Server(Kube):
    """Takes patches as the API server would: refuses those for another resource version."""

    def __init__(self, *bodies: b.Json, error: KubeError | None = None) -> None:
        self.bodies = {(x["metadata"]["name"]): x for x in bodies}
        self.patches: list[tuple[str, str, b.Json]] = []
        self.error = error

    async def patch_status(
        self, plural: str, namespace: str, name: str, status: b.Json, resource_version: str
    ) -> b.Json:
        if self.error:
            raise self.error
        body = self.bodies[name]
        if body["metadata"]["resourceVersion"] != resource_version:
            raise KubeError(409, "Conflict", "the object has been modified")
        self.patches.append((plural, name, status))
        merged = {k: v for k, v in ((body.get("status") or {}) | status).items() if v is not None}
        version = str(int(resource_version) + 1)
        self.bodies[name] = body | {"status": merged, "metadata": body["metadata"] | {"resourceVersion": version}}
        return self.bodies[name]


async def write(server: Server, entry: Entry, view: JobView, *runs: b.Json, conflict: Entry | None = None) -> None:
    await StatusWriter(server, DatabaseClock()).write(entry, view, runs, conflict)


class TestWriter:
    async def test_one_write_and_then_none(self) -> None:
        entry = b.entry()
        server = Server(entry.body)
        await write(server, entry, b.view(b.run(pod_uid="p")))
        assert [(p, n) for p, n, _ in server.patches] == [("leasedjobs", b.JOB)]
        assert entry.body["metadata"]["resourceVersion"] == "11", "the next write is based on this one"
        await write(server, entry, b.view(b.run(pod_uid="p"), now=20))
        assert len(server.patches) == 1

    async def test_what_is_no_longer_true_is_removed(self) -> None:
        entry = b.entry()
        server = Server(entry.body)
        await write(server, entry, b.view())
        entry.body = entry.body | {"spec": {**entry.body["spec"], "suspend": True}}
        entry.generation = -1
        derive(entry, Settings())
        await write(server, entry, b.view(suspend=True))
        assert server.patches[-1][2]["nextScheduleTime"] is None
        assert "nextScheduleTime" not in server.bodies[b.JOB]["status"]

    async def test_a_stale_replica_does_not_write(self) -> None:
        body = b.job_body()
        server = Server(body)
        await write(server, b.entry(body), b.view(b.run(SUCCESS, pod_uid="p")))
        stale = b.entry(server.bodies[b.JOB])
        await write(server, stale, b.view(b.run(pod_uid="p")))
        assert len(server.patches) == 1

    @pytest.mark.parametrize("status", [404, 409])
    async def test_a_conflict_is_left_to_the_next_observation(self, status: int) -> None:
        entry = b.entry()
        body = entry.body
        await write(Server(body, error=KubeError(status, "x", "y")), entry, b.view())
        assert entry.body is body

    async def test_any_other_refusal_is_an_error(self) -> None:
        entry = b.entry()
        with pytest.raises(KubeError):
            await write(Server(entry.body, error=KubeError(403, "Forbidden", "no")), entry, b.view())

    async def test_its_runs_follow(self) -> None:
        entry, run = b.entry(), b.run_body({"tick": "2026-07-20T03:00:00Z"})
        server = Server(entry.body, run)
        await write(server, entry, b.view(b.run(pod_uid="p")), run)
        assert [p for p, _, _ in server.patches] == ["leasedjobs", "leasedjobruns"]
        assert server.bodies["now"]["status"]["phase"] == "Running"

    @pytest.mark.parametrize("phase", ["Succeeded", "Failed", "Cancelled", "Refused"])
    async def test_a_finished_run_is_never_written_again(self, phase: str) -> None:
        entry, run = b.entry(), b.run_body(status={"phase": phase})
        server = Server(entry.body, run)
        await write(server, entry, b.view(), run)
        assert [p for p, _, _ in server.patches] == ["leasedjobs"]

    async def test_a_job_that_is_refused_says_so_to_its_runs(self) -> None:
        entry, run = b.entry(b.job_body({"schedule": "?"})), b.run_body()
        server = Server(entry.body, run)
        view = replace(b.view(), policy=StatusWriter.no_policy)
        await write(server, entry, view, run)
        assert server.bodies["now"]["status"]["reason"] == "JobNotReady"


class TestAnotherVersionAtWork:
    """While two versions run side by side, neither takes away what the other one says, and they don't shout."""

    async def test_what_a_later_version_says_stays(self) -> None:
        server = Server(b.job_body())
        await write(server, b.entry(server.bodies[b.JOB]), b.view(b.run(pod_uid="p")))
        body = server.bodies[b.JOB]
        body["status"]["later"] = {"x": 1}
        for name in ("active", "recentRuns"):
            body["status"][name][0]["later"] = 7
        await write(server, b.entry(body), b.view(b.run(pod_uid="p")))
        assert len(server.patches) == 1, "nothing of ours has changed"
        await write(server, b.entry(body), b.view(b.run(SUCCESS, pod_uid="p")))
        status = server.bodies[b.JOB]["status"]
        assert status["later"] == {"x": 1}
        assert (status["recentRuns"][0]["outcome"], status["recentRuns"][0]["later"]) == ("Success", 7)
        assert status["active"] == []

    async def test_another_attempt_has_nothing_of_the_one_before(self) -> None:
        server = Server(b.job_body())
        await write(server, b.entry(server.bodies[b.JOB]), b.view(b.run(pod_uid="p")))
        server.bodies[b.JOB]["status"]["recentRuns"][0]["later"] = 7
        await write(server, b.entry(server.bodies[b.JOB]), b.view(b.run(pod_uid="q", attempt=2)))
        assert "later" not in server.bodies[b.JOB]["status"]["recentRuns"][0]

    async def test_the_same_is_said_again_ever_more_slowly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = [1000.0]
        monkeypatch.setattr("leasedjob.controller.status.time.monotonic", lambda: clock[0])
        entry = b.entry()
        server = Server(entry.body)
        writer = StatusWriter(server, DatabaseClock())
        written, answers = [], set()
        while clock[0] < 2000.0:
            before = len(server.patches)
            answers.add(await writer.write(entry, b.view(), (), None))
            if len(server.patches) > before:
                written.append(clock[0])
                body = server.bodies[b.JOB]
                version = str(int(body["metadata"]["resourceVersion"]) + 1)
                body = body | {
                    "metadata": body["metadata"] | {"resourceVersion": version},
                    "status": body["status"] | {"code": "somebody/else"},
                }
                server.bodies[b.JOB] = body
            entry.renew(server.bodies[b.JOB])
            clock[0] += 0.5
        gaps = [late - early for early, late in itertools.pairwise(written)]
        assert gaps[0] <= 2 * INSIST_AFTER[0]
        assert gaps == sorted(gaps)
        assert len(written) < 14
        assert answers == {True, False}, "it looks again later"

    async def test_the_answer_to_a_write_knows_the_spec_best(self) -> None:
        """A watch that is older than a change of the definition shows the object without the fields that it brought."""
        whole = b.job_body({"onlyOnHolidays": True})
        server = Server(whole)
        cache = Cache(lambda key: None)
        cache.job_seen(b.job_body())
        entry = cache.jobs[b.NAMESPACE, b.JOB]
        derive(entry, Settings())
        assert entry.problem is None
        assert await StatusWriter(server, DatabaseClock()).write(entry, b.view(), (), None) is False, "it looks again"
        cache.job_seen(b.job_body(version=12))  # what the same watch says of that write
        derive(entry, Settings())
        assert entry.problem is not None
        assert entry.problem[0] == "UnknownField"
        cache.job_seen(b.job_body(version=13, generation=2))
        derive(entry, Settings())
        assert entry.problem is None

    async def test_an_answer_that_the_watch_has_overtaken_tells_it_too(self) -> None:
        entry = b.entry()
        answer = b.job_body({"onlyOnHolidays": True}, version=11)
        entry.observe(b.job_body(version=11))
        entry.renew(answer)
        derive(entry, Settings())
        assert entry.problem is not None

    async def test_what_is_new_is_said_at_once(self) -> None:
        entry = b.entry()
        server = Server(entry.body)
        for row in (b.run(), b.run(pod_uid="p"), b.run(SUCCESS, pod_uid="p")):
            await write(server, entry, b.view(row))
        assert len(server.patches) == 3


def test_a_time_is_later_or_equal_only() -> None:
    """Written times are cut to seconds; a status that is computed again from the same row must be the same."""
    row = b.run(SUCCESS, finished_at=b.at(30.7))
    first = shown(b.view(row))
    again = shown(b.view(row), b.entry(b.job_body(status=first)))
    assert first["lastSuccessfulTime"] == again["lastSuccessfulTime"] == b.rfc(30)
    assert datetime.fromisoformat(first["lastSuccessfulTime"]) <= b.at(30.7) < b.at(30) + timedelta(seconds=1)


class TestTicksThatDidNotRun:
    @staticmethod
    def state(*reasons: str, suspension: Suspension | None = None, **counts: int) -> CodeState:
        entries = tuple(
            LedgerEntry(
                code=b.CODE, first=b.at(-n * HOUR), last=b.at(-n * HOUR), count=1, count_is_exact=True, kind="skipped",
                reason=reason, decided_by="east", decided_at=b.at(-n * HOUR),
            )
            for n, reason in enumerate(reasons)
        )  # fmt: skip
        return CodeState(
            code=b.CODE, watermark=b.T0, created_at=b.T0, counts=counts, ledger=entries, suspension=suspension,
            ledger_through=None, pruned_through=None, registered_uid=None, registered_suspended=None,
            registered_schedule=None, active_elsewhere=False, db_now=b.T0,
        )  # fmt: skip

    def test_counts_and_the_latest_ranges_are_shown(self) -> None:
        entry = b.entry()
        entry.state = self.state(*["Overlap"] * 12, skipped=20, missed=3)
        found = shown(b.view(), entry)
        assert (found["skippedTicks"], found["missedTicks"]) == (20, 3)
        assert "droppedTicks" not in found
        assert len(found["ledger"]) == 10
        assert found["ledger"][0]["from"] == "2026-07-20T03:00:00Z"

    def test_what_another_replica_has_read_since_stays(self) -> None:
        entry = b.entry()
        entry.state = self.state("Overlap", skipped=7)
        newer = shown(b.view(), entry)
        entry.body = {**entry.body, "status": newer}
        entry.state = self.state(skipped=6)
        assert shown(b.view(), entry)["ledger"] == newer["ledger"]
        assert shown(b.view(), entry)["skippedTicks"] == 7
        entry.state = None
        assert shown(b.view(), entry)["skippedTicks"] == 7
        entry.state = self.state(skipped=7)  # ranges were deleted
        assert "ledger" not in shown(b.view(), entry)

    def test_a_suspension_after_failures_is_the_reason_of_ready(self) -> None:
        entry = b.entry()
        entry.state = self.state(suspension=Suspension(since=b.T0, by="east", runs=3, reason="k: OOMKilled"))
        found = shown(replace(b.view(), suspended=True), entry)
        (ready,) = [c for c in found["conditions"] if c["type"] == "Ready"]
        assert (ready["status"], ready["reason"]) == ("False", "SuspendedAfterFailures")
        assert "3 failed runs in a row" in ready["message"]
        assert "k: OOMKilled" in ready["message"]
        assert "kubectl leasedjob resume" in ready["message"]
        assert "nextScheduleTimes" not in found
