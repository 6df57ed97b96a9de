"""A workload's own liveness probes, which the sidecar performs in the kubelet's stead.

The container's livenessProbe is taken by the fence; the user's httpGet or tcpSocket is carried out here by its own
timing. Once it has failed `failureThreshold` times in a row the sidecar answers "no" for that container, for good, as
the kubelet would have stopped it at that moment. The lease is not fenced by that.

Differences to the kubelet's own: initialDelaySeconds counts from the fence probe's first question for the container
(at most one of its periods after the start), and a redirect counts as success without being followed.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from leasedjob.http1 import HttpError, ask

USER_AGENT: Final = "leasedjob-probe"


@dataclass(frozen=True, slots=True)
class OwnProbe:
    """One container's own liveness probe; Kubernetes' field names, defaults and units (whole seconds)."""

    port: int
    hosts: tuple[str, ...]
    path: str | None = None  # None: tcpSocket
    tls: bool = False
    headers: tuple[tuple[str, str], ...] = ()
    initial_delay: int = 0
    period: int = 10
    timeout: int = 1
    threshold: int = 3

    @classmethod
    def parse(cls, raw: Mapping[str, Any], own_address: str) -> OwnProbe | None:
        """The probe in a container's livenessProbe, or None if it is neither httpGet nor tcpSocket.

        Without a host it is tried on the loopback address and on the Pod's own, whichever answers: the workload may
        listen on either.
        """
        http, tcp = raw.get("httpGet"), raw.get("tcpSocket")
        kind = http or tcp
        if not kind:
            return None
        host = kind.get("host")
        hosts = (host,) if host else tuple(dict.fromkeys(("127.0.0.1", own_address)))
        path = None
        if http:
            path = http.get("path") or "/"
            path = path if path.startswith("/") else f"/{path}"
        return cls(
            port=int(kind["port"]),
            hosts=tuple(h for h in hosts if h),
            path=path,
            tls=str(kind.get("scheme", "")).upper() == "HTTPS",
            headers=tuple((str(h["name"]), str(h["value"])) for h in kind.get("httpHeaders") or ()),
            initial_delay=int(raw.get("initialDelaySeconds") or 0),
            period=max(1, int(raw.get("periodSeconds") or 10)),
            timeout=max(1, int(raw.get("timeoutSeconds") or 1)),
            threshold=max(1, int(raw.get("failureThreshold") or 3)),
        )

    def problem(self) -> str | None:
        """Carries it out once: why it failed, or None."""
        found = ""
        for host in self.hosts:
            try:
                if self.path is None:
                    socket.create_connection((host, self.port), timeout=self.timeout).close()
                    return None
                headers = self.headers
                if not any(name.lower() == "user-agent" for name, _ in headers):
                    headers = (*headers, ("User-Agent", USER_AGENT))
                status, _ = ask(host, self.port, "GET", self.path, seconds=self.timeout, headers=headers, tls=self.tls)
                if 200 <= status < 400:
                    return None
                found = f"HTTP status {status}"
                break  # it answered, and the answer is no
            except (OSError, HttpError, ValueError) as error:
                found = found or f"{type(error).__name__}: {error}"
        return found or "no address to ask"


def parse_all(text: str, own_address: str) -> dict[str, OwnProbe]:
    """Container name -> probe, from the operator's JSON; what can't be read is not probed."""
    try:
        raw = json.loads(text or "{}")
        pairs = [(str(name), OwnProbe.parse(probe, own_address)) for name, probe in raw.items()]
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}
    return {name: probe for name, probe in pairs if probe is not None}


class ProbeLoop(threading.Thread):
    """Performs one container's probe until it has failed for good.

    Args:
        failed: called once, from this thread, with the container's name and the reason.
    """

    def __init__(self, container: str, probe: OwnProbe, failed: Callable[[str, str], None]) -> None:
        super().__init__(name=f"probe-{container}", daemon=True)
        self._container, self._probe, self._failed = container, probe, failed
        self._stop_it = threading.Event()

    def run(self) -> None:
        probe = self._probe
        failures = 0
        wait = float(probe.initial_delay)
        while not self._stop_it.wait(wait):
            problem = probe.problem()
            failures = failures + 1 if problem else 0
            if problem and failures >= probe.threshold:
                self._failed(self._container, problem)
                return
            wait = probe.period

    def stop(self) -> None:
        self._stop_it.set()
