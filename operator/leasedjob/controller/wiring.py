"""kopf's part: watching. Handlers only feed the cache; nothing is kept in annotations, no finalizers are set.

kopf runs in a thread and an event loop of its own: it takes over the signals of a main thread, and at its end the other
tasks of its loop. What it observes is handed over to the operator's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import kopf
from kopf._cogs.clients import api as kopf_api

from leasedjob.api import deep
from leasedjob.controller.cache import Cache
from leasedjob.controller.loops import Health
from leasedjob.controller.pods import cluster_label
from leasedjob.controller.settings import Settings
from leasedjob.protocol import GROUP, LABEL_CLUSTER, LABEL_MANAGED, VERSION

log = logging.getLogger(__name__)
Deliver = Callable[[str, Callable[[dict[str, Any]], None], kopf.Body], None]


def pod_labels(settings: Settings) -> dict[str, str]:
    """The labels of the Pods that this operator's cluster runs."""
    return {LABEL_MANAGED: "true", LABEL_CLUSTER: cluster_label(settings.cluster)}


async def watch(settings: Settings, cache: Cache, health: Health) -> None:
    """Watches until it is cancelled, from when `health` says that it may; ends or raises only if kopf does."""
    loop = asyncio.get_running_loop()

    def deliver(kind: str, take: Callable[[dict[str, Any]], None], body: kopf.Body) -> None:
        plain = dict(body)

        def arrived() -> None:
            health.event(kind)
            take(plain)

        loop.call_soon_threadsafe(arrived)

    _read_deep_objects()

    def run(stop: threading.Event) -> None:
        kopf.run(
            registry=registry_for(settings, cache, deliver),
            settings=settings_for(settings),
            clusterwide=not settings.namespaces,
            namespaces=sorted(s for s in health.scopes if s is not None),
            standalone=True,
            stop_flag=stop,
        )

    await health.renew.wait()
    while True:
        stop = threading.Event()
        health.renew.clear()
        thread = asyncio.ensure_future(asyncio.to_thread(run, stop))
        renew = asyncio.ensure_future(health.renew.wait())
        try:
            await asyncio.wait([thread, renew], return_when=asyncio.FIRST_COMPLETED)
            if thread.done():
                return await thread
        finally:
            renew.cancel()
            stop.set()
            with contextlib.suppress(Exception):  # what had ended its watchers was logged then
                await thread
        # A watcher ends for good at what kopf takes for final: a right that is taken away, a definition made anew.
        log.warning("the watch begins anew%s", " for it is silent" if health.staleness() else "")


class _NoEssence(kopf.DiffBaseStorage):
    """Handlers of events need no difference to what was before, which costs two deep copies of each object."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


class _NoProgress(kopf.ProgressStorage):
    """Handlers of events have no progress."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None

    def purge(self, **_: Any) -> None:
        return None

    def touch(self, **_: Any) -> None:
        return None

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence


@functools.cache
def _read_deep_objects() -> None:
    """From now on one object that is too deep for the parser ends neither kopf's lists nor its watches.

    kopf has no setting for it: its two functions through which everything is read are wrapped.
    """
    request, iter_lines = kopf_api.request, kopf_api.iter_jsonlines

    async def requested(*args: Any, **options: Any) -> Any:
        response = await request(*args, **options)
        response.json = functools.partial(response.json, loads=deep.loads)  # type: ignore[method-assign]
        return response

    async def cut_lines(*args: Any, **options: Any) -> AsyncIterator[bytes]:
        async for line in iter_lines(*args, **options):
            yield deep.readable(line)

    kopf_api.request, kopf_api.iter_jsonlines = requested, cut_lines


def registry_for(settings: Settings, cache: Cache, deliver: Deliver) -> kopf.OperatorRegistry:
    """The watch handlers of one operator; each hands over one kind of object."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        if settings.kubeconfig:
            return kopf.login_with_kubeconfig(**kwargs)
        return kopf.login_with_service_account(**kwargs)

    @kopf.on.event(GROUP, VERSION, "leasedjobs", registry=registry)
    async def leasedjob_seen(type: str | None, body: kopf.Body, **_: Any) -> None:
        deliver("jobs", cache.job_gone if type == "DELETED" else cache.job_seen, body)

    @kopf.on.event(GROUP, VERSION, "leasedjobruns", registry=registry)
    async def leasedjobrun_seen(type: str | None, body: kopf.Body, **_: Any) -> None:
        deliver("runs", cache.run_gone if type == "DELETED" else cache.run_seen, body)

    @kopf.on.event("v1", "pods", labels=pod_labels(settings), registry=registry)
    async def pod_seen(type: str | None, body: kopf.Body, **_: Any) -> None:
        deliver("pods", cache.pod_gone if type == "DELETED" else cache.pod_seen, body)

    return registry


def settings_for(settings: Settings) -> kopf.OperatorSettings:
    """Explicit watch timeouts (a silent connection is replaced within about a minute), no Events, no peering."""
    k = kopf.OperatorSettings()
    k.peering.standalone = True
    k.posting.enabled = False
    k.watching.server_timeout = 60
    k.watching.client_timeout = 75
    k.watching.connect_timeout = 10
    k.watching.chunk_size = 500
    k.watching.reconnect_backoff = 1.0
    # The API server sends the runs' own Pods only, however many others there are.
    k.watching.label_selectors["", "v1", "pods"] = ",".join(f"{label}={v}" for label, v in pod_labels(settings).items())
    # Without cluster-wide rights, looking for namespaces and definitions would hold up the watches for a minute.
    k.scanning.disabled = bool(settings.namespaces)
    k.process.ultimate_exiting_timeout = 20
    k.persistence.diffbase_storage = _NoEssence()
    k.persistence.progress_storage = _NoProgress()
    return k
