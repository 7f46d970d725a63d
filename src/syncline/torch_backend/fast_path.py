"""A fast path for allreduce: one tensor of a size and type that was summed before.

The first call for each size and type prepares everything except the tensor's address. Other calls, and calls while
anything else is in flight, take the normal path (``collectives``). Other ranks cannot tell the difference: tickets,
keys and plan are the same. A background call starts in the calling thread, which completes it if the other ranks have
arrived.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp

from ..engine.engine import PreparedRun
from ..engine.order import Order, Work
from ..errors import PeerTimeout
from ..plans.messages import Program
from ..session.communicator import Communicator
from ..session.tickets import ALLREDUCE, CALLS, Ticket
from .collectives import Collectives, shown
from .tensors import memory_of, reduction_of, sizes_of

_MOST, _MOST_BYTES = 128, 1 << 20
"""The most prepared kinds and the most bytes per tensor, because each kind keeps memory."""

_LABEL = CALLS[ALLREDUCE]


@dataclass(eq=False)
class _Prepared:
    kept: PreparedRun
    argument: int
    flags: int
    work: Work | None = None
    """The last background call, which uses its prepared run until it is done."""


class FastAllreduce:
    """The allreduces of the ranks of ``us``, counted by ``collectives``. Hold ``lock`` to take keys."""

    def __init__(self, us: Communicator, collectives: Collectives, lock: threading.RLock) -> None:
        self._us, self._collectives, self._lock = us, collectives, lock
        self._known: dict[tuple[int, torch.dtype], _Prepared | None] = {}
        self._sum = ReduceOp.SUM
        self._busy = False

    def allreduce(self, tensor: torch.Tensor, op: Any, timeout_s: float) -> bool:
        """Sum a tensor in place. False, without side effects, if it must take the normal path."""
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
            raise us.late(_LABEL, sorted(us.process.engine.absent(key, us.ranks)), timeout_s) from None
        finally:
            self._busy = False
        return True

    def begin(self, tensor: torch.Tensor, op: Any) -> Work | None:
        """Start to sum a tensor. Returns the work, which may be done; None if it must take the normal path."""
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
        """Count the call and take the same number of keys as on the normal path."""
        ticket, key = self._us.come(ALLREDUCE, prepared.argument, flags=prepared.flags)
        self._us.keys.take()
        self._collectives.calls += 1
        return ticket, key

    def _prepared(self, tensor: torch.Tensor, op: Any) -> _Prepared | None:
        """The prepared run for such a tensor, if it is free; None if there is none or it cannot be prepared."""
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
        """Release all prepared runs and their memory."""
        while self._known:
            prepared = self._known.popitem()[1]
            if prepared is not None and self._us.engine.error is None:
                self._us.process.engine.drop(prepared.kept, prepared.work)

    def _prepare(self, tensor: torch.Tensor) -> _Prepared | None:
        """Prepare a run for tensors like this one; None if they must take the normal path."""
        us, nbytes = self._us, tensor.nbytes
        if us.world_size == 1 or not 0 < nbytes <= _MOST_BYTES or tensor.is_complex() or len(self._known) >= _MOST:
            return None
        array = memory_of(tensor).numbers
        reduction = reduction_of(self._sum, array.dtype)
        program = us.allreduce_program(nbytes)
        prepared = None
        if reduction.adds(array.dtype) and isinstance(program, Program) and us.shows(program, array):
            kept = us.process.engine.keep(program, array.dtype, array.size)
            if kept is None:  # not now
                return None
            prepared = _Prepared(kept, *shown(reduction.name, sizes_of([tensor])))
        self._known[tensor.numel(), tensor.dtype] = prepared
        return prepared
