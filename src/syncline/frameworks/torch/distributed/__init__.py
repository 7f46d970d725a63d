"""A backend of torch.distributed: ``init_process_group("syncline")``.

Loaded when the first group of that backend is made (``syncline.torch_backend`` registers it).
"""

from __future__ import annotations

from typing import Any

from ....errors import UsageError
from .group import SynclineGroup
from .sessions import communicator_for

__all__ = ["SynclineGroup", "create"]


def create(options: Any, strategy: Any = None) -> SynclineGroup:
    """What torch calls for a new group: its place in ``options``, and the ``pg_options`` of the script, a strategy."""
    if strategy is not None and not isinstance(strategy, str):
        raise UsageError(
            f"the options of a group of the backend syncline are a strategy, such as pg_options='ring transport=tcp',"
            f" not {type(strategy).__name__}"
        )
    us, shut = communicator_for(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        list(options.global_ranks_in_group),
        strategy,
    )
    return SynclineGroup(options.store, us, options.timeout, shut)
