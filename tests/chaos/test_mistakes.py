"""The judge's judge: each of these mistakes in the product, made in a scratch database, is found by a short run.

Without them a suite that finds nothing would prove nothing.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.chaos.arena import Harm, freezing, peace, run
from tests.chaos.conftest import Arena
from tests.chaos.crew import Layer
from tests.chaos.history import Broken, only
from tests.chaos.test_chaos import plan

pytestmark = pytest.mark.integration
LEASE = 0.5
soak = pytest.mark.soak


@pytest.mark.parametrize(
    ("layer", "function", "right", "wrong", "harm", "broken"),
    [
        pytest.param(
            Layer.LIBRARY, "leasedjob.acquire", "is_expired(s.modified_at, s.lease_ms)", "true", peace, Broken.OVERLAP,
            id="a lease that is held is taken",
        ),
        pytest.param(
            Layer.LIBRARY, "leasedjob.finish", "AND s.owner_token = p_token", "", freezing(1.5 * LEASE),
            Broken.NOT_ENDED, id="an end under another's token is recorded",
        ),
        pytest.param(
            Layer.LIBRARY, "chaos.act", "WHERE s.token <= excluded.token", "", freezing(1.5 * LEASE), Broken.OLD_TOKEN,
            id="a sink doesn't look at tokens",
        ),
        pytest.param(
            Layer.OPERATOR, "leasedjob.claim_batch", "FOR NO KEY UPDATE OF c SKIP LOCKED", "", peace,
            Broken.GROUP_OVERLAP, id="overlap is decided without the lock of the code",
        ),
        pytest.param(
            Layer.LIBRARY, "leasedjob.heartbeat", "AND s.owner_token = p_token", "", freezing(1.5 * LEASE),
            Broken.NOT_BEATEN, marks=soak, id="a beat under another's token extends the lease",
        ),
        pytest.param(
            Layer.OPERATOR, "leasedjob.heartbeat", "AND NOT is_expired(s.modified_at, s.lease_ms)", "",
            freezing(1.5 * LEASE, share=1.0), Broken.REVIVED, marks=soak, id="an expired lease is extended",
        ),
        pytest.param(
            Layer.LIBRARY, "leasedjob.acquire", "fencing_token = nextval('leasedjob.fencing_token'),", "",
            freezing(1.5 * LEASE), Broken.OWNER, marks=soak, id="a reclaim keeps the fencing token",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_found(
    arena: Arena, layer: Layer, function: str, right: str, wrong: str, harm: Harm, broken: Broken
) -> None:
    arena.patch(function, right, wrong)
    values: dict[str, Any] = {"processes": 6, "tasks": 3, "lease": LEASE, "heartbeat": LEASE / 3}
    if broken is Broken.GROUP_OVERLAP:  # few jobs that are often free, so that many ask for them at one instant
        values |= {"codes": 2, "work": 0.05}
    made = plan(arena, layer, stubborn=1.0, **{"work": 3 * LEASE, "codes": 8, **values})
    # Without the code's lock two claims overlap, or one of them moves the watermark past the other's tick.
    wanted = {broken, Broken.LOST_KEY} if broken is Broken.GROUP_OVERLAP else {broken}
    found: set[Broken] = set()
    seconds, deadline = 2.0, time.monotonic() + 120
    while not found & wanted and time.monotonic() < deadline:
        history = run(made, arena.dsn, harm, seconds, to_the_end=False)
        found |= only(history.violations())
        seconds *= 1.5  # chance decides who meets whom
    assert found & wanted, found
