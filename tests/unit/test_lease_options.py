"""Options of the library: what is refused before any SQL, and the defaults."""

from __future__ import annotations

from typing import Any

import pytest

from leasedjob import lease
from leasedjob.errors import InvalidJobIdentityOptionsError, InvalidJobLeaseOptionsError
from leasedjob.identity import JobSchedulerType, RunIdentity
from leasedjob.lease.core import Trust, keep
from leasedjob.lease.options import (
    DEFAULT_HEARTBEAT_MS,
    DEFAULT_LEASE_MS,
    LEFT_OUT,
    MAX_SAFE_INTEGER,
    JobAcquireOptions,
    default_heartbeat_ms,
    resolve,
)

BASE = {"code": "sync", "run_key": "k"}


def test_defaults() -> None:
    options = resolve(JobAcquireOptions(code=" sync ", run_key="k"))
    assert options.identity == RunIdentity(JobSchedulerType.SCHEDULE, "sync", "k")
    assert (options.name, options.lease_ms, options.heartbeat_ms) == ("sync", 900_000, 60_000)
    assert (DEFAULT_LEASE_MS, DEFAULT_HEARTBEAT_MS) == (900_000, 60_000)


def test_a_mapping_serves_as_well() -> None:
    assert resolve(BASE) == resolve(JobAcquireOptions(**BASE))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lease_ms", "heartbeat_ms"), [(3, 1), (5, 1), (6, 2), (179_999, 59_999), (180_000, 60_000), (10**9, 60_000)]
)
def test_default_heartbeat(lease_ms: int, heartbeat_ms: int) -> None:
    assert default_heartbeat_ms(lease_ms) == heartbeat_ms
    assert resolve({**BASE, "lease_ms": lease_ms}).heartbeat_ms == heartbeat_ms


@pytest.mark.parametrize(
    "timing",
    [
        {"lease_ms": 3},
        {"lease_ms": MAX_SAFE_INTEGER},
        {"heartbeat_ms": 0},
        {"lease_ms": 3, "heartbeat_ms": 1},
        {"lease_ms": 100, "heartbeat_ms": 49},
        {"lease_ms": LEFT_OUT},
    ],
)
def test_safe_timing(timing: dict[str, Any]) -> None:
    resolve({**BASE, **timing})


@pytest.mark.parametrize(
    "timing",
    [{name: value} for name in ("lease_ms", "heartbeat_ms") for value in (None, True, 1.0, "900", [], -1, 2**53)]
    + [
        {"lease_ms": 0},
        {"lease_ms": 1},
        {"lease_ms": 2},
        {"lease_ms": 100, "heartbeat_ms": 50},
        {"lease_ms": 101, "heartbeat_ms": 51},
        {"heartbeat_ms": 450_000},
        {"lease_ms": float("nan")},
    ],
    ids=repr,
)
def test_unsafe_timing_is_refused(timing: dict[str, Any]) -> None:
    with pytest.raises(InvalidJobLeaseOptionsError):
        resolve({**BASE, **timing})


@pytest.mark.parametrize(
    "options",
    [
        None,
        7,
        "sync",
        {},
        {"code": "sync"},
        {"code": "sync", "run_key": None},
        {"code": "sync", "type": "INITIAL", "run_key": None},
        {"code": "sync", "type": "INITIAL", "run_key": "k"},
        {"code": None, "run_key": "k"},
        {**BASE, "type": None},
        {**BASE, "type": "OTHER"},
        {**BASE, "name": None},
        {**BASE, "name": 7},
        {**BASE, "leaseMs": 1},
    ],
    ids=repr,
)
def test_ambiguous_identity_is_refused(options: object) -> None:
    with pytest.raises(InvalidJobIdentityOptionsError):
        resolve(options)


def test_identity_is_judged_before_timing() -> None:
    with pytest.raises(InvalidJobIdentityOptionsError):
        resolve({"code": "", "lease_ms": None})


# --- trust -----------------------------------------------------------------------------------------------------------


def test_trust_ends_two_percent_early_counted_from_the_request() -> None:
    trust = Trust(lease=100, interval=30, sent=1000)
    assert trust.until == 1098
    assert (trust.over(1097.9), trust.over(1098)) == (False, True)
    assert trust.wait(1010) == 20
    assert trust.wait(1035) == 0
    trust.beaten(1031, jitter=0.0)
    assert trust.until == 1129
    assert trust.wait(1031) == 30


def test_a_missed_beat_is_repeated_soon_and_never_past_the_end_of_trust() -> None:
    trust = Trust(lease=100, interval=30, sent=0)
    waits = []
    now = 30.0
    while not trust.over(now):
        trust.missed(now, jitter=1.0)
        waits.append(trust.wait(now))
        now += trust.wait(now)
    assert waits[:4] == pytest.approx([0.2, 0.4, 0.8, 1.6])
    assert max(waits) <= 6.5
    assert now == pytest.approx(98)


def test_without_heartbeats_trust_just_ends() -> None:
    assert Trust(lease=100, interval=0, sent=0).wait(10) == 88


@pytest.mark.parametrize(("stopping", "until"), [(0, 98), (20, 78), (60, pytest.approx(98 * 2 / 3))])
def test_work_that_takes_its_time_to_stop_is_told_earlier(stopping: float, until: float) -> None:
    trust = Trust(lease=100, interval=30, sent=1000, stopping=stopping)
    assert trust.until - 1000 == until
    assert trust.end == 1098


def test_keep_beats_until_lost() -> None:
    """The conversation itself, with a clock that only moves in pauses."""
    from uuid import uuid4

    from leasedjob.errors import DatabaseUnavailableError
    from leasedjob.lease.core import Ask, JobLease, Pause

    now = 0.0
    beats = []
    talk = keep(JobLease(uuid4(), uuid4()), Trust(lease=10, interval=3, sent=0), clock=lambda: now, jitter=lambda: 1.0)
    held = {"held": True, "busy": False, "stop_requested": False}
    answers: list[Any] = [held, DatabaseUnavailableError("down"), {**held, "busy": True}, held, {**held, "held": False}]
    step = next(talk)
    reason = ""
    while not reason:
        try:
            if isinstance(step, Pause):
                now += step.seconds
                step = talk.send([])
            else:
                assert isinstance(step, Ask)
                assert step.within is not None
                beats.append(round(now, 3))
                answer = answers.pop(0)
                step = talk.throw(answer) if isinstance(answer, Exception) else talk.send([answer])
        except StopIteration as stop:
            reason = stop.value
    assert beats == [2.7, 5.4, 5.6, 6.0, 8.7]  # each up to a tenth early, at random
    assert "reclaimed" in reason


@pytest.mark.parametrize(
    ("lease", "sent_ago", "seconds"),
    [
        (900, 60, 411),  # of 822 s that are left
        (3, 1, 1.0),  # half would be less than a second
        (1, 0.3, 0.68),  # all that is left
        (1, 2, 0.001),
    ],
)
def test_a_beat_that_hangs_leaves_time_for_another(lease: float, sent_ago: float, seconds: float) -> None:
    assert Trust(lease=lease, interval=lease / 3, sent=100).patience(100 + sent_ago) == pytest.approx(seconds)


def test_the_public_names_are_all_there() -> None:
    for name in lease.__all__:
        assert getattr(lease, name) is not None
    assert set(lease.__all__) == set(lease._HOME)
    with pytest.raises(AttributeError):
        lease.nothing  # noqa: B018


# --- the alarm -------------------------------------------------------------------------------------------------------


def test_the_alarm_acts_in_order_and_forgets_what_was_removed() -> None:
    import threading

    from leasedjob.lease.alarm import Alarm, Call

    alarm, acted, over = Alarm(), [], threading.Event()
    removed = Call(0.05, lambda: acted.append("removed"))
    alarm.add(removed)
    alarm.add(Call(0.2, lambda: (acted.append("second"), over.set())))
    alarm.add(Call(0.1, lambda: (acted.append("first"), 1 / 0)))  # a failure of one is no other's
    alarm.remove(removed)
    assert over.wait(60)
    assert acted == ["first", "second"]
    later = threading.Event()
    alarm.add(Call(0.01, later.set))  # it is asleep by now, or about to be
    assert later.wait(60)


def test_the_alarm_works_in_a_child_process_too() -> None:
    import subprocess
    import sys

    script = (
        "import os, sys, threading; from leasedjob.lease.alarm import ALARM, Call; over = threading.Event(); "
        "ALARM.add(Call(0.01, over.set)); assert over.wait(60); again = threading.Event(); pid = os.fork(); "
        "ALARM.add(Call(0.01, again.set)); assert again.wait(60); "
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else 0)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=120)


def test_the_package_is_light() -> None:
    import subprocess
    import sys

    script = (
        "import sys, leasedjob, leasedjob.lease, leasedjob.testing; "
        "print(sorted({'psycopg', 'asyncio', 'pydantic', 'kopf', 'kubernetes'} & sys.modules.keys())); "
        "from leasedjob import JobSchedulerService; print(JobSchedulerService.__module__)"
    )
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert out == "[]\nleasedjob.lease.service\n"
