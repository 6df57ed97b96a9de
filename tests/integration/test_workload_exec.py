"""`leasedjob exec` as a real process: signals, children, standard error, exit codes; its report to a real sidecar."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from leasedjob import protocol
from leasedjob.lease.store import OperatorStore
from leasedjob.lease.trust import Timing
from leasedjob.protocol import Seen

from .conftest import Database
from .sidecar_parts import CALM, Pod, Pods, pods_for
from .workload_parts import LONG, Process, Processes, processes

pytestmark = pytest.mark.integration

# Notes each SIGTERM and SIGINT, and ends when a file is there.
NOTES = """
import os, signal, sys, time
path = sys.argv[1]
def note(number, _):
    print("got", signal.Signals(number).name)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, note)
print("ready")
while not os.path.exists(path):
    time.sleep(0.02)
print("done")
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def run() -> Iterator[Processes]:
    yield from processes()


@pytest.fixture
def pods(tmp_path: Path, database: Database, store: OperatorStore) -> Iterator[Pods]:
    yield from pods_for(tmp_path, database, store)


def noting(run: Processes, tmp_path: Path, *options: str, code: int = 0) -> Process:
    """exec around NOTES, ready for signals."""
    command = [sys.executable, "-c", NOTES, str(tmp_path / "end"), str(code)]
    process = run.leasedjob("exec", *options, "--", *command)
    process.line("ready")
    return process


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def await_gone(pid: int) -> None:
    until = time.monotonic() + LONG
    while not gone(pid):
        assert time.monotonic() < until, f"process {pid} lives on"
        time.sleep(0.02)  # somebody else's child: there is nothing to wait on


# --- exit codes and output -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["sh", "-c", "exit 0"], 0),
        (["sh", "-c", "exit 3"], 3),
        (["sh", "-c", "exit 255"], 255),
        (["sh", "-c", "kill -KILL $$"], 137),
        (["sh", "-c", "kill -TERM $$"], 143),
        (["no-such-command"], 127),
        (["/etc/passwd"], 126),
        (["--help"], 127),
    ],
)
def test_exit_codes_are_kept(run: Processes, command: list[str], code: int) -> None:
    assert run.leasedjob("exec", "--", *command).wait() == code


@pytest.mark.parametrize(
    "words", [["exec"], ["exec", "--"], ["exec", "true"], ["exec", "--", ""], ["exec", "--nope", "--", "true"]]
)
def test_a_wrong_call(run: Processes, words: list[str]) -> None:
    process = run.leasedjob(*words)
    assert process.wait() == 2
    assert "usage: leasedjob exec [options] -- COMMAND..." in process.err


@pytest.mark.parametrize(
    "streams",
    [
        "2>&-",
        ">&-",
        "<&- >&- 2>&-",
        ">/dev/full 2>&1",
        "2> >(exec true)",  # a reader that is gone
    ],
)
def test_exit_codes_are_kept_whatever_the_streams_are(run: Processes, streams: str, tmp_path: Path) -> None:
    """The command itself writes into what it was given, and not into a pipe of ours."""
    command = f"echo word; echo word >&2; ls -l /proc/$$/fd > {tmp_path}/fds; exit 8"
    line = f"sleep 0.1; exec {sys.executable} -m leasedjob exec -- sh -c '{command}' {streams}"
    process = run.start(["bash", "-c", line])
    assert process.wait() == 8, process.err
    fds = [line.split()[-3:] for line in (tmp_path / "fds").read_text().splitlines() if " -> " in line]
    assert {number for number, _, _ in fds} >= {"0", "1", "2"}


def test_it_says_that_there_is_no_sidecar(run: Processes) -> None:
    process = run.leasedjob("exec", "--", "true")
    assert process.wait() == 0
    assert "LEASEDJOB_SIDECAR_URL is not set" in process.err


def test_words_input_and_output_are_the_commands_own(run: Processes) -> None:
    program = "import sys; print(sys.argv[1:]); sys.stderr.write('e' * 300_000 + '\\nlast\\n')"
    process = run.leasedjob("exec", "--", sys.executable, "-c", program, "--", "-x", "a b", "")
    assert process.wait() == 0
    assert process.out == ["['--', '-x', 'a b', '']"]
    assert "e" * 300_000 + "\nlast\n" in process.err, "not a byte is lost on the way"


def test_the_command_starts_with_ordinary_signals(run: Processes) -> None:
    """Python ignores SIGPIPE and handles others; nothing of it is handed on."""
    process = run.leasedjob("exec", "--", "cat", "/proc/self/status")
    assert process.wait() == 0
    found = [line.split() for line in process.out if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
    named = (1 << 31) - 1  # what lies above is the C library's own
    assert [(name, int(mask, 16) & named) for name, mask in found] == [("SigBlk:", 0), ("SigIgn:", 0), ("SigCgt:", 0)]


# --- signals ---------------------------------------------------------------------------------------------------------


def test_the_first_stop_is_passed_on_and_the_others_join_it(run: Processes, tmp_path: Path) -> None:
    process = noting(run, tmp_path, code=5)
    process.signal(signal.SIGTERM)
    process.line("got SIGTERM")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        process.signal(number)
    process.line("got SIGUSR1")
    (tmp_path / "end").touch()
    assert process.wait() == 5
    assert [line for line in process.out if line.startswith("got")] == ["got SIGTERM", "got SIGUSR1"]
    assert "stopped: signal; exit code 5" in process.err


def test_a_shell_in_between_keeps_nothing_back(run: Processes, tmp_path: Path) -> None:
    """The shell dies of SIGTERM at once; the program behind it finishes, and nobody hurries it."""
    line = f"{sys.executable} -c '{NOTES}' {tmp_path / 'end'} 0; echo never"
    process = run.leasedjob("exec", "--", "sh", "-c", line)
    process.line("ready")
    process.signal(signal.SIGTERM)
    process.line("got SIGTERM")
    (tmp_path / "end").touch()
    assert process.wait() == 143
    assert process.out[-1] == "done"


def test_a_command_that_does_not_end_is_killed_at_the_end_of_the_budget(run: Processes, tmp_path: Path) -> None:
    process = noting(run, tmp_path, "--grace", "3", "--pre-stop", "1")
    process.signal(signal.SIGTERM)
    assert process.wait() == 137
    assert "got SIGTERM" in process.out
    assert "killed at the end of its budget" in process.err


def test_what_the_command_leaves_behind_is_ended(run: Processes, tmp_path: Path) -> None:
    stubborn = tmp_path / "stubborn.sh"
    stubborn.write_text("trap '' TERM; echo $$; while :; do sleep 0.1; done\n")
    process = run.leasedjob("exec", "--", "sh", "-c", f"sh {stubborn} & sleep 0.5; exit 4")
    assert process.wait() == 4
    await_gone(int(process.out[0]))
    assert "left processes behind" in process.err


@pytest.mark.parametrize("milliseconds", [0, 20, 100, 300, 1000])
def test_a_sigterm_at_any_moment_of_the_start(run: Processes, tmp_path: Path, milliseconds: int) -> None:
    process = run.leasedjob("exec", "--", "sh", "-c", f"echo $$ > {tmp_path / 'pid'}; exec sleep 300")
    time.sleep(milliseconds / 1000)  # the moment is what is tested
    process.signal(signal.SIGTERM)
    assert process.wait() in (143, -signal.SIGTERM), "Python itself may not have begun"
    if (tmp_path / "pid").exists() and (pid := (tmp_path / "pid").read_text().strip()):
        await_gone(int(pid))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_it_is_still_being_imported_is_not_lost(run: Processes, tmp_path: Path, number: int) -> None:
    program = f"""
        import os, sys
        class Hook:
            def find_spec(self, name, path=None, target=None):
                if name == "leasedjob.workload.verbs":
                    os.kill(os.getpid(), {int(number)})
        sys.meta_path.insert(0, Hook())
        sys.argv = ["leasedjob", "exec", "--", "touch", {str(tmp_path / "ran")!r}]
        from leasedjob.__main__ import main
        main()
    """
    process = run.python(program)
    assert process.wait() == 128 + number
    assert not (tmp_path / "ran").exists()
    assert "the command was not started" in process.err


def test_what_was_ignored_at_the_start_stays_so(run: Processes, tmp_path: Path) -> None:
    program = f"exec {sys.executable} -m leasedjob exec -- sh -c 'kill -HUP $$; echo survived'"
    process = run.start(["sh", "-c", f"trap '' HUP; {program}"])
    assert process.wait() == 0
    assert process.out == ["survived"]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_as_the_first_process_of_a_container_it_reaps_and_hears_signals(run: Processes, tmp_path: Path) -> None:
    # An orphan that ends after its parent becomes a child of process 1; nobody else could reap it.
    orphans = "for i in 1 2 3; do sh -c 'sleep 0.1 &'; done; sleep 1; echo zombies $(ps -eo stat | grep -c '^Z')"
    command = f"{orphans}; exec {sys.executable} -c '{NOTES}' {tmp_path / 'end'} 6"
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    process = run.start([*words, sys.executable, "-m", "leasedjob", "exec", "--", "sh", "-c", command])
    process.line("zombies 0")
    process.line("ready")
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGTERM)  # from outside its namespace, as the kubelet's
    process.line("got SIGTERM")
    (tmp_path / "end").touch()
    assert process.wait() == 6


# --- with a sidecar --------------------------------------------------------------------------------------------------


def beside(pod: Pod, containers: int = 1) -> dict[str, str]:
    """The environment of a workload container of this Pod."""
    url = f"http://127.0.0.1:{pod.report_port}"
    return {protocol.ENV_SIDECAR_URL: url, protocol.ENV_CONTAINERS: str(containers)}


async def test_a_failure_is_recorded_with_its_code_and_the_end_of_stderr(
    run: Processes, pods: Pods, minute: datetime
) -> None:
    pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    program = "import sys; sys.stderr.write('x' * 10_000 + '\\nno such order\\n'); sys.exit(3)"
    process = run.leasedjob("exec", "--", sys.executable, "-c", program, env=beside(pod))
    assert process.wait() == 3
    assert pod.row()["status"] == "RUNNING", "recorded when the workload has ended"
    testimony = pod.end(seconds=LONG)
    assert (testimony.seen, testimony.outcome, testimony.recorded) == (Seen.REPORTED, "fail", True)
    row = pod.row()
    assert (row["status"], row["failures"]) == ("FAIL", 1)
    assert row["data"]["exitCode"] == 3
    assert row["data"]["error"] == "the command exited with 3: no such order"
    assert row["data"]["stderr"].endswith("xxx\nno such order")
    assert len(row["data"]["stderr"]) <= 3072


async def test_a_success_is_recorded_at_once(run: Processes, pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    assert run.leasedjob("exec", "--", "true", env=beside(pod)).wait() == 0
    row = pod.row()
    assert (row["status"], row["data"]) == ("SUCCESS", {"exitCode": 0})


@pytest.mark.parametrize(("containers", "options"), [(2, []), (0, []), (1, ["--no-report"])])
async def test_a_success_that_is_not_the_runs_is_not_reported(
    run: Processes, pods: Pods, minute: datetime, containers: int, options: list[str]
) -> None:
    pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    assert run.leasedjob("exec", *options, "--", "true", env=beside(pod, containers)).wait() == 0
    assert pod.view()["outcome"] is None
    assert pod.end(seconds=LONG).seen is Seen.LEASED


async def test_a_command_that_can_t_be_started_has_failed(run: Processes, pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    assert run.leasedjob("exec", "--", "no-such-command", env=beside(pod)).wait() == 127
    pod.end(seconds=LONG)
    assert pod.row()["data"]["error"] == "no-such-command: No such file or directory"


async def test_a_stopped_command_reports_nothing_whatever_its_code(
    run: Processes, pods: Pods, minute: datetime, tmp_path: Path
) -> None:
    """Whether a stop was an interruption, or a deadline that was passed, the operator sees and not the command."""
    pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    for code in (0, 1):
        end = tmp_path / f"end-{code}"
        command = [sys.executable, "-c", NOTES, str(end), str(code)]
        process = run.leasedjob("exec", "--", *command, env=beside(pod))
        process.line("ready")
        process.signal(signal.SIGTERM)
        process.line("got SIGTERM")
        end.touch()
        assert process.wait() == code
        assert pod.view()["outcome"] is None
    assert pod.end(seconds=LONG).seen is Seen.LEASED


async def test_a_lost_lease_stops_the_command_at_once(
    run: Processes, pods: Pods, minute: datetime, tmp_path: Path, database: Database
) -> None:
    pod = await pods.pod(minute, Timing(duration=60, heartbeat=1, grace=40, pre_stop=0))
    pod.adopt_and_hold()
    command = [sys.executable, "-c", NOTES, str(tmp_path / "end"), "0"]
    process = run.leasedjob("exec", "--", *command, env=beside(pod))
    process.line("ready")
    database.rows(
        "UPDATE leasedjob.job_scheduler SET stop_requested_at = clock_timestamp(), stop_reason = 'Replaced' "
        "WHERE id = %s::uuid",
        pod.lease_id,
    )
    process.line("got SIGTERM")
    (tmp_path / "end").touch()
    assert process.wait() == 0, "its own code; the sidecar's testimony says what it is worth"
    assert "stopped: lease lost (a stop was requested" in process.err
    assert pod.end(seconds=LONG).seen is Seen.FENCED


async def test_the_drain_notice_is_a_second_path_to_a_stop(
    run: Processes, pods: Pods, minute: datetime, tmp_path: Path
) -> None:
    pod = await pods.pod(minute, Timing(duration=120, heartbeat=2, grace=40, pre_stop=1))
    pod.adopt_and_hold()
    command = [sys.executable, "-c", NOTES, str(tmp_path / "end"), "0"]
    process = run.leasedjob("exec", "--", *command, env=beside(pod))
    process.line("ready")
    assert pod.run("drain") == 0
    process.line("got SIGTERM")  # no other process has sent one
    (tmp_path / "end").touch()
    assert process.wait() == 0
    assert "stopped: drain notice" in process.err
    late = run.leasedjob("exec", "--", "sh", "-c", "echo started", env=beside(pod))
    assert late.wait() == 143, "nothing is begun any more"
    assert late.out == []


@pytest.mark.parametrize(("code", "outcome"), [(0, "complete"), (4, None)])
async def test_a_command_that_ends_by_itself_after_the_notice(
    run: Processes, pods: Pods, minute: datetime, tmp_path: Path, code: int, outcome: str | None
) -> None:
    """Done is done; but whether a failure comes from the stop nobody knows, so the operator takes it as interrupted."""
    pod = await pods.pod(minute, Timing(duration=200, heartbeat=2, grace=60, pre_stop=50))
    pod.adopt_and_hold()
    command = [sys.executable, "-c", NOTES, str(tmp_path / "end"), str(code)]
    process = run.leasedjob("exec", "--", *command, env=beside(pod))
    process.line("ready")
    assert pod.run("drain") == 0
    await asyncio.sleep(0.5)  # the notice stops nothing
    (tmp_path / "end").touch()
    assert process.wait() == code
    assert "got SIGTERM" not in process.out
    assert pod.view()["outcome"] == outcome


async def test_a_sidecar_that_is_restarted_hears_the_report(run: Processes, pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, CALM)
    pod.adopt_and_hold()
    pod.kill()
    process = run.leasedjob("exec", "--", "sh", "-c", "exit 9", env=beside(pod))
    await asyncio.sleep(3)  # it asks in vain
    assert not process.ended()
    pod.begin_hold()
    assert process.wait() == 9
    pod.end(seconds=LONG)
    assert pod.row()["data"]["exitCode"] == 9
