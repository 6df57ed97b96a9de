"""`leasedjob`: the program. Verbs for LeasedJob's database are in `leasedjob.cli`, those around a command
and of an application's outbox in `leasedjob.workload`; each starts without the others."""

from __future__ import annotations

import contextlib
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
        _open_what_is_closed()
        from leasedjob.workload import verbs

        code = verbs.main(words, early)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # nobody reads it, or its disk is full: the code is the command's
                stream.flush()
        os._exit(code)  # threads may be stuck in a call; nothing is left to be done for them
    if words[:1] and words[0] in OF_THE_OUTBOX:
        from leasedjob.workload.outbox import verb

        sys.exit(verb.main(words[1:]))
    from leasedjob.cli import leasedjob

    leasedjob.main({**AROUND_A_COMMAND, **OF_THE_OUTBOX})


def _open_what_is_closed() -> None:
    """Standard streams that whoever started us has closed lead nowhere. Else a pipe of ours would get one of their
    numbers, and the command would write into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


if __name__ == "__main__":
    main()
