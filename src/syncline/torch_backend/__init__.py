"""A backend of torch.distributed: ``init_process_group("syncline")``.

This file registers it and does nothing more; what it is made of is loaded with the first group. ``import torch`` calls
``register`` by the entry point ``_syncline_torch``, which warns where it fails, and so does ``import syncline`` where
torch is loaded already. So this file has to be light.
"""

from __future__ import annotations

from typing import Any

NAME = "syncline"
OLDEST = (2, 6)
"""The first version of torch with what the backend needs."""


def register() -> None:
    """Make ``torch.distributed.init_process_group("syncline")`` known; may be called again."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, strategy: Any = None) -> Any:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST:
        raise NotImplementedError(
            f"the backend syncline needs torch {'.'.join(map(str, OLDEST))} or newer, this is {torch.__version__}: pip"
            f" install 'torch>={'.'.join(map(str, OLDEST))}', or use the backend gloo"
        )
    from .sessions import create

    return create(options, strategy)
