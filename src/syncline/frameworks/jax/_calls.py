"""Python functions as operations of a compiled computation, on its own memory: nothing is copied, nothing of JAX runs.

JAX's own callbacks copy what they are given, and begin computations of JAX for that, inside of the one that waits for
them: a few hundred microseconds each, and a deadlock where the threads are few. XLA's foreign functions have neither.
All of Syncline's that are Python are one of these, ``_handle``; a number that is compiled into the computation says
which is meant. Those that are machine code are ``kernels.calls``.

What XLA hands over is read word by word, by the offsets of its C interface (``xla/ffi/api/c_api.h``), whose version is
told when the function is registered.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...kernels.calls import MAJOR, MINOR
from .._threads import keep_state
from ._ending import wait_at_exit

Array = NDArray[Any]
Function = Callable[[list[Array], list[Array]], None]
"""What reads the first and fills the second: views of the computation's memory, for as long as the call lasts."""

_NAME = "syncline_call"
_METADATA = 1  # the extension by which XLA asks for the version
_INTERNAL = 13  # of error codes
_NEXT, _TYPE = 16, 8  # of an extension, in bytes, as all offsets here
_VERSION = 8  # within what the extension points to
_API, _STAGE, _ARGUMENTS, _RESULTS, _ATTRIBUTES = 16, 32, 72, 112, 160
_ARGUMENT_COUNT, _RESULT_COUNT = 56, 96
_EXECUTE = 3
_CREATE_ERROR = 48  # within the interface
_DATA = 24  # within a buffer


class Call(NamedTuple):
    """A function, and what it is given and gives; ``number`` is its own in this process."""

    number: int
    function: Function
    arguments: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    results: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]


class _ErrorArguments(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("errc", ctypes.c_int),
    )


class Calls:
    """All that this process has, by numbers; they stay, since a compiled computation may be called at any time."""

    def __init__(self) -> None:
        self._known: dict[int, Call] = {}
        self._numbers = count()
        self._handler: Any = None
        self._codes: dict[str, Any] = {}
        self._lock = threading.Lock()

    def make(self, function: Function, arguments: Sequence[Any], results: Sequence[Any]) -> Call:
        """Let computations call a function of arrays of these shapes and types."""
        with self._lock:
            if self._handler is None:
                self._handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_handle)
                wait_at_exit()
                _register(_NAME, self._handler)
            made = Call(next(self._numbers), function, _described(arguments), _described(results))
            self._known[made.number] = made
        return made

    def make_code(self, name: str, code: Any) -> None:
        """Let computations call machine code by a name."""
        with self._lock:
            if name not in self._codes:
                self._codes[name] = code
                _register(name, code)

    def find(self, number: int) -> Call:
        """The one of a number."""
        return self._known[number]


calls = Calls()


def invoke(call: Call, *arguments: Any) -> list[Any]:
    """Have a computation that is being traced call."""
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in call.results]
    return invoke_code(_NAME, call.number, arguments, results)


def invoke_code(name: str, number: int, arguments: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The same of what was registered by a name, which is told the number.

    Calls stay in the computation, in their order, as far as each is given what the one before it gives, and a result of
    the computation needs the last one. To JAX they have no effects (``_ending``).
    """
    made = jax.ffi.ffi_call(name, list(results), has_side_effect=False)
    return list(made(*arguments, call=np.int64(number)))


def _register(name: str, function: Any) -> None:
    pointer = ctypes.cast(function, ctypes.c_void_p)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(pointer), platform="cpu")


def _described(given: Sequence[Any]) -> tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]:
    return tuple((tuple(one.shape), np.dtype(one.dtype)) for one in given)


def _handle(frame: int) -> int | None:
    """What XLA calls; an error of its own kind, with the text of the exception, or nothing."""
    try:
        if extension := _word(frame + 8):
            _say_version(extension)
        elif _integer(frame + _STAGE) == _EXECUTE:
            keep_state()
            number = _word(_word(_word(_word(frame + _ATTRIBUTES)) + 8))
            call = calls.find(number)
            arguments = _arrays(call.arguments, _word(frame + _ARGUMENTS), _word(frame + _ARGUMENT_COUNT))
            call.function(arguments, _arrays(call.results, _word(frame + _RESULTS), _word(frame + _RESULT_COUNT)))
        return None
    except BaseException as error:
        return _error(_word(frame + _API), f"{type(error).__name__}: {error}")


def _say_version(extension: int) -> None:
    while extension:
        if _integer(extension + _TYPE) == _METADATA:
            version = _word(extension + 24) + _VERSION
            ctypes.c_int.from_address(version + 16).value = MAJOR
            ctypes.c_int.from_address(version + 20).value = MINOR
        extension = _word(extension + _NEXT)


def _arrays(described: Sequence[tuple[tuple[int, ...], np.dtype[Any]]], buffers: int, given: int) -> list[Array]:
    if given != len(described):
        raise UsageError(f"a compiled computation of another run gives {given} arrays where {len(described)} belong")
    found = []
    for number, (shape, dtype) in enumerate(described):
        address = _word(_word(buffers + 8 * number) + _DATA)
        size = dtype.itemsize
        for length in shape:
            size *= length
        memory = (ctypes.c_byte * size).from_address(address or 0) if size else b""
        found.append(np.ndarray(shape, dtype, memory))
    return found


def _error(api: int, text: str) -> int | None:
    create = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArguments))(_word(api + _CREATE_ERROR))
    size = ctypes.sizeof(_ErrorArguments) - 4  # the last field ends it, whatever would be filled up
    made = create(ctypes.byref(_ErrorArguments(size, None, text.encode(), _INTERNAL)))
    return None if made is None else int(made)


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def _integer(address: int) -> int:
    return ctypes.c_int.from_address(address).value
