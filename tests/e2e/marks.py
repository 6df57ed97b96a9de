"""Workloads that write down what happens to them, each moment a line in a file on a volume that outlives their Pods.

The file of attempt N is called N, in the job's own folder. Its lines are written with one system call each, so that a
workload's last moment is known however it ends; their times are this machine's, as the database's are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.jobs import NEVER, SHORT, container, leased_job
from tests.e2e.kube import Json

# What every program here begins with; a test's own program may, too.
PRELUDE = '''
    import json, os, signal, sys, time
    file = os.open(f"/marks/{os.environ['LEASEDJOB_ATTEMPT']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    def mark(what, **more):
        line = {"at": time.time(), "what": what, "token": int(os.environ["LEASEDJOB_FENCING_TOKEN"]),
                "key": os.environ["LEASEDJOB_IDEMPOTENCY_KEY"], **more}
        os.write(file, (json.dumps(line) + "\\n").encode())
    def ask(path, body=None):
        """What the sidecar answers: status and JSON."""
        import urllib.error, urllib.request
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(os.environ["LEASEDJOB_SIDECAR_URL"] + path, data=data)
        try:
            with urllib.request.urlopen(asked, timeout=40) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
'''

# Runs until it is killed; SIGTERM is noted and ignored.
DEAF = (
    PRELUDE
    + """
    signal.signal(signal.SIGTERM, lambda *_: mark("term"))
    mark("start")
    while True:
        mark("alive")
        time.sleep(0.05)
"""
)


def shared_folder(top: Path) -> Path:
    """A folder below `top` that workloads write to, whoever they run as."""
    folder = top / "marks"
    folder.mkdir()
    folder.chmod(0o777)
    for parent in folder.parents[:3]:
        parent.chmod(0o755)
    return folder


def ends_with(code: int = 0, *, needs: float = 0) -> str:
    """Runs until somebody writes the file `finish` (then it exits 0) or SIGTERM comes: then it goes on for `needs`
    seconds, counted from the first SIGTERM, and exits with `code`."""
    return (
        PRELUDE
        + f"""
    until = None
    def term(*_):
        global until
        mark("term")
        until = until or time.monotonic() + {needs}
    signal.signal(signal.SIGTERM, term)
    mark("start")
    code = 0
    while not os.path.exists("/marks/finish"):
        if until and time.monotonic() >= until:
            code = {code}
            break
        mark("alive")
        time.sleep(0.05)
    mark("end")
    sys.exit(code)
"""
    )


def read(folder: Path, attempt: int) -> list[Json]:
    """The marks of an attempt; a line that is being written is left out."""
    path = folder / str(attempt)
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def said(folder: Path, attempt: int, what: str) -> list[Json]:
    """The marks `what` of an attempt."""
    return [mark for mark in read(folder, attempt) if mark["what"] == what]


def own(folder: Path, job: str) -> Path:
    """A folder of one job within a test's."""
    path = folder / job
    path.mkdir(exist_ok=True)
    path.chmod(0o777)
    return path


def finish(folder: Path) -> None:
    """Lets the workloads of a folder end by themselves."""
    (folder / "finish").touch()


def marked_job(name: str, folder: Path, program: str = DEAF, timing: Json = SHORT, **spec: Any) -> Json:
    """A LeasedJob whose workload (and whose init containers, if any) may write to `folder`; it has no ticks."""
    mount = [{"name": "marks", "mountPath": "/marks"}]
    pod = spec.pop("pod", {})
    for init in pod.get("initContainers", []):
        init.setdefault("volumeMounts", mount)
    pod = {**pod, "volumes": [{"name": "marks", "hostPath": {"path": str(folder)}}]}
    main = container(program, volumeMounts=mount)
    return leased_job(name, **{"containers": [main], "schedule": NEVER, **timing, **spec, "pod": pod})
