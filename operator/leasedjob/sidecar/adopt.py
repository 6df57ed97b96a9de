"""`leasedjob-sidecar adopt`: takes the operator's claim over for this Pod, and hands the lease to `hold`.

Idempotent: the new token is written down before it is proposed, so that an adopt whose answer was lost, or whose
container was restarted, asks for the same thing again. Trust is counted from when the answered request was sent: the
database extends the lease at each of them.

It retries what may pass (network, restart, password that is being rotated) until its deadline, and ends with exit code
75 and one line of JSON in the termination message where the claim is not this Pod's to take. Nothing has run then.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, assert_never
from uuid import UUID, uuid4

from leasedjob import protocol
from leasedjob.lease.held import Adoption, AdoptVerdict
from leasedjob.lease.trust import Timing
from leasedjob.sidecar import files
from leasedjob.sidecar.clock import boot_id, boottime
from leasedjob.sidecar.files import Handoff, Stage
from leasedjob.sidecar.link import Connect, connector, describe
from leasedjob.sidecar.settings import Settings

if TYPE_CHECKING:
    from psycopg import Connection

DEADLINE_SECONDS: Final = 300.0
CALL_SECONDS: Final = 20.0
RETRY_FIRST_SECONDS: Final = 0.25
RETRY_MOST_SECONDS: Final = 5.0

MESSAGES: Final = {
    AdoptVerdict.LOST: "the claim is no longer this Pod's: its run was reclaimed or has ended, or the token is wrong",
    AdoptVerdict.EXPIRED: "the claim ran out before this Pod could adopt it",
    AdoptVerdict.TAKEN: "another Pod has adopted this claim",
    AdoptVerdict.REFUSED: "the database role of this namespace may not adopt this claim",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """What the operator gave this Pod. Raises KeyError or ValueError where the environment isn't one of ours."""

    lease_id: str
    claim_token: str
    pod_uid: str
    pod_name: str
    timing: Timing
    seconds: float

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Claim:
        return cls(
            lease_id=str(UUID(env[protocol.ENV_LEASE_ID])),
            claim_token=str(UUID(env[protocol.ENV_CLAIM_TOKEN])),
            pod_uid=env[protocol.ENV_POD_UID],
            pod_name=env[protocol.ENV_POD_NAME],
            timing=Timing.from_json(env[protocol.ENV_TIMING]),
            seconds=float(env.get(protocol.ENV_ADOPT_DEADLINE) or DEADLINE_SECONDS),
        )


class Refused(Exception):
    """Adoption is over; nothing will run. `verdict` is an AdoptVerdict, or "unreachable" or "invalid"."""

    def __init__(self, verdict: str, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


def adopt(claim: Claim, settings: Settings, connect: Connect) -> Handoff:
    """The handoff, written; what an earlier run of this container has proposed or adopted is taken up.

    Raises:
        Refused: the claim isn't ours, or the database couldn't be asked in time.
    """
    boot = boot_id()
    handoff = Handoff.read(settings.handoff_file)
    if handoff is None or (handoff.lease_id, handoff.pod_uid) != (claim.lease_id, claim.pod_uid):
        handoff = Handoff(claim.lease_id, str(uuid4()), claim.pod_uid, Stage.PROPOSED, boot)
    # The token is kept, what a predecessor trusted is not: its times may be of another boot.
    handoff = replace(handoff, state=Stage.PROPOSED, boot_id=boot, sent=None, trusted_until=None)
    handoff.write(settings.handoff_file)
    until, failures, problem = time.monotonic() + claim.seconds, 0, ""
    while True:
        try:
            with contextlib.closing(connect(min(CALL_SECONDS, max(1.0, until - time.monotonic())))) as connection:
                sent = boottime()
                adoption = ask(connection, claim, handoff)
            if adoption.verdict is not AdoptVerdict.BUSY:
                # Crash window: adopted in the database, the handoff not yet rewritten. The token stands in the file by
                # then, so a restarted adopt finds its own adoption.
                return conclude(claim, replace(handoff, sent=sent), adoption, settings)
            now = "the claim is locked by another session"
        except Refused:
            raise
        except Exception as error:  # whatever it was, only the deadline ends the attempts
            now = describe(error)
        if now != problem:
            say(now)
        problem, failures = now, failures + 1
        pause = min(RETRY_FIRST_SECONDS * 2 ** min(failures - 1, 8), RETRY_MOST_SECONDS) * (0.5 + random.random() / 2)
        if time.monotonic() + pause >= until:
            raise Refused("unreachable", f"not adopted within {claim.seconds:.0f} s: {problem}")
        time.sleep(pause)


def ask(connection: Connection[Any], claim: Claim, handoff: Handoff) -> Adoption:
    """One request, cut off from outside if the database takes it and never answers."""
    from leasedjob.lease.holder import SidecarStore

    with Cutter(connection, CALL_SECONDS):
        return SidecarStore(connection).adopt(
            UUID(claim.lease_id),
            UUID(claim.claim_token),
            UUID(handoff.token),
            pod_uid=claim.pod_uid,
            pod_name=claim.pod_name,
        )


class Cutter:
    """Shuts a connection's socket down after some seconds, unless the block has ended by then."""

    def __init__(self, connection: Connection[Any], seconds: float) -> None:
        self._connection = connection
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True

    def __enter__(self) -> Cutter:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _cut(self) -> None:
        import socket

        with contextlib.suppress(Exception), socket.socket(fileno=os.dup(self._connection.fileno())) as copy:
            copy.shutdown(socket.SHUT_RDWR)


def conclude(claim: Claim, handoff: Handoff, adoption: Adoption, settings: Settings) -> Handoff:
    """The adopted handoff, written; or Refused."""
    match adoption.verdict:
        case AdoptVerdict.ADOPTED:
            pass
        case AdoptVerdict.LOST | AdoptVerdict.EXPIRED | AdoptVerdict.TAKEN | AdoptVerdict.REFUSED as verdict:
            raise Refused(verdict, adoption.reason or MESSAGES[verdict])
        case AdoptVerdict.BUSY:
            raise AssertionError("busy is asked again")
        case never:
            assert_never(never)
    assert handoff.sent is not None
    handoff = replace(
        handoff,
        state=Stage.ADOPTED,
        attempt=adoption.attempt or 0,
        lease_ms=adoption.lease_ms or 0,
        fencing_token=adoption.fencing_token or 0,
        lock_key=adoption.lock_key or "",
        timing=claim.timing,
    )
    lease = handoff.lease
    assert lease is not None
    handoff = replace(handoff, trusted_until=handoff.sent + lease.trust if handoff.sent is not None else None)
    handoff.write(settings.handoff_file)
    return handoff


def leave(settings: Settings, verdict: str, message: str) -> int:
    """Says why nothing will run; EXIT_NOT_MINE."""
    say(f"{verdict}: {message}")
    files.write_message(settings.termination_log, files.failure_message("adopt", verdict, message))
    return protocol.EXIT_NOT_MINE


def stopped(settings: Settings) -> int:
    """The end by SIGTERM."""
    return leave(settings, "stopped", "the Pod was stopped before its lease was adopted")


def run(settings: Settings) -> int:
    """Exit code 0 with the handoff written, or EXIT_NOT_MINE with a termination message."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(stopped(settings)))
    result: list[int] = []

    def work() -> None:
        try:
            handoff = adopt(Claim.from_env(os.environ), settings, connector(settings.database_dir))
            say(f"adopted attempt {handoff.attempt} of lease {handoff.lease_id}")
            result.append(0)
        except Refused as refused:
            result.append(leave(settings, refused.verdict, str(refused)))
        except Exception as error:
            result.append(leave(settings, "invalid", describe(error)))

    # In a thread of its own, since a signal is handled only between two steps of the main thread, and name resolution
    # is one long step.
    worker = threading.Thread(target=work, name="adopt", daemon=True)
    worker.start()
    while worker.is_alive():
        worker.join(1.0)
    return result[0] if result else leave(settings, "invalid", "adopt ended without a result")


def say(text: str) -> None:
    """One line to the container's log."""
    print(f"leasedjob-adopt: {text}", file=sys.stderr, flush=True)
