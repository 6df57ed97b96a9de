"""Whose name a cluster's is, what becomes of a former name, and that a cordoned cluster is given nothing."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from leasedjob.lease.clusters import ForgetAnswer, Greeting, Identity, Standing
from leasedjob.lease.rows import Asked, BackfillStep, ClaimVerdict, Outcome
from leasedjob.lease.store import OperatorStore, SidecarStore

from .conftest import CLUSTER, CODE, UID, Database, claim, claimed, registered, request

pytestmark = pytest.mark.integration
EAST = Identity(cluster="east", uid="uid-1", release="system/lj")
IMPOSTOR = Identity(cluster="east", uid="uid-2", release="system/lj")
WEST = Identity(cluster="west", uid="uid-1", release="system/lj")  # the same release, called otherwise


async def greet(store: OperatorStore, who: Identity, **more: Any) -> Greeting:
    return await store.greet_cluster(who, **{"version": "1", "by_values": False, "new": True, **more})


def silent(database: Database, name: str, minutes: float) -> None:
    """Nothing was heard of the cluster for so long."""
    database.rows(
        "UPDATE leasedjob.cluster SET last_seen_at = last_seen_at - %s * interval '1 minute' WHERE name = %s",
        minutes,
        name,
    )


def asked(by: str = "alice") -> Asked:
    return Asked(cluster="east", action="Cordon", by=by, request=str(uuid4()))


# --- names -----------------------------------------------------------------------------------------------------------
async def test_a_name_is_its_clusters_own_for_every_replica(store: OperatorStore) -> None:
    for _ in range(3):
        assert (await greet(store, EAST)).verdict is Standing.MINE
    (known,) = await store.known_clusters()
    assert (known.name, known.uid, known.release, known.version) == ("east", "uid-1", "system/lj", "1")


async def test_another_cluster_of_that_name_is_refused_and_changes_nothing(
    store: OperatorStore, database: Database
) -> None:
    await greet(store, EAST)
    silent(database, "east", 14)
    before = database.rows("SELECT * FROM leasedjob.cluster")
    said = await greet(store, IMPOSTOR)
    assert (said.verdict, said.other_uid, said.other_release) == (Standing.TAKEN, "uid-1", "system/lj")
    assert said.seen_ago is not None
    assert timedelta(minutes=14) <= said.seen_ago < timedelta(minutes=15)
    assert database.rows("SELECT * FROM leasedjob.cluster") == before


async def test_a_name_that_nobody_has_used_for_long_is_taken_and_its_former_owner_is_refused(
    store: OperatorStore, database: Database
) -> None:
    await greet(store, EAST)
    silent(database, "east", 15.1)
    assert (await greet(store, IMPOSTOR)).verdict is Standing.MINE
    assert (await greet(store, EAST, new=False)).verdict is Standing.TAKEN


async def test_a_name_is_taken_over_at_once_from_the_cluster_that_is_named(store: OperatorStore) -> None:
    await greet(store, EAST)
    assert (await greet(store, IMPOSTOR, take_over="uid-3")).verdict is Standing.TAKEN
    assert (await greet(store, IMPOSTOR, take_over="uid-1")).verdict is Standing.MINE
    assert (await greet(store, EAST)).verdict is Standing.TAKEN
    assert (await greet(store, IMPOSTOR, take_over="uid-1")).verdict is Standing.MINE, "the value may stay"


async def test_two_releases_of_one_cluster_need_two_names_until_one_is_gone(
    store: OperatorStore, database: Database
) -> None:
    other = Identity(cluster="east", uid="uid-1", release="team/lj")
    await greet(store, EAST)
    assert (await greet(store, other)).verdict is Standing.TAKEN
    silent(database, "east", 1.1)
    assert (await greet(store, other)).verdict is Standing.MINE, "the release was installed elsewhere in the cluster"


async def test_an_operator_that_can_tell_no_uid_is_let_in_and_forgets_none(store: OperatorStore) -> None:
    await greet(store, EAST)
    assert (await greet(store, Identity(cluster="east"))).verdict is Standing.MINE
    assert (await greet(store, IMPOSTOR)).verdict is Standing.TAKEN


# --- another name for the same release -------------------------------------------------------------------------------
async def test_a_former_name_is_drained_before_the_new_one_begins(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await greet(store, EAST)
    await registered(store)
    run, token = await claimed(store, minute), uuid4()
    assert run.id
    assert run.owner_token
    sidecar.adopt(run.id, run.owner_token, token, pod_uid="pod-1", pod_name="p")
    said = await greet(store, WEST)
    assert (said.verdict, said.other, said.live) == (Standing.WAITS, "east", 1)

    # The former one ends what runs, and begins nothing, though it was asked for before the other came.
    assert (await greet(store, EAST, new=False)).verdict is Standing.SUCCEEDED
    later = minute + timedelta(minutes=1)
    assert (await claim(store, request(later))).verdict is ClaimVerdict.CORDONED
    assert sidecar.heartbeat(run.id, token).held
    assert (await greet(store, WEST, new=False)).verdict is Standing.WAITS
    assert sidecar.finish(run.id, token, Outcome.COMPLETE)

    assert (await greet(store, WEST, new=False)).verdict is Standing.MINE
    assert await store.registrations("east") == {}
    assert await store.registrations("west") == {CODE: ("shop", UID)}
    assert [t.kind.value for t in await store.take_transitions("west", apart=timedelta(0))] == ["started", "ended"]
    assert (await greet(store, EAST, new=False)).verdict is Standing.SUCCEEDED, "an old replica that is still there"
    assert [c.name for c in await store.known_clusters()] == ["west"]


async def test_a_former_names_leases_that_ran_out_are_not_waited_for(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await greet(store, EAST)
    await registered(store)
    run = await claimed(store, minute)
    assert (await greet(store, WEST)).verdict is Standing.WAITS
    database.age(run.id, 61)
    assert (await greet(store, WEST, new=False)).verdict is Standing.MINE


async def test_a_name_may_be_taken_back(store: OperatorStore, database: Database) -> None:
    """By a rollback, whose processes are new; or by what is left when its successor is gone."""
    await greet(store, EAST)
    await greet(store, WEST)
    assert (await greet(store, EAST)).verdict is Standing.MINE
    assert (await greet(store, WEST, new=False)).verdict is Standing.SUCCEEDED
    silent(database, "east", 1.1)
    assert (await greet(store, WEST, new=False)).verdict is Standing.MINE


async def test_a_cordon_goes_along_with_a_new_name(store: OperatorStore) -> None:
    await greet(store, EAST)
    await store.cordon_cluster("east", True, reason="upgrade", asked=asked())
    said = await greet(store, WEST)
    assert (said.verdict, said.cordon_reason, said.cordoned_by) == (Standing.MINE, "upgrade", "alice")
    assert said.cordoned_at is not None


# --- cordons ---------------------------------------------------------------------------------------------------------
async def test_a_cordoned_cluster_is_given_nothing_and_ends_what_it_has(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await greet(store, EAST)
    await registered(store)
    run, token = await claimed(store, minute), uuid4()
    assert run.id
    assert run.owner_token
    sidecar.adopt(run.id, run.owner_token, token, pod_uid="pod-1", pod_name="p")
    did = await store.cordon_cluster(CLUSTER, True, reason="upgrade", asked=asked())
    assert (did.known, did.changed, did.clusters) == (True, True, ["east"])
    watermark = database.watermark()
    later = minute + timedelta(minutes=1)
    assert (await claim(store, request(later))).verdict is ClaimVerdict.CORDONED
    assert database.watermark() == watermark, "the tick is not decided"
    assert sidecar.heartbeat(run.id, token).held
    await store.begin_backfill(CLUSTER, "b", CODE, through=minute, ticks=1, planned=1)
    step, _ = await store.step_backfill(
        CLUSTER, "b", after=minute, through=later, skipped=0, limit=1, request=request(later, manual=True)
    )
    assert step is BackfillStep.BUSY
    database.age(run.id, 10_000)
    assert (await claim(store, request(minute))).verdict is ClaimVerdict.CORDONED, "nor what has expired"

    assert (await store.cordon_cluster(CLUSTER, False, reason="", asked=asked())).changed
    assert (await claim(store, request(minute))).verdict is ClaimVerdict.CLAIMED


async def test_a_cordon_stops_no_other_cluster(store: OperatorStore, minute: datetime) -> None:
    await greet(store, EAST)
    await registered(store)
    await registered(store, cluster="west")
    await store.cordon_cluster("east", True, reason="", asked=asked())
    (answer,) = await store.claim_runs("west", [request(minute)])
    assert answer.verdict is ClaimVerdict.CLAIMED


async def test_who_cordons_is_written_down_once(store: OperatorStore) -> None:
    await greet(store, EAST)
    who = asked("bob")
    assert (await store.cordon_cluster("east", True, reason="disk", asked=who)).changed
    assert not (await store.cordon_cluster("east", True, reason="disk", asked=who)).changed
    said = await greet(store, EAST, new=False)
    assert (said.cordoned_by, said.cordon_reason) == ("bob", "disk")
    (line,) = await store.audit("")
    assert (line.did, line.asked_by, line.why, line.cluster) == ("Cordoned", "bob", "disk", "east")


async def test_an_unknown_cluster_is_named_with_those_that_there_are(store: OperatorStore) -> None:
    await greet(store, EAST)
    did = await store.cordon_cluster("esat", True, reason="", asked=asked())
    assert (did.known, did.changed, did.clusters) == (False, False, ["east"])


async def test_what_is_known_of_clusters(store: OperatorStore, database: Database, minute: datetime) -> None:
    """Also of one whose operators are too old to say anything."""
    await greet(store, EAST, by_values=True)
    await registered(store)
    await registered(store, cluster="old")
    await store.claim_runs("old", [request(minute)])
    east, old = await store.known_clusters()
    assert (east.name, east.jobs, east.runs, east.cordoned, east.by_values) == ("east", 1, 0, True, True)
    assert (old.name, old.jobs, old.runs, old.cordoned, old.last_seen_at) == ("old", 1, 1, False, None)
    silent(database, "east", 3)
    (east, _) = await store.known_clusters()
    assert east.last_seen_at is not None
    assert east.db_now - east.last_seen_at > timedelta(minutes=3)


# --- a cluster that is gone for good ---------------------------------------------------------------------------------
SILENCE = timedelta(minutes=15)


async def forget(store: OperatorStore, name: str = "east") -> ForgetAnswer:
    return await store.forget_cluster(name, silence=SILENCE, reason="burnt down", asked=asked())


async def test_a_cluster_that_is_gone_counts_no_more(
    store: OperatorStore, sidecar: SidecarStore, database: Database, minute: datetime
) -> None:
    await greet(store, EAST)
    await registered(store)
    await registered(store, cluster="west")
    run, token = await claimed(store, minute), uuid4()
    assert run.id
    assert run.owner_token
    sidecar.adopt(run.id, run.owner_token, token, pod_uid="pod-1", pod_name="p")
    said = await forget(store)
    assert (said.known, said.forgotten, said.live) == (True, False, 1), "it was seen just now"
    silent(database, "east", 15.1)
    assert not (await forget(store)).forgotten, "it holds a run"
    assert await store.registrations("east") != {}
    database.age(run.id, 3600)

    said = await forget(store)
    assert (said.forgotten, said.jobs) == (True, 1)
    assert await store.registrations("east") == {}
    assert [c.name for c in await store.known_clusters()] == ["west"]
    assert (await forget(store)).known is False
    (line,) = database.rows("SELECT action, did, asked_by, why FROM leasedjob.audit WHERE cluster = 'east'")
    assert tuple(line.values()) == ("Cordon", "Forgotten", "alice", "burnt down")
    # What it held goes on elsewhere, as the run's next attempt.
    again = await claim(store, request(minute), cluster="west")
    assert (again.verdict, again.attempt) == (ClaimVerdict.CLAIMED, 2)


async def test_a_cluster_of_an_older_version_is_forgotten_too(
    store: OperatorStore, database: Database, minute: datetime
) -> None:
    await registered(store, cluster="old")
    said = await forget(store, "old")
    assert (said.forgotten, said.seen_ago, said.clusters) == (True, None, ["old"])
    assert await store.registrations("old") == {}


async def test_what_is_in_use_is_left_until_it_is_asked_again(store: OperatorStore, database: Database) -> None:
    await greet(store, EAST)
    await registered(store)
    silent(database, "east", 60)
    other = database.connect(autocommit=False)
    other.execute("SELECT FROM leasedjob.job_code FOR UPDATE")
    said = await forget(store)
    assert (said.busy, said.forgotten) == (True, False)
    other.rollback()
    assert [c.jobs for c in await store.known_clusters()] == [1]
    assert (await forget(store)).forgotten


async def test_one_that_comes_back_begins_anew(store: OperatorStore, database: Database, minute: datetime) -> None:
    await greet(store, EAST)
    await registered(store)
    silent(database, "east", 60)
    assert (await forget(store)).forgotten
    assert (await greet(store, EAST, new=False)).verdict is Standing.MINE
    assert (await claim(store, request(minute))).verdict is ClaimVerdict.UNREGISTERED
    await registered(store)
    assert [c.jobs for c in await store.known_clusters()] == [1]
