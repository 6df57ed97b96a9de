"""get, why, timeline, logs, preview, backfill, suspend, resume, lint, release, forget, against a played API server."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from tests.unit.kube_api import FakeApi, status

from leasedjob import protocol
from leasedjob.api.v1alpha1 import LeasedJobRunStatus, RunPhase, Verdict
from leasedjob.cli import explain, repair, wait
from leasedjob.cli.attempts import attempts
from leasedjob.cli.exits import Exit
from leasedjob.cli.gitops import keeper
from leasedjob.cli.timeline import draw

Object = dict[str, Any]
Call = Callable[..., Result]
NOW = datetime(2026, 7, 20, 4, 0, tzinfo=UTC)
TICK = "2026-07-20T03:00:00Z"
READY = {"type": "Ready", "status": "True", "reason": "Accepted", "message": "", "lastTransitionTime": TICK}


def run_of(key: str = TICK, **more: Any) -> Object:
    """A finished run of the status."""
    return {
        "runKey": key, "attempt": 1, "outcome": "Success", "reason": "Completed", "holder": "eu/default/hello-0a-1",
        "podName": "hello-0a-1", "scheduledTime": key.partition("#")[0] or None, "startTime": "2026-07-20T03:00:01Z",
        "completionTime": "2026-07-20T03:10:01Z", **more,
    }  # fmt: skip


def ledger(first: str, last: str, count: int, kind: str = "Skipped", reason: str = "Overlap") -> Object:
    return {
        "from": first, "to": last, "count": count, "kind": kind, "reason": reason, "decidedBy": "eu",
        "decidedAt": last,
    }  # fmt: skip


def job_of(*, spec: Object | None = None, **status: Any) -> Object:
    return {
        "apiVersion": "leasedjob.io/v1alpha1",
        "kind": "LeasedJob",
        "metadata": {"name": "hello", "namespace": "default", "generation": 1},
        "spec": {"type": "Schedule", "schedule": "0 3 * * *", "concurrencyPolicy": "Forbid", **(spec or {})},
        "status": {"conditions": [READY], **status},
    }


def pod_of(
    run_key: str = TICK,
    attempt: int = 1,
    *,
    name: str = "",
    node: str = "node-1",
    exit_code: int | None = 0,
    **more: Any,
) -> Object:
    name = name or f"hello-{attempt}"
    state: Object = {"running": {"startedAt": "2026-07-20T03:00:05Z"}}
    if exit_code is not None:
        state = {
            "terminated": {
                "startedAt": "2026-07-20T03:00:05Z", "finishedAt": "2026-07-20T03:05:05Z", "exitCode": exit_code,
                "reason": "Error" if exit_code else "Completed",
            }
        }  # fmt: skip
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "creationTimestamp": f"2026-07-20T03:00:0{attempt}Z",
            "labels": {protocol.LABEL_JOB: "hello"},
            "annotations": {
                protocol.ANNOTATION_JOB: "hello",
                protocol.ANNOTATION_RUN_KEY: run_key,
                protocol.ANNOTATION_ATTEMPT: str(attempt),
                **more.get("annotations", {}),
            },
        },
        "spec": {"nodeName": node, "containers": more.get("containers", [{"name": "main"}])},
        "status": more.get("status", {"phase": "Running", "containerStatuses": [{"name": "main", "state": state}]}),
    }


def put_pod(api: FakeApi, pod: Object) -> None:
    made = api.put("pods", pod["metadata"]["name"], spec=pod["spec"], status=pod["status"])
    made["metadata"].update(pod["metadata"])


def answer(**status: Any) -> Object:
    return LeasedJobRunStatus(**status).model_dump(mode="json", by_alias=True, exclude_none=True)


# --- why: now -------------------------------------------------------------------------------------------------------


def now_words(job: Object) -> str:
    return "\n".join(explain.now_in_words(job, NOW))


def test_nothing_is_due() -> None:
    words = explain.now_in_words(job_of(nextScheduleTime="2026-07-21T03:00:00Z", recentRuns=[run_of()]), NOW)
    assert words[0] == "Nothing runs, because no tick is due: the next one is 2026-07-21T03:00:00Z, in 23h."
    assert words[1] == (
        f"The last run: Run {TICK} is Success (Completed), attempt 1, held by eu/default/hello-0a-1, took 10m, "
        "ended 49m ago."
    )


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (job_of(conditions=[]), "No operator has looked at it yet"),
        (job_of(conditions=[{**READY, "status": "False", "reason": "InvalidSchedule", "message": "spec.schedule: no"}]),
         "No tick starts a run: InvalidSchedule: spec.schedule: no"),
        (job_of(conditions=[{**READY, "reason": "Suspended"}]), "spec.suspend is true"),
        (job_of(conditions=[{**READY, "status": "False", "reason": "SuspendedAfterFailures", "message": "3 failures"}]),
         "No tick starts a run: 3 failures."),
        (job_of(observedGeneration=0), "has not seen the last edit"),
        (job_of(), "No further tick comes"),
        (job_of(nextScheduleTime="2026-07-20T03:55:00Z"), "5m overdue: the operator, or its database"),
        (job_of(nextScheduleTime="2026-07-21T03:00:00Z"), "It has not run yet."),
        (job_of(spec={"type": "Initial"}), "runs once, ever, and has not begun"),
        (job_of(spec={"type": "Initial"}, recentRuns=[run_of("")]), "has had its run"),
        (job_of(active=[run_of(outcome="Running", completionTime=None)]), "a tick that comes due is skipped"),
        (job_of(active=[run_of(outcome="Running")], spec={"concurrencyPolicy": "Replace"}), "stops it first"),
        (job_of(active=[run_of(outcome="Pending", reason="ErrImagePull", message="no image")]), "no image"),
        (job_of(ledger=[ledger(TICK, TICK, 1)]), f"The last decision: the tick {TICK} was skipped: Overlap"),
        (job_of(conditions=[READY, {**READY, "type": "SpecDiffers", "message": "us"}]), "SpecDiffers: us"),
    ],
)  # fmt: skip
def test_why_not_now(job: Object, text: str) -> None:
    assert text in now_words(job)


def test_a_decision_older_than_the_last_run_is_not_the_last_one() -> None:
    old = ledger("2026-07-19T03:00:00Z", "2026-07-19T03:00:00Z", 1)
    assert "decision" not in now_words(job_of(recentRuns=[run_of()], ledger=[old]))


def test_why_asks_nobody_about_now(api: FakeApi, call: Call) -> None:
    api.put(
        "leasedjobs", "hello", **{k: v for k, v in job_of(nextScheduleTime=TICK).items() if k in ("spec", "status")}
    )
    shown = call("why", "hello")
    assert (shown.exit_code, api.bodies) == (Exit.OK, [])
    found = json.loads(call("why", "hello", "-o", "json").stdout)
    assert found["ready"]["reason"] == "Accepted"
    assert found["words"] == shown.stdout.splitlines()


# --- why: at a tick ---------------------------------------------------------------------------------------------------


def explained(verdict: Verdict, message: str, **more: Any) -> Callable[[Object], Object]:
    return lambda _spec: answer(
        phase=RunPhase.SUCCEEDED, explanation={"verdict": verdict, "message": message, "tick": TICK, **more}
    )


def test_why_at_a_tick_asks_the_operator_and_takes_the_question_back(api: FakeApi, call: Call) -> None:
    api.job()
    api.operator = explained(
        Verdict.SKIPPED, "a run was active", range=ledger(TICK, "2026-07-20T05:00:00Z", 3), failures=2, interruptions=1
    )
    result = call("why", "hello", "--at", "2026-07-20T05:00:00+02:00")
    assert result.exit_code == Exit.OK
    assert api.bodies[0][2]["spec"] == {"jobName": "hello", "action": "Explain", "tick": TICK}
    assert api.runs() == []
    assert result.stdout.splitlines() == [
        "Skipped: a run was active",
        "So far: 2 failures that counted, 1 interruption that didn't count.",
        f"In the ledger: 3 ticks from {TICK} to 2026-07-20T05:00:00Z were skipped: Overlap (a run was still active, "
        "and concurrencyPolicy is Forbid), decided by eu at 2026-07-20T05:00:00Z.",
        f"To run it all the same: kubectl leasedjob run hello --at {TICK}",
    ]


def test_why_about_a_time_that_is_no_tick(api: FakeApi, call: Call) -> None:
    api.job()
    api.operator = explained(Verdict.NOT_A_TICK, f"no tick; the nearest: {TICK}", previous_tick=TICK)
    assert call("why", "hello", "--at", TICK).stdout == f"NotATick: no tick; the nearest: {TICK}\n"
    assert json.loads(call("why", "hello", "--at", TICK, "-o", "json").stdout)["previousTick"] == TICK


def test_why_about_a_run_key_and_its_reruns(api: FakeApi, call: Call) -> None:
    api.job()
    again = run_of(f"{TICK}#r1")
    api.operator = explained(Verdict.RAN, "it ran", run=run_of(), reruns=[again])
    result = call("why", "hello", "--run-key", TICK)
    assert api.bodies[0][2]["spec"]["runKey"] == TICK
    assert f"Again, by a backfill: Run {TICK}#r1 is Success" in result.stdout


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (TICK, f"Ran\nRun {TICK} is Success"),
        ("2026-07-19T03:00:00Z", "Skipped: the tick 2026-07-19T03:00:00Z was skipped: Overlap"),
        ("2026-07-21T03:00:00Z", "Pending: it has not come yet"),
    ],
)
def test_who_may_not_ask_the_operator_is_told_what_the_status_knows(
    api: FakeApi, call: Call, key: str, text: str
) -> None:
    api.job(
        recent_runs=[run_of()],
        ledger=[ledger("2026-07-19T03:00:00Z", "2026-07-19T03:00:00Z", 1)],
        next_schedule_time="2026-07-21T03:00:00Z",
    )
    forbidden = status(403, "Forbidden", 'leasedjobruns.leasedjob.io is forbidden: User "eve" cannot create resource')
    api.fail = lambda method, _path: (403, forbidden) if method == "POST" else None
    result = call("why", "hello", "--at", key)
    assert result.exit_code == Exit.OK
    assert result.stdout.startswith(text)
    assert "by the status alone" in result.stderr
    unknown = call("why", "hello", "--at", "2026-07-18T03:00:00Z")
    assert (unknown.exit_code, unknown.stdout) == (Exit.NO_ACCESS, "")


def test_nobody_answers_and_nothing_is_left_behind(api: FakeApi, call: Call) -> None:
    api.job()
    result = call("why", "hello", "--at", TICK, "--timeout", "0.3")
    assert result.exit_code == Exit.TIMED_OUT
    assert "no operator has answered within 0.3 s" in result.stderr
    assert api.runs() == []


def test_a_refused_question_is_an_error_with_the_operator_s_words(api: FakeApi, call: Call) -> None:
    api.job()
    api.operator = lambda _spec: answer(phase=RunPhase.REFUSED, reason="JobNotReady", message="spec.schedule: no")
    result = call("why", "hello", "--at", TICK)
    assert result.exit_code == Exit.RUN_REFUSED
    assert "spec.schedule: no" in result.stderr


# --- suspend and resume -----------------------------------------------------------------------------------------------


def test_suspend_and_resume_set_the_one_field(api: FakeApi, call: Call) -> None:
    job = api.job()
    assert call("suspend", "hello").stdout == "leasedjob.leasedjob.io/hello suspended\n"
    assert api.bodies == [("PATCH", "application/merge-patch+json", {"spec": {"suspend": True}})]
    assert "suspended already" in call("suspend", "hello").stdout
    assert call("resume", "hello").stdout == "leasedjob.leasedjob.io/hello resumed\n"
    assert job["spec"]["suspend"] is False
    assert "is not suspended" in call("resume", "hello").stdout
    assert len(api.bodies) == 2


def test_a_suspension_after_failures_is_ended_outside_spec(api: FakeApi, call: Call) -> None:
    api.job(conditions=[{**READY, "reason": "SuspendedAfterFailures"}])
    api.operator = lambda _spec: answer(phase=RunPhase.SUCCEEDED)
    result = call("resume", "hello", "--reason", "repaired")
    assert result.stdout == "leasedjob.leasedjob.io/hello resumed\n"
    assert [body["spec"] for _, _, body in api.bodies] == [
        {"jobName": "hello", "action": "Resume", "reason": "repaired"}
    ]


def test_suspend_warns_where_somebody_else_keeps_the_field(api: FakeApi, call: Call) -> None:
    job = api.job()
    job["metadata"]["labels"] = {"kustomize.toolkit.fluxcd.io/name": "shop"}
    result = call("suspend", "hello")
    assert result.exit_code == Exit.OK
    assert "warning: Flux keeps hello" in result.stderr
    assert "spec.suspend to true there too" in result.stderr


def applied(manager: str, field: str) -> Object:
    """An entry of managedFields."""
    return {"manager": manager, "operation": "Apply", "fieldsV1": {"f:spec": {f"f:{field}": {}}}}


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ({}, None),
        ({"labels": {"app.kubernetes.io/instance": "x"}}, None),
        ({"annotations": {"argocd.argoproj.io/tracking-id": "x"}}, "Argo CD"),
        ({"labels": {"argocd.argoproj.io/instance": "x"}}, "Argo CD"),
        ({"labels": {"helm.toolkit.fluxcd.io/name": "x"}}, "Flux"),
        ({"annotations": {"meta.helm.sh/release-name": "x"}}, "Helm"),
        ({"managedFields": [{"manager": "argocd-controller", "operation": "Update"}]}, "Argo CD"),
        ({"managedFields": [{"manager": "kustomize-controller", "operation": "Apply"}]}, "Flux"),
        ({"managedFields": [applied("kubectl", "suspend")]}, None),
        ({"managedFields": [applied("ours", "suspend")]}, "the field manager ours"),
        ({"managedFields": [applied("ours", "schedule")]}, None),
    ],
)  # fmt: skip
def test_who_keeps_a_field(metadata: Object, name: str | None) -> None:
    assert keeper({"metadata": metadata}, "spec", "suspend") == name


# --- backfill ---------------------------------------------------------------------------------------------------------

RANGE = ("--from", "2026-07-01T00:00:00Z", "--to", "2026-07-31T02:00:00+02:00")


def test_a_backfill_is_one_leasedjobrun(api: FakeApi, call: Call) -> None:
    api.job()
    api.operator = lambda _spec: answer(phase=RunPhase.RUNNING, reason="Running", backfill={"ticks": 31, "planned": 28})
    result = call("backfill", "hello", *RANGE, "--reprocess", "failed", "--max-active", "3", "--reason", "lost")
    assert result.exit_code == Exit.OK
    assert api.bodies[0][2]["spec"] == {
        "jobName": "hello",
        "reason": "lost",
        "backfill": {
            "from": "2026-07-01T00:00:00Z",
            "to": "2026-07-31T00:00:00Z",
            "reprocess": "Failed",
            "maxActive": 3,
        },
    }
    assert result.stdout.endswith("created: 31 ticks, 28 planned\n")


@pytest.mark.parametrize(("phase", "code"), [(RunPhase.SUCCEEDED, Exit.OK), (RunPhase.FAILED, Exit.RUN_FAILED)])
def test_a_backfill_can_be_waited_for(api: FakeApi, call: Call, phase: RunPhase, code: Exit) -> None:
    api.job()
    api.operator = lambda _spec: answer(
        phase=phase, message="2 failed", backfill={"ticks": 3, "succeeded": 1, "failed": 2}
    )
    result = call("backfill", "hello", *RANGE, "--wait")
    assert result.exit_code == code
    assert f"{phase}: 3 ticks, 1 succeeded, 2 failed" in result.stdout


def test_a_dry_run_shows_the_plan_and_leaves_nothing(api: FakeApi, call: Call) -> None:
    api.job()
    plan = [
        {"tick": TICK, "action": "Skip", "reason": "Succeeded"},
        {"tick": "2026-07-21T03:00:00Z", "action": "Run", "runKey": "2026-07-21T03:00:00Z"},
    ]
    api.operator = lambda spec: (
        answer(phase=RunPhase.SUCCEEDED, backfill={"ticks": 60, "planned": 59, "plan": plan})
        if spec["backfill"]["dryRun"]
        else None
    )
    result = call("backfill", "hello", *RANGE, "--dry-run")
    assert api.runs() == []
    assert result.stdout.splitlines()[1].split() == [TICK, "Skip", "<none>", "Succeeded"]
    assert result.stderr == "60 ticks, 59 would run\nand 58 more ticks that are not shown\n"
    assert call("backfill", "hello", *RANGE, "--dry-run", "-o", "name").stdout == "2026-07-21T03:00:00Z\n"
    assert json.loads(call("backfill", "hello", *RANGE, "--dry-run", "-o", "json").stdout)["planned"] == 59


@pytest.mark.parametrize(
    "words",
    [
        ("--from", TICK),
        ("--from", TICK, "--to", "2026-07-19T00:00:00Z"),
        (*RANGE, "--max-active", "0"),
        (*RANGE, "--reprocess", "some"),
        ("--from", "yesterday", "--to", TICK),
    ],
)
def test_a_backfill_that_can_t_be_meant(api: FakeApi, call: Call, words: tuple[str, ...]) -> None:
    api.job()
    assert call("backfill", "hello", *words).exit_code == Exit.USAGE
    assert api.bodies == []


# --- cancel a run of the schedule -------------------------------------------------------------------------------------


def test_a_run_that_the_schedule_started_is_cancelled_by_an_action(api: FakeApi, call: Call) -> None:
    api.job()
    api.run("hello-1", tick=TICK, phase=RunPhase.REFUSED)  # says nothing of the run
    api.operator = lambda _spec: answer(phase=RunPhase.RUNNING, reason="Stopping", message="its Pod is stopped")
    result = call("cancel", f"hello/{TICK}")
    assert api.bodies[0][2]["spec"] == {"jobName": "hello", "action": "Cancel", "runKey": TICK}
    assert result.stdout == f"run {TICK} of hello is being cancelled: its Pod is stopped\n"


# --- release and forget -----------------------------------------------------------------------------------------------


def repairing(outcome: str) -> Callable[[Object], Object]:
    """An operator that explains a run with this outcome, and does what it is asked for."""

    def operator(spec: Object) -> Object:
        if spec["action"] == "Explain":
            return explained(Verdict.RUNNING, "", run=run_of(outcome=outcome))(spec)
        return answer(phase=RunPhase.SUCCEEDED, message="done so")

    return operator


@pytest.mark.parametrize(
    ("verb", "outcome", "says"),
    [
        ("release", "Running", "then the next attempt"),
        ("release", "Pending", "Then"),
        ("forget", "Failed", "counted from zero"),
        ("forget", "Cancelled", "forgotten"),
    ],
)
def test_repair_says_first_what_it_will_do(api: FakeApi, call: Call, verb: str, outcome: str, says: str) -> None:
    api.job()
    api.operator = repairing(outcome)
    result = call(verb, "hello", "--at", TICK, "--yes", "--reason", "node is gone")
    assert result.exit_code == Exit.OK, result.stderr
    assert says.lower() in result.stderr.lower()
    assert f"Run {TICK} is {outcome}" in result.stderr
    assert [b["spec"] for _, _, b in api.bodies if b.get("spec")] == [
        {"jobName": "hello", "action": "Explain", "tick": TICK},
        {"jobName": "hello", "action": verb.title(), "tick": TICK, "reason": "node is gone"},
    ]
    assert result.stdout.endswith(f"{verb}d: done so\n".replace("forgetd", "forgotten"))


def test_a_release_that_takes_its_time_is_told_as_such(api: FakeApi, call: Call) -> None:
    api.job()
    explains = repairing("Running")
    stopping = answer(phase=RunPhase.RUNNING, reason="Stopping", message="Pod hello-1 is being stopped")
    api.operator = lambda spec: explains(spec) if spec["action"] == "Explain" else stopping
    result = call("release", "hello", "--at", TICK, "-y")
    assert result.exit_code == Exit.OK
    assert result.stdout.endswith(" is being released: Pod hello-1 is being stopped\n")


def test_cancelling_a_run_of_the_schedule_that_has_ended_is_no_error(api: FakeApi, call: Call) -> None:
    api.job()
    api.operator = lambda _spec: answer(phase=RunPhase.REFUSED, reason="AlreadySucceeded", message="it has succeeded")
    result = call("cancel", f"hello/{TICK}")
    assert (result.exit_code, result.stdout) == (Exit.OK, f"run {TICK} of hello has already ended: it has succeeded\n")
    api.operator = lambda _spec: answer(phase=RunPhase.REFUSED, reason="NoSuchRun", message="no such run")
    assert call("cancel", f"hello/{TICK}").exit_code == Exit.RUN_REFUSED


def test_force_says_what_may_happen(api: FakeApi, call: Call) -> None:
    api.job()
    api.operator = repairing("Running")
    result = call("release", "hello", "--at", TICK, "--force", "-y")
    assert "runs twice" in result.stderr
    assert api.bodies[-1][2]["spec"]["force"] is True


@pytest.mark.parametrize(("verb", "outcome"), [("release", "Failed"), ("forget", "Success"), ("forget", "Running")])
def test_repair_of_what_needs_none_does_nothing(api: FakeApi, call: Call, verb: str, outcome: str) -> None:
    api.job()
    api.operator = repairing(outcome)
    result = call(verb, "hello", "--at", TICK, "-y")
    assert result.exit_code == Exit.REFUSED
    assert [b["spec"]["action"] for _, _, b in api.bodies if b.get("spec")] == ["Explain"]


def test_repair_of_no_run(api: FakeApi, call: Call) -> None:
    api.job()
    api.operator = explained(Verdict.BEFORE_WATERMARK, "ticks count from later on")
    result = call("release", "hello", "--at", TICK, "-y")
    assert result.exit_code == Exit.NOT_FOUND
    assert "ticks count from later on" in result.stderr


def test_repair_asks_a_person_and_refuses_to_guess(api: FakeApi, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    api.job()
    api.operator = repairing("Running")
    nobody = call("release", "hello", "--at", TICK)
    assert nobody.exit_code == Exit.USAGE
    assert "--yes" in nobody.stderr
    said: list[str] = []

    def no(text: str, **_: Any) -> bool:
        said.append(text)
        return False

    monkeypatch.setattr(repair.click, "confirm", no)
    monkeypatch.setattr(repair, "_somebody_is_there", lambda: True)
    result = call("release", "hello", "--at", TICK)
    assert (result.exit_code, said) == (Exit.INTERRUPTED, ["Go on?"])
    assert all(b["spec"]["action"] == "Explain" for _, _, b in api.bodies if b.get("spec"))


def test_repair_needs_to_know_which_run(api: FakeApi, call: Call) -> None:
    api.job()
    assert call("forget", "hello", "-y").exit_code == Exit.USAGE
    assert call("forget", "hello", "--at", TICK, "--run-key", TICK, "-y").exit_code == Exit.USAGE
    assert api.bodies == []


# --- get --------------------------------------------------------------------------------------------------------------


def test_get_describes_one(api: FakeApi, call: Call) -> None:
    api.job(
        code="default/hello",
        conditions=[READY],
        next_schedule_times=[datetime.now(UTC) + timedelta(days=n, hours=1) for n in (1, 2)],
        recent_runs=[run_of()],
        skipped_ticks=3,
        ledger=[ledger(TICK, TICK, 1)],
    )
    shown = call("get", "hello").stdout
    lines = shown.splitlines()
    assert lines[0].split() == ["Name:", "default/hello"]
    assert ["Not", "run:", "3", "skipped,", "ever"] in [line.split() for line in lines]
    assert "(in 1d)" in shown or "(in 1d1h)" in shown
    assert "Runs:" in lines
    assert "Ticks that did not run:" in lines
    assert any(line.split()[:5] == [TICK, TICK, "1", "Skipped", "Overlap"] for line in lines)


def test_get_is_list_without_a_name_and_takes_the_formats(api: FakeApi, call: Call) -> None:
    api.job()
    api.job("other")
    assert call("get").stdout == call("list").stdout
    assert json.loads(call("get", "hello", "-o", "json").stdout)["metadata"]["name"] == "hello"
    assert call("get", "hello", "-o", "name").stdout == "leasedjob.leasedjob.io/hello\n"
    assert yaml.safe_load(call("get", "hello", "other", "-o", "yaml").stdout)["kind"] == "List"
    assert len(call("get", "hello", "other", "-o", "wide").stdout.splitlines()) == 3
    assert call("get", "hello", "-A").exit_code == Exit.USAGE
    assert call("get", "nix").exit_code == Exit.NOT_FOUND


# --- attempts and timeline --------------------------------------------------------------------------------------------


def test_an_attempt_is_read_from_its_pod() -> None:
    stranger = pod_of()
    stranger["metadata"]["annotations"][protocol.ANNOTATION_JOB] = "other"
    broken = pod_of()
    broken["metadata"]["annotations"][protocol.ANNOTATION_ATTEMPT] = "x"
    first, second = attempts([pod_of(attempt=2, exit_code=None), stranger, broken, pod_of(exit_code=3)], "hello")
    assert (first.number, first.exit_code, first.reason, first.waits) == (1, 3, "Error", False)
    assert (second.number, second.exit_code, second.ended, second.waits) == (2, None, None, False)


def test_a_pod_that_waits() -> None:
    state = {"waiting": {"reason": "ImagePullBackOff"}}
    pod = pod_of(status={"phase": "Pending", "containerStatuses": [{"name": "main", "state": state}]})
    (found,) = attempts([pod], "hello")
    assert (found.waits, found.reason, found.started) == (True, "ImagePullBackOff", None)


def drawn(job: Object, pods: list[Object], width: int = 100) -> list[str]:
    return [text for text, _ in draw(job, attempts(pods, "hello"), NOW, width=width, blocks=False)]


def test_the_timeline_has_a_line_for_each_attempt() -> None:
    run = run_of(attempt=2, startTime="2026-07-20T03:00:02Z", completionTime="2026-07-20T03:05:05Z", reason=None)
    job = job_of(
        recentRuns=[run],
        nextScheduleTime="2026-07-21T03:00:00Z",
        ledger=[ledger("2026-07-20T03:15:00Z", "2026-07-20T03:45:00Z", 3)],
    )
    lines = drawn(job, [pod_of(attempt=1, exit_code=1, node="node-2"), pod_of(attempt=2)])
    assert lines[0].strip().startswith("0")
    assert lines[1].split("|")[0].split() == [TICK, "#1", "Ended", "Error", "node-2"]
    assert lines[2].split("|")[0].split() == ["#2", "Success", "eu/node-1"]
    assert lines[1].split("|")[1].rstrip().endswith("x")
    assert lines[2].split("|")[1].rstrip().endswith("=")
    assert lines[2].endswith("5m")
    assert lines[3].startswith("-- 3 ticks from 2026-07-20T03:15:00Z")
    assert lines[4] == "next: 2026-07-21T03:00:00Z (in 23h)"
    assert all(line.isascii() and len(line) <= 100 for line in lines[:3])
    assert len({line.index("|") for line in lines[1:3]}) == 1


def test_an_attempt_in_another_cluster_has_no_pod_here() -> None:
    lines = drawn(job_of(recentRuns=[run_of(holder="us/default/hello-9")]), [])
    assert lines[1].split("|")[0].split() == [TICK, "#1", "Success", "us"]


def test_a_run_that_goes_on_and_one_that_waits() -> None:
    running = run_of(outcome="Running", completionTime=None)
    assert drawn(job_of(recentRuns=[running]), [pod_of(exit_code=None)])[1].split("|")[1].rstrip().endswith(">")
    waits = run_of(outcome="Pending", reason="ImagePullBackOff", completionTime=None)
    pod = pod_of(status={"phase": "Pending"})
    line = drawn(job_of(recentRuns=[waits]), [pod])[1]
    assert "Pending ImagePullBackOff" in line
    assert set(line.split("|")[1].strip()) == {"."}


def test_delays_and_durations_share_one_scale() -> None:
    early = run_of("2026-07-19T03:00:00Z", startTime="2026-07-19T03:00:00Z", completionTime="2026-07-19T03:20:00Z")
    late = run_of(startTime="2026-07-20T03:10:00Z", completionTime="2026-07-20T03:20:00Z")
    first, second = (line.split("|")[1] for line in drawn(job_of(recentRuns=[late, early]), [])[1:3])
    assert len(first) == len(second)
    assert first.startswith("=")
    assert second.index("=") == pytest.approx(len(second) / 2, abs=1)


def test_the_timeline_shows_only_printable_text() -> None:
    lines = drawn(job_of(recentRuns=[run_of(holder="\x1b[31meu/x/y")]), [])
    assert all(line.isprintable() for line in lines)


def test_timeline_of_nothing_and_as_json(api: FakeApi, call: Call) -> None:
    api.job()
    result = call("timeline", "hello")
    assert (result.exit_code, result.stdout, result.stderr) == (Exit.OK, "", "No run of hello yet.\n")
    api.job(recent_runs=[run_of()])
    put_pod(api, pod_of())
    (run,) = json.loads(call("timeline", "hello", "-o", "json").stdout)["runs"]
    assert run["pods"][0] == {
        "attempt": 1, "podName": "hello-1", "nodeName": "node-1", "createTime": "2026-07-20T03:00:01Z",
        "startTime": "2026-07-20T03:00:05Z", "completionTime": "2026-07-20T03:05:05Z", "exitCode": 0,
        "reason": "Completed",
    }  # fmt: skip
    assert TICK in call("timeline", "hello").stdout


# --- logs -------------------------------------------------------------------------------------------------------------

OLD = "2026-07-19T03:00:00Z"


@pytest.fixture
def three(api: FakeApi) -> FakeApi:
    """Two runs, the latest of which had two attempts."""
    api.job(recent_runs=[run_of(attempt=2)])
    old = pod_of(OLD, 1, name="old")
    old["metadata"]["creationTimestamp"] = "2026-07-19T03:00:00Z"
    for pod in (old, pod_of(attempt=1, exit_code=1), pod_of(attempt=2)):
        put_pod(api, pod)
        api.logs[pod["metadata"]["name"], "main"] = f"from {pod['metadata']['name']}\n".encode()
    return api


@pytest.mark.parametrize(
    ("words", "pod"),
    [
        ((), "hello-2"),
        (("--attempt", "1"), "hello-1"),
        (("--previous",), "old"),
        (("--at", OLD), "old"),
        (("--run-key", TICK), "hello-2"),
    ],
)
def test_whose_log_is_meant(three: FakeApi, call: Call, words: tuple[str, ...], pod: str) -> None:
    result = call("logs", "hello", *words)
    assert (result.exit_code, result.stdout) == (Exit.OK, f"from {pod}\n")


def test_the_flags_of_a_log_reach_the_api_server(three: FakeApi, call: Call) -> None:
    call("logs", "hello", "--tail", "5", "--timestamps", "-f")
    assert three.asked[-1][1] == {"container": "main", "follow": "true", "tailLines": "5", "timestamps": "true"}


def test_the_container_is_the_workload_s(api: FakeApi, call: Call) -> None:
    api.job()
    put_pod(api, pod_of(containers=[{"name": "a"}, {"name": "b"}]))
    api.logs |= {("hello-1", "a"): b"a\n", ("hello-1", "b"): b"b\n", ("hello-1", "leasedjob-hold"): b"h\n"}
    first = call("logs", "hello")
    assert (first.stdout, first.stderr) == ("a\n", "of container a; there are also b\n")
    assert call("logs", "hello", "-c", "leasedjob-hold").stdout == "h\n"
    put_pod(
        api,
        pod_of(containers=[{"name": "a"}, {"name": "b"}], annotations={"kubectl.kubernetes.io/default-container": "b"}),
    )
    assert call("logs", "hello").stdout == "b\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--attempt", "3"), f"attempt 3 of run {TICK} of hello (there are: 1, 2)"),
        (("--at", "2026-07-01T03:00:00Z"), "its status doesn't know of it either"),
    ],
)
def test_a_log_that_is_not_there(three: FakeApi, call: Call, words: tuple[str, ...], text: str) -> None:
    result = call("logs", "hello", *words)
    assert result.exit_code == Exit.NOT_FOUND
    assert text in result.stderr


def test_a_run_of_another_cluster_is_named_with_its_end(api: FakeApi, call: Call) -> None:
    api.job(recent_runs=[run_of(outcome="Failed", holder="us/default/hello-9", message="exit code 3: no such table")])
    result = call("logs", "hello")
    assert result.exit_code == Exit.NOT_FOUND
    assert "us/default/hello-9 (cluster/namespace/Pod): exit code 3: no such table" in result.stderr
    assert "before the latest one" in call("logs", "hello", "-p").stderr


def test_only_one_flag_names_the_run(call: Call) -> None:
    assert call("logs", "hello", "--at", TICK, "-p").exit_code == Exit.USAGE


# --- preview ----------------------------------------------------------------------------------------------------------

SPRING = ("--schedule", "30 2 * * *", "--time-zone", "Europe/Rome", "--after", "2027-03-27T12:00:00Z")


def test_preview_of_a_schedule_marks_clock_changes(call: Call) -> None:
    lines = call("preview", *SPRING, "--count", "2").stdout.splitlines()
    assert lines[1].split()[:5] == ["2027-03-28T01:00:00Z", "Sun", "2027-03-28", "03:00", "CEST"]
    assert "02:30 is skipped: runs right after the gap" in lines[1]
    assert lines[2].endswith("-")
    skipped = call("preview", *SPRING, "--clock-change-policy", "Kubernetes", "--count", "1").stdout
    assert "2027-03-28 02:30 is skipped and not run" in skipped
    twice = call("preview", "--schedule", "30 2 * * *", "--time-zone", "Europe/Rome", "--after", "2026-10-24T12:00:00Z")
    assert "02:30 comes twice: runs the first time only" in twice.stdout


def test_preview_in_another_zone_and_as_json(call: Call) -> None:
    (line,) = json.loads(call("preview", *SPRING, "--zone", "Asia/Tokyo", "--count", "1", "-o", "json").stdout)
    assert line["localTime"] == "2027-03-28T10:00:00+09:00"
    assert (line["tick"], line["effect"]) == ("2027-03-28T01:00:00Z", "MovedAfterGap")


def manifest(name: str = "hello", **spec: Any) -> str:
    body = {
        "apiVersion": "leasedjob.io/v1alpha1",
        "kind": "LeasedJob",
        "metadata": {"name": name},
        "spec": {"schedule": "0 3 * * *", "template": {"spec": {"containers": [{"name": "m", "image": "i"}]}}, **spec},
    }
    return yaml.safe_dump({**body, "spec": {k: v for k, v in body["spec"].items() if v is not None}})


def test_preview_of_a_manifest_and_of_an_object_agree(api: FakeApi, call: Call, tmp_path: Path) -> None:
    text = manifest(schedule="H H * * *", jitterSeconds=600)
    (tmp_path / "job.yaml").write_text(text)
    api.put("leasedjobs", "hello", spec=yaml.safe_load(text)["spec"], status={"code": "default/hello"})
    words = ("--after", TICK, "-o", "json")
    offline = call("preview", "-f", str(tmp_path / "job.yaml"), *words)
    assert offline.exit_code == Exit.OK, offline.stderr
    assert json.loads(offline.stdout) == json.loads(call("preview", "hello", *words).stdout)
    assert len(json.loads(offline.stdout)) == 10


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ((), Exit.USAGE, "name one LeasedJob"),
        (("hello", "--schedule", "@daily"), Exit.USAGE, "name one LeasedJob"),
        (("hello", "--time-zone", "Etc/UTC"), Exit.USAGE, "go with --schedule"),
        (("--schedule", "0 4 31 6 *"), Exit.INVALID, "--schedule: never fires"),
        (("--schedule", "@daily", "--time-zone", "CEST2"), Exit.INVALID, "--time-zone:"),
        (("--schedule", "@daily", "--zone", "Mars"), Exit.USAGE, "--zone:"),
        (("--schedule", "@daily", "--count", "0"), Exit.USAGE, "--count"),
    ],
)
def test_a_preview_that_can_t_be_made(call: Call, words: tuple[str, ...], code: Exit, text: str) -> None:
    result = call("preview", *words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert text in result.stderr


def test_preview_of_what_is_not_accepted_or_has_no_ticks(api: FakeApi, call: Call) -> None:
    api.put("leasedjobs", "bad", spec={"schedule": "61 * * * *", "template": {"spec": {"containers": []}}})
    result = call("preview", "bad")
    assert result.exit_code == Exit.INVALID
    assert "spec.schedule" in result.stderr
    once = yaml.safe_load(manifest(schedule=None, type="Initial"))["spec"]
    api.put("leasedjobs", "once", spec=once)
    assert "runs once, ever" in call("preview", "once").stderr


# --- lint -------------------------------------------------------------------------------------------------------------


def lint(call: Call, tmp_path: Path, text: str, *words: str) -> Result:
    (tmp_path / "jobs.yaml").write_text(text)
    return call("lint", str(tmp_path / "jobs.yaml"), *words)


def test_a_good_manifest(call: Call, tmp_path: Path) -> None:
    result = lint(call, tmp_path, manifest())
    assert (result.exit_code, result.stderr) == (Exit.OK, "")
    assert result.stdout.endswith("jobs.yaml: leasedjob/hello: ok\n")


def test_what_the_api_server_and_what_the_operator_would_refuse(call: Call, tmp_path: Path) -> None:
    text = "---\n".join(
        [
            manifest("a", schedule="61 * * * *"),
            manifest("b", schedule="0 0 30 2 *"),
            manifest("c", timeZone="Europe/Room"),
            manifest("d", shedule="0 3 * * *"),
            manifest("e"),
            "apiVersion: v1\nkind: Service\nmetadata: {name: web}\n",
        ]
    )
    result = lint(call, tmp_path, text)
    assert result.exit_code == Exit.INVALID
    lines = result.stdout.splitlines()
    assert [line.split(": ")[1] for line in lines] == [f"leasedjob/{name}" for name in "abcde"]
    assert "document 3: leasedjob/c: spec.timeZone:" in lines[2]
    assert 'did you mean "Europe/Rome"?' in lines[2]
    assert "did you mean schedule?" in lines[3]
    assert result.stderr == "Error: 4 of 5 objects would not be accepted\n"
    assert lint(call, tmp_path, text, "-o", "name").stdout.split() == [f"leasedjob.leasedjob.io/{n}" for n in "abcd"]


def test_lint_as_json_has_the_fields(call: Call, tmp_path: Path) -> None:
    (found,) = json.loads(lint(call, tmp_path, manifest(schedule="61 * * * *"), "-o", "json").stdout)
    assert (found["kind"], found["name"]) == ("LeasedJob", "hello")
    assert found["problems"][0]["field"] == "spec.schedule"
    assert found["problems"][0]["reason"] == "InvalidSchedule"


def test_warnings_pass_unless_strict(call: Call, tmp_path: Path) -> None:
    text = manifest(schedule="10 3 29 2 5")
    result = lint(call, tmp_path, text)
    assert result.exit_code == Exit.OK
    assert "warning: day of month and day of week" in result.stdout
    assert lint(call, tmp_path, text, "--strict").exit_code == Exit.INVALID


def test_lint_says_what_a_lease_is_good_for(call: Call, tmp_path: Path) -> None:
    text = manifest(
        lease={"durationSeconds": 120, "heartbeatSeconds": 15}, shutdown={"terminationGracePeriodSeconds": 30}
    )
    _, said = lint(call, tmp_path, text, "--timing").stdout.splitlines()
    assert said.endswith(
        "leasedjob/hello: a lease of 120 s is trusted for 70 s: the database may be away for 55 s, "
        "a lost node's run goes on within 120 s"
    )
    (found,) = json.loads(lint(call, tmp_path, text, "-o", "json").stdout)
    assert (found["timing"]["trustedSeconds"], found["timing"]["takeoverSeconds"]) == (70, 120)
    (refused,) = json.loads(lint(call, tmp_path, manifest(lease={"durationSeconds": 30}), "-o", "json").stdout)
    assert refused["timing"] is None
    assert refused["problems"]


def test_lint_of_nothing_of_ours(call: Call, tmp_path: Path) -> None:
    assert lint(call, tmp_path, "kind: Service\n").exit_code == Exit.USAGE
    assert lint(call, tmp_path, "").exit_code == Exit.USAGE
    result = lint(call, tmp_path, "apiVersion: leasedjob.io/v2\nkind: LeasedJob\nmetadata: {name: x}\nspec: {}\n")
    assert result.exit_code == Exit.INVALID
    assert "apiVersion" in result.stdout


# --- errors stay one line ---------------------------------------------------------------------------------------------

VERBS: list[tuple[str, ...]] = [
    ("get", "hello"), ("why", "hello"), ("why", "hello", "--at", TICK), ("timeline", "hello"), ("logs", "hello"),
    ("preview", "hello"), ("backfill", "hello", *RANGE), ("suspend", "hello"), ("resume", "hello"),
    ("release", "hello", "--at", TICK, "-y"), ("forget", "hello", "--at", TICK, "-y"), ("run", "hello", "--at", TICK),
    ("cancel", f"hello/{TICK}"),
]  # fmt: skip


@pytest.mark.parametrize("words", VERBS, ids=[" ".join(words[:3]) for words in VERBS])
def test_every_failure_is_one_clear_line(api: FakeApi, call: Call, words: tuple[str, ...]) -> None:
    forbidden = status(403, "Forbidden", 'leasedjobs.leasedjob.io "hello" is forbidden: User "eve" cannot get it')
    cases: list[tuple[Callable[[], None], Exit, str]] = [
        (lambda: None, Exit.NOT_FOUND, "LeasedJob hello not found in namespace default (context here)"),
        (lambda: setattr(api, "installed", False), Exit.NOT_INSTALLED, "is the chart installed there?"),
        (lambda: setattr(api, "fail", lambda *_: (403, forbidden)), Exit.NO_ACCESS, 'User "eve" cannot get it'),
    ]
    for prepare, code, text in cases:
        prepare()
        result = call(*words)
        assert result.exit_code == code
        assert (result.stdout, len(result.stderr.splitlines())) == ("", 1)
        assert text in result.stderr
    assert call(*words, "--context", "nowhere").exit_code == Exit.UNREACHABLE


def test_a_name_that_would_be_another_path_is_none(api: FakeApi, call: Call) -> None:
    for name in ("..", ".", ""):
        result = call("get", name)
        assert result.exit_code == Exit.USAGE, name


def test_a_live_cronjob(api: FakeApi, call: Call) -> None:
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "m", "image": "i"}]}}
    spec = {"schedule": "0 3 * * *", "timeZone": "Etc/UTC", "jobTemplate": {"spec": {"template": template}}}
    api.put("cronjobs", "nightly", spec=spec)
    for source in ("cronjob/nightly", "cj/nightly", "cronjobs.batch/nightly"):
        assert yaml.safe_load(call("convert", source, "-q").stdout)["metadata"] == {
            "name": "nightly",
            "namespace": "default",
        }
    missing = call("convert", "cronjob/nix")
    assert missing.exit_code == Exit.NOT_FOUND
    assert "CronJob nix not found in namespace default" in missing.stderr


def test_waiting_for_an_answer_can_be_given_up(api: FakeApi, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    api.job()
    monkeypatch.setattr("leasedjob.cli.cluster.Cluster.follow", interrupted)
    assert call("why", "hello", "--at", TICK).exit_code == Exit.INTERRUPTED
    assert api.runs() == []
    assert wait.ANSWER_SECONDS > 0
