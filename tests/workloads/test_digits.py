"""Digits: the split, and that training reaches its accuracy whatever the order in which gradients are summed."""

import numpy as np
import pytest
import torch
from passing import batches

from syncline.errors import UsageError
from syncline_bench.workloads import Workload, load
from syncline_bench.workloads import digits as workload


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
        ranks = [batches(workload, rank, world, workload.batch, seed, epoch) for rank in range(world)]
        for parts in zip(*ranks, strict=True):
            optimizer.zero_grad()
            total = sum(len(labels) for _, labels in parts)
            for images, labels in (map(torch.from_numpy, part) for part in parts):
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


@pytest.mark.slow
def test_one_and_four_workers_learn_digits_alike(digits):
    results = [digits.evaluate(train(digits, world, seed=1)) for world in (1, 4)]
    (alone, _), (together, _) = results
    assert alone >= 0.97
    assert abs(alone - together) * 360 <= 1 + 1e-9


@pytest.mark.parametrize("hidden", [128, 9, 500])
def test_a_blueprint_is_the_model_of_pytorch(hidden):
    made = load(f"digits(hidden={hidden})")
    assert made.blueprint is not None
    for seed in (0, 7, 2**32 + 3):
        wanted = dict(made.model(seed).named_parameters())
        found = made.blueprint.start(seed)
        assert list(found) == list(wanted)
        for name, tensor in wanted.items():
            assert found[name].shape == tuple(tensor.shape)
            np.testing.assert_allclose(found[name], tensor.detach().numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("hidden", "most"), [(64, 0.05), (128, 0.05), (1280, 0.005)])
def test_rates_are_those_of_the_schedule(hidden, most):
    digits = load(f"digits(hidden={hidden})")
    assert max(digits.blueprint.rates(30)) == pytest.approx(most)
    optimizer = digits.optimizer(torch.nn.Linear(1, 1))
    schedule, rates = digits.schedule(optimizer, 30), []
    for _ in range(30):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert tuple(rates) == digits.blueprint.rates(30)


def test_hidden_neurons_make_a_network_of_ten_million():
    wide = load("digits(hidden=9648)")
    assert wide.name == "digits(hidden=9648)"
    assert sum(np.prod(shape) for shape in wide.blueprint.shapes.values()) == 18_826 + 1_035 * 9648 == 10_004_506
    for hidden in (1, 0, -3, 1 << 21):
        with pytest.raises(UsageError, match=f"hidden must be a number of neurons from 2 to .*, got {hidden}"):
            load(f"digits(hidden={hidden})")
