"""``torch.nn.SyncBatchNorm`` over the batches of all workers, on this run's collectives.

torch's own asks for a process group and a GPU, and without a group it quietly normalises by the rank's batch alone.

Per channel, every rank's count, mean and sum of squared deviations are gathered and combined in rank order (Chan, Golub
and LeVeque 1979), so all ranks have the same bits. With y = w xhat + b and xhat = (x - mean) / std over n values,
dx = w / std (dy - sum dy / n - xhat sum(dy xhat) / n): backward adds two sums per channel over the ranks. Gradients of
w and b are the rank's own and averaged with all others. Ranks whose batches differ in size are weighed by them in the
statistics, but all their losses count alike in dx, as in torch.
"""

from __future__ import annotations

import copyreg
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from ...errors import NotBuiltError, UsageError
from ...session.session import Session
from .compiled import eager


class Moments(NamedTuple):
    """Of all values of each channel: how many, their mean, the sum of their squared deviations; float64."""

    values: float
    mean: torch.Tensor
    deviation: torch.Tensor


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """What a prepared model's SyncBatchNorm modules are until they are given back; copies of them are torch's."""

    _session: Session

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(n, channels, ...) -> the same shape, normalised; in evaluation as torch does it."""
        if not self.training:
            return super().forward(input)
        found: torch.Tensor = _normalise(self, input)
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {key: value for key, value in vars(self).items() if key != "_session"}
        return copyreg._reconstructor, (torch.nn.SyncBatchNorm, object, None), state  # type: ignore[attr-defined]


class Synchronised:
    """A module that has been made to normalise over all ranks; ``remove`` gives it back."""

    def __init__(self, module: torch.nn.Module, session: Session) -> None:
        self._module = module
        module.__class__ = SyncBatchNorm
        vars(module)["_session"] = session

    def remove(self) -> None:
        """Make it torch's again."""
        vars(self._module).pop("_session", None)
        self._module.__class__ = torch.nn.SyncBatchNorm


def synchronise(model: torch.nn.Module, session: Session) -> list[Synchronised]:
    """Take over all SyncBatchNorm modules of a model; raises UsageError for one that cannot be."""
    return [Synchronised(module, session) for module in unsynchronised(model)]


def unsynchronised(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The SyncBatchNorm modules of a model that have not been taken over; raises UsageError for one that cannot be."""
    found: list[torch.nn.Module] = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.SyncBatchNorm) or isinstance(module, SyncBatchNorm):
            continue
        if type(module) is not torch.nn.SyncBatchNorm:
            raise UsageError(
                f"module {name!r} is a {type(module).__name__}, made from SyncBatchNorm: only torch's own can be run by"
                " Syncline's collectives; use that, or BatchNorm"
            )
        if module.process_group is not None:
            raise NotBuiltError(
                f"module {name!r} normalises over a process group of its own: use SyncBatchNorm without"
            )
        found.append(module)
    return found


def _train(module: SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
    module._check_input_dim(x)
    module._check_non_zero_input_channels(x)
    moments = _of_all_ranks(module._session, _moments(x.detach()))
    if moments.values < 2:
        raise ValueError(f"expected more than 1 value per channel over all ranks, got input size {tuple(x.shape)}")
    if module.running_mean is not None and module.running_var is not None and module.num_batches_tracked is not None:
        with torch.no_grad():
            module.num_batches_tracked.add_(1)
            share = module.momentum
            if share is None:
                share = 1.0 / float(module.num_batches_tracked)
            for kept, now in (
                (module.running_mean, moments.mean),
                (module.running_var, moments.deviation / (moments.values - 1)),
            ):
                kept.lerp_(now.to(kept), share)
    found: torch.Tensor = _Normalised.apply(x, module.weight, module.bias, moments, module.eps, module._session)  # type: ignore[no-untyped-call]
    return found


_normalise = eager(_train)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        moments: Moments,
        eps: float,
        session: Session,
    ) -> torch.Tensor:
        kind = _computed_in(x)
        std = (moments.deviation / moments.values + eps).sqrt()
        mean, scale = moments.mean.to(x.device, kind), std.reciprocal().to(x.device, kind)
        ctx.session, ctx.count = session, moments.values
        ctx.save_for_backward(x, weight, mean, scale)
        out = (x.to(kind) - _wide(mean, x)) * _wide(scale, x)
        if weight is not None:
            out = out * _wide(weight.to(kind), x)
        if bias is not None:
            out = out + _wide(bias.to(kind), x)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        kind = _computed_in(x)
        dy, normal = dy.to(kind), (x.to(kind) - _wide(mean, x)) * _wide(scale, x)
        rest = [dim for dim in range(x.dim()) if dim != 1]
        sums = torch.stack([dy.sum(rest), (dy * normal).sum(rest)])
        dx = None
        if ctx.needs_input_grad[0]:
            whole = sums.double().cpu().numpy().reshape(-1).copy()
            ctx.session.allreduce(whole, average=False)
            both = torch.from_numpy(whole).view(2, -1).to(x.device, kind) / ctx.count
            dx = (dy - _wide(both[0], x) - normal * _wide(both[1], x)) * _wide(scale, x)
            if weight is not None:
                dx = dx * _wide(weight.to(kind), x)
            dx = dx.to(x.dtype)
        dw = sums[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        db = sums[0].to(weight.dtype) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None, None


def _moments(x: torch.Tensor) -> Moments:
    """Of this rank's batch; a batch may be empty."""
    channels = x.shape[1]
    count = x.numel() // channels
    if count == 0:
        return Moments(0.0, torch.zeros(channels, dtype=torch.float64), torch.zeros(channels, dtype=torch.float64))
    rest = [dim for dim in range(x.dim()) if dim != 1]
    variance, mean = torch.var_mean(x.to(_computed_in(x)), rest, correction=0)
    return Moments(float(count), mean.double().cpu(), variance.double().cpu() * count)


def _of_all_ranks(session: Session, mine: Moments) -> Moments:
    row = np.concatenate([[mine.values], mine.mean.numpy(), mine.deviation.numpy()])
    table = torch.from_numpy(np.stack([np.frombuffer(data) for data in session.gather(row.tobytes())]))
    channels = mine.mean.numel()
    counts, means, deviations = table[:, :1], table[:, 1 : 1 + channels], table[:, 1 + channels :]
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    return Moments(float(count), mean, (deviations + counts * (means - mean).square()).sum(0))


def _computed_in(x: torch.Tensor) -> torch.dtype:
    return x.dtype if x.dtype == torch.float64 else torch.float32


def _wide(channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One value per channel, seen with the dimensions of a batch."""
    return channels.view(1, -1, *[1] * (like.dim() - 2))
