"""Error feedback under elastic averaging, where workers stay apart from the centre: it ends there or is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from syncline import registry
from syncline.codecs import Floats, Rounds, State, Wraps
from syncline.errors import StrategyError
from syncline.nouns import Spec
from syncline.strategy.strategy import Strategy

TEXTS = [text for entry in registry.entries("codecs") for text in entry.capabilities.get("examples", (entry.name,))]
SHAPE, EXCHANGES, BETA = (64, 64), 100, 0.9


def told(codec: Any, difference: Floats, state: State) -> Floats:
    """What one worker's exchange says of a difference."""
    found = difference.copy()
    inner = codec.codec
    if isinstance(inner, Rounds):
        for _ in inner.average(found, state, 1):
            pass
    else:
        payload = np.zeros(codec.wire_bytes(state.spec)[1] // 4, np.uint32)
        encoded = codec.encode(difference, payload, state)
        codec.decode(payload[: encoded.words], found, state)
    state.step += 1
    return found


def far(codec: Any) -> float:
    """The share of its first distance from a worker that stands still at which a centre ends."""
    worker = np.random.default_rng(0).standard_normal(SHAPE[0] * SHAPE[1]).astype(np.float32)
    centre, state = np.zeros_like(worker), codec.init(Spec("tensor", SHAPE), 0, True)
    for _ in range(EXCHANGES):
        centre += np.float32(BETA) * told(codec, worker - centre, state)
    return float(np.linalg.norm(worker - centre) / np.linalg.norm(worker))


def refused(text: str) -> bool:
    """Whether the rule that this is about refuses a codec."""
    try:
        Strategy.parse(f"ring sync=easgd(steps=4) codec={text}")
    except StrategyError as error:
        return "at a distance from the agreed weights" in str(error)
    return False


@pytest.mark.parametrize("text", TEXTS)
def test_a_centre_comes_to_a_worker_that_stands_still_unless_the_codec_is_refused(text: str) -> None:
    """What feedback keeps of a difference that is still there comes once more, and then too much of it."""
    codec: Any = Strategy.parse(f"ring codec={text}").codec_object()
    if not isinstance(codec, Wraps):
        return  # without feedback
    if refused(text):
        assert far(codec) > 1
    else:
        assert far(codec) < 0.01
