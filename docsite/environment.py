"""docs/reference/environment.md: every environment variable that a part of LeasedJob reads or sets."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from docsite.table import comments, notice, table
from leasedjob import protocol
from leasedjob.controller import settings
from leasedjob.controller.ping_hosts import PingHosts

_WORKLOAD: dict[str, tuple[str, str]] = {
    protocol.ENV_TYPE: ("`SCHEDULE`", "or `INITIAL`"),
    protocol.ENV_CODE: ("`shop/sync-orders`", "the code of the LeasedJob"),
    protocol.ENV_RUN_KEY: ("`2026-07-20T01:00:00Z`", "which run this is: the tick, in UTC; empty for `INITIAL`"),
    protocol.ENV_SCHEDULED_TIME: ("`2026-07-20T01:00:00Z`", "the tick; empty for a run that somebody asked for"),
    protocol.ENV_IDEMPOTENCY_KEY: ("`v2:…`", "the same for each attempt of the run: for a unique column at the sink"),
    protocol.ENV_ATTEMPT: ("`1`", "the number of this attempt"),
    protocol.ENV_FENCING_TOKEN: (
        "`4711`",
        "larger than that of every earlier attempt and run: let the sink refuse smaller ones",
    ),
    protocol.ENV_SIDECAR_URL: (
        "`http://127.0.0.1:17891`",
        "where the outcome may be reported; see [workload.md](workload.md)",
    ),
    protocol.ENV_CONTAINERS: ("`1`", "how many workload containers the Pod has"),
    protocol.ENV_TRACE_PARENT: ("`00-…`", "the run's trace, where traces are sent"),
    protocol.ENV_ACTIVE_DEADLINE: ("`3600`", "`activeDeadlineSeconds`; empty without one"),
}
_SIDECAR: dict[str, str] = {
    protocol.ENV_LEASE_ID: "the row of the run",
    protocol.ENV_CLAIM_TOKEN: "the token that adopt shows, and which is worth nothing after that",
    protocol.ENV_POD_UID: "the Pod's uid",
    protocol.ENV_POD_NAME: "the Pod's name",
    protocol.ENV_TIMING: "lease, heartbeat, grace period, preStop, as JSON",
    protocol.ENV_USER_PROBES: "the liveness probes that the template had, as JSON",
    protocol.ENV_ADOPT_DEADLINE: "for how many seconds adopt tries",
}
_PROGRAMS = (
    (
        "`LEASEDJOB_DATABASE_URL`",
        "`leasedjob` (all verbs but `exec`), `current_run`",
        "connection string; hides a password from ps",
    ),
    (
        "`LEASEDJOB_CODE`, `LEASEDJOB_RUN_KEY`",
        "`current_run` with a database",
        "which run to take where the call doesn't say it",
    ),
    ("`KUBECONFIG`", "`kubectl leasedjob`", "as for kubectl"),
)
_OPERATOR_ELSEWHERE = {
    "LEASEDJOB_LOG_LEVEL": ("`INFO`", "`logLevel` of the chart"),
    "LEASEDJOB_KOPF_LOG_LEVEL": ("`WARNING`", "the same of the framework"),
}


def page() -> str:
    """The page."""
    known = {value for name, value in vars(protocol).items() if name.startswith("ENV_")}
    if untold := known ^ {*_WORKLOAD, *_SIDECAR}:
        raise ValueError(f"docsite/environment.py doesn't say, or says too much, of {sorted(untold)}")
    return "\n".join(
        (
            notice("docsite/environment.py, leasedjob.protocol and leasedjob.controller.settings"),
            "# Environment variables\n",
            "## Of the workload\n",
            "Set in each workload container, in front of what the template sets.\n",
            table(("variable", "for example", "meaning"), ((f"`{k}`", *v) for k, v in _WORKLOAD.items())),
            "Under `leasedjob run-exclusive` a command gets code, run key, idempotency key, attempt and fencing token.\n",
            "## Read by programs\n",
            table(("variable", "read by", "meaning"), _PROGRAMS),
            "## Of the sidecar's containers\n",
            "Set by the operator; nothing to configure.\n",
            table(("variable", "meaning"), ((f"`{k}`", v) for k, v in _SIDECAR.items())),
            "## Of the operator\n",
            "The chart writes them from its values; a Deployment of your own may set them.\n",
            table(("variable", "default", "meaning"), _operator()),
        )
    )


def _operator() -> Iterator[tuple[str, str, str]]:
    said = comments(settings.Settings)
    defaults: Mapping[str, Any] = {
        f.name: f.default
        if f.default is not MISSING
        else f.default_factory()
        if f.default_factory is not MISSING
        else ""
        for f in fields(settings.Settings)
    }
    for field, variable in _variables():
        text = said.get(field, "") or f"{field.replace('_', ' ')}"
        yield f"`{variable}`", _default(defaults[field]), text
    for variable, (default, text) in _OPERATOR_ELSEWHERE.items():
        yield f"`{variable}`", default, text


def _variables() -> Iterator[tuple[str, str]]:
    """Field -> variable, from the one call in Settings.from_environment that reads them."""
    tree = ast.parse(Path(inspect.getsourcefile(settings) or "").read_text(encoding="utf-8"))
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "cls":
            for keyword in call.keywords:
                for node in ast.walk(keyword.value):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isupper():
                        yield str(keyword.arg), node.value


def _default(value: Any) -> str:
    if value in ("", (), frozenset()) or value == PingHosts():
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, Mapping):
        return "10m and 48Mi, at most 500m and 128Mi"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
