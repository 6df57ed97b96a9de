"""The status page of a whole operator, with an API server and a PostgreSQL, in a real Chromium: one story of a night.

What it shows of everything, and how, has its tests in tests/integration/test_status_page.py.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from tests.browser import Browser, chromium
from tests.controller.control_plane import Bench, Kubelet, free_port, wait_until
from tests.controller.proxy import ApiProxy, TcpProxy

HOSTILE = "<img src=x onerror=window.stolen=1>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium(pytest.skip) as running:
        yield running


def test_a_night_as_it_is_seen(bench: Bench, browser: Browser) -> None:
    page = free_port()
    url = f"http://127.0.0.1:{page}"
    with TcpProxy(bench.postgres.address, bench.postgres.port) as database, ApiProxy(bench.plane) as api:
        (bench.credentials / "port").write_text(str(database.port))
        operator = bench.operator(
            LEASEDJOB_PAGE_PORT=str(page),
            LEASEDJOB_KUBECONFIG=str(bench.plane.kubeconfig(api.port)),
            LEASEDJOB_COMPARE_SECONDS="2",
        )
        with browser.tab() as tab:
            assert tab.open(url) == 200
            assert tab.text("h1") == "No jobs yet"

            # A run, from its claim to its end.
            bench.apply("nightly", schedule="0 0 1 1 *")
            bench.apply("broken", schedule="0 0 30 2 *")
            tab.wait("the jobs are seen", "document.querySelectorAll('#jobs tbody tr').length === 2")
            tab.wait("one is not Ready", "document.title.startsWith('(1) ')")
            assert "never fires" in tab.text("#jobs") or "never" in tab.text("#jobs")
            bench.run_now("nightly", name="tonight")
            kubelet = Kubelet(bench, bench.pod_for("nightly"))
            tab.wait("it waits", "document.querySelector('#jobs').innerText.includes('Pending')")
            kubelet.run()
            tab.wait("it runs", "document.querySelector('#jobs').innerText.includes('Running')")
            tab.open(f"{url}/leases")
            tab.wait("its lease", "document.querySelector('#leases')?.innerText.includes('left')")
            assert kubelet.pod["metadata"]["name"] in tab.text("#leases")
            tab.open(f"{url}/jobs/{bench.namespace}/nightly")
            kubelet.end(3, reason="Error", message=f"no such order {HOSTILE}")
            tab.wait("its failure", "document.querySelector('#runs-table')?.innerText.includes('no such order')")
            assert HOSTILE in tab.text("#runs-table")

            # Why a tick ran or not is the operator's own answer.
            tab.open(f"{url}/jobs/{bench.namespace}/nightly?tick=2026-01-01T00:00:00Z")
            assert "BeforeWatermark" in tab.text(".answer")

            # What another cluster does with the same code.
            code = f"{bench.namespace}/nightly"
            bench.sql(
                "INSERT INTO leasedjob.job_registration (code, cluster, namespace, name, uid, created_at,"
                " schedule_hash, spec_hash, policy, suspended)"
                " VALUES (%s, 'east', %s, 'nightly', 'e', clock_timestamp(), '', '', 'Forbid', false)",
                code, bench.namespace,
            )  # fmt: skip
            bench.sql(
                "INSERT INTO leasedjob.job_scheduler (lock_key, type, code, run_key, status, lease_ms, run_lease_ms,"
                " cluster, namespace, job_name, job_uid, holder, pod_uid, adopted_at)"
                " VALUES (%s, 'SCHEDULE', %s, 'manual/x/there/1', 'RUNNING', 900000, 900000, 'east', %s, 'nightly',"
                " 'e', 'east/the-holder', 'p', clock_timestamp())",
                str(uuid4()), code, bench.namespace,
            )  # fmt: skip
            tab.open(f"{url}/timeline?window=1h")
            lanes = "[...document.querySelectorAll('svg.lane[role=img]')].map(s => s.getAttribute('aria-label')).join()"
            tab.wait("a lane for each", f"{lanes}.includes('in east') && {lanes}.includes('in {bench.cluster}')")
            tab.open(f"{url}/clusters")
            tab.wait("both clusters", "document.querySelectorAll('#clusters tbody tr').length === 2")
            tab.open(f"{url}/jobs/{bench.namespace}/nightly")
            tab.wait("where it is", "document.querySelector('#where-table')?.innerText.includes('east')")

            # The database goes, and comes back.
            tab.open(url)
            database.down()
            tab.wait("it is said", "document.querySelector('.notice')?.innerText.includes('The database')")
            assert "nightly" in tab.text("#jobs")
            assert operator.alive
            database.up()
            tab.wait("it is back", "!document.querySelector('.notice')")

            # The API server goes.
            api.rule(lambda request: True, reset=True)
            tab.wait("it is said too", "document.querySelector('.notice')?.innerText.includes('The API server')")
            assert "nightly" in tab.text("#jobs")
            api.heal()
            tab.wait("it is back too", "!document.querySelector('.notice')")

            # And so does the operator.
            assert operator.stop() == 0
            tab.wait("nobody is there", "document.querySelector('#pulse').innerText.includes('Not connected')")
            assert tab.value("window.stolen") is None
            assert {urlsplit(asked).netloc for asked in tab.asked()} == {f"127.0.0.1:{page}"}
            complaints = [c for c in tab.complaints() if "ERR_CONNECTION" not in c and "net::ERR" not in c]
            assert complaints == []


def test_a_port_that_is_taken_stops_no_run(bench: Bench) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        operator = bench.operator(LEASEDJOB_PAGE_PORT=str(taken.getsockname()[1]))
        wait_until("it is logged", lambda: "the status page can't be served" in operator.log.read_text(), 60)
        assert operator.ready()


def test_only_the_loopback_answers_by_default(bench: Bench) -> None:
    """Another address of this machine is another network's way to the Pod."""
    port = free_port()
    bench.operator(LEASEDJOB_PAGE_PORT=str(port))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
        assert answer.status == 200
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.2:{port}/", timeout=60)
