"""Random histories of the library: several actors acquire, beat, end, freeze and crash, while time goes by.

After every step, in memory and on PostgreSQL alike: a run has at most one valid owner, attempts and fencing tokens only
grow, SUCCESS is final, and the key of a run never changes. A model of the rows says what each answer must be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test

from leasedjob.identity import RunIdentity
from leasedjob.lease import (
    JobAcquired,
    JobAcquireOptions,
    JobLease,
    JobSchedulerType,
    NotAcquired,
    SyncJobSchedulerService,
)
from leasedjob.lease.core import Ask
from leasedjob.testing.postgres import PostgresServer

from .conftest import _database as new_database
from .lease_backends import Backend, Memory, Postgres, closing

pytestmark = pytest.mark.integration
RUNS = (
    JobAcquireOptions(code="a", run_key="1"),
    JobAcquireOptions(code="a", run_key="2"),
    JobAcquireOptions(code="b", type=JobSchedulerType.INITIAL),
)
LEASES = (1_000_000, 2_000_000)  # ms; far longer than the test takes


@dataclass
class Known:
    """What the model knows of a run's row."""

    id: UUID
    key: str
    attempt: int
    fencing_token: int
    owner: UUID
    lease_ms: int
    status: str = "RUNNING"
    age: float = 0.0  # seconds since the last sign of life
    ended_by: str = ""

    @property
    def valid(self) -> bool:
        return self.status == "RUNNING" and self.age * 1000 <= self.lease_ms


@dataclass
class Holder:
    """Somebody who was given a lease once. A crash is that he is never heard of again; a freeze, that time goes by."""

    lease: JobLease
    run: int
    attempt: int


class Machine(RuleBasedStateMachine):
    """`backend` is set by the test."""

    backend: Backend
    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        if isinstance(self.backend, Postgres):
            self.backend.clear()
        else:
            type(self).backend = Memory()
        self.jobs = [self.backend.synchronous() for _ in range(3)]
        self.known: dict[int, Known] = {}
        self.tokens: list[int] = []
        self.keys: dict[int, str] = {}

    # --- what may happen ---------------------------------------------------------------------------------------------

    @rule(target=holders, actor=st.integers(0, 2), run=st.integers(0, 2), lease_ms=st.sampled_from(LEASES))
    def acquire(self, actor: int, run: int, lease_ms: int) -> Any:
        options = RUNS[run]
        wanted = {name: getattr(options, name) for name in ("code", "run_key", "type")} | {"lease_ms": lease_ms}
        result = self.jobs[actor].acquire(JobAcquireOptions(**wanted))
        known = self.known.get(run)
        if known is not None and (known.valid or known.status == "SUCCESS"):
            assert not result.acquired
            assert result.reason is (NotAcquired.COMPLETED if known.status == "SUCCESS" else NotAcquired.HELD)
            return multiple()
        assert isinstance(result, JobAcquired)
        assert result.attempt == (1 if known is None else known.attempt + 1)
        assert result.idempotency_key == self.keys.setdefault(run, result.idempotency_key)
        assert result.fencing_token > max(self.tokens, default=0)
        assert result.row.data is None
        assert known is None or (result.id, known.owner == result.owner_token) == (known.id, False)
        self.tokens.append(result.fencing_token)
        self.known[run] = Known(
            result.id, result.idempotency_key, result.attempt, result.fencing_token, result.owner_token, lease_ms
        )
        return Holder(result.lease, run, result.attempt)

    @rule(actor=st.integers(0, 2), holder=holders)
    def heartbeat(self, actor: int, holder: Holder) -> None:
        known = self.known[holder.run]
        held = self.jobs[actor].heartbeat(holder.lease)
        assert held == (known.valid and known.owner == holder.lease.owner_token)
        if held:
            known.age = 0.0

    @rule(actor=st.integers(0, 2), holder=holders, how=st.sampled_from(("complete", "fail", "release")))
    def end(self, actor: int, holder: Holder, how: str) -> None:
        known = self.known[holder.run]
        mine = known.owner == holder.lease.owner_token
        recorded = getattr(self.jobs[actor], how)(holder.lease, {"how": how})
        # An end after expiry is accepted as long as nobody reclaimed; said again it is the same end.
        assert recorded == (mine and (known.status == "RUNNING" or known.ended_by == how))
        if recorded and known.status == "RUNNING":
            known.status, known.ended_by = ("SUCCESS" if how == "complete" else "FAIL"), how

    @rule(holder=holders, wrong=st.booleans())
    def a_stranger_guesses(self, holder: Holder, wrong: bool) -> None:
        lease = JobLease(holder.lease.id if wrong else uuid4(), uuid4() if wrong else holder.lease.owner_token)
        assert not self.jobs[0].heartbeat(lease)
        for how in ("complete", "fail", "release"):
            assert not getattr(self.jobs[0], how)(lease)

    @rule(run=st.integers(0, 2), lease_ms=st.sampled_from(LEASES), target=holders)
    def acquire_whose_answer_is_lost(self, run: int, lease_ms: int) -> Any:
        """The same statement is sent again with the same token, as the library does, and finds its own row."""
        identity = RunIdentity.of(
            code=RUNS[run].code,
            type=JobSchedulerType.INITIAL if run == 2 else JobSchedulerType.SCHEDULE,
            run_key=None if run == 2 else RUNS[run].run_key,
        )
        ask = Ask(
            "acquire",
            {
                "lock_key": identity.lock_key,
                "type": identity.type.value,
                "code": identity.code,
                "run_key": identity.run_key,
                "name": "",
                "lease_ms": lease_ms,
                "token": uuid4(),
                "holder": "",
            },
        )
        (first,), (second,) = self.jobs[0]._ask(ask), self.jobs[1]._ask(ask)
        assert first["verdict"] == second["verdict"]
        if first["verdict"] != "acquired":
            return multiple()
        assert (first["attempt"], first["fencing_token"]) == (second["attempt"], second["fencing_token"])
        known = self.known.get(run)
        assert known is None or not (known.valid or known.status == "SUCCESS")
        assert first["attempt"] == (1 if known is None else known.attempt + 1)
        self.tokens.append(first["fencing_token"])
        self.known[run] = Known(
            first["id"],
            self.keys.setdefault(run, first["lock_key"]),
            first["attempt"],
            first["fencing_token"],
            first["owner_token"],
            lease_ms,
        )
        return Holder(JobLease(first["id"], first["owner_token"]), run, first["attempt"])

    # However they add up, they end no lease to the second: retries take a little time that the model doesn't count.
    @rule(seconds=st.sampled_from([401.0, 907.0, 1_001.0, 2_001.0]))
    def time_goes_by(self, seconds: float) -> None:
        """Everybody is silent: frozen, cut off, or dead."""
        self.backend.advance(seconds)
        for known in self.known.values():
            known.age += seconds

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def the_rows_are_what_the_model_says(self) -> None:
        for run, known in self.known.items():
            row = self.backend.row(known.id)
            assert (row["status"], row["attempt"], row["fencing_token"], row["owner_token"], row["lock_key"]) == (
                known.status,
                known.attempt,
                known.fencing_token,
                known.owner,
                self.keys[run],
            )
            assert (row["finished_at"] is None) == (known.status == "RUNNING")

    @invariant()
    def tokens_grow(self) -> None:
        assert self.tokens == sorted(set(self.tokens))


def run(backend: type[Backend] | Backend, examples: int, steps: int) -> None:
    machine = type("Histories", (Machine,), {"backend": backend})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def test_random_histories_in_memory() -> None:
    run(Memory(), examples=200, steps=50)


@pytest.fixture(params=["15", "18"])
def postgres(request: pytest.FixtureRequest) -> Iterator[Postgres]:
    names = ("server", "template") if request.param == "18" else ("server_15", "template_15")
    server: PostgresServer = request.getfixturevalue(names[0])
    for database in new_database(server, request.getfixturevalue(names[1])):
        with closing(Shared(database.dsn)) as backend:
            yield backend


class Shared(Postgres):
    """The actors take turns on one connection: a history of hundreds of statements is then a matter of seconds."""

    def synchronous(self) -> SyncJobSchedulerService:
        return SyncJobSchedulerService(lambda: nullcontext(self.connection))


@pytest.mark.soak
def test_many_random_histories_in_memory() -> None:
    run(Memory(), examples=5_000, steps=80)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_many_random_histories_on_postgresql(postgres: Postgres) -> None:
    run(postgres, examples=1_000, steps=80)


def test_random_histories_on_postgresql(postgres: Postgres) -> None:
    run(postgres, examples=60, steps=40)
