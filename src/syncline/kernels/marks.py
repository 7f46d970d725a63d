"""How functions are marked that become machine code, and what they take and return.

Nothing that is marked ever runs as Python. In the process that compiles, ``compiler`` takes the marked functions; in
all others ``machine_code`` finds what was made of one. ``compiled`` marks the functions that Python calls with arrays.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

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


def machine_code(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Mark a function whose machine code is called with the address of its parameters, without checks."""
    parsed = Signature.parse(signature)

    def decorate(function: Callable[..., Any]) -> Any:
        return code_of(function, parsed) if compiler is None else compiler.compiled(function, parsed)

    return decorate


def code_of(function: Callable[..., Any], signature: Signature, held: bool = False) -> Any:
    """The machine code of a marked function, for ctypes; ``held`` keeps the interpreter lock during a call."""
    result = _C_TYPES.get(signature.results[0], ctypes.c_int64) if signature.results else None
    kind = ctypes.PYFUNCTYPE if held else ctypes.CFUNCTYPE
    return kind(result, ctypes.c_void_p)(objects.address(function.__module__, function.__name__))


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


_C_TYPES: dict[str, Any] = {"bool": ctypes.c_bool, "float32": ctypes.c_double, "float64": ctypes.c_double}
