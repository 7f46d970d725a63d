"""The process group: what torch calls, in torch's words, over the collectives of a communicator.

Owns the translation: tensors to memory, options to reductions, roots and time limits, and what is handed back. A call
that torch makes synchronously is over when it returns; others go on behind the script. Tensors of another device go to
the backend that the group was given for it (``others``). Torch reaches some of these methods by more than one name,
which changed between its versions.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from ....errors import ClosedError, PeerError, UsageError
from ....session.communicator import Communicator
from ..eager import eager_methods
from . import others
from .calls import Call
from .checks import check, check_alike, check_one_type, check_parts, nothing, share_out
from .collectives import Collectives
from .mailbox import Mailbox
from .prompt import Prompt
from .reductions import reduction_of
from .tensors import Memory, kind_of, memory_of, sizes_of, together
from .works import Completer, GroupWork

Tensors = Sequence[torch.Tensor]
Array = NDArray[Any]

NAME = "syncline"


_Base: Any = ProcessGroup  # whose declared types are those of several forms of each call


@eager_methods
class SynclineGroup(_Base):  # type: ignore[misc]
    """The ranks of ``us``. ``shut`` is called when the group is destroyed."""

    def __init__(
        self,
        store: Any,
        us: Communicator,
        timeout: timedelta,
        shut: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(us.rank, us.world_size)
        self.us, self.store = us, store
        self.beside: dict[str, Any] = {}
        """Groups of other devices' backends."""
        self.timeout = timeout
        self._allowed_s = 0.0
        self._allow(timeout.total_seconds())
        self._shut = shut
        self._collectives, self._mailbox = Collectives(us), Mailbox(us)
        self._completer = Completer()
        self._called, self._described = "", ""
        self._lock = threading.RLock()
        self._prompt = Prompt(us, self._collectives, self._lock)
        self._summed = self._over([])

    def getBackendName(self) -> str:
        """What torch calls this backend."""
        return NAME

    def _get_backend_name(self) -> str:
        return NAME

    def name(self) -> str:
        """The same."""
        return NAME

    @property
    def group_name(self) -> Any:
        """What torch has called this group; its base class would ask a backend of its own."""
        return self._called

    @property
    def group_desc(self) -> str:
        """What the script says that the group is for."""
        return self._described

    def _set_group_name(self, name: str) -> None:
        self._called = name

    def _set_group_desc(self, text: str) -> None:
        self._described = text

    def set_timeout(self, timeout: timedelta) -> None:
        """The time limit of calls that give none."""
        self.timeout = timeout
        self._allow(timeout.total_seconds())

    # Torch's base class asks backends of its own, which this group has not.

    @property
    def _device_types(self) -> list[torch.device]:
        return others.devices(self)

    def _get_backend(self, device: torch.device) -> Any:
        other = others.of_device(self, torch.device(device))
        return self if other is None else other._get_backend(device)

    def _set_sequence_number_for_group(self) -> None:
        """Calls are counted anyway."""

    def _get_sequence_number_for_group(self) -> int:
        return self._collectives.calls

    def _start_coalescing(self, device: Any = None) -> None:
        """Calls are put together where torch gives several at once only."""

    def _end_coalescing(self, device: Any = None) -> GroupWork:  # noqa: ARG002
        return self._over([])

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """The end waits for what is under way."""

    def shutdown(self) -> None:
        """The group is destroyed; receives that nothing was sent for are given up."""
        while self.beside:
            self.beside.popitem()[1].shutdown()
        if not self._alone and self.us.member.usable:
            self._mailbox.close()
            self._prompt.close()
            if self._mailbox.unused:
                self.us.give_back()
        self._shut()

    def abort(self) -> None:
        """End what is under way, and with it the run, without waiting: the others get an error that names this rank."""
        while self.beside:
            self.beside.popitem()[1].abort()
        if not self._alone and self.us.member.usable:
            name = self.us.name(self.us.rank)
            self.us.member.fail(ClosedError(f"{name} has aborted the process group {self._called or 'of all ranks'}"))
        with contextlib.suppress(ClosedError, PeerError):
            self._shut()

    # Reductions.

    def allreduce(self, tensors: Tensors, opts: Any = None, *_: Any) -> Any:
        """Each tensor becomes that of all ranks."""
        if opts is not None and len(tensors) == 1:
            limit_s = self._limit(opts)
            if getattr(opts, "asyncOp", True):
                if (work := self._prompt.begin(tensors[0], opts.reduceOp)) is not None:
                    return self._under_way(None if work.done else work, work.label, list(tensors), limit_s)
            elif self._prompt.allreduce(tensors[0], opts.reduceOp, limit_s):
                return self._summed
        if (other := others.of(self, tensors)) is not None:
            return other.allreduce(tensors, opts)
        return self._reduce(tensors, opts, lambda *call: self._collectives.allreduce(*call))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """Several in one call."""
        if (other := others.of(self, tensors)) is not None:
            return other.allreduce_coalesced(tensors, opts)
        return self._reduce(tensors, opts, lambda *call: self._collectives.allreduce(*call))

    def reduce(self, tensors: Tensors, opts: Any = None, *_: Any) -> Any:
        """Of rank ``rootRank`` alone."""
        if (other := others.of(self, tensors)) is not None:
            return other.reduce(tensors, opts)
        root = int(opts.rootRank)
        return self._reduce(
            tensors,
            opts,
            lambda array, reduction, sizes, done: self._collectives.reduce(
                array, root, reduction, sizes, done if self.us.rank == root else nothing
            ),
            in_place=self.us.rank == root,
        )

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
        return self._run(lambda: begin(array, reduction, sizes_of(tensors), done), opts, list(tensors))

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None, *_: Any) -> Any:
        """Rank r gets the r-th tensor of all, reduced."""
        if (other := others.of(self, outputs)) is not None:
            return other.reduce_scatter(outputs, inputs, opts)
        check(len(outputs) == len(inputs) == 1, "reduce_scatter takes one output and one list of inputs")
        check_parts(inputs[0], self.us.world_size, outputs[0], "reduce_scatter's list of inputs")
        return self._scatter_reduced(outputs, np.stack([memory_of(part).numbers for part in inputs[0]]), opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        """Rank r gets the r-th part of one tensor of all, reduced."""
        if (other := others.of(self, [output])) is not None:
            return other._reduce_scatter_base(output, given, opts)
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Of several in one call."""
        if (other := others.of(self, outputs)) is not None:
            return other.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        world = self.us.world_size
        for output, given in zip(outputs, inputs, strict=True):
            check(
                given.numel() == world * output.numel() and given.dtype == output.dtype,
                f"reduce_scatter: the input has {given.numel()} elements of {given.dtype}, the output {output.numel()}"
                f" of {output.dtype}; with {world} ranks the input is {world} times the output",
            )
        return self._scatter_reduced(outputs, self._table_of(inputs), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _table_of(self, inputs: Tensors) -> Array:
        """A copy of inputs that have a part for each rank, whose row r is the parts for rank r."""
        check_one_type(inputs)
        world = self.us.world_size
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

        return self._run(
            lambda: self._collectives.reduce_scatter(table, reduction, sizes_of(outputs), done), opts, list(outputs)
        )

    # What is only moved.

    def broadcast(self, tensors: Tensors, opts: Any = None, *_: Any) -> Any:
        """Tensors of rank ``rootRank`` on all."""
        if (other := others.of(self, tensors)) is not None:
            return other.broadcast(tensors, opts)
        memories = [memory_of(tensor) for tensor in tensors]
        alone = len(memories) == 1
        data = memories[0].data if alone else together(list(tensors))
        root = int(opts.rootRank)
        check(0 <= root < self.us.world_size, f"broadcast: there is no rank {root} in this group")

        def done() -> None:
            if alone:
                memories[0].write_back()
            else:
                share_out(data, memories)

        sizes = sizes_of(tensors)
        return self._run(lambda: self._collectives.broadcast(data, root, sizes, done), opts, list(tensors))

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None, *_: Any) -> Any:
        """Each rank's tensor, in a list on all."""
        if (other := others.of(self, inputs)) is not None:
            return other.allgather(outputs, inputs, opts)
        check(len(outputs) == len(inputs) == 1, "allgather takes one input and one list of outputs")
        return self.allgather_coalesced([[output] for output in outputs[0]], inputs, opts, list(outputs))

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None, handed: Any = None
    ) -> Any:
        """Each rank's tensors, rank by rank, on all."""
        if (other := others.of(self, inputs)) is not None:
            return other.allgather_coalesced(outputs, inputs, opts)
        world = self.us.world_size
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
        return self._run(call, opts, list(outputs) if handed is None else handed)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        """Each rank's tensor, one behind the other in one tensor on all."""
        if (other := others.of(self, [given])) is not None:
            return other._allgather_base(output, given, opts)
        world = self.us.world_size
        check(
            output.numel() == world * given.numel() and output.dtype == given.dtype,
            f"all-gather: the output has {output.numel()} elements of {output.dtype}, the input {given.numel()} of"
            f" {given.dtype}; with {world} ranks the output is {world} times the input",
        )
        memory = memory_of(output)
        mine, table = memory_of(given).data, memory.data.reshape(world, -1)
        sizes = sizes_of([given])
        call = lambda: self._collectives.all_gather(mine, table, sizes, memory.write_back)  # noqa: E731
        return self._run(call, opts, [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Of several in one call."""
        if (other := others.of(self, inputs)) is not None:
            return other.allgather_into_tensor_coalesced(outputs, inputs, opts)
        world = self.us.world_size
        rows: list[list[torch.Tensor]] = [[] for _ in range(world)]
        for output, given in zip(outputs, inputs, strict=True):
            check(output.numel() == world * given.numel(), f"all-gather: an output is {world} times its input")
            check(output.is_contiguous(), "all-gather: an output has to be contiguous")
            flat = output.detach().view(world, *given.shape)
            for row, part in zip(rows, flat, strict=True):
                row.append(part)
        return self.allgather_coalesced(rows, inputs, opts, list(outputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
        *_: Any,
    ) -> Any:
        """Parts of one tensor to all ranks, theirs into parts of another; sizes count along the first dimension."""
        if (other := others.of(self, [given])) is not None:
            return other.alltoall_base(output, given, output_sizes, input_sizes, opts)
        check(output.dtype == given.dtype, f"all-to-all: the output is {output.dtype}, the input {given.dtype}")
        into, memory = self._cut(output, output_sizes, "output")
        out, _ = self._cut(given, input_sizes, "input")
        kind = kind_of(given)
        call = lambda: self._collectives.all_to_all(out, into, kind, memory.write_back)  # noqa: E731
        return self._run(call, opts, [output])

    alltoall_base = all_to_all_single

    def _cut(self, tensor: torch.Tensor, sizes: Sequence[int], what: str) -> tuple[dict[int, Array], Memory]:
        """The bytes of a tensor for each rank."""
        world, length = self.us.world_size, tensor.shape[0] if tensor.dim() else 1
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

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any) -> Any:
        """A tensor to each rank, and one of each."""
        if (other := others.of(self, inputs)) is not None:
            return other.alltoall(outputs, inputs, opts)
        world = self.us.world_size
        check(len(outputs) == len(inputs) == world, f"all-to-all takes a tensor for each of the {world} ranks")
        memories = [memory_of(output) for output in outputs]
        out = {rank: memory_of(given).data for rank, given in enumerate(inputs)}
        into = {rank: memory.data for rank, memory in enumerate(memories)}

        def done() -> None:
            for memory in memories:
                memory.write_back()

        kind = kind_of(inputs[0])
        return self._run(lambda: self._collectives.all_to_all(out, into, kind, done), opts, list(outputs))

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None, *_: Any) -> Any:
        """Each rank's tensor, in a list on rank ``rootRank``."""
        if (other := others.of(self, inputs)) is not None:
            return other.gather(outputs, inputs, opts)
        root, (given,) = int(opts.rootRank), inputs
        here = list(outputs[0]) if self.us.rank == root else []
        check(self.us.rank != root or len(here) == self.us.world_size, "gather: a tensor for each rank at the root")
        for output in here:
            check_alike(output, given, "gather: an output")
        memories = [memory_of(output) for output in here]
        table = {rank: memory.data for rank, memory in enumerate(memories)}

        def done() -> None:
            for memory in memories:
                memory.write_back()

        mine, sizes = memory_of(given).data, sizes_of(inputs)
        return self._run(lambda: self._collectives.gather(mine, root, table, sizes, done), opts, list(outputs))

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None, *_: Any) -> Any:
        """The r-th tensor of the list of rank ``rootRank`` on rank r."""
        if (other := others.of(self, outputs)) is not None:
            return other.scatter(outputs, inputs, opts)
        root, (output,) = int(opts.rootRank), outputs
        here = list(inputs[0]) if self.us.rank == root else []
        check(self.us.rank != root or len(here) == self.us.world_size, "scatter: a tensor for each rank at the root")
        for given in here:
            check_alike(given, output, "scatter: an input")
        memory, sizes = memory_of(output), sizes_of(outputs)
        table = {rank: memory_of(given).data for rank, given in enumerate(here)}
        call = lambda: self._collectives.scatter(table, root, memory.data, sizes, memory.write_back)  # noqa: E731
        return self._run(call, opts, list(outputs))

    # Between two ranks, and no data at all.

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> Any:
        """A tensor to a rank."""
        if (other := others.of(self, tensors)) is not None:
            return other.send(tensors, rank, tag)
        (tensor,) = tensors
        if self._alone:
            raise UsageError("send: there is no other rank in this group")
        with self._lock:
            work = self._mailbox.send(rank, tag, memory_of(tensor).data)
        return self._under_way(work, work.label, list(tensors))

    def recv(self, tensors: Tensors, rank: int | None, tag: int = 0) -> Any:
        """A tensor of a rank."""
        if (other := others.of(self, tensors)) is not None:
            return other.recv(tensors, rank, tag)
        (tensor,) = tensors
        if self._alone:
            raise UsageError("recv: there is no other rank in this group")
        memory = memory_of(tensor)
        check(memory.dense.data_ptr() == tensor.data_ptr(), "recv: give a contiguous tensor")
        with self._lock:
            work = self._mailbox.receive(rank, tag, memory.data)
        return self._under_way(work, work.label, list(tensors))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        """A tensor of whichever rank sends one."""
        return self.recv(tensors, None, tag)

    def barrier(self, opts: Any = None, *_: Any) -> Any:
        """Wait until all ranks are here; an error names those that are not within the time limit."""
        device = getattr(opts, "device", None)
        if device is not None and (other := others.of_device(self, device)) is not None:
            return other.barrier(opts)
        return self._run(self._collectives.barrier, opts, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:  # noqa: ARG002
        """As ``barrier``; all that are late are named, on all ranks that have come."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        with self._lock:
            call = self._collectives.barrier()
        call.finish(limit_s)

    # How calls run.

    @property
    def _timeout_s(self) -> float:
        return self.timeout.total_seconds()

    @property
    def _alone(self) -> bool:
        return self.us.member.alone

    def _run(self, begin: Callable[[], Call], opts: Any, outputs: Any) -> GroupWork:
        """Make a call: here, where torch waits for it, else behind the script."""
        limit_s = self._limit(opts)
        with self._lock:
            call = begin()
            if not self._alone and getattr(opts, "asyncOp", True):
                return self._under_way(call.begin(), call.label, outputs, limit_s)
        call.finish(limit_s)
        return self._over(outputs)

    def _limit(self, opts: Any) -> float:
        found = getattr(opts, "timeout", None)
        given_s = found.total_seconds() if isinstance(found, timedelta) else 0.0
        if given_s > self._allowed_s:
            self._allow(given_s)
        return given_s if given_s > 0 else self._timeout_s

    def _allow(self, limit_s: float) -> None:
        """Calls may take so long, also where nothing else in the run may."""
        self._allowed_s = limit_s
        if not self._alone:
            self.us.engine.allow(limit_s)

    def _under_way(self, work: Any, label: str, outputs: Any, limit_s: float | None = None) -> GroupWork:
        limit_s = self._timeout_s if limit_s is None else limit_s
        return GroupWork(self.us, work, label, outputs, limit_s, self._completer)

    def _over(self, outputs: Any) -> GroupWork:
        return GroupWork(self.us, None, "", outputs, self._timeout_s, self._completer)
