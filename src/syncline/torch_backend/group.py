"""The process group that torch calls, on top of the collectives of a communicator.

A method validates the call's tensors, turns them into arrays and sizes, and defines what is written back (``tensors``);
``works`` runs the calls. Torch reaches some of these methods by several names, which changed between its versions.

Torch assigns a group written in Python to all devices and creates none of the other backends that were requested, as in
``init_process_group("cpu:syncline,cuda:nccl")``. The first tensor on another device therefore creates that device's
backend, in a group of torch's own beside this one, and calls with such tensors are forwarded. If no backend was
requested for a device, its tensors are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import Backend, ProcessGroup, ReduceOp

from ..errors import ClosedError, PeerError
from ..frameworks.torch.compiled import eager_methods
from ..frameworks.torch.storage import dtype_name
from ..session.communicator import Communicator
from . import NAME
from .collectives import Call, Collectives
from .fast_path import FastAllreduce
from .mailbox import Mailbox
from .tensors import (
    Array,
    Reduction,
    Tensors,
    check,
    check_alike,
    check_one_type,
    cut,
    memory_of,
    reduction_of,
    share_out,
    sizes_of,
    table_of,
    together,
)
from .works import GroupWork, Running

_Base: Any = ProcessGroup  # torch declares several forms of each call


@eager_methods
class SynclineGroup(_Base):  # type: ignore[misc]
    """The process group of the ranks of ``us``. ``shut`` is called when the group is destroyed."""

    def __init__(
        self,
        store: Any,
        us: Communicator,
        timeout: timedelta,
        shut: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(us.rank, us.world_size)
        assert not us.member.title  # calls use the run's process indices and keys
        self.us, self.store = us, store
        self.beside: dict[str, Any] = {}
        """The groups for other devices' backends."""
        self._shut = shut
        self._called, self._described = "", ""
        self._running = running = Running(us, timeout)
        self._collectives = collectives = Collectives(us)
        self._mailbox = Mailbox(us)
        self._fast = FastAllreduce(us, collectives, running.lock)
        self._summed = running.over([])

    def getBackendName(self) -> str:
        """The name of this backend in torch."""
        return NAME

    def _get_backend_name(self) -> str:
        return NAME

    def name(self) -> str:
        """The name of this backend in torch."""
        return NAME

    @property
    def group_name(self) -> Any:
        """The group's name in torch. The base class would ask an inner backend."""
        return self._called

    @property
    def group_desc(self) -> str:
        """The description that the script gave."""
        return self._described

    def _set_group_name(self, name: str) -> None:
        self._called = name

    def _set_group_desc(self, text: str) -> None:
        self._described = text

    @property
    def timeout(self) -> timedelta:
        """The default time limit of calls."""
        return self._running.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default time limit of calls."""
        self._running.limit_to(timeout)

    # Torch's base class asks inner backends, which this group does not have.

    @property
    def _device_types(self) -> list[torch.device]:
        return _devices(self)

    def _get_backend(self, device: torch.device) -> Any:
        other = _of_device(self, torch.device(device))
        return self if other is None else other._get_backend(device)

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: calls are always counted."""

    def _get_sequence_number_for_group(self) -> int:
        return self._collectives.calls

    def _start_coalescing(self, device: Any = None) -> None:
        """Does nothing: only calls that torch itself coalesces are coalesced."""

    def _end_coalescing(self, device: Any = None) -> GroupWork:  # noqa: ARG002
        return self._running.over([])

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Does nothing: the end waits for works in flight."""

    def shutdown(self) -> None:
        """Destroy the group and give up receives without a message."""
        while self.beside:
            self.beside.popitem()[1].shutdown()
        if not self._running.alone and self.us.process.usable:
            self._mailbox.close()
            self._fast.close()
            if self._mailbox.unused:
                self.us.give_back()
        self._shut()

    def abort(self) -> None:
        """End the run at once, with everything in flight. The other ranks get an error that names this one."""
        while self.beside:
            self.beside.popitem()[1].abort()
        if not self._running.alone and self.us.process.usable:
            name = self.us.name(self.us.rank)
            self.us.process.fail(ClosedError(f"{name} has aborted the process group {self._called or 'of all ranks'}"))
        with contextlib.suppress(ClosedError, PeerError):
            self._shut()

    # Reductions

    def allreduce(self, tensors: Tensors, opts: Any = None, *_: Any) -> Any:
        if opts is not None and len(tensors) == 1:
            limit_s = self._running.limit_s(opts)
            if getattr(opts, "asyncOp", True):
                if (work := self._fast.begin(tensors[0], opts.reduceOp)) is not None:
                    return self._running.under_way(None if work.done else work, work.label, list(tensors), limit_s)
            elif self._fast.allreduce(tensors[0], opts.reduceOp, limit_s):
                return self._summed
        if (other := _beside(self, tensors)) is not None:
            return other.allreduce(tensors, opts)
        return _reduce(self, self._collectives.allreduce, tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        if (other := _beside(self, tensors)) is not None:
            return other.allreduce_coalesced(tensors, opts)
        return _reduce(self, self._collectives.allreduce, tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any = None, *_: Any) -> Any:
        if (other := _beside(self, tensors)) is not None:
            return other.reduce(tensors, opts)
        root = int(opts.rootRank)
        return _reduce(self, partial(self._collectives.reduce, root), tensors, opts, in_place=self.us.rank == root)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None, *_: Any) -> Any:
        if (other := _beside(self, outputs)) is not None:
            return other.reduce_scatter(outputs, inputs, opts)
        check(len(outputs) == len(inputs) == 1, "reduce_scatter takes one output and one list of inputs")
        (parts,), (output,), world = inputs, outputs, self.us.world_size
        what = "reduce_scatter's list of inputs"
        check(len(parts) == world, f"{what} has {len(parts)} tensors for {world} ranks")
        for part in parts:
            check_alike(part, output, what)
        return _scatter_reduced(self, outputs, np.stack([memory_of(part).numbers for part in parts]), opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        if (other := _beside(self, [output])) is not None:
            return other._reduce_scatter_base(output, given, opts)
        return _scatter_reduced(self, [output], table_of([given], [output], self.us.world_size), opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        if (other := _beside(self, outputs)) is not None:
            return other.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        return _scatter_reduced(self, outputs, table_of(inputs, outputs, self.us.world_size), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Copies

    def broadcast(self, tensors: Tensors, opts: Any = None, *_: Any) -> Any:
        if (other := _beside(self, tensors)) is not None:
            return other.broadcast(tensors, opts)
        memories, root = [memory_of(tensor) for tensor in tensors], int(opts.rootRank)
        if len(memories) == 1:
            data, done = memories[0].data, memories[0].write_back
        else:
            data = together(tensors)
            done = partial(share_out, data, memories)
        check(0 <= root < self.us.world_size, f"broadcast: there is no rank {root} in this group")
        begin = partial(self._collectives.broadcast, data, root, sizes_of(tensors), done)
        return self._running.run(begin, opts, list(tensors))

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None, *_: Any) -> Any:
        if (other := _beside(self, inputs)) is not None:
            return other.allgather(outputs, inputs, opts)
        check(len(outputs) == len(inputs) == 1, "allgather takes one input and one list of outputs")
        return _gather_rows(self, [[output] for output in outputs[0]], inputs, opts, list(outputs))

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        if (other := _beside(self, inputs)) is not None:
            return other.allgather_coalesced(outputs, inputs, opts)
        return _gather_rows(self, outputs, inputs, opts, list(outputs))

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        if (other := _beside(self, [given])) is not None:
            return other._allgather_base(output, given, opts)
        world = self.us.world_size
        check(
            output.numel() == world * given.numel() and output.dtype == given.dtype,
            f"all-gather: the output has {output.numel()} elements of {output.dtype}, the input {given.numel()} of"
            f" {given.dtype}; with {world} ranks the output is {world} times the input",
        )
        memory = memory_of(output)
        mine, table = memory_of(given).data, memory.data.reshape(world, -1)
        begin = partial(self._collectives.all_gather, mine, table, sizes_of([given]), memory.write_back)
        return self._running.run(begin, opts, [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        if (other := _beside(self, inputs)) is not None:
            return other.allgather_into_tensor_coalesced(outputs, inputs, opts)
        world = self.us.world_size
        rows: list[list[torch.Tensor]] = [[] for _ in range(world)]
        for output, given in zip(outputs, inputs, strict=True):
            check(output.numel() == world * given.numel(), f"all-gather: an output must be {world} times its input")
            check(output.is_contiguous(), "all-gather: an output must be contiguous")
            flat = output.detach().view(world, *given.shape)
            for row, part in zip(rows, flat, strict=True):
                row.append(part)
        return _gather_rows(self, rows, inputs, opts, list(outputs))

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
        """Exchange parts of one tensor with all ranks; sizes count along the first dimension."""
        if (other := _beside(self, [given])) is not None:
            return other.alltoall_base(output, given, output_sizes, input_sizes, opts)
        check(output.dtype == given.dtype, f"all-to-all: the output is {output.dtype}, the input {given.dtype}")
        into, memory = cut(output, output_sizes, self.us.world_size, "output")
        out, _ = cut(given, input_sizes, self.us.world_size, "input")
        begin = partial(self._collectives.all_to_all, out, into, dtype_name(given.dtype), memory.write_back)
        return self._running.run(begin, opts, [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any) -> Any:
        if (other := _beside(self, inputs)) is not None:
            return other.alltoall(outputs, inputs, opts)
        world = self.us.world_size
        check(len(outputs) == len(inputs) == world, f"all-to-all takes a tensor for each of the {world} ranks")
        out = {rank: memory_of(given).data for rank, given in enumerate(inputs)}
        into, done = _places(outputs)
        begin = partial(self._collectives.all_to_all, out, into, dtype_name(inputs[0].dtype), done)
        return self._running.run(begin, opts, list(outputs))

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None, *_: Any) -> Any:
        if (other := _beside(self, inputs)) is not None:
            return other.gather(outputs, inputs, opts)
        root, (given,) = int(opts.rootRank), inputs
        here = list(outputs[0]) if self.us.rank == root else []
        check(
            self.us.rank != root or len(here) == self.us.world_size, "gather: the root must give a tensor for each rank"
        )
        for output in here:
            check_alike(output, given, "gather: an output")
        into, done = _places(here)
        begin = partial(self._collectives.gather, memory_of(given).data, root, into, sizes_of(inputs), done)
        return self._running.run(begin, opts, list(outputs))

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None, *_: Any) -> Any:
        if (other := _beside(self, outputs)) is not None:
            return other.scatter(outputs, inputs, opts)
        root, (output,) = int(opts.rootRank), outputs
        here = list(inputs[0]) if self.us.rank == root else []
        check(
            self.us.rank != root or len(here) == self.us.world_size,
            "scatter: the root must give a tensor for each rank",
        )
        for given in here:
            check_alike(given, output, "scatter: an input")
        memory, out = memory_of(output), {rank: memory_of(given).data for rank, given in enumerate(here)}
        begin = partial(self._collectives.scatter, out, root, memory.data, sizes_of(outputs), memory.write_back)
        return self._running.run(begin, opts, list(outputs))

    # Point-to-point, and barriers

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> Any:
        if (other := _beside(self, tensors)) is not None:
            return other.send(tensors, rank, tag)
        (tensor,) = tensors
        check(not self._running.alone, "send: there is no other rank in this group")
        with self._running.lock:
            work = self._mailbox.send(rank, tag, memory_of(tensor).data)
        return self._running.under_way(work, work.label, list(tensors))

    def recv(self, tensors: Tensors, rank: int | None, tag: int = 0) -> Any:
        if (other := _beside(self, tensors)) is not None:
            return other.recv(tensors, rank, tag)
        (tensor,) = tensors
        check(not self._running.alone, "recv: there is no other rank in this group")
        memory = memory_of(tensor)
        check(memory.dense.data_ptr() == tensor.data_ptr(), "recv: give a contiguous tensor")
        with self._running.lock:
            work = self._mailbox.receive(rank, tag, memory.data)
        return self._running.under_way(work, work.label, list(tensors))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return self.recv(tensors, None, tag)

    def barrier(self, opts: Any = None, *_: Any) -> Any:
        """Wait until all ranks are here. The error after the time limit names the missing ranks."""
        device = getattr(opts, "device", None)
        if device is not None and (other := _of_device(self, device)) is not None:
            return other.barrier(opts)
        return self._running.run(self._collectives.barrier, opts, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:  # noqa: ARG002
        """As ``barrier``. All missing ranks are named, on all ranks that are here."""
        limit_s = self._running.timeout_s if timeout is None else timeout.total_seconds()
        with self._running.lock:
            call = self._collectives.barrier()
        call.finish(limit_s)


# Helpers of several calls. They are functions because the class pays for every method to keep it from the compiler.


def _reduce(
    group: SynclineGroup, begin: Callable[..., Call], tensors: Tensors, opts: Any, in_place: bool = True
) -> GroupWork:
    memories = [memory_of(tensor) for tensor in tensors]
    check_one_type(tensors)
    if len(memories) == 1 and in_place:
        array, done = memories[0].numbers, memories[0].write_back
    else:
        array = np.concatenate([memory.numbers for memory in memories])
        done = partial(share_out, array.view(np.uint8), memories)
    reduction = _reduction(opts, array, tensors)
    return group._running.run(partial(begin, array, reduction, sizes_of(tensors), done), opts, list(tensors))


def _scatter_reduced(group: SynclineGroup, outputs: Tensors, table: Array, opts: Any) -> GroupWork:
    """Row r of the table, which is overwritten, becomes rank r's share of every input."""
    check_one_type(outputs)
    memories = [memory_of(output) for output in outputs]
    begin, reduction = group._collectives.reduce_scatter, _reduction(opts, table, outputs)

    def done(mine: Array) -> None:
        share_out(mine.view(np.uint8), memories)

    return group._running.run(partial(begin, table, reduction, sizes_of(outputs), done), opts, list(outputs))


def _gather_rows(
    group: SynclineGroup, outputs: Sequence[Tensors], inputs: Tensors, opts: Any, handed: list[Any]
) -> GroupWork:
    """Gather each rank's tensors in rank order. ``handed`` is the call's result."""
    world = group.us.world_size
    check(len(outputs) == world, f"all-gather: {len(outputs)} outputs for {world} ranks")
    for row in outputs:
        for output, given in zip(row, inputs, strict=True):
            check_alike(output, given, "all-gather: an output")
    memories = [[memory_of(output) for output in row] for row in outputs]
    mine = together(inputs)
    table = np.empty((world, mine.size), np.uint8)

    def done() -> None:
        for row, data in zip(memories, table, strict=True):
            share_out(data, row)

    begin = partial(group._collectives.all_gather, mine, table, sizes_of(inputs), done)
    return group._running.run(begin, opts, handed)


def _reduction(opts: Any, array: Array, tensors: Tensors) -> Reduction:
    """The reduction of a call, for its tensors' element type."""
    return reduction_of(ReduceOp.SUM if opts is None else opts.reduceOp, array.dtype, tensors[0].is_complex())


def _places(outputs: Tensors) -> tuple[dict[int, Array], Callable[[], None]]:
    """The memory for each rank's bytes, and the functions to call when they have arrived."""
    memories = [memory_of(output) for output in outputs]

    def done() -> None:
        for memory in memories:
            memory.write_back()

    return {rank: memory.data for rank, memory in enumerate(memories)}, done


# Backends of other devices


def _beside(group: SynclineGroup, tensors: Sequence[Any]) -> Any:
    """The group for tensors on another device; None for tensors that this group moves itself."""
    first = tensors[0] if tensors else None
    if not isinstance(first, torch.Tensor) or first.device.type == "cpu":
        return None
    return _of_device(group, first.device)


def _of_device(group: SynclineGroup, device: torch.device) -> Any:
    """The group for a device. The first call creates it."""
    if device.type == "cpu":
        return None
    found = group.beside.get(device.type)
    if found is None:
        found = group.beside[device.type] = _make(group, device.type, _asked_for(group, device.type))
    return found


def _devices(group: SynclineGroup) -> list[torch.device]:
    """The devices whose tensors the group accepts, the CPU first."""
    return [torch.device("cpu"), *(torch.device(kind) for kind in _asked(group) if kind != "cpu")]


def _asked(group: SynclineGroup) -> dict[str, str]:
    """The backends requested for devices, except this one."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {kind: name for kind, _, name in pairs if name != group.name()}


def _asked_for(group: SynclineGroup, device: str) -> str:
    name = _asked(group).get(device, "")
    if not name:
        better = "cuda:nccl" if device == "cuda" else f"{device}:BACKEND"
        raise NotImplementedError(
            f"the backend syncline moves tensors on the CPU, but this tensor is on {device}: use"
            f' init_process_group("cpu:syncline,{better}"), or move the tensor with .cpu()'
        )
    return name


def _make(group: SynclineGroup, device: str, name: str) -> Any:
    """A group of torch's own with one backend. Collective at the first call for that device."""
    store, rank, size = PrefixStore(f"beside/{device}/", group.store), group.rank(), group.size()
    timeout = group.timeout
    inner = ProcessGroup(store, rank, size)
    kind = Backend.backend_type_map[name]
    backend: Any
    if name == Backend.GLOO:
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    elif name == Backend.NCCL:
        if not dist.is_nccl_available():
            raise NotImplementedError("this build of PyTorch has no NCCL: install one with CUDA, or use cuda:gloo")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.global_ranks_in_group = list(dist.get_process_group_ranks(group))
        options.group_name = group.group_name
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
    elif (plugin := Backend._plugins.get(name.upper())) is not None and not plugin.extended_api:
        backend = plugin.creator_fn(store, rank, size, timeout)
    else:
        raise NotImplementedError(f"the backend {name} cannot be made beside syncline: use gloo or nccl for {device}")
    if isinstance(backend, ProcessGroup):
        return backend
    inner._set_default_backend(kind)
    inner._register_backend(torch.device(device), kind, backend)
    return inner
