"""Type hints that pay: what mypy and pyright know of the library. Pyright is run as `basedpyright`, its distribution on
PyPI that brings its own node."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RIGHT, WRONG = HERE / "lease_types_right.py", HERE / "lease_types_wrong.py"


def mypy(file: Path) -> set[int]:
    """The lines at which it finds errors."""
    words = [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--no-error-summary", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=HERE.parents[1], check=False)
    assert not done.stderr, done.stderr
    found = re.findall(rf"{re.escape(file.name)}:(\d+): error:", done.stdout)
    assert len(found) == done.stdout.count(": error:"), done.stdout
    return {int(line) for line in found}


def pyright(file: Path, tmp_path: Path) -> set[int]:
    """The lines at which it finds errors, in its standard mode."""
    config = tmp_path / "pyrightconfig.json"
    config.write_text(
        json.dumps(
            {
                "typeCheckingMode": "standard",
                "include": [str(file)],
                "extraPaths": [str(HERE.parents[1] / "operator")],
                "pythonVersion": "3.11",
            }
        )
    )
    words = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(config)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "filesAnalyzed" in done.stdout, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["summary"]["filesAnalyzed"] == 1, answer
    errors = [item for item in answer["generalDiagnostics"] if item["severity"] == "error"]
    assert all(item["file"] == str(file) for item in errors), errors
    return {item["range"]["start"]["line"] + 1 for item in errors}


def refused(*kinds: str) -> set[int]:
    lines = WRONG.read_text(encoding="utf-8").splitlines()
    marked = {
        number: line.rpartition("# refused: ")[2] for number, line in enumerate(lines, 1) if "# refused: " in line
    }
    assert set(marked.values()) == {"both", "mypy"}
    return {number for number, kind in marked.items() if kind in kinds}


@pytest.mark.timeout(300)
def test_mypy_knows_the_fields_after_the_check_and_refuses_them_before() -> None:
    assert mypy(RIGHT) == set()
    assert mypy(WRONG) == refused("both", "mypy")


@pytest.mark.timeout(300)
def test_pyright_knows_the_fields_after_the_check(tmp_path: Path) -> None:
    assert pyright(RIGHT, tmp_path) == set()
    assert pyright(WRONG, tmp_path) == refused("both")
