"""The laws that every part of Syncline must satisfy, as checks for authors of parts.

from syncline.testing import check_codec

def test_my_codec() -> None:
    check_codec      ``codecs``: encoding and decoding, alone and among ranks (``reducing``, ``rounds``)
check_algorithm  ``algorithms``: plans for groups of 1 to 64 workers
check_schedule   ``schedules``: buckets of models, and training with them on a virtual clock
check_sync       ``sync``: its answers, and their effect on owners of weights and on training
check_transport  ``transports``: messages between all ends of a ``network``, priorities, ``transport_ends``
"""

from __future__ import annotations

from .algorithms import check_algorithm
from .codecs import check_codec
from .laws import BrokenLaw
from .schedules import check_schedule
from .sync import check_sync
from .transports import check_transport

__all__ = ["BrokenLaw", "check_algorithm", "check_codec", "check_schedule", "check_sync", "check_transport"]
