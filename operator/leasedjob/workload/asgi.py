"""ASGI: a server within the program that stops as Kubernetes expects it. The extra `asgi` brings uvicorn.

    state = ShutdownState.listening()
    async with GracefulShutdown(state) as shutdown:
        server = UvicornServer(uvicorn.Config(app, host="0.0.0.0", port=8080), state)
        shutdown.add(server)
        await server.start()
        await shutdown.finished()

    the notice    readiness is 503; requests are still served, each answer closes its connection
    SIGTERM       nobody is accepted any more, idle connections are closed, requests in flight end, for 25 s at most
    the limit     what is still in flight is named and cancelled

`Draining` alone is the part of it that works with any ASGI server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Generator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from leasedjob.workload.draining import ShutdownState
from leasedjob.workload.phases import Phase

if TYPE_CHECKING:
    import uvicorn

_log: Final = logging.getLogger("leasedjob.workload")
READINESS: Final = "/readyz"

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Draining:
    """ASGI middleware: answers the readiness probe, and tells clients to come back on another connection, which is
    another Pod's by then, from the first moment of draining.

    Args:
        app: what is served.
        state: whose draining it follows.
        readiness: the path of the readiness probe; None leaves it to the application.
    """

    def __init__(self, app: Application, state: ShutdownState, *, readiness: str | None = READINESS) -> None:
        if readiness is not None and not readiness.startswith("/"):
            raise ValueError(f"readiness must be a path that begins with /, or None, not {readiness!r}")
        self._app, self._state, self._readiness = app, state, readiness
        self._in_flight: dict[object, str] = {}

    @property
    def in_flight(self) -> Sequence[str]:
        """Requests that are being served, as method and path; WebSockets as well."""
        return list(self._in_flight.values())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if kind == "http" and scope["path"] == self._readiness:
            await self._ready(self._closing(scope, send))
            return
        key = object()
        self._in_flight[key] = f"{scope['method'] if kind == 'http' else 'WebSocket'} {scope['path']}"
        try:
            await self._app(scope, receive, self._closing(scope, send) if kind == "http" else send)
        finally:
            del self._in_flight[key]

    async def _ready(self, send: Send) -> None:
        status, text = self._state.readiness()
        body = text.encode()
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _closing(self, scope: Scope, send: Send) -> Send:
        if not scope.get("http_version", "1.1").startswith("1"):
            return send  # HTTP/2 has no such header; its server says GOAWAY

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._state.is_draining():
                kept = [(name, value) for name, value in message.get("headers", ()) if name.lower() != b"connection"]
                message = {**message, "headers": [*kept, (b"connection", b"close")]}
            await send(message)

        return closing


class UvicornServer:
    """A uvicorn server on the running event loop, as a part of a GracefulShutdown. It handles no signals: those are the
    state's. Its application is served by way of `Draining`.

    Args:
        config: of uvicorn; its `timeout_graceful_shutdown` isn't needed, the phase has a limit.
        state: whose draining it follows.
        readiness: the path of the readiness probe; None leaves it to the application.
        name: for log lines.

    Raises:
        ValueError: the config asks for several workers or for reload, which are processes of their own.
    """

    phase: Final = Phase.HTTP

    def __init__(
        self, config: uvicorn.Config, state: ShutdownState, *, readiness: str | None = READINESS, name: str = "http"
    ) -> None:
        if config.workers > 1 or config.should_reload:
            raise ValueError("config: workers and reload are for uvicorn's own command line; this server is in-process")
        self.name = name
        self._config, self._state, self._readiness = config, state, readiness
        self._server: uvicorn.Server | None = None
        self._draining: Draining | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once it accepts connections. Should the server end by itself, that is the program's stop.

        Raises:
            RuntimeError: it can't start, or was started before; uvicorn's log says why.
        """
        if self._serving is not None:
            raise RuntimeError(f"{self.name} was started before")
        import uvicorn

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Generator[None]:
                yield

        self._config.load()
        self._draining = Draining(self._config.loaded_app, self._state, readiness=self._readiness)
        self._config.loaded_app = self._draining
        self._server = server = Server(self._config)
        self._serving = asyncio.create_task(self._serve(server), name=f"leasedjob-{self.name}")
        while not server.started and not self._serving.done():
            await asyncio.sleep(0.01)
        if self._serving.done():
            self._serving.result()
            raise RuntimeError(f"{self.name} has ended before it accepted connections")
        self._serving.add_done_callback(self._ended)

    async def _serve(self, server: uvicorn.Server) -> None:
        try:
            await server.serve()
        except SystemExit as error:  # how uvicorn says that it can't start; it would end the loop
            raise RuntimeError(f"{self.name} can't start: uvicorn exits with {error.code}") from error

    def _ended(self, serving: asyncio.Task[None]) -> None:
        if not self._state.is_stopping():
            error = None if serving.cancelled() else serving.exception()
            self._state.begin(f"the server {self.name} has ended by itself{f': {error}' if error else ''}")

    @property
    def ports(self) -> Sequence[int]:
        """The TCP ports that it listens on."""
        if self._server is None or not self._server.started:
            return ()
        addresses = [socket.getsockname() for server in self._server.servers for socket in server.sockets]
        return [address[1] for address in addresses if isinstance(address, tuple)]

    async def stop(self) -> None:
        """Accepts nobody any more, closes idle connections, and waits for the requests in flight."""
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        try:
            await asyncio.wait([self._serving])
        except asyncio.CancelledError:
            self._server.force_exit = True
            for task in list(self._server.server_state.tasks):
                task.cancel()
            raise
        self._serving.result()

    def in_hand(self) -> Sequence[str]:
        """The requests in flight."""
        return self._draining.in_flight if self._draining is not None else ()
