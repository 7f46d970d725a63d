"""Owns the bounds of a model's backward pass (``Backward``) and the gradients that it has produced (``Produced``).

Autograd runs each pass as a *graph task* with an increasing number, and runs queued callbacks at its end. A pass begins
with its first gradient, or earlier if it reaches a model output that counts samples. The first gradient may arrive in
an inner task that a re-entrant checkpoint runs during the backward of its node. At the end of an inner task that node
is still being evaluated. A hook on the node therefore queues a callback in the task around it, and so on outwards.

A pass that ends with an exception runs no callback. This shows when a gradient arrives in a newer task that is not
inside the pass; a caller that knows that no backward pass is running calls ``give_up``.

Nothing here depends on other ranks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch

from ...errors import GradientError
from .storage import Storage

Keep = Callable[[int, torch.Tensor, bool], None]
"""Receives the number of a parameter, this worker's own gradient, and whether it must be copied to be kept."""

_NAMED = 8
"""The maximum number of parameter names in an error."""


class Backward:
    """The backward passes of one model.

    ``ended`` is called at the end of a pass, inside autograd. ``backward()`` raises its exceptions. ``given_up`` is
    called when a pass turns out to have ended with an exception; it raises if the run cannot recover.
    """

    def __init__(self, ended: Callable[[], None], given_up: Callable[[], None]) -> None:
        self.nested = False  # a pass has had inner tasks, so one pass may produce a gradient several times
        self._ended, self._given_up = ended, given_up
        self.tasks: list[int] = []
        """The known tasks of the present pass, in order of arrival."""
        self._depth = 0  # of the outermost known task around them, in the thread of the first task
        self._thread = 0

    def enter(self) -> None:
        """Note the task that autograd is running. Call it at least whenever that is not in ``tasks``."""
        task = torch._C._current_graph_task_id()
        if task in self.tasks:
            return
        depth, thread = _depth(), threading.get_ident()
        if self.tasks and task > max(self.tasks):
            # Autograd runs device nodes in threads of its own, whose stacks do not show an outer pass.
            if depth > (self._depth if thread == self._thread else 0):
                self.nested = True
            else:
                self.give_up()
        if not self.tasks:
            self._depth, self._thread = depth, thread
            _at_end_of_task(self._task_ended)
        self.tasks.append(task)

    @property
    def running(self) -> bool:
        """Whether a pass has begun and not ended."""
        return bool(self.tasks)

    def give_up(self) -> None:
        """Report that the present pass has ended with an exception, and forget it."""
        self._given_up()
        self.leave()

    def leave(self) -> None:
        """Forget the present pass."""
        self.tasks.clear()

    def _task_ended(self) -> None:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            self._ended()
            return
        self.nested = True
        self._depth -= 1
        handle: Any = None

        def after(*_: Any) -> None:
            handle.remove()
            _at_end_of_task(self._task_ended)

        handle = node.register_hook(after)


def _at_end_of_task(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _depth() -> int:
    """The number of nested backward passes that Python has started in this thread."""
    frame: FrameType | None = sys._getframe(1)
    engine, found = torch.autograd.graph._engine_run_backward.__code__, 0
    while frame is not None:
        found += frame.f_code is engine
        frame = frame.f_back
    return found


class Produced:
    """Puts the gradients of the parameters ``named`` into their buckets, and refuses those that cannot be exchanged."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        storage: Storage,
        fault: Callable[[str], GradientError],
    ) -> None:
        self._named, self._fault = named, fault
        self.storage = storage
        """The buckets of the present pass."""
        self._share, self._factor = 1.0, torch.ones((), dtype=torch.float32, device="cpu")
        self._versions = [(0, 0)] * len(named)  # of each parameter and gradient, when it was placed
        self.forget()

    def forget(self) -> None:
        """Forget the gradients of the pass."""
        self._came = [False] * len(self._named)

    @property
    def any(self) -> bool:
        """Whether any gradient has been produced in the pass."""
        return True in self._came

    @property
    def share(self) -> float:
        """The factor by which gradients are multiplied as they are placed."""
        return self._share

    @share.setter
    def share(self, value: float) -> None:
        if value != self._share:
            self._share, self._factor = value, torch.tensor(value, dtype=torch.float32, device="cpu")

    def place(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor, keep: Keep | None) -> bool:
        """Put a gradient into its place in its bucket. Returns whether it is that parameter's first in the pass.

        ``keep`` receives the gradient before it is scaled. GradientError for a gradient that cannot be exchanged.
        """
        if gradient.is_sparse or gradient.requires_grad:
            self._refuse(index, gradient)
        storage, share = self.storage, self._share
        moves = gradient.data_ptr() != storage.places[index]
        if keep is not None:
            keep(index, gradient, not moves)
        if moves:
            view = storage.fresh(index)
            # torch turns a Python number into a tensor in every call, which costs more than scaling a small gradient.
            torch.mul(gradient, self._factor if gradient.dtype is torch.float32 else share, out=view)
            parameter.grad = gradient = view
        elif share != 1.0:
            gradient.mul_(share)
        self._versions[index] = parameter._version, gradient._version
        came, self._came[index] = self._came[index], True
        return not came

    def fill(self, index: int, keep: Keep | None) -> None:
        """Stand in for a missing gradient: with what was accumulated before the pass, or else with zeros."""
        parameter = self._named[index][1]
        if parameter.grad is None:
            parameter.grad = self.storage.fresh(index).zero_()
        else:
            self.place(index, parameter, parameter.grad, keep)

    def share_out(self, share: float) -> None:
        """Multiply all gradients of the pass by ``share``."""
        for came, view in zip(self._came, self.storage.views, strict=True):
            if came:
                view.mul_(share)

    def check_first(self, index: int) -> None:
        """Raise GradientError if a gradient is produced a second time after it was sent."""
        if self._came[index]:
            raise self._fault(
                f"the gradient of {self._named[index][0]!r} was produced again after it had been sent: this backward"
                " pass has re-entrant checkpoints, the first one had none; use use_reentrant=False, or checkpoint from"
                " the first step on"
            )

    def check_untouched(self) -> None:
        """Raise GradientError if a parameter or its gradient was changed after the gradient was placed."""
        places = self.storage.places
        for index, (name, parameter) in enumerate(self._named):
            gradient = parameter.grad
            if self._came[index] and (
                gradient is None
                or gradient.data_ptr() != places[index]
                or (parameter._version, gradient._version) != self._versions[index]
            ):
                raise self._fault(
                    f"{name!r} or its gradient was changed during backward, when the gradient had been sent: change"
                    " gradients and make optimizer steps after backward(), not in post-accumulate hooks"
                    " (Tensor.register_hook is called in time)"
                )

    def _refuse(self, index: int, gradient: torch.Tensor) -> NoReturn:
        """Raise GradientError for a gradient that is sparse or can itself be differentiated."""
        name = self._named[index][0]
        if gradient.is_sparse:
            raise self._fault(f"the gradient of {name!r} is sparse, which cannot be exchanged: use sparse=False")
        raise self._fault(
            f"the gradient of {name!r} can itself be differentiated (create_graph=True), which an exchange would"
            " lose: use torch.autograd.grad() for inner derivatives and a plain backward() for the last one"
        )

    def refuse_missing(self, missing: Sequence[int]) -> NoReturn:
        """Raise GradientError that names the parameters without a gradient."""
        names = ", ".join(repr(self._named[index][0]) for index in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise self._fault(
            f"{len(missing)} parameters got no gradient in this backward pass: {names}{more}. If that is meant,"
            ' pass unused="zeros" to syncline.prepare(), or freeze them before it'
        )
