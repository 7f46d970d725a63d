"""Heartbeats: how a process shows those of other machines that it lives, whatever its interpreter is doing.

A thread of Python cannot do that: a call that holds the interpreter lock for longer than the liveness limit, as some
extensions do, would look like death. The kernel cannot either: keepalive probes are answered for a process that is
stopped. So the beats come from compiled code in a thread of this process, without the lock. They stop when the process
is stopped or gone, when its machine hangs and when the link is dead, and at no other time.

A connection has one writer at a time. Whoever has something to say ends the beats first: an object of this class never
begins again. After a goodbye, or the news of a failure, nobody asks for beats. After a question or an answer others
still do: the watcher shows itself that it lives, and once its words are all sent it leaves that to new beats.
"""

from __future__ import annotations

import os
import select
import struct
import threading
import time
from collections.abc import Mapping
from socket import socket

import numpy as np

_POLLFD = struct.Struct("=ihh")

START_S = 5.0
"""How long ``start`` waits for its thread, which needs the interpreter lock until it runs compiled code."""


class Beats:
    """Sends ``frame`` over every connection once per ``period_s``, from ``start`` until ``end``."""

    def __init__(self, socks: Mapping[int, socket], frame: bytes, period_s: float) -> None:
        from ..kernels.beats import beat  # compiled code: loaded where it is used

        self._peers = tuple(socks)
        self._frame = np.frombuffer(frame, np.uint8)
        self._descriptors = np.array([sock.fileno() for sock in socks.values()], np.int64)
        self._begun = np.zeros(len(socks), np.int64)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = np.frombuffer(bytearray(_POLLFD.pack(self.bell, select.POLLIN, 0)), np.uint8)
        self._running = np.zeros(1, np.int64)
        arguments = (
            self._descriptors,
            self._begun,
            self._running,
            self._frame.ctypes.data,
            self._frame.nbytes,
            self._poll.ctypes.data,
            max(1, int(period_s * 1000)),
        )
        self._thread = threading.Thread(target=beat, args=arguments, name="syncline-beats", daemon=True)
        self._ended = False

    def start(self) -> None:
        """Begin: from then on no thread that holds the interpreter lock is in the way."""
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not self._running[0] and time.monotonic() < deadline:
            time.sleep(0.0001)

    def end(self) -> dict[int, bytes]:
        """Send no more; by peer what is left of a frame that had begun. Called by one thread at a time."""
        if self._ended:
            return {}
        self._ended = True
        os.eventfd_write(self.bell, 1)
        if self._thread.ident is not None:
            self._thread.join()
        bell, self.bell = self.bell, -1  # the number may be another file's from here on
        os.close(bell)
        begun = zip(self._peers, self._begun.tolist(), strict=True)
        return {peer: self._frame[count:].tobytes() for peer, count in begun if count}
