"""The judge of `make chaos` is shown histories with each kind of violation, and one without any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.chaos_cluster.checker import Broken, Verdict, judge, ticks_due
from tests.chaos_cluster.records import Change, Done, Evidence, Job, Line, Range

BASE = 1_800_000_000.0  # a full minute
LEASE, BUDGET = 40.0, 15.0
HERE, THERE = "chaos-a", "chaos-b"
ADDRESSES = {HERE: "10.99.10.2", THERE: "10.99.11.2"}


def key_of(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"


class Story:
    """Writes down what happened, as the witnesses would."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.changes: list[Change] = []
        self.ranges: list[Range] = []
        self.lines: list[Line] = []
        self.faults: list[Done] = []
        self._tokens = 0
        self._connections = 0

    def job(self, code: str, policy: str = "Forbid", **more: Any) -> str:
        values: dict[str, Any] = {"every": 1, "offset": 0, "since": BASE - 5, "lease": LEASE, "budget": BUDGET}
        self.jobs.append(Job(code=code, policy=policy, **{"simulated": False, **values, **more}))
        return code

    def write(self, code: str, tick: float, at: float, status: str = "RUNNING", **more: Any) -> Change:
        old = next((c for c in reversed(self.changes) if c.code == code and c.run_key == key_of(tick)), None)
        values: dict[str, Any] = {
            "token": self._tokens,
            "attempt": old.attempt if old else 1,
            "owner": old.owner if old else "claim",
            "adopted": bool(old and old.adopted),
            "until": at + LEASE,
            "modified": at,
            "cluster": old.cluster if old else HERE,
        }
        change = Change(
            seq=len(self.changes), at=at, key=f"{code}|{tick}", code=code, run_key=key_of(tick), manual=False,
            status=status, **{"outcome": "", "retry": False, "reason": "", **values, **more},
        )  # fmt: skip
        self.changes.append(change)
        return change

    def grant(self, code: str, tick: float, at: float, cluster: str = HERE) -> int:
        """A claim and its adoption; the token."""
        self._tokens += 1
        attempts = {c.attempt for c in self.changes if c.code == code and c.run_key == key_of(tick)}
        more: dict[str, Any] = {"attempt": max(attempts, default=0) + 1, "cluster": cluster}
        self.write(code, tick, at, token=self._tokens, owner=f"claim {self._tokens}", adopted=False, **more)
        self.write(code, tick, at + 1, token=self._tokens, owner=f"pod {self._tokens}", adopted=True, **more)
        return self._tokens

    def say(self, connection: int, what: str, at: float, **more: Any) -> None:
        self.lines.append(Line(seq=len(self.lines), since=at - 0.01, at=at, connection=connection, what=what, **more))

    def work(
        self, code: str, tick: float, token: int, begin: float, end: float, *, cluster: str = HERE, done: bool = True,
        pod: str = "", last: str = "end", effects: bool = True,
    ) -> int:  # fmt: skip
        self._connections += 1
        who: dict[str, Any] = {
            "key": f"{code}|{tick}", "code": code, "token": token, "attempt": 1, "pod": pod or f"pod-{token}",
            "peer": ADDRESSES[cluster],
        }  # fmt: skip
        self.say(self._connections, "start", begin, **who)
        if effects:
            self.say(self._connections, "effect", begin + 0.5, **who)
        if done:
            self.say(self._connections, "done", end - 0.2, **who)
        self.say(self._connections, last, end, **who)
        return self._connections

    def succeed(self, code: str, tick: float, after: float = 0.5) -> None:
        """The usual: claimed at the tick, worked for three seconds, recorded."""
        token = self.grant(code, tick, tick + after)
        self.work(code, tick, token, tick + after + 2, tick + after + 5)
        self.write(code, tick, tick + after + 6, "SUCCESS", token=token)

    def skip(self, code: str, first: float, last: float, count: int, reason: str, kind: str, decided: float) -> None:
        values: dict[str, Any] = {"kind": kind, "reason": reason, "decided_at": decided}
        self.ranges.append(Range(code=code, first=first, last=last, count=count, exact=True, **values))

    def evidence(self, minutes: int = 3) -> Evidence:
        lines = [replace(line, seq=n) for n, line in enumerate(sorted(self.lines, key=lambda line: line.at))]
        return Evidence(
            jobs=self.jobs, until=BASE + (minutes - 1) * 60, changes=self.changes, ranges=self.ranges, lines=lines,
            faults=self.faults, addresses=ADDRESSES, settings={},
        )  # fmt: skip

    def verdict(self, minutes: int = 3) -> Verdict:
        return judge(self.evidence(minutes))


def taken_over(story: Story, policy: str = "Forbid", *, code: str = "chaos/a", ends: float, starts: float) -> int:
    """A run whose first holder was lost at BASE + 10 (its lease ended at BASE + 50) and whose second one began to work
    at `starts`, while the first one's workload ended at `ends`; the first one's token."""
    story.job(code, policy)
    first = story.grant(code, BASE, BASE + 0.5)
    story.write(code, BASE, BASE + 10, token=first)
    story.work(code, BASE, first, BASE + 3, ends, done=False)
    second = story.grant(code, BASE, BASE + 51, THERE)
    story.work(code, BASE, second, starts, starts + 5, cluster=THERE)
    story.write(code, BASE, starts + 6, "SUCCESS", token=second)
    return first


# --- nothing is wrong ------------------------------------------------------------------------------------------------


def test_a_history_in_which_nothing_is_wrong() -> None:
    story = Story()
    for code, policy in (("chaos/a", "Forbid"), ("chaos/b", "Allow")):
        story.job(code, policy)
        for minute in range(3):
            story.succeed(code, BASE + minute * 60)
    story.job("hold/1", "", simulated=True)
    for minute in range(3):
        story.succeed("hold/1", BASE + minute * 60, after=2)
    taken_over(story, code="chaos/c", ends=BASE + 40, starts=BASE + 54)
    story.skip("chaos/c", BASE + 60, BASE + 60, 1, "Overlap", "skipped", BASE + 60.1)
    story.succeed("chaos/c", BASE + 120)
    verdict = story.verdict()
    assert verdict.violations == []
    assert verdict.excused == []
    real, simulated = verdict.real, verdict.simulated
    assert (real.jobs, real.due, real.run["SUCCESS"], real.not_run) == (3, 9, 8, {"skipped Overlap": 1})
    assert (real.attempts, real.taken_over, real.elsewhere, real.workloads, real.effects) == (9, 1, 1, 9, 9)
    assert (simulated.jobs, simulated.due, simulated.run["SUCCESS"], simulated.unaccounted) == (1, 3, 3, 0)


def test_what_is_due_follows_from_every_and_offset() -> None:
    job = Job(
        code="c", policy="Forbid", every=3, offset=(int(BASE) // 60 + 1) % 3, since=BASE, lease=LEASE, budget=BUDGET,
        simulated=False,
    )  # fmt: skip
    assert ticks_due(job, BASE + 600) == [BASE + 60, BASE + 240, BASE + 420, BASE + 600]
    assert ticks_due(replace(job, every=1, offset=0), BASE + 120) == [BASE + 60, BASE + 120], "not the one at `since`"


def test_records_are_kept_and_read_again(tmp_path: Path) -> None:
    story = Story()
    taken_over(story, ends=BASE + 60, starts=BASE + 54)
    story.faults.append(Done(number=1, kind="drain", cluster=HERE, target="node1", begin=BASE, end=BASE + 1))
    evidence = story.evidence()
    evidence.save(tmp_path / "run")
    read = Evidence.load(tmp_path / "run")
    assert read == evidence
    assert judge(read).to_dict() == judge(evidence).to_dict()


# --- ticks -----------------------------------------------------------------------------------------------------------


def lost_tick(story: Story) -> None:
    story.job("chaos/a")
    story.succeed("chaos/a", BASE)
    story.succeed("chaos/a", BASE + 120)


def lost_tick_of_a_holder(story: Story) -> None:
    story.job("hold/1", "", simulated=True)
    story.succeed("hold/1", BASE)
    story.succeed("hold/1", BASE + 60)


def counted_twice(story: Story) -> None:
    story.job("chaos/a")
    for minute in range(3):
        story.succeed("chaos/a", BASE + minute * 60)
    story.succeed("chaos/a", BASE - 60)  # before it existed
    story.job("chaos/b")
    for minute in range(3):
        story.succeed("chaos/b", BASE + minute * 60, after=70 - minute * 25)
    story.skip("chaos/b", BASE + 60, BASE + 60, 1, "Overlap", "skipped", BASE + 75)


def not_due(story: Story) -> None:
    story.job("chaos/a", every=2, offset=int(BASE) // 60 % 2)
    for minute in (0, 1, 2):
        story.succeed("chaos/a", BASE + minute * 60)


def early(story: Story) -> None:
    story.job("chaos/a")
    for minute in range(3):
        story.succeed("chaos/a", BASE + minute * 60, after=-0.2 if minute == 1 else 0.1)


def late(story: Story) -> None:
    story.job("chaos/a", deadline=30)
    for minute in range(3):
        story.succeed("chaos/a", BASE + minute * 60, after=32 if minute == 1 else 0.1)


def miscounted(story: Story) -> None:
    story.job("chaos/a", deadline=30)
    story.skip("chaos/a", BASE, BASE + 120, 4, "StartingDeadline", "missed", BASE + 200)


def skipped_beside_nothing(story: Story) -> None:
    story.job("chaos/a")
    story.succeed("chaos/a", BASE)
    story.skip("chaos/a", BASE + 60, BASE + 60, 1, "Overlap", "skipped", BASE + 60.1)
    story.succeed("chaos/a", BASE + 120)


def skipped_though_allowed(story: Story) -> None:
    story.job("chaos/a", "Allow")
    story.succeed("chaos/a", BASE, after=58)
    story.skip("chaos/a", BASE + 60, BASE + 60, 1, "Overlap", "skipped", BASE + 60.1)
    story.succeed("chaos/a", BASE + 120)


def missed_too_soon(story: Story) -> None:
    story.job("chaos/a", deadline=30)
    story.succeed("chaos/a", BASE)
    story.skip("chaos/a", BASE + 60, BASE + 60, 1, "StartingDeadline", "missed", BASE + 80)
    story.succeed("chaos/a", BASE + 120)


def missed_without_a_later_tick(story: Story) -> None:
    story.job("chaos/a")
    story.succeed("chaos/a", BASE)
    story.skip("chaos/a", BASE + 60, BASE + 60, 1, "MissedRunPolicy", "missed", BASE + 80)
    story.succeed("chaos/a", BASE + 120)


def never_ended(story: Story) -> None:
    story.job("chaos/a")
    for minute in range(2):
        story.succeed("chaos/a", BASE + minute * 60)
    story.grant("chaos/a", BASE + 120, BASE + 121)


# --- leases ----------------------------------------------------------------------------------------------------------


def taken_while_held(story: Story) -> None:
    story.job("chaos/a", "Allow")
    story.grant("chaos/a", BASE, BASE + 1)
    token = story.grant("chaos/a", BASE, BASE + 30)
    story.work("chaos/a", BASE, token, BASE + 32, BASE + 34)
    story.write("chaos/a", BASE, BASE + 35, "SUCCESS", token=token)


def two_runs_of_a_forbid_job(story: Story) -> None:
    story.job("chaos/a")
    one, other = story.grant("chaos/a", BASE, BASE + 30), story.grant("chaos/a", BASE + 60, BASE + 61)
    for tick, token in ((BASE, one), (BASE + 60, other)):
        story.work("chaos/a", tick, token, BASE + 62 + (tick > BASE) * 10, BASE + 64 + (tick > BASE) * 10)
        story.write("chaos/a", tick, BASE + 66 + (tick > BASE) * 10, "SUCCESS", token=token)


def success_that_opens_again(story: Story) -> None:
    story.job("chaos/a")
    story.succeed("chaos/a", BASE)
    token = story.grant("chaos/a", BASE, BASE + 20)
    story.work("chaos/a", BASE, token, BASE + 22, BASE + 24)
    story.write("chaos/a", BASE, BASE + 25, "SUCCESS", token=token)


# --- workloads -------------------------------------------------------------------------------------------------------


def two_workloads_of_one_run(story: Story) -> None:
    taken_over(story, "Allow", ends=BASE + 60, starts=BASE + 54)


def a_frozen_one_that_was_only_heard_of_again(story: Story) -> None:
    """The connection never ended in sight of the recorder, but was used after the other one had started."""
    first = taken_over(story, ends=BASE + 58, starts=BASE + 54)
    story.lines[:] = [
        replace(line, what="lost") if line.token == first and line.what == "end" else line for line in story.lines
    ]
    who = next(line for line in story.lines if line.token == first)
    story.lines.append(replace(who, what="term", since=BASE + 57, at=BASE + 57.5))


def workloads_of_two_runs_of_a_forbid_job(story: Story) -> None:
    """Each lease is as it should be: the first one's had ended, and its workload had not."""
    story.job("chaos/a")
    one = story.grant("chaos/a", BASE, BASE + 0.5)
    story.work("chaos/a", BASE, one, BASE + 3, BASE + 66, done=False)
    story.write("chaos/a", BASE, BASE + 50, "FAIL", token=one, reason="Replaced")
    story.succeed("chaos/a", BASE + 60)
    story.succeed("chaos/a", BASE + 120)


def a_workload_after_success(story: Story) -> None:
    story.job("chaos/a", "Allow")
    first = story.grant("chaos/a", BASE, BASE + 0.5)
    second = story.grant("chaos/a", BASE, BASE + 45, THERE)
    story.work("chaos/a", BASE, second, BASE + 47, BASE + 50, cluster=THERE)
    story.write("chaos/a", BASE, BASE + 51, "SUCCESS", token=second)
    story.work("chaos/a", BASE, first, BASE + 52, BASE + 53, done=False, effects=False)


def success_of_nothing(story: Story) -> None:
    story.job("chaos/a")
    token = story.grant("chaos/a", BASE, BASE + 1)
    story.write("chaos/a", BASE, BASE + 5, "SUCCESS", token=token)


def success_of_what_was_stopped(story: Story) -> None:
    story.job("chaos/a")
    token = story.grant("chaos/a", BASE, BASE + 1)
    story.work("chaos/a", BASE, token, BASE + 3, BASE + 6, done=False)
    story.write("chaos/a", BASE, BASE + 7, "SUCCESS", token=token)


# --- effects ---------------------------------------------------------------------------------------------------------


def an_old_token_let_in(story: Story, accepted: bool = True) -> None:
    """By a sink that had heard of the newer one: by its workload's start alone."""
    first = taken_over(story, ends=BASE + 55, starts=BASE + 54)
    who = next(line for line in story.lines if line.token == first)
    story.lines.append(replace(who, what="effect", since=BASE + 54.5, at=BASE + 54.6, accepted=accepted))


def a_token_of_nobody(story: Story) -> None:
    story.job("chaos/a")
    story.succeed("chaos/a", BASE)
    story.work("chaos/a", BASE, 99, BASE + 5.8, BASE + 6.2, done=False, effects=False)


CASES: list[tuple[Callable[[Story], None], set[Broken], int]] = [
    (lost_tick, {Broken.UNACCOUNTED}, 3),
    (lost_tick_of_a_holder, {Broken.UNACCOUNTED}, 3),
    (counted_twice, {Broken.TWICE, Broken.NOT_DUE}, 3),
    (not_due, {Broken.NOT_DUE}, 3),
    (early, {Broken.EARLY}, 3),
    (late, {Broken.LATE}, 3),
    (miscounted, {Broken.COUNT}, 3),
    (skipped_beside_nothing, {Broken.UNFOUNDED}, 3),
    (skipped_though_allowed, {Broken.UNFOUNDED}, 3),
    (missed_too_soon, {Broken.UNFOUNDED}, 3),
    (missed_without_a_later_tick, {Broken.UNFOUNDED}, 3),
    (never_ended, {Broken.OPEN}, 3),
    (taken_while_held, {Broken.LEASE}, 1),
    (two_runs_of_a_forbid_job, {Broken.LEASE}, 2),
    (success_that_opens_again, {Broken.RAN_AGAIN}, 1),
    (two_workloads_of_one_run, {Broken.OVERLAP}, 1),
    (a_frozen_one_that_was_only_heard_of_again, {Broken.OVERLAP}, 1),
    (workloads_of_two_runs_of_a_forbid_job, {Broken.OVERLAP}, 3),
    (a_workload_after_success, {Broken.RAN_AGAIN}, 1),
    (success_of_nothing, {Broken.NO_START}, 1),
    (success_of_what_was_stopped, {Broken.NOT_DONE}, 1),
    (an_old_token_let_in, {Broken.OLD_TOKEN, Broken.OVERLAP}, 1),
    (a_token_of_nobody, {Broken.UNKNOWN_TOKEN}, 1),
]


@pytest.mark.parametrize(("tell", "broken", "minutes"), CASES, ids=[tell.__name__ for tell, _, _ in CASES])
def test_a_violation_is_seen(tell: Callable[[Story], None], broken: set[Broken], minutes: int) -> None:
    story = Story()
    tell(story)
    assert story.verdict(minutes).found() == broken


def test_there_is_a_history_for_each_kind_of_violation() -> None:
    assert set().union(*(broken for _, broken, _ in CASES)) == set(Broken)


def test_a_job_that_nobody_asked_for() -> None:
    story = Story()
    story.job("chaos/a")
    story.succeed("chaos/a", BASE)
    story.succeed("chaos/b", BASE)
    assert story.verdict(1).found() == {Broken.NOT_DUE}


def test_an_effect_that_was_refused_is_none() -> None:
    story = Story()
    an_old_token_let_in(story, accepted=False)
    verdict = story.verdict(1)
    assert verdict.found() == {Broken.OVERLAP}
    assert verdict.real.refused == 1


def test_an_effect_of_which_the_sink_could_not_know_better_is_late() -> None:
    """The newer token was given, but nobody had told the sink."""
    story = Story()
    first = taken_over(story, ends=BASE + 53.5, starts=BASE + 54)
    who = next(line for line in story.lines if line.token == first)
    story.lines.append(replace(who, what="effect", since=BASE + 53.2, at=BASE + 53.3))
    verdict = story.verdict(1)
    assert verdict.violations == []
    assert verdict.real.late == 1


# --- within G2's conditions, and outside -----------------------------------------------------------------------------


def fault(kind: str, begin: float, end: float, *, cluster: str = HERE, target: str = "", note: str = "") -> Done:
    return Done(number=7, kind=kind, cluster=cluster, target=target, begin=begin, end=end, note=note)


# The lease of the one that was lost ended at BASE + 50, so its fence acts from BASE + 34.2 on.
@pytest.mark.parametrize(
    ("what", "excused"),
    [
        pytest.param(fault("kubelet-kill", BASE + 30, BASE + 70), True, id="its kubelet was dead"),
        pytest.param(fault("kubelet-freeze", BASE + 5, BASE + 30), True, id="its kubelet had just come back"),
        pytest.param(fault("node-freeze", BASE + 40, BASE + 45), True, id="its node was frozen"),
        pytest.param(fault("pod-freeze", BASE + 11, BASE + 60, target="pod-1"), True, id="its Pod was frozen"),
        pytest.param(fault("kubelet-kill", BASE + 30, BASE + 70, cluster=THERE), False, id="the other one's kubelet"),
        pytest.param(fault("kubelet-kill", BASE + 1, BASE + 15), False, id="long before"),
        pytest.param(fault("kubelet-kill", BASE + 55, BASE + 70), False, id="after both were there"),
        pytest.param(fault("pod-freeze", BASE + 11, BASE + 60, target="pod-2"), False, id="another Pod"),
        pytest.param(fault("cut-database", BASE + 11, BASE + 60), False, id="cut off"),
        pytest.param(fault("sidecar-freeze", BASE + 11, BASE + 60, target="pod-1"), False, id="its sidecar alone"),
        pytest.param(fault("workload-freeze", BASE + 11, BASE + 60, target="pod-1"), False, id="its workload alone"),
        pytest.param(fault("kubelet-kill", BASE + 30, BASE + 70, note="not done"), False, id="nothing was done"),
    ],
)
def test_an_overlap_is_excused_only_by_what_g2_names(what: Done, excused: bool) -> None:
    story = Story()
    taken_over(story, ends=BASE + 60, starts=BASE + 54)
    story.faults.append(what)
    verdict = story.verdict(1)
    assert (verdict.found(), [e.fault for e in verdict.excused]) == (
        (set(), [7]) if excused else ({Broken.OVERLAP}, [])
    )


def test_a_fault_that_was_healed_long_ago_excuses_no_overlap_that_goes_on() -> None:
    story = Story()
    story.job("chaos/a")
    first = story.grant("chaos/a", BASE, BASE + 0.5)
    story.work("chaos/a", BASE, first, BASE + 3, BASE + 200, done=False)
    second = story.grant("chaos/a", BASE, BASE + 45, THERE)
    for beat in range(60, 200, 20):
        story.write("chaos/a", BASE, BASE + beat, token=second)
    story.work("chaos/a", BASE, second, BASE + 48, BASE + 199, cluster=THERE)
    story.write("chaos/a", BASE, BASE + 201, "SUCCESS", token=second)
    story.faults.append(fault("kubelet-kill", BASE + 20, BASE + 60))
    assert story.verdict(1).found() == {Broken.OVERLAP}


def test_two_that_are_heard_of_in_one_look_are_no_overlap() -> None:
    """The recorder was late: it can't say which came first."""
    story = Story()
    taken_over(story, ends=BASE + 60, starts=BASE + 60)
    assert story.verdict(1).violations == []


def test_runs_of_an_allow_job_may_overlap_each_other() -> None:
    story = Story()
    story.job("chaos/a", "Allow")
    for minute in range(2):
        tick = BASE + minute * 60
        token = story.grant("chaos/a", tick, tick + 0.5)
        for beat in (20, 50):
            story.write("chaos/a", tick, tick + beat, token=token)
        story.work("chaos/a", tick, token, tick + 2, tick + 70)
        story.write("chaos/a", tick, tick + 71, "SUCCESS", token=token)
    assert story.verdict(2).violations == []
