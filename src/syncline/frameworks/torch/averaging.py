"""Workers that train by themselves and exchange weights after some updates: one model's side of it.

Such a step is a plain one: gradients stay where autograd has put them, and the optimizer is called as ever, or not, as
GradScaler decides. When it has run after a step of which the sync mode says so, weights are exchanged and waited for.
Where it has not been called, that is done before the model's next forward pass in training, and where a GradScaler has
left the call out, before any other call at which workers meet. A step is a backward
pass outside ``no_sync``, or what one call of the optimizer makes of several (LBFGS). So all ranks count alike whatever
their gradients are.

What travels, and what becomes of it, is ``training.weights``'; it lies in the buckets of the strategy's schedule
(``ParameterMemory``), which gradients of such steps do not use. Buffers go along.

A GradScaler asks an optimizer whether that handles overflows itself, and where it does not calls it at once or, if a
gradient has overflown, not at all (``torch.amp.GradScaler.step``). So an optimizer that has been asked, and not been
called since, has been skipped; one that has not been asked may still be called (``ScalerCalls``). Optimizers that do
handle overflows are called in every step and need no telling.

Evaluation exchanges nothing, nor does the end. ``consolidate`` gives all workers the same weights; the run's course
stays what it would be without it: what was agreed on, and what is counted, are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ...compression.saved import Saved
from ...errors import UsageError
from ...session.layout import gather_saved
from ...session.tickets import AVERAGE, Meeting
from ...sync import Averages
from ...sync._periodic import BLOCK_ELEMENTS
from ...training.weights import AgreedWeights, Values, WeightExchange
from .buffers import MeanBuffers
from .compiled import eager
from .replica import Replica
from .storage import Array, Storage, as_bytes

Tensors = dict[str, torch.Tensor]


class ParameterMemory:
    """A model's parameters as ``training.weights`` computes with them; ``storage`` has the buckets.

    Where a worker counts nothing its part is 0, whatever its weights are: NaN, where it had no samples.
    """

    sums_differences = True

    def __init__(self, storage: Storage, parameters: Sequence[torch.Tensor], workers: int) -> None:
        self._storage, self._parameters, self._workers = storage, parameters, workers

    @property
    def buckets(self) -> Values:
        """Where the tensors live."""
        return Values(self._storage.views, list(self._storage.resident.values()))

    def zeros(self) -> Values:
        """The same."""
        blocks = {dtype: torch.zeros_like(flat) for dtype, flat in self._storage.resident.items()}
        tensors = [self._storage.view_in(blocks, tensor) for tensor in range(len(self._parameters))]
        return Values(tensors, list(blocks.values()))

    @torch.no_grad()
    def read(self, into: Values) -> None:
        """Tensor by tensor."""
        for value, parameter in zip(into.tensors, self._parameters, strict=True):
            value.copy_(parameter)

    @torch.no_grad()
    def write(self, values: Values) -> None:
        """The other way round."""
        for parameter, value in zip(self._parameters, values.tensors, strict=True):
            parameter.copy_(value)

    @torch.no_grad()
    def subtract(self, values: Values) -> None:
        """Tensor by tensor."""
        for parameter, value, view in zip(self._parameters, values.tensors, self._storage.views, strict=True):
            torch.sub(parameter, value, out=view)

    @torch.no_grad()
    def give_up(self, part: float) -> None:
        """In one operation, which may round once."""
        for parameter, view in zip(self._parameters, self._storage.views, strict=True):
            parameter.sub_(view, alpha=part)

    @torch.no_grad()
    def share_out(self, weight: float) -> None:
        """By a product."""
        share = weight / self._workers
        for flat in self._storage.resident.values():
            flat.mul_(share) if share > 0 else flat.zero_()

    def equal(self, values: Values) -> bool:
        """Whether the weights are these."""
        return all(map(torch.equal, values.tensors, self._parameters))

    def bytes_of(self, block: torch.Tensor) -> Array:
        """From wherever it lies."""
        found: Array = as_bytes(block).cpu().numpy()
        return found

    def at_once(self, block: torch.Tensor) -> int:
        """Elsewhere than on the CPU all."""
        return BLOCK_ELEMENTS if block.is_cpu else max(1, block.numel())

    def add_up(self, add: Callable[[Array], None]) -> None:
        """Down and up again, where they live elsewhere."""
        storage = self._storage
        storage.bring_all_down()
        for array in storage.arrays:
            add(array)
        for number in range(len(storage.buckets)):
            storage.bring_up(number)

    def saved(self, values: Values) -> list[torch.Tensor]:
        """By parameter."""
        return [value.cpu().clone() for value in values.tensors]

    def load(self, values: Values, saved: Sequence[torch.Tensor]) -> None:
        """By parameter."""
        for mine, value in zip(values.tensors, saved, strict=True):
            mine.copy_(value)


class Averaging:
    """When a model's weights are exchanged, which ``mode`` has; all workers make it together."""

    def __init__(self, replica: Replica, mode: Averages) -> None:
        session, parameters = replica.session, [parameter for _, parameter in replica.named]
        self._replica, self._memory = replica, ParameterMemory(replica.storages[-1], parameters, session.world_size)
        self._weights = WeightExchange(session, replica.first_key, mode, self._memory)
        replica.trained.weights, replica.exchange.program = self._weights, self._weights.program
        replica.listeners.loaded = self._weights.travelling.anew
        staging = replica.exchange.staging
        self._buffers = MeanBuffers(replica.session, replica.selection, staging, replica.first_key, replica.fault)
        self._in_step = self._counted = False  # the optimizer has been called; and has made a step of its own since
        self._scaled = False  # a GradScaler has come with the optimizer, which has not been called since
        self._telling: ScalerCalls | None = None

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Be told when the optimizer runs."""
        before, after = eager(lambda _, *given: self._before_step(*given)), eager(lambda *_: self._after_step())
        self._replica.hooks.keep([optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)])
        self._telling = ScalerCalls(optimizer, self._note_scaler)
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
        return True

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
        self._replica.trained.settle()

    # Exchange.

    @property
    def weight(self) -> float:
        """What this rank counts in an exchange of weights: nothing where it has made no step since the last one."""
        return self._weights.weight(self._replica.weight)

    def met(self, kind: int, meeting: Meeting, step: int) -> None:
        """All come to exchange weights after that step, or to consolidate them."""
        mix = self._weights.travelling.mix(step) if kind == AVERAGE else None
        self._buffers.start(meeting, *(mix or ()))

    def averaged(self, kind: int) -> None:
        """All of it has come."""
        self._buffers.finish()
        if kind == AVERAGE:
            self._replica.counting.reset()

    def saved(self) -> dict[str, Any]:
        """What a resumed run has to know: of all workers, which call it together.

        Each worker's own weights and buffers are in it, as many bytes as there are workers times the model's, unless
        all have agreed on theirs.
        """
        replica, weights = self._replica, self._weights
        replica.trained.rest()
        mine: Saved = {"counted": np.array([self.weight])}
        if weights.since or not self._all_agree:
            mine |= {f"own/{name}": as_bytes(tensor.contiguous()).cpu().numpy() for name, tensor in self._tensors()}
        ranks = gather_saved(replica.session, mine)
        return {
            **weights.travelling.saved(),
            "since": weights.since,
            "synchronous": weights.follows,
            "counted": [float(rank["counted"][0]) for rank in ranks],
            "ranks": [self._own(rank) for rank in ranks],
        }

    @property
    def _all_agree(self) -> bool:
        """Whether this worker has the very weights that all have agreed on."""
        travelling = self._weights.travelling
        return isinstance(travelling, AgreedWeights) and self._memory.equal(travelling.agreed)

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
        ranks, session, weights = saved["ranks"], self._replica.session, self._weights
        try:
            weights.travelling.load(saved)
            each = [[rank.get(name) for rank in ranks] for name, _ in self._tensors()]
            with torch.no_grad():
                weights.travelling.give()
                for (_, tensor), of_ranks in zip(self._tensors(), each, strict=True):
                    _load_own(tensor, of_ranks, session.rank if len(ranks) == session.world_size else None)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"the agreed weights in this state are of another model: {error}") from error
        weights.since, weights.follows = int(saved["since"]), bool(saved["synchronous"])
        if len(ranks) == session.world_size and weights.since:
            self._replica.counting.resume(float(saved["counted"][session.rank]))

    def forget(self) -> None:
        """A state that has nothing of this was loaded: go on from the weights that there are, as in the beginning."""
        self._weights.forget()
        self._replica.counting.resume(0.0)


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


_ASKED = "_step_supports_amp_scaling"


class _Asked:
    """In place of the answer, which is no: calls all of ``tells`` when it is looked at."""

    def __init__(self) -> None:
        self.tells: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        for tell in self.tells:
            tell()
        return False


class ScalerCalls:
    """Calls ``tell`` whenever a GradScaler comes with this optimizer, until it is removed."""

    def __init__(self, optimizer: torch.optim.Optimizer, tell: Callable[[], None]) -> None:
        self._optimizer, self._tell = optimizer, tell
        found = vars(optimizer).get(_ASKED)
        if isinstance(found, _Asked):
            found.tells.append(tell)
        elif not getattr(optimizer, _ASKED, False):
            vars(optimizer)[_ASKED] = asked = _Asked()
            asked.tells.append(tell)

    def remove(self) -> None:
        """The optimizer is as it was."""
        found = vars(self._optimizer).get(_ASKED)
        if isinstance(found, _Asked) and self._tell in found.tells:
            found.tells.remove(self._tell)
            if not found.tells:
                del vars(self._optimizer)[_ASKED]
