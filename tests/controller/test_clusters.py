"""Clusters on one database, as operators and the plugin see them: a name that is taken, another name, cordons."""

from __future__ import annotations

import json
import time
import urllib.request
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import CliRunner

from leasedjob.cli.kubectl import plugin
from tests.controller.control_plane import Bench, Json, Kubelet, OperatorProcess, wait_until

RELEASE = {"LEASEDJOB_RELEASE": "system/lj"}


@pytest.fixture
def own(bench: Bench) -> dict[str, str]:
    """What a release says of itself."""
    return {**RELEASE, "POD_NAMESPACE": bench.namespace}


def ask(bench: Bench, *words: str) -> tuple[int, str]:
    """The plugin's exit code and output."""
    argv = ["--kubeconfig", str(bench.plane.kubeconfig()), "-n", bench.namespace, *words]
    if words[0] != "list":
        argv += ["--operator-namespace", bench.namespace]
    done = CliRunner().invoke(plugin, argv)
    return done.exit_code, done.output


def listed(bench: Bench) -> dict[str, Json]:
    code, text = ask(bench, "clusters", "-o", "json")
    assert code == 0, text
    return {each["name"]: each for each in json.loads(text)}


def scraped(operator: OperatorProcess) -> dict[str, str]:
    """Series and values."""
    with urllib.request.urlopen(f"http://127.0.0.1:{operator.metrics}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def condition(bench: Bench, job: str) -> Json | None:
    status = bench.job(job).get("status") or {}
    return next((c for c in status.get("conditions") or [] if c["type"] == "Cordoned"), None)


def cluster(bench: Bench, name: str, **values: Any) -> None:
    """A cluster that somebody else is."""
    columns = ", ".join(values)
    bench.sql(
        f"INSERT INTO leasedjob.cluster (name, {columns}) VALUES (%s, {', '.join(['%s'] * len(values))})",
        name,
        *values.values(),
    )


def test_a_name_that_is_taken_starts_nothing_and_forgets_nothing(bench: Bench, own: dict[str, str]) -> None:
    """What the other cluster has registered under the name stays; when it is gone for long the name is free."""
    cluster(bench, bench.cluster, uid="another", release="system/lj")
    bench.sql("INSERT INTO leasedjob.job_code (code, watermark) VALUES ('shop/theirs', now())")
    bench.sql(
        "INSERT INTO leasedjob.job_registration (code, cluster, namespace, name, uid, created_at, schedule_hash,"
        " spec_hash, policy, suspended) VALUES ('shop/theirs', %s, %s, 'theirs', 'u', now(), '', '', 'Forbid', false)",
        bench.cluster, bench.namespace,
    )  # fmt: skip
    bench.apply("job", schedule="* * * * *")
    operator = bench.operator(start=False, LEASEDJOB_COMPARE_SECONDS="1", **own)
    operator.start()
    wait_until("it says so", lambda: "in use by another cluster, with UID another" in operator.probe("/readyz")[1], 60)
    assert operator.probe("/healthz")[0] == 200
    time.sleep(8)  # several comparisons
    assert [row[0] for row in bench.sql("SELECT code FROM leasedjob.job_registration")] == ["shop/theirs"]
    assert bench.pods() == []
    bench.sql("UPDATE leasedjob.cluster SET last_seen_at = now() - interval '16 minutes'")
    bench.wait_ready(operator)
    wait_until(
        "what is not here is forgotten", lambda: bench.sql("SELECT code FROM leasedjob.job_registration") != [], 30
    )


def test_a_name_is_taken_over_on_demand(bench: Bench, own: dict[str, str]) -> None:
    cluster(bench, bench.cluster, uid="another", release="system/lj")
    bench.operator(LEASEDJOB_CLUSTER_TAKEOVER="another", **own)


def test_another_name_waits_until_the_runs_of_the_former_one_have_ended(bench: Bench, own: dict[str, str]) -> None:
    """As in a rollout: the old replica goes on until the new one is ready."""
    everywhere = {**own, "LEASEDJOB_NAMESPACES": "", "LEASEDJOB_CLUSTER": "former"}
    bench.operator("op-1", **everywhere)
    bench.apply("job", suspend=True)
    bench.run_now("job")
    kubelet = Kubelet(bench, bench.pod_for("job"))
    kubelet.run()
    later = bench.operator("op-2", start=False, **{**everywhere, "LEASEDJOB_CLUSTER": "later"})
    later.start()
    words = "was called 'former', and 1 of its runs are live"
    wait_until("it waits, and says for what", lambda: words in later.probe("/readyz")[1], 60)
    kubelet.end(0)
    bench.row_when("job", lambda r: r["status"] == "SUCCESS", "the former name's operator records it")
    bench.wait_ready(later)
    bench.operators[0].kill()
    bench.whole_run("job")
    (row,) = bench.sql("SELECT DISTINCT cluster FROM leasedjob.job_registration")
    assert row == ("later",)


def test_a_cordon_from_the_plugin(bench: Bench, own: dict[str, str]) -> None:
    """Nothing begins, what runs is recorded, everything says why, replicas and restarts know it; then it begins."""
    operators = [bench.operator(f"op-{n}", **own) for n in range(2)]
    bench.apply("working", suspend=True)
    bench.run_now("working")
    kubelet = Kubelet(bench, bench.pod_for("working"))
    kubelet.run()
    assert ask(bench, "cordon", "--reason", "new disks")[1] == f"cluster/{bench.cluster} cordoned\n"
    assert ask(bench, "cordon")[1] == f"cluster/{bench.cluster} already cordoned\n"
    bench.apply("ticking", schedule="* * * * *", missedRunPolicy="RunAll")
    bench.apply("once", type="Initial")
    asked = bench.run_now("working")["metadata"]["name"]
    wait_until("all are known", lambda: len(bench.sql("SELECT code FROM leasedjob.job_registration")) == 3, 60)
    for operator in operators:
        operator.stop()
    # As if it had been cordoned for longer: ticks that nobody has decided.
    bench.sql("UPDATE leasedjob.job_code SET watermark = now() - interval '150 s' WHERE code LIKE '%%/ticking'")
    at = datetime.now(UTC)
    for operator in operators:
        operator.start()
    for operator in operators:
        bench.wait_ready(operator)
    said = wait_until("the objects say so", lambda: condition(bench, "ticking"), 60)
    assert (said["status"], said["reason"]) == ("True", "ClusterCordoned")
    assert "new disks" in said["message"]
    wait_until("a request waits", lambda: bench.run_status(asked).get("reason") == "ClusterCordoned", 60)
    each = listed(bench)[bench.cluster]
    assert (each["cordoned"], each["reason"], each["runs"], each["this"]) == (True, "new disks", 1, True)
    assert each["cordonedBy"] == "admin"
    kubelet.end(0)
    bench.row_when("working", lambda r: r["status"] == "SUCCESS", "what ran is recorded")
    time.sleep(5)
    assert bench.rows("ticking") == bench.rows("once") == []
    assert bench.sql("SELECT code FROM leasedjob.tick_ledger") == [], "nothing is decided of its ticks"
    assert "Ready,Cordoned" in ask(bench, "list")[1]
    assert ask(bench, "uncordon")[1] == f"cluster/{bench.cluster} uncordoned\n"
    wait_until(
        "the one run ever, and the request, begin",
        lambda: bench.rows("once") and bench.run_status(asked).get("attempt"),
        60,
    )
    wait_until("a tick", lambda: bench.rows("ticking"), 60)
    assert bench.rows("ticking")[0]["tick"] < at, "one that came while it was cordoned"
    wait_until("and nothing says so any more", lambda: condition(bench, "ticking") is None, 60)


def test_a_cordon_by_values_outlives_the_plugins(bench: Bench, own: dict[str, str]) -> None:
    operator = bench.operator(LEASEDJOB_CORDONED="true", **own)
    bench.apply("job", schedule="* * * * *")
    said = wait_until("the object says so", lambda: condition(bench, "job"), 60)
    assert "the chart's value `cordoned`" in said["message"]
    code, text = ask(bench, "uncordon")
    assert code == 12
    assert "only its release's values can end" in text
    assert listed(bench)[bench.cluster]["cordonedBy"] == "values"
    assert bench.rows("job") == []
    assert scraped(operator)["leasedjob_cluster_cordoned"] == "1.0"
    assert scraped(operator)[f'leasedjob_cluster_info{{cluster="{bench.cluster}"}}'] == "1.0"


def test_what_is_asked_wrongly(bench: Bench, own: dict[str, str]) -> None:
    bench.operator(**own)
    code, text = ask(bench, "cordon", "nowhere")
    assert code == 3
    assert f"no cluster 'nowhere' has worked on this database; there are: {bench.cluster}" in text
    bench.core.create_namespaced_config_map(
        bench.namespace,
        {
            "metadata": {"name": "odd", "labels": {"leasedjob.io/request": "clusters"}},
            "data": {"action": "Explode"},
        },
    )

    def answer() -> str:
        return (bench.core.read_namespaced_config_map("odd", bench.namespace).data or {}).get("answer", "")

    assert "action: must be one of" in wait_until("it is answered", answer, 30)
    cluster(bench, "lost", uid="x", last_seen_at=datetime.now(UTC) - timedelta(hours=2))
    code, text = ask(bench, "clusters")
    assert code == 0
    assert "Lost" in next(line for line in text.splitlines() if line.startswith("lost"))
    assert ask(bench, "cordon", "lost")[1] == "cluster/lost cordoned\n", "a cluster that can't be reached"

    assert ask(bench, "forget-cluster", "nowhere", "--yes")[0] == 3
    code, text = ask(bench, "forget-cluster", bench.cluster, "--yes")
    assert code == 12
    assert "the one that is asked" in text
    cluster(bench, "alive", uid="y", last_seen_at=datetime.now(UTC) - timedelta(minutes=5))
    code, text = ask(bench, "forget-cluster", "alive", "--yes")
    assert code == 12
    assert "cordoned instead" in text
    code, text = ask(bench, "forget-cluster", "lost", "--yes", "--reason", "burnt down")
    assert code == 0
    assert text.endswith("cluster/lost forgotten, with its 0 LeasedJobs\n")
    assert "lost" not in listed(bench)
