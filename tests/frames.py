"""Frames of links as bytes, for tests that write them to a socket by themselves."""

from __future__ import annotations

from syncline.wire.links import HEADER


def header(kind: int, size: int, tag: int, argument: int) -> bytes:
    """What stands before a body of ``size`` bytes."""
    return HEADER.pack(kind | size << 8, tag, argument)
