"""Owns the user's optimizer object during a run: with weights held by servers, and with deferred updates.

The object stays the user's own, so learning-rate schedulers that hold it keep working; only its class changes. If
servers or other workers own the weights, a ``Served`` optimizer lets these owners apply updates: ``step()`` asks for
one, and ``state_dict()`` collects their state. A copy or a pickle of it is a plain optimizer with that state.

At the end of the run the object gets its own class back, together with the owners' state if this rank can ask for it
alone. If the workers own the weights, asking would be a collective call, and the end of a run must not contain one.
Each rank then keeps its own pieces of the state, and the optimizer is ``Parted``: it cannot be used by itself, but
``prepare`` in a later run gathers the pieces.

With deferred updates the object is ``Stepping``: ``step()`` lets the model's ``DeferredUpdates`` decide which weights
are updated when. Methods that read weights or state, above all ``state_dict``, wait for all updates first. Copies and
pickles are plain optimizers.
"""

from __future__ import annotations

import contextlib
import copyreg
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NoReturn, TypeVar, cast

import torch

from ...errors import SynclineError, UsageError
from ...schedules import goes_ahead
from ...serving.records import Record, pack, unpack
from ...session.session import Session
from .deferred import DeferredUpdates, watch_zero_grad
from .own_values import ADDED, copy_with, group_values, plain_attributes
from .partial_optimizer import records_of, whole_state
from .passes import TrainedReplica
from .served import Client

Groups = list[dict[str, Any]]


class Served:
    """Mixed into the class of a user's optimizer by ``take_over``; the owners of the weights apply the updates."""

    _syncline_client: Client
    param_groups: Groups
    defaults: dict[str, Any]
    grad_scale: torch.Tensor
    found_inf: torch.Tensor

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Answer True to a GradScaler, which then leaves the check for overflows to ``step``."""
        self._syncline_client.share_overflow()
        return True

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients of the last backward pass and wait for the new weights. Returns the closure's loss."""
        loss, scaled = None, hasattr(self, "grad_scale")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # what learning-rate schedulers look at
        if scaled:  # a GradScaler has set these
            self._syncline_client.unscale(float(self.grad_scale))
        self._syncline_client.step(group_values(self.param_groups), skip=scaled and bool(self.found_inf))
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers made before and after prepare find _opt_called kept

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear gradients as the optimizer's own method does."""
        plain = partial(super().zero_grad, *args, **kwargs)  # type: ignore[misc]
        if self._syncline_client.deferred is None:
            plain()
        else:
            self._syncline_client.deferred.zero_grad(plain, looks=looks_at_gradients(self, *args, **kwargs))

    @property
    def state(self) -> NoReturn:
        """Refuse access: the script would take an empty dictionary for the state."""
        raise UsageError(
            "the owners of the weights hold the optimizer's state: read it from optimizer.state_dict()['state'], change"
            " it by optimizer.load_state_dict(), or use ps(update=worker)"
        )

    @state.setter
    def state(self, value: object) -> None:
        del value
        _ = self.state

    def state_dict(self) -> dict[str, Any]:
        """The state dictionary with the owners' state, as a single process would return it."""
        self._syncline_client.settle("optimizer.state_dict()")
        return self._whole().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Send the state to the owners and take over the group values.

        If each push is an update by itself, all workers must call it.
        """
        self._syncline_client.settle("optimizer.load_state_dict()")
        whole = self._whole(fetch=False)
        whole.load_state_dict(dict(state))
        _take_values(self, whole)
        self._syncline_client.owned.load(records_of(whole, self._syncline_client.parameters))

    def add_param_group(self, group: dict[str, Any]) -> None:  # noqa: ARG002
        """Refuse: ``prepare`` fixes the set of served weights."""
        raise UsageError("add parameter groups before syncline.prepare(): servers hold a fixed set of weights")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle as a plain optimizer with the owners' state."""
        self._syncline_client.settle("copying or saving the optimizer")
        return _reduced(self._whole(), protocol)

    def _whole(self, fetch: bool = True) -> torch.optim.Optimizer:
        """A plain optimizer of the user's class over the same parameters; with ``fetch``, it has the owners' state."""
        whole = _plain_like(self)
        if fetch:
            state = whole_state(self._syncline_client.owned.owners.ask("state"), self._syncline_client.parameters)
            whole.state.update(_in_order(state, self.param_groups))
        return whole


class Parted:
    """Mixed into the class of an optimizer whose state is spread over several ranks after the end of a run."""

    _syncline_pieces: list[Record] | None  # None on a rank that owned nothing
    _syncline_owners: int
    _syncline_parameters: Sequence[torch.nn.Parameter]
    param_groups: Groups

    def step(self, closure: Callable[[], Any] | None = None) -> NoReturn:  # noqa: ARG002
        """Refuse: the optimizer would continue without its state."""
        raise _parted()

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @property
    def state(self) -> NoReturn:
        """Refuse: the state is incomplete."""
        raise _parted()

    def state_dict(self) -> NoReturn:
        """Refuse: the state is incomplete."""
        raise _parted()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: the state is incomplete."""
        del protocol
        raise _parted()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a complete state and become a plain optimizer again."""
        whole = _plain_like(self)
        whole.load_state_dict(dict(state))
        _take_values(self, whole)
        _restore(self, whole.state)


def take_over(optimizer: torch.optim.Optimizer, client: Client) -> None:
    """Make the user's optimizer object the served one, so that schedulers that hold it keep working."""
    del optimizer.state
    optimizer._syncline_hidden = hide_step(optimizer)  # type: ignore[attr-defined]
    optimizer._syncline_client = client  # type: ignore[attr-defined]
    mix_in(optimizer, Served)


def give_back(optimizer: Any, fetch: bool) -> None:
    """Restore a served optimizer to the user's class at the end. ``fetch``: the owners may be asked for the state.

    Does nothing to an optimizer that is not served.
    """
    client = getattr(optimizer, "_syncline_client", None)
    if client is None:
        return
    if fetch and client.owned.owners.answers_one:
        with contextlib.suppress(SynclineError):  # the end of the run reports the fault; the state is dropped then
            _restore(optimizer, optimizer._whole().state)
            return
    shard, kept = client.owned.owners.shard, client.keeps_state
    pieces = None if shard is None or not kept else shard.state()
    _restore(optimizer, {})
    if kept:
        del optimizer.state
        optimizer._syncline_pieces, optimizer._syncline_owners = pieces, client.owned.owners.count
        optimizer._syncline_parameters = client.parameters
        optimizer._syncline_hidden = vars(optimizer).pop("step", None)
        mix_in(optimizer, Parted)


def put_together(session: Session, optimizer: Any) -> None:
    """Restore the state of a parted optimizer from the pieces of all workers. All workers must call it.

    Raises UsageError if an owner of the earlier run does not take part in this one.
    """
    pieces = optimizer._syncline_pieces if isinstance(optimizer, Parted) else None
    parts = session.gather(b"" if pieces is None else pack(pieces))
    if not isinstance(optimizer, Parted):
        return
    found = [(rank, part) for rank, part in enumerate(parts) if part]
    if len(found) != optimizer._syncline_owners:
        raise _parted()
    number = session.member.number
    records = [record for rank, part in found for record in unpack(part, session.name(rank), number(rank))]
    _restore(optimizer, _in_order(whole_state(records, optimizer._syncline_parameters), optimizer.param_groups))


def forget_pieces(optimizer: Any) -> None:
    """Make a parted optimizer a plain one without state."""
    if isinstance(optimizer, Parted):
        _restore(optimizer, {})


def take_state(optimizer: Any, state: Mapping[Any, Any]) -> None:
    """Give a plain optimizer this state, in the order in which it would have created it."""
    optimizer.state.clear()
    optimizer.state.update(_in_order(state, optimizer.param_groups))


def hide_step(optimizer: torch.optim.Optimizer) -> Any:
    """Remove a scheduler's wrapper of the plain step from the object, because the new class has another step.

    Raises UsageError for a step that the script has set itself: it would no longer be called.
    """
    hidden = vars(optimizer).get("step")
    if hidden is not None and not hasattr(hidden, "_wrapped_by_lr_sched"):
        raise UsageError(
            f"step() of this {type(optimizer).__name__} was replaced on the object itself, and would no longer be"
            " called: replace it after syncline.prepare()"
        )
    return vars(optimizer).pop("step", None)


def mix_in(optimizer: torch.optim.Optimizer, mixin: type) -> None:
    """Replace the optimizer's class by a subclass with ``mixin`` first."""
    plain = type(optimizer)
    modes = {name: _with_state(name) for name in ("train", "eval") if mixin is Served and hasattr(plain, name)}
    optimizer.__class__ = type(f"{mixin.__name__}{plain.__name__}", (mixin, plain), modes)


def _with_state(name: str) -> Callable[..., Any]:
    """A method of the user's optimizer that changes weights by means of its state, as in schedule-free optimizers.

    The owners receive the changed weights with the next step, like other changes by the script.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._syncline_client.settle(f"optimizer.{name}()")
        whole = self._whole()
        before = _versions(whole)
        found = getattr(whole, name)(*args, **kwargs)
        if _versions(whole) != before:
            raise UsageError(
                f"{type(whole).__name__}.{name}() changes the optimizer's state, which the owners of the weights hold:"
                " use ps(update=worker)"
            )
        _take_values(self, whole)
        return found

    return call


def _versions(optimizer: torch.optim.Optimizer) -> list[tuple[int, str, int, int]]:
    """The tensors of the optimizer's state with their version counters."""
    return [
        (number, key, id(value), value._version)
        for number, state in enumerate(optimizer.state.values())
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    ]


def own_class(optimizer: Any) -> type:
    """The user's class, for an optimizer whose class has a mixin."""
    return type(optimizer).__mro__[2]


def plain_class(optimizer: Any) -> type:
    """The user's class, whether the optimizer's has a mixin or not."""
    return own_class(optimizer) if isinstance(optimizer, Served | Stepping | Parted) else type(optimizer)


def _restore(optimizer: Any, state: Mapping[Any, Any] | None = None) -> None:
    """Restore the own class of an optimizer with a mixin, with this state if there is one."""
    optimizer.__class__ = own_class(optimizer)
    hidden = vars(optimizer).get("_syncline_hidden")
    for name in ADDED:
        vars(optimizer).pop(name, None)
    if hidden is not None:
        vars(optimizer).setdefault("step", hidden)  # unless the script has put something there meanwhile
    if state is not None:
        optimizer.state = defaultdict(dict, state)


def _plain_like(optimizer: Any) -> torch.optim.Optimizer:
    """An optimizer of the user's class without state, over the same parameters and with the same group values."""
    groups = [dict(group) for group in optimizer.param_groups]
    return copy_with(optimizer, own_class(optimizer), groups, defaultdict(dict), steps=False)


def _reduced(whole: Any, protocol: Any) -> Any:
    """The result of ``__reduce_ex__`` of an optimizer with a mixin, whose plain copy is ``whole``."""
    # The mixed class's own would pickle that class: reconstruct the plain class instead.
    return copyreg._reconstructor, (type(whole), object, None), *whole.__reduce_ex__(protocol)[2:]  # type: ignore[attr-defined]


def _in_order(state: Mapping[Any, Any], groups: Groups) -> dict[Any, Any]:
    """The state in the order in which the optimizer itself creates it, independent of the owners' order."""
    return {one: state[one] for group in groups for one in group["params"] if one in state}


def _take_values(optimizer: Any, loaded: torch.optim.Optimizer) -> None:
    """Copy the values of groups and attributes from ``loaded``."""
    for mine, other in zip(optimizer.param_groups, loaded.param_groups, strict=True):
        mine.update({key: value for key, value in other.items() if key != "params"})
    vars(optimizer).update({name: vars(loaded)[name] for name in plain_attributes(loaded)})


def _parted() -> UsageError:
    return UsageError(
        "the state of this optimizer stayed with the owners of its weights when their run ended: prepare it again with"
        " the same ranks if these were the owners, or load the result of an optimizer.state_dict() from before"
        " syncline.shutdown()"
    )


def looks_at_gradients(optimizer: Any, set_to_none: bool = True) -> bool:
    """Whether ``zero_grad`` with these arguments reads gradients. PyTorch's own does not when it sets them to None."""
    plain: Any = own_class(optimizer)
    return not (set_to_none and plain.zero_grad is torch.optim.Optimizer.zero_grad)


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _or_plain(method: _Method) -> _Method:
    """Redirect a bound method that the script has kept: it calls the plain class's method once the optimizer has that
    class again."""

    @wraps(method)
    def either(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, Stepping):
            return method(self, *args, **kwargs)
        if method.__name__ == "step":
            self._opt_called = True  # no scheduler has wrapped the kept method
        return getattr(type(self), method.__name__)(self, *args, **kwargs)

    return cast(_Method, either)


class Stepping:
    """Mixed into the class of a user's optimizer whose updates are deferred."""

    _syncline_deferred: DeferredUpdates
    param_groups: Groups

    @_or_plain
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Defer the update of each weight until its first use. Returns the closure's loss."""
        if not self._syncline_deferred.updates_alone:  # such an optimizer (LBFGS) may call the closure several times
            self._opt_called = True
            return self._syncline_deferred.at_once(partial(super().step, *(() if closure is None else (closure,))))  # type: ignore[misc]
        loss, deferred, whole = None, self._syncline_deferred, super().step  # type: ignore[misc]
        if closure is not None:
            deferred.looked = True
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # what learning-rate schedulers look at
        if deferred.attached:
            deferred.step(whole)
        else:  # the closure's backward pass has chosen a schedule that does not cross iterations
            whole()
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers made before and after prepare find _opt_called kept
    step.hooked = True  # type: ignore[attr-defined]  # torch adds profiling and hooks to the user's own, which is called

    @_or_plain
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear gradients as the optimizer's own method does. Setting them to None does not count as a read."""
        plain = partial(super().zero_grad, *args, **kwargs)  # type: ignore[misc]
        self._syncline_deferred.zero_grad(plain, looks=looks_at_gradients(self, *args, **kwargs))

    @_or_plain
    def add_param_group(self, group: dict[str, Any]) -> None:
        """Finish deferred updates, then add a group, whose parameters must belong to the model too."""
        self._syncline_deferred.flush()
        self._syncline_deferred.check_added(group)
        super().add_param_group(group)  # type: ignore[misc]

    @property
    def state(self) -> Any:
        """The state after all deferred updates."""
        self._syncline_deferred.flush()
        return vars(self)["state"]

    @state.setter
    def state(self, value: Any) -> None:
        vars(self)["state"] = value

    @_or_plain
    def state_dict(self) -> dict[str, Any]:
        """The state dictionary after all deferred updates."""
        self._syncline_deferred.flush()
        found: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return found

    @_or_plain
    def load_state_dict(self, state: Any) -> None:
        """Finish deferred updates, then load a state."""
        self._syncline_deferred.flush()
        super().load_state_dict(state)  # type: ignore[misc]

    @_or_plain
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Finish deferred updates, then copy or pickle as a plain optimizer."""
        self._syncline_deferred.flush()
        groups, state = self.param_groups, vars(self)["state"]
        return _reduced(copy_with(self, own_class(self), groups, state, steps=False), protocol)


def defer_steps(replica: TrainedReplica, optimizer: torch.optim.Optimizer, *, gives_way: bool = False) -> None:
    """Defer the updates of a model's optimizer into the next iteration.

    ``gives_way``: a schedule without deferred updates may replace this one later.
    """
    schedule = replica.exchange.schedule
    plain, later = type(optimizer), schedule.apply == "next_step"
    hidden = hide_step(optimizer)
    deferred = DeferredUpdates(replica, optimizer, plain, later=later, local=goes_ahead(schedule))
    deferred.gives_way, deferred.watches = gives_way, schedule.apply == "step"
    replica.deferred = deferred
    optimizer._syncline_deferred, optimizer._syncline_hidden = deferred, hidden  # type: ignore[attr-defined]
    mix_in(optimizer, Stepping)
    watch_zero_grad(deferred)


def end_deferred_steps(optimizer: Any) -> None:
    """Restore the optimizer's own class. Updates that are still in flight are abandoned."""
    deferred = getattr(optimizer, "_syncline_deferred", None)
    if deferred is not None:
        _restore(optimizer)
        vars(deferred.model).pop("zero_grad", None)
