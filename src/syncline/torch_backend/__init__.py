"""A backend of torch.distributed: ``init_process_group("syncline")``.

This file only registers the backend; the first group loads the rest. ``import torch`` calls ``register`` through the
entry point ``_syncline_torch``, which warns on failure, and ``import syncline`` calls it if torch is loaded already.
This file must therefore stay light.
"""

from __future__ import annotations

from typing import Any

NAME = "syncline"
OLDEST = (2, 7)
"""The oldest supported version of torch, as in ``frameworks.torch``, which is not loaded here. With 2.6 the constructor
of DistributedDataParallel never returned from its first wait for a work of this backend."""


def register() -> None:
    """Register ``torch.distributed.init_process_group("syncline")``. May be called again."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, strategy: Any = None) -> Any:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST:
        raise NotImplementedError(
            f"the backend syncline needs torch {'.'.join(map(str, OLDEST))} or newer, but this is {torch.__version__}:"
            " pip"
            f" install 'torch>={'.'.join(map(str, OLDEST))}', or use the backend gloo"
        )
    from .sessions import create

    return create(options, strategy)
