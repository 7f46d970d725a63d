"""Detects the first use of a parameter whose gradient or value is in flight, and completes it.

Between the end of backward and its layer's next forward pass, a parameter's gradient, and then its new value, may still
be in flight. During that time the parameter has another class: a subclass of ``torch.nn.Parameter`` whose
``__torch_function__`` PyTorch calls before any use in Python, be it a layer, ``clip_grad_norm_``, a moving average,
``state_dict`` or a print. If the use reads the gradient or the value, the parameter is completed and gets its own class
back, and the use then proceeds normally. The script therefore needs no changes, however it has obtained the parameter,
and layers need no hooks.

Two kinds of use are not reported: tensors that share a parameter's memory and were made before (a kept ``p.data``), and
extensions that read tensors from Python directly. ``deferred`` describes how it handles them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ...errors import UsageError

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
        _complete([self])
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
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
        """Complete these parameters before a read."""
        with self.lock:
            numbers = [number for one in parameters if (number := self.numbers.get(id(one))) is not None]
            if numbers:
                self._check_transforms()
                self._read(numbers)
                self.release(numbers)

    def complete_all(self) -> None:
        """Complete all parameters before a read of a gradient."""
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
