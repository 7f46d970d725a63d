"""``benchmarks/replays`` builds the published networks whose recorded layers the replays have."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from syncline_bench.workloads import load

PUBLISHED = {"gpt2": 124_439_808, "bert_base": 109_482_240, "vit_b16": 86_567_656}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recorded_replays_have_the_published_number_of_parameters_and_the_models_tensors(
    name: str, program: Callable[[str], ModuleType]
) -> None:
    with torch.device("meta"):
        model = program("replays").build(name)
    trace = load(f"replay:{name}").trace
    assert trace is not None
    assert trace.elements == PUBLISHED[name] == sum(weight.numel() for weight in model.parameters())
    expected = [(key, tuple(weight.shape)) for key, weight in model.named_parameters()]
    assert [(layer.name, layer.tensors[0].shape) for layer in trace.layers] == expected
    assert trace.device == "cpu"
    assert all(layer.backward_s > 0 for layer in trace.layers if len(layer.tensors[0].shape) > 1)
    assert 1 < trace.backward_s / trace.forward_s < 4
