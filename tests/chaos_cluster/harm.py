"""What is done to clusters, database and holders, and how it is undone. The plan says when; here is how."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final

from tests.chaos.proxy import Fault as Line
from tests.chaos_cluster import clocks
from tests.chaos_cluster.database import NotNowError, Replicated
from tests.chaos_cluster.plan import CLOCK_SHIFT, Fault
from tests.chaos_cluster.sites import Site, running
from tests.cluster import faults, network, onenode
from tests.cluster.network import How, Part
from tests.cluster.onenode import HOST_ADDRESS
from tests.e2e.kube import Json

PATIENCE: Final = 15.0  # seconds for somebody to come to whom it can be done


class NobodyError(Exception):
    """There is nobody to do it to; the message says who was wanted."""


@dataclass(slots=True)
class Harm:
    """Does faults and heals them.

    Args:
        holders: the holders' processes, by number; one that was killed has another one's place at once.
        doors: how many doors of the database the holders have; the first one is the clusters'.
    """

    sites: dict[str, Site]
    database: Replicated
    holders: Callable[[], Sequence[subprocess.Popen[bytes]]]
    stop: threading.Event
    _kubelets: dict[str, threading.Lock] = field(default_factory=dict)

    def does(self, fault: Fault) -> AbstractContextManager[str]:
        """A context in which the fault is there; gives the name of whom it hit.

        Raises:
            NobodyError, NotNowError: it can't be done now.
        """
        return getattr(self, "_" + fault.kind.replace("-", "_"))(fault)  # type: ignore[no-any-return]

    # --- whom --------------------------------------------------------------------------------------------------------

    def _one(self, fault: Fault, container: str, pods: Callable[[Site], Sequence[Json]]) -> tuple[Site, Json, str]:
        """A Pod in which this container runs, and the container's id: in the fault's cluster, else in another one;
        waits a while for one."""
        first = self.sites[fault.cluster]
        deadline = time.monotonic() + PATIENCE
        while True:
            for site in (first, *(site for site in self.sites.values() if site is not first)):
                with contextlib.suppress(OSError):
                    if found := [(pod, id) for pod in pods(site) if (id := running(pod, container))]:
                        return site, *found[int(fault.place * len(found))]
            if time.monotonic() > deadline or self.stop.wait(1.0):
                raise NobodyError(f"{container} runs nowhere")

    def _operator(self, fault: Fault) -> tuple[Site, Json, str]:
        return self._one(fault, "operator", Site.operators)

    def _pod(self, fault: Fault, container: str = "main") -> tuple[Site, Json, str]:
        return self._one(fault, container, Site.pods)

    # --- processes ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _killed(self, site: Site, pod: Json, container: str) -> Iterator[str]:
        faults.Faults(site.node).signal_container(container, signal.SIGKILL)
        yield name_of(site, pod)

    @contextlib.contextmanager
    def _stopped(self, site: Site, pod: Json, container: str) -> Iterator[str]:
        """Each process of the container by a signal, so that SIGKILL still ends them."""
        own = faults.Faults(site.node)
        pids = own.signal_processes(container, signal.SIGSTOP)
        try:
            yield name_of(site, pod)
        finally:
            faults.send(set(pids) & set(own.processes(container)), signal.SIGCONT)

    @contextlib.contextmanager
    def _clock(self, fault: Fault, site: Site, pod: Json, container: str, file: str) -> Iterator[str]:
        pid = faults.Faults(site.node).container_pid(container)
        clocks.set_clock(pid, file, fault.sign * CLOCK_SHIFT)
        try:
            yield f"{name_of(site, pod)} {fault.sign * CLOCK_SHIFT:+d} s"
        finally:
            with contextlib.suppress(OSError, AssertionError):
                clocks.set_clock(pid, file, 0)

    def _operator_kill(self, fault: Fault) -> AbstractContextManager[str]:
        return self._killed(*self._operator(fault))

    def _operator_freeze(self, fault: Fault) -> AbstractContextManager[str]:
        return self._stopped(*self._operator(fault))

    def _operator_clock(self, fault: Fault) -> AbstractContextManager[str]:
        return self._clock(fault, *self._operator(fault), clocks.OPERATOR_FILE)

    def _sidecar_kill(self, fault: Fault) -> AbstractContextManager[str]:
        return self._killed(*self._pod(fault, "leasedjob-hold"))

    def _sidecar_freeze(self, fault: Fault) -> AbstractContextManager[str]:
        return self._stopped(*self._pod(fault, "leasedjob-hold"))

    def _sidecar_clock(self, fault: Fault) -> AbstractContextManager[str]:
        return self._clock(fault, *self._pod(fault, "leasedjob-hold"), clocks.SIDECAR_FILE)

    def _workload_kill(self, fault: Fault) -> AbstractContextManager[str]:
        return self._killed(*self._pod(fault))

    def _workload_freeze(self, fault: Fault) -> AbstractContextManager[str]:
        return self._stopped(*self._pod(fault))

    # --- Pods and nodes ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _pod_delete(self, fault: Fault) -> Iterator[str]:
        site, pod, _ = self._pod(fault)
        site.delete(pod)
        yield name_of(site, pod)

    @contextlib.contextmanager
    def _pod_freeze(self, fault: Fault) -> Iterator[str]:
        site, pod, _ = self._pod(fault)
        own = faults.Faults(site.node)
        try:
            own.freeze_pod(pod["metadata"]["uid"])
            yield name_of(site, pod)
        finally:
            own.heal()

    @contextlib.contextmanager
    def _kubelet(self, fault: Fault, does: Callable[[faults.Faults], None]) -> Iterator[str]:
        site = self.sites[fault.cluster]
        lock = self._kubelets.setdefault(site.name, threading.Lock())
        if not lock.acquire(blocking=False):
            raise NotNowError(f"the kubelet of {site.name} is not well already")
        own = faults.Faults(site.node)
        try:
            does(own)
            yield onenode.NODE
        finally:
            own.heal()
            lock.release()

    def _kubelet_kill(self, fault: Fault) -> AbstractContextManager[str]:
        return self._kubelet(fault, lambda own: own.kill("kubelet"))

    def _kubelet_freeze(self, fault: Fault) -> AbstractContextManager[str]:
        return self._kubelet(fault, lambda own: own.stop("kubelet"))

    def _node_freeze(self, fault: Fault) -> AbstractContextManager[str]:
        return self._kubelet(fault, lambda own: own.freeze_node())

    @contextlib.contextmanager
    def _node_drain(self, fault: Fault) -> Iterator[str]:
        site = self.sites[fault.cluster]
        options = ["--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=20s"]
        try:
            site.kubectl.run("drain", onenode.NODE, *options, timeout=60)
            yield onenode.NODE
        finally:
            site.kubectl.run("uncordon", onenode.NODE)

    # --- networks ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _cut(self, fault: Fault, site: Site, one: Part, other: Part, target: str) -> Iterator[str]:
        """Packets are dropped and nobody is told, or refused, until it is healed."""
        how = How.DROP if fault.sign > 0 else How.REFUSE
        with faults.Faults(site.node).severed(one, other, how=how):
            yield f"{target} {how}"

    def _cut_database(self, fault: Fault) -> AbstractContextManager[str]:
        door = Part("PostgreSQL", (HOST_ADDRESS,), (self.database.doors[0].port,))
        return self._cut(fault, self.sites[fault.cluster], network.CLUSTER, door, "PostgreSQL")

    def _operator_cut_api(self, fault: Fault) -> AbstractContextManager[str]:
        site, pod, _ = self._operator(fault)
        operator = network.pod(pod["status"]["podIP"])
        return self._cut(fault, site, operator, faults.Faults(site.node).api, name_of(site, pod))

    # --- the database ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _postgres_restart(self, fault: Fault) -> Iterator[str]:
        self.database.restart(fault.seconds)
        yield "primary"

    @contextlib.contextmanager
    def _postgres_promote(self, fault: Fault) -> Iterator[str]:
        self.database.promote()
        yield "standby"

    # --- holders -----------------------------------------------------------------------------------------------------

    def _holder(self, fault: Fault) -> int:
        return int(fault.place * len(self.holders()))

    @contextlib.contextmanager
    def _holder_kill(self, fault: Fault) -> Iterator[str]:
        number = self._holder(fault)
        self.holders()[number].kill()
        yield f"holders-{number}"

    @contextlib.contextmanager
    def _holder_freeze(self, fault: Fault) -> Iterator[str]:
        number = self._holder(fault)
        process = self.holders()[number]
        process.send_signal(signal.SIGSTOP)
        try:
            yield f"holders-{number}"
        finally:
            process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def _holder_cut(self, fault: Fault) -> Iterator[str]:
        """All processes behind one door."""
        door = 1 + int(fault.place * (len(self.database.doors) - 1))
        self.database.doors[door].breaks(Line.DROP)
        try:
            yield f"door {door}"
        finally:
            self.database.doors[door].breaks(Line.NONE)


def name_of(site: Site, pod: Json) -> str:
    """With its cluster, which need not be the plan's."""
    return f"{site.name}/{pod['metadata']['name']}"
