"""Workers that train by themselves and exchange weights after some updates: one model's side of it.

Such a step is a plain one: gradients stay where autograd has put them, and the optimizer is called as ever, or not, as
GradScaler decides. When it has run after a step of which the sync mode says so, weights are exchanged and waited for.
Where it has not been called, that is done before the model's next forward pass in training, and where a GradScaler has
left the call out, before any other call at which workers meet. A step is a backward
pass outside ``no_sync``, or what one call of the optimizer makes of several (LBFGS). So all ranks count alike whatever
their gradients are.

What travels (``agreed``) lies in the buckets of the strategy's schedule, which gradients of such steps do not use. The
state machine of ``engine.step`` says when, the sync mode what becomes of it.

Evaluation exchanges nothing, nor does the end. ``consolidate`` gives all workers the same weights; the run's course
stays what it would be without it: what was agreed on, and what is counted, are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from ...compression.saved import Saved
from ...errors import UsageError
from ...session.layout import gather_saved
from ...session.tickets import AVERAGE, CONSOLIDATE, JOINED, Meeting, step_argument
from .agreed import Exchanged, Tensors
from .buffers import MeanBuffers
from .eager import eager
from .replica import Replica
from .skipped import Telling
from .storage import as_bytes


class Averaging:
    """When a model's weights are exchanged. ``weights`` is what of them travels; all workers make it together."""

    def __init__(self, replica: Replica, weights: Exchanged) -> None:
        self._replica, self._weights = replica, weights
        replica.listeners.loaded = weights.anew
        staging = replica.exchange.staging
        self._buffers = MeanBuffers(replica.session, replica.selection, staging, replica.first_key, replica.fault)
        self._in_step = self._counted = False  # the optimizer has been called; and has made a step of its own since
        self._follows_exchange = False
        self._scaled = False  # a GradScaler has come with the optimizer, which has not been called since
        self._telling: Telling | None = None
        self.since = 0
        """How many steps have been made since weights were exchanged last."""

    @property
    def alike(self) -> bool:
        """Whether all workers count alike, whatever they have seen."""
        return self._weights.alike

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Be told when the optimizer runs."""
        before, after = eager(lambda _, *given: self._before_step(*given)), eager(lambda *_: self._after_step())
        self._replica.hooks.keep([optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)])
        self._telling = Telling(optimizer, self._note_scaler)
        self._replica.session.member.before_calls[self._replica.first_key] = self._catch_up

    def detach(self) -> None:
        """The run is over for this model."""
        if self._telling is not None:
            self._telling.remove()
            self._replica.session.member.before_calls.pop(self._replica.first_key, None)

    # What happens to the model.

    @property
    def repeats(self) -> bool:
        """Whether backward passes evaluate the step again that the optimizer, which is running, has begun."""
        return self._in_step and self._counted

    def begin_step(self) -> bool:
        """A backward pass of the worker's own has ended: whether it is a step, and no further part of one."""
        if self.repeats:
            return False
        self._counted, self._scaled = self._in_step, False
        if self._follows_exchange:  # all have the same weights still: the optimizer is called after this
            self._weights.anew()
            self._follows_exchange = False
        self.since += 1
        return True

    def exchanged(self) -> None:
        """Gradients have been: weights stay those that all have."""
        self._follows_exchange = True

    def _before_step(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any] | None:
        self._in_step, self._counted, self._scaled = True, False, False
        closure = keywords.get("closure", arguments[1] if len(arguments) > 1 else None)
        if closure is None:
            return None
        return (arguments[0], partial(self._evaluate, closure)), {}

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call a closure; when it raises, the optimizer has ended, and tells nobody."""
        try:
            return closure()
        except BaseException:
            self._in_step = False
            raise

    def _after_step(self) -> None:
        self._in_step = False
        self.settle()

    def before_forward(self) -> None:
        """A forward pass begins: what the optimizer was not called for is exchanged now, if the pass is of training."""
        training = torch.is_grad_enabled() and self._replica.model.training
        if training and not self._in_step and torch._C._current_graph_task_id() == -1:
            self.settle()

    def _note_scaler(self) -> None:
        self._scaled = True

    def _catch_up(self) -> None:
        """The others have exchanged before they come to a call of the script's, if a GradScaler skips on this rank."""
        if self._scaled:
            self.settle()

    def settle(self) -> None:
        """Exchange what is to be exchanged before another step."""
        trained, session = self._replica.trained, self._replica.session
        if trained.machine.owes:
            session.check_usable()
            actions = trained.machine.updated()
            with self._others_waiting():
                trained.do(actions)

    def shadow(self, meeting: Meeting, step: int) -> None:
        """Take part in the exchange that the others have come to after a step of theirs: this rank has not made it."""
        with self._others_waiting():
            self._replica.trained.shadow(AVERAGE, meeting, step)

    # Exchange.

    @property
    def weight(self) -> float:
        """What this rank counts in an exchange of weights: nothing where it has made no step since the last one."""
        return 1.0 if self.alike else self._replica.passes.weight() if self.since else 0.0

    @contextmanager
    def _others_waiting(self) -> Iterator[None]:
        """What is raised inside leaves the others waiting for the rest of an exchange, of which they are told."""
        try:
            yield
        except BaseException as error:
            self._replica.session.member.process.interrupted(error)
            raise

    @property
    def fingerprint(self) -> int:
        """What has to be the same on all workers for an exchange to make sense."""
        return self._weights.fingerprint

    def met(self, meeting: Meeting, step: int) -> None:
        """All come to exchange weights after that step: what of them travels goes into its buckets."""
        self._buffers.start(meeting, *(self._weights.mix(step) or ()))
        self._weights.put(1.0 / self._replica.session.world_size)

    def average(self, step: int) -> None:
        """All of it has come."""
        meeting = self._replica.trained.meeting
        assert meeting is not None
        self._check_alike(meeting)
        self._weights.take(step)
        self._buffers.finish()
        self._replica.passes.counting.reset()
        self._replica.exchange.exchanged(meeting)
        self.since = 0

    def _check_alike(self, meeting: Meeting) -> None:
        """Raise GradientError where ranks have gone on from different weights."""
        marks = [ticket.flags for ticket in meeting.tickets() if ticket.kind != JOINED]
        if len(set(marks)) > 1:
            raise self._replica.fault(
                "ranks have loaded different weights into the model since all agreed on some, so that what theirs"
                " differ by says nothing: load the same ones on all ranks, or syncline.load_state_dict() after them"
            )

    def _rest(self) -> None:
        """Before something that all workers do together between two steps."""
        self.settle()
        if self._follows_exchange:  # what they agree on is what they have
            self._weights.anew()

    def saved(self) -> dict[str, Any]:
        """What a resumed run has to know: of all workers, which call it together.

        Each worker's own weights and buffers are in it, as many bytes as there are workers times the model's, unless
        all have agreed on theirs.
        """
        self._rest()
        replica = self._replica
        mine: Saved = {"counted": np.array([self.weight])}
        if self.since or not self._weights.all_agree:
            mine |= {f"own/{name}": as_bytes(tensor.contiguous()).cpu().numpy() for name, tensor in self._tensors()}
        ranks = gather_saved(replica.session, mine)
        return {
            **self._weights.saved(),
            "since": self.since,
            "synchronous": self._follows_exchange,
            "counted": [float(rank["counted"][0]) for rank in ranks],
            "ranks": [self._own(rank) for rank in ranks],
        }

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return self._replica.selection.tensors()

    def _own(self, rank: Saved) -> Tensors:
        """A worker's own tensors, as it has told them; none where all agree."""
        if len(rank) == 1:
            return {}
        return {
            name: torch.from_numpy(rank[f"own/{name}"].copy()).view(tensor.dtype).view(tensor.shape)
            for name, tensor in self._tensors()
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from there; all workers call it with the same. Raises UsageError for the state of another model.

        Where there are more or fewer workers than there were, all begin with the mean of what these had.
        """
        ranks, session = saved["ranks"], self._replica.session
        try:
            self._weights.load(saved)
            each = [[rank.get(name) for rank in ranks] for name, _ in self._tensors()]
            with torch.no_grad():
                self._weights.give_agreed()
                for (_, tensor), of_ranks in zip(self._tensors(), each, strict=True):
                    _load_own(tensor, of_ranks, session.rank if len(ranks) == session.world_size else None)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"the agreed weights in this state are of another model: {error}") from error
        self.since, self._follows_exchange = int(saved["since"]), bool(saved["synchronous"])
        if len(ranks) == session.world_size and self.since:
            self._replica.passes.counting.resume(float(saved["counted"][session.rank]))

    def forget(self) -> None:
        """A state that has nothing of this was loaded: go on from the weights that there are, as in the beginning."""
        self._weights.forget()
        self.since, self._follows_exchange = 0, False
        self._replica.passes.counting.resume(0.0)

    def consolidate(self) -> None:
        """Give all workers the same weights, which all of them call together, between two steps."""
        self._rest()
        replica, session = self._replica, self._replica.session
        with self._others_waiting():
            replica.check_start()
            argument = step_argument(replica.first_key, replica.steps)
            meeting = session.meet(CONSOLIDATE, argument, weight=self.weight, flags=self.fingerprint)
            self._buffers.start(meeting)
            session.engine.wait(*([] if meeting.work is None else [meeting.work]))
            self._check_alike(meeting)
            if self._weights.put_own(meeting.share() / session.world_size):
                self._sum()
            self._weights.take_final()
            self._buffers.finish()

    def _sum(self) -> None:
        """Of the buckets, as they are, between the workers alone: servers and codecs have no part in it."""
        session, storage = self._replica.session, self._replica.storages[-1]
        storage.bring_all_down()
        for array in storage.arrays:
            session.run(session.allreduce_program(array.nbytes), array, "consolidate")
        for number in range(len(storage.buckets)):
            storage.bring_up(number)


def _load_own(tensor: torch.Tensor, of_ranks: Sequence[torch.Tensor | None], rank: int | None) -> None:
    """Let a tensor be what that worker had, or, without one, the mean of what workers had, if it is a number."""
    known = [value for value in of_ranks if value is not None]
    if not known:
        return
    if rank is not None:
        known = [value for value in of_ranks[rank : rank + 1] if value is not None]
    if tensor.is_floating_point():
        tensor.data.copy_(torch.stack(known).to(torch.float64).mean(0))
    elif known:
        tensor.data.copy_(known[0])
