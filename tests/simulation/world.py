"""Two clusters, their operators and Pods, and what happens to them in a year. Time is a heap of what comes next.

An operator here does what engine.py and act.py do with one object: it registers what it sees, asks `decide` what to do,
and puts that to the store. Everything else is dice: when an edit reaches a cluster, which memory is stale, who crashes
between a claim and its Pod, how long work takes and how it ends.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from leasedjob.api.v1alpha1 import ConcurrencyPolicy
from leasedjob.controller import act
from leasedjob.controller.decide import Claim, Launch, RecordTicks, Stop, decide
from leasedjob.controller.engine import Engine
from leasedjob.controller.model import JobView, Policy
from leasedjob.identity import JobSchedulerType, RunIdentity
from leasedjob.lease.rows import (
    ClaimRequest,
    ClaimVerdict,
    Outcome,
    Passed,
    Registration,
    Run,
)
from leasedjob.lease.trust import Timing
from leasedjob.schedule import ClockChangePolicy, MissedRunPolicy, Timetable
from tests.simulation.naive import Table, instant_of
from tests.simulation.store import Store

CLUSTERS = ("east", "west")
TIMING = Timing(900, 60, 60, 10)
RUN_LEASE_MS = 900_000
ROUNDS = 12


@dataclass(frozen=True)
class Spec:
    """What a person wrote."""

    table: Table
    concurrency: ConcurrencyPolicy = ConcurrencyPolicy.FORBID
    missed: MissedRunPolicy = MissedRunPolicy.RunLatest
    limit: int = 100
    deadline: int | None = None
    suspend: bool = False
    backoff_limit: int = 0

    def policy(self, code: str) -> Policy:
        return Policy(
            type=JobSchedulerType.SCHEDULE,
            timing=TIMING,
            schedule=timetable(self.table, code),
            suspend=self.suspend,
            starting_deadline=self.deadline,
            concurrency=self.concurrency,
            missed=self.missed,
            missed_limit=self.limit,
            backoff_limit=self.backoff_limit,
        )


class Remembering(Timetable):
    """A timetable that is asked the same by two operators at the same tick: what it answered is kept.

    Between two ticks the answers don't change, but for CronJob's search, which depends on where it begins.
    """

    def next(self, after: datetime) -> datetime | None:
        memory = self.__dict__
        if self.policy is ClockChangePolicy.RunOnce:
            low, high = memory.get("between", (None, None))
            if low is None or not low <= after < high:
                found = super().next(after)
                if found is None:
                    return None
                memory["between"] = after, found
            return memory["between"][1]
        kept = memory.setdefault("following", {})
        if after not in kept:
            if len(kept) > 64:
                kept.clear()
            kept[after] = super().next(after)
        return kept[after]

    def previous(self, before_or_at: datetime) -> datetime | None:
        kept = self.__dict__.setdefault("earlier", {})
        if before_or_at not in kept:
            if len(kept) > 64:
                kept.clear()
            kept[before_or_at] = super().previous(before_or_at)
        return kept[before_or_at]

    def start_of(self, tick: datetime) -> datetime:
        kept = self.__dict__.setdefault("starts", {})
        if tick not in kept:
            if len(kept) > 64:
                kept.clear()
            kept[tick] = super().start_of(tick)
        return kept[tick]


@lru_cache(maxsize=256)
def timetable(table: Table, code: str) -> Timetable:
    return Remembering.of(
        [cron.text for cron in table.crons],
        table.zone,
        policy=ClockChangePolicy.RunOnce if table.run_once else ClockChangePolicy.Kubernetes,
        code=code,
        not_before=None if table.not_before is None else instant_of(table.not_before),
        not_after=None if table.not_after is None else instant_of(table.not_after),
        jitter_seconds=table.jitter_seconds,
    )


@dataclass(frozen=True)
class Registered:
    """That a cluster's operator put a spec into force: what the account is held against."""

    at: datetime
    cluster: str
    spec: Spec


@dataclass(frozen=True)
class Started:
    """That a run was claimed for the first time."""

    at: datetime
    tick: datetime
    cluster: str


@dataclass
class History:
    """What happened to one code, for the account."""

    created: datetime
    registered: list[Registered] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    # Of these spans nobody can say what was due: an edit while no operator ran that knew the schedule before.
    unknown: list[tuple[datetime, datetime]] = field(default_factory=list)


@dataclass(slots=True)
class Memory:
    """What one operator knows of one object."""

    spec: Spec | None = None
    policy: Policy | None = None
    registration: Registration | None = None
    registered: Registration | None = None
    registered_schedule: Timetable | None = None
    watermark: datetime | None = None
    rows: dict[UUID, Run] = field(default_factory=dict)
    waits: bool = False
    look_at: datetime | None = None


@dataclass(slots=True)
class Operator:
    cluster: str
    up: bool = True
    memory: dict[str, Memory] = field(default_factory=dict)


@dataclass(frozen=True)
class Dice:
    """How likely things are. Per look, unless said otherwise."""

    stale: float = 0.2  # rows aren't read again
    crash: float = 0.0005  # right after a claim
    node_lost: float = 0.002  # per run
    fails: float = 0.05  # per run
    long: float = 0.05  # per run: longer than its schedule's interval, maybe
    skewed: float = 0.02  # the clock is some milliseconds off
    edits: float = 1 / 20  # per object and day
    suspends: float = 1 / 10  # per object and day
    asleep: float = 6.0  # days, until it is resumed
    outages: float = 1.0  # per operator and day
    dark: float = 1 / 20  # per day: the database is away


Action = Callable[..., None]


class World:
    """One simulated history.

    Args:
        specs: the objects, by code; each in every cluster.
        change: another spec for an object; called with the dice.
        settle: at the end, for so long nothing bad happens.
    """

    def __init__(
        self,
        store: Store,
        specs: dict[str, Spec],
        change: Callable[[random.Random, str, Spec], Spec],
        *,
        seed: int,
        begin: datetime,
        end: datetime,
        settle: timedelta = timedelta(days=2),
        dice: Dice | None = None,
    ) -> None:
        self.store = store
        self.dice = random.Random(seed)
        self.odds = dice or Dice()
        self.end, self.calm = end, end - settle
        self.begin = begin
        self._change = change
        self._heap: list[tuple[datetime, int, Action, tuple[Any, ...]]] = []
        self._serial = 0
        self.dark_until = begin
        self.operators = [Operator(cluster) for cluster in CLUSTERS]
        self.specs = {cluster: dict(specs) for cluster in CLUSTERS}  # as each cluster's API server has them
        self.wanted = dict(specs)
        self.history = {code: History(begin) for code in specs}
        self.looks = 0
        for operator in self.operators:
            for code in specs:
                self._look_in(operator, code, 0.0)
            self._later(begin, self._maybe_out, operator)
        for code in specs:
            self._later(begin, self._maybe_edit, code)
        self._later(begin, self._maybe_dark)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _later(self, at: datetime, action: Action, *arguments: Any) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at, self._serial, action, arguments))

    def run(self) -> None:
        while self._heap and self._heap[0][0] <= self.end:
            at, _, action, arguments = heapq.heappop(self._heap)
            self.store.now = max(self.store.now, at)
            action(*arguments)

    @property
    def now(self) -> datetime:
        return self.store.now

    @property
    def calm_now(self) -> bool:
        return self.now >= self.calm

    def _seconds(self, low: float, high: float) -> timedelta:
        return timedelta(seconds=self.dice.uniform(low, high))

    # --- what happens -------------------------------------------------------------------------------------------------

    def _next_after(self, per_day: float, action: Action, *arguments: Any) -> None:
        if per_day > 0:
            self._later(self.now + timedelta(days=self.dice.expovariate(per_day)), action, *arguments)

    def _maybe_edit(self, code: str, first: bool = True) -> None:
        if not first and not self.calm_now:
            old = self.wanted[code]
            if self.dice.random() < self.odds.suspends / (self.odds.edits + self.odds.suspends):
                new = replace(old, suspend=True)
                awake = self.now + timedelta(days=self.dice.expovariate(1 / self.odds.asleep))
                self._later(min(self.calm, awake), self._resume, code)
            else:
                new = replace(self._change(self.dice, code, old), suspend=old.suspend)
            only_one = new.suspend and not old.suspend and self.dice.random() < 0.3
            self._write(code, new, CLUSTERS[:1] if only_one else CLUSTERS)
        self._next_after(self.odds.edits + self.odds.suspends, self._maybe_edit, code, False)

    def _resume(self, code: str) -> None:
        self._write(code, replace(self.wanted[code], suspend=False), CLUSTERS)

    def _write(self, code: str, spec: Spec, clusters: Sequence[str]) -> None:
        """A person changes the object; the change comes to the second cluster somewhat later."""
        self.wanted[code] = spec
        first = self.dice.choice(clusters)
        for cluster in clusters:
            wait = timedelta(0) if cluster == first else self._seconds(0, self.dice.choice([0, 5, 300]))
            self._later(self.now + wait, self._arrives, cluster, code, spec)

    def _arrives(self, cluster: str, code: str, spec: Spec) -> None:
        self.specs[cluster][code] = spec
        for operator in self.operators:
            if operator.cluster == cluster and operator.up:
                self._look_in(operator, code, self.dice.uniform(0, 0.5))

    def _maybe_out(self, operator: Operator, first: bool = True) -> None:
        if not first and not self.calm_now:
            operator.up = False
            operator.memory.clear()
            hours = self.dice.choice([0.003, 0.05, 1, 12, 50, 150])
            back = self.now + timedelta(hours=self.dice.expovariate(1 / hours))
            self._later(min(back, self.calm), self._back, operator)
        else:
            self._next_after(self.odds.outages, self._maybe_out, operator, False)

    def _back(self, operator: Operator) -> None:
        operator.up = True
        for code in self.specs[operator.cluster]:
            self._look_in(operator, code, self.dice.uniform(0, 3))
        self._next_after(self.odds.outages, self._maybe_out, operator, False)

    def _maybe_dark(self, first: bool = True) -> None:
        if not first and not self.calm_now:
            hours = self.dice.choice([0.01, 0.5, 5, 24])
            self.dark_until = min(self.now + timedelta(hours=self.dice.expovariate(1 / hours)), self.calm)
        self._next_after(self.odds.dark, self._maybe_dark, False)

    # --- an operator --------------------------------------------------------------------------------------------------

    def _look_in(self, operator: Operator, code: str, seconds: float) -> None:
        self._look_at(operator, code, self.now + timedelta(seconds=seconds))

    def _look_at(self, operator: Operator, code: str, at: datetime) -> None:
        memory = operator.memory.setdefault(code, Memory())
        if memory.look_at is None or at < memory.look_at or memory.look_at <= self.now:
            memory.look_at = max(at, self.now)
            self._later(memory.look_at, self._look, operator, code, memory)

    def _look(self, operator: Operator, code: str, memory: Memory) -> None:
        if operator.memory.get(code) is not memory or memory.look_at is None or memory.look_at > self.now:
            return  # restarted since, or to be looked at later
        memory.look_at = None
        if self.now < self.dark_until:
            self._look_at(operator, code, self.dark_until + self._seconds(0, 30))
            return
        self.looks += 1
        spec = self.specs[operator.cluster][code]
        if memory.spec is not spec:
            memory.spec = spec
            memory.policy = spec.policy(code)
            memory.registration = self._registration(operator.cluster, code, spec)
        if memory.registered != memory.registration and not self._register(operator, code, memory):
            self._look_in(operator, code, 0.2)
            return
        if not memory.rows or self.dice.random() >= self.odds.stale:
            self._refresh(operator, code, memory)
        again = self._rounds(operator, code, memory)
        if operator.memory.get(code) is memory and again is not None:
            self._look_at(operator, code, again)

    def _registration(self, cluster: str, code: str, spec: Spec) -> Registration:
        table = replace(spec.table, jitter_seconds=0)  # jitter moves no tick
        return Registration(
            code=code,
            uid=f"{cluster}-{code}",
            namespace="sim",
            name=code,
            created_at=self.history[code].created,
            schedule_hash=repr(table),
            spec_hash=repr(replace(spec, suspend=False)),
            policy=spec.concurrency.value,
            suspended=spec.suspend,
        )

    def _register(self, operator: Operator, code: str, memory: Memory) -> bool:
        new = memory.registration
        assert new is not None
        assert memory.policy is not None
        passed = self._passed(operator.cluster, code, memory)
        answer = self.store.register(operator.cluster, new, passed)
        if answer.watermark is not None:
            memory.watermark = answer.watermark
        if answer.busy:
            memory.watermark = self.store.watermark(code)
            return False
        memory.registered, memory.registered_schedule = new, memory.policy.schedule
        assert memory.spec is not None
        self.history[code].registered.append(Registered(self.now, operator.cluster, memory.spec))
        return True

    def _passed(self, cluster: str, code: str, memory: Memory) -> Passed | None:
        """The ticks that an edit or a resume leaves behind, as the engine finds them."""
        known = self.store.registration(cluster, code)
        if known is None:
            return None
        state = SimpleNamespace(
            registered_uid=known.uid,
            registered_schedule=known.schedule_hash,
            registered_suspended=known.suspended,
            watermark=self.store.watermark(code),
            suspension=None,
        )
        entry = SimpleNamespace(
            state=state,
            policy=memory.policy,
            registered=memory.registered,
            registered_schedule=memory.registered_schedule,
        )
        engine = SimpleNamespace(clock=SimpleNamespace(now=lambda: self.now))
        passed = Engine._passed(engine, entry, memory.registration)  # type: ignore[arg-type]
        if (
            passed is None
            and memory.registration is not None
            and known.schedule_hash != memory.registration.schedule_hash
        ):
            self.history[code].unknown.append((self.store.watermark(code), self.now))
        return passed

    def _refresh(self, operator: Operator, code: str, memory: Memory) -> None:
        memory.rows = {run.id: run for run in self.store.rows(operator.cluster, code)}

    def _rounds(self, operator: Operator, code: str, memory: Memory) -> datetime | None:
        assert memory.policy is not None
        again: datetime | None = None
        for number in range(ROUNDS):
            skew = timedelta(milliseconds=self.dice.randint(-30, 30)) if self.dice.random() < self.odds.skewed else None
            view = JobView(
                cluster=operator.cluster,
                code=code,
                policy=memory.policy,
                watermark=memory.watermark,
                initial_lock_key="",
                now=self.now if skew is None else self.now + skew,
                rows=memory.rows,
                uid=f"{operator.cluster}-{code}",
            )
            decision = decide(view)
            again = decision.wake_at
            memory.waits = bool(decision.waits)
            if not decision.actions:
                break
            soon = None
            for action in decision.actions:
                soon = self._act(operator, code, memory, action)
                if soon is not None or operator.memory.get(code) is not memory:
                    break
            if operator.memory.get(code) is not memory:
                return None
            if soon is not None:
                at = self.now + timedelta(seconds=soon)
                return at if again is None else min(at, again)
            if number == 0 and self.dice.random() < 0.9 and all(isinstance(a, Claim) for a in decision.actions):
                break  # what is left is done at the next look, as after a lost event
        return again

    def _act(self, operator: Operator, code: str, memory: Memory, action: object) -> float | None:
        """Seconds after which to look again, if the action could not be taken now."""
        match action:
            case Claim():
                return self._claim(operator, code, memory, action)
            case RecordTicks():
                answer = self.store.record(
                    operator.cluster, code, action.through, action.ranges, suspended=action.suspended
                )
                if answer.watermark is not None:
                    memory.watermark = answer.watermark
                return None if answer.recorded else 600.0 if action.suspended else 0.5
            case Launch():
                assert action.run.claim_token is not None
                self._pod(action.run.id, action.run.claim_token, action.run.attempt, code)
                self._refresh(operator, code, memory)
                return 1.0
            case Stop():
                raise AssertionError(f"nobody cancels here: {action}")
            case _:
                raise AssertionError(f"not expected here: {action}")

    def _claim(self, operator: Operator, code: str, memory: Memory, action: Claim) -> float | None:
        policy = memory.policy
        assert policy is not None
        request = ClaimRequest(
            identity=RunIdentity(action.type, code, action.run_key),
            tick=action.tick,
            name=code,
            namespace="sim",
            job_name=code,
            job_uid=f"{operator.cluster}-{code}",
            tenant="",
            run_lease_ms=RUN_LEASE_MS,
            on_overlap=action.overlap,
            starting_deadline_ms=act._deadline_ms(policy, action.tick),
            backoff_limit=policy.backoff_limit,
            dropped=action.dropped,
        )
        (answer,) = self.store.claim(operator.cluster, [request])
        if answer.watermark is not None:
            memory.watermark = answer.watermark
        match answer.verdict:
            case ClaimVerdict.CLAIMED:
                assert answer.id is not None
                assert answer.owner_token is not None
                if answer.attempt == 1 and action.tick is not None:
                    self.history[code].started.append(Started(self.now, action.tick, operator.cluster))
                if not self.calm_now and self.dice.random() < self.odds.crash:
                    operator.memory.clear()  # claim committed, Pod not created
                    self._later(self.now + self._seconds(1, 120), self._restarted, operator)
                    return None
                self._pod(answer.id, answer.owner_token, answer.attempt or 1, code)
            case ClaimVerdict.FUTURE:
                assert action.tick is not None
                return max(0.001, (action.tick - answer.db_now).total_seconds())
            case ClaimVerdict.OVERLAP_WAIT:
                return 15.0  # an operator asks each 2 s
            case ClaimVerdict.BUSY:
                return 0.1
            case ClaimVerdict.UNREGISTERED | ClaimVerdict.PRUNED:
                raise AssertionError(f"not expected here: {answer}")
            case _:
                pass
        self._refresh(operator, code, memory)
        return None

    def _restarted(self, operator: Operator) -> None:
        if operator.up:
            for code in self.specs[operator.cluster]:
                self._look_in(operator, code, self.dice.uniform(0, 1))

    # --- a Pod --------------------------------------------------------------------------------------------------------

    def _pod(self, id: UUID, claim_token: UUID, attempt: int, code: str) -> None:
        token = UUID(int=self.dice.getrandbits(128))
        if not self.store.adopt(id, claim_token, token, f"{id}-{attempt}"):
            return
        if not self.calm_now and self.dice.random() < self.odds.node_lost:
            return  # its node is lost: nothing is heard of it any more
        seconds = self.dice.choice([2, 10, 40])
        if self.dice.random() < self.odds.long:
            seconds = self.dice.choice([400, 4000])
        until = self.now + timedelta(seconds=self.dice.expovariate(1 / seconds))
        self._later(min(until, self.now + timedelta(seconds=60)), self._pod_goes_on, id, token, until, code)

    def _pod_goes_on(self, id: UUID, token: UUID, until: datetime, code: str) -> None:
        if self.now < self.dark_until:
            at = self.now + timedelta(seconds=60)
            self._later(at, self._pod_goes_on, id, token, until, code)
            return
        held, stop = self.store.beat(id, token)
        if not held:
            return  # fenced
        if stop:
            self.store.finish(id, token, Outcome.RELEASE)
        elif self.now >= until:
            failed = self.dice.random() < self.odds.fails
            self.store.finish(id, token, Outcome.FAIL if failed else Outcome.COMPLETE)
        else:
            at = min(until, self.now + timedelta(seconds=30))
            self._later(at, self._pod_goes_on, id, token, until, code)
            return
        for operator in self.operators:  # its row has changed: whoever waits for that looks again
            memory = operator.memory.get(code)
            if operator.up and memory is not None and memory.waits:
                self._refresh(operator, code, memory)
                self._look_in(operator, code, self.dice.uniform(0, 2))
