"""Two clusters side by side on one PostgreSQL: `python -m tests.cluster pair NAME` brings up NAME-a and NAME-b.

Each has the product's images and a release of its own, called by its cluster's name in the database they share. The
PostgreSQL belongs to the pair and goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from tests.cluster import database, lifecycle, release, source
from tests.cluster.database import Database
from tests.cluster.layout import Cache
from tests.cluster.progress import ClusterError, Progress
from tests.cluster.source import Cluster, Source

DBNAME = "leasedjob"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two clusters and what they share.

    Args:
        images: the chart's `--set` arguments for the images that both have.
    """

    name: str
    clusters: tuple[Cluster, Cluster]
    database: Database
    images: tuple[str, ...]


def names(name: str) -> tuple[str, str]:
    return f"{name}-a", f"{name}-b"


def at_once(*calls: Callable[[], T]) -> list[T]:
    """What the calls give; all are done before the first error is raised."""
    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        started = [pool.submit(call) for call in calls]
    return [call.result() for call in started]


def up(cache: Cache, name: str, progress: Progress) -> Pair:
    """Both clusters, their PostgreSQL and the images; what is there already is found.

    Raises:
        ClusterError: they can't be had here.
    """
    machine = source.observe()
    if machine.kubeconfig or not (machine.linux and machine.root):
        raise ClusterError("two clusters at once: Linux and root are needed, and no kubeconfig named")

    def one(cluster: str) -> tuple[Cluster, list[str]]:
        lifecycle.up(cache, cluster, progress)
        found = source.find(cache, cluster)
        if found is None or found.source is not Source.ONE_NODE:
            raise ClusterError(f"cluster {cluster} is not there")
        return found, source.deliver(found, cache, progress)

    (first, images), (second, _) = at_once(*(lambda each=each: one(each) for each in names(name)))
    return Pair(name, (first, second), database.up(first, cache, progress, name=name), tuple(images))


def install(pair: Pair, cache: Cache, progress: Progress, values: Mapping[str, Any], *, dbname: str = DBNAME) -> None:
    """A release in each, on the database `dbname`, which is made where it isn't there."""
    database.create_owned(pair.database, dbname, anew=False)

    def one(cluster: Cluster) -> None:
        own = {"clusterName": cluster.name, **values}
        release.install(cluster, pair.database, dbname, cache, progress, values=own, images=pair.images)

    at_once(*(lambda cluster=cluster: one(cluster) for cluster in pair.clusters))


def down(cache: Cache, name: str, progress: Progress) -> None:
    """Removes both and their PostgreSQL; nothing happens where there are none."""
    database.down(cache, name, progress)
    at_once(*(lambda each=each: lifecycle.down(cache, each, progress) for each in names(name)))


def told(pair: Pair) -> Sequence[str]:
    """What a person does next."""
    return [f"cluster {cluster.name}: export KUBECONFIG={cluster.kubeconfig}" for cluster in pair.clusters] + [
        f"PostgreSQL: {pair.database.host}:{pair.database.port}"
    ]
