"""Codecs: array <-> payload, one file each.

A codec declares how payloads combine, what it must not be cut across and whether error feedback may stand around it.
It knows nothing of buckets, plans or transports; sizes follow from a tensor's Spec alone.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

from ..types import Spec


class Codec(Protocol):
    """What a strategy needs to know of every codec."""

    combine: ClassVar[Literal["sum", "gather", "merge"]]
    """Payloads may be added, only collected, or merged."""

    granularity: ClassVar[Literal["element", "block", "tensor"]]
    """The unit that slices and buckets must not cut."""

    contraction: ClassVar[bool]
    """True when decode(encode(x)) is nearer to x than 0 is: what error feedback needs to converge."""

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        """The expected and the greatest number of payload bytes of a tensor, without encoding it."""
        ...
