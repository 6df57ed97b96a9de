"""The evaluator against robfig/cron v3 itself, the library that CronJob schedules with.

Under `Kubernetes` they agree everywhere; under `RunOnce` away from clock changes. The oracle is a small Go program
beside this file; it reads the same zone data through ZONEINFO.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from pathlib import Path

import pytest

from leasedjob.errors import InvalidScheduleError
from leasedjob.schedule import ClockChangePolicy, Schedule, clock_changes, load_zone, zone_names

ORACLE = Path(__file__).parent / "robfig_oracle"
QUESTIONS = int(os.environ.get("LEASEDJOB_ORACLE_QUESTIONS", "20000"))
MUTILATED = 1500
SEED = int(os.environ.get("LEASEDJOB_ORACLE_SEED", "20270101"))
DAY = timedelta(days=1)
HARD_ZONES = ("Africa/Cairo", "Asia/Beirut", "America/Havana", "America/Santiago", "Atlantic/Azores", "America/Nuuk",
              "Antarctica/Troll", "Australia/Lord_Howe", "Africa/Casablanca", "Asia/Gaza", "Europe/Paris")  # fmt: skip
# What robfig reads and LeasedJob refuses, by a word of the refusal.
KNOWN_REFUSALS = ("wider than its range", "never fires", "wildcard can't begin", "@every", "no value")

Question = tuple[str, str, datetime]
Ask = Callable[[list[Question]], list[str]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    go = shutil.which("go") or shutil.which("/usr/local/go/bin/go")
    if go is None:
        pytest.skip("NOT CHECKED against robfig/cron: there is no Go here")
    program = tmp_path_factory.mktemp("oracle") / "robfig-oracle"
    built = subprocess.run(
        [go, "build", "-o", str(program), "."], cwd=ORACLE, capture_output=True, text=True, timeout=280, check=False
    )
    if built.returncode:
        pytest.skip(f"NOT CHECKED against robfig/cron: the oracle does not build: {built.stderr.strip()[-400:]}")

    def asking(questions: list[Question]) -> list[str]:
        lines = "".join(f"{zone}\t{expression}\t{int(at.timestamp())}\n" for zone, expression, at in questions)
        environment = {**os.environ, "ZONEINFO": str(files("tzdata").joinpath("zoneinfo"))}
        answered = subprocess.run(
            [program], input=lines, capture_output=True, text=True, check=True, env=environment, timeout=120
        )
        answers = answered.stdout.splitlines()
        assert len(answers) == len(questions)
        return answers

    return asking


def an_item(dice: random.Random, low: int, high: int) -> str:
    first, last = sorted((dice.randint(low, high), dice.randint(low, high)))
    return dice.choice(
        [
            str(first),
            str(first),
            f"{first}-{last}",
            f"{first}-{last}/{dice.randint(1, last - first + 1)}",
            f"*/{dice.randint(1, high - low + 1)}",
            f"{first}/{dice.randint(1, high - first + 1)}",
        ]
    )


def a_field(dice: random.Random, low: int, high: int, star: float) -> str:
    if dice.random() < star:
        return dice.choice("****?")
    return ",".join(an_item(dice, low, high) for _ in range(dice.choice([1, 1, 1, 2, 3])))


def an_expression(dice: random.Random) -> str:
    if dice.random() < 0.02:
        return dice.choice(["@yearly", "@monthly", "@weekly", "@daily", "@midnight", "@hourly", "0 0 29 2 *"])
    bounds = ((0, 59, 0.2), (0, 23, 0.3), (1, 31, 0.55), (1, 12, 0.7), (0, 6, 0.55))
    return " ".join(a_field(dice, *bound) for bound in bounds)


def read(expression: str, zone: str) -> Schedule | str:
    """The schedule under the policy Kubernetes, or why it is refused."""
    try:
        return Schedule.parse(expression, zone, policy=ClockChangePolicy.Kubernetes)
    except InvalidScheduleError as refusal:
        return str(refusal)


def questions(seed: int, n: int) -> list[Question]:
    """Random triples, most of them near a clock change."""
    dice = random.Random(seed)
    everywhere = dice.sample(sorted(zone_names()), 150)  # other ones with each seed: each year of a zone takes a while
    found: list[Question] = []
    while len(found) < n:
        zone = dice.choice(HARD_ZONES if dice.random() < 0.5 else everywhere)
        at = datetime(dice.randint(2024, 2060), 1, 1, tzinfo=UTC) + timedelta(seconds=dice.randrange(365 * 86_400))
        if dice.random() < 0.6:
            changes = clock_changes(load_zone(zone), at, at + timedelta(days=400))
            if changes:
                at = dice.choice(changes).at + timedelta(seconds=dice.randint(-3 * 86_400, 86_400))
        found.append((zone, an_expression(dice), at))
    return found


def near_a_change(zone: str, *instants: datetime) -> bool:
    info = load_zone(zone)
    offsets = (((at - DAY).astimezone(info).utcoffset(), (at + DAY).astimezone(info).utcoffset()) for at in instants)
    return any(before != after for before, after in offsets)


def compare(ask: Ask, seed: int, enough: int) -> None:
    """At least `enough` triples under either policy; under RunOnce without those near a clock change."""
    print(f"seed {seed}: LEASEDJOB_ORACLE_SEED repeats it")
    asked = questions(seed, enough + enough // 3)
    answers = ask(asked)
    compared = dict.fromkeys(ClockChangePolicy, 0)
    for (zone, expression, at), answer in zip(asked, answers, strict=True):
        schedule = read(expression, zone)
        if isinstance(schedule, str):
            assert "never fires" in schedule
            assert answer == "none", (zone, expression, at, answer)
            continue
        if answer == "none":  # more than five years away: robfig gives up
            tick = schedule.next(at)
            assert tick is not None
            assert tick.year >= at.year + 5, (zone, expression, at)
            continue
        expected = datetime.fromtimestamp(int(answer), UTC)
        assert schedule.next(at) == expected, (zone, expression, at)
        compared[ClockChangePolicy.Kubernetes] += 1

        once = Schedule.parse(expression, zone).next(at)
        assert once is not None
        if not near_a_change(zone, at, expected, once):
            assert once == expected, (zone, expression, at)
            compared[ClockChangePolicy.RunOnce] += 1
    assert compared[ClockChangePolicy.Kubernetes] >= enough, compared
    assert compared[ClockChangePolicy.RunOnce] >= enough, compared


def test_agrees(ask: Ask) -> None:
    compare(ask, SEED, QUESTIONS)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_agrees_for_long(ask: Ask) -> None:
    for _ in range(20):
        compare(ask, random.SystemRandom().randrange(10**9), 20_000)


@pytest.mark.parametrize("seed", range(3))
def test_reads_and_refuses_the_same(ask: Ask, seed: int) -> None:
    """Mutilated expressions: what both read means the same, and nothing is read that CronJob refuses, but 7 and H."""
    dice = random.Random(seed)
    alphabet = "0123456789*/-,? @LW#ajsun7+"
    at = datetime(2027, 1, 1, tzinfo=UTC)
    texts = []
    for _ in range(MUTILATED):
        text = list(an_expression(dice))
        for _ in range(dice.choice([1, 1, 1, 2, 3])):
            place = dice.randrange(len(text))
            text[place : place + dice.randint(0, 1)] = dice.choice(alphabet)
        texts.append("".join(text))
    answers = ask([("Etc/UTC", text, at) for text in texts])
    agreed = 0
    for expression, answer in zip(texts, answers, strict=True):
        schedule = read(expression, "Etc/UTC")
        if isinstance(schedule, str):
            refused_there = answer.startswith("error") or answer == "none"
            assert refused_there or any(word in schedule for word in KNOWN_REFUSALS), (expression, answer, schedule)
        elif answer.startswith("error"):
            # accepted here alone: 7 for Sunday, blanks around a macro
            assert "7" in expression.split()[-1] or expression.strip().startswith("@"), (expression, answer)
        elif answer != "none":
            assert schedule.next(at) == datetime.fromtimestamp(int(answer), UTC), (expression, answer)
            agreed += 1
    assert agreed > MUTILATED // 20
