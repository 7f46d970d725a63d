"""Syncline as a backend of torch.distributed: what a program that calls torch's collectives gets of it.

Its tensors are torch's own, in memory that ranks do not share, as those of such programs are. SYNCLINE_STRATEGY says
what runs.
"""

from __future__ import annotations

from syncline.registry import register

from . import Seat
from ._torch_native import TorchNative


@register(
    "peers",
    "torch:syncline",
    collectives=("allreduce", "reduce-scatter", "all-gather", "broadcast"),
    moves="memory",
    needs="torch",
)
class TorchSyncline(TorchNative):
    """torch.distributed's own collectives on the backend syncline."""

    def __init__(self, seat: Seat) -> None:
        from syncline.torch_backend import register as register_backend

        register_backend()
        super().__init__(seat, "syncline")
