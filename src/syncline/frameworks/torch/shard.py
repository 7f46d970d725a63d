"""The user's optimizer on slices of the weights, as ``serving`` asks for it: a real torch optimizer.

It has flat slices in place of the tensors. That is the same update only for optimizers that treat every element by
itself; ``probe`` finds out, on small tensors, whether one does.

Its state leaves and enters as records, whose elements are tensors in nobody's framework: here they become tensors
again, put together as if one process had trained.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...errors import NotBuiltError, UsageError
from ...nouns import Slice
from ...serving.records import Elements, Record, State
from ...serving.shard import Groups, Holding
from .storage import as_torch, dtype_name, memory, view_like


class SlicedOptimizer:
    """A user's optimizer on what a process owns; it updates the holdings' weights in place.

    ``own`` are the keys of each group that the optimizer itself changes, as ``probe`` has found them; ``optimizer`` is
    told the attributes, since the next one on other slices is made of it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        own: Sequence[frozenset[str]],
        holdings: Sequence[Holding],
    ) -> None:
        self._parts = [as_torch(held.weights, _dtype(held)).requires_grad_() for held in holdings]
        self._gradients = [as_torch(held.gradient, _dtype(held)) for held in holdings]
        self._own, self._model = own, optimizer
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
        # Counts in attributes go on in the next optimizer; those in groups are sent to it.
        vars(self._model).update({key: value for key, value in vars(self._optimizer).items() if key not in _LEFT_OUT})
        for group, values, own in zip(self._optimizer.param_groups, groups, self._own, strict=True):
            for key, value in values.items():
                if key not in own and not _same(_plain(key, group[key]), value):
                    raise _refusal(
                        type(self._optimizer).__name__,
                        f"it has changed {key!r} of a parameter group itself, from {value} to {group[key]}, which it"
                        f" did not in the {_TRIED_STEPS} steps that were tried, so that workers would not be told",
                    )

    def advanced(self) -> Groups:
        """As plain values; nothing of groups without slices here, in which an optimizer need not count."""
        return [
            {key: _plain(key, group[key]) for key in sorted(own & group.keys())} if group["params"] else {}
            for group, own in zip(self._optimizer.param_groups, self._own, strict=True)
        ]

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


_LEFT_OUT = ("state", "param_groups", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Of an optimizer's attributes, what a copy of it on slices has of its own."""


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
    vars(clone).update({key: value for key, value in vars(optimizer).items() if key not in _LEFT_OUT})
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


@dataclass(frozen=True)
class Probed:
    """What an optimizer does: whether it keeps a state, and which values of each group it may change itself.

    One that was seen to change a value may change every number and word of the group: Prodigy's estimate first changes
    after some steps.
    """

    keeps_state: bool
    own: tuple[frozenset[str], ...]


_SHAPES = ((6, 4), (9,))
_CUT = (Slice(0, 0, 5), Slice(0, 5, 24), Slice(1, 0, 4), Slice(1, 4, 9))
_SCALES = (1.0, 1e4, 1e-4)
"""Of the gradients of the steps that are tried: what limits a norm shows itself at one of them."""
_TRIED_STEPS = len(_SCALES)


def probe(optimizer: torch.optim.Optimizer, owners: int = 1) -> Probed:
    """Raise UsageError unless the optimizer gives the same result on the slices of so many owners as on whole tensors.

    Some steps with the values of its groups, on a matrix and a vector of random numbers for each: once whole, and once
    cut into flat slices, which are those of two owners where there are several.
    """
    name = type(optimizer).__name__
    fewer = "" if owners == 1 else " (some such optimizers can run with one owner of all tensors, servers=1)"
    generator = torch.Generator().manual_seed(0)
    groups = [
        # The learning rate may be 0 now, under a warm-up, when every optimizer would look the same.
        {key: 0.1 if key == "lr" else copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    shapes = _SHAPES * len(groups)
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    cuts = [
        Slice(part.tensor + len(_SHAPES) * number, part.start, part.stop)
        for number in range(len(groups))
        for part in _CUT
    ]
    shares = [cuts] if owners == 1 else [cuts[::3] + cuts[1::3], cuts[2::3]]
    try:
        whole, (a,) = _tried(optimizer, groups, start, [[Slice(i, 0, one.numel()) for i, one in enumerate(start)]])
        parts, several = _tried(optimizer, groups, start, shares)
        for scale in _SCALES:
            gradients = [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
            for one, tensor in [*whole, *parts]:
                tensor.grad = gradients[one.tensor].reshape(-1)[one.start : one.stop].reshape(tensor.shape).clone()
            for made in (a, *several):
                made.step()
    except Exception as error:
        raise _refusal(name, f"it does not work on flat slices ({type(error).__name__}: {error})") from error
    for one, part in parts:
        expected = whole[one.tensor][1].detach().reshape(-1)[one.start : one.stop]
        if not torch.allclose(part.detach(), expected, rtol=1e-9, atol=1e-12):
            raise _refusal(name, f"its update of an element depends on other elements{fewer}")
    before, after = group_values(groups), group_values(a.param_groups)
    _check_tellable(name, a, before, after)
    changes = before != after
    own = tuple(
        frozenset(key for key, value in group.items() if changes and not isinstance(value, list)) for group in after
    )
    for made in several:
        for number, (keys, mine, theirs) in enumerate(zip(own, a.param_groups, made.param_groups, strict=True)):
            for key in sorted(keys):
                if not _near(_plain(key, mine[key]), _plain(key, theirs[key])):
                    raise _refusal(
                        name,
                        f"it computes {key!r} of parameter group {number} from all tensors of the group{fewer}",
                    )
    return Probed(any(a.state.values()), own)


def _check_tellable(
    name: str, tried: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> None:
    """Raise UsageError for what an optimizer has learnt where owners tell nobody of it."""
    for of in tried.state:
        if not isinstance(of, torch.Tensor):
            raise _refusal(name, f"it keeps {of!r} in its state beside that of parameters, which owners cannot tell")
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        for key, value in new.items():
            if isinstance(value, list) and old.get(key) != value:
                raise _refusal(
                    name, f"it changes {key!r} of parameter group {number}, a list, which owners cannot tell"
                )


def _tried(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    start: Sequence[torch.Tensor],
    shares: Sequence[Sequence[Slice]],
) -> tuple[list[tuple[Slice, torch.Tensor]], list[torch.optim.Optimizer]]:
    """Copies of an optimizer, one for each share of these tensors, and the parts that they update."""
    template = copy.copy(optimizer)
    vars(template).update({key: value for key, value in vars(optimizer).items() if key not in ("state", "step")})
    each = len(_SHAPES)
    template.param_groups = [
        {**copy.deepcopy(group), "params": start[each * number : each * (number + 1)]}
        for number, group in enumerate(groups)
    ]
    pairs: list[tuple[Slice, torch.Tensor]] = []
    made: list[torch.optim.Optimizer] = []
    for share in shares:
        parts = [start[one.tensor].reshape(-1)[one.start : one.stop].clone() for one in share]
        parts = [
            part.reshape(start[one.tensor].shape if part.numel() == start[one.tensor].numel() else part.shape)
            for one, part in zip(share, parts, strict=True)
        ]
        for part in parts:
            part.requires_grad_()
        of = on_slices(template, start, share, parts)
        for one, part in zip(share, parts, strict=True):
            of.state[part] = state_like(optimizer, optimizer.param_groups[one.tensor // each], part)
        if callable(turn := getattr(of, "train", None)):
            turn()  # schedule-free ones are made for evaluation, in which they refuse to step
        pairs += zip(share, parts, strict=True)
        made.append(of)
    return pairs, made


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


class OwnValues:
    """The values of an optimizer's groups that it changes itself, on a worker: owners' optimizers do, and tell.

    A worker sends the owners such a value only where the script has changed it since it was told.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, own: Sequence[frozenset[str]]) -> None:
        self._optimizer, self._own = optimizer, own
        self._told: list[dict[str, Any]] = [{} for _ in own]  # nothing: at first all is sent

    def to_send(self, groups: Groups) -> list[dict[str, Any]]:
        """The values of the groups without what owners have from themselves."""
        return [
            {key: value for key, value in group.items() if key not in told or not _same(told[key], value)}
            for group, told in zip(groups, self._told, strict=True)
        ]

    def forget(self) -> None:
        """Send all again: other owners have the slices now."""
        self._told = [{} for _ in self._own]

    def take(self, records: Sequence[Record]) -> None:
        """Give the optimizer what its owners have told; raises UsageError where they tell different things."""
        found: dict[tuple[int, str], Any] = {}
        for record in records:
            at = record.slice.tensor, record.key
            if at not in found:
                found[at] = record.value
            elif not _same(found[at], record.value):
                raise _refusal(
                    type(self._optimizer).__mro__[2].__name__,
                    f"owners of different slices have come to {found[at]} and {record.value} as {at[1]!r} of parameter"
                    f" group {at[0]}",
                )
        for number, (group, own) in enumerate(zip(self._optimizer.param_groups, self._own, strict=True)):
            self._told[number] = {key: found[number, key] for key in own if (number, key) in found}
            group.update(self._told[number])


def group_values(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The values of an optimizer's groups without their tensors, as JSON can say them."""
    return [{key: _plain(key, value) for key, value in group.items() if key != "params"} for group in groups]


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)):
        return [_plain(key, item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise NotBuiltError(f"the optimizer's group value {key!r} is a {type(value).__name__}, which cannot be sent")


def _same(one: Any, other: Any) -> bool:
    """Whether two plain values, or a plain one and a tensor of one element, are the same; NaN is itself."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    return bool(one == other) or (one != one and other != other)


def _near(one: Any, other: Any) -> bool:
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12) or _same(one, other)
    return _same(one, other)
