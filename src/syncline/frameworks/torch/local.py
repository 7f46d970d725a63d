"""A worker's own step ahead of the average: plain SGD without state, from the weights that all have.

While the gradients of step t are under way, a worker computes the next ones at

    w(t+1) = W(t) - lr g(t)

with its own gradient g(t), plus it for an optimizer that maximizes, and W(t), the weights that all have, updated with
the average of step t-1 ("OD-SGD", Xu et al., ACM TACO 2020). Memory: a copy of the weights, and the worker's own
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import UsageError
from .parts import Values


class LocalSteps:
    """Takes ``parameters`` ahead and back; learning rates are those of the optimizer's groups."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._parameters = parameters
        for group in optimizer.param_groups:
            if "lr" not in group:
                raise UsageError(
                    f"{type(optimizer).__name__} has no learning rate, which a local step takes: use"
                    " schedule=delayed(local=off)"
                )
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._shared = [torch.empty_like(parameter, requires_grad=False) for parameter in parameters]
        self._mine: dict[int, torch.Tensor] = {}
        self._ahead = False

    def forget(self) -> None:
        """A backward pass begins to make gradients; what is left of the one before has not been stepped from."""
        self._mine.clear()

    def keep(self, number: int, gradient: torch.Tensor, copy: bool) -> None:
        """This worker's own gradient of a parameter."""
        self._mine[number] = gradient.clone() if copy else gradient

    def go_ahead(self, values: Values) -> None:
        """From the weights that all have to this worker's own."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter, shared in zip(self._parameters, self._shared, strict=True):
                shared.copy_(parameter)
            for group in values:
                for parameter in group["params"]:
                    if (gradient := self._mine.get(self._numbers.get(id(parameter), -1))) is not None:
                        parameter.add_(gradient * group["lr"], alpha=1 if group.get("maximize") else -1)
        self._mine, self._ahead = {}, True

    def go_back(self) -> None:
        """To the weights that all have, if this worker is ahead of them."""
        if not self._ahead:
            return
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter, shared in zip(self._parameters, self._shared, strict=True):
                parameter.copy_(shared)
        self._ahead = False
