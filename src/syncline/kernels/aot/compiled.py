"""Marks functions as kernels, and calls their machine code from Python through ctypes.

A marked function never runs as Python. In the process that compiles, ``compiler`` receives it; in every other process
importing its module compiles it, or opens the machine code that ``objects`` has kept. ``compiled`` marks the kernels
that Python calls; ``inner`` and ``inlined`` mark the kernels that only other kernels call.

Machine code takes one argument, the address of a block with its parameters: 8 bytes for each number, and for each array
its address followed by its shape. A call fills such a block and releases the interpreter lock; ``Compiled.bind`` fills
it once for arrays that stay where they are.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import objects

_F = TypeVar("_F", bound=Callable[..., Any])

_C_TYPES: Final[dict[str, Any]] = {"bool": ctypes.c_bool, "float32": ctypes.c_double, "float64": ctypes.c_double}


class Compiler(Protocol):
    """Receives the marked functions in the process that compiles."""

    def inner(self, function: Callable[..., Any], inline: bool) -> Any: ...  # noqa: D102
    def compiled(self, function: Callable[..., Any], signature: Signature) -> Any: ...  # noqa: D102
    def instruction(self, name: str) -> Any: ...  # noqa: D102
    def external(self, name: str, signature: Signature) -> Any: ...  # noqa: D102


compiler: Compiler | None = None
"""Set only in a process that compiles."""


@dataclass(frozen=True)
class Parameter:
    """A number, or a C-contiguous writable array of ``dims`` dimensions; ``element`` names the element type."""

    element: str
    dims: int = 0

    @classmethod
    def parse(cls, text: str) -> Parameter:
        """Read ``int64``, ``float32[]`` or ``int64[,]``."""
        element, bracket, rest = text.strip().partition("[")
        return cls(element, rest.count(",") + 1 if bracket else 0)

    def __str__(self) -> str:
        return self.element + ("[" + "," * (self.dims - 1) + "]" if self.dims else "")

    def of(self, array: Any) -> tuple[int, ...]:
        """The address and shape of an array that fits; TypeError for anything else."""
        if not isinstance(array, np.ndarray):
            raise TypeError(f"a {type(array).__name__} is not a {self}")
        if array.dtype != self.element or array.ndim != self.dims:
            raise TypeError(f"an array of {array.dtype} in {array.ndim} dimensions is not a {self}")
        if not (array.flags.c_contiguous and array.flags.aligned and array.flags.writeable):
            raise TypeError("arrays have to be contiguous, aligned and writable")
        return array.ctypes.data, *array.shape


@dataclass(frozen=True)
class Signature:
    """The parameters and the result of a kernel, such as ``(float32[], int64) -> int64``."""

    parameters: tuple[Parameter, ...]
    results: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Signature:
        """Read ``text``: one comma within brackets for each further dimension, and commas between several results."""
        taken, _, given = text.partition("->")
        inside = taken.strip()[1:-1].replace("[,]", "[;]")
        parts = [part.replace(";", ",") for part in inside.split(",") if part.strip()]
        results = tuple(part.strip() for part in given.split(",") if part.strip())
        return cls(tuple(map(Parameter.parse, parts)), results)

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.parameters))})" + (f" -> {', '.join(self.results)}" if self.results else "")

    @property
    def layout(self) -> str:
        """The parameters in a block, as a format of ``struct``."""
        return "".join("q" * (1 + item.dims) if item.dims else _letter(item.element) for item in self.parameters)

    @property
    def size(self) -> int:
        """Words in a block: the parameters, followed by the results if there are several."""
        return sum(1 + item.dims for item in self.parameters) + (len(self.results) if len(self.results) > 1 else 0)


def _letter(element: str) -> str:
    return "?7x" if element == "bool" else "d" if element.startswith("float") else "q"


def compiled(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Mark a kernel that Python calls. It returns a number, a bool, several whole numbers, or nothing."""
    parsed = Signature.parse(signature)

    def decorate(function: Callable[..., Any]) -> Any:
        return Compiled(function, parsed) if compiler is None else compiler.compiled(function, parsed)

    return decorate


class Compiled:
    """A kernel that Python calls. A call raises TypeError for arguments that its signature does not allow.

    Whole numbers are taken modulo the size of their type; callers check ranges.
    """

    def __init__(self, function: Callable[..., Any], signature: Signature) -> None:
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self.code = _code_of(function, signature)
        """Takes the address of a block, unchecked, and releases the interpreter lock."""
        self.held = _code_of(function, signature, held=True)
        """The same with the interpreter lock kept: for kernels that end before the lock could be taken back."""
        self._signature = signature
        self._run = _caller(self.code, signature)

    def __call__(self, *args: Any) -> Any:
        """Run the kernel; other threads run meanwhile."""
        try:
            return self._run(*args)
        except (TypeError, struct.error) as error:
            raise TypeError(f"{self.__name__} takes {self._signature}: {error}") from None

    def bind(self, *args: NDArray[Any]) -> Bound:
        """Fix the first parameters, which must be arrays; the remaining ones must be int64."""
        parameters, count = self._signature.parameters, len(args)
        arrays, rest = parameters[:count], parameters[count:]
        if len(arrays) < count or len(self._signature.results) > 1 or any(item != Parameter("int64") for item in rest):
            raise TypeError(f"the first {count} parameters of {self.__name__}{self._signature} cannot be bound")
        words = [word for item, array in zip(arrays, args, strict=True) for word in item.of(array)]
        return Bound(self.code, words, len(rest), args)


class Bound:
    """A kernel with its arrays fixed, for one thread at a time. It keeps the arrays alive."""

    def __init__(
        self, call: Callable[[int], Any], first: Sequence[int], rest: int, keep: tuple[NDArray[Any], ...]
    ) -> None:
        self._rest, self._keep = rest, keep
        self.words = (ctypes.c_int64 * (len(first) + rest))(*first)
        """The block: the fixed parameters, then the remaining ones."""
        self._fill = partial(struct.Struct(f"={rest}q").pack_into, self.words, 8 * len(first))
        self.run: Callable[[], Any] = partial(call, ctypes.addressof(self.words))
        """Run the kernel with the block as it is, unchecked."""

    def __call__(self, *rest: int) -> Any:
        """Run the kernel with its remaining parameters."""
        if len(rest) != self._rest:
            raise TypeError(f"{self._rest} parameters are not bound, got {len(rest)}")
        self._fill(*rest)
        return self.run()


def _caller(code: Callable[[Any], Any], signature: Signature) -> Callable[..., Any]:
    """A Python function that fills a block with its arguments and passes its address to ``code``.

    It is generated for the signature, because a loop over parameters takes several times as long as a small kernel.
    """
    names = [f"p{place}" for place in range(len(signature.parameters))]
    arrays = [(name, item) for name, item in zip(names, signature.parameters, strict=True) if item.dims]
    known: dict[str, Any] = {
        "run": partial(_run, code, signature), "pack": struct.Struct(f"={signature.layout}").pack,
        "slow": partial(_packed, signature), "ndarray": np.ndarray, "addressof": ctypes.addressof,
        # The buffer protocol checks that an array is contiguous and writable, and is faster than array.ctypes.data.
        "view": (ctypes.c_char * 0).from_buffer,
    }  # fmt: skip
    words, checks, misaligned = list(names), list[str](), list[str]()
    for name, item in arrays:
        dtype = np.dtype(item.element)
        known[f"type_{name}"] = dtype
        checks.append(f"type({name}) is ndarray and {name}.dtype is type_{name} and {name}.ndim == {item.dims}")
        misaligned.append(f"at_{name} & {dtype.alignment - 1}")
        words[names.index(name)] = ", ".join([f"at_{name}", *(f"{name}.shape[{axis}]" for axis in range(item.dims))])
    inside = ", ".join(names)
    lines = [f"def call({inside}):"]
    if arrays:
        lines += [f" if {' and '.join(checks)}:"]
        lines += [f"  at_{name} = addressof(view({name}))" for name, _ in arrays]
        lines += [f"  if not ({' or '.join(misaligned)}):", f"   return run(pack({', '.join(words)}))"]
        lines += [f" return run(slow({inside}))"]
    else:
        lines += [f" return run(pack({', '.join(words)}))"]
    if len(signature.results) < 2:
        known["run"] = code  # ctypes passes the address of bytes
    exec("\n".join(lines), known)
    return known["call"]  # type: ignore[no-any-return]


def _run(code: Callable[[Any], Any], signature: Signature, parameters: bytes) -> tuple[int, ...]:
    """Call a kernel with several results, which it writes behind its parameters."""
    count = len(signature.results)
    block = (ctypes.c_int64 * signature.size).from_buffer_copy(parameters + bytes(8 * count))
    code(ctypes.addressof(block))
    return tuple(block[-count:])


def _packed(signature: Signature, *args: Any) -> bytes:
    """The parameters as bytes. Slow: for arrays with an equal dtype that is another object, and to raise TypeError."""
    words = list[Any]()
    for item, value in zip(signature.parameters, args, strict=True):
        words += item.of(value) if item.dims else (value,)
    return struct.pack(f"={signature.layout}", *words)


def _code_of(function: Callable[..., Any], signature: Signature, held: bool = False) -> Any:
    """The machine code of a marked function, as a ctypes function; ``held`` keeps the interpreter lock in a call."""
    result = _C_TYPES.get(signature.results[0], ctypes.c_int64) if signature.results else None
    kind = ctypes.PYFUNCTYPE if held else ctypes.CFUNCTYPE
    return kind(result, ctypes.c_void_p)(objects.address(function.__module__, function.__name__))


def inner(function: _F) -> _F:
    """Mark a function that kernels call; Numba infers its types from each call."""
    return function if compiler is None else compiler.inner(function, inline=False)


def inlined(function: _F) -> _F:
    """Mark a function that Numba copies into the kernels that call it."""
    return function if compiler is None else compiler.inner(function, inline=True)


def instruction(function: _F) -> _F:
    """Mark a declaration in ``native`` that the compiler implements by instructions."""
    return function if compiler is None else compiler.instruction(function.__name__)


def external(name: str, signature: str) -> Any:
    """Declare a function of the C library that kernels may call."""
    return None if compiler is None else compiler.external(name, Signature.parse(signature))
