"""Checks of models and optimizers before they are prepared: each unsupported one is refused by name, with a remedy.

``tell_of_slow_start`` warns of a combination that learns little at first. Optimizers such as Adam divide a gradient by
the size of earlier gradients. If a codec sends one element in a hundred, an element's gradients are zeros, and then the
sum of a hundred gradients. That sum moves the weight by about one step, where a hundred gradients would have moved it
by a hundred. With SGD nothing is lost, because its steps are proportional to the sums.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from ...codecs import Codec, Sparse, codec_of
from ...errors import UsageError
from ...nouns import Spec
from ...serving.owner import PushGroups
from ...serving.shard import Groups
from ...session.session import Session
from ...strategy.strategy import Strategy
from ...strategy.words import NONE, write
from ...sync import Averages, Mixes, momentum_with
from .buffers import unsynchronised
from .options import Named, Options, Selection
from .own_values import group_values
from .partial_optimizer import DECLARED, probe_parts, updates_alone
from .storage import layers_of

log = logging.getLogger("syncline")

_EITHER = "let only Syncline or only that library average it"


def checked_alone(
    strategy: Strategy,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    options: Options,
    others: Iterable[Prepared],
) -> Selection:
    """The parts of the model that take part. Raises UsageError for faults that this rank finds without the others.

    ``others`` are the models that were prepared before.
    """
    check_only_ours(model)
    selection = Selection(model, options)
    _check_normalisation(model, options)
    _check_held_once(model, selection.trained(), others)
    if optimizer is not None:
        _check_optimizer(model, optimizer)
    if strategy.server_holds_weights:
        _check_served(optimizer, selection)
    if strategy.schedule_object().apply != "step":
        check_deferred(strategy, optimizer, selection)
    if isinstance(strategy.sync_mode(), Averages):
        _check_averaging(strategy, optimizer, options)
    if not strategy.sync_mode().merges and optimizer is not None:
        _check_by_itself(strategy, group_values(optimizer.param_groups), selection)
    return selection


def check_only_ours(model: torch.nn.Module) -> None:
    """Raise UsageError if another library averages or shards the parameters already."""
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, DistributedDataParallel):
            raise UsageError(
                f"{where} is wrapped in DistributedDataParallel, which averages its gradients itself: {_EITHER}"
                " (ddp.module is the plain model)"
            )
        sharded = _loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
        if sharded is not None and isinstance(module, sharded):
            raise UsageError(f"{where} is sharded by FullyShardedDataParallel: {_EITHER}")
    tensor_type = _loaded("torch.distributed.tensor", "DTensor")
    for name, parameter in model.named_parameters():
        if tensor_type is not None and isinstance(parameter, tensor_type):
            raise UsageError(f"parameter {name!r} is a DTensor, distributed by torch (fully_shard?): {_EITHER}")


def check_parameters(model: torch.nn.Module, named: Named) -> None:
    """Raise UsageError if there is nothing to exchange, or if a parameter or gradient is sparse."""
    if not named:
        raise UsageError("this model has no parameter that requires a gradient: there is nothing to exchange")
    for name, parameter in named:
        if parameter.is_sparse:
            raise UsageError(f"parameter {name!r} is sparse, which cannot be exchanged")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            raise UsageError(
                f"module {name!r} makes sparse gradients, which cannot be exchanged: build it with sparse=False"
            )


def _check_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if the optimizer holds no parameter of the model: it belongs to another model."""
    foreign = foreign_to([model], optimizer)
    if foreign and len(foreign) == sum(len(group["params"]) for group in optimizer.param_groups):
        raise UsageError(
            f"the optimizer holds a tensor of shape {tuple(foreign[0].shape)} that is not a parameter of the model:"
            " give syncline.prepare() the model and the optimizer made from its parameters"
        )


def foreign_to(models: Iterable[object], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors in the optimizer that are not parameters of these models. Models of other frameworks are skipped."""
    modules = [model for model in models if isinstance(model, torch.nn.Module)]
    known = {id(parameter) for model in modules for parameter in model.parameters()}
    return [tensor for group in optimizer.param_groups for tensor in group["params"] if id(tensor) not in known]


def _check_normalisation(model: torch.nn.Module, options: Options) -> None:
    """Raise UsageError for SyncBatchNorm modules that cannot be taken over, or not with these options."""
    if unsynchronised(model) and not options.fixed:
        raise UsageError(
            "SyncBatchNorm sums gradients over all ranks during backward, before their weights are known:"
            " use batches of one size and a number as weight=, or BatchNorm"
        )


def _check_held_once(model: torch.nn.Module, named: Named, others: Iterable[Prepared]) -> None:
    """Raise UsageError if another prepared model has one of the parameters: both would average its gradient."""
    for other in others:
        held = set() if other.model is model else {id(parameter) for _, parameter in other.named}
        for name, parameter in named:
            if id(parameter) in held:
                raise UsageError(
                    f"parameter {name!r} is in a model that was prepared before, which averages its gradient already:"
                    " prepare one torch.nn.ModuleList of both models, or leave it to the first with ignore="
                )


def _check_served(optimizer: torch.optim.Optimizer | None, selection: Selection) -> None:
    """Raise UsageError if servers would lack an optimizer, or if it updates tensors that the servers do not hold."""
    if optimizer is None:
        raise UsageError(
            "a parameter server that holds the weights updates them with your optimizer: give syncline.prepare() the"
            " model and its optimizer, or use ps(update=worker) or an allreduce such as ring"
        )
    for tensor in foreign_to([selection.model], optimizer):
        raise UsageError(
            f"the optimizer holds a tensor of shape {tuple(tensor.shape)} that is not a parameter of the model, and a"
            " parameter server that holds the weights runs one optimizer per model: put all models into one"
            " torch.nn.ModuleList, or use ps(update=worker) or an allreduce such as ring"
        )
    for name, parameter in selection.model.named_parameters():
        if selection.ignores(parameter) and any(
            parameter is held for group in optimizer.param_groups for held in group["params"]
        ):
            raise UsageError(
                f"parameter {name!r} is ignored, but the optimizer, which runs on the parameter server, updates it:"
                " give it an optimizer of its own, or use ps(update=worker) or an allreduce such as ring"
            )


def _check_averaging(strategy: Strategy, optimizer: torch.optim.Optimizer | None, options: Options) -> None:
    """Raise UsageError if no optimizer would report updates of weights, or if the mode does not support ``weight=``."""
    sync = strategy.sync.name
    if isinstance(strategy.sync_mode(), Mixes) and options.weight != 1:
        raise UsageError(
            f"weight={options.weight!r}: under sync={sync} a worker averages its weights with a few others and does not"
            " know the sum of all weight= values; leave weight= out"
        )
    if optimizer is None:
        raise UsageError(
            f"sync={sync} exchanges weights when the optimizer has updated them: give syncline.prepare() the model and"
            " its optimizer"
        )


def check_deferred(strategy: Strategy, optimizer: torch.optim.Optimizer | None, selection: Selection) -> None:
    """Raise UsageError if this model and optimizer cannot end steps in the next iteration."""
    name = strategy.schedule.name
    if optimizer is None:
        raise UsageError(
            f"schedule={name} updates weights at their first use: give syncline.prepare() the model and its"
            " optimizer, or use schedule=fixed"
        )
    for group in optimizer.param_groups:
        check_held(name, selection.model, group)
    _check_apart(name, selection.trained())
    for parameter_name, parameter in selection.trained():
        if type(parameter) is not torch.nn.Parameter:
            raise UsageError(
                f"parameter {parameter_name!r} is a {type(parameter).__name__}, and schedule={name} can detect reads of"
                " plain torch.nn.Parameters only: use schedule=fixed"
            )
    kind = type(optimizer).__name__
    if not updates_alone(optimizer):
        if strategy.schedule_object().apply == "next_step":
            raise UsageError(
                f"schedule={name} makes a step of the optimizer during the next one, on a copy of the object, and"
                f" {kind}, which is not one of torch's own, may keep something in the object: declare in its class"
                f" {DECLARED} = True if it does not, or use schedule=fixed"
            )
        log.warning(
            "%s is not one of torch's own optimizers: its step waits for all gradients under schedule=%s. If its"
            " update of"
            " a parameter depends on that parameter alone, declare in its class %s = True",
            kind, name, DECLARED,
        )  # fmt: skip
    elif type(optimizer).__module__.split(".")[0] != "torch":
        probe_parts(optimizer)


def check_held(schedule: str, model: torch.nn.Module, group: dict[str, Any]) -> None:
    """Raise UsageError if a group of an optimizer with deferred updates holds tensors of another model."""
    known = {id(parameter) for parameter in model.parameters()}
    held = group["params"]
    for tensor in [held] if isinstance(held, torch.Tensor) else list(held):
        if id(tensor) not in known:
            raise UsageError(
                f"the optimizer holds a tensor of shape {tuple(tensor.shape)} that is not a parameter of the model, and"
                f" schedule={schedule} updates the weights of one model at their first use: put all models into one"
                " torch.nn.ModuleList, or use schedule=fixed"
            )


def _check_apart(schedule: str, named: Named) -> None:
    """Raise UsageError if two parameters share memory: a read of one would not complete the other."""
    places = sorted((p.untyped_storage().data_ptr(), p.data_ptr(), p.data_ptr() + p.nbytes, n) for n, p in named)
    for (storage, _, end, first), (other, begin, _, second) in pairwise(places):
        if storage == other and begin < end:
            raise UsageError(
                f"parameters {first!r} and {second!r} share memory, and schedule={schedule} updates each at its first"
                " read: let both be one torch.nn.Parameter, or use schedule=fixed"
            )


def _check_by_itself(strategy: Strategy, groups: Groups, selection: Selection) -> None:
    """Raise UsageError for anything that workers would have to do together in a step, under a mode without joint steps.

    Also refuses values of the optimizer's groups with which a single push cannot be applied.
    """
    mode, sync = strategy.sync_mode(), strategy.sync.name
    PushGroups(mode, 1, sync, momentum_with(mode, groups))(groups)
    if selection.buffers():
        raise UsageError(
            f"under sync={sync} there is no joint step in which rank 0's buffers (batch statistics) could be copied:"
            " give syncline.prepare() broadcast_buffers=False, so that every rank keeps its own"
        )
    if any(isinstance(module, torch.nn.SyncBatchNorm) for module in selection.model.modules()):
        raise UsageError(
            f"SyncBatchNorm sums over all ranks, which make no joint step under sync={sync}: use BatchNorm, or a"
            " synchronous mode"
        )


def check_own_values(strategy: Strategy, optimizer: torch.optim.Optimizer, own: Sequence[frozenset[str]]) -> None:
    """Raise UsageError if the optimizer changes values itself and the strategy cannot send them to workers."""
    if not any(own):
        return
    why = ""
    if not strategy.sync_mode().merges:
        why = f"under sync={strategy.sync.name} owners of the weights change them at every worker's push"
    elif strategy.schedule_object().apply != "step":
        why = f"under schedule={strategy.schedule.name} its update happens bucket by bucket"
    if why:
        what = "values of its parameter groups" if any(own[:-1]) else f"its attribute {min(own[-1])!r}"
        raise UsageError(
            f"{type(optimizer).__name__} changes {what} itself in step(), and {why}: use"
            " sync=bsp without backup workers, with schedule=fixed, ps(update=worker), or an optimizer that keeps its"
            " counters in its state"
        )


class Prepared(Protocol):
    """A model whose gradients are averaged, with its trained parameters."""

    model: torch.nn.Module
    named: Named


def _loaded(module: str, name: str) -> type | None:
    """A class of a torch module if the script has loaded that module; loading it here would cost time and memory."""
    found: type | None = getattr(sys.modules.get(module), name, None)
    return found


RARELY = 0.1
"""The share of sent elements below which the first steps suffer. At a tenth they do not."""


def tell_of_slow_start(session: Session, named: Named, optimizer: torch.optim.Optimizer | None) -> None:
    """Warn on rank 0 if a codec sends few elements from the first step on, and the optimizer is adaptive."""
    if session.index or session.strategy.codec == NONE or optimizer is None:
        return
    if not any("eps" in group for group in optimizer.param_groups):  # added to the divisor by adaptive optimizers
        return
    ratio = _rarest(session.strategy.codec_object(), [layer.spec for layer in layers_of(named)])
    if ratio >= RARELY:
        return
    steps, name = round(1 / ratio), type(optimizer).__name__
    log.warning(
        "%s: codec=%s sends an element once in %d steps or so, and %s learns little from that in the first ones: let"
        " the share fall slowly with codec=threshold(ratio=%s, warmup=%d), choose ratio=%s or more, or use SGD with"
        " momentum",
        session.name(session.index),
        write("codecs", session.strategy.codec),
        steps,
        name,
        ratio,
        steps,
        RARELY,
    )


def _rarest(codec: Codec, specs: list[Spec]) -> float:
    """The smallest share of a tensor's elements that the codec sends in the first step."""
    found = [codec_of(codec, spec) for spec in specs]
    shares = (one.codec.ratio_at(0) for one in found if isinstance(one.codec, Sparse) and not one.warmup)
    return min(shares, default=1.0)
