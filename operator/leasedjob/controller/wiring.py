"""kopf's part: watching. Handlers only feed the cache; nothing is kept in annotations, no finalizers are set."""

from __future__ import annotations

from typing import Any

import kopf

from leasedjob.controller.cache import Cache
from leasedjob.controller.loops import Health
from leasedjob.controller.pods import cluster_label
from leasedjob.controller.settings import Settings
from leasedjob.protocol import GROUP, LABEL_CLUSTER, LABEL_MANAGED, VERSION


def registry_for(settings: Settings, cache: Cache, health: Health) -> kopf.OperatorRegistry:
    """The watch handlers of one operator."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        if settings.kubeconfig:
            return kopf.login_with_kubeconfig(**kwargs)
        return kopf.login_with_service_account(**kwargs)

    @kopf.on.event(GROUP, VERSION, "leasedjobs", registry=registry)
    async def leasedjob_seen(type: str | None, body: kopf.Body, **_: Any) -> None:
        health.event("jobs")
        (cache.job_gone if type == "DELETED" else cache.job_seen)(_plain(body))

    @kopf.on.event(GROUP, VERSION, "leasedjobruns", registry=registry)
    async def leasedjobrun_seen(type: str | None, body: kopf.Body, **_: Any) -> None:
        health.event("runs")
        (cache.run_gone if type == "DELETED" else cache.run_seen)(_plain(body))

    labels = {LABEL_MANAGED: "true", LABEL_CLUSTER: cluster_label(settings.cluster)}

    @kopf.on.event("v1", "pods", labels=labels, registry=registry)
    async def pod_seen(type: str | None, body: kopf.Body, **_: Any) -> None:
        health.event("pods")
        (cache.pod_gone if type == "DELETED" else cache.pod_seen)(_plain(body))

    return registry


def _plain(body: kopf.Body) -> dict[str, Any]:
    """kopf's view of the object as the plain dict behind it."""
    return dict(body)


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
    # Without cluster-wide rights, looking for namespaces and definitions would hold up the watches for a minute.
    k.scanning.disabled = bool(settings.namespaces)
    k.process.ultimate_exiting_timeout = 20
    return k
