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
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import SynclineError
from ...nouns import Slice
from ...serving.records import Elements, Record, State
from ...serving.shard import Groups, Holding
from .own_values import (
    attributes,
    beyond,
    is_plain,
    is_read,
    name_of,
    near,
    own_attributes,
    plain,
    put,
    refusal,
    same,
    told,
    values_of,
)
from .storage import as_torch, dtype_name, memory, view_like


class SlicedOptimizer:
    """A user's optimizer on what a process owns; it updates the holdings' weights in place.

    ``own`` are the keys of each group, and behind them the attributes, that the optimizer itself changes, as ``probe``
    has found them; ``optimizer`` is told the attributes, since the next one on other slices is made of it.
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
        for group, values in zip(self._optimizer.param_groups, groups[: len(self._own) - 1], strict=True):
            group.update(values)
        for values in groups[len(self._own) - 1 :]:
            put(vars(self._optimizer), values)
        before = [*groups[: len(self._own) - 1], attributes(self._optimizer)]
        with torch.inference_mode(mode=False), torch.autocast("cpu", enabled=False):
            self._optimizer.step()
        # Attributes go on in the next optimizer; values of groups are sent to it.
        vars(self._model).update({key: value for key, value in vars(self._optimizer).items() if key not in _LEFT_OUT})
        after = values_of(self._optimizer)
        for number, (old, new, own) in enumerate(zip(before, after, self._own, strict=True)):
            for key, value in old.items():
                if key in new and key not in own and not same(new[key], value):
                    raise refusal(
                        type(self._optimizer).__name__,
                        f"it has changed {name_of(key, number, len(after))} itself, from {value} to {new[key]}, which"
                        f" it did not in the {_TRIED_STEPS} steps that were tried, so that workers would not be told",
                    )

    def advanced(self) -> Groups:
        """As texts; nothing of groups without slices here, in which an optimizer need not count."""
        groups = self._optimizer.param_groups
        of_some = any(group["params"] for group in groups)
        has_slices = [*(bool(group["params"]) for group in groups), of_some]
        return [told(self._optimizer, number, self._own) if has else {} for number, has in enumerate(has_slices)]

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
    vars(clone).update({key: value for key, value in own_attributes(optimizer).items() if key not in _LEFT_OUT})
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
    """What an optimizer does: whether it keeps a state, and the names of values that it may change (``OwnValues``).

    One that was seen to change a value of a group may change every number and word of all groups, and so with
    attributes: Prodigy's estimate first changes after some steps.
    """

    keeps_state: bool
    own: tuple[frozenset[str], ...]
    changed: tuple[frozenset[str], ...] = ()  # those of them that were seen to change


_SHAPES = ((6, 4), (9,))
_CUT = (Slice(0, 0, 5), Slice(0, 5, 24), Slice(1, 0, 4), Slice(1, 4, 9))
_SCALES = (1.0, 1e4, 1e-4)
"""Of the gradients of the steps that are tried: what limits a norm shows itself at one of them."""
_TRIED_STEPS = len(_SCALES)


def probe(optimizer: torch.optim.Optimizer, owners: int = 1) -> Probed:
    """Raise UsageError unless the optimizer gives the same result on the slices of so many owners as on whole tensors.

    Some steps with the values of its groups, on a matrix and a vector of random numbers for each: twice whole, and once
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
    uncut = [Slice(number, 0, one.numel()) for number, one in enumerate(start)]
    cuts = [
        Slice(part.tensor + len(_SHAPES) * number, part.start, part.stop)
        for number in range(len(groups))
        for part in _CUT
    ]
    shares = [cuts] if owners == 1 else [cuts[::3] + cuts[1::3], cuts[2::3]]
    try:
        whole, (a,) = _tried(optimizer, groups, start, [uncut])
        again, (b,) = _tried(optimizer, groups, start, [uncut])
        parts, several = _tried(optimizer, groups, start, shares)
        before = values_of(a)
        for scale in _SCALES:
            gradients = [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
            _step([*whole, *again, *parts], [a, b, *several], gradients)
        beside = _changed_beyond(*_tried(optimizer, groups, start, [uncut]), gradients)
    except SynclineError:
        raise
    except Exception as error:
        raise refusal(name, f"it does not work on flat slices ({type(error).__name__}: {error})") from error
    _check_tellable(optimizer, a, beside)
    if not _agree(whole, again):
        raise refusal(
            name,
            "two of it come to different weights from the same start and gradients: it draws random numbers, or keeps"
            f" something outside of itself; {_KEEP}",
        )
    # Some change nothing in their first steps, RAdam among them: that alone says little.
    if all(torch.equal(tensor, start[one.tensor]) for one, tensor in whole) and (key := _holds_tensors(optimizer)):
        raise refusal(
            name,
            f"its step() changes none of the tensors in param_groups, and it keeps its parameters in its attribute"
            f" {key!r}, which owners cannot exchange for slices; let it go over param_groups",
        )
    if not _agree(whole, parts):
        raise refusal(name, f"its update of an element depends on other elements{fewer}")
    changed = _changed(before, values_of(a))
    own = _own(values_of(a), changed)
    for made in several:
        for number, (keys, mine, theirs) in enumerate(zip(own, values_of(a), values_of(made), strict=True)):
            for key in sorted(keys):
                if key not in theirs or not near(mine[key], theirs[key]):
                    of = "it is given" if number == len(groups) else "of the group"
                    raise refusal(name, f"it computes {name_of(key, number, len(own))} from all tensors {of}{fewer}")
    return Probed(any(a.state.values()), own, changed)


def _agree(whole: Sequence[tuple[Slice, torch.Tensor]], parts: Sequence[tuple[Slice, torch.Tensor]]) -> bool:
    """Whether parts have what whole tensors have there."""
    return all(
        torch.allclose(
            part.detach().reshape(-1),
            whole[one.tensor][1].detach().reshape(-1)[one.start : one.stop],
            rtol=1e-9,
            atol=1e-12,
            equal_nan=True,
        )
        for one, part in parts
    )


def _changed(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> tuple[frozenset[str], ...]:
    """The keys of what has changed in each group, and behind them the attributes."""
    return tuple(
        frozenset(key for key, value in new.items() if key not in old or not same(old[key], value))
        for old, new in zip(before, after, strict=True)
    )


def _own(after: Sequence[Mapping[str, Any]], changed: Sequence[frozenset[str]]) -> tuple[frozenset[str], ...]:
    """The keys of what may change in each group, and behind them the attributes."""
    groups, attributes = any(changed[:-1]), any(changed[-1:])
    return tuple(
        frozenset(key for key, value in new.items() if key in keys or (any_of and not isinstance(value, (list, dict))))
        for new, keys, any_of in zip(after, changed, [*[groups] * (len(after) - 1), attributes], strict=True)
    )


_KEEP = "keep it in param_groups, in an attribute, or in the state of each parameter"


def _step(
    pairs: Sequence[tuple[Slice, torch.Tensor]],
    made: Sequence[torch.optim.Optimizer],
    gradients: Sequence[torch.Tensor],
) -> None:
    """One step of each with these gradients of whole tensors."""
    for one, tensor in pairs:
        tensor.grad = gradients[one.tensor].reshape(-1)[one.start : one.stop].reshape(tensor.shape).clone()
    for optimizer in made:
        optimizer.step()


def _changed_beyond(
    pairs: Sequence[tuple[Slice, torch.Tensor]],
    made: Sequence[torch.optim.Optimizer],
    gradients: Sequence[torch.Tensor],
) -> list[str]:
    """Where an optimizer whose likes have made steps already still changes something beyond itself.

    What is done once, a warning or an entry of a cache, is no count. ``gradients`` are the smallest that were tried:
    larger and smaller ones than all before follow, for whatever keeps the largest.
    """
    _step(pairs, made, gradients)
    before = beyond(made[0])
    for scale in (1e10, 1e-2):
        _step(pairs, made, [scale * one for one in gradients])
    return [
        place
        for place, value in beyond(made[0]).items()
        if place not in before or not same(plain(place, before[place]), plain(place, value))
    ]


def _check_tellable(given: torch.optim.Optimizer, tried: torch.optim.Optimizer, changed: Sequence[str]) -> None:
    """Raise UsageError for what a tried optimizer has learnt where owners can tell nobody of it.

    ``changed`` are such places beyond it.
    """
    name = type(tried).__name__
    for of in tried.state:
        if not isinstance(of, torch.Tensor):
            raise refusal(name, f"it keeps {of!r} in its state beside that of parameters, which owners cannot tell")
    for key, value in vars(tried).items():
        holds = key not in _LEFT_OUT and isinstance(value, (list, dict)) and not is_plain(value)
        if holds and is_plain(vars(given).get(key)) and is_read(tried, key):
            raise refusal(name, f"it keeps tensors in its attribute {key!r}, which owners cannot tell; {_KEEP}")
    if changed:
        raise refusal(name, f"it changes {changed[0]}, which owners cannot tell; {_KEEP}")


def _holds_tensors(optimizer: torch.optim.Optimizer) -> str:
    """The name of an attribute, beside the groups, that has a parameter in it, or nothing."""
    parameters = {id(one) for group in optimizer.param_groups for one in group["params"]}
    for name, value in vars(optimizer).items():
        held = [*value, *value.values()] if isinstance(value, dict) else value
        if name not in _LEFT_OUT and isinstance(held, (list, tuple, set)) and parameters & set(map(id, held)):
            return name
    return ""


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
    known = _elementwise_keys(optimizer)
    for parameter in group["params"]:
        state = optimizer.state.get(parameter)
        if state:
            return {
                key: torch.full_like(tensor, float(value.double().mean()), requires_grad=False)
                if _elementwise(key, value, parameter, known)
                else copy.deepcopy(value)
                for key, value in state.items()
            }
    return {}


def _elementwise_keys(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Under which the state of parameters that are no scalars has an element for each of theirs."""
    return frozenset(
        key
        for parameter, state in optimizer.state.items()
        if isinstance(parameter, torch.Tensor) and parameter.dim() > 0
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    )


def _elementwise(key: str, value: Any, parameter: torch.Tensor, known: frozenset[str]) -> bool:
    """Whether a value of a parameter's state has an element for each of the parameter's.

    A scalar's momentum and its count of steps have the same shape: other parameters tell them apart, by ``known``, and
    if there are none the name that torch itself goes by.
    """
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    return value.dim() > 0 or (key in known if known else key != "step")


def records_of(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> list[Record]:
    """A whole optimizer's state as records: what a user loaded or trained before."""
    found, known = [], _elementwise_keys(optimizer)
    for index, parameter in enumerate(parameters):
        whole = Slice(index, 0, parameter.numel())
        for key, value in optimizer.state.get(parameter, {}).items():
            if _elementwise(key, value, parameter, known):
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
