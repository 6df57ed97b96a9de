"""The manifests as they were when somebody last looked: a change of the chart shows what it changes in them.

After a change that is meant: `make snapshots`, and read the difference. Definitions and copies of files are left out.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.chart_rendering import EMBEDDED, EXISTING, NAMESPACED, VARIANTS, Json

FOLDER = Path(__file__).with_name("snapshots")
POLICIES: Json = {"networkPolicy": {"enabled": True, "runNamespaces": ["team-a"]}}
SHOWN: dict[str, Json] = {
    "existing-secret": EXISTING,
    "embedded-with-policies": {**EMBEDDED, **POLICIES},
    "namespaced": {**NAMESPACED, "sidecar": {"secret": {"create": True}}},
    "everything-set": VARIANTS["everything set"],
}
COPIES = {"CustomResourceDefinition", "PrometheusRule"}


def shown(objects: list[Json]) -> str:
    kept = [o for o in objects if o["kind"] not in COPIES and not o["metadata"]["name"].endswith("-dashboard")]
    kept.sort(key=lambda o: (o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"]))
    return str(yaml.safe_dump_all(kept, sort_keys=True, width=120))


@pytest.mark.parametrize("name", SHOWN)
def test_the_manifests_are_as_they_were(render: Any, name: str) -> None:
    file = FOLDER / f"{name}.yaml"
    found = shown(render(SHOWN[name]))
    if os.environ.get("LEASEDJOB_UPDATE_SNAPSHOTS"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(found)
    was = file.read_text() if file.exists() else ""
    difference = "".join(difflib.unified_diff(was.splitlines(True), found.splitlines(True), name, "now", n=2))
    assert not difference, f"{difference}\nIf that is meant: make snapshots"


def test_there_is_no_snapshot_of_what_is_no_longer_rendered() -> None:
    assert {p.stem for p in FOLDER.glob("*.yaml")} == set(SHOWN)
