"""A dimension of a DeviceMesh, or a process group of torch, as the ranks of the run that a group of ours is made of.

Whatever backend torch.distributed has: nothing is sent here. Torch's ranks have to be the workers' own, as they are
where one launcher has started both.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import UsageError
from ...session.session import Session


def ranks_of(session: Session, group: Any) -> tuple[int, ...]:
    """The ranks of what torch calls a group of some, this worker among them, in ascending order.

    Raises UsageError for what is none, for a mesh of several dimensions, and where this worker is not in it.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ()
            example = f'mesh["{names[0]}"]' if names else "mesh[NAME], of a mesh made with mesh_dim_names=,"
            raise UsageError(
                f"group= is a DeviceMesh of {group.ndim} dimensions: give the one whose ranks are to train together,"
                f" such as {example}"
            )
        found = [int(rank) for rank in group.mesh.tolist()]
    elif isinstance(group, dist.ProcessGroup):
        found = _ranks_of_group(group)
    else:
        raise UsageError(
            "group= takes what syncline.new_group() gives, one dimension of a DeviceMesh, or a ProcessGroup, not"
            f" {type(group).__name__}"
        )
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (session.rank, session.world_size):
        raise UsageError(
            f"torch.distributed calls this process rank {dist.get_rank()} of {dist.get_world_size()}, and Syncline rank"
            f" {session.rank} of {session.world_size}: start both with the same ranks, or give"
            " syncline.new_group(ranks)"
        )
    if session.rank not in found:
        raise UsageError(f"{session.name(session.rank)} is not in this group, of ranks {', '.join(map(str, found))}")
    return tuple(sorted(found))


def _ranks_of_group(group: dist.ProcessGroup) -> list[int]:
    try:
        return [int(rank) for rank in dist.get_process_group_ranks(group)]
    except (KeyError, ValueError) as error:  # as torch says that it no longer has it
        raise UsageError(
            "group= is a ProcessGroup that was destroyed: give syncline.new_group(ranks), which lives as long as the"
            " run, or destroy it when all that takes it is over"
        ) from error
