"""What this process knows of the cluster: LeasedJobs, LeasedJobRuns and the runs' Pods, as last observed.

Observations arrive from the watch and from the periodic comparison with a list, in any order; an older one never
replaces a newer one, and an object that was seen deleted does not come back from an old list.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from leasedjob.controller.facts import PodFacts, parse_time, pod_facts
from leasedjob.controller.model import Policy
from leasedjob.lease.rows import CodeState, Registration, Run

Json = Mapping[str, Any]
Key = tuple[str, str]  # namespace, name of a LeasedJob
TOMBSTONE_SECONDS: Final = 600.0


def version(body: Json) -> int:
    """The resource version as a number; they are comparable within one resource."""
    text = str((body.get("metadata") or {}).get("resourceVersion") or "0")
    return int(text) if text.isdecimal() else 0


def lean(body: Json) -> Json:
    """An observed object as it is kept: without what is never read (who owns which field, and kubectl's second copy of
    the whole), and with one string for each name of a field however many objects have it. With ten thousand objects it
    is most of the process's memory."""
    meta = {k: v for k, v in (body.get("metadata") or {}).items() if k != "managedFields"}
    if notes := meta.get("annotations"):
        meta["annotations"] = {k: v for k, v in notes.items() if k != _LAST_APPLIED}
    whole: Json = _with_shared_names({**body, "metadata": meta})
    return whole


class Packed(Mapping[str, Any]):
    """An object's spec as it is kept: its JSON, a quarter of what the same takes as dicts. Each look at it reads it
    anew, so whoever wants more than one thing asks for `whole`."""

    __slots__ = ("_text",)

    def __init__(self, spec: Json) -> None:
        self._text = json.dumps(spec, separators=(",", ":")).encode()

    @property
    def whole(self) -> dict[str, Any]:
        """What it says, the caller's own."""
        found: dict[str, Any] = json.loads(self._text)
        return found

    def __getitem__(self, name: str) -> Any:
        return self.whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)

    def __bool__(self) -> bool:
        return self._text != b"{}"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Packed):
            return self._text == other._text or self.whole == other.whole
        return self.whole == other

    __hash__ = None  # type: ignore[assignment]  # as of any mapping that compares by what it holds


def kept(body: Json) -> Json:
    """A LeasedJob as it is kept: `lean`, its spec packed. The template is needed when a Pod is built, and is most of
    the object."""
    spec = body.get("spec")
    if not isinstance(spec, dict):
        return lean(body)
    packed = Packed(spec)
    return {**lean({**body, "spec": {}}), "spec": packed}


def _with_shared_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {sys.intern(k): _with_shared_names(v) for k, v in value.items()}
    return [_with_shared_names(v) for v in value] if isinstance(value, list) else value


_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"


def generation(body: Json) -> int:
    """The generation of the object's spec."""
    return int((body.get("metadata") or {}).get("generation") or 1)


@dataclass(slots=True)
class Entry:
    """One LeasedJob. What the API server said, what was derived from it, and what the database said."""

    namespace: str
    name: str
    uid: str
    body: Json
    created_at: datetime
    # derived from spec
    generation: int = -1  # of the spec that the following was parsed from
    code: str = ""
    policy: Policy | None = None
    problem: tuple[str, str] | None = None  # reason, message: why the object is not Ready
    warning: str = ""
    pull_secrets: tuple[str, ...] = ()
    sidecar_resources: Json | None = None
    initial_lock_key: str = ""
    registration: Registration | None = None
    # from the database
    registered: Registration | None = None  # as it was accepted
    watermark: datetime | None = None
    state: CodeState | None = None
    state_stale: bool = True  # to be read again before anything rests on it
    spec_differs: bool = False
    rows: dict[UUID, Run] = field(default_factory=dict)
    rows_loaded: bool = False
    doubtful: set[UUID] = field(default_factory=set)  # rows to be read again before anything rests on them
    # this process's own memory; losing it is harmless
    handled: dict[str, float] = field(
        default_factory=dict
    )  # actions that were just taken, and until when to leave them
    trouble: str = ""  # why the last reconcile could not finish; logged once
    backoff: float = 0.0
    notes: dict[str, str] = field(default_factory=dict)  # lock key of a manual run -> why it doesn't start
    started: set[str] = field(default_factory=set)  # uids of LeasedJobRuns whose run this process claimed for them
    doomed: bool = False  # its namespace is being terminated, which nothing undoes: no Pod can be created any more
    said: bytes = b""  # of the status that this process wrote last: see `status.gist`
    said_at: float = 0.0
    contradicted: int = 0  # how often somebody has put another status in the place of that one

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    @property
    def template(self) -> Json:
        """The Pod template, as written."""
        template: Json = self.body["spec"]["template"]
        return template

    def renew(self, body: Json) -> None:
        """Takes over an answer of the API server, unless the watch has delivered something newer meanwhile: an edit
        that was seen must not be forgotten again. Where it shows another spec than was known, that is derived anew: a
        watch that is older than a change of the definition goes on without the fields that this one brought."""
        if version(body) >= version(self.body):
            if generation(body) == generation(self.body) and body.get("spec") != self.body.get("spec"):
                self.generation = -1
            self.body = kept(body)

    def observe(self, body: Json) -> None:
        """Takes over what was observed. An object of one generation has one spec, and an answer knows it better."""
        if generation(body) == generation(self.body):
            body = {**body, "spec": {}}
            self.body = {**lean(body), "spec": self.body.get("spec")}
        else:
            self.body = kept(body)


class Cache:
    """All observed objects. `changed(key)` is called for each LeasedJob that something changed for.

    Args:
        serves: whether LeasedJobs and LeasedJobRuns of this namespace are this operator's concern; others aren't seen.
            Pods carry the operator's own label, so what it began before is brought to its end.
    """

    def __init__(self, changed: Callable[[Key], None], serves: Callable[[str], bool] = lambda _: True) -> None:
        self.changed = changed
        self._serves = serves
        self.jobs: dict[Key, Entry] = {}
        self.pods: dict[str, PodFacts] = {}
        self.pods_of: defaultdict[Key, set[str]] = defaultdict(set)
        self.runs: dict[str, Json] = {}  # LeasedJobRuns by uid
        self.runs_of: defaultdict[Key, set[str]] = defaultdict(set)
        self.by_code: defaultdict[str, set[Key]] = defaultdict(set)
        self.removed: list[Entry] = []  # LeasedJobs that are gone and have to be unregistered
        self._versions: dict[str, int] = {}
        self._gone: dict[str, float] = {}
        self._prune_at = 1000
        self.helped_at = 0.0  # when a Pod was last seen that another replica has created, by time.monotonic()

    def _news(self, body: Json) -> bool:
        uid = body["metadata"]["uid"]
        if uid in self._gone or version(body) < self._versions.get(uid, 0):
            return False
        changed = version(body) != self._versions.get(uid)
        self._versions[uid] = version(body)
        return changed

    def _bury(self, uid: str) -> None:
        now = time.monotonic()
        self._gone[uid] = now
        self._versions.pop(uid, None)
        if len(self._gone) > self._prune_at:
            self._gone = {u: t for u, t in self._gone.items() if now - t < TOMBSTONE_SECONDS}
            self._prune_at = max(1000, 2 * len(self._gone))  # so that many deletions don't each go through all

    @staticmethod
    def _drop(index: defaultdict[Any, set[Any]], key: Any, member: Any) -> None:
        index[key].discard(member)
        if not index[key]:
            del index[key]

    # --- LeasedJobs --------------------------------------------------------------------------------------------------

    def job_seen(self, body: Json) -> None:
        meta = body["metadata"]
        if meta.get("deletionTimestamp"):
            self.job_gone(body)  # a finalizer of somebody else's keeps it; nothing of it starts any more
            return
        if not self._serves(meta["namespace"]) or not self._news(body):
            return
        key = meta["namespace"], meta["name"]
        entry = self.jobs.get(key)
        if entry is not None and entry.uid != meta["uid"]:
            if version(body) < version(entry.body):
                self._bury(meta["uid"])  # the predecessor of the object that is known
                return
            self._bury(entry.uid)
            self.removed.append(entry)  # deleted and created anew while nobody looked
            entry = None
        if entry is None:
            created = parse_time(meta.get("creationTimestamp"))
            assert created is not None, "the API server sets creationTimestamp"
            entry = Entry(*key, uid=meta["uid"], body=kept(body), created_at=created)
            self.jobs[key] = entry
        elif version(body) == version(entry.body):
            return  # the answer to this process's own write has told it
        else:
            entry.observe(body)
        self.changed(key)

    def job_gone(self, body: Json) -> None:
        meta = body["metadata"]
        self._bury(meta["uid"])
        key = meta["namespace"], meta["name"]
        entry = self.jobs.get(key)
        if entry is not None and entry.uid == meta["uid"]:
            del self.jobs[key]
            self.removed.append(entry)
            self.changed(key)
            for other in self.with_code(entry.code):
                self.changed(other.key)  # the code may be free for it now

    def index_code(self, entry: Entry, before: str) -> None:
        """`entry.code` was derived; it was `before`. More than one object of a code is a conflict."""
        if before and before != entry.code:
            self._drop(self.by_code, before, entry.key)
        if entry.code:
            self.by_code[entry.code].add(entry.key)

    def with_code(self, code: str) -> list[Entry]:
        """The LeasedJobs that have this code."""
        return [e for k in self.by_code.get(code, ()) if (e := self.jobs.get(k)) is not None and e.code == code]

    # --- Pods --------------------------------------------------------------------------------------------------------

    def pod_seen(self, body: Json, *, own: bool = False) -> None:
        """`own`: this process has just created it."""
        if not self._news(body):
            return
        facts = pod_facts(body)
        if facts is None:
            return
        key = facts.namespace, facts.job_name
        before = self.pods.get(facts.uid)
        if before is None and not own:
            self.helped_at = time.monotonic()
        if before is not None and before.job_name != facts.job_name:
            self._drop(self.pods_of, (before.namespace, before.job_name), facts.uid)  # somebody edited its annotation
        self.pods[facts.uid] = facts
        self.pods_of[key].add(facts.uid)
        self.changed(key)

    def pod_gone(self, body: Json) -> None:
        uid = body["metadata"]["uid"]
        self._bury(uid)
        facts = self.pods.pop(uid, None)
        if facts is not None:
            key = facts.namespace, facts.job_name
            self._drop(self.pods_of, key, uid)
            self.changed(key)

    def pods_for(self, key: Key) -> tuple[PodFacts, ...]:
        return tuple(self.pods[uid] for uid in sorted(self.pods_of.get(key, ())) if uid in self.pods)

    # --- LeasedJobRuns -----------------------------------------------------------------------------------------------

    def run_seen(self, body: Json) -> None:
        if not self._serves(body["metadata"]["namespace"]) or not self._news(body):
            return
        meta = body["metadata"]
        key = meta["namespace"], str((body.get("spec") or {}).get("jobName") or "")
        self.runs[meta["uid"]] = lean(body)
        self.runs_of[key].add(meta["uid"])
        self.changed(key)

    def run_gone(self, body: Json) -> None:
        uid = body["metadata"]["uid"]
        self._bury(uid)
        old = self.runs.pop(uid, None)
        if old is not None:
            key = old["metadata"]["namespace"], str((old.get("spec") or {}).get("jobName") or "")
            self._drop(self.runs_of, key, uid)
            self.changed(key)

    def runs_for(self, key: Key) -> tuple[Json, ...]:
        bodies = [self.runs[uid] for uid in self.runs_of.get(key, ()) if uid in self.runs]
        return tuple(
            sorted(bodies, key=lambda b: (b["metadata"].get("creationTimestamp") or "", b["metadata"]["name"]))
        )

    # --- comparison with a list --------------------------------------------------------------------------------------

    def brief(self, body: Json) -> Json:
        """A listed object as it has to be kept until it is compared: what is known as it is needs only its metadata."""
        meta = body["metadata"]
        if version(body) != self._versions.get(meta["uid"]):
            return kept(body) if body.get("kind") == "LeasedJob" else body
        return {"metadata": {k: meta[k] for k in ("uid", "resourceVersion", "namespace", "name")}}

    def compare(
        self, kind: str, listed: Iterable[Json], at_version: int, namespaces: Collection[str] | None = None
    ) -> int:
        """Take over what a list shows and the watch has not; the number of differences.

        Args:
            at_version: the list's resource version; an object that is newer may rightly be missing in it.
            namespaces: those that were listed; what is known of others stays as it is. None: all.
        """
        seen, gone = {
            "jobs": (self.job_seen, self.job_gone),
            "pods": (self.pod_seen, self.pod_gone),
            "runs": (self.run_seen, self.run_gone),
        }[kind]
        known: dict[str, Json] = {
            "jobs": {e.uid: (e.body["metadata"]) for e in self.jobs.values()},
            "pods": {p.uid: {"namespace": p.namespace, "name": p.name, "uid": p.uid} for p in self.pods.values()},
            "runs": {u: b["metadata"] for u, b in self.runs.items()},
        }[kind]
        differences = 0
        uids = set()
        for body in listed:
            uid = body["metadata"]["uid"]
            uids.add(uid)
            if uid in self._gone or (kind != "pods" and not self._serves(body["metadata"]["namespace"])):
                continue
            if version(body) > self._versions.get(uid, -1):
                differences += 1
                seen(body)
        for uid in known.keys() - uids:
            if self._versions.get(uid, 0) > at_version:
                continue
            if namespaces is not None and known[uid]["namespace"] not in namespaces:
                continue
            differences += 1
            gone({"metadata": dict(known[uid])})
        return differences
