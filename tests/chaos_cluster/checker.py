"""What became of each tick, and which promises were broken, from the records alone. Pure.

It shares no code with the package: what is due, when a fence begins to act and what a key looks like is said here by
itself. Of the leases speaks the judge of the contention suite (`tests.chaos.history`), which knows as little of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final

from tests.chaos import history
from tests.chaos_cluster.records import Change, Done, Evidence, Job, Line, Range

MINUTE: Final = 60
RATE_ERROR: Final = 0.02  # of a clock
KUBELET_BACK_SECONDS: Final = 15.0  # after which a kubelet that came back looks at its Pods again
HEALED_SECONDS: Final = (
    60.0  # and the fence's budget: for so long after a fault it still excuses what it has left behind
)
ROUND: Final = 1.0  # seconds by which two instants of one clock are taken for the same
# Faults that are outside what G2 promises: to the workload's node, to its whole Pod, to the process that the holder is.
NODE_FAULTS: Final = frozenset({"kubelet-kill", "kubelet-freeze", "node-freeze"})
POD_FAULTS: Final = frozenset({"pod-freeze", "holder-freeze"})


class Broken(StrEnum):
    """A promise that was broken."""

    UNACCOUNTED = "tick unaccounted for"
    TWICE = "tick accounted for twice"
    NOT_DUE = "ran or recorded without being due"
    EARLY = "claimed before its tick"
    LATE = "first claimed after its starting deadline"
    COUNT = "a range that doesn't hold what it says"
    UNFOUNDED = "a reason that can't be"
    OPEN = "run not ended"
    LEASE = "lease"  # a rule of tests.chaos.history; the text names it
    OVERLAP = "workloads overlap"
    OLD_TOKEN = "old token let in"
    UNKNOWN_TOKEN = "token that nobody was given"
    RAN_AGAIN = "ran again after SUCCESS"
    NO_START = "SUCCESS without a workload"
    NOT_DONE = "SUCCESS of work that wasn't finished"


@dataclass(frozen=True, slots=True)
class Violation:
    broken: Broken
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.broken}: {self.key}: {self.text}"


@dataclass(frozen=True, slots=True)
class Excused:
    """What is no violation, because a condition of G2 didn't hold: and which."""

    key: str
    text: str
    fault: int
    kind: str


@dataclass(slots=True)
class Tally:
    """What became of the ticks of one kind of job."""

    jobs: int = 0
    due: int = 0
    run: Counter[str] = field(default_factory=Counter)  # by how it ended
    not_run: Counter[str] = field(default_factory=Counter)  # by kind and reason
    unaccounted: int = 0
    attempts: int = 0
    taken_over: int = 0  # attempts whose predecessor's lease had run out
    elsewhere: int = 0  # attempts in another cluster than the one before
    workloads: int = 0
    effects: int = 0
    refused: int = 0
    late: int = 0  # let in although a newer token had been given, of which the sink hadn't heard

    def to_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: dict(v) if isinstance(v, Counter) else v for name, v in values.items()}


@dataclass(slots=True)
class Verdict:
    """Everything that the records say."""

    real: Tally = field(default_factory=Tally)
    simulated: Tally = field(default_factory=Tally)
    violations: list[Violation] = field(default_factory=list)
    excused: list[Excused] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)  # faults that could not be done

    def say(self, broken: Broken, key: str, text: str) -> None:
        self.violations.append(Violation(broken, key, text))

    def found(self) -> set[Broken]:
        return {violation.broken for violation in self.violations}

    def to_dict(self) -> dict[str, Any]:
        return {
            "LeasedJobs": self.real.to_dict(),
            "holders": self.simulated.to_dict(),
            "violations": [asdict(violation) for violation in self.violations],
            "outside G2's conditions": [asdict(excused) for excused in self.excused],
            "faults": dict(self.faults),
            "faults left out": dict(self.left_out),
        }


@dataclass(slots=True)
class Workload:
    """One process that worked under a token, as the recorder heard it."""

    first: Line
    last: Line  # its end, or the latest that was heard of it
    cluster: str
    done: bool = False
    ended: bool = False

    @property
    def token(self) -> int:
        return self.first.token

    @property
    def start(self) -> float:
        """The latest instant at which it can have started."""
        return self.first.at

    @property
    def alive(self) -> float:
        """The latest instant at which it certainly was still there."""
        return self.last.since if self.ended else self.last.at


def judge(evidence: Evidence) -> Verdict:
    """The verdict on a run."""
    verdict = Verdict()
    for fault in evidence.faults:
        (verdict.left_out if fault.note else verdict.faults)[fault.kind] += 1
    by_code: defaultdict[str, list[Change]] = defaultdict(list)
    for change in sorted(evidence.changes, key=lambda change: change.seq):
        by_code[change.code].append(change)
    ranges: defaultdict[str, list[Range]] = defaultdict(list)
    for r in evidence.ranges:
        ranges[r.code].append(r)
    workloads = _workloads(evidence)
    jobs = {job.code: job for job in evidence.jobs}
    for stranger in sorted({*by_code, *ranges} - set(jobs)):
        verdict.say(Broken.NOT_DUE, stranger, "nobody asked for this job")
    for job in evidence.jobs:
        tally = verdict.simulated if job.simulated else verdict.real
        tally.jobs += 1
        _account(verdict, tally, job, by_code[job.code], ranges[job.code], evidence.until)
        mine = [workload for workload in workloads if workload.first.code == job.code]
        tally.workloads += len(mine)
        _judge_leases(verdict, tally, job, by_code[job.code])
        _judge_overlaps(verdict, job, by_code[job.code], mine, evidence.faults)
        _judge_successes(verdict, job, by_code[job.code], mine, evidence.faults)
    _judge_effects(verdict, jobs, by_code, evidence.lines)
    names = {change.key: f"{change.code} {change.run_key}" for change in evidence.changes}
    verdict.violations = [replace(each, key=names.get(each.key, each.key)) for each in verdict.violations]
    verdict.excused = [replace(each, key=names.get(each.key, each.key)) for each in verdict.excused]
    return verdict


# --- ticks -----------------------------------------------------------------------------------------------------------


def ticks_due(job: Job, through: float) -> list[int]:
    """Seconds since the epoch of each tick after `job.since`, up to and with `through`."""
    first = int(job.since // MINUTE) + 1
    return [m * MINUTE for m in range(first, int(through // MINUTE) + 1) if m % job.every == job.offset]


def tick_of(run_key: str) -> int | None:
    """The tick that a run key names; None for one that names none."""
    try:
        at = datetime.strptime(run_key, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(at.timestamp())


def _clock(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S.%f}"[:-3]


def _rows(changes: Sequence[Change]) -> dict[str, list[Change]]:
    """The writes to each row, by run key."""
    rows: defaultdict[str, list[Change]] = defaultdict(list)
    for change in changes:
        rows[change.run_key].append(change)
    return rows


def _over(change: Change) -> bool:
    return change.status == "SUCCESS" or (change.status == "FAIL" and not change.retry)


def _account(
    verdict: Verdict, tally: Tally, job: Job, changes: Sequence[Change], ranges: Sequence[Range], until: float
) -> None:
    latest = max([until, *(r.last for r in ranges), *(change.at for change in changes)])
    due = ticks_due(job, latest)
    every = set(due)
    places: Counter[int] = Counter()
    rows = _rows(changes)
    for run_key, writes in rows.items():
        tick = tick_of(run_key)
        if tick is None or tick not in every:
            verdict.say(Broken.NOT_DUE, job.code, f"run {run_key!r} is no tick of it")
            continue
        places[tick] += 1
        claimed = writes[0].at
        if claimed < tick:
            verdict.say(Broken.EARLY, job.code, f"{run_key} was claimed at {_clock(claimed)}")
        if job.deadline is not None and claimed > tick + job.jitter + job.deadline + ROUND:
            verdict.say(
                Broken.LATE,
                job.code,
                f"{run_key} was claimed at {_clock(claimed)}, its starting deadline is {job.deadline} s",
            )
        ended = writes[-1].status == "SUCCESS" if job.simulated else _over(writes[-1])
        if not ended and (tick <= until or not job.simulated):  # holders leave at once what comes after the last tick
            verdict.say(
                Broken.OPEN,
                job.code,
                f"{run_key} is {writes[-1].status} {writes[-1].reason} at the end, attempt {writes[-1].attempt}",
            )
        if tick <= until:
            tally.run[_ending(writes[-1])] += 1
    for r in ranges:
        inside = due[bisect_left(due, r.first) : bisect_right(due, r.last)]
        if len(inside) != r.count or not r.exact:
            verdict.say(Broken.COUNT, job.code, f"{_text(r)} says {r.count}, and {len(inside)} are due in it")
        if problem := _unfounded(job, r, inside, due, rows):
            verdict.say(Broken.UNFOUNDED, job.code, f"{_text(r)}: {problem}")
        for tick in inside:
            places[tick] += 1
            if tick <= until:
                tally.not_run[f"{r.kind} {r.reason}"] += 1
    for tick in due:
        if tick > until:
            break
        tally.due += 1
        if places[tick] == 0:
            tally.unaccounted += 1
            verdict.say(Broken.UNACCOUNTED, job.code, f"{_clock(tick)} has no run and is in no range")
    for tick, number in sorted(places.items()):
        if number > 1:
            verdict.say(Broken.TWICE, job.code, f"{_clock(tick)} has {number} places in runs and ranges")


def _ending(last: Change) -> str:
    if last.status == "SUCCESS":
        return "SUCCESS"
    if not _over(last):
        return "open"
    return f"FAIL {last.reason or last.outcome}".strip()


def _text(r: Range) -> str:
    return f"{r.kind} {r.reason} {_clock(r.first)} to {_clock(r.last)}"


def _unfounded(job: Job, r: Range, inside: Sequence[int], due: Sequence[int], rows: dict[str, list[Change]]) -> str:
    """Why this reason can't be that of these ticks; empty where it can."""
    match r.reason:
        case "Overlap":
            if job.policy != "Forbid":
                return f"the policy is {job.policy}"
            for tick in inside:
                if not _active(rows, tick, r.decided_at):
                    return f"no other run was active between {_clock(tick)} and {_clock(r.decided_at)}"
        case "StartingDeadline":
            if job.deadline is None:
                return "it has no starting deadline"
            if r.decided_at < r.last + job.deadline - ROUND:
                return f"decided at {_clock(r.decided_at)}, {job.deadline} s had not passed"
        case "MissedRunPolicy":
            place = bisect_right(due, r.last)
            after = due[place] if place < len(due) else float("inf")
            if job.missed == "RunAll" or (job.missed == "RunLatest" and after > r.decided_at + ROUND):
                return f"the policy is {job.missed}, and the next tick is at {_clock(min(after, 4e9))}"
        case _:
            return "nothing that was done explains it"
    return ""


def _active(rows: dict[str, list[Change]], tick: int, decided: float) -> bool:
    """Whether a run of another tick was active at some time between a tick and when it was decided."""
    for run_key, writes in rows.items():
        over = next((change.at for change in writes if _over(change)), float("inf"))
        if tick_of(run_key) != tick and writes[0].at <= decided and over >= tick:
            return True
    return False


# --- leases ----------------------------------------------------------------------------------------------------------


def _micros(at: float) -> int:
    return round(at * 1_000_000)


def _judge_leases(verdict: Verdict, tally: Tally, job: Job, changes: Sequence[Change]) -> None:
    told = history.History(
        changes=[
            history.Change(
                seq=change.seq,
                key=change.key,
                group=change.code,
                status=change.status,
                token=change.token,
                attempt=change.attempt,
                owner=change.owner,
                adopted=change.adopted,
                modified=_micros(change.modified),
                until=_micros(change.until),
            )
            for change in changes
        ],
        exclusive=job.policy in ("Forbid", "Replace"),
        complete=False,
        effects_expected=False,
    )
    for violation in told.violations():
        broken = Broken.LEASE
        if violation.broken is history.Broken.SUCCESS_NOT_FINAL:
            broken = Broken.RAN_AGAIN
        verdict.say(broken, violation.key, f"{violation.broken}: {violation.text}")
    for writes in _rows(changes).values():
        tally.attempts += 1
        for old, new in pairwise(writes):
            if new.token == old.token:
                continue
            tally.attempts += 1
            tally.taken_over += old.status == "RUNNING"
            tally.elsewhere += old.cluster != new.cluster


# --- workloads -------------------------------------------------------------------------------------------------------


def _workloads(evidence: Evidence) -> list[Workload]:
    """Each connection that told of a start."""
    clusters = {address: name for name, address in evidence.addresses.items()}
    found: dict[int, Workload] = {}
    for line in sorted(evidence.lines, key=lambda line: line.seq):
        workload = found.get(line.connection)
        if workload is None:
            if line.what == "start":
                found[line.connection] = Workload(line, line, clusters.get(line.peer, ""))
            continue
        if line.what == "lost":  # when it ended isn't known, only when it was last heard of
            continue
        workload.last = line
        workload.ended = line.what == "end"
        workload.done = workload.done or line.what == "done"
    return list(found.values())


def _judge_overlaps(
    verdict: Verdict, job: Job, changes: Sequence[Change], workloads: Sequence[Workload], faults: Sequence[Done]
) -> None:
    exclusive = job.policy in ("Forbid", "Replace")
    ordered = sorted(workloads, key=lambda workload: workload.token)
    for number, old in enumerate(ordered):
        for new in ordered[number + 1 :]:
            if not exclusive and new.first.key != old.first.key:
                continue
            both = max(old.start, new.start)
            if both > min(old.alive, new.alive) or old.first.connection == new.first.connection:
                continue
            text = (
                f"token {old.token} ({old.first.pod}, {_clock(old.start)} to {_clock(old.alive)}) beside token "
                f"{new.token} ({new.first.pod}, {_clock(new.start)} to {_clock(new.alive)})"
            )
            end = min(old.alive, new.alive)
            _blame(verdict, Broken.OVERLAP, old.first.key, text, job, changes, old, (both, end), faults)


def _blame(
    verdict: Verdict, broken: Broken, key: str, text: str, job: Job, changes: Sequence[Change],
    old: Workload, span: tuple[float, float], faults: Sequence[Done],
) -> None:  # fmt: skip
    """A violation, unless something was done to the old one that G2 doesn't cover."""
    fault = outside(job, changes, old, span, faults)
    if fault is None:
        verdict.say(broken, key, text)
    else:
        verdict.excused.append(Excused(key, f"{broken}: {text}", fault.number, fault.kind))


def outside(
    job: Job, changes: Sequence[Change], old: Workload, span: tuple[float, float], faults: Sequence[Done]
) -> Done | None:
    """The fault for which G2 doesn't hold: one to the old workload's kubelet, or to its Pod as a whole, while the fence
    had to act: from when its holder may first have said no, until the overlap began. One that was healed long before
    the overlap's end excuses nothing."""
    at, end = span
    mine = [c for c in changes if c.key == old.first.key and c.token == old.token]
    running = [c.until for c in mine if c.status == "RUNNING"]
    ended = [c.at for c in mine if c.status != "RUNNING"]
    expiry = min([*running[-1:], *ended[:1], at])
    acts = expiry - RATE_ERROR * job.lease - job.budget
    for fault in faults:
        if fault.note:
            continue
        back = fault.end + (KUBELET_BACK_SECONDS if fault.kind in NODE_FAULTS else 0)
        if not (fault.begin <= at and back >= acts and end <= back + job.budget + HEALED_SECONDS):
            continue
        if fault.kind in NODE_FAULTS and fault.cluster == old.cluster:
            return fault
        if fault.kind in POD_FAULTS and fault.target == old.first.pod:
            return fault
    return None


def _judge_successes(
    verdict: Verdict, job: Job, changes: Sequence[Change], workloads: Sequence[Workload], faults: Sequence[Done]
) -> None:
    by_key: defaultdict[str, list[Workload]] = defaultdict(list)
    for workload in workloads:
        by_key[workload.first.key].append(workload)
    for change in changes:
        if change.status != "SUCCESS":
            continue
        mine = [workload for workload in by_key[change.key] if workload.token == change.token]
        if not mine:
            verdict.say(Broken.NO_START, change.key, f"token {change.token}, and nobody heard of its workload")
        elif not any(workload.done for workload in mine):
            verdict.say(Broken.NOT_DONE, change.key, f"token {change.token}, whose workload never said that it is done")
        for other in by_key[change.key]:
            if other.token != change.token and other.first.since > change.at:
                started = f"token {other.token} started at {_clock(other.start)}"
                text = f"{started}, SUCCESS under {change.token} at {_clock(change.at)}"
                _blame(
                    verdict, Broken.RAN_AGAIN, change.key, text, job, changes, other, (other.start, other.start), faults
                )  # fmt: skip


# --- effects ---------------------------------------------------------------------------------------------------------


def _judge_effects(
    verdict: Verdict, jobs: dict[str, Job], by_code: dict[str, list[Change]], lines: Sequence[Line]
) -> None:
    grants: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    given: set[tuple[str, int]] = set()
    for changes in by_code.values():
        for change in changes:
            if (change.key, change.token) not in given:
                given.add((change.key, change.token))
                grants[change.key].append((change.token, change.at))
    newest: dict[str, int] = {}
    for line in sorted(lines, key=lambda line: line.seq):
        if line.what not in ("start", "effect"):
            continue
        if line.what == "effect":
            job = jobs.get(line.code)
            tally = verdict.simulated if job is not None and job.simulated else verdict.real
            tally.effects += 1
            tally.refused += not line.accepted
            if line.accepted and line.token < newest.get(line.key, 0):
                text = f"token {line.token} at {_clock(line.at)}, after token {newest[line.key]}"
                verdict.say(Broken.OLD_TOKEN, line.key, text)
            elif line.accepted:
                tally.late += any(token > line.token and at < line.since for token, at in grants[line.key])
        if (line.key, line.token) not in given:
            verdict.say(Broken.UNKNOWN_TOKEN, line.key, f"{line.what} under token {line.token}")
        newest[line.key] = max(line.token, newest.get(line.key, 0))
