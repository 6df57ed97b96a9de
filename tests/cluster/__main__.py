"""`python -m tests.cluster`: see --help."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.cluster import lifecycle
from tests.cluster.layout import Cache
from tests.cluster.onenode import Node
from tests.cluster.progress import ClusterError, Progress, fail


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        sub.add_argument("name", nargs="?", default="test", help="name of the cluster (default: test)")
        return sub

    up = verb("up", "start a one-node cluster, or find it running")
    up.add_argument("--index", type=int, help="its number, 1 to 250: its addresses are 10.99.NUMBER.0/24")
    up.add_argument("--fast-node-loss", action="store_true", help="notice a lost node in about 12 s")
    verb("down", "remove a cluster; nothing happens where there is none")
    verb("status", "show clusters and whether they are healthy")
    verb("kubeconfig", "print the path of a running cluster's kubeconfig")
    load = verb("load", "import image archives into a cluster")
    load.add_argument("archives", nargs="+", type=Path, help="docker or OCI archives")
    shell = verb("sh", "run a command inside a cluster's namespaces")
    shell.add_argument("command", nargs=argparse.REMAINDER, help="default: bash")
    return parser


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    cache = Cache.from_env()
    progress = Progress()
    try:
        return _run(options, cache, progress)
    except ClusterError as error:
        return fail(str(error))


def _run(options: argparse.Namespace, cache: Cache, progress: Progress) -> int:
    match options.verb:
        case "up":
            lifecycle.up(
                cache, options.name, progress, index=options.index, fast_node_loss=options.fast_node_loss
            )
        case "down":
            lifecycle.down(cache, options.name, progress)
        case "status":
            for node in lifecycle.find_all(cache):
                print(f"{node.name}\t{'healthy' if lifecycle.healthy(node) else 'not healthy'}\t{node.kubeconfig}")
        case "load":
            lifecycle.load(_running(cache, options.name), options.archives, progress)
        case "kubeconfig":
            print(_running(cache, options.name).kubeconfig)
        case "sh":
            command = lifecycle.enter(_running(cache, options.name), *(options.command or ["bash"]))
            os.execvp(command[0], command)
        case _:
            raise AssertionError(options.verb)
    return 0


def _running(cache: Cache, name: str) -> Node:
    node = lifecycle.find(cache, name)
    if node is None or lifecycle.main_pid(node) is None:
        raise ClusterError(f"cluster {name} is not running: make cluster-up")
    return node


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
