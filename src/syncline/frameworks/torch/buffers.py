"""Buffers of a model (batch statistics): those of rank 0 are copied to all ranks with every exchange of gradients.

Where weights are exchanged, which each rank has trained by itself, floating-point buffers are averaged as these are.
They travel packed, and staged as gradients are where the model lives on a device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...engine.order import Order, When, Work
from ...kernels import cpu
from ...plans.messages import Program
from ...session.layout import BUCKETS
from ...session.session import MODEL_KEYS, Session
from ...session.tickets import JOINED, Meeting
from ...training.memory import Staging
from .agreement import pack_bytes, unpack_bytes
from .options import Selection
from .storage import Pair


class Buffers:
    """The buffers of one model, as they are at the time of each exchange; ``fault`` makes an error of this rank.

    They are those ``among`` all that take part of which that is true.
    """

    def __init__(
        self,
        session: Session,
        selection: Selection,
        staging: Staging,
        first_key: int,
        fault: Callable[[str], Exception],
        among: Callable[[torch.Tensor], bool] = lambda _: True,
    ) -> None:
        self._session, self._staging, self._fault = session, staging, fault
        self._key = first_key + MODEL_KEYS - 1
        self._buffers = [buffer for buffer in selection.buffers().values() if among(buffer())]
        self._packed = staging.allocate(sum(buffer().nbytes for buffer in self._buffers), np.dtype(np.uint8))
        packed, device = torch.from_numpy(self._packed), staging.device
        self._pair = Pair(packed if device is None else torch.zeros_like(packed, device=device), packed)
        self._works: list[Work] = []

    def start(self, meeting: Meeting) -> None:
        """Begin to copy those of the first rank that takes part in this step to all ranks."""
        self._works = []
        if not self._buffers or meeting.work is None:
            return
        buffers = [buffer() for buffer in self._buffers]
        if sum(buffer.nbytes for buffer in buffers) != self._packed.nbytes:
            raise self._fault("a buffer of the model has another size than at syncline.prepare(): prepare it again")
        pack_bytes(buffers, self._pair.device)

        def program() -> Program:
            first = next(rank for rank, ticket in enumerate(meeting.tickets()) if ticket.kind != JOINED)
            return self._session.broadcast_program(first)

        gate = self._staging.down(self._pair, meeting.work, "buffers")
        exchange = self._session.engine.start(Order(program, self._packed, self._key, "buffers"), When(gate))
        self._works = [self._staging.up(self._pair, exchange, "buffers")]

    def finish(self) -> None:
        """Wait for what was begun, and give it to the model."""
        works, self._works = self._works, []
        if works:
            self._session.engine.wait(*works)
            self._staging.join()
            unpack_bytes(self._pair.device, [buffer() for buffer in self._buffers])


class MeanBuffers:
    """The buffers of a model that are averaged with its weights; those that are no floating-point numbers are copied.

    They are added up in float32, or in float64 where any of them is that, between the workers.
    """

    def __init__(
        self,
        session: Session,
        selection: Selection,
        staging: Staging,
        first_key: int,
        fault: Callable[[str], Exception],
    ) -> None:
        self._session, self._staging, self._fault = session, staging, fault
        self._key = first_key + BUCKETS - 1  # no bucket has it
        self._others = Buffers(session, selection, staging, first_key, fault, lambda buffer: not _is_mean(buffer))
        self._buffers = [buffer for buffer in selection.buffers().values() if _is_mean(buffer())]
        wide = any(buffer().dtype == torch.float64 for buffer in self._buffers)
        dtype = np.dtype(np.float64 if wide else np.float32)
        self._packed = staging.allocate(sum(buffer().numel() for buffer in self._buffers) * dtype.itemsize, dtype)
        packed, device = torch.from_numpy(self._packed), staging.device
        self._pair = Pair(packed if device is None else torch.zeros_like(packed, device=device), packed)
        self._works: list[Work] = []
        self._parts = 1

    def start(self, meeting: Meeting, mix: Program | None = None, parts: int = 1) -> None:
        """Begin to average them as they are now, over all workers, or the sum of so many parts that ``mix`` makes."""
        self._works = []
        self._others.start(meeting)
        if not self._buffers or meeting.work is None:
            return
        buffers = [buffer().detach() for buffer in self._buffers]
        if sum(buffer.numel() for buffer in buffers) != self._packed.size:
            raise self._fault("a buffer of the model has another size than at syncline.prepare(): prepare it again")
        at = 0
        for buffer in buffers:
            self._pair.device[at : at + buffer.numel()].copy_(buffer.reshape(-1))
            at += buffer.numel()
        self._pair.device.div_(self._session.world_size if mix is None else 1)
        self._parts = parts
        label, session = "mean of buffers", self._session
        program = session.allreduce_program(self._packed.nbytes) if mix is None else mix
        gate = self._staging.down(self._pair, meeting.work, label)
        when = When(gate, before=lambda: cpu.weigh(self._packed, meeting.share()))
        exchange = session.engine.start(Order(program, self._packed, self._key, label), when)
        self._works = [self._staging.up(self._pair, exchange, label)]

    def finish(self) -> None:
        """Wait for all, and give it to the model."""
        self._others.finish()
        works, self._works = self._works, []
        if not works:
            return
        self._session.engine.wait(*works)
        self._staging.join()
        self._pair.device.div_(self._parts)
        at = 0
        for buffer in (buffer() for buffer in self._buffers):
            part = self._pair.device[at : at + buffer.numel()]
            buffer.data.copy_(part.view(buffer.shape))  # past autograd, as all that comes here
            at += buffer.numel()


def _is_mean(buffer: torch.Tensor) -> bool:
    """Whether the mean of several is one of them: of a number, and no count or index."""
    return buffer.is_floating_point()
