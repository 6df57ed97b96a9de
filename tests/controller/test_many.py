"""Many objects, many runs, large objects: bounded time, bounded memory, and silence when there is nothing to do.

Each test has a size for every run of the tests, and one for `make soak`. What is measured is printed (`pytest -rP`).
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.controller.control_plane import GROUP, VERSION, Bench, Json, OperatorProcess, wait_until
from tests.controller.proxy import ApiProxy, TcpProxy

YEARLY = "0 0 1 1 *"
SMALL_AND_LARGE = [
    pytest.param(500, 12.0, id="500"),
    pytest.param(10_000, 75.0, id="10000", marks=[pytest.mark.soak, pytest.mark.timeout(1500)]),
]


def _body(bench: Bench, name: str, **spec: Any) -> Json:
    """About 1.5 kB, as objects are that people write."""
    env = [{"name": f"SETTING_{n}", "value": f"a value that says something, number {n}"} for n in range(15)]
    container = {"name": "main", "image": "example/main:1", "env": env, "command": ["run", "--all"]}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "LeasedJob",
        "metadata": {"name": name, "namespace": bench.namespace},
        "spec": {"schedule": YEARLY, **spec, "template": {"spec": {"containers": [container]}}},
    }


class Sender:
    """POSTs many objects over a few connections: a client library would take longer than the API server does."""

    def __init__(self, bench: Bench, threads: int = 4) -> None:
        self._bench, self._threads = bench, threads
        self._tls = ssl.create_default_context(cafile=str(bench.plane.folder / "ca.crt"))

    def create(self, path: str, bodies: list[Json]) -> None:
        def some(part: list[Json]) -> None:
            connection = http.client.HTTPSConnection("127.0.0.1", self._bench.plane.port, context=self._tls)
            head = {"Authorization": f"Bearer {self._bench.plane.token}", "Content-Type": "application/json"}
            for body in part:
                for _ in range(5):
                    connection.request("POST", path, json.dumps(body), head)
                    answer = connection.getresponse()
                    text = answer.read()
                    if answer.status != 429:
                        break
                    time.sleep(1)
                assert answer.status == 201, text
            connection.close()

        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(some, [bodies[n :: self._threads] for n in range(self._threads)]))


def _listed(bench: Bench) -> list[Json]:
    """Every LeasedJob of the test."""
    found: list[Json] = []
    token = None
    while True:
        page = bench.custom.list_namespaced_custom_object(
            GROUP, VERSION, bench.namespace, "leasedjobs", limit=500, **({"_continue": token} if token else {})
        )
        found += page["items"]
        token = page["metadata"].get("continue")
        if not token:
            return found


@contextmanager
def _alive(operator: OperatorProcess) -> Iterator[Callable[[], float]]:
    """Asks /healthz all the time; the longest that an answer took."""
    stop, longest, bad = threading.Event(), [0.0], []

    def ask() -> None:
        while not stop.wait(0.2):
            since = time.monotonic()
            status, text = operator.probe("/healthz", timeout=30)
            longest[0] = max(longest[0], time.monotonic() - since)
            if status != 200:
                bad.append((status, text))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield lambda: longest[0]
    finally:
        stop.set()
        thread.join()
    assert bad == [], "liveness stays green while there is work"


@pytest.mark.parametrize(("count", "idle"), SMALL_AND_LARGE)
def test_many_objects_at_once(bench: Bench, count: int, idle: float) -> None:
    """Each is registered and shown, what is due runs, and then nobody writes anything any more."""
    due = count // 10
    with ApiProxy(bench.plane) as proxy:
        environment = {
            "LEASEDJOB_KUBECONFIG": str(bench.plane.kubeconfig(proxy.port)),
            "LEASEDJOB_COMPARE_SECONDS": "3" if count < 1000 else "20",
        }
        operator = bench.operator(**environment)
        empty = operator.resident_kib
        bodies = [_body(bench, f"idle-{n}") for n in range(count - due)]
        for n in range(due):
            body = _body(bench, f"due-{n}", type="Initial")
            del body["spec"]["schedule"]
            bodies.insert(n * 10, body)
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{bench.namespace}/leasedjobs"
        with _alive(operator) as longest:
            since = time.monotonic()
            Sender(bench).create(path, bodies)
            created = time.monotonic() - since
            started = "SELECT count(*) FROM leasedjob.job_scheduler"
            wait_until("what is due has been claimed", lambda: bench.sql(started)[0][0] == due, 600, 0.5)
            wait_until("and has its Pod", lambda: len(bench.pods()) == due, 600, 0.5)
            ran = time.monotonic() - since

            def shown() -> bool:
                return all((o.get("status") or {}).get("conditions") for o in _listed(bench))

            wait_until("each is shown as accepted", shown, 600, 1)
            seen = time.monotonic() - since
            registered = "SELECT count(*) FROM leasedjob.job_registration"
            assert bench.sql(registered) == [(count,)]
            assert {c["status"] for o in _listed(bench) for c in o["status"]["conditions"]} == {"True"}
        full = operator.resident_kib
        per_object = (full - empty) / count
        print(
            f"{count} objects, {due} of them due: created in {created:.1f} s, due ones started {ran - created:.1f} s "
            f"later, all shown {seen - created:.1f} s later; resident {empty // 1024} MiB before, {full // 1024} MiB "
            f"with them, {per_object:.1f} KiB each; slowest liveness answer {longest() * 1000:.0f} ms"
        )
        assert ran - created < 60
        assert seen - created < 240
        assert full - empty < 128 * 1024 + 24 * count

        _quiet(proxy, seconds=3, within=60)
        before = len(proxy.writes())
        time.sleep(idle)
        assert [(r.method, r.path) for r in proxy.writes()[before:]] == [], "nothing is due, so nothing is written"
        assert operator.ready()

        # Started anew with all of them there: no write, no second run, in bounded time.
        operator.stop()
        since = time.monotonic()
        before = len(proxy.writes())
        operator.start()
        bench.wait_ready(operator)
        print(f"ready again after {time.monotonic() - since:.1f} s")
        _quiet(proxy, seconds=3, within=120)
        again = [(r.method, r.path) for r in proxy.writes()[before:]]
        assert again == []
        assert bench.sql(started) == [(due,)]
        bench.close()


def _quiet(proxy: ApiProxy, *, seconds: float, within: float) -> None:
    """Until nothing has been written for so many seconds."""
    last = [len(proxy.writes()), time.monotonic()]

    def is_quiet() -> bool:
        if (now := len(proxy.writes())) != last[0]:
            last[:] = [now, time.monotonic()]
        return time.monotonic() - last[1] > seconds

    wait_until("nothing is written any more", is_quiet, within, 0.2)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_thousand_due_at_once_on_a_slow_database(bench: Bench) -> None:
    """Each answer of the database takes three seconds. All start within two minutes, no matter how many."""
    count = 2000
    at = datetime.now(UTC) + timedelta(seconds=100)
    tick = at.replace(second=0, microsecond=0) + timedelta(minutes=1)
    with TcpProxy(bench.postgres.address, bench.postgres.port) as slow:
        (bench.credentials / "host").write_text("127.0.0.1")
        (bench.credentials / "port").write_text(str(slow.port))
        operator = bench.operator()
        bodies = [_body(bench, f"job-{n}", schedule=f"{tick.minute} {tick.hour} * * *") for n in range(count)]
        Sender(bench).create(f"/apis/{GROUP}/{VERSION}/namespaces/{bench.namespace}/leasedjobs", bodies)
        registered = "SELECT count(*) FROM leasedjob.job_registration"
        wait_until("all are registered", lambda: bench.sql(registered) == [(count,)], 120, 0.5)
        assert datetime.now(UTC) < tick, "the objects came too late"
        slow.answer_delay = 3.0
        with _alive(operator) as longest:
            claimed = "SELECT count(*) FROM leasedjob.job_scheduler"
            wait_until("all are claimed", lambda: bench.sql(claimed) == [(count,)], 300, 0.5)
            wait_until("all have their Pod", lambda: len(bench.pods()) == count, 300, 1)
        (late,) = bench.sql("SELECT max(extract(epoch FROM created_at - tick)) FROM leasedjob.job_scheduler")
        pods = (datetime.now(UTC) - tick).total_seconds()
        print(
            f"{count} runs: the last one was claimed {late[0]:.1f} s after the tick, its Pod there by {pods:.0f} s; "
            f"slowest liveness answer {longest() * 1000:.0f} ms"
        )
        assert late[0] < 120
        assert bench.sql("SELECT max(attempt) FROM leasedjob.job_scheduler") == [(1,)]
        assert bench.sql("SELECT count(*) FROM leasedjob.tick_ledger") == [(0,)]
        bench.close()


def test_five_thousand_runs_with_huge_errors(bench: Bench) -> None:
    """What is shown stays small and can be written, whatever stands in the database, also for a replica that starts."""
    operator = bench.operator()
    bench.apply("noisy", schedule=YEARLY)
    wait_until("registered", lambda: bench.ready_condition("noisy").get("status") == "True")
    (row,) = bench.sql("SELECT uid FROM leasedjob.job_registration")
    code = f"{bench.namespace}/noisy"
    bench.sql(
        # Each with a key of its own; one in 25 failed, with 300 KiB of what JSON and Go write at length.
        "INSERT INTO leasedjob.job_scheduler (lock_key, type, code, run_key, name, status, outcome, lease_ms,"
        " run_lease_ms, cluster, namespace, job_name, job_uid, tick, created_at, started_at, finished_at, reason, data)"
        " SELECT 'test:' || n, 'SCHEDULE', %s, to_char(t, 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'), 'noisy',"
        "  (CASE WHEN n %% 25 = 0 THEN 'FAIL' ELSE 'SUCCESS' END)::leasedjob.job_scheduler_status,"
        "  (CASE WHEN n %% 25 = 0 THEN 'fail' ELSE 'complete' END), 40000, 40000, %s, %s, 'noisy', %s, t, t, t, t,"
        "  CASE WHEN n %% 25 = 0 OR n > 4990 THEN 'Error: ' || repeat('<&>\"\\', 61440) ELSE '' END,"
        "  CASE WHEN n %% 25 = 0 THEN jsonb_build_object('error', repeat('ü', 153600)) END"
        " FROM (SELECT n, date_trunc('minute', clock_timestamp()) - (5001 - n) * interval '1 minute' AS t"
        "       FROM generate_series(1, 5000) n) s",
        code, bench.cluster, bench.namespace, row[0],
    )  # fmt: skip

    def shown() -> Json | None:
        status = bench.status("noisy")
        return status if len(status.get("recentRuns") or []) == 10 else None

    status = wait_until("the last ten are shown", shown, 60)
    size = len(json.dumps(bench.job("noisy"), separators=(",", ":")).encode())
    assert size < 64 * 1024, size
    assert all(len(r.get("message", "")) <= 520 for r in status["recentRuns"])
    before = bench.job("noisy")["metadata"]["resourceVersion"]
    operator.stop()
    operator = bench.operator("another")
    bench.apply("sign", suspend=True)
    wait_until("it works", lambda: bench.ready_condition("sign").get("status") == "True")
    assert bench.job("noisy")["metadata"]["resourceVersion"] == before, "it sees the same, and has nothing to write"
    assert "failed" not in operator.log.read_text()
    print(f"object with status: {size / 1024:.1f} KiB; resident {operator.resident_kib // 1024} MiB")


def test_a_template_of_200_kib(bench: Bench) -> None:
    """It runs, and the operator keeps no copy of it anywhere."""
    bench.operator()
    values = [{"name": f"V{n}", "value": "x" * 4096} for n in range(50)]
    bench.apply("large", suspend=True, template={"spec": {"containers": [{"name": "c", "image": "i", "env": values}]}})
    bench.run_now("large")
    pod = bench.pod_for("large")
    assert [e for e in pod["spec"]["containers"][0]["env"] if e["name"].startswith("V")] == values
    assert sum(len(k) + len(v) for k, v in pod["metadata"]["annotations"].items()) < 2048
    wait_until("shown", lambda: bench.status("large").get("active"))
    meta = bench.job("large")["metadata"]
    assert not meta.get("annotations")
    assert not meta.get("finalizers")


def test_requests_by_the_hundred(bench: Bench) -> None:
    """A job with 150 LeasedJobRuns: one runs, the others wait their turn, and each says so."""
    operator = bench.operator()
    bench.apply("job", suspend=True)
    body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "LeasedJobRun", "spec": {"jobName": "job"}}
    bodies = [{**body, "metadata": {"name": f"run-{n}"}} for n in range(150)]
    Sender(bench).create(f"/apis/{GROUP}/{VERSION}/namespaces/{bench.namespace}/leasedjobruns", bodies)

    def waiting() -> int:
        found = bench.custom.list_namespaced_custom_object(GROUP, VERSION, bench.namespace, "leasedjobruns")["items"]
        return [(r.get("status") or {}).get("reason") for r in found].count("Overlap")

    wait_until("all but one wait, and say so", lambda: waiting() == 149, 60, 0.5)
    assert len(bench.rows("job")) == 1
    assert operator.ready()
