"""Faults in a running one-node cluster: what a network, a node or a freezing machine can do to a Pod.

What is done to a component hits the whole node, and so every test that runs at the same time.
"""

from __future__ import annotations

import contextlib
import os
import shlex
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
        self._killed: set[str] = set()
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
        self._killed.add(component)

    def start(self, component: str) -> None:
        """Starts a component that was killed, as the cluster's first process had started it."""
        command = onenode.component_commands(self.node)[component]
        path = f"PATH={self.node.binaries}:/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin HOME=/root"
        script = f"{path} setsid {command} >> log/{component}.log 2>&1 < /dev/null & echo $! > pids/{component}.pid"
        self.inside("bash", "-c", script)
        self._killed.discard(component)

    def crash(self) -> None:
        """The node dies: kubelet, containerd and every process of every container; `recover` brings it back."""
        self.kill("kubelet")
        self.kill("containerd")
        # In the cluster's own process namespace, so no other cluster's.
        shims = 'for p in /proc/[0-9]*; do [ "$(cat $p/comm)" != containerd-shim ] || echo ${p#/proc/}; done'
        self.inside("bash", "-c", f"kill -{int(signal.SIGKILL)} $({shims}) || true")
        for group in (lifecycle.CGROUP_ROOT / "pids" / self.node.cgroup, lifecycle.CGROUP_ROOT / self.node.cgroup):
            for procs in group.rglob("cgroup.procs"):
                for pid in procs.read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)

    def recover(self) -> None:
        """Starts what was killed, containerd before the kubelet."""
        for component in sorted(self._killed):
            self.start(component)
            if component == "containerd":  # without it the kubelet ends at once
                answers = shlex.join(self.node.ctr("version"))
                self.inside("bash", "-c", f"until {answers} > /dev/null 2>&1; do sleep 0.1; done", timeout=60)

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

    def freeze(self, container_id: str) -> None:
        """Freezes one container with the cgroup freezer; `thaw` lets it go on."""
        self._freeze(container_id.rpartition("/")[2])

    def freeze_pod(self, uid: str) -> None:
        """Freezes all containers of a Pod at once, its sidecars included."""
        self._freeze(f"pod{uid}")

    def _freeze(self, name: str) -> None:
        root = lifecycle.CGROUP_ROOT / "freezer" / self.node.cgroup
        if not root.is_dir():  # cgroup v2
            root = lifecycle.CGROUP_ROOT / self.node.cgroup
        group = next(root.rglob(name), None)
        if group is None:
            raise AssertionError(f"no cgroup {name}")
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
        self.recover()
        for table in list(self._tables):
            self.inside("nft", "delete", "table", "ip", table, check=False)
            self._tables.discard(table)
