"""Time zones: IANA names in their exact spelling, from the packaged data alone."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from leasedjob.errors import InvalidScheduleError
from leasedjob.schedule import Schedule, clock_changes, load_zone, zone_names


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "IST",
        "CEST",
        "Local",
        "local",
        "europe/rome",
        "EUROPE/ROME",
        "Europe/Rome ",
        "Europe//Rome",
        "Europe/./Rome",
        "Europe/../Europe/Rome",
        "../../etc/passwd",
        "/etc/localtime",
        "/usr/share/zoneinfo/Europe/Rome",
        "Europe",
        "Europe\\Rome",
        "Europe/Rome\0",
        "zone.tab",
        "tzdata.zi",
        "__init__.py",
        "UTC+2",
        "+02:00",
        "x" * 10_000,
    ],
)
def test_refused(name: str) -> None:
    with pytest.raises(InvalidScheduleError) as caught:
        Schedule.parse("0 0 * * *", name)
    assert caught.value.field == "timeZone"
    assert str(caught.value).startswith("timeZone: ")
    assert len(str(caught.value)) < 200
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["europe/rome", "Europe/Rom", "Europe/Roma"])
def test_a_near_miss_is_named(name: str) -> None:
    with pytest.raises(InvalidScheduleError, match='did you mean "Europe/Rome"'):
        load_zone(name)


def test_every_packaged_name_loads() -> None:
    assert len(zone_names()) > 500
    for name in zone_names():
        assert load_zone(name).key == name


def test_the_host_has_no_say() -> None:
    """CRON-12: no zone file of the host is opened, wherever its environment points."""
    program = """
import os, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from datetime import UTC, datetime
from leasedjob.schedule import Schedule
tick = Schedule.parse("0 6 * * *", "Europe/Rome").next(datetime(2027, 7, 1, 12, tzinfo=UTC))
assert tick == datetime(2027, 7, 2, 4, tzinfo=UTC), tick
zone_files = [path for path in opened if path.endswith("Rome")]
assert zone_files and all("tzdata" in path for path in zone_files), zone_files
assert not [path for path in opened if path.startswith("/usr/share/zoneinfo")], opened
"""
    environment = {"PYTHONTZPATH": "/nonexistent", "TZ": "America/Denver", "PATH": ""}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=60)


def test_clock_changes() -> None:
    changes = clock_changes(
        load_zone("Europe/Paris"), datetime(2027, 1, 1, tzinfo=UTC), datetime(2028, 1, 1, tzinfo=UTC)
    )
    assert [(change.at.isoformat(), change.skips) for change in changes] == [
        ("2027-03-28T01:00:00+00:00", True),
        ("2027-10-31T01:00:00+00:00", False),
    ]


def test_clock_changes_include_their_end_and_not_their_start() -> None:
    zone, at = load_zone("Europe/Paris"), datetime(2027, 3, 28, 1, tzinfo=UTC)
    assert len(clock_changes(zone, at - timedelta(seconds=1), at)) == 1
    assert clock_changes(zone, at, at + timedelta(days=30)) == ()
