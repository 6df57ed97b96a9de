"""What the probes answer, when the engine may work, and what one comparison takes for a silent watch."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit import controller_builders as b

from leasedjob.controller.cache import Cache
from leasedjob.controller.definitions import Definitions, OldDefinitionsError
from leasedjob.controller.engine import Engine
from leasedjob.controller.kube import Kube, KubeError
from leasedjob.controller.loops import STALE_AFTER, STUCK_AFTER, Comparer, Health
from leasedjob.controller.metrics import Metrics
from leasedjob.controller.settings import Settings


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("leasedjob.controller.loops.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def sound() -> Health:
    return Health(listed=True, unread="", definitions="", schema="", database="", cluster="")


class TestProbes:
    def test_ready_when_everything_is_known(self) -> None:
        assert sound().ready() is None
        assert Health().ready()

    @pytest.mark.parametrize("what", ["unread", "definitions", "schema", "database", "cluster"])
    def test_the_reason_is_told(self, what: str) -> None:
        health = sound()
        setattr(health, what, "because")
        assert health.ready() == "because"
        assert health.live() is None, "a restart would not help"

    def test_red_when_a_watch_stays_silent(self, clock: Clock) -> None:
        health = sound()
        health.silent_since["pods"] = clock.now
        clock.now += STALE_AFTER
        assert health.live() is None
        clock.now += 1
        assert "pods" in (health.live() or "")
        health.event("jobs")
        assert health.live(), "another watch's news say nothing of this one"
        health.event("pods")
        assert health.live() is None


class FakeEngine(Engine):
    """Only what a comparison touches."""

    def __init__(self, kube: Kube, *namespaces: str) -> None:
        self.settings = Settings(cluster="c", namespaces=namespaces)
        self.kube = kube
        self.cache = Cache(lambda key: None)
        self.metrics = Metrics()
        self.fresh = False
        self.forgot: list[Any] = []

    def begin(self) -> None:
        self.fresh = True

    async def forget_absent(self, namespaces: Any = None) -> None:
        self.forgot.append(namespaces)


class Server(Kube):
    """Lists of objects by plural, and refusals by (plural, namespace) or (plural, namespace, "watch")."""

    def __init__(self) -> None:
        self.objects: dict[str, list[b.Json]] = {"leasedjobs": [], "leasedjobruns": [], "pods": []}
        self.refused: dict[Any, int] = {}
        self.tried: list[str] = []

    def _refuse(self, *what: Any) -> None:
        if status := self.refused.get(what):
            raise KubeError(status, "Forbidden", " ".join(map(str, what)))

    async def list(
        self, base: str, plural: str, namespace: str | None, *, label_selector: str = "", keep: Any = None
    ) -> Any:
        self._refuse(plural, namespace)
        found = [keep(o) for o in self.objects[plural] if namespace in (None, o["metadata"]["namespace"])]
        return 50, found

    async def try_watch(
        self, base: str, plural: str, namespace: str | None, *, label_selector: str, since: int
    ) -> None:
        self.tried.append(plural)
        self._refuse(plural, namespace, "watch")

    async def call(self, method: str, path: str, *_: Any, **__: Any) -> Any:
        raise KubeError(403, "Forbidden", path)  # the definitions can't be compared here


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasedjob.controller.loops.WATCH_BEGINS_SECONDS", 0.0)


class TestComparer:
    async def test_the_engine_works_when_all_is_known(self) -> None:
        server, health = Server(), Health(schema="", cluster="")
        engine = FakeEngine(server)
        await Comparer(engine, health).step()
        assert (health.listed, engine.fresh, health.renew.is_set()) == (True, True, True)
        assert health.scopes == {None}
        assert server.tried == ["leasedjobs", "leasedjobruns", "pods"]

    async def test_and_not_before_the_schema_is_known(self) -> None:
        health = Health(cluster="")
        engine = FakeEngine(Server())
        await Comparer(engine, health).step()
        assert not engine.fresh
        health.schema = ""
        health.admit(engine)
        assert engine.fresh
        health.schema = "it went"
        health.admit(engine)
        assert not engine.fresh

    @pytest.mark.parametrize("what", [("pods", None), ("leasedjobruns", None, "watch")])
    async def test_no_watch_begins_where_one_would_be_refused(self, what: Any) -> None:
        server, health = Server(), Health(schema="", cluster="")
        server.refused[what] = 403
        engine = FakeEngine(server)
        comparer = Comparer(engine, health)
        with pytest.raises(KubeError):
            await comparer.step()
        assert (health.listed, engine.fresh, health.renew.is_set()) == (False, False, False)
        assert what[0] in (health.ready() or "")
        server.refused.clear()
        await comparer.step()
        assert (health.listed, engine.fresh, health.renew.is_set()) == (True, True, True)

    async def test_a_right_that_went_and_came_back(self) -> None:
        """Its watcher has ended for good: the watch begins anew."""
        server, health = Server(), Health(schema="", cluster="")
        engine = FakeEngine(server)
        comparer = Comparer(engine, health)
        await comparer.step()
        health.renew.clear()
        server.refused["pods", None] = 403
        with pytest.raises(KubeError):
            await comparer.step()
        assert health.ready()
        assert engine.fresh, "it works with what it knows"
        server.refused.clear()
        await comparer.step()
        assert health.renew.is_set()

    async def test_one_namespace_of_two(self) -> None:
        server, health = Server(), Health(schema="", database="", cluster="")
        mine, theirs = b.job_body(), b.job_body(name="other")
        theirs["metadata"] |= {"namespace": "elsewhere", "uid": "u-elsewhere"}
        server.objects["leasedjobs"] = [mine, theirs]
        engine = FakeEngine(server, b.NAMESPACE, "elsewhere")
        comparer = Comparer(engine, health)
        await comparer.step()
        assert health.ready() is None
        assert len(engine.cache.jobs) == 2
        server.refused["pods", "elsewhere"] = 403
        health.renew.clear()
        await comparer.step()
        assert "namespace elsewhere" in (health.ready() or "")
        assert len(engine.cache.jobs) == 2, "what can't be seen isn't gone"
        assert engine.forgot[-1] == {b.NAMESPACE}
        assert not health.renew.is_set()
        server.refused.clear()
        await comparer.step()
        assert health.ready() is None
        assert health.renew.is_set()

    async def test_a_passing_fault_changes_nothing(self) -> None:
        server, health = Server(), Health(schema="", database="", cluster="")
        engine = FakeEngine(server)
        comparer = Comparer(engine, health)
        await comparer.step()
        server.refused["leasedjobs", None] = 500
        with pytest.raises(KubeError):
            await comparer.step()
        assert health.ready() is None
        assert health.scopes == {None}

    async def test_a_silent_watch_begins_anew(self, clock: Clock) -> None:
        server, health = Server(), Health(schema="", database="", cluster="")
        engine = FakeEngine(server)
        comparer = Comparer(engine, health)
        await comparer.step()
        health.renew.clear()
        server.objects["leasedjobs"] = [b.job_body()]
        await comparer.step()
        assert health.staleness() == 0.0
        assert not health.renew.is_set()
        clock.now += STUCK_AFTER + 1
        await comparer.step()
        assert health.renew.is_set()


class Publisher(Kube):
    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), 0

    async def call(self, method: str, path: str, *_: Any, **__: Any) -> Any:
        assert (method, path) == ("GET", "/openapi/v3/apis/leasedjob.io/v1alpha1")
        self.asked += 1
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class TestDefinitions:
    async def test_old_ones_are_asked_for_again(self) -> None:
        kube = Publisher({}, {})
        definitions = Definitions(kube)
        for _ in range(2):
            with pytest.raises(OldDefinitionsError, match=r"LeasedJob, LeasedJobRun.*crds\.enabled"):
                await definitions.check()
        assert kube.asked == 2

    async def test_a_cluster_that_does_not_tell_is_taken_as_it_is(self) -> None:
        kube = Publisher(KubeError(403, "Forbidden", "no"))
        definitions = Definitions(kube)
        await definitions.check()
        await definitions.check()
        assert kube.asked == 1

    async def test_a_document_that_is_not_there_yet_is_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [1000.0]
        monkeypatch.setattr("leasedjob.controller.definitions.time.monotonic", lambda: now[0])
        missing = KubeError(404, "NotFound", "no")
        definitions = Definitions(Publisher(missing, missing, missing))
        for _ in range(2):
            with pytest.raises(KubeError):
                await definitions.check()
            now[0] += 15
        await definitions.check()

    @pytest.mark.parametrize("status", [0, 429, 500])
    async def test_a_passing_fault_is_no_answer(self, status: int) -> None:
        with pytest.raises(KubeError):
            await Definitions(Publisher(KubeError(status, "x", "y"))).check()
