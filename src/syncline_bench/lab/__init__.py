"""Hosts on one machine: network namespaces joined by links of a chosen rate.

Owns how such hosts are made, entered and removed. Does not know what runs in them: commands are started by ``launch``,
MPI jobs by the MPI library's own launcher. Needs root and iproute2; importing it needs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lab import Lab

__all__ = ["Lab"]


def __getattr__(name: str) -> Any:
    # Not before it is asked for: an MPI launcher starts the agent, which needs little, once for every host.
    if name == "Lab":
        from .lab import Lab

        return Lab
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
