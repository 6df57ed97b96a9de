"""`leasedjob`: the program. Verbs for the database are in `leasedjob.cli`, those around a command in
`leasedjob.workload`; each starts without the other."""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

# Written here, so that neither side is imported for the other one's sake.
AROUND_A_COMMAND: Final = {
    "exec": "run a command in a run's Pod: signals, children, report (exec -- COMMAND...)",
    "run-exclusive": "run a command on one of many hosts, under a lease (run-exclusive ... -- COMMAND...)",
}


def main() -> None:
    """The entry point."""
    words = sys.argv[1:]
    if words[:1] and words[0] in AROUND_A_COMMAND:
        # A SIGTERM while the rest is being imported must not be lost: the first process of a container would ignore it.
        early: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: early.append(number))
        from leasedjob.workload import verbs

        code = verbs.main(words, early)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads may be stuck in a call; nothing is left to be done for them
    from leasedjob.cli import leasedjob

    leasedjob.main(AROUND_A_COMMAND)


if __name__ == "__main__":
    main()
