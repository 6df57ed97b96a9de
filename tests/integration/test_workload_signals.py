"""Draining and stopping in real processes: signals at every moment, blocked loops, parts that never end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from leasedjob import http1, protocol
from leasedjob.lease.store import OperatorStore
from leasedjob.lease.trust import Timing

from .conftest import Database
from .sidecar_parts import Pods, pods_for
from .workload_parts import LONG, Process, Processes, processes

pytestmark = pytest.mark.integration

PRELUDE = """
import asyncio, logging, os, sys, threading, time
from leasedjob.workload import *
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
"""


@pytest.fixture
def run() -> Iterator[Processes]:
    yield from processes()


@pytest.fixture
def pods(tmp_path: Path, database: Database, store: OperatorStore) -> Iterator[Pods]:
    yield from pods_for(tmp_path, database, store)


# Works until draining, finishes what is in its hands when the file is there, and closes its pool last.
WORKER = (
    PRELUDE
    + """
async def main(end):
    state = ShutdownState.listening()
    async def worker():
        while not state.is_draining():
            await asyncio.sleep(0.01)
        while not os.path.exists(end):
            await asyncio.sleep(0.01)
        print("worked")
    working = asyncio.create_task(worker())
    async def finish():
        print("stopping")
        await working
    async with GracefulShutdown(state) as shutdown:
        shutdown.on_stop(Phase.BACKGROUND, "worker", finish)
        shutdown.on_stop(Phase.POOLS, "pool", lambda: print("closed"))
        print("ready", state.readiness()[0])
        await state
        print("draining", state.readiness()[0])
        await shutdown.finished()
asyncio.run(main(sys.argv[1]))
print("end")
"""
)


def worker(run: Processes, end: Path, env: dict[str, str] | None = None) -> Process:
    return run.start([sys.executable, "-c", WORKER, str(end)], env)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_signals_that_come_again_join_the_same_drain(run: Processes, tmp_path: Path, first: int) -> None:
    process = worker(run, tmp_path / "end")
    process.line("ready 200")
    process.signal(first)
    process.line("draining 503")
    process.line("stopping")
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        process.signal(number)
    time.sleep(0.3)  # none of them does anything
    assert not process.ended()
    (tmp_path / "end").touch()
    assert process.wait() == 0
    assert process.out[-3:] == ["worked", "closed", "end"]
    assert process.err.count("stopping: SIG") == 1
    assert "joins the stop that has begun" in process.err


@pytest.mark.parametrize("milliseconds", [20, 100, 300, 1000])
def test_a_sigterm_at_any_moment_of_the_start(run: Processes, tmp_path: Path, milliseconds: int) -> None:
    (tmp_path / "end").touch()
    process = worker(run, tmp_path / "end")
    time.sleep(milliseconds / 1000)  # the moment is what is tested
    process.signal(signal.SIGTERM)
    code = process.wait()
    if code == -signal.SIGTERM:
        assert process.out == [], "before it listened nothing was begun"
    else:
        assert code == 0
        assert process.out[-3:] == ["worked", "closed", "end"]


def test_a_program_s_own_signal_handlers_on_the_loop_take_nothing_away(run: Processes) -> None:
    """asyncio takes the wakeup descriptor over for them."""
    process = run.python(
        PRELUDE
        + """
import signal
async def main():
    state = ShutdownState.listening()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: print("usr1"))
    print("ready")
    print("drained by", await state)
asyncio.run(main())
"""
    )
    process.line("ready")
    process.signal(signal.SIGUSR1)
    process.line("usr1")
    process.signal(signal.SIGTERM)
    process.line("drained by SIGTERM")
    assert process.wait() == 0


def test_another_kind_of_loop_takes_nothing_away_either(run: Processes) -> None:
    """uvloop has a wakeup descriptor of its own."""
    process = run.python(
        PRELUDE
        + """
import uvloop
async def main():
    state = ShutdownState.listening()
    print("ready")
    print("drained by", await state)
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""
    )
    process.line("ready")
    process.signal(signal.SIGTERM)
    process.line("drained by SIGTERM")
    assert process.wait() == 0


def test_a_call_in_c_that_blocks_the_loop_neither_hides_the_signal_nor_delays_the_end(run: Processes) -> None:
    process = run.python(
        PRELUDE
        + """
import hashlib
async def close():
    print("never")
async def main():
    state = ShutdownState.listening()
    threading.Thread(target=lambda: (state.wait(), print("heard"))).start()
    shutdown = GracefulShutdown(state, ShutdownBudget.within(6, 0))
    await shutdown.__aenter__()
    shutdown.on_stop(Phase.HTTP, "api", close)
    shutdown.on_stop(Phase.POOLS, "pool", lambda: print("closed"))
    print("ready")
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
asyncio.run(main())
"""
    )
    process.line("ready")
    time.sleep(0.5)  # so that the call has begun
    process.signal(signal.SIGTERM)
    assert process.wait() == 143
    assert process.out[1:] == ["heard", "closed"]
    assert "ERROR shutdown: http: api was cut off" in process.err
    assert "CRITICAL shutdown: the budget of 5 s is over; cut off: api" in process.err


def test_a_task_that_never_ends_and_a_phase_that_raises_are_named_and_the_rest_still_runs(run: Processes) -> None:
    process = run.python(
        PRELUDE
        + """
async def main():
    state = ShutdownState.listening()
    never = asyncio.create_task(asyncio.Event().wait())
    async def finish():
        await never
    def fail():
        raise OSError("no broker")
    async with GracefulShutdown(state, ShutdownBudget(pre_stop=0, background=1)) as shutdown:
        shutdown.on_stop(Phase.BACKGROUND, "task", finish)
        shutdown.on_stop(Phase.CONSUMERS, "consumer", fail)
        shutdown.on_stop(Phase.POOLS, "pool", lambda: print("closed"))
        print("ready")
        report = await shutdown.finished()
    print(*(f"{line.phase} {line.outcome}" for line in report))
asyncio.run(main())
"""
    )
    process.line("ready")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert process.out[1:] == ["closed", "background cut consumers failed pools done"]
    assert "ERROR shutdown: background: task was cut off" in process.err
    assert "ERROR shutdown: consumers: consumer failed: OSError: no broker" in process.err


def test_a_program_that_does_not_end_after_its_stop_ends_by_itself_and_says_what_ran(run: Processes) -> None:
    process = run.python(
        PRELUDE
        + """
state = ShutdownState.listening()
threading.Thread(target=threading.Event().wait, name="forgotten").start()
with GracefulShutdown(state, ShutdownBudget.within(3, 0)) as shutdown:
    print("ready")
    shutdown.wait()
print("main ends")
"""
    )
    process.line("ready")
    process.signal(signal.SIGTERM)
    process.line("main ends")
    assert process.wait() == 143
    assert "nothing, but the program goes on" in process.err
    assert "threads: forgotten" in process.err


def test_the_sidecars_notice_comes_before_sigterm(run: Processes, tmp_path: Path) -> None:
    """Both moments by hand; those of a real sidecar are below."""
    process = run.python(
        PRELUDE
        + """
state = ShutdownState.listening()
with GracefulShutdown(state, ShutdownBudget()) as shutdown:
    shutdown.on_stop(Phase.HTTP, "api", lambda: print("api closes"))
    state.notice("preStop")
    print("ready", *state.readiness())
    shutdown.wait()
"""
    )
    process.line("ready 503 draining: preStop")
    time.sleep(0.3)
    assert "api closes" not in process.out, "requests still arrive"
    process.signal(signal.SIGTERM)
    process.line("api closes")
    assert process.wait() == 0


SERVER = (
    PRELUDE
    + """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
end = sys.argv[1]
state = ShutdownState.listening()
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        status, text = 200, "done"
        if self.path == "/ready":
            status, text = state.readiness()
        elif self.path == "/notice":
            state.notice("preStop")
        elif self.path == "/work":
            sys.stdout.write("working\\n")  # at once: others write, too
            while not os.path.exists(end):
                time.sleep(0.02)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *_):
        pass
class Server(ThreadingHTTPServer):
    daemon_threads = False          # so that closing it waits for the requests in flight
with Server(("127.0.0.1", 0), Handler) as server:
    threading.Thread(target=server.serve_forever).start()
    with GracefulShutdown(state, ShutdownBudget()) as shutdown:
        def close():
            server.shutdown()
            server.server_close()
        shutdown.on_stop(Phase.HTTP, "api", close)
        shutdown.on_stop(Phase.POOLS, "pool", lambda: print("pool closed"))
        print("port", server.server_address[1])
        shutdown.wait()
"""
)


def test_a_server_is_unready_at_once_serves_until_the_stop_and_finishes_what_it_has(
    run: Processes, tmp_path: Path
) -> None:
    process = run.start([sys.executable, "-c", SERVER, str(tmp_path / "end")])
    port = int(process.line("port").split()[1])

    def get(path: str) -> tuple[int, bytes]:
        return http1.ask("127.0.0.1", port, "GET", path, seconds=LONG)

    assert get("/ready") == (200, b"ready")
    assert get("/notice")[0] == 200
    assert get("/ready") == (503, b"draining: preStop")
    with ThreadPoolExecutor(2) as clients:
        late = [clients.submit(get, "/work") for _ in range(2)]  # were on their way when the notice came
        process.line("working")
        process.line("working")
        process.signal(signal.SIGTERM)
        until = time.monotonic() + LONG
        while time.monotonic() < until:
            try:
                http1.ask("127.0.0.1", port, "GET", "/ready", seconds=1)
            except OSError:
                break  # nobody accepts or answers any more
        assert not any(request.done() for request in late)
        assert "pool closed" not in process.out
        (tmp_path / "end").touch()
        assert [request.result() for request in late] == [(200, b"done")] * 2
    assert process.wait() == 0
    assert process.out[-1] == "pool closed"


async def test_a_drain_notice_of_a_real_sidecar(run: Processes, pods: Pods, minute: datetime, tmp_path: Path) -> None:
    pod = await pods.pod(minute, Timing(duration=200, heartbeat=2, grace=30, pre_stop=10))
    pod.adopt_and_hold()
    (tmp_path / "end").touch()
    url = {protocol.ENV_SIDECAR_URL: f"http://127.0.0.1:{pod.report_port}"}
    process = worker(run, tmp_path / "end", url)
    process.line("ready 200")
    assert pod.run("drain") == 0
    process.line("draining 503")
    assert process.wait() == 0, "nothing here has use for the time until SIGTERM"
    assert "draining: the sidecar's drain notice" in process.err
    late = worker(run, tmp_path / "end", url)
    assert late.wait() != 0, "a program that starts now is told at once: nothing may be begun"
    assert "DrainingError" in late.err


# --- children that are forked -----------------------------------------------------------------------------------------

FORKED = (
    PRELUDE
    + """
import multiprocessing, signal
state = ShutdownState.listening()
fork = multiprocessing.get_context("fork")
def work(begun):
    begun.set()
    time.sleep(600)
for number, ended in [(signal.SIGTERM, -signal.SIGTERM)] * 20 + [(signal.SIGINT, 1)]:
    begun = fork.Event()
    child = fork.Process(target=work, args=(begun,))
    child.start()
    if number == signal.SIGINT:    # while a child begins, Python itself may lose a KeyboardInterrupt
        begun.wait(60)
    os.kill(child.pid, number)
    child.join(50)
    assert child.exitcode == ended, child.exitcode
with fork.Pool(2) as pool:
    assert pool.map(abs, (-1, -2)) == [1, 2]
print("draining", state.is_draining(), state.reason)
print("mask", *signal.pthread_sigmask(signal.SIG_BLOCK, ()))
os.kill(os.getpid(), signal.SIGTERM)
print("draining", state.wait(60), state.reason)
"""
)
FORKED_LISTENS = (
    PRELUDE
    + """
state = ShutdownState.listening()
child = os.fork()
if not child:
    state = ShutdownState.listening()
    print("child", os.getpid(), flush=True)
    state.wait()
    print("child drains", state.reason, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("parent drains", state.is_draining())
"""
)
FORKED_IN_POD = (
    PRELUDE
    + """
state, run = ShutdownState.listening(), current_run()
child = os.fork()
if not child:
    state, theirs = ShutdownState.listening(), current_run()
    print("child", theirs is run, flush=True)
    state.wait(60)
    print("child drains", state.reason, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
)


def test_what_ends_a_forked_child_ends_that_child_and_not_its_parent(run: Processes) -> None:
    process = run.python(FORKED)
    assert process.wait() == 0, process.err
    assert process.out == ["draining False ", "mask", "draining True SIGTERM"]


def test_a_forked_child_that_listens_itself_drains_alone(run: Processes) -> None:
    process = run.python(FORKED_LISTENS)
    os.kill(int(process.line("child").split()[1]), signal.SIGTERM)
    assert process.wait() == 0, process.err
    assert process.out[1:] == ["child drains SIGTERM", "parent drains False"]


async def test_a_forked_child_hears_of_its_pod_s_notice(run: Processes, pods: Pods, minute: datetime) -> None:
    pod = await pods.pod(minute, Timing(duration=200, heartbeat=2, grace=30, pre_stop=10))
    pod.adopt_and_hold()
    process = run.python(
        FORKED_IN_POD,
        {
            protocol.ENV_SIDECAR_URL: f"http://127.0.0.1:{pod.report_port}",
            protocol.ENV_TYPE: "SCHEDULE",
            protocol.ENV_CODE: "forks",
            protocol.ENV_RUN_KEY: "",
            protocol.ENV_ATTEMPT: "1",
            protocol.ENV_IDEMPOTENCY_KEY: "v2:key",
            protocol.ENV_FENCING_TOKEN: "1",
        },
    )
    process.line("child False")
    assert pod.run("drain") == 0
    assert process.wait() == 0, process.err
    assert process.out[1:] == ["child drains the sidecar's drain notice"]


# --- R-SHUT-SCHED-1: the forbidden way, and this one ------------------------------------------------------------------

FORBIDDEN = (
    PRELUDE
    + """
async def main():
    state = ShutdownState.listening()
    async def iterate():
        while True:
            await asyncio.sleep(0.05)
            print("began")
            await asyncio.sleep(0.3)
            print("ended")
    task = asyncio.create_task(iterate())
    await state
    task.cancel()          # the interval is cleared, its iteration is not awaited
asyncio.run(main())
"""
)
ALLOWED = (
    PRELUDE
    + """
async def main():
    state = ShutdownState.listening()
    async def iterate():
        print("began")
        await asyncio.sleep(0.3)
        print("ended")
    async with GracefulShutdown(state) as shutdown:
        intervals = IntervalRegistry(state)
        intervals.add("work", 0.05, iterate)
        shutdown.add(intervals)
        await shutdown.finished()
asyncio.run(main())
"""
)


@pytest.mark.parametrize(("program", "unfinished"), [(FORBIDDEN, 1), (ALLOWED, 0)], ids=["forbidden", "allowed"])
def test_an_interval_that_is_cancelled_loses_its_iteration(run: Processes, program: str, unfinished: int) -> None:
    process = run.python(program)
    for _ in range(3):
        process.line("began")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert process.out.count("began") - process.out.count("ended") == unfinished
