"""Laws of codecs: nothing is lost, written elsewhere or made up, and what a codec declares is so.

What concerns a codec follows from what it declares (``combine``, ``block``, ``contraction``, ``biased``,
``stochastic``, ``decay``). Codecs that work in rounds have neither encode nor decode: laws of their own hold them to
what they do with other ranks, and all codecs are held to what reducers do with them.
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
    """Hold a codec, or the registered one of a text such as ``"topk(ratio=0.01)"``, to all laws that concern it.

    Returns the names of these laws. Raises BrokenLaw, an AssertionError with the law, the codec and the example that it
    fails for. So many ``examples`` are drawn for every law, from the ``seed``; where chance decides they are always the
    same, so that a codec that has passed passes again.
    """
    built: Codec = build("codecs", read_part(codec)) if isinstance(codec, str) else codec
    return LAWS.hold(built, f"codec {codec}", seed, examples)
