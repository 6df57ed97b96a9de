"""The chart's egress policies as rules of a kernel: Pods' network namespaces, real connections, and who gets through.

No cluster: a bridge with five Pods, three with the labels that the chart gives them, the node with its ports, and a
database outside. tests/e2e/test_network_policy.py does the same with the real programs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.network_policies import World
from tests.unit.chart_rendering import EXISTING, Json

from leasedjob import protocol

pytestmark = pytest.mark.skipif(
    shutil.which("nft") is None or shutil.which("ip") is None or os.geteuid() != 0, reason="needs nft and ip, as root"
)
NODE, DATABASE = "10.99.0.2", "10.99.0.1"
TARGETS = {
    "api": (NODE, 6443), "dns": (NODE, 53), "kubelet": (NODE, 10250), "database": (DATABASE, 5432),
    "elsewhere": (DATABASE, 9999), "monitor": (DATABASE, 8443),
}  # fmt: skip
LISTEN = "import socket,sys,time\nkept=[socket.create_server(('',int(p))) for p in sys.argv[1:]]\ntime.sleep(60)"
TRY = """
import concurrent.futures, json, socket, sys
def through(target):
    try:
        socket.create_connection(tuple(target), 2).close()
    except OSError:
        return False
    return True
targets = json.loads(sys.argv[1])
with concurrent.futures.ThreadPoolExecutor(len(targets)) as pool:
    print(json.dumps(dict(zip(targets, pool.map(through, targets.values())))))
"""


def script(pods: list[Json], rules: str) -> str:
    """Sets the network up in the namespaces that it is run in, tries every way, prints one line for each Pod."""
    python = sys.executable
    lines = [
        "set -e", "mount -t tmpfs tmpfs /run", "ip link set lo up", "echo 1 > /proc/sys/net/ipv4/ip_forward",
        "ip link add cni0 type bridge", "ip addr add 10.88.0.1/16 dev cni0", "ip link set cni0 up",
        "ip netns add out", "ip link add e0 type veth peer name eth0 netns out", f"ip addr add {NODE}/24 dev e0",
        "ip link set e0 up", f"ip -n out addr add {DATABASE}/24 dev eth0", "ip -n out link set eth0 up",
        f"ip -n out route add 10.88.0.0/16 via {NODE}",
    ]  # fmt: skip
    for n, pod in enumerate(pods):
        lines += [
            f"ip netns add p{n}", f"ip link add v{n} type veth peer name eth0 netns p{n}",
            f"ip link set v{n} master cni0 up", f"ip -n p{n} addr add {pod['status']['podIP']}/16 dev eth0",
            f"ip -n p{n} link set eth0 up", f"ip -n p{n} route add default via 10.88.0.1",
        ]  # fmt: skip
    lines += [
        f'{python} -c "{LISTEN}" 6443 53 10250 &',
        f'ip netns exec out {python} -c "{LISTEN}" 5432 9999 8443 &',
        f'ip netns exec p0 {python} -c "$WAIT"',
        f"nft '{rules}'",
        *(f'ip netns exec p{n} {python} -c "$TRY" "$TARGETS" > /run/{n} & tries="$tries $!"' for n in range(len(pods))),
        "wait $tries",
        *(f"cat /run/{n}" for n in range(len(pods))),
        "kill $(jobs -p) 2> /dev/null || :",
    ]
    return "\n".join(lines)


WAIT = """
import json, os, socket, time
for target in json.loads(os.environ["TARGETS"]).values():
    for _ in range(200):
        try:
            socket.create_connection(tuple(target), 2).close()
            break
        except OSError:
            time.sleep(0.05)
    else:
        raise SystemExit(f"{target} does not listen")
"""


def tried(pods: list[Json], policies: list[Json]) -> dict[str, set[str]]:
    """Pod -> the targets that it reaches."""
    namespaces: dict[str, dict[str, str]] = {p["metadata"]["namespace"]: {} for p in pods}
    rules = World(tuple(pods), namespaces, tuple(policies)).ruleset()
    # With `--kill-child` and a process namespace of its own, nothing of it outlives the test.
    argv = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", script(pods, rules)]
    env = {"PATH": os.environ["PATH"], "TRY": TRY, "WAIT": WAIT, "TARGETS": json.dumps(TARGETS)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=90, check=False, cwd=Path("/"))
    assert done.returncode == 0, done.stderr[-1500:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        pod["metadata"]["name"]: {target for target, through in answer.items() if through}
        for pod, answer in zip(pods, answers, strict=True)
    }


def pod(name: str, number: int, namespace: str, labels: dict[str, str]) -> Json:
    meta = {"name": name, "uid": name, "namespace": namespace, "labels": labels}
    return {"metadata": meta, "status": {"podIP": f"10.88.0.{number}"}}


def test_each_pod_reaches_what_it_needs_and_nothing_else(render: Any) -> None:
    values = {
        **EXISTING, "monitoring": {"pingHosts": ["checks.example:8443"]},
        "networkPolicy": {
            "enabled": True, "runNamespaces": ["team-a"], "database": {"to": [{"ipBlock": {"cidr": f"{DATABASE}/32"}}]},
        },
    }  # fmt: skip
    objects = render(values)
    policies = [o for o in objects if o["kind"] == "NetworkPolicy"]
    deny = {
        "metadata": {"namespace": "team-a"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
    }  # fmt: skip
    deployment = next(o for o in objects if o["kind"] == "Deployment")
    job = next(o for o in objects if o["kind"] == "Job")
    pods = [
        pod("free", 10, "other", {}),
        pod("operator", 11, "leasedjob-system", deployment["spec"]["template"]["metadata"]["labels"]),
        pod("migrate", 12, "leasedjob-system", job["spec"]["template"]["metadata"]["labels"]),
        pod("run", 13, "team-a", {protocol.LABEL_MANAGED: "true"}),
        pod("stranger", 14, "team-a", {}),
    ]
    assert tried(pods, [*policies, deny]) == {
        "free": set(TARGETS),
        "operator": {"api", "dns", "database", "monitor"},
        "migrate": {"dns", "database"},
        "run": {"dns", "database"},
        "stranger": set(),
    }
