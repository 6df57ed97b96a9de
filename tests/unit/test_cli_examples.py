"""The command lines in the documentation exist, and what cli.md shows is what is printed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import Result
from tests.unit.kube_api import FakeApi
from tests.unit.test_cli_verbs import job_of, ledger, pod_of, run_of

from leasedjob.api.v1alpha1 import LeasedJobRunStatus, RunPhase
from leasedjob.cli.attempts import attempts
from leasedjob.cli.kubectl import plugin
from leasedjob.cli.timeline import draw

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
Call = Callable[..., Result]


def examples(page: Path) -> list[tuple[str, list[str]]]:
    """Each `kubectl leasedjob` command line of a page's code blocks, and what stands below it until the next `$`."""
    found: list[tuple[str, list[str]]] = []
    kind: str | None = None  # of the block that is open
    shown: list[str] | None = None
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = re.match(r"\s*```(\w*)", line)
        if fence:
            kind, shown = (fence[1] if kind is None else None), None
            continue
        command = re.match(r"(?:\$ )?kubectl leasedjob (.*)", line)
        if command and (kind == "sh" or (kind == "console" and line.startswith("$ "))):
            shown = []
            found.append((command[1], shown))
        elif line.startswith("$ "):
            shown = None
        elif shown is not None:
            shown.append(line)
    return found


def in_one(page: str, start: str) -> tuple[list[str], list[str]]:
    """The words and the shown lines of the only example in a page that begins with `start`."""
    (found,) = [(line, shown) for line, shown in examples(ROOT / page) if line.startswith(start)]
    return shlex.split(found[0]), found[1]


WRITTEN = [(page, line) for page in PAGES for line, _ in examples(page)]


@pytest.mark.parametrize(("page", "line"), WRITTEN, ids=[f"{page.name}: {line}" for page, line in WRITTEN])
def test_every_command_line_is_one(page: Path, line: str) -> None:
    words = shlex.split(re.split(r" \|\|? | > ", line)[0], comments=True)
    context = plugin.make_context("kubectl leasedjob", words, resilient_parsing=words[:1] == ["--help"])
    if words[0] != "--help":
        name, command, rest = plugin.resolve_command(context, words)
        assert command is not None
        command.make_context(name, rest, parent=context)


def test_there_are_examples() -> None:
    assert len(WRITTEN) >= 12
    assert isinstance(plugin, click.Group)


def without_ages(line: str) -> list[str]:
    """The cells of a table's line, without those that depend on today."""
    return [cell for cell in re.split(r" {2,}", line) if not re.fullmatch(r"\d+[dhms](\d+[hms])?", cell)]


def test_the_preview_of_the_page(call: Call) -> None:
    words, shown = in_one("docs/reference/cli.md", "preview --schedule")
    done = call(*words)
    assert done.exit_code == 0
    assert [without_ages(line) for line in done.stdout.splitlines()] == [without_ages(line) for line in shown]


def test_the_backfill_of_the_page(api: FakeApi, call: Call) -> None:
    words, shown = in_one("docs/reference/cli.md", "backfill")
    api.job("nightly")
    names = ("tick", "action", "runKey", "reason")
    rows = [zip(names, line.split(), strict=True) for line in shown[1:-1]]
    plan = [{name: cell for name, cell in row if cell != "<none>"} for row in rows]
    status = LeasedJobRunStatus(phase=RunPhase.SUCCEEDED, backfill={"ticks": 3, "planned": 2, "plan": plan})
    api.operator = lambda _spec: status.model_dump(mode="json", by_alias=True, exclude_none=True)
    done = call(*words)
    assert [*done.stdout.splitlines(), *done.stderr.splitlines()] == shown


def test_the_conversion_of_the_howto(api: FakeApi, call: Call) -> None:
    words, shown = in_one("docs/howto-migrate-from-cronjob.md", "convert cronjob/nightly > ")
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "m", "image": "i"}]}}
    spec: dict[str, Any] = {"schedule": "0 3 * * *", "jobTemplate": {"spec": {"template": template}}}
    api.put("cronjobs", "nightly", spec={**spec, "concurrencyPolicy": "Forbid"})
    done = call(*words[:2])
    for line in shown:
        assert line.rstrip(" …") in done.stderr
    converted = yaml.safe_load(done.stdout)["spec"]
    page = (ROOT / "docs/howto-migrate-from-cronjob.md").read_text(encoding="utf-8")
    assert "| `backoffLimit` | `6`" in page
    assert (converted["backoffLimit"], converted["shutdown"]["preStopSeconds"]) == (6, 0)


def a_timeline() -> list[str]:
    """The drawing of cli.md: a run that failed once, a tick that was skipped, a run that goes on."""
    first, second = "2026-07-19T01:00:00Z", "2026-07-20T01:00:00Z"
    job = job_of(
        recentRuns=[
            run_of(second, outcome="Running", startTime="2026-07-20T01:00:00Z", completionTime=None),
            run_of(first, attempt=2, startTime="2026-07-19T01:00:51Z", completionTime="2026-07-19T01:04:00Z"),
        ],
        nextScheduleTime="2026-07-21T01:00:00Z",
        ledger=[ledger("2026-07-19T13:00:00Z", "2026-07-19T13:00:00Z", 1)],
    )
    pods = [
        _pod(pod_of(first, 1, exit_code=1, node="node-2"), "01:00:00", "01:00:01", "01:00:41"),
        _pod(pod_of(first, 2), "01:00:51", "01:00:52", "01:04:00"),
        _pod(pod_of(second, 1, exit_code=None, node="node-2"), "01:00:00", "01:00:15", ""),
    ]
    now = datetime(2026, 7, 20, 1, 1, 20, tzinfo=UTC)
    return [text for text, _ in draw(job, attempts(pods, "hello"), now, width=100, blocks=False)]


def _pod(pod: dict[str, Any], created: str, started: str, ended: str) -> dict[str, Any]:
    day = pod["metadata"]["annotations"]["leasedjob.io/run-key"][:10]
    pod["metadata"]["creationTimestamp"] = f"{day}T{created}Z"
    (state,) = pod["status"]["containerStatuses"][0]["state"].values()
    state["startedAt"] = f"{day}T{started}Z"
    if ended:
        state["finishedAt"] = f"{day}T{ended}Z"
    return pod


def test_the_timeline_of_the_page() -> None:
    _, shown = in_one("docs/reference/cli.md", "timeline")
    assert shown == a_timeline()
