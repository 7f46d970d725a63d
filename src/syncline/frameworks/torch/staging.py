"""Copies gradients on a device to the transport's memory and back, concurrently with the computation.

A transport moves host memory. If a model lives on a GPU, so do its buckets, and every bucket has a mirror in pinned
memory of the transport, so that the device can copy without the processor:

    training stream   backward ... bucket complete . backward goes on . . . . . . . . end of backward: join
    stream down                           device -> mirror
    a thread here                          waits for that
    progress thread                                       exchanges the mirror
    stream up                                                                 mirror -> device

``CudaCopier`` handles the device, ``Staged`` the order. Each direction has a stream of its own, because devices have a
copy engine for each. A copy up overwrites memory that the training stream may still have to read, because kernels are
launched long before they run. The copy is therefore ordered after everything that was launched there before ``up``.
Everything that the training thread launches after ``join`` sees the copied values. On a GPU both are dependencies
between streams and block no thread. Models whose gradients lie in the transport's memory need no copies
(``training.memory.Staging``).

With a codec, buckets stay on the device if it can compute the codec (``Coder``). The two streams then also encode and
decode, and only payloads are copied:

    training stream   backward ... bucket complete . backward goes on . . . . . . . . end of backward: join
    stream down                           encode -> payload -> pinned memory
    a thread here                                     waits for that
    progress thread                                          exchanges payloads
    stream up                                                          pinned memory -> payloads -> decode, add

The next copy down writes a mirror only after the training stream has passed ``join``, hence after the copy up has read
it. Memory: a model's gradients once more on the host. Traffic: each byte once over the bus in each direction.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Literal
from weakref import WeakValueDictionary

import numpy as np
import torch

from ...codecs._device import SWITCH, why_not
from ...compression.reducers import Bytes
from ...engine.engine import Engine
from ...engine.order import Work
from ...engine.trace import begin
from ...errors import NotBuiltError, SynclineError, UsageError
from ...session.session import Session
from ...training.memory import Staging
from ...wire.scratch import Scratch
from .device_sums import DeviceSums, map_blocks
from .storage import Array, Pair, Storage

log = logging.getLogger("syncline")

Direction = Literal["down", "up"]
"""The two streams of a copier: from the device, and to it."""

_PAGE_BYTES = 4096
_END_S = 10.0


class Staged(Staging):
    """The ``Staging`` of tensors on a device. ``fail`` is called with the error of a failed copy."""

    def __init__(self, engine: Engine, copier: CudaCopier, fail: Callable[[Exception], object]) -> None:
        super().__init__(engine)
        self.device = copier.device
        self._copier, self._fail = copier, fail
        self._pinned: list[torch.Tensor] = []
        self._watches = {direction: _Watch(fail) for direction in _DIRECTIONS}
        self._sums: DeviceSums | None = None
        self._open = True

    def allocate(self, nbytes: int, dtype: np.dtype[Any]) -> Array:
        """Memory in pages of its own: whole pages are pinned, and none may be pinned twice."""
        return self._pages(nbytes, lambda size: self._engine.allocate(size, np.dtype(np.uint8))).view(dtype)

    def _pages(self, nbytes: int, allocate: Callable[[int], Bytes]) -> Bytes:
        """Pinned pages, of which ``nbytes`` are used."""
        pages = max(1, -(-nbytes // _PAGE_BYTES))
        raw = allocate((pages + 1) * _PAGE_BYTES)
        start = -raw.ctypes.data % _PAGE_BYTES
        block = raw[start : start + pages * _PAGE_BYTES]
        host = torch.from_numpy(block)
        self._copier.pin(host)
        self._pinned.append(host)
        return block[:nbytes]

    @cached_property
    def coder(self) -> Coder | None:
        """None if codecs are left to the processor."""
        if os.environ.get(SWITCH) == "off" or not self._copier.codes:
            return None
        room = _PinnedScratch(partial(self._pages, allocate=lambda size: np.empty(size, np.uint8)))
        return Coder(room, *(_Stream(self._copier, direction, watch) for direction, watch in self._watches.items()))

    def sums(self, session: Session, storages: Sequence[Storage]) -> DeviceSums:
        if self._sums is None:
            blocks = map_blocks(session, storages, self._copier.export, self._copier.attach)
            down, up = (_Stream(self._copier, direction, self._watches[direction]) for direction in _DIRECTIONS)
            self._sums = DeviceSums(session.rank, storages, blocks, down, up)
        return self._sums

    def mark(self) -> torch.cuda.Event:
        return self._copier.mark()

    def follow(self) -> Callable[[], None]:
        return partial(self._copier.run, "up", lambda: None, self._copier.mark())

    def hand_over(self, pair: Pair, mark: torch.cuda.Event, share: float) -> None:
        self._copier.run("down", partial(_weigh, pair.device, share), mark)

    def down(self, pair: Pair, gate: Work | None, label: str) -> Work | None:
        """Start the copy at once. A thread of this object waits for its end, so that nothing else is blocked."""
        landed, observer, span = self._engine.promise(f"{label}: copying to the host"), self._engine.observer, None
        if observer is not None:
            span = begin(observer, "staging", landed.label, landed.span, nbytes=pair.host.nbytes)

        def done() -> None:
            if span is not None:
                span.end()
            self._engine.fulfil(landed)

        self._watches["down"].call_after(self._copier.to_host(pair), done)
        return landed if gate is None else self._engine.then(label, [gate, landed])

    def up(self, pair: Pair, exchange: Work, label: str) -> Work:
        """The progress thread starts the copy as soon as the exchange is done."""
        mark = self._copier.mark()
        return self._engine.then(label, [exchange], lambda: self._copier.to_device(pair, mark))

    def join(self) -> None:
        self._copier.join()

    def synchronize(self) -> None:
        self._copier.synchronize()

    def close(self) -> None:
        """End the threads and unpin the memory. Callable repeatedly."""
        if not self._open:
            return
        self._open = False
        for watch in self._watches.values():
            watch.close()
        with contextlib.suppress(Exception):  # a broken device was reported before, and the process must still end
            self._copier.synchronize()
        if self._sums is not None:
            self._sums.close()
        while self._pinned:
            self._copier.unpin(self._pinned.pop())
        self._copier.close()


_DIRECTIONS: tuple[Direction, ...] = ("down", "up")


class _Watch:
    """A thread, begun when it is needed, that waits for events of one stream in order. ``fail`` gets their faults."""

    def __init__(self, fail: Callable[[Exception], object]) -> None:
        self._fail = fail
        self._awaited: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call_after(self, event: torch.cuda.Event, call: Callable[[], None]) -> None:
        """Call ``call`` in the thread after the event."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="syncline-staging", daemon=True)
            self._thread.start()
        self._awaited.put((event, call))

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._awaited.put(None)
            self._thread.join(_END_S)

    def _run(self) -> None:
        while (item := self._awaited.get()) is not None:
            event, call = item
            try:
                event.synchronize()
            except Exception as error:  # a fault of the device, which must reach every thread that waits for it
                self._fail(error)
            else:
                call()


class _Stream:
    """One stream of a copier as a ``Queue`` of reducers."""

    def __init__(self, copier: CudaCopier, direction: Direction, watch: _Watch) -> None:
        self._copier, self._direction, self._watch = copier, direction, watch

    def run(self, act: Callable[[], None]) -> None:
        self._copier.run(self._direction, act)

    def then(self, call: Callable[[], None]) -> None:
        self._watch.call_after(self.reached(), call)

    def reached(self) -> torch.cuda.Event:
        """The end of all work queued so far."""
        return self._copier.reached(self._direction)


class _PinnedScratch(Scratch):
    """Pinned buffers. A buffer that the device still reads returns to the pool later, when another one is needed. For
    one thread."""

    def __init__(self, make: Callable[[int], Bytes]) -> None:
        super().__init__(make)
        self.read: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()

    def take(self, nbytes: int) -> Bytes:
        while self.read and self.read[0][0].query():  # type: ignore[no-untyped-call]
            self.read.popleft()[1]()
        return super().take(nbytes)


class Coder:
    """The ``Device`` of reducers, in the streams of a copier."""

    def __init__(self, room: _PinnedScratch, encoding: _Stream, decoding: _Stream) -> None:
        self.room, self.encoding, self.decoding = room, encoding, decoding

    def after_decoding(self, call: Callable[[], None]) -> None:
        self.room.read.append((self.decoding.reached(), call))


def _weigh(tensor: torch.Tensor, share: float) -> None:
    """As ``kernels.cpu.weigh``, with the same bits."""
    if share <= 0:
        tensor.zero_()
    elif share != 1.0:
        tensor.mul_(float(torch.tensor(share, dtype=tensor.dtype, device="cpu")))


_EXPORTED: WeakValueDictionary[str, torch.Tensor] = WeakValueDictionary()
"""The tensors that this process has exported, by process and address."""


class CudaCopier:
    """Copies between an NVIDIA GPU and host memory, in two streams of its own. Tests replace it by one for the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._down: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pin(self, host: torch.Tensor) -> None:
        """Pin host memory (whole pages), so that copies can run concurrently with the computation.

        Raises SynclineError if the driver refuses.
        """
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device):
            code = cudart.cudaHostRegister(host.data_ptr(), host.nbytes, 0)
        if int(code) != 0:
            raise SynclineError(
                f"cannot pin {host.nbytes} bytes of host memory for {self.device}: {cudart.cudaGetErrorString(code)}"
            )

    def unpin(self, host: torch.Tensor) -> None:
        """Undo ``pin``, before the memory is freed."""
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(host.data_ptr())  # type: ignore[no-untyped-call]

    def to_host(self, pair: Pair) -> torch.cuda.Event:
        """Start to copy down the result of everything launched in the current stream so far."""
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), torch.cuda.stream(self._down):
            pair.host.copy_(pair.device, non_blocking=True)
            done: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # the waiting thread sleeps
            done.record(self._down)
        return done

    def export(self, tensor: torch.Tensor) -> list[Any]:
        """Describe the memory of a tensor for the ``attach`` of one other process of this host, in values of JSON."""
        place = f"{os.getpid()} {tensor.data_ptr()}"
        _EXPORTED[place] = tensor
        storage = tensor.untyped_storage()
        device, *told = storage._share_cuda_()  # type: ignore[no-untyped-call] # counts one more user of the memory
        return [place, str(torch.cuda.get_device_properties(device).uuid)] + [
            one.hex() if isinstance(one, bytes) else one for one in told
        ]

    def attach(self, told: Any, like: torch.Tensor) -> torch.Tensor:
        """The memory that another process has exported, as a flat tensor with the type and size of another one."""
        place, uuid, handle, nbytes, offset, counter, counter_offset, event, waits = told
        if place in _EXPORTED:  # of a thread of this process, where CUDA opens no handle
            return _EXPORTED[place]
        devices = range(torch.cuda.device_count())
        device = next((one for one in devices if str(torch.cuda.get_device_properties(one).uuid) == uuid), None)
        if device is None:
            raise UsageError(f"GPU {uuid} is not visible here: let all ranks of a host see all its GPUs")
        if nbytes != like.untyped_storage().nbytes():
            raise UsageError(f"it has {nbytes} bytes and not {like.untyped_storage().nbytes()}")
        if device != self.device.index and not torch.cuda.can_device_access_peer(self.device, device):
            raise UsageError(f"{self.device} cannot access the memory of GPU {uuid}")
        handle, counter, event = (bytes.fromhex(one) for one in (handle, counter, event))
        storage = torch.UntypedStorage._new_shared_cuda(
            device, handle, nbytes, offset, counter, counter_offset, event, waits
        )
        found = torch.empty(0, dtype=like.dtype, device=storage.device).set_(storage)
        return found[: like.numel()]

    @property
    def codes(self) -> bool:
        """Whether the kernels of codecs run on this device. A warning gives the reason if they do not."""
        if reason := why_not(self.device):
            log.warning(
                "the processor compresses the gradients of %s, where codecs cannot run: %s", self.device, reason
            )
        return not reason

    def run(self, direction: Direction, act: Callable[[], None], behind: torch.cuda.Event | None = None) -> None:
        """Queue the device work of ``act`` in a stream, after a point in the training stream. For any thread."""
        stream = self._down if direction == "down" else self._up
        if behind is not None:
            stream.wait_event(behind)
        with torch.no_grad(), torch.cuda.stream(stream):
            act()

    def reached(self, direction: Direction) -> torch.cuda.Event:
        """The end of all work queued in a stream so far."""
        end: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # the waiting thread sleeps
        end.record(self._down if direction == "down" else self._up)
        return end

    def mark(self) -> torch.cuda.Event:
        """The present point in the current stream, which is the training's; called in the training thread."""
        reached: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        reached.record(torch.cuda.current_stream(self.device))
        return reached

    def to_device(self, pair: Pair, behind: torch.cuda.Event) -> None:
        """Start to copy up, after earlier copies up and that point in the training stream. Callable in any thread."""
        self._up.wait_event(behind)
        with torch.no_grad(), torch.cuda.stream(self._up):
            pair.device.copy_(pair.host, non_blocking=True)

    def join(self) -> None:
        """Let the current stream continue only after the copies up. The calling thread does not wait."""
        torch.cuda.current_stream(self.device).wait_stream(self._up)

    def synchronize(self) -> None:
        """Return when all copies are done."""
        self._down.synchronize()
        self._up.synchronize()

    def close(self) -> None:
        """Free what the copier owns. Its streams belong to PyTorch's pool."""


def device_of(named: list[tuple[str, torch.nn.Parameter]]) -> torch.device:
    """The device of a model's trained parameters. Raises UsageError if they are on several, naming one of them."""
    (first, parameter), *others = named
    device = parameter.device
    for name, other in others:
        if other.device != device:
            raise UsageError(
                f"parameter {name!r} is on {other.device}, {first!r} on {device}: the trained parameters of a process"
                " have to be on one device"
            )
    if device.type not in ("cpu", "cuda"):
        raise NotBuiltError(
            f"parameter {first!r} is on {device}: models on the CPU or on CUDA devices can be exchanged"
        )
    return device


def staging_for(
    device: torch.device, engine: Engine, fail: Callable[[Exception], object], copier: CudaCopier | None = None
) -> Staging:
    """The staging for a model on that device; ``copier`` replaces the device's own copier."""
    if copier is None:
        if device.type == "cpu":
            return Staging(engine)
        copier = CudaCopier(device)
    return Staged(engine, copier, fail)
