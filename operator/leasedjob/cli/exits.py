"""The exit codes of `kubectl leasedjob` and the error that a verb ends with. Documented in docs/reference/cli.md."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import assert_never

import click

from leasedjob.cli.output import printable


class Exit(IntEnum):
    """Scripts rely on these, so a number never changes its meaning."""

    OK = 0
    REFUSED = 1  # the API server answered and said no, or something unforeseen happened
    USAGE = 2  # an unknown option, a tick that is no tick
    NOT_FOUND = 3  # the LeasedJob, the LeasedJobRun or the namespace
    NOT_INSTALLED = 4  # the cluster doesn't know the kinds
    NO_ACCESS = 5  # not logged in, or RBAC says no
    UNREACHABLE = 6  # no kubeconfig, no such context, no answer
    RUN_FAILED = 10  # --wait: how the run ended
    RUN_CANCELLED = 11
    RUN_REFUSED = 12
    INVALID = 20  # lint: the cluster would refuse a manifest; convert: a CronJob that a LeasedJob can't stand for
    TIMED_OUT = 124  # --wait: as timeout(1) has it
    INTERRUPTED = 130  # as a shell reports SIGINT


class Phase(StrEnum):
    """A LeasedJobRun's `status.phase`. The names are those of `leasedjob.api`, which would cost a pydantic import."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"
    REFUSED = "Refused"

    @classmethod
    def of(cls, run: dict[str, object]) -> Phase:
        """The phase of a LeasedJobRun object; PENDING where there is none, or an unknown one."""
        status = run.get("status")
        phase = status.get("phase") if isinstance(status, dict) else None
        try:
            return cls(str(phase))
        except ValueError:
            return cls.PENDING

    @property
    def exit_code(self) -> Exit | None:
        """What `--wait` exits with; None while the run goes on."""
        match self:
            case Phase.PENDING | Phase.RUNNING:
                return None
            case Phase.SUCCEEDED:
                return Exit.OK
            case Phase.FAILED:
                return Exit.RUN_FAILED
            case Phase.CANCELLED:
                return Exit.RUN_CANCELLED
            case Phase.REFUSED:
                return Exit.RUN_REFUSED
            case _:
                assert_never(self)


class Failure(click.ClickException):
    """Ends a verb with one readable line on stderr and an exit code; never a traceback."""

    def __init__(self, exit_code: Exit, message: str) -> None:
        super().__init__(printable(message))
        self.exit_code = int(exit_code)  # type: ignore[misc]  # click declares a class variable, reads the instance
