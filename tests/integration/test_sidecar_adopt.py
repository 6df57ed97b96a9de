"""adopt against a real PostgreSQL, as the real process with a tenant's role."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from leasedjob import protocol
from leasedjob.lease.store import OperatorStore

from .conftest import Database, claimed, lock_row, registered
from .sidecar_parts import CALM, SHORT, Pod, Pods, pods_for

pytestmark = pytest.mark.integration


@pytest.fixture
def pods(tmp_path: Path, database: Database, store: OperatorStore) -> Iterator[Pods]:
    yield from pods_for(tmp_path, database, store)


async def test_the_claim_becomes_the_pods_lease_with_a_token_that_the_operator_never_knew(
    pods: Pods, minute: datetime
) -> None:
    pod = await pods.pod(minute, CALM)
    assert pod.run("adopt") == 0, pod.log("adopt")
    row, handoff = pod.row(), pod.handoff()
    assert (row["pod_uid"], row["lease_ms"]) == (pod.uid, CALM.duration * 1000)
    assert row["owner_token"] == UUID(handoff["token"]) != UUID(pod.claim_token)
    assert (handoff["state"], handoff["fencing_token"]) == ("adopted", row["fencing_token"])
    assert handoff["trusted_until"] == pytest.approx(handoff["sent"] + CALM.trust)
    assert handoff["sent"] <= time.clock_gettime(time.CLOCK_BOOTTIME) < handoff["trusted_until"]
    assert (pod.directory / "lease.json").stat().st_mode & 0o077 == 0
    assert pod.message("adopt") == {}


async def test_adopting_twice_by_the_same_pod_is_once(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    assert pod.run("adopt") == 0
    before = pod.handoff()
    assert pod.run("adopt") == 0
    after = pod.handoff()
    assert (after["token"], after["attempt"]) == (before["token"], before["attempt"])
    assert after["sent"] > before["sent"]


async def test_an_adoption_whose_answer_was_lost_is_found_again(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    pod.proxy.lose_answer_to = b"leasedjob.adopt"
    assert pod.run("adopt") == 0, pod.log("adopt")
    assert pod.proxy.lost_answers == 1
    assert pod.row()["owner_token"] == UUID(pod.handoff()["token"])


async def test_an_adopt_that_died_before_it_wrote_the_handoff_goes_on_with_the_same_token(
    pods: Pods, minute: datetime
) -> None:
    """Crash window: the row is adopted, the handoff still says "proposed"."""
    pod = await pods.pod(minute, CALM)
    assert pod.run("adopt") == 0
    handoff = pod.handoff()
    proposed = {"state": "proposed", "sent": None, "trusted_until": None, "attempt": 0, "timing": None}
    (pod.directory / "lease.json").write_text(json.dumps({**handoff, **proposed}))
    assert pod.run("adopt") == 0
    assert pod.handoff()["token"] == handoff["token"]
    assert pod.row()["owner_token"] == UUID(handoff["token"])


@pytest.mark.parametrize("case", ["other pod", "wrong token", "expired", "ended"])
async def test_a_claim_that_is_not_ours_ends_with_75_and_a_reason(
    case: str, pods: Pods, minute: datetime, store: OperatorStore
) -> None:
    pod = await pods.pod(minute, CALM)
    match case:
        case "other pod":
            assert pods.rival(pod).run("adopt") == 0
            verdict = "taken"
        case "wrong token":
            pod.claim_token = str(uuid4())
            verdict = "lost"
        case "expired":
            pods.database.age(UUID(pod.lease_id), 61)
            verdict = "expired"
        case _:
            assert await store.release_claim(UUID(pod.lease_id), UUID(pod.claim_token), reason="QuotaExceeded")
            verdict = "lost"
    assert pod.run("adopt") == protocol.EXIT_NOT_MINE
    message = pod.message("adopt")
    assert message["adopt"] == verdict
    assert message["message"]
    assert pod.handoff()["state"] == "proposed"


async def test_the_role_of_another_namespace_is_refused(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    (pod.directory / "database" / "username").write_text(await pods.tenant(namespace="elsewhere"))
    assert pod.run("adopt") == protocol.EXIT_NOT_MINE
    assert pod.message("adopt")["adopt"] == "refused"
    assert pod.row()["pod_uid"] is None


async def test_a_row_that_a_stranger_locks_is_waited_for(pods: Pods, minute: datetime, database: Database) -> None:
    pod = await pods.pod(minute, CALM)
    stranger = database.connect(autocommit=False)
    lock_row(stranger, "job_scheduler", "id", UUID(pod.lease_id))
    process = pod.start("adopt")
    try:
        _await_log(pod, "adopt", "locked")
        stranger.rollback()
        assert process.wait(15) == 0
    finally:
        process.kill()


async def test_a_database_that_comes_up_late_is_waited_for(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    pod.proxy.mode = "refuse"
    process = pod.start("adopt")
    try:
        _await_log(pod, "adopt", "leasedjob-adopt: ")
        pod.proxy.mode = "pass"
        assert process.wait(15) == 0, pod.log("adopt")
    finally:
        process.kill()


async def test_a_password_that_arrives_late_is_waited_for(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    secret = pod.directory / "database" / "password"
    right = secret.read_text()
    secret.write_text("old")
    process = pod.start("adopt")
    try:
        _await_log(pod, "adopt", "refused the login")
        secret.write_text(right)
        assert process.wait(15) == 0, pod.log("adopt")
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("mode", "cause"), [("hole", "NetworkPolic"), ("refuse", "connection")], ids=["egress denied", "reset"]
)
async def test_the_deadline_ends_it_and_the_message_names_the_likely_cause(
    mode: str, cause: str, pods: Pods, minute: datetime
) -> None:
    pod = await pods.pod(minute, CALM, extra={protocol.ENV_ADOPT_DEADLINE: "3"})
    pod.proxy.mode = mode
    assert pod.run("adopt") == protocol.EXIT_NOT_MINE
    message = pod.message("adopt")
    assert message["adopt"] == "unreachable"
    assert cause in message["message"]


async def test_missing_credentials_are_named(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM, extra={protocol.ENV_ADOPT_DEADLINE: "1"})
    for file in (pod.directory / "database").iterdir():
        file.unlink()
    assert pod.run("adopt") == protocol.EXIT_NOT_MINE
    assert "credentials" in pod.message("adopt")["message"]


async def test_sigterm_ends_it_at_once_and_takes_nothing(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    pod.proxy.mode = "hole"
    process = pod.start("adopt")
    try:
        _await_file(pod.directory / "lease.json")
        process.send_signal(signal.SIGTERM)
        assert process.wait(2) == protocol.EXIT_NOT_MINE
    finally:
        process.kill()
    assert pod.message("adopt")["adopt"] == "stopped"
    assert pod.row()["pod_uid"] is None


async def test_a_foreign_environment_is_named(pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM, extra={protocol.ENV_TIMING: "{}"})
    assert pod.run("adopt") == protocol.EXIT_NOT_MINE
    assert pod.message("adopt")["adopt"] == "invalid"


async def test_the_next_attempt_gets_a_larger_fencing_token(
    pods: Pods, minute: datetime, store: OperatorStore, database: Database
) -> None:
    first = await pods.pod(minute, SHORT)
    assert first.run("adopt") == 0
    database.age(UUID(first.lease_id), 13)
    await registered(store)
    second = pods.for_claim(await claimed(store, minute, run_lease_ms=12_000), SHORT)
    assert second.run("adopt") == 0
    assert second.handoff()["attempt"] == 2
    assert second.handoff()["lock_key"] == first.handoff()["lock_key"]
    assert second.handoff()["fencing_token"] > first.handoff()["fencing_token"]


def _await_log(pod: Pod, verb: str, text: str) -> None:
    until = time.monotonic() + 15
    while text not in pod.log(verb):
        assert time.monotonic() < until, pod.log(verb)
        time.sleep(0.02)  # a file has no signal to wait on


def _await_file(path: Path) -> None:
    until = time.monotonic() + 15
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
