"""The bench itself: that its arithmetic is right, and that a measure runs. No time is judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import __main__ as command
from bench import report
from bench.measures import imports, schedule
from bench.model import Aim, Result, Row, Scale, difference, ratio, rows, turns

QUICK = Scale(quick=True)


def test_sides_take_turns_and_the_order_turns_round() -> None:
    calls: list[str] = []

    def side(name: str, value: float) -> float:
        calls.append(name)
        return value

    found = turns({"a": lambda: side("a", 1), "b": lambda: side("b", 2)}, 2)
    assert found == {"a": [1, 1], "b": [2, 2]}
    assert calls == ["b", "a", "a", "b", "b", "a"]  # the first pair warms up


def test_a_ratio_is_taken_within_a_turn() -> None:
    # The machine was ten times slower in the second turn; the ratio of medians would be 1.1.
    mine, peer = [2.0, 20.0, 2.2], [1.0, 10.0, 2.0]
    assert ratio(mine, peer) == 2.0
    assert difference(mine, peer) == 1.0


def test_the_table_names_peer_spread_and_verdict() -> None:
    table = rows({"peer": [1.0, 1.0, 1.0], "mine": [1.0, 2.0, 3.0]}, "ms", {"mine": "peer"})
    result = Result("name", "title", table, (Aim("mine / peer", 2.0, 1.5), Aim("rate", 2.0, 1.5, at_least=True)))
    text = report.table(result)
    assert "2.00 (1.50 to 2.50) x peer" in text
    assert "mine / peer <= 1.5: 2.00, NOT MET" in text
    assert "rate >= 1.5: 2.00, met" in text


def test_what_is_kept(tmp_path: Path) -> None:
    result = Result("name", "title", (Row("a", "ms", (1.0, 3.0), (2.0, 4.0), "b"),), settings={"due": 3})
    kept = json.loads(report.write(result, {"cores": 2}, tmp_path).read_text())
    assert kept["rows"] == [
        {
            "what": "a",
            "unit": "ms",
            "median": 2.0,
            "min": 1.0,
            "max": 3.0,
            "n": 2,
            "ratio": 3.0,
            "half of the ratios within": [2.5, 3.5],
            "peer": "b",
        }
    ]
    assert (kept["machine"], kept["settings"]) == ({"cores": 2}, {"due": 3})


def test_every_measure_has_a_module() -> None:
    modules = {path.stem for path in (Path(command.__file__).parent / "measures").glob("*.py")} - {"__init__"}
    assert modules == set(command.MEASURES)


def test_an_unknown_measure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["leases"])
    assert "no such measure: leases" in capsys.readouterr().err


def test_schedules_are_measured_with_whatever_peers_there_are() -> None:
    result = schedule.measure(QUICK)
    assert "leasedjob" in {row.what for row in result.rows}
    assert all(value > 0 for row in result.rows for value in row.values)


def test_gate_and_drain_start_without_the_driver() -> None:
    names = [row.what for row in imports.measure(QUICK).rows]
    assert [name for name in names if name.startswith(("gate", "drain"))]
    assert all("without the driver" in name for name in names if name.startswith(("gate", "drain")))


def test_a_trial_keeps_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--quick", "--results", str(tmp_path), "schedule"]) == 0
    assert "these figures mean nothing" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
