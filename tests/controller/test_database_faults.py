"""The database away, slow, full, locked, read-only or without a right: nothing is lost, and all is told."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from tests.controller.control_plane import Bench, Kubelet, OperatorProcess, wait_until
from tests.controller.proxy import TcpProxy


@pytest.fixture
def proxy(bench: Bench) -> Iterator[TcpProxy]:
    """Between the operators and the database; sidecars have their own way."""
    with TcpProxy(bench.postgres.address, bench.postgres.port) as proxy:
        (bench.credentials / "host").write_text("127.0.0.1")
        (bench.credentials / "port").write_text(str(proxy.port))
        yield proxy
        bench.close()


def _operator(bench: Bench, name: str = "op-1", *, start: bool = True) -> OperatorProcess:
    return bench.operator(
        name,
        start=start,
        LEASEDJOB_SIDECAR_DATABASE_HOST=bench.postgres.address,
        LEASEDJOB_SIDECAR_DATABASE_PORT=str(bench.postgres.port),
    )


def _get(operator: OperatorProcess, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.health}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read().decode()
    except OSError:
        return 0, ""


def _not_ready(operator: OperatorProcess, *words: str) -> None:
    """Not ready, and the reason has these words; but alive, for a restart would not help."""

    def told() -> bool:
        status, text = _get(operator, "/readyz")
        return status == 503 and all(w in text for w in words)

    wait_until(f"not ready: {words}", told, 40)
    assert _get(operator, "/healthz")[0] == 200


def _ready(operator: OperatorProcess) -> None:
    wait_until("ready again", operator.ready, 40)


def _runs(bench: Bench, job: str, seconds: float = 30) -> None:
    """A whole run, from a request to SUCCESS."""
    run = bench.run_now(job)["metadata"]["name"]
    row = bench.row_when(job, lambda r: run in str(r["run_key"]), "claimed", seconds=seconds)
    pod = wait_until(
        "its Pod",
        lambda: next((p for p in bench.pods() if str(row["id"]) in p["metadata"]["annotations"].values()), None),
    )
    kubelet = Kubelet(bench, pod)
    kubelet.run()
    kubelet.end(0)
    wait_until("succeeded", lambda: bench.run(run).get("status", {}).get("phase") == "Succeeded")


def test_down_when_the_operator_starts(bench: Bench, proxy: TcpProxy) -> None:
    proxy.down()
    operator = _operator(bench, start=False)
    operator.start()
    bench.apply("setup", type="Initial")
    _not_ready(operator, "connection to the database failed")
    proxy.up()
    _ready(operator)
    kubelet = Kubelet(bench, bench.pod_for("setup"))
    kubelet.run()
    kubelet.end(0)
    bench.row_when("setup", lambda r: r["status"] == "SUCCESS", "done")


def test_away_in_mid_run(bench: Bench, proxy: TcpProxy) -> None:
    """One run goes on, one ends while the operator can't record it, one is asked for meanwhile."""
    operator = _operator(bench)
    kubelets = {}
    for job in ("goes-on", "ends"):
        bench.apply(job, suspend=True)
        bench.run_now(job)
        kubelets[job] = Kubelet(bench, bench.pod_for(job))
        kubelets[job].run()
    bench.apply("later", suspend=True)
    wait_until("known", lambda: bench.ready_condition("later").get("status") == "True")
    proxy.hang()
    kubelets["ends"].end(0)
    bench.run_now("later")
    since = time.monotonic()
    _not_ready(operator)
    assert kubelets["goes-on"].heartbeat()
    time.sleep(max(0.0, 20 - (time.monotonic() - since)))
    proxy.up()
    _ready(operator)
    row = bench.row_when("ends", lambda r: r["status"] != "RUNNING", "recorded afterwards")
    assert (row["status"], row["attempt"]) == ("SUCCESS", 1)
    bench.pod_for("later")
    kubelets["goes-on"].end(0)
    assert bench.row_when("goes-on", lambda r: r["status"] != "RUNNING", "recorded")["attempt"] == 1
    assert operator.alive


def test_away_at_the_tick(bench: Bench, proxy: TcpProxy) -> None:
    """A tick comes while the database is away: it starts when the database is back, and is in nobody's ledger."""
    operator = _operator(bench)
    at = datetime.now(UTC) + timedelta(seconds=62)
    tick = at.replace(second=0, microsecond=0)
    for n in range(3):
        bench.apply(f"job-{n}", schedule=f"{tick.minute} {tick.hour} * * *", missedRunPolicy="Skip")
        wait_until("known", lambda n=n: bench.ready_condition(f"job-{n}").get("status") == "True")
    wait_until("just before the tick", lambda: datetime.now(UTC) > tick - timedelta(seconds=3), 70, 0.2)
    proxy.down()
    wait_until("after the tick", lambda: datetime.now(UTC) > tick + timedelta(seconds=12), 30, 0.2)
    _not_ready(operator)
    proxy.up()
    for n in range(3):
        row = bench.row_when(f"job-{n}", lambda r: True, "claimed", seconds=40)
        assert (row["tick"], row["attempt"]) == (tick, 1)
        assert row["started_at"] - tick < timedelta(seconds=60), "on time, or Skip would have left it out"
    assert bench.sql("SELECT count(*) FROM leasedjob.tick_ledger") == [(0,)]


def test_read_only_and_back(bench: Bench) -> None:
    """As during a failover: what was the primary answers, and refuses to write."""
    operator = bench.operator()
    bench.apply("job", suspend=True)
    wait_until("known", lambda: bench.ready_condition("job").get("status") == "True")
    database = psycopg.sql.Identifier(bench.database)

    def everywhere(value: str) -> None:
        with psycopg.connect(bench.postgres.conninfo("postgres"), autocommit=True) as c:
            c.execute(
                psycopg.sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = {}").format(
                    database, psycopg.sql.SQL(value)
                )
            )
            c.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (bench.database,))

    everywhere("on")
    run = bench.run_now("job")["metadata"]["name"]
    wait_until("the log says why", lambda: "read-only" in operator.log.read_text())
    assert bench.rows("job") == []
    everywhere("off")
    kubelet = Kubelet(bench, bench.pod_for("job", seconds=45))
    kubelet.run()
    kubelet.end(0)
    wait_until("succeeded", lambda: bench.run_status(run).get("phase") == "Succeeded")


@contextlib.contextmanager
def operator_role(bench: Bench, options: str) -> Iterator[str]:
    """A login role with the rights of the schema's owner, but no superuser; the operators use it from now on."""
    role = f"op_{bench.database}"
    with psycopg.connect(bench.postgres.conninfo("postgres"), autocommit=True) as c:
        c.execute(f"CREATE ROLE {role} LOGIN {options} PASSWORD 'secret' IN ROLE postgres")  # type: ignore[arg-type]
        (bench.credentials / "user").write_text(role)
        (bench.credentials / "password").write_text("secret")
        try:
            yield role
        finally:
            bench.close()
            (bench.credentials / "user").write_text("postgres")
            c.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", (role,))
            # It may own grants of tenants' roles; what can't be dropped goes away with the server.
            with contextlib.suppress(psycopg.Error):
                c.execute(f"DROP ROLE {role}")  # type: ignore[arg-type]


def test_no_free_connection(bench: Bench) -> None:
    with operator_role(bench, "CREATEROLE CONNECTION LIMIT 6") as role:
        conninfo = psycopg.conninfo.make_conninfo(
            bench.postgres.conninfo(bench.database), user=role, password="secret", application_name="hog"
        )
        operator = bench.operator(LEASEDJOB_DATABASE_CONNECTIONS="3")
        bench.apply("job", suspend=True)
        _runs(bench, "job")
        with psycopg.connect(bench.postgres.conninfo(bench.database), autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s"
                " AND application_name <> 'hog'", (role,),
            )  # fmt: skip
            hogs = []
            for _ in range(200):  # the operator's own reconnections compete
                if len(hogs) == 6:
                    break
                try:
                    hogs.append(psycopg.connect(conninfo))
                except psycopg.OperationalError:
                    admin.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s"
                        " AND application_name <> 'hog'", (role,),
                    )  # fmt: skip
            assert len(hogs) == 6
        _not_ready(operator, "no free connection")
        run = bench.run_now("job")["metadata"]["name"]
        for hog in hogs:
            hog.close()
        _ready(operator)
        wait_until("claimed afterwards", lambda: any(run in str(r["run_key"]) for r in bench.rows("job")))


def test_without_createrole_the_reason_is_in_the_status(bench: Bench) -> None:
    with operator_role(bench, "NOCREATEROLE"):
        operator = bench.operator()
        bench.apply("job", suspend=True)
        run = bench.run_now("job")["metadata"]["name"]
        row = bench.row_when("job", lambda r: r["status"] == "FAIL", "released")
        assert row["reason"].startswith("PodNotCreated: SidecarCredential")
        assert row["failures"] == 0
        wait_until(
            "the run shows it", lambda: "SidecarCredential" in bench.run(run).get("status", {}).get("message", "")
        )
        assert operator.ready()


@pytest.mark.parametrize("table", ["job_scheduler", "job_code"])
def test_a_strangers_row_lock_holds_up_one_object_only(bench: Bench, table: str) -> None:
    operator = bench.operator()
    for job in ("locked", "free"):
        bench.apply(job, suspend=True)
    bench.run_now("locked")
    kubelet = Kubelet(bench, bench.pod_for("locked"))
    kubelet.run()
    code = f"{bench.namespace}/locked"
    with psycopg.connect(bench.postgres.conninfo(bench.database)) as stranger:
        stranger.execute(f"SELECT FROM leasedjob.{table} WHERE code = %s FOR UPDATE", (code,))  # type: ignore[arg-type]
        kubelet.end(1)
        _runs(bench, "free")
        bench.run_now("locked")
        if table == "job_scheduler":
            assert bench.rows("locked")[0]["status"] == "RUNNING", "nothing waits for the lock, nothing is lost"
        _runs(bench, "free")
        stranger.rollback()
    wait_until("the failure is recorded", lambda: bench.rows("locked")[0]["failures"] == 1)
    wait_until("the second run starts", lambda: len(bench.rows("locked")) == 2, 60)
    assert operator.ready()


def test_a_slow_database(bench: Bench, proxy: TcpProxy) -> None:
    """Every statement waits, again and again; runs go through all the same."""
    _operator(bench)
    bench.apply("job", suspend=True)
    done = threading.Event()

    def stutter() -> None:
        while not done.wait(1.0):
            proxy.pause()
            time.sleep(1.0)
            proxy.resume()

    thread = threading.Thread(target=stutter)
    thread.start()
    try:
        _runs(bench, "job")
    finally:
        done.set()
        thread.join()
