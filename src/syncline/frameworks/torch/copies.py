"""A copy of a prepared model is a plain model, and so is what a pickle of it becomes.

Hooks are entries of a module's dictionaries, which copying and pickling take along: they would hold the whole run, and
the forward passes of a copy would count as the original's. Python asks the object itself how to copy and pickle it,
so the answer is put on this one model and leaves out hooks by their numbers; the model keeps its class.

A class may have an answer of its own (``__deepcopy__``, ``__reduce__``, ``__getstate__``; torch.fx.GraphModule has the
first two). It is asked, and finds the module as it is, since other threads may be in a forward pass: what it copies of
the dictionaries of hooks is replaced beforehand (``memo``), and what it gives out is cleaned afterwards. A class whose
``__copy__`` hands on the dictionaries themselves shares hooks with its copies, as it shares parameters.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

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
