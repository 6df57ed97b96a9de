"""The examples' manifests: complete, restricted, and accepted by the resource's own models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from leasedjob.api import template
from leasedjob.api.v1alpha1 import LeasedJobSpec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDERS = sorted(p for p in EXAMPLES.iterdir() if p.is_dir())
MANIFESTS = {str(f.relative_to(EXAMPLES)): f for f in sorted(EXAMPLES.glob("*/*.yaml"))}


def load(name: str) -> dict[str, Any]:
    document = yaml.safe_load(MANIFESTS[name].read_text())
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_each_example_has_a_manifest_and_says_what_you_see(folder: Path) -> None:
    assert list(folder.glob("*.yaml"))
    text = (folder / "README.md").read_text()
    assert f"kubectl apply -f examples/{folder.name}/" in text
    assert f"[{folder.name}]({folder.name}/README.md)" in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_model_accepts_it(name: str) -> None:
    document = load(name)
    spec = LeasedJobSpec.model_validate(document["spec"])
    assert not template.problems(document["spec"]["template"], spec)
    assert spec.timing.problem() is None


@pytest.mark.parametrize("name", MANIFESTS)
def test_it_passes_the_restricted_profile_and_sets_resources(name: str) -> None:
    pod = load(name)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["resources"].keys() == {"requests", "limits"}


@pytest.mark.parametrize("name", MANIFESTS)
def test_its_program_is_python_and_its_image_the_one_that_tests_load_or_its_own(name: str) -> None:
    (container,) = load(name)["spec"]["template"]["spec"]["containers"]
    assert container["imagePullPolicy"] == "IfNotPresent"
    folder = MANIFESTS[name].parent
    if (folder / "Dockerfile").exists():
        assert container["image"] == f"registry.example/{folder.name[3:]}:1"
        program = next(word for word in container["command"] if word.endswith(".py"))
        compile((folder / program).read_text(), program, "exec")
        return
    assert container["image"] == "python:3.13-slim-trixie"
    python, flag, program = container["command"]
    assert (python, flag) == ("python3", "-c")
    compile(program, name, "exec")
