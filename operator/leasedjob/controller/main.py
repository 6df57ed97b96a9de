"""The operator process: settings, database, API server, kopf, probes, and an orderly stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from dataclasses import replace
from typing import Any, Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from leasedjob import __version__
from leasedjob.controller.act import Actor
from leasedjob.controller.clock import DatabaseClock
from leasedjob.controller.clusters import ASKED_SECONDS, GREET_SECONDS, Doorkeeper, Greeter, identify
from leasedjob.controller.engine import Engine
from leasedjob.controller.events import Recorder
from leasedjob.controller.gauges import GAUGE_SECONDS, Gauges
from leasedjob.controller.kube import Kube, KubeError
from leasedjob.controller.loops import (
    EXPORT_SECONDS,
    POLL_SECONDS,
    RENEW_SECONDS,
    TELL_SECONDS,
    Comparer,
    Health,
    Poller,
    Renewer,
    ShutdownExporter,
    Teller,
    forever,
)
from leasedjob.controller.metrics import Metrics
from leasedjob.controller.page.server import serve as page
from leasedjob.controller.pings import Pinger
from leasedjob.controller.retention import Retention
from leasedjob.controller.settings import Settings, SettingsError
from leasedjob.controller.status import StatusWriter
from leasedjob.controller.tenants import Rotator, TenantSecrets
from leasedjob.controller.tracing import Tracer
from leasedjob.controller.wiring import watch
from leasedjob.lease.database import Credentials, operator_pool
from leasedjob.lease.service import JobSchedulerService
from leasedjob.lease.store import OperatorStore

log = logging.getLogger(__name__)
SWITCH_SECONDS: Final = 0.0005


async def resolved(settings: Settings, kube: Kube) -> Settings:
    """Settings with the cluster's name: the UID of kube-system unless one was given."""
    delay = 1.0
    while not settings.cluster:
        try:
            settings = replace(settings, cluster=await kube.namespace_uid("kube-system"))
        except KubeError as e:
            log.warning("the cluster's identity is not known yet (or set clusterName): %s", e)
            await asyncio.sleep(delay)
            delay = min(10.0, delay * 2)
    return settings


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Runs the operator until `stop` is set."""
    async with contextlib.AsyncExitStack() as stack:
        health, metrics, clock = Health(), Metrics(), DatabaseClock()
        await stack.enter_async_context(_http(settings, health, metrics))
        kube = await stack.enter_async_context(Kube(settings.kubeconfig, connections=settings.pod_concurrency + 40))
        settings = await resolved(settings, kube)
        own = await identify(settings, kube)
        metrics.cluster_info.labels(settings.cluster).set(1)
        credentials = Credentials.from_directory(settings.database_dir)
        connections = operator_pool(credentials, max_size=settings.database_connections)
        await stack.enter_async_context(connections)
        store = OperatorStore(connections.connection, observe=metrics.asked)
        events = Recorder(kube, settings.identity)
        pinger = Pinger(kube, settings.ping_hosts, settings.monitoring_secret, events, metrics)
        await stack.enter_async_context(pinger)
        tracer = Tracer(settings.otlp_endpoint, settings.cluster, metrics)
        tenants = TenantSecrets(settings, kube, metrics)
        actor = Actor(settings, kube, store, tenants, events, clock, metrics)
        engine = Engine(settings, kube, store, actor, clock, metrics, StatusWriter(kube, clock))
        actor.cache = engine.cache
        events.calm = actor.launches.calm
        gauges = Gauges(engine)
        await stack.enter_async_context(page(engine, health, gauges))
        rotator = Rotator(tenants, lambda: {namespace for namespace, _ in engine.cache.jobs} if engine.fresh else None)
        loops = {
            "agenda": engine.agenda.run(),
            "events": events.run(),
            "poll": forever("database poll", POLL_SECONDS, Poller(engine, health).step),
            "cluster": forever("name of the cluster", GREET_SECONDS, Greeter(engine, health, own).step),
            "renew": forever("renewal of claims", RENEW_SECONDS, Renewer(engine).step),
            "export": forever("export of shutdowns", EXPORT_SECONDS, ShutdownExporter(engine).step),
            "gauges": forever("metrics of states", GAUGE_SECONDS, gauges.step),
            "told": forever("transitions of runs", TELL_SECONDS, Teller(engine, pinger, tracer).step),
            "rotate": forever("rotation of credentials", settings.rotation_check_seconds, rotator.step),
            "compare": forever("comparison of watch and list", settings.compare_seconds, Comparer(engine, health).step),
            "watch": watch(settings, engine.cache, health),
        }
        if settings.own_namespace:
            asked = Doorkeeper(kube, store, settings).step
            loops["asked"] = forever("requests about clusters", ASKED_SECONDS, asked)
        if tracer.on:
            loops["traces"] = tracer.run()
        if settings.retention_days or settings.ledger_days:
            jobs = JobSchedulerService(connections.connection)
            loops["retention"] = Retention(jobs, settings.retention_days, settings.ledger_days).run()
        log.info("leasedjob %s serves cluster %s as %s", __version__, settings.cluster, settings.identity)
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
        stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait())
        # No loop ends by itself while the process is to live: whichever does is a reason to be restarted.
        done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        await engine.stop()
        for task in tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(15):
                await asyncio.gather(*tasks, return_exceptions=True)
        for task in () if stopping in done else done:
            if not task.cancelled() and task.exception():
                raise RuntimeError(f"{task.get_name()} ended") from task.exception()
            log.error("%s ended by itself", task.get_name())


@contextlib.asynccontextmanager
async def _http(settings: Settings, health: Health, metrics: Metrics) -> Any:
    """/healthz and /readyz on the health port, /metrics on the metrics port."""

    async def healthz(_: web.Request) -> web.Response:
        why = health.live()
        return web.Response(status=503 if why else 200, text=why or "ok")

    async def readyz(_: web.Request) -> web.Response:
        why = health.ready()
        return web.Response(status=503 if why else 200, text=why or "ok")

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    runners = []
    for port, routes in (
        (settings.health_port, [web.get("/healthz", healthz), web.get("/readyz", readyz)]),
        (settings.metrics_port, [web.get("/metrics", exposition)]),
    ):
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(app, handle_signals=False, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, None, port).start()
        runners.append(runner)
    try:
        yield
    finally:
        for runner in runners:
            await runner.cleanup()


async def _run(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, stop)


def main() -> None:
    """Console script `leasedjob-operator`. Exit codes: 0 stopped, 1 a loop ended, 2 a setting can't be used."""
    logging.basicConfig(
        level=os.environ.get("LEASEDJOB_LOG_LEVEL", "INFO"),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # kopf's thread computes while this one mostly asks: it must not wait its whole turn at each request.
    sys.setswitchinterval(SWITCH_SECONDS)
    logging.getLogger("kopf").setLevel(os.environ.get("LEASEDJOB_KOPF_LOG_LEVEL", "WARNING"))
    # It warns that it doesn't take over the signals in a thread, which is what the thread is for.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
    try:
        settings = Settings.from_environment()
    except SettingsError as e:
        print(f"leasedjob-operator: {e}", file=sys.stderr)
        sys.exit(2)
    if settings.kubeconfig:
        os.environ["KUBECONFIG"] = settings.kubeconfig  # where kopf looks
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    asyncio.run(_run(settings))
