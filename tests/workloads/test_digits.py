"""Digits: the split, and that training reaches its accuracy whatever the order in which gradients are summed."""

import numpy as np
import pytest
import torch

from syncline.errors import UsageError
from syncline.workloads import Workload, load
from syncline.workloads import digits as workload


@pytest.fixture(scope="module")
def digits() -> Workload:
    return load("digits")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(workload: Workload, world: int, seed: int) -> torch.nn.Module:
    """Synchronous training of ``world`` workers in one process: their gradients are weighted and summed."""
    model = workload.model(seed)
    optimizer = workload.optimizer(model)
    schedule = workload.schedule(optimizer, workload.epochs * workload.steps_per_epoch(workload.batch, world))
    assert schedule is not None
    for epoch in range(workload.epochs):
        ranks = [workload.batches(rank, world, workload.batch, seed, epoch) for rank in range(world)]
        for parts in zip(*ranks, strict=True):
            optimizer.zero_grad()
            total = sum(len(labels) for _, labels in parts)
            for images, labels in parts:
                (workload.loss(model(images), labels) * (len(labels) / total)).backward()
            optimizer.step()
            schedule.step()
    assert all(group["lr"] < 1e-4 for group in optimizer.param_groups)
    return model


def test_the_images_are_those_of_scikit_learn(monkeypatch):
    pixels, labels = workload._read()
    monkeypatch.setattr(workload.Path, "is_file", lambda _: False)
    expected_pixels, expected_labels = workload._read()
    assert np.array_equal(pixels, expected_pixels)
    assert np.array_equal(labels, expected_labels)
    assert (pixels.dtype, labels.dtype) == (np.float32, np.int64)
    monkeypatch.setattr(workload, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"install it with pip install 'syncline\[workloads\]'"):
        load("digits")


def test_the_split_is_fixed_and_balanced(digits):
    assert digits.test is not None
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert np.bincount(digits.test.labels).tolist() == [36] * 10
    again = load("digits")
    assert again.test is not None
    assert np.array_equal(again.test.pixels, digits.test.pixels)
    rows = {image.tobytes() for image in digits.train.pixels}
    assert not any(image.tobytes() in rows for image in digits.test.pixels)


def test_samples_are_normalised(digits):
    pixels, labels = digits.train.take(np.arange(len(digits.train)))
    assert pixels.shape == (1437, 1, 8, 8)
    assert pixels.mean().item() == pytest.approx(0, abs=1e-4)
    assert pixels.std().item() == pytest.approx(1, abs=1e-3)
    assert (labels.min().item(), labels.max().item()) == (0, 9)


def test_one_and_four_workers_learn_digits_alike(digits):
    results = [digits.evaluate(train(digits, world, seed=1)) for world in (1, 4)]
    (alone, _), (together, _) = results
    assert alone >= 0.97
    assert abs(alone - together) * 360 <= 1 + 1e-9
