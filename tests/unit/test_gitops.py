"""docs/howto-gitops.md: the health checks in a real Lua, and kstatus' rules, on the status that the operator writes."""

from __future__ import annotations

import re
from typing import Any

import lupa
import pytest
import yaml
from tests.docs_blocks import blocks

from leasedjob.api.v1alpha1 import LeasedJobRunStatus, RunPhase
from leasedjob.controller.status import job_status

from . import controller_builders as b

PAGE = "docs/howto-gitops.md"
MANIFESTS = [yaml.safe_load(block.text) for block in blocks("yaml") if block.page == PAGE]
(CONFIG,) = (m["data"] for m in MANIFESTS if m["kind"] == "ConfigMap")
(FLUX,) = (m["spec"] for m in MANIFESTS if m["kind"] == "Kustomization")
Json = dict[str, Any]


def health(kind: str, body: Json) -> tuple[str, str]:
    """As Argo CD asks: the object is the global `obj`, and the program has no files, no processes and no modules."""
    lua = lupa.LuaRuntime(unpack_returned_tuples=True, register_eval=False, register_builtins=False)
    for name in ("io", "os", "package", "require", "dofile", "loadfile", "debug", "python"):
        lua.globals()[name] = None

    def as_lua(value: Any) -> Any:
        if isinstance(value, dict):
            return lua.table_from({key: as_lua(inner) for key, inner in value.items() if inner is not None})
        if isinstance(value, list):
            return lua.table_from([as_lua(inner) for inner in value])
        return value

    lua.globals().obj = as_lua(body)
    answer = lua.execute(CONFIG[f"resource.customizations.health.leasedjob.io_{kind}"])
    return answer.status, answer.message


def kstatus(body: Json) -> str:
    """What kstatus makes of an object without rules of its own."""
    meta, status = body["metadata"], body.get("status", {})
    if "deletionTimestamp" in meta:
        return "Terminating"
    if "observedGeneration" in status and status["observedGeneration"] != meta["generation"]:
        return "InProgress"
    conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
    if conditions.get("Reconciling") == "True":
        return "InProgress"
    if conditions.get("Stalled") == "True":
        return "Failed"
    return "Current" if conditions.get("Ready", "True") == "True" else "InProgress"


def job(generation: int = 1, **spec: Any) -> Json:
    """A LeasedJob as the operator sees and answers it."""
    body = b.job_body()
    body["spec"] = {**body["spec"], **spec}
    entry = b.entry(body)
    return {
        "metadata": {"name": "hello", "generation": generation},
        "spec": body["spec"],
        "status": job_status(entry, b.view(now=10), None),
    }


def test_a_job_that_is_accepted() -> None:
    assert health("LeasedJob", job())[0] == "Healthy"
    assert kstatus(job()) == "Current"


def test_a_job_that_nobody_has_seen() -> None:
    new = job()
    del new["status"]
    edited = job(generation=2)
    for body in (new, edited):
        assert health("LeasedJob", body)[0] == "Progressing"
    assert kstatus(edited) == "InProgress"


def test_a_job_with_a_mistake() -> None:
    bad = job(timeZone="Europe/Room")
    status, message = health("LeasedJob", bad)
    assert status == "Degraded"
    assert "Europe/Room" in message
    assert kstatus(bad) == "InProgress"  # why the page has an expression for Flux


def test_a_job_that_is_suspended() -> None:
    body = job(suspend=True)
    assert health("LeasedJob", body)[0] == "Suspended"
    assert kstatus(body) == "Current"


@pytest.mark.parametrize("phase", list(RunPhase))
def test_a_run(phase: RunPhase) -> None:
    status = LeasedJobRunStatus(phase=phase, reason="Reason").model_dump(mode="json", by_alias=True, exclude_none=True)
    wanted = {RunPhase.PENDING: "Progressing", RunPhase.RUNNING: "Progressing", RunPhase.SUCCEEDED: "Healthy"}
    assert health("LeasedJobRun", {"metadata": {}, "status": status})[0] == wanted.get(phase, "Degraded")
    assert health("LeasedJobRun", {"metadata": {}})[0] == "Progressing"
    (rule,) = (r for r in FLUX["healthCheckExprs"] if r["kind"] == "LeasedJobRun")
    ended_badly = set(re.findall(r"'(\w+)'", rule["failed"]))
    assert (phase in ended_badly) == (wanted.get(phase, "Degraded") == "Degraded")
    assert (rule["current"] == f"status.phase == '{phase}'") == (phase is RunPhase.SUCCEEDED)
