"""Times derived from networks: sums are the published totals, shares are those of hand-counted operations."""

from __future__ import annotations

import pytest
from torch import nn

from syncline.errors import UsageError
from syncline_bench.workloads.models.flops import trace_of
from syncline_bench.workloads.models.networks import GoogLeNet, ResNet50


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10, bias=False)
    )


def test_shares_are_those_of_operations() -> None:
    trace = trace_of("small", small, (3, 8, 8), 16, 1.0, 2.0)
    conv, norm, linear = trace.layers
    forward = [2 * 256 * 27, 8 * 256, 2 * 10 * 256]
    assert [layer.forward_s for layer in trace.layers] == pytest.approx([part / sum(forward) for part in forward])
    # The convolution meets the data, whose gradient nobody needs.
    backward = [forward[0], 2 * forward[1], 2 * forward[2]]
    assert [layer.backward_s for layer in trace.layers] == pytest.approx(
        [2 * part / sum(backward) for part in backward]
    )
    assert [[tensor.name for tensor in layer.tensors] for layer in trace.layers] == [
        ["weight", "bias"], ["weight", "bias"], ["weight"],
    ]  # fmt: skip
    assert conv.tensors[0].shape == (4, 3, 3, 3)
    assert (norm.name, linear.name, trace.batch) == ("1", "4", 16)


@pytest.mark.parametrize(("network", "tensors", "elements"), [(ResNet50, 161, 25_557_032), (GoogLeNet, 116, 6_998_552)])
def test_totals_and_parameters_are_kept(network: type[nn.Module], tensors: int, elements: int) -> None:
    trace = trace_of("it", network, (3, 224, 224), 1, 0.125, 0.25)
    assert trace.forward_s == pytest.approx(0.125)
    assert trace.backward_s == pytest.approx(0.25)
    assert trace.elements == elements
    assert sum(len(layer.tensors) for layer in trace.layers) == tensors


def test_auxiliary_classifiers_come_where_training_runs_them() -> None:
    trace = trace_of("it", lambda: GoogLeNet(auxiliary=True), (3, 224, 224), 1, 1.0, 1.0)
    assert trace.elements == 13_378_280
    assert "auxiliary" in trace.layers[-1].name
    assert trace.layers[0].name == "stem.0"


def test_a_layer_that_cannot_be_counted_is_named() -> None:
    with pytest.raises(UsageError, match=r"0 \(LayerNorm\)"):
        trace_of("it", lambda: nn.Sequential(nn.LayerNorm(4)), (1, 1, 4), 1, 1.0, 1.0)
