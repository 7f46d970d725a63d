"""The user's optimizer on parts of the weights: on flat slices at their owners, or on some parameters at a time.

``SlicedOptimizer`` is a real torch optimizer on flat slices, as ``serving`` needs it. The update of slices equals the
update of whole tensors only for optimizers that treat every element by itself. ``probe`` tests an optimizer for that on
small tensors. The optimizer's state is sent and received as records, whose elements belong to no framework. Here they
become tensors again, as if one process had trained.

``update`` makes a deferred update of some parameters by a copy of the optimizer object. The copy's groups hold these
parameters alone, with the group values of the call; the state is the original's. The result equals the optimizer's own
only if no parameter's update depends on another's, and if the optimizer keeps nothing outside its state and its groups.
This holds for PyTorch's own optimizers. The class of another optimizer has to declare it with
``updates_parameters_alone = True``; ``probe_parts`` then tests it on small tensors.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import SynclineError, UsageError
from ...nouns import Slice
from ...serving.records import Elements, Record, State
from ...serving.shard import Groups, Holding
from .own_values import (
    OF_STEPS,
    attributes,
    beyond,
    copy_with,
    is_plain,
    is_read,
    name_of,
    near,
    plain,
    put,
    refusal,
    same,
    told,
    values_of,
)
from .storage import as_torch, dtype_name, memory, view_like


class SlicedOptimizer:
    """A user's optimizer on the slices that a process owns; it updates the weights of the holdings in place.

    ``own`` has the keys of each group, followed by the attributes, that the optimizer itself changes (``probe``). The
    attributes are copied back to ``optimizer``, because the next optimizer for other slices is built from it.
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
        self._optimizer = on_slices(
            optimizer, optimizer.param_groups, parameters, [held.slice for held in holdings], self._parts
        )

    def squared_norm(self) -> float:
        return float(sum(gradient.double().square().sum() for gradient in self._gradients))

    def apply(self, groups: Groups, scale: float) -> None:
        """Make one step, independent of the autograd and autocast modes of the calling thread."""
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
        # The next optimizer for other slices is built from ``_model``; values of groups are sent to it.
        vars(self._model).update({key: value for key, value in vars(self._optimizer).items() if key not in _LEFT_OUT})
        after = values_of(self._optimizer)
        for number, (old, new, own) in enumerate(zip(before, after, self._own, strict=True)):
            for key, value in old.items():
                if key in new and key not in own and not same(new[key], value):
                    raise refusal(
                        type(self._optimizer).__name__,
                        f"it has changed {name_of(key, number, len(after))} itself, from {value} to {new[key]}; it did"
                        f" not do so in the {_TRIED_STEPS} steps of its trial, so this value is not sent to workers",
                    )

    def advanced(self) -> Groups:
        """As texts. Groups without slices here return nothing, because an optimizer may skip them in its counts."""
        groups = self._optimizer.param_groups
        of_some = any(group["params"] for group in groups)
        has_slices = [*(bool(group["params"]) for group in groups), of_some]
        return [told(self._optimizer, number, self._own) if has else {} for number, has in enumerate(has_slices)]

    def state(self) -> list[State]:
        """Tensors become elements that share their memory; other values are unchanged."""
        return [
            {key: _to_elements(value) for key, value in self._optimizer.state.get(part, {}).items()}
            for part in self._parts
        ]

    def load(self, states: Sequence[State]) -> None:
        for part, state in zip(self._parts, states, strict=True):
            self._optimizer.state[part] = {key: _to_tensors(value) for key, value in state.items()}


def _dtype(held: Holding) -> torch.dtype:
    found: torch.dtype = getattr(torch, str(held.weights.dtype))
    return found


def as_elements(tensor: torch.Tensor) -> Elements:
    """The elements of a tensor; they share its memory if it is contiguous and on the host."""
    data = memory(tensor.detach().cpu().contiguous())
    return Elements(dtype_name(tensor.dtype), tuple(tensor.shape), data)


def as_tensor(elements: Elements) -> torch.Tensor:
    """A tensor that shares the memory of these elements."""
    dtype: torch.dtype = getattr(torch, elements.dtype)
    if elements.data.size == 0:  # torch does not accept NumPy's strides of an empty array
        return torch.empty(elements.shape, dtype=dtype)
    return torch.from_numpy(elements.data).view(dtype).reshape(elements.shape)


def _to_elements(value: Any) -> Any:
    return as_elements(value) if isinstance(value, torch.Tensor) else value


def _to_tensors(value: Any) -> Any:
    return as_tensor(value) if isinstance(value, Elements) else value


_LEFT_OUT = ("state", "param_groups", *OF_STEPS)
"""The attributes that a copy of an optimizer on slices does not share with the original."""


def on_slices(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    parameters: Sequence[torch.Tensor],
    slices: Sequence[Slice],
    parts: Sequence[torch.Tensor],
) -> torch.optim.Optimizer:
    """A copy of an optimizer without state, with these groups, which hold flat slices (``parts``) of their tensors."""
    number = {id(parameter): index for index, parameter in enumerate(parameters)}
    of_tensor: dict[int, list[torch.Tensor]] = defaultdict(list)
    for one, part in zip(slices, parts, strict=True):
        of_tensor[one.tensor].append(part)
    cut = [
        {
            **group,
            "params": [part for tensor in group["params"] for part in of_tensor[number.get(id(tensor), -1)]],
        }
        for group in groups
    ]
    return copy_with(optimizer, type(optimizer), cut, defaultdict(dict), steps=True, apart=True)


@dataclass(frozen=True)
class Probed:
    """The result of ``probe``: whether the optimizer keeps a state, and the names of values that it may change.

    If it was seen to change a value of a group, ``own`` has every number and text of all groups; likewise for
    attributes. Prodigy's estimate, for example, first changes after some steps. ``changed`` has the values that were
    seen to change.
    """

    keeps_state: bool
    own: tuple[frozenset[str], ...]
    changed: tuple[frozenset[str], ...] = ()  # the values that were seen to change


_SHAPES = ((6, 4), (9,))
_CUT = (Slice(0, 0, 5), Slice(0, 5, 24), Slice(1, 0, 4), Slice(1, 4, 9))
_SCALES = (1.0, 1e4, 1e-4)
"""The scales of the gradients in the tried steps: a limit on a norm shows at one of them."""
_TRIED_STEPS = len(_SCALES)


def probe(optimizer: torch.optim.Optimizer, owners: int = 1) -> Probed:
    """Raise UsageError unless the optimizer gives the same result on the slices of ``owners`` as on whole tensors.

    It makes a few steps with the values of each group on a random matrix and a random vector: twice on whole tensors,
    and once on flat slices. The slices belong to two owners if there are several.
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
            "two copies of it reach different weights from the same start and gradients: it draws random numbers, or"
            f" keeps something outside of itself; {_KEEP}",
        )
    # Some optimizers, such as RAdam, change nothing in their first steps: that alone is no fault.
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
    """Whether the parts equal the corresponding elements of the whole tensors."""
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
    """The keys that have changed in each group, followed by the changed attributes."""
    return tuple(
        frozenset(key for key, value in new.items() if key not in old or not same(old[key], value))
        for old, new in zip(before, after, strict=True)
    )


def _own(after: Sequence[Mapping[str, Any]], changed: Sequence[frozenset[str]]) -> tuple[frozenset[str], ...]:
    """The keys that may change in each group, followed by the attributes that may change."""
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
    """Make one step of each optimizer with these gradients of whole tensors."""
    for one, tensor in pairs:
        tensor.grad = gradients[one.tensor].reshape(-1)[one.start : one.stop].reshape(tensor.shape).clone()
    for optimizer in made:
        optimizer.step()


def _changed_beyond(
    pairs: Sequence[tuple[Slice, torch.Tensor]],
    made: Sequence[torch.optim.Optimizer],
    gradients: Sequence[torch.Tensor],
) -> list[str]:
    """The places outside the optimizer that it still changes after other copies of it have made steps.

    A change that happens only once, such as a warning or a cache entry, does not count. ``gradients`` have the smallest
    scale tried; steps with larger and smaller gradients follow, in case the optimizer keeps an extreme value.
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
    """Raise UsageError if the tried optimizer keeps something that owners cannot send.

    ``changed`` are the places outside the optimizer that it changes.
    """
    name = type(tried).__name__
    for of in tried.state:
        if not isinstance(of, torch.Tensor):
            raise refusal(name, f"it keeps {of!r} in its state besides parameters, which owners cannot send")
    for key, value in vars(tried).items():
        holds = key not in _LEFT_OUT and isinstance(value, (list, dict)) and not is_plain(value)
        if holds and is_plain(vars(given).get(key)) and is_read(tried, key):
            raise refusal(name, f"it keeps tensors in its attribute {key!r}, which owners cannot send; {_KEEP}")
    if changed:
        raise refusal(name, f"it changes {changed[0]}, which owners cannot send; {_KEEP}")


def _holds_tensors(optimizer: torch.optim.Optimizer) -> str:
    """The name of an attribute, other than the groups, that holds a parameter; empty if there is none."""
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
    each = len(_SHAPES)
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
        of_start = [
            {**copy.deepcopy(group), "params": start[each * number : each * (number + 1)]}
            for number, group in enumerate(groups)
        ]
        of = on_slices(optimizer, of_start, start, share, parts)
        for one, part in zip(share, parts, strict=True):
            of.state[part] = state_like(optimizer, optimizer.param_groups[one.tensor // each], part)
        if callable(turn := getattr(of, "train", None)):
            turn()  # schedule-free optimizers start in evaluation mode, in which they refuse to step
        pairs += zip(share, parts, strict=True)
        made.append(of)
    return pairs, made


def state_like(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], tensor: torch.Tensor) -> dict[str, Any]:
    """A state like the optimizer's for a parameter of that group, empty if it has none; Adagrad always has one."""
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
    """The keys whose values, for parameters that are not scalars, have one element per element of the parameter."""
    return frozenset(
        key
        for parameter, state in optimizer.state.items()
        if isinstance(parameter, torch.Tensor) and parameter.dim() > 0
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    )


def _elementwise(key: str, value: Any, parameter: torch.Tensor, known: frozenset[str]) -> bool:
    """Whether a value of a parameter's state has an element for each of the parameter's.

    For a scalar, momentum and the count of steps have the same shape. The keys ``known`` from other parameters separate
    them; without other parameters, the name ``step`` that PyTorch itself uses.
    """
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    return value.dim() > 0 or (key in known if known else key != "step")


def records_of(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> list[Record]:
    """A whole optimizer's state as records, such as a state that the user has loaded or trained before."""
    found, known = [], _elementwise_keys(optimizer)
    for index, parameter in enumerate(parameters):
        whole = Slice(index, 0, parameter.numel())
        for key, value in optimizer.state.get(parameter, {}).items():
            if _elementwise(key, value, parameter, known):
                value = in_memory_order(value, parameter)
            found.append(Record(whole, key, _to_elements(value)))
    return found


def whole_state(records: Iterable[Record], parameters: Sequence[torch.Tensor]) -> dict[torch.Tensor, dict[str, Any]]:
    """The state that one process would have, by parameter, assembled from the records of all slices."""
    flat: dict[tuple[int, str], torch.Tensor] = {}
    state: dict[torch.Tensor, dict[str, Any]] = {}
    for record in records:
        part, value = record.slice, _to_tensors(record.value)
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
    """The elements of a tensor, flat, in the order in which the elements of ``like`` lie in its storage."""
    flat = torch.empty(value.numel(), dtype=value.dtype)
    view_like(flat, like).copy_(value)
    return flat


# On whole parameters, some at a time.


Values = list[dict[str, Any]]
"""The values of an optimizer's groups, including their parameters."""

DECLARED = "updates_parameters_alone"
"""The attribute by which an optimizer's class declares that it updates each parameter alone."""

_OF_TORCH = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor",
    "Muon",
)  # fmt: skip


def updates_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the update of a parameter depends on that parameter alone: known for PyTorch's own, else declared."""
    known = [getattr(torch.optim, name, None) for name in _OF_TORCH]
    return type(optimizer) in known or bool(getattr(type(optimizer), DECLARED, False))


def group_copies(optimizer: torch.optim.Optimizer) -> Values:
    """Copies of the groups' present values, which later calls of a learning-rate scheduler do not change."""
    return [{key: _kept(value) for key, value in group.items()} for group in optimizer.param_groups]


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def update(
    optimizer: torch.optim.Optimizer,
    plain: type,
    values: Values,
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
) -> Values:
    """Update these parameters with these gradients. Returns the group values after the update.

    ``plain`` is the optimizer's original class. The script's autograd and autocast modes have no effect, and ``.grad``
    is restored.
    """
    wanted = {id(parameter) for parameter in parameters}
    groups = [{**said, "params": [one for one in said["params"] if id(one) in wanted]} for said in values]
    part = copy_with(optimizer, plain, groups, vars(optimizer)["state"], steps=True)
    device = parameters[0].device.type
    with torch.inference_mode(mode=False), torch.no_grad(), torch.amp.autocast(device, enabled=False):
        before = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        try:
            part.step()
        finally:
            for parameter, gradient_before in zip(parameters, before, strict=True):
                parameter.grad = gradient_before
    return part.param_groups


def write_back(optimizer: torch.optim.Optimizer, before: Values, after: Values) -> None:
    """Write the group values that the optimizer has changed, except those that the script has changed meanwhile."""
    for group, old, new in zip(optimizer.param_groups, before, after, strict=False):
        for key, value in new.items():
            if key == "params":
                continue
            changed = key not in old or (value is not old[key] and not same(value, old[key]))
            if changed and (key not in group or key not in old or same(group[key], old[key])):
                group[key] = value


def probe_parts(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError unless the optimizer gives the same result on one parameter at a time as on all.

    It makes a few steps with each group's values, on a random matrix and a random vector.
    """
    tried: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        values = {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr", "names")}
        if not any(_same_values(values, one) for one in tried):
            tried.append(values)
            # The learning rate may be 0 now, under a warm-up, when every optimizer would look the same.
            _probe_group(optimizer, {**group, "lr": 0.1} if "lr" in group else group)


def _same_values(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())


def _probe_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    name, plain = type(optimizer).__name__, type(optimizer)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in _SHAPES]
    gradients = [
        [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in _SHAPES]
        for scale in (1.0, 1e-4, 1e4) * 3  # so that updates with a limit differ
    ]
    results = []
    for together in (True, False):
        tensors = [tensor.clone().requires_grad_() for tensor in start]
        groups = [{**group, "params": tensors}]
        one = copy_with(optimizer, plain, groups, defaultdict(dict), steps=True, apart=True)
        for tensor in tensors:
            if state := state_like(optimizer, group, tensor):
                one.state[tensor] = state
        try:
            for step in gradients:
                before = after = group_copies(one)
                if together:
                    for tensor, gradient in zip(tensors, step, strict=True):
                        tensor.grad = gradient.clone()
                    one.step()
                    continue
                for i in reversed(range(len(tensors))):
                    after = update(one, plain, before, [tensors[i]], [step[i].clone()])
                write_back(one, before, after)
        except Exception as error:
            raise _refusal(name, f"it does not work on some of them ({type(error).__name__}: {error})") from error
        results.append([tensor.detach() for tensor in tensors])
    if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
        raise _refusal(name, "its update of a parameter depends on others")


def _refusal(name: str, why: str) -> UsageError:
    return UsageError(
        f"{name} cannot update parameters one by one as their gradients arrive: {why};"
        " use schedule=fixed, or an element-wise optimizer such as SGD or Adam"
    )
