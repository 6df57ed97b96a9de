"""An HTTP server on the loopback that plays the API server's paths and its errors, for the plugin's tests.

The answers have the shape of a real API server's (tests/controller/test_plugin_verbs.py asks one).
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from leasedjob.api.v1alpha1 import LeasedJobRunStatus, LeasedJobStatus

Object = dict[str, Any]
OURS = "/apis/leasedjob.io/v1alpha1"
KINDS = {
    "leasedjobs": ("LeasedJob", OURS),
    "leasedjobruns": ("LeasedJobRun", OURS),
    "cronjobs": ("CronJob", "/apis/batch/v1"),
    "pods": ("Pod", "/api/v1"),
}


class FakeApi:
    """Objects in memory, and the error that the next requests get."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.installed = True
        self.fail: Callable[[str, str], tuple[int, Object | str] | None] = lambda _method, _path: None
        self.bodies: list[tuple[str, str, Object]] = []  # what was written: method, content type, body
        self.operator: Callable[[Object], Object | None] = lambda _spec: None  # the status of a LeasedJobRun, at once
        self.logs: dict[tuple[str, str], bytes] = {}  # by Pod and container
        self.asked: list[tuple[str, dict[str, str]]] = []  # logs: path and query
        self.pages: list[str] = []
        self.watchers: list[queue.Queue[Object | None]] = []
        self.watching = threading.Event()
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.answer(self, "GET")

            def do_POST(self) -> None:
                fake.answer(self, "POST")

            def do_PATCH(self) -> None:
                fake.answer(self, "PATCH")

            def do_DELETE(self) -> None:
                fake.answer(self, "DELETE")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        for watcher in self.watchers:
            watcher.put(None)
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    # --- what a test does ---------------------------------------------------------------------------------------------

    def put(self, plural: str, name: str, namespace: str = "default", **parts: Any) -> Object:
        with self.lock:
            body = {
                "apiVersion": KINDS[plural][1].removeprefix("/apis/").removeprefix("/api/"),
                "kind": KINDS[plural][0],
                "metadata": {
                    "name": name,
                    "namespace": namespace,
                    "uid": f"uid-{name}",
                    "resourceVersion": str(len(self.objects) + 1),
                    "creationTimestamp": "2026-07-20T02:00:00Z",
                    "managedFields": [{"manager": "kubectl"}],
                },
                **parts,
            }
            self.objects[plural, namespace, name] = body
            return body

    def job(self, name: str = "hello", namespace: str = "default", **status: Any) -> Object:
        made = LeasedJobStatus(**status).model_dump(mode="json", by_alias=True, exclude_none=True)
        spec = {"type": "Schedule", "schedule": "0 3 * * *", "timeZone": "Etc/UTC"}
        return self.put("leasedjobs", name, namespace, spec=spec, status=made)

    def run(self, name: str, job: str = "hello", tick: str | None = None, **status: Any) -> Object:
        made = LeasedJobRunStatus(**status).model_dump(mode="json", by_alias=True, exclude_none=True)
        spec = {"jobName": job, **({"tick": tick} if tick else {})}
        return self.put("leasedjobruns", name, spec=spec, status=made)

    def runs(self) -> list[Object]:
        return [body for (plural, _, _), body in self.objects.items() if plural == "leasedjobruns"]

    def tell(self, **status: Any) -> None:
        """The operator writes the status of the only run, while somebody watches it."""
        assert self.watching.wait(10)
        (run,) = self.runs()
        run["status"] = LeasedJobRunStatus(**status).model_dump(mode="json", by_alias=True, exclude_none=True)
        self.event("MODIFIED", run)

    def event(self, kind: str, body: Object) -> None:
        self.watchers[-1].put({"type": kind, "object": json.loads(json.dumps(body))})

    def cut(self) -> None:
        """Ends the watch, as a load balancer does."""
        self.watching.clear()
        self.watchers[-1].put(None)

    # --- what the API server does -------------------------------------------------------------------------------------

    def answer(self, request: BaseHTTPRequestHandler, method: str) -> None:
        url = urlsplit(request.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        length = int(request.headers.get("Content-Length") or 0)
        body = json.loads(request.rfile.read(length)) if length else {}
        if method != "GET":
            self.bodies.append((method, request.headers["Content-Type"], body))
        if query.get("watch") in ("True", "true"):
            self.stream(request, int(query["timeoutSeconds"]))
            return
        code, said = self.decide(method, url.path, query, body)
        if url.path.endswith("/log") and code == 200:
            self.asked.append((url.path, query))
            data = self.logs[url.path.split("/")[-2], query["container"]]
        else:
            data = (said if isinstance(said, str) else json.dumps(said)).encode()
        request.send_response(code)
        request.send_header("Content-Type", "text/plain" if isinstance(said, str) else "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def decide(self, method: str, path: str, query: dict[str, str], body: Object) -> tuple[int, Object | str]:
        if failure := self.fail(method, path):
            return failure
        if path == "/api/v1/namespaces":
            return 200, {"metadata": {}, "items": [{"metadata": {"name": n}} for n in ("default", "shop")]}
        base = next((api for _, api in KINDS.values() if path.startswith(f"{api}/")), None)
        if base is None or (base == OURS and not self.installed):
            return 404, "404 page not found\n"
        parts = path.removeprefix(base).strip("/").split("/")
        namespace = parts[1] if parts[0] == "namespaces" else None
        plural, *rest = parts[2:] if namespace else parts
        if method == "GET" and not rest:
            return self.page(plural, namespace, query)
        if namespace == "gone" and method == "POST":
            return 404, status(404, "NotFound", 'namespaces "gone" not found', name="gone", kind="namespaces")
        if method == "POST":
            name = f"{body['metadata']['generateName']}x{len(self.objects)}"
            made = self.put(plural, name, str(namespace), spec=body["spec"])
            made["metadata"].update({k: v for k, v in body["metadata"].items() if k != "generateName"})
            if (told := self.operator(body["spec"])) is not None:
                made["status"] = told
            return 201, made
        found = self.objects.get((plural, str(namespace), rest[0]))
        if found is None:
            message = f'{plural} "{rest[0]}" not found'
            return 404, status(404, "NotFound", message, name=rest[0], kind=plural)
        if method == "PATCH":
            found["spec"].update(body["spec"])
        if method == "DELETE":
            del self.objects[plural, str(namespace), rest[0]]
        return 200, found

    def page(self, plural: str, namespace: str | None, query: dict[str, str]) -> tuple[int, Object]:
        every = [b for (p, ns, _), b in sorted(self.objects.items()) if p == plural and namespace in (None, ns)]
        if "labelSelector" in query:
            key, _, value = query["labelSelector"].partition("=")
            every = [b for b in every if b["metadata"].get("labels", {}).get(key) == value]
        start, limit = int(query.get("continue") or 0), int(query["limit"])
        self.pages.append(query.get("continue", ""))
        end = start + min(limit, 2)
        more = {"continue": str(end)} if end < len(every) else {}
        return 200, {"kind": "List", "metadata": more, "items": every[start:end]}

    def stream(self, request: BaseHTTPRequestHandler, seconds: int) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.end_headers()
        events: queue.Queue[Object | None] = queue.Queue()
        self.watchers.append(events)
        self.watching.set()
        with contextlib.suppress(queue.Empty):
            while (event := events.get(timeout=min(seconds, 30))) is not None:
                request.wfile.write(json.dumps(event).encode() + b"\n")
                request.wfile.flush()


def status(code: int, reason: str, message: str, **details: str) -> Object:
    return {
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
        "details": details,
    }


def write_kubeconfig(path: Path, server: str) -> None:
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "clusters": [{"name": "c", "cluster": {"server": server}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [
                    {"name": "here", "context": {"cluster": "c", "user": "u"}},
                    {"name": "shop", "context": {"cluster": "c", "user": "u", "namespace": "shop"}},
                ],
            }
        )
    )
