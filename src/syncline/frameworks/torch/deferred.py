"""Deferred updates: each parameter is updated at its first use, by the user's optimizer on that parameter alone.

Between the end of backward and its layer's next forward pass, a parameter's gradient, and then its new value, may still
be in flight. During that time the parameter has another class: a subclass of ``torch.nn.Parameter`` whose
``__torch_function__`` PyTorch calls before any use in Python, be it a layer, ``clip_grad_norm_``, a moving average,
``state_dict`` or a print. If the use reads the gradient or the value, the parameter is completed and gets its own class
back, and the use then proceeds normally. The script therefore needs no changes, however it has obtained the parameter,
and layers need no hooks.

Two kinds of use are not reported: tensors that share a parameter's memory and were made before (a kept ``p.data``), and
extensions that read tensors from Python directly. ``overlap`` describes how it handles them.

``update`` uses a copy of the optimizer object. The copy's groups hold these parameters alone, with the group values of
the call; the state is the original's. The result equals the optimizer's own only if no parameter's update depends on
another's, and if the optimizer keeps nothing outside its state and its groups. This holds for PyTorch's own optimizers.
The class of another optimizer has to declare it with ``updates_parameters_alone = True``; ``probe_parts`` then tests it
on small tensors.

``LocalSteps`` are a worker's own steps ahead of the average: plain SGD without state, from the weights that all workers
share. While the gradients of step t are in flight, a worker computes the next ones at

    w(t+1) = W(t) - lr g(t)

with its own gradient g(t) (added for an optimizer that maximizes), and the shared weights W(t), updated with the
average of step t-1 ("OD-SGD", Xu et al., ACM TACO 2020). Memory: a copy of the weights, and the worker's own gradients.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ...errors import UsageError
from .hooks import Telling
from .own_values import own_attributes
from .shard import state_like

_PLAIN = torch.nn.Parameter

_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "names", "itemsize", "nbytes", "grad_fn",
    "is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested",
    "retains_grad", "output_nr", "_backward_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "get_device",
    "is_contiguous", "is_floating_point", "is_complex", "__len__", "register_hook",
    "register_post_accumulate_grad_hook",
)  # fmt: skip


def _harmless() -> Iterator[Any]:
    for name in _ATTRIBUTES:
        if hasattr(torch.Tensor, name):
            attribute = getattr(torch.Tensor, name)
            yield attribute.__get__
            if hasattr(attribute, "__set__"):
                yield attribute.__set__
    yield from (getattr(torch.Tensor, name) for name in _METHODS)


_HARMLESS = frozenset(_harmless())
"""Functions that read neither the value nor the gradient."""
_GRADIENT: Any = torch.Tensor.grad
_GET_GRADIENT = _GRADIENT.__get__
_SET_GRADIENT = frozenset((_GRADIENT.__set__, _GRADIENT.__delete__))


class DeferredParameter(torch.nn.Parameter):
    """The class of a parameter whose gradient or value is in flight."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Complete the parameters among the arguments if ``func`` reads them, then call it."""
        if func in _HARMLESS or func in _SET_GRADIENT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = list(_among((args, kwargs)))
        if func == _GET_GRADIENT:
            for deferral in _deferrals_of(found):
                deferral.complete_all()
        else:
            _complete(found)
        if any(_among((args, kwargs))):  # no deferral owns it: it was made from the class of a deferred parameter
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a plain parameter to code that calls the class of a deferred one."""
        return torch.nn.Parameter(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Complete the parameter first."""
        _complete([self])
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Complete the parameter first."""
        _complete([self])
        return self.__reduce_ex__(protocol)


class Deferral:
    """The parameters of one model, some of them deferred.

    A read calls ``read`` with the numbers of the parameters, in the reading thread; afterwards these must be complete.
    A read of a gradient calls ``read_all``; afterwards all parameters must be complete.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        read: Callable[[Sequence[int]], None],
        read_all: Callable[[], None],
    ) -> None:
        self.parameters = parameters
        self._read, self._read_all = read, read_all
        self.lock = threading.RLock()
        """Held while a thread completes parameters, or changes which parameters are deferred."""
        self.numbers: dict[int, int] = {}
        """The number of each deferred parameter, by its ``id``."""
        self.watches = False
        """Whether nothing is in flight, so that reads are only reported."""

    @property
    def any(self) -> bool:
        """Whether any parameter is deferred."""
        return bool(self.numbers)

    def defer(self, numbers: Iterable[int]) -> None:
        """Complete these parameters at their next read."""
        for number in numbers:
            parameter = self.parameters[number]
            parameter.__class__ = DeferredParameter
            self.numbers[id(parameter)] = number
            _DEFERRED[id(parameter)] = self

    def release(self, numbers: Iterable[int]) -> None:
        """End the deferral of these parameters: they are complete."""
        for number in numbers:
            parameter = self.parameters[number]
            if self.numbers.pop(id(parameter), None) is not None:
                _DEFERRED.pop(id(parameter), None)
                parameter.__class__ = _PLAIN

    def release_all(self) -> None:
        """End the deferral of all parameters."""
        self.release(list(self.numbers.values()))

    def complete(self, parameters: Iterable[torch.Tensor]) -> None:
        """Complete these parameters, because they are read."""
        with self.lock:
            numbers = [number for one in parameters if (number := self.numbers.get(id(one))) is not None]
            if numbers:
                self._check_transforms()
                self._read(numbers)
                self.release(numbers)

    def complete_all(self) -> None:
        """Complete all parameters, because a gradient is read."""
        with self.lock:
            if self.numbers:
                self._check_transforms()
                self._read_all()
                self.release_all()

    def _check_transforms(self) -> None:
        if not self.watches and in_transform():
            raise UsageError(
                "a transform of torch.func reads weights before their update, which cannot be made inside a transform:"
                " call syncline.flush() before it, or use schedule=fixed"
            )


def in_transform() -> bool:
    """Whether a transform of torch.func is running."""
    return torch._C._functorch.maybe_current_level() is not None


_DEFERRED: dict[int, Deferral] = {}


def _deferrals_of(parameters: Sequence[torch.Tensor]) -> list[Deferral]:
    found = [_DEFERRED.get(id(one)) for one in parameters]  # another thread may have completed some meanwhile
    return list({id(one): one for one in found if one is not None}.values())


def _complete(parameters: Sequence[torch.Tensor]) -> None:
    for deferral in _deferrals_of(parameters):
        deferral.complete(parameters)


def _among(found: Any) -> Iterator[DeferredParameter]:
    """The deferred parameters among a function's arguments, also in tuples, lists and dictionaries."""
    if isinstance(found, DeferredParameter):
        yield found
    elif isinstance(found, (tuple, list)):
        for one in found:
            yield from _among(one)
    elif isinstance(found, dict):
        for one in found.values():
            yield from _among(one)


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


def values_of(optimizer: torch.optim.Optimizer) -> Values:
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


_OURS = ("step", "_overlap", "_hidden", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


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
    """Write the group values that the optimizer has changed, except those that the script has changed meanwhile."""
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
    """Whether hooks run before or after every step. Such a step has to be a single one."""
    of_one = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    theirs = [hook for hook in of_one if not isinstance(hook, Telling)]
    return bool(theirs or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


_SHAPES = ((6, 4), (9,))
_SCALES = (1.0, 1e-4, 1e4) * 3
"""The scales of the gradients in the tried steps, so that updates with a limit differ."""


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
        f"{name} cannot update parameters one by one as their gradients arrive: {why};"
        " use schedule=fixed, or an element-wise optimizer such as SGD or Adam"
    )


class LocalSteps:
    """Moves ``parameters`` ahead of the shared weights and back. The learning rates are those of the optimizer's
    groups."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._parameters = parameters
        for group in optimizer.param_groups:
            if "lr" not in group:
                raise UsageError(
                    f"{type(optimizer).__name__} has no learning rate, and a local step needs one: use"
                    " schedule=delayed(local=off)"
                )
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._shared = [torch.empty_like(parameter, requires_grad=False) for parameter in parameters]
        self._mine: dict[int, torch.Tensor] = {}
        self._ahead = False

    def forget(self) -> None:
        """Drop the last gradients, from which no step was made: a backward pass begins."""
        self._mine.clear()

    def keep(self, number: int, gradient: torch.Tensor, copy: bool) -> None:
        """Keep this worker's own gradient of a parameter, as a copy if ``copy``."""
        self._mine[number] = gradient.clone() if copy else gradient

    def go_ahead(self, values: Values) -> None:
        """Move from the shared weights to this worker's own."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter, shared in zip(self._parameters, self._shared, strict=True):
                shared.copy_(parameter)
            for group in values:
                for parameter in group["params"]:
                    if (gradient := self._mine.get(self._numbers.get(id(parameter), -1))) is not None:
                        parameter.add_(gradient * group["lr"], alpha=1 if group.get("maximize") else -1)
        self._mine, self._ahead = {}, True

    def go_back(self) -> None:
        """Return to the shared weights, if this worker is ahead of them."""
        if not self._ahead:
            return
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter, shared in zip(self._parameters, self._shared, strict=True):
                parameter.copy_(shared)
        self._ahead = False
