"""The user's optimizer on slices of the weights, as ``serving`` asks for it: a real torch optimizer.

It has flat slices in place of the tensors. That is the same update only for optimizers that treat every element by
itself; ``probe`` finds out, on small tensors, whether one does.

Its state leaves and enters as records, whose elements are tensors in nobody's framework: here they become tensors
again, put together as if one process had trained.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...errors import UsageError
from ...nouns import Slice
from ...serving.records import Elements, Record, State
from ...serving.shard import Groups, Holding
from .storage import as_torch, dtype_name, memory, view_like


class SlicedOptimizer:
    """A user's optimizer on what a process owns; it updates the holdings' weights in place."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], holdings: Sequence[Holding]
    ) -> None:
        self._parts = [as_torch(held.weights, _dtype(held)).requires_grad_() for held in holdings]
        self._gradients = [as_torch(held.gradient, _dtype(held)) for held in holdings]
        for part, gradient in zip(self._parts, self._gradients, strict=True):
            part.grad = gradient
        self._optimizer = on_slices(optimizer, parameters, [held.slice for held in holdings], self._parts)

    def squared_norm(self) -> float:
        """As torch adds."""
        return float(sum(gradient.double().square().sum() for gradient in self._gradients))

    def apply(self, groups: Groups, scale: float) -> None:
        """One step, whatever mode the thread is in that makes it."""
        if scale != 1.0:
            for gradient in self._gradients:
                gradient.mul_(scale)
        for group, values in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(values)
        with torch.inference_mode(mode=False), torch.autocast("cpu", enabled=False):
            self._optimizer.step()

    def state(self) -> list[State]:
        """Tensors as elements, which are their memory, all else as it is."""
        return [
            {key: _said(value) for key, value in self._optimizer.state.get(part, {}).items()} for part in self._parts
        ]

    def load(self, states: Sequence[State]) -> None:
        """The other way round."""
        for part, state in zip(self._parts, states, strict=True):
            self._optimizer.state[part] = {key: _heard(value) for key, value in state.items()}


def _dtype(held: Holding) -> torch.dtype:
    found: torch.dtype = getattr(torch, str(held.weights.dtype))
    return found


def as_elements(tensor: torch.Tensor) -> Elements:
    """A tensor in nobody's framework; its own memory where that is contiguous and on the host."""
    data = memory(tensor.detach().cpu().contiguous())
    return Elements(dtype_name(tensor.dtype), tuple(tensor.shape), data)


def as_tensor(elements: Elements) -> torch.Tensor:
    """A tensor again, with the same memory."""
    dtype: torch.dtype = getattr(torch, elements.dtype)
    if elements.data.size == 0:  # NumPy's strides of nothing are none of torch's
        return torch.empty(elements.shape, dtype=dtype)
    return torch.from_numpy(elements.data).view(dtype).reshape(elements.shape)


def _said(value: Any) -> Any:
    return as_elements(value) if isinstance(value, torch.Tensor) else value


def _heard(value: Any) -> Any:
    return as_tensor(value) if isinstance(value, Elements) else value


def on_slices(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    slices: Sequence[Slice],
    parts: Sequence[torch.Tensor],
) -> torch.optim.Optimizer:
    """A copy of an optimizer, without state, whose groups hold parts of their tensors, flat slices of them."""
    number = {id(parameter): index for index, parameter in enumerate(parameters)}
    of_tensor: dict[int, list[torch.Tensor]] = defaultdict(list)
    for one, part in zip(slices, parts, strict=True):
        of_tensor[one.tensor].append(part)
    clone = copy.copy(optimizer)
    left_out = ("state", "param_groups", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    vars(clone).update({key: value for key, value in vars(optimizer).items() if key not in left_out})
    # The user's hooks belong to the user's optimizer and run once per step, on the worker.
    clone._optimizer_step_pre_hooks, clone._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    clone.state = defaultdict(dict)
    clone.param_groups = [
        {
            **group,
            "params": [part for tensor in group["params"] for part in of_tensor[number.get(id(tensor), -1)]],
        }
        for group in optimizer.param_groups
    ]
    return clone


def probe(optimizer: torch.optim.Optimizer) -> bool:
    """Raise UsageError unless the optimizer gives the same result on slices as on whole tensors; whether it has state.

    Three steps with the values of each parameter group, on a matrix and a vector of random numbers, once whole and
    once cut into flat slices.
    """
    tried, keeps_state = [], False
    for group in optimizer.param_groups:
        values = {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr", "names")}
        if values not in tried:
            tried.append(values)
            # The learning rate may be 0 now, under a warm-up, when every optimizer would look the same.
            keeps_state |= _probe_group(optimizer, {**group, "lr": 0.1} if "lr" in group else group)
    return keeps_state


_SHAPES = ((6, 4), (9,))
_CUT = (Slice(0, 0, 5), Slice(0, 5, 24), Slice(1, 0, 4), Slice(1, 4, 9))


def _probe_group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    name = type(optimizer).__name__
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in _SHAPES]
    whole = [tensor.clone().requires_grad_() for tensor in start]
    flat = [start[cut.tensor].reshape(-1)[cut.start : cut.stop].clone().requires_grad_() for cut in _CUT]
    template = copy.copy(optimizer)
    vars(template).update({key: value for key, value in vars(optimizer).items() if key not in ("state", "step")})
    template.param_groups = [{**group, "params": whole}]
    everything = [Slice(index, 0, tensor.numel()) for index, tensor in enumerate(whole)]
    try:
        a, b = on_slices(template, whole, everything, whole), on_slices(template, whole, _CUT, flat)
        for tensors, of in ((whole, a), (flat, b)):
            for tensor in tensors:
                of.state[tensor] = state_like(optimizer, group, tensor)
        for _ in range(3):
            gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in _SHAPES]
            for tensor, gradient in zip(whole, gradients, strict=True):
                tensor.grad = gradient.clone()
            for cut, part in zip(_CUT, flat, strict=True):
                part.grad = gradients[cut.tensor].reshape(-1)[cut.start : cut.stop].clone()
            a.step()
            b.step()
    except Exception as error:
        raise _refusal(name, f"it does not work on flat slices ({type(error).__name__}: {error})") from error
    for cut, part in zip(_CUT, flat, strict=True):
        expected = whole[cut.tensor].detach().reshape(-1)[cut.start : cut.stop]
        if not torch.allclose(part.detach(), expected, rtol=1e-9, atol=1e-12):
            raise _refusal(name, "its update of an element depends on the rest of the tensor")
    return any(a.state.values())


def state_like(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], tensor: torch.Tensor) -> dict[str, Any]:
    """State as the optimizer has it for a parameter of that group (Adagrad makes it at construction), if it has any."""
    for parameter in group["params"]:
        state = optimizer.state.get(parameter)
        if state:
            return {
                key: torch.full_like(tensor, float(value.double().mean()), requires_grad=False)
                if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape
                else copy.deepcopy(value)
                for key, value in state.items()
            }
    return {}


def _refusal(name: str, why: str) -> UsageError:
    return UsageError(
        f"{name} cannot run on a parameter server that holds slices of the weights: {why};"
        " use ps(update=worker), ring or another allreduce, or an element-wise optimizer such as SGD or Adam"
    )


def records_of(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> list[Record]:
    """A whole optimizer's state as records: what a user loaded or trained before."""
    found = []
    for index, parameter in enumerate(parameters):
        whole = Slice(index, 0, parameter.numel())
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0:
                value = in_memory_order(value, parameter)
            found.append(Record(whole, key, _said(value)))
    return found


def whole_state(records: Iterable[Record], parameters: Sequence[torch.Tensor]) -> dict[torch.Tensor, dict[str, Any]]:
    """Records of all slices put together: the state one process would have, by parameter."""
    flat: dict[tuple[int, str], torch.Tensor] = {}
    state: dict[torch.Tensor, dict[str, Any]] = {}
    for record in records:
        part, value = record.slice, _heard(record.value)
        parameter = parameters[part.tensor]
        entry = state.setdefault(parameter, {})
        if not record.elementwise:
            entry.setdefault(record.key, value)
            continue
        key = part.tensor, record.key
        if key not in flat:
            flat[key] = torch.zeros(parameter.numel(), dtype=value.dtype, device=parameter.device)
            entry[record.key] = view_like(flat[key], parameter)
        flat[key][part.start : part.stop] = value
    return state


def in_memory_order(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor, flat, in the order in which ``like``'s lie in its storage."""
    flat = torch.empty(value.numel(), dtype=value.dtype)
    view_like(flat, like).copy_(value)
    return flat
