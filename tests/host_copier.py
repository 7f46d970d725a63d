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
    """Copies tensors of the CPU in a thread of its own, as late as it likes.

    ``before(direction)`` is called in that thread before every copy, with ``"down"`` or ``"up"``.
    """

    def __init__(self, before: Callable[[str], None] = lambda _: None) -> None:
        self.device = torch.device("cpu")
        self._before = before
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._last = _passed()
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
        return self._order("down", pair.device, pair.host, _passed())

    def mark(self) -> _Done:
        """Passed: what a CPU was told to compute, it has."""
        return _passed()

    def to_device(self, pair: Pair, behind: _Done) -> None:
        """Queue it."""
        self._order("up", pair.host, pair.device, behind)

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

    def _order(self, direction: str, source: torch.Tensor, target: torch.Tensor, behind: _Done) -> _Done:
        done = _Done()
        with self._ordering:  # copies up are ordered by another thread than copies down
            self._last = done
            self._orders.put((direction, source, target, behind, done))
        return done

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            direction, source, target, behind, done = order
            self._before(direction)
            behind.synchronize()
            with torch.no_grad():
                target.copy_(source)
            done.set()


class _Done(threading.Event):
    """An event with the name that devices give to waiting."""

    def synchronize(self) -> None:
        """Return when it is set."""
        self.wait()


_Order = tuple[str, torch.Tensor, torch.Tensor, _Done, _Done]  # direction, source, target, what it is behind, its end


def _passed() -> _Done:
    found = _Done()
    found.set()
    return found
