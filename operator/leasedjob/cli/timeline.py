"""`kubectl leasedjob timeline`: who ran what, where, in which attempt, drawn.

Each run has a line for each of its attempts, on one scale that begins at the run's tick (of a run without a tick: at
its first start), so that delays and durations of all runs can be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from leasedjob.cli.options import cluster_options, complete_jobs, target
from leasedjob.cli.output import COLOURS, Format, ago, dump, duration, format_option, parse_time, printable

if TYPE_CHECKING:
    from leasedjob.cli.attempts import Attempt

Object = dict[str, Any]
MIN_SCALE: Final = 10
PLAIN_WIDTH: Final = 120  # where there is no terminal
_GAP: Final = "  "
_LEGEND: Final = "since the tick"


@dataclass(frozen=True, slots=True)
class Bar:
    """One attempt. Offsets are seconds since the run's zero: when it was claimed, began to work, and ended (or now)."""

    label: str  # the run key, on the first line of a run
    attempt: str
    outcome: str
    where: str
    claimed: float | None
    started: float | None
    ended: float | None
    goes_on: bool
    note: str


@dataclass(frozen=True, slots=True)
class Marks:
    """How the parts of a bar are drawn: waiting, working, its last piece by outcome."""

    waiting: str
    working: str
    good: str
    bad: str
    going: str


ASCII: Final = Marks(".", "=", "=", "x", ">")
BLOCKS: Final = Marks("░", "█", "█", "▚", "▶")


@click.command()
@click.argument("name", shell_complete=complete_jobs)
@click.option("--ascii", "plain", is_flag=True, help="Draw with ASCII signs; so it is done anyway without a terminal.")
@format_option(Format.WIDE, Format.JSON, Format.YAML)
@cluster_options
@click.pass_context
def command(ctx: click.Context, name: str, plain: bool, output: Format) -> None:
    """Draw a LeasedJob's recent runs.

    Who ran what, where, which attempt, how late and how long, and the ticks between that did not run. It tells what the
    status knows (at most ten runs) and the Pods that are left in this cluster. With -o wide holders are whole.
    """
    from leasedjob.cli.attempts import of_job

    cluster = target(ctx)
    job = cluster.get("leasedjobs", name)
    found = of_job(cluster, name)
    now = datetime.now(UTC)
    status = job.get("status") or {}
    if output in (Format.JSON, Format.YAML):
        dump({"runs": list(_plain(status, found)), "ledger": status.get("ledger") or []}, output)
        return
    lines = list(draw(job, found, now, width=_width(), blocks=_blocks(plain), wide=output is Format.WIDE))
    if not lines:
        click.echo(f"No run of {name} yet.", err=True)
        return
    colours = sys.stdout.isatty()
    for text, colour in lines:
        click.echo(click.style(text, fg=colour) if colours and colour else text)


def _width() -> int:
    import shutil

    return shutil.get_terminal_size((PLAIN_WIDTH, 40)).columns if sys.stdout.isatty() else PLAIN_WIDTH


def _blocks(plain: bool) -> bool:
    return not plain and sys.stdout.isatty() and "utf" in (sys.stdout.encoding or "").lower()


# --- what is drawn: pure ----------------------------------------------------------------------------------------------


def draw(
    job: Object, found: Iterable[Attempt], now: datetime, *, width: int, blocks: bool, wide: bool = False
) -> Iterator[tuple[str, str]]:
    """The lines of the drawing and the colour of each ("" for none), the earliest first; none where nothing ran."""
    status = job.get("status") or {}
    groups = sorted(
        [*_runs(status, list(found), now, wide=wide), *_ranges(status)], key=lambda group: (group[0], len(group[1]))
    )
    bars = [bar for _, lines in groups for bar in lines if isinstance(bar, Bar)]
    if not groups:
        return
    columns = [
        max((len(getattr(bar, part)) for bar in bars), default=0) for part in ("label", "attempt", "outcome", "where")
    ]
    longest = max(
        (end for bar in bars for end in (bar.claimed, bar.started, bar.ended) if end is not None), default=0.0
    )
    beside = max(len(_LEGEND), *(len(bar.note) for bar in bars)) if bars else 0
    scale = max(MIN_SCALE, width - sum(columns) - len(_GAP) * 5 - beside - 2)
    if bars:
        end = duration(longest) if longest >= 1 else "1s"
        blank = " " * (sum(columns) + len(_GAP) * 4 + 1)
        yield f"{blank}0{end:>{scale - 1}} {_GAP}{_LEGEND}", ""
    marks = BLOCKS if blocks else ASCII
    for _, lines in groups:
        for line in lines:
            if isinstance(line, str):
                yield line, "yellow"
                continue
            cells = _GAP.join(
                getattr(line, part).ljust(size)
                for part, size in zip(("label", "attempt", "outcome", "where"), columns, strict=True)
            )
            drawn = _bar(line, max(longest, 1.0), scale, marks)
            yield f"{cells}{_GAP}|{drawn}|{_GAP}{line.note}".rstrip(), COLOURS.get(line.outcome.split(" ")[0], "")
    following = status.get("nextScheduleTime")
    if following:
        yield f"next: {following} ({ago(following, now)})", ""


def _bar(bar: Bar, longest: float, scale: int, marks: Marks) -> str:
    def at(seconds: float) -> int:
        return max(0, min(scale - 1, int(seconds / longest * scale)))

    cells = [" "] * scale
    if bar.claimed is not None:
        until = bar.started if bar.started is not None else bar.ended
        for index in range(at(bar.claimed), at(until if until is not None else bar.claimed) + 1):
            cells[index] = marks.waiting
    if bar.started is not None and bar.ended is not None:
        first, last = at(bar.started), at(bar.ended)
        for index in range(first, last + 1):
            cells[index] = marks.working
        bad = bar.outcome.split(" ")[0] not in ("Success", "Running", "Pending", "")
        cells[last] = marks.going if bar.goes_on else marks.bad if bad else marks.good
    return "".join(cells)


def _merged(status: Object, found: Iterable[Attempt]) -> dict[str, tuple[Object, list[Attempt]]]:
    """Each run that the status or a Pod knows of: what the status says, and its attempts in order."""
    runs: dict[str, tuple[Object, list[Attempt]]] = {
        str(run.get("runKey") or ""): (run, []) for run in status.get("recentRuns") or []
    }
    for attempt in found:
        runs.setdefault(attempt.run_key, ({}, []))[1].append(attempt)
    for _, attempts in runs.values():
        attempts.sort(key=lambda attempt: attempt.number)
    return runs


def _runs(status: Object, found: list[Attempt], now: datetime, *, wide: bool) -> Iterator[tuple[str, list[Bar | str]]]:
    for key, (run, attempts) in _merged(status, found).items():
        known = {attempt.number for attempt in attempts}
        began = [at for at in (*(a.created for a in attempts), parse_time(run.get("startTime"))) if at is not None]
        if not began:
            continue
        zero = parse_time(run.get("scheduledTime")) or parse_time(key.partition("#")[0]) or min(began)
        zero = min(zero, *began)
        bars: list[Bar | str] = [_of_pod(attempt, run, zero, now, wide=wide) for attempt in attempts]
        if run.get("attempt") and run["attempt"] not in known:
            bars.append(_of_status(run, zero, now, wide=wide))
        yield zero.isoformat(), [_labelled(bar, _short(key)) if not number else bar for number, bar in enumerate(bars)]


def _labelled(bar: Bar | str, label: str) -> Bar | str:
    from dataclasses import replace

    return replace(bar, label=label) if isinstance(bar, Bar) else bar


def _short(key: str) -> str:
    """`manual/<namespace>/<name>/<uid>` as the LeasedJobRun's name."""
    parts = key.split("/")
    return printable(parts[2] if parts[0] == "manual" and len(parts) == 4 else key) or "(once)"


def _of_pod(attempt: Attempt, run: Object, zero: datetime, now: datetime, *, wide: bool) -> Bar:
    latest = run.get("attempt") == attempt.number
    if latest:
        outcome = _outcome(run)
    elif attempt.exit_code is None:
        outcome = "Pending" if attempt.waits else "Running" if attempt.started and not attempt.ended else "Ended"
    else:
        # Of an earlier attempt only its exit code is left: that it wasn't the last says that it did not succeed.
        outcome = f"Ended {attempt.reason}".strip()
    holder = str(run.get("holder") or "") if latest else ""
    place = holder if wide and holder else f"{holder.split('/')[0]}/{attempt.node}" if holder else attempt.node
    ended = attempt.ended or (parse_time(run.get("completionTime")) if latest else None)
    return _bar_of(
        attempt.number,
        outcome,
        place or "<none>",
        zero,
        now,
        attempt.created,
        attempt.started,
        ended,
        goes_on=ended is None,
    )


def _of_status(run: Object, zero: datetime, now: datetime, *, wide: bool) -> Bar:
    """An attempt without a Pod here: it is another cluster's, or its Pod was removed."""
    began, ended = parse_time(run.get("startTime")), parse_time(run.get("completionTime"))
    outcome, holder = _outcome(run), str(run.get("holder") or "")
    works = outcome.split(" ")[0] not in ("Pending", "Retrying")
    place = holder if wide else holder.split("/")[0]
    return _bar_of(
        int(run["attempt"]), outcome, place or "<none>", zero, now, began, began if works else None, ended,
        goes_on=ended is None and works,
    )  # fmt: skip


def _bar_of(
    number: int,
    outcome: str,
    where: str,
    zero: datetime,
    now: datetime,
    claimed: datetime | None,
    started: datetime | None,
    ended: datetime | None,
    *,
    goes_on: bool,
) -> Bar:
    def since(at: datetime | None) -> float | None:
        return None if at is None else max(0.0, (at - zero).total_seconds())

    took = ((ended or now) - started).total_seconds() if started else None
    return Bar(
        label="",
        attempt=f"#{number}",
        outcome=printable(outcome),
        where=printable(where),
        claimed=since(claimed),
        started=since(started),
        ended=since(ended or now),
        goes_on=goes_on,
        note="" if took is None else duration(max(0.0, took)),
    )


def _outcome(run: Object) -> str:
    """How a run stands, with its reason where that says more."""
    outcome, reason = str(run.get("outcome") or ""), str(run.get("reason") or "")
    return f"{outcome} {reason}" if reason and outcome not in ("Success", "Running") else outcome


def _ranges(status: Object) -> Iterator[tuple[str, list[Bar | str]]]:
    from leasedjob.cli.explain import range_in_words

    for entry in status.get("ledger") or []:
        at = parse_time(entry.get("from"))
        if at is not None:
            yield at.isoformat(), [printable(f"-- {range_in_words(entry)}")]


def _plain(status: Object, found: Iterable[Attempt]) -> Iterator[Object]:
    """The runs and their attempts as -o json shows them."""

    def shown(at: datetime | None) -> str | None:
        return None if at is None else at.strftime("%Y-%m-%dT%H:%M:%SZ")

    for key, (run, attempts) in _merged(status, found).items():
        pods = [
            {
                "attempt": a.number, "podName": a.pod, "nodeName": a.node, "createTime": shown(a.created),
                "startTime": shown(a.started), "completionTime": shown(a.ended), "exitCode": a.exit_code,
                "reason": a.reason,
            }
            for a in attempts
        ]  # fmt: skip
        yield {**run, "runKey": key, "pods": [{k: v for k, v in pod.items() if v not in (None, "")} for pod in pods]}
