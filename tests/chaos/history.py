"""The judge: from records of a run to the promises that were broken. Pure.

Three kinds of records, none of which the judged programs can embellish: what a trigger saw written to the lease rows,
what a sink that checks fencing tokens let pass, and what clients were told. All times are the database's, in
microseconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Final

RUNNING: Final = "RUNNING"
SUCCESS: Final = "SUCCESS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A lease row as it was written.

    Args:
        seq: grows in the order in which one row was written.
        key: the run. group: the job that it belongs to.
        token: the fencing token. owner: the owner token.
        modified: what the row says of its last acquire, heartbeat or end. until: the end of the lease.
    """

    seq: int
    key: str
    group: str
    status: str
    token: int
    attempt: int
    owner: str
    adopted: bool
    modified: int
    until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Something that was done outside under a token, and whether the sink let it pass."""

    seq: int
    key: str
    token: int
    accepted: bool
    at: int


class What(StrEnum):
    """What a client was told by the lease."""

    ACQUIRED = "acquired"
    BEAT = "beat"  # held
    ENDED = "ended"  # recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A client was told that this was done under its token."""

    client: str
    what: What
    key: str
    token: int
    detail: str = ""  # of ENDED: the status


class Broken(StrEnum):
    """A promise that was broken."""

    OVERLAP = "overlap"  # a new owner while the lease of the old one was valid
    GROUP_OVERLAP = "group overlap"  # two runs of a job that forbids it were owned at one time
    REVIVED = "revived"  # an expired lease was extended
    TOKEN = "token"  # a fencing token that didn't grow, or an attempt that is not the next
    OWNER = "owner"  # the owner changed without a new token, other than by the one adoption
    SUCCESS_NOT_FINAL = "success not final"
    LOST_KEY = "lost key"  # a run that began didn't end as SUCCESS
    OLD_TOKEN = "old token"  # the sink let an effect pass after one with a newer token
    UNKNOWN_TOKEN = "unknown token"  # an effect under a token that was never given for this run
    NO_EFFECT = "no effect"  # SUCCESS under a token without any effect under it
    TWO_WINNERS = "two winners"  # two clients were told that they own one attempt
    NOT_GRANTED = "not granted"  # a client was told that it owns an attempt that isn't there
    NOT_ENDED = "not ended"  # a client was told that its end is recorded, and it isn't
    NOT_BEATEN = "not beaten"  # a client was told that its lease was extended more often than it was


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise."""

    broken: Broken
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.broken}: {self.key}: {self.text}"


@dataclass(slots=True)
class _Attempt:
    """One token's time: from its grant until it ended, expired or was followed by the next."""

    key: str
    group: str
    token: int
    begin: int
    until: int
    ended: str = ""
    extensions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All records of a run, each kind in the order of its `seq`.

    Args:
        exclusive: the runs of a group may not overlap.
        complete: every run that began has to have ended as SUCCESS.
        expected: runs that have to have begun.
        effects_expected: whoever ends a run as SUCCESS has done something before.
    """

    changes: Sequence[Change]
    effects: Sequence[Effect] = ()
    told: Sequence[Told] = ()
    exclusive: bool = False
    complete: bool = True
    expected: Sequence[str] = ()
    effects_expected: bool = True
    _found: list[Violation] = field(default_factory=list, init=False)

    def violations(self) -> list[Violation]:
        """Every promise that these records show broken."""
        self._found.clear()
        attempts = self._attempts()
        self._judge_keys()
        if self.exclusive:
            self._judge_groups(attempts)
        self._judge_effects(attempts)
        self._judge_told(attempts)
        return list(self._found)

    def _say(self, broken: Broken, key: str, text: str) -> None:
        self._found.append(Violation(broken, key, text))

    def _attempts(self) -> dict[tuple[str, int], _Attempt]:
        """Follows each row, write by write."""
        attempts: dict[tuple[str, int], _Attempt] = {}
        last: dict[str, Change] = {}
        for change in sorted(self.changes, key=lambda change: change.seq):
            old = last.get(change.key)
            last[change.key] = change
            if old is not None and old.status == SUCCESS and change.status != SUCCESS:
                self._say(Broken.SUCCESS_NOT_FINAL, change.key, f"{change.status} after SUCCESS, token {change.token}")
            if old is None or change.token != old.token:
                self._granted(old, change)
                attempts[change.key, change.token] = _Attempt(
                    change.key, change.group, change.token, change.modified, change.until
                )
                continue
            attempt = attempts[change.key, change.token]
            if change.owner != old.owner and not (change.adopted and not old.adopted):
                self._say(Broken.OWNER, change.key, f"another owner under token {change.token}")
            if change.status == RUNNING:
                if change.modified > old.modified:
                    attempt.extensions += 1
                    if change.modified > old.until:
                        self._say(
                            Broken.REVIVED,
                            change.key,
                            f"token {change.token} extended {change.modified - old.until} us after its end",
                        )
                attempt.until = change.until
            elif old.status == RUNNING:
                attempt.ended = change.status
                attempt.until = min(attempt.until, change.modified)
        return attempts

    def _granted(self, old: Change | None, new: Change) -> None:
        if new.status != RUNNING:
            self._say(Broken.TOKEN, new.key, f"a new token {new.token} came with {new.status}")
        if old is None:
            if new.attempt != 1:
                self._say(Broken.TOKEN, new.key, f"the first attempt is {new.attempt}")
            return
        if old.status == RUNNING and new.modified <= old.until:
            self._say(
                Broken.OVERLAP,
                new.key,
                f"token {new.token} granted {old.until - new.modified} us before the lease of {old.token} ended",
            )
        if new.token <= old.token or new.attempt != old.attempt + 1:
            self._say(
                Broken.TOKEN,
                new.key,
                f"token {old.token}, attempt {old.attempt} followed by token {new.token}, attempt {new.attempt}",
            )

    def _judge_keys(self) -> None:
        last = {change.key: change for change in sorted(self.changes, key=lambda change: change.seq)}
        for key in self.expected:
            if key not in last:
                self._say(Broken.LOST_KEY, key, "it never began")
        if self.complete:
            for key, change in last.items():
                if change.status != SUCCESS:
                    self._say(Broken.LOST_KEY, key, f"{change.status} at the end, attempt {change.attempt}")

    def _judge_groups(self, attempts: dict[tuple[str, int], _Attempt]) -> None:
        by_group: defaultdict[str, list[_Attempt]] = defaultdict(list)
        for attempt in attempts.values():
            by_group[attempt.group].append(attempt)
        for group, members in by_group.items():
            members.sort(key=lambda attempt: attempt.begin)
            for one, other in pairwise(members):
                # Of one run the other judgement speaks.
                if one.key != other.key and other.begin < one.until:
                    self._say(
                        Broken.GROUP_OVERLAP,
                        group,
                        f"{other.key} (token {other.token}) began {one.until - other.begin} us before the end of "
                        f"{one.key} (token {one.token})",
                    )

    def _judge_effects(self, attempts: dict[tuple[str, int], _Attempt]) -> None:
        newest: dict[str, int] = {}
        done: set[tuple[str, int]] = set()
        for effect in sorted(self.effects, key=lambda effect: effect.seq):
            if not effect.accepted:
                continue
            done.add((effect.key, effect.token))
            if effect.token < newest.get(effect.key, 0):
                self._say(Broken.OLD_TOKEN, effect.key, f"token {effect.token} passed after token {newest[effect.key]}")
            newest[effect.key] = max(effect.token, newest.get(effect.key, 0))
            if (effect.key, effect.token) not in attempts:
                self._say(Broken.UNKNOWN_TOKEN, effect.key, f"an effect under token {effect.token}")
        if self.effects_expected:
            for (key, token), attempt in attempts.items():
                if attempt.ended == SUCCESS and (key, token) not in done:
                    self._say(Broken.NO_EFFECT, key, f"SUCCESS under token {token}")

    def _judge_told(self, attempts: dict[tuple[str, int], _Attempt]) -> None:
        winners: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        beats: Counter[tuple[str, int]] = Counter()
        for told in self.told:
            attempt = attempts.get((told.key, told.token))
            match told.what:
                case What.ACQUIRED:
                    winners[told.key, told.token].add(told.client)
                    if attempt is None:
                        self._say(Broken.NOT_GRANTED, told.key, f"{told.client} was given token {told.token}")
                case What.BEAT:
                    beats[told.key, told.token] += 1
                case What.ENDED if attempt is None or attempt.ended != told.detail:
                    ended = attempt.ended if attempt else "nothing"
                    self._say(
                        Broken.NOT_ENDED,
                        told.key,
                        f"{told.client} was told {told.detail} of token {told.token}; recorded: {ended or 'nothing'}",
                    )
        for (key, token), clients in winners.items():
            if len(clients) > 1:
                self._say(Broken.TWO_WINNERS, key, f"token {token} was given to {', '.join(sorted(clients))}")
        for (key, token), count in beats.items():
            extensions = attempts[key, token].extensions if (key, token) in attempts else 0
            if count > extensions:
                self._say(Broken.NOT_BEATEN, key, f"token {token}: {count} beats were confirmed, {extensions} written")

    def summary(self) -> str:
        """What happened, in one line."""
        attempts = Counter(change.key for change in self.changes if change.status == RUNNING)
        tokens = {(change.key, change.token) for change in self.changes}
        refused = sum(not effect.accepted for effect in self.effects)
        return (
            f"{len(attempts):,} runs, {len(tokens):,} attempts, {len(self.changes):,} writes, "
            f"{len(self.effects):,} effects of which {refused} refused, {self.late_effects()} late"
        )

    def late_effects(self) -> int:
        """Effects that passed although the next attempt had been granted already: what only the sink's own effect under
        the newer token can end. No broken promise, but what a frozen owner costs a sink that hears of no news."""
        grants: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        seen: set[tuple[str, int]] = set()
        for change in self.changes:
            if (change.key, change.token) not in seen:
                seen.add((change.key, change.token))
                grants[change.key].append((change.token, change.modified))
        return sum(
            any(token > effect.token and begin < effect.at for token, begin in grants[effect.key])
            for effect in self.effects
            if effect.accepted
        )


def only(violations: Iterable[Violation]) -> set[Broken]:
    """Which promises were broken."""
    return {violation.broken for violation in violations}
