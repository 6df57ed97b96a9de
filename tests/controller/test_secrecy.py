"""No secret in logs, Events, statuses, metrics, probes' answers or lists of processes.

The real operator at DEBUG, the real sidecar and the real command line work with secrets that are known, also where
things go wrong, and everything that others can read of them is searched.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

from leasedjob import protocol
from tests.controller.control_plane import GROUP, VERSION, Bench, Json, Kubelet, free_port, wait_until
from tests.controller.test_database_faults import operator_role
from tests.controller.test_monitoring import Monitor, monitor  # noqa: F401  # fixture
from tests.controller.test_rights import ALL, Account

OF_OPERATOR, WRONG = "op's-m4rked/9%", "wr0ng-m4rked-pass"
IN_TEMPLATE, IN_URL, IN_DEAD_URL = "t3mplate-m4rked", "url-m4rked", "dead-m4rked"


def forms(secret: str) -> set[str]:
    """As it may be written."""
    return {secret, quote(secret, safe=""), json.dumps(secret)[1:-1], base64.b64encode(secret.encode()).decode()}


def told(text: str, secrets: Mapping[str, str]) -> set[str]:
    """Names of the secrets that a text tells."""
    return {name for name, secret in secrets.items() if any(form in text for form in forms(secret))}


def test_a_secret_is_found_in_each_of_its_forms() -> None:
    for form in ("pass word=op's-m4rked/9%", "op%27s-m4rked%2F9%25", base64.b64encode(OF_OPERATOR.encode()).decode()):
        assert told(f"a {form} b", {"it": OF_OPERATOR, "other": WRONG}) == {"it"}


def command_lines() -> str:
    """Of every process, as every user of the machine sees them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(found)


def environment_of(pid: int) -> str:
    """As its own user and root see it; what crash reports and debug pages tend to print."""
    return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")


class Sidecar:
    """The real adopt and hold of one Pod, with the environment that the operator gave them."""

    def __init__(self, bench: Bench, pod: Json) -> None:
        self.bench, self.pod = bench, pod
        self.folder = bench.folder / f"pod-{pod['metadata']['uid'][:8]}"
        (self.folder / "database").mkdir(parents=True)
        for name, value in bench.core.read_namespaced_secret("leasedjob-sidecar", bench.namespace).data.items():
            (self.folder / "database" / name).write_bytes(base64.b64decode(value))
        self._ports = {"PROBE_PORT": str(free_port()), "REPORT_PORT": str(free_port())}

    def _environment(self, container: str) -> dict[str, str]:
        wanted = next(c for c in self.pod["spec"]["initContainers"] if c["name"] == container)
        meta = self.pod["metadata"]
        fields = {"metadata.uid": meta["uid"], "metadata.name": meta["name"]}
        files = {
            "HANDOFF_FILE": "lease.json", "DATABASE_DIR": "database", "TERMINATION_LOG": f"{container}.message",
        }  # fmt: skip
        return {
            "PATH": os.environ["PATH"],
            **{e["name"]: e.get("value") or fields[e["valueFrom"]["fieldRef"]["fieldPath"]] for e in wanted["env"]},
            **{f"LEASEDJOB_SIDECAR_{k}": str(self.folder / v) for k, v in files.items()},
            **{f"LEASEDJOB_SIDECAR_{k}": v for k, v in self._ports.items()},
        }

    def start(self, container: str, verb: str) -> subprocess.Popen[bytes]:
        env = self._environment(container)
        (self.folder / f"{container}.message").write_text("")
        with (self.folder / f"{verb}.log").open("ab") as log:
            argv = [sys.executable, "-m", "leasedjob.sidecar.main", verb]
            return subprocess.Popen(argv, env=env, stdout=log, stderr=log)

    def adopt(self) -> None:
        assert self.start(protocol.CONTAINER_ADOPT, "adopt").wait(60) == 0, self.texts()

    @contextmanager
    def hold(self) -> Iterator[subprocess.Popen[bytes]]:
        process = self.start(protocol.CONTAINER_HOLD, "hold")
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, self.texts()
        finally:
            process.kill()
            process.wait()

    @property
    def token(self) -> str:
        """The lease's own token, which only adopt and hold know."""
        return str(json.loads((self.folder / "lease.json").read_text())["token"])

    def texts(self) -> str:
        """What the kubelet keeps of them: logs and termination messages."""
        return "".join(p.read_text() for p in self.folder.glob("*.log")) + "".join(
            p.read_text() for p in self.folder.glob("*.message")
        )


def _shown(bench: Bench) -> dict[str, str]:
    """What the API server shows of the test's namespace to whoever may not read Secrets, by kind."""
    found: dict[str, str] = {"Events": json.dumps(_raw(bench, "/api/v1", "events"))}
    for plural in ("leasedjobs", "leasedjobruns"):
        items = _raw(bench, f"/apis/{GROUP}/{VERSION}", plural)
        found[plural] = json.dumps([{**i, "spec": None} for i in items])  # the spec is the user's own
    found["Pods"] = json.dumps(
        [
            {**p, "spec": {**p["spec"], "containers": [{**c, "env": None} for c in p["spec"]["containers"]]}}
            for p in _raw(bench, "/api/v1", "pods")
        ]
    )
    return found


def _raw(bench: Bench, base: str, plural: str) -> list[Json]:
    answer = bench.plane.api().call_api(
        "GET",
        f"https://127.0.0.1:{bench.plane.port}{base}/namespaces/{bench.namespace}/{plural}",
        header_params={"Authorization": f"Bearer {bench.plane.token}", "Accept": "application/json"},
    )
    return list(json.loads(answer.read())["items"])


def _command_line(bench: Bench, url: str, *words: str) -> str:
    env = {"PATH": os.environ["PATH"], "LEASEDJOB_DATABASE_URL": url}
    argv = [sys.executable, "-m", "leasedjob", *words]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


@pytest.fixture
def account(bench: Bench) -> Account:
    account = Account(bench)
    account.may(*ALL)
    return account


def test_no_secret_is_told(bench: Bench, monitor: Monitor, account: Account) -> None:  # noqa: F811
    with operator_role(bench, "CREATEROLE") as role:
        with psycopg.connect(bench.postgres.conninfo("postgres"), autocommit=True) as c:
            c.execute(f"ALTER ROLE {role} PASSWORD 'op''s-m4rked/9%'")  # type: ignore[arg-type]
        (bench.credentials / "password").write_text(OF_OPERATOR)
        dead = f"http://127.0.0.1:{free_port()}"
        operator = bench.operator(
            LEASEDJOB_LOG_LEVEL="DEBUG",
            LEASEDJOB_KOPF_LOG_LEVEL="DEBUG",
            **account.environment(LEASEDJOB_PING_HOSTS=f"{monitor.host},{dead}"),
        )
        pid = operator._process.pid  # type: ignore[union-attr]
        secrets = {
            "the operator's password": OF_OPERATOR, "a wrong password": WRONG, "the operator's token": account.token,
            "a variable of the template": IN_TEMPLATE, "a monitor's path": IN_URL, "a dead monitor's path": IN_DEAD_URL,
        }  # fmt: skip

        # A monitor that is away, which is told after several tries, and one that may not be called.
        bench.apply("dead", suspend=True, monitoring={"pingURL": f"{dead}/{IN_DEAD_URL}"})
        bench.apply("refused", suspend=True, monitoring={"pingURL": f"https://elsewhere.example/{IN_DEAD_URL}"})
        for job in ("dead", "refused"):
            bench.whole_run(job)

        # A run with the real sidecar, to its end.
        ping = {"metadata": {"name": "leasedjob-monitoring"}, "stringData": {"nightly": f"{monitor.host}/{IN_URL}"}}
        bench.core.create_namespaced_secret(bench.namespace, ping)
        container = {"name": "main", "image": "i", "env": [{"name": "TOKEN", "value": IN_TEMPLATE}]}
        bench.apply(
            "job", suspend=True, monitoring={"pingURLKey": "nightly"}, template={"spec": {"containers": [container]}}
        )
        bench.run_now("job")
        pod = bench.pod_for("job")
        kubelet, sidecar = Kubelet(bench, pod), Sidecar(bench, pod)
        sidecar.adopt()
        secrets["the claim's token"] = str(kubelet.claim_token)
        secrets["the lease's token"] = sidecar.token
        secrets["the namespace's password"] = (sidecar.folder / "database" / "password").read_text()
        with sidecar.hold() as hold:
            kubelet.start()
            wait_until("it holds", lambda: (sidecar.folder / "hold.log").read_text(), 60)
            lines = command_lines()
            assert told(environment_of(hold.pid), secrets) == set(), "in the environment of hold"
        kubelet.end(0, testimony=(sidecar.folder / f"{protocol.CONTAINER_HOLD}.message").read_text())
        wait_until("it is over", lambda: bench.rows("job")[-1]["status"] == "SUCCESS", 60)
        wait_until("its monitor is told", lambda: (f"/{IN_URL}", str(kubelet.lease_id)) in monitor.told, 60)

        # A sidecar with a wrong password.
        bench.run_now("dead")
        other = wait_until(
            "another Pod", lambda: next((p for p in bench.pods() if not p["spec"].get("nodeName")), None), 60
        )
        refused = Sidecar(bench, other)
        (refused.folder / "database" / "password").write_text(WRONG)
        adopt = refused.start(protocol.CONTAINER_ADOPT, "adopt")
        wait_until("it was refused", lambda: "password" in refused.texts() or adopt.poll() is not None, 60)
        adopt.kill()
        adopt.wait()
        secrets["another claim's token"] = str(Kubelet(bench, other).claim_token)
        # The operator's own: refused, then no connection string at all.
        for name, text in (("password", WRONG), ("uri", f"postgresql://{role}:{WRONG}@[broken")):
            was = (bench.credentials / name).read_text() if (bench.credentials / name).exists() else None
            (bench.credentials / name).write_text(text)
            bench.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s AND datname = %s",
                role,
                bench.database,
            )
            wait_until("it says that it is not ready", lambda: operator.probe("/readyz")[0] == 503, 60, 0.2)
            time.sleep(1)  # it tries meanwhile
            answers = operator.probe("/readyz")[1] + operator.probe("/healthz")[1]
            assert told(answers, secrets) == set(), answers
            (bench.credentials / name).unlink() if was is None else (bench.credentials / name).write_text(was)
        bench.wait_ready(operator)
        # The command line.
        conninfo = f"postgresql://{role}:{{}}@{bench.postgres.address}:{bench.postgres.port}/{bench.database}"
        said = _command_line(bench, conninfo.format(quote(OF_OPERATOR, safe="")), "migrate", "--check")
        assert "current" in said
        said += _command_line(bench, conninfo.format(WRONG), "migrate", "--check")
        said += _command_line(bench, f"postgresql://{role}:{WRONG}@[broken", "migrate", "--check")

        wait_until("both are told", lambda: {"PingFailed", "PingRefused"} <= _reasons(bench), 90)
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.metrics}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
        environment = environment_of(pid)
        lines += command_lines()
        assert operator.stop() == 0

    log = operator.log.read_text()
    assert "DEBUG" in log
    assert told(log, secrets) == set(), "in the operator's log"
    assert told(sidecar.texts() + refused.texts(), secrets) == set(), "in the sidecar's logs or messages"
    assert told(said, secrets) == set(), said
    assert told(metrics, secrets) == set()
    assert told(lines, secrets) == set(), "in a list of processes"
    assert told(environment, secrets) == set(), "in the operator's environment"
    # The claim's token is in the Pod that it is for, and worth nothing once adopt has shown it.
    allowed = {"Pods": {"the claim's token", "another claim's token"}}
    for kind, text in _shown(bench).items():
        assert told(text, secrets) <= allowed.get(kind, set()), kind


def _reasons(bench: Bench) -> set[str]:
    return {e["reason"] for e in _raw(bench, "/api/v1", "events")}


def test_a_process_that_is_told_a_secret_on_its_command_line_is_found() -> None:
    process: Any = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", WRONG])
    try:
        wait_until("it is listed", lambda: told(command_lines(), {"it": WRONG}) == {"it"}, 30)
    finally:
        process.kill()
        process.wait()
