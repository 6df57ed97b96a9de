"""A tenant who writes what nobody should: huge, deep, wrong and very many objects. The others stay on time.

`make test` writes some hundred of them, `make soak` 10,000. What is measured is printed (`pytest -rP`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kubernetes import client

from tests.controller.control_plane import GROUP, VERSION, Bench, Json, Kubelet, wait_until
from tests.controller.test_many import Sender, _alive

YEARLY = "0 0 1 1 *"


def deep(levels: int) -> Any:
    """Lists in lists, as text: json.dumps has a limit of its own."""
    return "[" * levels + "]" * levels


def manifest(name: str, extra: str = "", **spec: Any) -> bytes:
    """A LeasedJob as text; `extra` stands in its template, which the definition keeps as it is."""
    container = {"name": "main", "image": "i"}
    template: Json = {"spec": {"containers": [container]}}
    body = {
        "apiVersion": f"{GROUP}/{VERSION}", "kind": "LeasedJob", "metadata": {"name": name},
        "spec": {"schedule": YEARLY, "template": template, **spec},
    }  # fmt: skip
    text = json.dumps(body)
    return text.replace('"image": "i"', f'"image": "i", "x": {extra}' if extra else '"image": "i"').encode()


# Name -> what is written. The API server may refuse it: then nothing of it reaches the operator.
HOSTILE: dict[str, Callable[[str], bytes]] = {
    "900 levels deep": lambda n: manifest(n, deep(900)),
    "3,000 levels deep": lambda n: manifest(n, deep(3_000)),
    "9,000 levels deep": lambda n: manifest(n, deep(9_000)),
    "a megabyte in one text": lambda n: manifest(n, json.dumps("x" * 1_000_000)),
    "a hundred thousand small fields": lambda n: manifest(n, json.dumps({f"f{i}": i for i in range(60_000)})),
    "a date that never comes": lambda n: manifest(n, schedule="0 0 30 2 *"),
    "a schedule of a leap second's kind": lambda n: manifest(n, schedule="59 23 29 2 1"),
    "a zone that doesn't exist": lambda n: manifest(n, timeZone="../../etc/passwd"),
    "signs of every kind": lambda n: manifest(n, json.dumps("\u202e\x00\ud7ff\U0001f4a3" * 100)),
    "a number without end": lambda n: manifest(n, "9" * 5_000),
}


class Elsewhere:
    """The namespace of the tenant who floods."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.name = bench, f"{bench.namespace}-b"
        bench.core.create_namespace({"metadata": {"name": self.name}})
        self.path = f"/apis/{GROUP}/{VERSION}/namespaces/{self.name}/leasedjobs"

    def ask(self, method: str, body: bytes = b"", name: str = "") -> tuple[int, str]:
        """The API server's answer as text: a client's parser gives up on some of it."""
        api = self.bench.plane.api()
        answer = api.rest_client.pool_manager.request(
            method,
            f"https://127.0.0.1:{self.bench.plane.port}{self.path}{name and f'/{name}'}",
            body=body,
            headers={"Authorization": f"Bearer {self.bench.plane.token}", "Content-Type": "application/json"},
        )
        return int(answer.status), answer.data.decode("utf-8", "replace")

    def close(self) -> None:
        assert self.ask("DELETE")[0] == 200


@pytest.fixture
def elsewhere(bench: Bench) -> Iterator[Elsewhere]:
    there = Elsewhere(bench)
    yield there
    bench.close_operators()
    there.close()


def _start(bench: Bench, elsewhere: Elsewhere) -> Any:
    both = f"{bench.namespace},{elsewhere.name}"
    return bench.operator(LEASEDJOB_NAMESPACES=both, LEASEDJOB_COMPARE_SECONDS="5")


@contextmanager
def _others_run(bench: Bench) -> Iterator[list[float]]:
    """Runs of another tenant all the while: how long each took from its request to its Pod."""
    bench.apply("good", suspend=True, concurrencyPolicy="Allow")
    took: list[float] = []
    stop, wrong = threading.Event(), []

    def run() -> None:
        while not stop.wait(0.5):
            since = time.monotonic()
            try:
                known = {p["metadata"]["uid"] for p in bench.pods()}
                bench.run_now("good")
                pod = wait_until(
                    "its Pod",
                    lambda known=known: next((p for p in bench.pods() if p["metadata"]["uid"] not in known), None),
                    120,
                )
                took.append(time.monotonic() - since)
                kubelet = Kubelet(bench, pod)
                kubelet.run()
                kubelet.end(0)
            except (AssertionError, client.ApiException) as e:
                wrong.append(e)
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield took
    finally:
        stop.set()
        thread.join(180)
    assert wrong == []
    assert took


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(tuple(HOSTILE), id="all"),
        *(pytest.param((kind,), id=kind, marks=pytest.mark.soak) for kind in HOSTILE),
    ],
)
def test_what_one_tenant_writes_stops_nobody(bench: Bench, elsewhere: Elsewhere, kinds: tuple[str, ...]) -> None:
    """An operator that sees it come, and one that starts with it there, run what others ask for."""
    operator = _start(bench, elsewhere)
    answers = {kind: elsewhere.ask("POST", HOSTILE[kind](f"hostile-{n}"))[0] for n, kind in enumerate(kinds)}
    assert set(answers.values()) <= {201, 400, 413, 422}, answers
    bench.apply("good", suspend=True)
    bench.whole_run("good", seconds=60)
    time.sleep(6)  # a comparison with a list, too
    bench.whole_run("good", seconds=60)
    assert operator.ready()
    assert operator.stop() == 0
    operator.start()
    bench.wait_ready(operator)
    bench.whole_run("good", seconds=60)
    for n, kind in enumerate(kinds):
        if answers[kind] == 201 and "deep" in kind:
            wait_until(
                f"{kind}: it says what is wrong",
                lambda n=n: "is nested more than 64 levels deep" in elsewhere.ask("GET", name=f"hostile-{n}")[1],
                60,
            )
    print(answers)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(300, id="300"),
        pytest.param(10_000, id="10000", marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
def test_a_flood_of_them(bench: Bench, elsewhere: Elsewhere, count: int) -> None:
    """Wrong ones and good ones that are all due at once, and meanwhile the runs of another tenant."""
    operator = _start(bench, elsewhere)
    bodies: list[Json] = []
    for n in range(count):
        spec: Json = {
            0: {"schedule": "0 0 30 2 *"}, 1: {"schedule": YEARLY, "timeZone": "Mars/Olympus_Mons"},
            2: {"type": "Initial"}, 3: {"schedule": "* * * * *", "suspend": True},
        }[n % 4]  # fmt: skip
        body = json.loads(manifest(f"flood-{n}"))
        body["spec"] = {"template": body["spec"]["template"], **spec}
        if n % 100 == 0:
            body["spec"]["template"]["spec"]["containers"][0]["env"] = [{"name": "E", "value": "x" * 100_000}]
        bodies.append(body)
    with _alive(operator) as longest, _others_run(bench) as took:
        since = time.monotonic()
        Sender(bench, threads=2).create(elsewhere.path, bodies)
        created = time.monotonic() - since
        wait_until(
            "all are judged",
            lambda: bench.sql("SELECT count(*) FROM leasedjob.job_registration")[0][0] >= 1 + 2 * (count // 4),
            900,
            0.5,
        )
        judged = time.monotonic() - since
        time.sleep(5)
    print(
        f"{count} objects written in {created:.1f} s, judged after {judged:.1f} s; meanwhile {len(took)} runs of "
        f"another tenant, from request to Pod {sorted(took)[len(took) // 2]:.2f} s in the middle, {max(took):.2f} s at "
        f"most; slowest liveness answer {longest() * 1000:.0f} ms; resident {operator.resident_kib // 1024} MiB"
    )
    assert max(took) < 30
    assert operator.ready()
    assert "Traceback" not in operator.log.read_text()
