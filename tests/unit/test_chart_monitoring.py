"""Alerts, their runbooks and the dashboard: judged by Prometheus' promtool, and compared with the metrics there are.

promtool is the one that LEASEDJOB_TEST_PROMTOOL names, the one on PATH, or the one in the cache (`python -m
tests.cluster promtool`). Where there is none these tests are skipped, and say so; with CI=true it is brought.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster import packages
from tests.cluster.layout import Cache
from tests.cluster.progress import Progress

from leasedjob.controller.metrics import Metrics

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = REPOSITORY / "charts" / "leasedjob" / "files"
RUNBOOKS = REPOSITORY / "docs" / "runbooks"
CASES = Path(__file__).with_name("alerts_test.yaml")

Json = dict[str, Any]
ALERTS: Json = yaml.safe_load((FILES / "alerts.yaml").read_text())
RULES: list[Json] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
DASHBOARD: Json = json.loads((FILES / "dashboard.json").read_text())
NAMES = [rule["alert"] for rule in RULES]


def queries() -> Iterator[tuple[str, str]]:
    """Each query of the dashboard: the panel's title, and the query as Grafana sends it."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"].replace("$__rate_interval", "5m").replace("$namespace", ".*").replace("$job", ".*")
            yield panel["title"], expr


def metrics_of() -> set[str]:
    """The name of every sample that an operator exports, `_created` apart."""
    registry = Metrics().registry
    found = set()
    for collector in registry._collector_to_names:
        for name in registry._collector_to_names[collector]:
            if not name.endswith("_created"):
                found.add(name)
    return found


def named_in(expr: str) -> set[str]:
    return set(re.findall(r"\b(?:leasedjob|app)_[a-z_]+\b", re.sub(r'"[^"]*"', '""', expr)))


@pytest.fixture(scope="session")
def program() -> str:
    """The path of promtool."""
    if found := os.environ.get("LEASEDJOB_TEST_PROMTOOL") or shutil.which("promtool"):
        return found
    cache = Cache.from_env()
    if os.environ.get("CI") == "true":
        return str(packages.promtool(cache, Progress()))
    cached = cache.root / "prometheus" / "usr" / "bin" / "promtool"
    if not cached.exists():
        pytest.skip("THE ALERTS ARE NOT TESTED for want of promtool: run `.venv/bin/python -m tests.cluster promtool`")
    return str(cached)


@pytest.fixture
def promtool(program: str, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs promtool in a folder of its own."""

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *args], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    return run


# --- by promtool ------------------------------------------------------------------------------------------------------


def test_the_rules_are_sound(promtool: Any) -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", str(FILES / "alerts.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_when_it_should_and_only_then(promtool: Any, tmp_path: Path) -> None:
    bare = [
        {**g, "rules": [{k: v for k, v in r.items() if k != "annotations"} for r in g["rules"]]}
        for g in ALERTS["groups"]
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": bare}))
    shutil.copy(CASES, tmp_path / "cases.yaml")
    done = promtool("test", "rules", "cases.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_texts_of_the_alerts_can_be_filled_in(promtool: Any, tmp_path: Path) -> None:
    """The same cases with the texts: promtool finds a difference for each alert, and shows what it made of them."""
    shutil.copy(FILES / "alerts.yaml", tmp_path / "rules.yaml")
    shutil.copy(CASES, tmp_path / "cases.yaml")
    said = promtool("test", "rules", "cases.yaml")
    text = said.stdout + said.stderr
    shown = set(re.findall(r'alertname="(\w+)"[^\n]*\n\s*Annotations:\{description="', text))
    assert shown == set(NAMES)
    assert "error expanding" not in text
    assert "{{" not in text
    assert "<no value>" not in text


def test_each_query_of_the_dashboard_is_one(promtool: Any, tmp_path: Path) -> None:
    rules = [{"record": f"panel:number_{n}:query", "expr": expr} for n, (_, expr) in enumerate(queries())]
    assert len(rules) > 20
    (tmp_path / "dashboard.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = promtool("check", "rules", "dashboard.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


# --- compared with what there is --------------------------------------------------------------------------------------


def test_alerts_and_dashboard_name_metrics_that_there_are() -> None:
    there = metrics_of()
    for title, expr in [*((r["alert"], r["expr"]) for r in RULES), *queries()]:
        named = named_in(expr)
        assert named, title
        assert named <= there, title
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            assert named_in(variable["query"]["query"]) <= there


def test_labels_in_alerts_and_dashboard_are_the_metrics_own() -> None:
    """`sum by (reson)` would be no error for Prometheus."""
    labels = {"namespace", "job", "pod", "le", "leasedjob"}
    for collector in Metrics().registry._collector_to_names:
        labels |= set(collector._labelnames)  # type: ignore[attr-defined]
    for title, expr in [*((r["alert"], r["expr"]) for r in RULES), *queries()]:
        grouped = {w for by in re.findall(r"by \(([^)]*)\)", expr) for w in by.replace(" ", "").split(",")}
        matched = set(re.findall(r"([a-z_]+)(?:=|!=|=~|!~)\"", expr))
        assert grouped | matched <= labels, title


def test_every_alert_has_cases_that_fire_and_that_do_not() -> None:
    cases = [c for test in yaml.safe_load(CASES.read_text())["tests"] for c in test["alert_rule_test"]]
    assert {c["alertname"] for c in cases if c["exp_alerts"]} == set(NAMES)
    assert {c["alertname"] for c in cases if not c["exp_alerts"]} == set(NAMES)


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert {p.stem for p in RUNBOOKS.glob("*.md")} - {"README"} == set(NAMES)
    index = (RUNBOOKS / "README.md").read_text()
    for name in NAMES:
        page = (RUNBOOKS / f"{name}.md").read_text()
        assert page.startswith(f"# {name}\n")
        heads = re.findall(r"^## (.+)$", page, re.MULTILINE)
        assert heads == ["What it means", "How to look", "What to do"], name
        assert f"({name}.md)" in index
        assert named_in(page) <= metrics_of(), name


def test_alerts_say_what_a_person_needs() -> None:
    assert len(NAMES) == len(set(NAMES))
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_the_dashboard_can_be_loaded() -> None:
    panels = DASHBOARD["panels"]
    ids = [p["id"] for p in panels]
    assert len(ids) == len(set(ids))
    assert DASHBOARD["uid"]
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not mine & cells, panel["title"]
        cells |= mine
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
