"""Identity, byte for byte what the NestJS library computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from leasedjob.identity import RunIdentity

VECTORS: list[dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("identity-vectors.yaml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("vector", VECTORS, ids=[repr(vector["code"]) for vector in VECTORS])
def test_vector(vector: dict[str, Any]) -> None:
    identity = RunIdentity.of(type=vector["type"], code=vector["code"], run_key=vector["runKey"])
    assert identity.lock_key == vector["key"]
    assert identity.idempotency_key == vector["key"]


def test_the_vectors_are_there() -> None:
    assert len(VECTORS) >= 8
