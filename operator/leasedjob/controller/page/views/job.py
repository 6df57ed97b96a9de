"""All that is known of one job."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from leasedjob.api.v1alpha1 import Explanation
from leasedjob.controller.facts import PodFacts, parse_time
from leasedjob.controller.page.markup import Child, Html, el, join, path
from leasedjob.controller.page.model import (
    About,
    Job,
    Row,
)
from leasedjob.controller.page.query import Window
from leasedjob.controller.page.views.frame import Shown, frame
from leasedjob.controller.page.views.not_run import ledger_table
from leasedjob.controller.page.views.parts import (
    badge,
    cell,
    field,
    holder_of,
    key_of,
    outcome,
    row,
    short_reason,
    table,
    took,
    why,
)
from leasedjob.controller.page.words import NONE, left, when
from leasedjob.lease.rows import JobSchedulerStatus, Run
from leasedjob.schedule import load_zone


def draw(shown: Shown, found: Row, about: About | None, explanation: Explanation | str | None) -> str:
    """All that is known of one job.

    Args:
        about: None: the database has not said.
        explanation: of `query.tick`; a text says why there is none.
    """
    job, seen, now = found.job, found.job.seen, shown.now
    spec, status = seen.body.get("spec") or {}, seen.body.get("status") or {}
    reason = short_reason(found)
    main = join(
        el("p", el("a", "Jobs", href=path("")), " / ", el("a", seen.namespace, href=path("", ns=seen.namespace)),
           class_="crumbs"),
        el("h1", seen.name, " ", badge(found.state)),
        el("p", reason, class_="why large") if reason else None,
        _facts(
            [
                ("Schedule", join(el("code", job.schedule), f" {job.zone}")),
                ("Next run", when(found.next_start, now, job.zone)),
                ("Last success", when(seen.times.success if seen.times else None, now, job.zone)),
                ("Success due by", when(seen.times.deadline if seen.times else None, now, job.zone)),
                ("Concurrency", str(spec.get("concurrencyPolicy") or "Forbid")),
                ("Code", el("code", seen.code or NONE)),
            ]
        ),
        _now_section(job, now),
        _why_form(shown, seen.namespace, seen.name, explanation),
        el("h2", "Recent runs", id="runs"),
        table(
            "Recent runs",
            ["Run", "Outcome", "Attempt", "Began", "Took", "Holder", "Reason"],
            [part for run in job.runs for part in _run_rows(run, job, now)],
            key="runs-table",
            empty="It has not run yet." if seen.loaded else "Its runs have not been read yet.",
        ),
        el("p", el("a", "Its timeline", href=path("timeline", q=seen.code or seen.name, window=Window.DAY))),
        el("h2", "Ticks that did not run", id="ledger"),
        el("p", _counts(status), class_="sub") if _counts(status) else None,
        ledger_table((seen.state.ledger if seen.state else ()), shown, with_job=False,
                      empty="Every tick that is known of has run."),
        el("h2", "Next ticks", id="next"),
        _next(job, found, now),
        el("h2", "Conditions", id="conditions"),
        table(
            "Conditions",
            ["Type", "Status", "Reason", "Message", "Since"],
            [_condition(c, now) for c in job.conditions],
            key="conditions-table",
            empty="No operator has looked at it yet.",
        ),
        _about(about, shown),
    )  # fmt: skip
    return frame(f"{seen.namespace}/{seen.name}", main, shown=shown, here=None)


def _facts(pairs: Iterable[tuple[str, Child]]) -> Html:
    return el("dl", [el("div", el("dt", name), el("dd", value)) for name, value in pairs], class_="facts")


def _now_section(job: Job, now: datetime) -> Child:
    if not job.active:
        return None
    return join(
        el("h2", "Now", id="now"),
        [
            el(
                "div",
                outcome(run, job),
                el("p", f"Run {key_of(run)}, attempt {run.attempt}, held by ", el("code", holder_of(run)), "."),
                el("p", _lease_left(run, now)),
                el("p", why(run, job), class_="why") if why(run, job) else None,
                el("p", f"It is to stop: {run.stop_reason or 'somebody asked'}.") if run.stop_requested_at else None,
                class_="card",
                data_key=f"active-{run.id}",
            )
            for run in job.active
        ],
    )


def _lease_left(run: Run, now: datetime) -> Child:
    if run.status is JobSchedulerStatus.RUNNING:
        return join("Lease: ", left(run.expires_at, now), ", unless a heartbeat extends it.")
    if run.retry_at is not None:
        return join("Next attempt: ", when(run.retry_at, now))
    return None


def _why_form(shown: Shown, namespace: str, name: str, explanation: Explanation | str | None) -> Html:
    tick = shown.query.tick
    written = f"{tick:%Y-%m-%dT%H:%M:%SZ}" if tick else ""
    answer: Child = None
    if isinstance(explanation, str):
        answer = el("p", explanation, class_="answer")
    elif explanation is not None:
        answer = el("p", el("strong", str(explanation.verdict)), f" ({explanation.reason}): {explanation.message}.",
                    class_="answer")  # fmt: skip
    return el(
        "section",
        el("h2", "Why did a tick run, or not?", id="why"),
        el(
            "form",
            field(
                "tick",
                "Tick, in UTC",
                el("input", type="text", id="tick", name="tick", value=written, placeholder="2026-07-20T03:00:00Z",
                   pattern=r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", autocomplete="off", required=True, size=22),
            ),
            el("button", "Ask", type="submit"),
            method="get",
            action=path("jobs", namespace, name),
            class_="filters ask",
        ),
        answer,
        aria_labelledby="why",
    )  # fmt: skip


def _run_rows(run: Run, job: Job, now: datetime) -> Iterable[Html]:
    reason = why(run, job)
    more = [f"{n} {word}" for n, word in ((run.failures, "failed"), (run.interruptions, "interrupted")) if n]
    yield row(
        cell("Run", el("code", key_of(run)), el("span", " asked for", class_="sub") if run.manual else None, head=True),
        cell("Outcome", outcome(run, job)),
        cell("Attempt", str(run.attempt), " ", el("span", ", ".join(more), class_="sub")),
        cell("Began", when(run.adopted_at or run.started_at, now, job.zone)),
        cell("Took", el("span", took(run, now), class_="took")),
        cell("Holder", el("span", holder_of(run), class_="clip", title=holder_of(run)), " ",
             el("span", f"token {run.fencing_token}", class_="sub")),
        cell("Reason", el("span", reason, class_="why")),
        key=f"run-{run.id}",
        id=f"run-{run.id}",
    )  # fmt: skip
    for pod in job.attempts(run):
        if pod.attempt != run.attempt:
            yield _attempt_row(pod, now)


def _attempt_row(pod: PodFacts, now: datetime) -> Html:
    """An earlier attempt, as its Pod tells of it."""
    end = next((c.end for c in pod.workload if c.end), None)
    told = f"{end.reason or 'Ended'}, exit code {end.exit_code}" if end else pod.reason or pod.phase
    return row(
        cell("Run", el("span", "earlier attempt", class_="sub"), head=True),
        cell("Outcome", told),
        cell("Attempt", str(pod.attempt)),
        cell("Began", when(pod.created_at, now)),
        cell("Took", NONE),
        cell("Holder", el("span", f"{pod.node or 'no node'}/{pod.name}", class_="clip")),
        cell("Reason", el("span", end.message if end else pod.message, class_="why")),
        key=f"pod-{pod.uid}",
        class_="earlier",
    )


def _next(job: Job, found: Row, now: datetime) -> Child:
    policy = job.seen.policy
    if policy is None or policy.schedule is None:
        return el("p", "It has no schedule that counts.", class_="empty")
    if found.next_start is None:
        return el("p", "No tick starts a run as things are.", class_="empty")
    zone = load_zone(policy.schedule.time_zone)
    rows = []
    for tick in policy.schedule.ahead(now, 5):
        start = policy.schedule.start_of(tick)
        rows.append(
            row(
                cell("Tick", el("code", f"{tick:%Y-%m-%dT%H:%M:%SZ}"), head=True),
                cell("Starts", when(start, now, job.zone)),
                cell("There", f"{start.astimezone(zone):%a %d %b %Y %H:%M:%S} {policy.schedule.time_zone}"),
                key=f"next-{tick.timestamp():.0f}",
            )
        )
    there = f"In {policy.schedule.time_zone}"
    return table("Next ticks", ["Tick", "Starts", there], rows, key="next-table", empty="No further tick comes.")


def _condition(c: Any, now: datetime) -> Html:

    return row(
        cell("Type", str(c.get("type", "")), head=True),
        cell("Status", str(c.get("status", ""))),
        cell("Reason", str(c.get("reason", ""))),
        cell("Message", el("span", str(c.get("message", "")), class_="why")),
        cell("Since", when(parse_time(c.get("lastTransitionTime")), now)),
        key=f"condition-{c.get('type')}",
    )


def _counts(status: Any) -> str:
    found = [
        f"{int(status[name]):,} {word}"
        for name, word in (("skippedTicks", "skipped"), ("missedTicks", "missed"), ("droppedTicks", "dropped"))
        if status.get(name)
    ]
    return f"In all: {', '.join(found)}." if found else ""


def _about(about: About | None, shown: Shown) -> Html:
    if about is None:
        return join(el("h2", "Clusters"), el("p", "The database has not said which clusters have it.", class_="empty"))
    return join(
        el("h2", "Clusters", id="where"),
        table(
            "Clusters that have this job",
            ["Cluster", "Object", "Policy", "Suspended"],
            [
                row(
                    cell("Cluster", el("code", r.cluster), head=True),
                    cell("Object", f"{r.namespace}/{r.name}"),
                    cell("Policy", r.policy),
                    cell("Suspended", "yes" if r.suspended else "no"),
                    key=f"where-{r.cluster}",
                )
                for r in about.registered
            ],
            key="where-table",
            empty="No cluster has registered it with the database.",
        ),
        el("h2", "What people did", id="audit"),
        table(
            "Audit lines",
            ["When", "Action", "Run", "Asked by", "Why"],
            [
                row(
                    cell("When", when(a.at, shown.now), head=True),
                    cell("Action", f"{a.action}: {a.did}"),
                    cell("Run", f"{a.run_key or NONE}{f', attempt {a.attempt}' if a.attempt else ''}"),
                    cell("Asked by", f"{a.asked_by} ({a.cluster})"),
                    cell("Why", el("span", a.why, class_="why")),
                    key=f"audit-{number}-{a.at.timestamp()}",
                )
                for number, a in enumerate(about.audit)
            ],
            key="audit-table",
            empty="Nobody has released, cancelled or forgotten a run.",
        ),
    )
