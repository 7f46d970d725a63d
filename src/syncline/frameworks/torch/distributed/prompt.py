"""The short way of an allreduce that torch waits for: one tensor of a kind that was summed before.

What such a call needs besides the tensor's address is prepared at the first one, for each number and type of elements.
Any other call, and one that comes while something else is under way, goes the long way (``collectives``), which ranks
do not see: tickets, keys and plan are the same.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from ....engine.engine import Kept
from ....errors import PeerTimeout
from ....plans.messages import Program
from ....session.communicator import Communicator
from ....session.tickets import ALLREDUCE, CALLS
from .collectives import Collectives, shown
from .reductions import reduction_of
from .tensors import memory_of, sizes_of

_MOST, _MOST_BYTES = 128, 1 << 20
"""How many kinds are remembered, and of how many bytes a tensor may be: memory is kept for each."""

_LABEL = CALLS[ALLREDUCE]


class _Prepared(NamedTuple):
    kept: Kept
    argument: int
    flags: int


class Prompt:
    """The allreduces of the ranks of ``us``, which ``collectives`` counts; ``lock`` is held to take keys."""

    def __init__(self, us: Communicator, collectives: Collectives, lock: threading.RLock) -> None:
        self._us, self._collectives, self._lock = us, collectives, lock
        self._known: dict[tuple[int, torch.dtype], _Prepared | None] = {}
        self._sum = ReduceOp.SUM
        self._busy = False

    def allreduce(self, tensor: torch.Tensor, op: Any, timeout_s: float) -> bool:
        """Sum a tensor in place; False where it has to go the long way, nothing having been done."""
        if op != self._sum or not (
            type(tensor) is torch.Tensor
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
        ):
            return False
        us = self._us
        kind = (tensor.numel(), tensor.dtype)
        with self._lock:
            if self._busy:
                return False
            prepared = self._known[kind] if kind in self._known else self._prepare(tensor)
            if prepared is None:
                return False
            self._busy = True
            ticket, key = us.come(ALLREDUCE, prepared.argument, flags=prepared.flags)
            us.call_key()
            self._collectives.calls += 1
        try:
            sign = us.sign(ticket)
            if not us.engine.run_kept(prepared.kept, tensor.data_ptr(), key, _LABEL, sign, timeout_s):
                array = memory_of(tensor).numbers
                us.engine.run(prepared.kept.program, array, key, _LABEL, sign, timeout_s)
        except PeerTimeout:
            if us.engine.error is not None:
                raise
            raise us.late(_LABEL, sorted(us.engine.absent(key, us.ranks)), timeout_s) from None
        finally:
            self._busy = False
        return True

    def close(self) -> None:
        """What was prepared is not needed any more."""
        while self._known:
            prepared = self._known.popitem()[1]
            if prepared is not None and self._us.engine.error is None:
                self._us.engine.drop(prepared.kept)

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
            kept = us.engine.keep(program, array.dtype, array.size)
            if kept is None:  # not now
                return None
            prepared = _Prepared(kept, *shown(reduction.name, sizes_of([tensor])))
        self._known[tensor.numel(), tensor.dtype] = prepared
        return prepared
