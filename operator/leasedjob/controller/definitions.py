"""Whether the API server's definitions have every field that this version writes or reads.

With an older definition a new field is pruned without a word: what the user asked for would simply be off. So the
operator compares at its start and from time to time, and starts nothing while a field is missing. It reads what the API
server publishes to everybody (`/openapi/v3`), which needs no right to read definitions.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from leasedjob.api.fields import lacking_in
from leasedjob.controller.kube import CRD_BASE, Kube, KubeError

log = logging.getLogger(__name__)
PUBLISHED_WITHIN: Final = 20.0  # seconds after which a new definition must be in the document
COMPARE_SECONDS: Final = 600.0
SHOWN: Final = 8


class OldDefinitionsError(Exception):
    """The API server's definitions lack fields of this version; the message names them and what to do."""

    def __init__(self, fields: list[str]) -> None:
        more = f" and {len(fields) - SHOWN} more" if len(fields) > SHOWN else ""
        super().__init__(
            f"the API server's definitions are older than this operator and lack {', '.join(fields[:SHOWN])}{more}: "
            "upgrade the CustomResourceDefinitions (the chart's crds.enabled, or `kubectl apply -f crds/`)"
        )


class Definitions:
    """Compares the served definitions with this version's models."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._next = 0.0
        self._absent_since: float | None = None

    async def check(self) -> None:
        """Nothing if they have every field, or if that was seen a while ago.

        Raises:
            OldDefinitionsError: they lack some.
            KubeError: the document can't be read now.
        """
        now = time.monotonic()
        if now < self._next:
            return
        try:
            document = await self._kube.call("GET", f"/openapi/v3{CRD_BASE}")
        except KubeError as e:
            if e.status not in (401, 403, 404, 406):
                raise
            if self._absent_since is None:
                self._absent_since = now
            if e.status == 404 and now - self._absent_since < PUBLISHED_WITHIN:
                raise  # the definitions were made a moment ago
            log.warning("the served definitions can't be compared with this version's: %s", e)
        else:
            if fields := lacking_in(document):
                raise OldDefinitionsError(fields)
        self._absent_since = None
        self._next = now + COMPARE_SECONDS
