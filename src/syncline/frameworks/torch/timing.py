"""Measures the computation times of a model's layers, for schedules that depend on them and for trace files.

A tensor's backward time is the time from the previous gradient to its own; the first one's starts when the backward
pass enters the model's output. Its forward time is the time from the call of its module to the call of the next module
with trained tensors. The first one's starts with the call of the model, and the last one's ends with that call. A
module's time counts for its first tensor. Computation between layers, such as an activation, is thereby part of a
layer. If a tensor is used again, as a tied embedding is by the output layer, this time counts for the tensor that was
used for the first time last, since it waits for no other. Times are medians over the steps, and 0 if nothing shows
them: a gradient that arrives together with others costs nothing more. Hooks on modules split compiled models, so they
exist only if forward times are wanted.

A GPU computes asynchronously. There moments are events on its stream, which are read when the steps are over.

``Recording`` measures the layers of an unchanged training script on this device. Global hooks on modules and optimizers
find the model: the outermost module that is called and whose parameters the first optimizer trains. It is measured for
some steps after the first ones, in which memory is allocated and kernels are selected; then the script is ended. Copies
of batches to a device by ``to``, ``cuda`` and ``copy_`` are timed too, with the device idle before and after. A trace
file has their time in the row of its first layer.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from itertools import pairwise
from statistics import median
from typing import Any, TextIO

import torch
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...costs.cluster import DEVICES
from ...errors import UsageError
from ...nouns import Layer
from .compiled import eager
from .hooks import PlainCopies
from .options import Named, tensors_in
from .staging import device_of
from .storage import layers_of

_BEGIN, _END = -1, -2

Moment = Any
"""A point in time, as represented by a clock."""

_Marks = list[tuple[int, Moment]]


class Clock:
    """The clock of the place where a model computes: the CPU, which computes synchronously."""

    def now(self) -> Moment:
        """The point that the computation has reached."""
        return time.perf_counter()

    def between_s(self, start: Moment, stop: Moment) -> float:
        """The seconds between two moments, once both have passed."""
        found: float = stop - start
        return found


class CudaClock(Clock):
    """The clock of a model on a GPU, which computes in the order of the current stream. Moments are events there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Moment:
        reached: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        reached.record(torch.cuda.current_stream(self._device))
        return reached

    def between_s(self, start: Moment, stop: Moment) -> float:
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock for models on that device."""
    return CudaClock(device) if device.type == "cuda" else Clock()


class LayerTimes:
    """Measures the layers of a model in ``steps`` steps. ``named`` are its trained parameters, in forward order."""

    def __init__(self, model: torch.nn.Module, named: Named, steps: int, clock: Clock, *, forward: bool) -> None:
        self._wanted, self._clock = steps, clock
        self._over: list[tuple[_Marks, _Marks]] = []  # ``_called`` and ``_came`` of each measured step
        self._called: _Marks = []  # calls of modules, by their first tensors, or _BEGIN and _END of the model
        self._came: _Marks = []  # gradients, or _BEGIN of a backward pass
        self._task = -1  # autograd's number of the last backward pass
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
        """Keep a hook of a module, and leave it out of copies of that module."""
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
        """Note that a gradient is complete."""
        self._came.append((tensor, self._clock.now()))

    def forget(self) -> None:
        """Discard everything since the last step."""
        self._called, self._came = [], []

    def end_step(self) -> None:
        """Note that all gradients of a step are complete."""
        self._over.append((self._called, self._came))
        self.forget()

    # What follows from it.

    @property
    def under_way(self) -> bool:
        """Whether gradients have arrived since the last step."""
        return any(tensor != _BEGIN for tensor, _ in self._came)

    @property
    def enough(self) -> bool:
        """Whether all wanted steps have been measured."""
        return len(self._over) >= self._wanted

    @property
    def last(self) -> bool:
        """Whether the step that begins is the last one to measure."""
        return len(self._over) + 1 >= self._wanted

    def of(self, layers: Sequence[Layer]) -> tuple[Layer, ...]:
        """The layers with their times; waits until the moments have passed."""
        forward_s: list[list[float]] = [[] for _ in layers]
        backward_s: list[list[float]] = [[] for _ in layers]
        for called, came in self._over:
            spent_s: dict[int, float] = {}
            seen: set[int] = set()
            newest = -1
            for (tensor, start), (following, stop) in pairwise(called):
                of = following if tensor == _BEGIN else tensor
                seen = set() if tensor == _BEGIN else seen
                if of >= 0:
                    newest = newest if of in seen else of
                    seen.add(of)
                    spent_s[newest] = spent_s.get(newest, 0.0) + self._clock.between_s(start, stop)
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
        """Remove the hooks; the times so far are kept."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


COLUMNS = ("name", "elements", "forward_s", "backward_s", "h2d_s", "device", "shape", "rows")


class Recorded(SystemExit):
    """Ends the script with status 0, because enough has been recorded."""


class Recording:
    """Records ``steps`` backward passes of a script, after the first ``skip`` steps of its optimizer.

    When it is ``done`` it raises ``Recorded`` out of the optimizer's step; ``layers`` and ``h2d_s`` then have the
    result. ``away`` tells whether a device is a target of timed copies.
    """

    def __init__(self, steps: int, skip: int, away: Callable[[torch.device], bool] | None = None) -> None:
        self.done = False
        self.layers: tuple[Layer, ...] = ()
        self.h2d_s, self.device = 0.0, ""
        self.rows: dict[int, float] = {}
        """The share of rows with a gradient in the last step, of embeddings, by the number of their layer."""
        self.made = 0
        """The number of optimizer steps so far."""
        self._steps, self._skip = steps, skip
        self._depth = 0
        self._called: dict[int, torch.nn.Module] = {}  # outermost modules with parameters to train
        self._times: LayerTimes | None = None
        self._embeddings: dict[int, torch.nn.Parameter] = {}
        self._copies = _Copies(away or (lambda device: device.type == "cuda"))
        self._handles: list[Any] = [
            modules.register_module_forward_pre_hook(eager(lambda module, _: self._enter(module))),
            modules.register_module_forward_hook(eager(lambda *_: self._leave()), always_call=True),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer)),
        ]

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        if self._times is not None:
            self._times.detach()
        self._copies.remove()

    # What happens in the script.

    def _enter(self, module: torch.nn.Module) -> None:
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled() and any(one.requires_grad for one in module.parameters()):
            self._called[id(module)] = module

    def _leave(self) -> None:
        self._depth -= 1

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.made += 1
        if self._times is not None and self._times.enough:
            self.layers = self._times.of(self.layers)
            self.rows = {number: _used(weight) for number, weight in self._embeddings.items()}
            self.h2d_s, self.done = self._copies.median_s, True
            raise Recorded(0)
        if self._times is None and self.made >= self._skip:
            self._attach(self._model(optimizer))
        self._copies.end_step()

    def _model(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
        """The module that the optimizer trains. UsageError unless it is a single module that the script calls."""
        trained = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        found = [one for one in self._called.values() if any(id(tensor) in trained for tensor in one.parameters())]
        if len(found) != 1:
            names = ", ".join(type(one).__name__ for one in found) or "none"
            raise UsageError(
                f"the parameters of {type(optimizer).__name__} belong to {names} of the modules that the script calls,"
                " and only one model can be recorded: put all layers into one torch.nn.Module and call that"
            )
        return found[0]

    def _attach(self, model: torch.nn.Module) -> None:
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        self.layers, device = layers_of(named), device_of(named)
        self.device = device.type if device.type in DEVICES else ""
        self._times = LayerTimes(model, named, self._steps, clock_of(device), forward=True)
        for index, (_, parameter) in enumerate(named):
            hook = eager(lambda _, index=index: self._produced(index))
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        looked_up = {id(one.weight) for one in model.modules() if isinstance(one, torch.nn.Embedding)}
        self._embeddings = {index: one for index, (_, one) in enumerate(named) if id(one) in looked_up}
        self._copies.begin()

    def _produced(self, index: int) -> None:
        assert self._times is not None
        if not self._times.under_way:
            torch.autograd.Variable._execution_engine.queue_callback(self._times.end_step)
        self._times.produced(index)


class _Copies:
    """Times copies from the host to devices for which ``away`` is true, between ``begin`` and ``remove``."""

    _NAMES = ("to", "cuda", "copy_")

    def __init__(self, away: Callable[[torch.device], bool]) -> None:
        self._away = away
        self._plain: dict[str, Any] = {}
        self._spent_s = 0.0
        self._steps_s: list[float] = []

    def begin(self) -> None:
        self._spent_s = 0.0
        for name in self._NAMES:
            self._plain[name] = vars(torch.Tensor).get(name)
            setattr(torch.Tensor, name, self._timed(getattr(torch.Tensor, name)))

    def end_step(self) -> None:
        if self._plain:
            self._steps_s.append(self._spent_s)
            self._spent_s = 0.0

    def remove(self) -> None:
        for name, plain in self._plain.items():
            if plain is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, plain)
        self._plain = {}

    @property
    def median_s(self) -> float:
        """The median seconds per step."""
        return median(self._steps_s[1:] or [0.0])  # the first entry precedes the first measured step

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
            _idle()
            begun = time.perf_counter()
            made = call(tensor, *arguments, **keywords)
            source = arguments[0] if call.__name__ == "copy_" and arguments else tensor
            if self._away(made.device) and isinstance(source, torch.Tensor) and not self._away(source.device):
                _idle()
                self._spent_s += time.perf_counter() - begun
            return made

        return timed


def _idle() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _used(weight: torch.nn.Parameter) -> float:
    """The share of rows whose gradient is not zero."""
    gradient = weight.grad
    if gradient is None:
        return 1.0
    rows = gradient.to_dense() if gradient.is_sparse else gradient
    return max(1.0, float((rows != 0).any(-1).sum())) / len(rows)


def write_trace(recording: Recording, file: TextIO) -> None:
    """Write the layers as a trace file: one line per tensor, in forward order."""
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(COLUMNS)
    for index, layer in enumerate(recording.layers):
        times = f"{layer.forward_s:.9f}", f"{layer.backward_s:.9f}"
        first = ("", "") if index else (f"{recording.h2d_s:.9f}", recording.device)
        shape, share = "x".join(map(str, layer.spec.shape)), recording.rows.get(index, 1.0)
        last = shape, "" if share == 1 else f"{share:.6g}"
        lines.writerow([layer.spec.name, layer.spec.elements, *times, *first, *last])
