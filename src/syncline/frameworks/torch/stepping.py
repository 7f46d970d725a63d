"""The user's optimizer object while updates are deferred: it stays the user's own, and its class changes.

So learning-rate schedulers that hold it go on working. ``step()`` lets the model's ``Crossing`` decide what is updated
when; whatever tells of weights or state, ``state_dict`` first of all, waits for all updates. Copies and pickles are
plain optimizers.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .crossing import Crossing
from .optimizer import mix_in, own_class
from .replica import Replica


class Stepping:
    """Mixed into the class of a user's optimizer."""

    _crossing: Crossing

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Have the weights updated as soon as they are needed; the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # what learning-rate schedulers look at
        self._crossing.step(super().step)  # type: ignore[misc]
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers made before and after prepare find _opt_called kept
    step.hooked = True  # type: ignore[attr-defined]  # torch adds profiling and hooks to the user's own, which is called

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own."""
        if set_to_none:
            self._crossing.drop_gradients(super().zero_grad)  # type: ignore[misc]
        else:
            self._crossing.flush()
            super().zero_grad(set_to_none=False)  # type: ignore[misc]

    @property
    def state(self) -> Any:
        """When all updates have been made."""
        self._crossing.flush()
        return vars(self)["state"]

    @state.setter
    def state(self, value: Any) -> None:
        vars(self)["state"] = value

    def state_dict(self) -> dict[str, Any]:
        """When all updates have been made."""
        self._crossing.flush()
        found: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return found

    def load_state_dict(self, state: Any) -> None:
        """Behind the updates that were due before."""
        self._crossing.flush()
        super().load_state_dict(state)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain optimizer, when all updates have been made."""
        self._crossing.flush()
        plain = own_class(self)
        whole: Any = object.__new__(plain)
        left_out = ("_crossing", "_hidden")
        vars(whole).update({key: value for key, value in vars(self).items() if key not in left_out})
        return copyreg._reconstructor, (plain, object, None), *whole.__reduce_ex__(protocol)[2:]  # type: ignore[attr-defined]


def defer_steps(replica: Replica, optimizer: torch.optim.Optimizer) -> None:
    """Let the steps of a model end in the next iteration: the optimizer's updates wait until they are needed."""
    schedule = replica.session.strategy.schedule_object()
    plain, later = type(optimizer), schedule.apply == "next_step"
    crossing = Crossing(replica, optimizer, plain, later=later, local=later and getattr(schedule, "local", False))
    replica.crossing = crossing
    optimizer._crossing = crossing  # type: ignore[attr-defined]
    optimizer._hidden = vars(optimizer).pop("step", None)  # type: ignore[attr-defined]  # a scheduler's wrapper around the plain step
    mix_in(optimizer, Stepping)
    replica.model.zero_grad = partial(_zero_grad, crossing, replica.model)  # type: ignore[method-assign]


def end_deferred_steps(optimizer: Any) -> None:
    """Give the optimizer its own class back; nothing is under way, or it is given up."""
    crossing = getattr(optimizer, "_crossing", None)
    if crossing is None:
        return
    optimizer.__class__ = own_class(optimizer)
    hidden = vars(optimizer).pop("_hidden", None)
    del optimizer._crossing
    if hidden is not None:
        optimizer.step = hidden
    vars(crossing.model).pop("zero_grad", None)


def _zero_grad(crossing: Crossing, model: torch.nn.Module, set_to_none: bool = True) -> None:
    """The model's ``zero_grad``, which looks at no gradient where it sets them to None."""
    plain = partial(type(model).zero_grad, model, set_to_none)
    if set_to_none:
        crossing.drop_gradients(plain)
    else:
        plain()
