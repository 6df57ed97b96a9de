"""Which schedules of a code are in force, and when: what registrations make of it, and what is refused for it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from leasedjob.controller.left import left_by
from leasedjob.lease.rows import (
    BUSY_SCHEDULES_CHANGED,
    Asked,
    ClaimVerdict,
    CodeState,
    Passed,
    Registered,
    Registration,
)
from leasedjob.lease.store import OperatorStore
from leasedjob.schedule import CodeTicks, TickReason, Timetable, passed_over, written

from .conftest import CLUSTER, CODE, UID, Database, claim, registration, request

pytestmark = pytest.mark.integration
WEST = "west"
HOUR = timedelta(hours=1)
NOW = datetime.now(UTC)
# Half an hour away from now, so that no tick comes or goes until the last of these tests has run.
MINUTE = (NOW + timedelta(minutes=29)).minute
TOP = (NOW + timedelta(minutes=29)).replace(second=0, microsecond=0)
HOURLY, OFTEN = f"{MINUTE} * * * *", f"{MINUTE},{(MINUTE + 30) % 60} * * * *"
CREATED = TOP - 10 * HOUR - timedelta(minutes=1)


def job(expression: str, **changes: Any) -> Registration:
    """As an operator of this release registers it; "" is one of the release before."""
    text = written(Timetable.of([expression], code=CODE)) if expression else None
    return registration(created_at=CREATED, schedule_hash=expression or "unsaid", schedule=text, **changes)


async def state_of(store: OperatorStore, cluster: str = CLUSTER) -> CodeState:
    return (await store.code_states(cluster, [CODE]))[CODE]


async def register(store: OperatorStore, wanted: Registration, cluster: str = CLUSTER) -> Registered:
    """As an operator that has just started does it: it knows nothing but what the database says."""
    state = (await store.code_states(cluster, [CODE])).get(CODE)
    passed = left_by(state, wanted, await store.database_now() - timedelta(milliseconds=20))
    (answer,) = await store.register_jobs(cluster, [wanted], {CODE: passed} if passed else None)
    assert not answer.busy
    return answer


def ledger(database: Database) -> list[tuple[Any, ...]]:
    rows = database.rows("SELECT first, last, count, exact, kind, reason FROM leasedjob.tick_ledger ORDER BY first")
    return [tuple(row.values()) for row in rows]


def in_force(state: CodeState) -> list[str]:
    return [s.key for s in state.schedules if s.until is None]


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        pytest.param({}, {"expression": OFTEN}, ("dropped", "ScheduleEdited"), id="edited"),
        pytest.param({"suspended": True}, {}, ("skipped", "Suspended"), id="resumed"),
        pytest.param({"suspended": True}, {"expression": OFTEN}, ("skipped", "Suspended"), id="edited and resumed"),
        pytest.param({}, {"uid": "anew", "created_at": NOW}, ("dropped", "JobDeleted"), id="created anew"),
    ],
)
async def test_who_comes_next_writes_down_what_was_left(
    store: OperatorStore, database: Database, before: dict[str, Any], after: dict[str, Any], line: tuple[str, str]
) -> None:
    await register(store, job(HOURLY, **before))
    assert database.watermark() == CREATED
    expression = after.get("expression", HOURLY)
    wanted = job(expression)
    changes = {name: value for name, value in after.items() if name != "expression"}
    await register(store, registration(**{**_fields(wanted), **changes}))
    assert ledger(database) == [(TOP - 10 * HOUR, TOP - HOUR, 10, True, *line)]
    assert NOW - timedelta(minutes=1) < database.watermark() <= datetime.now(UTC)
    assert in_force(await state_of(store)) == [expression]


def _fields(wanted: Registration) -> dict[str, Any]:
    return {name: getattr(wanted, name) for name in Registration.__dataclass_fields__}


async def test_an_object_of_type_initial_has_no_ticks_and_leaves_none(store: OperatorStore, database: Database) -> None:
    initial = registration(created_at=CREATED, schedule_hash="none", schedule=written(None))
    await register(store, initial)
    assert (await state_of(store)).schedules[0].known
    await register(store, job(HOURLY))
    assert ledger(database) == []
    await register(store, initial)
    assert ledger(database) == [], "no tick has come since"


async def test_what_the_release_before_registered_is_not_known_and_not_counted(
    store: OperatorStore, database: Database
) -> None:
    await register(store, job(""))
    await register(store, job(HOURLY))
    assert ledger(database) == []
    (then,) = await store.schedules_at(CODE, TOP - 3 * HOUR)
    assert (then.key, then.known, then.since) == ("unsaid", False, CREATED)
    (now,) = await store.schedules_at(CODE, datetime.now(UTC) + HOUR)
    assert (now.key, now.known) == (HOURLY, True)


async def test_what_is_known_stays_known_when_the_release_before_registers_it(
    store: OperatorStore, database: Database
) -> None:
    await register(store, job(HOURLY))
    unsaid = registration(created_at=CREATED, schedule_hash=HOURLY, spec_hash="another")
    await store.register_jobs(CLUSTER, [unsaid])
    await register(store, job(OFTEN))
    assert [row[2] for row in ledger(database)] == [10]


async def test_where_another_cluster_is_active_an_edit_moves_nothing_and_counts_from_now(
    store: OperatorStore, database: Database
) -> None:
    await register(store, job(HOURLY))
    await register(store, job(HOURLY), WEST)
    assert len((await state_of(store)).schedules) == 1, "one schedule, whoever has it"
    await register(store, job(OFTEN))
    state = await state_of(store)
    assert (state.watermark, ledger(database)) == (CREATED, [])
    since = {s.key: (s.since, s.until) for s in state.schedules}
    assert since[HOURLY] == (CREATED, None), "west has it still"
    assert NOW - timedelta(minutes=1) < since[OFTEN][0] <= datetime.now(UTC)
    await register(store, job(OFTEN), WEST)
    state = await state_of(store)
    assert (state.watermark, in_force(state)) == (CREATED, [OFTEN])
    assert CodeTicks(state.schedules).count(CREATED, datetime.now(UTC)) == (10, True), "those that were, and are left"


async def test_in_force_is_what_isnt_suspended_or_else_everything(store: OperatorStore) -> None:
    await register(store, job(HOURLY))
    await register(store, job(OFTEN, suspended=True), WEST)
    assert in_force(await state_of(store)) == [HOURLY]
    await register(store, job(HOURLY, suspended=True))
    assert sorted(in_force(await state_of(store))) == sorted([HOURLY, OFTEN])
    await register(store, job(OFTEN), WEST)
    assert in_force(await state_of(store)) == [OFTEN]
    await store.unregister_objects(WEST, {CODE: UID})
    assert in_force(await state_of(store)) == [HOURLY]
    await store.unregister_objects(CLUSTER, {CODE: UID})
    assert in_force(await state_of(store)) == []


async def test_what_was_counted_from_other_schedules_is_refused(store: OperatorStore, database: Database) -> None:
    await register(store, job(HOURLY))
    await register(store, job(HOURLY), WEST)
    before = await state_of(store)
    await register(store, job(OFTEN), WEST)
    after = await state_of(store)
    assert after.version > before.version

    answer = await claim(store, request(TOP - HOUR, version=before.version))
    assert (answer.verdict, answer.reason) == (ClaimVerdict.BUSY, BUSY_SCHEDULES_CHANGED)
    ranges = passed_over(CodeTicks(before.schedules), CREATED, TOP - 2 * HOUR, TickReason.MissedRunPolicy)
    for record in (store.record_ticks, store.record_suspended):
        assert not (await record(CLUSTER, CODE, TOP - 2 * HOUR, ranges, version=before.version)).recorded
    edit = Passed(at=datetime.now(UTC) - timedelta(seconds=1), ranges=ranges, version=before.version)
    (busy,) = await store.register_jobs(CLUSTER, [job(OFTEN)], {CODE: edit})
    assert busy.busy
    database.connect(autocommit=True).execute("UPDATE leasedjob.job_code SET suspended_at = now()")
    asked = Asked(cluster=CLUSTER, action="Resume", by="shop/r", request="r")
    assert await store.resume_code(CODE, edit, asked) == (True, False, None)
    database.connect(autocommit=True).execute("UPDATE leasedjob.job_code SET suspended_at = NULL")
    assert (ledger(database), database.watermark()) == ([], CREATED)

    assert (await store.record_ticks(CLUSTER, CODE, TOP - 2 * HOUR, ranges, version=after.version)).recorded
    answer = await claim(store, request(TOP - HOUR, version=after.version))
    assert answer.verdict is ClaimVerdict.CLAIMED


async def test_who_can_say_what_is_left_has_to(store: OperatorStore, database: Database) -> None:
    await register(store, job(HOURLY))
    (answer,) = await store.register_jobs(CLUSTER, [job(OFTEN)])
    assert (answer.busy, database.watermark()) == (True, CREATED)
    (answer,) = await store.register_jobs(CLUSTER, [job("")])  # it can't
    assert not answer.busy


async def test_which_schedule_was_in_force_is_known_as_long_as_the_ledger_is_kept(
    store: OperatorStore, database: Database
) -> None:
    await register(store, job(HOURLY))
    await register(store, job(OFTEN))
    connection = database.connect(autocommit=True)
    connection.execute("UPDATE leasedjob.code_schedule SET since = since - interval '100 days'")
    connection.execute("UPDATE leasedjob.code_schedule SET until = until - interval '100 days' WHERE until IS NOT NULL")
    pruned = "SELECT leasedjob.prune_ledger(now() - %s, 100) AS gone"
    assert database.rows(pruned, timedelta(days=101)) == [{"gone": 0}]
    assert database.rows(pruned, timedelta(days=90)) == [{"gone": 1}]
    assert [s.key for s in (await state_of(store)).schedules] == [OFTEN]
