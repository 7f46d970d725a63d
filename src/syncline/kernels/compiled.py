"""Compiled functions as Python sees them: how they are called.

A kernel is a Python function that the decorators here mark: ``compiled`` those that Python calls, ``inner`` and
``inlined`` those that compiled ones call (``marks``). A process of its own compiles a whole module of them
(``compiler``), what it makes is kept (``objects``), and here it is opened and called by ctypes, without the interpreter
lock: no compiler is loaded, and nothing is unpickled. A module is compiled, or opened, when it is imported.

A function in machine code takes the address of its parameters and nothing else: 8 bytes each, an array as its address
followed by its shape. That is laid out for every call, or once where the arrays stay (``Compiled.bind``).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import marks
from .arrays import spread
from .marks import Parameter, Signature, code_of, inlined, inner

__all__ = ["Bound", "Compiled", "compiled", "inlined", "inner"]


def compiled(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Mark a function that Python calls; it returns a number, a bool, some whole numbers, or nothing."""
    parsed = Signature.parse(signature)

    def decorate(function: Callable[..., Any]) -> Any:
        return Compiled(function, parsed) if marks.compiler is None else marks.compiler.compiled(function, parsed)

    return decorate


class Compiled:
    """A function in machine code. Raises TypeError for other types than its signature has.

    Whole numbers are taken modulo the size of their type; what they mean is for the caller to check.
    """

    def __init__(self, function: Callable[..., Any], signature: Signature) -> None:
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self.code = code_of(function, signature)
        """Takes the address of the parameters, without a check."""
        self.held = code_of(function, signature, held=True)
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
    rows, at = list[int](), 0
    for item in signature.parameters:
        if item.dims:
            rows += at, item.dims, id(np.dtype(item.element))
        at += 1 + item.dims
    return spread, (ctypes.c_int64 * len(rows))(*rows)


def _fill(signature: Signature, block: Any, *args: Any) -> None:
    """The arrays as Python knows them: their type may equal the one wanted without being the same object."""
    at = _HEAD
    for item, value in zip(signature.parameters, args, strict=True):
        if item.dims:
            block[at : at + 1 + item.dims] = item.of(value)
        at += 1 + item.dims
