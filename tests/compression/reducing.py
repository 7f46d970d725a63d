"""What tests of reducers share: every codec of the registry, and gradients to exchange in ``testing.reducing``."""

from __future__ import annotations

import numpy as np

from syncline import registry
from syncline.codecs import Codec
from syncline.strategy.grammar import read_part
from syncline.strategy.words import build
from syncline.testing.reducing import SHAPES

TEXTS = [text for entry in registry.entries("codecs") for text in entry.capabilities.get("examples", (entry.name,))]
TEXTS += ["randomk(ratio=0.01, decay=1)", "randomk(ratio=0.3, decay=1)"]
ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES)


def codec(text: str, feedback: bool | None = None) -> Codec:
    """A codec by its text, with the feedback that a strategy would put around it, or as told."""
    found: Codec = build("codecs", read_part(text))
    wanted = (found.biased and found.contraction) if feedback is None else feedback
    return build("codecs", read_part(f"feedback({text})")) if wanted and not text.startswith("feedback") else found


def gradients(workers: int, elements: int, seed: int, scale: float = 1.0) -> list[list[np.ndarray]]:
    draw = np.random.default_rng(seed)
    return [[(scale * draw.standard_normal(elements)).astype(np.float32)] for _ in range(workers)]


def can_be_served(text: str) -> bool:
    return codec(text).combine != "rounds"
