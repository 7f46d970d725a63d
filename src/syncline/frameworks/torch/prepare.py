"""``prepare``: from a model, an optimizer and a session to a replica, a served optimizer, or a server's loop."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ...errors import SynclineError, UsageError
from ...nouns import Bucket
from ...serving.records import pack, unpack
from ...serving.server import serve
from ...serving.summing import Summing
from ...serving.traffic import Model
from ...serving.worker import attach as attach_to_owners
from ...session.layout import decide_layout
from ...session.session import MODEL_KEYS, Session
from ...sync import Averages
from .agreement import check_same_model, check_same_own, copy_from_worker
from .averaging import Averaging
from .choosing import Choosing
from .deferred import updates_alone
from .hooks import steps_of
from .optimizer import defer_steps, end_deferred_steps, give_back, put_together, take_over
from .options import Named, Options, Selection
from .own_values import OwnValues, group_values
from .passes import TrainedReplica
from .pulling import pull_by_layer
from .replica import Forms
from .served import Client, model_of
from .shard import Probed, SlicedOptimizer, probe, records_of, whole_state
from .staging import Copier
from .storage import Array, Storage, layers_of
from .supported import (
    check_averaging,
    check_by_itself,
    check_crossing,
    check_held_once,
    check_momentum,
    check_normalisation,
    check_only_ours,
    check_optimizer,
    check_own_values,
    check_parameters,
    check_served,
    foreign_to,
    tell_of_slow_start,
)


@dataclass(frozen=True)
class Prepared:
    """What ``prepare`` has made of a model on a worker; ``client`` is set when servers hold the weights.

    There may be no optimizer otherwise.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    replica: TrainedReplica
    client: Client | None

    def consolidate(self) -> None:
        """Have the newest weights, as all workers then do, which call it together."""
        self.replica.flush()
        if self.client is not None:
            self.client.consolidate()
        self.replica.trained.consolidate()

    def release(self, fetch: bool = False, settle: bool = False) -> None:
        """Make model and optimizer the user's own again.

        ``settle`` says whether what is under way may be waited for, ``fetch`` whether owners may be asked for the
        optimizer's state.
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
    copier: Copier | None = None,
) -> Prepared | None:
    """Check that all processes have the same model, start them from rank 0's values, and attach.

    On a server this serves until the workers have left and returns None. ``copier`` stands in for what copies between
    the model's device and the host. A model that was prepared before is let go of first.
    """
    selection = _checked_alone(session, model, optimizer, options)
    first_key = session.enter_model(model)
    let_go(session, model)
    before: Prepared | None = session.prepared.pop(first_key, None)
    if before is not None:
        before.replica.flush()
        before.release()
    if session.is_worker:
        put_together(session, optimizer)
    probed = _checked_together(
        session, optimizer, selection, [*options.agreed, f"the run's model {first_key // MODEL_KEYS}"]
    )
    check_parameters(model, selection.trained())
    copy_from_worker(session, [tensor.detach() for _, tensor in selection.tensors()])
    if not session.is_worker:
        _serve(session, selection.trained(), optimizer, probed)
        return None
    tell_of_slow_start(session, selection.trained(), optimizer)
    replica = TrainedReplica(session, model, options, first_key=first_key, copier=copier)
    if optimizer is None or not session.strategy.server_holds_weights:
        made = _attach_all_reduced(session, optimizer, replica)
    else:
        made = _attach_served(session, optimizer, probed, replica)
    if session.chooses_schedule:
        replica.exchange.choosing = Choosing(replica, optimizer)
    if before is not None:
        made.replica.steps = before.replica.steps
    made.replica.hooks.keep(steps_of(session, optimizer))
    if made.replica.averaging is not None and optimizer is not None:
        made.replica.averaging.attach(optimizer)  # behind those that tell of steps
    session.prepared[first_key] = made
    session.consolidates[first_key] = made.consolidate
    return made


def _checked_alone(
    session: Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, options: Options
) -> Selection:
    """What takes part of a model; raises UsageError for what this rank finds wrong by itself."""
    check_only_ours(model)
    selection = Selection(model, options)
    check_normalisation(model, options)
    known: list[Prepared] = [made for one in session.family for made in one.prepared.values()]
    check_held_once(model, selection.trained(), [made.replica for made in known])
    if optimizer is not None:
        check_optimizer(model, optimizer)
    if session.strategy.server_holds_weights:
        check_served(optimizer, selection)
    if session.strategy.schedule_object().apply != "step":
        check_crossing(session.strategy, optimizer, selection)
    if isinstance(session.strategy.sync_mode(), Averages):
        check_averaging(session.strategy, optimizer, options)
    if not session.strategy.sync_mode().merges and optimizer is not None:
        check_by_itself(session.strategy, group_values(optimizer.param_groups), selection)
    return selection


def _checked_together(
    session: Session, optimizer: torch.optim.Optimizer | None, selection: Selection, options: list[object]
) -> Probed:
    """What a trial of the optimizer shows; raises MismatchError where ranks have other models, options or values."""
    probed = Probed(False, ())
    if optimizer is not None and session.strategy.server_holds_weights:
        roles = session.strategy.roles
        probed = probe(optimizer, 1 if roles is None else roles.owners)
    if optimizer is not None:
        check_momentum(session.strategy, optimizer, probed.keeps_state)
    check_same_model(session, selection.tensors(), options)
    if optimizer is not None and session.strategy.server_holds_weights:
        check_same_own(session, probed.own, probed.changed)
        check_own_values(session.strategy, optimizer, probed.own)
    return probed


def release(session: Session, model: torch.nn.Module) -> Prepared:
    """End a model's part in a run that goes on; all workers call it. Raises UsageError for one that has none."""
    for one in session.family:
        for key, made in list(one.prepared.items()):
            if made.model is model:
                made.consolidate()
                one.leave_model(key)
                made.release(fetch=True)
                return made  # type: ignore[no-any-return]
    raise UsageError("syncline.release() takes a model that syncline.prepare() was given and that is not released yet")


def let_go(session: Session, model: torch.nn.Module) -> None:
    """Release a model that was prepared in another group of workers, or in that of all."""
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
    """Every rank updates its own weights, with an optimizer that may be none of ours, or that of several models."""
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
    """Raise GradientError where the optimizer trains something whose gradients nobody averages."""
    for tensor in foreign_to(replica.session.models, optimizer):
        if tensor.requires_grad:
            raise replica.fault(
                f"the optimizer holds a tensor of shape {tuple(tensor.shape)} that is not a parameter of any prepared"
                " model, so that its gradient would be each rank's own: give syncline.prepare() every model that the"
                " optimizer trains, a loss with parameters too"
            )


def _attach_served(
    session: Session, optimizer: torch.optim.Optimizer, probed: Probed, replica: TrainedReplica
) -> Prepared:
    """Others update the weights: the parameters move into storage that is pulled into, the optimizer asks for it."""
    staging, by_layer = replica.exchange.staging, session.strategy.schedule_object().apply == "layer"
    device = torch.device("cpu") if by_layer and staging.device is None else staging.device
    weights = Storage(replica.named, replica.storage.buckets, staging.allocate, device)
    parameters = [parameter for _, parameter in replica.named]
    _move_into(weights, parameters)
    replica.guard.forms = Forms(replica.named)  # those of views with gaps are others now
    replica.listeners.local_step = partial(_refuse_local_step, replica)
    plain = copy.copy(optimizer)  # of the user's class also when that is another
    vars(plain).update(vars(optimizer))
    learnt = records_of(optimizer, parameters) if session.rank == 0 or not session.group.servers else []
    build = partial(SlicedOptimizer, plain, parameters, probed.own)
    worker = attach_to_owners(session, model_of(replica, weights), build, learnt, apart=updates_alone(optimizer))
    replica.exchange.owners = worker
    together = session.strategy.sync_mode().merges and not by_layer
    own = OwnValues(optimizer, probed.own) if together else None
    client = Client(replica, weights, worker, keeps_state=probed.keeps_state, own=own)
    if by_layer:
        pull_by_layer(replica, optimizer, client, weights)
    take_over(optimizer, client)
    return Prepared(replica.model, optimizer, replica, client)


def _refuse_local_step(replica: TrainedReplica) -> None:
    raise replica.fault(
        f"sync={replica.session.strategy.sync.name} exchanges nothing in step {replica.steps}, and the servers that"
        " hold the weights have to be told every step: use ring or another allreduce, or ps(update=worker)"
    )


def _serve(session: Session, named: Named, optimizer: torch.optim.Optimizer | None, probed: Probed) -> None:
    layout = decide_layout(session, layers_of(named))
    gradients = Storage(named, layout.buckets, session.engine.allocate)
    compression = session.compression(layout.layers, layout.buckets, gradients.arrays)
    if optimizer is None or not session.strategy.server_holds_weights:
        Summing(session, layout, gradients.arrays, compression, partial(_lay_out, gradients)).serve()
        return
    weights = Storage(named, layout.buckets, session.engine.allocate)
    parameters = [parameter for _, parameter in named]
    _move_into(weights, parameters)
    arrays = Model(layout, gradients.arrays, weights.arrays, compression)
    build, learnt = partial(SlicedOptimizer, optimizer, parameters, probed.own), records_of(optimizer, parameters)

    def lay(buckets: Sequence[Bucket]) -> tuple[Sequence[Array], Sequence[Array]]:
        return _lay_out(gradients, buckets), _lay_out(weights, buckets)

    serve(session, arrays, build, learnt, lay, apart=updates_alone(optimizer))


def _lay_out(storage: Storage, buckets: Sequence[Bucket]) -> Sequence[Array]:
    storage.cut(buckets)
    return storage.arrays


def _copy_optimizer(
    session: Session, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], root: int
) -> None:
    """Give every rank the optimizer state of ``root``: a rank without batches has not made the last steps."""
    data = session.tell_all(pack(records_of(optimizer, parameters)) if session.rank == root else b"", root)
    if session.rank != root:
        records = unpack(data, session.name(root), session.member.number(root))
        for parameter, state in whole_state(records, parameters).items():
            optimizer.state[parameter] = state


def _move_into(weights: Storage, parameters: list[torch.nn.Parameter]) -> None:
    """Let the parameters live in contiguous storage, and their values be in the transport's memory.

    A server's own parameters may stay where they are: it works on the storage alone.
    """
    with torch.no_grad():
        for parameter, view in zip(parameters, weights.views, strict=True):
            view.copy_(parameter)
            if view.device == parameter.device:
                parameter.data = view
        for dtype, flat in weights.flat.items():
            if flat is not weights.resident[dtype]:
                flat.copy_(weights.resident[dtype])
