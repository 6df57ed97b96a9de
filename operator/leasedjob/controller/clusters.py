"""Who this cluster is in the database, whether that name is its own, and whether it takes new runs.

A name that is somebody else's stops everything: Pods of runs are known by the name of their cluster, so two clusters of
one name would each take the other's Pods for its own. A cordon stops only what begins: see
docs/decisions/0023-clusters.md.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, assert_never

from leasedjob import __version__
from leasedjob.controller.kube import Kube, KubeError
from leasedjob.controller.settings import Settings
from leasedjob.identity import run_key_for
from leasedjob.lease.clusters import CordonAnswer, ForgetAnswer, Greeting, Identity, KnownCluster, Standing
from leasedjob.lease.rows import Asked
from leasedjob.lease.store import OperatorStore
from leasedjob.protocol import ANSWER_KEY, LABEL_REQUEST, REQUEST_CLUSTERS

if TYPE_CHECKING:
    from leasedjob.controller.engine import Engine
    from leasedjob.controller.loops import Health

log = logging.getLogger(__name__)
GREET_SECONDS: Final = 2.0
ASKED_SECONDS: Final = 2.0
BY_VALUES: Final = "the chart's value `cordoned`"
TAKE_OVER: Final = "the chart's value `clusterTakeover`"
FORGET_SILENCE: Final = timedelta(minutes=15)  # as long as a name is kept for a cluster that isn't seen


class ClusterAction(StrEnum):
    """What somebody asks about clusters."""

    LIST = "List"
    CORDON = "Cordon"
    UNCORDON = "Uncordon"
    FORGET = "Forget"


async def identify(settings: Settings, kube: Kube) -> Identity:
    """Who this operator is. Waits while the API server doesn't answer; a right that is lacking is only told of, since
    a cluster whose name nobody else has needs no proof of it."""
    where, prefix = ("kube-system", "") if not settings.namespaces else (settings.own_namespace, "namespace/")
    uid, delay = "", 1.0
    while where:
        try:
            uid = prefix + await kube.namespace_uid(where)
            break
        except KubeError as e:
            if not e.transient:
                log.warning("whether another cluster has the same clusterName can't be told: %s", e)
                break
            log.warning("the cluster's identity is not known yet: %s", e)
            await asyncio.sleep(delay)
            delay = min(10.0, delay * 2)
    return Identity(cluster=settings.cluster, uid=uid, release=settings.release)


def hindrance(said: Greeting, own: Identity) -> str:
    """Why this operator may start nothing under its cluster's name; "" if it may."""
    match said.verdict:
        case Standing.MINE | Standing.SUCCEEDED:
            return ""
        case Standing.TAKEN if said.other_uid == own.uid:
            return (
                f"clusterName {own.cluster!r} is in use by another release in this cluster, {said.other_release}, "
                f"which asked the database {_ago(said.seen_ago)} ago: give each release a clusterName of its own"
            )
        case Standing.TAKEN:
            return (
                f"clusterName {own.cluster!r} is in use by another cluster, with UID {said.other_uid} (this one has "
                f"{own.uid}), which asked the database {_ago(said.seen_ago)} ago: choose another clusterName; if this "
                f"cluster takes its place, set {TAKE_OVER} to that UID, or wait until it has not been seen for "
                "15 minutes"
            )
        case Standing.WAITS:
            return (
                f"this cluster was called {said.other!r}, and {said.live} of its runs are live under that name: it "
                f"takes no new ones, and {own.cluster!r} begins when they, or their leases, have ended; or set "
                "clusterName back"
            )
        case _:
            assert_never(said.verdict)


def _ago(span: timedelta | None) -> str:
    return f"{max(0, int(span.total_seconds())) if span else 0} s"


def cordon_of(said: Greeting, own: Identity, by_values: bool) -> str:
    """Why this cluster takes no new runs, in words that stay the same; "" if it does."""
    if said.verdict is Standing.SUCCEEDED:
        return f"cluster {own.cluster} takes no new runs: this release is called {said.other} by now"
    if said.cordoned_at is not None:
        since = run_key_for(said.cordoned_at.replace(microsecond=0))
        by = f", asked for by {said.cordoned_by}" if said.cordoned_by else ""
        why = f": {said.cordon_reason}" if said.cordon_reason else ""
        return f"cluster {own.cluster} is cordoned since {since}{by}{why}"
    return f"cluster {own.cluster} is cordoned by {BY_VALUES}" if by_values else ""


class Greeter:
    """Says to the database who this operator is, and lets the engine know what it answers."""

    def __init__(self, engine: Engine, health: Health, own: Identity) -> None:
        self._engine = engine
        self._health = health
        self._own = own
        self._new = True

    async def step(self) -> None:
        engine, health, settings = self._engine, self._health, self._engine.settings
        said = await engine.store.greet_cluster(
            self._own,
            version=__version__,
            by_values=settings.cordoned,
            new=self._new,
            take_over=settings.cluster_takeover,
        )
        self._new &= said.verdict is Standing.TAKEN
        trouble = hindrance(said, self._own)
        if trouble != health.cluster:
            log.log(logging.ERROR if trouble else logging.INFO, trouble or f"the name {self._own.cluster} is ours")
        health.cluster = trouble
        engine.cordon(cordon_of(said, self._own, settings.cordoned))
        health.admit(engine)


# --- what somebody asks about clusters -------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """A question, or something to be done."""

    action: ClusterAction
    cluster: str
    reason: str

    @classmethod
    def of(cls, data: Mapping[str, str], own: str) -> ClusterRequest | str:
        """From a ConfigMap's data; else what is wrong with it, naming the key."""
        try:
            action = ClusterAction(data.get("action", ""))
        except ValueError:
            return f"action: must be one of {', '.join(ClusterAction)}, not {data.get('action', '')!r}"
        reason = data.get("reason", "")
        if len(reason) > 1024:
            return "reason: at most 1024 characters"
        return cls(action, data.get("cluster", "") or own, reason)


def answer_of(request: ClusterRequest, did: CordonAnswer) -> dict[str, Any]:
    """What whoever asked for a cordon, or its end, is told."""
    name = request.cluster
    if not did.known:
        return _unknown(name, did.clusters)
    cordons = request.action is ClusterAction.CORDON
    if not cordons and did.by_values:
        message = f"cluster {name!r} is cordoned by {BY_VALUES}, which only its release's values can end"
        return {"error": "CordonedByValues", "message": message, "changed": did.changed}
    word = "cordoned" if cordons else "uncordoned"
    return {"cluster": name, "changed": did.changed, "message": word if did.changed else f"already {word}"}


def forgotten(name: str, did: ForgetAnswer) -> dict[str, Any]:
    """What whoever asked to forget a cluster is told."""
    if not did.known:
        return _unknown(name, did.clusters)
    if did.forgotten:
        return {"cluster": name, "changed": True, "message": f"forgotten, with its {did.jobs} LeasedJobs"}
    if did.seen_ago is not None and did.seen_ago < FORGET_SILENCE:
        why = f"it asked the database {_ago(did.seen_ago)} ago; one that works, or may soon again, is cordoned instead"
        return {"error": "Alive", "message": f"cluster {name!r} is not forgotten: {why}"}
    if did.live:
        why = f"{did.live} of its runs are held; they, or their leases, end first"
        return {"error": "RunsLive", "message": f"cluster {name!r} is not forgotten: {why}"}
    return {"error": "Busy", "message": f"cluster {name!r} is not forgotten yet: its rows are in use; ask again"}


def _unknown(name: str, clusters: Collection[str]) -> dict[str, Any]:
    known = ", ".join(clusters) or "none"
    return {"error": "NotFound", "message": f"no cluster {name!r} has worked on this database; there are: {known}"}


def listed(cluster: KnownCluster, own: str) -> dict[str, Any]:
    """A cluster as it is told."""

    def time(at: Any) -> str | None:
        return None if at is None else run_key_for(at.replace(microsecond=0))

    return {
        "name": cluster.name,
        "this": cluster.name == own,
        "lastSeen": time(cluster.last_seen_at),
        "cordoned": cluster.cordoned,
        "cordonedSince": time(cluster.cordoned_at),
        "cordonedBy": cluster.cordoned_by or ("values" if cluster.by_values else ""),
        "reason": cluster.cordon_reason,
        "runs": cluster.runs,
        "leasedJobs": cluster.jobs,
        "uid": cluster.uid,
        "release": cluster.release,
        "version": cluster.version,
        "now": time(cluster.db_now),
    }


class Doorkeeper:
    """Answers requests about clusters: ConfigMaps with a label, in the operator's own namespace, so that who may create
    one is who may change the operator. Replicas may meet; each change and each answer happens once."""

    def __init__(self, kube: Kube, store: OperatorStore, settings: Settings) -> None:
        self._kube = kube
        self._store = store
        self._settings = settings

    async def step(self) -> None:
        selector = f"{LABEL_REQUEST}={REQUEST_CLUSTERS}"
        _, found = await self._kube.list("/api/v1", "configmaps", self._settings.own_namespace, label_selector=selector)
        for body in found:
            if ANSWER_KEY not in (body.get("data") or {}):
                await self._answer(body)

    async def _answer(self, body: Mapping[str, Any]) -> None:
        meta = body["metadata"]
        said = await self._said(body.get("data") or {}, meta)
        try:
            await self._kube.patch_config_map(
                meta["namespace"], meta["name"], {ANSWER_KEY: json.dumps(said)}, meta["resourceVersion"]
            )
        except KubeError as e:
            if e.status not in (404, 409):
                raise

    async def _said(self, data: Mapping[str, str], meta: Mapping[str, Any]) -> dict[str, Any]:
        own = self._settings.cluster
        request = ClusterRequest.of(data, own)
        if isinstance(request, str):
            return {"error": "Invalid", "message": request}
        if request.action is ClusterAction.LIST:
            return {"clusters": [listed(c, own) for c in await self._store.known_clusters()]}
        asked = Asked(
            cluster=own,
            action=str(request.action),
            by=data.get("by", "") or f"{meta['namespace']}/{meta['name']}",
            request=meta["uid"],
            why=request.reason,
        )
        if request.action is ClusterAction.FORGET:
            if request.cluster == own:
                return {"error": "Alive", "message": f"cluster {own!r} is the one that is asked: it is not forgotten"}
            gone = await self._store.forget_cluster(
                request.cluster, silence=FORGET_SILENCE, reason=request.reason, asked=asked
            )
            return forgotten(request.cluster, gone)
        did = await self._store.cordon_cluster(
            request.cluster, request.action is ClusterAction.CORDON, reason=request.reason, asked=asked
        )
        return answer_of(request, did)
