"""Calls that only move: torch's tensors and options as bytes and sizes, and what is written back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .checks import check, check_alike, share_out
from .collectives import Collectives
from .running import Running
from .tensors import Memory, kind_of, memory_of, sizes_of, together
from .works import GroupWork

Tensors = Sequence[torch.Tensor]
Array = NDArray[Any]


class Moving:
    """Those of the ranks of ``running``, of tensors on the CPU."""

    def __init__(self, running: Running, collectives: Collectives) -> None:
        self._us, self._running, self._collectives = running.us, running, collectives

    def broadcast(self, tensors: Tensors, opts: Any) -> GroupWork:
        """Tensors of rank ``rootRank`` on all."""
        memories = [memory_of(tensor) for tensor in tensors]
        alone = len(memories) == 1
        data = memories[0].data if alone else together(list(tensors))
        root = int(opts.rootRank)
        check(0 <= root < self._us.world_size, f"broadcast: there is no rank {root} in this group")

        def done() -> None:
            if alone:
                memories[0].write_back()
            else:
                share_out(data, memories)

        sizes = sizes_of(tensors)
        return self._running.run(lambda: self._collectives.broadcast(data, root, sizes, done), opts, list(tensors))

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> GroupWork:
        """Each rank's tensor, in a list on all."""
        check(len(outputs) == len(inputs) == 1, "allgather takes one input and one list of outputs")
        return self.allgather_coalesced([[output] for output in outputs[0]], inputs, opts, list(outputs))

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any, handed: list[Any]
    ) -> GroupWork:
        """Each rank's tensors, rank by rank, on all."""
        world = self._us.world_size
        check(len(outputs) == world, f"all-gather: {len(outputs)} outputs for {world} ranks")
        for row in outputs:
            for output, given in zip(row, inputs, strict=True):
                check_alike(output, given, "all-gather: an output")
        memories = [[memory_of(output) for output in row] for row in outputs]
        mine = together(list(inputs))
        table = np.empty((world, mine.size), np.uint8)

        def done() -> None:
            for row, data in zip(memories, table, strict=True):
                share_out(data, row)

        sizes = sizes_of(inputs)
        call = lambda: self._collectives.all_gather(mine, table, sizes, done)  # noqa: E731
        return self._running.run(call, opts, handed)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> GroupWork:
        """Each rank's tensor, one behind the other in one tensor on all."""
        world = self._us.world_size
        check(
            output.numel() == world * given.numel() and output.dtype == given.dtype,
            f"all-gather: the output has {output.numel()} elements of {output.dtype}, the input {given.numel()} of"
            f" {given.dtype}; with {world} ranks the output is {world} times the input",
        )
        memory = memory_of(output)
        mine, table = memory_of(given).data, memory.data.reshape(world, -1)
        sizes = sizes_of([given])
        call = lambda: self._collectives.all_gather(mine, table, sizes, memory.write_back)  # noqa: E731
        return self._running.run(call, opts, [output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> GroupWork:
        """Of several in one call."""
        world = self._us.world_size
        rows: list[list[torch.Tensor]] = [[] for _ in range(world)]
        for output, given in zip(outputs, inputs, strict=True):
            check(output.numel() == world * given.numel(), f"all-gather: an output is {world} times its input")
            check(output.is_contiguous(), "all-gather: an output has to be contiguous")
            flat = output.detach().view(world, *given.shape)
            for row, part in zip(rows, flat, strict=True):
                row.append(part)
        return self.allgather_coalesced(rows, inputs, opts, list(outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any,
    ) -> GroupWork:
        """Parts of one tensor to all ranks, theirs into parts of another; sizes count along the first dimension."""
        check(output.dtype == given.dtype, f"all-to-all: the output is {output.dtype}, the input {given.dtype}")
        into, memory = self._cut(output, output_sizes, "output")
        out, _ = self._cut(given, input_sizes, "input")
        kind = kind_of(given)
        call = lambda: self._collectives.all_to_all(out, into, kind, memory.write_back)  # noqa: E731
        return self._running.run(call, opts, [output])

    def _cut(self, tensor: torch.Tensor, sizes: Sequence[int], what: str) -> tuple[dict[int, Array], Memory]:
        """The bytes of a tensor for each rank."""
        world, length = self._us.world_size, tensor.shape[0] if tensor.dim() else 1
        check(not sizes or len(sizes) == world, f"all-to-all: {len(sizes)} sizes of the {what} for {world} ranks")
        check(
            bool(sizes) or length % world == 0,
            f"all-to-all: the {what}'s first dimension, {length}, is not a multiple of the {world} ranks",
        )
        chosen = list(sizes) or [length // world] * world
        check(sum(chosen) == length, f"all-to-all: the sizes of the {what} sum to {sum(chosen)}, not to {length}")
        memory = memory_of(tensor)
        data = memory.data
        row = data.size // length if length else 0
        edges = [0, *np.cumsum(chosen).tolist()]
        return {rank: data[edges[rank] * row : edges[rank + 1] * row] for rank in range(world)}, memory

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> GroupWork:
        """A tensor to each rank, and one of each."""
        world = self._us.world_size
        check(len(outputs) == len(inputs) == world, f"all-to-all takes a tensor for each of the {world} ranks")
        memories = [memory_of(output) for output in outputs]
        out = {rank: memory_of(given).data for rank, given in enumerate(inputs)}
        into = {rank: memory.data for rank, memory in enumerate(memories)}

        def done() -> None:
            for memory in memories:
                memory.write_back()

        kind = kind_of(inputs[0])
        return self._running.run(lambda: self._collectives.all_to_all(out, into, kind, done), opts, list(outputs))

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> GroupWork:
        """Each rank's tensor, in a list on rank ``rootRank``."""
        root, (given,) = int(opts.rootRank), inputs
        here = list(outputs[0]) if self._us.rank == root else []
        check(self._us.rank != root or len(here) == self._us.world_size, "gather: a tensor for each rank at the root")
        for output in here:
            check_alike(output, given, "gather: an output")
        memories = [memory_of(output) for output in here]
        table = {rank: memory.data for rank, memory in enumerate(memories)}

        def done() -> None:
            for memory in memories:
                memory.write_back()

        mine, sizes = memory_of(given).data, sizes_of(inputs)
        return self._running.run(lambda: self._collectives.gather(mine, root, table, sizes, done), opts, list(outputs))

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> GroupWork:
        """The r-th tensor of the list of rank ``rootRank`` on rank r."""
        root, (output,) = int(opts.rootRank), outputs
        here = list(inputs[0]) if self._us.rank == root else []
        check(self._us.rank != root or len(here) == self._us.world_size, "scatter: a tensor for each rank at the root")
        for given in here:
            check_alike(given, output, "scatter: an input")
        memory, sizes = memory_of(output), sizes_of(outputs)
        table = {rank: memory_of(given).data for rank, given in enumerate(here)}
        call = lambda: self._collectives.scatter(table, root, memory.data, sizes, memory.write_back)  # noqa: E731
        return self._running.run(call, opts, list(outputs))
