"""The table for people, and the JSON that is kept."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bench.model import Aim, Result, Row


def machine() -> dict[str, Any]:
    """What the figures were taken on; nothing that names the machine."""
    processor = ""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        processor = platform.processor()
    return {
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": [round(value, 1) for value in os.getloadavg()],
        "python": platform.python_version(),
    }


def _number(value: float) -> str:
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def _cells(row: Row) -> tuple[str, ...]:
    against = ""
    if row.ratios:
        low, high = row.spread
        against = f"{median(row.ratios):.2f} ({low:.2f} to {high:.2f}) x {row.peer}"
    return (
        row.what,
        *(_number(value) for value in (row.median, min(row.values), max(row.values))),
        row.unit,
        str(len(row.values)),
        against,
    )


def _verdict(aim: Aim) -> str:
    sign = ">=" if aim.at_least else "<="
    return f"aim: {aim.text} {sign} {aim.limit:g}: {_number(aim.value)}, {'met' if aim.met else 'NOT MET'}"


def table(result: Result) -> str:
    """The measure as text."""
    head = ("", "median", "min", "max", "unit", "n", "ratio")
    lines = [head, *(_cells(row) for row in result.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    left = {0, 4, 6}
    text = [f"{result.name}: {result.title}", ""]
    for line in lines:
        cells = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        text.append("  " + "  ".join(cells).rstrip())
    text.append("")
    text.extend(f"  {_verdict(aim)}" for aim in result.aims)
    text.append("  " + "; ".join(f"{name} {value}" for name, value in result.settings.items()))
    return "\n".join(text)


def as_json(result: Result, taken_on: dict[str, Any]) -> dict[str, Any]:
    """The measure as data."""
    return {
        "name": result.name,
        "title": result.title,
        "machine": taken_on,
        "settings": dict(result.settings),
        "rows": [
            {
                "what": row.what,
                "unit": row.unit,
                "median": round(row.median, 6),
                "min": round(min(row.values), 6),
                "max": round(max(row.values), 6),
                "n": len(row.values),
                **_against(row),
            }
            for row in result.rows
        ],
        "aims": [
            {
                "text": aim.text,
                "at least" if aim.at_least else "at most": aim.limit,
                "value": round(aim.value, 3),
                "met": aim.met,
            }
            for aim in result.aims
        ],
    }


def _against(row: Row) -> dict[str, Any]:
    if not row.ratios:
        return {}
    low, high = row.spread
    return {
        "ratio": round(median(row.ratios), 3),
        "half of the ratios within": [round(low, 3), round(high, 3)],
        "peer": row.peer,
    }


def write(result: Result, taken_on: dict[str, Any], directory: Path) -> Path:
    """Keeps the measure as `directory`/<name>.json; the file's path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{result.name}.json"
    path.write_text(json.dumps(as_json(result, taken_on), indent=1) + "\n", encoding="utf-8")
    return path
