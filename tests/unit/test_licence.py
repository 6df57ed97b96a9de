"""The project's licence is said once and the same everywhere, and what the images contain may be passed on with it."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import metadata
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
# Permissive ones; and those that ask for their own source only, of packages that are used as they are.
ACCEPTED = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "LGPL-3.0-only", "MIT", "MIT-0", "MPL-2.0", "PSF-2.0",
    "PostgreSQL", "Unlicense", "Apache 2.0", "MIT License",
}  # fmt: skip


def packages() -> set[str]:
    """What is installed into the images, by the files that pin it."""
    found = set()
    for name in ("operator", "sidecar", "postgresql"):
        text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
        found |= set(re.findall(r"^([\w.-]+)(?:\[[^]]*\])?==", text, re.MULTILINE))
    return found


def test_the_licence_is_the_same_everywhere() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    chart = yaml.safe_load((ROOT / "charts/leasedjob/Chart.yaml").read_text(encoding="utf-8"))
    assert (chart.get("annotations") or {}).get("artifacthub.io/license", "Apache-2.0") == "Apache-2.0"
    assert "Apache-2.0" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_there_are_packages_to_look_at() -> None:
    assert {"psycopg", "kopf", "kubernetes", "pydantic"} <= packages()


@pytest.mark.parametrize("name", sorted(packages()))
def test_a_package_in_an_image_has_a_licence_that_is_accepted(name: str) -> None:
    said = metadata(name)
    text = said.get("License-Expression") or (said.get("License") or "").partition("\n")[0]
    words = {word for word in re.split(r"\s+(?:AND|OR)\s+|[()]", text) if word}
    assert words, f"{name} doesn't say its licence"
    assert words <= ACCEPTED, f"{name}: {text}"
