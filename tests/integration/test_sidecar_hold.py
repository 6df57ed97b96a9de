"""hold against a real PostgreSQL, as the real process: the whole path, and every way in which its world breaks."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from tests.chaos.proxy import FaultyProxy

from leasedjob import protocol
from leasedjob.lease.rows import Outcome
from leasedjob.lease.store import OperatorStore
from leasedjob.lease.trust import Timing
from leasedjob.protocol import Seen

from .conftest import Database, claimed, lock_row
from .sidecar_parts import CALM, SHORT, Pod, Pods, pods_for, write_credentials

pytestmark = pytest.mark.integration


@pytest.fixture
def pods(tmp_path: Path, database: Database, store: OperatorStore) -> Iterator[Pods]:
    yield from pods_for(tmp_path, database, store)


def fenced(view: dict[str, Any]) -> bool:
    return bool(view["state"] == "fenced")


async def test_the_path_of_a_run(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, SHORT)
    pod.adopt_and_hold()
    assert pod.run("gate") == 0
    assert pod.probe() == 200
    assert pod.probe(attempt=2) == 503
    before = pod.row()["modified_at"]
    pod.await_beats(2)
    assert pod.row()["modified_at"] > before
    assert pod.lease_left() > SHORT.duration - 2.5
    assert pod.run("drain") == 0
    view = pod.view()
    assert (view["draining"], view["leased"], view["fencingToken"]) == (True, True, pod.row()["fencing_token"])
    assert (view["graceSeconds"], view["preStopSeconds"]) == (SHORT.grace, SHORT.pre_stop)
    assert view["sinceAdoptionSeconds"] > 0
    pod.await_beats(1)
    began = time.monotonic()
    testimony = pod.end()
    assert time.monotonic() - began < 1
    assert (testimony.seen, testimony.final, testimony.lease_id, testimony.attempt) == (
        Seen.LEASED,
        True,
        pod.lease_id,
        1,
    )
    assert testimony.beat <= time.time() < testimony.until
    assert pod.row()["status"] == "RUNNING", "an image that reports nothing is finalized by the operator"
    assert pod.handoff()["token"] not in pod.log("hold") + json.dumps(view)


async def test_heartbeats_stay_hot_updates(pods: Pods, minute: datetime, database: Database) -> None:
    pod = await pods.pod(minute, SHORT)
    pod.adopt_and_hold()
    pod.await_beats(3)
    pod.end()
    # Statistics arrive when a session ends.
    (stats,) = database.rows(
        "SELECT n_tup_upd - n_tup_hot_upd AS cold FROM pg_stat_user_tables WHERE relname = 'job_scheduler'"
    )
    assert stats["cold"] <= 1, "adopt itself may not be HOT"


@pytest.mark.parametrize("mode", ["hole", "mute", "refuse"])
async def test_without_a_database_the_answer_is_no_before_the_lease_ends(
    mode: str, pods: Pods, minute: datetime
) -> None:
    pod = await pods.pod(minute, SHORT)
    pod.adopt_and_hold()
    pod.await_beats(1)
    pod.proxy.mode = mode
    if mode == "refuse":
        pod.proxy.reset()
    slowest = 0.0
    while not fenced(pod.view()):
        began = time.monotonic()
        status = pod.probe()
        slowest = max(slowest, time.monotonic() - began)
        assert status == 200 or fenced(pod.view())
        pod.view(revision=pod.view()["revision"], wait=0.2)
    assert pod.left_when_fenced() >= SHORT.fence_budget, "the workload must have its whole time to stop"
    assert slowest < 1, "a call that hangs must not hold up the probes"
    assert pod.probe() == 503
    pod.proxy.mode = "pass"
    pod.proxy.reset()
    pod.await_beats(1)
    assert pod.probe() == 503, "fenced is sticky"
    testimony = pod.end()
    assert testimony.seen is Seen.FENCED
    assert testimony.fenced_at is not None
    assert "in time" in testimony.reason


async def test_an_outage_shorter_than_trust_is_survived(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, SHORT)
    pod.adopt_and_hold()
    pod.await_beats(1)
    pod.proxy.mode = "refuse"
    pod.proxy.reset()
    pod.await_view(lambda v: bool(v["heartbeats"]["failed"] >= 2))
    pod.proxy.mode = "pass"
    pod.await_beats(2)
    assert pod.probe() == 200
    assert pod.end().seen is Seen.LEASED


async def test_sessions_that_are_ended_all_the_time_cost_nothing(
    pods: Pods, minute: datetime, database: Database
) -> None:
    pod = await pods.pod(minute, SHORT)
    pod.adopt_and_hold()
    for _ in range(4):
        pod.await_beats(1)
        with psycopg.connect(database.server.conninfo(database.name), autocommit=True) as admin:
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", (pods.user,))
    pod.await_beats(1)
    assert pod.end().seen is Seen.LEASED


async def test_a_connection_that_a_firewall_forgot_costs_no_lease(
    pods: Pods, minute: datetime, database: Database
) -> None:
    """No packet of the open connection arrives any more, and nobody is told; a new one works."""
    with FaultyProxy(database.server.address, database.server.port) as network:
        pod = await pods.pod(minute, SHORT)
        pod.proxy.leads_to("127.0.0.1", network.port)
        pod.adopt_and_hold()
        pod.await_beats(1)
        network.strand()
        view = pod.await_beats(2, seconds=60)
        assert view["heartbeats"]["failed"] >= 1
        assert pod.probe() == 200
        assert pod.end().seen is Seen.LEASED


# --- frozen, killed, restarted ---------------------------------------------------------------------------------------


async def test_frozen_past_trust_its_first_answer_is_no(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, SHORT)
    pod.adopt_and_hold()
    pod.await_beats(1)
    pod.freeze(SHORT.trust + 0.1)
    assert pod.probe() == 503
    assert pod.end().seen is Seen.FENCED


async def test_frozen_for_less_than_trust_it_holds_but_testifies_only_after_a_new_yes(
    pods: Pods, minute: datetime
) -> None:
    pod = await pods.pod(minute, SHORT)
    pod.adopt_and_hold()
    assert pod.probe() == 200
    pod.await_beats(1)
    pod.freeze(1.5)  # longer than one probe's timeout, which is all that this timing allows
    assert pod.probe() == 200, "the lease is held"
    testimony = pod.end()
    assert testimony.seen is Seen.FENCED
    assert "frozen" in testimony.reason


async def test_frozen_and_asked_again_it_testifies_leased(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, SHORT)
    pod.adopt_and_hold()
    assert pod.probe() == 200
    pod.freeze(1.5)
    pod.await_beats(2)  # more than the probe's timeout after the thaw
    assert pod.probe() == 200
    assert pod.end().seen is Seen.LEASED


async def test_killed_and_restarted_it_goes_on_with_the_same_token(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    pod.await_beats(1)
    before = pod.row()
    pod.kill()
    assert pod.testimony().final is False
    assert pod.testimony().seen is Seen.LEASED
    pod.begin_hold()
    assert pod.probe() == 200
    pod.await_beats(1)
    after = pod.row()
    assert (after["owner_token"], after["attempt"]) == (before["owner_token"], before["attempt"])
    assert after["modified_at"] > before["modified_at"]
    assert pod.end().seen is Seen.LEASED


async def test_restarted_without_a_database_it_trusts_its_predecessors_heartbeat_and_no_longer(
    pods: Pods, minute: datetime
) -> None:
    pod = await pods.pod(minute, SHORT)
    pod.adopt_and_hold()
    pod.await_beats(2)
    pod.kill()
    pod.proxy.mode = "refuse"
    pod.begin_hold()
    assert pod.probe() == 200
    pod.await_view(fenced)
    assert pod.left_when_fenced() >= SHORT.fence_budget


async def test_restarted_past_the_handoffs_deadline_it_says_no_until_one_heartbeat_is_answered(
    pods: Pods, minute: datetime
) -> None:
    pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    pod.kill()
    (pod.directory / "hold.json").unlink()
    handoff = pod.handoff()
    handoff |= {"sent": handoff["sent"] - CALM.trust, "trusted_until": handoff["trusted_until"] - CALM.trust}
    (pod.directory / "lease.json").write_text(json.dumps(handoff))
    pod.proxy.mode = "refuse"
    pod.begin_hold()
    assert pod.view()["state"] == "unconfirmed"
    assert pod.probe() == 503
    pod.proxy.mode = "pass"
    pod.await_view(lambda v: bool(v["leased"]))
    assert pod.probe() == 200


async def test_times_of_another_boot_mean_nothing(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    assert pod.run("adopt") == 0
    (pod.directory / "lease.json").write_text(json.dumps({**pod.handoff(), "boot_id": "another boot"}))
    pod.proxy.mode = "refuse"
    pod.begin_hold()
    assert pod.view()["state"] == "unconfirmed"
    assert pod.end().seen is Seen.FENCED


async def test_a_fence_survives_the_process(pods: Pods, minute: datetime, store: OperatorStore) -> None:
    pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    await store.request_stop([UUID(pod.lease_id)], reason="Replaced")
    pod.await_view(fenced)
    pod.kill()
    pod.begin_hold()
    assert pod.probe() == 503
    assert fenced(pod.view())


async def test_before_the_handoff_it_says_no_and_the_gate_stays_shut(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM, extra={"LEASEDJOB_SIDECAR_GATE_SECONDS": "1"})
    pod.begin_hold()
    assert pod.probe() == 503
    assert pod.run("gate") == protocol.EXIT_NOT_MINE
    assert pod.message("gate")["gate"] == "unreachable"
    assert pod.run("adopt") == 0
    pod.await_view(lambda v: bool(v["leased"]))
    assert pod.run("gate") == 0


async def test_sigterm_before_the_handoff(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    pod.begin_hold()
    testimony = pod.end()
    assert (testimony.seen, testimony.final, testimony.lease_id) == (Seen.FENCED, True, pod.lease_id)


async def test_a_handoff_of_another_pod_is_not_taken(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    assert pod.run("adopt") == 0
    pod.uid = "another-uid"
    pod.begin_hold()
    assert pod.view()["state"] == "waiting"


# --- what the database says ------------------------------------------------------------------------------------------


async def test_a_stop_request_fences_at_the_next_heartbeat(pods: Pods, minute: datetime, store: OperatorStore) -> None:
    pod = await pods.pod(minute, SHORT)
    pod.adopt_and_hold()
    await store.request_stop([UUID(pod.lease_id)], reason="Replaced")
    pod.await_view(fenced, seconds=3)
    assert pod.probe() == 503
    assert pod.run("gate") == protocol.EXIT_NOT_MINE
    assert "stop" in pod.message("gate")["message"]
    assert "stop" in pod.end().reason


async def test_a_lost_lease_fences_at_the_next_heartbeat_and_nothing_more_is_sent(
    pods: Pods, minute: datetime, database: Database, store: OperatorStore
) -> None:
    pod = await pods.pod(minute, SHORT)
    pod.adopt_and_hold()
    database.age(UUID(pod.lease_id), 13)
    second = await claimed(store, minute, run_lease_ms=12_000)
    assert second.attempt == 2
    pod.await_view(fenced, seconds=3)
    assert pod.probe() == 503
    status, body = pod.post({"outcome": "complete"})
    assert (status, body["recorded"]) == (409, False)
    assert pod.row()["status"] == "RUNNING"
    assert pod.row()["owner_token"] == second.owner_token
    assert pod.end().seen is Seen.FENCED


async def test_a_wrong_token_is_a_lost_lease(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, SHORT)
    assert pod.run("adopt") == 0
    (pod.directory / "lease.json").write_text(
        json.dumps({**pod.handoff(), "token": "00000000-0000-4000-8000-000000000000"})
    )
    pod.begin_hold()
    pod.await_view(fenced, seconds=4)
    assert pod.probe() == 503


async def test_a_row_that_a_stranger_locks_is_neither_lost_nor_held_for_ever(
    pods: Pods, minute: datetime, database: Database
) -> None:
    pod = await pods.pod(minute, SHORT)
    pod.adopt_and_hold()
    stranger = database.connect(autocommit=False)
    lock_row(stranger, "job_scheduler", "id", UUID(pod.lease_id))
    pod.await_view(lambda v: "locked" in v["heartbeats"]["lastProblem"])
    assert pod.probe() == 200
    pod.await_view(fenced)
    assert pod.left_when_fenced() >= SHORT.fence_budget


async def test_a_password_that_is_rotated_between_heartbeats_needs_no_restart(
    pods: Pods, minute: datetime, database: Database
) -> None:
    pod = await pods.pod(minute, Timing(duration=60, heartbeat=6, grace=1, pre_stop=0))
    pod.adopt_and_hold()
    await pods.tenant(password="new")
    assert pod.await_view(lambda v: v["heartbeats"]["failed"] > 0)["leased"]
    assert "refused the login" in pod.view()["heartbeats"]["lastProblem"]
    write_credentials(pod.directory / "database", database, pod.proxy.port, pods.user, "new")
    pod.await_beats(1)
    assert pod.end().seen is Seen.LEASED


# --- a slow database -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delay", "timing"),
    [
        pytest.param(0.15, SHORT, id="150 ms"),
        pytest.param(3.0, Timing(duration=150, heartbeat=5, grace=1, pre_stop=0), id="3 s"),
    ],
)
async def test_a_slow_database_is_no_loss_and_holds_up_no_probe(
    delay: float, timing: Timing, pods: Pods, minute: datetime
) -> None:
    pod = await pods.pod(minute, timing)
    assert pod.run("adopt") == 0
    pod.proxy.delay = delay
    pod.begin_hold()
    answers: list[tuple[int, float]] = []
    beats = pod.view()["heartbeats"]["answered"]
    until = time.monotonic() + 60
    while (view := pod.view())["heartbeats"]["answered"] < beats + 2:
        assert time.monotonic() < until, pod.log("hold")
        began = time.monotonic()
        answers.append((pod.probe(), time.monotonic() - began))
        pod.view(revision=view["revision"], wait=0.2)
    assert {status for status, _ in answers} == {200}
    assert max(seconds for _, seconds in answers) < 1
    assert pod.view()["heartbeats"]["latestSeconds"] >= delay
    assert pod.end().seen is Seen.LEASED


# --- reported outcomes -----------------------------------------------------------------------------------------------


async def test_a_reported_success_is_recorded_at_once(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    assert pod.post({"outcome": "complete", "data": {"rows": 42}}) == (200, {"recorded": True, "outcome": "complete"})
    row = pod.row()
    assert (row["status"], row["outcome"], row["data"]) == ("SUCCESS", "complete", {"rows": 42})
    assert pod.post({"outcome": "complete"})[0] == 200
    assert pod.post({"outcome": "fail"}) == (
        409,
        {"recorded": False, "outcome": "fail", "error": "complete is recorded already", "lost": False},
    )
    assert pod.row() == row
    assert pod.probe() == 200, "the workload may end in peace"
    testimony = pod.end()
    assert (testimony.seen, testimony.outcome, testimony.recorded) == (Seen.REPORTED, "complete", True)


@pytest.mark.parametrize("outcome", ["fail", "release"])
async def test_what_makes_a_run_claimable_is_recorded_at_the_workloads_end(
    outcome: str, pods: Pods, minute: datetime
) -> None:
    pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    assert pod.post({"outcome": outcome, "data": {"rows": 42}})[0] == 202
    assert pod.post({"outcome": "complete"})[0] == 409
    assert pod.row()["status"] == "RUNNING"
    testimony = pod.end()
    assert (testimony.seen, testimony.outcome, testimony.recorded) == (Seen.REPORTED, outcome, True)
    row = pod.row()
    assert (row["status"], row["outcome"], row["data"]) == ("FAIL", outcome, {"rows": 42})


@pytest.mark.parametrize("outcome", list(Outcome))
async def test_an_outcome_whose_answer_is_lost_is_recorded_once(outcome: Outcome, pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    pod.proxy.lose_answer_to = b"leasedjob.finish"
    if outcome is Outcome.COMPLETE:
        assert pod.post({"outcome": outcome})[0] == 200
    else:
        assert pod.post({"outcome": outcome})[0] == 202
        pod.end()
    assert pod.proxy.lost_answers == 1
    row = pod.row()
    assert (row["outcome"], row["failures"], row["interruptions"]) == (
        outcome,
        int(outcome is Outcome.FAIL),
        int(outcome is Outcome.RELEASE),
    )


async def test_signals_that_come_again_join_the_end_that_has_begun(pods: Pods, minute: datetime) -> None:
    """The workload's failure is on its way to a slow database; SIGTERM comes three times, SIGINT once: one end, that is
    recorded once, and a final testimony."""
    pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    assert pod.post({"outcome": "fail", "data": {"rows": 42}})[0] == 202
    pod.proxy.delay = 0.15
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
        pod.signal(number)
        await asyncio.sleep(0.05)  # apart, so that each is delivered
    testimony = pod.end()
    assert (testimony.seen, testimony.outcome, testimony.final) == (Seen.REPORTED, "fail", True)
    row = pod.row()
    if testimony.recorded:  # else the operator records it: a busy machine may need longer than a sidecar waits
        assert (row["status"], row["failures"], row["data"]) == ("FAIL", 1, {"rows": 42})
    else:
        assert row["failures"] <= 1


async def test_an_outcome_waits_for_the_database(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    pod.proxy.mode = "refuse"
    pod.proxy.reset()
    answers: list[int] = []
    reporter = threading.Thread(target=lambda: answers.append(pod.post({"outcome": "complete"})[0]))
    reporter.start()
    pod.await_view(lambda v: v["outcome"] == "complete" and v["heartbeats"]["failed"] > 0)
    pod.proxy.mode = "pass"
    reporter.join(20)
    assert answers == [200]
    assert pod.row()["status"] == "SUCCESS"


async def test_an_outcome_that_the_database_never_took_is_testified(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    pod.proxy.mode = "refuse"
    pod.proxy.reset()
    with pytest.raises(OSError):
        pod.post({"outcome": "complete"}, seconds=0.5)
    testimony = pod.end()
    assert (testimony.seen, testimony.outcome, testimony.recorded) == (Seen.REPORTED, "complete", False)
    assert pod.row()["status"] == "RUNNING"


async def test_work_that_was_finished_past_trust_is_recorded_if_nobody_reclaimed(
    pods: Pods, minute: datetime, database: Database
) -> None:
    pod = await pods.pod(minute, SHORT)
    pod.adopt_and_hold()
    pod.proxy.mode = "refuse"
    pod.proxy.reset()
    pod.await_view(fenced)
    database.age(UUID(pod.lease_id), 60)
    pod.proxy.mode = "pass"
    pod.await_view(lambda v: bool(v["lost"]))
    assert pod.post({"outcome": "complete"})[0] == 200
    assert pod.row()["status"] == "SUCCESS"
    assert pod.end().seen is Seen.REPORTED


@pytest.mark.parametrize(
    ("raw", "stored"),
    [
        pytest.param(b'{"outcome":"fail","data":{"error":"a\\u0000b"}}', {"error": "a\ufffdb"}, id="NUL"),
        pytest.param(b'{"outcome":"fail","data":"\\ud800"}', "\ufffd", id="lone surrogate"),
        pytest.param(b'{"outcome":"fail","data":"\xff\xfe"}', "\ufffd\ufffd", id="not UTF-8"),
        pytest.param(b'{"outcome":"fail","data":[NaN,-Infinity]}', ["NaN", "-Infinity"], id="NaN"),
        pytest.param(b'{"outcome":"fail"}', None, id="no data"),
    ],
)
async def test_data_that_postgresql_cannot_store_is_replaced_and_the_run_is_recorded(
    raw: bytes, stored: object, pods: Pods, minute: datetime
) -> None:
    pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    assert pod.post(None, raw=raw)[0] == 202
    pod.end()
    assert pod.row()["data"] == stored


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 400),
        (b"not json", 400),
        (b"[]", 400),
        (b'{"outcome":"success"}', 400),
        (b"[" * 100_000, 400),
        (b'{"outcome":"fail","data":"' + b"x" * 2_000_000 + b'"}', 413),
    ],
    ids=["empty", "no JSON", "no object", "unknown outcome", "too deep", "too large"],
)
async def test_reports_that_make_no_sense_are_refused_and_the_lease_is_held(
    raw: bytes, status: int, pods: Pods, minute: datetime
) -> None:
    pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    assert pod.post(None, raw=raw)[0] == status
    assert pod.probe() == 200
    assert pod.row()["status"] == "RUNNING"


# --- what the workload hears, and its own probes ---------------------------------------------------------------------


async def test_whoever_waits_for_the_drain_notice_is_told_at_once(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    heard: list[tuple[dict[str, Any], float]] = []

    def listen() -> None:
        from leasedjob.http1 import ask

        _, body = ask("127.0.0.1", pod.report_port, "GET", "/v1/drain?wait=20", seconds=25)
        heard.append((json.loads(body), time.monotonic()))

    listener = threading.Thread(target=listen)
    listener.start()
    told = time.monotonic()
    assert pod.run("drain") == 0
    listener.join(10)
    assert heard[0][0] == {"draining": True, "leased": True, "reason": ""}
    assert heard[0][1] - told < 2


async def test_drain_never_fails(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    assert pod.run("drain", seconds=4) == 0


class Health:
    """The workload's own endpoint, which may turn ill."""

    def __init__(self) -> None:
        self.status = 200
        self.asked = threading.Event()
        health = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                health.asked.set()
                self.send_response(health.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def own_probes(**probes: dict[str, Any]) -> dict[str, str]:
    base = {"periodSeconds": 1, "failureThreshold": 2, "timeoutSeconds": 1}
    return {protocol.ENV_USER_PROBES: json.dumps({name: {**base, **probe} for name, probe in probes.items()})}


async def test_a_workloads_own_probe_stops_its_container_and_leaves_the_lease(pods: Pods, minute: datetime) -> None:
    health = Health()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pod = await pods.pod(
            minute,
            CALM,
            extra=own_probes(
                web={"httpGet": {"path": "/healthz", "port": health.port}},
                queue={"tcpSocket": {"port": listener.getsockname()[1]}},
            ),
        )
        pod.adopt_and_hold()
        assert pod.probe("web") == 200
        assert pod.probe("queue") == 200
        assert health.asked.wait(10)
        assert pod.view()["unhealthy"] == {}
        health.status = 500
        view = pod.await_view(lambda v: bool(v["unhealthy"]))
        assert view["unhealthy"] == {"web": "HTTP status 500"}
        assert view["leased"]
        assert [pod.probe(c) for c in ("web", "queue", "other")] == [503, 200, 200]
    pod.await_view(lambda v: "queue" in v["unhealthy"])
    pod.kill()
    pod.begin_hold()
    assert pod.probe("web") == 503, "for good, also over a restart"
    testimony = pod.end()
    assert testimony.failed_probe == "web"
    health.server.shutdown()
    health.server.server_close()


async def test_own_probes_that_make_no_sense_are_not_performed(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM, extra={protocol.ENV_USER_PROBES: "{nonsense"})
    pod.adopt_and_hold()
    assert pod.probe() == 200


async def test_the_testimony_is_rewritten_each_second(pods: Pods, minute: datetime) -> None:
    pod: Pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    first = pod.testimony().beat
    pod.await_beats(1)
    pod.kill()
    last = pod.testimony()
    assert last.beat > first
    assert time.time() - last.beat < 3
