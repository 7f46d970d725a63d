"""Workers that train by themselves and exchange weights after some updates: one model's side of it.

Such a step is a plain one: gradients stay where autograd has put them, and the optimizer is called as ever, or not, as
GradScaler decides. When it has run after a step of which the sync mode says so, weights are exchanged and waited for.
Where the script has not called it, that is done before the model's next forward pass in training. A step is a backward
pass outside ``no_sync``, or what one call of the optimizer makes of several (LBFGS). So all ranks count alike whatever
their gradients are.

What travels lies in the buckets of the strategy's schedule, which gradients of such steps do not use: ``Differences``
from the weights that all have agreed on, through the strategy's architecture and codec, or a ``Mixture`` of some
workers' weights. The state machine of ``engine.step`` says when, the sync mode what becomes of it.

Evaluation exchanges nothing, nor does the end. ``consolidate`` gives all workers the same weights; the run's course
stays what it would be without it: what was agreed on, and what is counted, are left as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ...compression.saved import Saved, from_bytes
from ...compression.saved import as_bytes as saved_as_bytes
from ...engine.step import Action, Agree, BucketPhase, Submit, Wait
from ...engine.work import Work
from ...errors import UsageError
from ...plans.check import check_mixing
from ...plans.messages import Program
from ...session.communicator import compiled
from ...session.tickets import CONSOLIDATE, JOINED, Meeting, step_of
from ...sync import Agrees, Mixes, mixes_of
from ...sync._periodic import BLOCK_ELEMENTS, agree_in_blocks
from .buffers import MeanBuffers
from .eager import eager
from .replica import Replica
from .storage import as_bytes

Tensors = dict[str, torch.Tensor]


class Mix(NamedTuple):
    """This rank's part in a plan that adds some workers' arrays, and how many it adds up."""

    program: Program
    parts: int


class Exchanged(Protocol):
    """What of a model's weights is exchanged."""

    @property
    def alike(self) -> bool:
        """Whether all workers count alike, whatever they have seen."""
        ...

    def mix(self, step: int) -> Mix | None:
        """What mixes arrays after a step; None where all are averaged by the strategy's architecture."""
        ...

    @property
    def fingerprint(self) -> int:
        """What has to be the same on all workers for an exchange to make sense."""
        ...

    def put(self, share: float) -> None:
        """Put ``share`` of it into the buckets."""
        ...

    def take(self, step: int) -> None:
        """The exchange after a step has come: give the weights what follows from it."""
        ...

    def put_own(self, share: float) -> bool:
        """Put ``share`` of what the workers' sum makes the final weights; False where no sum is needed for them."""
        ...

    def give_agreed(self) -> None:
        """Let the weights be those that all have agreed on, if there are any."""
        ...

    def take_final(self) -> None:
        """The sum has come, where one is needed: let the weights be the final ones."""
        ...

    def anew(self) -> None:
        """The script has loaded weights."""
        ...

    @property
    def all_agree(self) -> bool:
        """Whether this worker has the very weights that all have agreed on."""
        ...

    def saved(self) -> dict[str, list[torch.Tensor]]:
        """What all workers have alike and a resumed run has to know, by parameter."""
        ...

    def load(self, saved: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Take it up; all workers call it with the same."""
        ...


class Averaging:
    """When a model's weights are exchanged. ``weights`` is what of them travels; all workers make it together."""

    def __init__(self, replica: Replica, weights: Exchanged) -> None:
        self._replica, self._weights = replica, weights
        gradients = replica.gradients
        self._buffers = MeanBuffers(
            replica.session, replica.selection, gradients.staging, replica.first_key, replica.fault, gradients.share_of
        )
        self._meeting: Meeting | None = None
        self._works: dict[BucketPhase, Work] = {}
        self._in_step = self._counted = False  # the optimizer has been called; and has made a step of its own since
        self._follows_exchange = False
        self.since = 0
        """How many steps have been made since weights were exchanged last."""

    @property
    def alike(self) -> bool:
        """Whether all workers count alike, whatever they have seen."""
        return self._weights.alike

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Be told when the optimizer runs."""
        before, after = eager(lambda *_: self._before_step()), eager(lambda *_: self._after_step())
        self._replica.keep([optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)])
        self._replica.averaging = self
        self._replica.on_loaded = self._weights.anew

    # What happens to the model.

    def begin_step(self) -> bool:
        """A backward pass of the worker's own has ended: whether it is a step, and no further part of one."""
        if self._in_step and self._counted:
            return False
        self._counted = self._in_step
        if self._follows_exchange:  # all have the same weights still
            self._weights.anew()
            self._follows_exchange = False
        self.since += 1
        return True

    def exchanged(self) -> None:
        """Gradients have been: weights stay those that all have."""
        self._follows_exchange = True

    def _before_step(self) -> None:
        self._in_step, self._counted = True, False

    def _after_step(self) -> None:
        self._in_step = False
        self.settle()

    def before_forward(self) -> None:
        """A forward pass begins: what the optimizer was not called for is exchanged now, if the pass is of training."""
        training = torch.is_grad_enabled() and self._replica.model.training
        if training and not self._in_step and torch._C._current_graph_task_id() == -1:
            self.settle()

    def settle(self) -> None:
        """Exchange what is to be exchanged before another step."""
        if self._replica.machine.owes:
            self._replica.session.check_usable()
            self._do(self._replica.machine.updated())

    def shadow(self, meeting: Meeting) -> None:
        """Take part in the exchange for which the others have come, without having made a step for it."""
        tickets = meeting.tickets()
        number = next(step_of(ticket) for ticket in tickets if ticket.kind != tickets[self._replica.session.rank].kind)
        self._begin(meeting, number)
        self._do([action for action in self._replica.machine_at(number).updated() if not isinstance(action, Agree)])

    # Exchange.

    def _do(self, actions: Sequence[Action]) -> None:
        try:
            for action in actions:
                if isinstance(action, Agree):
                    meeting = self._replica.meet_to_average(action.step, self._weights.fingerprint)
                    self._begin(meeting, action.step)
                elif isinstance(action, Submit):
                    self._submit(action)
                elif isinstance(action, Wait):
                    self._replica.session.engine.wait(*[self._works.pop(operation) for operation in action.operations])
                    self._replica.gradients.staging.join()
                else:
                    self._end(action.step)
        except BaseException as error:
            self._replica.session.member.interrupted(error)  # the others wait for the rest
            raise

    def _begin(self, meeting: Meeting, step: int) -> None:
        self._meeting = meeting
        self._buffers.start(meeting, *(self._weights.mix(step) or ()))
        self._weights.put(1.0 / self._replica.session.world_size)

    def _submit(self, submit: Submit) -> None:
        after = None if submit.after is None else self._works.pop(submit.after)
        started = self._replica.gradients.start(submit.operation, self._meeting, submit.priority, after)
        self._works[submit.operation] = started

    def _end(self, step: int) -> None:
        assert self._meeting is not None
        self._check_alike(self._meeting)
        self._weights.take(step)
        self._buffers.finish()
        self._replica.averaged(self._meeting)
        self._meeting, self.since = None, 0

    def _check_alike(self, meeting: Meeting) -> None:
        """Raise GradientError where ranks have gone on from different weights."""
        marks = [ticket.flags for ticket in meeting.tickets() if ticket.kind != JOINED]
        if len(set(marks)) > 1:
            raise self._replica.fault(
                "ranks have loaded different weights into the model since all agreed on some, so that what theirs"
                " differ by says nothing: load the same ones on all ranks, or syncline.load_state_dict() after them"
            )

    def saved(self) -> dict[str, Any]:
        """What a resumed run has to know: of all workers, which call it together.

        Each worker's own weights and buffers are in it, as many bytes as there are workers times the model's, unless
        all have agreed on theirs.
        """
        self.settle()
        if self._follows_exchange:
            self._weights.anew()
        replica = self._replica
        mine: Saved = {"counted": np.array([replica.left_weight])}
        if self.since or not self._weights.all_agree:
            mine |= {f"own/{name}": as_bytes(tensor.contiguous()).cpu().numpy() for name, tensor in self._tensors()}
        ranks = [from_bytes(data) for data in replica.session.gather(saved_as_bytes(mine))]
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
            self._replica.resume_weight(float(saved["counted"][session.rank]))

    def consolidate(self) -> None:
        """Give all workers the same weights, which all of them call together, between two steps."""
        self.settle()
        replica, session = self._replica, self._replica.session
        try:
            meeting = replica.meet_to_average(replica.steps, self._weights.fingerprint, CONSOLIDATE)
            self._buffers.start(meeting)
            session.engine.wait(*([] if meeting.work is None else [meeting.work]))
            self._check_alike(meeting)
            if self._weights.put_own(replica.gradients.share_of(meeting) / session.world_size):
                self._sum()
            self._weights.take_final()
            self._buffers.finish()
        except BaseException as error:
            session.member.interrupted(error)
            raise

    def _sum(self) -> None:
        """Of the buckets, as they are, between the workers alone: servers and codecs have no part in it."""
        session, storage = self._replica.session, self._replica.gradients.storages[-1]
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


class Differences:
    """By how much the weights of a model differ from those that all workers have agreed on last."""

    def __init__(self, replica: Replica, mode: Agrees) -> None:
        self._mode = mode
        self._storage = replica.gradients.storages[-1]
        self._parameters = [parameter for _, parameter in replica.named]
        self._pull = mode.pull(replica.session.world_size)
        self._agreed = self._like_weights()
        self._memory = self._like_weights() if mode.remembers else {}
        self._views = self._views_in(self._agreed)
        self._memory_views = self._views_in(self._memory)
        self._mark: int | None = 0  # None where it has to be computed: this rank alone says what was agreed on
        self._copy_own()

    def _like_weights(self) -> Tensors:
        return {dtype: torch.zeros_like(flat) for dtype, flat in self._storage.resident.items()}

    def _views_in(self, blocks: Tensors) -> list[torch.Tensor]:
        tensors = range(len(self._parameters) if blocks else 0)
        return [self._storage.view_in(blocks, tensor) for tensor in tensors]

    def _copy_own(self) -> None:
        with torch.no_grad():
            for agreed, parameter in zip(self._views, self._parameters, strict=True):
                agreed.copy_(parameter)

    alike = False

    def mix(self, step: int) -> None:
        """All are averaged."""

    @property
    def all_agree(self) -> bool:
        """True in the beginning, and after an exchange, unless there is a centre."""
        return all(map(torch.equal, self._views, self._parameters))

    def saved(self) -> dict[str, list[torch.Tensor]]:
        """The agreed weights, and what the mode remembers."""
        found = {"agreed": [view.cpu().clone() for view in self._views]}
        if self._memory:
            found["memory"] = [view.cpu().clone() for view in self._memory_views]
        return found

    def load(self, saved: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Which the next exchange compares."""
        for mine, what in ((self._views, "agreed"), (self._memory_views, "memory")):
            for view, value in zip(mine, saved[what] if mine else (), strict=True):
                view.copy_(value)
        self._mark = None

    def anew(self) -> None:
        """What was loaded counts as agreed on: all ranks have to load the same, which the next exchange checks."""
        self._copy_own()
        self._mark = None

    @property
    def fingerprint(self) -> int:
        """Of the agreed weights, where no exchange has made them."""
        if self._mark is None:
            self._mark = 0
            for flat in (*self._agreed.values(), *self._memory.values()):
                self._mark = zlib.crc32(as_bytes(flat).cpu().numpy(), self._mark)
        return self._mark

    def put(self, share: float) -> None:
        """And give up what the mode says of it."""
        self._differ()
        with torch.no_grad():
            if self._pull < 1:
                for parameter, view in zip(self._parameters, self._storage.views, strict=True):
                    parameter.sub_(view, alpha=self._pull)
            for flat in self._storage.resident.values():
                flat.mul_(share)

    def _differ(self) -> None:
        with torch.no_grad():
            for parameter, agreed, view in zip(self._parameters, self._views, self._storage.views, strict=True):
                torch.sub(parameter, agreed, out=view)

    def take(self, step: int) -> None:  # noqa: ARG002
        """Agree on what follows from the mean difference, and go on from there."""
        with torch.no_grad():
            for dtype, mean in self._storage.resident.items():
                block = BLOCK_ELEMENTS if mean.is_cpu else max(1, mean.numel())
                agree_in_blocks(self._mode, self._agreed[dtype], mean, self._memory.get(dtype), block)
        self._mark = 0
        if self._pull == 1:
            self._give(self._views)

    def give_agreed(self) -> None:
        """As they are."""
        self._give(self._views)

    def _give(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)

    def put_own(self, share: float) -> bool:
        """The difference again; a centre is what it is."""
        if self._pull < 1:
            return False
        self._differ()
        with torch.no_grad():
            for flat in self._storage.resident.values():
                flat.mul_(share)
        return True

    def take_final(self) -> None:
        """The mean of all weights, or the centre."""
        if self._pull < 1:
            self._give(self._views)
            return
        with torch.no_grad():
            for dtype, mean in self._storage.resident.items():
                mean.add_(self._agreed[dtype])
        self._give(self._storage.views)


class Mixture:
    """A model's weights, which each worker averages with those of some others; raises PlanError for a mode's plans."""

    alike = True
    fingerprint = 0
    all_agree = False

    def __init__(self, replica: Replica, mode: Mixes) -> None:
        self._mode, self._session = mode, replica.session
        self._storage = replica.gradients.storages[-1]
        self._parameters = [parameter for _, parameter in replica.named]
        check_mixing(mixes_of(mode, replica.session.world_size))
        replica.gradients.program = lambda step: self.mix(step).program

    def mix(self, step: int) -> Mix:
        """As the mode has it."""
        plan = self._mode.mix(self._session.world_size, step)
        return Mix(compiled(plan, self._session.rank), len(plan.sums[self._session.rank]))

    def put(self, share: float) -> None:  # noqa: ARG002
        """All of them: what is added up is divided afterwards."""
        self._put(1.0)

    def _put(self, share: float) -> None:
        with torch.no_grad():
            for parameter, view in zip(self._parameters, self._storage.views, strict=True):
                torch.mul(parameter, share, out=view)

    def take(self, step: int) -> None:
        """The mean of the sum."""
        parts = self.mix(step).parts
        with torch.no_grad():
            for flat in self._storage.resident.values():
                flat.div_(parts)
        self.take_final()

    def put_own(self, share: float) -> bool:
        """A share of all workers' mean."""
        self._put(share)
        return True

    def take_final(self) -> None:
        """What has come."""
        with torch.no_grad():
            for parameter, value in zip(self._parameters, self._storage.views, strict=True):
                parameter.copy_(value)

    def anew(self) -> None:
        """Weights are what they are."""

    def saved(self) -> dict[str, list[torch.Tensor]]:
        """Nothing that all have alike."""
        return {}

    def load(self, saved: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Nothing."""

    def give_agreed(self) -> None:
        """There are none."""
