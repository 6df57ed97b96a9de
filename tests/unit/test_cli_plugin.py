"""`kubectl leasedjob` against an HTTP server on the loopback that plays the API server's paths and its errors.

The answers have the shape of a real API server's (tests/e2e/test_kubectl_plugin.py asks one).
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner, Result
from tests.unit.kube_api import FakeApi, status, write_kubeconfig

from leasedjob.api.v1alpha1 import RunPhase
from leasedjob.cli import wait
from leasedjob.cli.complete import answer
from leasedjob.cli.exits import Exit, Phase
from leasedjob.cli.kubectl import VERBS, plugin
from leasedjob.cli.list import last_result, state
from leasedjob.cli.options import Tick
from leasedjob.cli.output import ago, duration, printable

Object = dict[str, Any]
NOW = datetime(2026, 7, 20, 3, 0, tzinfo=UTC)
Call = Callable[..., Result]


# --- run --------------------------------------------------------------------------------------------------------------


def test_run_creates_one_leasedjobrun_owned_by_the_job(api: FakeApi, call: Call) -> None:
    api.job()
    result = call("run", "hello", "--reason", "the night's was lost")
    assert result.exit_code == Exit.OK
    (_, _, body) = api.bodies[0]
    assert body["metadata"] == {
        "generateName": "hello-",
        "ownerReferences": [
            {"apiVersion": "leasedjob.io/v1alpha1", "kind": "LeasedJob", "name": "hello", "uid": "uid-hello"}
        ],
    }
    assert body["spec"] == {"jobName": "hello", "reason": "the night's was lost"}
    (run,) = api.runs()
    assert result.stdout == f"leasedjobrun.leasedjob.io/{run['metadata']['name']} created\n"


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("2026-07-20T03:00:00Z", "2026-07-20T03:00:00Z"),
        ("2026-07-20T05:00:00+02:00", "2026-07-20T03:00:00Z"),
        ("2026-07-20t03:00:00z", "2026-07-20T03:00:00Z"),
        ("2026-07-19T23:30:00-03:30", "2026-07-20T03:00:00Z"),
    ],
)
def test_a_tick_is_stored_in_utc(
    api: FakeApi, call: Call, monkeypatch: pytest.MonkeyPatch, given: str, stored: str
) -> None:
    monkeypatch.setattr(wait, "ANSWER_SECONDS", 0.1)
    api.job()
    result = call("run", "hello", "--tick", given)
    assert result.exit_code == Exit.OK
    assert api.bodies[0][2]["spec"]["tick"] == stored
    assert "created" in result.stdout
    assert "no operator has said yet" in result.stderr


def test_a_tick_that_is_none_is_refused_without_waiting_for_a_run(api: FakeApi, call: Call) -> None:
    api.job()
    nearest = 'no tick of "0 3 * * *" in Etc/UTC; the nearest: 2026-07-20T03:00:00Z'

    def operator() -> None:
        api.tell(phase=RunPhase.PENDING, reason="Pending", message="not claimed yet")
        api.tell(phase=RunPhase.REFUSED, reason="NotATick", message=nearest)

    thread = in_background(operator)
    result = call("run", "hello", "--tick", "2026-07-20T03:30:00Z")
    thread.join()
    assert result.exit_code == Exit.RUN_REFUSED
    assert nearest in result.stderr
    assert "created" in result.stdout


def test_a_tick_that_is_one_is_not_waited_for(api: FakeApi, call: Call) -> None:
    api.job()
    thread = in_background(lambda: api.tell(phase=RunPhase.PENDING, reason="Claimed", attempt=1))
    result = call("run", "hello", "--tick", "2026-07-20T03:00:00Z")
    thread.join()
    assert (result.exit_code, result.stderr) == (Exit.OK, "")


def test_a_claimed_run_whose_pod_is_pending_is_an_answer(api: FakeApi, call: Call) -> None:
    api.job()
    thread = in_background(lambda: api.tell(phase=RunPhase.PENDING, reason="Pending", attempt=1))
    result = call("run", "hello", "--at", "2026-07-20T03:00:00Z")
    thread.join()
    assert (result.exit_code, result.stderr) == (Exit.OK, "")


def test_who_may_not_watch_runs_is_told_that_nothing_is_known(api: FakeApi, call: Call) -> None:
    api.job()
    forbidden = status(403, "Forbidden", 'leasedjobruns.leasedjob.io is forbidden: User "u" cannot get')
    api.fail = lambda method, path: (403, forbidden) if method == "GET" and "leasedjobruns" in path else None
    result = call("run", "hello", "--tick", "2026-07-20T03:00:00Z")
    assert result.exit_code == Exit.OK
    assert "no operator has said yet" in result.stderr


@pytest.mark.parametrize(
    "tick",
    [
        "now",
        "",
        "2026-07-20",
        "2026-07-20T03:00:00",
        "2026-07-20T03:00:00.5Z",
        "2026-02-30T03:00:00Z",
        "0001-01-01T00:00:00+05:00",
        "1721440800",
    ],
)
def test_a_bad_tick_is_a_usage_error_and_creates_nothing(api: FakeApi, call: Call, tick: str) -> None:
    api.job()
    result = call("run", "hello", "--tick", tick)
    assert result.exit_code == Exit.USAGE
    assert "--tick" in result.stderr
    assert api.bodies == []


def test_a_missing_leasedjob_is_named_and_nothing_is_created(api: FakeApi, call: Call) -> None:
    result = call("run", "hallo")
    assert result.exit_code == Exit.NOT_FOUND
    assert result.stderr == "Error: LeasedJob hallo not found in namespace default (context here)\n"
    assert api.bodies == []


def test_run_prints_the_object_that_was_stored(api: FakeApi, call: Call) -> None:
    api.job()
    body = json.loads(call("run", "hello", "-o", "json").stdout)
    assert body["spec"]["jobName"] == "hello"
    assert "managedFields" not in body["metadata"]
    assert yaml.safe_load(call("run", "hello", "-o", "yaml").stdout)["kind"] == "LeasedJobRun"
    assert re.fullmatch(r"leasedjobrun\.leasedjob\.io/hello-x\d+\n", call("run", "hello", "-o", "name").stdout)


def in_background(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("phase", "code"),
    [
        (RunPhase.SUCCEEDED, Exit.OK),
        (RunPhase.FAILED, Exit.RUN_FAILED),
        (RunPhase.CANCELLED, Exit.RUN_CANCELLED),
        (RunPhase.REFUSED, Exit.RUN_REFUSED),
    ],
)
def test_wait_follows_the_run_to_its_end(api: FakeApi, call: Call, phase: RunPhase, code: Exit) -> None:
    api.job()

    def operator() -> None:
        api.tell(phase=RunPhase.RUNNING, attempt=1, pod_name="hello-0a1b-1")
        api.tell(phase=phase, attempt=1, reason="Because", message="what happened")

    thread = in_background(operator)
    result = call("run", "hello", "--wait")
    thread.join()
    assert result.exit_code == code
    (run,) = api.runs()
    name = run["metadata"]["name"]
    assert result.stdout == f"leasedjobrun.leasedjob.io/{name} {phase}\n"
    assert f"{name}: Running, attempt 1, Pod hello-0a1b-1\n" in result.stderr
    assert ("Error: " in result.stderr) is (code != Exit.OK)


def test_a_watch_that_breaks_is_begun_again(api: FakeApi, call: Call) -> None:
    api.job()

    def operator() -> None:
        assert api.watching.wait(10)
        api.cut()
        api.tell(phase=RunPhase.SUCCEEDED)

    thread = in_background(operator)
    result = call("run", "hello", "--wait")
    thread.join()
    assert result.exit_code == Exit.OK
    assert len(api.watchers) == 2


def test_a_watch_from_too_old_a_version_is_begun_again(api: FakeApi, call: Call) -> None:
    api.job()

    def operator() -> None:
        assert api.watching.wait(10)
        gone = status(410, "Expired", "too old resource version")
        api.watching.clear()
        api.event("ERROR", gone)
        api.tell(phase=RunPhase.SUCCEEDED)

    thread = in_background(operator)
    assert call("run", "hello", "--wait").exit_code == Exit.OK
    thread.join()


def test_wait_ends_when_the_run_is_deleted(api: FakeApi, call: Call) -> None:
    api.job()

    def somebody() -> None:
        assert api.watching.wait(10)
        api.event("DELETED", api.runs()[0])

    thread = in_background(somebody)
    result = call("run", "hello", "--wait")
    thread.join()
    assert result.exit_code == Exit.NOT_FOUND
    assert "was deleted" in result.stderr


def test_wait_gives_up_after_its_timeout_and_the_run_goes_on(api: FakeApi, call: Call) -> None:
    api.job()
    result = call("run", "hello", "--wait", "--timeout", "0.5")
    assert result.exit_code == Exit.TIMED_OUT
    assert "it goes on" in result.stderr
    assert api.runs()[0]["spec"].get("cancel") is None


def test_timeout_without_wait_is_a_usage_error(call: Call) -> None:
    assert call("run", "hello", "--timeout", "3").exit_code == Exit.USAGE


# --- cancel -----------------------------------------------------------------------------------------------------------


def test_cancel_sets_the_one_field(api: FakeApi, call: Call) -> None:
    api.run("hello-1", phase=RunPhase.RUNNING)
    result = call("cancel", "hello-1")
    assert result.exit_code == Exit.OK
    assert api.bodies == [("PATCH", "application/merge-patch+json", {"spec": {"cancel": True}})]
    assert result.stdout == "leasedjobrun.leasedjob.io/hello-1 is being cancelled\n"


@pytest.mark.parametrize("phase", [p for p in RunPhase if Phase(p).exit_code is not None])
def test_cancelling_what_has_ended_changes_nothing(api: FakeApi, call: Call, phase: RunPhase) -> None:
    api.run("hello-1", phase=phase)
    result = call("cancel", "hello-1")
    assert result.exit_code == Exit.OK
    assert str(phase) in result.stdout
    assert api.bodies == []


def test_cancel_by_job_and_run_key_prefers_the_run_that_goes_on(api: FakeApi, call: Call) -> None:
    tick = "2026-07-20T03:00:00Z"
    api.run("hello-1", tick=tick, phase=RunPhase.REFUSED)
    api.run("hello-2", run_key=tick, phase=RunPhase.RUNNING)
    api.run("other-1", job="other", tick=tick, phase=RunPhase.RUNNING)
    assert "hello-2 is being cancelled" in call("cancel", f"hello/{tick}").stdout


def test_cancel_by_a_manual_run_key_with_slashes(api: FakeApi, call: Call) -> None:
    api.run("hello-1", run_key="manual/default/hello-1/uid", phase=RunPhase.RUNNING)
    assert "hello-1 is being cancelled" in call("cancel", "hello/manual/default/hello-1/uid").stdout


def test_cancel_says_what_was_not_found(api: FakeApi, call: Call) -> None:
    assert "LeasedJobRun nix not found" in call("cancel", "nix").stderr
    assert "LeasedJob nix not found" in call("cancel", "nix/2026-07-20T03:00:00Z").stderr


def test_cancel_can_wait_for_the_end_and_any_end_will_do(api: FakeApi, call: Call) -> None:
    api.run("hello-1", phase=RunPhase.RUNNING)
    thread = in_background(lambda: api.tell(phase=RunPhase.SUCCEEDED))
    result = call("cancel", "hello-1", "--wait")
    thread.join()
    assert result.exit_code == Exit.OK
    assert result.stdout == "leasedjobrun.leasedjob.io/hello-1 Succeeded\n"


# --- list and runs ----------------------------------------------------------------------------------------------------


def condition(truth: str, reason: str) -> Object:
    return {"type": "Ready", "status": truth, "reason": reason, "message": "", "lastTransitionTime": NOW}


def fill(api: FakeApi) -> None:
    ran = {
        "runKey": "2026-07-20T03:00:00Z",
        "attempt": 2,
        "podName": "hello-0a1b-2",
        "holder": "c1/default/hello-0a1b-2",
    }
    ended = {"startTime": NOW, "completionTime": NOW + timedelta(seconds=200)}
    api.job(
        "hello",
        code="default/hello",
        conditions=[condition("True", "Accepted")],
        active_count=0,
        last_result="Failed",
        last_schedule_time=NOW,
        next_schedule_time=datetime.now(UTC) + timedelta(days=300),
        recent_runs=[{**ran, **ended, "outcome": "Failed", "reason": "Error", "message": "exit code 3"}],
        holder="c1/default/hello-0a1b-2",
    )
    api.job("bad", conditions=[condition("False", "InvalidSpec")])
    api.job("resting", conditions=[condition("True", "Suspended")])
    api.job("far", namespace="shop")


def test_list_shows_state_and_last_result(api: FakeApi, call: Call) -> None:
    fill(api)
    lines = [re.split(r" {3,}", line) for line in call("list").stdout.splitlines()]
    assert lines[0] == [
        "NAME", "SCHEDULE", "TIME ZONE", "STATE", "ACTIVE", "NEXT", "LAST SCHEDULE", "LAST RESULT", "AGE",
    ]  # fmt: skip
    by_name = {line[0]: line for line in lines[1:]}
    assert by_name.keys() == {"hello", "bad", "resting"}
    assert by_name["hello"][1:5] == ["0 3 * * *", "Etc/UTC", "Ready", "0"]
    assert by_name["hello"][7] == "Failed Error"
    assert by_name["hello"][5] == "in 299d"
    assert by_name["bad"][3] == "False: InvalidSpec"
    assert by_name["resting"][3] == "Suspended"


def test_list_reads_every_page(api: FakeApi, call: Call) -> None:
    for number in range(5):
        api.job(f"job-{number}")
    assert call("list", "-o", "name").stdout.split() == [f"leasedjob.leasedjob.io/job-{n}" for n in range(5)]
    assert api.pages == ["", "2", "4"]


def test_list_of_all_namespaces_and_of_one(api: FakeApi, call: Call) -> None:
    fill(api)
    lines = call("list", "-A", "--no-headers").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["default", "default", "default", "shop"]
    assert call("list", "-n", "shop", "-o", "name").stdout == "leasedjob.leasedjob.io/far\n"
    assert call("-n", "shop", "list", "-o", "name").stdout == "leasedjob.leasedjob.io/far\n"
    assert call("list", "--context", "shop", "-o", "name").stdout == "leasedjob.leasedjob.io/far\n"


def test_list_wide_json_and_yaml(api: FakeApi, call: Call) -> None:
    fill(api)
    wide = call("list", "-o", "wide").stdout
    assert "HOLDER" in wide.splitlines()[0]
    assert "c1/default/hello-0a1b-2" in wide
    body = json.loads(call("list", "-o", "json").stdout)
    assert body["kind"] == "List"
    assert all("managedFields" not in item["metadata"] for item in body["items"])
    assert yaml.safe_load(call("list", "-o", "yaml").stdout) == body


def test_an_empty_list_says_so_and_succeeds(call: Call) -> None:
    result = call("list")
    assert (result.exit_code, result.stdout) == (Exit.OK, "")
    assert result.stderr == "No LeasedJobs in namespace default.\n"
    assert json.loads(call("list", "-o", "json").stdout)["items"] == []


def test_runs_shows_the_status(api: FakeApi, call: Call) -> None:
    fill(api)
    lines = [re.split(r" {3,}", line) for line in call("runs", "hello").stdout.splitlines()]
    assert lines[0] == ["RUN KEY", "ATTEMPT", "OUTCOME", "REASON", "SCHEDULED", "STARTED", "DURATION", "POD"]
    assert lines[1][:5] == ["2026-07-20T03:00:00Z", "2", "Failed", "Error", "<none>"]
    assert lines[1][6:] == ["3m20s", "hello-0a1b-2"]
    assert "exit code 3" in call("runs", "hello", "-o", "wide").stdout
    assert json.loads(call("runs", "hello", "-o", "json").stdout)[0]["runKey"] == "2026-07-20T03:00:00Z"


def test_runs_of_a_job_without_runs(api: FakeApi, call: Call) -> None:
    api.job()
    result = call("runs", "hello")
    assert (result.exit_code, result.stdout, result.stderr) == (Exit.OK, "", "No run of hello yet.\n")


def test_text_from_the_cluster_cannot_write_to_the_terminal(api: FakeApi, call: Call) -> None:
    job = api.job()
    job["spec"]["schedule"] = "\x1b]0;gotcha\x07 [red]x[/red]"
    shown = call("list").stdout
    assert "\x1b" not in shown
    assert "\\x1b]0;gotcha\\x07 [red]x[/red]" in shown


@pytest.mark.parametrize("columns", [40, 200])
def test_a_terminal_gets_whole_columns_in_colour(api: FakeApi, kubeconfig: Path, columns: int) -> None:
    fill(api)
    shown = on_a_terminal(["--kubeconfig", str(kubeconfig), "list", "-o", "wide"], columns)
    assert "c1/default/hello-0a1b-2" in shown
    assert re.search(r"\x1b\[31m *False: InvalidSpec", shown)


def on_a_terminal(words: list[str], columns: int) -> str:
    import fcntl
    import os
    import pty
    import struct
    import termios

    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")} | {"TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-m", "leasedjob.cli.kubectl", *words], stdin=theirs, stdout=theirs, env=environment
    ) as process:
        os.close(theirs)
        read = b""
        try:
            while chunk := os.read(mine, 65536):
                read += chunk
        except OSError:  # Linux: the other side is closed
            pass
        os.close(mine)
    assert process.returncode == 0
    return read.decode()


# --- errors -----------------------------------------------------------------------------------------------------------

FORBIDDEN = (
    'leasedjobs.leasedjob.io "hello" is forbidden: User "eve" cannot get resource "leasedjobs" in API group '
    '"leasedjob.io" in the namespace "default"'
)


@pytest.mark.parametrize(
    ("answered", "code", "text"),
    [
        ((401, status(401, "Unauthorized", "Unauthorized")), Exit.NO_ACCESS, "not logged in"),
        ((403, status(403, "Forbidden", FORBIDDEN)), Exit.NO_ACCESS, 'User "eve" cannot get'),
        ((403, status(403, "Forbidden", "exceeded quota: count")), Exit.REFUSED, "refused: exceeded quota"),
        ((404, "404 page not found\n"), Exit.NOT_INSTALLED, "is the chart installed there?"),
        ((422, status(422, "Invalid", "spec.tick: Invalid value")), Exit.REFUSED, "spec.tick: Invalid value"),
        ((500, status(500, "InternalError", "etcd is away")), Exit.REFUSED, "500: etcd is away"),
        ((502, "<html>\nbad gateway\x1b[31m</html>"), Exit.REFUSED, "502"),
    ],
)
@pytest.mark.parametrize("words", [("run", "hello"), ("cancel", "hello"), ("list",), ("list", "-A"), ("runs", "hello")])
def test_every_refusal_is_one_line_and_a_code(
    api: FakeApi, call: Call, words: tuple[str, ...], answered: tuple[int, Any], code: Exit, text: str
) -> None:
    api.fail = lambda _method, _path: answered
    result = call(*words)
    assert result.exit_code == code
    assert result.stdout == ""
    assert text in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "\x1b" not in result.stderr


def test_a_namespace_that_does_not_exist(api: FakeApi, call: Call) -> None:
    api.job(namespace="gone")
    result = call("run", "hello", "-n", "gone")
    assert result.exit_code == Exit.NOT_FOUND
    assert "namespace gone not found" in result.stderr


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound, never listening
        taken.bind(("127.0.0.1", 0))
        write_kubeconfig(tmp_path / "config", f"http://127.0.0.1:{taken.getsockname()[1]}")
        result = CliRunner().invoke(plugin, ["--kubeconfig", str(tmp_path / "config"), "list"])
    assert result.exit_code == Exit.UNREACHABLE
    assert "Connection refused" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("text", ["", "a: [", "[]", "kind: Config\n", "contexts: 3\ncurrent-context: x\n", "\x00"])
def test_an_unusable_kubeconfig_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    result = CliRunner().invoke(plugin, ["list", "--kubeconfig", str(tmp_path / "config")])
    assert result.exit_code == Exit.UNREACHABLE
    assert len(result.stderr.splitlines()) == 1


def test_a_missing_kubeconfig_and_an_unknown_context(tmp_path: Path, call: Call) -> None:
    result = CliRunner().invoke(plugin, ["list", "--kubeconfig", str(tmp_path / "nothing")])
    assert result.exit_code == Exit.UNREACHABLE
    result = call("list", "--context", "nowhere")
    assert result.exit_code == Exit.UNREACHABLE
    assert "'nowhere' (it has: here, shop)" in result.stderr


@pytest.mark.parametrize(
    "words", [("nonsense",), ("run",), ("list", "-o", "xml"), ("run", "a", "b"), ("list", "--nope")]
)
def test_usage_errors(call: Call, words: tuple[str, ...]) -> None:
    result = call(*words)
    assert result.exit_code == Exit.USAGE
    assert result.stderr.startswith("Usage: kubectl leasedjob")


# --- completion -------------------------------------------------------------------------------------------------------


def completed(kubeconfig: Path, *words: str) -> list[str]:
    """The values, and the directive, as kubectl would read them."""
    lines = answer(["--kubeconfig", str(kubeconfig), *words]).splitlines()
    return [line.partition("\t")[0] for line in lines]


def test_completion_of_verbs_flags_and_values(kubeconfig: Path) -> None:
    assert completed(kubeconfig, "ru") == ["run", "runs", ":4"]
    assert "--tick" in completed(kubeconfig, "run", "--t")
    assert completed(kubeconfig, "list", "-o", "") == ["wide", "json", "yaml", "name", ":4"]
    assert completed(kubeconfig, "list", "--kubeconfig", "") == [":0"]


def test_completion_of_names_from_the_cluster(api: FakeApi, kubeconfig: Path) -> None:
    api.job("hello")
    api.job("help")
    api.job("other")
    api.run("hello-1", phase=RunPhase.RUNNING)
    api.run("hello-2", phase=RunPhase.FAILED)
    assert completed(kubeconfig, "run", "hel") == ["hello", "help", ":4"]
    assert completed(kubeconfig, "runs", "o") == ["other", ":4"]
    assert completed(kubeconfig, "cancel", "") == ["hello-1", ":4"]
    assert completed(kubeconfig, "list", "-n", "s") == ["shop", ":4"]
    assert completed(kubeconfig, "list", "--context", "") == ["here", "shop", ":4"]


def test_every_verb_that_takes_a_leasedjob_completes_its_name(api: FakeApi, kubeconfig: Path) -> None:
    api.job("hello")
    context = click.Context(plugin)
    verbs = []
    for verb in plugin.list_commands(context):
        command = plugin.get_command(context, verb)
        assert command is not None
        if any(p.name in ("name", "names") for p in command.params if isinstance(p, click.Argument)):
            verbs.append(verb)
            assert completed(kubeconfig, verb, "h") == ["hello", ":4"], verb
    assert len(verbs) == 13


def test_completion_of_run_keys_and_cronjobs(api: FakeApi, kubeconfig: Path) -> None:
    keys = ["2026-07-20T03:00:00Z", "2026-07-20T03:00:00Z#r1", "manual/default/a/b"]
    api.job("hello", recent_runs=[{"runKey": key} for key in keys])
    api.put("cronjobs", "nightly", spec={})
    assert completed(kubeconfig, "why", "hello", "--at", "2") == [keys[0], ":4"]
    assert completed(kubeconfig, "logs", "hello", "--run-key", "") == [*keys, ":4"]
    assert completed(kubeconfig, "why", "--at", "") == [":4"]
    assert "cronjob/nightly" in completed(kubeconfig, "convert", "cron")


def test_completion_is_silent_when_the_cluster_is_not_there(api: FakeApi, kubeconfig: Path) -> None:
    api.fail = lambda _method, _path: (500, "no")
    assert completed(kubeconfig, "run", "") == [":4"]
    assert completed(kubeconfig, "list", "-n", "") == [":4"]


# --- the cost of starting ---------------------------------------------------------------------------------------------


def loaded_by(module: str, *words: str) -> set[str]:
    """Top-level modules that a command line has imported."""
    script = (
        "import sys, contextlib, io\n"
        f"from {module} import main\n"
        f"sys.argv = ['x', *{list(words)!r}]\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    try: main()\n"
        "    except SystemExit as done: assert not done.code, done.code\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    return set(
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    )


HEAVY = {"kubernetes", "urllib3", "yaml", "rich", "pydantic", "psycopg", "kopf", "asyncio"}


@pytest.mark.parametrize("words", [("--help",), ("run", "--help"), ("version",)])
def test_help_imports_nothing_heavy(words: tuple[str, ...]) -> None:
    assert not loaded_by("leasedjob.cli.kubectl", *words) & HEAVY


def test_the_help_lists_every_verb_and_imports_none() -> None:
    script = (
        "import sys\n"
        "from leasedjob.cli.kubectl import plugin\n"
        "try: plugin(['--help'])\n"
        "except SystemExit: pass\n"
        "print(*(name for name in sys.modules if name.startswith('leasedjob.cli.')))"
    )
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    *lines, modules = loaded.splitlines()
    commands = lines[lines.index("Commands:") + 1 :]
    assert {line.split()[0] for line in commands if not line.startswith("     ")} == set(VERBS)
    assert not {f"leasedjob.cli.{verb}" for verb in VERBS} & set(modules.split())


def test_completing_a_verb_imports_nothing_heavy() -> None:
    assert not loaded_by("leasedjob.cli.complete", "r") & HEAVY


# --- small things -----------------------------------------------------------------------------------------------------


def test_phases_are_the_api_s() -> None:
    assert [str(phase) for phase in Phase] == [str(phase) for phase in RunPhase]
    assert Phase.of({}) is Phase.PENDING
    assert Phase.of({"status": {"phase": "SomethingNew"}}) is Phase.PENDING


def test_a_tick_that_is_a_tick_already() -> None:
    assert Tick().convert(NOW, None, None) == NOW


def test_an_unparsable_tick_names_the_way_to_write_it() -> None:
    with pytest.raises(click.BadParameter, match="2026-07-20T03:00:00Z"):
        Tick().convert("tomorrow", None, None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.9, "59s"), (60, "1m"), (200, "3m20s"), (700, "11m"), (3_600, "1h"), (11_100, "3h5m"),
     (40_000, "11h"), (100_000, "1d3h"), (4_000_000, "46d")],
)  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_ago_both_ways_and_neither() -> None:
    assert ago("2026-07-20T02:55:00Z", NOW) == "5m"
    assert ago("2026-07-20T03:05:00Z", NOW) == "in 5m"
    assert ago(None, NOW) == ago("rubbish", NOW) == ""


def test_printable_keeps_one_line() -> None:
    assert printable("a\n\tb\x00é\u202e") == "a b\\x00é\\u202e"


def test_state_and_result_of_an_object_without_status() -> None:
    assert state({"spec": {}}) == "Unknown"
    assert last_result({"spec": {}}) == ""
