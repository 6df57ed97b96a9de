"""What is known of the cluster: an older observation never replaces a newer one, and the dead stay dead."""

from __future__ import annotations

import copy
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit import controller_builders as b

from leasedjob.controller import cache as module
from leasedjob.controller.cache import Cache, Key, Packed, version

KEY: Key = (b.NAMESPACE, b.JOB)


class Marked(Counter[Key]):
    """Counts for which keys the cache said that something has changed."""

    def __call__(self, key: Key) -> None:
        self[key] += 1


@pytest.fixture
def marked() -> Marked:
    return Marked()


@pytest.fixture
def cache(marked: Marked) -> Cache:
    return Cache(marked)


def job(version: int = 10, uid: str = b.JOB_UID, **more: Any) -> b.Json:
    return b.job_body(version=version, uid=uid, **more)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"metadata": {"resourceVersion": "17"}}, 17),
        ({"metadata": {"resourceVersion": ""}}, 0),
        ({"metadata": {"resourceVersion": "abc"}}, 0),
        ({"metadata": None}, 0),
        ({}, 0),
    ],
)
def test_versions(body: b.Json, expected: int) -> None:
    assert version(body) == expected


# kind -> (an observation of one object at a version, how to say "seen" and "gone", what the cache then holds)
KINDS: dict[str, tuple[Callable[[int], b.Json], str, Callable[[Cache], int | None]]] = {
    "jobs": (
        lambda v: job(v),
        "job",
        lambda c: version(c.jobs[KEY].body) if KEY in c.jobs else None,
    ),
    "pods": (
        lambda v: b.running_pod(version=v, uid="u"),
        "pod",
        lambda c: int(c.pods["u"].resource_version) if "u" in c.pods else None,
    ),
    "runs": (
        lambda v: b.run_body(version=v),
        "run",
        lambda c: version(c.runs["u1"]) if "u1" in c.runs else None,
    ),
}


@pytest.mark.parametrize("kind", list(KINDS))
class TestAnyKind:
    def seen(self, cache: Cache, kind: str, version: int) -> None:
        make, name, _ = KINDS[kind]
        getattr(cache, f"{name}_seen")(make(version))

    def gone(self, cache: Cache, kind: str, version: int) -> None:
        make, name, _ = KINDS[kind]
        getattr(cache, f"{name}_gone")(make(version))

    def held(self, cache: Cache, kind: str) -> int | None:
        return KINDS[kind][2](cache)

    def test_news_marks_the_job(self, cache: Cache, marked: Marked, kind: str) -> None:
        self.seen(cache, kind, 10)
        assert (self.held(cache, kind), marked[KEY]) == (10, 1)
        self.seen(cache, kind, 11)
        assert (self.held(cache, kind), marked[KEY]) == (11, 2)

    def test_old_never_replaces_new(self, cache: Cache, marked: Marked, kind: str) -> None:
        self.seen(cache, kind, 10)
        self.seen(cache, kind, 9)
        assert (self.held(cache, kind), marked[KEY]) == (10, 1)

    def test_the_same_again_is_no_news(self, cache: Cache, marked: Marked, kind: str) -> None:
        self.seen(cache, kind, 10)
        self.seen(cache, kind, 10)
        assert marked[KEY] == 1

    def test_versions_are_numbers_not_texts(self, cache: Cache, marked: Marked, kind: str) -> None:
        self.seen(cache, kind, 9)
        self.seen(cache, kind, 10)
        assert self.held(cache, kind) == 10

    def test_the_deleted_doesn_t_come_back(self, cache: Cache, marked: Marked, kind: str) -> None:
        self.seen(cache, kind, 10)
        self.gone(cache, kind, 12)
        assert (self.held(cache, kind), marked[KEY]) == (None, 2)
        self.seen(cache, kind, 11)
        self.seen(cache, kind, 13)
        assert (self.held(cache, kind), marked[KEY]) == (None, 2)

    def test_nor_from_an_old_list(self, cache: Cache, marked: Marked, kind: str) -> None:
        self.seen(cache, kind, 10)
        self.gone(cache, kind, 12)
        assert cache.compare(kind, [KINDS[kind][0](10)], 11) == 0
        assert self.held(cache, kind) is None

    def test_a_deletion_that_is_told_twice(self, cache: Cache, marked: Marked, kind: str) -> None:
        self.gone(cache, kind, 12)
        self.gone(cache, kind, 12)
        assert (self.held(cache, kind), marked[KEY]) == (None, 0)
        assert cache.removed == []

    def test_compare_finds_what_the_watch_did_not_tell(self, cache: Cache, marked: Marked, kind: str) -> None:
        make = KINDS[kind][0]
        assert cache.compare(kind, [make(10)], 10) == 1
        assert (self.held(cache, kind), marked[KEY]) == (10, 1)
        assert cache.compare(kind, [make(10)], 15) == 0
        assert cache.compare(kind, [make(14)], 15) == 1
        assert self.held(cache, kind) == 14

    def test_compare_removes_what_is_gone(self, cache: Cache, marked: Marked, kind: str) -> None:
        self.seen(cache, kind, 10)
        assert cache.compare(kind, [], 11) == 1
        assert (self.held(cache, kind), marked[KEY]) == (None, 2)
        assert cache.compare(kind, [], 12) == 0

    def test_compare_leaves_what_is_newer_than_the_list(self, cache: Cache, marked: Marked, kind: str) -> None:
        self.seen(cache, kind, 20)
        assert cache.compare(kind, [], 19) == 0
        assert self.held(cache, kind) == 20
        assert cache.compare(kind, [KINDS[kind][0](15)], 19) == 0
        assert self.held(cache, kind) == 20

    def test_compare_leaves_what_was_not_listed(self, cache: Cache, marked: Marked, kind: str) -> None:
        self.seen(cache, kind, 10)
        assert cache.compare(kind, [], 11, frozenset({"other"})) == 0
        assert self.held(cache, kind) == 10
        assert cache.compare(kind, [], 11, frozenset({"other", b.NAMESPACE})) == 1
        assert self.held(cache, kind) is None

    @settings(max_examples=60)
    @given(data=st.data())
    def test_any_order_ends_with_the_newest(self, kind: str, data: st.DataObject) -> None:
        cache = Cache(lambda key: None)
        make = KINDS[kind][0]
        versions = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=12))
        deleted = data.draw(st.booleans())
        for v in versions:
            if data.draw(st.booleans()):
                self.seen(cache, kind, v)
            else:
                cache.compare(kind, [make(v)], v)
        if deleted:
            self.gone(cache, kind, 31)
            for v in data.draw(st.lists(st.integers(1, 30), max_size=4)):
                self.seen(cache, kind, v)
                cache.compare(kind, [make(v)], v)
        assert self.held(cache, kind) == (None if deleted else max(versions))


class TestMemory:
    def test_what_is_never_read_is_not_kept(self, cache: Cache) -> None:
        body = job(10)
        applied = "kubectl.kubernetes.io/last-applied-configuration"
        body["metadata"] |= {"managedFields": [{"manager": "x"}], "annotations": {applied: "{}", "mine": "1"}}
        notes = {applied: "the template's own", "managedFields": "too"}
        body["spec"]["template"] = {"metadata": {"annotations": notes}, "spec": {"managedFields": [1]}}
        cache.job_seen(body)
        kept = cache.jobs[KEY].body
        assert "managedFields" not in kept["metadata"]
        assert kept["metadata"]["annotations"] == {"mine": "1"}
        assert kept["spec"] == body["spec"], "a template is kept as written"
        assert body["metadata"]["managedFields"], "what was given stays as it was"

    def test_names_are_shared(self, cache: Cache) -> None:
        for n in range(2):
            body: b.Json = json.loads(json.dumps(job(10, uid=f"u{n}") | {"status": {"nextScheduleTimes": []}}))
            body["metadata"]["name"] = f"job-{n}"
            cache.job_seen(body)
        one, two = (next(iter(e.body["status"])) for e in cache.jobs.values())
        assert one is two

    def test_a_spec_is_kept_packed(self, cache: Cache) -> None:
        body = job(10)
        cache.job_seen(body)
        spec = cache.jobs[KEY].body["spec"]
        assert isinstance(spec, Packed)
        assert spec == body["spec"]
        assert body["spec"] == spec
        assert spec == Packed(dict(reversed(body["spec"].items()))), "whatever the order of its fields"
        assert spec != Packed({**body["spec"], "suspend": True})
        assert dict(spec) == body["spec"]
        assert len(spec) == len(body["spec"])
        assert spec
        assert not Packed({})
        spec.whole["template"] = "changed"
        assert cache.jobs[KEY].template == body["spec"]["template"], "nobody changes what is kept"

    def test_what_is_known_need_not_be_kept_until_it_is_compared(self, cache: Cache) -> None:
        cache.job_seen(job(10))
        same, newer = cache.brief(job(10)), cache.brief(job(11))
        assert same.keys() == {"metadata"}
        assert newer == job(11)
        assert cache.compare("jobs", [same], 20) == 0
        assert cache.compare("jobs", [newer], 20) == 1
        assert cache.compare("jobs", [same], 20) == 0
        assert cache.jobs[KEY].body["metadata"]["resourceVersion"] == "11"


class TestJobs:
    def test_an_edit_keeps_the_entry(self, cache: Cache) -> None:
        cache.job_seen(job(10))
        entry = cache.jobs[KEY]
        entry.handled["x"] = 1.0
        cache.job_seen(job(11, generation=2))
        assert cache.jobs[KEY] is entry
        assert entry.body["metadata"]["generation"] == 2

    def test_deleted_and_created_anew_while_nobody_looked(self, cache: Cache) -> None:
        cache.job_seen(job(10))
        old = cache.jobs[KEY]
        cache.job_seen(job(20, uid="new"))
        assert cache.jobs[KEY].uid == "new"
        assert cache.removed == [old], "it has to be unregistered"
        cache.job_seen(job(11))
        assert cache.jobs[KEY].uid == "new", "an old list must not bring it back"
        assert cache.compare("jobs", [job(11)], 11) == 0
        assert cache.jobs[KEY].uid == "new"
        assert cache.removed == [old]

    def test_its_predecessor_in_an_old_list(self, cache: Cache) -> None:
        cache.job_seen(job(20, uid="new"))
        cache.compare("jobs", [job(10)], 15)
        assert cache.jobs[KEY].uid == "new"
        assert cache.removed == []

    def test_the_late_end_of_a_predecessor(self, cache: Cache) -> None:
        cache.job_seen(job(20, uid="new"))
        cache.job_gone(job(19))
        assert cache.jobs[KEY].uid == "new"

    def test_removed(self, cache: Cache) -> None:
        cache.job_seen(job(10))
        entry = cache.jobs[KEY]
        cache.job_gone(job(11))
        assert cache.removed == [entry]
        assert cache.jobs == {}


class TestPods:
    def test_a_stranger_s_pod_is_none(self, cache: Cache, marked: Marked) -> None:
        body = b.pod()
        del body["metadata"]["annotations"]
        cache.pod_seen(body)
        assert cache.pods == {}
        assert marked == {}
        assert cache.compare("pods", [body], 100) == 0, "and no difference at every comparison"

    def test_by_job(self, cache: Cache) -> None:
        for n in (3, 1, 2):
            cache.pod_seen(b.pod(tick=b.at(n), uid=f"u{n}"))
        cache.pod_seen(b.pod(job="other", uid="u9"))
        assert [p.uid for p in cache.pods_for(KEY)] == ["u1", "u2", "u3"]
        assert [p.uid for p in cache.pods_for((b.NAMESPACE, "other"))] == ["u9"]
        assert cache.pods_for((b.NAMESPACE, "none")) == ()

    def test_nothing_is_left_of_those_that_are_gone(self, cache: Cache) -> None:
        for n in range(5):
            cache.pod_seen(b.pod(uid=f"u{n}"))
            cache.pod_gone(b.pod(uid=f"u{n}"))
            cache.run_seen(b.run_body(uid=f"r{n}"))
            cache.run_gone(b.run_body(uid=f"r{n}"))
        assert (cache.pods, cache.pods_of, cache.runs, cache.runs_of) == ({}, {}, {}, {})

    def test_whose_annotation_somebody_edits(self, cache: Cache) -> None:
        cache.pod_seen(b.pod(uid="u", version=1))
        cache.pod_seen(b.pod(uid="u", version=2, job="other"))
        assert cache.pods_for(KEY) == ()
        assert len(cache.pods_for((b.NAMESPACE, "other"))) == 1
        cache.pod_gone(b.pod(uid="u", version=3))
        assert cache.pods_of == {}


class TestRuns:
    def test_oldest_first(self, cache: Cache) -> None:
        for uid, name, created in (("u1", "b", 5), ("u2", "a", 5), ("u3", "z", 1)):
            cache.run_seen(b.run_body(uid=uid, name=name, created=created))
        assert [r["metadata"]["name"] for r in cache.runs_for(KEY)] == ["z", "a", "b"]

    def test_of_a_job_that_isn_t_there(self, cache: Cache, marked: Marked) -> None:
        cache.run_seen(b.run_body({"jobName": "none"}))
        assert marked == {(b.NAMESPACE, "none"): 1}

    def test_without_a_spec(self, cache: Cache) -> None:
        body = b.run_body()
        body["spec"] = None
        cache.run_seen(body)
        cache.run_gone(body)
        assert cache.runs_of == {}


class TestTombstones:
    def test_they_go_after_their_time(self, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [1000.0]
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
        for n in range(1000):
            cache.pod_gone({"metadata": {"uid": f"u{n}"}})
        now[0] += module.TOMBSTONE_SECONDS + 1
        cache.pod_gone({"metadata": {"uid": "last"}})
        assert set(cache._gone) == {"last"}

    def test_many_deletions_cost_little_each(self, cache: Cache) -> None:
        """Fifty thousand Pods in ten minutes; each deletion must not go through all of them."""
        began = time.process_time()
        for n in range(50_000):
            cache.pod_gone({"metadata": {"uid": f"u{n}"}})
        assert time.process_time() - began < 5
        assert len(cache._gone) == 50_000


def test_ten_thousand_objects(cache: Cache, marked: Marked) -> None:
    bodies = []
    for n in range(10_000):
        body = job(n + 1, uid=f"u{n}", name=f"job-{n}")
        bodies.append(body)
    began = time.process_time()
    assert cache.compare("jobs", bodies, 10_000) == 10_000
    assert cache.compare("jobs", copy.copy(bodies), 10_001) == 0
    assert cache.compare("jobs", bodies[:9000], 10_002) == 1000
    assert len(cache.jobs) == 9000
    assert len(cache.removed) == 1000
    assert time.process_time() - began < 5


def test_a_late_answer_does_not_undo_an_edit_that_was_seen() -> None:
    """A status patch's answer that was overtaken by the event of an edit; nothing would ever tell of the edit again."""
    cache = Cache(lambda _: None)
    cache.job_seen(b.job_body(version=3))
    entry = next(iter(cache.jobs.values()))
    entry.renew(b.job_body(version=2))
    assert entry.body["metadata"]["resourceVersion"] == "3"
    entry.renew(b.job_body(version=4))
    assert entry.body["metadata"]["resourceVersion"] == "4"


def test_what_another_operator_serves_is_not_seen_but_own_pods_are_brought_to_their_end(marked: Marked) -> None:
    cache = Cache(marked, lambda namespace: namespace != b.NAMESPACE)
    cache.job_seen(job())
    assert cache.compare("jobs", [job(11)], 20) == 0, "nothing that the watch should have shown"
    assert not cache.jobs
    for kind in ("jobs", "runs"):
        observe, verb, held = KINDS[kind]
        getattr(cache, f"{verb}_seen")(observe(12))
        assert held(cache) is None
    assert not marked
    observe, verb, held = KINDS["pods"]
    assert cache.compare("pods", [observe(12)], 20) == 1
    assert held(cache) is not None
