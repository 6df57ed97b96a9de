"""Two versions at once: schema, definitions and statuses that are older or newer than the operator.

docs/decisions/0009-versions.md has the rules. Another version is played by what it leaves behind: migrations, fields of
the definitions, and what it writes.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from kubernetes import client

from leasedjob.lease.migrate import migrate, migrations
from tests.controller.control_plane import GROUP, VERSION, Bench, Json, Kubelet, OperatorProcess, wait_until
from tests.controller.proxy import ApiProxy

NAME = f"leasedjobs.{GROUP}"


def _unready(operator: OperatorProcess, *words: str) -> None:
    def says_so() -> bool:
        assert operator.alive, operator.tail()
        status, text = operator.probe("/readyz")
        return status == 503 and all(w in text for w in words)

    wait_until(f"/readyz names {words}", says_so, 60)
    assert operator.probe("/healthz")[0] == 200, "a restart would not help"


# --- the database's schema -------------------------------------------------------------------------------------------


def _later(bench: Bench, name: str, ahead: int = 1) -> int:
    version = len(migrations()) + ahead
    bench.sql("INSERT INTO leasedjob.schema_migration (version, name, checksum) VALUES (%s, %s, 'x')", version, name)
    return version


def test_an_operator_goes_on_with_a_later_schema(bench: Bench) -> None:
    """A column, a table and a function more, all of which it doesn't know: the release before the newest one works on,
    whether it was running or starts now."""
    before = bench.operator("before")
    bench.apply("job", suspend=True)
    bench.sql("ALTER TABLE leasedjob.job_scheduler ADD COLUMN later text NOT NULL DEFAULT 'x'")
    bench.sql("ALTER TABLE leasedjob.job_registration ADD COLUMN later integer")
    bench.sql("CREATE TABLE leasedjob.later (id bigint)")
    bench.sql("CREATE FUNCTION leasedjob.later(x integer) RETURNS integer LANGUAGE sql AS 'SELECT x'")
    _later(bench, "later")
    bench.whole_run("job")
    assert before.ready()
    before.stop()
    after = bench.operator("after")
    bench.whole_run("job")
    assert after.ready()
    assert [r["attempt"] for r in bench.rows("job")] == [1, 1]


def test_an_operator_that_a_later_schema_has_left_behind_stops_and_says_so(bench: Bench) -> None:
    """It starts nothing, and goes on by itself when the reason is gone (here: when it is back)."""
    known = len(migrations())
    _later(bench, "more")
    asking = _later(bench, f"needs_{known + 1:04d}_less", 2)
    operator = bench.operator(start=False)
    operator.start()
    bench.apply("job", suspend=True)
    run = bench.run_now("job")["metadata"]["name"]
    _unready(operator, f"up to {known:04d}", f"needs_{known + 1:04d}_less", "upgrade")
    assert bench.rows("job") == []
    assert not bench.run(run).get("status")
    bench.sql("DELETE FROM leasedjob.schema_migration WHERE version = %s", asking)
    bench.wait_ready(operator)
    bench.pod_for("job")


def test_an_operator_on_an_earlier_schema_names_the_command(bench: Bench) -> None:
    bench.sql("DROP SCHEMA leasedjob CASCADE")
    with psycopg.connect(bench.postgres.conninfo(bench.database), autocommit=True) as connection:
        migrate(connection, migrations()[:-1])
    operator = bench.operator(start=False)
    operator.start()
    bench.apply("job", suspend=True)
    bench.run_now("job")
    _unready(operator, "leasedjob migrate", str(migrations()[-1]))
    assert bench.rows("job") == [], "what it would ask for may not be there"
    with psycopg.connect(bench.postgres.conninfo(bench.database), autocommit=True) as connection:
        migrate(connection)
    bench.wait_ready(operator)
    kubelet = Kubelet(bench, bench.pod_for("job"))
    kubelet.run()
    kubelet.end(0)
    bench.row_when("job", lambda r: r["status"] == "SUCCESS", "recorded")


@pytest.mark.soak
def test_a_running_operator_notices_that_it_was_left_behind(bench: Bench) -> None:
    operator = bench.operator()
    bench.apply("job", suspend=True)
    bench.whole_run("job")
    _later(bench, "more")
    asking = _later(bench, f"needs_{len(migrations()) + 1:04d}_less", 2)
    _unready(operator, "upgrade")
    bench.run_now("job", name="late")
    time.sleep(3)  # long enough for it to be claimed
    assert len(bench.rows("job")) == 1
    bench.sql("DELETE FROM leasedjob.schema_migration WHERE version = %s", asking)
    bench.wait_ready(operator)
    wait_until("it starts now", lambda: len(bench.rows("job")) == 2)


# --- the definitions -------------------------------------------------------------------------------------------------


@pytest.fixture
def definition(bench: Bench) -> Iterator[Any]:
    """Changes the schema of LeasedJob for a while: `change(edit)`; `change()` puts it back."""
    api = client.ApiextensionsV1Api(bench.plane.api())
    plain = bench.plane.api().sanitize_for_serialization(api.read_custom_resource_definition(NAME))
    openapi = f"https://127.0.0.1:{bench.plane.port}/openapi/v3/apis/{GROUP}/{VERSION}"
    headers = {"Authorization": f"Bearer {bench.plane.token}", "Accept": "application/json"}

    def published() -> bytes:
        return bytes(bench.plane.api().call_api("GET", openapi, header_params=headers).read())

    def change(edit: Any = None) -> None:
        body = copy.deepcopy(plain)
        if edit is not None:
            edit(body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"])
        before = published()
        if edit is None and before == original:
            return
        body["metadata"] = {"name": NAME, "resourceVersion": _version(api)}
        api.replace_custom_resource_definition(NAME, body)
        wait_until("the change is published", lambda: published() != before, 60, 0.2)

    original = published()
    try:
        yield change
    finally:
        change()


def _version(api: client.ApiextensionsV1Api) -> str:
    return str(api.read_custom_resource_definition(NAME).metadata.resource_version)


def test_older_definitions_are_named_and_nothing_starts(bench: Bench, definition: Any) -> None:
    """A field that would be pruned without a word: what the user asked for would be off."""

    def older(properties: Json) -> None:
        del properties["spec"]["properties"]["activeDeadlineSeconds"]
        del properties["status"]["properties"]["recentRuns"]["items"]["properties"]["holder"]

    definition(older)
    operator = bench.operator(start=False)
    operator.start()
    bench.apply("job", suspend=True, activeDeadlineSeconds=60)
    assert "activeDeadlineSeconds" not in bench.job("job")["spec"], "this is what must not go unnoticed"
    bench.run_now("job")
    _unready(
        operator, "LeasedJob.spec.activeDeadlineSeconds", "LeasedJob.status.recentRuns[].holder", "crds.enabled"
    )  # fmt: skip
    assert bench.rows("job") == []
    definition()
    bench.wait_ready(operator)
    bench.pod_for("job")


def test_newer_definitions_and_a_newer_operator_beside_this_one(bench: Bench, definition: Any) -> None:
    """A field that somebody relies on is not passed over; other objects go on; what the newer one says stays."""

    def newer(properties: Json) -> None:
        properties["spec"]["properties"]["onlyOnHolidays"] = {"type": "boolean"}
        properties["spec"]["properties"]["lease"]["properties"]["later"] = {"type": "integer"}
        properties["status"]["properties"]["later"] = {"type": "string"}
        properties["status"]["properties"]["recentRuns"]["items"]["properties"]["later"] = {"type": "string"}

    operator = bench.operator()
    definition(newer)
    bench.apply("relies", suspend=True, onlyOnHolidays=True)
    bench.apply("plain", suspend=True)
    found = wait_until("judged", lambda: (c := bench.ready_condition("relies")).get("status") == "False" and c)
    assert found["reason"] == "UnknownField"
    assert "spec.onlyOnHolidays" in found["message"]
    bench.run_now("relies")
    bench.whole_run("plain")
    assert bench.rows("relies") == []
    # Its watch was older than the definition, and had shown neither field. One that begins now shows both.
    operator.stop()
    operator.start()
    bench.wait_ready(operator)

    wait_until("shown", lambda: bench.status("plain").get("recentRuns"))
    status = bench.status("plain")
    status["later"], status["recentRuns"][0]["later"] = "kept", "kept"
    bench.custom.patch_namespaced_custom_object_status(
        GROUP, VERSION, bench.namespace, "leasedjobs", "plain", {"status": status}
    )
    bench.run_now("plain")
    wait_until("this one writes, too", lambda: bench.status("plain").get("activeCount") == 1)
    status = bench.status("plain")
    assert status["later"] == "kept"
    assert [r.get("later") for r in status["recentRuns"]] == [None, "kept"]
    assert bench.ready_condition("relies")["reason"] == "UnknownField"
    assert operator.ready()


def test_two_that_disagree_do_not_keep_the_api_server_busy(bench: Bench) -> None:
    """Somebody puts another status in the place of this one's each time, at once: this one insists ever more slowly."""
    with ApiProxy(bench.plane) as proxy:
        operator = bench.operator(LEASEDJOB_KUBECONFIG=str(bench.plane.kubeconfig(proxy.port)))
        bench.apply("job", suspend=True)
        wait_until("accepted", lambda: bench.ready_condition("job").get("reason") == "Suspended")
        stop = threading.Event()
        said = [0]

        def contradict() -> None:
            while not stop.is_set():
                status = bench.status("job")
                ready = next(c for c in status["conditions"] if c["type"] == "Ready")
                if ready["reason"] == "Suspended":
                    ready["reason"] = "Otherwise"
                    bench.custom.patch_namespaced_custom_object_status(
                        GROUP, VERSION, bench.namespace, "leasedjobs", "job", {"status": status}
                    )
                    said[0] += 1

        other = threading.Thread(target=contradict)
        other.start()
        try:
            wait_until("both have insisted", lambda: said[0] >= 3, 60)
            before = len(proxy.writes())
            # As many runs of another job as take some seconds: nothing of them writes this job's status.
            bench.apply("sign", suspend=True)
            for _ in range(3):
                bench.whole_run("sign")
            mine = [r for r in proxy.writes()[before:] if r.writes_status() and "/leasedjobs/job/" in r.path]
        finally:
            stop.set()
            other.join()
        assert len(mine) < 8, "an insisting writer would have written hundreds of times"
        wait_until("it has the last word", lambda: bench.ready_condition("job").get("reason") == "Suspended", 60)
        assert operator.ready()
        bench.close()
