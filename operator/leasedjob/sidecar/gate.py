"""`leasedjob-sidecar gate`: the last init container. The workload starts only behind a lease that is held now.

It waits for `hold` to be up and leased; where the lease is lost it ends at once, with exit code 75 and a message.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Any, Final

from leasedjob.http1 import HttpError, ask
from leasedjob.protocol import EXIT_NOT_MINE
from leasedjob.sidecar.settings import Settings

PAUSE_SECONDS: Final = 0.05
CALL_SECONDS: Final = 5.0


def verdict(status: int, body: bytes) -> tuple[bool | None, str]:
    """True: go on. False: the lease is lost for good. None: not yet."""
    try:
        view: dict[str, Any] = json.loads(body) if status == 200 else {}
    except ValueError:
        view = {}
    if view.get("leased") is True and float(view.get("trustLeftSeconds", 0)) > 0:
        return True, ""
    if view.get("state") in ("fenced", "reported"):
        return False, str(view.get("reason") or "an outcome was reported before the workload began")
    return None, str(view.get("reason") or f"the sidecar answered {status}")


def run(settings: Settings) -> int:
    """Exit code 0 if leased, else EXIT_NOT_MINE."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_NOT_MINE))
    until = time.monotonic() + settings.gate_seconds
    pause = PAUSE_SECONDS
    answer: bool | None = None
    while True:
        try:
            status, body = ask("127.0.0.1", settings.report_port, "GET", "/v1/lease", seconds=CALL_SECONDS)
            answer, why = verdict(status, body)
        except (OSError, HttpError) as error:
            answer, why = None, f"the sidecar does not answer: {error}"
        if answer is True:
            return 0
        if answer is False or time.monotonic() + pause >= until:
            break
        time.sleep(pause)
        pause = min(pause * 1.5, 1.0)
    return _leave(settings, "fenced" if answer is False else "unreachable", why)


def _leave(settings: Settings, name: str, why: str) -> int:
    message = f"the workload was not started, its lease is not held: {why}"
    print(f"leasedjob-gate: {message}", file=sys.stderr, flush=True)
    text = json.dumps({"gate": name, "message": message[:700]}, separators=(",", ":"))
    try:
        with open(settings.termination_log, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        pass  # the log has it
    return EXIT_NOT_MINE
