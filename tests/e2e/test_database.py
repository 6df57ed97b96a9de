"""A database that restarts, goes away, rotates passwords and speaks TLS through a pooler, seen by real Pods; and Pods
that can't reach it."""

from __future__ import annotations

import base64
import contextlib
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from leasedjob import protocol
from tests.cluster import onenode
from tests.cluster.faults import Faults
from tests.cluster.layout import Cache
from tests.cluster.network import Part
from tests.cluster.progress import ClusterError
from tests.cluster.source import Cluster
from tests.e2e.conftest import Measured, Release
from tests.e2e.jobs import NEVER, leased_job, run_of
from tests.e2e.kube import Helm, Json, Kubectl
from tests.e2e.private import DBNAME, OWNER, SECRET, OwnDatabase, images_of, own_database, own_release
from tests.e2e.test_path import _running, phase, result

PODS = Part("Pods", (onenode.POD_CIDR,))
SIDECAR_SECRET = "leasedjob-sidecar"
QUICK = {"shutdown": {"preStopSeconds": 0, "terminationGracePeriodSeconds": 6}}
# Outlives a minute without a database: 204 of 240 s are trusted.
PATIENT: Json = {**QUICK, "lease": {"durationSeconds": 240, "heartbeatSeconds": 10}}
HELLO = "print('hello')"
UNTIL_TOLD = """
    import os, time
    while not os.path.exists("/tmp/finish"):
        time.sleep(0.2)
"""


@pytest.fixture
def own(cluster: Cluster, cache: Cache) -> Iterator[OwnDatabase]:
    if cluster.node is None:
        pytest.skip("a PostgreSQL of a test's own is reached only from the one-node cluster")
    with contextlib.ExitStack() as stack:
        try:
            database = stack.enter_context(own_database(cluster, cache))
        except ClusterError as error:  # no PgBouncer
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(str(error))
        yield database


@pytest.fixture
def images(helm: Helm, release: Release) -> dict[str, Any]:
    return images_of(helm, release.name, release.namespace)


def _row(own: OwnDatabase, job: str) -> dict[str, Any]:
    """The job's newest lease."""
    return own.sql("SELECT * FROM leasedjob.job_scheduler WHERE job_name = %s ORDER BY created_at DESC LIMIT 1", job)[0]


def _beaten(own: OwnDatabase, kubectl: Kubectl, job: str, since: datetime, held: dict[str, Any]) -> None:
    """A heartbeat after `since`, of the same attempt and owner."""
    kubectl.wait("a heartbeat", lambda: _row(own, job)["modified_at"] > since, timeout=90)
    now = _row(own, job)
    assert [now[k] for k in ("attempt", "owner_token", "fencing_token", "status")] == [
        held[k] for k in ("attempt", "owner_token", "fencing_token", "status")
    ]


def _restarts(kubectl: Kubectl, pod: str) -> int:
    status = kubectl.json("get", "pod", pod)["status"]
    return sum(int(s["restartCount"]) for s in (*status["initContainerStatuses"], *status["containerStatuses"]))


def _credential(kubectl: Kubectl) -> dict[str, str]:
    data = kubectl.json("get", "secret", SIDECAR_SECRET)["data"]
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def test_a_run_through_all_that_its_database_does(
    cluster_kubectl: Kubectl, helm: Helm, images: dict[str, Any], own: OwnDatabase, measured: Measured
) -> None:
    """Behind PgBouncer in transaction mode, over TLS with a verified name: the database restarts, the namespace's
    credential and the operator's password are rotated, and the database is away for a minute and a tick. One run goes
    on through all of it, no container restarts, and no tick is lost."""
    poolers = own.pooler("operator"), own.pooler("sidecars")
    with own_release(cluster_kubectl, helm, own, *poolers, images) as release:
        (kubectl,) = release.namespaces
        kubectl.apply(leased_job("ticking", HELLO, missedRunPolicy="RunAll", **QUICK))
        kubectl.apply(leased_job("slow", UNTIL_TOLD, schedule=NEVER, **PATIENT), run_of("slow", "now"))
        pod = str(kubectl.wait("the workload runs", lambda: _running(kubectl, "slow"), timeout=90)["metadata"]["name"])
        held = _row(own, "slow")
        first = _credential(kubectl)
        assert (first["sslmode"], first["port"], "ca.crt" in first) == ("verify-full", str(poolers[1].port), True)

        # 1. A restart, 10 s in all.
        own.server.stop()
        time.sleep(10)
        own.server.start()
        _beaten(own, kubectl, "slow", datetime.now(UTC), held)

        # 2. The namespace's credential is old enough. Its Pod sees the new one as soon as its kubelet looks; then the
        # former one's time is over.
        own.sql("UPDATE leasedjob.tenant SET slot_since = slot_since - interval '31 days'")
        kubectl.wait("the Secret is another one", lambda: _credential(kubectl)["user"] != first["user"], timeout=60)
        second = _credential(kubectl)
        began = time.monotonic()
        show = ("exec", pod, "-c", protocol.CONTAINER_HOLD, "--", "cat", f"{protocol.MOUNT_DATABASE}/user")

        def mounted() -> bool:
            release.touch(kubectl, pod)
            return kubectl.run(*show).stdout.strip() == second["user"]

        kubectl.wait("the Pod has it", mounted, timeout=150, every=2)
        measured(f"a rotated Secret was in its running Pod after {time.monotonic() - began:.1f} s")

        def alone() -> bool:
            own.sql("UPDATE leasedjob.tenant SET retire_at = clock_timestamp() WHERE retire_at > clock_timestamp()")
            return own.sql("SELECT role::text FROM leasedjob.tenant_role") == [{"role": second["user"]}]

        kubectl.wait("the former slot is disabled", alone, timeout=60, every=1)
        for port in (poolers[1].port, own.server.port):
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(host=own.host, port=port, dbname=DBNAME, user=first["user"], password=first["password"])
        _beaten(own, kubectl, "slow", datetime.now(UTC), held)

        # 3. The operator's own password: the old one is refused at once, the new one arrives later.
        own.sql(f"ALTER ROLE {OWNER} PASSWORD 'another'")
        own.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", OWNER)
        poolers[0].stop()
        poolers[0].start()
        kubectl.wait("it isn't ready", lambda: "refused the login" in release.readyz(), timeout=60)
        release.system.apply(own.secret(SECRET, poolers[0].port, OWNER, "another"))
        kubectl.wait("it is ready again", release.ready, timeout=150, every=2)

        # 4. Away for longer than a minute, so a tick is within it.
        kubectl.wait("a tick has run", lambda: result(kubectl, "ticking") == "Success", timeout=120)
        away = datetime.now(UTC)
        own.server.stop()
        kubectl.wait("it says so", lambda: "the database" in release.readyz(), timeout=60)
        time.sleep(max(0.0, 62 - (datetime.now(UTC) - away).total_seconds()))
        own.server.start()
        back = datetime.now(UTC)
        missed = away.replace(second=0, microsecond=0) + timedelta(minutes=1)
        done = "SELECT status FROM leasedjob.job_scheduler WHERE job_name = 'ticking' AND tick = %s"
        kubectl.wait(
            "the tick that fell into it has run", lambda: own.sql(done, missed) == [{"status": "SUCCESS"}], timeout=90
        )
        assert missed < back
        _beaten(own, kubectl, "slow", back, held)
        assert own.sql("SELECT * FROM leasedjob.tick_ledger") == []

        kubectl("exec", pod, "-c", "main", "--", "touch", "/tmp/finish")
        kubectl.wait("it succeeds", lambda: phase(kubectl, "now") == "Succeeded", timeout=60)
        (row,) = own.sql("SELECT status, attempt FROM leasedjob.job_scheduler WHERE job_name = 'slow'")
        assert row == {"status": "SUCCESS", "attempt": 1}
        assert _restarts(kubectl, pod) == 0
        assert release.restarts() == 0


def _says(kubectl: Kubectl, *words: str) -> str:
    """What status and Events say of the namespace's one LeasedJob, once it has these words."""

    def told() -> str:
        text = str(kubectl.json("get", "lj", "job").get("status")) + kubectl("get", "events")
        return text if all(word in text for word in words) else ""

    return str(kubectl.wait(f"{words} in status or Events", told, timeout=150))


def test_pods_and_operator_that_cannot_reach_it_say_why(
    cluster_kubectl: Kubectl, helm: Helm, images: dict[str, Any], own: OwnDatabase, node_faults: Faults
) -> None:
    """A wrong authority, another host's certificate, an expired one, egress that is denied: each is named where a user
    looks. Egress that comes 15 s late only makes the run late."""
    operator, sidecars = own.pooler("operator"), own.pooler("sidecars")
    stranger = own.pooler("stranger", "DNS:db.example")
    expired = own.pooler("expired", days=-1)
    dropped = own.pooler("dropped")

    def cut(port: int) -> str:
        return node_faults.cut(PODS, Part(f"port {port}", ports=(port,)))

    cuts = {cut(dropped.port)}
    try:
        with own_release(cluster_kubectl, helm, own, operator, sidecars, images, namespaces=5) as release:
            late, wrong_authority, wrong_host, too_old, denied = release.namespaces
            cases = {
                wrong_authority: (operator.port, "stranger", "TLS: the server's certificate was not accepted"),
                wrong_host: (stranger.port, "ca", "TLS: the server's certificate is for another host name"),
                too_old: (expired.port, "ca", "the certificate's dates"),
                denied: (dropped.port, "ca", "egress to it allowed by the NetworkPolicies"),
            }
            job = leased_job("job", HELLO, schedule=NEVER, **QUICK)
            for kubectl, (port, authority, _) in cases.items():
                # A Secret of the user's own, which the operator doesn't touch; the role is never asked for.
                kubectl.apply(own.secret(SIDECAR_SECRET, port, "nobody", "x", authority=authority))
                kubectl.apply(job, run_of("job", "now"))
            cuts.add(late_by := cut(sidecars.port))
            late.apply(job, run_of("job", "now"))
            pod = late.wait("its Pod", lambda: late.items("pods"), timeout=60)[0]["metadata"]["name"]
            late.wait(
                "adopt tries, and says what may be wrong",
                lambda: "NetworkPolicies" in late.run("logs", pod, "-c", protocol.CONTAINER_ADOPT).stdout,
                timeout=60,
            )
            node_faults.mend(late_by)
            late.wait("it ran, late", lambda: phase(late, "now") == "Succeeded", timeout=90)
            assert _restarts(late, pod) == 0
            for kubectl, (_, _, words) in cases.items():
                _says(kubectl, "NotAdopted", words)
                (row,) = own.sql(
                    "SELECT failures, interruptions FROM leasedjob.job_scheduler WHERE namespace = %s",
                    kubectl.namespace,
                )
                assert row == {"failures": 0, "interruptions": 0}

            # The operator itself, whose connections end as soon as its pooler does.
            for port, authority, words in (
                (operator.port, "stranger", "TLS: the server's certificate was not accepted"),
                (stranger.port, "ca", "TLS: the server's certificate is for another host name"),
                (expired.port, "ca", "TLS: the server's certificate was not accepted"),
            ):
                release.system.apply(own.secret(SECRET, port, OWNER, "owner", authority=authority))

                def told(words: str = words) -> bool:
                    operator.stop()
                    operator.start()
                    return release.told(words)

                release.system.wait(f"readyz says {words}", told, timeout=150, every=2)
            release.system.apply(own.secret(SECRET, operator.port, OWNER, "owner"))
            release.system.wait("it is ready again", release.ready, timeout=150, every=2)
            assert release.restarts() == 0
    finally:
        for each in cuts:
            node_faults.mend(each)


@pytest.mark.parametrize(
    "security",
    [
        pytest.param({"runAsNonRoot": True, "runAsUser": 1000730042, "runAsGroup": 0}, id="an assigned account"),
        pytest.param(None, id="none for the Pod"),
    ],
)
def test_a_pod_under_the_restricted_profile(kubectl: Kubectl, security: Json | None) -> None:
    """With an account that no image knows, or with settings for the containers alone: what the operator adds is
    admitted, starts without a home, and writes nowhere but where it may."""
    main = leased_job("x", HELLO)["spec"]["template"]["spec"]["containers"][0]
    main["securityContext"] = {
        **main["securityContext"],
        "runAsNonRoot": True,
        "runAsUser": 1000730042,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    body = leased_job("job", containers=[main], schedule=NEVER, **QUICK)
    spec = body["spec"]["template"]["spec"]
    spec.pop("securityContext")
    if security is not None:
        spec["securityContext"] = {**security, "seccompProfile": {"type": "RuntimeDefault"}}
    kubectl.apply(body, run_of("job", "now"))
    kubectl.wait("it succeeds", lambda: phase(kubectl, "now") == "Succeeded", timeout=90)
    (pod,) = kubectl.items("pods")
    added = [c for c in pod["spec"]["initContainers"] if c["name"].startswith(protocol.RESERVED_PREFIX)]
    assert len(added) == 3
    for container in added:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "runAsUser" not in context or security is None, "what the platform assigned is not overridden"
    assert pod["spec"]["containers"][0]["securityContext"] == main["securityContext"], "nor what the user wrote"
