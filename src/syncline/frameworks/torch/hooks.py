"""What a replica has attached to its model: it is told what passes do, and so is who observes; copies have none of it.

A copy of a prepared model is a plain model, and so is what a pickle of it becomes (``PlainCopies``). Hooks are entries
of a module's dictionaries, which copying and pickling take along: they would hold the whole run, and the forward passes
of a copy would count as the original's. Python asks the object itself how to copy and pickle it, so the answer is put
on this one model and leaves out hooks by their numbers; the model keeps its class. A class may have an answer of its
own (``__deepcopy__``, ``__reduce__``, ``__getstate__``; torch.fx.GraphModule has the first two). It is asked, and finds
the module as it is, since other threads may be in a forward pass: what it copies of the dictionaries of hooks is
replaced beforehand (``memo``), and what it gives out is cleaned afterwards. A class whose ``__copy__`` hands on the
dictionaries themselves shares hooks with its copies, as it shares parameters.

The session's observer is told what a model computes: its forward and backward passes, and the optimizer's steps. A
forward pass is a call of the model, also without gradients, as in an evaluation. A backward pass is told from where it
enters the output of the model, and ends before what its end waits for. What a pass leaves unfinished, since the script
has caught an exception, ends when the next one begins. On a GPU, which computes behind the script, these are the times
at which the script has given its orders.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ...engine.trace import Kind, Observer, Span, begin
from ...session.session import Session
from ...session.tickets import Meeting
from .buffers import synchronise
from .compiled import eager
from .options import tensors_in


class Told(Protocol):
    """Who is told."""

    def before_forward(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """A forward pass begins."""
        ...

    def after_forward(self, output: Any) -> None:
        """A forward pass has ended."""
        ...

    def came_through_output(self) -> None:
        """A backward pass has come through what a forward pass gave."""
        ...

    def on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """A parameter's gradient has been accumulated."""
        ...

    def on_state_loaded(self, module: torch.nn.Module) -> None:
        """A state was loaded into a module, which may be a copy of the model."""
        ...


class Hooks:
    """Those of one model, until they are removed; of outputs only where ``outputs`` says so."""

    def __init__(
        self,
        session: Session,
        model: torch.nn.Module,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        told: Told,
        *,
        outputs: bool,
    ) -> None:
        handles: list[Any] = []
        for index, (_, parameter) in enumerate(named):
            hook = eager(partial(told.on_gradient, index))
            handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            _put_first(handles[-1].id, parameter._post_accumulate_grad_hooks)
        before = eager(lambda _, arguments, keywords: told.before_forward(arguments, keywords))
        handles.append(model.register_forward_pre_hook(before, with_kwargs=True))
        if outputs:
            after = eager(lambda _, __, output: told.after_forward(output))
            handles.append(model.register_forward_hook(after))
        loaded = eager(lambda module, _: told.on_state_loaded(module))
        handles.append(model.register_load_state_dict_post_hook(loaded))  # type: ignore[no-untyped-call]
        handles += passes_of(session, model)
        self._copies = PlainCopies(model, handles)
        self._handles = [*handles, self._copies, *synchronise(model, session)]

    @property
    def attached(self) -> bool:
        """Whether they have not been removed."""
        return bool(self._handles)

    def keep(self, handles: Iterable[Any]) -> None:
        """Remove these too; copies of the model have none of them either."""
        kept = list(handles)
        self._copies.leave_out(kept)
        self._handles += kept

    def remove(self) -> None:
        """End them."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def nothing(*_: object) -> None:
    """Of which nobody is told."""


@dataclass
class Listeners:
    """Who is told of a replica's steps."""

    first_exchange: Callable[[], None] = nothing
    """Called before the first exchange, when all models have been prepared."""

    forward: Callable[[], None] = nothing
    """Called when a forward pass begins that a backward pass may follow."""

    backward: Callable[[int | None], None] = nothing
    """Called when a backward pass begins, with the parameter whose gradient has come already, if any has."""

    begin: Callable[[], None] = nothing
    """Called when a step that is exchanged begins, with its first gradient."""

    second_backward: Callable[[], None] = nothing
    """Called when a second exchange begins before the step of the first; a parameter server refuses that."""

    exchanged: Callable[[Meeting | None], None] = nothing
    """Called at the end of every step's backward pass, with what was agreed on in it; pushes may be under way."""

    local_step: Callable[[], None] = nothing
    """Called when a step is each rank's own; a parameter server refuses that."""

    loaded: Callable[[], None] = nothing
    """Called when the script has loaded a state into the model."""

    joined: Callable[[int], None] = nothing
    """Called when ranks with different numbers of batches have joined, with the one that trained longest."""


def _put_first(key: int, hooks: dict[int, Any]) -> None:
    """Let a hook be called before those that were there: they may take away what it looks at.

    Autograd goes by the order of insertion, whatever order an OrderedDict says it has.
    """
    for other in [other for other in hooks if other != key]:
        hooks[other] = hooks.pop(other)


_REDUCE, _DEEPCOPY = "__reduce_ex__", "__deepcopy__"
_OURS = (_REDUCE, _DEEPCOPY, "zero_grad")
"""What is put on the model beside hooks."""
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
_LEFT_OUT = "left out"
_DEPTH = 4
"""So deep in what a class says of itself are a module's attributes: in arguments, or in a state, or in a part of it."""


class PlainCopies:
    """As long as it is not removed, copies and pickles of ``module`` have none of the hooks with these handles.

    Several may be on one module.
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
        """Nor those with these."""
        self._answer.ours.update(handle.id for handle in handles)

    def remove(self) -> None:
        """End it; named as the handle of a hook has it."""
        self._answer.asked -= 1
        if not self._answer.asked:
            for name in (_REDUCE, _DEEPCOPY):
                vars(self._module).pop(name, None)


class _Answer:
    """What a module answers when it is copied; ``ours`` are the numbers of the hooks that copies do not have."""

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
        for name, empty in copies.items():  # now that what refers to the module finds its copy
            empty.update(copy.deepcopy(self._theirs(here[name]), memo))
        if isinstance(found, torch.nn.Module) and found is not self._module:
            for name in [name for name in vars(found) if name in _OURS]:
                del vars(found)[name]
            for name, value in vars(found).items():
                if _are_hooks(name, value) and not self.ours.isdisjoint(value):  # it took the dictionary itself
                    vars(found)[name] = self._theirs(value)
        return found

    def _cleaned(self, said: Any, depth: int) -> Any:
        """What a class says of itself, with attributes of the module as they were without us.

        The same object where there are none: what is in it twice has to stay one.
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
"""The phase of forward passes that no backward pass can follow."""


class _Spans:
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
        self._forward, self._backward = _Spans(observer, "forward", "forward"), _Spans(observer, "backward", "backward")
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
    spans = _Spans(session.observer, "optimizer", type(optimizer).__name__)
    return [
        optimizer.register_step_pre_hook(Telling(spans.begin)),
        optimizer.register_step_post_hook(Telling(spans.end)),
    ]


class Telling:
    """A hook before or after a step that only tells of it, which is known by its class."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def __call__(self, *_: Any) -> None:
        """It is there."""
        self._tell()
