"""Starts, finds and removes one-node clusters on this machine (the effects; the commands are in `onenode`)."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.cluster import binaries, images, onenode, packages
from tests.cluster.layout import Cache
from tests.cluster.onenode import Node
from tests.cluster.progress import ClusterError, Progress, clean_environment, output, tail, wait_for

# Numbers of the clusters that the Makefile uses; any other name, or one whose number is taken by a cluster of another
# cache folder, takes the first free one from 10 on.
KNOWN_INDEX = {"demo": 1, "test": 2, "twin-a": 3, "twin-b": 4}
FIRST_FREE_INDEX = 10
CGROUP_ROOT = Path("/sys/fs/cgroup")
START_SECONDS = 120.0
RECOVERY_SECONDS = 30.0


# --- what is there ---------------------------------------------------------------------------------------------------
def find(cache: Cache, name: str) -> Node | None:
    """The cluster of that name as it was started, running or not; None where its folder isn't there."""
    folder = cache.clusters / name
    try:
        state = json.loads((folder / "cluster.json").read_text())
        return Node(name, state["index"], folder, Path(state["binaries"]), state["fast_node_loss"])
    except (OSError, ValueError, KeyError):
        return None


def find_all(cache: Cache) -> list[Node]:
    names = sorted(p.parent.name for p in cache.clusters.glob("*/cluster.json"))
    return [node for name in names if (node := find(cache, name))]


def _process_start(pid: int) -> str | None:
    """Boot and start time of a process: with its number they name it for good, a number alone may be reused."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":
            return None
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + ":" + fields[19]
    except (OSError, IndexError):
        return None


def main_pid(node: Node) -> int | None:
    """The host's number of the process under which the cluster lives, if it is alive and ours."""
    try:
        state = json.loads((node.folder / "process.json").read_text())
    except (OSError, ValueError):
        return None
    pid = int(state["pid"])
    return pid if _process_start(pid) == state["start"] else None


def init_pid(node: Node) -> int | None:
    """The host's number of the cluster's process 1."""
    pid = main_pid(node)
    if pid is None:
        return None
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def enter(node: Node, *argv: str) -> list[str]:
    """The command that runs `argv` inside the cluster. Raises ClusterError where it isn't running."""
    pid = init_pid(node)
    if pid is None:
        raise ClusterError(f"cluster {node.name} is not running")
    return onenode.enter_command(node, pid, list(argv))


def healthy(node: Node) -> bool:
    """Whether the API answers and the node is Ready."""
    if main_pid(node) is None:
        return False
    path = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
    return output(node.kubectl("get", "node", onenode.NODE, "--request-timeout=5s", "-o", path), timeout=10) == "True"


# --- start -----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _locked(cache: Cache, name: str) -> Iterator[None]:
    """One start or removal of a cluster at a time."""
    cache.clusters.mkdir(parents=True, exist_ok=True)
    with (cache.clusters / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _link_exists(link: str) -> bool:
    return Path(f"/sys/class/net/{link}").exists()


def choose_index(name: str, taken: set[int]) -> int:
    """The number of a new cluster: the known one, else the first free one."""
    if (known := KNOWN_INDEX.get(name)) is not None and known not in taken:
        return known
    return next(i for i in range(FIRST_FREE_INDEX, 251) if i not in taken)


def up(cache: Cache, name: str, progress: Progress, *, index: int | None = None, fast_node_loss: bool = False) -> Node:
    """A running cluster of that name: the one that is there if it is healthy, else a new one.

    Raises ClusterError with what is missing, or which log to read.
    """
    if os.geteuid() != 0:
        raise ClusterError("a one-node Kubernetes needs root: its containers, mounts and network are made directly")
    with _locked(cache, name):
        node = find(cache, name)
        asked = binaries.kubernetes_asked()
        if node is not None and _recovers(node, progress):
            if asked is not None:
                same_minor(f"cluster {name}", binaries.version_of(node.binaries), asked)
            progress.say(f"cluster {name} is up: {node.kubeconfig}")
            return node
        if node is not None:
            progress.say(f"cluster {name} is there but not healthy: making it anew")
            _remove(node)
        packages.ensure(packages.RUN, cache, progress)
        programs = binaries.ensure(cache, progress)
        node = _reserve(cache, name, programs, index, fast_node_loss)
        try:
            _start(node, progress)
            load(node, [images.pause_archive(cache, programs), images.base_archive(cache, progress)], progress)
        except BaseException:
            kept = cache.logs / f"cluster-{name}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(node.log, kept, ignore_dangling_symlinks=True, dirs_exist_ok=True)
            progress.say(f"cluster {name} did not start; its logs are kept in {kept}")
            _remove(node)
            raise
        return node


def same_minor(what: str, version: str, asked: str) -> None:
    """Raises ClusterError where a cluster that is there has another minor version than the one that is asked for."""
    if version.split(".")[:2] != asked.split(".")[:2]:
        raise ClusterError(
            f"{what} runs Kubernetes {version or '(unknown)'}, and {asked} is asked for: remove it, or take another "
            "name (TEST_CLUSTER=name)"
        )


def _recovers(node: Node, progress: Progress) -> bool:
    """Whether a cluster is healthy, or becomes so: one that is only busy must not be thrown away."""
    if main_pid(node) is None:
        return False
    if healthy(node):
        return True
    progress.say(f"cluster {node.name} does not answer; waiting {RECOVERY_SECONDS:.0f} s for it")
    with contextlib.suppress(ClusterError):
        wait_for("it to answer", lambda: healthy(node), timeout=RECOVERY_SECONDS, log=node.log / "apiserver.log")
        return True
    return False


def _reserve(cache: Cache, name: str, programs: Path, index: int | None, fast_node_loss: bool) -> Node:
    """A new cluster's number and folder, taken under a lock, and the host's fixed address."""
    with _locked(cache, "numbers"):
        taken = {n.index for n in find_all(cache)} | {i for i in range(1, 251) if _link_exists(f"lj{i}")}
        node = Node(name, index or choose_index(name, taken), cache.clusters / name, programs, fast_node_loss)
        if node.index in taken:
            raise ClusterError(f"another cluster has number {node.index}; choose another one with --index")
        node.folder.mkdir(parents=True, exist_ok=True)
        node.folder.chmod(0o700)
        state = {"index": node.index, "binaries": str(programs), "fast_node_loss": fast_node_loss}
        (node.folder / "cluster.json").write_text(json.dumps(state))
        if not _link_exists(onenode.HOST_BRIDGE):
            _all(onenode.host_bridge_commands(), node)
        return node


def _start(node: Node, progress: Progress) -> None:
    progress.say(f"starting Kubernetes {binaries.version_of(node.binaries)}: cluster {node.name}, {node.address}")
    _write_files(node)
    _make_cgroups(node)
    with (node.log / "init.log").open("ab") as log:
        process = subprocess.Popen(
            onenode.start_command(node),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={"PATH": packages.search_path()},
        )
    state = {"pid": process.pid, "start": _process_start(process.pid)}
    (node.folder / "process.json").write_text(json.dumps(state))
    own = os.readlink("/proc/self/ns/net")

    def separated() -> bool:
        if process.poll() is not None:
            raise ClusterError(
                f"namespaces can't be made here (unshare ended with {process.returncode}):\n"
                f"{tail(node.log / 'init.log')}"
            )
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/{process.pid}/ns/net") != own
        return False

    wait_for("the cluster's own network namespace", separated, timeout=10, log=node.log / "init.log", every=0.01)
    _all(onenode.link_commands(node, process.pid), node)

    def alive(done: bool) -> bool:
        if process.poll() is not None:
            raise ClusterError(
                f"the cluster's first process ended ({process.returncode}):\n{tail(node.log / 'init.log')}"
            )
        return done

    started = node.folder / "started"
    wait_for(
        "the Kubernetes API", lambda: alive(started.exists()), timeout=START_SECONDS, log=node.log / "apiserver.log"
    )
    progress.say("  API ready")
    wait_for("the node to be Ready", lambda: alive(healthy(node)), timeout=START_SECONDS, log=node.log / "kubelet.log")
    account = node.kubectl("-n", "default", "get", "serviceaccount/default", "configmap/kube-root-ca.crt")
    wait_for(
        "the default service account",
        lambda: alive(output(account, timeout=10) is not None),
        timeout=START_SECONDS,
        log=node.log / "kcm.log",
    )
    wait_for("DNS", lambda: alive(_dns_ready(node)), timeout=START_SECONDS, log=node.log / "coredns.log")
    progress.say(f"  node Ready, DNS ready: {node.kubeconfig}")


def _dns_ready(node: Node) -> bool:
    # No proxy of the environment: this address exists on this machine alone.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{node.address}:8181/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _all(commands: list[list[str]], node: Node, *, cwd: Path | None = None) -> None:
    for argv in commands:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=cwd,
            check=False,
            timeout=60,
            env=clean_environment(PATH=packages.search_path()),
        )
        if done.returncode != 0:
            raise ClusterError(f"cluster {node.name}: {' '.join(argv)} failed: {done.stderr.strip()}")


def _write_files(node: Node) -> None:
    folder = node.folder
    for sub in ("log/pods", "log/containers", "varlib/kubelet", "varlib/cni", "varlib/containerd"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    for sub in ("etcd", "net.d", "pids", "pki", "sysctl", "tmp", "volplugins"):
        (folder / sub).mkdir(exist_ok=True)
    pki = folder / "pki"
    _all(onenode.ca_commands(), node, cwd=pki)
    for name, (subject, alternative) in onenode.leaf_certificates(node).items():
        (pki / f"{name}.ext").write_text(onenode.leaf_extensions(alternative))
        _all(onenode.leaf_commands(name, subject), node, cwd=pki)

    def encoded(file: str) -> str:
        return base64.b64encode((pki / file).read_bytes()).decode()

    for name in onenode.CLIENTS:
        text = onenode.kubeconfig(
            node, ca=encoded("ca.crt"), certificate=encoded(f"{name}.crt"), key=encoded(f"{name}.key")
        )
        (folder / f"{name}.kubeconfig").write_text(text)
        (folder / f"{name}.kubeconfig").chmod(0o600)
    (folder / "net.d" / "10-bridge.conflist").write_text(onenode.cni_config())
    (folder / "containerd.toml").write_text(onenode.containerd_config(node))
    (folder / "kubelet.yaml").write_text(onenode.kubelet_config(node))
    (folder / "proxy.yaml").write_text(onenode.proxy_config(node))
    (folder / "Corefile").write_text(onenode.corefile(node))
    (folder / "init.sh").write_text(onenode.init_script(node))


# --- cgroups ---------------------------------------------------------------------------------------------------------
def _unified() -> bool:
    """Whether this machine has cgroup v2 alone."""
    return (CGROUP_ROOT / "cgroup.controllers").exists()


def _cgroups(node: Node) -> list[Path]:
    """The cluster's own cgroups: one on cgroup v2, else one for each v1 controller (and runc's in `unified`)."""
    if _unified():
        return [CGROUP_ROOT / node.cgroup]
    return [CGROUP_ROOT / c / node.cgroup for c in (*onenode.CGROUP_V1, "unified") if (CGROUP_ROOT / c).is_dir()]


def _make_cgroups(node: Node) -> None:
    for group in _cgroups(node):
        if group.parent.name != "unified":
            group.mkdir(exist_ok=True)
    if not _unified():
        # A new v1 cpuset is empty, and nothing can run in it.
        for name in ("cpuset.mems", "cpuset.cpus"):
            cpuset = CGROUP_ROOT / "cpuset"
            (cpuset / node.cgroup / name).write_text((cpuset / name).read_text())


def _processes(node: Node) -> list[str]:
    found: list[str] = []
    for group in _cgroups(node):
        for file in group.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found += file.read_text().split()
    return found


def _remove_cgroups(node: Node) -> None:
    for group in _cgroups(node):
        if group.is_dir():
            for sub in sorted((p for p in group.rglob("*") if p.is_dir()), reverse=True):
                with contextlib.suppress(OSError):
                    sub.rmdir()
            group.rmdir()


# --- stop ------------------------------------------------------------------------------------------------------------
def down(cache: Cache, name: str, progress: Progress) -> None:
    """Removes a cluster and everything of it on this machine; nothing happens where there is none."""
    if os.geteuid() != 0:
        if find(cache, name) is None:
            return
        raise ClusterError(f"removing cluster {name} needs root")
    with _locked(cache, name):
        node = find(cache, name)
        if node is None:
            progress.say(f"no cluster {name}")
            return
        _remove(node)
        with _locked(cache, "numbers"):
            if not find_all(cache) and _link_exists(onenode.HOST_BRIDGE) and not _other_links():
                _delete_link(onenode.HOST_BRIDGE, node)
        progress.say(f"cluster {name} is removed")


def _other_links() -> bool:
    """Whether clusters of another cache folder still use the host's fixed address."""
    return any(_link_exists(f"lj{i}") for i in range(1, 251))


def _delete_link(link: str, node: Node) -> None:
    """A veth may go by itself at any moment, with the network namespace at its other end."""
    if _link_exists(link):
        try:
            _all([["ip", "link", "del", link]], node)
        except ClusterError:
            if _link_exists(link):
                raise


def _remove(node: Node) -> None:
    pid = main_pid(node)
    if pid is not None:
        for frozen in (CGROUP_ROOT / "freezer" / node.cgroup).rglob("freezer.state"):
            with contextlib.suppress(OSError):  # frozen processes can't die
                frozen.write_text("THAWED")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        # Reaped here if this process started it; else by whoever did.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        wait_for(
            f"the processes of cluster {node.name} to end",
            lambda: _process_start(pid) is None,
            timeout=30,
            log=node.log / "init.log",
        )
    wait_for(
        f"the containers of cluster {node.name} to end",
        lambda: not _processes(node),
        timeout=30,
        log=node.log / "kubelet.log",
    )
    deadline = time.monotonic() + 10
    while True:  # a cgroup stays busy for a moment after its last process has ended
        try:
            _remove_cgroups(node)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterError(f"cgroups of cluster {node.name} can't be removed: {error}") from error
            time.sleep(0.1)
    # By name: a TCP connection without a peer can keep a dead network namespace, and its veth, alive for minutes.
    _delete_link(node.link, node)
    _all([["rm", "-rf", "--one-file-system", str(node.folder)]], node)


# --- images ----------------------------------------------------------------------------------------------------------
def load(node: Node, archives: list[Path], progress: Progress) -> None:
    """Imports image archives into the cluster's containerd; an archive that was imported before is left out."""
    done_file = node.folder / "loaded.json"
    done: dict[str, int] = json.loads(done_file.read_text()) if done_file.exists() else {}
    for path in archives:
        stamp = path.stat().st_mtime_ns
        if done.get(str(path)) == stamp:
            continue
        began = progress.elapsed
        progress.run(
            node.ctr("images", "import", str(path)),
            what=f"importing {path.name}",
            log=node.log / "import.log",
            timeout=300,
        )
        progress.say(f"  imported {path.name} ({progress.elapsed - began:.1f} s)")
        done[str(path)] = stamp
        done_file.write_text(json.dumps(done))
