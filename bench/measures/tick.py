"""Where the time of a tick goes, with 1, 100 and 1,000 objects due: claim, decide, build, POST, status, Events.

The operator runs with a stop-watch at each stage (`bench.watched`), and no node takes Pods. A stage's time is that of
all its calls together; calls of one stage run at the same time where they wait for the API server, so that POSTs sum up
to far more than what passed meanwhile. What passed is in "from" and "until", seconds after the tick.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.database import database
from bench.measures.burst import Burst
from bench.model import Result, Row, Scale
from bench.plane import Plane, percentile

STAGES: Final = ("claim", "decide", "build", "POST", "status: compute", "status: PATCH", "Event")


def _rows(due: int, late: list[float], raw: dict[str, Any], tick: float) -> list[Row]:
    table = [
        Row(f"{due:,} due: the first Pod", "s", (min(late),)),
        Row(f"{due:,} due: half of the Pods", "s", (percentile(late, 0.5),)),
        Row(f"{due:,} due: the last Pod", "s", (max(late),)),
    ]
    used: list[tuple[float, float, float]] = []
    for stage in STAGES:
        spans = [(began, ended) for began, ended in raw[stage]["spans"] if ended >= tick]
        if not spans:
            continue
        each = [(ended - began) * 1000 for began, ended in spans]
        table.append(Row(f"{due:,} due: {stage}, {len(spans):,} times: each", "ms", (percentile(each, 0.5),)))
        table.append(Row(f"{due:,} due: {stage}: together", "ms", (sum(each),)))
        table.append(Row(f"{due:,} due: {stage}: from", "s", (min(began for began, _ in spans) - tick,)))
        table.append(Row(f"{due:,} due: {stage}: until", "s", (max(ended for _, ended in spans) - tick,)))
        if stage in ("decide", "POST"):
            used += [tuple(u) for u in raw[stage]["used"] if u[0] >= tick]
    last = max(ended for _, ended in raw["POST"]["spans"])
    used = sorted(u for u in used if u[0] <= last)
    for who, column in (("the deciding thread", 1), ("the process", 2)):
        milliseconds = (used[-1][column] - used[0][column]) * 1000
        table.append(Row(f"{due:,} due: processor of {who} until the last POST", "ms", (milliseconds,)))
    return table


def measure(scale: Scale) -> Result:
    """Milliseconds and seconds."""
    table: list[Row] = []
    with database() as base, tempfile.TemporaryDirectory() as folder, Plane(Path(folder)) as plane:
        for due in (1, 100, 1000) if not scale.quick else (1, 5):
            profile = Path(folder) / f"profile-{due}.json"
            burst = Burst(plane, base, due, 60)
            burst.prefix = f"tick-{due}"
            late = burst.ours(profile)
            raw = json.loads(profile.read_text(encoding="utf-8"))
            # The first claim of this operator's life comes at the tick.
            first = min(began for began, _ in raw["claim"]["spans"])
            table += _rows(due, late, raw, first - first % 60)
        settings: dict[str, Any] = base.settings
    return Result(
        "tick",
        "where the time of a tick goes (less is better)",
        tuple(table),
        (),
        {
            **settings,
            "from, until": "seconds after the tick",
            "deciding": "the thread that decides and asks; the other one is kopf's",
            "nodes": "none that takes Pods",
        },
    )
