"""Two releases in one cluster, each with its database: one leaves a namespace to the other, or both are told."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controller.control_plane import Bench, Json, Kubelet, OperatorProcess, wait_until


@pytest.fixture
def elsewhere(bench: Bench, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The settings of another release: its cluster name and its database."""
    name = f"{bench.database}_2"
    bench.postgres.create_database(name, template="migrated")
    folder = tmp_path / "elsewhere"
    shutil.copytree(bench.credentials, folder)
    (folder / "dbname").write_text(name)
    yield {"LEASEDJOB_CLUSTER": "elsewhere", "LEASEDJOB_DATABASE_DIR": str(folder)}
    bench.close()
    bench.postgres.drop_database(name)


def _events(bench: Bench, text: str) -> list[Json]:
    return [e for e in bench.core.list_namespaced_event(bench.namespace).items if text in (e.message or "")]


def _operator(bench: Bench, settings: dict[str, str]) -> OperatorProcess:
    return bench.operator("op-2", start=True, **settings)


def test_both_are_told_and_the_run_has_one_pod(bench: Bench, elsewhere: dict[str, str]) -> None:
    """A Pod's name follows from the run, so the API server lets one of them create it."""
    bench.operator()
    _operator(bench, elsewhere)
    bench.apply("job", suspend=True)
    bench.run_now("job")
    wait_until("an Event says so", lambda: _events(bench, "two releases serve this namespace"), 60)
    assert len(bench.pods()) == 1


def test_what_is_excluded_is_left_alone(bench: Bench, elsewhere: dict[str, str]) -> None:
    """The other release serves the whole cluster, but for namespaces like this one."""
    other = _operator(
        bench, {**elsewhere, "LEASEDJOB_NAMESPACES": "", "LEASEDJOB_EXCLUDE_NAMESPACES": f"x,{bench.namespace[:6]}*"}
    )
    bench.operator()
    for job in ("one", "two"):
        bench.apply(job, suspend=True)
        bench.run_now(job)
        kubelet = Kubelet(bench, bench.pod_for(job))
        kubelet.run()
        kubelet.end(0)
        bench.row_when(job, lambda r: r["status"] == "SUCCESS", "done")
    assert len(bench.pods()) == 2
    assert bench.namespace not in other.log.read_text()
    assert other.ready()
