"""uvicorn within a program that stops: readiness, requests in flight, connections that are kept, WebSockets."""

from __future__ import annotations

import asyncio
import http.client
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from leasedjob.workload import Phase, ShutdownState
from leasedjob.workload.asgi import Draining

from .workload_parts import LONG, Process, Processes, processes

pytestmark = pytest.mark.integration

# /work waits for the file; /stream does so between its two lines; /notice is the preStop hook.
SERVICE = """
import asyncio, logging, os, sys
import uvicorn
from leasedjob.workload import *
from leasedjob.workload.asgi import UvicornServer
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
end, http, limit = sys.argv[1], sys.argv[2], float(sys.argv[3])
async def main():
    state = ShutdownState.listening()
    async def until_end():
        while not os.path.exists(end):
            await asyncio.sleep(0.01)
    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            print("lifespan ends", flush=True)
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            print("socket", flush=True)
            print("socket ends", (await receive()).get("code"), flush=True)
            return
        async def start(*headers):
            await send({"type": "http.response.start", "status": 200, "headers": list(headers)})
        async def body(text, more=False):
            await send({"type": "http.response.body", "body": text, "more_body": more})
        match scope["path"]:
            case "/notice":
                state.notice("preStop")
            case "/work":
                print("working", flush=True)
                await until_end()
            case "/stream":
                await start()
                await body(b"first\\n", True)
                print("streaming", flush=True)
                await until_end()
                await body(b"last\\n")
                return
        await start((b"content-length", b"4"), (b"Connection", b"keep-alive"))
        await body(b"done")
    server = UvicornServer(uvicorn.Config(app, port=0, http=http, log_level="warning", ws="websockets-sansio",
                                          timeout_keep_alive=600), state)
    async with GracefulShutdown(state, ShutdownBudget(pre_stop=0, http=limit)) as shutdown:
        shutdown.on_stop(Phase.POOLS, "pool", lambda: print("pool closed", flush=True))
        shutdown.add(server)
        await server.start()
        print("port", *server.ports, flush=True)
        report = await shutdown.finished()
    print(*(f"{line.phase} {line.outcome}" for line in report), flush=True)
asyncio.run(main())
"""


@pytest.fixture
def run() -> Iterator[Processes]:
    yield from processes()


@pytest.fixture(params=["h11", "httptools"])
def http_of(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def service(run: Processes, end: Path, http_of: str = "h11", limit: float = 25) -> tuple[Process, int]:
    process = run.start([sys.executable, "-c", SERVICE, str(end), http_of, str(limit)])
    return process, int(process.line("port").split()[1])


class Client:
    """One connection that is kept."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG)

    def ask(self, path: str) -> tuple[int, bytes]:
        self._connection.request("GET", path)
        self.response = self._connection.getresponse()
        return self.response.status, self.response.read()

    @property
    def told_to_close(self) -> bool:
        return self.response.getheader("connection") == "close"

    def closed_by_the_server(self) -> bool:
        return self._connection.sock is None or self._connection.sock.recv(1) == b""

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def clients() -> Iterator[list[Client]]:
    made: list[Client] = []
    yield made
    for client in made:
        client.close()


def test_from_notice_to_end(run: Processes, tmp_path: Path, http_of: str, clients: list[Client]) -> None:
    process, port = service(run, tmp_path / "end", http_of)
    clients += [Client(port) for _ in range(4)]
    kept, idle, working, streaming = clients
    assert kept.ask("/readyz") == (200, b"ready")
    assert idle.ask("/") == (200, b"done")
    assert not kept.told_to_close
    assert kept.ask("/notice") == (200, b"done")
    assert kept.told_to_close, "so that its next request goes to another Pod"
    assert kept.ask("/readyz") == (503, b"draining: preStop")
    assert kept.ask("/") == (200, b"done"), "requests still arrive that were on their way"
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(working.ask, "/work")]
        process.line("working")
        answers.append(threads.submit(streaming.ask, "/stream"))
        process.line("streaming")
        for _ in range(3):
            process.signal(signal.SIGTERM)
        assert idle.closed_by_the_server()
        refused_by(port)
        assert not any(answer.done() for answer in answers)
        assert "pool closed" not in process.out
        (tmp_path / "end").touch()
        assert [answer.result() for answer in answers] == [(200, b"done"), (200, b"first\nlast\n")]
    assert process.wait() == 0, process.err
    assert process.out[-3:] == ["lifespan ends", "pool closed", "http done pools done"]
    assert process.err.count("stopping: SIGTERM") == 1


def refused_by(port: int) -> None:
    """Waits until nobody is accepted any more."""
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=LONG).close()
        except OSError:
            return
        time.sleep(0.02)
    raise AssertionError("connections are still accepted")


def test_a_request_that_never_ends_is_cut_off_and_named(run: Processes, tmp_path: Path, clients: list[Client]) -> None:
    process, port = service(run, tmp_path / "end", limit=2)
    clients.append(Client(port))
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(clients[0].ask, "/work?secret=1")
        process.line("working")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0, process.err
        assert answer.result()[0] == 500
    assert "http was cut off after" in process.err
    assert "dropped: GET /work\n" in process.err
    assert process.out[-2:] == ["pool closed", "http cut pools done"]


async def test_a_websocket_is_told_that_the_service_restarts(run: Processes, tmp_path: Path) -> None:
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed

    process, port = service(run, tmp_path / "end")
    async with connect(f"ws://127.0.0.1:{port}/events") as connection:
        await asyncio.to_thread(process.line, "socket")
        process.signal(signal.SIGTERM)
        with pytest.raises(ConnectionClosed) as closed:
            await connection.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1012
    assert await asyncio.to_thread(process.wait) == 0, process.err
    assert "socket ends 1012" in process.out


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("uvicorn.Config(app, port=int(sys.argv[1]))", "RuntimeError: http can't start: uvicorn exits with"),
        ("uvicorn.Config(failing, port=0, lifespan='on')", "RuntimeError: http can't start: uvicorn exits with"),
    ],
    ids=["port", "lifespan"],
)
def test_a_server_that_can_not_start_ends_the_program_in_phases(run: Processes, what: str, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = run.start(
            [
                sys.executable,
                "-c",
                f"""
import asyncio, sys
import uvicorn
from leasedjob.workload import *
from leasedjob.workload.asgi import UvicornServer
async def app(scope, receive, send):
    pass
async def failing(scope, receive, send):
    raise OSError("no database")
async def main():
    state = ShutdownState.listening()
    async with GracefulShutdown(state) as shutdown:
        shutdown.on_stop(Phase.POOLS, "pool", lambda: print("pool closed"))
        server = UvicornServer({what}, state)
        shutdown.add(server)
        await server.start()
asyncio.run(main())
""",
                str(taken.getsockname()[1]),
            ]
        )
        assert process.wait() == 1
    assert said in process.err
    assert process.out == ["pool closed"]


def test_a_server_that_ends_by_itself_is_the_stop_of_the_program(run: Processes, clients: list[Client]) -> None:
    process = run.python(
        """
        import asyncio
        import uvicorn
        from leasedjob.workload import *
        from leasedjob.workload.asgi import UvicornServer
        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        async def main():
            state = ShutdownState.listening()
            config = uvicorn.Config(app, port=0, lifespan="off", limit_max_requests=1, log_level="error")
            async with GracefulShutdown(state) as shutdown:
                server = UvicornServer(config, state)
                shutdown.add(server)
                await server.start()
                print("port", *server.ports, flush=True)
                await shutdown.finished()
            print(state.reason)
        asyncio.run(main())
        """
    )
    clients.append(Client(int(process.line("port").split()[1])))
    assert clients[0].ask("/") == (204, b"")
    assert process.wait() == 0, process.err
    assert process.out[-1] == "the server http has ended by itself"


class TestDraining:
    """The middleware alone, which any ASGI server can use."""

    @staticmethod
    async def ask(app: Any, path: str = "/", version: str = "1.1") -> tuple[int, dict[bytes, bytes]]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            raise AssertionError("nothing to receive")

        await app({"type": "http", "path": path, "method": "GET", "http_version": version}, receive, send)
        return sent[0]["status"], dict(sent[0]["headers"])

    @staticmethod
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"Connection", b"keep-alive")]})
        await send({"type": "http.response.body", "body": b""})

    async def test_http_1_is_told_to_close_and_http_2_has_no_such_header(self) -> None:
        state = ShutdownState()
        app = Draining(self.app, state)
        assert await self.ask(app) == (200, {b"Connection": b"keep-alive"})
        state.notice("preStop")
        assert await self.ask(app) == (200, {b"connection": b"close"})
        assert await self.ask(app, version="2") == (200, {b"Connection": b"keep-alive"})

    async def test_the_path_of_readiness(self) -> None:
        state = ShutdownState()
        state.begin("SIGTERM")
        assert (await self.ask(Draining(self.app, state), "/readyz"))[0] == 503
        assert (await self.ask(Draining(self.app, state, readiness="/ready"), "/readyz"))[0] == 200
        assert (await self.ask(Draining(self.app, state, readiness=None), "/readyz"))[0] == 200
        with pytest.raises(ValueError, match="readiness"):
            Draining(self.app, state, readiness="readyz")

    def test_what_a_server_is(self) -> None:
        import uvicorn

        from leasedjob.workload.asgi import UvicornServer

        assert UvicornServer.phase is Phase.HTTP
        for config in (uvicorn.Config(self.app, workers=2), uvicorn.Config("app:app", reload=True)):
            with pytest.raises(ValueError, match="workers and reload"):
                UvicornServer(config, ShutdownState())
