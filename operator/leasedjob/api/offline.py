"""What becomes of a manifest, judged without a cluster: by the API server's schema and rules, and the operator. Pure.

Every refusal of the definitions has its twin in the models (see `leasedjob.api.structural`), so reading an object with
them says what both would say. What only a cluster knows is not judged: another object with the same code, immutable
fields, quotas, webhooks.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Final

from pydantic import BaseModel

from leasedjob.api.fields import unknown
from leasedjob.api.problem import Problem, Reason
from leasedjob.api.structural import structural
from leasedjob.api.v1alpha1 import LeasedJobRunSpec, LeasedJobSpec, parse_job, parse_run
from leasedjob.errors import InvalidJobIdentityOptionsError
from leasedjob.identity import job_code
from leasedjob.protocol import GROUP, VERSION

API_VERSION: Final = f"{GROUP}/{VERSION}"
_SPECS: Final[dict[str, type[BaseModel]]] = {"LeasedJob": LeasedJobSpec, "LeasedJobRun": LeasedJobRunSpec}
_READERS: Final[dict[str, Callable[[Mapping[str, Any]], Any]]] = {"LeasedJob": parse_job, "LeasedJobRun": parse_run}
_TOP: Final = ("apiVersion", "kind", "metadata", "spec", "status")
_METADATA: Final = (
    "annotations",
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generateName",
    "generation",
    "labels",
    "managedFields",
    "name",
    "namespace",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
    "uid",
)
_LABEL: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NAMESPACE: Final = re.compile(_LABEL)
_QUALIFIED: Final = re.compile(
    rf"(?:(?P<prefix>{_SUBDOMAIN.pattern})/)?(?P<name>[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)"
)
_LABEL_VALUE: Final = re.compile("([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_MAX_ANNOTATIONS: Final = 256 * 1024  # bytes, keys and values together


def verdict(manifest: Any) -> list[Problem]:
    """Every reason for which a LeasedJob or LeasedJobRun would not be accepted; empty if it would be.

    An unknown field counts: kubectl has the API server refuse it, and without that it would be dropped.

    Args:
        manifest: the object as JSON has it. A YAML file has to be read without making times of its texts.
    """
    if not isinstance(manifest, Mapping):
        return [Problem("", Reason.INVALID_SPEC, "must be an object")]
    kind = manifest.get("kind")
    found = [
        *_text("apiVersion", manifest.get("apiVersion"), (API_VERSION,)),
        *_text("kind", kind, tuple(_SPECS)),
        *_metadata(manifest.get("metadata")),
    ]
    if not isinstance(kind, str) or kind not in _SPECS:
        return found
    found += _unknown(kind, manifest)
    parsed = _READERS[kind](manifest)
    if isinstance(parsed, list):
        return found + parsed
    if isinstance(parsed, LeasedJobSpec):
        found += _code(manifest, parsed)
    return found


def _text(field: str, value: object, known: tuple[str, ...]) -> Iterator[Problem]:
    if value is None:
        yield Problem(field, Reason.INVALID_SPEC, "is required")
    elif value not in known:
        yield Problem(field, Reason.INVALID_SPEC, f"is {value!r}, but must be {' or '.join(known)}")


def _metadata(metadata: object) -> Iterator[Problem]:
    def bad(field: str, message: str) -> Problem:
        return Problem(f"metadata.{field}", Reason.INVALID_SPEC, message)

    if not isinstance(metadata, Mapping):
        yield Problem("metadata", Reason.INVALID_SPEC, "is required" if metadata is None else "must be an object")
        return
    for field, pattern, longest in (("name", _SUBDOMAIN, 253), ("namespace", _NAMESPACE, 63)):
        value = metadata.get(field)
        if value is None or value == "":
            if field == "name" and not metadata.get("generateName"):
                yield bad(field, "is required")
        elif not isinstance(value, str):
            yield bad(field, f"is {value!r}, but must be text")
        elif len(value) > longest or not pattern.fullmatch(value):
            dots = ", - and ." if field == "name" else " and -"
            yield bad(
                field,
                f"must be at most {longest} lower-case letters, digits{dots}, and begin and end with a letter or digit",
            )
    for field in ("labels", "annotations"):
        entries = metadata.get(field)
        if entries is None:
            continue
        if not isinstance(entries, Mapping):
            yield bad(field, "must be an object")
            continue
        for key, value in entries.items():
            if not _is_key(key):
                yield bad(field, f"{key!r} is not a key: a name of at most 63 characters, after a domain and /")
            if not isinstance(value, str):
                yield bad(f"{field}.{key}", f"is {value!r}, but must be text; put it in quotes")
            elif field == "labels" and (len(value) > 63 or not _LABEL_VALUE.fullmatch(value)):
                yield bad(
                    f"{field}.{key}", "must be at most 63 letters, digits, -, _ and .; the first and last no sign"
                )
    notes = metadata.get("annotations")
    if isinstance(notes, Mapping):
        size = sum(len(f"{key}{value}".encode(errors="surrogatepass")) for key, value in notes.items())
        if size > _MAX_ANNOTATIONS:
            yield bad("annotations", f"are {size} bytes, but at most {_MAX_ANNOTATIONS} are stored")


def _is_key(key: object) -> bool:
    found = _QUALIFIED.fullmatch(key) if isinstance(key, str) else None
    return found is not None and len(found["name"]) <= 63 and len(found["prefix"] or "") <= 253


def _unknown(kind: str, manifest: Mapping[str, Any]) -> Iterator[Problem]:
    paths = [str(key) for key in manifest if key not in _TOP]
    metadata = manifest.get("metadata")
    if isinstance(metadata, Mapping):
        paths += [f"metadata.{key}" for key in metadata if key not in _METADATA]
    schema = _schema(kind)
    paths += unknown(schema, manifest.get("spec"), "spec")
    names = {*_TOP, *_METADATA, *_names(schema)}
    for path in paths:
        field = path.rpartition(".")[2]
        close = difflib.get_close_matches(field, names - {field}, n=1, cutoff=0.75)
        meant = f"; did you mean {close[0]}?" if close else ""
        yield Problem(path, Reason.UNKNOWN_FIELD, f"is not a field of {kind}{meant}")


@cache
def _schema(kind: str) -> dict[str, Any]:
    return structural(_SPECS[kind])


def _names(schema: Mapping[str, Any]) -> Iterator[str]:
    for name, child in (schema.get("properties") or {}).items():
        yield name
        yield from _names(child)


def _code(manifest: Mapping[str, Any], spec: LeasedJobSpec) -> Iterator[Problem]:
    metadata = manifest.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str):
        return
    assert isinstance(metadata, Mapping)
    try:
        job_code(str(metadata.get("namespace") or "default"), name, spec.code)
    except InvalidJobIdentityOptionsError as error:
        yield Problem("spec.code", Reason.INVALID_CODE, str(error))
