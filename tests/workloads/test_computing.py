"""How a workload's model computes: layouts, devices, and what this machine cannot do."""

from __future__ import annotations

import pytest
import torch

from syncline.errors import UsageError
from syncline_bench.workloads import Computing, load

NHWC = torch.channels_last
with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")


def test_the_default_leaves_model_and_batch_as_they_are() -> None:
    plain, model, images = Computing(), torch.nn.Conv2d(3, 4, 3), torch.rand(2, 3, 8, 8)
    weight = model.weight
    assert plain.placed(model, 1) is model
    assert model.weight is weight
    assert plain.moved(plain.laid_out(images)) is images


def test_channels_last_lays_out_weights_and_images_and_keeps_their_values() -> None:
    how, model, images = Computing(channels_last="on"), torch.nn.Conv2d(3, 4, 3), torch.rand(2, 3, 8, 8)
    before = model.weight.detach().clone()
    how.placed(model, 0)
    batch = how.laid_out(images)
    assert model.weight.is_contiguous(memory_format=NHWC)
    assert batch.is_contiguous(memory_format=NHWC)
    assert torch.equal(model.weight, before)
    assert torch.equal(batch, images)
    assert model(batch).is_contiguous(memory_format=NHWC)


def test_a_workload_that_computes_takes_them_and_a_replayed_one_does_not() -> None:
    assert load("synthetic:alexnet(channels_last=on)").computing == Computing(channels_last="on")
    with pytest.raises(UsageError, match="replay has no argument 'channels_last'"):
        load("replay:alexnet(channels_last=on)")


def test_autotuning_without_a_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="add device=cuda"):
        Computing(autotune="on")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="device=cuda needs a GPU"):
        load("synthetic:alexnet(device=cuda)")


@with_gpu
def test_models_and_batches_go_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    how = Computing(device="cuda", channels_last="on", autotune="on")
    model = how.placed(torch.nn.Conv2d(3, 4, 3), process=torch.cuda.device_count())
    assert isinstance(model.weight, torch.Tensor)
    assert model.weight.device == torch.device("cuda", 0)
    assert torch.backends.cudnn.benchmark
    batch = how.moved(how.laid_out(torch.rand(2, 3, 8, 8)))
    assert batch.is_contiguous(memory_format=NHWC)
    begun = how.now()
    assert model(batch).is_cuda
    assert how.now() > begun
