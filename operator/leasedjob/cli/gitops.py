"""Which tool keeps an object as it stands in Git or in a chart, and would undo what a person changes by hand. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from leasedjob.protocol import FIELD_MANAGER

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool and the marks that it leaves.

    marks: beginnings of label and annotation keys. managers: its names in managedFields.
    """

    name: str
    marks: tuple[str, ...]
    managers: tuple[str, ...]


TOOLS: Final = (
    Tool(
        "Argo CD",
        ("argocd.argoproj.io/instance", "argocd.argoproj.io/tracking-id"),
        ("argocd-controller", "argocd-application-controller"),
    ),
    Tool(
        "Flux",
        ("kustomize.toolkit.fluxcd.io/", "helm.toolkit.fluxcd.io/"),
        ("kustomize-controller", "helm-controller"),
    ),
    Tool("Config Sync", ("configmanagement.gke.io/", "configsync.gke.io/"), ("configsync",)),
    Tool("Fleet", ("objectset.rio.cattle.io/",), ("fleetagent", "fleet-agent")),
    Tool("kapp", ("kapp.k14s.io/",), ("kapp",)),
    Tool("Helm", ("meta.helm.sh/",), ("helm",)),
)
# A person's own: what is applied by hand isn't applied again by itself.
_BY_HAND: Final = ("kubectl", FIELD_MANAGER, f"kubectl-{FIELD_MANAGER}")


def is_mark(key: str) -> bool:
    """Whether a label or annotation says that a tool owns the object; on a copy it would be a lie."""
    return any(key.startswith(mark) for tool in TOOLS for mark in tool.marks)


def keeper(body: Object, *path: str) -> str | None:
    """Who keeps the field at `path` (`"spec", "suspend"`) as it is written elsewhere; None where nobody is known to.

    A tool is known by its labels and annotations, or by name in managedFields; any other manager that *applies* the
    field is named as it names itself.
    """
    metadata = body.get("metadata") or {}
    keys = [*(metadata.get("labels") or {}), *(metadata.get("annotations") or {})]
    for tool in TOOLS:
        if any(key.startswith(mark) for key in keys for mark in tool.marks):
            return tool.name
    for entry in metadata.get("managedFields") or []:
        manager = str(entry.get("manager") or "")
        for tool in TOOLS:
            if manager in tool.managers:
                return tool.name
        if entry.get("operation") == "Apply" and manager not in _BY_HAND and _owns(entry.get("fieldsV1"), path):
            return f"the field manager {manager}"
    return None


def _owns(fields: object, path: tuple[str, ...]) -> bool:
    for step in path:
        if not isinstance(fields, dict) or f"f:{step}" not in fields:
            return False
        fields = fields[f"f:{step}"]
    return True
