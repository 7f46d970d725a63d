"""The stand-in for a device in tests of staging: the CPU, whose memory a thread copies late."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from syncline.errors import SynclineError
from syncline.frameworks.torch.storage import Pair

PAGE_BYTES = 4096
END_S = 10.0


class HostCopier:
    """Copies tensors of the CPU in a thread of its own, as late as it likes, and encodes and decodes if it ``codes``.

    ``before(direction)`` is called in that thread before everything that it does, with ``"down"`` or ``"up"``.
    """

    def __init__(self, before: Callable[[str], None] = lambda _: None, codes: bool = False) -> None:
        self.device, self.codes = torch.device("cpu"), codes
        self._before = before
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._last = _passed()
        self._fault: Exception | None = None
        self._ordering = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="syncline-copier", daemon=True)
        self._thread.start()

    def pin(self, host: torch.Tensor) -> None:
        """Held to what a device asks for: whole pages."""
        if host.data_ptr() % PAGE_BYTES or host.nbytes % PAGE_BYTES:
            raise SynclineError(f"{host.nbytes} bytes at {host.data_ptr():#x} are not whole pages")

    def unpin(self, host: torch.Tensor) -> None:
        """Nothing."""

    def to_host(self, pair: Pair) -> _Done:
        """Queue it."""
        return self._order("down", lambda: pair.host.copy_(pair.device), _passed())

    def run(self, direction: str, act: Callable[[], object], behind: _Done | None = None) -> None:
        """Queue it."""

        def alone() -> None:
            with _INTERPRETING:
                act()

        self._order(direction, alone, _passed() if behind is None else behind)

    def reached(self, direction: str) -> _Done:  # noqa: ARG002
        """All that was queued so far: one thread does everything in order."""
        return self._last

    def mark(self) -> _Done:
        """Passed: what a CPU was told to compute, it has."""
        return _passed()

    def to_device(self, pair: Pair, behind: _Done) -> None:
        """Queue it."""
        self._order("up", lambda: pair.device.copy_(pair.host), behind)

    def join(self) -> None:
        """A CPU has no streams: wait."""
        self._last.synchronize()

    def synchronize(self) -> None:
        """Wait."""
        self._last.synchronize()

    def close(self) -> None:
        """End the thread."""
        self._orders.put(None)
        self._thread.join(END_S)

    def _order(self, direction: str, act: Callable[[], object], behind: _Done) -> _Done:
        done = _Done()
        with self._ordering:  # copies up are ordered by another thread than copies down
            self._last = done
            self._orders.put((direction, act, behind, done))
        return done

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            direction, act, behind, done = order
            self._before(direction)
            behind.synchronize()
            try:
                with torch.no_grad():
                    act()
            except Exception as error:  # told to those that wait for it, as a device does
                self._fault = error
            done.fault = self._fault
            done.set()


class _Done(threading.Event):
    """An event with the names that devices give to waiting and asking."""

    fault: Exception | None = None

    def synchronize(self) -> None:
        """Return when it is set."""
        self.wait()
        if self.fault is not None:
            raise self.fault

    def query(self) -> bool:
        """Whether it is set."""
        return self.is_set()


_Order = tuple[str, Callable[[], object], _Done, _Done]  # direction, what to do, what it is behind, its end

_INTERPRETING = threading.Lock()
"""Triton's interpreter serves one thread at a time."""


def _passed() -> _Done:
    found = _Done()
    found.set()
    return found
