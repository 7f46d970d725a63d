"""Lines between the launcher and the processes of an elastic run, over which these agree on the run's members.

The launcher relays packets between processes, tells all when one has ended, and favours one half of a view if each of
two halves could go on (``membership``). Each process inherits one end of a socket pair, so the sender of a packet is
known. A packet is a JSON object. A packet that a full socket does not take is lost, which the protocol allows.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..errors import GroupError

VARIABLE = "SYNCLINE_ELASTIC"
"""The environment variable with the descriptor of a process's end, its number, all processes, and the least number."""

PACKET_BYTES = 1 << 16


class Relay:
    """The launcher's side. The run goes on as long as ``least`` processes are left."""

    def __init__(self, processes: int, least: int) -> None:
        self._least = least
        self._pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(processes)]
        self._favoured: dict[int, list[int]] = {}  # by view
        self._view = 0
        self._begun = False  # a process has called ``syncline.elastic``
        self._ended: dict[int, int] = {}  # status, by rank
        self.members = set(range(processes))
        """The ranks of the processes in the latest view."""
        for ours, _ in self._pairs:
            ours.setblocking(False)

    def sockets(self) -> list[socket.socket]:
        """The ends of the launcher, by rank."""
        return [ours for ours, _ in self._pairs]

    def inherited(self, rank: int) -> int:
        """The descriptor that a process inherits."""
        return self._pairs[rank][1].fileno()

    def environ(self, rank: int) -> dict[str, str]:
        """The variables for the environment of a process."""
        return {VARIABLE: f"{self.inherited(rank)}:{rank}:{len(self._pairs)}:{self._least}"}

    def read(self, rank: int) -> None:
        """Handle the packets of a process."""
        while True:
            try:
                packet = self._pairs[rank][0].recv(PACKET_BYTES)
            except OSError:
                return
            if not packet:
                return
            # A process may send nonsense: that is its loss, not the launcher's end.
            with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
                self._obey(rank, json.loads(packet))

    def _obey(self, rank: int, packet: Mapping[str, Any]) -> None:
        if "to" in packet:
            self._tell(int(packet["to"]), {"from": rank, "message": packet["message"]})
        elif "begun" in packet:
            self._begun = True
        elif "done" in packet:
            self._tell_others(rank, {**packet, "done": rank})
        elif "ask" in packet:
            half = self._favoured.setdefault(int(packet["ask"]), packet["half"])
            self._tell(rank, {"view": packet["ask"], "half": half})
        elif packet["view"] > self._view:
            members = {int(member) for member in packet["members"]}
            if members and members <= set(range(len(self._pairs))):
                self._view, self.members = packet["view"], members

    def note_end(self, rank: int, status: int) -> None:
        """Note that a process has ended, and tell the others."""
        self.read(rank)  # what it said before
        self._ended[rank] = status
        self._tell_others(rank, {"ended": rank})

    @property
    def is_over(self) -> bool:
        """Whether all members of the latest view have ended, or too many have failed for the others to go on.

        A failure before any process has called ``syncline.elastic`` is one too many: the others may wait for a process
        that never comes.
        """
        left = sum(not self._ended.get(rank) for rank in self.members)
        early = not self._begun and any(self._ended.values())
        return self.members <= self._ended.keys() or early or left < self._least or 2 * left < len(self.members)

    @property
    def succeeded(self) -> bool:
        """Whether a member of the latest view has ended with status 0."""
        return any(self._ended.get(rank) == 0 for rank in self.members)

    def _tell_others(self, rank: int, packet: Mapping[str, Any]) -> None:
        for other in range(len(self._pairs)):
            if other != rank and other not in self._ended:
                self._tell(other, packet)

    def _tell(self, rank: int, packet: Mapping[str, Any]) -> None:
        if 0 <= rank < len(self._pairs):
            with suppress(OSError):
                self._pairs[rank][0].send(json.dumps(packet).encode())

    def close(self) -> None:
        """Close both ends of every line."""
        for pair in self._pairs:
            for sock in pair:
                sock.close()


class RelayLine:
    """A process's side: its number among ``processes``, and the ``least`` number of them that go on."""

    def __init__(self, sock: socket.socket, number: int, processes: int, least: int) -> None:
        self._sock, self.number, self.processes, self.least = sock, number, processes, least

    @classmethod
    def inherit(cls) -> RelayLine | None:
        """The line of this process. None if its launcher has not made one."""
        parts = os.environ.get(VARIABLE, "").split(":")
        if len(parts) != 4 or not all(part.isdecimal() for part in parts):
            return None
        fd, number, processes, least = map(int, parts)
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                return None
            os.set_inheritable(fd, False)
            return cls(socket.socket(fileno=fd), number, processes, least)
        except OSError:
            return None

    def send(self, packet: Mapping[str, Any]) -> None:
        """Send a packet to the launcher."""
        with suppress(OSError):
            self._sock.send(json.dumps(packet).encode())

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next packet. None after ``timeout_s``. GroupError if the launcher has ended."""
        self._sock.settimeout(timeout_s)
        try:
            data = self._sock.recv(PACKET_BYTES)
        except TimeoutError:
            return None
        except OSError:
            data = b""
        if not data:
            raise GroupError("syncline run has ended, over which the workers that are left would have agreed to go on")
        packet: dict[str, Any] = json.loads(data)
        return packet
