"""The sidecar's HTTP server and client on real sockets: slow, greedy and rude peers hold up nobody."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from leasedjob.http1 import HttpError, ask
from leasedjob.sidecar import server as module
from leasedjob.sidecar.server import Exchange, Request, Server


class Running:
    """A server in a loop of its own; `held` keeps exchanges that the handler does not answer."""

    def __init__(self, host: str = "127.0.0.1", **limits: Any) -> None:
        self.selector = selectors.DefaultSelector()
        self.requests: list[Request] = []
        self.held: list[Exchange] = []
        self.clock = time.monotonic
        self.server = Server(
            self.selector, host, 0, self.handle, now=lambda: self.clock(), **{"body_limit": 1000, **limits}
        )
        self.port = self.server.port
        self._stop = False
        self._errands: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def handle(self, request: Request, exchange: Exchange) -> None:
        self.requests.append(request)
        match request.path:
            case "/hold":
                self.held.append(exchange)
            case "/fault":
                raise RuntimeError("a handler's fault")
            case "/big":
                exchange.answer(200, {"text": "x" * 5_000_000})
            case _:
                exchange.answer(200, {"path": request.path, "body": len(request.body)})

    def _loop(self) -> None:
        while not self._stop:
            for key, mask in self.selector.select(0.02):
                key.data(mask)
            self.server.expire()
            while self._errands:
                self._errands.pop()()

    def await_held(self, count: int) -> None:
        deadline = time.monotonic() + 5
        while len(self.held) < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def within_loop(self, errand: Callable[[], None]) -> None:
        self._errands.append(errand)

    def stop(self) -> None:
        self._stop = True
        self._thread.join()
        self.server.close()
        self.selector.close()

    def talk(self, *pieces: bytes, pause: float = 0.0) -> bytes:
        """Sends these pieces and reads until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            for piece in pieces:
                connection.sendall(piece)
                if pause:
                    time.sleep(pause)
            received = b""
            while data := connection.recv(65536):
                received += data
            return received


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running()
    yield running
    running.stop()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_a_request_in_single_bytes_is_a_request(running: Running) -> None:
    request = b"POST /x?wait=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
    assert status(running.talk(*(bytes([b]) for b in request))) == 200
    assert running.requests == [Request("POST", "/x", {"wait": "1"}, b"abc")]


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        pytest.param(b"nonsense\r\n\r\n", 400, id="not HTTP"),
        pytest.param(b"GET / HTTP/2.0\r\n\r\n", 400, id="not HTTP/1"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, id="TLS hello"),
        pytest.param(b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400, id="malformed header"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400, id="negative length"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: 1e3\r\n\r\n", 400, id="odd length"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n", 413, id="body too large"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 413, id="absurd length"),
        pytest.param(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411, id="chunked"),
        pytest.param(b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", 431, id="head too large"),
        pytest.param(b"GET / HTTP/1.1\r\nX: " + b"y" * 20_000, 431, id="endless head"),
        pytest.param(b"GET /fault HTTP/1.1\r\n\r\n", 500, id="handler's fault"),
    ],
)
def test_what_is_refused(running: Running, raw: bytes, code: int) -> None:
    assert status(running.talk(raw)) == code
    assert status(running.talk(b"GET / HTTP/1.1\r\n\r\n")) == 200


def test_a_client_that_sends_on_after_its_refusal_still_gets_the_answer(running: Running) -> None:
    head = b"POST / HTTP/1.1\r\nContent-Length: 500000\r\n\r\n"
    assert status(running.talk(head, *[b"x" * 50_000] * 10)) == 413


def test_slow_clients_hold_up_nobody_and_are_cut_off(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW_SECONDS", 0.5)
    slow = [socket.create_connection(("127.0.0.1", running.port), timeout=5) for _ in range(50)]
    for connection in slow[1:]:
        connection.sendall(b"GET / HT")
    began = time.monotonic()
    assert ask("127.0.0.1", running.port, "GET", "/", seconds=2)[0] == 200
    assert time.monotonic() - began < 0.3
    assert slow[0].recv(100) == b"", "nothing was sent: nothing is answered"
    assert status(slow[1].recv(1000)) == 408
    for connection in slow:
        connection.close()


def test_where_there_are_too_many_the_oldest_silent_one_makes_room() -> None:
    running = Running(connections=8)
    try:
        holders = [socket.create_connection(("127.0.0.1", running.port), timeout=5) for _ in range(3)]
        for holder in holders:
            holder.sendall(b"GET /hold HTTP/1.1\r\n\r\n")
        running.await_held(3)
        silent = [socket.create_connection(("127.0.0.1", running.port), timeout=5) for _ in range(20)]
        assert ask("127.0.0.1", running.port, "GET", "/", seconds=2)[0] == 200
        assert silent[0].recv(1) == b""
        running.within_loop(lambda: [e.answer(200, {}) for e in running.held] and None)
        assert [status(h.recv(1000)) for h in holders] == [200] * 3
        for connection in (*holders, *silent):
            connection.close()
    finally:
        running.stop()


def test_a_client_that_reads_slowly_gets_everything_and_one_that_never_reads_is_cut_off(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOW_SECONDS", 1.0)
    with socket.create_connection(("127.0.0.1", running.port), timeout=5) as never:
        never.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        assert len(running.talk(b"GET /big HTTP/1.1\r\n\r\n")) > 5_000_000
        assert ask("127.0.0.1", running.port, "GET", "/", seconds=2)[0] == 200
        deadline = time.monotonic() + 5
        while running.server._exchanges and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not running.server._exchanges


def test_a_client_that_has_given_up_is_noticed(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(b"GET /hold HTTP/1.1\r\n\r\n")
        running.await_held(1)
        assert not running.held[0].gone()
    deadline = time.monotonic() + 5
    while running.held[0].open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running.held[0].open
    assert running.held[0].gone()


def test_curl_and_its_expectation(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.port), timeout=5) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 100")
        connection.sendall(b"body")
        assert status(connection.recv(1000)) == 200


def test_all_addresses_means_both_families_where_there_are_both() -> None:
    running = Running(host="")
    try:
        assert ask("127.0.0.1", running.port, "GET", "/", seconds=2)[0] == 200
        if socket.has_ipv6:
            try:
                assert ask("::1", running.port, "GET", "/", seconds=2)[0] == 200
            except OSError as error:
                pytest.skip(f"no IPv6 here: {error}")
    finally:
        running.stop()


def test_a_port_that_is_taken_is_an_error(running: Running) -> None:
    with pytest.raises(OSError, match="in use"):
        module.listen("127.0.0.1", running.port)


# --- the client ------------------------------------------------------------------------------------------------------


def peer(answer: Callable[[socket.socket], None]) -> tuple[int, socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.recv(65536)
            answer(connection)

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1], listener


def test_a_server_that_drips_does_not_prolong_the_deadline() -> None:
    def drip(connection: socket.socket) -> None:
        for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 100:
            try:
                connection.send(bytes([byte]))
            except OSError:
                return
            time.sleep(0.05)

    port, listener = peer(drip)
    began = time.monotonic()
    with listener, pytest.raises(TimeoutError):
        ask("127.0.0.1", port, "GET", "/", seconds=0.5)
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1\r\n\r\n", b"\x00\xff"])
def test_what_is_not_http_is_an_error(answer: bytes) -> None:
    port, listener = peer(lambda connection: connection.sendall(answer))
    with listener, pytest.raises(HttpError):
        ask("127.0.0.1", port, "GET", "/", seconds=2)


def test_an_endless_answer_is_cut() -> None:
    def flood(connection: socket.socket) -> None:
        try:
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            for _ in range(10_000):
                connection.sendall(b"x" * 65536)
        except OSError:
            return

    port, listener = peer(flood)
    with listener:
        code, body = ask("127.0.0.1", port, "GET", "/", seconds=5)
    assert code == 200
    assert len(body) < 200_000
