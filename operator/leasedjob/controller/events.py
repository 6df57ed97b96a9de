"""Kubernetes Events on a LeasedJob. They decide nothing: one that can't be written is logged and forgotten.

What is said again is counted, not said again: the name of an Event follows from its object, type, reason and message,
so that every replica, also one that was started later, finds the same Event and adds one to its count. The API server
forgets an Event an hour after its last change; what happens after that begins a new one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from leasedjob.controller.kube import Kube, KubeError
from leasedjob.protocol import GROUP, VERSION

log = logging.getLogger(__name__)
COMPONENT: Final = "leasedjob"
MESSAGE_LIMIT: Final = 1024  # the API server's own limit for an Event's message
QUEUE_LIMIT: Final = 2000
COUNT_TRIES: Final = 5  # replicas may count the same Event at the same moment


class EventReason(StrEnum):
    """Every `reason` of an Event; beside these only those of `leasedjob.api.problem.Reason`."""

    RUN_STARTED = "RunStarted"
    RUN_SUCCEEDED = "RunSucceeded"
    RUN_FAILED = "RunFailed"
    RUN_INTERRUPTED = "RunInterrupted"
    RUN_CANCELLED = "RunCancelled"
    RUN_REPLACED = "RunReplaced"
    POD_NOT_CREATED = "PodNotCreated"
    CLAIM_RELEASED = "ClaimReleased"
    POD_DELETED = "PodDeleted"
    RUN_RELEASED = "RunReleased"
    RUN_FORGOTTEN = "RunForgotten"
    SUSPENDED_AFTER_FAILURES = "SuspendedAfterFailures"
    SCHEDULE_RESUMED = "ScheduleResumed"
    BACKFILL_STARTED = "BackfillStarted"
    BACKFILL_ENDED = "BackfillEnded"
    TICK_MISSED = "TickMissed"
    TICK_SKIPPED = "TickSkipped"
    SCHEDULE_WARNING = "ScheduleWarning"
    PING_REFUSED = "PingRefused"
    PING_FAILED = "PingFailed"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """An Event to write. `once`: it tells of something that happens once, so that a second writer adds nothing."""

    event: dict[str, Any]
    once: bool


def event_name(regarding: Mapping[str, Any], *said: str) -> str:
    """The same for the same words about the same object, whoever says them."""
    meta = regarding["metadata"]
    digest = hashlib.sha256("\0".join((meta["uid"], *said)).encode("utf-8", "surrogatepass"))
    return f"{meta['name'][:200]}.{digest.hexdigest()[:16]}"


async def _at_once() -> None:
    """Nothing is waited for."""


class Recorder:
    """Writes Events in the background, a few at a time, so that no reconcile waits for one.

    Attributes:
        calm: awaited before each Event: whatever has to go first.
    """

    def __init__(self, kube: Kube, instance: str, *, writers: int = 4) -> None:
        self.calm: Callable[[], Awaitable[None]] = _at_once
        self._kube = kube
        self._instance = instance
        self._writers = writers
        self._queue: asyncio.Queue[_Wanted] = asyncio.Queue(QUEUE_LIMIT)
        self._writing = 0
        self._counting = asyncio.Lock()

    @property
    def idle(self) -> bool:
        """Nothing waits to be written or is being written."""
        return self._queue.empty() and not self._writing

    def record(
        self, regarding: Mapping[str, Any], reason: str, message: str, *, warning: bool = False, once: str = ""
    ) -> None:
        """Queues an Event about the object `regarding`; dropped if the queue is full.

        Args:
            once: what this can happen once for, such as an attempt: however many replicas say it, it counts as one.
                Empty: it is counted each time.
        """
        meta = regarding["metadata"]
        now = _now()
        kind, message = "Warning" if warning else "Normal", message[:MESSAGE_LIMIT]
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": event_name(regarding, kind, reason, message, once), "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": regarding.get("kind") or "LeasedJob",
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
                "resourceVersion": meta.get("resourceVersion", ""),
            },
            "type": kind,
            "reason": str(reason),
            "message": message,
            "source": {"component": COMPONENT, "host": self._instance},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        log.info("%s/%s: %s: %s", meta["namespace"], meta["name"], reason, message)
        try:
            self._queue.put_nowait(_Wanted(event, bool(once)))
        except asyncio.QueueFull:
            log.warning("too many Events wait to be written; dropped %s on %s", reason, meta["name"])

    async def run(self) -> None:
        """Writes what is queued, until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._writers):
                group.create_task(self._write_all())

    async def _write_all(self) -> None:
        while True:
            wanted = await self._queue.get()
            event = wanted.event
            self._writing += 1
            try:
                await self.calm()
                await self._write(wanted)
            except KubeError as e:
                if e.status not in (403, 404):  # a namespace that is terminating or gone takes no Events
                    log.warning("Event %s on %s: %s", event["reason"], event["involvedObject"]["name"], e)
            finally:
                self._writing -= 1

    async def _write(self, wanted: _Wanted) -> None:
        try:
            await self._kube.create_event(wanted.event)
        except KubeError as e:
            if e.status != 409 or e.reason != "AlreadyExists":
                raise
            if not wanted.once:
                async with self._counting:
                    await self._count(wanted.event)

    async def _count(self, event: dict[str, Any]) -> None:
        """Adds one to the count of the Event that says this already. The first patch reads it: a right to read Events
        is not needed."""
        namespace, name = event["metadata"]["namespace"], event["metadata"]["name"]
        last = {"lastTimestamp": event["lastTimestamp"]}
        for _ in range(COUNT_TRIES):
            there = await self._kube.patch_event(namespace, name, last)
            body = {
                **last,
                "metadata": {"resourceVersion": there["metadata"]["resourceVersion"]},
                "count": int(there.get("count") or 1) + 1,
                "source": event["source"],
            }
            try:
                await self._kube.patch_event(namespace, name, body)
            except KubeError as e:
                if e.status != 409:
                    raise
            else:
                return


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
