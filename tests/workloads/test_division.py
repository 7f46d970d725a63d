"""How ranks share the training set: the laws behind 'N workers see what one worker sees'."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from passing import batches

from syncline.errors import UsageError
from syncline_bench.workloads import Images, Workload


def counting(samples: int, global_batch: bool = True, repeats: int = 1) -> Workload:
    """A workload whose image i shows the number i, with a linear model."""
    pixels = np.arange(samples, dtype=np.float32).reshape(-1, 1, 1, 1)
    images = Images(pixels, np.arange(samples) % 2, np.float32(0), repeats=repeats)
    return Workload(
        name="counting",
        batch=8,
        global_batch=global_batch,
        epochs=1,
        train=images,
        test=images,
        build=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(), torch.nn.Linear(1, 2)),
        loss=lambda output, target: torch.nn.functional.cross_entropy(output, target),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        schedule=lambda _, __: None,
    )


def shown(batches) -> list[list[int]]:
    return [images.astype(int).ravel().tolist() for images, _ in batches]


sizes = st.integers(1, 60)


@given(
    samples=sizes, world=st.integers(1, 8), extra=st.integers(0, 20), seed=st.integers(0, 9), epoch=st.integers(0, 3)
)
def test_the_parts_of_all_ranks_are_the_batches_of_one_worker(samples, world, extra, seed, epoch):
    workload, batch = counting(samples), world + extra
    alone = shown(batches(workload, 0, 1, batch, seed, epoch))
    ranks = [shown(batches(workload, rank, world, batch, seed, epoch)) for rank in range(world)]
    steps = workload.steps_per_epoch(batch, world)
    assert [len(parts) for parts in ranks] == [steps] * world
    joined = [list(chain(*parts)) for parts in zip(*ranks, strict=True)]
    assert joined == alone[:steps]
    for parts in zip(*ranks, strict=True):
        lengths = [len(part) for part in parts]
        assert min(lengths) >= 1
        assert max(lengths) - min(lengths) <= 1


@given(samples=sizes, batch=st.integers(1, 70))
def test_one_worker_sees_every_sample_once_an_epoch(samples, batch):
    seen = chain(*shown(batches(counting(samples), 0, 1, batch, 0, 0)))
    assert sorted(seen) == list(range(samples))


@pytest.mark.parametrize(("world", "steps"), [(1, 3), (2, 3), (3, 2), (4, 2)])
def test_the_incomplete_batch_is_kept_when_every_rank_gets_a_sample(world, steps):
    assert counting(22).steps_per_epoch(10, world) == steps


def test_epochs_and_seeds_differ_and_repeat():
    def order(seed: int, epoch: int) -> list[list[int]]:
        return shown(batches(counting(50), 0, 1, 8, seed, epoch))

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    assert order(0, 1) != order(1, 0)


def test_samples_are_converted_and_belong_to_the_caller():
    stored = Images(np.full((2, 1, 1, 1), 200, np.uint8), np.arange(2), np.array(250, np.float32), scale=0.5, repeats=3)
    assert len(stored) == 6
    pixels, labels = stored.take(np.array([0, 5]))
    assert (pixels.dtype, labels.dtype) == (np.float32, np.int64)
    assert pixels.flatten().tolist() == [-25.0, -25.0]
    assert labels.tolist() == [0, 1]
    pixels[:] = labels[:] = 0
    assert stored.take(np.array([1]))[1].item() == 1
    assert stored.pixels.min() == 200


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ((0, 4, 3, 0, 0), "use a batch of 4 or more"),
        ((0, 0, 8, 0, 0), "at least one worker"),
        ((0, 1, 8, -1, 0), "cannot be negative"),
        ((0, 1, 8, 0, -1), "cannot be negative"),
    ],
)
def test_mistakes_are_refused_before_the_first_batch(arguments, hint):
    with pytest.raises(UsageError, match=hint):
        batches(counting(20), *arguments)


def test_the_batch_of_all_workers():
    assert [counting(20, True).total_batch(n) for n in (1, 4)] == [8, 8]
    assert [counting(20, False).total_batch(n) for n in (1, 4)] == [8, 32]
    assert counting(20, False).total_batch(3, 5) == 15


def test_models_depend_on_the_seed_alone_and_leave_the_random_state():
    workload = counting(4)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = workload.model(3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    again, other = workload.model(3), workload.model(4)
    assert torch.equal(first[2].weight, again[2].weight)
    assert not torch.equal(first[2].weight, other[2].weight)


def test_evaluation_counts_the_test_set_and_restores_the_modes():
    workload = counting(7)
    model = workload.model(0)
    model[1].eval()
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.copy_(torch.tensor([1.0, 0.0]))
    accuracy, loss = workload.evaluate(model)
    assert accuracy == 4 / 7
    assert loss == pytest.approx((4 * np.log1p(np.exp(-1)) + 3 * np.log1p(np.exp(1))) / 7)
    assert [module.training for module in model.modules()] == [True, True, False, True]
