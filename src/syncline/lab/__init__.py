"""Hosts on one machine: network namespaces joined by links of a chosen rate.

Owns how such hosts are made, entered and removed. Does not know what runs in them: commands are started by ``launch``,
MPI jobs by the MPI library's own launcher. Needs root and iproute2; importing it needs nothing.
"""

from .lab import Lab

__all__ = ["Lab"]
