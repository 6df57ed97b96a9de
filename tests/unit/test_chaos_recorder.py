"""The recorder of `make chaos`: what it writes down, and what it refuses."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.chaos_cluster.recorder import Recorder
from tests.chaos_cluster.records import Line, read


class Heard:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.recorder = Recorder("127.0.0.1", 0, file)

    def call(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.recorder.port), timeout=10)

    def until(self, count: int) -> list[Line]:
        """Looks until so many lines are written."""
        for _ in range(100):
            if len(found := read(self.file, Line)) >= count:
                return found
            self.recorder.look(10)
        raise AssertionError(found)


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Heard]:
    made = Heard(tmp_path / "lines.jsonl")
    yield made
    made.recorder.close()


def start(token: int, key: str = "k") -> bytes:
    told: dict[str, Any] = {"what": "start", "key": key, "code": "c", "token": token, "attempt": 1, "pod": f"p{token}"}
    return (json.dumps(told) + "\n").encode()


EFFECT = b'{"what": "effect"}\n'


def test_a_workload_s_life_and_its_end(heard: Heard) -> None:
    with heard.call() as workload:
        workload.sendall(start(7) + EFFECT)
        heard.until(2)
        assert workload.recv(100) == b"1\n1\n"
        workload.sendall(b'{"what": "do')  # it may come in pieces
        heard.recorder.look(10)
        workload.sendall(b'ne"}\n')
        heard.until(3)
    lines = heard.until(4)
    assert [(line.seq, line.what, line.key, line.token, line.pod) for line in lines] == [
        (n + 1, what, "k", 7, "p7") for n, what in enumerate(("start", "effect", "done", "end"))
    ]
    assert {line.connection for line in lines} == {1}
    assert all(line.since <= line.at and line.peer == "127.0.0.1" for line in lines)
    assert [line.at for line in lines] == sorted(line.at for line in lines)


def test_a_death_is_an_end(heard: Heard) -> None:
    """As a kernel closes what a killed process had open, with an answer that it had not read."""
    workload = heard.call()
    workload.sendall(start(7))
    heard.until(1)
    workload.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    workload.close()
    assert heard.until(2)[-1].what == "end"


def test_an_old_token_is_refused_from_the_start_of_a_newer_one_on(heard: Heard) -> None:
    with heard.call() as old, heard.call() as new, heard.call() as other:
        old.sendall(start(3) + EFFECT)
        heard.until(2)
        new.sendall(start(4))
        heard.until(3)
        old.sendall(EFFECT)
        other.sendall(start(2, key="another"))
        lines = heard.until(5)
        assert old.recv(100) == b"1\n1\n0\n"
        assert other.recv(100) == b"1\n"
        assert [line.accepted for line in lines if line.key == "k"] == [True, True, True, False]


@pytest.mark.parametrize(
    "words", [b"nonsense\n", b'{"what": "effect"}\n', b'{"what": "start"}\n', b"x" * 5000, b"[]\n"]
)
def test_whoever_talks_nonsense_is_hung_up_on(heard: Heard, words: bytes) -> None:
    with heard.call() as stranger, heard.call() as workload:
        stranger.sendall(words)
        workload.sendall(start(1))
        heard.until(1)
        looking = threading.Thread(target=heard.recorder.look, args=(0.3,))
        looking.start()
        answer = stranger.recv(100) if len(words) < 5000 else b""
        looking.join()
        assert answer == b""
        assert [line.what for line in heard.until(1)] == ["start"], "nothing of it is written down"
