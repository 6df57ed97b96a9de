"""What a process uses, read from /proc."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import process_time


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one process, in MiB."""

    resident: float
    unshared: float  # private pages: what one more such process costs


def memory(pid: int) -> Memory:
    """What a process has now."""
    sizes: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0])
    return Memory(sizes["Rss"] / 1024, (sizes["Private_Clean"] + sizes["Private_Dirty"]) / 1024)


def processor_seconds(pid: int) -> float:
    """What the process's living threads have used so far; finer than the ticks of /proc/PID/stat."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text(encoding="ascii").split()[0]) for task in tasks) / 1e9


class Meter:
    """Processor seconds of this process and of a database session, by name: what a busy machine can't stretch much."""

    def __init__(self) -> None:
        self._used: dict[str, list[float]] = {}

    @contextmanager
    def of(self, name: str, session: int) -> Iterator[None]:
        """Counts what the block uses; `session` is the process id of the database's backend."""
        before = process_time() + processor_seconds(session)
        yield
        used = process_time() + processor_seconds(session) - before
        self._used.setdefault(name, []).append(used)

    def after_warm_up(self, factor: float, order: Iterable[str]) -> dict[str, list[float]]:
        """All but the first of each name, times `factor`; in this order, names that weren't metered left out."""
        return {
            f"{name}, processor": [value * factor for value in self._used[name][1:]]
            for name in order
            if name in self._used
        }
