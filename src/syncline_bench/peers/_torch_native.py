"""torch.distributed's own calls over one of its backends, for the peers that are such a backend.

As a script has it that torchrun starts: the default group, found by the environment's variables, and no other; and as
many threads as OMP_NUM_THREADS says, which torchrun sets to 1 as the bench does.
"""

from __future__ import annotations

from typing import Any

from . import Array, Seat


class TorchNative:
    """The collectives of the default group, of that ``backend``."""

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
        """The name leaves nothing open."""

    def close(self) -> None:
        self._dist.destroy_process_group()
