"""A small engine for NetworkPolicies, for a cluster whose network has none: they become nftables rules in the node.

It knows what the chart uses: selectors by labels and expressions, blocks of addresses, ports with a protocol. What a
policy says of a Pod's own node stays allowed, as Kubernetes has it. A Pod that the engine hasn't seen yet reaches
nothing, so that nothing gets out before its policies are in force.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.cluster.faults import Faults
from tests.cluster.onenode import POD_CIDR
from tests.e2e.kube import Json, Kubectl

TABLE = "leasedjob_policies"
BRIDGE = "cni0"
EVERY = 0.4  # seconds between two looks


def selected(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects; an empty one selects everything."""
    selector = selector or {}
    if any(labels.get(k) != v for k, v in (selector.get("matchLabels") or {}).items()):
        return False
    for expression in selector.get("matchExpressions") or []:
        value, values = labels.get(expression["key"]), expression.get("values") or []
        matches = {
            "In": value in values, "NotIn": value not in values, "Exists": value is not None,
            "DoesNotExist": value is None,
        }  # fmt: skip
        if not matches[expression["operator"]]:
            return False
    return True


@dataclass(frozen=True, slots=True)
class World:
    """Pods with an address of their own, the labels of their namespaces, and the policies."""

    pods: tuple[Json, ...]
    namespaces: Mapping[str, Mapping[str, str]]
    policies: tuple[Json, ...]

    @classmethod
    def seen(cls, kubectl: Kubectl) -> World:
        everything = kubectl.json("get", "pods,namespaces,networkpolicies", "-A")["items"]
        kinds: dict[str, list[Json]] = {}
        for each in everything:
            kinds.setdefault(each["kind"], []).append(each)
        pods = [
            p for p in kinds.get("Pod", []) if p.get("status", {}).get("podIP") and not p["spec"].get("hostNetwork")
        ]
        running = [p for p in pods if p["status"].get("phase") not in ("Succeeded", "Failed")]
        labels = {n["metadata"]["name"]: n["metadata"].get("labels") or {} for n in kinds.get("Namespace", [])}
        return cls(tuple(running), labels, tuple(kinds.get("NetworkPolicy", [])))

    def _labels(self, pod: Json) -> dict[str, str]:
        return pod["metadata"].get("labels") or {}

    def addresses(self, peer: Json, home: str) -> list[str]:
        """What a peer of a policy in the namespace `home` stands for."""
        if block := peer.get("ipBlock"):
            return [block["cidr"]]
        found = []
        for pod in self.pods:
            namespace = pod["metadata"]["namespace"]
            if "namespaceSelector" in peer:
                if not selected(peer["namespaceSelector"], self.namespaces.get(namespace, {})):
                    continue
            elif namespace != home:
                continue
            if selected(peer.get("podSelector"), self._labels(pod)):
                found.append(pod["status"]["podIP"])
        return found

    def _rules(self, pod: Json, way: str, side: str, address: str) -> list[str] | None:
        """nftables rules that let through what the policies allow; None: no policy is about this Pod."""
        mine = [
            p for p in self.policies
            if p["metadata"]["namespace"] == pod["metadata"]["namespace"]
            and selected(p["spec"].get("podSelector"), self._labels(pod))
            and way.capitalize() in p["spec"].get("policyTypes", ["Ingress"])
        ]  # fmt: skip
        if not mine:
            return None
        rules = []
        for policy in mine:
            for rule in policy["spec"].get(way) or []:
                peers = rule.get(side)
                place = ""
                if peers:
                    named = [a for peer in peers for a in self.addresses(peer, policy["metadata"]["namespace"])]
                    if not named:
                        continue
                    place = f"ip {address} {{ {', '.join(sorted(set(named)))} }} "
                for port in rule.get("ports") or [{}]:
                    protocol = port.get("protocol", "TCP").lower()
                    number = f"dport {port['port']} " if "port" in port else ""
                    what = f"{protocol} {number}" if number else f"ip protocol {protocol} "
                    rules.append(f"{place}{what}return")
        return rules

    def ruleset(self) -> str:
        """All of it, in one transaction."""
        chains, jumps = [], []
        for n, pod in enumerate(sorted(self.pods, key=lambda p: str(p["metadata"]["uid"]))):
            address = pod["status"]["podIP"]
            for way, side, own, other in (("egress", "to", "saddr", "daddr"), ("ingress", "from", "daddr", "saddr")):
                rules = self._rules(pod, way, side, other)
                if rules is None:
                    continue
                name = f"{way}_{n}"
                chains.append(f"chain {name} {{ {'; '.join([*rules, 'counter name denied drop'])}; }}")
                jumps.append(f"ip {own} {address} jump {name}")
        known = ", ".join(sorted({p["status"]["podIP"] for p in self.pods})) or "127.0.0.2"
        strangers = f"ip saddr {POD_CIDR} ip saddr != {{ {known} }} counter name denied drop"
        judge = "; ".join(["ct state established,related return", strangers, *jumps])
        hooks = [
            f'chain {hook} {{ type filter hook {hook} priority -5; iifname "{BRIDGE}" jump judge; }}'
            for hook in ("input", "forward")
        ]
        parts = ["counter denied { }", *chains, f"chain judge {{ {judge}; }}", *hooks]
        return f"add table ip {TABLE}; delete table ip {TABLE}; table ip {TABLE} {{ {'; '.join(parts)}; }}"


class Engine:
    """Keeps the node's rules in step with Pods and policies."""

    def __init__(self, kubectl: Kubectl, faults: Faults) -> None:
        self._kubectl, self._faults = kubectl, faults
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._last = ""
        self.denied = 0  # packets
        self.errors: list[str] = []

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
            except Exception as error:  # a look that failed leaves the rules as they are; the test says so at its end
                self.errors.append(repr(error))
            self._stop.wait(EVERY)

    def look(self) -> None:
        rules = World.seen(self._kubectl).ruleset()
        if rules != self._last:
            self._count()
            self._faults.inside("nft", rules)
            self._last = rules

    def _count(self) -> None:
        if self._last:
            said = self._faults.inside("nft", "list", "counter", "ip", TABLE, "denied")
            self.denied += int(said.partition("packets ")[2].split(" ")[0])

    @contextmanager
    def running(self) -> Iterator[Engine]:
        self.look()
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(60)
            self._count()
            self._faults.inside("nft", "delete", "table", "ip", TABLE)
