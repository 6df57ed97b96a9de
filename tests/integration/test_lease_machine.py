"""Random histories of one Forbid job: several clusters and their Pods claim, adopt, beat, end, expire and crash.

After every step, whatever the order: a run has at most one valid owner, attempts and fencing tokens only grow, SUCCESS
is final, the key of a run never changes, and two runs of the job never own their lease at the same time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from psycopg.rows import dict_row

from leasedjob.identity import RunIdentity, run_key_for
from leasedjob.lease import store
from leasedjob.lease.rows import AdoptVerdict, Outcome, OverlapRule
from leasedjob.lease.statements import statement
from leasedjob.lease.store import SidecarStore

from .conftest import CODE, NAMESPACE, UID, Database, request

pytestmark = pytest.mark.integration
CLUSTERS = ("east", "west")
TABLES = "job_scheduler, shutdown_report, job_registration, job_code, tick_ledger, code_schedule"


@dataclass
class Owner:
    """Somebody who was given a token once; whether it still counts is the database's business."""

    id: UUID
    token: UUID
    attempt: int
    fencing_token: int
    pod: str | None = None
    ended: list[str] = field(default_factory=list)


class Leases(RuleBasedStateMachine):
    """The machine; `connection` and `minute` are set by the test."""

    connection: psycopg.Connection[dict[str, Any]]
    minute: datetime
    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.connection.execute(f"TRUNCATE leasedjob.{TABLES.replace(', ', ', leasedjob.')}".encode())
        self.sidecar = SidecarStore(self.connection)
        self.succeeded: set[str] = set()
        self.seen: dict[str, tuple[int, int]] = {}  # lock key -> attempt, fencing token
        job = {
            "ordinal": 0,
            "code": CODE,
            "uid": UID,
            "namespace": NAMESPACE,
            "name": "sync-orders",
            "created_at": (self.minute - timedelta(days=1)).isoformat(),
            "schedule_hash": "s",
            "spec_hash": "s",
            "policy": "Forbid",
            "suspended": False,
        }
        for cluster in CLUSTERS:
            self.ask("register_jobs", cluster=cluster, jobs=json.dumps([job]))

    def ask(self, name: str, **parameters: Any) -> list[dict[str, Any]]:
        with self.connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(statement(name), parameters).fetchall()

    def rows(self) -> list[dict[str, Any]]:
        with self.connection.cursor(row_factory=dict_row) as cursor:
            cursor.execute(
                "SELECT *, leasedjob.is_expired(modified_at, lease_ms) AS expired FROM leasedjob.job_scheduler"
            )
            return cursor.fetchall()

    # --- what may happen ---------------------------------------------------------------------------------------------

    @rule(
        target=owners,
        cluster=st.sampled_from(CLUSTERS),
        ticks=st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True).map(sorted),
        rule=st.sampled_from([OverlapRule.SKIP, OverlapRule.WAIT, OverlapRule.REPLACE]),
        manual=st.booleans(),
    )
    def claim(self, cluster: str, ticks: list[int], rule: OverlapRule, manual: bool) -> Any:
        wanted = []
        for n in ticks:
            tick = self.minute + timedelta(seconds=n)
            wanted.append(
                request(
                    tick,
                    identity=RunIdentity.of(code=CODE, run_key=run_key_for(tick)),
                    on_overlap=rule,
                    manual=manual,
                    reopen=manual,
                    backoff_limit=1,
                    interruption_limit=2,
                )
            )
        answers = self.ask("claim_runs", cluster=cluster, **store.claims_document(wanted))
        assert [answer["ordinal"] for answer in answers] == list(range(len(ticks)))
        assert not [answer for answer in answers if answer["verdict"] == "busy"]
        won = [answer for answer in answers if answer["verdict"] == "claimed"]
        assert len(won) <= 1 or rule is OverlapRule.REPLACE
        return multiple(*(Owner(a["id"], a["owner_token"], a["attempt"], a["fencing_token"]) for a in won))

    @rule(target=owners, owner=consumes(owners), again=st.booleans())
    def adopt(self, owner: Owner, again: bool) -> Any:
        new, pod = uuid4(), str(uuid4())
        answer = self.sidecar.adopt(owner.id, owner.token, new, pod_uid=pod, pod_name="pod")
        if answer.verdict is not AdoptVerdict.ADOPTED:
            return multiple()
        if again:
            repeated = self.sidecar.adopt(owner.id, owner.token, new, pod_uid=pod, pod_name="pod")
            assert repeated == answer
        assert answer.attempt == owner.attempt
        return Owner(owner.id, new, owner.attempt, owner.fencing_token, pod)

    @rule(owner=owners)
    def beat(self, owner: Owner) -> None:
        held = self.sidecar.heartbeat(owner.id, owner.token).held
        (row,) = [row for row in self.rows() if row["id"] == owner.id]
        assert held == (row["owner_token"] == owner.token and row["status"] == "RUNNING" and not row["expired"])

    @rule(owner=owners, outcome=st.sampled_from(Outcome))
    def finish(self, owner: Owner, outcome: Outcome) -> None:
        (before,) = [row for row in self.rows() if row["id"] == owner.id]
        recorded = self.sidecar.finish(owner.id, owner.token, outcome)
        mine = before["owner_token"] == owner.token
        assert recorded == (mine and (before["status"] == "RUNNING" or before["outcome"] == outcome))

    @rule(owner=owners, outcome=st.sampled_from(Outcome))
    def observed_end(self, owner: Owner, outcome: Outcome) -> None:
        (before,) = [row for row in self.rows() if row["id"] == owner.id]
        (answer,) = self.ask(
            "end_attempt",
            id=owner.id,
            attempt=owner.attempt,
            pod_uid=owner.pod,
            outcome=outcome.value,
            counts=outcome is Outcome.FAIL,
            retry_ms=-1,
            reason="Seen",
            data=None,
        )
        assert answer["changed"] == (
            before["status"] == "RUNNING" and before["attempt"] == owner.attempt and before["pod_uid"] == owner.pod
        )

    @rule(owner=owners)
    def stop(self, owner: Owner) -> None:
        (answer,) = self.ask("request_stop", ids=[owner.id], reason="Cancelled")
        (row,) = [row for row in self.rows() if row["id"] == owner.id]
        stopping = row["stop_requested_at"] is not None or (row["status"] != "RUNNING" and row["retry_at"] is None)
        assert (answer["done"] == [owner.id]) == stopping

    @rule(cluster=st.sampled_from(CLUSTERS))
    def renew(self, cluster: str) -> None:
        rows = self.rows()
        (answer,) = self.ask("renew_claims", cluster=cluster, ids=[row["id"] for row in rows])
        assert set(answer["renewed"]) == {
            row["id"]
            for row in rows
            if row["status"] == "RUNNING"
            and row["pod_uid"] is None
            and row["cluster"] == cluster
            and not row["expired"]
        }

    @rule(seconds=st.sampled_from([30, 61, 901]))
    def time_passes(self, seconds: int) -> None:
        self.connection.execute(
            "UPDATE leasedjob.job_scheduler SET modified_at = modified_at - %(s)s * interval '1 s', "
            "retry_at = retry_at - %(s)s * interval '1 s'",
            {"s": seconds},
        )

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def one_owner_at_a_time(self) -> None:
        rows = self.rows()
        assert len([row for row in rows if row["status"] == "RUNNING" and not row["expired"]]) <= 1

    @invariant()
    def attempts_and_fencing_tokens_only_grow(self) -> None:
        for row in self.rows():
            attempt, fencing_token = self.seen.get(row["lock_key"], (0, 0))
            assert row["attempt"] >= attempt
            assert row["fencing_token"] >= fencing_token
            assert (row["attempt"] == attempt) == (row["fencing_token"] == fencing_token)
            self.seen[row["lock_key"]] = (row["attempt"], row["fencing_token"])

    @invariant()
    def success_is_final(self) -> None:
        successes = {row["lock_key"] for row in self.rows() if row["status"] == "SUCCESS"}
        assert successes >= self.succeeded
        self.succeeded = successes

    @invariant()
    def a_row_is_whole(self) -> None:
        for row in self.rows():
            identity = RunIdentity.of(code=row["code"], run_key=row["run_key"])
            assert row["lock_key"] == identity.lock_key
            assert (row["finished_at"] is None) == (row["status"] == "RUNNING") == (row["outcome"] is None)
            assert row["retry_at"] is None or row["status"] == "FAIL"
            assert (row["pod_uid"] is None) == (row["adopted_at"] is None)
            assert row["failures"] + row["interruptions"] <= row["attempt"]

    @invariant()
    def no_tick_both_ran_and_was_recorded_as_not_run(self) -> None:
        with self.connection.cursor(row_factory=dict_row) as cursor:
            cursor.execute(
                "SELECT l.first FROM leasedjob.tick_ledger l JOIN leasedjob.job_scheduler s "
                "ON s.code = l.code AND s.tick BETWEEN l.first AND l.last AND NOT s.manual AND s.attempt = 1"
            )
            assert cursor.fetchall() == []


def test_random_histories(database: Database, minute: datetime) -> None:
    Leases.connection = database.connect()
    Leases.minute = minute
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Leases,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
