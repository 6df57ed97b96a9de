"""Brings up a Kubernetes for the demo and the tests, and what they need in it.

environment:
  LEASEDJOB_KUBECONFIG    use the cluster of this kubeconfig (make demo KUBECONFIG=path sets it); without it no cluster
                          that exists already is ever touched
  LEASEDJOB_REGISTRY      push the images to this registry, which that cluster pulls from; needs docker or podman
  LEASEDJOB_CLUSTER_FROM  kind or one-node: leave the other sources out
  LEASEDJOB_KUBERNETES    a minor version of Kubernetes, one of those in tests/cluster/go (make ... KUBERNETES=1.34)
  LEASEDJOB_CACHE         built programs, images and running clusters; default ~/.cache/leasedjob
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.cluster import binaries, database, jars, lifecycle, network, onenode, packages, pair, source
from tests.cluster.faults import Faults
from tests.cluster.layout import Cache
from tests.cluster.onenode import Node
from tests.cluster.progress import ClusterError, Progress, fail


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        sub.add_argument("name", nargs="?", default="test", help="name of the cluster (default: test)")
        return sub

    verb("up", "a cluster from the first source that this machine has")
    node = verb("node", "start a one-node cluster, or find it running")
    node.add_argument("--index", type=int, help="its number, 1 to 250: its addresses are 10.99.NUMBER.0/24")
    node.add_argument("--fast-node-loss", action="store_true", help="notice a lost node in about 12 s")
    verb("images", "build the project's images and bring them to the cluster; prints the chart's values for them")
    verb("can", "whether a cluster can be had here; if not, says why and ends with 3")
    verb("postgres", "a PostgreSQL on this machine that the cluster's Pods reach; removed with the cluster")
    verb("down", "remove a cluster; nothing happens where there is none")
    two = verb("pair", "two clusters, NAME-a and NAME-b, on one PostgreSQL, with the images and a release in each")
    two.add_argument("--down", action="store_true", help="remove them and their PostgreSQL")
    two.add_argument("--bare", action="store_true", help="install no release")
    cut = verb("cut", "cut parts of a cluster off from each other until `heal`, e.g. cut test database")
    cut.add_argument("what", choices=["database", "api", "everything"], help="what can't be reached any more")
    cut.add_argument("--pod", metavar="ADDRESS", help="by this Pod alone; default: by all of the cluster")
    cut.add_argument("--way", choices=[*network.Way], default="both", help="whose packets don't arrive: there, back")
    cut.add_argument("--refuse", action="store_true", help="the sender is told; default: nobody is")
    freeze = verb("freeze", "the node stands still, with its containers, until `heal`")
    freeze.add_argument("--control-plane", action="store_true", help="API server, etcd and controllers, too")
    kill = verb("kill", "end a component with SIGKILL; `heal` starts it again")
    kill.add_argument("component", choices=[*onenode.COMPONENTS])
    verb("heal", "undo every fault in a cluster, whoever made it")
    verb("status", "show clusters and whether they are healthy")
    verb("kubeconfig", "print the path of a running cluster's kubeconfig")
    build = verbs.add_parser("build", help="build Kubernetes' programs into the cache, or wait for whoever does")
    build.add_argument("module", nargs="*", help="some of etcd, kube, containerd, helm, dns, pause; default: all")
    tool = verbs.add_parser("pgbouncer", help="put PgBouncer into a folder, without installing it; prints its path")
    tool.add_argument("folder", type=Path)
    tool = verbs.add_parser("postgresql15", help="the same with PostgreSQL 15; prints the folder of its programs")
    tool.add_argument("folder", type=Path)
    tool = verbs.add_parser("redis", help="the same with Redis; prints the path of redis-server")
    tool.add_argument("folder", type=Path)
    verbs.add_parser("chromium", help="bring a headless Chromium into the cache; prints the path of its launcher")
    verbs.add_parser("promtool", help="bring Prometheus' checker into the cache; prints its path")
    verbs.add_parser("kafka", help="bring the jars of a Kafka broker into the cache; prints their folder")
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
            source.up(cache, options.name, progress)
        case "node":
            lifecycle.up(cache, options.name, progress, index=options.index, fast_node_loss=options.fast_node_loss)
        case "images":
            cluster = source.up(cache, options.name, progress)
            print(" ".join(source.deliver(cluster, cache, progress)))
        case "can":
            choice = source.choose(source.observe())
            print(choice.reason, file=sys.stderr if choice.source is None else sys.stdout)
            return 3 if choice.source is None else 0
        case "postgres":
            database.up(source.up(cache, options.name, progress), cache, progress)
        case "pair" if options.down:
            pair.down(cache, options.name, progress)
        case "pair":
            made = pair.up(cache, options.name, progress)
            if not options.bare:
                pair.install(made, cache, progress, {})
            print("\n".join(pair.told(made)))
        case "cut":
            _cut(options, cache)
        case "freeze":
            Faults(_running(cache, options.name)).freeze_node(control_plane=options.control_plane)
        case "kill":
            Faults(_running(cache, options.name)).kill(options.component)
        case "heal":
            Faults(_running(cache, options.name)).heal_everything()
        case "down":
            database.down(cache, options.name, progress)
            source.down(cache, options.name, progress)
        case "status":
            for node in lifecycle.find_all(cache):
                print(f"{node.name}\t{'healthy' if lifecycle.healthy(node) else 'not healthy'}\t{node.kubeconfig}")
        case "build":
            modules = {module.folder.partition("-")[0]: module for module in binaries.every_module()}
            if unknown := set(options.module) - set(modules):
                raise ClusterError(f"no such module: {', '.join(sorted(unknown))}; there are {', '.join(modules)}")
            binaries.ensure(cache, progress, tuple(modules[name] for name in options.module) or None)
        case "pgbouncer":
            print(packages.pgbouncer(options.folder, cache, progress))
        case "postgresql15":
            print(packages.postgresql(options.folder, cache, progress))
        case "redis":
            print(packages.redis(options.folder, cache, progress))
        case "chromium":
            print(packages.chromium(cache, progress))
        case "promtool":
            print(packages.promtool(cache, progress))
        case "kafka":
            print(jars.ensure(cache, progress))
        case "load":
            lifecycle.load(_running(cache, options.name), options.archives, progress)
        case "kubeconfig":
            found = source.find(cache, options.name)
            if found is None:
                raise ClusterError(f"cluster {options.name} is not running: make cluster-up")
            print(found.kubeconfig)
        case "sh":
            command = lifecycle.enter(_running(cache, options.name), *(options.command or ["bash"]))
            os.execvp(command[0], command)
        case _:
            raise AssertionError(options.verb)
    return 0


def _cut(options: argparse.Namespace, cache: Cache) -> None:
    faults = Faults(_running(cache, options.name))
    one = network.pod(options.pod) if options.pod else network.CLUSTER
    if options.what == "api":
        other = faults.api
    elif options.what == "everything":
        if not options.pod:
            raise ClusterError("cut everything: name a --pod")
        other = network.EVERYTHING
    else:
        server = database.of_cluster(cache, options.name)
        if server is None:
            raise ClusterError(f"there is no PostgreSQL of cluster {options.name}")
        other = server.part
    how = network.How.REFUSE if options.refuse else network.How.DROP
    faults.cut(one, other, way=network.Way(options.way), how=how)


def _running(cache: Cache, name: str) -> Node:
    node = lifecycle.find(cache, name)
    if node is None or lifecycle.main_pid(node) is None:
        raise ClusterError(f"cluster {name} is not running: make cluster-up")
    return node


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
