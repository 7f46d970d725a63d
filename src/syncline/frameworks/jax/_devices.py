"""Which devices call, and which compute for the owners of weights.

Where a computation runs on several devices of this host, each of them makes every call. They all have the same, whole
arrays, so the first to come does it for all; the others wait, and copy what it has made.

An owner of weights runs the optimizer while the computation of a worker in the same process waits for it, in a thread
of XLA's that other computations of these devices may need: on one core there is no other. So owners beside workers have
a device of their own, of a second client of XLA's, which has threads of its own and computes in the thread that calls.
"""

from __future__ import annotations

import importlib
import threading
from functools import cache
from typing import Any

import jax

from ...errors import UsageError
from ._calls import Array, Function


class _Made:
    """What the first device is doing, or has done; so many others have not had it."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.done = threading.Event()
        self.results: list[Array] = []
        self.error: BaseException | None = None


class OnceForAll:
    """A function that is called by so many ``devices`` for every step, which its first argument says."""

    def __init__(self, function: Function, devices: int) -> None:
        self._function, self._devices = function, devices
        self._lock = threading.Lock()
        self._made: dict[int, _Made] = {}

    def __call__(self, arguments: list[Array], results: list[Array]) -> None:
        """Raises, for all of them, what the function has raised."""
        step = int(arguments[0])
        with self._lock:
            made = self._made.get(step)
            first = made is None
            if made is None:
                made = self._made[step] = _Made(self._devices)
            made.left -= 1
            if made.left == 0:
                del self._made[step]
        if first:
            self._make(made, arguments, results)
        made.done.wait()  # as long as the function's own limits let it
        if made.error is not None:
            raise made.error
        if not first:
            for result, value in zip(results, made.results, strict=True):
                result[...] = value

    def _make(self, made: _Made, arguments: list[Array], results: list[Array]) -> None:
        try:
            self._function(arguments, results)
            made.results = [value.copy() for value in results]
        except BaseException as error:
            made.error = error
        finally:
            made.done.set()


def shared(function: Any, devices: int) -> Function:
    """The function itself where one device calls it."""
    return function if devices == 1 else OnceForAll(function, devices)


def device_of_owners(*, beside: bool) -> Any:
    """Where owners compute, ``beside`` a worker or in a process of their own."""
    return _device_apart() if beside else jax.local_devices(backend="cpu")[0]


@cache
def _device_apart() -> Any:
    try:
        made: Any = importlib.import_module("jaxlib.xla_client").make_cpu_client(asynchronous=False, num_devices=1)
        return made.local_devices()[0]
    except (ImportError, AttributeError, TypeError) as error:
        version = importlib.import_module("jaxlib").__version__
        raise UsageError(
            f"jaxlib {version} does not give owners of weights on workers a device of their own ({error}): use"
            " ps(servers=1), servers that are processes of their own, or ps(on=workers, update=worker)"
        ) from error
