"""The short way of an allreduce: one tensor of a kind that was summed before.

What such a call needs besides the tensor's address is prepared at the first one, for each number and type of elements.
Any other call, and one that comes while something else is under way, goes the long way (``collectives``), which ranks
do not see: tickets, keys and plan are the same. A call that goes on behind the script is begun in the thread that makes
it, which does all of it where the others have come.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp

from ..engine.engine import Kept
from ..engine.order import Order, Work
from ..errors import PeerTimeout
from ..plans.messages import Program
from ..session.communicator import Communicator
from ..session.tickets import ALLREDUCE, CALLS, Ticket
from .collectives import Collectives, shown
from .tensors import memory_of, reduction_of, sizes_of

_MOST, _MOST_BYTES = 128, 1 << 20
"""How many kinds are remembered, and of how many bytes a tensor may be: memory is kept for each."""

_LABEL = CALLS[ALLREDUCE]


@dataclass(eq=False)
class _Prepared:
    kept: Kept
    argument: int
    flags: int
    work: Work | None = None
    """The last call that went on behind the script: while it does, what is kept is in use."""


class Prompt:
    """The allreduces of the ranks of ``us``, which ``collectives`` counts; ``lock`` is held to take keys."""

    def __init__(self, us: Communicator, collectives: Collectives, lock: threading.RLock) -> None:
        self._us, self._collectives, self._lock = us, collectives, lock
        self._known: dict[tuple[int, torch.dtype], _Prepared | None] = {}
        self._sum = ReduceOp.SUM
        self._busy = False

    def allreduce(self, tensor: torch.Tensor, op: Any, timeout_s: float) -> bool:
        """Sum a tensor in place; False where it has to go the long way, nothing having been done."""
        us = self._us
        with self._lock:
            prepared = self._prepared(tensor, op)
            if prepared is None:
                return False
            self._busy = True
            ticket, key = self._come(prepared)
        try:
            sign = us.sign(ticket)
            if not prepared.kept.run(tensor.data_ptr(), key, _LABEL, sign, timeout_s):
                array = memory_of(tensor).numbers
                us.engine.run(Order(prepared.kept.program, array, key, _LABEL, sign=sign), timeout_s)
        except PeerTimeout:
            if us.engine.error is not None:
                raise
            raise us.late(_LABEL, sorted(us.member.process.engine.absent(key, us.ranks)), timeout_s) from None
        finally:
            self._busy = False
        return True

    def begin(self, tensor: torch.Tensor, op: Any) -> Work | None:
        """Begin to sum a tensor; the work, which may be done. None where it has to go the long way."""
        us = self._us
        with self._lock:
            prepared = self._prepared(tensor, op)
            if prepared is None:
                return None
            ticket, key = self._come(prepared)
            sign = us.sign(ticket)
            work = prepared.kept.begin(tensor.data_ptr(), key, _LABEL, sign, tensor)
            if work is None:
                array = memory_of(tensor).numbers
                work = us.engine.start(Order(prepared.kept.program, array, key, _LABEL, sign=sign))
            else:
                prepared.work = work
            if not work.done:
                us.keys.hold(key, work)
            return work

    def _come(self, prepared: _Prepared) -> tuple[Ticket, int]:
        """Come to the call: as many keys are taken as on the long way."""
        ticket, key = self._us.come(ALLREDUCE, prepared.argument, flags=prepared.flags)
        self._us.keys.take()
        self._collectives.calls += 1
        return ticket, key

    def _prepared(self, tensor: torch.Tensor, op: Any) -> _Prepared | None:
        """What is kept for such a tensor and is not in use; None where there is nothing, or cannot be."""
        if op != self._sum or not (
            type(tensor) is torch.Tensor
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
        ):
            return None
        kind = (tensor.numel(), tensor.dtype)
        if self._busy:
            return None
        prepared = self._known[kind] if kind in self._known else self._prepare(tensor)
        if prepared is None or (prepared.work is not None and not prepared.work.done):
            return None
        return prepared

    def close(self) -> None:
        """What was prepared is not needed any more."""
        while self._known:
            prepared = self._known.popitem()[1]
            if prepared is not None and self._us.engine.error is None:
                self._us.member.process.engine.drop(prepared.kept, prepared.work)

    def _prepare(self, tensor: torch.Tensor) -> _Prepared | None:
        """What is kept for tensors like this one, None where they go the long way."""
        us, nbytes = self._us, tensor.nbytes
        if us.world_size == 1 or not 0 < nbytes <= _MOST_BYTES or tensor.is_complex() or len(self._known) >= _MOST:
            return None
        array = memory_of(tensor).numbers
        reduction = reduction_of(self._sum, array.dtype)
        program = us.allreduce_program(nbytes)
        prepared = None
        if reduction.adds(array.dtype) and isinstance(program, Program) and us.shows(program, array):
            kept = us.member.process.engine.keep(program, array.dtype, array.size)
            if kept is None:  # not now
                return None
            prepared = _Prepared(kept, *shown(reduction.name, sizes_of([tensor])))
        self._known[tensor.numel(), tensor.dtype] = prepared
        return prepared
