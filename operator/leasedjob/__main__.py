"""`leasedjob`: the program. Verbs for LeasedJob's database are in `leasedjob.cli`, those around a command
and of an application's outbox in `leasedjob.workload`; each starts without the others."""

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
OF_THE_OUTBOX: Final = {"outbox": "look after an application's outbox (install, status, parked, retry)"}


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
    if words[:1] and words[0] in OF_THE_OUTBOX:
        from leasedjob.workload.outbox import verb

        sys.exit(verb.main(words[1:]))
    from leasedjob.cli import leasedjob

    leasedjob.main({**AROUND_A_COMMAND, **OF_THE_OUTBOX})


if __name__ == "__main__":
    main()
