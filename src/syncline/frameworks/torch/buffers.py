"""Batch statistics: the exchange of a model's buffers, and batch normalisation over the batches of all ranks.

With every exchange of gradients, rank 0's buffers are copied to all ranks (``Buffers``). If workers train alone and
exchange weights, floating-point buffers are averaged like the weights (``MeanBuffers``). Buffers travel packed into one
array. For a model on a device they are staged through the host, like gradients.

``SyncBatchNorm`` is ``torch.nn.SyncBatchNorm`` on this run's collectives. PyTorch's own needs a process group and a
GPU; without a group it silently normalises over the rank's own batch. The ranks gather the count, mean and sum of
squared deviations of each channel and combine them in rank order (Chan, Golub and LeVeque 1979), so all ranks get the
same bits. With y = w xhat + b and xhat = (x - mean) / std over n values, dx = w / std (dy - sum dy / n - xhat sum(dy
xhat) / n): backward sums two numbers per channel over the ranks. Gradients of w and b are local to the rank and
averaged like all others. In the statistics a rank counts by the size of its batch; in dx all losses count equally, as
in PyTorch.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from ...engine.order import Order, When, Work
from ...errors import NotBuiltError, UsageError
from ...kernels import cpu
from ...plans.messages import Program
from ...session.layout import BUCKETS
from ...session.session import MODEL_KEYS, Session
from ...session.tickets import JOINED, Meeting
from ...training.exchange import BucketExchange
from .compiled import eager
from .options import Selection
from .storage import Pair, pack_bytes, unpack_bytes


class Buffers:
    """The exchange of a model's buffers with their values at that time. ``fault`` makes an error of this rank.

    ``among`` selects the buffers; by default all take part.
    """

    def __init__(
        self,
        exchange: BucketExchange,
        selection: Selection,
        fault: Callable[[str], Exception],
        among: Callable[[torch.Tensor], bool] = lambda _: True,
    ) -> None:
        self._session, self._staging, self._fault = exchange.session, exchange.staging, fault
        self._key = exchange.key + MODEL_KEYS - 1
        self._buffers = [buffer for buffer in selection.buffers().values() if among(buffer())]
        self._packed = self._staging.allocate(sum(buffer().nbytes for buffer in self._buffers), np.dtype(np.uint8))
        packed, device = torch.from_numpy(self._packed), self._staging.device
        self._pair = Pair(packed if device is None else torch.zeros_like(packed, device=device), packed)
        self._works: list[Work] = []

    def start(self, meeting: Meeting) -> None:
        """Start the broadcast from the first rank that has a batch in this step."""
        self._works = []
        if not self._buffers or meeting.work is None:
            return
        buffers = [buffer() for buffer in self._buffers]
        if sum(buffer.nbytes for buffer in buffers) != self._packed.nbytes:
            raise self._fault("a buffer of the model has another size than at syncline.prepare(): prepare it again")
        pack_bytes(buffers, self._pair.device)

        def program() -> Program:
            first = next(rank for rank, ticket in enumerate(meeting.tickets()) if ticket.kind != JOINED)
            return self._session.broadcast_program(first)

        gate = self._staging.down(self._pair, meeting.work, "buffers")
        exchange = self._session.engine.start(Order(program, self._packed, self._key, "buffers"), When(gate))
        self._works = [self._staging.up(self._pair, exchange, "buffers")]

    def finish(self) -> None:
        """Wait for the broadcast and write the values to the model's buffers."""
        works, self._works = self._works, []
        if works:
            self._session.engine.wait(*works)
            self._staging.join()
            unpack_bytes(self._pair.device, [buffer() for buffer in self._buffers])


class MeanBuffers:
    """Averages a model's floating-point buffers together with its weights, and copies the other buffers from one rank.

    The sum over the workers is computed in float32, or in float64 if any buffer has that type.
    """

    def __init__(self, exchange: BucketExchange, selection: Selection, fault: Callable[[str], Exception]) -> None:
        self._session, self._staging, self._fault = exchange.session, exchange.staging, fault
        self._key = exchange.key + BUCKETS - 1  # buckets are numbered from 0 and never reach this key
        self._others = Buffers(exchange, selection, fault, lambda buffer: not _is_mean(buffer))
        self._buffers = [buffer for buffer in selection.buffers().values() if _is_mean(buffer())]
        wide = any(buffer().dtype == torch.float64 for buffer in self._buffers)
        dtype = np.dtype(np.float64 if wide else np.float32)
        self._packed = self._staging.allocate(sum(buffer().numel() for buffer in self._buffers) * dtype.itemsize, dtype)
        packed, device = torch.from_numpy(self._packed), self._staging.device
        self._pair = Pair(packed if device is None else torch.zeros_like(packed, device=device), packed)
        self._works: list[Work] = []
        self._parts = 1

    def start(self, meeting: Meeting, mix: Program | None = None, parts: int = 1) -> None:
        """Start to average the present values over all workers. With ``mix``, sum ``parts`` workers' values by that
        program."""
        self._works = []
        self._others.start(meeting)
        if not self._buffers or meeting.work is None:
            return
        buffers = [buffer().detach() for buffer in self._buffers]
        if sum(buffer.numel() for buffer in buffers) != self._packed.size:
            raise self._fault("a buffer of the model has another size than at syncline.prepare(): prepare it again")
        at = 0
        for buffer in buffers:
            self._pair.device[at : at + buffer.numel()].copy_(buffer.reshape(-1))
            at += buffer.numel()
        self._pair.device.div_(self._session.world_size if mix is None else 1)
        self._parts = parts
        label, session = "mean of buffers", self._session
        program = session.allreduce_program(self._packed.nbytes) if mix is None else mix
        gate = self._staging.down(self._pair, meeting.work, label)
        when = When(gate, before=lambda: cpu.weigh(self._packed, meeting.share()))
        exchange = session.engine.start(Order(program, self._packed, self._key, label), when)
        self._works = [self._staging.up(self._pair, exchange, label)]

    def finish(self) -> None:
        """Wait for the exchange and write the values to the model's buffers."""
        self._others.finish()
        works, self._works = self._works, []
        if not works:
            return
        self._session.engine.wait(*works)
        self._staging.join()
        self._pair.device.div_(self._parts)
        at = 0
        for buffer in (buffer() for buffer in self._buffers):
            part = self._pair.device[at : at + buffer.numel()]
            buffer.data.copy_(part.view(buffer.shape))  # not recorded by autograd, like every exchange
            at += buffer.numel()


def _is_mean(buffer: torch.Tensor) -> bool:
    """Whether to average a buffer: floating-point numbers yes, counts and indices no."""
    return buffer.is_floating_point()


class Moments(NamedTuple):
    """Statistics of all values of each channel: their number, mean and sum of squared deviations, in float64."""

    values: float
    mean: torch.Tensor
    deviation: torch.Tensor


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """The class of a prepared model's SyncBatchNorm modules until its release; copies of them are PyTorch's."""

    _session: Session

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(n, channels, ...) -> the same shape, normalised. In evaluation this is PyTorch's own."""
        if not self.training:
            return super().forward(input)
        found: torch.Tensor = _normalise(self, input)
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {key: value for key, value in vars(self).items() if key != "_session"}
        return copyreg._reconstructor, (torch.nn.SyncBatchNorm, object, None), state  # type: ignore[attr-defined]


class Synchronised:
    """A module that normalises over all ranks until ``remove``."""

    def __init__(self, module: torch.nn.Module, session: Session) -> None:
        self._module = module
        module.__class__ = SyncBatchNorm
        vars(module)["_session"] = session

    def remove(self) -> None:
        """Restore the module's own class."""
        vars(self._module).pop("_session", None)
        self._module.__class__ = torch.nn.SyncBatchNorm


def synchronise(model: torch.nn.Module, session: Session) -> list[Synchronised]:
    """Take over all SyncBatchNorm modules of a model. Raises UsageError for a module that cannot be taken over."""
    return [Synchronised(module, session) for module in unsynchronised(model)]


def unsynchronised(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The SyncBatchNorm modules that have not been taken over yet. Raises UsageError if one cannot be taken over."""
    found: list[torch.nn.Module] = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.SyncBatchNorm) or isinstance(module, SyncBatchNorm):
            continue
        if type(module) is not torch.nn.SyncBatchNorm:
            raise UsageError(
                f"module {name!r} is a {type(module).__name__}, derived from SyncBatchNorm: Syncline's collectives"
                " support torch.nn.SyncBatchNorm itself only; use that class, or BatchNorm"
            )
        if module.process_group is not None:
            raise NotBuiltError(
                f"module {name!r} normalises over a process group of its own: use SyncBatchNorm without process_group="
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
    """The statistics of this rank's batch, which may be empty."""
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
    """One value per channel, as a view that broadcasts over a batch."""
    return channels.view(1, -1, *[1] * (like.dim() - 2))
