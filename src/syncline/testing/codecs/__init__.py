"""Laws of codecs: nothing is lost, written out of bounds or invented, and declarations are true.

The declarations (``combine``, ``block``, ``contraction``, ``biased``, ``stochastic``, ``decay``) determine the laws
that apply. Codecs that work in rounds have neither encode nor decode; laws of their own test them with several ranks.
Laws about reducers apply to all codecs.
"""

from __future__ import annotations

from typing import Any

from ...codecs import Codec
from ...strategy.grammar import read_part
from ...strategy.parts import build
from ..laws import Laws
from . import exchanges, faults, numbers, payloads, rounds

LAWS: Laws[Codec, Any] = Laws(payloads.LAWS, faults.LAWS, numbers.LAWS, rounds.LAWS, exchanges.LAWS)


def check_codec(codec: str | Codec, *, seed: int = 0, examples: int = 30) -> tuple[str, ...]:
    """Check a codec, or the registered one of a text such as ``"topk(ratio=0.01)"``, against all laws that apply.

    Returns the names of these laws. Raises BrokenLaw, an AssertionError with the law, the codec and the failing
    example. ``examples`` are drawn for every law, from ``seed``. Statistical laws always use the same examples, so that
    a codec that has passed passes again.
    """
    built: Codec = build("codecs", read_part(codec)) if isinstance(codec, str) else codec
    return LAWS.hold(built, f"codec {codec}", seed, examples)
