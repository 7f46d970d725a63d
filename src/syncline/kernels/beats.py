"""Sends a few bytes again and again, compiled: no thread that holds the interpreter lock can keep it from doing so."""

from __future__ import annotations

import numpy as np

from .compiled import compiled
from .native import poll, send

_MSG_DONTWAIT, _MSG_NOSIGNAL = 0x40, 0x4000


@compiled("(int64[], int64[], int64[], int64, int64, int64, int64)")
def beat(descriptors, begun, running, frame, nbytes, bell, period_ms):
    """Send ``nbytes`` at address ``frame`` to every socket once per period, until the bell rings.

    ``bell`` is the address of a struct pollfd. A socket that takes nothing is passed over; of a frame that it took a
    part of, ``begun`` is how much, and the rest goes first next time. ``running`` is set when nothing of Python is
    needed any more.
    """
    running[0] = 1
    rung = np.int32(0)
    while rung <= 0:  # negative: a signal came
        for i in range(descriptors.size):
            rest = nbytes - begun[i]
            sent = send(np.int32(descriptors[i]), frame + begun[i], rest, np.int32(_MSG_DONTWAIT | _MSG_NOSIGNAL))
            if sent > 0:
                begun[i] = (begun[i] + sent) % nbytes
        rung = poll(bell, 1, np.int32(period_ms))
