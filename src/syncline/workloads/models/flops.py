"""From a network to a trace: times of whole passes, shared out among its layers by their floating-point operations.

Owns the counting. A layer is a module that has parameters of its own; pooling, activations and the like take no time of
their own, which makes their neighbours' a little longer. The network runs once on no samples: nothing is computed, and
the shapes of a sample are the real ones; its weights are memory that nobody touches. (On torch's meta device many
operations are references in Python, for the first of which torch loads its compiler: seconds in every rank.)

Operations for an output of n elements: a convolution or linear layer of k inputs per output makes n k multiplications
and as many additions forward; backward as many for its weights, and again for its input unless that is the data. Batch
normalisation makes 8 n forward (mean, variance, normalising, scaling and shifting) and twice that backward.

Operations are not time: memory-bound layers take longer than their share. What a trace is for, the order and size of
gradients and when they become ready, is determined by the large convolutions at the front and the large matrices at
the end, for which it is a fair estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...errors import UsageError
from ...nouns import Spec
from .._trace import Trace, TracedLayer

_NORMALISING = 8


@dataclass(frozen=True)
class _Counted:
    name: str
    module: nn.Module
    forward: float
    backward: float


def trace_of(
    name: str,
    build: Callable[[], nn.Module],
    image: tuple[int, int, int],
    batch: int,
    forward_s: float,
    backward_s: float,
) -> Trace:
    """The trace of a network whose passes over ``batch`` samples of shape ``image`` take the given seconds.

    Layers come in the order in which a training pass runs them. Raises UsageError for a layer that cannot be counted.
    """
    counted = _count(build, image)
    forward, backward = sum(item.forward for item in counted), sum(item.backward for item in counted)
    layers = tuple(
        TracedLayer(
            item.name,
            tuple(Spec(key, tuple(tensor.shape)) for key, tensor in item.module.named_parameters(recurse=False)),
            forward_s * item.forward / forward,
            backward_s * item.backward / backward,
        )
        for item in counted
    )
    return Trace(name, layers, batch)


def _count(build: Callable[[], nn.Module], image: tuple[int, int, int]) -> list[_Counted]:
    """The operations of every layer for one sample, in the order in which a training pass calls them."""
    found: list[_Counted] = []

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda module, inputs, output: found.append(_counted(name, module, inputs[0], output))

    with _Uninitialised():
        model = build()
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(hook(name))
    model.train()(torch.empty(0, *image))  # the data themselves need no gradient
    return found


class _Uninitialised(TorchFunctionMode):
    """Tensors keep what their memory has in place of initial values."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


def _counted(name: str, module: nn.Module, given: Tensor, output: Tensor) -> _Counted:
    elements = prod(output.shape[1:])  # of a sample
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        forward = 2.0 * elements * module.weight[0].numel()
        return _Counted(name, module, forward, 2 * forward if given.requires_grad else forward)
    if isinstance(module, nn.BatchNorm2d):
        forward = float(_NORMALISING * elements)
        return _Counted(name, module, forward, 2 * forward)
    raise UsageError(f"the operations of {name} ({type(module).__name__}) are not known: its time cannot be derived")
