"""The table of accepted and refused objects, which models and API server are both tested with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

TABLE = yaml.safe_load((Path(__file__).parent / "crd-rules.yaml").read_text(encoding="utf-8"))


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in change.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def spec_of(case: dict[str, Any]) -> dict[str, Any]:
    """The spec that a case describes as a change of the table's base."""
    base = copy.deepcopy(TABLE["base"])
    pod = merged(base["template"]["spec"], case.get("pod") or {})
    if "container" in case:
        pod["containers"][0] = merged(pod["containers"][0], case["container"])
    base["template"]["spec"] = pod
    if "metadata" in case:
        base["template"]["metadata"] = case["metadata"]
    return merged(base, case.get("spec") or {})
