"""Syncline: the communication of distributed deep learning, every way of it under one interface.

    import syncline

    syncline.init()                                   # or init(strategy="ps(servers=2)")
    model, optimizer = syncline.prepare(model, optimizer)

Start scripts with torchrun, with ``syncline run``, or by hand with ``init(rank=, world_size=, address=)``. Importing
this package loads no framework; the first call that needs one does.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .api import (
        allreduce,
        barrier,
        broadcast,
        checkpoints,
        clip_grad_norm_,
        comm_hook,
        consolidate,
        elastic,
        flush,
        gather,
        hook_state,
        init,
        is_initialized,
        join,
        load_state_dict,
        local_rank,
        new_group,
        no_sync,
        prepare,
        rank,
        release,
        sampler,
        shutdown,
        state_dict,
        stats,
        world_size,
    )

__all__ = [
    "__version__",
    "allreduce",
    "barrier",
    "broadcast",
    "checkpoints",
    "clip_grad_norm_",
    "comm_hook",
    "consolidate",
    "elastic",
    "flush",
    "gather",
    "hook_state",
    "init",
    "is_initialized",
    "join",
    "load_state_dict",
    "local_rank",
    "new_group",
    "no_sync",
    "prepare",
    "rank",
    "release",
    "sampler",
    "shutdown",
    "state_dict",
    "stats",
    "world_size",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if "torch" in sys.modules:
    from _syncline_torch import register

    register()


def __dir__() -> list[str]:
    return sorted(__all__)
