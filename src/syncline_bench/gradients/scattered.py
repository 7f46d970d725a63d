"""A network whose backward pass returns finished gradients, so that moving them is measured without any computation.

Autograd treats these gradients as in any network. Nothing else holds such a tensor, so a parameter without a gradient
takes it over, and a parameter with a gradient adds it. Its memory is the same in every pass, as under a caching
allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Scattered(nn.Module):
    """A parameter for each of ``gradients``, with the memory of ``weights``. ``forward`` has no arguments."""

    def __init__(self, gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        super().__init__()
        self._gradients = tuple(gradients)
        for number, weight in enumerate(weights):
            self.register_parameter(f"tensor{number}", nn.Parameter(weight))

    def forward(self) -> Tensor:
        """A scalar. Its backward pass gives every parameter its gradient, from the last parameter to the first."""
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
