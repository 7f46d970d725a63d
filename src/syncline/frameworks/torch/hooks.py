"""What a replica has attached to its model, so that it is told what forward and backward passes do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ...session.session import Session
from ...session.tickets import Meeting
from .batch_norm import synchronise
from .computing import passes_of
from .copies import PlainCopies
from .eager import eager


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
