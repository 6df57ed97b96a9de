"""Which URLs the operator calls for spec.monitoring, and what it does with a monitor that doesn't answer.

The monitor is a real HTTP server; the resolver's answers are given where a name has to stand for a certain address.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import pytest
from aiohttp import web
from tests.unit import controller_builders as b
from tests.unit.test_controller_metrics import samples, transition

from leasedjob.controller.events import Recorder
from leasedjob.controller.kube import Kube, KubeError
from leasedjob.controller.metrics import Metrics
from leasedjob.controller.model import Monitoring
from leasedjob.controller.ping_hosts import PingHosts, PingRefusedError, Trust, may_connect
from leasedjob.controller.pings import WAITING_EACH, Ping, Pinger, Signal, signal_of, signal_url
from leasedjob.controller.settings import Settings, SettingsError
from leasedjob.lease.rows import Outcome, TransitionKind

HOSTS = ("monitor.example", "ports.example:8443", "http://ping.team.svc", "*.wild.example", "http://127.0.0.1:8000")


class TestHosts:
    @pytest.mark.parametrize(
        ("url", "trust"),
        [
            ("https://monitor.example/ping/1", Trust.LISTED),
            ("https://MONITOR.example./ping/1", Trust.LISTED),
            ("https://monitor.example:443/", Trust.LISTED),
            ("https://ports.example:8443/a?b=c", Trust.LISTED),
            ("http://ping.team.svc/a", Trust.LISTED),
            ("https://a.wild.example/a", Trust.PATTERN),
            ("https://a.b.wild.example/a", Trust.PATTERN),
            ("http://127.0.0.1:8000/a", Trust.ADDRESS),
        ],
    )
    def test_what_is_listed_may_be_called(self, url: str, trust: Trust) -> None:
        assert PingHosts.parse(HOSTS).trust(url) is trust

    @pytest.mark.parametrize(
        "url",
        [
            "https://other.example/",
            "http://monitor.example/",  # listed for https
            "https://monitor.example:8443/",
            "https://ports.example/",
            "https://monitor.example.evil.example/",
            "https://wild.example/",
            "https://evilwild.example/",
            "https://monitor.example@evil.example/",
            "https://evil.example/?https://monitor.example/",
            "https://evil.example/#@monitor.example/",
            "https://monitor.example\\@evil.example/",
            "https://user@monitor.example/",
            "http://127.0.0.1/",
            "http://127.1:8000/",
            "http://2130706433:8000/",
            "ftp://monitor.example/",
            "file:///etc/passwd",
            "https://",
            "https://monitor.example:0/",
            "https://monitor.example:99999/",
            "https://monitor.example/\r\nHost: x",
            "https://mönitor.example/",
        ],
    )
    def test_anything_else_is_refused(self, url: str) -> None:
        with pytest.raises(PingRefusedError):
            PingHosts.parse(HOSTS).trust(url)

    def test_nothing_is_called_unless_something_is_listed(self) -> None:
        with pytest.raises(PingRefusedError, match="turned off"):
            PingHosts().trust("https://monitor.example/")

    @pytest.mark.parametrize("host", ["127.0.0.1", "169.254.169.254", "2130706433", "0x7f000001", "10.0.0.1", "127.1"])
    def test_a_star_covers_names_only(self, host: str) -> None:
        anything = PingHosts.parse(("*",))
        assert anything.trust("https://any.example/") is Trust.PATTERN
        with pytest.raises(PingRefusedError):
            anything.trust(f"https://{host}/")

    def test_a_refusal_does_not_tell_the_secret_part(self) -> None:
        with pytest.raises(PingRefusedError) as refused:
            PingHosts.parse(HOSTS).trust("https://other.example:8443/ping/53cr37?token=53cr37")
        assert str(refused.value) == "https://other.example:8443 is not among the hosts that may be called"

    @pytest.mark.parametrize("text", ["https://a.example/path", "a b", "*x.example", "a.*.example", "a:0", "ftp://a"])
    def test_an_entry_that_is_none_is_named(self, text: str) -> None:
        with pytest.raises(SettingsError, match="LEASEDJOB_PING_HOSTS") as refused:
            Settings.from_environment({"LEASEDJOB_PING_HOSTS": f"monitor.example,{text}"})
        assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("address", "listed", "pattern"),
    [
        ("93.184.215.14", True, True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True, True),
        ("10.1.2.3", True, False),
        ("192.168.1.1", True, False),
        ("100.64.0.1", True, False),
        ("fd00::1", True, False),
        ("127.0.0.1", False, False),
        ("::1", False, False),
        ("0.0.0.0", False, False),
        ("169.254.169.254", False, False),
        ("fe80::1%eth0", False, False),
        ("224.0.0.1", False, False),
        ("240.0.0.1", False, False),
        ("::ffff:127.0.0.1", False, False),
        ("::ffff:10.1.2.3", True, False),
        ("64:ff9b::a9fe:a9fe", False, False),
        ("2002:7f00:1::1", False, False),
    ],
)
def test_what_a_name_may_stand_for(address: str, listed: bool, pattern: bool) -> None:
    assert (may_connect(address, Trust.LISTED), may_connect(address, Trust.PATTERN)) == (listed, pattern)
    assert may_connect(address, Trust.ADDRESS)


class TestSignals:
    @pytest.mark.parametrize(
        ("url", "start", "success"),
        [
            ("https://m.example/ping/1", "https://m.example/ping/1/start?rid=x", "https://m.example/ping/1?rid=x"),
            ("https://m.example/ping/1/", "https://m.example/ping/1/start?rid=x", "https://m.example/ping/1/?rid=x"),
            ("https://m.example?k=v", "https://m.example/start?k=v&rid=x", "https://m.example/?k=v&rid=x"),
        ],
    )
    def test_where_it_is_told(self, url: str, start: str, success: str) -> None:
        assert signal_url(url, Signal.START, "x") == start
        assert signal_url(url, Signal.SUCCESS, "x") == success
        assert signal_url(url, Signal.FAIL, "x") == start.replace("/start", "/fail")

    def test_what_is_told(self) -> None:
        assert signal_of(transition(TransitionKind.STARTED)) is Signal.START
        assert signal_of(transition(outcome=Outcome.COMPLETE, final=True)) is Signal.SUCCESS
        assert signal_of(transition(outcome=Outcome.FAIL, final=True)) is Signal.FAIL
        assert signal_of(transition(TransitionKind.GIVEN_UP, final=True, reason="Cancelled")) is Signal.FAIL
        assert signal_of(transition(outcome=Outcome.FAIL, reason="Error")) is None  # another attempt comes
        assert signal_of(transition(TransitionKind.TAKEN_OVER)) is None


# --- with a real server ----------------------------------------------------------------------------------------------


class Monitor:
    """Answers as it is told, 200 when nothing is left; remembers what it was asked."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.seen: list[tuple[str, str]] = []
        self.hang = False
        self.let_go = asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append((request.path_qs, (await request.read()).decode()))
        if self.hang:
            await self.let_go.wait()
        status = self.answers.pop(0) if self.answers else 200
        return web.Response(status=status, headers={"Location": "/elsewhere"} if status == 302 else {})

    @property
    def paths(self) -> list[str]:
        return [path.partition("?")[0] for path, _ in self.seen]


class Secrets(Kube):
    def __init__(self, **data: str) -> None:
        self.data = {k: base64.b64encode(v.encode()).decode() for k, v in data.items()}
        self.error: KubeError | None = None

    async def get_secret(self, namespace: str, name: str) -> dict[str, Any] | None:
        if self.error is not None:
            raise self.error
        return {"data": self.data} if name == "leasedjob-monitoring" and namespace == b.NAMESPACE else None


class Spoken(Recorder):
    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def record(self, regarding: Any, reason: str, message: str, *, warning: bool = False, once: str = "") -> None:
        self.said.append((str(reason), message))


class Bench:
    def __init__(self, monitor: Monitor, port: int) -> None:
        self.monitor, self.port = monitor, port
        self.metrics, self.events, self.kube = (
            Metrics(),
            Spoken(),
            Secrets(url=f"http://127.0.0.1:{port}/ping/s3cr3t\n"),
        )
        self.hosts = PingHosts.parse((f"http://127.0.0.1:{port}", f"http://localhost:{port}"))

    def pinger(self, **more: Any) -> Pinger:
        options: dict[str, Any] = {"tries": (0.0, 0.0, 0.0), **more}
        return Pinger(self.kube, self.hosts, "leasedjob-monitoring", self.events, self.metrics, **options)

    def ping(self, signal: Signal = Signal.SUCCESS, *, job: str = b.JOB, run: str = "", **monitoring: Any) -> Ping:
        known = monitoring or {"ping_url": f"http://127.0.0.1:{self.port}/ping/s3cr3t"}
        return Ping(b.job_body(name=job), Monitoring(**known), signal, run or str(uuid4()), "the run")

    def results(self) -> dict[tuple[str, ...], float]:
        return samples(self.metrics, "leasedjob_pings_total")

    async def until(self, probe: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not probe():
                await asyncio.sleep(0.01)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    monitor = Monitor()
    app = web.Application()
    app.router.add_route("POST", "/{tail:.*}", monitor.answer)
    runner = web.AppRunner(app, shutdown_timeout=1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield Bench(monitor, runner.addresses[0][1])
    monitor.let_go.set()
    await runner.cleanup()


async def test_start_and_success_are_told_in_their_order_with_the_runs_id(bench: Bench) -> None:
    async with bench.pinger() as pinger:
        pinger.tell(bench.ping(Signal.START, run="r1"))
        await bench.until(lambda: bool(bench.monitor.seen))
        pinger.tell(bench.ping(run="r1"))
        await bench.until(lambda: len(bench.results()) == 2)
    assert bench.monitor.seen == [("/ping/s3cr3t/start?rid=r1", "the run"), ("/ping/s3cr3t?rid=r1", "the run")]
    assert bench.results() == {("start", "sent"): 1, ("success", "sent"): 1}


async def test_a_start_is_not_told_after_its_end_is_known(bench: Bench) -> None:
    async with bench.pinger() as pinger:
        pinger.tell(bench.ping(Signal.START, run="r1"))
        pinger.tell(bench.ping(Signal.FAIL, run="r1"))
        await bench.until(lambda: bool(bench.results()))
    assert bench.monitor.paths == ["/ping/s3cr3t/fail"]


async def test_a_fault_that_may_pass_is_tried_again(bench: Bench) -> None:
    bench.monitor.answers = [503, 429]
    async with bench.pinger() as pinger:
        pinger.tell(bench.ping())
        await bench.until(lambda: bool(bench.results()))
    assert len(bench.monitor.seen) == 3
    assert bench.results() == {("success", "sent"): 1}
    assert bench.events.said == []


async def test_a_start_is_tried_once(bench: Bench) -> None:
    bench.monitor.answers = [503]
    async with bench.pinger() as pinger:
        pinger.tell(bench.ping(Signal.START))
        await bench.until(lambda: bool(bench.results()))
    assert len(bench.monitor.seen) == 1


async def test_tries_end_and_the_event_does_not_tell_the_url(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.monitor.answers = [500] * 9
    caplog.set_level(logging.DEBUG)
    async with bench.pinger() as pinger:
        pinger.tell(bench.ping())
        await bench.until(lambda: bool(bench.results()))
    assert len(bench.monitor.seen) == 3
    assert bench.results() == {("success", "failed"): 1}
    assert bench.events.said == [("PingFailed", "success: no answer (ClientError)")]
    assert "s3cr3t" not in caplog.text


@pytest.mark.parametrize("status", [302, 404])
async def test_what_no_try_will_change_is_not_tried_again_and_no_redirect_followed(bench: Bench, status: int) -> None:
    bench.monitor.answers = [status]
    async with bench.pinger() as pinger:
        pinger.tell(bench.ping())
        await bench.until(lambda: bool(bench.results()))
    assert bench.monitor.paths == ["/ping/s3cr3t"]
    assert bench.events.said == [("PingFailed", f"success: the monitor answered {status}")]


async def test_a_monitor_that_hangs_holds_up_neither_another_job_nor_the_end(bench: Bench) -> None:
    bench.monitor.hang = True
    async with bench.pinger(try_seconds=0.3) as pinger:
        pinger.tell(bench.ping(Signal.START, job="slow"))
        await bench.until(lambda: bool(bench.monitor.seen))
        bench.monitor.hang = False
        pinger.tell(bench.ping(job="quick"))
        await bench.until(lambda: len(bench.results()) == 2)
    assert bench.results() == {("start", "failed"): 1, ("success", "sent"): 1}


async def test_what_waits_is_bounded_and_the_oldest_goes_first(bench: Bench) -> None:
    bench.monitor.hang = True
    async with bench.pinger(try_seconds=30) as pinger:
        pinger.tell(bench.ping())
        await bench.until(lambda: bool(bench.monitor.seen))
        for n in range(WAITING_EACH + 3):
            pinger.tell(bench.ping(run=f"r{n}"))
        assert bench.results() == {("success", "dropped"): 3}
        bench.monitor.hang = False
        bench.monitor.let_go.set()
        await bench.until(lambda: len(bench.monitor.seen) == WAITING_EACH + 1)
    assert bench.monitor.seen[1][0].endswith("rid=r3")


async def test_the_url_comes_from_the_secret(bench: Bench) -> None:
    async with bench.pinger() as pinger:
        pinger.tell(bench.ping(ping_url_key="url"))
        await bench.until(lambda: bool(bench.results()))
    assert bench.monitor.paths == ["/ping/s3cr3t"]


@pytest.mark.parametrize(
    ("monitoring", "said"),
    [
        ({"ping_url": "https://evil.example/s3cr3t"}, "https://evil.example is not among the hosts that may be called"),
        ({"ping_url_key": "other"}, "Secret leasedjob-monitoring has no key other"),
    ],
)
async def test_what_may_not_be_called_is_told_and_not_tried(
    bench: Bench, monitoring: dict[str, Any], said: str
) -> None:
    async with bench.pinger() as pinger:
        pinger.tell(bench.ping(**monitoring))
        await bench.until(lambda: bool(bench.results()))
    assert bench.monitor.seen == []
    assert bench.results() == {("success", "refused"): 1}
    assert bench.events.said == [("PingRefused", f"success: {said}")]


async def test_a_name_that_stands_for_the_loopback_is_not_called(bench: Bench) -> None:
    async with bench.pinger() as pinger:
        pinger.tell(bench.ping(ping_url=f"http://localhost:{bench.port}/ping"))
        await bench.until(lambda: bool(bench.results()))
    assert bench.monitor.seen == []
    assert bench.events.said == [("PingRefused", "success: localhost stands for an address that may not be called")]


async def test_a_secret_that_may_not_be_read(bench: Bench) -> None:
    bench.kube.error = KubeError(403, "Forbidden", "no")
    async with bench.pinger() as pinger:
        pinger.tell(bench.ping(ping_url_key="url"))
        await bench.until(lambda: bool(bench.results()))
    assert bench.events.said == [("PingRefused", "success: Secret leasedjob-monitoring can't be read")]
