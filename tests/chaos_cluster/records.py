"""What is written down of a run of chaos, and nothing that follows from it. Times are seconds since the epoch.

Three witnesses: a trigger on the lease rows (and the ledger as it stands at the end), the recorder outside the
clusters, and whoever did the harm. A folder holds them, so that a run can be judged again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What was asked for: something that is due at each minute m with m % every == offset, counted from the epoch.

    Args:
        policy: Forbid, Replace or Allow; a simulated one has none, its runs may overlap each other.
        since: ticks after this instant count.
        lease, budget: seconds; the fence begins to act 2 % of the lease and the budget before the lease ends.
        deadline: startingDeadlineSeconds. jitter: jitterSeconds.
        missed: missedRunPolicy.
    """

    code: str
    policy: str
    every: int
    offset: int
    since: float
    lease: float
    budget: float
    simulated: bool
    deadline: int | None = None
    missed: str = "RunLatest"
    jitter: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A lease row as it was written, by the trigger. `at` and all other times are the database's."""

    seq: int
    at: float
    key: str
    code: str
    run_key: str
    manual: bool
    status: str
    outcome: str
    token: int
    attempt: int
    owner: str
    adopted: bool
    modified: float
    until: float
    retry: bool
    reason: str
    cluster: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Ticks that did not run, from the ledger: first and last one, how many, and why."""

    code: str
    first: float
    last: float
    count: int
    exact: bool
    kind: str
    reason: str
    decided_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What the recorder heard on a connection, which a workload holds open from its start to its process's end.

    Args:
        since: when the recorder looked before: it happened after that, and not later than `at`.
        what: start, effect, term (it was told to stop), done (its work is finished), end (the connection was closed, by
            the workload or by its death), lost (no answer any more).
        peer: the address from which it came.
        accepted: of an effect.
    """

    seq: int
    since: float
    at: float
    connection: int
    what: str
    peer: str = ""
    key: str = ""
    code: str = ""
    pod: str = ""
    token: int = 0
    attempt: int = 0
    accepted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Harm that was done.

    Args:
        number: in the plan.
        cluster: where, if it was in one. target: to whom: a Pod's name, a holder process, or a part's.
        begin, end: from before it was done until after it was healed.
        note: why it was not done, if it wasn't.
    """

    number: int
    kind: str
    cluster: str
    target: str
    begin: float
    end: float
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known of a run.

    Args:
        until: ticks after this instant aren't looked at.
        addresses: of clusters, by which their workloads are known to the recorder.
        settings: what was run, for the reader.
    """

    jobs: Sequence[Job]
    until: float
    changes: Sequence[Change]
    ranges: Sequence[Range]
    lines: Sequence[Line]
    faults: Sequence[Done]
    addresses: dict[str, str]
    settings: dict[str, Any]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        head = {"until": self.until, "addresses": self.addresses, "settings": self.settings}
        (folder / "run.json").write_text(json.dumps(head, indent=1) + "\n")
        for name, values in self._lists().items():
            _write(folder / f"{name}.jsonl", values)

    @classmethod
    def load(cls, folder: Path) -> Evidence:
        head = json.loads((folder / "run.json").read_text())
        return cls(
            jobs=read(folder / "jobs.jsonl", Job),
            changes=read(folder / "changes.jsonl", Change),
            ranges=read(folder / "ranges.jsonl", Range),
            lines=read(folder / "lines.jsonl", Line),
            faults=read(folder / "faults.jsonl", Done),
            **head,
        )

    def _lists(self) -> dict[str, Sequence[Any]]:
        return {
            "jobs": self.jobs,
            "changes": self.changes,
            "ranges": self.ranges,
            "lines": self.lines,
            "faults": self.faults,
        }


def _write(path: Path, values: Iterable[Any]) -> None:
    path.write_text("".join(json.dumps(asdict(value)) + "\n" for value in values))


def read(path: Path, kind: type[T]) -> list[T]:
    """The records of a file; a last line that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [kind(**json.loads(line)) for line in lines if line.endswith("\n")]
