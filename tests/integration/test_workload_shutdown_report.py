"""How long the phases of a stop took: from the program by way of its Pod's sidecar into the database."""

from __future__ import annotations

import json
import socket
import threading
import uuid
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from leasedjob import protocol
from leasedjob.lease.store import OperatorStore
from leasedjob.lease.trust import Timing
from leasedjob.protocol import PhaseEnd
from leasedjob.workload.phases import Outcome, Phase

from .conftest import CLUSTER, Database
from .sidecar_parts import Pod, Pods, pods_for, post
from .workload_parts import Process, Processes, processes

pytestmark = pytest.mark.integration

PROGRAM = """
import logging, sys
from leasedjob.workload import *
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
state = ShutdownState.listening()
run = current_run()
def fail():
    raise OSError("no broker")
with GracefulShutdown(state) as shutdown:
    shutdown.on_stop(Phase.BACKGROUND, "relay", lambda: None)
    shutdown.on_stop(Phase.CONSUMERS, "consumer", fail)
    print("ready", flush=True)
    if sys.argv[1] == "complete":
        run.complete()
    else:
        shutdown.wait()
"""
TIMING = Timing(duration=120, heartbeat=2, grace=20, pre_stop=0)


@pytest.fixture
def run() -> Iterator[Processes]:
    yield from processes()


@pytest.fixture
def pods(tmp_path: Path, database: Database, store: OperatorStore) -> Iterator[Pods]:
    yield from pods_for(tmp_path, database, store)


def program(run: Processes, url: str, pod: Pod | None = None, end: str = "drain") -> Process:
    import sys

    env = {protocol.ENV_SIDECAR_URL: url}
    if pod is not None:
        env |= {
            protocol.ENV_TYPE: "SCHEDULE",
            protocol.ENV_CODE: "a",
            protocol.ENV_RUN_KEY: "b",
            protocol.ENV_IDEMPOTENCY_KEY: "v2:key",
            protocol.ENV_ATTEMPT: "1",
            protocol.ENV_FENCING_TOKEN: "1",
            protocol.ENV_CONTAINERS: "1",
        }
    return run.start([sys.executable, "-c", PROGRAM, end], env)


def reports(database: Database) -> list[dict[str, Any]]:
    return database.rows("SELECT * FROM leasedjob.shutdown_report ORDER BY recorded_at")


def test_the_words_of_protocol_are_those_of_the_phases() -> None:
    assert list(Phase) == list(protocol.SHUTDOWN_PHASES)
    assert list(Outcome) == list(protocol.SHUTDOWN_OUTCOMES)


@pytest.mark.parametrize("end", ["drain", "complete"])
async def test_what_a_program_says_at_its_end_is_stored_with_its_run_and_given_out_once(
    run: Processes, pods: Pods, minute: datetime, database: Database, store: OperatorStore, end: str
) -> None:
    pod = await pods.pod(minute, TIMING)
    pod.adopt_and_hold()
    process = program(run, f"http://127.0.0.1:{pod.report_port}", pod, end)
    process.line("ready")
    if end == "drain":
        assert pod.run("drain") == 0
    assert process.wait() == 0, process.err
    pod.end()
    (row,) = reports(database)
    assert (row["run_id"], row["attempt"], row["cluster"]) == (uuid.UUID(pod.lease_id), 1, CLUSTER)
    assert [(entry["phase"], entry["outcome"]) for entry in row["phases"]] == [
        ("background", "done"),
        ("consumers", "failed"),
    ]
    assert pod.row()["status"] == ("RUNNING" if end == "drain" else "SUCCESS")
    assert await store.take_shutdown_reports("another") == []
    assert await store.take_shutdown_reports(CLUSTER) == [PhaseEnd.parse(row["phases"])]
    assert await store.take_shutdown_reports(CLUSTER) == []
    database.connect(autocommit=True).execute("DELETE FROM leasedjob.job_scheduler")
    assert reports(database) == []


async def test_an_answer_that_is_lost_counts_once(pods: Pods, minute: datetime, database: Database) -> None:
    pod = await pods.pod(minute, TIMING)
    pod.adopt_and_hold()
    pod.proxy.lose_answer_to = b"leasedjob.report_shutdown"
    body = json.dumps({"phases": [{"phase": "http", "outcome": "done", "seconds": 1}]}).encode()
    assert post(pod.report_port, "/v1/shutdown", body, 30) == (202, {"accepted": True})
    pod.await_view(lambda view: bool(view["heartbeats"]["failed"] == 1))
    pod.await_beats(2)
    assert pod.proxy.lost_answers == 1
    pod.end()
    assert len(reports(database)) == 1


async def test_a_database_that_does_not_know_the_function_costs_the_lease_nothing(
    pods: Pods, minute: datetime, database: Database
) -> None:
    """A sidecar of this version on an older schema."""
    pod = await pods.pod(minute, TIMING)
    database.connect(autocommit=True).execute("DROP FUNCTION leasedjob.report_shutdown")
    pod.adopt_and_hold()
    body = json.dumps({"phases": [{"phase": "http", "outcome": "done", "seconds": 1}]}).encode()
    assert post(pod.report_port, "/v1/shutdown", body, 30)[0] == 202
    view = pod.await_view(lambda view: bool(view["heartbeats"]["failed"] == 3), seconds=60)
    assert view["leased"]
    pod.await_beats(1)
    assert pod.post({"outcome": "complete"})[0] == 200
    pod.end()


REFUSED = (
    (b"no JSON", "expected JSON"),
    (b"[]", "phases must be a list"),
    (b"{}", "phases must be a list"),
    (b'{"phases": [1]}', "phases[0] must be an object"),
    (b'{"phases": [{"phase": "", "outcome": "done", "seconds": 1}]}', "phases[0].phase"),
    (b'{"phases": [{"phase": "http", "outcome": 1, "seconds": 1}]}', "phases[0].outcome"),
    (b'{"phases": [{"phase": "http", "outcome": "done", "seconds": -1}]}', "phases[0].seconds"),
    (b'{"phases": [{"phase": "http", "outcome": "done", "seconds": NaN}]}', "phases[0].seconds"),
    (b'{"phases": [{"phase": "http", "outcome": "done", "seconds": true}]}', "phases[0].seconds"),
    (json.dumps({"phases": [{"phase": "a", "outcome": "b", "seconds": 1}] * 17}).encode(), "at most 16"),
)


async def test_what_is_no_report_is_refused(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, TIMING)
    pod.adopt_and_hold()
    for body, said in REFUSED:
        status, answer = post(pod.report_port, "/v1/shutdown", body, 30)
        assert status == 400
        assert said in answer["error"]


async def test_what_the_database_refuses(
    pods: Pods, minute: datetime, database: Database, store: OperatorStore
) -> None:
    pod = await pods.pod(minute, TIMING)
    pod.adopt_and_hold()
    token = uuid.UUID(pod.handoff()["token"])
    with database.connect(autocommit=True) as owner:

        def call(token: uuid.UUID, phases: str, report: uuid.UUID | None = None) -> Any:
            row = owner.execute(
                "SELECT leasedjob.report_shutdown(%s, %s, %s, %s::jsonb) AS taken",
                (pod.lease_id, token, report or uuid.uuid4(), phases),
            ).fetchone()
            assert row is not None
            return row["taken"]

        assert call(uuid.uuid4(), "[]") is False
        for wrong in ('{"a": 1}', "null", json.dumps(["x" * 3000])):
            with pytest.raises(Exception, match="phases must be a JSON array"):
                call(token, wrong)
        # What a tenant's role writes by itself is left out by whoever reads it.
        assert call(token, '["nonsense"]') is True
        for _ in range(15):
            assert call(token, "[]") is True
        assert call(token, "[]") is False, "one attempt doesn't fill the table"
    assert await store.take_shutdown_reports(CLUSTER) == [()] * 15


def test_a_sidecar_of_before_and_one_that_is_gone_cost_the_program_nothing(run: Processes) -> None:
    class Old(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b'{"error": "no such path"}')

        def log_message(self, *_: object) -> None:
            pass

    with socket.create_server(("127.0.0.1", 0)) as gone, ThreadingHTTPServer(("127.0.0.1", 0), Old) as server:
        threading.Thread(target=server.serve_forever).start()
        for port, said in ((server.server_address[1], "no such path"), (gone.getsockname()[1], "does not answer")):
            process = run.python(
                f"""
                import logging
                from leasedjob.workload import *
                from leasedjob.workload.sidecar import sidecar_at
                logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
                state = ShutdownState()
                state.sidecar = sidecar_at("http://127.0.0.1:{port}")
                with GracefulShutdown(state) as shutdown:
                    shutdown.on_stop(Phase.POOLS, "pool", lambda: print("closed"))
                """
            )
            assert process.wait() == 0
            assert process.out == ["closed"]
            assert "the durations of the shutdown were not taken" in process.err
            assert said in process.err
        server.shutdown()


async def test_a_program_that_is_ended_by_force_says_it_with_its_last_words(
    run: Processes, pods: Pods, minute: datetime, database: Database
) -> None:
    pod = await pods.pod(minute, TIMING)
    pod.adopt_and_hold()
    process = run.python(
        f"""
        import threading
        from leasedjob.workload import *
        from leasedjob.workload.sidecar import sidecar_at
        state = ShutdownState()
        state.sidecar = sidecar_at("http://127.0.0.1:{pod.report_port}")
        with GracefulShutdown(state, ShutdownBudget(total=2, pre_stop=0, http=0, intervals=0, background=1, consumers=0,
                                                    pools=0, sidecar=1)) as shutdown:
            shutdown.on_stop(Phase.BACKGROUND, "relay", threading.Event().wait)
            shutdown.on_stop(Phase.POOLS, "pool", threading.Event().wait)
        """
    )
    assert process.wait() == 143
    pod.end()
    (row,) = reports(database)
    assert {entry["phase"]: entry["outcome"] for entry in row["phases"]}["background"] == "cut"
