"""Where workloads tell what they do: a process outside the clusters, with its own clock, that is a checking sink, too.

    python -m tests.chaos_cluster.recorder HOST PORT FILE

A workload holds one connection open from its start on and sends a JSON object a line: `what` (start, effect, term,
done), and with the start its `key`, `code`, `token`, `attempt` and `pod`. Each line is answered by 1, or by 0 where a
newer token of that key has been heard of: such an effect is refused. When its process dies, however that is, the kernel
closes the connection: that is its end.

What is found in one look may have happened in any order since the look before, so both times are written down.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tests.chaos_cluster.records import Line
from tests.chaos_cluster.tether import tether

WHAT: Final = frozenset({"start", "effect", "term", "done"})
_LIMIT: Final = 4096  # of a line
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}  # seconds, and times


class _Caller:
    """One connection."""

    def __init__(self, number: int, connection: socket.socket, peer: str) -> None:
        self.number, self.connection, self.peer = number, connection, peer
        self.buffer = b""
        self.who: dict[str, Any] = {}
        self.heard = time.time()


class Recorder:
    """One thread, one file. `port` 0 takes a free one."""

    def __init__(self, host: str, port: int, file: Path) -> None:
        self._listener = socket.create_server((host, port), backlog=512)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._newest: dict[str, int] = {}
        self._seq = self._callers = 0
        self._since = self._at = time.time()

    def serve(self) -> None:
        """For ever."""
        while True:
            self.look(None)

    def look(self, timeout: float | None) -> None:
        """Waits until something happens, and writes down all that has."""
        self._since = time.time()
        ready = self._selector.select(timeout)
        self._at = time.time()
        for key, _ in ready:
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        os.close(self._file)

    def _accept(self) -> None:
        connection, (peer, *_) = self._listener.accept()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._callers += 1
        caller = _Caller(self._callers, connection, peer)
        self._selector.register(connection, selectors.EVENT_READ, caller)

    def _read(self, caller: _Caller) -> None:
        try:
            data = caller.connection.recv(65536)
        except ConnectionResetError:  # it died with an answer unread
            data = b""
        except BlockingIOError:
            return
        except OSError:  # nobody there any more
            self._write(caller, "lost", since=caller.heard)
            self._forget(caller)
            return
        caller.buffer += data
        *lines, caller.buffer = caller.buffer.split(b"\n")
        try:
            for line in lines:
                self._take(caller, json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            data = b""
        if data and len(caller.buffer) <= _LIMIT:
            caller.heard = self._at
            return
        self._write(caller, "end")
        self._forget(caller)

    def _take(self, caller: _Caller, told: dict[str, Any]) -> None:
        what = told["what"]
        if what not in WHAT or (what == "start") != (not caller.who):
            raise ValueError(what)
        if what == "start":
            caller.who = {name: str(told[name]) for name in ("key", "code", "pod")}
            caller.who |= {name: int(told[name]) for name in ("token", "attempt")}
        key, token = caller.who["key"], caller.who["token"]
        accepted = token >= self._newest.get(key, 0)
        self._newest[key] = max(token, self._newest.get(key, 0))
        self._write(caller, what, accepted=accepted)
        with contextlib.suppress(OSError):
            caller.connection.send(b"1\n" if accepted else b"0\n")

    def _write(self, caller: _Caller, what: str, *, since: float | None = None, accepted: bool = True) -> None:
        if not caller.who:
            return
        self._seq += 1
        line = Line(
            seq=self._seq,
            since=self._since if since is None else since,
            at=self._at,
            connection=caller.number,
            what=what,
            peer=caller.peer,
            accepted=accepted,
            **caller.who,
        )
        os.write(self._file, (json.dumps(asdict(line)) + "\n").encode())

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        caller.connection.close()


def main(arguments: list[str]) -> None:
    host, port, file = arguments
    tether()
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # a witness that is late sees less
    recorder = Recorder(host, int(port), Path(file))
    print(recorder.port, flush=True)
    recorder.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
