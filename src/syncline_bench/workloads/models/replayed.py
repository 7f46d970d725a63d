"""A network that takes the time of a trace instead of computing, with real parameters and real gradients.

To autograd it is a chain of layers, so everything that hooks into backward (Syncline, DistributedDataParallel) sees a
real network: layer l's gradients become ready when its backward time has passed, before layer l-1 begins, and forward
is in layer order. Every layer is a module that owns its parameters. Time passes by sleeping ``_speed``, so there may
be more ranks than cores.

The memory is real, the mathematics is not. Layers pass one number per sample through, and all elements of a layer's
gradient are the sum of the incoming gradient times the layer's position (k of L: k / L). With half the mean square of
the output as loss, that sum is the batch's mean. It differs between ranks and layers, and its mean over ranks is the
mean of the whole batch, so an unaveraged or misplaced gradient shows in the weights. If a trace has gradients for a
share of the rows only, all other rows are zero: the same ones in every step and on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._speed import Pacer
from .._trace import Trace, TracedLayer


class Replayed(nn.Module):
    """(n, ...) samples to (n,) numbers, each sample's mean, in the trace's time for any n.

    Cost besides sleeping: one write of all gradients per backward pass, which counts as part of the layers' times.
    """

    def __init__(self, trace: Trace, pacer: Pacer | None = None) -> None:
        super().__init__()
        self._pacer = pacer or Pacer()
        for index, layer in enumerate(trace.layers):
            # The number avoids clashes of names such as "half" with the module's attributes; a dot would mean a
            # submodule.
            name = f"{index}:{layer.name.replace('.', '/')}"
            self.add_module(name, ReplayedLayer(layer, (index + 1) / len(trace.layers), self._pacer))

    def stretch(self, factor: float) -> None:
        """Multiply all times of the trace."""
        self._pacer.stretch = factor

    def forward(self, samples: Tensor) -> Tensor:
        """The means of the samples, after the forward time of all layers."""
        self._pacer.new_iteration()
        # The signal is a leaf of its own, so that layers without parameters at the front also take their backward time.
        signal = samples.detach().flatten(1).mean(1).requires_grad_(torch.is_grad_enabled())
        for layer in self.children():
            signal = layer(signal)
        return signal


class ReplayedLayer(nn.Module):
    """One layer: its parameters, and its share of the time."""

    def __init__(self, layer: TracedLayer, factor: float, pacer: Pacer) -> None:
        super().__init__()
        self._layer, self._factor, self._pacer = layer, factor, pacer
        for tensor in layer.tensors:
            self.register_parameter(tensor.name, nn.Parameter(torch.zeros(tensor.shape)))
        # Gradients keep their memory, as with an accelerator's caching allocator: fresh pages cost ten times as much as
        # writing. The memory is touched here, or else the first iteration would pay for it.
        self._memory = [torch.ones_like(parameter) for parameter in self.parameters()]
        self._rows = [_used_rows(memory, layer.rows) for memory in self._memory]

    def forward(self, signal: Tensor) -> Tensor:
        """The unchanged signal, after the layer's forward time.

        It reads the weights when it begins, like a real layer: under some schedules they arrive only then.
        """
        for parameter in self.parameters():
            parameter.detach()
        found: Tensor = _Timed.apply(self, signal, *self.parameters())  # type: ignore[no-untyped-call]
        return found

    def take_forward(self) -> None:
        """Let the forward time pass."""
        self._pacer.begin()
        self._pacer.finish(self._layer.forward_s)

    def take_backward(self, value: float) -> list[Tensor]:
        """The gradients of all parameters, full of ``value`` times the layer's factor, after the backward time."""
        self._pacer.begin()
        found = [
            _filled(parameter, memory, rows, value * self._factor)
            for parameter, memory, rows in zip(self.parameters(), self._memory, self._rows, strict=True)
        ]
        self._pacer.finish(self._layer.backward_s)
        return found


def _used_rows(memory: Tensor, share: float) -> Tensor | None:
    """The rows whose gradient is not zero, at even distances; None for all."""
    count = max(1, round(share * len(memory)))
    return None if count >= len(memory) else torch.arange(count) * len(memory) // count


def _filled(parameter: nn.Parameter, memory: Tensor, rows: Tensor | None, value: float) -> Tensor:
    in_use = parameter.grad is not None and parameter.grad.data_ptr() == memory.data_ptr()
    # A second gradient is added to the memory of the first.
    found = torch.empty_like(parameter) if in_use or memory.device != parameter.device else memory
    if rows is None:
        found.fill_(value)
    else:
        found.zero_()[rows.to(found.device)] = value
    # Autograd takes over a tensor without a copy if there is no other reference to it.
    return found.detach()


class _Timed(torch.autograd.Function):
    """The identity on the signal, in a layer's time. Parameters are arguments so that they get gradients."""

    @staticmethod
    def forward(ctx: Any, layer: ReplayedLayer, signal: Tensor, *_: Tensor) -> Tensor:
        ctx.layer = layer
        layer.take_forward()
        return signal.view_as(signal)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return None, gradient, *ctx.layer.take_backward(float(gradient.sum()))
