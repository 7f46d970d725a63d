"""The user's optimizer object while updates are deferred: it stays the user's own, and its class changes.

So learning-rate schedulers that hold it go on working. ``step()`` lets the model's ``Crossing`` decide what is updated
when; whatever tells of weights or state, ``state_dict`` first of all, waits for all updates. Copies and pickles are
plain optimizers.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch

from ...schedules import goes_ahead
from .crossing import Crossing
from .optimizer import hide_step, looks_at_gradients, mix_in, own_class
from .passes import TrainedReplica

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _or_plain(method: _Method) -> _Method:
    """Let a method that somebody has kept, bound, be the plain class's when the optimizer has that again."""

    @wraps(method)
    def either(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, Stepping):
            return method(self, *args, **kwargs)
        if method.__name__ == "step":
            self._opt_called = True  # no scheduler has wrapped what was kept
        return getattr(type(self), method.__name__)(self, *args, **kwargs)

    return cast(_Method, either)


class Stepping:
    """Mixed into the class of a user's optimizer."""

    _crossing: Crossing

    @_or_plain
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Have the weights updated as soon as they are needed; the closure's loss."""
        if not self._crossing.updates_alone:  # it may call the closure as often as it likes
            self._opt_called = True
            return self._crossing.at_once(partial(super().step, *(() if closure is None else (closure,))))  # type: ignore[misc]
        loss, crossing, whole = None, self._crossing, super().step  # type: ignore[misc]
        if closure is not None:
            crossing.looked = True
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # what learning-rate schedulers look at
        if crossing.attached:
            crossing.step(whole)
        else:  # the closure's backward pass has chosen a schedule that does not cross iterations
            whole()
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers made before and after prepare find _opt_called kept
    step.hooked = True  # type: ignore[attr-defined]  # torch adds profiling and hooks to the user's own, which is called

    @_or_plain
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own; torch's looks at no gradient where it sets them to None."""
        plain = partial(super().zero_grad, *args, **kwargs)  # type: ignore[misc]
        self._crossing.zero_grad(plain, looks=looks_at_gradients(self, *args, **kwargs))

    @_or_plain
    def add_param_group(self, group: dict[str, Any]) -> None:
        """Behind the updates that were due before; what is added has to be of the model too."""
        self._crossing.flush()
        self._crossing.check_added(group)
        super().add_param_group(group)  # type: ignore[misc]

    @property
    def state(self) -> Any:
        """When all updates have been made."""
        self._crossing.flush()
        return vars(self)["state"]

    @state.setter
    def state(self, value: Any) -> None:
        vars(self)["state"] = value

    @_or_plain
    def state_dict(self) -> dict[str, Any]:
        """When all updates have been made."""
        self._crossing.flush()
        found: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return found

    @_or_plain
    def load_state_dict(self, state: Any) -> None:
        """Behind the updates that were due before."""
        self._crossing.flush()
        super().load_state_dict(state)  # type: ignore[misc]

    @_or_plain
    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain optimizer, when all updates have been made."""
        self._crossing.flush()
        plain = own_class(self)
        whole: Any = object.__new__(plain)
        left_out = ("_crossing", "_hidden")
        vars(whole).update({key: value for key, value in vars(self).items() if key not in left_out})
        return copyreg._reconstructor, (plain, object, None), *whole.__reduce_ex__(protocol)[2:]  # type: ignore[attr-defined]


def defer_steps(replica: TrainedReplica, optimizer: torch.optim.Optimizer, *, gives_way: bool = False) -> None:
    """Let the steps of a model end in the next iteration: the optimizer's updates wait until they are needed.

    ``gives_way`` says that another schedule may take the place of one that crosses iterations.
    """
    schedule = replica.exchange.schedule
    plain, later = type(optimizer), schedule.apply == "next_step"
    hidden = hide_step(optimizer)
    crossing = Crossing(replica, optimizer, plain, later=later, local=goes_ahead(schedule))
    crossing.gives_way, crossing.watches = gives_way, schedule.apply == "step"
    replica.crossing = crossing
    optimizer._crossing, optimizer._hidden = crossing, hidden  # type: ignore[attr-defined]
    mix_in(optimizer, Stepping)
    watch_zero_grad(crossing)


def end_deferred_steps(optimizer: Any) -> None:
    """Give the optimizer its own class back; nothing is under way, or it is given up."""
    crossing = getattr(optimizer, "_crossing", None)
    if crossing is None:
        return
    optimizer.__class__ = own_class(optimizer)
    hidden = vars(optimizer).pop("_hidden", None)
    del optimizer._crossing
    if hidden is not None:
        vars(optimizer).setdefault("step", hidden)  # unless the script has put something there meanwhile
    vars(crossing.model).pop("zero_grad", None)


def watch_zero_grad(crossing: Crossing) -> None:
    """The model's ``zero_grad``, if it is torch's own, looks at no gradient where it sets them to None."""
    if type(crossing.model).zero_grad is torch.nn.Module.zero_grad:
        crossing.model.zero_grad = partial(_zero_grad, crossing)  # type: ignore[method-assign]


def _zero_grad(crossing: Crossing, set_to_none: bool = True) -> None:
    model = crossing.model
    crossing.zero_grad(partial(type(model).zero_grad, model, set_to_none), looks=not set_to_none)
