"""`leasedjob exec` and `leasedjob run-exclusive`: for programs that know nothing of this package.

Everything up to the first `--` is ours, the rest is the command, word for word.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from leasedjob import protocol
from leasedjob.workload import supervise
from leasedjob.workload.command import Supervision, lost
from leasedjob.workload.supervise import Result, Why

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import psycopg
    from psycopg.rows import DictRow

    from leasedjob.lease.core import JobExecutionLease
    from leasedjob.lease.database import Credentials
    from leasedjob.lease.options import JobAcquireOptions
    from leasedjob.workload.sidecar import Sidecar, View

EXEC: Final = "exec"
RUN_EXCLUSIVE: Final = "run-exclusive"
ENV_URL: Final = "LEASEDJOB_DATABASE_URL"
DEFAULT_DIRECTORY: Final = "/etc/leasedjob/database"
FIRST_LOOK_SECONDS: Final = 5.0
REPORT_SECONDS: Final = 40.0
LEAST_REPORT_SECONDS: Final = 1.0

# Exit codes of run-exclusive that are not the command's own; 126 and 127 mean what they mean to a shell.
EXIT_USAGE: Final = 2
EXIT_UNRECORDED: Final = 75  # EX_TEMPFAIL, as adopt and gate
EXIT_NO_LEASE: Final = 125


class CommandFailedError(Exception):
    """The command ended with something other than 0."""


class CommandStoppedError(BaseException):
    """The command was stopped: the run is given back. No Exception, so that it doesn't count as a failure."""


def main(words: Sequence[str], early: Sequence[int] = ()) -> int:
    """Carries out a command line that begins with one of the verbs; the exit code.

    Args:
        early: signals that came since the process began.
    """
    verb, *rest = words
    cut = rest.index("--") if "--" in rest else len(rest)
    options, command = rest[:cut], rest[cut + 1 :]
    parser = _exec_parser() if verb == EXEC else _run_exclusive_parser()
    arguments = parser.parse_args(options)
    if not command or not command[0]:
        parser.error("name a command after --")
    supervision = Supervision(grace=arguments.grace, pre_stop=arguments.pre_stop, early=early)
    if verb == EXEC:
        return _exec(supervision, command, os.environ, no_report=arguments.no_report)
    return _run_exclusive(supervision, command, arguments)


# --- exec ------------------------------------------------------------------------------------------------------------


def _exec_parser() -> argparse.ArgumentParser:
    parser = _parser(
        EXEC,
        "Runs a command in a process group of its own, passes signals on to all of it, reaps orphans, and reports exit "
        "code and the end of standard error to the sidecar of the run's Pod. The command is stopped when the lease is "
        "lost, and killed when the stopping budget ends.",
        "exit code: the command's own; 128+n if signal n ended it; 127 if there is no such command, 126 if it can't be "
        "started; 143 if a stop came before it began; 2 usage",
    )
    parser.add_argument("--no-report", action="store_true", help="tell the sidecar nothing: exit codes decide")
    _stopping(parser)
    return parser


def _exec(supervision: Supervision, command: Sequence[str], env: Mapping[str, str], *, no_report: bool) -> int:
    url = env.get(protocol.ENV_SIDECAR_URL)
    sidecar: Sidecar | None = None
    if url:
        from leasedjob.errors import SidecarUnavailableError
        from leasedjob.workload.sidecar import sidecar_at

        sidecar = sidecar_at(url)

        def tell(view: View) -> None:
            supervision.tell(
                supervise.Seen(
                    time.monotonic(),
                    draining=view.draining,
                    lost=view.fenced,
                    reason=view.reason,
                    grace=view.grace,
                    pre_stop=view.pre_stop,
                )
            )

        try:
            tell(sidecar.look(seconds=FIRST_LOOK_SECONDS))  # a stop that has begun before us
        except SidecarUnavailableError as error:
            _say(EXEC, f"{error}; the command is started all the same")
        sidecar.subscribe(tell)
    else:
        _say(EXEC, f"no sidecar here ({protocol.ENV_SIDECAR_URL} is not set): nothing is reported")
    result = supervision.run(command, env)
    _say_end(EXEC, result)
    if sidecar is not None and not no_report:
        _report(sidecar, result, env)
    return result.code


def _report(sidecar: Sidecar, result: Result, env: Mapping[str, str]) -> None:
    """After a stop nothing is reported: what it means (an interruption, a deadline that was passed, a success after
    all) follows from why the Pod was stopped, and that is for the operator to see."""
    from leasedjob.errors import LeasedJobError
    from leasedjob.lease.rows import Outcome

    if result.stop is not None or (not result.started and not result.stderr):
        return
    if result.code != 0 and result.noticed:
        return  # the Pod was being stopped: whether that is why it failed, nobody knows
    data: dict[str, Any] = {"exitCode": result.code}
    if result.code == 0:
        # The success of one of several containers, or of an init container, isn't the run's: exit codes tell of that.
        if env.get(protocol.ENV_CONTAINERS) != "1":
            return
        outcome = Outcome.COMPLETE
    else:
        outcome = Outcome.FAIL
        data |= {"error": result.error, "stderr": result.stderr}
    try:
        sidecar.report(outcome, data, seconds=REPORT_SECONDS)
    except LeasedJobError as error:
        _say(EXEC, f"the end was not reported: {error}")


# --- run-exclusive ---------------------------------------------------------------------------------------------------


def _run_exclusive_parser() -> argparse.ArgumentParser:
    parser = _parser(
        RUN_EXCLUSIVE,
        "Runs a command if this process is the one that gets the run: a line in the crontabs of three hosts executes "
        "once. The command runs under a lease, is stopped when that is lost, and its end is recorded.",
        f"exit code: the command's own if it ran; {EXIT_UNRECORDED} if it exited with 0 and its success could not be "
        f"recorded, so that it may be repeated; {EXIT_NO_LEASE} if the database could not be asked for the lease; that "
        f"of --not-acquired if somebody else has or had the run; 126, 127, 128+n as a shell's; {EXIT_USAGE} usage",
    )
    parser.add_argument("--code", required=True, help="the job's code; at most 64 characters")
    parser.add_argument("--run-key", help="what makes this run a run: the same text on all hosts; for SCHEDULE")
    parser.add_argument(
        "--type",
        choices=("SCHEDULE", "INITIAL"),
        default="SCHEDULE",
        help="INITIAL runs once, ever, and has no run key",
    )
    parser.add_argument("--lease", type=_seconds, metavar="SECONDS", help="default: 900")
    parser.add_argument("--heartbeat", type=_seconds, metavar="SECONDS", help="default: 60, or a third of the lease")
    parser.add_argument(
        "--not-acquired", type=int, default=0, metavar="CODE", help="exit code where the run is not ours (default: 0)"
    )
    parser.add_argument(
        "--exit-zero-on-stop",
        choices=("retry", "success"),
        default="retry",
        help="what exit 0 after a stop means: the run is given back, or it has succeeded (default: retry)",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--database-url", metavar="URL", help=f"default: ${ENV_URL}, which hides a password from ps")
    where.add_argument("--database-dir", metavar="DIR", help=f"a folder of files (default: {DEFAULT_DIRECTORY})")
    _stopping(parser, pre_stop=0.0)
    return parser


def _run_exclusive(supervision: Supervision, command: Sequence[str], arguments: argparse.Namespace) -> int:
    import psycopg

    from leasedjob.errors import (
        InvalidJobIdentityOptionsError,
        InvalidJobLeaseOptionsError,
        LeasedJobError,
        LostJobLeaseError,
    )
    from leasedjob.lease.database import connect_sync
    from leasedjob.lease.options import resolve
    from leasedjob.lease.service import SyncJobSchedulerService

    ended: list[Result] = []
    asking = True

    def connection() -> AbstractContextManager[psycopg.Connection[DictRow]]:
        # A database that doesn't answer is asked several times; a stop ends that between two of them.
        if asking and supervision.stopped():
            raise CommandStoppedError
        return connect_sync(credentials)

    def work(lease: JobExecutionLease) -> None:
        nonlocal asking
        asking = False
        # By the time that somebody else may have the run the command has ended. Who has it already waits for nobody.
        lease.lost.call(
            lambda: supervision.tell(
                lost(lease.lost.reason, min(arguments.grace, lease.lost.seconds_left() or arguments.grace))
            )
        )
        result = supervision.run(command, {**os.environ, **_identity(options, lease)})
        ended.append(result)
        if result.stop is not None and result.stop.why is Why.LOST:
            lease.raise_if_lost()
        if result.code != 0 and result.stop is None:
            raise CommandFailedError(f"{result.error}\n{result.stderr}" if result.started else result.error)
        if result.stop is not None and (result.code != 0 or arguments.exit_zero_on_stop == "retry"):
            raise CommandStoppedError

    try:
        options = _options(arguments)
        resolve(options)
        credentials = _credentials(arguments)
        service = SyncJobSchedulerService(connection, stopping=arguments.grace)
        acquired = service.run_exclusive(options, work).acquired
    except (InvalidJobIdentityOptionsError, InvalidJobLeaseOptionsError) as error:
        _say(RUN_EXCLUSIVE, str(error))
        return EXIT_USAGE
    except (CommandFailedError, CommandStoppedError):
        stop = supervision.stopped()
        result = ended[0] if ended else Result(128 + (stop.number if stop else 0), False, stop, False, "")
        _say_end(RUN_EXCLUSIVE, result)
        return result.code
    except LostJobLeaseError as error:
        if ended:
            _say_end(RUN_EXCLUSIVE, ended[0])
        _say(RUN_EXCLUSIVE, str(error))
        return (ended[0].code if ended else 0) or EXIT_UNRECORDED
    except (LeasedJobError, psycopg.Error) as error:
        _say(RUN_EXCLUSIVE, " ".join(str(error).split()))
        return (ended[0].code or EXIT_UNRECORDED) if ended else EXIT_NO_LEASE
    if not acquired:
        key = f"{arguments.code} {arguments.run_key or ''}".strip()
        _say(RUN_EXCLUSIVE, f"{key}: another process has or had this run; the command was not started")
        code: int = arguments.not_acquired
        return code
    return ended[0].code


def _options(arguments: argparse.Namespace) -> JobAcquireOptions:
    from leasedjob.identity import JobSchedulerType
    from leasedjob.lease.options import LEFT_OUT, JobAcquireOptions

    def milliseconds(seconds: float | None) -> Any:
        return LEFT_OUT if seconds is None else round(seconds * 1000)

    return JobAcquireOptions(
        code=arguments.code,
        run_key=LEFT_OUT if arguments.run_key is None else arguments.run_key,
        type=JobSchedulerType(arguments.type),
        lease_ms=milliseconds(arguments.lease),
        heartbeat_ms=milliseconds(arguments.heartbeat),
    )


def _identity(options: JobAcquireOptions, lease: JobExecutionLease) -> dict[str, str]:
    """What the command learns of its run, under the names that it would find in a Pod."""
    from leasedjob.identity import tick_of
    from leasedjob.lease.options import resolve

    identity = resolve(options).identity
    return {
        protocol.ENV_TYPE: identity.type.value,
        protocol.ENV_CODE: identity.code,
        protocol.ENV_RUN_KEY: identity.run_key or "",
        protocol.ENV_SCHEDULED_TIME: (identity.run_key or "").partition("#")[0] if tick_of(identity.run_key) else "",
        protocol.ENV_IDEMPOTENCY_KEY: lease.idempotency_key,
        protocol.ENV_ATTEMPT: str(lease.attempt),
        protocol.ENV_FENCING_TOKEN: str(lease.fencing_token),
        protocol.ENV_SIDECAR_URL: "",
    }


def _credentials(arguments: argparse.Namespace) -> Credentials:
    from leasedjob.lease.database import Credentials

    url = arguments.database_url
    if url is None and arguments.database_dir is None:
        url = os.environ.get(ENV_URL) or None
    if url is not None:
        return Credentials.from_conninfo(url)
    if arguments.database_dir is not None:
        return Credentials.from_directory(arguments.database_dir)
    return Credentials(Path(DEFAULT_DIRECTORY), advice=f"${ENV_URL} or --database-url names another database")


# --- both ------------------------------------------------------------------------------------------------------------


def _parser(verb: str, description: str, epilog: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"leasedjob {verb}",
        usage=f"leasedjob {verb} [options] -- COMMAND...",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
    )


def _stopping(parser: argparse.ArgumentParser, *, pre_stop: float = 10.0) -> None:
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="the whole stopping budget, where no sidecar says another one (default: 60)",
    )
    parser.add_argument(
        "--pre-stop",
        type=_seconds,
        default=pre_stop,
        metavar="SECONDS",
        help=f"the part of it that has gone by when SIGTERM comes (default: {pre_stop:g})",
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be a number of seconds, 0 or more")
    return value


def _say_end(verb: str, result: Result) -> None:
    """Only what the command itself can't have said."""
    stop = result.stop
    if not result.started:
        _say(verb, result.error if result.stderr else "a stop came first; the command was not started")
    elif stop is not None:
        why = f"{stop.why}{f' ({stop.reason})' if stop.reason else ''}"
        tail = ", killed at the end of its budget" if result.killed else ""
        _say(verb, f"stopped: {why}{tail}; exit code {result.code}")
    elif result.killed:
        _say(verb, "the command left processes behind; they were killed")


def _say(verb: str, text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it: no reason not to go on
        print(f"leasedjob {verb}: {text}", file=sys.stderr, flush=True)
