"""The status page's pure parts: markup, words, what a URL asks for, how a job stands, where a run is drawn."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.controller_builders import (
    CODE,
    JOB,
    NAMESPACE,
    OTHER_CLUSTER,
    at,
    job_body,
    pending_pod,
    policy,
    run,
)

from leasedjob.controller import page
from leasedjob.controller.facts import pod_facts
from leasedjob.controller.gauges import JobState
from leasedjob.controller.page import lanes
from leasedjob.controller.page.hosts import allowed, parse_hosts
from leasedjob.controller.page.lanes import Kind
from leasedjob.controller.page.markup import Html, el, join, path
from leasedjob.controller.page.model import Seen, State, job_of, snapshot_of
from leasedjob.controller.page.observe import Kept
from leasedjob.controller.page.query import BadQuery, Query, Sort, cut, select
from leasedjob.controller.page.words import both, brief, relative, span
from leasedjob.controller.settings import Settings, SettingsError
from leasedjob.errors import DatabaseUnavailableError
from leasedjob.lease.rows import CodeState, JobSchedulerStatus, LedgerEntry, Run, Suspension

SUCCESS, FAIL = JobSchedulerStatus.SUCCESS, JobSchedulerStatus.FAIL
NOW = at(7200)

# --- markup -----------------------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """What a browser would make of it."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[Any] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.found.append(data)


def read(markup: str) -> list[Any]:
    reader = Reader()
    reader.feed(markup)
    reader.close()
    return reader.found


@given(st.text())
def test_text_and_attributes_stay_what_they_are(words: str) -> None:
    found = read(el("p", words, title=words))
    hidden = re.sub(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff\ufff9-\ufffb]",
        lambda m: f"\\u{ord(m[0]):04x}",
        words,
    )
    assert found[0] == ("p", {"title": hidden})
    assert "".join(found[1:]) == hidden


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_a_path_stays_on_this_page(namespace: str, name: str, query: str) -> None:
    try:
        made = path("jobs", namespace, name, q=query)
    except UnicodeEncodeError:  # half of a character, which no URL can hold
        return
    assert re.fullmatch(r"/jobs/[^/?#\\\s<>\"']*/[^/?#\\\s<>\"']*(\?q=[^#\\\s<>\"']+)?", made)


@pytest.mark.parametrize("name", ["onclick", "ONLOAD", "style", "srcdoc", "a b", "x=y", ""])
def test_attributes_that_run_or_style_something_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no attribute"):
        el("p", **{name: "x"})


def test_only_markup_is_taken_as_it_is() -> None:
    assert join("<b>", Html("<b>"), None, ["&", [3]]) == "&lt;b&gt;<b>&amp;3"
    assert isinstance(el("br"), Html)


def test_no_other_module_makes_markup_of_text() -> None:
    folder = Path(page.__file__).parent
    for source in folder.rglob("*.py"):
        text = source.read_text(encoding="utf-8")
        if source.name != "markup.py":
            assert not re.search(r"\bHtml\(", text), source
            assert "<" not in "".join(re.findall(r"\"(<[a-z/!][^\"]*)\"", text)), source


def test_the_script_makes_no_markup_of_text() -> None:
    script = (Path(page.__file__).parent / "static" / "page.js").read_text(encoding="utf-8")
    for dangerous in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "http:",
        "https:",
    ):
        assert dangerous not in script
    for file in (Path(page.__file__).parent / "static").iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.|url\(|@import", text), file


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-5, "0 s"), (0.9, "0 s"), (59, "59 s"), (60, "1 min"), (61, "1 min 1 s"), (600, "10 min"), (661, "11 min"),
     (3600, "1 h"), (3660, "1 h 1 min"), (36_000, "10 h"), (40_000, "11 h"), (90_000, "1 d 1 h"), (900_000, "10 d")],
)  # fmt: skip
def test_spans(seconds: float, said: str) -> None:
    assert span(seconds) == said


def test_times() -> None:
    assert relative(NOW + timedelta(seconds=61), NOW) == "in 1 min 1 s"
    assert relative(NOW, NOW) == "0 s ago"
    assert brief(at(0), NOW) == "03:00 UTC"
    assert brief(at(5), NOW) == "03:00:05 UTC"
    assert brief(at(-86_400), NOW) == "19 Jul 03:00 UTC"
    assert brief(at(-86_400 * 300), NOW) == "23 Sep 2025 03:00 UTC"
    assert both(at(0)) == both(at(0), "Etc/UTC") == "2026-07-20 03:00:00 UTC"
    assert both(at(0), "Europe/Berlin") == "2026-07-20 03:00:00 UTC · 2026-07-20 05:00:00 Europe/Berlin"


# --- names and settings -----------------------------------------------------------------------------------------------


def test_hosts() -> None:
    more = parse_hosts(["Jobs.example"])
    assert allowed("jobs.example:443", more)
    assert allowed("localhost", more)
    for host in (
        "jobs.example.evil",
        "evil.jobs.example",
        "jobs.example:",
        "jobs.example:x",
        "jobs_example",
        None,
        "",
        " ",
    ):
        assert not allowed(host, more), host
    for name in ("https://jobs.example", "jobs.example:443", "jobs example", "*", ""):
        with pytest.raises(ValueError, match="no host name"):
            parse_hosts([name])


def test_settings() -> None:
    assert Settings().page_port == 0
    assert Settings.from_environment({}).page_address == "127.0.0.1"
    given = Settings.from_environment(
        {"LEASEDJOB_PAGE_PORT": "8082", "LEASEDJOB_PAGE_ADDRESS": "::1", "LEASEDJOB_PAGE_HOSTS": "jobs.example, b"}
    )
    assert (given.page_port, given.page_address, given.page_hosts) == (8082, "::1", {"jobs.example", "b"})
    for name, value in (("PORT", "x"), ("ADDRESS", "localhost"), ("HOSTS", "https://x")):
        with pytest.raises(SettingsError, match=f"LEASEDJOB_PAGE_{name}"):
            Settings.from_environment({f"LEASEDJOB_PAGE_{name}": value})


# --- how a job stands -------------------------------------------------------------------------------------------------


def seen(*rows: Run, **more: Any) -> Seen:
    values: dict[str, Any] = {
        "namespace": NAMESPACE, "name": JOB, "uid": "u", "created_at": at(-86_400), "generation": 1, "code": CODE,
        "body": job_body(), "policy": policy(), "problem": None, "warning": "", "state": None, "watermark": NOW,
        "spec_differs": False, "loaded": True, "rows": rows, "pods": (), "times": JobState(at(10_800), None, None),
    }  # fmt: skip
    return Seen(**{**values, **more})


def snapshot(*jobs: Seen) -> Any:
    made = [job_of(one, "cluster-a") for one in jobs]
    return snapshot_of(made, cluster="cluster-a", identity="op", now=NOW, taken=0.0, fresh=True)


def state_of(*rows: Run, **more: Any) -> State:
    (row,) = snapshot(seen(*rows, **more)).rows
    return row.state


GOOD = run(SUCCESS, tick=at(3600), started=3600)
BAD = run(FAIL, tick=at(3600), started=3600, reason="Error: 1")
HELD = run(pod_uid="p", tick=at(7200), started=7190)
SUSPENDED_AT = CodeState(
    code=CODE, watermark=NOW, created_at=at(0), counts={}, ledger=(),
    suspension=Suspension(since=at(0), by="cluster-a", runs=3, reason="Error"), ledger_through=None,
    pruned_through=None, registered_uid="u", registered_suspended=False, registered_schedule="", active_elsewhere=False,
    db_now=NOW,
)  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "more", "state"),
    [
        ((), {}, State.NEW),
        ((GOOD,), {}, State.OK),
        ((BAD,), {}, State.FAILING),
        ((BAD, run(SUCCESS, tick=at(7200), started=7100)), {}, State.OK),
        ((GOOD, run(FAIL, tick=at(7200), started=7100, reason="Cancelled")), {}, State.OK),  # somebody's wish
        ((GOOD, HELD), {}, State.RUNNING),
        ((BAD, HELD), {}, State.FAILING),  # and runs again
        ((GOOD, run(tick=at(7200), started=7190)), {}, State.WAITING),
        ((GOOD, run(FAIL, tick=at(7200), started=7190, retry_at=at(7300))), {}, State.RETRYING),
        ((BAD,), {"policy": policy(suspend=True)}, State.SUSPENDED),
        ((GOOD, HELD), {"policy": policy(suspend=True)}, State.RUNNING),
        ((BAD,), {"state": SUSPENDED_AT}, State.HALTED),
        ((GOOD,), {"problem": ("InvalidSpec", "no")}, State.NOT_READY),
        ((GOOD,), {"times": JobState(None, at(3600), at(7100))}, State.OVERDUE),
        ((GOOD,), {"times": JobState(None, at(3600), at(7300))}, State.OK),
        ((GOOD,), {"watermark": at(0)}, State.LATE),  # 04:00 is undecided at 05:00
        ((GOOD, HELD), {"watermark": at(0)}, State.RUNNING),  # which is why it waits
        ((GOOD,), {"watermark": at(0), "policy": policy(suspend=True)}, State.SUSPENDED),
        ((GOOD,), {"watermark": at(3600)}, State.OK),  # 05:00 has come this very second
    ],
)  # fmt: skip
def test_state(rows: tuple[Run, ...], more: dict[str, Any], state: State) -> None:
    assert state_of(*rows, **more) is state


def test_another_object_has_its_code() -> None:
    condition = {"type": "Ready", "status": "False", "reason": "CodeConflict", "message": "taken"}
    assert state_of(GOOD, body=job_body(status={"conditions": [condition]})) is State.NOT_READY


def test_a_run_whose_workload_waits() -> None:
    facts = pod_facts(pending_pod(tick=at(7200)))
    assert facts is not None
    held = replace(HELD, id=run(tick=at(7200)).id, attempt=facts.attempt)
    assert state_of(GOOD, held, pods=(replace(facts, lease_id=str(held.id)),)) is State.WAITING


def test_a_job_counts_for_what_it_does_beside_what_it_is() -> None:
    found = snapshot(seen(BAD, HELD))
    assert found.counts[State.FAILING] == found.counts[State.RUNNING] == 1
    assert found.counts[State.OK] == 0
    assert found.attention == 1
    for state in State:
        assert len(select(found.rows, Query(state=str(state)))) == found.counts[state]


def test_the_next_start_goes_on_between_two_looks() -> None:
    (row,) = snapshot(seen(GOOD, times=JobState(at(7100), None, None))).rows
    assert row.next_start == at(10_800)
    (row,) = snapshot(seen(GOOD, policy=policy(suspend=True))).rows
    assert row.next_start is None


# --- what a URL asks for ----------------------------------------------------------------------------------------------


def rows() -> Any:
    return snapshot(
        seen(GOOD, name="b", code="billing/b"),
        seen(BAD, name="c", code="billing/c", namespace="shop"),
        seen(replace(HELD, holder="east/x/pod-7"), name="A", code="billing/A", times=JobState(at(9000), None, None)),
        seen(name="d", code="billing/d", policy=policy(suspend=True)),
    ).rows


def names(**given: str) -> list[str]:
    return [row.job.seen.name for row in select(rows(), Query.parse(given))]


def test_filter_and_order() -> None:
    assert names() == ["c", "A", "b", "d"]
    assert names(sort="name") == ["A", "b", "d", "c"]
    assert names(sort="name", order="desc") == ["c", "d", "b", "A"]
    assert names(sort="next")[:2] == ["A", "b"]
    assert names(sort="next")[-1] == "d"
    assert names(sort="last")[-2:] == ["A", "d"]
    assert names(ns="shop") == ["c"]
    assert names(state="attention") == ["c"]
    assert names(q="POD-7") == ["A"]
    assert names(q="billing/b") == ["b"]
    assert names(q="0 * * * *") == ["c", "A", "b", "d"]
    assert names(q="none") == []


def test_a_link_says_what_is_shown() -> None:
    query = Query.parse({"q": "a", "ns": "b", "state": "failing", "sort": "next", "order": "desc", "page": "3"})
    assert Query.parse({k: str(v) for k, v in query.parameters(page=3).items() if v}) == query
    assert query.parameters(state="")["page"] is None  # another filter begins at its first page
    assert not any(Query().parameters().values())


PARAMETERS = ("q", "ns", "cluster", "state", "sort", "order", "page", "window", "tick")


@given(st.dictionaries(st.sampled_from(PARAMETERS), st.text()))
def test_any_query_is_read_or_refused(given_: dict[str, str]) -> None:
    try:
        query = Query.parse(given_)
    except BadQuery as e:
        said = str(e)
    else:
        said = "page"
        assert query.page >= 1
        assert query.sort in Sort
    assert said.split()[0] in PARAMETERS


def test_pages() -> None:
    assert cut(range(250), 3)[0] == range(200, 250)
    shown, place = cut(range(250), 99)
    assert (shown, place.page, place.pages, place.first) == (range(200, 250), 3, 3, 201)
    assert cut([], 1)[1].first == 0


# --- what is asked, and kept ------------------------------------------------------------------------------------------


class Answers:
    """Something that can be asked, and held up."""

    def __init__(self) -> None:
        self.asked = 0
        self.go = asyncio.Event()
        self.go.set()
        self.fault: Exception | None = None

    async def __call__(self) -> int:
        self.asked += 1
        number = self.asked
        await self.go.wait()
        if self.fault is not None:
            raise self.fault
        return number


async def test_many_who_ask_at_once_ask_once() -> None:
    answers = Answers()
    kept = Kept(answers, 60, 60)
    assert await asyncio.gather(*(kept.get() for _ in range(20))) == [1] * 20
    assert await kept.get() == 1
    assert answers.asked == 1


@pytest.mark.parametrize("fault", [DatabaseUnavailableError("refused"), TimeoutError(), ZeroDivisionError()])
async def test_what_can_not_be_had_anew_stays_as_it_was(fault: Exception, caplog: pytest.LogCaptureFixture) -> None:
    answers = Answers()
    kept = Kept(answers, 0, 60)
    assert await kept.get() == 1
    answers.fault = fault
    assert await kept.get() == 1
    assert kept.fault
    assert bool(caplog.records) is isinstance(fault, ZeroDivisionError)
    answers.fault = None
    assert await kept.get() == 3
    assert not kept.fault


async def test_nobody_waits_long_for_what_is_slow() -> None:
    answers = Answers()
    answers.go.clear()
    kept = Kept(answers, 0, 60)
    assert await kept.get(0.01) is None
    answers.go.set()
    assert await kept.get() == 1
    answers.go.clear()
    assert await kept.get() == 1  # the last one, while the next is on its way
    assert answers.asked == 2
    await kept.close()


async def test_a_limit_is_kept() -> None:
    answers = Answers()
    answers.go.clear()
    kept = Kept(answers, 60, 0.01)
    assert await kept.get() is None
    assert kept.fault == "no answer in time"


# --- the timeline -----------------------------------------------------------------------------------------------------


def track(*runs: Run, ledger: tuple[LedgerEntry, ...] = (), hours: int = 2) -> lanes.Track:
    on = lanes.axis(NOW, timedelta(hours=hours))
    (job,) = lanes.in_window(runs, ledger, on, NOW)
    return lanes.track(job, on, NOW)


def test_a_bar_shows_when_it_was_claimed_taken_and_ended() -> None:
    ended = replace(GOOD, adopted_at=at(3780), finished_at=at(5400), pod_uid="p")
    (bar,) = track(ended).lanes[0].bars
    assert (bar.earlier, bar.begin, bar.worked, bar.end) == (50.0, 50.0, 52.5, 75.0)
    assert bar.kind is Kind.GOOD
    (bar,) = track(replace(ended, attempt=2, created_at=at(0))).lanes[0].bars
    assert bar.earlier == 0.0


def test_what_lies_outside_is_cut_or_left_out() -> None:
    on = lanes.axis(NOW, timedelta(hours=1))
    assert lanes.in_window([run(SUCCESS, tick=at(0), started=0)], (), on, NOW) == []
    (bar,) = (
        track(replace(HELD, created_at=at(-9000), started_at=at(-9000), expires_at=at(9000)), hours=1).lanes[0].bars
    )
    assert (bar.begin, bar.end) == (0.0, 100.0)
    (bar,) = track(replace(HELD, started_at=NOW, created_at=NOW, expires_at=at(9000))).lanes[0].bars
    assert bar.end == 100.0  # seen, and within the picture
    assert bar.begin < bar.end


def test_a_lane_for_each_cluster_and_bars_that_overlap_above_each_other() -> None:
    other = run(SUCCESS, tick=at(1800), started=1800, cluster=OTHER_CLUSTER)
    long = [replace(run(SUCCESS, tick=at(600 * n), started=600 * n), finished_at=at(7000)) for n in range(1, 7)]
    found = track(*long, other)
    assert [lane.cluster for lane in found.lanes] == ["cluster-a", OTHER_CLUSTER]
    assert found.lanes[0].levels == lanes.STACKED
    assert [bar.level for bar in found.lanes[0].bars] == [0, 1, 2, 3, 3, 3]
    assert found.lanes[1].levels == 1


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (GOOD, Kind.GOOD),
        (BAD, Kind.BAD),
        (replace(BAD, reason="Replaced"), Kind.UNWANTED),
        (replace(BAD, retry_at=NOW), Kind.RETRYING),
        (replace(HELD, expires_at=at(7300)), Kind.RUNNING),
        (replace(HELD, expires_at=at(7100)), Kind.LOST),
        (run(expires=7300), Kind.WAITING),
        (replace(run(expires=7300), job_uid=""), Kind.RUNNING),  # the library's, which no Pod adopts
    ],
)
def test_kinds(row: Run, kind: Kind) -> None:
    assert lanes.kind_of(row, NOW) is kind


def test_ticks_that_did_not_run() -> None:
    entry = LedgerEntry(
        code=CODE, first=at(1800), last=at(5400), count=2, count_is_exact=True, kind="skipped", reason="Overlap",
        decided_by="cluster-a", decided_at=at(5400),
    )  # fmt: skip
    (mark,) = track(ledger=(entry,)).marks
    assert (mark.begin, mark.end) == (25.0, 75.0)


def test_the_axis_has_round_times() -> None:
    end = datetime(2026, 7, 20, 5, 7, tzinfo=UTC)
    labels = [words for _, words in lanes.axis(end, timedelta(hours=6)).labels]
    assert labels == ["20 Jul", "01:00", "02:00", "03:00", "04:00", "05:00"]
    assert [words for _, words in lanes.axis(end, timedelta(hours=1)).labels][-1] == "05:00"
    assert "20 Jul" in [words for _, words in lanes.axis(end, timedelta(days=7)).labels]
    assert all(0 < where < 100 for where, _ in lanes.axis(end, timedelta(days=1)).labels)
