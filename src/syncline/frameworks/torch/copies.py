"""A copy of a prepared model is a plain model, and so is what a pickle of it becomes.

Hooks are entries of a module's dictionaries, which copying and pickling take along: they would hold the whole run, and
the forward passes of a copy would count as the original's. Python asks the object itself how to copy and pickle it,
so the answer is put on this one model and leaves out hooks by their numbers; the model keeps its class.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

_ANSWER = "__reduce_ex__"
_OURS = (_ANSWER, "zero_grad")
"""What is put on the model beside hooks."""


class PlainCopies:
    """As long as it is not removed, copies and pickles of ``module`` have none of the hooks with these handles.

    Several may be on one module.
    """

    def __init__(self, module: torch.nn.Module, handles: Iterable[Any]) -> None:
        self._module = module
        answer = vars(module).get(_ANSWER)
        self._answer = _Answer(module) if answer is None else answer.__self__
        self._answer.asked += 1
        vars(module)[_ANSWER] = self._answer.reduce
        self.leave_out(handles)

    def leave_out(self, handles: Iterable[Any]) -> None:
        """Nor those with these."""
        self._answer.ours.update(handle.id for handle in handles)

    def remove(self) -> None:
        """End it; named as the handle of a hook has it."""
        self._answer.asked -= 1
        if not self._answer.asked:
            vars(self._module).pop(_ANSWER, None)


class _Answer:
    """What a module answers when it is copied; ``ours`` are the numbers of the hooks that copies do not have."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.ours: set[int] = set()
        self.asked = 0

    def reduce(self, protocol: int) -> Any:
        found = type(self._module).__reduce_ex__(self._module, protocol)
        if len(found) > 2 and isinstance(found[2], dict):
            return (*found[:2], self._without(found[2]), *found[3:])
        return found  # of a class that says by itself what makes it up

    def _without(self, state: dict[str, Any]) -> dict[str, Any]:
        left = {key: value for key, value in state.items() if key not in _OURS}
        for key, value in left.items():
            if key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(value, dict):
                left[key] = OrderedDict((number, hook) for number, hook in value.items() if number not in self.ours)
        return left
