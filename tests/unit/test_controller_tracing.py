"""A run as one trace: what is sent is read by OpenTelemetry's own definition of the protocol."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.unit import controller_builders as b
from tests.unit.test_controller_metrics import samples, transition
from tests.unit.test_controller_pods import ATTEMPT, build

from leasedjob.controller.metrics import Metrics
from leasedjob.controller.settings import Settings, SettingsError
from leasedjob.controller.tracing import MOST_WAITING, Tracer, spans_of, trace_parent
from leasedjob.lease.rows import Outcome, Run, Transition, TransitionKind

ROW: Run = b.run(tick=b.T0, started=2, created=1)


def change(kind: TransitionKind, at: float, **changes: Any) -> Transition:
    return transition(kind, run_id=ROW.id, tick=b.T0, happened_at=b.at(at), **changes)


START = change(TransitionKind.STARTED, 5)
FAILED = change(TransitionKind.ENDED, 20, outcome=Outcome.FAIL, counted=True, reason="Error: secret text")
DONE = change(TransitionKind.ENDED, 90.25, outcome=Outcome.COMPLETE, final=True, attempt=2)


def times(span: dict[str, Any]) -> tuple[float, float]:
    zero = b.T0.timestamp()
    return int(span["startTimeUnixNano"]) / 1e9 - zero, int(span["endTimeUnixNano"]) / 1e9 - zero


def test_a_run_with_two_attempts_is_one_tree() -> None:
    again = replace(ROW, attempt=2, started_at=b.at(30))
    pending, first = *spans_of(START, ROW), *spans_of(FAILED, ROW)
    second, run = spans_of(DONE, again)
    assert {s["traceId"] for s in (pending, first, second, run)} == {ROW.id.hex}
    assert len({s["spanId"] for s in (pending, first, second, run)}) == 4
    assert "parentSpanId" not in run
    assert first["parentSpanId"] == second["parentSpanId"] == run["spanId"]
    assert pending["parentSpanId"] == first["spanId"]
    assert times(run) == pytest.approx((0, 90.25))  # from the tick
    assert times(first) == pytest.approx((2, 20))
    assert times(second) == pytest.approx((30, 90.25))
    assert times(pending) == pytest.approx((2, 5))
    assert [s["status"]["code"] for s in (first, second, run)] == [2, 1, 1]
    assert "secret text" not in json.dumps(first)


def test_the_workload_is_a_child_of_its_attempt() -> None:
    (span,) = spans_of(FAILED, ROW)
    assert trace_parent(str(ROW.id), 1) == f"00-{ROW.id.hex}-{span['spanId']}-01"
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", trace_parent(str(ROW.id), 1))
    assert trace_parent(str(ROW.id), 1) != trace_parent(str(ROW.id), 2)


def test_what_is_not_known_is_not_made_up() -> None:
    assert spans_of(FAILED, None) == []
    assert spans_of(FAILED, replace(ROW, attempt=2)) == []
    assert spans_of(change(TransitionKind.TAKEN_OVER, 9), ROW) == []


def test_the_pod_gets_its_context_only_if_there_are_traces() -> None:
    parent = trace_parent(ATTEMPT.lease_id, ATTEMPT.number)
    own = {"name": "TRACEPARENT", "value": "theirs"}
    template = {"spec": {"containers": [{"name": "main", "image": "i:1", "env": [own]}]}}
    (traced,) = build(template, trace_parent=parent)["spec"]["containers"]
    assert [e for e in traced["env"] if e["name"] == "TRACEPARENT"] == [{"name": "TRACEPARENT", "value": parent}]
    (untraced,) = build(template)["spec"]["containers"]
    assert [e for e in untraced["env"] if e["name"] == "TRACEPARENT"] == [own]


async def collect(answer: int, *told: Transition) -> tuple[list[Any], Metrics]:
    """What a collector is sent."""
    bodies: list[Any] = []

    async def take(request: web.Request) -> web.Response:
        assert request.path == "/v1/traces"
        bodies.append(await request.json())
        return web.Response(status=answer)

    app = web.Application()
    app.router.add_post("/{tail:.*}", take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    metrics = Metrics()
    tracer = Tracer(f"http://127.0.0.1:{runner.addresses[0][1]}/", "east", metrics)
    task = asyncio.create_task(tracer.run())
    await asyncio.sleep(0)
    for one in told:
        tracer.tell(one, ROW)
    async with asyncio.timeout(60):
        while not samples(metrics, "leasedjob_spans_total"):
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await runner.cleanup()
    return bodies, metrics


async def test_opentelemetry_reads_what_is_sent() -> None:
    (body,), metrics = await collect(200, START, FAILED)
    read = json_format.ParseDict(body, ExportTraceServiceRequest())
    (resource,) = read.resource_spans
    said = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert (said["service.name"], said["k8s.cluster.name"]) == ("leasedjob-operator", "east")
    names = [s.name for s in resource.scope_spans[0].spans]
    assert names == ["pending", "attempt 1"]
    assert all(s.start_time_unix_nano < s.end_time_unix_nano for s in resource.scope_spans[0].spans)
    assert samples(metrics, "leasedjob_spans_total") == {("sent",): 2}


async def test_a_collector_that_refuses_costs_spans_and_nothing_else() -> None:
    _, metrics = await collect(503, START)
    assert samples(metrics, "leasedjob_spans_total") == {("dropped",): 1}


def test_what_waits_is_bounded_and_nothing_waits_where_nothing_is_traced() -> None:
    metrics = Metrics()
    tracer, off = Tracer("http://x", "east", metrics), Tracer("", "east", metrics)
    for _ in range(MOST_WAITING + 7):
        tracer.tell(START, ROW)
        off.tell(START, ROW)
    assert samples(metrics, "leasedjob_spans_total") == {("dropped",): 7}
    assert not off.on


def test_an_endpoint_that_is_none_is_refused() -> None:
    with pytest.raises(SettingsError, match="LEASEDJOB_OTLP_ENDPOINT"):
        Settings.from_environment({"LEASEDJOB_OTLP_ENDPOINT": "collector:4318"})
