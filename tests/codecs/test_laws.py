"""Every codec of the registry, whoever wrote it, keeps the laws of its kind: ``testing.codecs`` has them."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from syncline import registry
from syncline.testing import check_codec
from syncline.testing.codecs import LAWS

DECLARED = [text for entry in registry.entries("codecs") for text in entry.capabilities.get("examples", (entry.name,))]


EXAMPLES = [
    *DECLARED,
    "ternary(clip=0)",
    "sign(vote=on, scale=1, momentum=0.9)",
    "randomk(ratio=0.01, decay=1)",
    "randomk(ratio=0.3, decay=1)",
]
"""Also the papers' own arguments, which are no examples: they need another learning rate than most trainings have."""


FIRST = {text.partition("(")[0]: text for text in reversed(EXAMPLES)}


@pytest.mark.parametrize(
    "text",
    [pytest.param(text, marks=[] if text in FIRST.values() else [pytest.mark.slow]) for text in EXAMPLES],
)
def test_every_codec_keeps_all_laws(text: str) -> None:
    check_codec(text, examples=8)


def test_every_law_concerns_some_codec() -> None:
    held = [check_codec(text, examples=3) for text in ("natural", "fp16", "powersgd(rank=2)")]
    assert {name for names in held for name in names} == set(LAWS.names)


def test_what_works_in_rounds_is_held_to_what_ranks_do() -> None:
    held = check_codec("feedback(powersgd(rank=2))", examples=11)
    assert "rounds keep unsent parts" in held
    assert "unsent parts are kept" not in held


@pytest.mark.slow
@settings(max_examples=6, phases=[Phase.generate])
@given(st.sampled_from(EXAMPLES), st.integers(0, 2**32 - 1))
def test_with_other_examples_in_every_run(text: str, seed: int) -> None:
    check_codec(text, seed=seed, examples=8)
