"""Sends updates by version, for workers that fetch weights one by one.

Weights are never encoded. After every update the owner encodes the difference between its weights and the *known* ones
and adds the decoded payload to the latter; the error remains in the next difference, as in ``updates``. The known
weights of a version therefore follow from those of the version before and one payload, and all workers at one version
have the same bits. A worker at version a gets the payloads of all later versions and adds them in order, or the known
weights themselves where those are fewer bytes. A worker that no other has overtaken gets a single payload. At c
versions behind, with payloads c times smaller than the weights, it gets as many bytes as without a codec. The owner
keeps no more bytes of payloads than that.

    word 0   the worker's version after this message
    word 1   the number of payloads, or ALL for the weights themselves
    then     the bytes of each payload's message
    then     these messages (``formats``), or the weights
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codecs import State, relay_of
from ..kernels import cpu
from ..wire.scratch import Scratch
from .reducers import Bytes, Held, Operand, ReduceError, Room
from .reducers.formats import MessageFormat, Packet

Array = NDArray[Any]

ALL = 0xFFFFFFFF
_HEAD_BYTES = 8


class _Part:
    """One owner's share of a bucket, in arrays of the known weights. Owner and worker each have one."""

    def __init__(self, share: Sequence[Operand], room: Room) -> None:
        self._parts = [replace(part, codec=relay_of(part.codec)) for part in share]
        # the threads of both sides may decode at once
        self._states: list[State] = [copy.deepcopy(part.again) for part in share]
        self._format, self._room = MessageFormat(self._parts), room
        self._whole_bytes = sum(part.array.nbytes for part in share)
        self.version = 0

    @property
    def greatest_bytes(self) -> int:
        """The maximum size of a message."""
        return _HEAD_BYTES + self._whole_bytes

    def _add(self, packet: Packet, version: int, sender: str) -> None:
        """Add a payload to the known weights, which then have that version."""
        for state in self._states:
            state.step = version
        arrays = [part.array for part in self._parts]
        if all(array.dtype == np.float32 for array in arrays):
            self._format.read(packet, arrays, self._states, sender, add=True)
        else:
            changes = [np.empty(array.size, np.float32) for array in arrays]
            self._format.read(packet, changes, self._states, sender, add=False)
            for array, change in zip(arrays, changes, strict=True):
                cpu.add_difference(array, change)
        self.version = version


class UpdateSender(_Part):
    """The owner's side. ``held`` are its weights, whose updates it encodes. Not thread-safe."""

    def __init__(self, share: Sequence[Operand], held: Sequence[Held]) -> None:
        super().__init__(share, Scratch())
        self._held = held
        self._sent: deque[Bytes] = deque()  # payloads of the latest versions, the newest last

    def update(self) -> None:
        """Encode the owner's updated weights as the next version."""
        changes = []
        for part, held in zip(self._parts, self._held, strict=True):
            changes.append(np.empty(part.array.size, np.float32))
            cpu.difference(held.weights, part.array, changes[-1])
        for state in self._states:
            state.step = self.version + 1
        packet = self._format.write(self._room, changes, self._states, lambda _: None)
        self._sent.append(packet.data.copy())
        self._add(packet, self.version + 1, "this owner")
        packet.free()
        for part, held in zip(self._parts, self._held, strict=True):
            if not held.keeps:
                held.weights[:] = part.array
        # More payloads than weights: workers that far behind get the weights themselves.
        while sum(_with_length(one) for one in self._sent) > self._whole_bytes:
            self._sent.popleft()

    def renew(self) -> None:
        """Start a version from the owner's weights as they are, which every worker then gets in full."""
        for part, held in zip(self._parts, self._held, strict=True):
            part.array[:] = held.weights
        self._sent.clear()
        self.version += 1

    def since(self, version: int) -> Bytes:
        """The message for a worker that has ``version``."""
        behind = self.version - version
        if behind > len(self._sent):
            return _message(self.version, ALL, [], [part.array.view(np.uint8) for part in self._parts])
        bodies = list(self._sent)[len(self._sent) - behind :]
        return _message(self.version, behind, [body.nbytes for body in bodies], bodies)


class UpdateReceiver(_Part):
    """The worker's side."""

    def take(self, data: Bytes, sender: str) -> None:
        """Apply an owner's message; raises ReduceError unless it continues from this version."""
        if data.nbytes < _HEAD_BYTES:
            raise self._nonsense(sender, f"of {data.nbytes} bytes is too short")
        version, count = (int(word) for word in data[:_HEAD_BYTES].view(np.uint32))
        if count == ALL:
            self._take_all(data[_HEAD_BYTES:], sender)
            self.version = version
            return
        at = _HEAD_BYTES + 4 * count
        lengths = data[_HEAD_BYTES:at].view(np.uint32).tolist() if at <= data.nbytes else []
        if version != self.version + count or len(lengths) != count or at + sum(lengths) != data.nbytes:
            why = f"brings {count} payloads in {data.nbytes} bytes up to version {version}, after {self.version}"
            raise self._nonsense(sender, why)
        for length in lengths:
            if length % 4:
                raise self._nonsense(sender, f"has a payload of {length} bytes")
            self._add(Packet(_SingleBuffer(data[at : at + length]), length), self.version + 1, sender)
            at += length

    def _take_all(self, data: Bytes, sender: str) -> None:
        if data.nbytes != self._whole_bytes:
            raise self._nonsense(sender, f"has {data.nbytes} bytes of weights in place of {self._whole_bytes}")
        at = 0
        for part in self._parts:
            part.array.view(np.uint8)[:] = data[at : at + part.array.nbytes]
            at += part.array.nbytes

    def _nonsense(self, sender: str, why: str) -> ReduceError:
        first = self._parts[0].name
        return ReduceError(f"{sender}: a message about updates of {first!r} {why}; do all run the same version?")


class _SingleBuffer:
    """A pool with a single buffer that belongs to the caller."""

    def __init__(self, buffer: Bytes) -> None:
        self._buffer = buffer

    def take(self, nbytes: int) -> Bytes:  # noqa: ARG002
        return self._buffer

    def give(self, buffer: Bytes) -> None:
        """Nothing to return."""


def _with_length(body: Bytes) -> int:
    return 4 + body.nbytes


def _message(version: int, count: int, lengths: Sequence[int], bodies: Sequence[Bytes]) -> Bytes:
    head = np.array([version & 0xFFFFFFFF, count, *lengths], np.uint32)
    return np.concatenate([head.view(np.uint8), *bodies])
