"""Real operators on a database that was restored to an earlier point, while the API server goes on from where it is."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

from leasedjob.cli import leasedjob
from leasedjob.testing.postgres import embedded_bin
from tests.controller.control_plane import Bench, Json, Kubelet, wait_until


def tool(name: str, *arguments: str) -> None:
    done = subprocess.run(
        [str(embedded_bin() / name), *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def restore(bench: Bench, dump: str) -> None:
    bench.postgres.drop_database(bench.database)
    bench.postgres.create_database(bench.database)
    tool("pg_restore", f"--dbname={bench.postgres.conninfo(bench.database)}", dump)


def shown(bench: Bench, job: str) -> Json:
    (run,) = bench.status(job).get("recentRuns") or [{}]
    return dict(run)


def test_nothing_runs_a_second_time_and_what_can_be_seen_is_recorded(bench: Bench, tmp_path: Path) -> None:
    latest = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=20)  # the next one: in 40 minutes
    before = bench.operator("before")
    for job in ("seen", "lost"):
        bench.apply(job, suspend=True)
    bench.apply("hourly", schedule=f"{latest.minute} * * * *")
    runs = {job: bench.run_now(job)["metadata"]["name"] for job in ("seen", "lost")}
    kubelets = {job: Kubelet(bench, bench.pod_for(job)) for job in runs}
    for kubelet in kubelets.values():
        kubelet.run()
    wait_until("hourly is accepted", lambda: bench.ready_condition("hourly").get("status") == "True")
    dump = str(tmp_path / "dump")
    tool("pg_dump", "--format=custom", f"--file={dump}", f"--dbname={bench.postgres.conninfo(bench.database)}")

    # What the backup doesn't know: a run that ends, one that succeeds with its second attempt, a tick.
    kubelets["seen"].end(0)
    bench.row_when("seen", lambda r: r["status"] == "SUCCESS", "has succeeded")
    bench.core.delete_namespaced_pod(kubelets["lost"].pod["metadata"]["name"], bench.namespace)
    kubelets["lost"].end(143)
    bench.row_when("lost", lambda r: r["retry_at"] is not None or r["attempt"] == 2, "was interrupted")
    bench.gone(kubelets["lost"].pod)
    second = Kubelet(bench, bench.pod_for("lost", 2))
    second.run()
    second.end(0)
    bench.row_when("lost", lambda r: r["status"] == "SUCCESS", "has succeeded")
    before.stop()
    bench.sql("UPDATE leasedjob.job_code SET watermark = %s WHERE code LIKE '%%/hourly'", latest - timedelta(minutes=1))
    before.start()
    ran = Kubelet(bench, bench.pod_for("hourly"))
    ran.run()
    ran.end(0)
    bench.row_when("hourly", lambda r: r["status"] == "SUCCESS", "has succeeded")
    for job in ("seen", "lost", "hourly"):
        wait_until(f"{job} shows it", lambda job=job: shown(bench, job).get("outcome") == "Success")  # type: ignore[misc]
    pods = {p["metadata"]["uid"] for p in bench.pods()}
    before.stop()

    restore(bench, dump)
    # As if the backup were older than the tick.
    bench.sql("UPDATE leasedjob.job_code SET watermark = %s WHERE code LIKE '%%/hourly'", latest - timedelta(minutes=1))
    assert leasedjob.run(["restored", "--database-dir", str(bench.credentials)]) == 0
    bench.sql("UPDATE leasedjob.restore SET begins_at = clock_timestamp()")
    bench.operator("after")

    # Its Pod is there and says how it ended.
    seen = bench.row_when("seen", lambda r: r["status"] == "SUCCESS", "is recorded again")
    assert seen["attempt"] == 1
    # Nobody says what became of this one: it ends when its lease has run out, and the status believes it.
    bench.sql(
        "UPDATE leasedjob.job_scheduler SET modified_at = modified_at - interval '1 day',"
        " changed_at = clock_timestamp() WHERE job_name = 'lost'"
    )
    lost = bench.row_when("lost", lambda r: r["status"] == "FAIL", "is ended", seconds=120)
    assert (lost["attempt"], lost["retry_at"], lost["reason"].partition(":")[0]) == (1, None, "Restored")
    wait_until(
        "it is shown",
        lambda: (shown(bench, "lost").get("reason"), shown(bench, "lost").get("attempt")) == ("Restored", 1),
    )
    # The tick ran, is forgotten, and doesn't run again.
    assert bench.rows("hourly") == []
    ((first, last, reason),) = bench.sql(
        "SELECT first, last, reason FROM leasedjob.tick_ledger WHERE code LIKE '%%/hourly'"
    )
    assert first <= latest <= last
    assert reason == "Restored"
    assert {p["metadata"]["uid"] for p in bench.pods()} <= pods
