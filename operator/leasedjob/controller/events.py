"""Kubernetes Events on a LeasedJob. They decide nothing: one that can't be written is logged and forgotten."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from leasedjob.controller.kube import Kube, KubeError
from leasedjob.protocol import GROUP, VERSION

log = logging.getLogger(__name__)
COMPONENT: Final = "leasedjob"
MESSAGE_LIMIT: Final = 1024  # the API server's own limit for an Event's message
QUEUE_LIMIT: Final = 2000


class Recorder:
    """Writes Events in the background, a few at a time, so that no reconcile waits for one."""

    def __init__(self, kube: Kube, instance: str, *, writers: int = 4) -> None:
        self._kube = kube
        self._instance = instance
        self._writers = writers
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(QUEUE_LIMIT)

    async def record(self, regarding: Mapping[str, Any], reason: str, message: str, *, warning: bool = False) -> None:
        """Queues an Event about the object `regarding`; dropped if the queue is full."""
        meta = regarding["metadata"]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{meta['name'][:200]}.{uuid.uuid4().hex[:16]}", "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": regarding.get("kind") or "LeasedJob",
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
                "resourceVersion": meta.get("resourceVersion", ""),
            },
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": message[:MESSAGE_LIMIT],
            "source": {"component": COMPONENT, "host": self._instance},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        log.info("%s/%s: %s: %s", meta["namespace"], meta["name"], reason, message)
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            log.warning("too many Events wait to be written; dropped %s on %s", reason, meta["name"])

    async def run(self) -> None:
        """Writes what is queued, until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._writers):
                group.create_task(self._write())

    async def _write(self) -> None:
        while True:
            event = await self._queue.get()
            try:
                await self._kube.create_event(event)
            except KubeError as e:
                if e.status not in (403, 404):  # a namespace that is terminating or gone takes no Events
                    log.warning("Event %s on %s: %s", event["reason"], event["involvedObject"]["name"], e)
