"""Owns the hooks on a model: they report its passes to the replica and to the observer. Copies do not have them.

A copy of a prepared model is a plain model, and so is an unpickled one (``PlainCopies``). Hooks are entries in a
module's dictionaries, and copies and pickles include these. A copied hook would keep the whole run alive and count the
forward passes of the copy as the original's. Python asks the object itself for its ``__reduce_ex__`` and
``__deepcopy__``. This one model therefore gets its own, which leave out our hooks by their numbers; the model keeps its
class. The class may define such methods too (``__deepcopy__``, ``__reduce__``, ``__getstate__``; torch.fx.GraphModule
has the first two). They are called on the unchanged module, since other threads may be in a forward pass: ``memo``
substitutes the dictionaries of hooks beforehand, and the result is cleaned afterwards. If a class's ``__copy__`` reuses
the dictionaries themselves, the copies share the hooks, as they share the parameters.

The session's observer receives spans of the forward and backward passes and of the optimizer's steps. A forward pass is
a call of the model, also without gradients, as in an evaluation. The span of a backward pass begins when the pass
enters the model's output, and ends before the waits at its end. If the script catches an exception in a pass, the span
stays open until the next pass begins. A GPU computes asynchronously; there the spans show the kernel launches.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...engine.trace import Kind, Observer, Span, begin
from ...session.session import Session
from ...session.tickets import Meeting
from ...training.model import nothing
from .buffers import synchronise
from .compiled import eager
from .options import tensors_in


class Hooks:
    """The hooks of one model, until they are removed.

    ``produced`` is called with the number of a parameter whose gradient has been accumulated, ``entered`` at the start
    of a forward pass, and ``loaded`` with a module, maybe of a copy, into which a state was loaded. ``left`` is called
    with the output of a forward pass.
    """

    def __init__(
        self,
        session: Session,
        model: torch.nn.Module,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        produced: Callable[[int, torch.Tensor], None],
        entered: Callable[[tuple[Any, ...], dict[str, Any]], None],
        loaded: Callable[[torch.nn.Module], None],
        left: Callable[[Any], None] | None = None,
    ) -> None:
        handles: list[Any] = []
        for index, (_, parameter) in enumerate(named):
            hook = eager(partial(produced, index))
            handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            _put_first(handles[-1].id, parameter._post_accumulate_grad_hooks)
        before = eager(lambda _, arguments, keywords: entered(arguments, keywords))
        handles.append(model.register_forward_pre_hook(before, with_kwargs=True))
        if left is not None:
            handles.append(model.register_forward_hook(eager(lambda _, __, output: left(output))))
        after_load = eager(lambda module, _: loaded(module))
        handles.append(model.register_load_state_dict_post_hook(after_load))  # type: ignore[no-untyped-call]
        handles += passes_of(session, model)
        self._copies = PlainCopies(model, handles)
        self._handles = [*handles, self._copies, *synchronise(model, session)]

    @property
    def attached(self) -> bool:
        """Whether the hooks are still on the model."""
        return bool(self._handles)

    def keep(self, handles: Iterable[Any]) -> None:
        """Take over these handles: ``remove`` removes them, and copies of the model leave them out."""
        kept = list(handles)
        self._copies.leave_out(kept)
        self._handles += kept

    def remove(self) -> None:
        """Remove all hooks, and give modules their own class and copy methods back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


@dataclass
class Listeners:
    """The functions that are called at points of a replica's steps."""

    first_exchange: Callable[[], None] = nothing
    """Called before the first exchange, when all models have been prepared."""

    begins: Callable[[], None] = nothing
    """Called before the model changes in a step: before a forward pass in training, or an update of this rank alone."""

    forward: Callable[[], None] = nothing
    """Called at the start of a forward pass that a backward pass may follow."""

    backward: Callable[[int | None], None] = nothing
    """Called at the start of a backward pass, with the number of a parameter whose gradient is complete, or None."""

    begin: Callable[[], None] = nothing
    """Called at the first gradient of a step that is exchanged."""

    second_backward: Callable[[], None] = nothing
    """Called if a second exchange begins before the optimizer's step of the first; a parameter server refuses it."""

    exchanged: Callable[[Meeting | None], None] = nothing
    """Called at the end of every step's backward pass with its meeting, if any; pushes may still be in flight."""

    loaded: Callable[[], None] = nothing
    """Called when the script has loaded a state into the model."""

    joined: Callable[[int], None] = nothing
    """Called when ranks with different numbers of batches have joined, with the rank that trained longest."""


def _put_first(key: int, hooks: dict[int, Any]) -> None:
    """Move a hook before the present ones, which may remove the gradient that it reads.

    The others are inserted again, because autograd follows the order of insertion and ignores ``move_to_end``.
    """
    for other in [other for other in hooks if other != key]:
        hooks[other] = hooks.pop(other)


_REDUCE, _DEEPCOPY = "__reduce_ex__", "__deepcopy__"
_OURS = (_REDUCE, _DEEPCOPY, "zero_grad")
"""The attributes that the model gets besides hooks."""
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
_LEFT_OUT = "left out"
_DEPTH = 4
"""The depth at which ``__reduce_ex__`` may hold a module's attributes: in arguments, a state, or a part of one."""


class PlainCopies:
    """Keeps the hooks with these handles out of copies and pickles of ``module`` until it is removed.

    A module may have several; they share one ``_Answer``.
    """

    def __init__(self, module: torch.nn.Module, handles: Iterable[Any]) -> None:
        self._module = module
        answer = vars(module).get(_REDUCE)
        self._answer = _Answer(module) if answer is None else answer.__self__
        self._answer.asked += 1
        vars(module)[_REDUCE] = self._answer.reduce
        if hasattr(type(module), _DEEPCOPY):
            vars(module)[_DEEPCOPY] = self._answer.deepcopy
        self.leave_out(handles)

    def leave_out(self, handles: Iterable[Any]) -> None:
        """Leave out the hooks with these handles too."""
        self._answer.ours.update(handle.id for handle in handles)

    def remove(self) -> None:
        """Restore the module's own behaviour. A hook's handle has this method too, so both end alike."""
        self._answer.asked -= 1
        if not self._answer.asked:
            for name in (_REDUCE, _DEEPCOPY):
                vars(self._module).pop(name, None)


class _Answer:
    """The copy methods of one module. ``ours`` are the numbers of the hooks that copies leave out."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.ours: set[int] = set()
        self.asked = 0

    def reduce(self, protocol: int) -> Any:
        return self._cleaned(type(self._module).__reduce_ex__(self._module, protocol), _DEPTH)

    def deepcopy(self, memo: dict[int, Any]) -> Any:
        kind: Any = type(self._module)
        here = vars(self._module)
        copies = {name: OrderedDict[int, Any]() for name, value in here.items() if _are_hooks(name, value)}
        memo.update(
            (id(value), copies.get(name, _LEFT_OUT)) for name, value in here.items() if name in (*copies, *_OURS)
        )
        found = kind.__deepcopy__(self._module, memo)
        memo[id(self._module)] = found
        for name, empty in copies.items():  # only now: hooks that refer to the module then find its copy in ``memo``
            empty.update(copy.deepcopy(self._theirs(here[name]), memo))
        if isinstance(found, torch.nn.Module) and found is not self._module:
            for name in [name for name in vars(found) if name in _OURS]:
                del vars(found)[name]
            for name, value in vars(found).items():
                if _are_hooks(name, value) and not self.ours.isdisjoint(value):  # reuses the dictionary itself
                    vars(found)[name] = self._theirs(value)
        return found

    def _cleaned(self, said: Any, depth: int) -> Any:
        """A result of ``__reduce_ex__`` without our attributes and hooks.

        Returns the same object if it has none: an object that occurs twice must stay one object.
        """
        if not depth or type(said) not in (tuple, list, dict):
            return said
        if type(said) is dict and any(_are_hooks(name, value) for name, value in said.items()):
            return {
                name: self._theirs(value) if _are_hooks(name, value) else value
                for name, value in said.items()
                if name not in _OURS
            }
        before = list(said.values() if type(said) is dict else said)
        after = [self._cleaned(one, depth - 1) for one in before]
        if all(one is other for one, other in zip(before, after, strict=True)):
            return said
        return dict(zip(said, after, strict=True)) if type(said) is dict else type(said)(after)

    def _theirs(self, hooks: dict[int, Any]) -> OrderedDict[int, Any]:
        return OrderedDict((number, hook) for number, hook in hooks.items() if number not in self.ours)


def _are_hooks(name: Any, value: Any) -> bool:
    return isinstance(name, str) and name.endswith(_HOOKS) and isinstance(value, dict)


NO_GRADIENT = "no gradient"
"""The phase of a forward pass without gradients: no backward pass can follow it."""


class _Spans:
    """Reports successive spans of one kind; a new span ends the open one."""

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
    """Reports the passes of one model."""

    def __init__(self, observer: Observer) -> None:
        self._forward, self._backward = _Spans(observer, "forward", "forward"), _Spans(observer, "backward", "backward")
        self._task = -1  # the graph task of the last backward pass

    def enter(self) -> None:
        if torch._C._current_graph_task_id() == -1:  # otherwise a checkpoint recomputes inside a backward pass
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
    """Handles of the hooks that report a model's passes; none without an observer."""
    if session.observer is None:
        return []
    passes = _Passes(session.observer)
    return [
        model.register_forward_pre_hook(eager(lambda _, __: passes.enter())),
        model.register_forward_hook(eager(lambda _, __, output: passes.leave(output))),
    ]


def steps_of(session: Session, optimizer: torch.optim.Optimizer | None) -> Iterable[Any]:
    """Handles of the hooks that report an optimizer's steps; none without an observer or if they are there already."""
    if session.observer is None or optimizer is None:
        return []
    if any(isinstance(hook, Telling) for hook in optimizer._optimizer_step_pre_hooks.values()):
        return []
    spans = _Spans(session.observer, "optimizer", type(optimizer).__name__)
    return [
        optimizer.register_step_pre_hook(Telling(spans.begin)),
        optimizer.register_step_post_hook(Telling(spans.end)),
    ]


class Telling:
    """A hook before or after a step that only reports it. Its class identifies it among other hooks."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def __call__(self, *_: Any) -> None:
        """Report the step, whatever torch passes to its hooks."""
        self._tell()
