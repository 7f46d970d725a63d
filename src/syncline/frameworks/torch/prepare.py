"""``prepare``: from a model, an optimizer and a session to a replica, a served optimizer, or a server's loop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ...algorithms.ps import push_and_pull
from ...plan import Plan
from ...program import compile_program
from ...session import Session
from ...updates import Updates
from .agreement import check_same_model, copy_from_worker
from .intact import Forms
from .optimizer import give_back, put_together, take_over
from .options import Named, Options, Selection
from .records import pack, unpack
from .replica import Replica
from .serve import Coded, Planned, ShardServer, Traffic, serve_plan
from .served import Client, LocalOwners, Owners, RemoteOwners
from .shard import Shard, coded, planned, probe, records_of, whole_state
from .staging import Copier
from .storage import Storage, layers_of
from .supported import check_only_ours, check_optimizer, check_served


@dataclass(frozen=True)
class Prepared:
    """What ``prepare`` has made of a model on a worker; ``client`` is set when servers hold the weights."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    replica: Replica
    client: Client | None

    def release(self, fetch: bool = False) -> None:
        """Make model and optimizer the user's own again; ``fetch``: owners may be asked for the optimizer's state."""
        give_back(self.optimizer, fetch)
        self.replica.detach()


def prepare(
    session: Session,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Options = Options(),  # noqa: B008 - a frozen value
    *,
    copier: Copier | None = None,
) -> Prepared | None:
    """Check that all processes have the same model, start them from rank 0's values, and attach.

    On a server this serves until the workers have left and returns None. ``copier`` stands in for what copies between
    the model's device and the host.
    """
    check_only_ours(model)
    check_optimizer(model, optimizer)
    selection = Selection(model, options)
    holds_weights = session.strategy.server_holds_weights
    if holds_weights:
        check_served(optimizer, selection)
    if session.is_worker:
        put_together(session, optimizer)
    keeps_state = holds_weights and probe(optimizer)
    first_key = session.enter_model(model)
    check_same_model(session, selection.tensors(), options.agreed)
    copy_from_worker(session, [tensor.detach() for _, tensor in selection.tensors()])
    if not session.is_worker:
        _serve(session, selection.trained(), optimizer, holds_weights)
        return None
    attach = partial(Replica, session, model, options=options, first_key=first_key, copier=copier)
    if not holds_weights:
        replica = attach(session.bucket_program)
        replica.on_joined = partial(_copy_optimizer, session, optimizer, [item for _, item in replica.named])
        return Prepared(model, optimizer, replica, None)
    push, pull = _halves(session)
    program = compile_program(push, session.index)
    replica = attach(lambda _: program)
    staging = replica.staging
    weights = Storage(replica.named, replica.storage.buckets, staging.allocate, staging.device)
    parameters = [parameter for _, parameter in replica.named]
    _move_into(weights, parameters)
    replica.forms = Forms(replica.named)  # those of views with gaps are others now
    updates = None if replica.compression is None else Updates(replica.compression, weights.arrays)
    owners: Owners = RemoteOwners(session)
    if session.group.servers == 0:
        owners = LocalOwners(session, _shard(session, optimizer, parameters, weights, replica.storage, push, updates))
    pull_program = compile_program(pull, session.index)
    client = Client(session, replica, weights, owners, pull_program, updates, keeps_state=keeps_state)
    learnt = records_of(optimizer, parameters) if session.rank == 0 and session.group.servers else []
    take_over(optimizer, client)
    if learnt:  # as the weights, also where a server's script has not loaded it, or another
        owners.load(learnt)
    return Prepared(model, optimizer, replica, client)


def _halves(session: Session) -> tuple[Plan, Plan]:
    arguments = session.strategy.architecture.arguments
    return push_and_pull(session.group, servers=arguments["servers"], on=arguments["on"])


def _serve(session: Session, named: Named, optimizer: torch.optim.Optimizer, holds_weights: bool) -> None:
    layers = layers_of(named)
    buckets = session.strategy.schedule_object().buckets(layers)
    gradients = Storage(named, buckets, session.engine.allocate)
    compression = session.compression(layers, buckets, gradients.arrays)
    if not holds_weights:
        program = compile_program(session.strategy.plan(session.group), session.index)
        serve_plan(session, program, gradients, compression)
        return
    push, pull = _halves(session)
    weights = Storage(named, buckets, session.engine.allocate)
    parameters = [parameter for _, parameter in named]
    _move_into(weights, parameters)
    updates = None if compression is None else Updates(compression, weights.arrays)
    shard = _shard(session, optimizer, parameters, weights, gradients, push, updates)
    if shard is not None:
        traffic: Traffic = Planned(session, gradients, weights, push, pull)
        if compression is not None and updates is not None:
            traffic = Coded(session, weights, compression, updates)
        ShardServer(session, shard, traffic).serve()


def _shard(
    session: Session,
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.nn.Parameter],
    weights: Storage,
    gradients: Storage,
    push: Plan,
    updates: Updates | None,
) -> Shard | None:
    """This process's shard, with what the optimizer has learnt so far, when it owns anything."""
    if session.index not in push.owners:
        return None
    slices = planned(weights, push, session.index) if updates is None else coded(weights, updates)
    shard = Shard(optimizer, parameters, slices, gradients)
    shard.load(records_of(optimizer, parameters))
    return shard


def _copy_optimizer(
    session: Session, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], root: int
) -> None:
    """Give every rank the optimizer state of ``root``: a rank without batches has not made the last steps."""
    data = session.tell_all(pack(records_of(optimizer, parameters)) if session.rank == root else b"", root)
    if session.rank != root:
        for parameter, state in whole_state(unpack(data, session.name(root), root), parameters).items():
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
