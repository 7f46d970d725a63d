"""The frames of ``_envelope``: a header of 24 bytes, and behind it a message of up to ``INLINE_BYTES``.

What a frame says is checked here as far as it can be without knowing what is under way.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from ..wire.links import broken
from . import INLINE_BYTES, Bytes

_HEADER = struct.Struct("<BxHxxxxQQ")
HEADER_BYTES = _HEADER.size
FRAME_BYTES = HEADER_BYTES + INLINE_BYTES
"""The size of the largest frame."""

SLOTS = 32767
"""Bodies under way between two ranks have slots from 1 to this: the tags that MPI promises at least."""

WHOLE, ANNOUNCED, ASKED, TURN, END, OFFERED, COMING = range(1, 8)
"""A message; a body that comes; one that may come; whose turn it is; the last frame; a body that is offered; its turn.

ANNOUNCED and OFFERED have the size of a body and its slot, which ASKED and COMING repeat. TURN and END have a key of
collectives, and how many of them have begun, in place of a tag.
"""


class Header(NamedTuple):
    """What a frame says."""

    kind: int
    slot: int
    tag: int
    size: int


def written(kind: int, tag: int, slot: int, size: int, data: Bytes | None) -> Bytes:
    """A frame, with a copy of a message that goes in it."""
    size = size if data is None else data.nbytes
    frame: Bytes = np.empty(HEADER_BYTES + (0 if data is None else size), np.uint8)
    _HEADER.pack_into(frame, 0, kind, slot, tag, size)
    if data is not None:
        frame[HEADER_BYTES:] = data
    return frame


def read(peer: int, frame: Bytes, nbytes: int) -> Header:
    """The header of a frame of so many bytes; raises ProtocolError where it cannot be one of this version."""
    if not HEADER_BYTES <= nbytes <= FRAME_BYTES:
        raise broken(peer, f"a frame of {nbytes} bytes came")
    header = Header._make(_HEADER.unpack_from(frame))
    if header.size != nbytes - HEADER_BYTES if header.kind == WHOLE else nbytes != HEADER_BYTES:
        raise broken(
            peer, f"a frame of kind {header.kind} with {nbytes} bytes came, which says it has {header.size} more"
        )
    return header


def frame_bytes(frame: Bytes) -> int:
    """The size of a frame that lies in a larger buffer."""
    kind, _, _, size = _HEADER.unpack_from(frame)
    return HEADER_BYTES + (size if kind == WHOLE else 0)


def is_last(frame: Bytes) -> bool:
    """True for the frame with which a rank ends."""
    return bool(_HEADER.unpack_from(frame)[0] == END)
