"""Derives a trace from a network: times of whole passes, divided among its layers by floating-point operations.

A layer is a module with parameters of its own. Pooling, activations and the like get no time, which makes their
neighbours' slightly longer. The network runs once with zero samples: nothing is computed, but the shapes of a sample
are real, and the memory of its weights is never touched. (On torch's meta device many operations are Python references,
the first of which makes torch load its compiler: seconds in every rank.)

Operations for an output of n elements: a convolution or linear layer of k inputs per output makes n k multiplications
and as many additions forward; backward as many for its weights, and again for its input unless that is the data. Batch
normalization makes 8 n forward (mean, variance, normalizing, scaling and shifting) and twice that backward.

Operations are not time: memory-bound layers take longer than their share. But a trace is for the order, the sizes and
the times of gradients. These depend on the large convolutions at the front and the large matrices at the end, for which
it is a fair estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from syncline.errors import UsageError
from syncline.nouns import Spec

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

    Layers are in the order of a training pass. Raises UsageError for a layer whose operations are unknown.
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
    """The operations of every layer for one sample, in the order of a training pass."""
    found: list[_Counted] = []

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda module, inputs, output: found.append(_counted(name, module, inputs[0], output))

    with _Uninitialised():
        model = build()
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(hook(name))
    model.train()(torch.empty(0, *image))  # the data need no gradient
    return found


class _Uninitialised(TorchFunctionMode):
    """Skips initial values: tensors keep the content of their memory."""

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
