"""Which fields a schema has: the API server's beside this version's, and an object's beside this version's. Pure.

The definitions and the operator are upgraded one after the other. An API server whose definition is older drops what it
doesn't know without a word; an operator that is older would pass over a field that the user relies on. Neither may
happen in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

from leasedjob.api.crd import KINDS
from leasedjob.api.structural import PRESERVE, structural
from leasedjob.api.v1alpha1 import LeasedJobRunSpec, LeasedJobSpec

Json = Mapping[str, Any]
_GROUP_VERSION_KIND: Final = "x-kubernetes-group-version-kind"


def lacking(wanted: Json, served: Json, path: str = "") -> Iterator[str]:
    """The fields of `wanted`, a structural schema, that `served` doesn't have and would prune."""
    if served.get(PRESERVE):
        return
    there: Json = served.get("properties") or {}
    for name, child in (wanted.get("properties") or {}).items():
        at = f"{path}.{name}" if path else name
        if name in there:
            yield from lacking(child, there[name], at)
        else:
            yield at
    for word, mark in (("items", "[]"), ("additionalProperties", ".*")):
        child = wanted.get(word)
        if isinstance(child, Mapping) and child:
            yield from lacking(child, served.get(word) or {}, path + mark)


def unknown(schema: Json, value: Any, path: str = "") -> Iterator[str]:
    """The fields in `value` that `schema`, a structural one, doesn't have."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown(schema.get("items") or {}, item, f"{path}[{index}]")
        return
    if not isinstance(value, Mapping):
        return
    known: Json = schema.get("properties") or {}
    others = schema.get("additionalProperties")
    for name, child in value.items():
        at = f"{path}.{name}" if path else str(name)
        if name in known:
            yield from unknown(known[name], child, at)
        elif isinstance(others, Mapping):
            yield from unknown(others, child, at)
        elif not schema.get(PRESERVE) and child is not None:
            yield at


def unknown_in_spec(spec: Any) -> list[str]:
    """The fields of a LeasedJob's spec that only a later version knows, as the user writes them."""
    return list(unknown(_spec_schema(), spec, "spec"))


def unknown_in_run(spec: Any) -> list[str]:
    """The same of a LeasedJobRun's spec."""
    return list(unknown(_run_schema(), spec, "spec"))


@cache
def _spec_schema() -> Json:
    return structural(LeasedJobSpec)


@cache
def _run_schema() -> Json:
    return structural(LeasedJobRunSpec)


@cache
def _wanted() -> dict[str, Json]:
    return {k.kind: k.to_json()["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for k in KINDS}


def lacking_in(document: Json) -> list[str]:
    """What an OpenAPI v3 document of the API server lacks of this version's kinds, as `LeasedJob.spec.…`."""
    served: dict[str, Json] = {}
    for schema in ((document.get("components") or {}).get("schemas") or {}).values():
        for name in schema.get(_GROUP_VERSION_KIND) or []:
            served[str(name.get("kind"))] = schema
    found = []
    for kind, wanted in _wanted().items():
        if kind not in served:
            found.append(kind)
        else:
            found += [f"{kind}.{field}" for field in lacking(wanted, served[kind])]
    return found
