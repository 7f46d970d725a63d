"""When a backward pass of a model begins and ends, with the passes that re-entrant checkpoints run inside it.

Autograd runs a pass as a *graph task* with a number of its own, which grows, and calls back at its end. A pass begins
with the first gradient that it makes, which may come in a task that a re-entrant checkpoint runs inside the backward of
its node. At the end of such an inner task that node is still being evaluated; the task around it is then asked for
its end as soon as the node is done, and so on outwards.

A pass that ends with an exception does not call back. That is noticed when a gradient comes in a task that is newer
and not inside it, or by who knows that no backward is running.

Owns nothing but this: nothing here knows of gradients, buckets or other ranks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch


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
