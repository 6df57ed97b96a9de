"""The engine that enforces NetworkPolicies in the tests' cluster: what it makes of selectors, peers and ports."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

import pytest
from tests.e2e.network_policies import TABLE, World, selected

Json = dict[str, Any]
LABELS = {"app": "a", "tier": "web"}


@pytest.mark.parametrize(
    ("selector", "wanted"),
    [
        (None, True),
        ({}, True),
        ({"matchLabels": {"app": "a"}}, True),
        ({"matchLabels": {"app": "b"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["a", "b"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["a"]}]}, False),
        ({"matchExpressions": [{"key": "tier", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]}, False),
        ({"matchLabels": {"app": "a"}, "matchExpressions": [{"key": "x", "operator": "Exists"}]}, False),
    ],
)
def test_selectors(selector: Json | None, wanted: bool) -> None:
    assert selected(selector, LABELS) is wanted


def pod(uid: str, ip: str, namespace: str = "own", **labels: str) -> Json:
    return {"metadata": {"uid": uid, "namespace": namespace, "labels": labels}, "status": {"podIP": ip}}


def policy(selector: Json, *kinds: str, **rules: Any) -> Json:
    return {
        "metadata": {"namespace": "own"},
        "spec": {"podSelector": selector, "policyTypes": list(kinds), **rules},
    }


def test_what_is_selected_reaches_what_is_allowed_and_what_is_not_selected_everything() -> None:
    pods = (pod("1", "10.88.0.1", app="a"), pod("2", "10.88.0.2", app="b"), pod("3", "10.88.0.3", "other", app="b"))
    egress = [
        {"ports": [{"protocol": "TCP", "port": 5432}], "to": [{"podSelector": {"matchLabels": {"app": "b"}}}]},
        {"ports": [{"protocol": "UDP", "port": 53}]},
        {"ports": [{"port": 443}], "to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
    ]
    rules = World(pods, {"own": {}, "other": {}}, (policy({"matchLabels": {"app": "a"}}, "Egress", egress=egress),))
    text = rules.ruleset()
    assert "ip daddr { 10.88.0.2 } tcp dport 5432 return" in text, "the namespace's own Pods alone"
    assert "; udp dport 53 return; " in text
    assert "ip daddr { 10.0.0.0/8 } tcp dport 443 return; counter name denied drop; }" in text
    assert text.count(" jump egress_") == 1
    assert "ip saddr 10.88.0.1 jump egress_0" in text
    assert "ip saddr != { 10.88.0.1, 10.88.0.2, 10.88.0.3 } counter name denied drop" in text


def test_peers_in_other_namespaces_and_peers_that_are_not_there() -> None:
    pods = (pod("1", "10.88.0.1", app="a"), pod("2", "10.88.0.2", "other", may="scrape"))
    of_other = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "other"}}}
    ingress = [
        {"ports": [{"protocol": "TCP", "port": 8081}], "from": [of_other]},
        {"ports": [{"protocol": "TCP", "port": 1}], "from": [{"podSelector": {"matchLabels": {"not": "there"}}}]},
    ]
    namespaces = {"own": {}, "other": {"kubernetes.io/metadata.name": "other"}}
    text = World(pods, namespaces, (policy({}, "Ingress", ingress=ingress),)).ruleset()
    assert "ip saddr { 10.88.0.2 } tcp dport 8081 return" in text
    assert "dport 1 " not in text, "nobody is not everybody"
    assert "ip daddr 10.88.0.1 jump ingress_0" in text


def test_to_deny_everything_and_to_allow_everything() -> None:
    pods = (pod("1", "10.88.0.1", out="yes"), pod("2", "10.88.0.2"))
    deny = policy({}, "Ingress", "Egress")
    out = policy({"matchLabels": {"out": "yes"}}, "Egress", egress=[{}])
    text = World(pods, {}, (deny, out)).ruleset()
    assert "chain egress_0 { ip protocol tcp return; counter name denied drop; }" in text
    assert "chain egress_1 { counter name denied drop; }" in text
    assert "chain ingress_0 { counter name denied drop; }" in text


@pytest.mark.skipif(shutil.which("nft") is None or os.geteuid() != 0, reason="needs nft, as root")
def test_the_rules_are_rules() -> None:
    """In a network namespace of its own, twice: the second time takes the place of the first."""
    blocks = [{"ipBlock": {"cidr": "10.1.0.0/16"}}, {"ipBlock": {"cidr": "10.2.0.1/32"}}]
    allowed = [{"ports": [{"port": 443}], "to": blocks}, {}]
    both = policy({"matchLabels": {"app": "a"}}, "Ingress", "Egress", egress=allowed)
    rules = World((pod("1", "10.88.0.1", app="a"), pod("2", "10.88.0.2")), {}, (both,)).ruleset()
    script = f"nft '{rules}' && nft '{rules}' && nft list counter ip {TABLE} denied"
    done = subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:500]
    assert "packets 0" in done.stdout
