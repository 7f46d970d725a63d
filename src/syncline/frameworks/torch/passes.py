"""The forward and backward passes of a model: where its gradients come from, and what is done at each.

A hook on each parameter fires when its gradient is complete. It is moved into its place in a contiguous bucket, divided
on the way by the number of ranks unless each rank's is an update by itself, and ``param.grad`` becomes a view of it:
after ``zero_grad(set_to_none=True)`` that is the only copy (``Produced``). The state machine of the step is told, whose
answers are carried out (``training.model``); what it wants to be waited for at the end has arrived when ``backward()``
returns. The step's ticket, which says how much this rank counts (``samples``), goes with the first gradient, unless the
pass may still add to the weight.

A re-entrant checkpoint may produce a gradient several times in one backward pass (``backward``). Whether a model has
some shows in its first pass, which is therefore *held*: gradients are moved, but nothing is scaled or sent before the
pass ends. So is every later one if there were some.

A backward pass that makes no gradients of parameters (``torch.autograd.grad``) is none of ours.

``Passes`` are the half of a ``Replica`` that knows what a pass is; the other half knows which step it is, and is told
of the end of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ...errors import GradientError
from .backward import Backward
from .local import LocalSteps
from .options import Options
from .samples import Counting, Fixed, Samples
from .storage import Storage

if TYPE_CHECKING:
    from .replica import Replica

_NAMED = 8
"""So many names of parameters are in an error."""


class Passes:
    """Those of one replica, which hooks tell of; each rank's gradients count ``share`` in their sum."""

    def __init__(self, replica: Replica, options: Options, share: float) -> None:
        self._replica, self._share = replica, share
        self._fills_missing = options.unused == "zeros"
        self._backward = Backward(self._end_backward, self._given_up)
        self._samples: Samples | None = None
        self.counting: Counting
        """How much the gradients since the last exchange count."""
        if isinstance(options.weight, (int, float)):
            self.counting = Fixed(options.weight)
        else:
            self.counting = self._samples = Samples(options.weight, self._came_through_output)
        self.synchronising = True
        """False while the script has said that gradients are only to be added up here."""
        self._synchronises = self._alone = False  # the present backward pass is exchanged, or a step of the rank's own
        self._held = True  # nothing of a backward pass is sent before it ends
        self._touched = False  # the present backward pass has made a gradient
        self._produced = Produced(replica.named, replica.storage, replica.fault)
        self._untold: list[int] = []  # of those that have come, what the state machine does not know yet

    @property
    def looks_at_outputs(self) -> bool:
        """Whether it has to know what forward passes give."""
        return self._samples is not None

    def before_forward(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """A forward pass begins."""
        replica = self._replica
        replica.guard.check_only_ours()
        if replica.crossing is not None:
            replica.crossing.before_forward()
        if replica.averaging is not None:
            replica.averaging.before_forward()
        if torch.is_grad_enabled():
            replica.listeners.forward()
            replica.guard.check_first()
            if self._backward.running and torch._C._current_graph_task_id() == -1:
                self._backward.give_up()
            if self._samples is not None:
                self._samples.before_forward(arguments, keywords)

    def on_state_loaded(self, module: torch.nn.Module) -> None:
        """The script has loaded a state."""
        if module is self._replica.model:  # and no copy of it
            self._replica.on_state_loaded()

    def after_forward(self, output: Any) -> None:
        """When backward comes through this output, its samples count."""
        if torch.is_grad_enabled() and self._samples is not None and not self._samples.after_forward(output):
            raise self._replica.fault(
                f"the model gives a {type(output).__name__} in which no tensor was found, so that nothing says which"
                " batches a gradient is of: give tensors in tuples, lists, dictionaries or dataclasses, or give"
                " syncline.prepare() a number as weight="
            )

    def on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """A parameter's gradient is complete, or, in a pass that is held, some of it."""
        if torch._C._current_graph_task_id() not in self._backward.tasks:  # two calls less for each other gradient
            self._enter(index)
        if not self._touched:
            self._touch()
        gradient = parameter.grad
        if gradient is None or not self._synchronises:  # an autograd function may give None
            return
        times, produced = self._replica.exchange.times, self._produced
        if times is not None:
            times.produced(index)
        if not self._held:
            produced.check_first(index)
        if produced.place(index, parameter, gradient, self._local):
            self._untold.append(index)
            if not self._held and self.counting.complete:
                self._tell()

    def _touch(self) -> None:
        """The first gradient of a pass has come."""
        self._touched = True
        if not self._synchronises:
            return
        replica = self._replica
        if (local := self._local) is not None:
            local.forget()
        if replica.exchange.replaces and replica.exchange.on_replacing is None:  # with owners, behind the optimizer
            replica.replace_layout()
        self._produced.share = 1.0 if self._held or not replica.trained.machine.due else self._share

    @property
    def _local(self) -> LocalSteps | None:
        """What takes weights ahead by this worker's own gradients, where anything does."""
        crossing = self._replica.crossing
        return None if crossing is None else crossing.local

    # One backward pass.

    def _tell(self) -> None:
        """Let the state machine know which gradients have come, and do what it says."""
        trained = self._replica.trained
        for index in self._untold:
            if actions := trained.machine.produced(index):
                trained.do(actions)
        self._untold.clear()

    def _came_through_output(self) -> None:
        """The first sign of a backward pass, before any gradient."""
        if self._replica.hooks.attached:
            self._enter()

    def _enter(self, first: int | None = None) -> None:
        replica = self._replica
        if not self._backward.running:
            replica.session.check_usable()
            replica.guard.check_forms()
            replica.listeners.backward(first)
            replica.turn(replica.trained.machine.begun)
            self._produced.storage = replica.storage
            # Set by scripts on the model, where they would set it on DistributedDataParallel's wrapper.
            synchronises = self.synchronising and getattr(replica.model, "require_backward_grad_sync", True)
            self._alone = synchronises and replica.averaging is not None and not replica.trained.machine.due
            self._synchronises = synchronises and not self._alone
        self._backward.enter()

    def _given_up(self) -> None:
        """The last backward pass ended with an exception that the script has caught."""
        replica = self._replica
        if replica.session.engine.error is not None:
            raise replica.session.engine.error
        if replica.trained.meeting is not None or (
            replica.trained.machine.due and self._produced.any and not self._held
        ):
            raise replica.fault(
                "the last backward pass ended with an exception after its exchange had begun; the other ranks wait for"
                " the rest of it: end the script instead of catching the exception"
            )
        replica.trained.machine.abandon()
        self.counting.drop()
        if replica.exchange.times is not None:
            replica.exchange.times.forget()
        self._forget()

    def reset(self) -> None:
        """The exchange is over."""
        self._backward.leave()
        self.counting.reset()
        self._forget()

    def _forget(self) -> None:
        self._touched = False
        self._replica.trained.forget()
        self._produced.forget()
        self._untold = []

    def weight(self) -> float:
        """How much this rank counts in an exchange."""
        weight = self.counting.weight
        if weight is None:
            raise self._replica.fault(
                "nothing says how much this rank counts: backward came through no output of the model's forward()"
                " (another method was called?). Give syncline.prepare() a number as weight="
            )
        return weight

    def _end_backward(self) -> None:
        """At the end of backward: nothing may be missing, everything has to arrive."""
        held, self._held = self._held, self._backward.nested
        if self._touched and self._synchronises:
            self._end_step(held)
        else:
            self._end_own()

    def _end_own(self) -> None:
        """The pass is not exchanged: it accumulates, is a step of the rank's own, or is none of ours."""
        replica = self._replica
        averaging = replica.averaging
        if replica.exchange.times is not None:
            replica.exchange.times.forget()
        if self._touched and not (averaging is not None and averaging.repeats):
            self.counting.keep()
        else:
            self.counting.drop()
        self._backward.leave()
        if self._touched and self._alone and averaging is not None and averaging.begin_step():
            replica.made_alone()
        self._touched = False
        if replica.crossing is not None:
            replica.crossing.backward_over()

    def _end_step(self, held: bool) -> None:
        """The pass makes a step; where it was ``held`` nothing of it has been sent so far."""
        replica = self._replica
        due = replica.trained.machine.due
        try:
            if not due:
                replica.listeners.local_step()
            self._send_rest(held and due)
        except BaseException as error:
            if replica.trained.begun:  # the others wait for the rest of this step
                replica.session.member.process.interrupted(error)
            replica.begin_anew()
            self.reset()
            raise
        meeting = replica.trained.meeting
        replica.made_step(meeting, due)
        self.reset()
        if replica.crossing is not None:
            replica.crossing.backward_over()
        replica.listeners.exchanged(meeting)

    def _send_rest(self, unshared: bool) -> None:
        """Send what has not gone yet, divided where it is ``unshared`` so far, and wait as the state machine says."""
        replica = self._replica
        self._produced.check_untouched()
        if unshared:
            self._produced.share_out(self._share)
        self._tell()
        if missing := replica.trained.machine.missing:
            if not self._fills_missing:
                self._produced.refuse_missing(missing)
            self._produced.share = self._share if replica.trained.machine.due else 1.0
            for index in missing:
                self._produced.fill(index, self._local)
            self._untold += missing
            self._tell()
        replica.trained.do(replica.trained.machine.backward_ended())
        replica.buffers.finish()


class Produced:
    """Which gradients of a pass have come, of the parameters ``named``, where they are put, and what none may be."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        storage: Storage,
        fault: Callable[[str], GradientError],
    ) -> None:
        self._named, self._fault = named, fault
        self.storage = storage
        """Where they are put, from one pass to the next."""
        self._share, self._factor = 1.0, torch.ones((), dtype=torch.float32, device="cpu")
        self._versions = [(0, 0)] * len(named)  # of parameters and gradients, as they were sent
        self.forget()

    def forget(self) -> None:
        """The pass is over."""
        self._came = [False] * len(self._named)

    @property
    def any(self) -> bool:
        """Whether one has come."""
        return True in self._came

    @property
    def share(self) -> float:
        """Of each gradient that comes, what is put there."""
        return self._share

    @share.setter
    def share(self, value: float) -> None:
        if value != self._share:
            self._share, self._factor = value, torch.tensor(value, dtype=torch.float32, device="cpu")

    def place(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor, local: LocalSteps | None) -> bool:
        """Put a gradient where it belongs in its bucket; whether it is the first of that parameter in the pass.

        ``local`` keeps it as it was.
        """
        if gradient.is_sparse or gradient.requires_grad:
            self._refuse(index, gradient)
        storage, share = self.storage, self._share
        moves = gradient.data_ptr() != storage.places[index]
        if local is not None:
            local.keep(index, gradient, copy=not moves)
        if moves:
            view = storage.fresh(index)
            # A number would be made a tensor in each call, which takes longer than the product of a small gradient.
            torch.mul(gradient, self._factor if gradient.dtype is torch.float32 else share, out=view)
            parameter.grad = gradient = view
        elif share != 1.0:
            gradient.mul_(share)
        self._versions[index] = parameter._version, gradient._version
        came, self._came[index] = self._came[index], True
        return not came

    def fill(self, index: int, local: LocalSteps | None) -> None:
        """Take a gradient that has not come for zeros, or for what was accumulated before, which still counts."""
        parameter = self._named[index][1]
        if parameter.grad is None:
            parameter.grad = self.storage.fresh(index).zero_()
        else:
            self.place(index, parameter, parameter.grad, local)

    def share_out(self, share: float) -> None:
        """Multiply all that have come."""
        for came, view in zip(self._came, self.storage.views, strict=True):
            if came:
                view.mul_(share)

    def check_first(self, index: int) -> None:
        """Raise GradientError for a gradient that comes a second time when the first has been sent."""
        if self._came[index]:
            raise self._fault(
                f"the gradient of {self._named[index][0]!r} was produced again after it had been sent: this backward"
                " pass has re-entrant checkpoints, the first one had none; use use_reentrant=False, or checkpoint from"
                " the first step on"
            )

    def check_untouched(self) -> None:
        """Raise GradientError where a parameter or its gradient was changed after the gradient had come."""
        places = self.storage.places
        for index, (name, parameter) in enumerate(self._named):
            gradient = parameter.grad
            if self._came[index] and (
                gradient is None
                or gradient.data_ptr() != places[index]
                or (parameter._version, gradient._version) != self._versions[index]
            ):
                raise self._fault(
                    f"{name!r} or its gradient was changed during backward, when the gradient had been sent: change"
                    " gradients and make optimizer steps after backward(), not in post-accumulate hooks"
                    " (Tensor.register_hook is called in time)"
                )

    def _refuse(self, index: int, gradient: torch.Tensor) -> NoReturn:
        """Raise GradientError for one that is sparse, or that can itself be differentiated."""
        name = self._named[index][0]
        if gradient.is_sparse:
            raise self._fault(f"the gradient of {name!r} is sparse, which cannot be exchanged: use sparse=False")
        raise self._fault(
            f"the gradient of {name!r} can itself be differentiated (create_graph=True), which an exchange would"
            " lose: use torch.autograd.grad() for inner derivatives and a plain backward() for the last one"
        )

    def refuse_missing(self, missing: Sequence[int]) -> NoReturn:
        """Raise GradientError for those that have not come."""
        names = ", ".join(repr(self._named[index][0]) for index in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise self._fault(
            f"{len(missing)} parameters got no gradient in this backward pass: {names}{more}. If that is meant,"
            ' pass unused="zeros" to syncline.prepare(), or freeze them before it'
        )
