"""Compiled functions as Python sees them: what they take, and how they are called.

A kernel is a Python function that the decorators here mark: ``compiled`` those that Python calls, ``inner`` and
``inlined`` those that compiled ones call. What they decorate never runs as Python. A process of its own compiles a
whole module of them (``compiler``), what it makes is kept (``objects``), and here it is opened and called by ctypes,
without the interpreter lock: no compiler is loaded, and nothing is unpickled. A module is compiled, or opened, when it
is imported.

A function in machine code takes the address of its parameters and nothing else: 8 bytes each, an array as its address
followed by its shape. That is laid out for every call, or once where the arrays stay (``Compiled.bind``).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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

    def __str__(self) -> str:
        return self.element + ("[" + "," * (self.dims - 1) + "]" if self.dims else "")

    def of(self, array: Any) -> tuple[int, ...]:
        """The address and shape of such an array; TypeError for anything else."""
        if not isinstance(array, np.ndarray):
            raise TypeError(f"a {type(array).__name__} is no {self}")
        if array.dtype != self.element or array.ndim != self.dims:
            raise TypeError(f"an array of {array.dtype} in {array.ndim} dimensions is no {self}")
        if not (array.flags.c_contiguous and array.flags.aligned and array.flags.writeable):
            raise TypeError("arrays have to be contiguous, aligned and writable")
        return array.ctypes.data, *array.shape


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

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.parameters))})" + (f" -> {', '.join(self.results)}" if self.results else "")

    @property
    def layout(self) -> str:
        """The parameters in memory, in the letters of ``struct``, with room for the shapes of arrays."""
        return "".join("q" + 8 * item.dims * "x" if item.dims else _letter(item.element) for item in self.parameters)

    @property
    def size(self) -> int:
        """The words of parameters, and of the results where these are several: they stand behind."""
        return sum(1 + item.dims for item in self.parameters) + (len(self.results) if len(self.results) > 1 else 0)


def _letter(element: str) -> str:
    return "?7x" if element == "bool" else "d" if element.startswith("float") else "q"


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
    """A function in machine code. Raises TypeError for other types than its signature has.

    Whole numbers are taken modulo the size of their type; what they mean is for the caller to check.
    """

    def __init__(self, function: Callable[..., Any], signature: Signature) -> None:
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        result = _C_TYPES.get(signature.results[0], ctypes.c_int64) if signature.results else None
        address = objects.address(function.__module__, function.__name__)
        self.code = ctypes.CFUNCTYPE(result, ctypes.c_void_p)(address)
        """Takes the address of the parameters, without a check."""
        self.held = ctypes.PYFUNCTYPE(result, ctypes.c_void_p)(address)
        """The same, and keeps the interpreter lock: for what ends sooner than the lock would be had again."""
        self._signature = signature
        self._run = _caller(self.code, signature)

    def __call__(self, *args: Any) -> Any:
        """Run it; other threads run meanwhile."""
        try:
            return self._run(*args)
        except (TypeError, struct.error) as error:
            raise TypeError(f"{self.__name__} takes {self._signature}: {error}") from None

    def bind(self, *args: NDArray[Any]) -> Bound:
        """This function with its first parameters, which are arrays, given; the others have to be whole numbers."""
        parameters, count = self._signature.parameters, len(args)
        arrays, rest = parameters[:count], parameters[count:]
        if len(arrays) < count or len(self._signature.results) > 1 or any(item != Parameter("int64") for item in rest):
            raise TypeError(f"the first {count} parameters of {self.__name__}{self._signature} cannot be bound")
        words = [word for item, array in zip(arrays, args, strict=True) for word in item.of(array)]
        return Bound(self.code, words, len(rest), args)


class Bound:
    """A compiled function whose arrays lie where they lie; used by one thread at a time."""

    def __init__(
        self, call: Callable[[int], Any], first: Sequence[int], rest: int, keep: tuple[NDArray[Any], ...]
    ) -> None:
        self._rest, self._keep, self._first = rest, keep, len(first)
        self.words = (ctypes.c_int64 * (len(first) + rest))(*first)
        """The parameters as they lie in memory, those that are not bound last."""
        self.run: Callable[[], Any] = partial(call, ctypes.addressof(self.words))
        """Run it with them as they lie there, without a check."""

    def __call__(self, *rest: int) -> Any:
        """Run it with the rest of its parameters."""
        if len(rest) != self._rest:
            raise TypeError(f"{self._rest} parameters are not bound, got {len(rest)}")
        for place, value in enumerate(rest, self._first):
            self.words[place] = value
        return self.run()


_HEAD = 3
"""The words of ``arrays.spread``, which stand in front of those of the function."""


def _caller(code: Callable[[Any], Any], signature: Signature) -> Callable[..., Any]:
    """A function that lays out its parameters and calls machine code with them.

    It is written for the signature: a loop over parameters takes longer than many a kernel runs.
    """
    names = [f"p{place}" for place in range(len(signature.parameters))]
    arrays = [name for name, item in zip(names, signature.parameters, strict=True) if item.dims]
    head, count = _HEAD if arrays else 0, len(signature.results)
    known: dict[str, Any] = {
        "code": code, "addressof": ctypes.addressof, "Block": ctypes.c_int64 * (head + signature.size),
        "ndarray": np.ndarray, "fill": partial(_fill, signature),
    }  # fmt: skip
    layout = "=" + "q" * head + signature.layout
    if not arrays and count < 2:
        known["pack"] = struct.Struct(layout).pack
        lines = [f"return code(pack({', '.join(names)}))"]
    else:
        known["pack_into"] = struct.Struct(layout).pack_into
        words = [f"id({name})" if name in arrays else name for name in names]
        lines = ["block = Block()", "address = addressof(block)"]
        if arrays:
            known["spread"], known["table"] = _spreading(signature)
            usual = " and ".join(f"type({name}) is ndarray" for name in arrays)
            words = [f"address + {8 * head}", "addressof(table)", str(len(arrays)), *words]
            refill = f"if not ({usual} and spread(address)): fill(block, {', '.join(names)})"
        lines += [f"pack_into(block, 0, {', '.join(words)})", *([refill] if arrays else [])]
        call = f"code(address + {8 * head})"
        lines += [call, f"return tuple(block[-{count}:])"] if count > 1 else [f"return {call}"]
    exec("\n ".join([f"def call({', '.join(names)}):", *lines]), known)
    return known["call"]  # type: ignore[no-any-return]


def _spreading(signature: Signature) -> tuple[Any, Any]:
    """The machine code of ``arrays.spread``, and its table of a function's arrays."""
    from .arrays import spread

    rows, at = list[int](), 0
    for item in signature.parameters:
        if item.dims:
            rows += at, item.dims, id(np.dtype(item.element))
        at += 1 + item.dims
    return spread.code, (ctypes.c_int64 * len(rows))(*rows)


def _fill(signature: Signature, block: Any, *args: Any) -> None:
    """The arrays as Python knows them: their type may equal the one wanted without being the same object."""
    at = _HEAD
    for item, value in zip(signature.parameters, args, strict=True):
        if item.dims:
            block[at : at + 1 + item.dims] = item.of(value)
        at += 1 + item.dims


_C_TYPES: dict[str, Any] = {"bool": ctypes.c_bool, "float32": ctypes.c_double, "float64": ctypes.c_double}
