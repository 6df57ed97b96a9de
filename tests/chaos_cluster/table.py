"""The verdict as a person reads it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from tests.chaos_cluster.checker import Broken, Tally, Verdict

MOST: Final = 20  # of one list


def lines(verdict: Verdict, settings: dict[str, Any]) -> Iterator[str]:
    """Lines of text."""
    yield f"chaos: seed {settings.get('seed')}, {settings.get('minutes')} minutes, {settings.get('what', '')}"
    yield ""
    yield from _ticks(verdict.real, verdict.simulated)
    yield ""
    counted = Counter(violation.broken for violation in verdict.violations)
    for broken in (Broken.UNACCOUNTED, Broken.OVERLAP, Broken.OLD_TOKEN, Broken.RAN_AGAIN):
        within = " within G2's conditions" if broken is Broken.OVERLAP else ""
        yield f"{broken.value + within:<52}{counted[broken]:>8}"
    for broken, number in counted.items():
        if broken not in (Broken.UNACCOUNTED, Broken.OVERLAP, Broken.OLD_TOKEN, Broken.RAN_AGAIN):
            yield f"{broken.value:<52}{number:>8}"
    outside = Counter(excused.kind for excused in verdict.excused)
    yield f"{'outside of them (' + (_listed(outside) or 'none') + ')':<52}{len(verdict.excused):>8}"
    yield ""
    yield f"faults: {sum(verdict.faults.values())} ({_listed(verdict.faults)})"
    if verdict.left_out:
        yield f"could not be done: {_listed(verdict.left_out)}"
    for title, found in (("outside G2's conditions", verdict.excused), ("VIOLATIONS", verdict.violations)):
        if found:
            yield ""
            yield f"{title}:"
            yield from (f"  {_said(each)}" for each in found[:MOST])
            if len(found) > MOST:
                yield f"  ... and {len(found) - MOST} more"


def _said(found: Any) -> str:
    return (
        str(found) if not hasattr(found, "fault") else f"fault {found.fault}, {found.kind}: {found.key}: {found.text}"
    )


def _listed(counted: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counted.items()))


def _ticks(real: Tally, simulated: Tally) -> Iterator[str]:
    def row(text: str, one: int | str, other: int | str) -> str:
        return f"{text:<36}{one:>12}{other:>12}"

    yield row("", "LeasedJobs", "simulated")
    yield row("jobs", real.jobs, simulated.jobs)
    yield row("ticks due", real.due, simulated.due)
    for ending in sorted({*real.run, *simulated.run}, key=lambda name: (name != "SUCCESS", name)):
        yield row(f"  run, {ending}", real.run[ending], simulated.run[ending])
    for reason in sorted({*real.not_run, *simulated.not_run}):
        yield row(f"  {reason}", real.not_run[reason], simulated.not_run[reason])
    yield row("  unaccounted for", real.unaccounted, simulated.unaccounted)
    yield row("attempts", real.attempts, simulated.attempts)
    yield row("  after a lease that had run out", real.taken_over, simulated.taken_over)
    yield row("  in another cluster than before", real.elsewhere, simulated.elsewhere)
    yield row("workloads started", real.workloads, simulated.workloads)
    yield row("effects", real.effects, simulated.effects)
    yield row("  refused by the sink", real.refused, simulated.refused)
    yield row("  let in before it heard of a newer", real.late, simulated.late)
