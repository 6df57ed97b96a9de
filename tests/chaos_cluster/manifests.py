"""The real LeasedJobs of a run: what each of them is, and the manifest that says so."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from tests.chaos_cluster import clocks
from tests.e2e.jobs import IMAGE, container, leased_job
from tests.e2e.kube import Json

NAMESPACE: Final = "chaos"


class Kind(StrEnum):
    """How a workload reports."""

    PLAIN = "plain"  # an image that knows nothing of LeasedJob: its exit code
    EXEC = "exec"  # under `leasedjob exec`
    SDK = "sdk"  # by the workload SDK


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds."""

    lease: int
    heartbeat: int
    grace: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Real:
    """A LeasedJob.

    Args:
        every, offset: minutes.
        work: seconds that its workload takes.
        fails: attempts that fail at their end.
        deaf: its workload takes no notice of SIGTERM.
        jitter: seconds by which its runs start after their ticks, at most; the same for one tick everywhere.
    """

    name: str
    kind: Kind
    policy: str
    every: int
    offset: int
    work: float
    timing: Timing
    backoff: int = 0
    fails: int = 0
    deaf: bool = False
    deadline: int | None = None
    missed: str = "RunLatest"
    jitter: int = 0

    @property
    def code(self) -> str:
        return f"{NAMESPACE}/{self.name}"

    @property
    def schedule(self) -> str:
        minutes = "*" if self.every == 1 else f"{self.offset}-59/{self.every}"
        return f"{minutes} * * * *"


# One text for all: what it is told of by its environment it tells the recorder, and works.
_WORK: Final = """
    import json, os, signal, socket, sys, time

    recorder = socket.create_connection((os.environ["RECORDER_HOST"], int(os.environ["RECORDER_PORT"])), timeout=30)
    answers = recorder.makefile()

    def say(what, **more):
        recorder.sendall((json.dumps({"what": what, **more}) + "\\n").encode())
        return answers.readline() == "1\\n"

    def begin():
        names = {"key": "IDEMPOTENCY_KEY", "code": "CODE", "token": "FENCING_TOKEN", "attempt": "ATTEMPT"}
        told = {name: os.environ["LEASEDJOB_" + variable] for name, variable in names.items()}
        if not say("start", pod=os.environ["POD_NAME"], **told):
            sys.exit(4)

    def work(stopped):
        # True if it was finished
        fails = int(os.environ["LEASEDJOB_ATTEMPT"]) <= int(os.environ["FAILS"])
        end = time.monotonic() + float(os.environ["WORK"])
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
            if stopped():
                say("term")
                return False
            if not say("effect") and os.environ["DEAF"] == "no":
                sys.exit(4)
        if fails:
            sys.exit(3)
        return say("done")
"""
_PLAIN: Final = """
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    begin()
    work(lambda: told and os.environ["DEAF"] == "no")
"""
_SDK: Final = """
    from leasedjob.workload import DrainingError, ShutdownState, current_run
    state = ShutdownState.listening()
    run = current_run()
    begin()
    try:
        with run:
            if not work(state.is_draining):
                raise DrainingError("stopped")
            run.complete({"done": True})
    except DrainingError as error:
        print(error)
"""


def manifest(job: Real, *, recorder: tuple[str, int], image: str) -> Json:
    """Args:
    image: one that has the package.
    """
    environment: dict[str, Any] = {
        "RECORDER_HOST": recorder[0],
        "RECORDER_PORT": recorder[1],
        "WORK": job.work,
        "FAILS": job.fails,
        "DEAF": "yes" if job.deaf else "no",
        **clocks.RIGHT,
    }
    env: list[Json] = [{"name": name, "value": str(value)} for name, value in environment.items()]
    env.append({"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
    main = container(_WORK + (_SDK if job.kind is Kind.SDK else _PLAIN), env=env)
    if job.kind is not Kind.PLAIN:
        main["image"] = image
    if job.kind is Kind.EXEC:
        main["command"] = ["leasedjob", "exec", "--", *main["command"]]
    assert job.kind is not Kind.PLAIN or main["image"] == IMAGE
    spec: dict[str, Any] = {
        "schedule": job.schedule,
        "concurrencyPolicy": job.policy,
        "missedRunPolicy": job.missed,
        "backoffLimit": job.backoff,
        "lease": {"durationSeconds": job.timing.lease, "heartbeatSeconds": job.timing.heartbeat},
        "shutdown": {"preStopSeconds": 0, "terminationGracePeriodSeconds": job.timing.grace},
        "successfulRunsHistoryLimit": 0,
        "failedRunsHistoryLimit": 0,
    }
    if job.jitter:
        spec["jitterSeconds"] = job.jitter
    if job.deadline is not None:
        spec["startingDeadlineSeconds"] = job.deadline
    return leased_job(job.name, containers=[main], **spec)
