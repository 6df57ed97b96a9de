"""How late the workload of a tick runs, measured by the replica that created its Pod.

The kubelet's own times are cut to seconds, so what counts is when this process saw the Pod run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Final

from leasedjob.controller.facts import PodFacts

MOST: Final = 10_000  # Pods that are waited for; the ones that have been waited for longest are left out


class WorkloadSkew:
    """Waits for the workloads of Pods that were just created.

    Args:
        observe: told the seconds from a tick's start to its workload.
    """

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._starts: dict[str, datetime] = {}  # by lease id

    def expect(self, lease_id: str, start: datetime) -> None:
        """The first attempt of a tick that was to start at this time has its Pod."""
        self._starts[lease_id] = start
        if len(self._starts) > MOST:
            del self._starts[next(iter(self._starts))]

    def look(self, pods: Iterable[PodFacts], now: datetime) -> None:
        """Of these Pods, those that are waited for and whose workload runs, or has run."""
        if not self._starts:
            return
        for pod in pods:
            start = self._starts.get(pod.lease_id)
            if start is None:
                continue
            if pod.workload_started and pod.attempt == 1:
                self._observe(max(0.0, (now - start).total_seconds()))
            elif not (pod.finished or pod.deleting or pod.attempt > 1):
                continue
            del self._starts[pod.lease_id]
