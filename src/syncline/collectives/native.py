"""The library's own allreduce: MPI_Allreduce, Gloo's or NCCL's."""

from __future__ import annotations

from ..registry import register
from . import Collective


@register("collectives", "native", goal="allreduce", priority=False)
def native() -> Collective:
    """The message library's own allreduce; over transport=torch or transport=mpi."""
    return Collective("allreduce")
