"""The public functions of the package, which act on the session of this process (``process``)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np

from . import checkpoint, recovery
from .errors import NotBuiltError, UsageError
from .global_batches import GlobalBatches, global_batches_of, log_of_pushes
from .process import Arguments, process
from .sampling import PoolBatches, SampleOrder, Sampler, sampler_of
from .saving import Checkpoints
from .session.groups import WorkerGroup
from .session.groups import new_group as make_group
from .session.session import Session
from .session.stats import Stats
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

elastic = recovery.run


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
    tls: str | None = None,
    check_replicas: int | None = None,
    check_finite: bool | Literal["warn"] | None = None,
    elastic: int | tuple[int, int | None] | None = None,
) -> None:
    """Join this run's processes.

    Under torchrun, ``syncline run``, mpirun or srun no arguments are needed. ``strategy`` defaults to
    ``SYNCLINE_STRATEGY`` and then to automatic choices; it determines which processes are workers and which are
    servers. To start processes by hand, pass ``rank`` (from 0, servers last), ``world_size`` (all processes, servers
    included) and ``address`` (``host:port`` of rank 0, where the processes meet). ``interface`` is the network
    interface, or address, to listen on; by default the one that reaches rank 0. ``secret`` keeps strangers out; it
    defaults to ``SYNCLINE_SECRET``. If the launcher counts servers in ``WORLD_SIZE`` (torchrun, ``env://``), this call
    changes it and ``RANK``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` to the workers' values.

    ``tls="on"`` encrypts all TCP connections with certificates made from the secret; a folder with ``ca.pem``,
    ``cert.pem`` and ``key.pem`` gives certificates instead. It defaults to ``SYNCLINE_TLS`` and then to ``"off"``.

    Time limits in seconds: ``timeout`` for all processes to join, ``liveness`` for a peer without heartbeats,
    ``progress`` for a stalled operation.

    Checks, all off by default (``docs/how-to/monitoring.md``): with ``check_replicas=n`` ranks compare their weights
    bit for bit before every n-th step, and with ``check_finite=True`` each looks at its gradients before they are sent.
    A fault ends the run with an error that names rank, parameter and step. ``check_finite="warn"`` only warns, as a
    GradScaler needs. The defaults are ``SYNCLINE_CHECK_REPLICAS`` and ``SYNCLINE_CHECK_FINITE``.

    ``elastic=(2, 8)`` says with how many workers ``syncline.elastic`` may go on: 2 to 8, or with ``elastic=2`` at least
    two. It is refused unless the launcher was started with ``--elastic`` and allows these numbers. It defaults to
    ``SYNCLINE_ELASTIC`` (``2:8``), which ``syncline run`` reads too.
    """
    process.begin(
        Arguments(
            strategy=strategy,
            rank=rank,
            world_size=world_size,
            address=address,
            interface=interface,
            secret=secret,
            timeout=timeout,
            liveness=liveness,
            progress=progress,
            tls=tls,
            check_replicas=check_replicas,
            check_finite=check_finite,
            elastic=elastic,
        )
    )


def is_initialized() -> bool:
    """Whether ``init`` was called and ``shutdown`` was not."""
    return process.joined is not None


def session() -> Session:
    """The session of this process. Raises ClosedError before ``init`` and after ``shutdown``."""
    return process.session


def new_group(ranks: Sequence[int], timeout: float | None = None) -> WorkerGroup:
    """Create a group of workers, to pass as ``group=``. Collective: workers outside the group call it too.

    All pass the same ranks, in any order, and create several groups in one order, as with ``torch.distributed``. If a
    worker passes other ranks, calls something else, or does not join within ``timeout`` seconds, all workers get an
    error that names it. A worker outside the group gets an object with ``group.rank`` -1, whose use is an error.

    Within a group ranks count from 0, in ascending order: ``syncline.rank(group)``, ``root=0``. Groups may overlap, and
    two threads may use two groups at once. Blocking calls of overlapping groups must be made in one order on all ranks.
    ``group.end()`` ends a group.
    """
    return make_group(session(), ranks, timeout)


def rank(group: Group | None = None) -> int:
    """This worker's rank, from 0; -1 within a group that it is not in. A server has the last worker's rank."""
    return group.rank if isinstance(group, WorkerGroup) else process.within(group).rank


def local_rank() -> int:
    """This process's number on its host, from 0."""
    return session().local_rank


def world_size(group: Group | None = None) -> int:
    """The number of workers, of all or of ``group``. Servers do not count."""
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
    """Make a model and its optimizer part of the run. Returns both; the training loop stays as it is.

    Without an optimizer, which only servers that hold the weights and ``join`` need, only the model is returned. An
    optimizer of several models is passed with each. Preparing a model again, for example after freezing or adding
    parameters, starts from rank 0's values and drops the codec's residuals.

    All ranks start from rank 0's values. From then on ``backward()`` ends with averaged gradients; under a parameter
    server ``optimizer.step()`` fetches the new weights. ``unused`` controls parameters without a gradient: ``"error"``
    names them, ``"zeros"`` counts their gradients as zero.

    ``weight`` is the weight of a rank in the mean. A number applies to every exchange. For losses that are means over
    batches whose sizes differ between ranks, ``"batch"`` weighs each batch by the first dimension of the first tensor
    passed to the model, and a function computes each batch's weight from the model's arguments.

    Parameters and buffers named in ``ignore`` stay local to each rank, and with ``broadcast_buffers=False`` so do all
    buffers.

    A model can also be a dictionary of arrays, of NumPy or of any type with DLPack or the buffer protocol in host
    memory. Its optimizer is a function, or an object with ``update(weights, gradient, state)``. The arrays are updated
    in place. Returns NumPy views of them and an optimizer: ``produced(name, gradient)`` sends a gradient during
    backward; ``step(gradients)`` sends the remaining ones and updates the weights with the mean.

    With a ``group`` from ``new_group`` the model belongs to the group's ranks alone. They make this call, and "all
    ranks" above means them. A 1-D DeviceMesh (``mesh["dp"]``) or a ProcessGroup of torch, with any backend, also works:
    its ranks create the group, without other ranks, on first use. A model of another group leaves it.

    On a server this call does not return: it serves until the workers have left, and exits with status 0.
    """
    process.within(group).check_fit()
    from .frameworks import adapter_of

    options = {"unused": unused, "weight": weight, "ignore": ignore, "broadcast_buffers": broadcast_buffers}
    handed = recovery.served(lambda: adapter_of(model)(process.within(group), model, optimizer, options))
    if handed is None:
        process.leave()
    made = handed.prepared
    before = [known.model is model for known in process.prepared]
    process.prepared[:] = [
        made if same else known for known, same in zip(process.prepared, before, strict=True) if made or not same
    ]
    if made is not None and not any(before):
        process.prepared.append(made)
    return handed.result


def release(model: Model) -> None:
    """Undo ``prepare`` for a PyTorch model and its optimizer, and free their resources.

    Collective, between two steps, with the same model on all ranks, which then have equal weights; the run continues. A
    run has at most 16 prepared models at a time, so scripts that train many models in sequence (cross-validation,
    sweeps) call it after each. Raises UsageError for a model that is not prepared, and under servers, which serve one
    model for the whole run.
    """
    here = _session_of_torch("release()")
    from .frameworks.torch import release as released

    if here.alone:  # there is nothing to undo
        return
    made = released(here, model)
    process.prepared[:] = [known for known in process.prepared if known is not made]


def no_sync() -> contextlib.AbstractContextManager[None]:
    """Let backward passes in this block only accumulate local gradients; the next pass after it exchanges them."""
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
    """Wrap a training loop whose number of batches differs between ranks.

    A rank without further batches takes part in the others' exchanges with weight 0 until all are done. Afterwards all
    ranks have the model and optimizer state of the rank that trained longest; learning-rate schedulers are left to the
    script. If workers train locally and exchange weights (``local``, ``gossip``), all then have the weights that
    ``consolidate`` computes.
    """
    here = _session_of_torch("join()")
    if any(
        made.client is not None and made.client.owned.together and made.client.deferred is not None
        for made in process.prepared
    ):
        raise UsageError(
            "join() is not possible if owners of the weights update each bucket on arrival, as under"
            " schedule=priority: a rank without batches has no optimizer values to send; use schedule=fixed"
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
            f"join() under sync={here.strategy.sync.name}: a rank without batches makes no update in synchronous"
            " steps, and the others train alone from then on; use sync=local, or give every rank the same number of"
            " batches"
        )
    if any(made.replica.normalises_over_ranks for made in process.prepared):
        raise UsageError(
            "join() with SyncBatchNorm: a rank without batches cannot contribute to the statistics; use BatchNorm, or"
            " give every rank the same number of batches"
        )
    yield
    if not process.prepared:
        return
    from .frameworks.torch.prepare import shadow_until_all_joined

    for made in process.prepared:
        shadow_until_all_joined(made.replica, made.client)


def clip_grad_norm_(parameters: Any, max_norm: float, *, scaler: torch.amp.GradScaler | None = None) -> torch.Tensor:
    """Clip the averaged gradients to a Euclidean norm of ``max_norm``, between ``backward`` and ``step``. Returns the
    norm.

    ``parameters`` is the model, or its parameters. Works under every strategy, even if servers hold the gradients. Pass
    a GradScaler that scaled the loss as ``scaler`` instead of calling its ``unscale_``.
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
    """Wait for everything in flight between two steps. Afterwards all weights are up to date on this rank.

    Only schedules whose steps end in the next iteration (``priority``, ``split``, ``delayed``) leave anything in
    flight, and reading parameters waits automatically. Call it before reads that PyTorch cannot intercept: through
    older tensors that share their memory, or in an extension. Each rank may call it alone.
    """
    session()
    for made in process.prepared:
        made.replica.flush()


def consolidate() -> None:
    """Give all workers the same, newest weights after training in which their replicas differ.

    Under ``sync=asp`` and ``ssp`` each worker has the weights that it received last. This call waits until all
    remaining workers make it, between two steps, and until the owners of the weights have applied every push; then all
    workers pull. If workers train locally, all get the mean of their weights, under ``easgd`` the centre, and the run
    continues from there. Call it before anything that must be equal on all ranks: a final evaluation, a manual
    checkpoint. Evaluation itself never exchanges. If replicas are equal after every step, as under ``bsp``, this is
    ``flush()``. Models that were prepared with a group are consolidated within it.
    """
    for here in session().family:
        for _, bring_together in sorted(here.consolidates.items()):
            bring_together()


def allreduce(tensor: Tensors, op: str = "mean", *, group: Group | None = None) -> Tensors:
    """Replace a tensor or array, on every worker, by the workers' ``mean`` or ``sum``, and return it.

    Here and below, ``group`` limits the call to the workers of a group (``new_group``).
    """
    if op not in ("mean", "sum"):
        raise UsageError(f"op={op!r}: choose 'mean' or 'sum'")
    here, (flat, write_back) = process.within(group), _flat(tensor)
    here.allreduce(flat, average=op == "mean")
    write_back()
    return tensor


def broadcast(tensor: Tensors, root: int = 0, *, group: Group | None = None) -> Tensors:
    """Replace a tensor or array, on every worker, by the one on rank ``root`` within the group, and return it."""
    here, (flat, write_back) = process.within(group), _flat(tensor)
    here.broadcast(flat, root)
    write_back()
    return tensor


def gather(data: bytes, *, group: Group | None = None) -> list[bytes]:
    """Every worker's bytes, in rank order, on every worker."""
    return process.within(group).gather(data)


def barrier(timeout: float | None = None, *, group: Group | None = None) -> None:
    """Wait until all workers are here. After ``timeout`` seconds an error names the missing ones."""
    process.within(group).barrier(timeout)


@overload
def sampler(
    dataset: Sized | int,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    group: Group | None = None,
) -> Sampler | PoolBatches: ...


@overload
def sampler(
    dataset: Sized | int,
    *,
    global_batch: int,
    drop_last: bool = False,
    seed: int = 0,
    shuffle: bool = True,
    group: Group | None = None,
) -> GlobalBatches: ...


def sampler(
    dataset: Sized | int,
    *,
    batch_size: int | None = None,
    global_batch: int | None = None,
    drop_last: bool = False,
    seed: int = 0,
    shuffle: bool = True,
    group: Group | None = None,
) -> Sampler | PoolBatches | GlobalBatches:
    """The samples of ``dataset`` (or a number of samples) that this worker trains on. Collective.

    With ``global_batch`` a step of all workers together trains on that many samples: the same ones in every step for
    any number of workers. It yields this worker's part of each batch, for ``DataLoader(dataset, batch_sampler=)``.
    Call ``commit()`` after every ``optimizer.step()``; ``state_dict()`` has the position, and a run with another number
    of workers continues exactly there. ``drop_last`` leaves out the last, smaller batch of an epoch.

    With ``batch_size`` it yields lists, for ``DataLoader(dataset, batch_sampler=)``, else indices, for
    ``DataLoader(dataset, batch_size=, sampler=)``. If the strategy's workers exchange in lockstep, an epoch is split
    into equal shares as in DistributedSampler; a few samples repeat if the number does not divide evenly. If each
    worker goes at its own pace (``asp``, ``ssp``, backup workers), all take their batches from one pool: every sample
    occurs once per epoch, a slow worker gets fewer, and the epoch ends for all when the pool is empty. Each iteration
    is the next epoch, shuffled again from ``seed``; ``set_epoch`` selects an epoch. With a ``group`` its workers alone
    share the samples and call it.
    """
    samples = dataset if isinstance(dataset, int) else len(dataset)
    order = SampleOrder(samples, batch_size, seed, shuffle, global_batch, drop_last)
    here = process.within(group)
    return sampler_of(here, order, log_of_pushes(here)) if global_batch is None else global_batches_of(here, order)


def stats(*, group: Group | None = None) -> Stats:
    """The time blocked in Syncline and the bytes moved since ``init``, in the run or in ``group``.

    A group counts the bytes of arrays and payloads, by rank in the run; all groups share the connections.
    """
    return process.within(group).stats()


def checkpoints(folder: str | os.PathLike[str], *, keep: int = 2, group: Group | None = None) -> Checkpoints:
    """The checkpoints of this run in ``folder``, of which the newest ``keep`` stay.

    ``save(step, state)`` writes the state (tensors, arrays, plain values, nested) in the background, each rank a part
    of its tensors, as safetensors files with checksums. ``load()`` returns step and state of the newest complete one,
    for any number of ranks, or None. ``wait()`` waits for the last save. All three are collective. The folder may be on
    a file system that all ranks share, or on each host.
    """
    return Checkpoints(lambda: process.within(group), folder, keep)


def state_dict() -> dict[str, Any]:
    """Syncline's own state for a checkpoint, besides the states of model and optimizer.

    Under a codec with residuals, and if workers train locally with weights of their own, all ranks must call it, and
    every rank gets the states of all: as many bytes as ranks times the model's size. If owners hold the weights, it
    includes the owners' weights, which are more precise than the workers'. It consists of tensors and plain values, as
    ``torch.save`` accepts. For models prepared with a group, it contains the states of the group's ranks and differs
    between groups.
    """
    return checkpoint.save(_session_of_torch("state_dict()"), process.prepared)


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Restore what ``state_dict`` saved. Refuses the state of a strategy with different mathematics.

    Another architecture, such as a parameter server in place of a ring, is no such difference: weights and steps go on.

    Collective. The algorithms that ``architecture=auto`` had measured are reused, so that sums round as before, unless
    the number of workers has changed; so is the choice of ``codec=auto``. A codec's residuals are redistributed if the
    number of workers has changed. A state without residuals causes a warning: unsent gradients of the last steps are
    lost.
    """
    checkpoint.load(_session_of_torch("load_state_dict()"), process.prepared, state)


def __getattr__(name: str) -> Any:
    """Load the hook of DistributedDataParallel, which imports torch, on first use."""
    if name in ("comm_hook", "hook_state"):
        from .torch_backend import hook

        return getattr(hook, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _session_of_torch(call: str) -> Session:
    """The session. NotBuiltError for a call that would ignore a model of another framework."""
    here = session()
    if any(all(known.model is not model for known in process.prepared) for model in here.models):
        raise NotBuiltError(
            f"{call} supports only models of PyTorch, but this run has a model of another framework"
            + ("; its optimizer has state_dict() and load_state_dict()" if "state_dict" in call else "")
        )
    return here


def shutdown() -> None:
    """End this process's part in the run. Called automatically at exit; may be called again.

    Models and optimizers belong to the script again and can be prepared in a later run. An optimizer whose state is on
    servers gets it back here, but not at exit.

    Raises a failure of the run that no call has raised yet, after closing everything.
    """
    process.end(fetch=True)


def _flat(tensor: Any) -> tuple[np.ndarray[Any, Any], Callable[[], object]]:
    """A one-dimensional numpy array over the tensor's memory or a copy, and the function that writes a copy back."""
    if isinstance(tensor, np.ndarray):
        if not tensor.flags.writeable:
            raise UsageError("this array is read-only: the result cannot be written into it")
        if tensor.flags.c_contiguous:
            return tensor.reshape(-1), lambda: None
        copy = np.ascontiguousarray(tensor)
        return copy.reshape(-1), lambda: np.copyto(tensor, copy)
    from .frameworks.torch.storage import flat_view

    return flat_view(tensor)
