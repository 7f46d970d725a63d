"""Compiled functions as Python sees them: what they take, and how they are called.

A kernel is a Python function that the decorators here mark: ``compiled`` those that Python calls, ``inner`` and
``inlined`` those that compiled ones call. What they decorate never runs as Python. A process of its own compiles a
whole module of them (``compiler``), what it makes is kept (``objects``), and here it is opened and called by ctypes,
without the interpreter lock: no compiler is loaded, and nothing is unpickled. A module is compiled, or opened, when it
is imported.

A function in machine code takes the address of its parameters and nothing else: 8 bytes each, an array as its address
followed by its shape. So a call costs the same whatever it takes, and parameters that stay can be laid out once
(``Compiled.bind``).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import objects

_F = TypeVar("_F", bound=Callable[..., Any])


class Compiler(Protocol):
    """What makes machine code of the marked functions, in the process that does."""

    def inner(self, function: Callable[..., Any], inline: bool) -> Any: ...  # noqa: D102
    def compiled(self, function: Callable[..., Any], signature: Signature) -> Any: ...  # noqa: D102
    def instruction(self, name: str) -> Any: ...  # noqa: D102
    def external(self, name: str, signature: Signature) -> Any: ...  # noqa: D102


compiler: Compiler | None = None
"""None everywhere but in a process that compiles."""


@dataclass(frozen=True)
class Parameter:
    """A number, or an array of ``dims`` dimensions, C-contiguous and writable; ``element`` names its type."""

    element: str
    dims: int = 0

    @classmethod
    def parse(cls, text: str) -> Parameter:
        """``int64``, ``float32[]``, ``int64[,]``."""
        element, bracket, rest = text.strip().partition("[")
        return cls(element, rest.count(",") + 1 if bracket else 0)


@dataclass(frozen=True)
class Signature:
    """What a function takes and returns: ``(float32[], int64) -> int64``."""

    parameters: tuple[Parameter, ...]
    results: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Signature:
        """Read ``text``; dimensions are commas within brackets, several results are separated by commas."""
        taken, _, given = text.partition("->")
        inside = taken.strip()[1:-1].replace("[,]", "[;]")
        parts = [part.replace(";", ",") for part in inside.split(",") if part.strip()]
        results = tuple(part.strip() for part in given.split(",") if part.strip())
        return cls(tuple(map(Parameter.parse, parts)), results)

    @property
    def layout(self) -> str:
        """The parameters in memory, in the letters of ``struct``."""
        letters = (("q" + "q" * item.dims) if item.dims else _letter(item.element) for item in self.parameters)
        return "=" + "".join(letters) + ("q" if len(self.results) > 1 else "")


def _letter(element: str) -> str:
    return "d" if element.startswith("float") else "q"


def compiled(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Mark a function that Python calls; it returns a number, a bool, some whole numbers, or nothing."""
    parsed = Signature.parse(signature)

    def decorate(function: Callable[..., Any]) -> Any:
        if compiler is not None:
            return compiler.compiled(function, parsed)
        return Compiled(function, parsed)

    return decorate


def inner(function: _F) -> _F:
    """Mark a function that compiled ones call; its types follow from theirs."""
    return function if compiler is None else compiler.inner(function, inline=False)


def inlined(function: _F) -> _F:
    """As ``inner``, but written into those that call it."""
    return function if compiler is None else compiler.inner(function, inline=True)


def instruction(function: _F) -> _F:
    """Mark a function of ``native`` that stands for instructions."""
    return function if compiler is None else compiler.instruction(function.__name__)


def external(name: str, signature: str) -> Any:
    """A function of the C library, for compiled functions to call."""
    return None if compiler is None else compiler.external(name, Signature.parse(signature))


class Compiled:
    """A function in machine code. Raises TypeError for anything but what its signature says."""

    def __init__(self, function: Callable[..., Any], signature: Signature) -> None:
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        address = objects.address(function.__module__, function.__name__)
        result = _C_TYPES.get(signature.results[0], ctypes.c_int64) if signature.results else None
        self._call = ctypes.CFUNCTYPE(result, ctypes.c_void_p)(address)
        self._pack = struct.Struct(signature.layout).pack
        self._wanted = [_Wanted(item) for item in signature.parameters]
        self._numbers = not any(item.dims for item in signature.parameters)
        self._results = len(signature.results)
        self._size = struct.calcsize(signature.layout) // 8

    def __call__(self, *args: Any) -> Any:
        """Run it; other threads run meanwhile."""
        if len(args) != len(self._wanted):
            raise TypeError(f"{self.__name__} takes {len(self._wanted)} parameters, got {len(args)}")
        flat = args if self._numbers else self._flat(args)
        try:
            if self._results < 2:
                return self._call(self._pack(*flat))
            results = (ctypes.c_int64 * self._results)()
            self._call(self._pack(*flat, ctypes.addressof(results)))
            return tuple(results)
        except struct.error as error:
            raise TypeError(f"{self.__name__}: {error}") from None

    def bind(self, *args: Any) -> Bound:
        """This function with its first parameters, which are arrays, given; the others have to be whole numbers."""
        return Bound(self._call, self._flat(args), self._size, args)

    def _flat(self, args: Sequence[Any]) -> list[Any]:
        flat = list[Any]()
        for wanted, value in zip(self._wanted, args, strict=False):
            if wanted.dtype is None:
                flat.append(value)
                continue
            if not isinstance(value, np.ndarray) or value.dtype != wanted.dtype or value.ndim != wanted.dims:
                raise TypeError(f"{self.__name__} takes {wanted.dims}-dimensional arrays of {wanted.dtype}")
            flat.append(address_of(value))
            flat.extend(value.shape)
        return flat


class Bound:
    """A compiled function whose arrays lie where they lie; used by one thread at a time."""

    def __init__(
        self, call: Callable[[int], Any], first: Sequence[int], size: int, keep: tuple[NDArray[Any], ...]
    ) -> None:
        self._call, self._keep = call, keep
        self._block = (ctypes.c_int64 * size)(*first)
        self._address, self._first = ctypes.addressof(self._block), len(first)

    def __call__(self, *rest: int) -> Any:
        """Run it with the rest of its parameters."""
        for place, value in enumerate(rest, self._first):
            self._block[place] = value
        return self._call(self._address)


class _Wanted:
    """What is held against an argument."""

    __slots__ = ("dims", "dtype")

    def __init__(self, parameter: Parameter) -> None:
        self.dims = parameter.dims
        self.dtype = np.dtype(parameter.element) if parameter.dims else None


_NOTHING = ctypes.c_char * 0
_C_TYPES: dict[str, Any] = {"bool": ctypes.c_bool, "float32": ctypes.c_double, "float64": ctypes.c_double}


def address_of(array: NDArray[Any]) -> int:
    """Where a contiguous, writable array lies; TypeError or ValueError for others. Quicker than ``array.ctypes``."""
    return ctypes.addressof(_NOTHING.from_buffer(array))
