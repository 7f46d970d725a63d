"""Deferred updates: a parameter is updated when somebody looks at it, by the user's optimizer on that part alone.

Between the end of backward and the next forward pass of its layer a parameter's gradient, and then its new value, may
not have come yet. As long as that is so the parameter has another class: a subclass of ``torch.nn.Parameter`` that
torch asks (``__torch_function__``) before it does anything with it in Python, be it a layer, ``clip_grad_norm_``, a
moving average, ``state_dict`` or a print. Asked for its gradient or its value it is completed first, gets its own class
back, and what was asked for goes on as if nothing had been. So a script needs to know of nothing, wherever it has got
the parameter from, and layers need no hooks.

What does not ask is not seen: tensors that share a parameter's memory and were made before (a kept ``p.data``), and
extensions that take tensors from Python by themselves. ``overlap`` has what is done about it.

The update (``update``) is made by a copy of the optimizer object whose groups hold these parameters alone, with the
values that the groups had when it was called, and whose state is the original's. That is what the optimizer itself
would have done only where no parameter's update depends on another's, and where it keeps nothing but its state and its
groups. So it is with torch's own. Of others nobody can know: one whose class says ``updates_parameters_alone = True``
is believed when ``probe_parts`` has found no fault on small tensors.

``LocalSteps`` are a worker's own step ahead of the average: plain SGD without state, from the weights that all have.
While the gradients of step t are under way, a worker computes the next ones at

    w(t+1) = W(t) - lr g(t)

with its own gradient g(t), plus it for an optimizer that maximizes, and W(t), the weights that all have, updated with
the average of step t-1 ("OD-SGD", Xu et al., ACM TACO 2020). Memory: a copy of the weights, and the worker's own
gradients.
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
"""What reads neither value nor gradient."""
_GRADIENT: Any = torch.Tensor.grad
_GET_GRADIENT = _GRADIENT.__get__
_SET_GRADIENT = frozenset((_GRADIENT.__set__, _GRADIENT.__delete__))


class DeferredParameter(torch.nn.Parameter):
    """The class of a parameter as long as something of it is under way."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Complete the parameters among the arguments, unless they are not looked at, and go on."""
        if func in _HARMLESS or func in _SET_GRADIENT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = list(_among((args, kwargs)))
        if func == _GET_GRADIENT:
            for deferral in _deferrals_of(found):
                deferral.complete_all()
        else:
            _complete(found)
        if any(_among((args, kwargs))):  # of nobody's: made by calling the class of one that was deferred
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Who calls the class of a parameter gets a plain one."""
        return torch.nn.Parameter(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Of the completed parameter."""
        _complete([self])
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Of the completed parameter."""
        _complete([self])
        return self.__reduce_ex__(protocol)


class Deferral:
    """The parameters of one model, some of which are deferred.

    ``read`` is called, in the thread that looks, with the numbers of those that are looked at, and ``read_all`` where a
    gradient is: afterwards these, or all, have to be complete.
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
        """Held by whoever completes parameters, or changes which are deferred."""
        self.numbers: dict[int, int] = {}
        """Of the deferred ones, by identity."""
        self.watches = False
        """Whether nothing is under way, and who looks is only told of."""

    @property
    def any(self) -> bool:
        """Whether any parameter is deferred."""
        return bool(self.numbers)

    def defer(self, numbers: Iterable[int]) -> None:
        """From now on these are completed when they are looked at."""
        for number in numbers:
            parameter = self.parameters[number]
            parameter.__class__ = DeferredParameter
            self.numbers[id(parameter)] = number
            _DEFERRED[id(parameter)] = self

    def release(self, numbers: Iterable[int]) -> None:
        """These are what they seem to be."""
        for number in numbers:
            parameter = self.parameters[number]
            if self.numbers.pop(id(parameter), None) is not None:
                _DEFERRED.pop(id(parameter), None)
                parameter.__class__ = _PLAIN

    def release_all(self) -> None:
        """All are."""
        self.release(list(self.numbers.values()))

    def complete(self, parameters: Iterable[torch.Tensor]) -> None:
        """Somebody looks at these."""
        with self.lock:
            numbers = [number for one in parameters if (number := self.numbers.get(id(one))) is not None]
            if numbers:
                self._check_transforms()
                self._read(numbers)
                self.release(numbers)

    def complete_all(self) -> None:
        """Somebody looks at a gradient."""
        with self.lock:
            if self.numbers:
                self._check_transforms()
                self._read_all()
                self.release_all()

    def _check_transforms(self) -> None:
        if not self.watches and in_transform():
            raise UsageError(
                "a transform of torch.func looks at weights whose update has not been made, and inside it none can be:"
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
    """The deferred parameters in what a function was given."""
    if isinstance(found, DeferredParameter):
        yield found
    elif isinstance(found, (tuple, list)):
        for one in found:
            yield from _among(one)
    elif isinstance(found, dict):
        for one in found.values():
            yield from _among(one)


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


class LocalSteps:
    """Takes ``parameters`` ahead and back; learning rates are those of the optimizer's groups."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._parameters = parameters
        for group in optimizer.param_groups:
            if "lr" not in group:
                raise UsageError(
                    f"{type(optimizer).__name__} has no learning rate, which a local step takes: use"
                    " schedule=delayed(local=off)"
                )
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._shared = [torch.empty_like(parameter, requires_grad=False) for parameter in parameters]
        self._mine: dict[int, torch.Tensor] = {}
        self._ahead = False

    def forget(self) -> None:
        """A backward pass begins to make gradients; what is left of the one before has not been stepped from."""
        self._mine.clear()

    def keep(self, number: int, gradient: torch.Tensor, copy: bool) -> None:
        """This worker's own gradient of a parameter."""
        self._mine[number] = gradient.clone() if copy else gradient

    def go_ahead(self, values: Values) -> None:
        """From the weights that all have to this worker's own."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter, shared in zip(self._parameters, self._shared, strict=True):
                shared.copy_(parameter)
            for group in values:
                for parameter in group["params"]:
                    if (gradient := self._mine.get(self._numbers.get(id(parameter), -1))) is not None:
                        parameter.add_(gradient * group["lr"], alpha=1 if group.get("maximize") else -1)
        self._mine, self._ahead = {}, True

    def go_back(self) -> None:
        """To the weights that all have, if this worker is ahead of them."""
        if not self._ahead:
            return
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter, shared in zip(self._parameters, self._shared, strict=True):
                parameter.copy_(shared)
        self._ahead = False
