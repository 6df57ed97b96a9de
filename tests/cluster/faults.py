"""Faults in a running one-node cluster: what a network, a node or a freezing machine can do to a Pod.

What is done to a component hits the whole node, and so every test that runs at the same time. `python -m tests.cluster
heal NAME` undoes what a process that was killed has left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.cluster import lifecycle, network, onenode
from tests.cluster.network import How, Part, Way
from tests.cluster.onenode import Node

BESIDE_THE_CONTROL_PLANE = ("kubelet", "containerd", "proxy")  # what a node of its own would have


class Faults:
    """Makes faults and heals them; `heal` undoes all of this object's."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._tables: set[str] = set()
        self._partitions: dict[str, str] = {}
        self._stopped: set[str] = set()
        self._killed: set[str] = set()
        self._frozen: set[Path] = set()
        self._stood: set[int] = set()

    def inside(self, *argv: str, check: bool = True, timeout: float = 30) -> str:
        """Runs a command in the cluster's namespaces (network, processes, mounts); its output."""
        done = subprocess.run(
            lifecycle.enter(self.node, *argv), capture_output=True, text=True, timeout=timeout, check=False
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(argv)}: exit {done.returncode}\n{done.stderr}")
        return done.stdout

    # --- network -----------------------------------------------------------------------------------------------------
    @property
    def api(self) -> Part:
        """The cluster's API server, as Pods reach it."""
        address, port = network.API_SERVICE
        return Part("the API server", (self.node.address, address), (network.API_PORT, port))

    @property
    def kubelet(self) -> Part:
        """The node as it talks to its Pods: probes, exec, logs."""
        return Part("the node", (self.node.address, onenode.POD_GATEWAY))

    def cut(self, one: Part, other: Part, *, way: Way = Way.BOTH, how: How = How.DROP) -> str:
        """Cuts two parts off from each other; gives what `mend` takes. Connections that are open are cut, too.

        Raises:
            AssertionError: neither part says who it is.
        """
        if not any(part.addresses or part.ports for part in (one, other)):
            raise AssertionError(f"{one.name} and {other.name}: that is everybody, the cluster's own parts among them")
        table = network.PREFIX + uuid.uuid4().hex[:12]
        self._tables.add(table)
        self.inside("nft", network.rules(table, one, other, way, how))
        if how is How.DROP:
            self.inside("nft", network.bridge_rules(table, one, other, way))
        return table

    def mend(self, cut: str) -> None:
        """Lets packets through again; nothing where that was done before."""
        if cut in self._tables:
            for family in ("ip", "bridge"):
                self.inside("nft", "delete", "table", family, cut, check=False)
            self._tables.discard(cut)

    @contextlib.contextmanager
    def severed(self, one: Part, other: Part, *, way: Way = Way.BOTH, how: How = How.DROP) -> Iterator[None]:
        """The parts are cut off from each other inside the context."""
        cut = self.cut(one, other, way=way, how=how)
        try:
            yield
        finally:
            self.mend(cut)

    def partition(self, pod_ip: str, port: int) -> None:
        """Drops everything between one Pod and a port, in both directions; connections hang, as after a cut."""
        self._partitions[pod_ip] = self.cut(network.pod(pod_ip), Part(f"port {port}", ports=(port,)))

    def reconnect(self, pod_ip: str) -> None:
        if cut := self._partitions.pop(pod_ip, None):
            self.mend(cut)

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
        for group in self.node_cgroups():
            for procs in group.rglob("cgroup.procs"):
                send(map(int, procs.read_text().split()), signal.SIGKILL)

    def recover(self) -> None:
        """Starts what was killed, containerd before the kubelet."""
        for component in sorted(self._killed):
            self.start(component)
            if component == "containerd":  # without it the kubelet ends at once
                answers = shlex.join(self.node.ctr("version"))
                self.inside("bash", "-c", f"until {answers} > /dev/null 2>&1; do sleep 0.1; done", timeout=60)

    # --- the whole node ----------------------------------------------------------------------------------------------
    def freeze_node(self, *, control_plane: bool = False) -> None:
        """The node stands still: its containers, containerd, kubelet and kube-proxy. `thaw_node` lets it go on.

        Args:
            control_plane: API server, etcd and controllers, too: a whole cluster whose machine is suspended.
        """
        self._freeze_group(self._freezer())
        for component in onenode.component_commands(self.node) if control_plane else BESIDE_THE_CONTROL_PLANE:
            if component not in self._killed:
                self.stop(component)
        if control_plane:  # whatever else there is: shims, and what a component has started
            self._stood |= set(own_processes(self.node))
            send(self._stood, signal.SIGSTOP)

    def thaw_node(self) -> None:
        """Everything that this object has frozen goes on; containers first, before a kubelet can stop one."""
        self.thaw()
        send(self._stood, signal.SIGCONT)
        self._stood.clear()
        for component in list(self._stopped):
            self.resume(component)

    # --- containers --------------------------------------------------------------------------------------------------
    def processes(self, container_id: str) -> list[int]:
        """The host's numbers of a container's processes, the first one first; none if it has ended. The id as in a
        Pod's status, with or without scheme."""
        wanted = container_id.rpartition("/")[2]
        for folder in self.node_cgroups():
            for group in folder.rglob(wanted):
                with contextlib.suppress(OSError):
                    if pids := (group / "cgroup.procs").read_text().split():
                        return sorted(map(int, pids), key=_started)
        return []

    def container_pid(self, container_id: str) -> int:
        """The host's number of a container's first process."""
        if pids := self.processes(container_id):
            return pids[0]
        raise AssertionError(f"no process of container {container_id}")

    def signal_processes(self, container_id: str, sign: signal.Signals, *, named: str | None = None) -> list[int]:
        """A signal to a container's processes, or to those of them with this name (as `ps -o comm` shows it); the
        host's numbers of those that were hit.

        Raises:
            AssertionError: there is none.
        """
        pids = [pid for pid in self.processes(container_id) if named is None or _name(pid) == named]
        if not pids:
            raise AssertionError(f"no process {named or ''} of container {container_id}")
        send(pids, sign)
        return pids

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
        group = next(self._freezer().rglob(name), None)
        if group is None:
            raise AssertionError(f"no cgroup {name}")
        self._freeze_group(group)

    def _freezer(self) -> Path:
        """The cgroup of all of the cluster's containers that can freeze them."""
        root = lifecycle.CGROUP_ROOT / "freezer" / self.node.cgroup
        return root if root.is_dir() else lifecycle.CGROUP_ROOT / self.node.cgroup  # the latter: cgroup v2

    def _freeze_group(self, group: Path) -> None:
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

    # --- back to normal ----------------------------------------------------------------------------------------------
    def heal(self) -> None:
        """Undoes every fault of this object."""
        self.thaw_node()
        self.recover()
        for cut in list(self._tables):
            self.mend(cut)

    def heal_everything(self) -> None:
        """Undoes every fault of the cluster, whoever made it."""
        for file, value in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            for state in self._freezer().rglob(file):
                with contextlib.suppress(OSError):  # its container is gone
                    state.write_text(value)
        send(own_processes(self.node), signal.SIGCONT)
        for group in self.node_cgroups():
            for procs in group.rglob("cgroup.procs"):
                with contextlib.suppress(OSError):
                    send(map(int, procs.read_text().split()), signal.SIGCONT)
        found = json.loads(self.inside("nft", "-j", "list", "tables"))["nftables"]
        for table in (each["table"] for each in found if "table" in each):
            if table["name"].startswith(network.PREFIX):
                self.inside("nft", "delete", "table", table["family"], table["name"], check=False)
        self._killed = {name for name in onenode.component_commands(self.node) if not self._runs(name)}
        self._tables, self._partitions, self._stopped, self._frozen = set(), {}, set(), set()
        self.recover()

    def node_cgroups(self) -> list[Path]:
        """Those in which the cluster's containers are listed."""
        folders = (lifecycle.CGROUP_ROOT / "pids" / self.node.cgroup, lifecycle.CGROUP_ROOT / self.node.cgroup)
        return [folder for folder in folders if folder.is_dir()]

    def _runs(self, component: str) -> bool:
        pid = (self.node.folder / "pids" / f"{component}.pid").read_text().strip()
        return self.inside("bash", "-c", f"cat /proc/{pid}/comm 2> /dev/null || true").strip() != ""


def own_processes(node: Node) -> list[int]:
    """The host's numbers of the cluster's processes that are in no container, but for its first one."""
    first = lifecycle.init_pid(node)
    assert first is not None, f"cluster {node.name} is not running"
    namespace = os.readlink(f"/proc/{first}/ns/pid")
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != first:
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns" / "pid") == namespace:
                    found.append(int(entry.name))
    return found


def send(pids: Iterable[int], sign: signal.Signals) -> None:
    """A signal to processes by the host's numbers; those that have ended are left out."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> tuple[int, int]:
    """For an order by age."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]), pid
    except (OSError, IndexError):
        return 0, pid
