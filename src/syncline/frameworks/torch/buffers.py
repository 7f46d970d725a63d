"""Buffers of a model (batch statistics): those of rank 0 are copied to all ranks with every exchange.

They travel packed, and staged as gradients are where the model lives on a device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...engine.work import Work
from ...plans.messages import Program
from ...session.session import MODEL_KEYS, Session
from ...session.tickets import STEP, Meeting
from .agreement import pack_bytes, unpack_bytes
from .options import Selection
from .staging import Staging
from .storage import Pair


class Buffers:
    """The buffers of one model, as they are at the time of each exchange; ``fault`` makes an error of this rank."""

    def __init__(
        self,
        session: Session,
        selection: Selection,
        staging: Staging,
        first_key: int,
        fault: Callable[[str], Exception],
    ) -> None:
        self._session, self._staging, self._fault = session, staging, fault
        self._key = first_key + MODEL_KEYS - 1
        self._buffers = list(selection.buffers().values())
        self._packed = staging.allocate(sum(buffer().nbytes for buffer in self._buffers), np.dtype(np.uint8))
        packed, device = torch.from_numpy(self._packed), staging.device
        self._pair = Pair(packed if device is None else torch.zeros_like(packed, device=device), packed)

    def start(self, meeting: Meeting) -> list[Work]:
        """Copy those of the first rank that takes part in this step to all ranks."""
        if not self._buffers or meeting.work is None:
            return []
        buffers = [buffer() for buffer in self._buffers]
        if sum(buffer.nbytes for buffer in buffers) != self._packed.nbytes:
            raise self._fault("a buffer of the model has another size than at syncline.prepare(): prepare it again")
        pack_bytes(buffers, self._pair.device)

        def program() -> Program:
            kinds = [ticket.kind for ticket in meeting.tickets()]
            return self._session.broadcast_program(kinds.index(STEP))

        gate = self._staging.down(self._pair, meeting.work, "buffers")
        exchange = self._session.engine.exchange(program, self._packed, self._key, "buffers", gate=gate)
        return [self._staging.up(self._pair, exchange, "buffers")]

    def finish(self) -> None:
        """All has come: give it to the model."""
        if self._buffers and self._session.world_size > 1:
            unpack_bytes(self._pair.device, [buffer() for buffer in self._buffers])
