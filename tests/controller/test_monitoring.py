"""What is counted and told of runs: by two replicas on a real API server, to a monitor that is a real HTTP server."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from leasedjob.lease.rows import Outcome
from tests.controller.control_plane import Bench, Kubelet, OperatorProcess, wait_until
from tests.controller.test_policies import HOURLY, after_outage

SECRET_PATH = "/ping/5ecr3t"


class Monitor:
    """Remembers the signals that it was told, with their runs; answers when `let_go` is set."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.let_go = threading.Event()
        self.let_go.set()
        monitor = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                path, _, query = self.path.partition("?")
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                monitor.told.append((path, query.removeprefix("rid=")))
                monitor.let_go.wait(60)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.let_go.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def environment(self) -> dict[str, str]:
        return {"LEASEDJOB_PING_HOSTS": self.host}


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    monitor = Monitor()
    yield monitor
    monitor.close()


def summed(
    operators: list[OperatorProcess], name: str, by: str = "", how: Callable[[list[float]], float] = sum
) -> dict[str, float]:
    """The samples of this name, over all replicas, by one label; zeros left out."""
    found: dict[str, list[float]] = {}
    for operator in operators:
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.metrics}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name:
                    found.setdefault(sample.labels.get(by, ""), []).append(sample.value)
    totals = {key: how(values) for key, values in found.items()}
    return {key: value for key, value in totals.items() if value}


def test_two_replicas_count_each_run_once_and_tell_its_monitor_in_order(bench: Bench, monitor: Monitor) -> None:
    replicas = [bench.operator(name, **monitor.environment) for name in ("op-1", "op-2")]
    bench.apply("job", suspend=True, monitoring={"pingURL": monitor.host + SECRET_PATH})

    bench.run_now("job", name="good")
    good = Kubelet(bench, bench.pod_for("job"))
    good.run()
    wait_until("the start is told", lambda: monitor.told, 60)
    good.end(0)
    wait_until("the success is told", lambda: len(monitor.told) == 2, 60)

    bench.run_now("job", name="bad")
    wait_until("the second Pod", lambda: bench.pod_for("job")["metadata"]["uid"] != good.pod["metadata"]["uid"], 60)
    bad = Kubelet(bench, bench.pod_for("job"))
    bad.run()
    assert bad.report(Outcome.FAIL, {"error": "no such order"})  # nobody but the sidecar writes this end
    wait_until("the failure is told", lambda: (f"{SECRET_PATH}/fail", str(bad.lease_id)) in monitor.told, 60)

    assert monitor.told[:2] == [(f"{SECRET_PATH}/start", str(good.lease_id)), (SECRET_PATH, str(good.lease_id))]
    of_bad = [path for path, run in monitor.told if run == str(bad.lease_id)]
    assert of_bad in ([f"{SECRET_PATH}/start", f"{SECRET_PATH}/fail"], [f"{SECRET_PATH}/fail"])  # it was that short
    assert summed(replicas, "leasedjob_runs_total", "outcome") == {"success": 1, "fail": 1}
    assert summed(replicas, "leasedjob_runs_total", "reason") == {"Completed": 1, "Reported": 1}
    assert summed(replicas, "leasedjob_attempts_total", "outcome") == {"complete": 1, "fail": 1}
    assert summed(replicas, "leasedjob_pings_total", "result") == {"sent": len(monitor.told)}
    assert summed(replicas, "leasedjob_database_statement_seconds_count", "statement").keys() >= {"claim_runs"}
    logs = "".join(o.log.read_text() for o in replicas)
    assert SECRET_PATH not in logs


def test_a_monitor_that_does_not_answer_delays_no_run(bench: Bench, monitor: Monitor) -> None:
    monitor.let_go.clear()
    operator = bench.operator(**monitor.environment)
    bench.apply("job", suspend=True, monitoring={"pingURL": monitor.host})
    bench.whole_run("job")
    wait_until("it hangs", lambda: monitor.told, 60)
    bench.whole_run("job")
    assert operator.ready()
    assert operator.stop() == 0  # nor the operator's end


def test_a_url_from_the_secret_and_one_that_may_not_be_called(bench: Bench, monitor: Monitor) -> None:
    bench.operator(**monitor.environment)
    secret = {"metadata": {"name": "leasedjob-monitoring"}, "stringData": {"nightly": monitor.host + SECRET_PATH}}
    bench.core.create_namespaced_secret(bench.namespace, secret)
    bench.apply("job", suspend=True, monitoring={"pingURLKey": "nightly"})
    bench.apply("other", suspend=True, monitoring={"pingURL": "https://metadata.example/computeMetadata"})
    for job in ("job", "other"):
        bench.whole_run(job)
    wait_until("the success is told", lambda: SECRET_PATH in [path for path, _ in monitor.told], 60)

    def refusals() -> list[str]:
        events = bench.core.list_namespaced_event(bench.namespace, field_selector="reason=PingRefused").items
        return [f"{e.involved_object.name}: {e.message}" for e in events]

    said = "other: success: https://metadata.example is not among the hosts that may be called"
    wait_until("an Event says so", lambda: said in refusals(), 60)
    assert not [r for r in refusals() if "computeMetadata" in r or r.startswith("job:")]


def test_a_lease_that_ran_out_and_the_states_of_a_job(bench: Bench) -> None:
    replicas = [bench.operator("op-1"), bench.operator("op-2")]
    bench.apply("job", schedule="0 0 1 1 *", lease={"durationSeconds": 40, "heartbeatSeconds": 5})
    bench.apply("broken", schedule="0 0 30 2 *")  # what the schema can't see
    bench.run_now("job")
    first = Kubelet(bench, bench.pod_for("job"))
    first.run()
    bench.sql(
        "UPDATE leasedjob.job_scheduler SET modified_at = modified_at - interval '100 s' WHERE id = %s", first.lease_id
    )
    second = Kubelet(bench, bench.pod_for("job", attempt=2, seconds=60))
    wait_until("it is counted", lambda: summed(replicas, "leasedjob_takeovers_total", "holder"), 60)
    assert summed(replicas, "leasedjob_takeovers_total", "holder") == {"same_cluster": 1}
    assert summed(replicas, "leasedjob_leases_lost_total", "phase") == {"running": 1}
    second.run()
    second.end(0)

    def known(name: str) -> dict[str, float]:
        return summed(replicas, name, "leasedjob", max)

    wait_until("its success is known", lambda: known("leasedjob_job_last_success_timestamp_seconds"), 60)
    next_start = known("leasedjob_job_next_schedule_timestamp_seconds")["job"]
    deadline = known("leasedjob_job_success_deadline_timestamp_seconds")["job"]
    assert 360 * 86_400 <= deadline - next_start <= 370 * 86_400  # until the tick after that one
    assert known("leasedjob_job_next_schedule_timestamp_seconds").keys() == {"job"}
    wait_until("it is counted", lambda: summed(replicas, "leasedjob_jobs_not_ready", how=max) == {"": 1}, 60)
    assert summed(replicas, "leasedjob_jobs", how=max) == {"": 2}
    assert summed(replicas, "leasedjob_jobs_overdue", how=max) == {}


def test_a_run_is_a_trace_that_its_workload_knows(bench: Bench, monitor: Monitor) -> None:
    operator = bench.operator(LEASEDJOB_OTLP_ENDPOINT=monitor.host)
    bench.apply("job", suspend=True)
    bench.run_now("job")
    pod = bench.pod_for("job")
    kubelet = Kubelet(bench, pod)
    (container,) = pod["spec"]["containers"]
    parent = next(e["value"] for e in container["env"] if e["name"] == "TRACEPARENT")
    assert parent.split("-")[1] == kubelet.lease_id.hex
    kubelet.run()
    kubelet.end(0)
    wait_until("three spans are sent", lambda: summed([operator], "leasedjob_spans_total", "result") == {"sent": 3}, 60)
    assert {path for path, _ in monitor.told} == {"/v1/traces"}


def test_both_skews_of_a_tick(bench: Bench) -> None:
    bench.apply("job", schedule=HOURLY)
    replicas = after_outage(bench, 1, "job", operators=2)
    pod = bench.pod_for("job", seconds=60)
    to_pod, to_workload = "leasedjob_start_skew_seconds", "leasedjob_workload_start_skew_seconds"
    wait_until("it is counted", lambda: summed(replicas, f"{to_pod}_count") == {"": 1}, 60)
    assert summed(replicas, f"{to_workload}_count") == {}
    Kubelet(bench, pod).run()
    wait_until("it is seen running", lambda: summed(replicas, f"{to_workload}_count") == {"": 1}, 60)
    late = summed(replicas, f"{to_pod}_sum")[""]
    assert 60 < late < summed(replicas, f"{to_workload}_sum")[""]
