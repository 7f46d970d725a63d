"""Initial weights: Caffe's fillers and He's rule, as the published networks were trained.

Caffe scales by the inputs of a neuron (fan-in) unless told otherwise; torch's initialisers of the same names differ.
"""

from __future__ import annotations

from math import sqrt

from torch import nn

Weighted = nn.Conv2d | nn.Linear
"""A layer with a weight and optionally a bias."""


def gaussian(layer: Weighted, std: float, bias: float = 0.0) -> None:
    """Normal weights of mean 0 and the given standard deviation; a constant bias."""
    nn.init.normal_(layer.weight, 0.0, std)
    _constant(layer, bias)


def xavier(layer: Weighted, bias: float = 0.0) -> None:
    """Uniform weights of variance 1 / fan-in (Glorot and Bengio, AISTATS 2010, in Caffe's form); a constant bias."""
    bound = sqrt(3 / _fan_in(layer))
    nn.init.uniform_(layer.weight, -bound, bound)
    _constant(layer, bias)


def he(layer: Weighted, bias: float = 0.0) -> None:
    """Normal weights of variance 2 / fan-in (He et al., ICCV 2015); a constant bias."""
    gaussian(layer, sqrt(2 / _fan_in(layer)), bias)


def _fan_in(layer: Weighted) -> int:
    return layer.weight[0].numel()


def _constant(layer: Weighted, value: float) -> None:
    if layer.bias is not None:
        nn.init.constant_(layer.bias, value)
