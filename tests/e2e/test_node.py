"""The whole node lost and back, the kubelet killed, every operator down: what Kubernetes says then proves nothing.

These tests hit everything that runs on the node, so they run alone (marker `node`). Each puts as many Pods as it can,
in different positions, under one fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from leasedjob import protocol
from leasedjob.lease.trust import Timing
from tests.cluster.faults import Faults
from tests.e2e.conftest import Measured, Release
from tests.e2e.jobs import container, run_of
from tests.e2e.kube import Json, Kubectl
from tests.e2e.marks import PRELUDE, ends_with, finish, marked_job, own, read, said
from tests.e2e.test_path import _running, phase, rows, succeeded
from tests.e2e.test_stops import at_attempt, begin, expiry, gone, locked_when_claimed, part, timing

pytestmark = pytest.mark.node


def is_ready(pod: Json) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions") or [])


def node_ready(kubectl: Kubectl) -> bool:
    (node,) = kubectl.items("nodes")
    return is_ready(node)


def alive_again(folder: Path, attempt: int) -> Callable[[], bool]:
    """Whether the workload has marked anything since this call."""
    seen = len(read(folder, attempt))
    return lambda: len(read(folder, attempt)) > seen


@pytest.fixture
def operators(cluster_kubectl: Kubectl, release: Release) -> Iterator[Callable[[int], None]]:
    """Sets how many replicas of the operator run, and waits for it; there are two again at the end."""
    system = cluster_kubectl.within(release.namespace)
    selector = "app.kubernetes.io/component=operator"

    def scale(replicas: int) -> None:
        system("scale", "deployment", release.name, f"--replicas={replicas}")
        system.wait(
            f"{replicas} operators",
            lambda: [is_ready(p) for p in system.items("pods", "-l", selector)] == [True] * replicas,
            timeout=120,
        )

    yield scale
    scale(2)  # also waits until those are back that a fault has hit


def test_a_kubelet_that_is_killed_at_any_step_doubles_nothing(
    open_kubectl: Kubectl,
    db: psycopg.Connection,
    node_faults: Faults,
    release: Release,
    marks: Path,
    measured: Measured,
) -> None:
    """One Pod each: before adoption, in the user's init container, at work, at its end, two in their drain, and one
    that is created meanwhile. All but those that work and that ignore SIGTERM take their next step while there is no
    kubelet."""
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    spec = timing(60, 5, 12)
    waits = PRELUDE + (
        '    mark("init")\n    while not os.path.exists("/marks/prepared"):\n        time.sleep(0.05)\n'
        '    mark("prepared")\n'
    )
    folders = {n: own(marks, n) for n in ("adopting", "preparing", "working", "ending", "draining", "deaf", "waiting")}
    programs = {"deaf": ends_with(143, needs=600)}
    inits = {"preparing": {"initContainers": [container(waits, name="prepare")]}}
    jobs = {
        name: marked_job(name, folder, programs.get(name, ends_with(143, needs=6)), spec, pod=inits.get(name, {}))
        for name, folder in folders.items()
    }
    drained = ("draining", "deaf")
    kubectl.apply(*jobs.values(), *(run_of(n, f"{n}-now") for n in ("preparing", "working", "ending", *drained)))
    for name in ("working", "ending", *drained):
        kubectl.wait(f"{name} runs", lambda name=name: _running(kubectl, name), timeout=90)
    kubectl.wait("the init container runs", lambda: said(folders["preparing"], 1, "init"), timeout=60)
    with locked_when_claimed(release.conninfo, namespace, "adopting") as held:
        kubectl.apply(run_of("adopting", "adopting-now"))
        assert held.wait(60)
        kubectl.wait("adopt runs", lambda: _state(kubectl, "adopting", protocol.CONTAINER_ADOPT, "running"), timeout=60)
        victims = kubectl.items("pods", "-l", f"{protocol.LABEL_JOB} in (draining, deaf)")
        kubectl("delete", "pod", *(v["metadata"]["name"] for v in victims), "--wait=false")
        for name in drained:
            kubectl.wait(f"{name} is told", lambda name=name: said(folders[name], 1, "term"), timeout=30)
        node_faults.kill("kubelet")
        killed = time.monotonic()
    (folders["preparing"] / "prepared").touch()
    finish(folders["ending"])
    kubectl.apply(run_of("waiting", "waiting-now"))
    for what, seen in {
        "adopted, and nobody starts hold": lambda: rows(db, namespace, "adopting")[0]["pod_uid"],
        "prepared, and nobody starts the gate": lambda: said(folders["preparing"], 1, "prepared"),
        "ended": lambda: said(folders["ending"], 1, "end"),
        "drained": lambda: said(folders["draining"], 1, "end"),
        "claimed": lambda: rows(db, namespace, "waiting"),
    }.items():
        kubectl.wait(what, seen, timeout=60)
    assert {n: rows(db, namespace, n)[0]["status"] for n in folders} == dict.fromkeys(folders, "RUNNING")
    node_faults.start("kubelet")
    down = time.monotonic() - killed
    started = time.time()
    for name in drained:
        kubectl.wait(f"attempt 2 of {name} runs", lambda name=name: read(folders[name], 2), timeout=90)
    for name in folders:
        finish(folders[name])
    for name in folders:
        kubectl.wait(f"{name} succeeds", lambda name=name: succeeded(db, namespace, name), timeout=90)
    for name, folder in folders.items():
        (row,) = rows(db, namespace, name)
        attempts = 2 if name in drained else 1
        assert (name, row["attempt"], row["failures"], row["interruptions"]) == (name, attempts, 0, attempts - 1)
        assert [len(said(folder, n + 1, "start")) for n in range(attempts)] == [1] * attempts, "started once each"
        assert len(said(folder, 1, "init")) == (name == "preparing"), "not prepared twice"
    for name in drained:
        assert read(folders[name], 2)[0]["at"] > read(folders[name], 1)[-1]["at"], "no overlap"
    assert read(folders["draining"], 1)[-1]["what"] == "end"
    assert not said(folders["working"], 1, "term"), "it never heard of it"
    terms = [m["at"] for m in said(folders["deaf"], 1, "term")]
    measured(
        f"kubelet down for {down:.1f} s, seven Pods at six steps; what ignores SIGTERM was told {len(terms)} times and"
        f" killed {read(folders['deaf'], 1)[-1]['at'] - terms[0]:.1f} s after the first, of a grace period of 12 s"
        f" ({read(folders['deaf'], 1)[-1]['at'] - started:.1f} s after the kubelet's start)"
    )
    kubectl("delete", "leasedjobs", "--all", "--timeout=30s")


def _state(kubectl: Kubectl, job: str, name: str, state: str) -> bool:
    pods = kubectl.items("pods", "-l", f"{protocol.LABEL_JOB}={job}")
    return any(state in part(pod, name).get("state", {}) for pod in pods)


# After a silence it asks what became of its lease, and then claims to have finished.
RETURNING = PRELUDE + (
    '    signal.signal(signal.SIGTERM, lambda *_: mark("term"))\n'
    '    mark("start")\n'
    "    before = time.monotonic()\n"
    '    while not os.path.exists("/marks/finish"):\n'
    "        now = time.monotonic()\n"
    "        if now - before > 5:\n"
    '            mark("returned", view=ask("/v1/lease")[1], late=ask("/v1/outcome", {"outcome": "complete"}))\n'
    '        mark("alive")\n'
    "        before = now\n"
    "        time.sleep(0.05)\n"
)


@pytest.mark.parametrize(
    "outage",
    [
        pytest.param(0, id="until its leases have expired"),
        pytest.param(600, id="ten minutes", marks=[pytest.mark.soak, pytest.mark.timeout(1500)]),
    ],
)
def test_a_node_that_is_lost_and_comes_back(
    open_kubectl: Kubectl,
    db: psycopg.Connection,
    node_faults: Faults,
    marks: Path,
    measured: Measured,
    outage: int,
) -> None:
    """The kubelet stands still. Of three Pods one is frozen, one is frozen and its object is failed and removed (what
    the Pod garbage collector does), and one goes on while its object is deleted by force."""
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    length = Timing(30, 3, 5, 0)
    folders = {name: own(marks, name) for name in ("frozen", "collected", "forced")}
    programs = {"frozen": RETURNING}
    spec = timing(length.duration, length.heartbeat, length.grace)
    jobs = {n: marked_job(n, f, programs.get(n, ends_with(143, needs=2)), spec) for n, f in folders.items()}
    kubectl.apply(*jobs.values())
    pods = {name: begin(kubectl, jobs[name], folders[name]) for name in folders}
    node_faults.stop("kubelet")
    lost = time.time()
    for name in ("frozen", "collected"):
        node_faults.freeze_pod(pods[name]["metadata"]["uid"])
    kubectl.wait("they stand still", lambda: read(folders["frozen"], 1)[-1]["at"] < time.time() - 1)
    before = {name: rows(db, namespace, name)[0] for name in folders}
    collected = pods["collected"]["metadata"]["name"]
    kubectl("patch", "pod", collected, "--subresource=status", "-p", COLLECTED)
    for name in ("collected", "forced"):
        kubectl("delete", "pod", pods[name]["metadata"]["name"], "--force", "--grace-period=0", "--wait=false")
        kubectl.wait(f"the object of {name} is gone", lambda name=name: gone(kubectl, pods[name]))
    for name in ("frozen", "collected"):
        row = kubectl.wait(
            f"{name} is claimed again",
            lambda name=name: at_attempt(db, namespace, name, 2),
            timeout=length.duration + 60,
        )
        after = row["started_at"].timestamp() - expiry(before[name])
        assert after >= 0, "nothing that Kubernetes says of a Pod ends its lease"
        assert row["fencing_token"] > before[name]["fencing_token"]
        assert (row["failures"], row["interruptions"]) == (0, 1)
        measured(f"node lost, {name}: claimed again {after:.2f} s after the expiry")
    held = rows(db, namespace, "forced")[0]
    assert (held["attempt"], held["status"]) == (1, "RUNNING"), "its sidecar holds it"
    assert held["modified_at"] > before["forced"]["modified_at"]
    kubectl.wait("its workload goes on", alive_again(folders["forced"], 1))
    while time.time() < lost + outage:
        time.sleep(1)
    # The node comes back at its worst: what was frozen goes on before there is a kubelet that could stop it.
    node_faults.thaw()
    back = time.time()
    (mark,) = kubectl.wait("the old workload is told", lambda: said(folders["frozen"], 1, "returned"), timeout=60)
    assert (mark["view"]["leased"], mark["view"]["state"]) == (False, "fenced"), "its first answer is no"
    assert mark["late"][0] == 409, "and what it says of its work is not recorded"
    again = rows(db, namespace, "frozen")[0]
    assert (again["attempt"], again["status"], again["data"]) == (2, "RUNNING", None)
    node_faults.resume("kubelet")
    resumed = time.time()
    for name in ("frozen", "collected"):
        kubectl.wait(f"attempt 2 of {name} runs", lambda name=name: read(folders[name], 2), timeout=90)
    kubectl.wait("the old Pod is gone", lambda: gone(kubectl, pods["frozen"]), timeout=60)
    kubectl.wait("the node is ready", lambda: node_ready(kubectl))
    last = {name: read(folders[name], 1)[-1]["at"] for name in folders}
    for name in ("frozen", "collected"):
        measured(
            f"node back, {name}: the old workload ended {last[name] - back:.1f} s after its thaw,"
            f" {last[name] - resumed:.1f} s after the kubelet's (grace period {length.grace} s)"
        )
    # The one that went on is stopped by the kubelet, which finds no object for it. Its sidecar can't tell anybody how
    # it ended, so its lease has to expire.
    released = held
    while (row := rows(db, namespace, "forced")[0])["attempt"] == 1:
        assert time.time() < resumed + 120
        released = row
        time.sleep(0.1)
    assert row["started_at"].timestamp() >= expiry(released)
    assert row["started_at"].timestamp() > read(folders["forced"], 1)[-1]["at"], "no overlap"
    for name in folders:
        finish(folders[name])
    for name in folders:
        kubectl.wait(f"{name} succeeds", lambda name=name: succeeded(db, namespace, name), timeout=90)
        (row,) = rows(db, namespace, name)
        assert (name, row["attempt"], row["failures"], row["interruptions"]) == (name, 2, 0, 1)
        assert read(folders[name], 1)[-1]["token"] < read(folders[name], 2)[0]["token"]
    kubectl("delete", "leasedjobs", "--all", "--timeout=30s")


def test_a_node_that_crashes_interrupts_its_runs(
    open_kubectl: Kubectl,
    db: psycopg.Connection,
    operators: Callable[[int], None],
    node_faults: Faults,
    marks: Path,
    measured: Measured,
) -> None:
    """Kubelet, containerd and all containers die at once, the operators among them. Nobody saw how the workload ended,
    so that is neither a success nor a failure."""
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    begin(kubectl, marked_job("crash", marks, ends_with(), timing(30, 3, 5)), marks)
    before = rows(db, namespace, "crash")[0]
    node_faults.crash()
    crashed = time.time()
    assert read(marks, 1)[-1]["at"] < crashed
    node_faults.recover()
    kubectl.wait("the node is ready", lambda: node_ready(kubectl), timeout=90)
    kubectl.wait("attempt 2 runs", lambda: read(marks, 2), timeout=120)
    row = rows(db, namespace, "crash")[0]
    assert (row["attempt"], row["failures"], row["interruptions"]) == (2, 0, 1)
    assert row["fencing_token"] > before["fencing_token"]
    assert len(said(marks, 1, "start")) == 1, "attempt 1 was not started again"
    measured(
        f"node crashed: attempt 2 claimed {row['started_at'].timestamp() - crashed:.1f} s after it,"
        f" of a lease of {before['lease_ms'] / 1000:.0f} s"
    )
    finish(marks)
    kubectl.wait("SUCCESS", lambda: succeeded(db, namespace, "crash"), timeout=90)
    kubectl("delete", "leasedjobs", "--all", "--timeout=30s")


# As the Pod garbage collector leaves a Pod whose node it takes for gone, just before it removes it.
COLLECTED = """
{"status": {"phase": "Failed", "conditions": [{"type": "DisruptionTarget", "status": "True",
 "reason": "DeletionByPodGC", "message": "PodGC: node no longer exists", "lastTransitionTime": null}]}}
"""


def test_runs_that_end_while_no_operator_is_there(
    open_kubectl: Kubectl,
    db: psycopg.Connection,
    operators: Callable[[int], None],
    marks: Path,
    measured: Measured,
) -> None:
    """Images that report nothing, whose leases last or have expired when the operators come back; one that reports; and
    LeasedJobs that are deleted meanwhile, in each of the ways that Kubernetes has for what depends on them."""
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    short, lasting = timing(30, 3, 5), timing(200, 10, 5)
    reports = PRELUDE + (
        '    mark("start")\n'
        '    while not os.path.exists("/marks/finish"):\n'
        "        time.sleep(0.05)\n"
        '    mark("reported", answer=ask("/v1/outcome", {"outcome": "complete", "data": {"rows": 1}}))\n'
    )
    plans = {
        "early": (ends_with(), lasting),
        "late": (ends_with(), short),
        "reports": (reports, short),
        "background": (reports, lasting),
        "foreground": (reports, lasting),
        "orphan": (ends_with(), lasting),
    }
    folders = {name: own(marks, name) for name in plans}
    jobs = {name: marked_job(name, folders[name], program, spec) for name, (program, spec) in plans.items()}
    kubectl.apply(*jobs.values(), *(run_of(name, f"{name}-now") for name in jobs))
    for name in jobs:
        kubectl.wait(f"{name} runs", lambda name=name: read(folders[name], 1), timeout=90)
    operators(0)
    for name in jobs:
        finish(folders[name])
    deleted = {"background", "foreground", "orphan"}
    kubectl.wait(
        "all Pods have ended",
        lambda: [p["status"]["phase"] for p in kubectl.items("pods")] == ["Succeeded"] * len(jobs),
        timeout=60,
    )
    for name in deleted:
        kubectl("delete", "leasedjob", name, f"--cascade={name}", "--timeout=30s")
    kubectl.wait("what depended on them is gone", lambda: len(kubectl.items("pods")) == len(jobs) - 2, timeout=60)
    late = rows(db, namespace, "late")[0]
    assert late["status"] == "RUNNING"
    kubectl.wait("a lease has expired", lambda: time.time() > expiry(late) + 1, timeout=60)
    assert {n: rows(db, namespace, n)[0]["status"] for n in jobs} == {
        "early": "RUNNING",
        "late": "RUNNING",
        "reports": "SUCCESS",
        "background": "SUCCESS",
        "foreground": "SUCCESS",
        "orphan": "RUNNING",
    }
    operators(2)
    back = time.monotonic()
    for name in jobs:
        kubectl.wait(f"{name} is recorded", lambda name=name: succeeded(db, namespace, name), timeout=60)
    measured(f"operators back: everything recorded {time.monotonic() - back:.1f} s after both were ready")
    for name in jobs:
        (row,) = rows(db, namespace, name)
        assert (name, row["attempt"], row["failures"], row["interruptions"]) == (name, 1, 0, 0)
        assert not read(folders[name], 2), "not repeated"
        if name not in deleted:
            kubectl.wait("it is shown", lambda name=name: phase(kubectl, f"{name}-now") == "Succeeded")
    kubectl("delete", "leasedjobs", "--all", "--timeout=30s")
    kubectl.wait(
        "only what was orphaned is left",
        lambda: [p["metadata"]["labels"][protocol.LABEL_JOB] for p in kubectl.items("pods")] == ["orphan"],
    )
