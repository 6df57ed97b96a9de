"""What the workload asks and tells the sidecar of its Pod, on the address that only the Pod's containers reach."""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final
from urllib.parse import urlsplit

from leasedjob import http1
from leasedjob.errors import LostJobLeaseError, OutcomeRefusedError, SidecarUnavailableError
from leasedjob.lease import jsonsafe
from leasedjob.lease.rows import Outcome
from leasedjob.protocol import PhaseEnd

_log: Final = logging.getLogger("leasedjob.workload")
LOOK_SECONDS: Final = 5.0
POLL_SECONDS: Final = 45.0  # of one long poll
REPORT_SECONDS: Final = 60.0  # for a report, all tries together
CALL_SECONDS: Final = 30.0  # for one try: the sidecar itself waits 25 s for the database
SHUTDOWN_SECONDS: Final = 0.8  # within the last words of a program that is ended by force
PAUSE_FIRST_SECONDS: Final = 0.2
PAUSE_MOST_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The sidecar's state.

    Args:
        fenced: the lease is lost or not to be trusted any more; there is no way back.
        reason: why the lease is not held, for people.
        grace, pre_stop: shutdown.terminationGracePeriodSeconds and preStopSeconds; None if not known yet.
        since_adoption: seconds since the Pod took the lease; None if not known.
        revision: grows with each change.
    """

    lease_id: str
    attempt: int
    fencing_token: int
    fenced: bool
    draining: bool
    reason: str
    grace: float | None
    pre_stop: float | None
    since_adoption: float | None
    revision: int

    @classmethod
    def from_json(cls, body: bytes) -> View:
        """Raises ValueError, KeyError or TypeError for what no sidecar says."""
        raw: Mapping[str, Any] = json.loads(body)
        return cls(
            lease_id=str(raw["leaseId"]),
            attempt=int(raw["attempt"]),
            fencing_token=int(raw["fencingToken"]),
            fenced=raw["state"] == "fenced",
            draining=bool(raw["draining"]),
            reason=str(raw["reason"]),
            grace=_seconds(raw.get("graceSeconds")),
            pre_stop=_seconds(raw.get("preStopSeconds")),
            since_adoption=_seconds(raw.get("sinceAdoptionSeconds")),
            revision=int(raw["revision"]),
        )


def _seconds(value: Any) -> float | None:
    return None if value is None else float(value)


class Sidecar:
    """The sidecar of this Pod.

    Args:
        url: LEASEDJOB_SIDECAR_URL, `http://127.0.0.1:17891`.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise ValueError(f"not a sidecar's address: {url!r}")
        self._host, self._port = parts.hostname, parts.port
        self._lock = threading.Lock()
        self._told: list[Callable[[View], object]] = []
        self._latest: View | None = None
        self._watching = False

    def look(self, *, revision: int | None = None, wait: float = 0.0, seconds: float = LOOK_SECONDS) -> View:
        """The sidecar's state; with a revision, once it is another one or `wait` seconds are over.

        Raises:
            SidecarUnavailableError: no answer, or none that a sidecar gives.
        """
        if revision is None:
            wait, query = 0.0, ""
        else:
            query = f"?revision={revision}&wait={wait:g}"
        try:
            status, body = http1.ask(self._host, self._port, "GET", f"/v1/lease{query}", seconds=seconds + wait)
            if status != 200:
                raise SidecarUnavailableError(f"the sidecar answered {status}")
            return View.from_json(body)
        except (OSError, http1.HttpError, ValueError, KeyError, TypeError) as error:
            raise SidecarUnavailableError(f"the sidecar does not answer: {error}") from error

    def report(self, outcome: Outcome, data: Any = None, *, seconds: float = REPORT_SECONDS) -> bool:
        """Reports how the attempt ended, again and again for so many seconds.

        Returns:
            True: the database has it. False: it is recorded as soon as the workload has ended, since a run that can be
            claimed again must not meet its former workload.

        Raises:
            LostJobLeaseError: the lease is lost; nothing was recorded.
            OutcomeRefusedError: another outcome came first, or this one can't be stored.
            SidecarUnavailableError: no answer in time. A sidecar that has heard the report goes on with it.
        """
        encoded = "null" if data is None else jsonsafe.dumps(data)
        body = f'{{"outcome":"{outcome.value}","data":{encoded}}}'.encode()
        until = time.monotonic() + seconds
        pause = PAUSE_FIRST_SECONDS
        while True:
            status, answer = self._post(body, min(CALL_SECONDS, max(0.1, until - time.monotonic())))
            why = str(answer.get("error") or f"the sidecar answered {status}")
            match status:
                case 200:
                    return True
                case 202:
                    return False
                case 409 if answer.get("lost"):
                    raise LostJobLeaseError("of this Pod", why)
                case 400 | 409 | 413 | 422:
                    raise OutcomeRefusedError(why)
                case _ if time.monotonic() + pause >= until:
                    raise SidecarUnavailableError(f"the outcome may not be recorded: {why}")
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(PAUSE_MOST_SECONDS, 2 * pause)

    def report_shutdown(self, ends: Sequence[PhaseEnd], *, seconds: float = SHUTDOWN_SECONDS) -> bool:
        """Hands over how the program has stopped, for the operator's metric; False if nobody took it: a sidecar of an
        earlier version doesn't know it, and nothing depends on it."""
        body = f'{{"phases":{PhaseEnd.to_json(ends)}}}'.encode()
        status, answer = self._post(body, seconds, "/v1/shutdown")
        if status != 202:
            _log.info("the durations of the shutdown were not taken: %s", answer.get("error") or status)
        return status == 202

    def _post(self, body: bytes, seconds: float, path: str = "/v1/outcome") -> tuple[int, Mapping[str, Any]]:
        headers = [("Content-Type", "application/json")]
        try:
            status, text = http1.ask(self._host, self._port, "POST", path, seconds=seconds, headers=headers, body=body)
            answer = json.loads(text)
        except (OSError, http1.HttpError, ValueError) as error:
            return 0, {"error": f"the sidecar does not answer: {error}"}
        return status, answer if isinstance(answer, dict) else {}

    def subscribe(self, tell: Callable[[View], object]) -> None:
        """Calls `tell` with each new state, in a thread of its own, for as long as the process lives."""
        with self._lock:
            self._told.append(tell)
            latest, watching, self._watching = self._latest, self._watching, True
        if latest is not None:
            tell(latest)
        if not watching:
            threading.Thread(target=self._watch, name="leasedjob-sidecar", daemon=True).start()

    def begin_anew(self) -> None:
        """In a child that was forked, where no thread watches: the next one who subscribes starts one."""
        self._lock, self._latest, self._watching = threading.Lock(), None, False

    def _watch(self) -> None:
        revision: int | None = None
        pause = PAUSE_FIRST_SECONDS
        while True:
            try:
                view = self.look(revision=revision, wait=POLL_SECONDS)
            except SidecarUnavailableError:
                # It is being restarted, or was killed: then the kubelet decides, and this side has nothing to say.
                revision = None
                time.sleep(pause)
                pause = min(PAUSE_MOST_SECONDS, 2 * pause)
                continue
            pause = PAUSE_FIRST_SECONDS
            if view.revision == revision:
                continue
            revision = view.revision
            with self._lock:
                self._latest = view
                told = list(self._told)
            for tell in told:
                try:
                    tell(view)
                except Exception:
                    _log.exception("a call that tells of the sidecar's state has failed")


@lru_cache(maxsize=8)
def sidecar_at(url: str) -> Sidecar:
    """One Sidecar, and so one thread that asks, for each address."""
    sidecar = Sidecar(url)
    os.register_at_fork(after_in_child=sidecar.begin_anew)
    return sidecar
