"""Small parts of the sidecar: own probes, files, the gate's verdict, the command line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leasedjob.lease.rows import Outcome
from leasedjob.lease.trust import Timing
from leasedjob.sidecar import files, gate, main
from leasedjob.sidecar.fence import Fenced, Lease, Report, State, Suspicion
from leasedjob.sidecar.files import Handoff, Stage
from leasedjob.sidecar.link import describe
from leasedjob.sidecar.probes import OwnProbe, ProbeLoop, parse_all

TIMING = Timing(duration=900, heartbeat=60, grace=60, pre_stop=10)
LEASE = Lease("lease-1", 3, 77, "v2:key", 900_000, TIMING)


# --- own probes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        ({"exec": {"command": ["true"]}}, None),
        ({"grpc": {"port": 1}}, None),
        ({"tcpSocket": {"port": 80}}, OwnProbe(80, ("127.0.0.1", "10.0.0.7"))),
        ({"httpGet": {"port": 80}}, OwnProbe(80, ("127.0.0.1", "10.0.0.7"), path="/")),
        (
            {
                "httpGet": {
                    "port": 8443,
                    "path": "live",
                    "host": "10.1.1.1",
                    "scheme": "HTTPS",
                    "httpHeaders": [{"name": "X", "value": "y"}],
                },
                "initialDelaySeconds": 7,
                "periodSeconds": 3,
                "timeoutSeconds": 2,
                "failureThreshold": 1,
            },
            OwnProbe(8443, ("10.1.1.1",), "/live", True, (("X", "y"),), 7, 3, 2, 1),
        ),
    ],
)
def test_own_probes_have_kubernetes_fields_and_defaults(raw: dict[str, Any], wanted: OwnProbe | None) -> None:
    assert OwnProbe.parse(raw, "10.0.0.7") == wanted


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"a": {"httpGet": {}}}', '{"a": {"tcpSocket": "x"}}'])
def test_own_probes_that_cannot_be_read_are_none(text: str) -> None:
    assert parse_all(text, "") == {}


def test_a_probe_is_tried_on_the_pods_own_address_too() -> None:
    with socket.create_server(("127.0.0.2", 0)) as listener:
        port = listener.getsockname()[1]
        assert OwnProbe(port, ("127.0.0.1", "127.0.0.2")).problem() is None
        assert "refused" in str(OwnProbe(port, ("127.0.0.1",)).problem()).lower()


def test_failures_must_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["down", "down", None, "down", "down", "down", None])
    monkeypatch.setattr(OwnProbe, "problem", lambda _: next(answers))
    failed: list[tuple[str, str]] = []
    loop = ProbeLoop("web", OwnProbe(1, (), period=0, threshold=3), lambda *args: failed.append(args))
    loop.run()
    assert failed == [("web", "down")]
    assert next(answers) is None


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_handoff_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = str(tmp_path / "lease.json")
    handoff = Handoff("l", "t", "u", Stage.ADOPTED, "boot", 1.5, 800.5, 3, 900_000, 77, "v2:key", TIMING)
    handoff.write(path)
    assert Handoff.read(path) == handoff
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["lease.json"]


@pytest.mark.parametrize("text", ["", "null", "{}", '{"state": "proposed"}', '{"state": "other"}', "[]", "\x00"])
def test_a_handoff_that_cannot_be_read_is_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    path.write_text(text)
    assert Handoff.read(str(path)) is None
    assert files.read_memory(str(path), LEASE, "boot") is None


def test_a_proposed_handoff_gives_no_lease() -> None:
    assert Handoff("l", "t", "u", Stage.PROPOSED, "boot").lease is None


def test_memory_is_for_the_same_lease_attempt_and_boot(tmp_path: Path) -> None:
    path = str(tmp_path / "hold.json")
    state = State(
        lease=LEASE,
        trusted_until=800.0,
        fenced=Fenced(5.0, "why", lost=True),
        report=Report(Outcome.FAIL, recorded=True),
        draining=True,
        well_at=4.0,
        asked={"main": 3.0},
        suspicions={"main": Suspicion(4.0, "frozen")},
        gap=Suspicion(4.0, "frozen"),
        unhealthy={"web": "500"},
    )
    files.write_memory(path, state, "boot")
    assert files.read_memory(path, LEASE, "boot") == state
    assert files.read_memory(path, LEASE, "other boot") is None
    assert files.read_memory(path, Lease("lease-1", 4, 1, "", 1, TIMING), "boot") is None
    assert files.read_memory(path, Lease("lease-2", 3, 1, "", 1, TIMING), "boot") is None


def test_an_unrecorded_report_is_not_remembered(tmp_path: Path) -> None:
    path = str(tmp_path / "hold.json")
    files.write_memory(path, State(lease=LEASE, report=Report(Outcome.FAIL, {"x": 1})), "boot")
    before = files.read_memory(path, LEASE, "boot")
    assert before is not None
    assert before.report is None


def test_a_termination_message_is_never_cut_short_by_a_shorter_one(tmp_path: Path) -> None:
    path = tmp_path / "message"
    files.write_message(str(path), '{"a":"' + "x" * 100 + '"}')
    files.write_message(str(path), '{"a":1}')
    assert json.loads(path.read_text()) == {"a": 1}
    assert len(path.read_text()) == 108


def test_a_termination_message_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    files.write_message(str(tmp_path / "missing" / "message"), "text")


def test_a_failure_message_is_one_short_json_line() -> None:
    text = files.failure_message("adopt", "lost", "é\n" * 5000)
    assert len(text) <= files.MESSAGE_LIMIT
    assert json.loads(text)["adopt"] == "lost"
    assert "\n" not in text


# --- gate, link, main ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "view", "wanted"),
    [
        (200, {"leased": True, "trustLeftSeconds": 5}, True),
        (200, {"leased": True, "trustLeftSeconds": 0}, None),
        (200, {"leased": False, "state": "waiting"}, None),
        (200, {"leased": False, "state": "unconfirmed"}, None),
        (200, {"leased": False, "state": "fenced", "reason": "lost"}, False),
        (200, {"leased": False, "state": "reported"}, False),
        (500, {"leased": True, "trustLeftSeconds": 5}, None),
    ],
)
def test_the_gates_verdict(status: int, view: dict[str, Any], wanted: bool | None) -> None:
    assert gate.verdict(status, json.dumps(view).encode())[0] is wanted


def test_the_gate_does_not_believe_what_it_cannot_read() -> None:
    assert gate.verdict(200, b"<html>")[0] is None


def test_a_description_is_one_line() -> None:
    assert describe(RuntimeError("a\n  b")) == "RuntimeError: a b"
    assert describe(RuntimeError()) == "RuntimeError: RuntimeError"


@pytest.mark.parametrize(("args", "code"), [(["--help"], 0), ([], 64), (["nonsense"], 64), (["hold", "x"], 64)])
def test_the_command_line(args: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(args)
    assert ended.value.code == code
    out, err = capsys.readouterr()
    assert all(verb in (out or err) for verb in main.VERBS)


@pytest.mark.parametrize("verb", ["gate", "drain"])
def test_gate_and_drain_start_without_the_database_driver(verb: str) -> None:
    code = (
        "import sys, os; os._exit = lambda code: (print('|'.join(sys.modules)), sys.stdout.flush());"
        f"from leasedjob.sidecar import main; main.main(['{verb}'])"
    )
    env = {**os.environ, "LEASEDJOB_SIDECAR_REPORT_PORT": "9", "LEASEDJOB_SIDECAR_GATE_SECONDS": "0"}
    env["LEASEDJOB_SIDECAR_TERMINATION_LOG"] = os.devnull
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    modules = set(done.stdout.split("|"))
    assert f"leasedjob.sidecar.{verb}" in modules
    assert not modules & {"psycopg", "leasedjob.lease.holder", "ssl", "asyncio", "http", "argparse", "logging"}


@pytest.mark.parametrize("verb", ["adopt", "hold"])
def test_what_only_an_operator_needs_is_not_imported(verb: str) -> None:
    """Each Pod waits for the imports of its sidecar, connecting included."""
    code = f"import sys, leasedjob.sidecar.{verb}, leasedjob.lease.holder; print('|'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.strip().split("|"))
    assert "psycopg" in modules
    assert not modules & {"leasedjob.lease.rows", "leasedjob.lease.store", "leasedjob.identity", "leasedjob.schedule"}
