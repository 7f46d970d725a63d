"""Calls out of a compiled computation, on its own memory: functions of Python, and machine code for gradients.

JAX's own callbacks copy what they are given, and begin computations of JAX for that, inside of the one that waits for
them: a few hundred microseconds each, and a deadlock where the threads are few. XLA's foreign functions do neither.
All that are Python are one of these, ``_handle``; a number that is compiled into the computation says which is meant.
``_handle`` reads what XLA hands over word by word, by the offsets of its C interface (``xla/ffi/api/c_api.h``), whose
version it tells when it is registered.

A thread of XLA's makes each call, and would have to wait for the interpreter, which the engine wants too. So only the
beginning and the end of a step are calls of Python (``Buckets``). In between machine code (``kernels.xla``) copies
gradients into their buckets, counts, and rings a bell, at which a thread hands over whatever buckets have come: several
at once where they come faster than they can go. The end hands over what is left, so that nothing depends on that thread
but how early buckets go. Both share a table, whose words ``kernels.xla`` names; its address goes through the
computation. Where several devices compute, each makes every call, and all of these are Python (``OnceForAll``).

JAX hands a computation to threads of its own and goes on. To JAX the calls have results, which the next step needs, and
no effects, by which it would know that it has to wait at the end: Python begins a computation with effects, argument by
argument, which takes most of a millisecond with eighty of them. So the end of a run, and of the process, waits here,
else the other ranks would miss the last steps, and calls would come when there is no interpreter. What goes wrong in
such a step is in results that perhaps nobody reads: until the end the script has not seen it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import select
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np

from ...errors import UsageError
from ...kernels import xla as kernel
from ...kernels.passes import CODES
from ...session.session import Session
from .._computations import keep_state
from .._flat import FlatModel
from .._weights import Array

TOKEN = np.zeros(4, np.int32)
"""What one call hands to the next: the step and the table's address, as two words of 64 bits."""

PUT, TAKE = "syncline_put", "syncline_take"
_LOOK_MS = 1000
"""How often the thread looks whether the run is over."""

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


_Described = tuple[tuple[tuple[int, ...], "np.dtype[Any]"], ...]  # arrays' shapes and types


class Call(NamedTuple):
    """A function, and what it is given and gives; ``number`` is its own in this process."""

    number: int
    function: Function
    arguments: _Described
    results: _Described


class _ErrorArguments(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("errc", ctypes.c_int),
    )


class Calls:
    """All calls of this process, by numbers; they stay, since a script may call a compiled computation at any time."""

    def __init__(self) -> None:
        self.known: list[Call] = []
        self._registered: dict[str, Any] = {}
        self._lock = threading.RLock()

    def make(self, function: Function, arguments: Sequence[Any], results: Sequence[Any]) -> Call:
        """Let computations call a function of arrays of these shapes and types."""
        with self._lock:
            if _NAME not in self._registered:
                wait_at_exit()
                self.make_code(_NAME, ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_handle))
            made = Call(len(self.known), function, _described(arguments), _described(results))
            self.known.append(made)
        return made

    def make_code(self, name: str, code: Any) -> None:
        """Let computations call machine code by a name."""
        with self._lock:
            if name not in self._registered:
                self._registered[name] = code
                pointer = ctypes.cast(code, ctypes.c_void_p)
                jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(pointer), platform="cpu")


calls = Calls()


def invoke(call: Call, *arguments: Any) -> list[Any]:
    """Put a call into the computation that JAX traces."""
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in call.results]
    return invoke_code(_NAME, call.number, arguments, results)


def invoke_code(name: str, number: int, arguments: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Put a call of the registered ``name`` into the computation, with a number.

    Calls stay in the computation, in their order, as long as each takes what the one before it gives, and a result of
    the computation needs the last one. To JAX they have no effects.
    """
    made = jax.ffi.ffi_call(name, list(results), has_side_effect=False)
    return list(made(*arguments, call=np.int64(number)))


def _described(given: Sequence[Any]) -> _Described:
    return tuple((tuple(one.shape), np.dtype(one.dtype)) for one in given)


def _handle(frame: int) -> int | None:
    """XLA's entry into Python; returns an error of XLA's with the text of the exception, or None."""
    try:
        if extension := _word(frame + 8):
            _say_version(extension)
        elif _integer(frame + _STAGE) == _EXECUTE:
            keep_state()
            call = calls.known[_word(_word(_word(_word(frame + _ATTRIBUTES)) + 8))]
            arguments = _arrays(call.arguments, _word(frame + _ARGUMENTS), _word(frame + _ARGUMENT_COUNT))
            call.function(arguments, _arrays(call.results, _word(frame + _RESULTS), _word(frame + _RESULT_COUNT)))
        return None
    except BaseException as error:
        return _error(_word(frame + _API), f"{type(error).__name__}: {error}")


def _say_version(extension: int) -> None:
    while extension:
        if _integer(extension + _TYPE) == _METADATA:
            version = _word(extension + 24) + _VERSION
            ctypes.c_int.from_address(version + 16).value = kernel.MAJOR
            ctypes.c_int.from_address(version + 20).value = kernel.MINOR
        extension = _word(extension + _NEXT)


def _arrays(described: _Described, buffers: int, given: int) -> list[Array]:
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


# Gradients into buckets.


class Buckets:
    """A model's gradients, in ``starts``: the tensors that come with each call, in the order of calls.

    ``after`` are the arrays that the computation is given at the end.
    """

    def __init__(self, model: FlatModel, starts: Sequence[Sequence[int]], after: Sequence[Array]) -> None:
        for name, function in ((PUT, kernel.put), (TAKE, kernel.take)):
            calls.make_code(name, function.code)
        self._model, self._starts, self._keep = model, starts, list(after)
        self._table = _table([[model.coming.places[tensor].array for tensor in tensors] for tensors in starts], after)
        self._told = len(starts)  # calls of the present step whose tensors the model has been told of
        self._telling = threading.Lock()
        self._error: BaseException | None = None
        self._table[kernel.BELL] = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # stays, as calls do
        self._thread: threading.Thread | None = None

    def begin(self, step: int, token: Array) -> None:
        """Begin a step, and write the token that the computation hands on."""
        with self._telling:
            self._table[kernel.SHARE : kernel.SHARE + 1].view(np.float64)[0] = self._model.begin()
            self._table[kernel.DONE] = self._told = 0
        if self._thread is None and len(self._starts) > 1:
            self._thread = threading.Thread(target=self._listen, name="syncline-gradients", daemon=True)
            self._thread.start()
        token.view(np.int64)[:] = step, self._table.ctypes.data

    def finish(self) -> None:
        """Hand over the last gradients; raises what has gone wrong on the way."""
        self._tell()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _tell(self) -> None:
        """Tell the model of gradients that have come since the last call."""
        with self._telling:
            while self._told < int(self._table[kernel.DONE]) and self._error is None:
                tensors = self._starts[self._told]
                self._told += 1
                try:
                    for tensor in tensors:
                        self._model.placed(tensor)
                except BaseException as error:  # the end of the step raises it
                    self._error = error

    def _listen(self) -> None:
        """The thread's loop, until the run is over."""
        table, bell = self._table, int(self._table[kernel.BELL])
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        while self._model.session.member.process.usable:
            table[kernel.ASLEEP] = 1
            self._tell()
            rung = poll.poll(_LOOK_MS)
            table[kernel.ASLEEP] = 0
            if rung:
                os.eventfd_read(bell)
                self._tell()


def _table(starts: Sequence[Sequence[Array]], after: Sequence[Array]) -> Any:
    begins, rows = [], list[int]()
    first = kernel.ROWS + len(starts)
    for arrays in (*starts, after):
        begins.append(first + len(rows))
        rows.append(len(arrays))
        for array in arrays:
            rows += CODES[str(array.dtype)], array.ctypes.data, array.size, array.nbytes
    table = np.zeros(first + len(rows), np.int64)
    table[kernel.ONE], table[kernel.TAKES] = 1, begins[-1]
    table[kernel.ROWS : first], table[first:] = begins[:-1], rows
    return table


# Several devices of one host.


class OnceForAll:
    """A function that is called by so many ``devices`` for every step, which its first argument says.

    They all have the same, whole arrays: the first to come does it for all; the others wait, and copy what it made.
    """

    def __init__(self, function: Function, devices: int) -> None:
        self._function, self._devices = function, devices
        self._lock = threading.Lock()
        self._made: dict[int, tuple[Future[list[Array]], int]] = {}  # by the step: how many devices have come to it

    def __call__(self, arguments: list[Array], results: list[Array]) -> None:
        """Raises, for all of them, what the function has raised."""
        step = int(arguments[0])
        with self._lock:
            made, come = self._made.pop(step, (Future(), 0))
            if come + 1 < self._devices:
                self._made[step] = made, come + 1
        if come == 0:
            try:
                self._function(arguments, results)
                made.set_result([value.copy() for value in results])
            except BaseException as error:
                made.set_exception(error)
        for result, value in zip(results, made.result(), strict=True):  # as long as the function's own limits let it
            result[...] = value


def shared(function: Any, devices: int) -> Function:
    """The function, for several devices where there are."""
    return function if devices == 1 else OnceForAll(function, devices)


# The end.


def unseen(session: Session, function: Callable[..., None]) -> Callable[..., None]:
    """The function as a computation calls it: what it raises reaches a thread of XLA's, not the script."""

    def call(*arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException:
            session.member.process.ending.reached_nobody()
            raise

    return call


def wait_for_steps(session: Session) -> None:
    """Wait before the end of a run; raises what went wrong in steps that the script has not waited for."""
    wait_for_computations()
    session.engine.check_error()


def wait_for_computations() -> None:
    """Wait for all computations that this thread has begun, or whose results are still there, whether they fail or not.

    What one thread begins on a CPU runs in order on each device, and so does what it begins on several: a small
    computation behind it waits for results that nobody has kept.
    """
    with jax.transfer_guard("allow"), suppress(Exception):
        for array in jax.live_arrays("cpu"):
            with suppress(Exception):  # deleted, or of a step that failed
                array.block_until_ready()
        devices = jax.local_devices(backend="cpu")
        for some in {*((one,) for one in devices), tuple(devices)}:
            whole = jax.sharding.NamedSharding(
                jax.sharding.Mesh(np.array(some), "all"), jax.sharding.PartitionSpec("all")
            )
            with suppress(Exception):
                jax.jit(jax.numpy.negative)(jax.device_put(np.zeros(len(some), np.float32), whole)).block_until_ready()


@cache
def wait_at_exit() -> None:
    """Let the end of the interpreter wait too, but not that of forked children, which have no threads of XLA."""
    atexit.register(wait_for_computations)
    os.register_at_fork(after_in_child=lambda: atexit.unregister(wait_for_computations))
