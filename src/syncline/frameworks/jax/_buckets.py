"""Gradients that compiled code puts into their buckets, without the interpreter; a thread tells the model of them.

Each call of a computation comes on a thread of XLA's, which would have to wait for the interpreter, which the engine
wants too. So only the beginning and the end of a step are calls of Python. In between
``kernels.calls`` copies, counts, and rings a bell, at which a thread hands over whatever buckets have come: several at
once where they come faster than they can go. The end hands over what is left, so that nothing depends on that thread
but how early buckets go. What has come at the end compiled code gives to the computation.

What the two agree on is a table, whose words ``kernels.calls`` names. Its address goes through the computation.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...kernels import calls as kernel
from ...kernels.passes import CODES
from .._flat import FlatModel
from ._calls import Array, calls

TOKEN = np.zeros(4, np.int32)
"""What one call hands to the next: the step and the table's address, as two words of 64 bits."""

PUT, TAKE = "syncline_put", "syncline_take"

_LOOK_MS = 1000
"""How often the thread looks whether the run is over."""


class Buckets:
    """A model's gradients, in ``starts``: the tensors that come with each call, in the order of calls.

    ``after`` are the arrays that the computation is given at the end.
    """

    def __init__(self, model: FlatModel, starts: Sequence[Sequence[int]], after: Sequence[Array]) -> None:
        for name, function in ((PUT, kernel.put), (TAKE, kernel.take)):
            calls.make_code(name, function.code)
        self._model, self._starts, self._keep = model, starts, list(after)
        self._table = _table([[model.coming.places[tensor].array for tensor in tensors] for tensors in starts], after)
        self._told = len(starts)  # calls of the present step whose tensors the model has been told of
        self._telling = threading.Lock()
        self._error: BaseException | None = None
        self._table[kernel.BELL] = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # stays, as calls do
        self._thread: threading.Thread | None = None

    def begin(self, step: int, token: Array) -> None:
        """A step begins: what the computation is handed."""
        with self._telling:
            self._table[kernel.SHARE : kernel.SHARE + 1].view(np.float64)[0] = self._model.begin()
            self._table[kernel.DONE] = self._told = 0
        if self._thread is None and len(self._starts) > 1:
            self._thread = threading.Thread(target=self._listen, name="syncline-gradients", daemon=True)
            self._thread.start()
        token.view(np.int64)[:] = step, self._table.ctypes.data

    def finish(self) -> None:
        """All have come; raises what has gone wrong on the way."""
        self._tell()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _tell(self) -> None:
        """Let the model know of what has come since."""
        with self._telling:
            while self._told < int(self._table[kernel.DONE]) and self._error is None:
                tensors = self._starts[self._told]
                self._told += 1
                try:
                    for tensor in tensors:
                        self._model.placed(tensor)
                except BaseException as error:  # the end of the step raises it
                    self._error = error

    def _listen(self) -> None:
        """What the thread does, until the run is over."""
        table, bell = self._table, int(self._table[kernel.BELL])
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        while self._model.session.member.process.usable:
            table[kernel.ASLEEP] = 1
            self._tell()
            rung = poll.poll(_LOOK_MS)
            table[kernel.ASLEEP] = 0
            if rung:
                os.eventfd_read(bell)
                self._tell()


def _table(starts: Sequence[Sequence[Array]], after: Sequence[Array]) -> Any:
    begins, rows = [], list[int]()
    first = kernel.ROWS + len(starts)
    for arrays in (*starts, after):
        begins.append(first + len(rows))
        rows.append(len(arrays))
        for array in arrays:
            rows += CODES[str(array.dtype)], array.ctypes.data, array.size, array.nbytes
    table = np.zeros(first + len(rows), np.int64)
    table[kernel.ONE], table[kernel.TAKES] = 1, begins[-1]
    table[kernel.ROWS : first], table[first:] = begins[:-1], rows
    return table
