"""Two clusters, holders of leases in them and beside them, faults at random, and a verdict.

    python -m tests.chaos_cluster run [--minutes N] [--seed N] [--folder PATH] [--keep]
    python -m tests.chaos_cluster judge FOLDER     the records of a run, judged again
    python -m tests.chaos_cluster plan [--minutes N] [--seed N]     what a seed does, and when
    python -m tests.chaos_cluster can              whether it can be run here; if not, says why and ends with 3

Ends with 1 where a promise was broken. The same seed does the same things at the same times.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from tests.chaos_cluster import arena, checker, plan, sites, table
from tests.chaos_cluster.records import Evidence
from tests.cluster.layout import Cache
from tests.cluster.progress import ClusterError, Progress, fail

VERDICT = "verdict.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos_cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)

    def planned(name: str, text: str) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument("--minutes", type=float, default=20.0, help="for which harm is done (default: 20)")
        verb.add_argument("--seed", type=int, help="default: a random one, which is printed")
        return verb

    run = planned("run", "a whole run, and its verdict")
    run.add_argument("--folder", type=Path, help="where its records are kept (default: in the cache)")
    run.add_argument("--results", type=Path, help="a folder in which the JSON of its verdict is kept, too")
    run.add_argument("--keep", action="store_true", help="leave the clusters running")
    judge = verbs.add_parser("judge", help="judge the records of a run again")
    judge.add_argument("folder", type=Path)
    planned("plan", "what a seed does, and when")
    verbs.add_parser("can", help="whether it can be run here")
    return parser


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if options.verb == "can":
        reason = sites.obstacle()
        print(reason, file=sys.stderr)
        return 3 if reason else 0
    if options.verb == "judge":
        return _judge(Evidence.load(options.folder), [options.folder / VERDICT])
    seed = random.SystemRandom().randrange(1, 1_000_000) if options.seed is None else options.seed
    if options.minutes < 1:
        return fail("--minutes: at least 1")
    if options.verb == "plan":
        for fault in plan.faults(seed, options.minutes):
            print(f"{fault.at:7.1f} s  {fault.kind:<17} {fault.cluster} for {fault.seconds:4.1f} s")
        return 0
    cache = Cache.from_env()
    folder = options.folder or cache.root / "chaos" / f"{seed}-{options.minutes:g}"
    print(f"seed {seed}: make chaos MINUTES={options.minutes:g} SEED={seed} does the same again; records in {folder}")
    signal.signal(signal.SIGTERM, _end)
    settings = arena.Settings(seed=seed, minutes=options.minutes, folder=folder)
    try:
        evidence = arena.run(settings, cache, Progress(), keep=options.keep)
    except ClusterError as error:
        return fail(str(error))
    results = [folder / VERDICT]
    if options.results is not None:
        results.append(options.results / f"chaos-{options.minutes:g}min-seed{seed}.json")
    code = _judge(evidence, results)
    if code:
        print(f"\nseed {seed}; again: make chaos MINUTES={options.minutes:g} SEED={seed}; records in {folder}")
    return code


def _end(*_: object) -> None:
    """So that nothing of it is left behind. Whoever sends it to a whole group sends it twice."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def _judge(evidence: Evidence, results: list[Path]) -> int:
    verdict = checker.judge(evidence)
    print("\n".join(["", *table.lines(verdict, evidence.settings)]))
    kept = {**evidence.settings, "faults done": [asdict(fault) for fault in evidence.faults], **verdict.to_dict()}
    for result in results:
        result.parent.mkdir(parents=True, exist_ok=True)
        result.write_text(json.dumps(kept, indent=1) + "\n")
    return 1 if verdict.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
