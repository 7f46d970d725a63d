"""One worker's copy of the model: gradients go into buckets during backward and come back averaged when it ends.

A hook on each parameter fires when its gradient is complete. The gradient is moved (scaled) into its place in a
contiguous bucket and ``param.grad`` becomes a view of it; after ``zero_grad(set_to_none=True)`` that is the only copy.
When the last gradient of a bucket is there the bucket goes to the engine, in the same order on every rank. A callback
at the end of backward waits for all of them, so that what follows ``backward()`` (clipping, GradScaler, the step) sees
averaged gradients.

The mean is over samples: rank i's gradient counts with w_i / sum of w, w_i being the size of its batches since the last
exchange. Gradients are divided by the number of ranks on their way into the bucket; only when a ticket shows that
weights differ does the progress thread correct a bucket by w_i N / sum of w before it goes.

Buffers (batch statistics) of rank 0 are copied to all ranks with every exchange, as DistributedDataParallel does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch

from ...engine import Lane, Work
from ...errors import GradientError, NotBuiltError, UsageError
from ...kernels import cpu
from ...program import Program
from ...session import BUCKET_KEYS, JOINED, STEP, Meeting, Session
from .agreement import copy_from_worker, pack_bytes, tensors_of, unpack_bytes
from .storage import Storage, layers_of

Weight = Callable[..., float] | float | Literal["batch"]

_BUFFER_KEY = BUCKET_KEYS - 1


class Replica:
    """The hooks of one model. ``program`` is this rank's part in the exchange of a bucket.

    ``unused`` says what happens to parameters that get no gradient in a backward pass: an ``"error"`` that names them,
    or ``"zeros"``. ``weight`` is ``"batch"`` (the first dimension of the first tensor given to the model), a number,
    or a function of the model's arguments.
    """

    def __init__(
        self, session: Session, model: torch.nn.Module, program: Program, *, unused: str, weight: Weight
    ) -> None:
        self.session, self.model = session, model
        self.named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        _check_supported(model, self.named)
        schedule = session.strategy.schedule_object()
        self.layers = layers_of(self.named)
        self.storage = Storage(self.named, schedule.buckets(self.layers), session.engine.allocate)
        self.steps = 0
        self.exchanged = False  # True between the end of an exchange and the next backward
        self._program = program
        self._unused, self._weight = unused, weight
        self._schedule = schedule
        self._lane = Lane(schedule.in_flight)
        self._of_tensor: list[list[int]] = [[] for _ in self.named]
        for number, bucket in enumerate(self.storage.buckets):
            for part in bucket.slices:
                self._of_tensor[part.tensor].append(number)
        self._buffers = [tensor for name, tensor in tensors_of(model) if not isinstance(tensor, torch.nn.Parameter)]
        self._packed = session.engine.allocate(sum(buffer.nbytes for buffer in self._buffers), np.dtype(np.uint8))
        self._synchronising = True
        self._samples = 0.0
        self._forward_samples = 0.0
        self._running = False
        self._meeting: Meeting | None = None
        self._fired = [False] * len(self.named)
        self._pending: list[int] = []
        self._next = 0
        self._works: list[Work] = []
        self._handles = self._attach()
        self._reset()

    # The user's side.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate local gradients; the next one outside exchanges their sum."""
        before, self._synchronising = self._synchronising, False
        try:
            yield
        finally:
            self._synchronising = before

    def shadow_until_all_joined(self) -> None:
        """Take part in the others' steps with weight 0 until every rank has run out of batches."""
        while True:
            meeting = self.session.meet(JOINED, flags=self.steps)
            if meeting.work is None:
                return
            self.session.engine.wait(meeting.work)
            tickets = meeting.tickets()
            if all(ticket.kind == JOINED for ticket in tickets):
                break
            self._start_buffers(meeting)
            for number, array in enumerate(self.storage.arrays):
                array[...] = 0
                self._submit(number, meeting)
            self._wait()
            self._reset()
        steps = [ticket.flags for ticket in tickets]
        longest = steps.index(max(steps))
        if min(steps) < max(steps):
            with torch.no_grad():
                tensors = [tensor.detach() for _, tensor in tensors_of(self.model)]
                copy_from_worker(self.session, tensors, root=longest, everyone=False)

    def detach(self) -> None:
        """Remove the hooks; gradients keep their values."""
        for handle in self._handles:
            handle.remove()

    # Hooks.

    def _attach(self) -> list[Any]:
        handles: list[Any] = []
        for index, (_, parameter) in enumerate(self.named):
            handles.append(parameter.register_post_accumulate_grad_hook(_gradient_hook(self, index)))
        handles.append(self.model.register_forward_pre_hook(_before_forward(self), with_kwargs=True))
        handles.append(self.model.register_forward_hook(_after_forward(self)))
        return handles

    def before_forward(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Note how many samples this forward pass has."""
        if not torch.is_grad_enabled():
            return
        if self._weight == "batch":
            tensor = _first_tensor((arguments, keywords))
            self._forward_samples = 1.0 if tensor is None or tensor.dim() == 0 else float(tensor.shape[0])
        else:
            given = self._weight(*arguments, **keywords) if callable(self._weight) else self._weight
            self._forward_samples = float(given)
            if not self._forward_samples >= 0:
                raise UsageError(f"weight= gave {self._forward_samples} for this batch: weights are numbers from 0 up")

    def after_forward(self, output: Any) -> None:
        """When backward comes through this output, its samples count and the end of backward is ours."""
        if not torch.is_grad_enabled():
            return
        tensor = _first_tensor(output, lambda found: found.requires_grad)
        if tensor is None:
            return
        samples = self._forward_samples
        counted = False

        def on_backward(_: torch.Tensor) -> None:
            nonlocal counted
            if not counted:
                counted = True
                self.begin_backward(samples)

        tensor.register_hook(on_backward)

    def begin_backward(self, samples: float) -> None:
        """The first sign of a backward pass: from an output, or from a parameter when no output gave one."""
        self._samples += samples
        if self._synchronising and not self._running:
            self.session.check_usable()
            self._running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    def on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """A parameter's gradient is complete."""
        if not self._synchronising:
            return
        if not self._running:
            self.begin_backward(self._forward_samples or 1.0)
        if self._fired[index]:
            raise self.fault(
                f"the gradient of {self.named[index][0]!r} was changed after it was sent: it is produced twice in one"
                " backward pass (a shared parameter under re-entrant checkpointing?); use use_reentrant=False"
            )
        self._fired[index] = True
        self._move(index, parameter)
        if self._meeting is None:
            self._meeting = self._meet()
        for number in self._of_tensor[index]:
            self._pending[number] -= 1
        if self._schedule.release == "ready":
            self._submit_ready()

    # One backward pass.

    def _reset(self) -> None:
        self._running = False
        self._meeting = None
        self._fired = [False] * len(self.named)
        self._pending = [len(bucket.slices) for bucket in self.storage.buckets]
        self._next = 0
        self._works = []
        self._samples = 0.0

    def _move(self, index: int, parameter: torch.Tensor) -> None:
        """Put a gradient, divided by the number of ranks, where it belongs in its bucket."""
        gradient, view = parameter.grad, self.storage.views[index]
        assert gradient is not None
        if gradient.is_sparse:
            name = self.named[index][0]
            raise self.fault(f"the gradient of {name!r} is sparse, which cannot be exchanged: use sparse=False")
        share = 1.0 / self.session.world_size
        with torch.no_grad():
            if gradient.data_ptr() == view.data_ptr():
                view.mul_(share)
            else:
                torch.mul(gradient, share, out=view)
                parameter.grad = view

    def _meet(self) -> Meeting:
        if self.exchanged and self.on_second_backward is not None:
            self.on_second_backward()
        self._check_trained()
        meeting = self.session.meet(STEP, weight=self._samples)
        self._start_buffers(meeting)
        return meeting

    on_second_backward: Callable[[], None] | None = None
    """Called when a second exchange begins before the step of the first; a parameter server refuses that."""

    on_exchanged: Callable[[], None] | None = None
    """Called at the end of every exchange."""

    def _submit_ready(self) -> None:
        while self._next < len(self._pending) and self._pending[self._next] == 0:
            assert self._meeting is not None
            self._submit(self._next, self._meeting)
            self._next += 1

    def _submit(self, number: int, meeting: Meeting) -> None:
        bucket = self.storage.buckets[number]
        array = self.storage.arrays[number]
        self._works.append(
            self.session.engine.exchange(
                self._program,
                array,
                number,
                f"bucket {number} ({bucket.describe(self.layers)})",
                lane=self._lane,
                gate=meeting.work,
                before=lambda: self._correct(array, meeting),
                priority=self._schedule.priority(bucket),
            )
        )

    def _correct(self, array: np.ndarray, meeting: Meeting) -> None:
        """In the progress thread: weigh this rank's gradient by its share of the samples."""
        tickets = meeting.tickets()
        mine, total = tickets[self.session.rank], sum(ticket.weight for ticket in tickets)
        if mine.kind == STEP and total > 0:
            cpu.scale(array, mine.weight * len(tickets) / total)

    def _end_backward(self) -> None:
        """At the end of backward: nothing may be missing, everything has to arrive."""
        try:
            if self._meeting is None:
                self._meeting = self._meet()
            missing = [index for index, fired in enumerate(self._fired) if not fired]
            if missing:
                self._fill(missing)
            self._submit_ready()
            self._wait()
        except BaseException:
            self._reset()
            raise
        self.steps += 1
        self.exchanged = True
        self._reset()
        if self.on_exchanged is not None:
            self.on_exchanged()

    def _fill(self, missing: list[int]) -> None:
        if self._unused != "zeros":
            names = ", ".join(repr(self.named[index][0]) for index in missing[:8])
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise self.fault(
                f"{len(missing)} parameters got no gradient in this backward pass: {names}{more}. If that is meant,"
                ' pass unused="zeros" to syncline.prepare(), or freeze them before it'
            )
        for index in missing:
            parameter, view = self.named[index][1], self.storage.views[index]
            # A gradient kept from before the exchange (accumulated under no_sync) still counts.
            if parameter.grad is None:
                view.zero_()
                parameter.grad = view
            else:
                self._move(index, parameter)
            for number in self._of_tensor[index]:
                self._pending[number] -= 1

    def _wait(self) -> None:
        self.session.engine.wait(*self._works)
        if self._buffers and self.session.world_size > 1:
            unpack_bytes(self._packed, self._buffers)

    def _start_buffers(self, meeting: Meeting) -> None:
        """Copy the buffers of the first rank that takes part in this step to all ranks."""
        if not self._buffers or meeting.work is None:
            return
        pack_bytes(self._buffers, self._packed)

        def program() -> Program:
            kinds = [ticket.kind for ticket in meeting.tickets()]
            return self.session.program("broadcast", root=kinds.index(STEP))

        engine = self.session.engine
        self._works.append(engine.exchange(program, self._packed, _BUFFER_KEY, "buffers", gate=meeting.work))

    def _check_trained(self) -> None:
        trained = sum(parameter.requires_grad for parameter in self.model.parameters())
        if trained != len(self.named):
            raise self.fault(
                f"{trained} parameters require a gradient, {len(self.named)} did at syncline.prepare(): freeze and"
                " unfreeze before it, or prepare the model again"
            )

    def fault(self, text: str) -> GradientError:
        """An error of this rank that ends the run for all."""
        error = GradientError(f"{self.session.name(self.session.index)}: {text}")
        self.session.fail(error)
        return error


def _gradient_hook(replica: Replica, index: int) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        replica.on_gradient(index, parameter)

    return _eager(hook)


def _before_forward(replica: Replica) -> Callable[..., None]:
    def hook(_: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        replica.before_forward(arguments, keywords)

    return _eager(hook)


def _after_forward(replica: Replica) -> Callable[..., None]:
    def hook(_: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:
        replica.after_forward(output)

    return _eager(hook)


def _eager(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook that torch.compile leaves alone: what ``torch.compiler.disable`` marks, without loading the compiler."""
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    return hook


def _first_tensor(value: Any, wanted: Callable[[torch.Tensor], bool] = lambda _: True) -> torch.Tensor | None:
    """The first tensor in nested tuples, lists, mappings and dataclasses that is wanted."""
    if isinstance(value, torch.Tensor):
        return value if wanted(value) else None
    if isinstance(value, Mapping):
        value = list(value.values())
    elif hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    if isinstance(value, (tuple, list)):
        for item in value:
            found = _first_tensor(item, wanted)
            if found is not None:
                return found
    return None


def _check_supported(model: torch.nn.Module, named: list[tuple[str, torch.nn.Parameter]]) -> None:
    if not named:
        raise UsageError("this model has no parameter that requires a gradient: there is nothing to exchange")
    for name, parameter in named:
        if parameter.device.type != "cpu":
            raise NotBuiltError(f"parameter {name!r} is on {parameter.device}: only CPU models can be exchanged so far")
        if parameter.is_sparse:
            raise UsageError(f"parameter {name!r} is sparse, which cannot be exchanged")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            raise UsageError(
                f"module {name!r} makes sparse gradients, which cannot be exchanged: build it with sparse=False"
            )
