"""The custom resources: pydantic models, the rules on them, and the CRDs that are generated from both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leasedjob.api.offline import verdict

__all__ = ["verdict"]


def __getattr__(name: str) -> Any:
    """`verdict` is imported when it is asked for: the models take a while to build."""
    if name == "verdict":
        from leasedjob.api.offline import verdict

        return verdict
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
