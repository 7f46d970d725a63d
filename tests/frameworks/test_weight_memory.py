"""Weights that workers exchange, in both kinds of memory: what becomes of them is the same but for roundings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from syncline.frameworks._flat import HeldWeights
from syncline.frameworks.torch.averaging import ParameterMemory
from syncline.frameworks.torch.storage import Storage, layers_of
from syncline.schedules.fixed import Fixed
from syncline.sync import Agrees
from syncline.sync.diloco import Diloco
from syncline.sync.easgd import Easgd
from syncline.sync.gossip import Gossip
from syncline.sync.local import Local
from syncline.training.memory import Blocks
from syncline.training.weights import WeightExchange, WeightMemory, weight_exchange

WORKERS, ROUNDS = 3, 4
SHAPES = ((5, 3), (), (7,))


def allocate(nbytes: int, dtype: Any) -> Any:
    return np.zeros(nbytes // dtype.itemsize, dtype)


def exchange_of(mode: Any, rank: int, memory: WeightMemory) -> WeightExchange:
    session: Any = SimpleNamespace(
        world_size=WORKERS, rank=rank, alone=False, process=SimpleNamespace(before_end=[]), paces={}
    )
    return weight_exchange(session, 0, mode, memory)


class Given:
    """As a framework whose weights are these arrays."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self.arrays = [array.copy() for array in arrays]

    def read(self, into: Sequence[Any]) -> None:
        for flat, array in zip(into, self.arrays, strict=True):
            flat[...] = array.reshape(-1)

    def write(self, values: Sequence[Any]) -> None:
        for array, flat in zip(self.arrays, values, strict=True):
            array[...] = flat.reshape(array.shape)


def first() -> list[Any]:
    return [np.asarray(np.random.default_rng(1).standard_normal(shape)) for shape in SHAPES]


def of_arrays() -> tuple[WeightMemory, list[Any], Sequence[Any]]:
    """A worker's memory, its weights, and the buckets that travel."""
    given = Given(first())
    layers = layers_of([(str(number), torch.from_numpy(array)) for number, array in enumerate(given.arrays)])
    buckets = Fixed().buckets(layers)
    held, travelling = Blocks(layers, buckets, allocate), Blocks(layers, buckets, allocate)
    return HeldWeights(given, held, travelling, WORKERS), given.arrays, travelling.arrays  # type: ignore[arg-type]


def of_parameters() -> tuple[WeightMemory, list[Any], Sequence[Any]]:
    named = [(str(number), torch.nn.Parameter(torch.from_numpy(array))) for number, array in enumerate(first())]
    storage = Storage(named, Fixed().buckets(layers_of(named)), allocate)
    parameters = [parameter for _, parameter in named]
    return ParameterMemory(storage, parameters, WORKERS), [one.detach().numpy() for one in parameters], storage.arrays


def add(all_buckets: Sequence[Sequence[Any]], ranks: Sequence[Sequence[int]]) -> None:
    """Let each worker's buckets be the sum of those of some."""
    before = [[array.copy() for array in buckets] for buckets in all_buckets]
    for buckets, wanted in zip(all_buckets, ranks, strict=True):
        for number, array in enumerate(buckets):
            array[...] = sum(before[rank][number] for rank in wanted)


def trained(mode: Any, make: Callable[[], Any]) -> list[Any]:
    """Every worker's weights after each exchange, and the final ones."""
    made, found = [make() for _ in range(WORKERS)], []
    everyone = [range(WORKERS)] * WORKERS
    exchanges = [exchange_of(mode, rank, memory) for rank, (memory, _, _) in enumerate(made)]
    all_buckets = [buckets for _, _, buckets in made]
    for step in range(ROUNDS):
        for rank, (_, weights, _) in enumerate(made):
            for array in weights:
                array -= 0.1 * np.cos(array + rank + step)
        for one in exchanges:
            one.put()
        add(all_buckets, everyone if isinstance(mode, Agrees) else [*mode.mix(WORKERS, step).sums])
        for one in exchanges:
            one.take_sum(step)
        found += [array.copy() for _, weights, _ in made for array in weights]
    if {one.put_own(1.0) for one in exchanges} == {True}:
        add(all_buckets, everyone)
    for one in exchanges:
        one.take_final()
    assert all(np.array_equal(a, b) for _, weights, _ in made for a, b in zip(weights, made[0][1], strict=True))
    return found + [array.copy() for array in made[0][1]]


@pytest.mark.parametrize("mode", [Local(1), Easgd(1), Diloco(1), Gossip(steps=1)], ids=str)
def test_both_kinds_of_memory_have_the_same_weights_but_for_roundings(mode: Any) -> None:
    for mine, theirs in zip(trained(mode, of_arrays), trained(mode, of_parameters), strict=True):
        assert np.allclose(mine, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("make", [of_arrays, of_parameters])
def test_what_was_saved_is_agreed_on_again(make: Callable[[], Any]) -> None:
    (one, weights, _), (other, _, _) = make(), make()
    mine, theirs = exchange_of(Diloco(1), 0, one), exchange_of(Diloco(1), 1, other)
    assert mine.fingerprint == 0  # all have begun with the same
    weights[0] += 1
    mine.anew()
    assert mine.fingerprint != theirs.fingerprint
    theirs.load(mine.saved())
    assert mine.fingerprint == theirs.fingerprint
    mine.forget()
    assert mine.fingerprint == theirs.fingerprint
