"""What the layers of somebody's model cost on this device, recorded while a training script runs, unchanged.

No line of the script says so: hooks that are called for every module and every optimizer find the model, which is the
outermost module that is called and has what the first optimizer trains. ``timing`` measures it for some steps. The
first ones are left out, in which memory is allocated and kernels are chosen. Then the script is ended.

Copies of batches to a device are timed where they are asked for, by ``to``, ``cuda`` and ``copy_``, with the device
idle before and after. A trace has them in its first layer's row.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterable
from functools import wraps
from statistics import median
from typing import Any, TextIO

import torch
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...errors import UsageError
from ...nouns import Layer
from .eager import eager
from .staging import device_of
from .storage import layers_of
from .timing import LayerTimes, clock_of

COLUMNS = ("name", "elements", "forward_s", "backward_s", "h2d_s")


class Recorded(SystemExit):
    """Enough has been recorded: the script ends here, with status 0."""


class Recording:
    """Records ``steps`` backward passes of a script, after the first ``skip`` steps of its optimizer.

    ``layers`` and ``h2d_s`` are there when it is ``done`` and has raised ``Recorded``, out of the optimizer's step.
    ``away`` says which devices batches are copied to.
    """

    def __init__(self, steps: int, skip: int, away: Callable[[torch.device], bool] | None = None) -> None:
        self.done = False
        self.layers: tuple[Layer, ...] = ()
        self.h2d_s = 0.0
        self.made = 0
        """Steps of the optimizer so far."""
        self._steps, self._skip = steps, skip
        self._depth = 0
        self._called: dict[int, torch.nn.Module] = {}  # outermost ones, that have something to train
        self._times: LayerTimes | None = None
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
            self.h2d_s, self.done = self._copies.median_s, True
            raise Recorded(0)
        if self._times is None and self.made >= self._skip:
            self._attach(self._model(optimizer))
        self._copies.end_step()

    def _model(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
        """What the optimizer trains; raises UsageError unless that is one module which the script calls."""
        trained = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        found = [one for one in self._called.values() if any(id(tensor) in trained for tensor in one.parameters())]
        if len(found) != 1:
            names = ", ".join(type(one).__name__ for one in found) or "none"
            raise UsageError(
                f"what {type(optimizer).__name__} trains belongs to {names} of the modules that the script calls, and"
                " one model can be recorded: put all layers into one torch.nn.Module and call that"
            )
        return found[0]

    def _attach(self, model: torch.nn.Module) -> None:
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        self.layers = layers_of(named)
        self._times = LayerTimes(model, named, self._steps, clock_of(device_of(named)), forward=True)
        for index, (_, parameter) in enumerate(named):
            hook = eager(lambda _, index=index: self._produced(index))
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._copies.begin()

    def _produced(self, index: int) -> None:
        assert self._times is not None
        if not self._times.under_way:
            torch.autograd.Variable._execution_engine.queue_callback(self._times.end_step)
        self._times.produced(index)


class _Copies:
    """Times copies from the host to devices that are ``away``, between ``begin`` and ``remove``."""

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
        """Seconds of a step."""
        return median(self._steps_s[1:] or [0.0])  # the first one is what was before the model was known

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


def write_trace(layers: Iterable[Layer], h2d_s: float, file: TextIO) -> None:
    """Layers as a trace file has them, one line per tensor, in forward order."""
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(COLUMNS)
    for index, layer in enumerate(layers):
        times = (layer.forward_s, layer.backward_s, 0.0 if index else h2d_s)
        rows.writerow([layer.spec.name, layer.spec.elements, *(f"{seconds:.9f}" for seconds in times)])
