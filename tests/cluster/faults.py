"""Faults in a running one-node cluster: what a network, a node or a freezing machine can do to a Pod.

All but `partition` hit the whole node, and so every test that runs at the same time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from tests.cluster import lifecycle, onenode
from tests.cluster.onenode import Node


class Faults:
    """Makes faults and heals them; `heal` undoes all of this object's."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._tables: set[str] = set()
        self._stopped: set[str] = set()
        self._frozen: set[Path] = set()

    def inside(self, *argv: str, check: bool = True, timeout: float = 30) -> str:
        """Runs a command in the cluster's namespaces (network, processes, mounts); its output."""
        done = subprocess.run(
            lifecycle.enter(self.node, *argv), capture_output=True, text=True, timeout=timeout, check=False
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(argv)}: exit {done.returncode}\n{done.stderr}")
        return done.stdout

    # --- network -----------------------------------------------------------------------------------------------------
    def partition(self, pod_ip: str, port: int) -> None:
        """Drops everything between one Pod and a TCP port, in both directions; connections hang, as after a cut."""
        table = "lj_" + pod_ip.replace(".", "_")
        self._tables.add(table)
        self.inside("nft", onenode.partition_rules(table, pod_ip, port))

    def reconnect(self, pod_ip: str) -> None:
        table = "lj_" + pod_ip.replace(".", "_")
        if table in self._tables:
            self.inside("nft", "delete", "table", "ip", table)
            self._tables.discard(table)

    # --- components --------------------------------------------------------------------------------------------------
    def _signal(self, component: str, sign: signal.Signals) -> None:
        """To a component of the cluster: etcd, apiserver, containerd, kcm, sched, kubelet, proxy or coredns."""
        pid = (self.node.folder / "pids" / f"{component}.pid").read_text().strip()
        self.inside("bash", "-c", f"kill -{int(sign)} {pid}")

    def stop(self, component: str) -> None:
        """Freezes a component with SIGSTOP; containers go on."""
        self._signal(component, signal.SIGSTOP)
        self._stopped.add(component)

    def resume(self, component: str) -> None:
        self._signal(component, signal.SIGCONT)
        self._stopped.discard(component)

    def kill(self, component: str) -> None:
        """Ends a component with SIGKILL; `start` brings it back."""
        self._signal(component, signal.SIGKILL)
        self._stopped.discard(component)

    def start(self, component: str) -> None:
        """Starts a component that was killed, as the cluster's first process had started it."""
        command = onenode.component_commands(self.node)[component]
        path = f"PATH={self.node.binaries}:/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin HOME=/root"
        script = f"{path} setsid {command} >> log/{component}.log 2>&1 < /dev/null & echo $! > pids/{component}.pid"
        self.inside("bash", "-c", script)

    # --- containers --------------------------------------------------------------------------------------------------
    def container_pid(self, container_id: str) -> int:
        """The host's number of a container's first process; the id as in a Pod's status, with or without scheme."""
        wanted = container_id.rpartition("/")[2]
        for folder in (lifecycle.CGROUP_ROOT / "pids" / self.node.cgroup, lifecycle.CGROUP_ROOT / self.node.cgroup):
            for group in folder.rglob(wanted):
                if pids := (group / "cgroup.procs").read_text().split():
                    return int(pids[0])
        raise AssertionError(f"no process of container {wanted}")

    def signal_container(self, container_id: str, sign: signal.Signals) -> None:
        """A signal from the host to a container's first process: SIGKILL and SIGSTOP work even there."""
        os.kill(self.container_pid(container_id), sign)

    def freeze(self, container_id: str | None = None) -> None:
        """Freezes one container, or all of the node's, with the cgroup freezer; `thaw` lets them go on."""
        root = lifecycle.CGROUP_ROOT / "freezer" / self.node.cgroup
        if not root.is_dir():  # cgroup v2
            root = lifecycle.CGROUP_ROOT / self.node.cgroup
        wanted = (container_id or "").rpartition("/")[2]
        group = next(root.rglob(wanted)) if wanted else root
        self._frozen.add(group)
        self._set_frozen(group, True)

    def thaw(self) -> None:
        for group in list(self._frozen):
            with contextlib.suppress(FileNotFoundError):
                self._set_frozen(group, False)
            self._frozen.discard(group)

    @staticmethod
    def _set_frozen(group: Path, frozen: bool) -> None:
        if (group / "freezer.state").exists():
            (group / "freezer.state").write_text("FROZEN" if frozen else "THAWED")
        else:
            (group / "cgroup.freeze").write_text("1" if frozen else "0")

    def heal(self) -> None:
        """Undoes every fault of this object."""
        self.thaw()
        for component in list(self._stopped):
            self.resume(component)
        for table in list(self._tables):
            self.inside("nft", "delete", "table", "ip", table, check=False)
            self._tables.discard(table)
