"""The measures that need PostgreSQL, at the smallest scale: each checks its own answers, and no time is judged."""

from __future__ import annotations

from importlib import import_module

import pytest
from bench.model import Scale


@pytest.mark.parametrize("name", ["lease", "claim", "heartbeat", "beats", "sidecar"])
def test_the_measure_runs(name: str) -> None:
    result = import_module(f"bench.measures.{name}").measure(Scale(quick=True))
    assert result.name == name
    assert all(row.values for row in result.rows)
