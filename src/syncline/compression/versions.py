"""Updates by version: what an owner tells a worker that has older weights than it has, where workers come one by one.

Weights are never encoded. Behind every update the owner encodes by how much its weights differ from the *known* ones,
and adds to these what the payload says; what it does not say is in the next difference, as in ``updates``. So
the known weights of a version follow from those of the version before and one payload, and all workers that have come
to it have the same bits. A worker at version a gets the payloads of all versions since, which it adds in order, or,
where these are more bytes, the known weights as they are. A worker that nobody has overtaken gets no more than its own
update; one that is as many versions behind as a payload is smaller gets what it would without a codec. The owner keeps
payloads of no more bytes than that.

    word 0   the version that the worker then has
    word 1   how many payloads bring it there, ALL for the weights as they are
    then     the bytes of each payload's message
    then     these messages (``letters``), or the weights
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
from .reducers.letters import Letter, Post

Array = NDArray[Any]

ALL = 0xFFFFFFFF
_HEAD_BYTES = 8


class _Part:
    """What one owner has of a bucket, in arrays of the known weights; either side has its own."""

    def __init__(self, share: Sequence[Operand], room: Room) -> None:
        self._parts = [replace(part, codec=relay_of(part.codec)) for part in share]
        self._states: list[State] = [copy.deepcopy(part.again) for part in share]  # threads of two sides may decode
        self._letter, self._room = Letter(self._parts), room
        self._whole_bytes = sum(part.array.nbytes for part in share)
        self.version = 0

    @property
    def greatest_bytes(self) -> int:
        """Of a message."""
        return _HEAD_BYTES + self._whole_bytes

    def _add(self, post: Post, version: int, sender: str) -> None:
        """Add what a payload says to the known weights, which then have that version."""
        for state in self._states:
            state.step = version
        arrays = [part.array for part in self._parts]
        if all(array.dtype == np.float32 for array in arrays):
            self._letter.read(post, arrays, self._states, sender, add=True)
        else:
            changes = [np.empty(array.size, np.float32) for array in arrays]
            self._letter.read(post, changes, self._states, sender, add=False)
            for array, change in zip(arrays, changes, strict=True):
                cpu.add_difference(array, change)
        self.version = version


class Telling(_Part):
    """The owner's side: ``held`` are its own weights, whose updates it tells. Used by one thread."""

    def __init__(self, share: Sequence[Operand], held: Sequence[Held]) -> None:
        super().__init__(share, Scratch())
        self._held = held
        self._said: deque[Bytes] = deque()  # the last versions' payloads, the newest last

    def update(self) -> None:
        """The owner's weights have been updated: that is the next version."""
        changes = []
        for part, held in zip(self._parts, self._held, strict=True):
            changes.append(np.empty(part.array.size, np.float32))
            cpu.difference(held.weights, part.array, changes[-1])
        for state in self._states:
            state.step = self.version + 1
        post = self._letter.write(self._room, changes, self._states, lambda _: None)
        self._said.append(post.data.copy())
        self._add(post, self.version + 1, "this owner")
        post.free()
        for part, held in zip(self._parts, self._held, strict=True):
            if not held.keeps:
                held.weights[:] = part.array
        while sum(_with_length(one) for one in self._said) > self._whole_bytes:
            self._said.popleft()

    def renew(self) -> None:
        """The owner has other weights than those that it has told of: all are to get them as they are."""
        for part, held in zip(self._parts, self._held, strict=True):
            part.array[:] = held.weights
        self._said.clear()
        self.version += 1

    def since(self, version: int) -> Bytes:
        """The message for a worker that has that version."""
        behind = self.version - version
        if behind > len(self._said):
            return _message(self.version, ALL, [], [part.array.view(np.uint8) for part in self._parts])
        bodies = list(self._said)[len(self._said) - behind :]
        return _message(self.version, behind, [body.nbytes for body in bodies], bodies)


class Hearing(_Part):
    """The worker's side."""

    def take(self, data: Bytes, sender: str) -> None:
        """Go on by an owner's message; raises ReduceError for one that cannot be of the versions that are to come."""
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
            self._add(Post(_Lent(data[at : at + length]), length), self.version + 1, sender)
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


class _Lent:
    """A room with one buffer, which is somebody else's."""

    def __init__(self, buffer: Bytes) -> None:
        self._buffer = buffer

    def take(self, nbytes: int) -> Bytes:  # noqa: ARG002
        """That one."""
        return self._buffer

    def give(self, buffer: Bytes) -> None:
        """It was never taken."""


def _with_length(body: Bytes) -> int:
    return 4 + body.nbytes


def _message(version: int, count: int, lengths: Sequence[int], bodies: Sequence[Bytes]) -> Bytes:
    head = np.array([version & 0xFFFFFFFF, count, *lengths], np.uint32)
    return np.concatenate([head.view(np.uint8), *bodies])
