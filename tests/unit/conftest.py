"""Fixtures of the plugin's tests (an API server that is played, a way to call a command line) and of the chart's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.unit.chart_rendering import (  # noqa: F401  # fixtures
    helm,
    helm_home,
    helm_program,
    refusal,
    render,
    rendered,
    text,
)
from tests.unit.kube_api import FakeApi, write_kubeconfig

from leasedjob.cli.kubectl import PROGRAM, plugin


@pytest.fixture
def api() -> Iterator[FakeApi]:
    fake = FakeApi()
    yield fake
    fake.close()


@pytest.fixture
def kubeconfig(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config"
    write_kubeconfig(path, api.url)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    return path


@pytest.fixture
def call(kubeconfig: Path) -> Callable[..., Result]:
    """Runs a command line; a traceback fails the test."""

    def run(*words: str) -> Result:
        result = CliRunner().invoke(plugin, ["--kubeconfig", str(kubeconfig), *words], prog_name=PROGRAM)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run
