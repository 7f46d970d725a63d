"""A backward pass of a model: when it begins and ends (``Backward``), and which gradients have come (``Produced``).

Autograd runs a pass as a *graph task* with a number of its own, which grows, and calls back at its end. A pass begins
with the first gradient that it makes, which may come in a task that a re-entrant checkpoint runs inside the backward of
its node. At the end of such an inner task that node is still being evaluated; the task around it is then asked for
its end as soon as the node is done, and so on outwards.

A pass that ends with an exception does not call back. That is noticed when a gradient comes in a task that is newer
and not inside it, or by who knows that no backward is running.

Nothing here knows of other ranks.
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
"""Is given a gradient as this worker has made it, and whether it has to be copied."""

_NAMED = 8
"""So many names of parameters are in an error."""


class Backward:
    """The backward passes of one model.

    ``ended`` is called at the end of a pass, inside autograd, and may raise: ``backward()`` then does. ``given_up`` is
    called when a pass is found to have ended with an exception; it raises where that cannot be mended.
    """

    def __init__(self, ended: Callable[[], None], given_up: Callable[[], None]) -> None:
        self.nested = False  # some pass so far ran others inside it: a gradient may come several times in one
        self._ended, self._given_up = ended, given_up
        self.tasks: list[int] = []
        """The tasks of the present pass that have been seen, in the order in which they came."""
        self._depth = 0  # of the outermost task that is known to surround them, in the thread where the first one came
        self._thread = 0

    def enter(self) -> None:
        """Something comes in the task that autograd is running; called at least where that is none of ``tasks``."""
        task = torch._C._current_graph_task_id()
        if task in self.tasks:
            return
        depth, thread = _depth(), threading.get_ident()
        if self.tasks and task > max(self.tasks):
            # Autograd's own threads, which run what is on a device, have no outer pass among their calls.
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
        """The present pass has ended with an exception."""
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
    """How many backward passes run one inside the other in this thread, as far as Python has called them."""
    frame: FrameType | None = sys._getframe(1)
    engine, found = torch.autograd.graph._engine_run_backward.__code__, 0
    while frame is not None:
        found += frame.f_code is engine
        frame = frame.f_back
    return found


class Produced:
    """Which gradients of a pass have come, of the parameters ``named``, where they are put, and what none may be."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        storage: Storage,
        fault: Callable[[str], GradientError],
    ) -> None:
        self._named, self._fault = named, fault
        self.storage = storage
        """Where they are put, from one pass to the next."""
        self._share, self._factor = 1.0, torch.ones((), dtype=torch.float32, device="cpu")
        self._versions = [(0, 0)] * len(named)  # of parameters and gradients, as they were sent
        self.forget()

    def forget(self) -> None:
        """The pass is over."""
        self._came = [False] * len(self._named)

    @property
    def any(self) -> bool:
        """Whether one has come."""
        return True in self._came

    @property
    def share(self) -> float:
        """Of each gradient that comes, what is put there."""
        return self._share

    @share.setter
    def share(self, value: float) -> None:
        if value != self._share:
            self._share, self._factor = value, torch.tensor(value, dtype=torch.float32, device="cpu")

    def place(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor, keep: Keep | None) -> bool:
        """Put a gradient where it belongs in its bucket; whether it is the first of that parameter in the pass.

        ``keep`` is given it as it was.
        """
        if gradient.is_sparse or gradient.requires_grad:
            self._refuse(index, gradient)
        storage, share = self.storage, self._share
        moves = gradient.data_ptr() != storage.places[index]
        if keep is not None:
            keep(index, gradient, not moves)
        if moves:
            view = storage.fresh(index)
            # A number would be made a tensor in each call, which takes longer than the product of a small gradient.
            torch.mul(gradient, self._factor if gradient.dtype is torch.float32 else share, out=view)
            parameter.grad = gradient = view
        elif share != 1.0:
            gradient.mul_(share)
        self._versions[index] = parameter._version, gradient._version
        came, self._came[index] = self._came[index], True
        return not came

    def fill(self, index: int, keep: Keep | None) -> None:
        """Take a gradient that has not come for zeros, or for what was accumulated before, which still counts."""
        parameter = self._named[index][1]
        if parameter.grad is None:
            parameter.grad = self.storage.fresh(index).zero_()
        else:
            self.place(index, parameter, parameter.grad, keep)

    def share_out(self, share: float) -> None:
        """Multiply all that have come."""
        for came, view in zip(self._came, self.storage.views, strict=True):
            if came:
                view.mul_(share)

    def check_first(self, index: int) -> None:
        """Raise GradientError for a gradient that comes a second time when the first has been sent."""
        if self._came[index]:
            raise self._fault(
                f"the gradient of {self._named[index][0]!r} was produced again after it had been sent: this backward"
                " pass has re-entrant checkpoints, the first one had none; use use_reentrant=False, or checkpoint from"
                " the first step on"
            )

    def check_untouched(self) -> None:
        """Raise GradientError where a parameter or its gradient was changed after the gradient had come."""
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
        """Raise GradientError for one that is sparse, or that can itself be differentiated."""
        name = self._named[index][0]
        if gradient.is_sparse:
            raise self._fault(f"the gradient of {name!r} is sparse, which cannot be exchanged: use sparse=False")
        raise self._fault(
            f"the gradient of {name!r} can itself be differentiated (create_graph=True), which an exchange would"
            " lose: use torch.autograd.grad() for inner derivatives and a plain backward() for the last one"
        )

    def refuse_missing(self, missing: Sequence[int]) -> NoReturn:
        """Raise GradientError for those that have not come."""
        names = ", ".join(repr(self._named[index][0]) for index in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise self._fault(
            f"{len(missing)} parameters got no gradient in this backward pass: {names}{more}. If that is meant,"
            ' pass unused="zeros" to syncline.prepare(), or freeze them before it'
        )
