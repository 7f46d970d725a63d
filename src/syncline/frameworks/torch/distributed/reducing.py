"""Calls that reduce: torch's tensors and options as arrays, sizes and reductions, and what is written back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .calls import Call
from .checks import check, check_one_type, check_parts, nothing, share_out
from .collectives import Collectives
from .reductions import reduction_of
from .running import Running
from .tensors import memory_of, sizes_of
from .works import GroupWork

Tensors = Sequence[torch.Tensor]
Array = NDArray[Any]


class Reducing:
    """Those of the ranks of ``running``, of tensors on the CPU."""

    def __init__(self, running: Running, collectives: Collectives) -> None:
        self._us, self._running, self._collectives = running.us, running, collectives

    def allreduce(self, tensors: Tensors, opts: Any) -> GroupWork:
        """Each tensor becomes that of all ranks."""
        return self._reduce(tensors, opts, self._collectives.allreduce)

    def reduce(self, tensors: Tensors, opts: Any) -> GroupWork:
        """Of rank ``rootRank`` alone."""
        root = int(opts.rootRank)
        return self._reduce(
            tensors,
            opts,
            lambda array, reduction, sizes, done: self._collectives.reduce(
                array, root, reduction, sizes, done if self._us.rank == root else nothing
            ),
            in_place=self._us.rank == root,
        )

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> GroupWork:
        """Rank r gets the r-th tensor of all, reduced."""
        check(len(outputs) == len(inputs) == 1, "reduce_scatter takes one output and one list of inputs")
        check_parts(inputs[0], self._us.world_size, outputs[0], "reduce_scatter's list of inputs")
        return self._scatter_reduced(outputs, np.stack([memory_of(part).numbers for part in inputs[0]]), opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> GroupWork:
        """Of several in one call."""
        world = self._us.world_size
        for output, given in zip(outputs, inputs, strict=True):
            check(
                given.numel() == world * output.numel() and given.dtype == output.dtype,
                f"reduce_scatter: the input has {given.numel()} elements of {given.dtype}, the output {output.numel()}"
                f" of {output.dtype}; with {world} ranks the input is {world} times the output",
            )
        return self._scatter_reduced(outputs, self._table_of(inputs), opts)

    def _reduce(self, tensors: Tensors, opts: Any, begin: Callable[..., Call], in_place: bool = True) -> GroupWork:
        memories = [memory_of(tensor) for tensor in tensors]
        check_one_type(tensors)
        if len(memories) == 1 and in_place:
            array, done = memories[0].numbers, memories[0].write_back
        else:
            array = np.concatenate([memory.numbers for memory in memories])

            def done() -> None:
                share_out(array.view(np.uint8), memories)

        op = torch.distributed.ReduceOp.SUM if opts is None else opts.reduceOp
        reduction = reduction_of(op, array.dtype, tensors[0].is_complex())
        return self._running.run(lambda: begin(array, reduction, sizes_of(tensors), done), opts, list(tensors))

    def _table_of(self, inputs: Tensors) -> Array:
        """A copy of inputs that have a part for each rank, whose row r is the parts for rank r."""
        check_one_type(inputs)
        world = self._us.world_size
        numbers = [memory_of(given).numbers.reshape(world, -1) for given in inputs]
        return numbers[0].copy() if len(numbers) == 1 else np.concatenate(numbers, axis=1)

    def _scatter_reduced(self, outputs: Tensors, table: Array, opts: Any) -> GroupWork:
        """Row r of the table, which is lost, is what rank r gets: its part of every input."""
        check_one_type(outputs)
        memories = [memory_of(output) for output in outputs]
        op = torch.distributed.ReduceOp.SUM if opts is None else opts.reduceOp
        reduction = reduction_of(op, table.dtype, outputs[0].is_complex())

        def done(mine: Array) -> None:
            share_out(mine.view(np.uint8), memories)

        return self._running.run(
            lambda: self._collectives.reduce_scatter(table, reduction, sizes_of(outputs), done), opts, list(outputs)
        )
