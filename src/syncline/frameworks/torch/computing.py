"""What a model computes, told to the session's observer: its forward and backward passes, and the optimizer's steps.

A forward pass is a call of the model, also without gradients, as in an evaluation. A backward pass is told from where
it enters the output of the model, and ends before what its end waits for. What a pass leaves unfinished, since the
script has caught an exception, ends when the next one begins. On a GPU, which computes behind the script, these are the
times at which the script has given its orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...engine.trace import Kind, Observer, Span, begin
from ...session.session import Session
from .eager import eager
from .samples import tensors_in

NO_GRADIENT = "no gradient"
"""The phase of forward passes that no backward pass can follow."""


class _Told:
    """Tells of one kind of span after the other."""

    def __init__(self, observer: Observer, kind: Kind, label: str) -> None:
        self._observer, self._kind, self._label = observer, kind, label
        self._open: Span | None = None

    def begin(self, phase: str = "") -> None:
        self.end()
        self._open = begin(self._observer, self._kind, self._label, phase=phase)

    def end(self) -> None:
        if self._open is not None:
            self._open.end()
            self._open = None


class _Passes:
    """The passes of one model."""

    def __init__(self, observer: Observer) -> None:
        self._forward, self._backward = _Told(observer, "forward", "forward"), _Told(observer, "backward", "backward")
        self._task = -1  # the backward pass that has begun

    def enter(self) -> None:
        if torch._C._current_graph_task_id() == -1:  # else a checkpoint, in the backward pass
            self._forward.begin("" if torch.is_grad_enabled() else NO_GRADIENT)

    def leave(self, output: Any) -> None:
        self._forward.end()
        for tensor in tensors_in(output) if torch.is_grad_enabled() else ():
            if tensor.grad_fn is not None:
                tensor.register_hook(self._enter_backward)  # type: ignore[no-untyped-call]

    def _enter_backward(self, _: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._backward.begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward.end)


def passes_of(session: Session, model: torch.nn.Module) -> Iterable[Any]:
    """Handles of the hooks that tell of a model's passes; none where nobody observes."""
    if session.observer is None:
        return []
    passes = _Passes(session.observer)
    return [
        model.register_forward_pre_hook(eager(lambda _, __: passes.enter())),
        model.register_forward_hook(eager(lambda _, __, output: passes.leave(output))),
    ]


def steps_of(session: Session, optimizer: torch.optim.Optimizer | None) -> Iterable[Any]:
    """Handles of the hooks that tell of an optimizer's steps; none where another model's tell of them already."""
    if session.observer is None or optimizer is None:
        return []
    if any(isinstance(hook, Telling) for hook in optimizer._optimizer_step_pre_hooks.values()):
        return []
    told = _Told(session.observer, "optimizer", type(optimizer).__name__)
    return [
        optimizer.register_step_pre_hook(Telling(told.begin)),
        optimizer.register_step_post_hook(Telling(told.end)),
    ]


class Telling:
    """A hook before or after a step that only tells of it, which is known by its class."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def __call__(self, *_: Any) -> None:
        """It is there."""
        self._tell()
