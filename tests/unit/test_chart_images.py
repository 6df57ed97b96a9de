"""Dockerfile and lock files: what a build may install, and that nothing of the builder's machine gets in."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
LOCKS = {p.stem: p.read_text() for p in sorted((REPOSITORY / "requirements").glob("*.txt"))}
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def pinned(lock: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9][a-z0-9.-]*)==(\S+)", LOCKS[lock], flags=re.MULTILINE))


def test_targets() -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    assert {"operator", "sidecar", "postgresql"} <= set(stages)
    assert len(stages) == len(re.findall(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)), "a stage without a name"
    assert stages[-1] == "operator", "what a build without --target makes"
    assert re.search(r"^ARG BASE_IMAGE=python:3\.13-slim-trixie$", DOCKERFILE, flags=re.MULTILINE)


@pytest.mark.parametrize("target", ["operator", "sidecar", "postgresql"])
def test_each_image_runs_as_nobody_in_particular(target: str) -> None:
    stage = re.split(r"^FROM ", DOCKERFILE.partition(f" AS {target}\n")[2], flags=re.MULTILINE)[0]
    assert re.findall(r"^USER (.*)$", stage, flags=re.MULTILINE) == ["65532:65532"]
    assert "ENTRYPOINT" in stage


def test_there_is_no_argument_that_could_leave_an_address_in_the_history() -> None:
    assert re.findall(r"^ARG (\w+)", DOCKERFILE, flags=re.MULTILINE) == ["BASE_IMAGE"]
    assert "://" not in DOCKERFILE


@pytest.mark.parametrize("lock", LOCKS)
def test_every_requirement_is_pinned_with_hashes_and_no_address(lock: str) -> None:
    assert "://" not in LOCKS[lock]
    assert not re.search(r"^\s*-", LOCKS[lock].replace("    --hash", ""), flags=re.MULTILINE)
    for entry in re.split(r"\n(?=\S)", LOCKS[lock].strip()):
        assert re.match(r"[a-z0-9][a-z0-9.-]*==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", entry), entry[:80]


def test_the_sidecar_stays_small() -> None:
    assert pinned("sidecar").keys() == {"psycopg", "psycopg-binary", "tzdata"}


@pytest.mark.parametrize(("lock", "extra"), [("sidecar", None), ("operator", None), ("operator", "operator")])
def test_locks_satisfy_the_project(lock: str, extra: str | None) -> None:
    wanted = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    versions = pinned(lock)
    for requirement in map(Requirement, wanted):
        if requirement.marker and not requirement.marker.evaluate({"python_version": "3.13"}):
            continue
        version = versions.get(canonicalize_name(requirement.name))
        assert version, f"{requirement.name} is not in {lock}.txt: run requirements/lock.sh"
        assert requirement.specifier.contains(version), f"{requirement} but {version} in {lock}.txt"


def test_images_share_the_versions_that_talk_to_the_database() -> None:
    operator, sidecar = pinned("operator"), pinned("sidecar")
    assert {n: operator[n] for n in sidecar} == sidecar


@pytest.mark.parametrize(
    "script",
    sorted((REPOSITORY / "images").rglob("*.sh")) + sorted((REPOSITORY / "requirements").glob("*.sh")),
    ids=lambda p: p.name,
)
def test_scripts_are_executable_shell(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    done = subprocess.run(["sh", "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
