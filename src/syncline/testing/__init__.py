"""The laws of parts, as checks for those who write one: what every part of Syncline is held to.

    from syncline.testing import check_codec

    def test_my_codec() -> None:
        check_codec("mine(ratio=0.01)")

A check runs every law that concerns the part by what it declares, and raises BrokenLaw, an AssertionError, with the
law, the part and the example that it fails for. Examples are drawn with NumPy from a seed: nothing else is needed, no
test framework either.

    check_codec      ``codecs``: what arrays become, and what becomes of that, alone and among ranks (``reducing``)
    check_algorithm  ``algorithms``: plans for groups of 1 to 64 workers
    check_schedule   ``schedules``: buckets of models, and training with them on a clock that is made up (``training``)
    check_sync       ``sync``: its answers, and what owners of weights (``serving``) and training make of them
    check_transport  ``transports``: messages between all ends of a ``network``, urgency, ends, sums of its own
"""

from __future__ import annotations

from .algorithms import check_algorithm
from .codecs import check_codec
from .laws import BrokenLaw
from .schedules import check_schedule
from .sync import check_sync
from .transports import check_transport

__all__ = ["BrokenLaw", "check_algorithm", "check_codec", "check_schedule", "check_sync", "check_transport"]
