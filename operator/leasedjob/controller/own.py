"""What a Pod template in the operator's own namespace must not name: the operator's Secrets and its account. Pure.

In another namespace neither can be named. Here, whoever may create LeasedJobs but no Pods would get by the operator's
hand what nobody gave them. Whoever may create Pods here needs no LeasedJob for it: that is for RBAC to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from leasedjob.api.problem import Problem, Reason
from leasedjob.controller.settings import Settings

_DEFAULT_ACCOUNT: Final = "default"


def problems(namespace: str, template: Mapping[str, Any], settings: Settings) -> list[Problem]:
    """Every place where `template` names what is the operator's own; empty outside of its namespace."""
    if not settings.own_namespace or namespace != settings.own_namespace:
        return []
    spec = template.get("spec") or {}
    found = []
    if settings.own_account:
        field = next((f for f in ("serviceAccountName", "serviceAccount") if spec.get(f)), "serviceAccountName")
        if (spec.get(field) or _DEFAULT_ACCOUNT) == settings.own_account:
            why = f"must not be {settings.own_account}: that account has the operator's rights"
            found.append(Problem(f"spec.template.spec.{field}", Reason.INVALID_TEMPLATE, why))
    for path, name in _secrets(spec, "spec.template.spec"):
        if name in settings.own_secrets:
            why = f"must not name the Secret {name}: the operator's database credential is in it"
            found.append(Problem(path, Reason.INVALID_TEMPLATE, why))
    return found


def _secrets(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every Secret that is named below `node` for a container to read, whatever kind of source names it."""
    if isinstance(node, list):
        for index, inner in enumerate(node):
            yield from _secrets(inner, f"{path}[{index}]")
    elif isinstance(node, Mapping):
        for key, inner in node.items():
            here = f"{path}.{key}"
            if key == "secretName" and isinstance(inner, str):
                yield here, inner
            elif (key == "secret" or key.lower().endswith(("secretref", "secretkeyref"))) and isinstance(
                inner, Mapping
            ):
                if isinstance(inner.get("name"), str):
                    yield f"{here}.name", inner["name"]
                yield from _secrets({k: v for k, v in inner.items() if k != "name"}, here)
            else:
                yield from _secrets(inner, here)
