"""How long the layers of a model compute, and buckets travel: measured in training steps, for schedules that go by it.

A tensor's backward time is what passes from the gradient before it to its own, the first one's from where the backward
pass enters the model's output; its forward time is that of the module which has it, without the modules inside, and
counts for the module's first tensor. Medians over the steps. Times are 0 where nothing shows them: inside a compiled
model no module is called, and a gradient that comes with others costs nothing more.

An exchange takes from where it begins here to its end. The shortest of the steps counts: in it nobody was waited for.

On a GPU, which computes behind the script, points of time are events on its stream, and are read when the steps are
over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Protocol

import torch

from ...nouns import Bucket, Layer
from ...predict.network import LinearCost, fit_line
from .eager import eager
from .options import Named
from .samples import tensors_in

Moment = Any
"""A point of time, as a clock knows it."""


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

    def __init__(self, model: torch.nn.Module, named: Named, steps: int, clock: Clock) -> None:
        self._wanted, self._clock = steps, clock
        self._forward: list[list[float]] = [[] for _ in named]
        self._backward: list[list[float]] = [[] for _ in named]
        self._entered: list[tuple[int, Moment, list[tuple[Moment, Moment]]]] = []  # modules that run, and those inside
        self._ran: list[tuple[int, Moment, Moment, list[tuple[Moment, Moment]]]] = []
        self._came: list[tuple[int, Moment]] = []
        self._begun: Moment | None = None
        self._task = -1  # the backward pass that has begun
        self._steps = 0
        number = {id(parameter): index for index, (_, parameter) in enumerate(named)}
        self._handles: list[Any] = []
        for module in model.modules():
            mine = [number[id(one)] for one in module.parameters(recurse=False) if id(one) in number]
            if mine:
                self._watch(module, min(mine))
        self._handles.append(model.register_forward_hook(eager(lambda _, __, output: self._end_forward(output))))

    def _watch(self, module: torch.nn.Module, tensor: int) -> None:
        before = eager(lambda _, __: self._enter(tensor))
        after = eager(lambda _, __, ___: self._leave())
        self._handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    # What happens to the model.

    def _enter(self, tensor: int) -> None:
        if torch.is_grad_enabled():
            self._entered.append((tensor, self._clock.now(), []))

    def _leave(self) -> None:
        if self._entered:
            tensor, start, inside = self._entered.pop()
            stop = self._clock.now()
            self._ran.append((tensor, start, stop, inside))
            if self._entered:
                self._entered[-1][2].append((start, stop))

    def _end_forward(self, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]

    def _begin_backward(self, _: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task and not self._came:
            self._task, self._begun = task, self._clock.now()

    def produced(self, tensor: int) -> None:
        """A gradient is complete."""
        self._came.append((tensor, self._clock.now()))

    def forget(self) -> None:
        """What has come since the last step is none."""
        self._entered, self._ran, self._came, self._begun = [], [], [], None

    def end_step(self) -> None:
        """All gradients of a step have come."""
        spent: dict[int, float] = {}
        for tensor, start, stop, inside in self._ran:
            own = self._clock.between_s(start, stop) - sum(self._clock.between_s(*one) for one in inside)
            spent[tensor] = spent.get(tensor, 0.0) + max(0.0, own)
        for tensor, seconds in spent.items():
            self._forward[tensor].append(seconds)
        last = self._begun
        for tensor, moment in self._came:
            if last is not None:
                self._backward[tensor].append(max(0.0, self._clock.between_s(last, moment)))
            last = moment
        self._steps += 1
        self.forget()

    # What follows from it.

    @property
    def enough(self) -> bool:
        """Whether so many steps have been measured."""
        return self._steps >= self._wanted

    def of(self, layers: Sequence[Layer]) -> tuple[Layer, ...]:
        """The layers with their times."""
        return tuple(
            replace(layer, forward_s=median(forward or [0.0]), backward_s=median(backward or [0.0]))
            for layer, forward, backward in zip(layers, self._forward, self._backward, strict=True)
        )

    def detach(self) -> None:
        """Measure no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class BucketTimes:
    """Measures the exchanges of buckets; called in the thread that drives."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun: dict[int, float] = {}
        self._shortest_s: dict[int, float] = {}

    def begin(self, number: int) -> None:
        """The exchange of a bucket begins."""
        self._begun[number] = self._clock()

    def end(self, number: int) -> None:
        """It is over."""
        spent_s = self._clock() - self._begun.pop(number)
        self._shortest_s[number] = min(spent_s, self._shortest_s.get(number, spent_s))

    def cost(self, buckets: Sequence[Bucket]) -> LinearCost | None:
        """What an exchange takes by its bytes, as far as these buckets show; None where none was measured."""
        measured = sorted(self._shortest_s.items())
        return fit_line([buckets[number].nbytes for number, _ in measured], [seconds for _, seconds in measured])
