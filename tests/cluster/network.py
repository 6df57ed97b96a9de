"""What can be cut off from what, and the firewall rules that do it. Pure; `faults` makes them.

The rules stand in the network namespace of one cluster. A packet between two parts passes its node's forward chain, or
the input or output chain where one of the parts is the node itself: the API server and DNS are. By then a Service's
address is its Pod's; who has called a Service would take no refusal from there for an answer, so refusals come earlier.
Every cluster has the same addresses for Pods and Services, so a part means something in one cluster alone; what all of
them share has an address of the host's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

API_PORT: Final = 6443
API_SERVICE: Final = ("10.96.0.1", 443)  # by which Pods call it
DNS_PORT: Final = 53
PREFIX: Final = "lj_"  # of the tables, so that whoever comes later can tell and remove them


class Way(StrEnum):
    """Whose packets don't arrive."""

    BOTH = "both"
    THERE = "there"  # those of the first part to the second
    BACK = "back"


class How(StrEnum):
    """What their sender notices."""

    DROP = "drop"  # nothing: connections hang, as after a cut
    REFUSE = "refuse"  # its connections are reset, and new ones are refused


@dataclass(frozen=True, slots=True)
class Part:
    """One end of what is cut: who has one of these addresses, and speaks from or to one of its ports.

    Args:
        addresses: IPv4 addresses or networks; none: any.
        ports: its TCP and UDP ports; none: any.
        on_node: its ports where it is the node itself, instead of `ports`; what else the node says is let through.
    """

    name: str
    addresses: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    on_node: tuple[int, ...] = ()


# Whoever is in the cluster: Pods and the node.
CLUSTER: Final = Part("the cluster")
# All that a Pod can talk to, but not its kubelet, which stands beside it on the same node: its probes get through.
EVERYTHING: Final = Part("everything", on_node=(API_PORT, API_SERVICE[1], DNS_PORT))


def pod(address: str) -> Part:
    """A Pod, by its address."""
    return Part(f"Pod {address}", (address,))


def rules(table: str, one: Part, other: Part, way: Way = Way.BOTH, how: How = How.DROP) -> str:
    """nftables rules, for inside a cluster, that cut one part off from the other."""
    pairs = {Way.BOTH: ((one, other), (other, one)), Way.THERE: ((one, other),), Way.BACK: ((other, one),)}[way]
    lines = [f"table ip {table} {{"]
    hooks = {"forward": -10, "input": -10, "output": -10}
    if how is How.REFUSE:
        hooks = {"prerouting": -150, **hooks}  # after connections are known, before addresses are rewritten
    for hook, priority in hooks.items():
        lines.append(f"  chain {hook} {{ type filter hook {hook} priority {priority};")
        for source, target in pairs:
            who = " ".join(_match(source, "s", hook) + _match(target, "d", hook))
            lines += [f"    {who} {verdict}".rstrip() for verdict in _verdicts(how)]
        lines.append("  }")
    return "\n".join([*lines, "}"])


def bridge_rules(table: str, one: Part, other: Part, way: Way = Way.BOTH) -> str:
    """Those for packets between two Pods, which a machine may pass on without asking the rules for routed ones. They
    only drop: a bridge refuses nothing."""
    pairs = {Way.BOTH: ((one, other), (other, one)), Way.THERE: ((one, other),), Way.BACK: ((other, one),)}[way]
    drops = [f"{' '.join(_match(s, 's', 'forward') + _match(t, 'd', 'forward'))} drop" for s, t in pairs]
    return f"table bridge {table} {{ chain f {{ type filter hook forward priority -10; {'; '.join(drops)}; }}; }}"


def _match(part: Part, side: str, hook: str) -> list[str]:
    """`side`: s for the sender, d for whom it is meant for."""
    words = []
    if part.addresses:
        words.append(f"ip {side}addr {{ {', '.join(part.addresses)} }}")
    ports = part.on_node if part.on_node and hook != "forward" else part.ports
    if ports:
        words.append(f"meta l4proto {{ tcp, udp }} th {side}port {{ {', '.join(map(str, ports))} }}")
    return words


def _verdicts(how: How) -> tuple[str, ...]:
    return ("drop",) if how is How.DROP else ("meta l4proto tcp reject with tcp reset", "reject")
