"""Simulated hosts on one machine: network namespaces joined by links of a chosen rate.

Owns the creation, use and removal of such hosts. ``launch`` starts commands in them; an MPI library's own launcher
starts MPI jobs. A lab needs root and iproute2; the import needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lab import Lab

__all__ = ["Lab"]


def __getattr__(name: str) -> Any:
    # Imported on first use, because an MPI launcher starts the agent once per host, and the agent needs little.
    if name == "Lab":
        from .lab import Lab

        return Lab
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
