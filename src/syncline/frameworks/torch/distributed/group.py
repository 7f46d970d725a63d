"""The process group: what torch calls, in torch's words, over the collectives of a communicator.

What a call does to tensors is in ``reducing`` and ``moving``, and how it runs in ``running``. Tensors of another device
go to the backend that the group was given for it (``others``). Torch reaches some of these methods by more than one
name, which changed between its versions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ....errors import ClosedError, PeerError, UsageError
from ....session.communicator import Communicator
from ..eager import eager_methods
from . import others
from .checks import check
from .collectives import Collectives
from .mailbox import Mailbox
from .moving import Moving
from .prompt import Prompt
from .reducing import Reducing
from .running import Running
from .tensors import memory_of
from .works import GroupWork

Tensors = Sequence[torch.Tensor]

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
        assert us.member is us.member.process  # calls name processes and keys as the run does
        self.us, self.store = us, store
        self.beside: dict[str, Any] = {}
        """Groups of other devices' backends."""
        self._shut = shut
        self._called, self._described = "", ""
        self._running = running = Running(us, timeout)
        self._collectives = collectives = Collectives(us)
        self._mailbox = Mailbox(us)
        self._reducing, self._moving = Reducing(running, collectives), Moving(running, collectives)
        self._prompt = Prompt(us, collectives, running.lock)
        self._summed = running.over([])

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

    @property
    def timeout(self) -> timedelta:
        """The time limit of calls that give none."""
        return self._running.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Let calls that give no time limit have this one."""
        self._running.limit_to(timeout)

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
        return self._running.over([])

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """The end waits for what is under way."""

    def shutdown(self) -> None:
        """The group is destroyed; receives that nothing was sent for are given up."""
        while self.beside:
            self.beside.popitem()[1].shutdown()
        if not self._running.alone and self.us.member.process.usable:
            self._mailbox.close()
            self._prompt.close()
            if self._mailbox.unused:
                self.us.give_back()
        self._shut()

    def abort(self) -> None:
        """End what is under way, and with it the run, without waiting: the others get an error that names this rank."""
        while self.beside:
            self.beside.popitem()[1].abort()
        if not self._running.alone and self.us.member.process.usable:
            name = self.us.name(self.us.rank)
            self.us.member.process.fail(
                ClosedError(f"{name} has aborted the process group {self._called or 'of all ranks'}")
            )
        with contextlib.suppress(ClosedError, PeerError):
            self._shut()

    # Reductions.

    def allreduce(self, tensors: Tensors, opts: Any = None, *_: Any) -> Any:
        """Each tensor becomes that of all ranks."""
        if opts is not None and len(tensors) == 1:
            limit_s = self._running.limit_s(opts)
            if getattr(opts, "asyncOp", True):
                if (work := self._prompt.begin(tensors[0], opts.reduceOp)) is not None:
                    return self._running.under_way(None if work.done else work, work.label, list(tensors), limit_s)
            elif self._prompt.allreduce(tensors[0], opts.reduceOp, limit_s):
                return self._summed
        if (other := others.of(self, tensors)) is not None:
            return other.allreduce(tensors, opts)
        return self._reducing.allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """Several in one call."""
        if (other := others.of(self, tensors)) is not None:
            return other.allreduce_coalesced(tensors, opts)
        return self._reducing.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any = None, *_: Any) -> Any:
        """Of rank ``rootRank`` alone."""
        if (other := others.of(self, tensors)) is not None:
            return other.reduce(tensors, opts)
        return self._reducing.reduce(tensors, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None, *_: Any) -> Any:
        """Rank r gets the r-th tensor of all, reduced."""
        if (other := others.of(self, outputs)) is not None:
            return other.reduce_scatter(outputs, inputs, opts)
        return self._reducing.reduce_scatter(outputs, inputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        """Rank r gets the r-th part of one tensor of all, reduced."""
        if (other := others.of(self, [output])) is not None:
            return other._reduce_scatter_base(output, given, opts)
        return self._reducing.reduce_scatter_single_coalesced([output], [given], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Of several in one call."""
        if (other := others.of(self, outputs)) is not None:
            return other.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        return self._reducing.reduce_scatter_single_coalesced(outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # What is only moved.

    def broadcast(self, tensors: Tensors, opts: Any = None, *_: Any) -> Any:
        """Tensors of rank ``rootRank`` on all."""
        if (other := others.of(self, tensors)) is not None:
            return other.broadcast(tensors, opts)
        return self._moving.broadcast(tensors, opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None, *_: Any) -> Any:
        """Each rank's tensor, in a list on all."""
        if (other := others.of(self, inputs)) is not None:
            return other.allgather(outputs, inputs, opts)
        return self._moving.allgather(outputs, inputs, opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """Each rank's tensors, rank by rank, on all."""
        if (other := others.of(self, inputs)) is not None:
            return other.allgather_coalesced(outputs, inputs, opts)
        return self._moving.allgather_coalesced(outputs, inputs, opts, list(outputs))

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        """Each rank's tensor, one behind the other in one tensor on all."""
        if (other := others.of(self, [given])) is not None:
            return other._allgather_base(output, given, opts)
        return self._moving.all_gather_single(output, given, opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Of several in one call."""
        if (other := others.of(self, inputs)) is not None:
            return other.allgather_into_tensor_coalesced(outputs, inputs, opts)
        return self._moving.all_gather_single_coalesced(outputs, inputs, opts)

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
        return self._moving.all_to_all_single(output, given, output_sizes, input_sizes, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any) -> Any:
        """A tensor to each rank, and one of each."""
        if (other := others.of(self, inputs)) is not None:
            return other.alltoall(outputs, inputs, opts)
        return self._moving.alltoall(outputs, inputs, opts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None, *_: Any) -> Any:
        """Each rank's tensor, in a list on rank ``rootRank``."""
        if (other := others.of(self, inputs)) is not None:
            return other.gather(outputs, inputs, opts)
        return self._moving.gather(outputs, inputs, opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None, *_: Any) -> Any:
        """The r-th tensor of the list of rank ``rootRank`` on rank r."""
        if (other := others.of(self, outputs)) is not None:
            return other.scatter(outputs, inputs, opts)
        return self._moving.scatter(outputs, inputs, opts)

    # Between two ranks, and no data at all.

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> Any:
        """A tensor to a rank."""
        if (other := others.of(self, tensors)) is not None:
            return other.send(tensors, rank, tag)
        (tensor,) = tensors
        if self._running.alone:
            raise UsageError("send: there is no other rank in this group")
        with self._running.lock:
            work = self._mailbox.send(rank, tag, memory_of(tensor).data)
        return self._running.under_way(work, work.label, list(tensors))

    def recv(self, tensors: Tensors, rank: int | None, tag: int = 0) -> Any:
        """A tensor of a rank."""
        if (other := others.of(self, tensors)) is not None:
            return other.recv(tensors, rank, tag)
        (tensor,) = tensors
        if self._running.alone:
            raise UsageError("recv: there is no other rank in this group")
        memory = memory_of(tensor)
        check(memory.dense.data_ptr() == tensor.data_ptr(), "recv: give a contiguous tensor")
        with self._running.lock:
            work = self._mailbox.receive(rank, tag, memory.data)
        return self._running.under_way(work, work.label, list(tensors))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        """A tensor of whichever rank sends one."""
        return self.recv(tensors, None, tag)

    def barrier(self, opts: Any = None, *_: Any) -> Any:
        """Wait until all ranks are here; an error names those that are not within the time limit."""
        device = getattr(opts, "device", None)
        if device is not None and (other := others.of_device(self, device)) is not None:
            return other.barrier(opts)
        return self._running.run(self._collectives.barrier, opts, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:  # noqa: ARG002
        """As ``barrier``; all that are late are named, on all ranks that have come."""
        limit_s = self._running.timeout_s if timeout is None else timeout.total_seconds()
        with self._running.lock:
            call = self._collectives.barrier()
        call.finish(limit_s)
