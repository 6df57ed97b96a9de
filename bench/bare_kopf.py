"""The peer of an idle operator: a kopf operator that watches LeasedJobs and does nothing with them.

    python -m bench.bare_kopf KUBECONFIG PORT COUNT

Answers /readyz on PORT with 200 once it has handled COUNT objects.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import kopf

from leasedjob.protocol import GROUP, VERSION


def main() -> None:
    kubeconfig, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    os.environ["KUBECONFIG"] = kubeconfig
    with contextlib.suppress(ImportError):  # as the operator
        import uvloop

        uvloop.install()
    seen: set[str] = set()

    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if len(seen) >= count else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", port), Ready)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    registry = kopf.OperatorRegistry()
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.watching.chunk_size = 500

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.event(GROUP, VERSION, "leasedjobs", registry=registry)
    async def leasedjob_seen(uid: str, **_: Any) -> None:
        seen.add(uid)

    kopf.run(registry=registry, settings=settings, clusterwide=True, standalone=True)


if __name__ == "__main__":
    main()
