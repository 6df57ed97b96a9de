"""A one-node Kubernetes in network, mount and process namespaces of its own.

Everything from etcd to the containers runs under one `unshare`: killing it kills all, and every mount vanishes with the
mount namespace. On the host there are only a veth `lj<index>`, the bridge `ljhost` (10.99.0.1, shared by all clusters:
the address of a PostgreSQL beside them), cgroups `leasedjob-<name>-<index>` and the cluster's folder in the cache.
The cluster has no default route: nothing leaves it. This module is the pure part: addresses, configurations, commands.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.progress import ClusterError

HOST_BRIDGE = "ljhost"
HOST_ADDRESS = "10.99.0.1"
POD_CIDR = "10.88.0.0/16"
POD_GATEWAY = "10.88.0.1"  # from which the node talks to its Pods
SERVICE_CIDR = "10.96.0.0/16"
PAUSE_IMAGE = "leasedjob.io/pause:1"
CGROUP_V1 = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "systemd")
# What the kubelet would set for the whole machine, and leave so. The cluster sees these values in its own mount
# namespace instead, so the kubelet has nothing to write.
KUBELET_SYSCTLS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}
NODE = "node1"


@dataclass(frozen=True, slots=True)
class Node:
    """One cluster: its name, its number (1 to 250, also its subnet), its folder and where its programs are."""

    name: str
    index: int
    folder: Path
    binaries: Path
    fast_node_loss: bool = False  # notice a lost node in about 12 s instead of 43 s, and evict after 5 s

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?", self.name):
            raise ClusterError(f"cluster name {self.name!r}: 1 to 20 of a-z, 0-9 and -")
        if not 1 <= self.index <= 250:
            raise ClusterError(f"cluster index {self.index}: must be 1 to 250")

    @property
    def address(self) -> str:
        return f"10.99.{self.index}.2"

    @property
    def gateway(self) -> str:
        return f"10.99.{self.index}.1"

    @property
    def link(self) -> str:
        return f"lj{self.index}"

    @property
    def cgroup(self) -> str:
        return f"leasedjob-{self.name}-{self.index}"

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "admin.kubeconfig"

    @property
    def socket(self) -> Path:
        return self.folder / "containerd.sock"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def ctr(self, *arguments: str) -> list[str]:
        return [str(self.binaries / "ctr"), "-a", str(self.socket), "-n", "k8s.io", *arguments]

    def kubectl(self, *arguments: str) -> list[str]:
        return [str(self.binaries / "kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments]


def start_command(node: Node) -> list[str]:
    """The one process under which all of the cluster lives."""
    namespaces = ["--net", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["unshare", *namespaces, "bash", str(node.folder / "init.sh")]


def enter_command(node: Node, init_pid: int, argv: list[str]) -> list[str]:
    """Runs `argv` inside the cluster's namespaces."""
    return ["nsenter", "-t", str(init_pid), "-p", "-m", "-n", f"-w{node.folder}", "--", *argv]


def host_bridge_commands() -> list[list[str]]:
    """The host's fixed address, once for all clusters."""
    return [
        ["ip", "link", "add", HOST_BRIDGE, "type", "bridge"],
        ["ip", "addr", "add", f"{HOST_ADDRESS}/24", "dev", HOST_BRIDGE],
        ["ip", "link", "set", HOST_BRIDGE, "up"],
    ]


def link_commands(node: Node, pid: int) -> list[list[str]]:
    """The veth between the host and the network namespace of process `pid`."""
    return [
        ["ip", "link", "add", node.link, "type", "veth", "peer", "name", "eth0", "netns", str(pid)],
        ["ip", "addr", "add", f"{node.gateway}/24", "dev", node.link],
        ["ip", "link", "set", node.link, "up"],
    ]


def kubeconfig(node: Node, *, ca: str, certificate: str, key: str) -> str:
    """A kubeconfig with everything embedded (arguments are base64). JSON is YAML."""
    cluster = {"server": f"https://{node.address}:6443", "certificate-authority-data": ca}
    user = {"client-certificate-data": certificate, "client-key-data": key}
    context = {"cluster": f"leasedjob-{node.name}", "user": "admin"}
    value = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": f"leasedjob-{node.name}", "cluster": cluster}],
        "users": [{"name": "admin", "user": user}],
        "contexts": [{"name": f"leasedjob-{node.name}", "context": context}],
        "current-context": f"leasedjob-{node.name}",
    }
    return json.dumps(value, indent=1) + "\n"


def leaf_certificates(node: Node) -> dict[str, tuple[str, str]]:
    """Name -> (subject, subjectAltName) of each certificate."""
    service = "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc"
    names = f"DNS:localhost,{service},DNS:kubernetes.default.svc.cluster.local"
    return {
        "apiserver": ("/CN=kube-apiserver", f"{names},IP:127.0.0.1,IP:10.96.0.1,IP:{node.address}"),
        "kubelet": (f"/O=system:nodes/CN=system:node:{NODE}", f"DNS:{NODE},IP:{node.address}"),
        "admin": ("/O=system:masters/CN=admin", "DNS:admin"),
        "kcm": ("/CN=system:kube-controller-manager", "DNS:kcm"),
        "sched": ("/CN=system:kube-scheduler", "DNS:sched"),
        "proxy": ("/CN=system:kube-proxy", "DNS:proxy"),
    }


CLIENTS = ("admin", "kubelet", "kcm", "sched", "proxy")
_CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


def ca_commands() -> list[list[str]]:
    """The CA and the service accounts' key. Python 3.13 and newer want keyUsage in a CA (VERIFY_X509_STRICT)."""
    usage = "keyUsage=critical,keyCertSign,cRLSign"
    ca = ["-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=kube-ca", "-days", "365", "-addext", usage]
    return [
        ["openssl", "ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", "sa.key"],
        ["openssl", "req", "-x509", *_CURVE, *ca],
    ]


def leaf_commands(name: str, subject: str) -> list[list[str]]:
    """Key, request and certificate of one leaf; its extensions are in NAME.ext."""
    sign = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "365", "-extfile", f"{name}.ext"]
    return [
        ["openssl", "req", *_CURVE, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject],
        ["openssl", "x509", "-req", "-in", f"{name}.csr", *sign, "-out", f"{name}.crt"],
    ]


def leaf_extensions(alternative: str) -> str:
    lines = (
        "basicConstraints=critical,CA:FALSE",
        "keyUsage=critical,digitalSignature",
        "extendedKeyUsage=serverAuth,clientAuth",
        "subjectKeyIdentifier=hash",
        "authorityKeyIdentifier=keyid",
        f"subjectAltName={alternative}",
    )
    return "\n".join(lines) + "\n"


def cni_config() -> str:
    """Pods' network: a bridge, addresses from a local range that vanishes with the cluster, host ports."""
    ranges = [[{"subnet": POD_CIDR, "gateway": POD_GATEWAY}]]
    ipam = {"type": "host-local", "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}], "dataDir": "/run/cni-ipam"}
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": True, "hairpinMode": True, "ipam": ipam}
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "1.0.0", "name": "bridge", "plugins": [bridge, portmap]}, indent=1)


def containerd_config(node: Node) -> str:
    """containerd without the plugins that would write outside the cluster's mount namespace."""
    disabled = (
        "io.containerd.nri.v1.nri",
        "io.containerd.internal.v1.opt",
        "io.containerd.grpc.v1.opt",
        "io.containerd.snapshotter.v1.blockfile",
        "io.containerd.snapshotter.v1.erofs",
        "io.containerd.differ.v1.erofs",
    )
    return f"""version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = {json.dumps(disabled)}
[grpc]
  address = "{node.socket}"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{PAUSE_IMAGE}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "{node.folder}/net.d"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
"""


def kubelet_config(node: Node) -> str:
    value: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{node.folder}/pki/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{node.folder}/pki/kubelet.crt",
        "tlsPrivateKeyFile": f"{node.folder}/pki/kubelet.key",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{node.socket}",
        "clusterDNS": [node.address],
        "clusterDomain": "cluster.local",
        "resolvConf": "",
        "maxPods": 500,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "localStorageCapacityIsolation": False,
        "enforceNodeAllocatable": [],
        "nodeStatusUpdateFrequency": "2s" if node.fast_node_loss else "10s",
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "volumePluginDir": f"{node.folder}/volplugins",
    }
    return json.dumps(value, indent=1)


def proxy_config(node: Node) -> str:
    """The zeros keep kube-proxy from writing sysctls that only the machine's own namespace may write."""
    nothing = {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
    value = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": POD_CIDR,
        "hostnameOverride": NODE,
        "clientConnection": {"kubeconfig": f"{node.folder}/proxy.kubeconfig"},
        "conntrack": nothing,
    }
    return json.dumps(value, indent=1)


def corefile(node: Node) -> str:
    """Names of the cluster; every other name doesn't exist (without that, a lookup would be a passing failure)."""
    return f""".:53 {{
  bind {node.address}
  errors
  ready {node.address}:8181
  cache 5
  template ANY ANY . {{
    rcode NXDOMAIN
  }}
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {node.kubeconfig} leasedjob-{node.name}
    pods insecure
    ttl 5
  }}
}}
"""


COMPONENTS = ("etcd", "apiserver", "containerd", "kcm", "sched", "kubelet", "proxy", "coredns")


def component_commands(node: Node) -> dict[str, str]:
    """Command line of each component, as the start script writes it (it runs in the cluster's folder)."""
    toleration = 5 if node.fast_node_loss else 300
    api = (
        "kube-apiserver --etcd-servers=http://127.0.0.1:2379 --secure-port=6443 --bind-address=0.0.0.0",
        f"--advertise-address={node.address} --tls-cert-file=pki/apiserver.crt",
        "--tls-private-key-file=pki/apiserver.key --client-ca-file=pki/ca.crt",
        "--service-account-key-file=pki/sa.key --service-account-signing-key-file=pki/sa.key",
        "--service-account-issuer=https://kubernetes.default.svc --authorization-mode=Node,RBAC",
        f"--enable-admission-plugins=NodeRestriction --service-cluster-ip-range={SERVICE_CIDR}",
        "--allow-privileged=true --kubelet-preferred-address-types=InternalIP",
        "--kubelet-client-certificate=pki/admin.crt --kubelet-client-key=pki/admin.key",
        "--kubelet-certificate-authority=pki/ca.crt",
        f"--default-not-ready-toleration-seconds={toleration} --default-unreachable-toleration-seconds={toleration}",
    )
    kcm = (
        "kube-controller-manager --kubeconfig=kcm.kubeconfig --service-account-private-key-file=pki/sa.key",
        "--root-ca-file=pki/ca.crt --use-service-account-credentials=true --leader-elect=false",
        f"--cluster-cidr={POD_CIDR} --allocate-node-cidrs=false --kube-api-qps=1000 --kube-api-burst=2000",
        *(["--node-monitor-period=1s --node-monitor-grace-period=12s"] if node.fast_node_loss else []),
    )
    return {
        "etcd": "etcd --data-dir etcd --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls "
        "http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380 --unsafe-no-fsync --log-level error",
        "apiserver": " ".join(api),
        "containerd": "containerd -c containerd.toml",
        "kcm": " ".join(kcm),
        "sched": "kube-scheduler --kubeconfig=sched.kubeconfig --leader-elect=false",
        "kubelet": "kubelet --config=kubelet.yaml --kubeconfig=kubelet.kubeconfig --root-dir=/var/lib/kubelet "
        f"--hostname-override={NODE} --node-ip={node.address} --v=2",
        "proxy": "kube-proxy --config=proxy.yaml",
        "coredns": "coredns -conf Corefile",
    }


def init_script(node: Node) -> str:
    """Process 1 of the cluster: private mounts, its half of the network, then the components in order."""
    command = component_commands(node)

    def start(name: str) -> str:
        return f"start {name} {command[name]}"

    sysctls = "\n".join(
        f"[ -e /proc/sys/{name} ] && echo {value} > sysctl/{name.replace('/', '.')} && "
        f"mount --bind sysctl/{name.replace('/', '.')} /proc/sys/{name}"
        for name, value in KUBELET_SYSCTLS.items()
    )
    return f"""# Process 1 of the cluster {node.name}.
set -u
cd {node.folder}
export PATH={node.binaries}:/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin
export HOME=/root TMPDIR={node.folder}/tmp
mount -t tmpfs tmpfs /run
: > resolv.conf; mount --bind resolv.conf /etc/resolv.conf
mkdir -p /var/lib/kubelet /var/lib/cni /var/lib/containerd /var/log
for x in kubelet cni containerd; do mount --bind varlib/$x /var/lib/$x; done
mount --bind log /var/log
{sysctls}
until [ -e /sys/class/net/eth0 ] || ip link show eth0 > /dev/null 2>&1; do sleep 0.02; done
ip addr add {node.address}/24 dev eth0; ip link set eth0 up; ip link set lo up
# No default route: nothing leaves. The host's fixed address, and a sink for what kube-proxy rewrites.
until ip route add 10.99.0.0/24 via {node.gateway} 2> /dev/null; do sleep 0.02; done
ip link add svc0 type bridge; ip link set svc0 up; ip route add {SERVICE_CIDR} dev svc0
start() {{ n=$1; shift; setsid "$@" >> log/$n.log 2>&1 < /dev/null & echo $! > pids/$n.pid; }}
{start("etcd")}
{start("apiserver")}
{start("containerd")}
until kubectl --kubeconfig admin.kubeconfig get --raw /readyz > /dev/null 2>&1; do sleep 0.1; done
{start("kcm")}
{start("sched")}
until ctr -a {node.socket} version > /dev/null 2>&1; do sleep 0.05; done
{start("kubelet")}
{start("proxy")}
{start("coredns")}
touch started
trap : TERM INT
while :; do wait || :; sleep 1; done
"""
