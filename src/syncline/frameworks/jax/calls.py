"""Calls from a compiled computation, on its own memory: Python functions, and machine code for gradients.

JAX's own callbacks copy their arguments, and start JAX computations for that inside the computation that waits for
them. This takes a few hundred microseconds each, and deadlocks if there are few threads. XLA's foreign functions avoid
both. All Python calls use one foreign function, ``_handle``; a number compiled into the computation selects the
function. ``_handle`` reads XLA's call frame word by word, by the offsets of its C interface (``xla/ffi/api/c_api.h``),
whose version it reports at registration.

A thread of XLA makes each call and would have to wait for the interpreter lock, which the engine needs too. Therefore
only the start and the end of a step are Python calls (``Buckets``). In between, machine code (``kernels.calls``) copies
gradients into their buckets, counts them and signals an eventfd. A thread then hands over all complete buckets, several
at once if they arrive faster than it runs. The end of the step hands over the rest, so the result never depends on that
thread. Both share a table in the layout of ``kernels.calls``; its address passes through the computation. With several
devices each of them makes every call, and all calls are Python (``OnceForAll``).

JAX dispatches a computation to its own threads and continues. The calls are dataflow to JAX, without effects: Python
dispatches computations with effects argument by argument, which takes most of a millisecond for eighty arguments. JAX
therefore does not wait for the calls at exit. The end of a run and of the process wait here; otherwise the other ranks
would miss the last steps, and calls would happen after the interpreter has ended. An error in a call is stored in
results that the script may never read, so the script may not see it before the end.
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
from .._flat import Array, FlatModel

TOKEN = np.zeros(4, np.int32)
"""The value that each call passes to the next: the step and the table's address, as two words of 64 bits."""

PUT, TAKE = "syncline_put", "syncline_take"
_LOOK_MS = 1000
"""The interval at which the thread checks whether the run is over."""

Function = Callable[[list[Array], list[Array]], None]
"""Reads the arrays of the first list and fills those of the second; both are views that are valid during the call."""

_NAME = "syncline_call"
_METADATA = 1  # the extension by which XLA asks for the version
_INTERNAL = 13  # of error codes
_NEXT, _TYPE = 16, 8  # of an extension, in bytes, as all offsets here
_VERSION = 8  # within the memory that the extension points to
_API, _STAGE, _ARGUMENTS, _RESULTS, _ATTRIBUTES = 16, 32, 72, 112, 160
_ARGUMENT_COUNT, _RESULT_COUNT = 56, 96
_EXECUTE = 3
_CREATE_ERROR = 48  # within the interface
_DATA = 24  # within a buffer


_Described = tuple[tuple[tuple[int, ...], "np.dtype[Any]"], ...]  # arrays' shapes and types


class Call(NamedTuple):
    """A function with the shapes and types of its arguments and results. ``number`` is unique in this process."""

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
    """All calls of this process, by number. They stay, because a compiled computation may be called at any time."""

    def __init__(self) -> None:
        self.known: list[Call] = []
        self._registered: dict[str, Any] = {}
        self._lock = threading.RLock()

    def make(self, function: Function, arguments: Sequence[Any], results: Sequence[Any]) -> Call:
        """Register a function of arrays with these shapes and types."""
        with self._lock:
            if _NAME not in self._registered:
                wait_at_exit()
                self.make_code(_NAME, ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_handle))
            made = Call(len(self.known), function, _described(arguments), _described(results))
            self.known.append(made)
        return made

    def make_code(self, name: str, code: Any) -> None:
        """Register machine code by a name."""
        with self._lock:
            if name not in self._registered:
                self._registered[name] = code
                pointer = ctypes.cast(code, ctypes.c_void_p)
                jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(pointer), platform="cpu")


calls = Calls()


def invoke(call: Call, *arguments: Any) -> list[Any]:
    """Add a call to the computation that JAX traces."""
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in call.results]
    return invoke_code(_NAME, call.number, arguments, results)


def invoke_code(name: str, number: int, arguments: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Add a call of the registered code ``name``, with a number, to the computation that JAX traces.

    JAX keeps the calls and their order as long as each takes a result of the one before it, and a result of the
    computation depends on the last one. To JAX they have no effects.
    """
    made = jax.ffi.ffi_call(name, list(results), has_side_effect=False)
    return list(made(*arguments, call=np.int64(number)))


def _described(given: Sequence[Any]) -> _Described:
    return tuple((tuple(one.shape), np.dtype(one.dtype)) for one in given)


def _handle(frame: int) -> int | None:
    """XLA's entry into Python. Returns an XLA error with the text of the exception, or None."""
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
        raise UsageError(f"a compiled computation of another run passes {given} arrays instead of {len(described)}")
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
    """A model's gradients. ``starts`` has the tensors of each call, in the order of calls.

    ``after`` are the arrays that the computation receives at the end.
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
        """Begin a step, and write the token that the computation passes on."""
        with self._telling:
            self._table[kernel.SHARE : kernel.SHARE + 1].view(np.float64)[0] = self._model.begin()
            self._table[kernel.DONE] = self._told = 0
        if self._thread is None and len(self._starts) > 1:
            self._thread = threading.Thread(target=self._listen, name="syncline-gradients", daemon=True)
            self._thread.start()
        token.view(np.int64)[:] = step, self._table.ctypes.data

    def finish(self) -> None:
        """Hand over the last gradients. Raises an earlier error of the step."""
        self._tell()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _tell(self) -> None:
        """Report the gradients that have arrived since the last call to the model."""
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
        while self._model.session.process.usable:
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
    """A function that each of ``devices`` devices calls in every step; its first argument is the step.

    All devices have the same whole arrays. The first to call runs the function; the others wait and copy its results.
    """

    def __init__(self, function: Function, devices: int) -> None:
        self._function, self._devices = function, devices
        self._lock = threading.Lock()
        self._made: dict[int, tuple[Future[list[Array]], int]] = {}  # by the step: how many devices have come to it

    def __call__(self, arguments: list[Array], results: list[Array]) -> None:
        """Raises the function's exception in every device's call."""
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
    """The function itself, or wrapped for several devices."""
    return function if devices == 1 else OnceForAll(function, devices)


# The end.


def unseen(session: Session, function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a function so that its exceptions are noted as unseen: they reach a thread of XLA, not the script."""

    def call(*arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException:
            session.process.reached_nobody()
            raise

    return call


def wait_for_steps(session: Session) -> None:
    """Wait before the end of a run. Raises the error of a step that the script has not waited for."""
    wait_for_computations()
    session.engine.check_error()


def wait_for_computations() -> None:
    """Wait for all computations that this thread has started, or whose results still exist, whether or not they fail.

    Computations that one thread starts on a CPU device run in order, also on several devices. A small computation after
    them therefore waits for those whose results nobody has kept.
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
    """Wait at the end of the interpreter too, except in forked children, which have no threads of XLA."""
    atexit.register(wait_for_computations)
    os.register_at_fork(after_in_child=lambda: atexit.unregister(wait_for_computations))
