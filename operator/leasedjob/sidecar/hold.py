"""`leasedjob-sidecar hold`: keeps the lease while the workload runs, and answers for it.

This is the thin edge around `fence`: one loop with two small HTTP servers and a clock, one thread for the database, one
that writes files, and one for each of the workload's own probes.

    probe port, on the Pod's address    GET  /v1/lease/<id>/<attempt>/<container>    200, or 503: the liveness probes
    report port, on 127.0.0.1           GET  /v1/lease[?revision=N&wait=S]    the state; with a wait: once it changed
                                        GET  /v1/drain[?wait=S]               once draining or no longer leased
                                        POST /v1/drain                        the drain notice; heartbeats go on
                                        POST /v1/outcome {"outcome": "complete|fail|release", "data": ...}
                                        POST /v1/shutdown {"phases": [{"phase", "outcome", "seconds"}]}

An outcome is answered 200 when the database has it (also if it had it already), 409 if the lease is lost or another
outcome came first, 422 if it can't be stored, 503 if the database didn't answer yet: ask again.
SIGTERM means that the workload has ended, since the kubelet stops sidecars last: the final testimony is written, and
the process ends.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import selectors
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, assert_never

from leasedjob import protocol
from leasedjob.lease.held import MAX_DATA_BYTES, Outcome
from leasedjob.sidecar import fence, files
from leasedjob.sidecar.clock import boot_id, boottime, walltime
from leasedjob.sidecar.fence import NEVER, Phase, State
from leasedjob.sidecar.link import KEEP_BELOW_SECONDS, Connect, Link, Make, connector
from leasedjob.sidecar.server import Exchange, Request, Server
from leasedjob.sidecar.settings import Settings

if TYPE_CHECKING:
    from leasedjob.sidecar.probes import OwnProbe, ProbeLoop

TICK_SECONDS: Final = 0.5
TESTIFY_SECONDS: Final = 1.0
OUTCOME_SECONDS: Final = 25.0  # how long a report waits for the database before its maker is told to ask again
WAIT_MOST_SECONDS: Final = 60.0
BODY_LIMIT: Final = 4 * MAX_DATA_BYTES  # JSON may escape what the database stores in a quarter of the bytes
CONTAINERS_MOST: Final = 256  # names that may be asked for; a Pod has far fewer


@dataclass(slots=True)
class Waiting:
    """An exchange that is answered once `ready` gives an answer, or with `late` when its time is over."""

    exchange: Exchange
    until: float
    ready: Callable[[], tuple[int, dict[str, Any]] | None]
    late: Callable[[], tuple[int, dict[str, Any]]]


class Scribe(threading.Thread):
    """Writes the newest testimony; a disk that stalls holds up nobody but this thread."""

    def __init__(self, path: str) -> None:
        super().__init__(name="scribe", daemon=True)
        self._path = path
        self._condition = threading.Condition()
        self._next: str | None = None
        self._idle = True

    def post(self, message: str) -> None:
        with self._condition:
            self._next = message
            self._condition.notify_all()

    def flush(self, seconds: float) -> None:
        """Waits until everything posted is written."""
        with self._condition:
            self._condition.wait_for(lambda: self._next is None and self._idle, seconds)

    def run(self) -> None:
        while True:
            with self._condition:
                self._idle = True
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._next is not None)
                message, self._next, self._idle = self._next, None, False
            if message is not None:
                files.write_message(self._path, message)


class Hold:
    """The process. `run` returns its exit code.

    Args:
        connect: opens a database connection within the seconds given; default: from the mounted credentials.
        early: the signals that came before `run` took them over.
    """

    def __init__(
        self,
        settings: Settings,
        env: Mapping[str, str],
        *,
        connect: Connect | None = None,
        early: Sequence[int] = (),
    ) -> None:
        self._settings = settings
        self._connect = connect or connector(settings.database_dir)
        self._lease_id = env.get(protocol.ENV_LEASE_ID, "")
        self._pod_uid = env.get(protocol.ENV_POD_UID, "")
        self._probes_text = env.get(protocol.ENV_USER_PROBES, "")
        self._boot = boot_id()
        self._state = State()
        self._revision = 0
        self._visible: tuple[object, ...] = ()
        self._link: Link | None = None
        self._adopted_at: float | None = None  # None also if the handoff was written before a reboot
        self._own_probes: dict[str, OwnProbe] = {}
        self._probe_loops: dict[str, ProbeLoop] = {}
        self._waiting: list[Waiting] = []
        self._inbox: collections.deque[tuple[int | None, Make]] = collections.deque()
        self._testify_at = 0.0
        self._leave = False
        self._early, self._signals = early, 0
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._drain_wakeups)
        self._servers: dict[int, Server] = {}
        self._bind_problem = self._write_problem = ""
        self._scribe = Scribe(settings.termination_log)

    def run(self) -> int:
        signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        self._signals += len(self._early)
        self._scribe.start()
        self._bind()
        self._read_handoff()
        while not self._leave:
            for key, mask in self._selector.select(self._pause()):
                key.data(mask)
            self._turn()
        self._testify()
        self._scribe.flush(1.0)
        say(f"ends: {self._state.testimony(boottime(), walltime(), lease_id=self._lease_id).to_json()}")
        return 0

    # --- the loop's parts ---

    def _pause(self) -> float:
        """Until the next tick, or the next call if that comes before."""
        return max(0.02, min(TICK_SECONDS, self._state.due_at - boottime()))

    def _turn(self) -> None:
        if self._signals:
            self._signals = 0
            self._feed(fence.Term(boottime()))
        while self._inbox:
            number, make = self._inbox.popleft()
            if number is None or (self._link is not None and number == self._link.current):
                self._feed(make(boottime(), random.random()))
        if self._state.lease is None:
            self._read_handoff()
        self._feed(fence.Tick(boottime()))
        if len(self._servers) < 2:
            self._bind()
        for server in self._servers.values():
            server.expire()
        self._serve_waiting()
        if boottime() >= self._testify_at:
            self._testify()

    def _feed(self, event: fence.Event) -> fence.Answer | None:
        answer = None
        self._state, actions = fence.step(self._state, event)
        for action in actions:
            match action:
                case fence.Beat() | fence.Record() | fence.Note():
                    assert self._link is not None
                    self._link.send(action)
                case fence.Cut():
                    if self._link is not None and self._link.cut():
                        self._inbox.append((self._link.current, _cut_off))
                case fence.Answer():
                    answer = action
                case fence.Leave():
                    self._leave = True
                case never:
                    assert_never(never)
        self._notice()
        return answer

    def _notice(self) -> None:
        """A change that somebody waits for: remembered before anybody hears of it, said, and testified at once."""
        state, at = self._state, boottime()
        report = state.report
        visible = (
            state.phase(at),
            state.fenced,
            state.draining,
            report and (report.outcome, report.recorded, report.refused, report.rejected),
            tuple(state.suspicions.items()),
            tuple(state.unhealthy),
            state.leaving,
            state.counts.last_problem if state.failures else "",
        )
        if visible == self._visible:
            return
        self._visible = visible
        self._revision += 1
        self._testify_at = 0.0
        self._remember()
        text = f"{state.phase(at)}"
        for word, value in (
            ("why", state.why(at)),
            ("suspicion", "; ".join(s.reason for s in state.suspicions.values())),
            ("report", f"{report.outcome}{' recorded' if report.recorded else ''} {report.refused}" if report else ""),
            ("draining", "yes" if state.draining else ""),
            ("unhealthy", ", ".join(state.unhealthy)),
            ("database", state.counts.last_problem if state.failures else ""),
        ):
            text += f", {word}: {value}" if value else ""
        say(text)

    def _testify(self) -> None:
        at = boottime()
        testimony = self._state.testimony(at, walltime(), lease_id=self._lease_id)
        self._scribe.post(testimony.to_json())
        self._remember()
        self._testify_at = at + TESTIFY_SECONDS

    def _remember(self) -> None:
        """For a successor in this Pod; into memory, so it doesn't wait for a disk."""
        try:
            files.write_memory(self._settings.memory_file, self._state, self._boot)
        except OSError as error:
            if str(error) != self._write_problem:
                self._write_problem = str(error)
                say(f"can't write {self._settings.memory_file}: {error}")

    def _serve_waiting(self) -> None:
        now, still = time.monotonic(), []
        for waiting in self._waiting:
            answer = waiting.ready() if waiting.exchange.open else None
            if answer is None and now >= waiting.until:
                answer = waiting.late()
            if answer is not None:
                waiting.exchange.answer(*answer)
            elif waiting.exchange.open:
                still.append(waiting)
        self._waiting = still

    def _bind(self) -> None:
        """Both ports; a port that is taken is tried again at each turn, and the probes fail meanwhile."""
        for host, port, handle, limit in (
            ("127.0.0.1", self._settings.report_port, self._report, BODY_LIMIT),
            ("", self._settings.probe_port, self._probe, 0),
        ):
            if port in self._servers:
                continue
            try:
                self._servers[port] = Server(self._selector, host, port, handle, now=time.monotonic, body_limit=limit)
                self._bind_problem = ""
            except OSError as error:
                problem = f"can't listen on port {port}: {error.strerror}"
                if problem != self._bind_problem:
                    self._bind_problem = problem
                    say(problem)

    def _read_handoff(self) -> None:
        handoff = files.Handoff.read(self._settings.handoff_file)
        lease = handoff.lease if handoff else None
        if handoff is None or lease is None:
            return
        if self._lease_id not in ("", handoff.lease_id) or self._pod_uid not in ("", handoff.pod_uid):
            return  # not for this Pod
        at = boottime()
        same_boot = handoff.boot_id == self._boot and handoff.sent is not None and handoff.trusted_until is not None
        self._link = Link(
            handoff.lease_id,
            handoff.token,
            self._connect,
            seconds=lease.call_limit,
            keep=lease.timing.heartbeat <= KEEP_BELOW_SECONDS,
            done=self._deliver,
        )
        self._adopted_at = handoff.sent if same_boot else None
        if self._probes_text:
            self._parse_probes()
        self._feed(
            fence.HandedOver(
                at,
                lease,
                sent=handoff.sent if same_boot and handoff.sent is not None else NEVER,
                trusted_until=handoff.trusted_until if same_boot and handoff.trusted_until is not None else NEVER,
                before=files.read_memory(self._settings.memory_file, lease, self._boot),
                jitter=random.random(),
            )
        )

    def _parse_probes(self) -> None:
        from leasedjob.sidecar.probes import parse_all

        try:
            address = socket.gethostbyname(socket.gethostname())  # the Pod's address stands in its /etc/hosts
        except OSError:
            address = ""
        self._own_probes = parse_all(self._probes_text, address)

    # --- from other threads and signals ---

    def _deliver(self, number: int | None, make: Make) -> None:
        self._inbox.append((number, make))
        with contextlib.suppress(OSError):  # full: the loop is awake anyway
            self._wake_out.send(b"\0")

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._signals += 1

    def _drain_wakeups(self, _mask: int) -> None:
        with contextlib.suppress(OSError):
            while self._wake_in.recv(4096):
                pass

    # --- probe port ---

    def _probe(self, request: Request, exchange: Exchange) -> None:
        parts = request.path.split("/")
        if request.method != "GET":
            exchange.answer(405, {"error": "GET only"})
            return
        if len(parts) != 6 or parts[:3] != ["", "v1", "lease"] or not (parts[4].isascii() and parts[4].isdecimal()):
            exchange.answer(404, {"error": "no such path"})
            return
        lease_id, attempt, container = parts[3], int(parts[4][:9]), parts[5]
        if len(container) > 63 or (container not in self._state.asked and len(self._state.asked) >= CONTAINERS_MOST):
            exchange.answer(404, {"error": "no such container"})
            return
        answer = self._feed(fence.Asked(boottime(), lease_id, attempt, container, gone=exchange.gone()))
        assert answer is not None
        exchange.answer(200 if answer.yes else 503, {"leased": answer.yes, "reason": answer.reason})
        if container in self._own_probes and container not in self._probe_loops and answer.yes:
            self._begin_own_probe(container)

    def _begin_own_probe(self, container: str) -> None:
        from leasedjob.sidecar.probes import ProbeLoop

        def failed(name: str, reason: str) -> None:
            self._deliver(None, lambda at, _jitter: fence.Unhealthy(at, name, reason[:160]))

        loop = ProbeLoop(container, self._own_probes[container], failed)
        self._probe_loops[container] = loop
        loop.start()

    # --- report port ---

    def _report(self, request: Request, exchange: Exchange) -> None:
        match request.method, request.path:
            case "GET", "/v1/lease":
                self._get_lease(request, exchange)
            case "GET", "/v1/drain":
                self._get_drain(request, exchange)
            case "POST", "/v1/drain":
                self._feed(fence.Drain(boottime()))
                exchange.answer(200, {"draining": True})
            case "POST", "/v1/outcome":
                self._post_outcome(request, exchange)
            case "POST", "/v1/shutdown":
                self._post_shutdown(request, exchange)
            case _, "/v1/lease" | "/v1/drain" | "/v1/outcome" | "/v1/shutdown":
                exchange.answer(405, {"error": "not this method"})
            case _:
                exchange.answer(404, {"error": "no such path"})

    def _get_lease(self, request: Request, exchange: Exchange) -> None:
        try:
            wait, seen = _wait(request), int(request.query.get("revision", "-1"))
        except ValueError:
            exchange.answer(400, {"error": "wait and revision are numbers"})
            return

        def ready() -> tuple[int, dict[str, Any]] | None:
            return (200, self._view()) if self._revision != seen else None

        self._hold_exchange(Waiting(exchange, time.monotonic() + wait, ready, lambda: (200, self._view())))

    def _get_drain(self, request: Request, exchange: Exchange) -> None:
        try:
            wait = _wait(request)
        except ValueError:
            exchange.answer(400, {"error": "wait is a number of seconds"})
            return

        def ready() -> tuple[int, dict[str, Any]] | None:
            state, at = self._state, boottime()
            over = state.draining or state.phase(at) is Phase.FENCED
            return (200, self._drain_view()) if over else None

        self._hold_exchange(Waiting(exchange, time.monotonic() + wait, ready, lambda: (200, self._drain_view())))

    def _post_outcome(self, request: Request, exchange: Exchange) -> None:
        try:
            raw = json.loads(request.body.decode("utf-8", "replace"))
            outcome, data = Outcome(raw["outcome"]), raw.get("data")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            exchange.answer(400, {"error": 'expected JSON: {"outcome": "complete|fail|release", "data": ...}'})
            return
        self._feed(fence.Reported(boottime(), outcome, data))

        def ready() -> tuple[int, dict[str, Any]] | None:
            status = fence.report_status(self._state, outcome)
            if status is None:
                return None
            code, why = status
            body: dict[str, Any] = {"recorded": code == 200, "outcome": outcome}
            if why:
                body["error"] = why
            if code == 409:  # for the SDK: another outcome came first, or nothing can be recorded any more
                body["lost"] = self._state.lost
            return code, body

        def late() -> tuple[int, dict[str, Any]]:
            why = self._state.counts.last_problem or "the database has not answered yet"
            return 503, {"recorded": False, "outcome": outcome, "error": why}

        self._hold_exchange(Waiting(exchange, time.monotonic() + OUTCOME_SECONDS, ready, late))

    def _post_shutdown(self, request: Request, exchange: Exchange) -> None:
        """Answered at once: whoever says it is about to end."""
        try:
            raw = json.loads(request.body.decode("utf-8", "replace"))
            phases = protocol.PhaseEnd.parse(raw["phases"] if isinstance(raw, dict) and "phases" in raw else None)
        except (ValueError, RecursionError) as error:
            exchange.answer(400, {"error": f'expected JSON: {{"phases": [...]}}: {error}'})
            return
        self._feed(fence.Noted(boottime(), str(uuid.uuid4()), phases))
        exchange.answer(202, {"accepted": True})

    def _hold_exchange(self, waiting: Waiting) -> None:
        answer = waiting.ready()
        if answer is None and waiting.until <= time.monotonic():
            answer = waiting.late()
        if answer is not None:
            waiting.exchange.answer(*answer)
        else:
            self._waiting.append(waiting)

    def _drain_view(self) -> dict[str, Any]:
        state, at = self._state, boottime()
        return {"draining": state.draining, "leased": state.leased(at), "reason": state.why(at)}

    def _view(self) -> dict[str, Any]:
        """The state for people, the gate and the SDK; no token in it."""
        state, at = self._state, boottime()
        lease, report, counts = state.lease, state.report, state.counts
        return {
            "leaseId": lease.lease_id if lease else self._lease_id,
            "attempt": lease.attempt if lease else 0,
            "fencingToken": lease.fencing_token if lease else 0,
            "idempotencyKey": lease.lock_key if lease else "",
            "state": "reported" if report and report.recorded else state.phase(at),
            "leased": state.leased(at),
            "lost": state.lost,
            "trustLeftSeconds": round(max(0.0, state.trusted_until - at), 3) if state.leased(at) else 0.0,
            "draining": state.draining,
            "graceSeconds": lease.timing.grace if lease else None,
            "preStopSeconds": lease.timing.pre_stop if lease else None,
            "sinceAdoptionSeconds": None if self._adopted_at is None else round(at - self._adopted_at, 3),
            "reason": state.why(at),
            "outcome": report.outcome if report else None,
            "recorded": bool(report and report.recorded),
            "unhealthy": dict(state.unhealthy),
            "revision": self._revision,
            "heartbeats": {
                "answered": counts.beats,
                "failed": counts.failed,
                "latestSeconds": round(counts.latest_seconds, 4),
                "lateSeconds": round(counts.late_seconds, 4),
                "lastProblem": counts.last_problem,
            },
        }


def _cut_off(at: float, jitter: float) -> fence.CallFailed:
    return fence.CallFailed(at, "the database did not answer in time", jitter)


def _wait(request: Request) -> float:
    seconds = float(request.query.get("wait", "0"))
    return max(0.0, min(seconds, WAIT_MOST_SECONDS)) if seconds == seconds else 0.0


def say(text: str) -> None:
    """One line to the container's log."""
    print(f"leasedjob-hold: {text}", file=sys.stderr, flush=True)


def run(settings: Settings, early: Sequence[int] = ()) -> int:
    """Runs until SIGTERM; `early` are the signals that have come already."""
    return Hold(settings, os.environ, early=early).run()
