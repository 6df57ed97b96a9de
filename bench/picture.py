"""`python -m bench.picture`: draws docs/performance-growth.svg from what `make bench` has kept.

Each panel has both axes in powers of ten: a line that rises one step a step grows as fast as the number of objects.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

from bench.__main__ import RESULTS

TARGET: Final = Path(__file__).parents[1] / "docs" / "performance-growth.svg"
WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 200, 62, 46, 92
OURS, PEER = "#0b6e99", "#9a5b00"  # told apart by their marks, too


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: tuple[tuple[float, float], ...]
    colour: str
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    lines: tuple[Line, ...]


def _rows(name: str) -> dict[str, float]:
    kept: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return {row["what"]: row["median"] for row in kept["rows"]}


def _points(rows: dict[str, float], of: str) -> tuple[tuple[float, float], ...]:
    """`of` with {} for the number of objects, as it stands in the table."""
    before, _, after = of.partition("{}")
    found = []
    for what, value in rows.items():
        if what.startswith(before) and what.endswith(after):
            number = what[len(before) : len(what) - len(after)].replace(",", "")
            if number.isdecimal():
                found.append((float(number), value))
    return tuple(sorted(found))


def panels() -> tuple[Panel, ...]:
    """What is drawn."""
    idle, tick = _rows("idle"), _rows("tick")

    def pair(title: str, field: str) -> Panel:
        return Panel(
            title,
            (
                Line("operator", _points(idle, f"{{}}: operator, {field}"), OURS),
                Line("bare kopf", _points(idle, f"{{}}: kopf, {field}"), PEER, dashed=True),
            ),
        )

    return (
        pair("nothing due: resident memory, MiB", "resident"),
        pair("start to ready, s", "ready"),
        pair("nothing due: processor, % of a core", "processor"),
        Panel(
            "objects due at one tick: tick to Pod, s",
            (
                Line("the last", _points(tick, "{} due: the last Pod"), OURS),
                Line("half of them", _points(tick, "{} due: half of the Pods"), PEER, dashed=True),
            ),
        ),
    )


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "middle", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )


def _label(power: int) -> str:
    return f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"


def _panel(panel: Panel, x0: float, y0: float) -> list[str]:
    points = [p for line in panel.lines for p in line.points if p[1] > 0]
    low_x, high_x = (
        math.floor(math.log10(min(p[0] for p in points))),
        math.ceil(math.log10(max(p[0] for p in points))),
    )
    low_y, high_y = (
        math.floor(math.log10(min(p[1] for p in points))),
        math.ceil(math.log10(max(p[1] for p in points))),
    )
    high_x, high_y = max(high_x, low_x + 1), max(high_y, low_y + 1)

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = x0 + (math.log10(point[0]) - low_x) / (high_x - low_x) * WIDTH
        return x, y0 + HEIGHT - (math.log10(point[1]) - low_y) / (high_y - low_y) * HEIGHT

    parts = [_text(x0, y0 - 14, panel.title, size=13, anchor="start", weight="bold")]
    for power in range(low_x, high_x + 1):
        x, _ = place((10.0**power, 10.0**low_y))
        parts.append(f'<line x1="{x:.1f}" y1="{y0}" x2="{x:.1f}" y2="{y0 + HEIGHT}" stroke="#ddd"/>')
        parts.append(_text(x, y0 + HEIGHT + 16, _label(power)))
    for power in range(low_y, high_y + 1):
        _, y = place((10.0**low_x, 10.0**power))
        parts.append(f'<line x1="{x0}" y1="{y:.1f}" x2="{x0 + WIDTH}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(x0 - 8, y + 4, _label(power), anchor="end"))
    parts.append(_text(x0 + WIDTH / 2, y0 + HEIGHT + 34, "objects"))
    for number, line in enumerate(panel.lines):
        placed = [place(p) for p in line.points if p[1] > 0]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dash}/>')
        for (x, y), (_, value) in zip(placed, [p for p in line.points if p[1] > 0], strict=True):
            if line.dashed:
                parts.append(f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" fill="{line.colour}"/>')
            else:
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{line.colour}"/>')
            parts.append(_text(x, y + (16 if line.dashed else -8), f"{value:.3g}", size=10))
        at = y0 + 14 + 16 * number
        parts.append(
            f'<line x1="{x0 + 10}" y1="{at - 4}" x2="{x0 + 34}" y2="{at - 4}" stroke="{line.colour}"'
            f' stroke-width="2"{dash}/>'
        )
        parts.append(_text(x0 + 40, at, line.name, anchor="start"))
    return parts


def draw(drawn: Sequence[Panel]) -> str:
    """The picture."""
    columns = 2
    rows = -(-len(drawn) // columns)
    width, height = LEFT + columns * (WIDTH + GAP), TOP + rows * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" role="img" aria-label="How cost grows with the number of objects">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, panel in enumerate(drawn):
        parts += _panel(panel, LEFT + number % columns * (WIDTH + GAP), TOP + number // columns * (HEIGHT + GAP))
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    TARGET.write_text(draw(panels()), encoding="utf-8")
    print(TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
