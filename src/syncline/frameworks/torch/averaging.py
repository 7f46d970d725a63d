"""Owns the exchange of one model's weights by workers that train alone between exchanges (local SGD and the like).

Steps between exchanges are plain: gradients stay where autograd has put them, and the script or a GradScaler calls the
optimizer as usual. The sync mode names the steps after which weights are exchanged. The exchange runs, and is waited
for, at the end of the optimizer's call. If the optimizer was not called, it runs before the model's next forward pass
in training. If a GradScaler has skipped the call, it also runs before any other call at which workers meet. A step is
one backward pass outside ``no_sync``, or all passes within one call of the optimizer (LBFGS). All ranks therefore count
the same steps, whatever their gradients are.

``training.weights`` decides which values are exchanged and applies the result. The values use the buckets of the
strategy's schedule (``ParameterMemory``), which the gradients of such steps do not need. Buffers are exchanged too.

A GradScaler asks an optimizer whether it handles overflows itself. If the answer is no, the scaler calls the optimizer
at once, or not at all if a gradient has overflowed (``torch.amp.GradScaler.step``). An optimizer that was asked and not
called since has therefore been skipped, whereas one that was not asked may still be called (``ScalerCalls``). An
optimizer that handles overflows is called in every step and needs no such rule.

Evaluation exchanges nothing, and neither does the end of the run. ``consolidate`` gives all workers the same weights
without an effect on later training: agreed weights and counts stay unchanged.
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
from ...training.weights import AgreedWeights, Values, weight_exchange
from .buffers import MeanBuffers
from .compiled import eager
from .replica import Replica
from .storage import Array, Storage, as_bytes

Tensors = dict[str, torch.Tensor]


class ParameterMemory:
    """The ``WeightMemory`` of a model's parameters; ``storage`` has the buckets.

    A worker of weight 0 contributes zeros even if its own weights are NaN, as they may be after a step without samples.
    """

    sums_differences = True

    def __init__(self, storage: Storage, parameters: Sequence[torch.Tensor], workers: int) -> None:
        self._storage, self._parameters, self._workers = storage, parameters, workers

    @property
    def buckets(self) -> Values:
        return Values(self._storage.views, list(self._storage.resident.values()))

    def zeros(self) -> Values:
        blocks = {dtype: torch.zeros_like(flat) for dtype, flat in self._storage.resident.items()}
        tensors = [self._storage.view_in(blocks, tensor) for tensor in range(len(self._parameters))]
        return Values(tensors, list(blocks.values()))

    @torch.no_grad()
    def read(self, into: Values) -> None:
        for value, parameter in zip(into.tensors, self._parameters, strict=True):
            value.copy_(parameter)

    @torch.no_grad()
    def write(self, values: Values) -> None:
        for parameter, value in zip(self._parameters, values.tensors, strict=True):
            parameter.copy_(value)

    @torch.no_grad()
    def subtract(self, values: Values) -> None:
        for parameter, value, view in zip(self._parameters, values.tensors, self._storage.views, strict=True):
            torch.sub(parameter, value, out=view)

    @torch.no_grad()
    def give_up(self, part: float) -> None:
        """In one operation per tensor, whose product and sum may be rounded once (a fused multiply-add)."""
        for parameter, view in zip(self._parameters, self._storage.views, strict=True):
            parameter.sub_(view, alpha=part)

    @torch.no_grad()
    def share_out(self, weight: float) -> None:
        """By a product, except that weight 0 writes zeros: NaN times 0 would stay NaN."""
        share = weight / self._workers
        for flat in self._storage.resident.values():
            flat.mul_(share) if share > 0 else flat.zero_()

    def equal(self, values: Values) -> bool:
        """Whether the parameters equal ``values``."""
        return all(map(torch.equal, values.tensors, self._parameters))

    def bytes_of(self, block: torch.Tensor) -> Array:
        """Copied to the host from a device."""
        found: Array = as_bytes(block).cpu().numpy()
        return found

    def at_once(self, block: torch.Tensor) -> int:
        """The whole block on a device, and a part of fixed size on the CPU."""
        return BLOCK_ELEMENTS if block.is_cpu else max(1, block.numel())

    def add_up(self, add: Callable[[Array], None]) -> None:
        """Copies the buckets of a device to the host first, and back afterwards."""
        storage = self._storage
        storage.bring_all_down()
        for array in storage.arrays:
            add(array)
        for number in range(len(storage.buckets)):
            storage.bring_up(number)

    def saved(self, values: Values) -> list[torch.Tensor]:
        """One tensor per parameter, on the CPU."""
        return [value.cpu().clone() for value in values.tensors]

    def load(self, values: Values, saved: Sequence[torch.Tensor]) -> None:
        for mine, value in zip(values.tensors, saved, strict=True):
            mine.copy_(value)


class Averaging:
    """Runs the exchanges of a model's weights at the steps that ``mode`` names; all workers construct it together."""

    def __init__(self, replica: Replica, mode: Averages) -> None:
        session, parameters = replica.session, [parameter for _, parameter in replica.named]
        self._replica, self._memory = replica, ParameterMemory(replica.storages[-1], parameters, session.world_size)
        self._weights = weight_exchange(session, replica.first_key, mode, self._memory)
        replica.trained.weights, replica.exchange.mix = self._weights, self._weights.mix
        replica.listeners.loaded = self._weights.anew
        self._buffers = MeanBuffers(replica.exchange, replica.selection, replica.fault)
        self._in_step = self._counted = False  # the optimizer is running; it has begun a step since its call
        self._scaled = False  # a GradScaler has asked the optimizer and not called it since
        self._telling: ScalerCalls | None = None

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Hook the optimizer's calls, and the calls at which workers meet."""
        before, after = eager(lambda _, *given: self._before_step(*given)), eager(lambda *_: self._after_step())
        self._replica.hooks.keep([optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)])
        self._telling = ScalerCalls(optimizer, self._note_scaler)
        self._replica.session.member.before_calls[self._replica.first_key] = self._catch_up

    def detach(self) -> None:
        """Stop watching the GradScaler and the calls at which workers meet. The replica removes the other hooks."""
        if self._telling is not None:
            self._telling.remove()
            self._replica.session.member.before_calls.pop(self._replica.first_key, None)

    # What happens to the model.

    @property
    def repeats(self) -> bool:
        """Whether a backward pass now belongs to a step that the running optimizer has begun (a further evaluation)."""
        return self._in_step and self._counted

    def begin_step(self) -> bool:
        """Note the end of a backward pass without an exchange. Returns whether it begins a step."""
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
        """Call a closure. If it raises, the optimizer ends without its post-step hooks, so its end is noted here."""
        try:
            return closure()
        except BaseException:
            self._in_step = False
            raise

    def _after_step(self) -> None:
        self._in_step = False
        self._replica.trained.settle()

    def before_forward(self) -> None:
        """Exchange weights for a step without a call of the optimizer, if this forward pass is one of training."""
        training = torch.is_grad_enabled() and self._replica.model.training
        if training and not self._in_step and torch._C._current_graph_task_id() == -1:
            self._replica.trained.settle()

    def _note_scaler(self) -> None:
        self._scaled = True

    def _catch_up(self) -> None:
        """Exchange now if a GradScaler has skipped the step: the other ranks have exchanged before this call."""
        if self._scaled:
            self._replica.trained.settle()

    # Exchange.

    @property
    def weight(self) -> float:
        """This rank's weight in the mean: 0 if it has made no step since the last exchange."""
        return self._weights.weight(self._replica.weight)

    def met(self, kind: int, meeting: Meeting, step: int) -> None:
        """Start the exchange of buffers: all ranks exchange weights after that step, or consolidate them."""
        mix = self._weights.mix(step) if kind == AVERAGE else None
        self._buffers.start(meeting, *(mix or ()))

    def averaged(self, kind: int) -> None:
        """Finish the exchange of buffers. After an exchange of weights, restart this rank's count of samples."""
        self._buffers.finish()
        if kind == AVERAGE:
            self._replica.counting.reset()

    def saved(self) -> dict[str, Any]:
        """The state of all workers for a resumed run; all workers call it.

        It contains each worker's own weights and buffers, so its size is the model's size times the number of workers.
        A worker adds none if it has made no step since the last exchange and its weights are the agreed ones.
        """
        replica, weights = self._replica, self._weights
        replica.trained.rest()
        mine: Saved = {"counted": np.array([self.weight])}
        if weights.since or not self._all_agree:
            mine |= {f"own/{name}": as_bytes(tensor.contiguous()).cpu().numpy() for name, tensor in self._tensors()}
        ranks = gather_saved(replica.session, mine)
        return {
            **weights.saved(),
            "since": weights.since,
            "synchronous": weights.follows,
            "counted": [float(rank["counted"][0]) for rank in ranks],
            "ranks": [self._own(rank) for rank in ranks],
        }

    @property
    def _all_agree(self) -> bool:
        """Whether this worker's weights are equal to the agreed ones."""
        weights = self._weights
        return isinstance(weights, AgreedWeights) and self._memory.equal(weights.agreed)

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return self._replica.selection.tensors()

    def _own(self, rank: Saved) -> Tensors:
        """A worker's own tensors from its gathered state; none if it sent none."""
        if len(rank) == 1:
            return {}
        return {
            name: torch.from_numpy(rank[f"own/{name}"].copy()).view(tensor.dtype).view(tensor.shape)
            for name, tensor in self._tensors()
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from a saved state; all workers call it with the same one. UsageError for another model's state.

        If the number of workers has changed, all start from the mean of the former workers' tensors.
        """
        ranks, session, weights = saved["ranks"], self._replica.session, self._weights
        try:
            weights.load(saved)
            each = [[rank.get(name) for rank in ranks] for name, _ in self._tensors()]
            with torch.no_grad():
                weights.give()
                for (_, tensor), of_ranks in zip(self._tensors(), each, strict=True):
                    _load_own(tensor, of_ranks, session.rank if len(ranks) == session.world_size else None)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"the agreed weights in this state are of another model: {error}") from error
        weights.since, weights.follows = int(saved["since"]), bool(saved["synchronous"])
        if len(ranks) == session.world_size and weights.since:
            self._replica.counting.resume(float(saved["counted"][session.rank]))

    def forget(self) -> None:
        """Continue from the present weights as in a new run: the script has loaded a state without agreed weights."""
        self._weights.forget()
        self._replica.counting.resume(0.0)


def _load_own(tensor: torch.Tensor, of_ranks: Sequence[torch.Tensor | None], rank: int | None) -> None:
    """Set a tensor to the value of ``rank``. Without a rank: to the mean, or to the first value if it is no float."""
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
    """Replaces the answer False, and calls all of ``tells`` whenever a GradScaler tests it."""

    def __init__(self) -> None:
        self.tells: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        for tell in self.tells:
            tell()
        return False


class ScalerCalls:
    """Calls ``tell`` whenever a GradScaler asks this optimizer whether it handles overflows, until it is removed."""

    def __init__(self, optimizer: torch.optim.Optimizer, tell: Callable[[], None]) -> None:
        self._optimizer, self._tell = optimizer, tell
        found = vars(optimizer).get(_ASKED)
        if isinstance(found, _Asked):
            found.tells.append(tell)
        elif not getattr(optimizer, _ASKED, False):
            vars(optimizer)[_ASKED] = asked = _Asked()
            asked.tells.append(tell)

    def remove(self) -> None:
        """Restore the optimizer's own answer once no other model watches it."""
        found = vars(self._optimizer).get(_ASKED)
        if isinstance(found, _Asked) and self._tell in found.tells:
            found.tells.remove(self._tell)
            if not found.tells:
                del vars(self._optimizer)[_ASKED]
