"""The page over HTTP: which requests are answered, with which headers, and how much work they may be."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Final

from aiohttp import web

from leasedjob.api.v1alpha1 import Explanation
from leasedjob.controller.engine import DATABASE_FAULTS, Engine
from leasedjob.controller.gauges import Gauges
from leasedjob.controller.loops import Health
from leasedjob.controller.page.hosts import allowed
from leasedjob.controller.page.observe import Observer
from leasedjob.controller.page.query import BadQuery, Query
from leasedjob.controller.page.views import job, jobs, leases, not_run, timeline
from leasedjob.controller.page.views.frame import Shown, problem
from leasedjob.identity import run_key_for

log = logging.getLogger(__name__)
WAITING: Final = 16  # requests that are worked on or wait for it; more are sent away
EXPLAIN_SECONDS: Final = 5.0
# Nothing but what this server sends: no inline script or style, nothing from elsewhere, no frame around it; and no
# string becomes markup in the browser.
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
_STATIC: Final = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _NotYetError(Exception):
    """There is nothing to show."""


class Page:
    """The handlers. Use `serve`."""

    def __init__(self, engine: Engine, health: Health, gauges: Gauges) -> None:
        self._engine = engine
        self._hosts = engine.settings.page_hosts
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="page")
        self._observer = Observer(engine, health, gauges, self._worker)
        self._busy = 0

    def app(self) -> web.Application:
        """The application."""
        app = web.Application(middlewares=[self._guard], client_max_size=1)
        app.add_routes(
            [
                web.get("/", self._jobs),
                web.get("/jobs/{namespace}/{name}", self._job),
                web.get("/timeline", self._timeline),
                web.get("/not-run", self._not_run),
                web.get("/leases", self._leases),
                web.get("/clusters", self._clusters),
            ]
        )
        for name, kind in _STATIC.items():
            app.router.add_get(f"/static/{name}", _static(name, kind))
        return app

    async def close(self) -> None:
        """Gives up what is being worked out."""
        await self._observer.close()
        self._worker.shutdown(wait=False, cancel_futures=True)

    # --- every request -----------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await self._answer(request, handler)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if len(request.headers.getall("Host", [])) != 1 or not allowed(request.headers["Host"], self._hosts):
            return _page(403, "Not by this name", "This page answers to localhost and to the names it was given.")
        if request.method not in ("GET", "HEAD"):
            response = _page(405, "Reading only", "This page changes nothing: ask with GET or HEAD.")
            response.headers["Allow"] = "GET, HEAD"
            return response
        if self._busy >= WAITING:
            response = _page(503, "Busy", "Too many ask at the same time. Try again in a moment.")
            response.headers["Retry-After"] = "2"
            return response
        self._busy += 1
        try:
            return await handler(request)
        except BadQuery as e:
            return _page(400, "That can't be shown", f"{e}.")
        except web.HTTPNotFound:
            return _page(404, "Not here", "There is no such page.")
        except _NotYetError:
            response = _page(503, "In a moment", "The operator has not looked at all jobs yet.")
            response.headers["Refresh"] = "2"
            return response
        except web.HTTPException as e:
            return _page(e.status, e.reason, "It can't be shown.")
        except Exception:
            log.exception("the status page failed at %s", request.path)
            return _page(500, "A fault of the page", "It is in the operator's log.")
        finally:
            self._busy -= 1

    async def _shown(self, request: web.Request) -> Shown:
        query = Query.parse(request.query)
        snapshot = await self._observer.snapshot()
        if snapshot is None:
            raise _NotYetError
        ago = max(0.0, time.monotonic() - snapshot.taken)
        return Shown(snapshot, query, self._observer.sources(), ago, request.path)

    async def _html(self, draw: Callable[[], str]) -> web.Response:
        text = await asyncio.get_running_loop().run_in_executor(self._worker, draw)
        return web.Response(text=text, content_type="text/html", charset="utf-8")

    # --- views -------------------------------------------------------------------------------------------------------

    async def _jobs(self, request: web.Request) -> web.StreamResponse:
        shown = await self._shown(request)
        return await self._html(lambda: jobs.draw(shown))

    async def _job(self, request: web.Request) -> web.StreamResponse:
        shown = await self._shown(request)
        key = request.match_info["namespace"], request.match_info["name"]
        found = shown.snapshot.by_key.get(key)
        if found is None:
            return _page(404, "No such job", f"This cluster has no LeasedJob {key[0]}/{key[1]}, or this operator "
                         "doesn't serve its namespace.")  # fmt: skip
        about = await self._observer.about(found.job.seen.code) if found.job.seen.code else None
        explanation = None
        if shown.query.tick is not None:
            explanation = await self._explained(key, run_key_for(shown.query.tick))
        return await self._html(lambda: job.draw(shown, found, about, explanation))

    async def _explained(self, key: tuple[str, str], run_key: str) -> Explanation | str | None:
        try:
            async with asyncio.timeout(EXPLAIN_SECONDS):
                return await self._engine.explanation(key, run_key)
        except (*DATABASE_FAULTS, TimeoutError) as e:
            return f"The database does not say: {str(e) or 'no answer in time'}"

    async def _timeline(self, request: web.Request) -> web.StreamResponse:
        shown = await self._shown(request)
        found = await self._observer.runs(shown.query.window)
        if found is None:
            remembered = [run for row in shown.snapshot.rows for run in row.job.seen.rows]
            return await self._html(lambda: timeline.draw(shown, remembered, partial=False, recalled=True))
        runs, partial = found
        return await self._html(lambda: timeline.draw(shown, runs, partial=partial, recalled=False))

    async def _not_run(self, request: web.Request) -> web.StreamResponse:
        shown = await self._shown(request)
        return await self._html(lambda: not_run.draw(shown))

    async def _leases(self, request: web.Request) -> web.StreamResponse:
        shown = await self._shown(request)
        found = await self._observer.leases()
        return await self._html(lambda: leases.draw(shown, found))

    async def _clusters(self, request: web.Request) -> web.StreamResponse:
        shown = await self._shown(request)
        found = await self._observer.leases()
        return await self._html(lambda: leases.clusters(shown, found))


def _page(status: int, title: str, text: str) -> web.Response:
    return web.Response(status=status, text=problem(title, text), content_type="text/html", charset="utf-8")


def _static(name: str, kind: str) -> Handler:
    content = files("leasedjob.controller.page").joinpath("static", name).read_bytes()
    # Asked for again each time, and then mostly not sent: after an upgrade nobody keeps the script of before.
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    kept = {"ETag": tag, "Cache-Control": "no-cache"}

    async def send(request: web.Request) -> web.StreamResponse:
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=kept)
        return web.Response(body=content, content_type=kind, charset="utf-8", headers=kept)

    return send


@contextlib.asynccontextmanager
async def serve(engine: Engine, health: Health, gauges: Gauges) -> AsyncIterator[None]:
    """Serves the page while the context lasts, if the settings say where."""
    settings = engine.settings
    if not settings.page_port:
        yield
        return
    page = Page(engine, health, gauges)
    runner = web.AppRunner(page.app(), handle_signals=False, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, settings.page_address, settings.page_port).start()
            log.info("the status page is served at %s, port %d", settings.page_address, settings.page_port)
        except OSError as e:  # nobody's run waits for a page
            log.error("the status page can't be served: %s", e)
        yield
    finally:
        await runner.cleanup()
        await page.close()
