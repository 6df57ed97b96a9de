"""The operator, with a stop-watch at each stage of a tick: claim, decide, build, POST, status, Events.

Started in the operator's place by a measure; when it ends it writes down, for each stage, how often it was done, the
seconds that all of it took, when the first began and the last ended, and what the process had used by then.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from leasedjob.controller import act, engine, status
from leasedjob.controller import main as operator
from leasedjob.controller.act import Actor
from leasedjob.controller.events import Recorder
from leasedjob.controller.kube import Kube


@dataclass(slots=True)
class Stage:
    """What was seen of one stage. Times by the clock that the API server's log has, too."""

    spans: list[tuple[float, float]] = field(default_factory=list)
    used: list[tuple[float, float, float]] = field(default_factory=list)  # at the end: clock, this thread, the process

    def add(self, began: float) -> None:
        ended = time.time()
        self.spans.append((began, ended))
        self.used.append((ended, time.thread_time(), time.process_time()))


STAGES: dict[str, Stage] = {}


def _timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
    kept = STAGES.setdefault(stage, Stage())
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def later(*args: Any, **kwargs: Any) -> Any:
            began = time.time()
            try:
                return await function(*args, **kwargs)
            finally:
                kept.add(began)

        return later

    @functools.wraps(function)
    def now(*args: Any, **kwargs: Any) -> Any:
        began = time.time()
        try:
            return function(*args, **kwargs)
        finally:
            kept.add(began)

    return now


def install() -> None:
    """Puts the stop-watches in."""
    for stage, owner, name in (
        ("look", engine.Engine, "_look_at"),
        ("decide", engine, "decide"),
        ("claim", Actor, "_claim_many"),
        ("build", act, "build_pod"),
        ("POST", Kube, "create_pod"),
        ("status: compute", status, "job_status"),
        ("status: PATCH", Kube, "patch_status"),
        ("Event", Recorder, "_write"),
    ):
        setattr(owner, name, _timed(stage, getattr(owner, name)))


def summary(since: float = 0.0, to: float = float("inf")) -> dict[str, Any]:
    """Of what ended in between."""
    found: dict[str, Any] = {}
    for name, stage in STAGES.items():
        spans = [(b, e) for b, e in stage.spans if since <= e <= to]
        if not spans:
            continue
        used = [u for u in stage.used if since <= u[0] <= to]
        found[name] = {
            "times": len(spans),
            "seconds": sum(e - b for b, e in spans),
            "median": median(e - b for b, e in spans),
            "first began": min(b for b, _ in spans),
            "last ended": max(e for _, e in spans),
            "thread by then": used[-1][1] - used[0][1],
            "process by then": used[-1][2] - used[0][2],
        }
    return found


def main() -> None:
    install()
    into = Path(os.environ["LEASEDJOB_BENCH_PROFILE"])
    try:
        operator.main()
    finally:
        raw = {name: {"spans": stage.spans, "used": stage.used} for name, stage in STAGES.items()}
        into.write_text(json.dumps(raw), encoding="utf-8")


if __name__ == "__main__":
    main()
