"""A bucket of DDP under the hook, without DDP: sums that owners divide, what is kept back on more ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from syncline.compression.reducers import HostCollective, Reducer, Round, Total
from syncline.errors import UsageError
from syncline.strategy.strategy import Strategy
from syncline.testing.reducing import run
from syncline.torch_backend.carrier import drive
from syncline.torch_backend.hook import CompressedBucket

SHAPES = [(40, 50), (7,), (1500,)]
ELEMENTS = 3507


def buckets(world: int, text: str = "codec=int8") -> tuple[list[CompressedBucket], list[torch.Tensor]]:
    """One of each rank, over memory that is filled with its gradients."""
    parameters = [torch.empty(shape) for shape in SHAPES]
    memory = [torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]
    codec = Strategy.parse(text).codec_object()
    made = [
        CompressedBucket(codec, 0, (0, 1, 2), parameters, memory[rank], _lanes(rank, world)) for rank in range(world)
    ]
    return made, memory


def _lanes(rank: int, world: int) -> Any:
    return SimpleNamespace(rank=rank, world=world)


def _reduce(made: list[CompressedBucket]) -> None:
    for together in zip(*(one.compression.pieces(0) for one in made), strict=True):
        run([start() for start in together])
    for one in made:
        one.compression.finish(0)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_owners_divide_the_sums(world: int) -> None:
    made, memory = buckets(world)
    mean = torch.stack(memory).mean(0)
    _reduce(made)
    for mine in memory:
        assert torch.equal(mine, memory[0])
        assert 0 < (mine - mean).abs().max() < 0.06  # steps of 1/127 of a block's largest, twice


@pytest.mark.parametrize("world", [2, 4])
def test_dividing_the_sums_is_dividing_before(world: int) -> None:
    """To the bit, where the number of ranks is a power of two: steps of a block are then divided exactly."""
    made, memory = buckets(world)
    before, divided = buckets(world)
    for one, here in zip(before, divided, strict=True):
        one.compression.participant = one.compression.participant.__class__(
            one.compression.participant.index, world, tuple(range(world)), one.compression.participant.room
        )
        here.div_(world)
    for _ in range(2):
        _reduce(made)
        _reduce(before)
        for mine, theirs in zip(memory, divided, strict=True):
            assert torch.equal(mine, theirs)
        for step, (mine, theirs) in enumerate(zip(memory, divided, strict=True)):
            mine.copy_(torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(100 + step)))
            theirs.copy_(mine / world)


def test_the_mean_of_what_is_kept_back_is_the_same_on_more_ranks() -> None:
    made, _ = buckets(2)
    _reduce(made)
    saved = [one.compression.saved() for one in made]
    kept = [one["own/parameter 0/residual"] for one in saved]
    assert np.abs(kept[0]).max() > 0
    more, _ = buckets(4)
    for one in more:
        one.load(saved)
        found = one.compression.saved()["own/parameter 0/residual"]
        np.testing.assert_allclose(found, (kept[0] + kept[1]) / 2, rtol=1e-6, atol=1e-9)
    again, _ = buckets(2)
    for one, before in zip(again, kept, strict=True):
        one.load(saved)
        np.testing.assert_array_equal(one.compression.saved()["own/parameter 0/residual"], before)


def test_a_codec_whose_payloads_are_summed_gets_shares_of_the_mean() -> None:
    made, memory = buckets(1, "codec=fp16")
    assert not made[0]._means
    assert memory[0].data_ptr() == made[0]._array.__array_interface__["data"][0]  # nothing is copied


@pytest.mark.parametrize(
    "asked",
    [
        HostCollective("reduce_scatter", []),
        Round([], [], after=SimpleNamespace()),  # type: ignore[arg-type]
        Round([], [], [Total(np.zeros(1), [0], [])]),
    ],
)
def test_what_a_process_group_does_not_carry_is_refused(asked: Any) -> None:
    """Not left out, which would be a wrong sum."""

    def reducer() -> Reducer:
        yield asked

    carrier: Any = SimpleNamespace()
    with pytest.raises(UsageError, match="carries messages and sums only, not "):
        drive([reducer], carrier)
