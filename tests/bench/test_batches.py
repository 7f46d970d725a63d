"""What processes of a comparison train on: the same batches whoever takes them, and how far the run is with each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import syncline
from syncline.sampling import Pool
from syncline_bench.batches import Batch, batches, in_step, pooled, weighed
from syncline_bench.messages import Job
from syncline_bench.workloads import Images, Part, Workload

WORLD, BATCH, SAMPLES = 2, 4, 14  # three batches of four, and one of two


def counting() -> Workload:
    pixels = np.arange(SAMPLES, dtype=np.float32).reshape(-1, 1, 1, 1)
    images = Images(pixels, np.zeros(SAMPLES, np.int64), np.zeros((1, 1, 1), np.float32))
    unused: Any = None
    return Workload("counting", BATCH, True, 1, images, None, unused, unused, unused, unused)


def job(strategy: str, iterations: int) -> Job:
    return Job("counting", strategy, BATCH, iterations, 3)


def as_they_are(part: Part) -> Part:
    return part


def shown(batch: Batch) -> tuple[int, ...]:
    return tuple(batch.inputs.astype(int).ravel().tolist())


@pytest.mark.parametrize(
    ("contender", "wanted"),
    [
        ("single", False),
        ("ddp", False),
        ("ring", False),
        ("ps(servers=1)", False),
        ("ps(servers=1) sync=asp", True),
    ],
)
def test_a_pool_is_for_workers_at_their_own_pace(contender: str, wanted: bool) -> None:
    assert pooled(contender) is wanted


@pytest.mark.parametrize(
    ("contender", "wanted"),
    [
        ("single", True),
        ("ddp", True),
        ("ring", True),
        ("ring sync=diloco(steps=4)", True),
        ("ring sync=gossip", False),
        ("ps(servers=1) sync=asp", True),
    ],
)
def test_batches_count_by_their_sizes_where_they_are_averaged_with_all_others(contender: str, wanted: bool) -> None:
    assert weighed(contender) is wanted


@pytest.mark.parametrize(
    ("contender", "wanted"),
    [
        ("single", True),
        ("ddp(bucket=1MiB)", True),
        ("ring codec=int8", True),
        ("ps(servers=1) sync=asp", False),
        ("ps(servers=1) sync=ssp(staleness=0)", False),
        ("ring sync=local(steps=4)", False),
        ("ring sync=post_local(after=20, steps=2)", True),
        ("ring sync=post_local(after=19, steps=2)", False),
    ],
)
def test_only_workers_that_exchange_in_every_step_are_bound_by_their_link(contender: str, wanted: bool) -> None:
    assert in_step(contender, 20) is wanted


@pytest.mark.parametrize("iterations", [1, 4, 5, 9])
def test_all_strategies_train_on_the_same_batches(monkeypatch: pytest.MonkeyPatch, iterations: int) -> None:
    """In a pool from which one worker takes three parts for each of the other's."""
    split = [list(batches(counting(), rank, WORLD, job("ring", iterations), as_they_are)) for rank in range(WORLD)]
    for own in split:
        assert [batch.position for batch in own] == list(range(1, iterations + 1))

    pools: list[Pool] = []
    asking = [0]

    def sampler(samples: int, **how: Any) -> Any:
        assert (samples, how) == (4 * WORLD, {"batch_size": 1, "shuffle": False})
        pools.append(Pool(samples, 1, WORLD))
        rank, epochs = len(pools) - 1, iter(range(100))

        class Sampler:
            def __iter__(self) -> Iterator[list[int]]:
                epoch = next(epochs)
                while piece := pools[0].take(rank, epoch):
                    yield list(piece)

        return Sampler()

    monkeypatch.setattr(syncline, "sampler", sampler, raising=False)
    sources = [
        batches(counting(), rank, WORLD, job("ps(servers=1) sync=asp", iterations), as_they_are)
        for rank in range(WORLD)
    ]
    found: list[list[Batch]] = [[], []]
    ended = [False, False]
    while not all(ended):
        rank = int(asking[0] % 4 == 3) if not any(ended) else ended.index(False)
        asking[0] += 1
        batch = next(sources[rank], None)
        if batch is None:
            ended[rank] = True
        else:
            found[rank].append(batch)

    def parts(all_of_them: list[list[Batch]]) -> Counter[tuple[int, tuple[int, ...]]]:
        return Counter((batch.position, shown(batch)) for own in all_of_them for batch in own)

    assert parts(found) == parts(split)
    assert all([batch.position for batch in own] == sorted(batch.position for batch in own) for own in found)
    if iterations > 1:
        assert len(found[0]) > len(found[1]) > 0


def test_shares_make_the_mean_over_workers_that_over_samples() -> None:
    images = counting().train
    wide = replace(counting(), train=replace(images, pixels=images.pixels[:11], labels=images.labels[:11]))
    for text, even in (("ring", False), ("ddp", False), ("ring sync=local(steps=2)", True)):
        split = [list(batches(wide, rank, WORLD, job(text, 3), as_they_are)) for rank in range(WORLD)]
        for parts in zip(*split, strict=True):
            samples = np.concatenate([part.inputs.ravel() for part in parts])
            mean = sum(part.share * part.inputs.mean() for part in parts) / WORLD
            assert even or mean == pytest.approx(samples.mean())
            assert all(part.share == 1 for part in parts) or len(samples) == 3
    assert split[0][2].share == 1  # whose weights are averaged: the gradients are its own
