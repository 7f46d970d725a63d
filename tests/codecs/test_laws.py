"""Every codec of the registry, whoever wrote it, keeps the laws of its kind: ``testing.codecs`` has them."""

from __future__ import annotations

import re

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from syncline import registry
from syncline.errors import UsageError
from syncline.strategy.grammar import read_part
from syncline.strategy.parts import build
from syncline.testing import check_codec
from syncline.testing.codecs import LAWS, Case
from syncline.testing.tensors import SIZES

DECLARED = [text for entry in registry.entries("codecs") for text in entry.capabilities.get("examples", (entry.name,))]


def in_rounds(text: str) -> bool:
    """Whether it alternates with sums over the ranks, whatever it is given: it has neither encode nor decode."""
    codec = build("codecs", read_part(text))
    return all(Case(codec, "normal", size, 0).codec.combine == "rounds" for size in SIZES)


EXAMPLES = [text for text in DECLARED if not in_rounds(text)] + [
    "ternary(clip=0)",
    "sign(vote=on, scale=1, momentum=0.9)",
    "randomk(ratio=0.1, decay=1)",
]
"""Also the papers' own arguments, which are no examples: they need another learning rate than most trainings have."""


@pytest.mark.parametrize("text", EXAMPLES)
def test_every_codec_keeps_all_laws(text: str) -> None:
    check_codec(text)


@pytest.mark.parametrize("text", [text for text in DECLARED if in_rounds(text)])
def test_a_codec_that_no_law_concerns_does_not_pass(text: str) -> None:
    with pytest.raises(UsageError, match=f"no law concerns the codec {re.escape(text)}"):
        check_codec(text)


def test_every_law_concerns_some_codec() -> None:
    assert {*check_codec("natural", examples=3), *check_codec("fp16", examples=3)} == set(LAWS.names)


@settings(max_examples=15, phases=[Phase.generate])
@given(st.sampled_from(EXAMPLES), st.integers(0, 2**32 - 1))
def test_with_other_examples_in_every_run(text: str, seed: int) -> None:
    check_codec(text, seed=seed, examples=8)
