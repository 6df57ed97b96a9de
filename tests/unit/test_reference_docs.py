"""docs/reference/ says what the code does: every metric, Event, reason and word, and no other one."""

from __future__ import annotations

import re
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import click
import pytest

from leasedjob.api.problem import Reason
from leasedjob.api.v1alpha1 import RunOutcome, RunPhase
from leasedjob.cli.kubectl import plugin
from leasedjob.controller.events import EventReason
from leasedjob.controller.manual import FINAL, RequestReason
from leasedjob.controller.metrics import KNOWN_REASONS, Metrics
from leasedjob.controller.outcome import Result
from leasedjob.controller.repair import RepairReason
from leasedjob.controller.spec import UNKNOWN_FIELD
from leasedjob.controller.status import OWN_CONDITIONS, ReadyReason
from leasedjob.errors import InvalidScheduleError
from leasedjob.lease import rows
from leasedjob.lease.database import FaultKind
from leasedjob.lease.rows import ClaimVerdict
from leasedjob.schedule import ClockChangePolicy, Schedule, TickReason, load_zone

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"


def section(page: str, title: str) -> str:
    text = (PAGES / page).read_text(encoding="utf-8")
    found = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert found, f"{page} has no section {title}"
    return found


def table(text: str) -> list[list[str]]:
    """The cells of the first table's rows, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# --- metrics.md ------------------------------------------------------------------------------------------------------


def test_every_metric_is_told_with_its_type_and_labels() -> None:
    text = (PAGES / "metrics.md").read_text(encoding="utf-8").partition("\n## ")[0]
    told = {words(name)[0]: (kind, words(labels)) for name, kind, labels, *_ in table(text)}
    exported = {}
    for collector in Metrics().registry._collector_to_names:
        (family,) = collector.collect()
        name = f"{family.name}_total" if family.type == "counter" else family.name
        exported[name] = (family.type, list(collector._labelnames))  # type: ignore[attr-defined]
    assert told == exported
    for name, _, _, over_replicas, meaning in table(text):
        assert over_replicas in ("sum", "max", "min", ""), name
        assert meaning, name


def test_every_label_value_is_told() -> None:
    told: defaultdict[tuple[str, str], str] = defaultdict(str)
    for metric, label, values in table(section("metrics.md", "Label values")):
        told[words(metric)[0], words(label)[0]] += values
    assert {*map(str, Result)} <= set(words(told["leasedjob_attempts_total", "outcome"]))
    assert set(words(told["leasedjob_claims_total", "verdict"])) == {*map(str, ClaimVerdict)}
    outcomes = {"success", "fail", *(w.lower() for w in (rows.REASON_CANCELLED, rows.REASON_REPLACED))}
    assert set(words(told["leasedjob_runs_total", "outcome"])) == outcomes
    assert set(words(told["leasedjob_database_errors_total", "kind"])) == {*map(str, FaultKind)} - {FaultKind.BUSY}
    skipped = {str(reason) for reason in TickReason if reason.kind == "skipped"}
    assert set(words(told["leasedjob_ticks_missed_total", "reason"])) == {*map(str, TickReason)} - skipped
    assert set(words(told["leasedjob_ticks_skipped_total", "reason"])) == skipped | {rows.REASON_OVERLAP}


# --- events.md -------------------------------------------------------------------------------------------------------


def test_every_word_of_a_result() -> None:
    assert [words(row[0])[0] for row in table(section("events.md", "Last Result"))] == [*map(str, RunOutcome)]


def test_every_reason_of_ready() -> None:
    told = {words(reason)[0]: status for reason, status, _ in table(section("events.md", "Condition Ready"))}
    good = {ReadyReason.ACCEPTED, ReadyReason.SUSPENDED}
    wanted = {*ReadyReason, *Reason, UNKNOWN_FIELD}
    assert told == {str(reason): "True" if reason in good else "False" for reason in wanted}
    for kind in OWN_CONDITIONS:
        assert kind in section("events.md", "Condition Ready")


def test_every_phase_and_reason_of_a_request() -> None:
    rows_ = [row for row in table(section("events.md", "Phases of a LeasedJobRun")) if words(row[0])]
    assert {words(phase)[0] for phase, *_ in rows_} == {*map(str, RunPhase)}
    told = {word for _, reason, _ in rows_ for word in words(reason)}
    assert told == {*map(str, RequestReason), *map(str, RepairReason)}
    assert set(words(section("events.md", "Phases of a LeasedJobRun").rpartition("\n|")[2])) >= FINAL


def test_every_event() -> None:
    told = {words(reason)[0]: kind for reason, kind, _ in table(section("events.md", "Events"))}
    assert told.keys() == {*map(str, EventReason)}
    source = (ROOT / "operator" / "leasedjob" / "controller" / "act.py").read_text(encoding="utf-8")
    source += (ROOT / "operator" / "leasedjob" / "controller" / "engine.py").read_text(encoding="utf-8")
    assert not re.findall(r'events\.record\([\w.]+, "', source), "reasons are EventReason's"
    assert set(told.values()) == {"Normal", "Warning"}


def test_every_reason_of_an_attempt() -> None:
    told = {word for row in table(section("events.md", "Why an attempt ended")) for word in words(row[0])}
    of_rows = {value for name, value in vars(rows).items() if name.startswith("REASON_")}
    elsewhere = {rows.REASON_OVERLAP, rows.REASON_STARTING_DEADLINE, rows.REASON_AFTER_FAILURES}  # of ticks
    assert told == KNOWN_REASONS | (of_rows - elsewhere) | {"NotAdopted", "PodNotCreated"}


# --- links -----------------------------------------------------------------------------------------------------------

DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), target
        if anchor and found.suffix == ".md":
            heads = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slug(head) for head in heads}, target


def slug(head: str) -> str:
    """The anchor of a heading, as code hosts make it."""
    return re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-")


def test_every_page_is_reachable_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    assert "docs/reference/README.md" in readme
    for page in PAGES.glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


# --- cron.md ---------------------------------------------------------------------------------------------------------

CODE = "shop/sync-orders"
MONDAY = datetime(2026, 7, 20, 0, 30, tzinfo=UTC)


def pairs(title: str) -> list[tuple[str, list[str]]]:
    """Each expression of a table in cron.md, and the other cells of its row."""
    return [(written, row[1:]) for row in table(section("cron.md", title)) for written in words(row[0])]


@pytest.mark.parametrize(("written", "cells"), pairs("Examples"))
def test_an_example_fires_when_the_page_says(written: str, cells: list[str]) -> None:
    schedule = Schedule.parse(written, code=CODE)
    assert ", ".join(f"{t:%d %H:%M}" for t in schedule.preview(MONDAY, 2)) == cells[1]
    assert bool(schedule.warnings) == ("**and**" in cells[0])


@pytest.mark.parametrize(("written", "cells"), pairs("What is refused"))
def test_what_the_page_calls_refused_is(written: str, cells: list[str]) -> None:
    with pytest.raises(InvalidScheduleError):
        Schedule.parse(written)
    for instead in words(cells[1]):
        if "*" in instead:
            Schedule.parse(instead)


def test_two_jobs_are_every_90_minutes() -> None:
    ticks = sorted(
        tick for text in ("0 */3 * * *", "30 1-23/3 * * *") for tick in Schedule.parse(text).preview(MONDAY, 8)
    )[:12]
    assert {later - tick for tick, later in pairwise(ticks)} == {timedelta(minutes=90)}


@pytest.mark.parametrize(("written", "cells"), pairs("Clock changes"))
@pytest.mark.parametrize(("column", "policy"), [(1, ClockChangePolicy.RunOnce), (2, ClockChangePolicy.Kubernetes)])
def test_a_clock_change_is_what_the_page_says(
    written: str, cells: list[str], column: int, policy: ClockChangePolicy
) -> None:
    change = (
        datetime(2026, 3, 29, 1, tzinfo=UTC) if cells[0].startswith("March") else datetime(2026, 10, 25, 1, tzinfo=UTC)
    )
    schedule = Schedule.parse(written, "Europe/Rome", policy=policy)
    night = [t for t in schedule.preview(change - timedelta(minutes=61), 9) if t < change + timedelta(minutes=59)]
    assert (", ".join(f"{t:%H:%M}" for t in night) or "none") == cells[column]


def test_zones_as_the_page_has_them() -> None:
    for zone in ("Etc/UTC", "Europe/Rome", "America/New_York", "UTC"):
        load_zone(zone)
    for zone in ("Local", "CEST", "+02:00", "/Europe/Rome"):
        with pytest.raises(InvalidScheduleError):
            load_zone(zone)


# --- every page ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_command_lines_name_verbs_that_there_are(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    verbs = set(re.findall(r"kubectl leasedjob (?:-n \S+ )?([a-z]+)\b", text))
    assert verbs <= set(plugin.list_commands(click.Context(plugin)))
    for target in re.findall(r"\bmake ([a-z-]+)", "\n".join(re.findall(r"`[^`]+`|```.*?```", text, re.DOTALL))):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
