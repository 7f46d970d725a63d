"""A network whose backward pass hands out finished gradients: what moving them costs is seen without any computing.

Autograd does with them what it does in any network. Each is a tensor that nobody else holds, so that a parameter
without a gradient takes it over as it is, and one with a gradient adds it. The memory behind it stays the
same from one pass to the next, as under a caching allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Scattered(nn.Module):
    """A parameter for each of ``gradients``, with the memory of ``weights``; ``forward`` takes nothing."""

    def __init__(self, gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        super().__init__()
        self._gradients = tuple(gradients)
        for number, weight in enumerate(weights):
            self.register_parameter(f"tensor{number}", nn.Parameter(weight))

    def forward(self) -> Tensor:
        """A number whose backward pass gives every parameter its gradient, the last one's first."""
        signal = torch.zeros((), requires_grad=True)
        for gradient, parameter in zip(self._gradients, self.parameters(), strict=True):
            signal = _Layer.apply(gradient, signal, parameter)  # type: ignore[no-untyped-call]
        return signal


class _Layer(torch.autograd.Function):
    """The identity on the signal; the parameter is an argument so that it gets a gradient."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, signal: Tensor, parameter: Tensor) -> Tensor:  # noqa: ARG004
        ctx.gradient = gradient
        return signal.view_as(signal)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (signal,) = gradients
        return None, signal, ctx.gradient.detach()
