"""Networks: the published numbers of parameters, shapes, order of registration and initial weights."""

import pytest
import torch
from torch import nn

from syncline_bench.workloads import layers
from syncline_bench.workloads.models.networks import AlexNet, Cifar10Quick, DigitsCNN, GoogLeNet, ResNet50, he, xavier


def auxiliary() -> GoogLeNet:
    return GoogLeNet(auxiliary=True)


NETWORKS = [
    (DigitsCNN, 151_306, (1, 8), 10),
    (Cifar10Quick, 145_578, (3, 32), 10),
    (AlexNet, 60_965_224, (3, 227), 1000),
    (GoogLeNet, 6_998_552, (3, 224), 1000),
    (auxiliary, 13_378_280, (3, 224), 1000),
    (ResNet50, 25_557_032, (3, 224), 1000),
]


@pytest.mark.parametrize(("network", "parameters", "_", "__"), NETWORKS)
def test_number_of_parameters(network, parameters, _, __):
    with torch.device("meta"):
        model = network()
    assert sum(tensor.numel() for tensor in model.parameters()) == parameters
    assert sum(layer.spec.elements for layer in layers(model)) == parameters


@pytest.mark.parametrize(("network", "_", "image", "classes"), NETWORKS)
def test_shape_of_the_scores(network, _, image, classes):
    channels, side = image
    with torch.device("meta"):
        model = network().eval()
        assert model(torch.empty(2, channels, side, side)).shape == (2, classes)


def test_auxiliary_scores_come_in_training_only():
    with torch.device("meta"):
        model = auxiliary()
        images = torch.empty(2, 3, 224, 224)
        assert [scores.shape for scores in model(images)] == [(2, 1000)] * 3
        assert model.eval()(images).shape == (2, 1000)


def test_googlenet_has_the_tensors_of_the_published_trace():
    with torch.device("meta"):
        assert len(layers(auxiliary())) == 128


@pytest.mark.parametrize("network", [DigitsCNN, Cifar10Quick, AlexNet, auxiliary, ResNet50])
def test_parameters_are_registered_in_forward_order(network):
    """Auxiliary classifiers are left out: they are registered where they branch off and run at the end."""
    called: list[str] = []
    with torch.device("meta"):
        model = network()
        for name, module in model.named_modules():
            if isinstance(module, (nn.Conv2d, nn.Linear, nn.BatchNorm2d)):
                module.register_forward_hook(lambda *_, name=name: called.append(name))
        side, channels = {DigitsCNN: (8, 1), Cifar10Quick: (32, 3), AlexNet: (227, 3)}.get(network, (224, 3))
        model(torch.empty(2, channels, side, side))
    registered = list(dict.fromkeys(layer.spec.name.rpartition(".")[0] for layer in layers(model)))
    assert sorted(called) == sorted(registered)
    outside = [name for name in called if "auxiliary" not in name]
    assert outside == [name for name in registered if "auxiliary" not in name]


def test_layers_name_type_and_leave_out_what_is_frozen():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False)).to(torch.bfloat16)
    model[0].bias.requires_grad_(False)
    found = [(layer.spec.name, layer.spec.shape, layer.spec.dtype) for layer in layers(model)]
    assert found == [("0.weight", (3, 2), "bfloat16"), ("1.weight", (1, 3), "bfloat16")]


def test_fillers_have_the_variance_they_promise():
    torch.manual_seed(0)
    layer = nn.Conv2d(50, 100, 3, groups=2)
    he(layer, 0.5)
    assert layer.weight.var().item() == pytest.approx(2 / 225, rel=0.05)
    assert layer.bias is not None
    assert layer.bias.unique().tolist() == [0.5]
    xavier(layer)
    assert layer.weight.var().item() == pytest.approx(1 / 225, rel=0.05)
    assert layer.weight.abs().max().item() <= (3 / 225) ** 0.5
