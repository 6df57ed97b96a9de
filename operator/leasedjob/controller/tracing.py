"""A run as one trace, from its tick to its outcome, in OTLP's JSON over HTTP. Off unless an endpoint is set.

The ids follow from the run: its trace is the run's id, and a span's id comes from the run and the attempt. So whoever
tells of a part, in whichever replica or cluster, tells of the same trace, and the workload's parent is known before it
begins.

    run            from the tick to its end; told by whoever took the end of the last attempt
      attempt N    from its claim to its end; the workload's own spans are its children, by TRACEPARENT
        pending    from the claim until the Pod took the lease over
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import aiohttp

from leasedjob import __version__
from leasedjob.controller.metrics import Metrics, result_of
from leasedjob.lease.rows import Run, Transition, TransitionKind

log = logging.getLogger(__name__)
Json = dict[str, Any]
MOST_WAITING: Final = 5000  # spans; the oldest go first
BATCH: Final = 500
SEND_SECONDS: Final = 2.0
REQUEST_SECONDS: Final = 5.0
_INTERNAL: Final = 1
_OK, _ERROR = 1, 2


def _span_id(run_id: str, part: str) -> str:
    return hashlib.sha256(f"{run_id} {part}".encode()).hexdigest()[:16]


def trace_parent(run_id: str, attempt: int) -> str:
    """What a workload gets as TRACEPARENT (W3C Trace Context): its spans become children of its attempt's."""
    return f"00-{UUID(run_id).hex}-{_span_id(run_id, f'attempt {attempt}')}-01"


def spans_of(transition: Transition, run: Run | None) -> list[Json]:
    """The spans that this transition completes; `run`: its row, as far as it is known."""
    if run is None:
        return []
    number, end = transition.attempt, transition.happened_at
    attempt = f"attempt {number}"
    begun = run.started_at if run.attempt == number else None
    found = []
    if transition.kind is TransitionKind.STARTED and begun is not None:
        found.append(_span(transition, "pending", f"pending {number}", attempt, begun, end))
    if transition.kind is TransitionKind.ENDED and begun is not None:
        said = {"leasedjob.outcome": result_of(transition).value, "leasedjob.reason": _word(transition)}
        found.append(_span(transition, attempt, attempt, "run", begun, end, said, good=transition.succeeded))
    if transition.final:
        said = {"leasedjob.reason": _word(transition), "leasedjob.attempts": str(number)}
        start = transition.tick if transition.tick is not None and not run.manual else run.created_at
        name = f"run {transition.namespace}/{transition.job_name}"
        found.append(_span(transition, name, "run", "", start, end, said, good=transition.succeeded))
    return found


def _word(transition: Transition) -> str:
    return transition.reason.partition(":")[0] or "Reported"


def _span(
    transition: Transition,
    name: str,
    part: str,
    parent: str,
    start: datetime,
    end: datetime,
    said: dict[str, str] | None = None,
    *,
    good: bool | None = None,
) -> Json:
    id = str(transition.run_id)
    attributes = {
        "k8s.namespace.name": transition.namespace,
        "leasedjob.name": transition.job_name,
        "leasedjob.run_key": transition.run_key or "",
        "leasedjob.attempt": str(transition.attempt),
        **(said or {}),
    }
    return {
        "traceId": transition.run_id.hex,
        "spanId": _span_id(id, part),
        **({"parentSpanId": _span_id(id, parent)} if parent else {}),
        "name": name,
        "kind": _INTERNAL,
        "startTimeUnixNano": _nano(min(start, end)),
        "endTimeUnixNano": _nano(end),
        "attributes": _attributes(attributes),
        **({} if good is None else {"status": {"code": _OK if good else _ERROR}}),
    }


def _nano(at: datetime) -> str:
    return str(int(at.timestamp()) * 1_000_000_000 + at.microsecond * 1000)


def _attributes(values: dict[str, str]) -> list[Json]:
    return [{"key": k, "value": {"stringValue": v}} for k, v in values.items()]


def document(spans: list[Json], cluster: str) -> Json:
    """An ExportTraceServiceRequest."""
    resource = {"service.name": "leasedjob-operator", "service.version": __version__, "k8s.cluster.name": cluster}
    scope = {"name": "leasedjob", "version": __version__}
    return {
        "resourceSpans": [
            {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [{"scope": scope, "spans": spans}]}
        ]
    }


class Tracer:
    """Sends spans in the background. A collector that is away costs spans and nothing else.

    Args:
        endpoint: of OTLP over HTTP, without `/v1/traces`; "" turns tracing off.
    """

    def __init__(self, endpoint: str, cluster: str, metrics: Metrics) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._cluster = cluster
        self._metrics = metrics
        self._waiting: deque[Json] = deque()
        self._trouble = ""

    @property
    def on(self) -> bool:
        return bool(self._endpoint)

    def tell(self, transition: Transition, run: Run | None) -> None:
        """Takes the spans on that this completes; never blocks."""
        if not self.on:
            return
        self._waiting.extend(spans_of(transition, run))
        while len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            self._metrics.spans.labels("dropped").inc()

    async def run(self) -> None:
        """Sends what waits, until it is cancelled; what waits then is sent once more."""
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                while True:
                    await asyncio.sleep(SEND_SECONDS)
                    while self._waiting and await self._send(session):
                        pass
            finally:
                if self._waiting:
                    await self._send(session)

    async def _send(self, session: aiohttp.ClientSession) -> bool:
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        try:
            async with session.post(f"{self._endpoint}/v1/traces", json=document(batch, self._cluster)) as answer:
                trouble = "" if answer.status < 300 else f"the collector answered {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            trouble = f"the collector can't be reached: {type(e).__name__}"
        if trouble and trouble != self._trouble:
            log.warning("traces: %s", trouble)
        self._trouble = trouble
        self._metrics.spans.labels("dropped" if trouble else "sent").inc(len(batch))
        return not trouble
