"""The judge of the contention suite: a sound history passes, and each kind of broken one is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.chaos.history import RUNNING, SUCCESS, Broken, Change, Effect, History, Told, What, only


def change(seq: int, token: int, modified: int, status: str = RUNNING, **other: Any) -> Change:
    """A write to the row of run "a" of job "j", with a lease of 100 us."""
    values: dict[str, Any] = {
        "seq": seq,
        "key": "a",
        "group": "j",
        "status": status,
        "token": token,
        "attempt": 1,
        "owner": f"owner-{token}",
        "adopted": False,
        "modified": modified,
        "until": modified + 100,
    }
    return Change(**{**values, **other})


def effect(seq: int, token: int, *, accepted: bool = True, key: str = "a", at: int = 0) -> Effect:
    return Effect(seq=seq, key=key, token=token, accepted=accepted, at=at or seq)


def told(what: What, token: int, client: str = "p1", detail: str = "") -> Told:
    return Told(client=client, what=what, key="a", token=token, detail=detail)


# The first owner beats once and is lost; the second one, after its expiry, finishes.
SOUND = History(
    changes=[
        change(1, 5, 1000),
        change(2, 5, 1050),
        change(3, 9, 1200, attempt=2),
        change(4, 9, 1230, attempt=2, adopted=True, owner="pod"),
        change(5, 9, 1290, SUCCESS, attempt=2, adopted=True, owner="pod"),
        change(6, 12, 1300, key="b"),
        change(7, 12, 1350, SUCCESS, key="b"),
    ],
    effects=[
        effect(1, 5, at=1010),
        effect(2, 9, at=1250),
        effect(3, 5, accepted=False, at=1260),
        effect(4, 12, key="b", at=1310),
    ],
    told=[
        told(What.ACQUIRED, 5),
        told(What.BEAT, 5),
        told(What.ACQUIRED, 9, "p2"),
        told(What.BEAT, 9, "p2"),
        told(What.ENDED, 9, "p2", SUCCESS),
    ],
    exclusive=True,
    expected=["a", "b"],
)


def test_a_sound_history_passes() -> None:
    assert SOUND.violations() == []
    assert SOUND.violations() == []  # asked again
    assert SOUND.summary() == "2 runs, 3 attempts, 7 writes, 4 effects of which 1 refused, 0 late"


def test_an_end_after_expiry_is_sound_while_nobody_reclaimed() -> None:
    assert History(changes=[change(1, 5, 1000), change(2, 5, 9999, SUCCESS)], effects=[effect(1, 5)]).violations() == []


def test_a_failed_run_is_taken_again_at_once() -> None:
    changes = [
        change(1, 5, 1000),
        change(2, 5, 1010, "FAIL"),
        change(3, 6, 1011, attempt=2),
        change(4, 6, 1012, SUCCESS, attempt=2),
    ]
    assert History(changes=changes, effects=[effect(1, 6)]).violations() == []


def with_changes(*changed: Change) -> History:
    """The sound history with these writes in place of those of the same number, or more."""
    by_seq = {c.seq: c for c in (*SOUND.changes, *changed)}
    return replace(SOUND, changes=list(by_seq.values()))


@pytest.mark.parametrize(
    ("history", "broken"),
    [
        (with_changes(change(3, 9, 1150, attempt=2)), Broken.OVERLAP),  # expired means later than its end
        (with_changes(change(2, 5, 1101)), Broken.REVIVED),
        (with_changes(change(3, 4, 1200, attempt=2)), Broken.TOKEN),
        (with_changes(change(3, 9, 1200, attempt=1)), Broken.TOKEN),
        (with_changes(change(1, 5, 1000, attempt=2)), Broken.TOKEN),
        (with_changes(change(3, 9, 1200, "FAIL", attempt=2)), Broken.TOKEN),
        (with_changes(change(2, 5, 1050, owner="thief")), Broken.OWNER),
        (with_changes(change(5, 9, 1240, attempt=2, adopted=True, owner="second pod")), Broken.OWNER),
        (with_changes(change(8, 13, 1400, attempt=3)), Broken.SUCCESS_NOT_FINAL),
        (with_changes(change(5, 9, 1290, "FAIL", attempt=2, adopted=True, owner="pod")), Broken.LOST_KEY),
        (with_changes(change(7, 12, 1350, key="b")), Broken.LOST_KEY),
        (replace(SOUND, expected=["a", "b", "c"]), Broken.LOST_KEY),
        (with_changes(change(6, 12, 1280, key="b")), Broken.GROUP_OVERLAP),
        (replace(SOUND, effects=[*SOUND.effects, effect(5, 5)]), Broken.OLD_TOKEN),
        (replace(SOUND, effects=[*SOUND.effects, effect(5, 10)]), Broken.UNKNOWN_TOKEN),
        (replace(SOUND, effects=[e for e in SOUND.effects if e.token != 9]), Broken.NO_EFFECT),
        (replace(SOUND, told=[*SOUND.told, told(What.ACQUIRED, 9, "p3")]), Broken.TWO_WINNERS),
        (replace(SOUND, told=[told(What.ACQUIRED, 6)]), Broken.NOT_GRANTED),
        (replace(SOUND, told=[told(What.ENDED, 5, detail=SUCCESS)]), Broken.NOT_ENDED),
        (replace(SOUND, told=[told(What.ENDED, 9, detail="FAIL")]), Broken.NOT_ENDED),
        (replace(SOUND, told=[told(What.ENDED, 77, detail=SUCCESS)]), Broken.NOT_ENDED),
        (replace(SOUND, told=[told(What.BEAT, 5), told(What.BEAT, 5)]), Broken.NOT_BEATEN),
        (replace(SOUND, told=[told(What.BEAT, 77)]), Broken.NOT_BEATEN),
    ],
)
def test_what_is_broken_is_found(history: History, broken: Broken) -> None:
    found = history.violations()
    assert broken in only(found), [str(violation) for violation in found]
    # What is allowed for one history isn't for another.
    assert SOUND.violations() == []


def test_order_is_that_of_the_writes_not_of_the_list() -> None:
    assert replace(SOUND, changes=SOUND.changes[::-1], effects=SOUND.effects[::-1]).violations() == []


def test_groups_may_overlap_where_that_is_allowed() -> None:
    history = replace(with_changes(change(6, 12, 1280, key="b")), exclusive=False)
    assert history.violations() == []


def test_an_effect_after_the_next_grant_is_late_but_not_broken() -> None:
    effects = [e for e in SOUND.effects if e.token != 5]
    history = replace(SOUND, effects=[effect(1, 5, at=1210), *effects])
    assert history.violations() == []
    assert history.late_effects() == 1


def test_runs_may_be_left_open_where_that_is_asked() -> None:
    history = replace(with_changes(change(7, 12, 1350, key="b")), complete=False)
    assert history.violations() == []
