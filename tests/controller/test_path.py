"""The path of a tick, with a real API server, a real PostgreSQL and real operator processes."""

from __future__ import annotations

from leasedjob import protocol
from tests.controller.control_plane import Bench, Kubelet, wait_until


def test_a_manual_run_from_object_to_success(bench: Bench) -> None:
    bench.operator()
    bench.apply("hello")
    wait_until("accepted", lambda: bench.ready_condition("hello").get("status") == "True")
    run = bench.run_now("hello")["metadata"]["name"]
    pod = bench.pod_for("hello")
    kubelet = Kubelet(bench, pod)
    kubelet.run()
    wait_until("shown as running", lambda: bench.run(run).get("status", {}).get("phase") == "Running")
    kubelet.end(0)
    row = bench.row_when("hello", lambda r: r["status"] == "SUCCESS", "SUCCESS")
    assert row["attempt"] == 1
    assert row["pod_uid"] == pod["metadata"]["uid"]
    wait_until("shown as succeeded", lambda: bench.run_status(run).get("phase") == "Succeeded")
    wait_until("job shows it", lambda: bench.status("hello").get("lastResult") == "Success")
    environment = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}
    assert environment[protocol.ENV_IDEMPOTENCY_KEY] == row["lock_key"]
