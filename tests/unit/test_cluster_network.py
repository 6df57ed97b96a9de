"""The firewall rules of a cut: whose packets, in which direction, and what their sender notices."""

from __future__ import annotations

import subprocess

import pytest
from tests.cluster.network import CLUSTER, EVERYTHING, How, Part, Way, bridge_rules, pod, rules

DATABASE = Part("PostgreSQL", ("10.99.0.1",), (15432,))
API = Part("the API server", ("10.99.3.2",), (6443,))
POD = pod("10.88.0.9")
THERE = "ip saddr { 10.88.0.9 } ip daddr { 10.99.0.1 } meta l4proto { tcp, udp } th dport { 15432 }"
BACK = "ip saddr { 10.99.0.1 } meta l4proto { tcp, udp } th sport { 15432 } ip daddr { 10.88.0.9 }"


def chain(text: str, hook: str) -> list[str]:
    """The rules of one chain."""
    _, _, rest = text.partition(f"chain {hook} {{")
    return [line.strip() for line in rest.partition("}\n")[0].splitlines()[1:] if line.strip(" }")]


@pytest.mark.parametrize("hook", ["forward", "input", "output"])
def test_a_cut_drops_both_directions_wherever_a_packet_passes(hook: str) -> None:
    assert chain(rules("lj_x", POD, DATABASE), hook) == [f"{THERE} drop", f"{BACK} drop"]


@pytest.mark.parametrize(("way", "kept"), [(Way.THERE, THERE), (Way.BACK, BACK)])
def test_one_direction_alone(way: Way, kept: str) -> None:
    assert chain(rules("lj_x", POD, DATABASE, way), "forward") == [f"{kept} drop"]
    assert bridge_rules("lj_x", POD, DATABASE, way).count(" drop") == 1


def test_what_is_refused_is_told() -> None:
    """Also by the address of a Service, which is rewritten before anything else here sees it."""
    text = rules("lj_x", POD, DATABASE, Way.THERE, How.REFUSE)
    for hook in ("prerouting", "forward", "output"):
        assert chain(text, hook) == [f"{THERE} meta l4proto tcp reject with tcp reset", f"{THERE} reject"]
    assert "prerouting" not in rules("lj_x", POD, DATABASE)


def test_a_whole_cluster_is_whoever_speaks_with_the_other_part() -> None:
    there, _ = chain(rules("lj_x", CLUSTER, DATABASE), "forward")
    assert there == "ip daddr { 10.99.0.1 } meta l4proto { tcp, udp } th dport { 15432 } drop"


def test_a_pod_that_reaches_nothing_is_still_reached_by_its_kubelet() -> None:
    text = rules("lj_x", POD, EVERYTHING)
    assert chain(text, "forward") == ["ip saddr { 10.88.0.9 } drop", "ip daddr { 10.88.0.9 } drop"]
    there, back = chain(text, "input")
    assert there == "ip saddr { 10.88.0.9 } meta l4proto { tcp, udp } th dport { 6443, 443, 53 } drop"
    assert back == "meta l4proto { tcp, udp } th sport { 6443, 443, 53 } ip daddr { 10.88.0.9 } drop"


@pytest.mark.parametrize("how", How)
@pytest.mark.parametrize("way", Way)
def test_nftables_takes_them(way: Way, how: How) -> None:
    texts = [rules("lj_x", one, other, way, how) for one in (POD, CLUSTER) for other in (DATABASE, API, EVERYTHING)]
    texts.append(bridge_rules("lj_x", POD, EVERYTHING, way))
    for text in texts:
        try:
            done = subprocess.run(
                ["unshare", "--map-root-user", "--net", "nft", text], capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            pytest.skip("no unshare here")
        if done.returncode == 127 or "unshare failed" in done.stderr or "failed to execute" in done.stderr:
            pytest.skip(f"no nft, or no namespaces of one's own: {done.stderr}")
        assert done.returncode == 0, f"{text}\n{done.stderr}"
