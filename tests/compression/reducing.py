"""What tests of reducers share: every codec of the registry, and gradients to exchange in ``testing.reducing``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from syncline import registry
from syncline.codecs import Codec
from syncline.compression.reducers import Flows, Traffic
from syncline.plans.plan import Plan
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


def moved_bytes(traffic: Sequence[Traffic], processes: int, plan: Callable[[int], Plan]) -> np.ndarray:
    """The bytes from every process (row) to every other (column).

    ``plan(nbytes)`` is the plan that sums an array of that size.
    """
    found = np.zeros((processes, processes))
    for step in (step for one in traffic for step in one):
        if isinstance(step, Flows):
            np.add.at(found, (step.src, step.dst), step.nbytes)
        else:
            summing = plan(step.nbytes)
            np.add.at(found, (summing.src, summing.dst), summing.count * (step.nbytes / summing.chunks))
    return found
