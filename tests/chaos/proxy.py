"""A TCP proxy that breaks what runs through it, in the ways in which networks do."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass
from enum import StrEnum

from tests.controller.proxy import POLL, _Server


class Fault(StrEnum):
    """What happens to connections, old and new, until it is healed."""

    NONE = "none"
    DROP = "drop"  # nothing arrives and nobody is told; new connections hang, too
    DELAY = "delay"  # everything takes longer
    RESET = "reset"  # connections are reset, new ones as soon as they come
    HALF_OPEN = "half-open"  # the server's end is gone and the client isn't told; new connections work


@dataclass(slots=True, eq=False)
class _Line:
    """One connection through the proxy."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    silent: bool = False  # the client hears nothing any more
    losing: bool = False  # the next answer is lost


class FaultyProxy(_Server):
    """Forwards a TCP port, and breaks connections on demand. Use as a context manager.

    Args:
        delay: seconds that each piece of data takes under Fault.DELAY.
        address: where it listens.
    """

    def __init__(self, host: str, port: int, *, delay: float = 0.3, address: str = "127.0.0.1") -> None:
        super().__init__(address=address)
        self._target = host, port
        self._delay = delay
        self._fault = Fault.NONE
        self._lines: set[_Line] = set()
        self._lost_word = b""
        self._to_lose = 0
        self.lost = 0  # answers lost so far

    def breaks(self, fault: Fault) -> None:
        """From now on; NONE heals. What was silent is reset then, as by a peer that comes back without memory."""

        async def change() -> None:
            self._fault = fault
            for line in list(self._lines):
                match fault:
                    case Fault.RESET:
                        _reset(line.client)
                    case Fault.HALF_OPEN:
                        line.silent = True
                        line.server.transport.abort()
                    case Fault.NONE if line.silent:
                        _reset(line.client)

        asyncio.run_coroutine_threadsafe(change(), self._loop).result(10)

    def leads_to(self, host: str, port: int) -> None:
        """From now on, for new connections; the open ones are reset."""

        async def change() -> None:
            self._target = host, port
            for line in list(self._lines):
                _reset(line.client)

        asyncio.run_coroutine_threadsafe(change(), self._loop).result(10)

    def strand(self) -> None:
        """The connections that are open now hear nothing any more; new ones work. No packet tells of it."""

        async def change() -> None:
            for line in self._lines:
                line.silent = True

        asyncio.run_coroutine_threadsafe(change(), self._loop).result(10)

    def lose_answers(self, word: str, times: int = 1) -> None:
        """The next `times` statements with `word` in them are carried out, and their answers lost."""
        self._lost_word, self._to_lose = word.encode(), times

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._fault is Fault.RESET:
            _reset(writer)
            return
        while self._fault is Fault.DROP:
            await asyncio.sleep(POLL)
        _keep_alive(writer)
        there, back = await asyncio.open_connection(*self._target)
        line = _Line(writer, back)
        self._lines.add(line)
        try:
            both = [asyncio.ensure_future(self._there(line, reader)), asyncio.ensure_future(self._back(line, there))]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if line.silent and not both[0].done():
                await asyncio.wait(both[:1])  # the client isn't told that its server is gone
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        finally:
            self._lines.discard(line)
            back.transport.abort()

    async def _wait(self, line: _Line) -> None:
        if self._fault is Fault.DELAY:
            await asyncio.sleep(self._delay)
        while self._fault is Fault.DROP:
            await asyncio.sleep(POLL)

    async def _there(self, line: _Line, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65536):
            await self._wait(line)
            if line.silent:
                continue
            if self._to_lose and self._lost_word in data:
                self._to_lose -= 1
                line.losing = True
            line.server.write(data)
            await line.server.drain()

    async def _back(self, line: _Line, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65536):
            await self._wait(line)
            if line.silent:
                continue
            if line.losing:  # a statement in autocommit is answered when it is committed
                self.lost += 1
                _reset(line.client)
                return
            line.client.write(data)
            await line.client.drain()


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """A client whose network is gone says no goodbye; its connection to the server must not stay for that."""
    own = writer.get_extra_info("socket")
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 3)):
        own.setsockopt(socket.IPPROTO_TCP, option, value)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection by a reset, as a peer does that knows nothing of it."""
    own = writer.get_extra_info("socket")
    if own is not None:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
