"""Spaces whose optimum is known, and a search of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

from syncline import registry
from syncline_bench.searchers import Axis, Candidate, Searcher, Space

NAMES = registry.names("searchers")
AXES = (
    Axis("architecture", ("ring", "tree", "direct", "ps")),
    Axis("codec", ("none", "fp16", "int8", "topk")),
    Axis("ratio", (0.001, 0.01, 0.1), ordered=True, when={"codec": ("topk",)}),
    Axis("schedule", ("fixed", "wait_free", "priority")),
    Axis("bucket", (1, 2, 4, 8, 16), ordered=True, when={"schedule": ("fixed",)}),
    Axis("slice", (1, 4), ordered=True, when={"schedule": ("priority",)}),
)
EFFECTS: Mapping[str, Mapping[Any, float]] = {
    "architecture": {"ring": 1.0, "tree": 1.4, "direct": 1.2, "ps": 1.7},
    "codec": {"none": 1.0, "fp16": 0.8, "int8": 0.7, "topk": 0.9},
    "ratio": {0.001: 1.2, 0.01: 1.0, 0.1: 1.3},
    "schedule": {"fixed": 1.0, "wait_free": 1.3, "priority": 0.95},
    "bucket": {1: 1.3, 2: 1.1, 4: 0.85, 8: 1.0, 16: 1.2},
    "slice": {1: 1.1, 4: 1.05},
}


def valid(candidate: Candidate) -> bool:
    return not (candidate["codec"] == "topk" and candidate["architecture"] == "tree")


def truth(candidate: Mapping[str, Any]) -> float:
    """The fastest is ring, int8, fixed, 4."""
    return float(np.prod([EFFECTS[name][choice] for name, choice in candidate.items()]))


FASTEST = {"architecture": "ring", "codec": "int8", "schedule": "fixed", "bucket": 4}


def made(name: str, space: Space, seed: int = 0) -> Searcher:
    searcher: Searcher = registry.get("searchers", name).target(space, seed=seed)
    return searcher


def asked(searcher: Searcher, measure: Callable[[Candidate], float | None], budget: int = 10**6) -> list[Candidate]:
    """What it asks for until nothing is left or the budget is spent."""
    found: list[Candidate] = []
    while len(found) < budget and (candidate := searcher.ask()) is not None:
        found.append(candidate)
        searcher.tell(candidate, measure(candidate))
    return found


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """Up to three axes, some of which apply only beside choices of others, with rules and predictions, or without."""
    axes: list[Axis] = []
    for place in range(draw(st.integers(1, 3))):
        choices = tuple(range(draw(st.integers(1, 4))))
        when = {}
        if axes and draw(st.booleans()):
            other = draw(st.sampled_from(axes))
            when = {other.name: tuple(draw(st.sets(st.sampled_from(other.choices), min_size=1)))}
        axes.append(Axis(f"axis{place}", choices, draw(st.booleans()), when))
    refused, silent = draw(st.sampled_from((2, 3, 10**6))), draw(st.sampled_from((1, 2, 10**6)))
    places: dict[Candidate, int] = {}

    def place_of(candidate: Candidate) -> int:
        return places.setdefault(candidate, len(places))

    return Space(
        axes,
        lambda candidate: place_of(candidate) % refused != 1,
        lambda candidate: None if place_of(candidate) % silent == 0 else 1.0 + sum(candidate.values()),
    )
