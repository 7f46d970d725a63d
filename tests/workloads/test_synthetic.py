"""Synthetic workloads: ImageNet shapes, the same data on every rank, the loss of auxiliary classifiers."""

import numpy as np
import pytest
import torch
from passing import batches
from torch.nn.functional import cross_entropy

from syncline_bench.workloads import load


@pytest.mark.parametrize(
    ("network", "side"), [("alexnet", 227), ("googlenet", 224), ("googlenet_aux", 224), ("resnet50", 224)]
)
def test_shapes_and_data(network, side):
    workload, again = load(f"synthetic:{network}"), load(f"synthetic:{network}")
    assert workload.name == f"synthetic:{network}"
    assert not workload.global_batch
    images, labels = next(batches(workload, 1, 2, 4, seed=3, epoch=0))
    assert images.shape == (2, 3, side, side)
    assert images.dtype == np.float32
    assert 0 <= int(labels.min()) <= int(labels.max()) < 1000
    same, _ = next(batches(again, 1, 2, 4, seed=3, epoch=0))
    assert np.array_equal(images, same)
    assert workload.steps_per_epoch(workload.total_batch(4), 4) >= 10


def test_there_is_nothing_to_evaluate():
    assert load("synthetic:alexnet").evaluate(torch.nn.Flatten()) is None


def test_auxiliary_losses_count_three_tenths():
    loss = load("synthetic:googlenet_aux").loss
    target = torch.tensor([1, 2])
    scores = [torch.from_numpy(np.random.default_rng(i).normal(size=(2, 5))) for i in range(3)]
    parts = [cross_entropy(each, target).item() for each in scores]
    assert loss(tuple(scores), target).item() == pytest.approx(parts[0] + 0.3 * (parts[1] + parts[2]))
    assert loss(scores[0], target).item() == parts[0]


def test_a_step_trains_the_small_one():
    workload = load("synthetic:googlenet")
    model = workload.model(0)
    optimizer = workload.optimizer(model)
    images, labels = map(torch.from_numpy, next(batches(workload, 0, 1, 1, seed=0, epoch=0)))
    loss = workload.loss(model(images), labels)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(tensor.grad is not None for tensor in model.parameters())
    optimizer.step()
    assert workload.schedule(optimizer, 10) is None
