"""current_run without a lease: which of the four places it finds itself in, and what it knows there."""

from __future__ import annotations

import contextlib
import logging
from datetime import UTC, datetime
from typing import Any

import pytest

from leasedjob import protocol
from leasedjob.errors import InvalidJobIdentityOptionsError, OutcomeRefusedError
from leasedjob.identity import JobSchedulerType, RunIdentity
from leasedjob.workload import Mode, current_run, find_run
from leasedjob.workload import run as module

KEY = "2026-07-20T03:00:00Z"
WRAPPED = {
    protocol.ENV_TYPE: "SCHEDULE",
    protocol.ENV_CODE: "shop/sync",
    protocol.ENV_RUN_KEY: KEY,
    protocol.ENV_SCHEDULED_TIME: KEY,
    protocol.ENV_IDEMPOTENCY_KEY: "v2:abc",
    protocol.ENV_ATTEMPT: "2",
    protocol.ENV_FENCING_TOKEN: "77",
    protocol.ENV_SIDECAR_URL: "",
}


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_current", [])
    for name in (*WRAPPED, module.ENV_URL):
        monkeypatch.delenv(name, raising=False)


class TestAlone:
    def test_it_plays_a_run_of_this_second(self, caplog: pytest.LogCaptureFixture) -> None:
        before = datetime.now(UTC).replace(microsecond=0)
        run = find_run({})
        assert run.mode is Mode.ALONE
        assert run.scheduled_time is not None
        assert run.scheduled_time >= before
        assert (run.attempt, run.fencing_token, run.deadline) == (1, 0, None)
        assert run.idempotency_key == RunIdentity.of(code=run.code, run_key=run.run_key).idempotency_key
        run.complete({"rows": 1})
        assert "stand-alone, so nothing is recorded" in caplog.text

    def test_a_run_that_is_named(self) -> None:
        run = find_run({protocol.ENV_CODE: "a"}, run_key=KEY)
        assert (run.code, run.run_key) == ("a", KEY)
        initial = find_run({}, code="seed", type=JobSchedulerType.INITIAL)
        assert (initial.run_key, initial.scheduled_time) == (None, None)

    def test_current_run_is_one_and_says_where_it_is(self, anew: None, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "leasedjob.workload"):
            run = current_run(code="a", run_key=KEY)
        assert current_run() is run
        assert f"run a {KEY}, attempt 1: stand-alone, nothing is held or recorded" in caplog.text


class TestUnderRunExclusive:
    def test_what_the_environment_says(self) -> None:
        run = find_run(WRAPPED | {module.ENV_URL: "postgresql://not-asked"})
        assert run.mode is Mode.COMMAND
        assert (run.code, run.run_key, run.attempt, run.fencing_token) == ("shop/sync", KEY, 2, 77)
        assert run.idempotency_key == "v2:abc"
        assert run.scheduled_time == datetime(2026, 7, 20, 3, tzinfo=UTC)
        run.complete()

    def test_a_run_without_tick_and_key(self) -> None:
        empty = {protocol.ENV_TYPE: "INITIAL", protocol.ENV_RUN_KEY: "", protocol.ENV_SCHEDULED_TIME: ""}
        run = find_run(WRAPPED | empty)
        assert (run.type, run.run_key, run.scheduled_time) == (JobSchedulerType.INITIAL, None, None)


def test_with_a_database_the_run_has_to_be_named() -> None:
    with pytest.raises(InvalidJobIdentityOptionsError, match=r"^code is missing: .*LEASEDJOB_CODE says"):
        find_run({module.ENV_URL: "postgresql://x"}, run_key=KEY)
    with pytest.raises(InvalidJobIdentityOptionsError, match=r"^run_key is missing: .*LEASEDJOB_RUN_KEY says"):
        find_run({}, code="a", database="postgresql://x")


class Recorder:
    def __init__(self) -> None:
        self.got: list[tuple[str, Any]] = []

    def record(self, outcome: Any, data: Any) -> None:
        self.got.append((outcome.value, data))


def recorded(mode: Mode = Mode.SIDECAR) -> tuple[module.Run, Recorder]:
    recorder = Recorder()
    identity = RunIdentity.of(code="a", run_key=KEY)
    return module._of(identity, mode, recorder, attempt=1, fencing_token=1), recorder


class TestReports:
    def test_the_first_one_counts(self) -> None:
        run, recorder = recorded()
        run.complete({"rows": 1})
        run.complete()
        with pytest.raises(OutcomeRefusedError, match="complete was reported before"):
            run.fail("late")
        assert recorder.got == [("complete", {"rows": 1})]

    @pytest.mark.parametrize(
        ("error", "data"),
        [
            (OSError("no route"), {"error": "no route", "type": "OSError"}),
            ("no route", {"error": "no route"}),
            ({"code": 7}, {"code": 7}),
            ("x" * 20_000, {"error": "x" * 10_000}),
        ],
    )
    def test_what_a_failure_keeps(self, error: Any, data: Any) -> None:
        run, recorder = recorded()
        run.fail(error)
        assert recorder.got == [("fail", data)]

    def test_a_release_says_so_whatever_else_it_says(self) -> None:
        run, recorder = recorded()
        run.release({"at": 17, "released": False})
        assert recorder.got == [("release", {"at": 17, "released": True})]


class TestBlock:
    @pytest.mark.parametrize(
        ("mode", "error", "expected"),
        [
            (Mode.SIDECAR, None, []),
            (Mode.SIDECAR, SystemExit(1), []),
            (Mode.SIDECAR, ValueError("x"), [("fail", {"error": "x", "type": "ValueError"})]),
            (Mode.SIDECAR, module.DrainingError("SIGTERM"), [("release", {"released": True})]),
            (Mode.SIDECAR, KeyboardInterrupt(), [("release", {"released": True})]),
            (Mode.SIDECAR, module.LostJobLeaseError("x"), []),
            (Mode.DATABASE, None, [("release", {"released": True})]),
            (Mode.DATABASE, SystemExit(0), [("release", {"released": True})]),
            (Mode.DATABASE, SystemExit(3), [("fail", {"error": "the program exits with 3"})]),
        ],
    )
    def test_how_it_ends(self, mode: Mode, error: BaseException | None, expected: list[Any]) -> None:
        run, recorder = recorded(mode)
        with contextlib.suppress(BaseException), run:
            if error is not None:
                raise error
        assert recorder.got == expected

    def test_what_was_said_in_it_stays(self) -> None:
        run, recorder = recorded()
        with contextlib.suppress(ValueError), run:
            run.complete()
            raise ValueError("after the end")
        assert recorder.got == [("complete", None)]
