"""Gloo, through torch.distributed: the CPU backend of DistributedDataParallel.

Its documented setting is the interface to use (GLOO_SOCKET_IFNAME), which the bench sets: Gloo otherwise takes what
the host's name resolves to. Ranks of one machine talk over TCP too.
"""

from __future__ import annotations

from syncline.registry import register

from . import Seat
from ._torch_native import TorchNative


@register(
    "peers",
    "gloo:native",
    collectives=("allreduce", "reduce-scatter", "all-gather", "broadcast"),
    moves="link",
    needs="torch",
)
class GlooNative(TorchNative):
    """torch.distributed's own collectives on the Gloo backend."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat, "gloo")
