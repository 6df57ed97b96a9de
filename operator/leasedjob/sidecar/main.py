"""The console script `leasedjob-sidecar adopt|hold|gate|drain`: what runs in each run's Pod beside the workload.

Each verb imports only what it needs: gate and drain start without the database driver.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

VERBS: Final = {
    "adopt": "take the operator's claim over for this Pod (init container)",
    "hold": "keep the lease and answer for it (native sidecar)",
    "gate": "wait until the lease is held (last init container)",
    "drain": "tell the sidecar that a stop has begun (its preStop hook)",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one verb and exits with its code; 64 for a wrong call."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args in (["-h"], ["--help"]):
        print(usage())
        sys.exit(0)
    if len(args) != 1 or args[0] not in VERBS:
        print(usage(), file=sys.stderr)
        sys.exit(64)
    # A SIGTERM that comes while the verb is still being imported must not be lost: as the first process of a
    # container, this one would ignore it.
    early: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: early.append(number))
    code = _run(args[0], early)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads may be stuck in name resolution; nothing is left to be done for them.
    os._exit(code)


def usage() -> str:
    lines = [f"  {verb:6} {text}" for verb, text in VERBS.items()]
    return "\n".join(["usage: leasedjob-sidecar VERB", "", *lines])


def _run(verb: str, early: list[int]) -> int:
    from leasedjob.sidecar.settings import Settings

    settings = Settings.from_env(os.environ)
    match verb:
        case "adopt":
            from leasedjob.sidecar import adopt

            return adopt.run(settings) if not early else adopt.stopped(settings)
        case "hold":
            from leasedjob.sidecar import hold

            return hold.run(settings, early)
        case "gate":
            from leasedjob.sidecar import gate

            return gate.run(settings)
        case _:
            from leasedjob.sidecar import drain

            return drain.run(settings)


if __name__ == "__main__":
    main()
