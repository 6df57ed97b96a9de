"""`kubectl leasedjob dashboard`: which Pod it takes, and that what a browser sends arrives there and comes back.

The API server is played by one process with a real WebSocket; tests/e2e/test_status_page.py asks a real one.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.unit.kube_api import FakeApi, status, write_kubeconfig
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

from leasedjob.cli.dashboard import path
from leasedjob.cli.exits import Exit
from leasedjob.cli.forward import AT_ONCE, PROTOCOL
from leasedjob.cli.kubectl import plugin

Object = dict[str, Any]
Call = Callable[..., Result]


def operator_pod(name: str, *, page: bool = True, instance: str = "lj", **status: Any) -> Object:
    ports = [{"name": "health", "containerPort": 8080}, *([{"name": "page", "containerPort": 8082}] if page else [])]
    labels = {"app.kubernetes.io/component": "operator", "app.kubernetes.io/instance": instance}
    return {
        "metadata": {"name": name, "namespace": "jobs-system", "labels": labels},
        "spec": {"containers": [{"name": "operator", "command": ["leasedjob-operator"], "ports": ports}]},
        "status": {"phase": "Running", **status},
    }


# --- which Pod --------------------------------------------------------------------------------------------------------


def put(api: FakeApi, pod: Object, namespace: str = "jobs-system") -> None:
    made = api.put("pods", pod["metadata"]["name"], namespace, spec=pod["spec"], status=pod["status"])
    made["metadata"]["labels"] = pod["metadata"]["labels"]


def test_without_an_operator_it_says_where_it_looked(call: Call) -> None:
    result = call("dashboard", "--no-browser")
    assert result.exit_code == Exit.NOT_FOUND
    assert "no Pod of an operator in any namespace" in result.stderr
    assert "--operator-namespace" in result.stderr


def test_a_page_that_is_off_names_the_value_that_turns_it_on(api: FakeApi, call: Call) -> None:
    put(api, operator_pod("op-1", page=False))
    result = call("dashboard", "--no-browser")
    assert result.exit_code == Exit.NOT_INSTALLED
    assert "statusPage.enabled=true" in result.stderr


def test_pods_of_other_operators_are_none(api: FakeApi, call: Call) -> None:
    other = operator_pod("other-1")
    other["spec"]["containers"][0]["command"] = ["another-operator"]
    put(api, other)
    assert call("dashboard", "--no-browser").exit_code == Exit.NOT_FOUND


def test_a_pod_that_does_not_run_is_named(api: FakeApi, call: Call) -> None:
    put(api, operator_pod("op-1", phase="Pending"))
    result = call("dashboard", "--no-browser")
    assert result.exit_code == Exit.NOT_FOUND
    assert "jobs-system/op-1" in result.stderr


def test_of_several_releases_one_has_to_be_named(api: FakeApi, call: Call) -> None:
    put(api, operator_pod("op-1"))
    put(api, operator_pod("op-2", instance="second"), "second-system")
    result = call("dashboard", "--no-browser")
    assert result.exit_code == Exit.USAGE
    assert "lj in jobs-system, second in second-system" in result.stderr
    assert "no Pod op-9 of an operator" in call("dashboard", "--no-browser", "--pod", "op-9").stderr


def test_who_may_not_list_all_pods_is_told_what_to_name(api: FakeApi, call: Call) -> None:
    said = status(403, "Forbidden", 'pods is forbidden: User "u" cannot list resource "pods"')
    api.fail = lambda _method, path: (403, said) if path.endswith("/pods") else None
    result = call("dashboard", "--no-browser")
    assert result.exit_code == Exit.NO_ACCESS
    assert "--operator-namespace" in result.stderr


# --- the way there ----------------------------------------------------------------------------------------------------


class Behind:
    """What the Pod serves."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        behind = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                behind.asked.append((self.path, self.headers["Host"]))
                data = b"x" * 300_000 if self.path == "/large" else self.path.encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Played:
    """An API server that lists Pods, and forwards to `Behind` as a kubelet does."""

    def __init__(self, behind: Behind) -> None:
        self.behind = behind
        self.pods = [operator_pod("op-1")]
        self.gone: set[str] = set()
        self.refused: tuple[int, str] | None = None
        self.reached: list[str] = []
        self.error = ""  # said instead of forwarding
        self._server: Server = serve(
            self._forward,
            "127.0.0.1",
            0,
            process_request=self._request,
            subprotocols=[PROTOCOL],  # type: ignore[list-item]
        )
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()

    def _request(self, connection: ServerConnection, request: Request) -> Response | None:
        path, _, _ = request.path.partition("?")
        assert request.headers["Authorization"] == "Bearer t"
        if path.endswith("/portforward"):
            name = path.split("/")[-2]
            self.reached.append(name)
            if self.refused is not None:
                return connection.respond(self.refused[0], self.refused[1])  # type: ignore[arg-type]
            return connection.respond(404, "gone") if name in self.gone else None  # type: ignore[arg-type]
        there = [p for p in self.pods if p["metadata"]["name"] not in self.gone]
        items = there if "/namespaces/" not in path or "/jobs-system/" in path else []
        return connection.respond(200, json.dumps({"metadata": {}, "items": items}))  # type: ignore[arg-type]

    def _forward(self, connection: ServerConnection) -> None:
        port = struct.pack("<H", 8082)
        connection.send(b"\0" + port)
        connection.send(b"\1" + port)
        if self.error:
            connection.send(b"\1" + self.error.encode())
            return
        with socket.create_connection(("127.0.0.1", self.behind.port)) as pod:

            def back() -> None:
                with contextlib.suppress(Exception):
                    while data := pod.recv(70_000):
                        connection.send(b"\0" + data)
                connection.close()

            thread = threading.Thread(target=back)
            thread.start()
            with contextlib.suppress(Exception):
                for message in connection:
                    assert isinstance(message, bytes)
                    assert message[:1] == b"\0"
                    pod.sendall(message[1:])
            with contextlib.suppress(OSError):
                pod.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.fixture
def behind() -> Iterator[Behind]:
    made = Behind()
    yield made
    made.close()


@pytest.fixture
def played(behind: Behind) -> Iterator[Played]:
    made = Played(behind)
    yield made
    made.close()


@contextlib.contextmanager
def dashboard(played: Played, folder: Path, *words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command in a process of its own; the URL that it printed, "" where it ended without one."""
    kubeconfig = folder / "config"
    write_kubeconfig(kubeconfig, played.url)
    program = "from leasedjob.cli.kubectl import main; main()"
    argv = [sys.executable, "-c", program, "--kubeconfig", str(kubeconfig), "dashboard", *words]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.communicate()


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        data: bytes = answer.read()
        return data


def test_a_browser_reaches_the_page_until_ctrl_c(played: Played, tmp_path: Path) -> None:
    with dashboard(played, tmp_path, "--no-browser") as (url, process):
        assert url.startswith("http://127.0.0.1:")
        assert url.endswith("/")
        assert get(f"{url}clusters") == b"/clusters"
        assert len(get(f"{url}large")) == 300_000
        results: list[bytes] = []
        threads = [threading.Thread(target=lambda n=n: results.append(get(f"{url}{n}"))) for n in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(results) == sorted(f"/{n}".encode() for n in range(12))
        assert {host for _, host in played.behind.asked} == {url.removeprefix("http://").rstrip("/")}
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == Exit.OK
        assert process.stderr is not None
        assert "Pod jobs-system/op-1" in process.stderr.read()


def test_a_job_is_shown_first(played: Played, tmp_path: Path) -> None:
    with dashboard(played, tmp_path, "sync-orders", "-n", "shop", "--no-browser") as (url, _):
        assert url.endswith("/jobs/shop/sync-orders")


def test_where_the_browser_begins() -> None:
    assert path("a b", "shop", None) == "/jobs/shop/a%20b"
    assert path(None, "default", "shop") == "/?ns=shop"
    assert path(None, "default", None) == "/"


def test_a_pod_that_is_replaced_meanwhile_is_left_for_the_next_one(played: Played, tmp_path: Path) -> None:
    with dashboard(played, tmp_path, "--no-browser") as (url, _):
        played.gone.add("op-1")
        played.pods.append(operator_pod("op-2"))
        assert get(f"{url}again") == b"/again"
        assert played.reached[-1] == "op-2"


def refused(played: Played, folder: Path, *words: str) -> str:
    """What a command that fails says."""
    write_kubeconfig(folder / "config", played.url)
    result = CliRunner().invoke(plugin, ["--kubeconfig", str(folder / "config"), "dashboard", "--no-browser", *words])
    assert result.exit_code == Exit.REFUSED, result.output
    assert result.stdout == ""
    return result.stderr


@pytest.mark.parametrize(
    ("code", "body", "said"),
    [
        (403, '{"message": "pods \\"op-1\\" is forbidden"}', "get and create pods/portforward"),
        (500, "broken", "500"),
    ],
)
def test_a_refusal_is_said(played: Played, tmp_path: Path, code: int, body: str, said: str) -> None:
    played.refused = code, body
    assert said in refused(played, tmp_path)


def test_a_port_where_nobody_listens_is_said(played: Played, tmp_path: Path) -> None:
    played.error = "error forwarding port 8082: connection refused"
    assert "connection refused" in refused(played, tmp_path)


def test_a_port_that_is_taken_is_said(played: Played, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of this machine can't be used" in refused(played, tmp_path, "--port", str(port))


def test_more_connections_than_a_browser_has_are_turned_away_and_given_back(played: Played, tmp_path: Path) -> None:
    with dashboard(played, tmp_path, "--no-browser") as (url, _):
        port = int(url.rsplit(":", 1)[1].strip("/"))
        for _ in range(2):  # places are given back
            many = [socket.create_connection(("127.0.0.1", port)) for _ in range(AT_ONCE + 8)]
            for one in many:
                one.close()
        last: Exception | None = None
        for _ in range(100):
            try:
                assert get(f"{url}still") == b"/still"
                break
            except OSError as e:
                last = e
        else:
            raise AssertionError(last)
