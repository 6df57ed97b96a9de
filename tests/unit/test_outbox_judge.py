"""What becomes of a message that could not be published: decided without a clock or a database."""

from __future__ import annotations

import socket
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasedjob.errors import MessageRefusedError, PublisherUnavailableError
from leasedjob.workload.outbox import judge as judging
from leasedjob.workload.outbox.judge import Failure, Judge, Patience, Verdict
from leasedjob.workload.outbox.publisher import OutboxMessage

DOWN = PublisherUnavailableError("down")


def message(id: int = 1, tries: int = 0) -> OutboxMessage:
    return OutboxMessage(
        id=id,
        idempotency_key=f"{id}",
        type="t",
        payload=1,
        topic="t",
        partition_key=None,
        created_at=datetime.now(UTC),
        tries=tries,
    )


@pytest.fixture
def judge() -> Judge:
    return Judge(Patience())


class TestRefused:
    @pytest.mark.parametrize(
        "error", [MessageRefusedError("no"), ValueError("no"), KeyError("no"), OSError("no"), FileNotFoundError()]
    )
    def test_a_try_is_spent_and_it_waits(self, judge: Judge, error: Exception) -> None:
        waits = [judge.failed(message(tries=tries), error).wait for tries in range(9)]
        assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256]
        assert (judge.stopped, judge.doubtful, judge.pause()) == (False, False, 0)

    def test_the_last_one_parks(self, judge: Judge) -> None:
        failure = judge.failed(message(tries=9), ValueError("no"))
        assert failure == Failure(failure.message, Verdict.PARKED, 10, None, "ValueError: no")

    def test_for_good(self, judge: Judge) -> None:
        assert judge.failed(message(), MessageRefusedError("no", final=True)).verdict is Verdict.PARKED

    def test_its_text_is_limited(self, judge: Judge) -> None:
        assert len(judge.failed(message(), ValueError("x" * 10_000)).error) == judging.ERROR_LIMIT


class TestUnavailable:
    @pytest.mark.parametrize("error", [DOWN, TimeoutError(), ConnectionError(), BrokenPipeError(), socket.gaierror()])
    def test_no_try_is_spent_however_often(self, judge: Judge, error: Exception) -> None:
        for id in range(100):
            failure = judge.failed(message(id, tries=9), error)
            assert (failure.verdict, failure.tries) == (Verdict.UNAVAILABLE, 9)

    def test_one_answer_is_not_believed_two_are(self, judge: Judge) -> None:
        judge.failed(message(1), DOWN)
        assert (judge.stopped, judge.doubtful) == (False, True)
        judge.failed(message(2), DOWN)
        assert judge.stopped

    def test_while_it_lasts_one_message_is_tried_at_a_time_and_the_pauses_grow(self, judge: Judge) -> None:
        judge.failed(message(0), DOWN)
        pauses = []
        for id in range(1, 8):
            assert not judge.stopped
            wait = judge.failed(message(id), DOWN).wait
            assert judge.stopped
            pauses.append(judge.pause())
            assert wait == 2 * pauses[-1], "others come first"
        assert pauses == [0.5, 1, 2, 4, 8, 15, 15]
        judge.published(message(9))
        assert (judge.stopped, judge.doubtful, judge.pause()) == (False, False, 0)
        judge.failed(message(10), DOWN)
        judge.failed(message(11), DOWN)
        assert judge.pause() == 0.5, "another outage"

    def test_another_outage_spends_one_try_at_the_most(self, judge: Judge) -> None:
        for id in range(5):
            judge.failed(message(id), DOWN)
        judge.published(message(5))
        verdicts = []
        for id in range(5):
            verdicts.append(judge.failed(message(id), DOWN).verdict)
            if judge.stopped:
                break
        assert verdicts == [Verdict.REFUSED, Verdict.UNAVAILABLE, Verdict.UNAVAILABLE]

    def test_said_again_of_a_message_while_others_pass_it_means_that_one(self, judge: Judge) -> None:
        tries, verdicts = 0, []
        while Verdict.PARKED not in verdicts:
            failure = judge.failed(message(1, tries), DOWN)
            tries = failure.tries
            verdicts.append(failure.verdict)
            assert not judge.stopped
            judge.published(message(2))
        assert verdicts == [Verdict.UNAVAILABLE, *[Verdict.REFUSED] * 9, Verdict.PARKED]

    def test_a_message_of_its_own_alone_proves_nothing(self, judge: Judge) -> None:
        verdicts = {judge.failed(message(1), DOWN).verdict for _ in range(50) if judge.pause() >= 0}
        assert verdicts == {Verdict.UNAVAILABLE}

    def test_a_message_that_was_taken_after_all_is_forgotten(self, judge: Judge) -> None:
        judge.failed(message(1), DOWN)
        judge.published(message(1))
        assert judge.failed(message(1), DOWN).verdict is Verdict.UNAVAILABLE

    @pytest.mark.parametrize(("asked", "pause"), [(7, 7), (0, 0.5), (86400, 300)])
    def test_a_sink_that_says_when_is_believed_within_reason(self, judge: Judge, asked: float, pause: float) -> None:
        failure = judge.failed(message(), PublisherUnavailableError("later", retry_after=asked))
        assert failure.verdict is Verdict.UNAVAILABLE
        assert (judge.stopped, judge.pause()) == (True, pause)
        assert not judge.stopped

    def test_not_all_is_remembered_for_ever(self, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(judging, "DOUBTS", 3)
        for id in range(10):
            judge.failed(message(id), DOWN)
        assert sorted(judge._doubts) == [7, 8, 9]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["taken", "down", "refused"])), max_size=60))
def test_no_message_is_parked_that_was_not_refused_or_left_behind_so_often(events: list[tuple[int, str]]) -> None:
    """Whatever comes: a try is spent only by a refusal, or where another message passed since the last failure."""
    patience = Patience(max_tries=3)
    judge = Judge(patience)
    tries: dict[int, int] = {}
    passed = 0
    failed_at: dict[int, int] = {}
    blamed = False
    for id, what in events:
        if what == "taken":
            judge.published(message(id))
            passed += 1
            blamed = False
            failed_at.pop(id, None)
            continue
        failure = judge.failed(message(id, tries.get(id, 0)), DOWN if what == "down" else ValueError())
        left_behind = what == "down" and id in failed_at and failed_at[id] < passed and not blamed
        blamed = blamed or left_behind
        assert failure.tries - tries.get(id, 0) == (1 if what == "refused" or left_behind else 0)
        assert (failure.verdict is Verdict.PARKED) == (failure.tries >= 3 and failure.tries > tries.get(id, 0))
        assert (failure.wait is None) == (failure.verdict is Verdict.PARKED)
        tries[id] = failure.tries
        if what == "down":
            failed_at[id] = passed
        judge.pause()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"max_tries": 0}, "max_tries must be a whole number, 1 or more, not 0"),
        ({"max_tries": True}, "max_tries must be"),
        ({"max_tries": 2.5}, "max_tries must be"),
        ({"first_wait": 0}, "first_wait must be positive, and longest_wait as long at least"),
        ({"first_wait": 2, "longest_wait": 1}, "first_wait must be positive"),
        ({"longest_pause": float("inf")}, "first_pause must be positive, and longest_pause"),
        ({"first_pause": float("nan")}, "first_pause must be positive"),
    ],
)
def test_patience_has_its_limits(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(Patience(), **wrong)


def test_nothing_overflows() -> None:
    patience = Patience(max_tries=10**9)
    assert (patience.wait(10**6), patience.pause(10**6)) == (300, 15)
