"""HttpPublisher against a real server, which is told what to answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from leasedjob.errors import MessageRefusedError, PublisherUnavailableError
from leasedjob.workload import (
    GracefulShutdown,
    HttpPublisher,
    OutboxMessage,
    OutboxRelay,
    ShutdownState,
    enqueue_once,
    install_outbox,
)

from .conftest import Database
from .workload_parts import LONG

pytestmark = pytest.mark.integration


class Sink:
    """A server that keeps what it is sent, and takes a key once."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.effects: dict[str, Any] = {}
        self.answers: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.connections = 0
        self.close_after = False
        self.silent = threading.Event()
        self.going = threading.Event()
        sink = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                sink.connections += 1

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                key = self.headers["Idempotency-Key"]
                sink.requests.append((self.path, dict(self.headers.items()), json.loads(body)))
                if sink.silent.is_set():
                    sink.going.wait(LONG)
                    self.close_connection = True
                    return
                status, headers, text = sink.answers.get(key, (204, {}, b""))
                if status < 300:
                    sink.effects.setdefault(key, json.loads(body))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if status != 204:
                    self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                if status != 204:
                    self.wfile.write(text)
                if sink.close_after:  # without having said so
                    self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def sink() -> Iterator[Sink]:
    made = Sink()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.02,))
    thread.start()
    yield made
    made.going.set()
    made.server.shutdown()
    thread.join(LONG)
    made.server.server_close()


def message(key: str = "order-7-paid", **changes: Any) -> OutboxMessage:
    values: dict[str, Any] = {
        "id": 1,
        "idempotency_key": key,
        "type": "order-paid",
        "payload": {"order": 7, "text": "Grüße"},
        "topic": "orders",
        "partition_key": "order-7",
        "created_at": datetime.now(UTC),
    }
    return OutboxMessage(**{**values, **changes})


async def test_what_is_posted(sink: Sink) -> None:
    tokens = iter(["one", "two"])
    with HttpPublisher(
        f"{sink.url}/events/{{topic}}/{{type}}?v=1", headers=lambda: {"Authorization": f"Bearer {next(tokens)}"}
    ) as publisher:
        headers = {"traceparent": "00-1-1-01", "authorization": "forged", "Content-Length": "7", "HOST": "x"}
        await publisher.publish(message(headers=headers))
        await publisher.publish(message("ключ 100%", topic="a/b", partition_key=None))
    (path, sent, body), (other_path, other, _) = sink.requests
    assert (path, body) == ("/events/orders/order-paid?v=1", {"order": 7, "text": "Grüße"})
    assert sent["Content-Type"] == "application/json"
    assert (sent["Idempotency-Key"], sent["Outbox-Type"], sent["Outbox-Topic"]) == (
        "order-7-paid", "order-paid", "orders",
    )  # fmt: skip
    assert sent["Outbox-Partition-Key"] == "order-7"
    assert (sent["traceparent"], sent["Authorization"]) == ("00-1-1-01", "Bearer one")
    assert sent["Host"].startswith("127.0.0.1:")
    assert other_path == "/events/a%2Fb/order-paid?v=1"
    assert (other["Idempotency-Key"], other["Authorization"]) == ("%D0%BA%D0%BB%D1%8E%D1%87 100%", "Bearer two")
    assert "Outbox-Partition-Key" not in other


async def test_a_connection_is_used_again_and_replaced_when_it_is_gone(sink: Sink) -> None:
    with HttpPublisher(sink.url) as publisher:
        for n in range(3):
            await publisher.publish(message(f"{n}"))
        assert sink.connections == 1
        sink.close_after = True
        for n in range(3, 6):
            await publisher.publish(message(f"{n}"))
        assert len(sink.effects) == 6
        assert sink.connections in (3, 4), "each closed by the server without a word"
    publisher.close()


@pytest.mark.parametrize(
    ("status", "error"),
    [
        *((status, MessageRefusedError) for status in (400, 402, 406, 409, 410, 413, 415, 422, 451)),
        *((status, PublisherUnavailableError) for status in (302, 308, 401, 403, 404, 405, 407, 408, 425, 429)),
        *((status, PublisherUnavailableError) for status in (500, 502, 503, 504, 507)),
    ],
)
async def test_what_an_answer_means(sink: Sink, status: int, error: type[Exception]) -> None:
    sink.answers["order-7-paid"] = (status, {"Location": "/"}, b"no\r\n  such \xff thing" + b"x" * 5000)
    with (
        HttpPublisher(sink.url) as publisher,
        pytest.raises(error, match=f"^HTTP {status}: no such \ufffd thingx+$") as raised,
    ):
        await publisher.publish(message())
    assert len(str(raised.value)) < 250
    assert getattr(raised.value, "retry_after", None) is None
    assert getattr(raised.value, "final", False) is False


@pytest.mark.parametrize(("said", "seconds"), [("7", 7.0), ("0", 0.0), ("Wed, 21 Oct 2026 07:28:00 GMT", None)])
async def test_it_says_when_it_wants_to_be_asked_again(sink: Sink, said: str, seconds: float | None) -> None:
    sink.answers["order-7-paid"] = (429, {"Retry-After": said}, b"")
    with HttpPublisher(sink.url) as publisher, pytest.raises(PublisherUnavailableError, match=r"^HTTP 429$") as raised:
        await publisher.publish(message())
    assert raised.value.retry_after == seconds


async def test_no_answer(sink: Sink) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with HttpPublisher(nowhere) as publisher, pytest.raises(PublisherUnavailableError, match="RefusedError"):
            await publisher.publish(message())
    sink.silent.set()
    with HttpPublisher(sink.url, seconds=0.05) as publisher, pytest.raises(PublisherUnavailableError, match="timed"):
        await publisher.publish(message())


async def test_nobody_waits_for_an_answer_that_is_not_wanted_any_more(sink: Sink) -> None:
    before = threading.active_count()
    sink.silent.set()
    with HttpPublisher(sink.url, seconds=LONG) as publisher:
        posting = asyncio.create_task(publisher.publish(message()))
        while not sink.requests:
            await asyncio.sleep(0.01)
        posting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await posting
        began = time.monotonic()
        await asyncio.get_running_loop().shutdown_default_executor()
        assert time.monotonic() - began < LONG / 2, "its thread has ended"
    assert threading.active_count() <= before + 1


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("ftp://a/", "url must be an address of http or https"),
        ("billing.example", "url must be an address of http or https"),
        ("https:///a", "url must be an address of http or https"),
        ("https://me:secret@a/", "url must not hold a user name"),
    ],
)
def test_other_addresses_are_refused(url: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        HttpPublisher(url)


async def test_a_certificate_is_verified(sink: Sink) -> None:
    """Against a server without TLS: the handshake fails, and that is the sink's fault and not the message's."""
    with HttpPublisher(sink.url.replace("http:", "https:")) as publisher:
        assert publisher._context is not None
        assert publisher._context.verify_mode is ssl.CERT_REQUIRED
        with pytest.raises(PublisherUnavailableError, match="SSL"):
            await publisher.publish(message())


async def test_with_a_relay_from_the_outbox_to_the_effect(sink: Sink, empty_database: Database) -> None:
    connection = empty_database.connect()
    install_outbox(connection)
    for n in range(20):
        enqueue_once(connection, f"{n}", "order-paid", {"n": n}, topic="orders", partition_key=f"{n % 3}")
    sink.answers["4"] = (422, {}, b"unknown order")
    state = ShutdownState()
    publisher = HttpPublisher(f"{sink.url}/{{topic}}")
    async with GracefulShutdown(state) as shutdown:
        shutdown.add(publisher)
        relay = OutboxRelay(empty_database.dsn, publisher, state, concurrency=3)
        shutdown.add(relay)
        relay.start()
        end = time.monotonic() + LONG
        while len(sink.effects) < 14:  # 0 to 19 but 4, and what is behind it: 7, 10, 13, 16, 19
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        state.begin()
        report = await shutdown.finished()
    assert [(line.phase, line.outcome) for line in report] == [("background", "done"), ("pools", "done")]
    assert set(sink.effects) == {f"{n}" for n in range(20)} - {"4", "7", "10", "13", "16", "19"}
    assert sink.connections <= 3
    rows = empty_database.rows("SELECT tries, error FROM leasedjob_outbox WHERE idempotency_key = '4'")
    assert rows[0]["error"] == "HTTP 422: unknown order"
