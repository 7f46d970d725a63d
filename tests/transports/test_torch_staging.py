"""The allreduce of a library that sees a device's memory only, with a stand-in for the device and for the library.

What a GPU adds, NCCL itself, is tested where there is one.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from syncline.errors import GroupError, PeerLost, UsageError
from syncline.nouns import numpy_dtype
from syncline.transports import MemoryStore, Place

torch = pytest.importorskip("torch")

from syncline.frameworks.torch.storage import _brought_down  # noqa: E402
from syncline.transports._envelope import Call  # noqa: E402
from syncline.transports.torch import StagedCollectives, Torch, _gloo, _in_time  # noqa: E402


class Doubling:
    """A library of two equal ranks: it works on the device's copy, in the order in which it is told to."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def allreduce(self, tensors: list[Any], _options: Any) -> Doubling:
        self.log.append("allreduce")
        (self.tensor,) = tensors
        return self

    def wait(self) -> None:
        self.log.append("wait")
        self.tensor.mul_(2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16", "uint64"])
def test_arrays_are_staged_through_the_device_on_its_stream(dtype: str) -> None:
    log: list[str] = []

    @contextlib.contextmanager
    def stream() -> Iterator[None]:
        log.append("in")
        yield
        log.append("out")

    array = (np.arange(100) % 17).astype(numpy_dtype(dtype))
    before = array.astype(np.int64)
    wait = StagedCollectives(Doubling(log), "cpu", stream, lambda: log.append("synchronize")).start(
        Call("allreduce", [array])
    )
    np.testing.assert_array_equal(array.astype(np.int64), before)  # the host's memory is not touched yet
    wait()
    np.testing.assert_array_equal(array.astype(np.int64), 2 * before)
    assert log == ["in", "allreduce", "out", "in", "wait", "out", "synchronize"]


@pytest.mark.parametrize("sizes", [(7, 7), (4, 0), (3, 9)])
def test_halves_move_only_the_parts_that_are_needed(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo is the library. All parts go up and one comes back in a sum; one goes up and the others come back after."""
    moved, copy = list[int](), torch.Tensor.copy_

    def counted(self: Any, other: Any) -> Any:
        moved.append(other.nbytes)
        return copy(self, other)

    def run(end: tuple[int, Any]) -> list[np.ndarray]:
        rank, group = end
        staged = StagedCollectives(group, "cpu", contextlib.nullcontext, lambda: None)
        parts = [np.full(size, 10 * rank + part + 1, np.float32) for part, size in enumerate(sizes)]
        staged.start(Call("reduce_scatter", parts))()
        staged.start(Call("all_gather", parts))()
        return parts

    store = MemoryStore()
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(_gloo, [Place(rank, 2, store) for rank in range(2)]))
        monkeypatch.setattr(torch.Tensor, "copy_", counted)
        found = list(threads.map(run, enumerate(groups)))
    for parts in found:
        for part, array in enumerate(parts):
            np.testing.assert_array_equal(array, np.full(sizes[part], 12 + 2 * part))
    assert sum(moved) == 4 * (2 + 1 + 1 + 1) * sum(sizes)


def test_nccl_that_cannot_connect_is_an_error_with_the_remedy() -> None:
    """Also where its call never comes back, or a rank is lost meanwhile."""

    def refused() -> None:
        raise RuntimeError("Duplicate GPU detected\nand more")

    with pytest.raises(GroupError, match=r"cuda:0\): Duplicate GPU detected; every rank needs a GPU of its own"):
        _in_time(Place(0, 2, MemoryStore()), refused, "cuda:0")
    never = threading.Event()
    with pytest.raises(GroupError, match="nothing came within 0 s"):
        _in_time(Place(0, 2, MemoryStore(), timeout_s=0.01), never.wait, "cuda:0")

    def lost() -> None:
        raise PeerLost("rank 1 is lost", rank=1)

    with pytest.raises(PeerLost):
        _in_time(Place(0, 2, MemoryStore(), check=lost), never.wait, "cuda:0")
    never.set()


def test_tensors_come_down_to_pinned_memory_of_the_host_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the default device is; what is one element beyond the limit is copied to memory that is not kept."""
    pinned, empty = list[Any](), torch.empty

    def recorded(shape: Any, *, pin_memory: bool, **named: Any) -> Any:
        pinned.append((pin_memory, tuple(shape)))
        return empty(shape, **named)

    tensors = [torch.arange(3), torch.arange(4)]
    monkeypatch.setattr("syncline.frameworks.torch.storage._PINNED_BYTES", tensors[0].nbytes)
    monkeypatch.setattr(torch, "empty", recorded)
    with torch.device("meta"):
        assert [_brought_down(tensor).tolist() for tensor in tensors] == [[0, 1, 2], [0, 1, 2, 3]]
    assert pinned == [(True, (3,))]


def test_nccl_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="needs a CUDA device"):
        Torch(Place(0, 1, MemoryStore()), backend="nccl")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_nccl() -> None:
    transport = Torch(Place(0, 1, MemoryStore()), backend="nccl")
    array = np.arange(1000, dtype=np.float32)
    handle = transport.allreduce(3, array)
    for _ in itertools.repeat(None, 1000):
        if handle.done:
            break
        transport.poll(0.1)
    transport.close()
    assert handle.done
    assert handle.error is None
    np.testing.assert_array_equal(array, np.arange(1000, dtype=np.float32))


def test_the_scripts_own_group_is_not_touched() -> None:
    from torch import distributed

    others = set(threading.enumerate())
    store = MemoryStore()
    with ThreadPoolExecutor(2) as threads:
        ends = list(threads.map(Torch, [Place(rank, 2, store) for rank in range(2)]))
    assert not distributed.is_initialized()
    for end in ends:
        end.close()
    for thread in set(threading.enumerate()) - others:
        thread.join(20.0)
