"""The user's optimizer on some of its parameters at a time, with the values that its groups had when it was called.

A copy of the optimizer object whose groups hold these parameters alone, and whose state is the original's, does the
update. That is what the optimizer itself would have done only where no parameter's update depends on another's, and
where it keeps nothing but its state and its groups. So it is with torch's own. Of others nobody can know: one whose
class says ``updates_parameters_alone = True`` is believed when ``probe_parts`` has found no fault on small tensors.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ...errors import UsageError
from .computing import Telling
from .own_values import own_attributes
from .shard import state_like

Values = list[dict[str, Any]]
"""Of an optimizer's groups, with their parameters."""

DECLARED = "updates_parameters_alone"
"""What the class of an optimizer says of itself."""

_OF_TORCH = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor",
    "Muon",
)  # fmt: skip


def updates_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is known, or said, that the update of a parameter depends on that parameter alone."""
    known = [getattr(torch.optim, name, None) for name in _OF_TORCH]
    return type(optimizer) in known or bool(getattr(type(optimizer), DECLARED, False))


def values_of(optimizer: torch.optim.Optimizer) -> Values:
    """The values of the groups now, whatever a learning-rate scheduler makes of them later."""
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
    """Update these parameters with these gradients; the values of the groups afterwards.

    ``plain`` is the class of the optimizer that does it. The modes that the script is in do not matter, and ``.grad``
    is as it was.
    """
    wanted = {id(parameter) for parameter in parameters}
    part = _with_groups(optimizer, plain, values, wanted)
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


_OURS = ("step", "_crossing", "_hidden", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def _with_groups(
    optimizer: torch.optim.Optimizer, plain: type, values: Values, wanted: Collection[int]
) -> torch.optim.Optimizer:
    part: torch.optim.Optimizer = object.__new__(plain)
    vars(part).update({key: value for key, value in vars(optimizer).items() if key not in _OURS})
    # The user's hooks are called by the user's optimizer, once per step; with hooks it is not used in parts.
    part._optimizer_step_pre_hooks, part._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    part.param_groups = [{**said, "params": [one for one in said["params"] if id(one) in wanted]} for said in values]
    return part


def write_back(optimizer: torch.optim.Optimizer, before: Values, after: Values) -> None:
    """Give the groups the values that the optimizer itself has changed, unless the script has changed them too."""
    for group, old, new in zip(optimizer.param_groups, before, after, strict=False):
        for key, value in new.items():
            if key == "params":
                continue
            changed = key not in old or (value is not old[key] and not _same(value, old[key]))
            if changed and (key not in group or key not in old or _same(group[key], old[key])):
                group[key] = value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something is called before or after every step, which has to be one step then."""
    of_one = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    theirs = [hook for hook in of_one if not isinstance(hook, Telling)]
    return bool(theirs or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


_SHAPES = ((6, 4), (9,))
_SCALES = (1.0, 1e-4, 1e4) * 3
"""Of the gradients of the steps that are tried: updates that are limited by something show it."""


def probe_parts(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError unless the optimizer gives the same result on one parameter at a time as on all.

    Some steps with the values of each group, on a matrix and a vector of random numbers.
    """
    tried: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        values = {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr", "names")}
        if not any(_same_values(values, one) for one in tried):
            tried.append(values)
            # The learning rate may be 0 now, under a warm-up, when every optimizer would look the same.
            _probe_group(optimizer, {**group, "lr": 0.1} if "lr" in group else group)


def _same_values(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())


def _probe_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    name, plain = type(optimizer).__name__, type(optimizer)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in _SHAPES]
    gradients = [
        [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in _SHAPES] for scale in _SCALES
    ]
    results = []
    for together in (True, False):
        tensors = [tensor.clone().requires_grad_() for tensor in start]
        one: torch.optim.Optimizer = object.__new__(plain)
        vars(one).update(
            {key: value for key, value in own_attributes(optimizer).items() if key not in ("state", *_OURS)}
        )
        one._optimizer_step_pre_hooks, one._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        one.param_groups = [{**group, "params": tensors}]
        one.state = defaultdict(dict)
        for tensor in tensors:
            if state := state_like(optimizer, group, tensor):
                one.state[tensor] = state
        try:
            for step in gradients:
                before = after = values_of(one)
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
        f"{name} cannot update parameters one after the other, when each one's gradient has come: {why};"
        " use schedule=fixed, or an element-wise optimizer such as SGD or Adam"
    )
