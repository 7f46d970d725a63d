"""The user's optimizer object in a run, while others own the weights or updates are deferred, and afterwards.

The object stays the user's own, so that learning-rate schedulers which hold it go on working; its class changes. While
others own the weights it is ``Served``: ``step()`` has the owners do the update, ``state_dict()`` puts their state
together. A copy or a pickle of it is a plain optimizer with that state.

At the end it gets its own class back, with the owners' state where one rank alone can ask for that. Where the workers
own the weights, asking would be a collective call, which the end must not be. Each rank then keeps its own pieces and
the optimizer is ``Parted``: it cannot be used by itself, but ``prepare`` in a later run gathers the pieces.

While updates are deferred it is ``Stepping``: ``step()`` lets the model's ``Crossing`` decide what is updated
when; whatever tells of weights or state, ``state_dict`` first of all, waits for all updates. Copies and pickles are
plain optimizers.
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
from .overlap import Crossing, watch_zero_grad
from .own_values import group_values, plain_attributes
from .passes import TrainedReplica
from .served import Client
from .shard import records_of, whole_state

Groups = list[dict[str, Any]]


class Served:
    """Mixed into the class of a user's optimizer by ``take_over``; the owners' optimizer does the work."""

    _client: Client
    param_groups: Groups
    defaults: dict[str, Any]
    grad_scale: torch.Tensor
    found_inf: torch.Tensor

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a GradScaler asks before it looks for an overflow, and then it leaves all else to ``step``."""
        self._client.share_overflow()
        return True

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Commit the gradients of the last backward and wait for the new weights; the closure's loss."""
        loss, scaled = None, hasattr(self, "grad_scale")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # what learning-rate schedulers look at
        if scaled:  # a GradScaler has set these
            self._client.unscale(float(self.grad_scale))
        self._client.step(group_values(self.param_groups), skip=scaled and bool(self.found_inf))
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers made before and after prepare find _opt_called kept

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own."""
        plain = partial(super().zero_grad, *args, **kwargs)  # type: ignore[misc]
        if self._client.crossing is None:
            plain()
        else:
            self._client.crossing.zero_grad(plain, looks=looks_at_gradients(self, *args, **kwargs))

    @property
    def state(self) -> NoReturn:
        """Refused: an empty dictionary would be taken for the state."""
        raise UsageError(
            "the owners of the weights hold the optimizer's state: read it from optimizer.state_dict()['state'], change"
            " it by optimizer.load_state_dict(), or use ps(update=worker)"
        )

    @state.setter
    def state(self, value: object) -> None:
        del value
        _ = self.state

    def state_dict(self) -> dict[str, Any]:
        """As one process would give it: the owners' state put together."""
        self._client.settle("optimizer.state_dict()")
        return self._whole().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Send the state to the owners and take the group values; where each push is an update, all workers call it."""
        self._client.settle("optimizer.load_state_dict()")
        whole = self._whole(fetch=False)
        whole.load_state_dict(dict(state))
        _take_values(self, whole)
        self._client.owned.load(records_of(whole, self._client.parameters))

    def add_param_group(self, group: dict[str, Any]) -> None:  # noqa: ARG002
        """Refused: what is served is fixed in ``prepare``."""
        raise UsageError("add parameter groups before syncline.prepare(): the servers hold a fixed set of weights")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain optimizer with the owners' state: what pickles and copies are."""
        self._client.settle("copying or saving the optimizer")
        whole = self._whole()
        # Not by the way of objects of the same class, which this one is not.
        return copyreg._reconstructor, (type(whole), object, None), *whole.__reduce_ex__(protocol)[2:]  # type: ignore[attr-defined]

    def _whole(self, fetch: bool = True) -> torch.optim.Optimizer:
        """A plain optimizer of the user's class over the same parameters, with the owners' state."""
        whole = _plain_like(self)
        if fetch:
            state = whole_state(self._client.owned.owners.ask("state"), self._client.parameters)
            whole.state.update(_in_order(state, self.param_groups))
        return whole


class Parted:
    """Mixed into the class of an optimizer whose state lies in pieces on several ranks after the end of a run."""

    _pieces: list[Record] | None  # None on a rank that owned nothing
    _owners: int
    _parameters: Sequence[torch.nn.Parameter]
    param_groups: Groups

    def step(self, closure: Callable[[], Any] | None = None) -> NoReturn:  # noqa: ARG002
        """Refused: it would go on without the state."""
        raise _parted()

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @property
    def state(self) -> NoReturn:
        """Refused."""
        raise _parted()

    def state_dict(self) -> NoReturn:
        """Refused."""
        raise _parted()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused."""
        del protocol
        raise _parted()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """With a whole state this is a plain optimizer again."""
        whole = _plain_like(self)
        whole.load_state_dict(dict(state))
        _take_values(self, whole)
        _restore(self, whole.state)


def take_over(optimizer: torch.optim.Optimizer, client: Client) -> None:
    """Make the user's optimizer object itself the served one: schedulers that hold it go on working."""
    del optimizer.state
    optimizer._hidden = hide_step(optimizer)  # type: ignore[attr-defined]
    optimizer._client = client  # type: ignore[attr-defined]
    mix_in(optimizer, Served)


def give_back(optimizer: Any, fetch: bool) -> None:
    """Make a served optimizer the user's own again, at the end; ``fetch`` says whether the owners may be asked.

    Does nothing to one that is not served.
    """
    client = getattr(optimizer, "_client", None)
    if client is None:
        return
    if fetch and client.owned.owners.answers_one:
        with contextlib.suppress(SynclineError):  # the end reports it; the state is then as if nobody had asked
            _restore(optimizer, optimizer._whole().state)
            return
    shard, kept = client.owned.owners.shard, client.keeps_state
    pieces = None if shard is None or not kept else shard.state()
    _restore(optimizer, {})
    if kept:
        del optimizer.state
        optimizer._pieces, optimizer._owners = pieces, client.owned.owners.count
        optimizer._parameters = client.parameters
        optimizer._hidden = vars(optimizer).pop("step", None)
        mix_in(optimizer, Parted)


def put_together(session: Session, optimizer: Any) -> None:
    """Give a parted optimizer its whole state back, from the pieces of all workers; all of them call it.

    Raises UsageError where an owner of the run before is no part of this one.
    """
    pieces = optimizer._pieces if isinstance(optimizer, Parted) else None
    parts = session.gather(b"" if pieces is None else pack(pieces))
    if not isinstance(optimizer, Parted):
        return
    found = [(rank, part) for rank, part in enumerate(parts) if part]
    if len(found) != optimizer._owners:
        raise _parted()
    number = session.member.number
    records = [record for rank, part in found for record in unpack(part, session.name(rank), number(rank))]
    _restore(optimizer, _in_order(whole_state(records, optimizer._parameters), optimizer.param_groups))


def hide_step(optimizer: torch.optim.Optimizer) -> Any:
    """Take a scheduler's wrapper around the plain step off the object, for its own class has another step now.

    Raises UsageError for a step of the script's own, which would not be called.
    """
    hidden = vars(optimizer).get("step")
    if hidden is not None and not hasattr(hidden, "_wrapped_by_lr_sched"):
        raise UsageError(
            f"step() of this {type(optimizer).__name__} was replaced on the object itself, and would no longer be"
            " called: do that after syncline.prepare()"
        )
    return vars(optimizer).pop("step", None)


def mix_in(optimizer: torch.optim.Optimizer, mixin: type) -> None:
    """Let the optimizer's class be one of its own with a mixin before it."""
    plain = type(optimizer)
    modes = {name: _with_state(name) for name in ("train", "eval") if mixin is Served and hasattr(plain, name)}
    optimizer.__class__ = type(f"{mixin.__name__}{plain.__name__}", (mixin, plain), modes)


def _with_state(name: str) -> Callable[..., Any]:
    """A method of the user's optimizer that changes weights by its state, as those of schedule-free ones.

    The owners are told the weights with the next step, like others that the script has changed.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._client.settle(f"optimizer.{name}()")
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
    """Which tensors its state has, and how often each was changed."""
    return [
        (number, key, id(value), value._version)
        for number, state in enumerate(optimizer.state.values())
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    ]


_OURS = ("_client", "_hidden", "_pieces", "_owners", "_parameters")


def own_class(optimizer: Any) -> type:
    """The user's class of an optimizer that something was mixed into."""
    return type(optimizer).__mro__[2]


def _restore(optimizer: Any, state: Mapping[Any, Any]) -> None:
    """Give an optimizer that something was mixed into its own class and state again."""
    optimizer.__class__ = own_class(optimizer)
    hidden = vars(optimizer).get("_hidden")
    for name in _OURS:
        vars(optimizer).pop(name, None)
    if hidden is not None:
        vars(optimizer).setdefault("step", hidden)  # unless the script has put something there meanwhile
    optimizer.state = defaultdict(dict, state)


def _plain_like(optimizer: Any) -> torch.optim.Optimizer:
    """An optimizer without state of the user's class, over the same parameters, with the same values of its groups."""
    whole: torch.optim.Optimizer = object.__new__(own_class(optimizer))
    vars(whole).update({key: value for key, value in vars(optimizer).items() if key not in _OURS})
    whole.param_groups = [dict(group) for group in optimizer.param_groups]
    whole.state = defaultdict(dict)
    return whole


def _in_order(state: Mapping[Any, Any], groups: Groups) -> dict[Any, Any]:
    """The state in the order in which an optimizer makes it, whichever owner it came from first."""
    return {one: state[one] for group in groups for one in group["params"] if one in state}


def _take_values(optimizer: Any, loaded: torch.optim.Optimizer) -> None:
    """Of the groups and the attributes."""
    for mine, other in zip(optimizer.param_groups, loaded.param_groups, strict=True):
        mine.update({key: value for key, value in other.items() if key != "params"})
    vars(optimizer).update({name: vars(loaded)[name] for name in plain_attributes(loaded)})


def _parted() -> UsageError:
    return UsageError(
        "the state of this optimizer stayed with the owners of its weights when their run ended: prepare it again with"
        " the same ranks, where these were the owners, or load what optimizer.state_dict() gives before"
        " syncline.shutdown()"
    )


def looks_at_gradients(optimizer: Any, set_to_none: bool = True) -> bool:
    """Whether ``zero_grad`` with these arguments does: not torch's own, where it sets them to None."""
    plain: Any = own_class(optimizer)
    return not (set_to_none and plain.zero_grad is torch.optim.Optimizer.zero_grad)


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
