"""The public calls: what scripts do with the session of their process, which ``process`` has."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np

from . import checkpoint
from .errors import NotBuiltError, UsageError
from .process import process
from .sampling import Sampler, sampler_of
from .sampling.order import SampleOrder
from .session.groups import WorkerGroup
from .session.groups import new_group as make_group
from .session.session import Session, Stats
from .wire.watch import LIVENESS_S

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from .frameworks.numpy import Function, Trainer, Update

    Model = TypeVar("Model", bound=torch.nn.Module)
    Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
    Group = WorkerGroup | DeviceMesh | ProcessGroup
    Tensors = TypeVar("Tensors", torch.Tensor, np.ndarray[Any, Any])


def init(
    strategy: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    interface: str | None = None,
    secret: str | bytes | None = None,
    timeout: float = 120.0,
    liveness: float = LIVENESS_S,
    progress: float = 30 * 60.0,
) -> None:
    """Join this run's processes.

    Under torchrun, ``syncline run``, mpirun or srun nothing has to be given. ``strategy`` defaults to
    ``SYNCLINE_STRATEGY`` and then to automatic choices; it fixes who is a worker and who a server. Those who start
    processes themselves give ``rank`` (from 0, servers last), ``world_size`` (all processes, servers included) and
    ``address`` (``host:port`` of rank 0, where the processes meet). ``interface`` is the network interface, or
    address, to listen on; by default the one that reaches rank 0. ``secret`` keeps strangers out;
    ``SYNCLINE_SECRET`` by default. Where the launcher counts servers in ``WORLD_SIZE`` (torchrun, ``env://``), it and
    ``RANK``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` are the workers' from here on.

    Limits in seconds: ``timeout`` for all processes to come, ``liveness`` for a peer without a sign of life,
    ``progress`` for an operation that does not move.
    """
    process.begin(
        strategy,
        rank=rank,
        world_size=world_size,
        address=address,
        interface=interface,
        secret=secret,
        timeout=timeout,
        liveness=liveness,
        progress=progress,
    )


def is_initialized() -> bool:
    """Whether ``init`` was called and ``shutdown`` not yet."""
    return process.joined is not None


def session() -> Session:
    """The session of this process; raises ClosedError before ``init`` and after ``shutdown``."""
    return process.session


def new_group(ranks: Sequence[int], timeout: float | None = None) -> WorkerGroup:
    """A group of some workers, for ``group=``; all workers call it, also those that are not in it.

    All give the same ranks, in whatever order, and make several groups in one order, as with ``torch.distributed``. A
    worker that calls it with other ranks, or does something else instead, is named by an error on all; so is one that
    has not come within ``timeout`` seconds. A worker that is not in the group has it too, with ``group.rank`` -1, and
    gets an error where it uses it.

    Within a group ranks count from 0, in ascending order: ``syncline.rank(group)``, ``root=0``. Groups may overlap, and
    two be used at once by two threads; where calls of two overlapping groups wait, ranks make them in one order.
    ``group.end()`` ends one.
    """
    return make_group(session(), ranks, timeout)


def rank(group: Group | None = None) -> int:
    """This worker's rank, from 0, and within a group that it is not in -1; a server answers with the last worker's."""
    return group.rank if isinstance(group, WorkerGroup) else process.within(group).rank


def local_rank() -> int:
    """This process's number on its host, from 0."""
    return session().local_rank


def world_size(group: Group | None = None) -> int:
    """The number of workers, of all or of ``group``; servers do not count."""
    return group.size if isinstance(group, WorkerGroup) else process.within(group).world_size


@overload
def prepare(
    model: Model,
    optimizer: None = None,
    *,
    unused: Literal["error", "zeros"] = "error",
    weight: float | Literal["batch"] | Callable[..., float] = 1,
    ignore: Iterable[str] = (),
    broadcast_buffers: bool = True,
    group: Group | None = None,
) -> Model: ...


@overload
def prepare(
    model: Model,
    optimizer: Optimizer,
    *,
    unused: Literal["error", "zeros"] = "error",
    weight: float | Literal["batch"] | Callable[..., float] = 1,
    ignore: Iterable[str] = (),
    broadcast_buffers: bool = True,
    group: Group | None = None,
) -> tuple[Model, Optimizer]: ...


@overload
def prepare(
    model: Mapping[str, Any], optimizer: Update | Function, *, group: Group | None = None
) -> tuple[dict[str, np.ndarray[Any, Any]], Trainer]: ...


def prepare(
    model: Any,
    optimizer: Any = None,
    *,
    unused: Literal["error", "zeros"] = "error",
    weight: float | Literal["batch"] | Callable[..., float] = 1,
    ignore: Iterable[str] = (),
    broadcast_buffers: bool = True,
    group: Group | None = None,
) -> Any:
    """Make a model and its optimizer part of the run; both are returned, the training loop stays as it is.

    Without an optimizer, which only servers that hold the weights need, and ``join``, the model alone is returned. An
    optimizer of several models is given with each. A model that was prepared before is prepared anew, from rank 0's
    values again, as when parameters have been frozen or added; what a codec had kept back is dropped.

    All ranks start from rank 0's values. From now on ``backward()`` ends with averaged gradients; under a parameter
    server ``optimizer.step()`` fetches the new weights. ``unused`` says what happens to parameters without a gradient:
    ``"error"`` names them, ``"zeros"`` counts them as zero.

    ``weight`` is how much a rank counts in the mean: a number, the same in every exchange, or, for losses that are
    means over batches whose sizes differ between ranks, ``"batch"`` (each batch counts by the first dimension of the
    first tensor given to the model) or a function of the model's arguments that gives what each batch counts.

    Parameters and buffers that ``ignore`` names stay each rank's own; with ``broadcast_buffers=False`` all buffers do.

    A dictionary of arrays, of NumPy or of whatever has DLPack or the buffer protocol and lies in the host's memory, is
    a model too, with an optimizer that has ``update(weights, gradient, state)``, or such a function. They are updated
    where they are; what is returned are NumPy's views of them, and an optimizer: ``produced(name, gradient)`` sends a
    gradient while backward goes on, ``step(gradients)`` those that are left, and updates the weights with the mean.

    With a ``group``, which ``new_group`` has given, the model is that of the group's ranks alone, who call this, and
    "all ranks" above are these. A 1-D DeviceMesh (``mesh["dp"]``) or a ProcessGroup of torch, whatever its backend, is
    a group too: its ranks make one of it, without others, the first time that they give it. A model that was prepared
    with another group is that one's no longer.

    A server process does not return from here: it serves until the workers have left, and ends with status 0.
    """
    here = process.within(group)
    here.check_fit()
    from .frameworks import adapter_of

    options = {"unused": unused, "weight": weight, "ignore": ignore, "broadcast_buffers": broadcast_buffers}
    handed = adapter_of(model).adapt(here, model, optimizer, options)
    if handed is None:
        shutdown()
        sys.exit(0)
    made = handed.prepared
    before = [known.model is model for known in process.prepared]
    process.prepared[:] = [
        made if same else known for known, same in zip(process.prepared, before, strict=True) if made or not same
    ]
    if made is not None and not any(before):
        process.prepared.append(made)
    return handed.result


def release(model: Model) -> None:
    """Make a prepared model of PyTorch, and its optimizer, the script's own again, and free what they took of the run.

    All ranks call it, between two steps, with the same model, and have one set of weights then; the run goes on. A run
    has up to 16 prepared models at a time, so scripts that train many one after the other (cross-validation, sweeps)
    call it behind each. Raises UsageError for a model that is not prepared, and under servers, which serve one model
    until the run ends.
    """
    here = _session_of_torch("release()")
    from .frameworks.torch import release as released

    if here.alone:  # nothing was done to it
        return
    made = released(here, model)
    process.prepared[:] = [known for known in process.prepared if known is not made]


def no_sync() -> contextlib.AbstractContextManager[None]:
    """Backward passes inside only accumulate local gradients (gradient accumulation); the next one exchanges them."""
    _session_of_torch("no_sync()")

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for made in process.prepared:
                stack.enter_context(made.replica.no_sync())
            yield

    return scope()


@contextlib.contextmanager
def join() -> Iterator[None]:
    """Around a training loop whose number of batches differs between ranks.

    A rank that has run out takes part in the others' exchanges with weight 0 until all have. At the end model and
    optimizer state of all ranks are those of the rank that trained longest; learning-rate schedulers are the script's.
    Where workers train by themselves and exchange weights (``local``, ``gossip``), model weights are then, on all, what
    ``consolidate`` makes of those that the ranks have.
    """
    here = _session_of_torch("join()")
    if any(
        made.client is not None and made.client.together and made.client.crossing is not None
        for made in process.prepared
    ):
        raise UsageError(
            "join() where owners of the weights update each bucket when it comes, as under schedule=priority, is not"
            " possible: a rank without batches cannot say with which values; use schedule=fixed"
        )
    if not here.alone and len(process.prepared) > 1:
        raise NotBuiltError("join() with several models is not built yet: give every rank the same number of batches")
    if any(made.optimizer is None for made in process.prepared):
        raise UsageError(
            "join() gives all ranks the optimizer state of the rank that trained longest: give syncline.prepare() the"
            " model and its optimizer"
        )
    if any(made.replica.synchronous_at_first for made in process.prepared):
        raise UsageError(
            f"join() under sync={here.strategy.sync.name}: a rank without batches makes no update in synchronous steps,"
            " and others train by themselves from there on; use sync=local, or give every rank as many batches"
        )
    if any(made.replica.normalises_over_ranks for made in process.prepared):
        raise UsageError(
            "join() with SyncBatchNorm: a rank without batches has nothing to add to the statistics of the others; use"
            " BatchNorm, or give every rank the same number of batches"
        )
    yield
    if not process.prepared:
        return
    from .frameworks.torch.prepare import shadow_until_all_joined

    for made in process.prepared:
        shadow_until_all_joined(made.replica, made.client)


def clip_grad_norm_(parameters: Any, max_norm: float, *, scaler: torch.amp.GradScaler | None = None) -> torch.Tensor:
    """Clip the averaged gradients to a Euclidean norm of ``max_norm`` between ``backward`` and ``step``; their norm.

    ``parameters`` is the model, or its parameters. Works under every strategy, also where servers hold the gradients.
    A GradScaler that the loss was scaled by is given as ``scaler``, in place of a call of its ``unscale_``.
    """
    import torch

    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    session()
    clients = [made.client for made in process.prepared if made.client is not None]
    ignored = {id(tensor) for tensor in found for made in process.prepared if made.replica.selection.ignores(tensor)}
    wanted = {id(tensor) for tensor in found if tensor.requires_grad} - ignored
    for client in clients:
        if wanted == {id(parameter) for parameter in client.parameters}:
            norm = client.clip(max_norm, 1.0 if scaler is None else scaler.get_scale())
            return torch.tensor(norm, dtype=client.parameters[0].dtype)
    if clients:
        raise UsageError("under a parameter server clip_grad_norm_ takes all parameters of one prepared model")
    if scaler is not None:
        for optimizer in {id(made.optimizer): made.optimizer for made in process.prepared if made.optimizer}.values():
            if any(id(tensor) in wanted for group in optimizer.param_groups for tensor in group["params"]):
                scaler.unscale_(optimizer)
    return torch.nn.utils.clip_grad_norm_(found, max_norm)


def flush() -> None:
    """Wait for whatever is under way between two steps: all weights are updated, on this rank, when it returns.

    Only schedules whose steps end in the next iteration (``priority``, ``split``, ``delayed``) leave something under
    way. Whatever looks at parameters does this by itself; call it before something that PyTorch does not tell of reads
    them: through tensors that share their memory and were made before, or in an extension. Each rank may call it alone.
    """
    session()
    for made in process.prepared:
        made.replica.flush()


def consolidate() -> None:
    """Let all workers have the same, newest weights, after training in which their replicas differ on the way.

    Under ``sync=asp`` and ``ssp`` each worker has the weights that it was sent last. This waits until all workers that
    have not left call it, between two steps, and until the owners of the weights have applied everything; then all
    pull. Where workers train by themselves, all get the mean of their weights, under ``easgd`` the centre; the run goes
    on as it would have, from there. Call it before what every rank shall see alike: a last evaluation, a checkpoint by
    hand. Evaluation never exchanges by itself. Where replicas are equal after every step, as under ``bsp``, it is
    ``flush()``. Models that were prepared with a group are brought together in it.
    """
    for here in session().family:
        for _, bring_together in sorted(here.consolidates.items()):
            bring_together()


def allreduce(tensor: Tensors, op: str = "mean", *, group: Group | None = None) -> Tensors:
    """Replace a tensor or array, on every worker, by the workers' ``mean`` or ``sum``; returns it.

    Here and below workers are those of ``group``, where one is given (``new_group``).
    """
    if op not in ("mean", "sum"):
        raise UsageError(f"op={op!r}: choose 'mean' or 'sum'")
    here, (flat, write_back) = process.within(group), _flat(tensor)
    here.allreduce(flat, average=op == "mean")
    write_back()
    return tensor


def broadcast(tensor: Tensors, root: int = 0, *, group: Group | None = None) -> Tensors:
    """Replace a tensor or array, on every worker, by that of rank ``root``, counted within the group; returns it."""
    here, (flat, write_back) = process.within(group), _flat(tensor)
    here.broadcast(flat, root)
    write_back()
    return tensor


def gather(data: bytes, *, group: Group | None = None) -> list[bytes]:
    """Every worker's bytes, in rank order, on every worker."""
    return process.within(group).gather(data)


def barrier(timeout: float | None = None, *, group: Group | None = None) -> None:
    """Wait until all workers are here; an error names those that are not after ``timeout`` seconds."""
    process.within(group).barrier(timeout)


def sampler(
    dataset: Sized | int,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    group: Group | None = None,
) -> Sampler:
    """Which samples of ``dataset``, or of a number of samples, this worker trains on; all workers call it.

    With ``batch_size`` it gives lists, for ``DataLoader(dataset, batch_sampler=)``, else indices, for
    ``DataLoader(dataset, batch_size=, sampler=)``. Under strategies whose workers exchange in step it splits an epoch
    as DistributedSampler does, into as many samples for each, a few of them twice where the number does not divide.
    Where each worker goes at its own pace (``asp``, ``ssp``, backup workers) all take their batches from one pool:
    every sample once per epoch, a slow worker fewer of them, and the epoch is over for all when the pool is empty. Each
    iteration is the next epoch, shuffled anew from ``seed``; ``set_epoch`` chooses. With a ``group`` its workers alone
    share the samples out, and call it.
    """
    samples = dataset if isinstance(dataset, int) else len(dataset)
    return sampler_of(process.within(group), SampleOrder(samples, batch_size, seed, shuffle))


def stats(*, group: Group | None = None) -> Stats:
    """Time blocked in Syncline and bytes moved, since ``init``, or what of them was for ``group``.

    A group's bytes are those of arrays and payloads, by rank in the run: connections are those of all groups.
    """
    return process.within(group).stats()


def state_dict() -> dict[str, Any]:
    """What Syncline itself has to remember for a resumed run, beside the model's and the optimizer's own state.

    Under a codec that keeps residuals, and where workers train by themselves and have weights of their own, all ranks
    have to call it, and every rank gets what all have: as many bytes as there are ranks times the model's. Where owners
    hold the weights, theirs are in it too: they know more than the workers have been told so far. Tensors and plain
    values, which ``torch.save`` takes. Of models that were prepared with a group, the state is that of its ranks: ranks
    of different groups have different states.
    """
    return checkpoint.save(_session_of_torch("state_dict()"), process.prepared)


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Take up what ``state_dict`` saved; refuses a state of another strategy, whose mathematics would differ.

    All ranks call it. Algorithms that ``architecture=auto`` had measured are used again, so that sums round as before,
    unless the number of workers is another one; so is the codec that ``codec=auto`` had chosen. What a codec had kept
    back is shared out where the number of workers is another one. A state without that warns: gradients of the last
    steps that had not been sent yet are lost.
    """
    checkpoint.load(_session_of_torch("load_state_dict()"), process.prepared, state)


def __getattr__(name: str) -> Any:
    """The hook of DistributedDataParallel, which is torch's: it is loaded when it is asked for."""
    if name in ("comm_hook", "hook_state"):
        from .torch_backend import hook

        return getattr(hook, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _session_of_torch(call: str) -> Session:
    """The session; raises NotBuiltError for a call that would pass over a model of another framework."""
    here = session()
    if any(all(known.model is not model for known in process.prepared) for model in here.models):
        raise NotBuiltError(
            f"{call} knows models of PyTorch only, and this run has one of another framework"
            + ("; its optimizer has state_dict() and load_state_dict()" if "state_dict" in call else "")
        )
    return here


def shutdown() -> None:
    """End this process's part in the run. Called by itself at the end of the interpreter; may be called again.

    Models and optimizers are the script's own again, and can be prepared in a later run. An optimizer whose state is
    on servers gets it back here, and not at the end of the interpreter.

    A failure of the run that no call has raised yet is raised here, when all is closed.
    """
    process.end(fetch=True)


def _flat(tensor: Any) -> tuple[np.ndarray[Any, Any], Callable[[], object]]:
    """A one-dimensional numpy array over the tensor's memory, or over a copy, and what writes the copy back."""
    if isinstance(tensor, np.ndarray):
        if not tensor.flags.writeable:
            raise UsageError("this array is read-only: the result could not be written into it")
        if tensor.flags.c_contiguous:
            return tensor.reshape(-1), lambda: None
        copy = np.ascontiguousarray(tensor)
        return copy.reshape(-1), lambda: np.copyto(tensor, copy)
    from .frameworks.torch.storage import flat_view

    return flat_view(tensor)
