"""How Pods end, and what their end is taken for: the workload, the sidecar and the database each at their slowest."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from leasedjob import protocol
from leasedjob.lease.trust import Timing
from tests.cluster.faults import Faults
from tests.e2e.conftest import Measured, Release
from tests.e2e.jobs import IMAGE, SHORT, container, run_of
from tests.e2e.kube import Json, Kubectl
from tests.e2e.marks import DEAF, PRELUDE, ends_with, finish, marked_job, own, read, said
from tests.e2e.test_path import _running, phase, rows, succeeded

# The default detection of 20 s: room for a sidecar's restart.
LONG: Json = {**SHORT, "lease": {"durationSeconds": 200, "heartbeatSeconds": 10}}


def timing(duration: int, heartbeat: int, grace: int, pre_stop: int = 0) -> Json:
    made = Timing(duration, heartbeat, grace, pre_stop)
    assert made.problem() is None
    return {
        "lease": {"durationSeconds": duration, "heartbeatSeconds": heartbeat},
        "shutdown": {"preStopSeconds": pre_stop, "terminationGracePeriodSeconds": grace},
    }


def begin(kubectl: Kubectl, job: Json, folder: Path, run: str = "now") -> Json:
    """Applies the job and a run of it; its Pod, when the workload has marked its start."""
    name = job["metadata"]["name"]
    kubectl.apply(job, run_of(name, f"{name}-{run}"))
    pod: Json = kubectl.wait(f"the workload of {name} runs", lambda: _running(kubectl, name), timeout=60)
    kubectl.wait(f"{name} has marked its start", lambda: read(folder, 1))
    return pod


def part(pod: Json, name: str) -> Json:
    """The status of a container, whichever kind it is."""
    status = pod["status"]
    both = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return next((s for s in both if s["name"] == name), {})


def at_attempt(db: psycopg.Connection, namespace: str, job: str, attempt: int, *, adopted: bool = False) -> Json | None:
    found = (r for r in rows(db, namespace, job) if r["attempt"] == attempt and (r["pod_uid"] or not adopted))
    return next(found, None)


def expiry(row: Json) -> float:
    """The last instant of the row's lease, as a time of the database's clock."""
    return float((row["modified_at"] + timedelta(milliseconds=row["lease_ms"])).timestamp())


def gone(kubectl: Kubectl, pod: Json) -> bool:
    there = kubectl.find("pod", pod["metadata"]["name"])
    return there is None or there["metadata"]["uid"] != pod["metadata"]["uid"]


@contextlib.contextmanager
def locked_when_claimed(conninfo: str, namespace: str, job: str) -> Iterator[threading.Event]:
    """A stranger's lock on the row of a job's next run, from the moment of its claim: adopt has to wait. The event says
    that it is held; it ends with the block."""
    held, over = threading.Event(), threading.Event()

    def lock() -> None:
        query = "SELECT id FROM leasedjob.job_scheduler WHERE namespace = %s AND job_name = %s FOR UPDATE"
        with psycopg.connect(conninfo) as connection:
            while not over.is_set() and connection.execute(query, (namespace, job)).fetchone() is None:
                over.wait(0.01)
            held.set()
            over.wait()
            connection.rollback()

    stranger = threading.Thread(target=lock)
    stranger.start()
    try:
        yield held
    finally:
        over.set()
        stranger.join()


# --- what an end is taken for ----------------------------------------------------------------------------------------


def test_a_sidecar_that_is_killed_after_the_workload_ended_changes_nothing(
    open_kubectl: Kubectl, db: psycopg.Connection, node_faults: Faults, marks: Path
) -> None:
    """It hears no SIGTERM, so the kubelet kills it at the end of the grace period: exit code 137."""
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    pod = begin(kubectl, marked_job("work", marks, ends_with(), LONG), marks)
    node_faults.signal_container(part(pod, protocol.CONTAINER_HOLD)["containerID"], signal.SIGSTOP)
    finish(marks)
    row = kubectl.wait(
        "recorded", lambda: rows(db, namespace, "work")[0]["finished_at"] and rows(db, namespace, "work")
    )
    assert [(r["status"], r["attempt"], r["failures"], r["interruptions"]) for r in row] == [("SUCCESS", 1, 0, 0)]
    ended = kubectl.json("get", "pod", pod["metadata"]["name"])
    assert part(ended, protocol.CONTAINER_HOLD)["state"]["terminated"]["exitCode"] == 137
    assert part(ended, "main")["state"]["terminated"]["exitCode"] == 0
    kubectl("delete", "leasedjob", "work", "--timeout=30s")


def test_a_reported_success_stands_whatever_the_exit_code(
    open_kubectl: Kubectl, db: psycopg.Connection, node_faults: Faults, marks: Path
) -> None:
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    report = 'mark("reported", answer=ask("/v1/outcome", {"outcome": "complete", "data": {"rows": 42}}))\n'
    exits = PRELUDE + f"    mark('start')\n    {report}    sys.exit(143)\n"
    lives = DEAF.replace('    mark("start")\n', f'    mark("start")\n    {report}')
    kubectl.apply(marked_job("exits", own(marks, "exits"), exits), run_of("exits", "exits-now"))
    pod = begin(kubectl, marked_job("killed", own(marks, "killed"), lives), own(marks, "killed"))
    kubectl.wait("it has reported", lambda: said(own(marks, "killed"), 1, "reported"))
    node_faults.signal_container(part(pod, "main")["containerID"], signal.SIGKILL)
    for job, code in (("exits", 143), ("killed", 137)):
        kubectl.wait(f"{job} is shown", lambda job=job: phase(kubectl, f"{job}-now") == "Succeeded", timeout=60)
        (row,) = rows(db, namespace, job)
        assert (row["status"], row["attempt"], row["data"]) == ("SUCCESS", 1, {"rows": 42})
        (mark,) = said(own(marks, job), 1, "reported")
        assert mark["answer"] == [200, {"recorded": True, "outcome": "complete"}]
        left = kubectl.wait(
            "its Pod has ended",
            lambda job=job: next(
                (
                    p
                    for p in kubectl.items("pods", "-l", f"{protocol.LABEL_JOB}={job}")
                    if p["status"]["phase"] == "Failed"
                ),
                None,
            ),
        )
        assert part(left, "main")["state"]["terminated"]["exitCode"] == code
    kubectl("delete", "leasedjobs", "--all", "--timeout=30s")


def test_a_sidecar_that_dies_at_its_start_leaves_no_pod_stuck(
    open_kubectl: Kubectl, db: psycopg.Connection, node_faults: Faults, marks: Path
) -> None:
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    waits = PRELUDE + "    while not os.path.exists('/marks/prepared'):\n        time.sleep(0.05)\n"
    init = container(waits, name="prepare")
    job = marked_job("early", marks, ends_with(), LONG, pod={"initContainers": [init]})
    kubectl.apply(job, run_of("early", "early-now"))

    def killed() -> bool:
        for pod in kubectl.items("pods"):
            hold = part(pod, protocol.CONTAINER_HOLD)
            if "running" in hold.get("state", {}):
                node_faults.signal_container(hold["containerID"], signal.SIGKILL)
                return True
        return False

    kubectl.wait("its sidecar runs, and is killed", killed, timeout=60, every=0.05)
    (marks / "prepared").touch()
    finish(marks)
    kubectl.wait("SUCCESS", lambda: succeeded(db, namespace, "early"), timeout=90)
    assert rows(db, namespace, "early")[0]["attempt"] == 1
    (pod,) = kubectl.items("pods")
    assert part(pod, protocol.CONTAINER_HOLD)["restartCount"] == 1
    kubectl("delete", "leasedjob", "early", "--timeout=30s")


# --- no overlap ------------------------------------------------------------------------------------------------------


def test_replace_starts_when_the_old_workload_has_ended(
    open_kubectl: Kubectl, db: psycopg.Connection, marks: Path, measured: Measured
) -> None:
    """The old one needs 10 s after SIGTERM; the new one's workload waits for it, and not for its lease to expire."""
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    job = marked_job("swap", marks, ends_with(0, needs=10), timing(60, 3, 16), concurrencyPolicy="Replace")
    begin(kubectl, job, marks, "one")
    asked = time.time()
    kubectl.apply(run_of("swap", "swap-two"))

    def by_run() -> list[list[Json]]:
        found: dict[str, list[Json]] = {}
        for mark in read(marks, 1):
            found.setdefault(mark["key"], []).append(mark)
        return list(found.values())

    kubectl.wait("the second one's workload runs", lambda: len(by_run()) == 2, timeout=90)
    old, new = by_run()
    assert old[-1]["what"] == "end"
    term = next(m["at"] for m in old if m["what"] == "term")
    assert old[-1]["at"] - term >= 10, "it had the time that it needed"
    assert new[0]["at"] > old[-1]["at"], "no overlap"
    assert new[0]["token"] > old[-1]["token"]
    first, second = rows(db, namespace, "swap")
    assert (first["status"], first["retry_at"], first["failures"]) == ("FAIL", None, 0)
    assert first["finished_at"] <= second["started_at"]
    measured(
        f"Replace: SIGTERM {term - asked:.1f} s after the new run was asked for, the old workload ended"
        f" {old[-1]['at'] - term:.1f} s later, the new one began {new[0]['at'] - old[-1]['at']:.1f} s after that"
    )
    finish(marks)
    kubectl.wait("the second succeeds", lambda: phase(kubectl, "swap-two") == "Succeeded", timeout=60)
    kubectl("delete", "leasedjob", "swap", "--timeout=30s")


def test_a_pod_that_is_frozen_as_a_whole_is_repeated_after_the_expiry_and_never_moves_again(
    open_kubectl: Kubectl, db: psycopg.Connection, node_faults: Faults, marks: Path, measured: Measured
) -> None:
    """Workload and sidecar frozen for longer than the lease, under a kubelet that works: it can't stop what is frozen,
    but what it has signalled dies at the thaw, before its next instruction."""
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    pod = begin(kubectl, marked_job("ice", marks, ends_with()), marks)
    node_faults.freeze_pod(pod["metadata"]["uid"])
    frozen = time.time()
    kubectl.wait("the freeze is complete", lambda: read(marks, 1)[-1]["at"] < time.time() - 0.5)
    before = rows(db, namespace, "ice")[0]
    kubectl.wait("the second workload runs", lambda: read(marks, 2), timeout=SHORT["lease"]["durationSeconds"] + 60)
    second = rows(db, namespace, "ice")[0]
    assert second["attempt"] == 2
    assert second["started_at"].timestamp() >= expiry(before), "nobody takes a run over before its lease has expired"
    assert second["fencing_token"] > before["fencing_token"]
    count = len(read(marks, 1))
    node_faults.thaw()
    thawed = time.time()
    kubectl.wait("its Pod is gone", lambda: gone(kubectl, pod), timeout=60)
    assert len(read(marks, 1)) == count, "it did nothing after the thaw"
    finish(marks)
    kubectl.wait("SUCCESS", lambda: succeeded(db, namespace, "ice"), timeout=60)
    row = rows(db, namespace, "ice")[0]
    assert (row["attempt"], row["fencing_token"]) == (2, second["fencing_token"])
    measured(f"a Pod frozen for {thawed - frozen:.0f} s: attempt 2 claimed {row['started_at'].timestamp() - expiry(before):.2f} s after the expiry")  # fmt: skip  # noqa: E501
    kubectl("delete", "leasedjob", "ice", "--timeout=30s")


# --- the grace period ------------------------------------------------------------------------------------------------

SHELL = 'echo prepared; python3 -u -c "$PROGRAM"; echo after'


def in_a_shell(job: Json) -> Json:
    """The same program as the child of a shell that is process 1: SIGTERM never gets to it."""
    (main,) = job["spec"]["template"]["spec"]["containers"]
    main["env"] = [{"name": "PROGRAM", "value": main["command"][-1]}]
    main["command"] = ["sh", "-c", SHELL]
    return job


def test_under_a_shell_as_process_1_the_sidecar_tells_of_the_drain_or_the_kill_ends_it(
    open_kubectl: Kubectl, db: psycopg.Connection, marks: Path
) -> None:
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    listens = PRELUDE + (
        "    import threading\n"
        "    def wait():\n"
        '        while not ask("/v1/drain?wait=30")[1]["draining"]:\n'
        "            pass\n"
        '        mark("told")\n'
        '        ask("/v1/outcome", {"outcome": "release"})\n'
        '        mark("end")\n'
        "        os._exit(0)\n"
        "    threading.Thread(target=wait).start()\n"
        '    signal.signal(signal.SIGTERM, lambda *_: mark("term"))\n'
        '    mark("start")\n'
    )
    grace, short = 30, 6
    jobs = {
        "listens": in_a_shell(marked_job("listens", own(marks, "listens"), listens, timing(90, 5, grace))),
        "deaf": in_a_shell(marked_job("deaf", own(marks, "deaf"), ends_with(), timing(60, 5, short))),
    }
    found = {name: begin(kubectl, job, own(marks, name)) for name, job in jobs.items()}
    before = {name: rows(db, namespace, name)[0] for name in jobs}
    asked = time.time()
    kubectl("delete", "pod", *(p["metadata"]["name"] for p in found.values()), "--wait=false")
    for name in jobs:
        row = kubectl.wait(f"attempt 2 of {name}", lambda name=name: at_attempt(db, namespace, name, 2), timeout=60)
        assert (row["interruptions"], row["failures"]) == (1, 0)
        assert row["started_at"].timestamp() < expiry(before[name]), "recorded; nobody waited for the expiry"
        assert row["started_at"].timestamp() > read(own(marks, name), 1)[-1]["at"]
        assert not said(own(marks, name), 1, "term"), "the shell keeps it to itself"
    assert [m["what"] for m in read(own(marks, "listens"), 1)][-2:] == ["told", "end"]
    assert read(own(marks, "listens"), 1)[-1]["at"] < asked + grace, "in time"
    last = read(own(marks, "deaf"), 1)[-1]
    assert last["what"] == "alive", "cut off by the kill"
    kubectl("delete", "leasedjobs", "--all", "--timeout=30s")


def test_a_deletion_before_the_sidecars_have_started_needs_no_grace_period(
    open_kubectl: Kubectl, db: psycopg.Connection, release: Release, marks: Path, measured: Measured
) -> None:
    """One Pod waits in `adopt` (its row is locked by a stranger), another one in an init container of the user; in both
    there are sidecars behind that have not begun."""
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    grace = 30
    late = container("import signal\nsignal.pause()", name="late-sidecar", restartPolicy="Always")
    waits = PRELUDE + (
        '    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n    mark("init")\n'
        "    while not os.path.exists('/marks/finish'):\n        time.sleep(0.05)\n"
    )

    def job(name: str) -> Json:
        inits = [container(waits, name="prepare"), {**late}]
        return marked_job(name, own(marks, name), ends_with(), timing(90, 5, grace), pod={"initContainers": inits})

    kubectl.apply(job("adopting"), job("preparing"), run_of("preparing", "preparing-now"))

    def adopting() -> Json | None:
        mine = (p for p in kubectl.items("pods") if p["metadata"]["labels"][protocol.LABEL_JOB] == "adopting")
        return next((p for p in mine if "running" in part(p, protocol.CONTAINER_ADOPT).get("state", {})), None)

    with locked_when_claimed(release.conninfo, namespace, "adopting") as held:
        kubectl.apply(run_of("adopting", "adopting-now"))
        assert held.wait(60)
        first = kubectl.wait("adopt runs", adopting, timeout=60)
        kubectl.wait("the init container runs", lambda: read(own(marks, "preparing"), 1), timeout=60)
        second = next(p for p in kubectl.items("pods") if p["metadata"]["name"] != first["metadata"]["name"])
        # adopt asks again and again; one refusal is in its log when it has begun to. A call that hangs is given up
        # after 20 s.
        kubectl.wait("adopt is kept waiting", lambda: "locked" in adopt_log(kubectl, first), timeout=40)
        asked = time.monotonic()
        kubectl("delete", "pod", first["metadata"]["name"], second["metadata"]["name"], "--wait=false")
        for pod in (first, second):
            kubectl.wait("the Pod is gone", lambda pod=pod: gone(kubectl, pod), timeout=grace - 5)
            measured(
                f"Pod {pod['metadata']['labels'][protocol.LABEL_JOB]}: gone {time.monotonic() - asked:.1f} s after its"
                f" deletion, of a grace period of {grace} s"
            )
        row = rows(db, namespace, "adopting")[0]
        assert (row["attempt"], row["pod_uid"]) == (1, None), "not adopted on its way out"
    # What was adopted is a new attempt. A claim that nobody adopted is released, or gets its Pod again.
    for name, interruptions in (("adopting", 0), ("preparing", 1)):
        finish(own(marks, name))
        kubectl.wait(f"{name} succeeds", lambda name=name: succeeded(db, namespace, name), timeout=90)
        (row,) = rows(db, namespace, name)
        assert (row["failures"], row["interruptions"]) == (0, interruptions)
        assert name == "adopting" or row["attempt"] == 2
        assert sum(len(said(own(marks, name), n, "start")) for n in (1, 2)) == 1, "the workload ran once"
    kubectl("delete", "leasedjobs", "--all", "--timeout=30s")


def adopt_log(kubectl: Kubectl, pod: Json) -> str:
    done = kubectl.run("logs", pod["metadata"]["name"], "-c", protocol.CONTAINER_ADOPT)
    return done.stdout + done.stderr


@contextlib.contextmanager
def slow_rows(db: psycopg.Connection, namespace: str, seconds: float) -> Iterator[None]:
    """Every statement that changes a lease row of this namespace takes so much longer."""
    name = f"slow_{uuid.uuid4().hex[:8]}"
    body = f"BEGIN PERFORM pg_sleep({seconds}); RETURN NEW; END"
    db.execute(f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $${body}$$".encode())
    db.execute(
        f"CREATE TRIGGER {name} BEFORE UPDATE ON job_scheduler FOR EACH ROW"
        f" WHEN (OLD.namespace = '{namespace}') EXECUTE FUNCTION {name}()".encode()
    )
    try:
        yield
    finally:
        db.execute(f"DROP FUNCTION {name}() CASCADE".encode())


def test_a_pre_stop_hook_a_deaf_workload_and_a_slow_database_share_one_budget(
    open_kubectl: Kubectl, db: psycopg.Connection, marks: Path, measured: Measured
) -> None:
    """preStop takes 20 s of 30, the workload lives to the kill, and the database needs 1.5 s for each statement: the
    report that the workload makes at SIGTERM has the last two seconds, and is recorded once all the same."""
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    grace, pre_stop = 30, 20
    program = PRELUDE + (
        "    def term(*_):\n"
        '        mark("term")\n'
        '        mark("reported", answer=ask("/v1/outcome", {"outcome": "release", "data": {"done": 7}}))\n'
        "    signal.signal(signal.SIGTERM, term)\n"
        '    mark("start")\n'
        "    while True:\n"
        '        mark("alive")\n'
        "        time.sleep(0.05)\n"
    )
    pod = begin(kubectl, marked_job("slow", marks, program, timing(90, 6, grace, pre_stop)), marks)
    with slow_rows(db, namespace, 1.5):
        before = rows(db, namespace, "slow")[0]["modified_at"]
        kubectl.wait("a heartbeat is slow", lambda: rows(db, namespace, "slow")[0]["modified_at"] > before)
        asked = time.time()
        kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")
        held = kubectl.wait("it is killed", lambda: gone(kubectl, pod) and rows(db, namespace, "slow")[0], timeout=60)
        left = time.time()
    first = read(marks, 1)
    term = next(m["at"] for m in first if m["what"] == "term")
    assert term - asked >= pre_stop, "preStop comes first"
    (reported,) = said(marks, 1, "reported")
    assert reported["answer"][0] == 202, "kept until the workload has ended"
    row = kubectl.wait("attempt 2 is adopted", lambda: at_attempt(db, namespace, "slow", 2, adopted=True), timeout=60)
    assert (row["interruptions"], row["failures"]) == (1, 0), "recorded once"
    assert row["started_at"].timestamp() < expiry(held), "and nobody waited for the expiry"
    assert row["started_at"].timestamp() > first[-1]["at"]
    measured(
        f"preStop {pre_stop} s, database 1.5 s a statement: SIGTERM {term - asked:.1f} s, kill"
        f" {first[-1]['at'] - asked:.1f} s, Pod gone {left - asked:.1f} s after the deletion (grace period {grace} s)"
    )
    kubectl("delete", "leasedjob", "slow", "--timeout=30s")


# --- processor time --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [50, pytest.param(1800, marks=[pytest.mark.soak, pytest.mark.timeout(2400)])])
def test_a_starved_workload_keeps_its_lease(
    open_kubectl: Kubectl, db: psycopg.Connection, marks: Path, measured: Measured, seconds: int
) -> None:
    """Four processes at full speed in a container with a tenth of a core, beside a sidecar with half of that: the lease
    is the sidecar's to keep."""
    kubectl, namespace = open_kubectl, open_kubectl.namespace
    program = PRELUDE + (
        '    mark("start")\n'
        f"    until = time.monotonic() + {seconds}\n"
        "    children = [os.fork() for _ in range(2)]\n"
        "    while time.monotonic() < until:\n"
        "        pass\n"
        "    if all(children):\n"
        '        mark("end", view=ask("/v1/lease")[1])\n'
        "    os._exit(0)\n"
    )
    main = container(program, resources={"requests": {"cpu": "5m"}, "limits": {"cpu": "100m"}})
    assert main["image"] == IMAGE
    main["volumeMounts"] = [{"name": "marks", "mountPath": "/marks"}]
    little = {"requests": {"cpu": "5m"}, "limits": {"cpu": "50m", "memory": "128Mi"}}
    job = marked_job("hungry", marks, containers=[main], sidecar={"resources": little})
    kubectl.apply(job, run_of("hungry", "hungry-now"))
    gaps, seen = [0.0], None
    kubectl.wait("it has begun", lambda: read(marks, 1), timeout=120)
    end = time.monotonic() + seconds + 60
    while not (row := rows(db, namespace, "hungry")[0])["finished_at"]:
        assert time.monotonic() < end
        if seen is not None:
            gaps.append((row["modified_at"] - seen).total_seconds())
        seen = row["modified_at"]
        time.sleep(1)
    assert (row["status"], row["attempt"], row["interruptions"]) == ("SUCCESS", 1, 0)
    timing_ = Timing(SHORT["lease"]["durationSeconds"], SHORT["lease"]["heartbeatSeconds"], 6, 0)
    (last,) = said(marks, 1, "end")
    late = last["view"]["heartbeats"]["lateSeconds"]
    assert max(gaps) < timing_.trust
    assert late < (timing_.duration - timing_.heartbeat) / 2
    measured(
        f"starved for {seconds} s (100m, its sidecar 50m): at most {max(gaps):.1f} s between heartbeats of"
        f" {timing_.heartbeat} s, the latest sent {late:.1f} s late, {last['view']['heartbeats']['failed']} failed"
    )
    kubectl("delete", "leasedjob", "hungry", "--timeout=30s")
