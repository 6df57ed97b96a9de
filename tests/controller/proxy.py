"""What can happen between an operator and its servers: proxies that delay, refuse, lose and silence.

`ApiProxy` ends TLS and reads each request, so that a fault can hit one kind of call; `TcpProxy` only forwards bytes.
Both run in a thread of their own and are told what to do by the test's thread.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.controller.control_plane import ControlPlane, wait_until

POLL = 0.02  # seconds


class _Server:
    """A listening socket and its event loop in a thread. Use as a context manager."""

    def __init__(self, tls: ssl.SSLContext | None = None, address: str = "127.0.0.1") -> None:
        self._tls = tls
        self._address = address
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self._listening = threading.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._stopping = False
        self.port = 0

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(lambda *_: None)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, self._address, 0, ssl=self._tls))
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        self._loop.run_forever()
        self._stopping = True
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0.05))  # what was aborted is let go
        self._loop.close()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listening.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._serve(reader, writer)
        except (OSError, EOFError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort() if self._stopping else writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError

    def cut(self) -> None:
        """Resets every open connection."""

        async def abort() -> None:
            for writer in list(self._writers):
                writer.transport.abort()

        asyncio.run_coroutine_threadsafe(abort(), self._loop).result(10)


async def _relay(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    waits: Callable[[], bool],
    late: Callable[[], float] = lambda: 0.0,
) -> None:
    """Everything arrives in its order, each part `late` seconds after it was sent, and none while `waits` is true."""
    on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def receive() -> None:
        try:
            while data := await reader.read(65536):
                on_the_way.put_nowait((time.monotonic() + late(), data))
        finally:
            on_the_way.put_nowait((time.monotonic() + late(), b""))

    receiving = asyncio.ensure_future(receive())
    try:
        while True:
            at, data = await on_the_way.get()
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            while waits():
                await asyncio.sleep(POLL)
            if not data:
                return
            writer.write(data)
            await writer.drain()
    finally:
        receiving.cancel()


class TcpProxy(_Server):
    """Forwards a TCP port. `down()`: every connection is reset; `hang()`: nothing gets through, nothing ends."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self._target = host, port
        self._refuses = self._hangs = False
        self.answer_delay = 0.0  # seconds by which each answer is late
        self.accepted = 0

    def down(self) -> None:
        self._refuses = True
        self.cut()

    def hang(self) -> None:
        self._hangs = True

    def pause(self) -> None:
        self._hangs = True

    def resume(self) -> None:
        """Everything arrives after all."""
        self._hangs = False

    def up(self) -> None:
        """Heals every fault; what hung is reset, as by a peer that comes back without memory."""
        hung, self._refuses, self._hangs = self._hangs, False, False
        if hung:
            self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self._refuses:
            writer.transport.abort()
            return
        while self._hangs:
            await asyncio.sleep(POLL)
        there, back = await asyncio.open_connection(*self._target)
        try:
            both = [
                asyncio.ensure_future(_relay(reader, back, lambda: self._hangs)),
                asyncio.ensure_future(_relay(there, writer, lambda: self._hangs, lambda: self.answer_delay)),
            ]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        finally:
            back.transport.abort()


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str  # with the query
    body: bytes

    @property
    def watch(self) -> bool:
        return "watch=true" in self.path or "watch=1" in self.path

    def creates(self, plural: str) -> bool:
        return self.method == "POST" and self.path.partition("?")[0].endswith(f"/{plural}")

    def writes_status(self) -> bool:
        return self.method == "PATCH" and self.path.partition("?")[0].endswith("/status")


@dataclass(slots=True)
class Rule:
    """A fault that hits every request that `matches`, the next `times` of them if that is given.

    delay: seconds before it is forwarded. answer: (status, reason, message) that is given instead. hold: it waits,
    not forwarded, until `release`. lose: it is carried out, and the answer is lost. reset: it is not carried out.
    """

    matches: Callable[[Request], bool]
    delay: float = 0.0
    answer: tuple[int, str, str] | None = None
    hold: bool = False
    lose: bool = False
    reset: bool = False
    times: int | None = None
    seen: list[Request] = field(default_factory=list)
    active: bool = True

    def release(self) -> None:
        """No more of it; what it holds goes on."""
        self.active = self.hold = False

    def wait_seen(self, count: int = 1, seconds: float = 30) -> None:
        wait_until(f"{count} requests of this kind", lambda: len(self.seen) >= count, seconds)


class ApiProxy(_Server):
    """In front of the API server, with its certificate. One connection to it for each request."""

    def __init__(self, plane: ControlPlane) -> None:
        folder: Path = plane.folder
        own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        own.load_cert_chain(folder / "server.crt", folder / "server.key")
        super().__init__(own)
        self._server_side = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        self._target = plane.port
        self._rules: list[Rule] = []
        self.silent = False  # watches stay open and deliver nothing
        self.watch_delay = 0.0  # seconds by which what a watch delivers is late
        self.requests: list[Request] = []
        self.answers: list[tuple[Request, int]] = []  # with the HTTP status; what a rule answers isn't among them

    def rule(self, matches: Callable[[Request], bool], **fault: Any) -> Rule:
        rule = Rule(matches, **fault)
        self._rules.append(rule)
        return rule

    def heal(self) -> None:
        self.silent = False
        for rule in self._rules:
            rule.release()

    def _hit(self, request: Request) -> Rule | None:
        for rule in self._rules:
            if rule.active and rule.matches(request):
                rule.seen.append(request)
                if rule.times is not None:
                    rule.times -= 1
                    rule.active = rule.times > 0
                return rule
        return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head[:-4].decode("latin-1").split("\r\n")
        method, path, _ = lines[0].split(" ", 2)
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        request = Request(method, path, body)
        self.requests.append(request)
        rule = self._hit(request)
        if rule is not None:
            await asyncio.sleep(rule.delay)
            while rule.hold:
                await asyncio.sleep(POLL)
            if rule.reset:
                writer.transport.abort()
                return
            if rule.answer is not None:
                writer.write(_refusal(*rule.answer))
                await writer.drain()
                return
        kept = [line for line in lines if not line.lower().startswith("connection:")]
        there, back = await asyncio.open_connection("127.0.0.1", self._target, ssl=self._server_side)
        try:
            back.write(("\r\n".join([*kept, "Connection: close"]) + "\r\n\r\n").encode("latin-1") + body)
            await back.drain()
            if rule is not None and rule.lose:
                await there.read()
                writer.transport.abort()
                return
            # A client that hangs up ends the request.
            gone = asyncio.ensure_future(reader.read())
            answer = asyncio.ensure_future(self._answer(there, writer, request))
            await asyncio.wait([gone, answer], return_when=asyncio.FIRST_COMPLETED)
            for task in (gone, answer):
                task.cancel()
            await asyncio.gather(gone, answer, return_exceptions=True)
        finally:
            back.transport.abort()

    async def _answer(self, there: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Request) -> None:
        begin = await there.readuntil(b"\r\n")
        self.answers.append((request, int(begin.split(b" ", 2)[1])))
        writer.write(begin)
        await _relay(
            there, writer, lambda: self.silent and request.watch, lambda: self.watch_delay if request.watch else 0.0
        )

    def writes(self) -> list[Request]:
        """Every request so far that asks for a change."""
        return [r for r in list(self.requests) if r.method not in ("GET", "HEAD")]


def _refusal(status: int, reason: str, message: str) -> bytes:
    text = json.dumps(
        {
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status, "reason": reason,
            "message": message,
        }
    )  # fmt: skip
    retry = "Retry-After: 1\r\n" if status == 429 else ""
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n{retry}Connection: close\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode()
