"""Backfills by real operators: each tick once, so many at a time, through a restart; what is run again and what not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from threading import Event, Thread
from typing import Any
from uuid import uuid4

import pytest
from kubernetes import client

from leasedjob import protocol
from leasedjob.identity import RunIdentity
from leasedjob.protocol import GROUP, VERSION
from tests.controller.control_plane import Bench, Kubelet, wait_until

pytestmark = [pytest.mark.integration]
FINAL = ("Succeeded", "Failed", "Cancelled", "Refused")


LAST = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(hours=12)


def daily() -> str:
    """A daily schedule that doesn't fire while a test runs."""
    return f"{LAST.minute} {LAST.hour} * * *"


# Leases that a busy machine can hold: nobody beats here.
DAILY = {"schedule": daily(), "lease": {"durationSeconds": 900}}


def ticks(count: int) -> list[datetime]:
    """The last ticks of `daily`, the oldest first."""
    return [LAST - timedelta(days=n) for n in range(count)][::-1]


def key(tick: datetime) -> str:
    return tick.strftime("%Y-%m-%dT%H:%M:%SZ")


def ask(bench: Bench, job: str, **spec: Any) -> str:
    """Creates a LeasedJobRun; its name."""
    name = f"{job}-{uuid4().hex[:6]}"
    body = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "LeasedJobRun",
        "metadata": {"name": name},
        "spec": {"jobName": job, **spec},
    }
    bench.custom.create_namespaced_custom_object(GROUP, VERSION, bench.namespace, "leasedjobruns", body)
    return name


def backfill(bench: Bench, job: str, first: datetime, last: datetime, **more: Any) -> str:
    return ask(bench, job, backfill={"from": key(first), "to": key(last), **more})


def answer(bench: Bench, run: str, *phases: str, seconds: float = 90) -> dict[str, Any]:
    wanted = phases or FINAL

    def found() -> dict[str, Any] | None:
        status = bench.run_status(run)
        return status if status.get("phase") in wanted else None

    status: dict[str, Any] = wait_until(f"{run} is {' or '.join(wanted)}", found, seconds)
    return status


@contextmanager
def node(bench: Bench, code: Callable[[dict[str, Any]], int | None] = lambda _: 0) -> Iterator[None]:
    """Runs every Pod to its end, with this exit code; None: it goes on."""
    stop, seen = Event(), set[str]()

    def work() -> None:
        while not stop.wait(0.1):
            for pod in bench.pods():
                uid = pod["metadata"]["uid"]
                over = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
                if over or uid in seen or pod["metadata"].get("deletionTimestamp"):
                    continue
                seen.add(uid)
                kubelet = Kubelet(bench, pod)
                kubelet.run()
                ended = code(pod)
                if ended is not None:
                    kubelet.end(ended)

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)


def run_key(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["annotations"].get(protocol.ANNOTATION_RUN_KEY))


def at_once(rows: list[dict[str, Any]]) -> int:
    """The largest number of runs that were active at one time, by the database's clock."""
    events = [(r["created_at"], 1) for r in rows] + [(r["finished_at"], -1) for r in rows]
    most = now = 0
    for _, change in sorted(events, key=lambda e: (e[0], e[1])):
        now += change
        most = max(most, now)
    return most


def test_thirty_ticks_two_at_a_time_across_two_operators_one_of_which_dies(bench: Bench) -> None:
    bench.apply("job", **DAILY, concurrencyPolicy="Allow")
    first, _ = bench.operator("op-1"), bench.operator("op-2")
    asked = ticks(30)
    with node(bench):
        run = backfill(bench, "job", asked[0], asked[-1], maxActive=2)
        wait_until("ten have ended", lambda: bench.run_status(run).get("backfill", {}).get("succeeded", 0) >= 10, 90)
        first.kill()
        bench.operator("op-3")
        status = answer(bench, run, seconds=120)
    assert status["phase"] == "Succeeded", status
    counts = status["backfill"]
    assert {k: counts[k] for k in ("ticks", "planned", "running", "succeeded", "failed", "skipped")} == {
        "ticks": 30, "planned": 30, "running": 0, "succeeded": 30, "failed": 0, "skipped": 0,
    }  # fmt: skip
    assert counts["current"] == []
    rows = bench.rows("job")
    assert [r["run_key"] for r in rows] == [key(t) for t in asked], "each tick once, oldest first"
    assert {(r["status"], r["attempt"], r["manual"]) for r in rows} == {("SUCCESS", 1, True)}
    assert at_once(rows) == 2
    assert len(json.dumps(status)) < 4000
    assert bench.sql("SELECT count(*) FROM leasedjob.tick_ledger") == [(0,)]
    reasons = [e.reason for e in bench.core.list_namespaced_event(bench.namespace).items]
    assert (reasons.count("BackfillStarted"), reasons.count("BackfillEnded")) == (1, 1)


def test_what_is_run_again_and_with_which_key(bench: Bench) -> None:
    bench.apply("job", **DAILY, concurrencyPolicy="Allow")
    bench.operator()
    good, bad, absent = ticks(3)
    with node(bench, lambda pod: 1 if run_key(pod) == key(bad) else 0):
        assert answer(bench, ask(bench, "job", tick=key(good)))["phase"] == "Succeeded"
        assert answer(bench, ask(bench, "job", tick=key(bad)))["phase"] == "Failed"

        plan = answer(bench, backfill(bench, "job", good, absent, reprocess="All", dryRun=True))
        assert (plan["phase"], plan["reason"]) == ("Succeeded", "Planned")
        assert [(p["action"], p["runKey"]) for p in plan["backfill"]["plan"]] == [
            ("Reprocess", f"{key(good)}#r1"), ("Retry", key(bad)), ("Run", key(absent)),
        ]  # fmt: skip
        assert len(bench.rows("job")) == 2, "a dry run starts nothing"

        none = answer(bench, backfill(bench, "job", good, absent))
        assert (none["backfill"]["skipped"], none["backfill"]["succeeded"]) == (2, 1)
        before = {r["run_key"]: r for r in bench.rows("job")}
        assert before[key(bad)]["attempt"] == 1
    with node(bench):
        failed = answer(bench, backfill(bench, "job", good, absent, reprocess="Failed"))
        assert (failed["backfill"]["skipped"], failed["backfill"]["succeeded"]) == (2, 1)
        again = {r["run_key"]: r for r in bench.rows("job")}
        assert (again[key(bad)]["status"], again[key(bad)]["attempt"]) == ("SUCCESS", 2)
        assert again[key(bad)]["fencing_token"] > before[key(bad)]["fencing_token"]

        for number in (1, 2):
            whole = answer(bench, backfill(bench, "job", good, absent, reprocess="All", maxActive=3))
            assert (whole["phase"], whole["backfill"]["succeeded"]) == ("Succeeded", 3)
            rows = {r["run_key"]: r for r in bench.rows("job")}
            assert {f"{key(t)}#r{number}" for t in (good, bad, absent)} <= rows.keys()
    assert len(rows) == 9
    assert len({r["lock_key"] for r in rows.values()}) == 9, "each has an idempotency key of its own"
    for tick in (good, absent):
        assert rows[key(tick)] == again[key(tick)], "a recorded success is never touched"


def test_forbid_runs_one_at_a_time_and_a_cancel_stops_it(bench: Bench) -> None:
    bench.apply("job", **DAILY)
    bench.operator()
    asked = ticks(5)
    with node(bench, lambda pod: 0 if run_key(pod) == key(asked[0]) else None):
        run = backfill(bench, "job", asked[0], asked[-1], maxActive=5)
        wait_until(
            "the second tick runs",
            lambda: bench.run_status(run).get("backfill", {}).get("current") == [key(asked[1])],
            60,
        )
        assert len(bench.rows("job")) == 2, "the job's own policy holds"
        other = ask(bench, "job", tick=key(asked[3]))
        wait_until("a run by name waits", lambda: bench.run_status(other).get("reason") == "Overlap", 60)
        bench.cancel(other)
        answer(bench, other, "Cancelled")
        bench.cancel(run)
        pod = next(p for p in bench.pods() if run_key(p) == key(asked[1]))
        wait_until("its Pod is stopped", lambda: bench.deleting(pod), 60)
    Kubelet(bench, pod).end(143)
    status = answer(bench, run, "Cancelled")
    assert (status["backfill"]["succeeded"], status["backfill"]["failed"]) == (1, 1)
    assert [r["run_key"] for r in bench.rows("job")] == [key(t) for t in asked[:2]]
    assert bench.rows("job")[1]["reason"] == "Cancelled"


def test_a_backfill_whose_object_is_deleted_begins_no_further_run(bench: Bench) -> None:
    bench.apply("job", **DAILY, concurrencyPolicy="Allow")
    bench.operator()
    asked = ticks(4)
    with node(bench, lambda _: None):
        run = backfill(bench, "job", asked[0], asked[-1], maxActive=1)
        answer(bench, run, "Running")
        wait_until("the first runs", lambda: any(r["pod_uid"] for r in bench.rows("job")), 60)
    bench.custom.delete_namespaced_custom_object(GROUP, VERSION, bench.namespace, "leasedjobruns", run)
    (pod,) = bench.pods()
    kubelet = Kubelet(bench, pod)
    kubelet.end(0)
    bench.row_when("job", lambda r: r["status"] == "SUCCESS", "what runs ends as what it was", seconds=60)
    follow = ask(bench, "job", action="Explain", tick=key(asked[1]))
    assert answer(bench, follow)["explanation"]["verdict"] == "BeforeWatermark"
    assert len(bench.rows("job")) == 1


@pytest.mark.parametrize(
    ("spec", "reason", "says"),
    [
        ({"schedule": "0 3 * * *"}, "TickInTheFuture", "spec.backfill.to"),
        ({"schedule": "* * * * *"}, "TooManyTicks", "more than 100000 ticks"),
        ({"type": "Initial", "suspend": True}, "NotATick", "type Initial"),
    ],
)
def test_what_is_refused(bench: Bench, spec: dict[str, Any], reason: str, says: str) -> None:
    bench.apply("job", **spec)
    bench.operator()
    last = datetime.now(UTC) + timedelta(days=1 if reason == "TickInTheFuture" else -1)
    status = answer(bench, backfill(bench, "job", last - timedelta(days=200), last))
    assert (status["phase"], status["reason"]) == ("Refused", reason)
    assert says in status["message"]
    assert [r for r in bench.rows("job") if r["manual"]] == []


def test_ticks_whose_records_were_deleted_are_left_and_counted(bench: Bench) -> None:
    bench.apply("job", **DAILY, concurrencyPolicy="Allow")
    bench.operator()
    asked = ticks(4)
    wait_until("it is registered", lambda: bench.sql("SELECT code FROM leasedjob.job_code"), 60)
    bench.sql(
        "INSERT INTO leasedjob.pruned_through (code, through) VALUES (%s, %s)", f"{bench.namespace}/job", asked[1]
    )
    bench.operators[0].stop()
    bench.operator("op-2")
    plan = answer(bench, backfill(bench, "job", asked[0], asked[-1], dryRun=True))["backfill"]
    assert [(p["action"], p.get("reason")) for p in plan["plan"]] == [("Skip", "Pruned")] * 2 + [("Run", None)] * 2
    with node(bench):
        status = answer(bench, backfill(bench, "job", asked[0], asked[-1], maxActive=2))
    assert (status["backfill"]["skipped"], status["backfill"]["succeeded"]) == (2, 2)
    assert len(bench.rows("job")) == 2


def test_thousands_of_ticks_that_have_run_are_passed_over_and_the_object_stays_small(bench: Bench) -> None:
    bench.apply("job", schedule="* * * * *", suspend=True)
    bench.operator()
    last = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(hours=1)
    first = last - timedelta(minutes=5_999)
    wait_until("it is registered", lambda: bench.sql("SELECT code FROM leasedjob.job_code"), 60)
    code = f"{bench.namespace}/job"
    keys = [key(first + timedelta(minutes=n)) for n in range(5_999)]
    locks = [RunIdentity.of(code=code, run_key=k).lock_key for k in keys]
    bench.sql(
        "INSERT INTO leasedjob.job_scheduler (lock_key, type, code, run_key, status, lease_ms, run_lease_ms, namespace,"
        " job_name, tick, finished_at) SELECT l, 'SCHEDULE', %s, k, 'SUCCESS', 1, 1, %s, 'done', k::timestamptz, now()"
        " FROM unnest(%s::text[], %s::text[]) x (l, k)",
        code, bench.namespace, locks, keys,
    )  # fmt: skip
    with node(bench):
        run = backfill(bench, "job", first, last)
        status = answer(bench, run, seconds=180)
    assert status["phase"] == "Succeeded", status
    assert status["backfill"]["ticks"] == 6_000
    assert (status["backfill"]["skipped"], status["backfill"]["succeeded"]) == (5_999, 1)
    assert len(json.dumps(bench.run(run))) < 6000


def test_what_the_api_server_refuses_names_its_field(bench: Bench) -> None:
    """No operator is needed for it; and what is said once stays said."""
    month = {"from": "2026-07-01T00:00:00Z", "to": "2026-07-31T00:00:00Z"}
    tick = month["to"]
    for spec, field in (
        ({"action": "Delete"}, "spec.action"),
        ({"backfill": {"from": tick}}, "spec.backfill.to"),
        ({"backfill": {**month, "from": "yesterday"}}, "spec.backfill.from"),
        ({"backfill": {"from": tick, "to": month["from"]}}, "spec.backfill.to"),
        ({"backfill": {**month, "maxActive": 101}}, "spec.backfill.maxActive"),
        ({"backfill": {**month, "reprocess": "failed"}}, "spec.backfill.reprocess"),
        ({"backfill": month, "tick": tick}, "spec.backfill"),
        ({"backfill": month, "action": "Explain"}, "spec.backfill"),
        ({"runKey": f"{tick}#r1"}, "spec.runKey"),
        ({"action": "Cancel", "runKey": "k", "tick": tick}, "spec.runKey"),
        ({"action": "Resume", "tick": tick}, "spec.tick"),
        ({"action": "Cancel", "tick": tick, "force": True}, "spec.force"),
        ({"action": "Release", "cancel": True}, "spec.cancel"),
    ):
        with pytest.raises(client.ApiException) as refused:
            ask(bench, "job", **spec)
        assert refused.value.status == 422, spec
        causes = json.loads(refused.value.body)["details"]["causes"]
        assert field in [cause["field"] for cause in causes], (spec, causes)
    run = ask(bench, "job", backfill=month)
    for change in ({"backfill": {**month, "maxActive": 3}}, {"action": "Explain"}, {"backfill": None}):
        with pytest.raises(client.ApiException):
            bench.custom.patch_namespaced_custom_object(
                GROUP, VERSION, bench.namespace, "leasedjobruns", run, {"spec": change}
            )
    bench.cancel(run)
