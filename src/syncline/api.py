"""The public calls: one session per process, and what scripts do with it.

The only place that knows of *the* session of a process; everything below takes one as an argument. Ends by itself when
the interpreter ends; an exception that ends the script is told to the other ranks with its text.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np

from . import checkpoint
from .errors import ClosedError, NotBuiltError, PeerError, SynclineError, UsageError
from .launch import attendance
from .launch.connecting import alone, connect_session
from .launch.environment import Environment
from .launch.guard import end_with_launcher
from .launch.meeting import MeetingPoint, secret_bytes
from .launch.places import Variables
from .sampling import Sampler, sampler_of
from .sampling.order import Order
from .session.printing import watch_exceptions
from .session.session import Session
from .session.stats import Stats
from .strategy.strategy import Strategy
from .timeline.recording import SessionSpans, begin_recording
from .wire.saying import say
from .wire.watch import FAILED_STATUS, LIVENESS_S

if TYPE_CHECKING:
    import torch

    from .frameworks.numpy import Trainer, Update
    from .frameworks.torch import Prepared

    Model = TypeVar("Model", bound=torch.nn.Module)
    Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
    Tensors = TypeVar("Tensors", torch.Tensor, np.ndarray[Any, Any])

_session: Session | None = None
_prepared: list[Prepared] = []
_point: MeetingPoint | None = None
_variables = Variables()
_inits = 0
_recording: SessionSpans | None = None
_recordings = 0
_watching = False
_hooked = False


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
    global _session, _inits
    if _session is not None:
        raise UsageError("syncline.init() was called before: call syncline.shutdown() first")
    _watch_exceptions()
    secret_bytes(secret)
    environment = _variables.recognise(rank=rank, world_size=world_size, address=address)
    interface = interface or os.environ.get("SYNCLINE_INTERFACE")
    chosen = _choose(strategy, environment)
    with _recorded(environment.rank) as recording:
        if environment.world == 1 and chosen.servers == 0:
            _session = alone(chosen, recording)
        else:
            run = f"{environment.run_id}/{environment.restart}/{_inits}"
            _inits += 1  # even if this one fails: who comes late to it must not come to the next
            _session = connect_session(
                chosen,
                _meeting_point(environment),
                run,
                secret=secret,
                interface=interface,
                timeout=timeout,
                liveness_s=liveness,
                limit_s=progress,
                recording=recording,
            )
            _variables.count_workers(environment, chosen.servers)
    _watch_the_end(environment)  # the first to be called at the end: what was loaded on the way ends after it


@contextlib.contextmanager
def _recorded(process: int) -> Iterator[SessionSpans | None]:
    """Record the session that begins inside, where that is asked for; nothing stays of one that does not."""
    global _recording, _recordings
    recording = begin_recording(process, _recordings)
    try:
        yield recording
    except BaseException:
        if recording is not None:
            recording.remove()
        raise
    _recording, _recordings = recording, _recordings + 1


def _meeting_point(environment: Environment) -> MeetingPoint:
    """Where this process meets the others: made once, since a later session meets where the first one did."""
    global _point
    if _point is not None and _point.asked != environment:
        _point.close()
        _point = None
    if _point is None:
        _point = MeetingPoint(environment)
    return _point


def _choose(strategy: str | None, environment: Environment) -> Strategy:
    """The strategy asked for by the script or else by the launcher; servers that were started must be in it."""
    text = strategy if strategy is not None else environment.strategy
    started = environment.servers
    if text is None:
        return Strategy.parse(f"ps(servers={started})" if started else "")
    chosen = Strategy.parse(text)
    if started is not None and started != chosen.servers and environment.world > 1:
        raise UsageError(
            f"{str(chosen)!r} has {chosen.servers} server processes, {started} were started: use syncline run"
            f" --servers {chosen.servers}"
        )
    return chosen


def is_initialized() -> bool:
    """Whether ``init`` was called and ``shutdown`` not yet."""
    return _session is not None


def session() -> Session:
    """The session of this process; raises ClosedError before ``init`` and after ``shutdown``."""
    if _session is None:
        raise ClosedError("call syncline.init() first")
    _session.check_usable()
    return _session


def rank() -> int:
    """This worker's rank, from 0; a server answers with the last worker's."""
    return session().rank


def local_rank() -> int:
    """This process's number on its host, from 0."""
    return session().local_rank


def world_size() -> int:
    """The number of workers; servers do not count."""
    return session().world_size


@overload
def prepare(
    model: Model,
    optimizer: None = None,
    *,
    unused: Literal["error", "zeros"] = "error",
    weight: float | Literal["batch"] | Callable[..., float] = 1,
    ignore: Iterable[str] = (),
    broadcast_buffers: bool = True,
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
) -> tuple[Model, Optimizer]: ...


@overload
def prepare(
    model: Mapping[str, np.ndarray[Any, Any]], optimizer: Update
) -> tuple[dict[str, np.ndarray[Any, Any]], Trainer]: ...


def prepare(
    model: Any,
    optimizer: Any = None,
    *,
    unused: Literal["error", "zeros"] = "error",
    weight: float | Literal["batch"] | Callable[..., float] = 1,
    ignore: Iterable[str] = (),
    broadcast_buffers: bool = True,
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

    A dictionary of NumPy arrays is a model too, with an optimizer that has ``update(weights, gradient, state)``: what
    is returned are the arrays that train, and an optimizer whose ``step(gradients)`` averages the ranks' gradients
    first.

    A server process does not return from here: it serves until the workers have left, and ends with status 0.
    """
    here = session()
    from .frameworks import adapter_of

    options = {"unused": unused, "weight": weight, "ignore": ignore, "broadcast_buffers": broadcast_buffers}
    handed = adapter_of(model).adapt(here, model, optimizer, options)
    if handed is None:
        shutdown()
        sys.exit(0)
    made = handed.prepared
    if made is not None and any(known.model is model for known in _prepared):
        _prepared[:] = [made if known.model is model else known for known in _prepared]
    elif made is not None:
        _prepared.append(made)
    return handed.result


def no_sync() -> contextlib.AbstractContextManager[None]:
    """Backward passes inside only accumulate local gradients (gradient accumulation); the next one exchanges them."""
    _session_of_torch("no_sync()")

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for made in _prepared:
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
    if any(made.client is not None and made.client.together and made.client.crossing is not None for made in _prepared):
        raise UsageError(
            "join() where owners of the weights update each bucket when it comes, as under schedule=priority, is not"
            " possible: a rank without batches cannot say with which values; use schedule=fixed"
        )
    if not here.alone and len(_prepared) > 1:
        raise NotBuiltError("join() with several models is not built yet: give every rank the same number of batches")
    if any(made.optimizer is None for made in _prepared):
        raise UsageError(
            "join() gives all ranks the optimizer state of the rank that trained longest: give syncline.prepare() the"
            " model and its optimizer"
        )
    if any(made.replica.synchronous_at_first for made in _prepared):
        raise UsageError(
            f"join() under sync={here.strategy.sync.name}: a rank without batches makes no update in synchronous steps,"
            " and others train by themselves from there on; use sync=local, or give every rank as many batches"
        )
    if any(made.replica.normalises_over_ranks for made in _prepared):
        raise UsageError(
            "join() with SyncBatchNorm: a rank without batches has nothing to add to the statistics of the others; use"
            " BatchNorm, or give every rank the same number of batches"
        )
    yield
    if not _prepared:
        return
    from .frameworks.torch.joining import shadow_until_all_joined

    for made in _prepared:
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
    clients = [made.client for made in _prepared if made.client is not None]
    ignored = {id(tensor) for tensor in found for made in _prepared if made.replica.selection.ignores(tensor)}
    wanted = {id(tensor) for tensor in found if tensor.requires_grad} - ignored
    for client in clients:
        if wanted == {id(parameter) for parameter in client.parameters}:
            norm = client.clip(max_norm, 1.0 if scaler is None else scaler.get_scale())
            return torch.tensor(norm, dtype=client.parameters[0].dtype)
    if clients:
        raise UsageError("under a parameter server clip_grad_norm_ takes all parameters of one prepared model")
    if scaler is not None:
        for optimizer in {id(made.optimizer): made.optimizer for made in _prepared if made.optimizer}.values():
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
    for made in _prepared:
        made.replica.flush()


def consolidate() -> None:
    """Let all workers have the same, newest weights, after training in which their replicas differ on the way.

    Under ``sync=asp`` and ``ssp`` each worker has the weights that it was sent last. This waits until all workers that
    have not left call it, between two steps, and until the owners of the weights have applied everything; then all
    pull. Where workers train by themselves, all get the mean of their weights, under ``easgd`` the centre; the run goes
    on as it would have, from there. Call it before what every rank shall see alike: a last evaluation, a checkpoint by
    hand. Evaluation never exchanges by itself. Where replicas are equal after every step, as under ``bsp``, it is
    ``flush()``.
    """
    for _, bring_together in sorted(session().consolidates.items()):
        bring_together()


def allreduce(tensor: Tensors, op: str = "mean") -> Tensors:
    """Replace a tensor or array, on every worker, by the workers' ``mean`` or ``sum``; returns it."""
    if op not in ("mean", "sum"):
        raise UsageError(f"op={op!r}: choose 'mean' or 'sum'")
    flat, write_back = _flat(tensor)
    session().allreduce(flat, average=op == "mean")
    write_back()
    return tensor


def broadcast(tensor: Tensors, root: int = 0) -> Tensors:
    """Replace a tensor or array, on every worker, by that of rank ``root``; returns it."""
    flat, write_back = _flat(tensor)
    session().broadcast(flat, root)
    write_back()
    return tensor


def gather(data: bytes) -> list[bytes]:
    """Every worker's bytes, in rank order, on every worker."""
    return session().gather(data)


def barrier(timeout: float | None = None) -> None:
    """Wait until all workers are here; an error names those that are not after ``timeout`` seconds."""
    session().barrier(timeout)


def sampler(dataset: Sized | int, *, batch_size: int | None = None, seed: int = 0, shuffle: bool = True) -> Sampler:
    """Which samples of ``dataset``, or of a number of samples, this worker trains on; all workers call it.

    With ``batch_size`` it gives lists, for ``DataLoader(dataset, batch_sampler=)``, else indices, for
    ``DataLoader(dataset, batch_size=, sampler=)``. Under strategies whose workers exchange in step it splits an epoch
    as DistributedSampler does, into as many samples for each, a few of them twice where the number does not divide.
    Where each worker goes at its own pace (``asp``, ``ssp``, backup workers) all take their batches from one pool:
    every sample once per epoch, a slow worker fewer of them, and the epoch is over for all when the pool is empty. Each
    iteration is the next epoch, shuffled anew from ``seed``; ``set_epoch`` chooses.
    """
    samples = dataset if isinstance(dataset, int) else len(dataset)
    return sampler_of(session(), Order(samples, batch_size, seed, shuffle))


def stats() -> Stats:
    """Time blocked in Syncline and bytes moved, since ``init``."""
    return session().stats()


def state_dict() -> dict[str, Any]:
    """What Syncline itself has to remember for a resumed run, beside the model's and the optimizer's own state.

    Under a codec that keeps residuals, and where workers train by themselves and have weights of their own, all ranks
    have to call it, and every rank gets what all have: as many bytes as there are ranks times the model's. Where owners
    hold the weights, theirs are in it too: they know more than the workers have been told so far. Tensors and plain
    values, which ``torch.save`` takes.
    """
    return checkpoint.save(_session_of_torch("state_dict()"), _prepared)


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Take up what ``state_dict`` saved; refuses a state of another strategy, whose mathematics would differ.

    All ranks call it. Algorithms that ``architecture=auto`` had measured are used again, so that sums round as before,
    unless the number of workers is another one; so is the codec that ``codec=auto`` had chosen. What a codec had kept
    back is shared out where the number of workers is another one. A state without that warns: gradients of the last
    steps that had not been sent yet are lost.
    """
    checkpoint.load(_session_of_torch("load_state_dict()"), _prepared, state)


def __getattr__(name: str) -> Any:
    """The hook of DistributedDataParallel, which is torch's: it is loaded when it is asked for."""
    if name in ("comm_hook", "hook_state"):
        from .frameworks.torch.distributed import hook

        return getattr(hook, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _session_of_torch(call: str) -> Session:
    """The session; raises NotBuiltError for a call that would pass over a model of another framework."""
    here = session()
    if any(all(known.model is not model for known in _prepared) for model in here.models):
        raise NotBuiltError(f"{call} knows models of PyTorch only, and this run has one of NumPy")
    return here


def shutdown() -> None:
    """End this process's part in the run. Called by itself at the end of the interpreter; may be called again.

    Models and optimizers are the script's own again, and can be prepared in a later run. An optimizer whose state is
    on servers gets it back here, and not at the end of the interpreter.

    A failure of the run that no call has raised yet is raised here, when all is closed.
    """
    _end(fetch=True)


def _end(fetch: bool = False) -> None:
    global _session
    if _session is None:
        return
    ending, passing = _session, sys.exc_info()[1]
    try:
        for made in _prepared:
            made.release(fetch and passing is None, settle=passing is None)
    finally:
        _prepared.clear()
        _session = None
        failure = _close(ending, sys.exc_info()[1])
    if failure is not None and passing is None:
        raise failure


def _close(ending: Session, passing: BaseException | None) -> Exception | None:
    """End a session while an exception passes through, or none does; the failure that nobody has seen yet."""
    if isinstance(passing, Exception) and not isinstance(passing, PeerError):
        ending.fail(passing)  # the others shall read it, not a goodbye
    failure = ending.shutdown()
    if not ending.forked:
        attendance.leave()
    return failure


def _end_at_exit() -> None:
    """The end of the interpreter, where an exception would be printed and the status would stay 0."""
    try:
        _end()
    except SynclineError as error:
        say(f"syncline: ended: {error}\n")
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
                stream.flush()
        os._exit(FAILED_STATUS)


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


def _watch_the_end(environment: Environment) -> None:
    """Say goodbye at exit, tell the others of an exception, let go in forked children, and end with the launcher."""
    global _watching
    attendance.join()
    if _watching:
        return
    _watching = True
    end_with_launcher(environment)
    atexit.register(_end_at_exit)
    os.register_at_fork(after_in_child=_forget)


def _watch_exceptions() -> None:
    """Print an exception that ends the script so that it can be read among those of other ranks, and tell them."""
    global _hooked
    if not _hooked:
        _hooked = True
        watch_exceptions(lambda: _session)


def _forget() -> None:
    """In a forked child (a data loader's worker): the connections are the parent's."""
    if _session is not None:
        _session.member.forget_in_child()
    if _recording is not None:
        _recording.file.forget()
