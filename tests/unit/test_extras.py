"""Whoever has installed the package without an extra is told which one it is."""

from __future__ import annotations

import subprocess
import sys

import pytest


def without(library: str, module: str) -> subprocess.CompletedProcess[str]:
    """Imports a module where a library is not installed."""
    program = f"import sys; sys.modules[{library!r}] = None; import {module}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", ["apscheduler", "bullmq", "kafka"])
def test_an_adapter_names_its_extra(name: str) -> None:
    done = without({"kafka": "aiokafka"}.get(name, name), f"leasedjob.workload.{name}")
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr
    assert done.stderr.rstrip().endswith(f"it comes with: pip install 'leasedjob[{name}]'")


def test_the_plugin_says_what_it_needs_in_one_line() -> None:
    done = without("click", "leasedjob.cli.kubectl")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "kubectl leasedjob: it needs more than the package alone: pip install 'leasedjob[cli]'"
    ]
