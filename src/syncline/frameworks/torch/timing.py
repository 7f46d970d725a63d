"""How long the layers of a model compute: measured in training steps, for schedules that go by it.

A tensor's backward time is what passes from the gradient before it to its own, the first one's from where the backward
pass enters the model's output. Its forward time is what passes from the call of the module which has it to that of the
next one that has some, the first one's from the model's, the last one's to its end; it counts for the module's first
tensor. What lies between layers, such as an activation, is thereby part of one. Medians over the steps. Times are 0
where nothing shows them: a gradient that comes with others costs nothing more. Hooks on modules, which break compiled
models apart, are there only where forward times are asked for.

On a GPU, which computes behind the script, points of time are events on its stream, and are read when the steps are
over.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import torch

from ...nouns import Layer
from .copies import PlainCopies
from .eager import eager
from .options import Named
from .samples import tensors_in

_BEGIN, _END = -1, -2

Moment = Any
"""A point of time, as a clock knows it."""

_Marks = list[tuple[int, Moment]]


class Clock(Protocol):
    """Where the model computes."""

    def now(self) -> Moment:
        """The point that the computation has reached."""
        ...

    def between_s(self, start: Moment, stop: Moment) -> float:
        """Seconds from one to the other, once both have passed."""
        ...


class HostClock:
    """Computation is where the script is."""

    def now(self) -> Moment:
        """Of the processor."""
        return time.perf_counter()

    def between_s(self, start: Moment, stop: Moment) -> float:
        """Their difference."""
        found: float = stop - start
        return found


class CudaClock:
    """Computation is behind the script, in the order of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Moment:
        """An event."""
        reached: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        reached.record(torch.cuda.current_stream(self._device))
        return reached

    def between_s(self, start: Moment, stop: Moment) -> float:
        """As the device has it; waits for the later one."""
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """For models there."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


class LayerTimes:
    """Measures the layers of a model in so many ``steps``; ``named`` are its trained parameters, in forward order."""

    def __init__(self, model: torch.nn.Module, named: Named, steps: int, clock: Clock, *, forward: bool) -> None:
        self._wanted, self._clock = steps, clock
        self._over: list[tuple[_Marks, _Marks]] = []  # what each step left of these:
        self._called: _Marks = []  # modules by their first tensors, or _BEGIN and _END of the model
        self._came: _Marks = []  # gradients, or _BEGIN of a backward pass
        self._task = -1  # the backward pass that has begun
        number = {id(parameter): index for index, (_, parameter) in enumerate(named)}
        self._handles: list[Any] = []
        self._hook(model, model.register_forward_pre_hook(eager(lambda _, __: self._call(_BEGIN))))
        for module in model.modules() if forward else ():
            mine = [number[id(one)] for one in module.parameters(recurse=False) if id(one) in number]
            if mine:
                call = partial(self._call, min(mine))
                self._hook(module, module.register_forward_pre_hook(eager(lambda _, __, call=call: call())))
        self._hook(model, model.register_forward_hook(eager(lambda _, __, output: self._end_forward(output))))

    def _hook(self, module: torch.nn.Module, handle: Any) -> None:
        """Keep a hook of a module, which copies of the module do not have."""
        self._handles += [handle, PlainCopies(module, [handle])]

    # What happens to the model.

    def _call(self, tensor: int) -> None:
        again = torch._C._current_graph_task_id() != -1  # a checkpoint, in the backward pass
        if torch.is_grad_enabled() and not again:
            self._called.append((tensor, self._clock.now()))

    def _end_forward(self, output: Any) -> None:
        self._call(_END)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]

    def _begin_backward(self, _: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._came.append((_BEGIN, self._clock.now()))

    def produced(self, tensor: int) -> None:
        """A gradient is complete."""
        self._came.append((tensor, self._clock.now()))

    def forget(self) -> None:
        """What has come since the last step is none."""
        self._called, self._came = [], []

    def end_step(self) -> None:
        """All gradients of a step have come."""
        self._over.append((self._called, self._came))
        self.forget()

    # What follows from it.

    @property
    def under_way(self) -> bool:
        """Whether gradients have come since the last step."""
        return any(tensor != _BEGIN for tensor, _ in self._came)

    @property
    def enough(self) -> bool:
        """Whether so many steps have been measured."""
        return len(self._over) >= self._wanted

    @property
    def last(self) -> bool:
        """Whether the step that begins is the last one to be measured."""
        return len(self._over) + 1 >= self._wanted

    def of(self, layers: Sequence[Layer]) -> tuple[Layer, ...]:
        """The layers with their times; waits until they have passed."""
        forward_s: list[list[float]] = [[] for _ in layers]
        backward_s: list[list[float]] = [[] for _ in layers]
        for called, came in self._over:
            spent_s: dict[int, float] = {}
            for (tensor, start), (following, stop) in pairwise(called):
                of = following if tensor == _BEGIN else tensor
                if of >= 0:
                    spent_s[of] = spent_s.get(of, 0.0) + self._clock.between_s(start, stop)
            for tensor, seconds in spent_s.items():
                forward_s[tensor].append(seconds)
            for (_, before), (tensor, moment) in pairwise(came):
                if tensor != _BEGIN:
                    backward_s[tensor].append(max(0.0, self._clock.between_s(before, moment)))
        return tuple(
            replace(layer, forward_s=median(forward or [0.0]), backward_s=median(backward or [0.0]))
            for layer, forward, backward in zip(layers, forward_s, backward_s, strict=True)
        )

    def detach(self) -> None:
        """Measure no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
