"""Events: what is said again is counted on one object, by whichever replica; what happens once counts once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit import controller_builders as b

from leasedjob.controller.events import EventReason, Recorder, event_name
from leasedjob.controller.kube import KubeError

TRIES = ("PodNotCreated", "Forbidden: exceeded quota")


class Api:
    """Events as the API server keeps them: names are unique, a patch may name the version that it changes."""

    def __init__(self) -> None:
        self.events: dict[str, dict[str, Any]] = {}
        self.version = 0
        self.conflicts = 0  # patches of a count that somebody is faster with
        self.refusal: KubeError | None = None

    def _stored(self, event: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        event["metadata"] = {**event["metadata"], "resourceVersion": str(self.version)}
        self.events[event["metadata"]["name"]] = event
        return dict(event)

    async def create_event(self, event: dict[str, Any]) -> None:
        if self.refusal is not None:
            raise self.refusal
        if event["metadata"]["name"] in self.events:
            raise KubeError(409, "AlreadyExists", "there is one")
        self._stored(dict(event))

    async def patch_event(self, namespace: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        if name not in self.events:
            raise KubeError(404, "NotFound", "gone")
        wanted = body.get("metadata", {}).get("resourceVersion")
        if wanted is not None and self.conflicts:
            self.conflicts -= 1
            self._stored({**self.events[name], "count": self.events[name]["count"] + 1})
        if wanted not in (None, self.events[name]["metadata"]["resourceVersion"]):
            raise KubeError(409, "Conflict", "it has changed")
        return self._stored({**self.events[name], **body, "metadata": self.events[name]["metadata"]})


async def written(api: Api, *said: tuple[str, str], replicas: int = 1, **more: Any) -> list[tuple[str, str, int]]:
    """What stands there when each replica has said all of it: reason, message, count."""
    recorders = [Recorder(api, f"replica-{n}") for n in range(replicas)]  # type: ignore[arg-type]
    for recorder in recorders:
        for reason, message in said:
            recorder.record(b.job_body(), reason, message, **more)
    async with asyncio.timeout(30):
        tasks = [asyncio.create_task(recorder.run()) for recorder in recorders]
        while any(not recorder.idle for recorder in recorders):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
    return [(e["reason"], e["message"], e["count"]) for e in api.events.values()]


async def test_what_is_tried_again_and_again_is_one_event_with_a_count() -> None:
    assert await written(Api(), *[TRIES] * 7) == [(*TRIES, 7)]


async def test_replicas_count_on_the_same_one() -> None:
    assert await written(Api(), *[TRIES] * 3, replicas=2) == [(*TRIES, 6)]


async def test_a_count_that_somebody_else_raised_meanwhile_is_read_again() -> None:
    api = Api()
    api.conflicts = 2
    assert await written(api, TRIES, TRIES) == [(*TRIES, 4)]


async def test_a_run_s_event_counts_once_however_many_say_it() -> None:
    said = (EventReason.RUN_SUCCEEDED, "2026-07-20T03:00:00Z, attempt 1")
    assert await written(Api(), said, said, replicas=2, once="end") == [(*said, 1)]


async def test_other_words_are_another_event() -> None:
    other = (TRIES[0], "Forbidden: no room")
    assert sorted(await written(Api(), TRIES, other, TRIES)) == sorted([(*TRIES, 2), (*other, 1)])


async def test_first_and_last_time_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api()
    for now in ("2026-07-20T03:00:00Z", "2026-07-20T03:10:00Z"):
        monkeypatch.setattr("leasedjob.controller.events._now", lambda now=now: now)
        await written(api, TRIES)
    (event,) = api.events.values()
    assert (event["firstTimestamp"], event["lastTimestamp"]) == ("2026-07-20T03:00:00Z", "2026-07-20T03:10:00Z")


@pytest.mark.parametrize(("status", "told"), [(403, False), (404, False), (500, True)])
async def test_one_that_can_t_be_written_is_forgotten(status: int, told: bool, caplog: Any) -> None:
    api = Api()
    api.refusal = KubeError(status, "Why", "message")
    assert await written(api, TRIES) == []
    assert any(r.levelname == "WARNING" for r in caplog.records) == told


def test_the_name_follows_from_object_and_words() -> None:
    job = b.job_body()
    name = event_name(job, "Warning", "A", "m")
    assert name == event_name(b.job_body(version=99), "Warning", "A", "m")
    other = {**job, "metadata": {**job["metadata"], "uid": "another"}}
    assert len({name, event_name(other, "Warning", "A", "m"), event_name(job, "Normal", "A", "m")}) == 3
    long = {**job, "metadata": {**job["metadata"], "name": "x" * 253}}
    assert len(event_name(long, "Warning", "A", "m")) <= 253
