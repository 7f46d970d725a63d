"""PyTorch optimizers for large batches, LARS and LAMB. ``import syncline`` does not load this, which loads torch.

More workers mean larger batches, and the learning rate grows with them: k times the batch, k times the rate, reached
after a warm-up such as torch's ``LinearLR`` (Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1
hour", arXiv 1706.02677). Beyond some thousand images, layers diverge if their gradients are large relative to their
weights. Both optimizers give each tensor its own rate by the *trust ratio*: the norm of its weights divided by the norm
of its update.

``LARS``: You, Gitman and Ginsburg, "Large batch training of convolutional networks" (arXiv 1708.03888), algorithm 1.
``LAMB``: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes" (arXiv 1904.00962),
algorithm 2 with the identity as phi. As in the authors' code, the ratio is 1 for tensors whose weights or updates are
all zeros, such as biases at the start.

Each tensor is updated by itself, so both optimizers work with schedules that defer updates per layer. An element's
update depends on the norms of the whole tensor, so servers that hold slices of tensors refuse both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import UsageError

__all__ = ["LAMB", "LARS"]


class _ByTensor(torch.optim.Optimizer):
    """The common part of both optimizers: a step that updates each tensor with the values of its group."""

    updates_parameters_alone = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns the loss of ``closure``, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise UsageError(f"{type(self).__name__} takes dense gradients only: use SparseAdam for embeddings")
                self._update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def _update(
        self, weights: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        raise NotImplementedError


class LARS(_ByTensor):
    """SGD with momentum and layer-wise adaptive rates: w -= v, v = momentum v + lr r (g + weight_decay w).

    r is ``trust`` |w| / (|g| + weight_decay |w|). With ``adapt=False`` r is 1, the usual choice for the group of biases
    and normalisation parameters. ``lr`` is the rate of the whole model, larger than SGD's by a factor of about 1 /
    ``trust``.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        adapt: bool = True,
    ) -> None:
        _check("LARS", lr=lr, weight_decay=weight_decay, trust=trust)
        if trust == 0:
            raise UsageError("trust of LARS must be above 0: adapt=False leaves a group's rate as it is")
        _check_below_one("LARS", momentum=momentum)
        values = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "adapt": adapt}
        super().__init__(params, values)

    def _update(
        self, weights: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        rate = group["lr"]
        if group["adapt"]:
            norm = weights.norm()
            rate = rate * _ratio(group["trust"] * norm, gradient.norm() + group["weight_decay"] * norm)
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weights)
        velocity: torch.Tensor = state["momentum"]
        velocity.mul_(group["momentum"]).add_(rate * gradient.add(weights, alpha=group["weight_decay"]))
        weights.sub_(velocity)


class LAMB(_ByTensor):
    """Adam with layer-wise adaptive rates: w -= lr (|w| / |u|) u, u = m / (sqrt(v) + eps) + weight_decay w.

    m and v are Adam's bias-corrected means of gradients and of their squares. With ``adapt=False`` the ratio is 1,
    which is AdamW.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
    ) -> None:
        _check("LAMB", lr=lr, eps=eps, weight_decay=weight_decay)
        _check_below_one("LAMB", **{"the first of betas": betas[0], "the second of betas": betas[1]})
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt})

    def _update(
        self, weights: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            state.update(step=torch.zeros(()), mean=torch.zeros_like(weights), square=torch.zeros_like(weights))
        state["step"] += 1
        step, (one, two) = float(state["step"]), group["betas"]
        mean, square = state["mean"], state["square"]
        mean.lerp_(gradient, 1 - one)
        square.mul_(two).addcmul_(gradient, gradient, value=1 - two)
        scale = (square / (1 - two**step)).sqrt_().add_(group["eps"])
        update = (mean / (1 - one**step)).div_(scale).add_(weights, alpha=group["weight_decay"])
        ratio = _ratio(weights.norm(), update.norm()) if group["adapt"] else 1.0
        weights.sub_(group["lr"] * ratio * update)


def _ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """A trust ratio; 1 if a norm is 0. It reads nothing back from the device."""
    usable = (above > 0) & (below > 0)
    return torch.where(usable, above / torch.where(usable, below, 1.0), 1.0)


def _check(name: str, **values: float) -> None:
    """Raise UsageError for a value that is negative, infinite or NaN."""
    for what, value in values.items():
        if not 0 <= value < float("inf"):
            raise UsageError(f"{what} of {name} must be a number from 0 up, got {value}")


def _check_below_one(name: str, **values: float) -> None:
    for what, value in values.items():
        if not 0 <= value < 1:
            raise UsageError(f"{what} of {name} must be from 0 to below 1, got {value}")
