"""Credentials that change while runs go on: a namespace's, by the operators themselves, and the operators' own."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from kubernetes import client
from psycopg import sql

from leasedjob.errors import DatabaseRefusedError
from leasedjob.lease.database import Credentials, connect_sync
from leasedjob.lease.store import SidecarStore
from leasedjob.lease.tenants import Slot, role_name, tenant_of
from tests.controller.control_plane import Bench, Kubelet, wait_until
from tests.controller.test_database_faults import _get, _not_ready, _ready, operator_role

SECRET = "leasedjob-sidecar"
QUICK = {"LEASEDJOB_ROTATION_CHECK_SECONDS": "1", "LEASEDJOB_ROTATION_OVERLAP_SECONDS": "4"}


def _secret(bench: Bench) -> dict[str, str]:
    data = bench.core.read_namespaced_secret(SECRET, bench.namespace).data
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def _role(bench: Bench, slot: Slot) -> str:
    return role_name(bench.database, tenant_of(bench.cluster, bench.namespace), slot)


def _files(folder: Path, values: dict[str, str]) -> Credentials:
    """As a kubelet mounts them."""
    folder.mkdir(exist_ok=True)
    for name, value in values.items():
        (folder / name).write_text(value)
    return Credentials.from_directory(folder)


def _tenant(bench: Bench) -> tuple[Any, ...]:
    """Slot, whether the former one works still, and the roles that speak for the tenant."""
    (row,) = bench.sql(
        "SELECT t.slot, t.retire_at IS NOT NULL, array_agg(r.role::text) FROM leasedjob.tenant t"
        " JOIN leasedjob.tenant_role r USING (tenant) WHERE t.tenant = %s GROUP BY t.tenant",
        tenant_of(bench.cluster, bench.namespace),
    )
    return tuple(row)


def _settled(bench: Bench, slot: Slot) -> None:
    """The Secret and the row name this slot, its role alone is in force, and the Secret's credential works."""
    wait_until(
        f"slot {slot} alone, of the Secret too",
        lambda: (
            _tenant(bench) == (slot, False, [_role(bench, slot)])
            and (seen := _secret(bench))["user"] == _role(bench, slot)
            and "next-user" not in seen
        ),
        60,
    )
    with connect_sync(_files(bench.folder / "settled", _secret(bench))) as connection:
        connection.execute("SELECT 1")


def _grow_old(bench: Bench) -> None:
    bench.sql("UPDATE leasedjob.tenant SET slot_since = slot_since - interval '31 days'")


def _running(bench: Bench, job: str) -> Kubelet:
    bench.apply(job, suspend=True)
    bench.run_now(job)
    kubelet = Kubelet(bench, bench.pod_for(job))
    kubelet.run()
    return kubelet


def _second_attempt(bench: Bench, job: str) -> Kubelet:
    """A Pod before which the operator has looked at the Secret again, for the one before could not adopt."""
    bench.apply(job, suspend=True)
    bench.run_now(job)
    Kubelet(bench, bench.pod_for(job)).refuse(message='{"adopt":"unreachable","message":"no credential"}')
    return Kubelet(bench, bench.pod_for(job, 2, seconds=60))


def test_a_rotation_in_mid_run_by_two_operators(bench: Bench) -> None:
    """A sidecar that still has the old files, one that keeps its old session, and one with the new files all hold their
    lease; afterwards the old password opens nothing."""
    operators = [bench.operator(f"op-{n}", **QUICK) for n in range(2)]
    kubelet = _running(bench, "job")
    old = _files(bench.folder / "old", _secret(bench))
    kept = connect_sync(old)
    _grow_old(bench)
    wait_until("the Secret names the other slot", lambda: _secret(bench)["user"] == _role(bench, Slot.B), 60)
    assert SidecarStore(kept).heartbeat(kubelet.lease_id, kubelet.token).held
    with connect_sync(old) as connection:
        assert SidecarStore(connection).heartbeat(kubelet.lease_id, kubelet.token).held
    assert kubelet.heartbeat(), "with the new files"

    _settled(bench, Slot.B)
    with pytest.raises(DatabaseRefusedError):
        connect_sync(old)
    with pytest.raises(psycopg.OperationalError):
        kept.execute("SELECT 1")
    assert kubelet.heartbeat()
    kubelet.end(0)
    row = bench.row_when("job", lambda r: r["status"] == "SUCCESS", "done")
    assert row["attempt"] == 1
    # And back: the slots go round.
    _grow_old(bench)
    _settled(bench, Slot.A)
    for operator in operators:
        assert operator.alive
        assert "Traceback" not in operator.log.read_text()
    done = sum(text.count("rotated the database credential") for text in (o.log.read_text() for o in operators))
    assert done == 2, "each rotation was one"


@pytest.mark.parametrize("died_after", ["stage", "role", "promote"])
def test_an_operator_died_in_a_rotation(bench: Bench, died_after: str) -> None:
    """Whoever comes next goes on from what it finds, and a credential that is in use works all the while."""
    operator = bench.operator("op-1", **QUICK)
    kubelet = _running(bench, "job")
    operator.kill()
    _grow_old(bench)
    role, staged = _role(bench, Slot.B), "staged-password"
    values: dict[str, Any] = {"next-user": role, "next-password": staged}
    if died_after in ("role", "promote"):
        bench.sql(
            f"CREATE ROLE {role} LOGIN PASSWORD '{staged}'; GRANT USAGE ON SCHEMA leasedjob TO {role};"
            f" INSERT INTO leasedjob.tenant_role SELECT '{role}', tenant FROM leasedjob.tenant;"
            f" GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA leasedjob TO {role}"
        )
    if died_after == "promote":
        values = {"user": role, "password": staged}
    bench.core.patch_namespaced_secret(SECRET, bench.namespace, {"stringData": values})
    assert kubelet.heartbeat()
    operator.start()
    _settled(bench, Slot.B)
    assert _secret(bench)["password"] == staged, "what lay ready was taken, not made anew"
    assert kubelet.heartbeat()


def test_a_deleted_secret_comes_back_and_disturbs_no_running_pod(bench: Bench) -> None:
    """Deleting it is how a person rotates at once: the next run writes it, in the slot that no Pod uses."""
    bench.operator(LEASEDJOB_ROTATION_CHECK_SECONDS="1")
    kubelet = _running(bench, "job")
    old = _files(bench.folder / "old", _secret(bench))
    bench.core.delete_namespaced_secret(SECRET, bench.namespace)
    _second_attempt(bench, "next").run()
    assert _secret(bench)["user"] == _role(bench, Slot.B)
    with connect_sync(old) as connection:
        assert SidecarStore(connection).heartbeat(kubelet.lease_id, kubelet.token).held
    assert kubelet.heartbeat()


def test_an_old_secret_from_a_backup_is_replaced(bench: Bench) -> None:
    """Its slot was disabled long ago; whoever restores it must not bring its password back."""
    bench.operator("op-1", **QUICK)
    kubelet = _running(bench, "job")
    old = _secret(bench)
    _grow_old(bench)
    _settled(bench, Slot.B)
    bench.core.patch_namespaced_secret(SECRET, bench.namespace, {"stringData": old})
    _second_attempt(bench, "next").run()
    assert kubelet.heartbeat()
    new = _secret(bench)
    assert new["user"] == old["user"]
    assert new["password"] != old["password"]
    _settled(bench, Slot.A)


def test_a_namespace_without_leasedjobs_loses_its_old_credential_and_gets_a_new_one(bench: Bench) -> None:
    bench.operator("op-1", **QUICK)
    kubelet = _running(bench, "job")
    kubelet.end(0)
    bench.row_when("job", lambda r: r["status"] == "SUCCESS", "done")
    old = _files(bench.folder / "old", _secret(bench))
    bench.delete("job")
    _grow_old(bench)

    def refused() -> bool:
        try:
            connect_sync(old).close()
        except DatabaseRefusedError:
            return True
        return False

    wait_until("its password opens nothing", refused, 60)
    assert _secret(bench)["user"] == _role(bench, Slot.A), "the Secret is left as it is"
    _running(bench, "next").end(0)
    _settled(bench, Slot.B)


def test_the_database_has_moved(bench: Bench) -> None:
    """The operator's own Secret names another address, and the namespaces' Secrets follow without a restart."""
    bench.operator()
    _running(bench, "job")
    before = _secret(bench)
    assert before["host"] == bench.postgres.address
    (bench.credentials / "host").write_text("localhost")
    _second_attempt(bench, "next").run()
    assert _secret(bench) == {**before, "host": "localhost"}


def test_a_secret_that_the_operator_may_not_write_is_told_and_holds_up_nobody(bench: Bench) -> None:
    operator = bench.operator("op-1", **QUICK)
    kubelet = _running(bench, "job")
    # As immutable nobody can change it, whatever their rights.
    bench.core.patch_namespaced_secret(SECRET, bench.namespace, {"immutable": True})
    _grow_old(bench)
    wait_until("the log says so", lambda: "can't be rotated: Invalid" in operator.log.read_text())
    assert kubelet.heartbeat()
    assert operator.ready()
    assert operator.log.read_text().count("can't be rotated") == 1, "once, not each second"
    bench.core.delete_namespaced_secret(SECRET, bench.namespace)
    _settled(bench, Slot.B)


def test_the_operators_own_password_is_rotated(bench: Bench) -> None:
    """The old one is refused and its sessions are ended before the new file arrives: the operator says so, waits, and
    goes on without a restart; a run that is under way notices nothing."""
    with operator_role(bench, "CREATEROLE") as role:
        operator = bench.operator()
        kubelet = _running(bench, "job")
        with psycopg.connect(bench.postgres.conninfo("postgres"), autocommit=True) as admin:
            admin.execute(sql.SQL("ALTER ROLE {} PASSWORD 'another'").format(sql.Identifier(role)))
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", (role,))
        _not_ready(operator, "refused the login", "rotated Secret")
        assert kubelet.heartbeat()
        kubelet.end(0)
        (bench.credentials / "password").write_text("another")
        _ready(operator)
        assert bench.row_when("job", lambda r: r["status"] == "SUCCESS", "recorded")["attempt"] == 1
        _running(bench, "next")
        assert operator.alive
        assert _get(operator, "/healthz")[0] == 200
        bench.close()


def test_a_secret_of_the_users_own_is_never_touched(bench: Bench) -> None:
    bench.core.create_namespaced_secret(
        bench.namespace,
        client.V1Secret(metadata=client.V1ObjectMeta(name=SECRET), string_data={"uri": "postgresql://mine"}),
    )
    operator = bench.operator("op-1", **QUICK)
    bench.apply("job", suspend=True)
    bench.run_now("job")
    bench.pod_for("job")
    version = bench.core.read_namespaced_secret(SECRET, bench.namespace).metadata.resource_version
    bench.sql(
        "INSERT INTO leasedjob.tenant (tenant) VALUES (%s) ON CONFLICT DO NOTHING",
        tenant_of(bench.cluster, bench.namespace),
    )
    _grow_old(bench)
    time.sleep(4)
    assert bench.core.read_namespaced_secret(SECRET, bench.namespace).metadata.resource_version == version
    assert operator.alive
