"""`python -m bench [NAME...]`: takes the measures named, all by default, prints them and keeps them as JSON."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Final

from bench import report
from bench.model import Result, Scale

# Each module has a `measure(scale)`.
MEASURES: Final = {
    "lease": "acquire and complete by the library, beside bare psycopg",
    "claim": "a batch of 1,000 due runs, beside one bare INSERT",
    "heartbeat": "one heartbeat, beside one UPDATE",
    "beats": "2,000 live leases on 20 connections: how late heartbeats are",
    "sidecar": "memory, processor and start of what runs in each Pod, beside a bare psycopg process",
    "burst": "1,000 objects due at one tick, beside CronJob and a bare client",
    "idle": "10,000 objects with nothing due, beside a kopf operator that only watches",
    "tick": "where the time of a tick goes, with 1, 100 and 1,000 objects due",
    "failover": "an operator of two is killed at the tick",
    "lost": "an owner's node is lost: expiry to the next claim",
    "live": "3,000 runs live at once: heartbeats, database, connections",
    "schedule": "parse and next, beside cronsim and croniter; the latest missed tick",
    "command": "kubectl leasedjob --help, beside bare Python",
    "imports": "what the sidecar's parts import",
}
RESULTS: Final = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 also where an aim isn't met, for a shared machine proves nothing."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Takes figures side by side with peers.",
        epilog="\n".join(f"  {name:9} {text}" for name, text in MEASURES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to measure; default: all of them")
    parser.add_argument("--quick", action="store_true", help="few and small turns: a trial of the bench; keeps nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the JSON goes")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in MEASURES]:
        parser.error(f"no such measure: {', '.join(unknown)}; there are {', '.join(MEASURES)}")

    # Processes that a measure has started end with it, also where somebody ends the bench.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    taken_on = report.machine()
    print("; ".join(f"{name} {value}" for name, value in taken_on.items()), flush=True)
    for name in options.names or MEASURES:
        began = monotonic()
        measure: Callable[[Scale], Result] = import_module(f"bench.measures.{name}").measure
        result = measure(Scale(options.quick))
        if options.quick:
            result = replace(result, aims=())
        print(f"\n{report.table(result)}", flush=True)
        if options.quick:
            print("  (quick: these figures mean nothing)")
        else:
            report.write(result, report.machine(), options.results)
        print(f"  took {monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
