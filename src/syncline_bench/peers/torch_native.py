"""torch.distributed's own calls over one of its backends: Gloo, and Syncline.

The setting of a script under torchrun: only the default group, found by environment variables, and OMP_NUM_THREADS
threads; torchrun and the bench set 1.

Gloo is the CPU backend of DistributedDataParallel. The bench sets its documented option, the interface to use
(GLOO_SOCKET_IFNAME): Gloo otherwise uses the address that the host's name resolves to. Ranks of one machine also use
TCP. Syncline's backend shows the speed of a program that calls torch's collectives: its tensors are torch's own, in
memory that ranks do not share. SYNCLINE_STRATEGY selects the strategy.
"""

from __future__ import annotations

from typing import Any

from syncline.registry import register

from . import Array, Seat, Settings

_DECLARED = {"collectives": ("allreduce", "reduce-scatter", "all-gather", "broadcast"), "needs": "torch"}


class TorchNative:
    """The collectives of the default group with this ``backend``."""

    def __init__(self, seat: Seat, backend: str) -> None:
        import torch
        import torch.distributed as dist

        self._dist: Any = dist
        self._seat = seat
        dist.init_process_group(backend)
        self._memory = torch.zeros(seat.elements)
        self._own = torch.zeros(seat.elements // seat.world if seat.collective == "reduce-scatter" else 0)
        self._whole = self._memory
        self._part = self._own
        # The names of these two calls change in torch 2.13.
        self._gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def select(self, elements: int) -> Array:
        self._whole = self._memory[:elements]
        part, rank = elements // self._seat.world, self._seat.rank
        if self._seat.collective == "reduce-scatter":
            self._part = self._own[:part]
        else:
            self._part = self._whole[rank * part : (rank + 1) * part]
        whole: Array = self._whole.numpy()
        return whole

    def run(self) -> None:
        match self._seat.collective:
            case "allreduce":
                self._dist.all_reduce(self._whole)
            case "reduce-scatter":
                self._scatter(self._part, self._whole)
            case "all-gather":
                self._gather(self._whole, self._part)
            case _:
                self._dist.broadcast(self._whole, 0)

    def result(self) -> Array:
        """The tensor, or the part that the reduce-scatter has filled."""
        found: Array = (self._part if self._seat.collective == "reduce-scatter" else self._whole).numpy()
        return found

    def chosen(self) -> None:
        """None: the name leaves nothing open."""

    def close(self) -> None:
        self._dist.destroy_process_group()


_THREADS: Settings = {f"threads={count}": {"OMP_NUM_THREADS": str(count)} for count in (1, 2)}


@register("peers", "gloo:native", moves="link", settings={"": _THREADS}, **_DECLARED)
class GlooNative(TorchNative):
    """torch.distributed's own collectives on the Gloo backend."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat, "gloo")


@register("peers", "torch:syncline", moves="memory", **_DECLARED)
class TorchSyncline(TorchNative):
    """torch.distributed's own collectives on the backend syncline."""

    def __init__(self, seat: Seat) -> None:
        from syncline.torch_backend import register as register_backend

        register_backend()
        super().__init__(seat, "syncline")
