"""Two clusters, their operators and Pods, and what happens to them in a year. Time is a heap of what comes next.

An operator here does what engine.py and act.py do with one object: it registers what it sees, asks `decide` what to do,
and puts that to the store. Everything else is dice: when an edit reaches a cluster, which memory is stale, who crashes
between a claim and its Pod, how long work takes and how it ends.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any
from uuid import UUID

from leasedjob.api.v1alpha1 import ConcurrencyPolicy
from leasedjob.controller import act
from leasedjob.controller.decide import Claim, Launch, RecordTicks, Stop, decide
from leasedjob.controller.engine import CLOCK_MARGIN
from leasedjob.controller.left import left_by
from leasedjob.controller.model import JobView, Policy
from leasedjob.identity import JobSchedulerType, RunIdentity
from leasedjob.lease.rows import (
    BUSY_SCHEDULES_CHANGED,
    ClaimRequest,
    ClaimVerdict,
    CodeState,
    Outcome,
    Registration,
    Run,
)
from leasedjob.lease.trust import Timing
from leasedjob.schedule import ClockChangePolicy, CodeTicks, MissedRunPolicy, TickRange, Timetable, written
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
        if self.policy is ClockChangePolicy.RunOnce:
            span = self._span(after)
            return super().next(after) if span is None else span[1]
        return self._kept("following", after, super().next)

    def previous(self, before_or_at: datetime) -> datetime | None:
        if self.policy is ClockChangePolicy.RunOnce:
            span = self._span(before_or_at)
            return super().previous(before_or_at) if span is None else span[0]
        return self._kept("earlier", before_or_at, super().previous)

    def _span(self, at: datetime) -> tuple[datetime, datetime] | None:
        """The ticks around it: at or before, and after."""
        spans: list[tuple[datetime, datetime]] = self.__dict__.setdefault("spans", [])
        for span in spans:
            if span[0] <= at < span[1]:
                return span
        before, after = super().previous(at), super().next(at)
        if before is None or after is None:
            return None
        if len(spans) > 3:
            del spans[0]
        spans.append((before, after))
        return spans[-1]

    def _kept(self, name: str, at: datetime, ask: Callable[[datetime], datetime | None]) -> datetime | None:
        kept: dict[datetime, datetime | None] = self.__dict__.setdefault(name, {})
        if at not in kept:
            if len(kept) > 64:
                kept.clear()
            kept[at] = ask(at)
        return kept[at]

    def start_of(self, tick: datetime) -> datetime:
        kept = self.__dict__.setdefault("starts", {})
        if tick not in kept:
            if len(kept) > 64:
                kept.clear()
            kept[tick] = super().start_of(tick)
        return kept[tick]


@lru_cache(maxsize=256)
def hash_of(table: Table) -> str:
    return hashlib.sha256(repr(table).encode()).hexdigest()[:32]


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
    """That a cluster's operator put a spec into force, or took it back (None): what the account is held against.

    `at`: from when on its ticks count; `done`: when the operator did it.
    """

    at: datetime
    done: datetime
    cluster: str
    spec: Spec | None


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
    # What a claim, or a look without one, has said of ticks that it passed, and when.
    passed: list[tuple[datetime, TickRange]] = field(default_factory=list)


@dataclass(frozen=True)
class Birth:
    """An object that was created under a name: the how manieth, and when."""

    number: int
    at: datetime


@dataclass(slots=True)
class Memory:
    """What one operator knows of one object."""

    spec: Spec | None = None
    born: Birth | None = None
    policy: Policy | None = None
    registration: Registration | None = None
    registered: Registration | None = None
    state: CodeState | None = None
    state_stale: bool = True
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
    deletes: float = 1 / 60  # per object and day; it is created anew some time later
    alone: float = 0.1  # per edit: it comes to one cluster only, and the other keeps its schedule until the next edit
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
        self.born = dict.fromkeys(specs, Birth(1, begin))
        self.deleted: set[str] = set()
        # As each cluster's API server has them.
        self.specs: dict[str, dict[str, tuple[Birth, Spec | None]]] = {
            cluster: {code: (self.born[code], spec) for code, spec in specs.items()} for cluster in CLUSTERS
        }
        self.wanted = dict(specs)
        self.history = {code: History(begin) for code in specs}
        self.looks = 0
        for operator in self.operators:
            for code in specs:
                self._look_in(operator, code, 0.0)
            self._later(begin, self._maybe_out, operator)
        for code in specs:
            self._later(begin, self._maybe_edit, code)
            self._later(begin, self._maybe_delete, code)
            self._later(self.calm, self._resume, code)  # in the end all clusters have the same
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
            only_one = self.dice.random() < (0.3 if new.suspend and not old.suspend else self.odds.alone)
            self._write(code, new, self.dice.choice([CLUSTERS[:1], CLUSTERS[1:]]) if only_one else CLUSTERS)
        self._next_after(self.odds.edits + self.odds.suspends, self._maybe_edit, code, False)

    def _maybe_delete(self, code: str, first: bool = True) -> None:
        """The object is deleted everywhere, and created anew some time later; maybe at once."""
        if not first and not self.calm_now and code not in self.deleted:
            self.deleted.add(code)
            hours = self.dice.choice([0.0002, 0.1, 10])
            again = self.now + timedelta(hours=self.dice.expovariate(1 / hours))
            for cluster in CLUSTERS:
                self._later(self.now + self._seconds(0, 10), self._arrives, cluster, code, self.born[code], None)
            self._later(min(again, self.calm), self._create, code)
        self._next_after(self.odds.deletes, self._maybe_delete, code, False)

    def _create(self, code: str) -> None:
        self.deleted.discard(code)
        # as the API server gives it
        self.born[code] = Birth(self.born[code].number + 1, self.now.replace(microsecond=0))
        self._write(code, replace(self.wanted[code], suspend=False), CLUSTERS)

    def _resume(self, code: str) -> None:
        self._write(code, replace(self.wanted[code], suspend=False), CLUSTERS)

    def _write(self, code: str, spec: Spec, clusters: Sequence[str]) -> None:
        """A person changes the object; the change comes to the second cluster somewhat later."""
        self.wanted[code] = spec
        if code in self.deleted:
            return
        first = self.dice.choice(clusters)
        for cluster in clusters:
            wait = timedelta(0) if cluster == first else self._seconds(0, self.dice.choice([0, 5, 300]))
            self._later(self.now + wait, self._arrives, cluster, code, self.born[code], spec)

    def _arrives(self, cluster: str, code: str, born: Birth, spec: Spec | None) -> None:
        there, kept = self.specs[cluster][code]
        if born.number < there.number or (born == there and kept is None):
            return  # late news of an object that is gone
        self.specs[cluster][code] = born, spec
        for operator in self.operators:
            if operator.cluster == cluster and operator.up:
                if spec is None:
                    self._look_in(operator, code, 0.0)
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
        born, spec = self.specs[operator.cluster][code]
        if spec is None:
            self._gone(operator, code)
            return
        if memory.spec is not spec or memory.born != born:
            memory.spec, memory.born = spec, born
            memory.policy = spec.policy(code)
            memory.registration = self._registration(operator.cluster, code, born, spec)
        if memory.state_stale:
            memory.state, memory.state_stale = self.store.state(operator.cluster, code), False
        if memory.registered != memory.registration and not self._register(operator, code, memory):
            self._look_in(operator, code, 0.2)
            return
        if not memory.rows or self.dice.random() >= self.odds.stale:
            self._refresh(operator, code, memory)
        again = self._rounds(operator, code, memory)
        if operator.memory.get(code) is memory and again is not None:
            self._look_at(operator, code, again)

    def _gone(self, operator: Operator, code: str) -> None:
        """The object was deleted, and an operator sees that."""
        state = self.store.state(operator.cluster, code)
        operator.memory.pop(code, None)
        if state is not None and state.registered_uid is not None:
            self.store.unregister(operator.cluster, code)
            self.history[code].registered.append(Registered(self.now, self.now, operator.cluster, None))

    def _registration(self, cluster: str, code: str, born: Birth, spec: Spec) -> Registration:
        table = replace(spec.table, jitter_seconds=0)  # jitter moves no tick
        return Registration(
            code=code,
            uid=f"{cluster}-{code}-{born.number}",
            namespace="sim",
            name=code,
            created_at=born.at,
            schedule_hash=hash_of(table),
            spec_hash=repr(replace(spec, suspend=False)),
            policy=spec.concurrency.value,
            suspended=spec.suspend,
            schedule=written(timetable(table, code)),
        )

    def _register(self, operator: Operator, code: str, memory: Memory) -> bool:
        new = memory.registration
        assert new is not None
        passed = left_by(memory.state, new, self.now - CLOCK_MARGIN)
        before = self.store.state(operator.cluster, code)
        answer = self.store.register(operator.cluster, new, passed)
        memory.state, memory.state_stale = self.store.state(operator.cluster, code), False
        if answer.watermark is not None:
            memory.watermark = answer.watermark
        if answer.busy:
            assert memory.state is not None
            memory.watermark = memory.state.watermark
            return False
        memory.registered = new
        if before is None:
            at = min(new.created_at, self.now)
        elif before.registered_uid != new.uid and not before.active_elsewhere:
            at = max(before.watermark, min(new.created_at, self.now))
        else:
            at = self.now if passed is None else passed.at
        self.history[code].registered.append(Registered(at, self.now, operator.cluster, memory.spec))
        return True

    def _refresh(self, operator: Operator, code: str, memory: Memory) -> None:
        memory.rows = {run.id: run for run in self.store.rows(operator.cluster, code)}

    def _rounds(self, operator: Operator, code: str, memory: Memory) -> datetime | None:
        assert memory.policy is not None
        assert memory.registration is not None
        again: datetime | None = None
        for number in range(ROUNDS):
            if memory.state_stale:
                memory.state, memory.state_stale = self.store.state(operator.cluster, code), False
            assert memory.state is not None
            skew = timedelta(milliseconds=self.dice.randint(-30, 30)) if self.dice.random() < self.odds.skewed else None
            view = JobView(
                cluster=operator.cluster,
                code=code,
                policy=memory.policy,
                watermark=memory.watermark,
                initial_lock_key="",
                now=self.now if skew is None else self.now + skew,
                rows=memory.rows,
                uid=memory.registration.uid,
                schedule_hash=memory.registration.schedule_hash,
                ticks=CodeTicks.after(memory.state.watermark, memory.state.schedules),
                version=memory.state.version,
            )
            decision = decide(view)
            again = decision.wake_at
            memory.waits = bool(decision.waits)
            if not decision.actions:
                break
            soon = None
            for action in decision.actions:
                soon = self._act(operator, code, memory, action, memory.state.version)
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

    def _act(self, operator: Operator, code: str, memory: Memory, action: object, version: int) -> float | None:
        """Seconds after which to look again, if the action could not be taken now."""
        match action:
            case Claim():
                return self._claim(operator, code, memory, action, version)
            case RecordTicks():
                answer = self.store.record(
                    operator.cluster,
                    code,
                    action.through,
                    action.ranges,
                    suspended=action.suspended,
                    version=version,
                )
                memory.state_stale |= not answer.recorded
                if answer.recorded:
                    self.history[code].passed += [(self.now, r) for r in action.ranges]
                if answer.watermark is not None:
                    memory.watermark = answer.watermark
                return None if answer.recorded else 600.0 if action.suspended else 0.5
            case Launch():
                assert action.run.claim_token is not None
                self._pod(action.run.id, action.run.claim_token, action.run.attempt, code)
                self._refresh(operator, code, memory)
                return 1.0
            case Stop():  # of an object that is no more
                self.store.stop(action.run.id, action.reason)
                self._refresh(operator, code, memory)
                return None
            case _:
                raise AssertionError(f"not expected here: {action}")

    def _claim(self, operator: Operator, code: str, memory: Memory, action: Claim, version: int) -> float | None:
        policy = memory.policy
        assert policy is not None
        assert memory.registration is not None
        request = ClaimRequest(
            identity=RunIdentity(action.type, code, action.run_key),
            tick=action.tick,
            name=code,
            namespace="sim",
            job_name=code,
            job_uid=memory.registration.uid,
            tenant="",
            run_lease_ms=RUN_LEASE_MS,
            on_overlap=action.overlap,
            starting_deadline_ms=act._deadline_ms(policy, action.tick),
            backoff_limit=policy.backoff_limit,
            dropped=action.dropped,
            version=version,
        )
        (answer,) = self.store.claim(operator.cluster, [request])
        if answer.watermark == action.tick and action.previous is None:
            self.history[code].passed += [(self.now, r) for r in action.dropped]
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
                memory.state_stale |= answer.reason == BUSY_SCHEDULES_CHANGED
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
