"""The stand-in for a device in tests of staging: the CPU, whose memory two threads copy late."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from syncline.errors import SynclineError
from syncline.frameworks.torch.storage import Pair

PAGE_BYTES = 4096
END_S = 10.0


class HostCopier:
    """Copies tensors of the CPU as late as it likes, and encodes and decodes if it ``codes``.

    Each direction, ``"down"`` and ``"up"``, has a thread, as a device has a stream: work of one direction runs in
    order, and nothing but what the caller asks for orders the two. ``before(direction)`` is called in the direction's
    thread before everything that the thread does.
    """

    def __init__(self, before: Callable[[str], None] = lambda _: None, codes: bool = False) -> None:
        self.device, self.codes = torch.device("cpu"), codes
        self._streams = {direction: _Stream(direction, before) for direction in ("down", "up")}

    def pin(self, host: torch.Tensor) -> None:
        """Held to what a device asks for: whole pages."""
        if host.data_ptr() % PAGE_BYTES or host.nbytes % PAGE_BYTES:
            raise SynclineError(f"{host.nbytes} bytes at {host.data_ptr():#x} are not whole pages")

    def unpin(self, host: torch.Tensor) -> None:
        """Nothing."""

    def to_host(self, pair: Pair) -> _Done:
        """Queue it."""
        return self._streams["down"].order(lambda: pair.host.copy_(pair.device), _passed())

    def run(self, direction: str, act: Callable[[], object], behind: _Done | None = None) -> None:
        """Queue it."""

        def alone() -> None:
            with _INTERPRETING:
                act()

        self._streams[direction].order(alone, _passed() if behind is None else behind)

    def reached(self, direction: str) -> _Done:
        """The last work that was queued in that direction so far; the other direction may be behind."""
        return self._streams[direction].last

    def export(self, tensor: torch.Tensor) -> list[Any]:
        """Its number: ranks are threads of one process."""
        _EXPORTED.append(tensor)
        return [len(_EXPORTED) - 1]

    def attach(self, told: Any, like: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        found = _EXPORTED[told[0]]
        assert found.shape == like.shape
        return found

    def mark(self) -> _Done:
        """Passed: what a CPU was told to compute, it has."""
        return _passed()

    def to_device(self, pair: Pair, behind: _Done) -> None:
        """Queue it."""
        self._streams["up"].order(lambda: pair.device.copy_(pair.host), behind)

    def join(self) -> None:
        """Wait for the copies up alone: a CPU has no training stream that could."""
        self._streams["up"].last.synchronize()

    def synchronize(self) -> None:
        """Wait for both directions."""
        for stream in self._streams.values():
            stream.last.synchronize()

    def close(self) -> None:
        """End the threads."""
        for stream in self._streams.values():
            stream.close()


class Lagging(HostCopier):
    """A device that is behind: its training stream gets on when something waits for it, or else when it is joined."""

    def __init__(self, codes: bool = False) -> None:
        self.ordered: list[Callable[[], None]] = []
        self._catching_up = threading.Lock()
        super().__init__(codes=codes)

    def mark(self) -> Any:
        return SimpleNamespace(synchronize=self.catch_up)

    def join(self) -> None:
        super().join()
        self.catch_up()

    def catch_up(self) -> None:
        with self._catching_up:  # both directions may wait
            while self.ordered:
                self.ordered.pop(0)()


class _Stream:
    """One direction: a thread and the last work that it was given."""

    def __init__(self, direction: str, before: Callable[[str], None]) -> None:
        self._direction, self._before = direction, before
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._fault: Exception | None = None
        self._ordering = threading.Lock()
        self.last = _passed()
        self._thread = threading.Thread(target=self._work, name="syncline-copier", daemon=True)
        self._thread.start()

    def order(self, act: Callable[[], object], behind: _Done) -> _Done:
        """Queue it, behind what was queued before and ``behind``. Callable in any thread."""
        done = _Done()
        with self._ordering:
            self.last = done
            self._orders.put((act, behind, done))
        return done

    def close(self) -> None:
        """End the thread."""
        self._orders.put(None)
        self._thread.join(END_S)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            act, behind, done = order
            self._before(self._direction)
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


_Order = tuple[Callable[[], object], _Done, _Done]  # what to do, what it is behind, its end

_EXPORTED: list[torch.Tensor] = []

_INTERPRETING = threading.Lock()
"""Triton's interpreter serves one thread at a time."""


def _passed() -> _Done:
    found = _Done()
    found.set()
    return found
