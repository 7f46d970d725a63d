"""A model's part in a run, from ``prepare`` to ``release``: a replica, a served optimizer, or a server's loop.

All processes start from the same model. Before any value is sent they compare its description (names, shapes, types,
strides, requires_grad); an error names the first parameter that differs. Worker 0's values are then copied piece by
piece, so that the extra memory stays small.

Ranks may have different numbers of batches. A rank that has run out of batches becomes a *shadow* until all have
(``shadow_until_all_joined``). A shadow makes the same collective calls as the others, but its ticket says that it has
no batches. It takes part in their exchanges with zeros and weight 0, and in the joint calls of workers that own
weights. If weights are exchanged, a shadow's own weights count in the first exchange after its last step; at the end it
has the others' weights.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ...errors import NotBuiltError, SynclineError, UsageError
from ...nouns import Slice
from ...serving.owner import HeldParts, check_kept, share_parts
from ...serving.records import Record, pack, unpack
from ...serving.shard import WEIGHTS
from ...serving.turns import Counted
from ...session.layout import decide_layout
from ...session.session import Session
from ...session.tickets import AVERAGE, BUCKET_KEYS, JOINED, STEP, step_of
from ...strategy.strategy import Strategy
from ...sync import Averages
from ...training.memory import check_same_model
from ...training.owners import OwnedModel, add_up, serve_model
from ...training.weights import AgreedWeights, Values
from .averaging import Averaging
from .choosing import Choosing
from .hooks import steps_of
from .optimizer import (
    defer_steps,
    end_deferred_steps,
    forget_pieces,
    give_back,
    plain_class,
    put_together,
    take_over,
    take_state,
)
from .options import Named, Options, Selection
from .own_values import OwnValues, copy_with, name_of
from .partial_optimizer import (
    Probed,
    SlicedOptimizer,
    as_elements,
    in_memory_order,
    probe,
    records_of,
    updates_alone,
    whole_state,
)
from .passes import TrainedReplica
from .replica import Forms
from .served import Client, pull_by_layer
from .staging import CudaCopier
from .storage import Storage, distinct, layers_of, pack_bytes, unpack_bytes
from .supported import check_own_values, check_parameters, checked_alone, foreign_to, tell_of_slow_start


@dataclass(frozen=True)
class Given:
    """A model with the arguments of its ``prepare``, which outlive the session."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    options: Options

    @property
    def described(self) -> str:
        """A text that differs between models whose tensors or modules differ, and between optimizers."""
        tensors = Selection(self.model, self.options).tensors()
        parts = [_described(name, tensor) for name, tensor in tensors]
        parts += [f"{name} {type(module).__qualname__}" for name, module in self.model.named_modules()]
        digest = zlib.crc32("\n".join([*parts, *self.options.agreed]).encode())
        elements = sum(tensor.numel() for _, tensor in tensors)
        kind, made = type(self.model).__name__, plain_class(self.optimizer).__name__
        return f"{kind} of {elements:,} elements in {len(tensors)} tensors, with {made} ({digest:08x})"

    # What an elastic run does with it (``recovery.lasting``).

    @property
    def shared(self) -> list[GroupValues]:
        """The values of the optimizer's groups."""
        return [] if self.optimizer is None else [GroupValues(self.optimizer)]

    def check_lasting(self, strategy: Strategy) -> None:  # noqa: ARG002 - under every one of PyTorch's
        """Raise NotBuiltError for a model without its optimizer."""
        if self.optimizer is None:
            raise NotBuiltError(
                "syncline.elastic() works with a model of PyTorch and its optimizer: give syncline.prepare() both"
            )

    def count(self, finished: Callable[[], object]) -> Callable[[], None]:
        """Call ``finished`` after every update, until the returned call."""
        assert self.optimizer is not None

        def stepped(*_: object) -> None:
            finished()

        return self.optimizer.register_step_post_hook(stepped).remove

    def keep_values(self) -> Callable[[], None]:
        """Copy the values of the model and the optimizer's state. The returned call puts them back into a released
        model."""
        forget_pieces(self.optimizer)  # ``hold_parts`` has had them before
        tensors = [tensor for _, tensor in Selection(self.model, self.options).tensors()]
        kept = [tensor.detach().clone() for tensor in tensors]
        state = {} if self.optimizer is None else dict(self.optimizer.state)

        def put_back() -> None:
            forget_pieces(self.optimizer)  # of a session that broke before it began
            with torch.no_grad():
                for tensor, copy in zip(tensors, kept, strict=True):
                    tensor.copy_(copy)
            if self.optimizer is not None:
                self.optimizer.state.clear()
                self.optimizer.state.update(state)

        return put_back

    def copy_again(self, session: Session, root: int, whole: bool) -> None:
        """Give the released model and its optimizer the values of ``root``. Gradients of a step that broke are dropped.

        The optimizer's state is copied if each worker has the ``whole`` of it. Parts that single workers own follow by
        ``put_together_again``.
        """
        self.model.zero_grad(set_to_none=True)
        if session.alone:
            return
        selection = Selection(self.model, self.options)
        with torch.no_grad():
            copy_from_worker(session, [tensor.detach() for _, tensor in selection.tensors()], root, everyone=False)
        if self.optimizer is not None and whole:
            _copy_optimizer(session, self.optimizer, [parameter for _, parameter in selection.trained()], root)

    def hold_whole(self, view: int, step: int, counted: Counted) -> HeldParts:
        """The model of a worker that is alone, with its optimizer's state, as the only part of that view.

        ``step`` is the number of finished steps; -1 for a worker that has none of the run's values. ``counted`` are the
        samples in the weights, if updates count them.
        """
        if step < 0:
            return HeldParts()
        parameters, records = [parameter for _, parameter in Selection(self.model, self.options).trained()], []
        for index, parameter in enumerate(parameters):
            whole = as_elements(in_memory_order(parameter.detach(), parameter))
            records.append(Record(Slice(index, 0, parameter.numel()), WEIGHTS, whole))
        if self.optimizer is not None:
            records += records_of(self.optimizer, parameters)
        return HeldParts(
            {step: {(view, 1, 0): records}}, [{"view": view, "taken": 0, "recent": [], "counted": counted}]
        )

    def put_together_again(self, session: Session, held: HeldParts, step: int) -> list[int]:
        """Give the released model and its optimizer the weights and the state of all parts after ``step`` steps.

        Returns the parts that nobody has.
        """
        receivers = range(session.world_size) if not session.group.servers else [0]
        records, missing = share_parts(session, held, step, receivers)
        if missing or not records:  # the other workers get the weights of rank 0, and have no state
            return missing
        whole = whole_state(records, [parameter for _, parameter in Selection(self.model, self.options).trained()])
        with torch.no_grad():
            for parameter, state in whole.items():
                parameter.copy_(state.pop(WEIGHTS))
        if self.optimizer is not None:
            take_state(self.optimizer, {parameter: state for parameter, state in whole.items() if state})
        return []

    def prepare_again(self, session: Session) -> Prepared | None:
        """Make the released model and its optimizer part of another session. None if this worker is alone."""
        return None if session.alone else prepare(session, self.model, self.optimizer, self.options)


@dataclass(frozen=True)
class Prepared:
    """The result of ``prepare`` on a worker. ``client`` is set if servers hold the weights; else ``optimizer`` may
    be None."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    replica: TrainedReplica
    client: Client | None

    @property
    def given(self) -> Given:
        """The arguments of ``prepare`` for this model."""
        return Given(self.model, self.optimizer, self.replica.options)

    def hold_parts(self, earlier: int) -> HeldParts:
        """The parts of the model that this worker owns or follows, after its last steps. It makes no more updates.

        Its clock does not count the first ``earlier`` steps.
        """
        return HeldParts() if self.client is None else self.client.owned.owners.hold().count_from(earlier)

    def mark(self, before: Mark | None = None) -> Mark:
        """Remember the values that the next step may change before it breaks, in the memory of the mark ``before``."""
        return Mark(self, before)

    def take_over(self, root: int, steps: int, mark: Mark | None) -> None:
        """Go on from the agreed weights of ``root`` after so many steps, if the sync mode exchanges weights.

        ``mark`` is this worker's own, after the same exchange. Under gossip, where no weights are agreed, a worker goes
        on from it.
        """
        replica, weights = self.replica, self.replica.trained.weights
        if weights is None:
            return
        replica.steps = steps

        def copy(values: Values) -> None:
            copy_from_worker(replica.session, values.blocks, root, everyone=False)

        weights.take_over(steps, None if mark is None else mark.memory, copy)
        if mark is not None and not isinstance(weights, AgreedWeights):
            mark.put_back()

    def consolidate(self) -> None:
        """Give all workers the newest weights; all of them must call it."""
        self.replica.flush()
        if self.client is not None:
            self.client.consolidate()
        self.replica.trained.consolidate()

    def release(self, fetch: bool = False, settle: bool = False) -> None:
        """Make the model and the optimizer the user's own again.

        ``settle``: the call may wait for exchanges in flight. ``fetch``: it may ask owners for the optimizer's state.
        """
        if settle and not self.replica.session.forked and self.replica.session.engine.error is None:
            with contextlib.suppress(SynclineError):  # the end reports it
                self.replica.flush()
        end_deferred_steps(self.optimizer)
        give_back(self.optimizer, fetch)
        self.replica.detach()


def prepare(
    session: Session,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    options: Options = Options(),  # noqa: B008 - a frozen value
    *,
    copier: CudaCopier | None = None,
) -> Prepared | None:
    """Check that all processes have the same model, copy rank 0's values to all, and attach hooks.

    On a server this serves until the workers have left, and returns None. ``copier`` replaces the copier between the
    model's device and the host. A model that was prepared before is released first.
    """
    known: list[Prepared] = [made for one in session.family for made in one.prepared.values()]
    selection = checked_alone(session.strategy, model, optimizer, options, [made.replica for made in known])
    first_key = session.enter_model(model)
    let_go(session, model)
    before: Prepared | None = session.prepared.pop(first_key, None)
    if before is not None:
        before.replica.flush()
        before.release()
    if session.is_worker:
        put_together(session, optimizer)
    probed = _checked_together(session, optimizer, selection, options, first_key)
    check_parameters(model, selection.trained())
    copy_from_worker(session, [tensor.detach() for _, tensor in selection.tensors()])
    if not session.is_worker:
        _serve(session, selection.trained(), optimizer, probed)
        return None
    tell_of_slow_start(session, selection.trained(), optimizer)
    replica = TrainedReplica(session, model, options, first_key=first_key, copier=copier)
    try:
        if optimizer is None or not session.strategy.server_holds_weights:
            made = _attach_all_reduced(session, optimizer, replica)
        else:
            made = _attach_served(session, optimizer, probed, replica)
    except SynclineError:  # a process is lost meanwhile: an elastic run prepares the model in another session
        replica.detach()
        raise
    if session.chooses_schedule:
        replica.exchange.choosing = Choosing(replica, optimizer)
    if before is not None:
        made.replica.steps = before.replica.steps
    made.replica.hooks.keep(steps_of(session, optimizer))
    if made.replica.averaging is not None and optimizer is not None:
        made.replica.averaging.attach(optimizer)  # after the hooks that report steps, so that these run first
    session.prepared[first_key] = made
    (session.weighed.discard if options.fixed else session.weighed.add)(first_key)
    session.consolidates[first_key] = made.consolidate
    return made


def _checked_together(
    session: Session, optimizer: torch.optim.Optimizer | None, selection: Selection, options: Options, first_key: int
) -> Probed:
    """The result of the optimizer's trial. Raises MismatchError if ranks have different models, options or values."""
    probed, strategy = Probed(False, ()), session.strategy
    said = [(f"has called syncline.prepare() with {one}", "give the same on all ranks") for one in options.agreed]
    if optimizer is not None and strategy.server_holds_weights:
        probed = probe(optimizer, 1 if strategy.roles is None else strategy.roles.owners)
        # All processes ask for such values together, so their names must agree.
        remedy = (
            "an optimizer must keep the same values on all ranks; keep a counter that is for one rank only in"
            " the script"
        )
        said.append((f"has an optimizer whose step() changes {_names(probed.changed)}", remedy))
        said.append((f"has an optimizer whose step() may change {_names(probed.own)}", remedy))
    if optimizer is not None:
        name = type(optimizer).__name__
        momentum = session.decide_momentum(optimizer.param_groups)
        check_kept(momentum, strategy.sync.name, name, probed.keeps_state)
    tensors = [_described(name, tensor) for name, tensor in selection.tensors()]
    check_same_model(session, first_key, tensors, *said)
    if optimizer is not None and strategy.server_holds_weights:
        check_own_values(strategy, optimizer, probed.own)
        if strategy.roles is not None and strategy.roles.replicas and any(probed.own):
            raise UsageError(
                f"{type(optimizer).__name__} changes {_names(probed.own)} in its steps, which replicas=1 does not keep"
                " for a second owner: use ps(on=workers, update=worker), or an optimizer that does not"
            )
    return probed


def _names(values: Sequence[frozenset[str]]) -> str:
    """The names of values in an optimizer's groups, followed by its attributes."""
    named = (name_of(key, place, len(values)) for place, keys in enumerate(values) for key in sorted(keys))
    return ", ".join(named) or "no value"


def release(session: Session, model: torch.nn.Module) -> Prepared:
    """End a model's part in a run that continues; all workers must call it. Raises UsageError if the model has no
    part."""
    for one in session.family:
        for key, made in list(one.prepared.items()):
            if made.model is model:
                made.consolidate()
                one.leave_model(key)
                made.release(fetch=True)
                return made  # type: ignore[no-any-return]
    raise UsageError("syncline.release() takes a model that was given to syncline.prepare() and is not released yet")


def let_go(session: Session, model: torch.nn.Module) -> None:
    """Release a model that was prepared in another group of workers."""
    for other in session.family:
        for key, made in list(other.prepared.items()):
            if made.model is model and other is not session:
                if made.client is not None:
                    raise UsageError(
                        "owners of weights hold this model as it was prepared in another group: prepare it once"
                    )
                made.replica.flush()
                made.release()
                other.leave_model(key)


def _attach_all_reduced(session: Session, optimizer: torch.optim.Optimizer | None, replica: TrainedReplica) -> Prepared:
    """Attach a model whose weights each rank updates itself. The optimizer may be None, or train several models."""
    if optimizer is not None:
        mode = session.strategy.sync_mode()
        if isinstance(mode, Averages):
            replica.averaging = Averaging(replica, mode)
        if session.strategy.schedule_object().apply != "step":
            defer_steps(replica, optimizer)
        replica.listeners.joined = partial(_copy_optimizer, session, optimizer, [item for _, item in replica.named])
        replica.listeners.first_exchange = partial(_check_all_prepared, replica, optimizer)
    return Prepared(replica.model, optimizer, replica, None)


def _check_all_prepared(replica: TrainedReplica, optimizer: torch.optim.Optimizer) -> None:
    """Raise GradientError if the optimizer trains a tensor whose gradients are not averaged."""
    for tensor in foreign_to(replica.session.models, optimizer):
        if tensor.requires_grad:
            raise replica.fault(
                f"the optimizer holds a tensor of shape {tuple(tensor.shape)} that is not a parameter of any prepared"
                " model, so its gradient would not be averaged: give syncline.prepare() every model that the optimizer"
                " trains, including a loss with parameters"
            )


def _attach_served(
    session: Session, optimizer: torch.optim.Optimizer, probed: Probed, replica: TrainedReplica
) -> Prepared:
    """Attach a model whose weights others update: move the parameters into the storage for pulls, and take over the
    optimizer."""
    staging, by_layer = replica.exchange.staging, session.strategy.schedule_object().apply == "layer"
    device = torch.device("cpu") if by_layer and staging.device is None else staging.device
    weights = Storage(replica.named, replica.storage.buckets, staging.allocate, device)
    parameters = [parameter for _, parameter in replica.named]
    _move_into(weights, parameters)
    replica.guard.forms = Forms(replica.named)  # parameters with gaps have got other strides
    # Of the user's class, also after ``take_over`` has added a mixin.
    plain = copy_with(optimizer, type(optimizer), optimizer.param_groups, optimizer.state, steps=False)
    learnt = records_of(optimizer, parameters) if session.rank == 0 or not session.group.servers else []
    build = partial(SlicedOptimizer, plain, parameters, probed.own)
    owned = OwnedModel(replica.exchange, replica.trained, weights, build, learnt, apart=updates_alone(optimizer))
    together = session.strategy.sync_mode().merges and not by_layer
    own = OwnValues(optimizer, probed.own) if together else None
    client = Client(replica, weights, owned, keeps_state=probed.keeps_state, own=own)
    if by_layer:
        pull_by_layer(replica, optimizer, client, weights)
    take_over(optimizer, client)
    return Prepared(replica.model, optimizer, replica, client)


def _serve(session: Session, named: Named, optimizer: torch.optim.Optimizer | None, probed: Probed) -> None:
    layout = decide_layout(session, layers_of(named))
    gradients = Storage(named, layout.buckets, session.engine.allocate)
    if optimizer is None or not session.strategy.server_holds_weights:
        add_up(session, layout, gradients)
        return
    weights = Storage(named, layout.buckets, session.engine.allocate)
    parameters = [parameter for _, parameter in named]
    _move_into(weights, parameters)
    build, learnt = partial(SlicedOptimizer, optimizer, parameters, probed.own), records_of(optimizer, parameters)
    try:
        serve_model(session, layout, gradients, weights, build, learnt, apart=updates_alone(optimizer))
    finally:
        for parameter in parameters:  # their memory ends with the session, after which an elastic run serves again
            parameter.data = parameter.detach().clone()


def _copy_optimizer(
    session: Session, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], root: int
) -> None:
    """Copy the optimizer state of ``root`` to all ranks: a rank without batches has not made the last steps."""
    data = session.tell_all(pack(records_of(optimizer, parameters)) if session.rank == root else b"", root)
    if session.rank != root:
        records = unpack(data, session.name(root), session.member.number(root))
        for parameter, state in whole_state(records, parameters).items():
            optimizer.state[parameter] = state


class Mark:
    """The values of a model before a step, to which a worker of an elastic run returns if the step breaks.

    Until a step has exchanged gradients it changes buffers only. Steps of workers that train alone change all values
    until weights are exchanged: then the mark is ``whole``, and has copies of them and of the optimizer's state. A mark
    takes the memory of the one ``before``, which is then of no more use.
    """

    def __init__(self, made: Prepared, before: Mark | None = None) -> None:
        replica, self._given = made.replica, made.given
        weights = replica.trained.weights
        self.steps = replica.steps
        self.whole = weights is not None and not replica.trained.machine.due
        self.memory: list[torch.Tensor] | None = None
        """What the sync mode remembers between exchanges, one tensor for each parameter."""
        # Every step takes a mark, so it does not search the modules again: they may replace their buffers.
        self._homes: list[dict[str, torch.Tensor | None]]
        self._homes = [one._buffers for one in made.given.model.modules()] if before is None else before._homes
        self._values: list[torch.Tensor] = _copies(self._tensors(), [] if before is None else before._values)
        self._state = _cloned(made.optimizer.state) if self.whole and made.optimizer is not None else None
        self._centre: list[torch.Tensor] = []
        if self.whole and isinstance(weights, AgreedWeights):
            weights.rest()
            self.memory, self._centre = weights.outlive()

    def _tensors(self) -> list[torch.Tensor]:
        if not self.whole:
            return [buffer for home in self._homes for buffer in home.values() if buffer is not None]
        return [tensor for _, tensor in Selection(self._given.model, self._given.options).tensors()]

    def put_back(self) -> None:
        """Give a released model these values. Under EASGD the weights are those of the centre."""
        with torch.no_grad():
            for tensor, value in zip(self._tensors(), self._values, strict=True):
                tensor.copy_(value)
            parameters = [parameter for _, parameter in Selection(self._given.model, self._given.options).trained()]
            for parameter, value in zip(parameters, self._centre, strict=False):
                parameter.copy_(value)
        optimizer = self._given.optimizer
        if optimizer is not None and self._state is not None:
            optimizer.state.clear()
            optimizer.state.update(_cloned(self._state))


def _copies(tensors: list[torch.Tensor], memory: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of many small tensors, by one call if ``memory`` fits them."""
    alike = [(one.shape, one.dtype, one.device) for one in tensors]
    if not alike or alike != [(one.shape, one.dtype, one.device) for one in memory]:
        return [tensor.detach().clone() for tensor in tensors]
    with torch.no_grad():
        torch._foreach_copy_(memory, tensors)
    return memory


State = Mapping[torch.Tensor, Mapping[str, Any]]


def _cloned(state: State) -> dict[torch.Tensor, dict[str, Any]]:
    """A copy of an optimizer's state."""
    return {
        parameter: {
            name: value.clone() if isinstance(value, torch.Tensor) else deepcopy(value) for name, value in one.items()
        }
        for parameter, one in state.items()
    }


class GroupValues:
    """The values of an optimizer's groups, such as the learning rate, as an object with a state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """The values of each group."""
        return {"groups": [{name: group[name] for name in group if name != "params"} for group in self._groups]}

    def load_state_dict(self, state: Any) -> None:
        """Set each group's values, those in a tensor in place."""
        for group, values in zip(self._groups, state["groups"], strict=True):
            for name, value in values.items():
                if hasattr(group.get(name), "copy_"):  # a compiled optimizer reads its rate from this tensor
                    group[name].copy_(value)
                else:
                    group[name] = value


def _move_into(weights: Storage, parameters: list[torch.nn.Parameter]) -> None:
    """Move the parameters into contiguous storage, and copy their values to the transport's memory.

    A server's own parameters may stay where they are, because a server works on the storage alone.
    """
    with torch.no_grad():
        for parameter, view in zip(parameters, weights.views, strict=True):
            view.copy_(parameter)
            if view.device == parameter.device:
                parameter.data = view
        for dtype, flat in weights.flat.items():
            if flat is not weights.resident[dtype]:
                flat.copy_(weights.resident[dtype])


_PIECE_BYTES = 16 * 1024 * 1024
_KEY = BUCKET_KEYS


def copy_from_worker(session: Session, tensors: Sequence[torch.Tensor], root: int = 0, everyone: bool = True) -> None:
    """Overwrite the tensors with worker ``root``'s values, on all workers. With ``everyone``, copy from worker 0 to
    servers too."""
    for piece in _pieces([distinct(tensor) for tensor in tensors]):
        packed = np.empty(sum(tensor.nbytes for tensor in piece), np.uint8)
        pack_bytes(piece, torch.from_numpy(packed))
        if everyone:
            session.engine.wait(session.everyone.broadcast(packed, _KEY, f"copying the model from {session.called(0)}"))
        else:
            session.broadcast(packed, root)
        unpack_bytes(torch.from_numpy(packed), piece)


def _described(name: str, tensor: torch.Tensor) -> str:
    frozen = "" if tensor.requires_grad else ", frozen"
    return f"{name!r} with shape {tuple(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()}{frozen}"


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    piece: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if piece and size + tensor.nbytes > _PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(tensor)
        size += tensor.nbytes
    if piece:
        yield piece


def shadow_until_all_joined(replica: TrainedReplica, client: Client | None = None) -> None:
    """Take part in the others' steps with weight 0 until every rank has run out of batches.

    All ranks then have the model of the rank that trained longest or, if weights are exchanged, the mean of all.
    ``Listeners.joined`` handles the optimizer's state, or the owners do, through ``client``. If every push is an update
    by itself, no shadow is needed.
    """
    if client is not None and not client.owned.together:
        client.join()
        return
    session = replica.session
    replica.settle()
    while True:
        if replica.exchange.replaces:
            replica.replace_layout()
        over = False
        while not over:
            weight = 0.0 if replica.averaging is None else replica.averaging.weight
            meeting = session.meet(JOINED, weight=weight, flags=replica.steps)
            if meeting.work is None:
                return
            session.engine.wait(meeting.work)
            tickets = meeting.tickets()
            kinds = [ticket.kind for ticket in tickets]
            others = [rank for rank, kind in enumerate(kinds) if kind != JOINED]
            if not others:
                _end(replica, [ticket.flags for ticket in tickets], held=client is not None)
                return
            if STEP in kinds:
                replica.shadow(meeting, step_of(tickets[kinds.index(STEP)]))  # not all of their steps are exchanged
            if AVERAGE in kinds and replica.averaging is not None:
                replica.trained.shadow(AVERAGE, meeting, step_of(tickets[kinds.index(AVERAGE)]))
            over = client is None or client.shadow(kinds[others[0]], others[0])


def _end(replica: TrainedReplica, steps: list[int], held: bool) -> None:
    """Finish after all ranks have run out of batches. ``steps`` are the steps of each rank; ``held``: others hold
    the weights."""
    longest = steps.index(max(steps))
    if replica.averaging is not None:
        replica.steps = max(steps)
        replica.trained.consolidate()
        replica.listeners.joined(longest)
        return
    if min(steps) < max(steps) or replica.made_local_steps:
        weights = {id(tensor) for _, tensor in replica.named} if held else set[int]()
        with torch.no_grad():
            tensors = [tensor.detach() for _, tensor in replica.selection.tensors() if id(tensor) not in weights]
            copy_from_worker(replica.session, tensors, root=longest, everyone=False)
        replica.listeners.joined(longest)
    replica.steps = max(steps)
