"""Gradients on a device give what gradients in host memory give: payloads, sums, residuals and checkpoints.

The CPU stands in for the device, and Triton's interpreter for its compiler; ``benchmarks/gpu`` has a GPU. That streams
are in order, and that a training waits for them, is for ``frameworks/test_coding.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from reducing import TEXTS, codec

from syncline.codecs import codec_of
from syncline.compression.compression import Compression, computes_on_device
from syncline.compression.reducers import Participant
from syncline.nouns import Layer, Slice, Spec
from syncline.testing.reducing import Counted, Ranks

torch = pytest.importorskip("torch")
if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter, which is off where there is a GPU", allow_module_level=True)

SHAPES = ((3,), (30, 41))
ELEMENTS = 3 + 30 * 41
THERE = [text for text in TEXTS if computes_on_device(codec(text), [Layer(Spec("p", (33, 40)))])]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class AtOnce:
    """A device whose streams have done everything at once; it keeps buffers until the next one is taken."""

    class Room(Counted):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Callable[[], None]] = []

        def take(self, nbytes: int) -> Any:
            self.free()
            return super().take(nbytes)

        def free(self) -> None:
            while self.kept:
                self.kept.pop()()

    def __init__(self) -> None:
        self.room = self.Room()
        self.encoding = self.decoding = self

    def run(self, act: Callable[[], None]) -> None:
        act()

    def then(self, call: Callable[[], None]) -> None:
        call()

    def after_decoding(self, call: Callable[[], None]) -> None:
        self.room.kept.append(call)


class Mixed(Ranks):
    """Rank 0 has its gradients on a device, the others do not."""

    def __init__(self, text: str, workers: int, there: bool, **options: Any) -> None:
        super().__init__(codec(text), workers, SHAPES, **options)
        self.device = AtOnce()
        if there:
            first = self.ranks[0]
            me = Participant(0, workers, first.participant.owners, self.rooms[0], device=self.device)
            tensors = [as_tensor(array) for array in self.arrays[0]]
            served = max(me.owners) >= workers
            made = Compression(self.codec, self.layers, self.buckets, tensors, me, served=served, name="rank 0")
            self.ranks[0] = made


def as_tensor(array: np.ndarray) -> Any:
    """The same memory."""
    words = {2: np.int16, 4: np.int32, 8: np.int64}[array.itemsize]
    return torch.from_numpy(array.view(words)).view(getattr(torch, array.dtype.name))


def gradients(workers: int, step: int, dtype: Any = np.float32) -> list[list[np.ndarray]]:
    draw = np.random.default_rng(step)
    return [[draw.standard_normal(ELEMENTS).astype(dtype)] for _ in range(workers)]


def same(one: Ranks, other: Ranks) -> None:
    """Results and all states, bit for bit."""
    assert [result.tobytes() for result in one.results] == [result.tobytes() for result in other.results]
    for mine, theirs in zip(one.ranks, other.ranks, strict=True):
        here, there = mine.saved(), theirs.saved()
        assert here.keys() == there.keys()
        assert all(here[key].tobytes() == there[key].tobytes() for key in here)


@pytest.mark.every(2)
@pytest.mark.parametrize("text", {text.partition("(")[0]: text for text in reversed(THERE)}.values())
def test_a_device_gives_the_bits_of_the_host(text: str) -> None:
    here, there = Mixed(text, 2, there=False), Mixed(text, 2, there=True)
    for group in (here, there):
        group.step(gradients(2, 0))
    same(here, there)
    there.device.room.free()
    assert there.device.room.out == 0
    assert all(room.out == 0 for room in there.rooms)


def test_what_stays_on_the_host_is_named() -> None:
    away = {codec_of(codec(text), Spec("p", (33, 40))).codec for text in TEXTS if text not in THERE}
    assert {type(one).__name__ for one in away} == {"GTopK", "PowerSGD"}
    assert not computes_on_device(codec("threshold(ratio=0.1, clip=1)"), [Layer(Spec("p", (9,)))])
    assert not computes_on_device(codec("int8(block=65536)"), [Layer(Spec("p", (9,)))])
    assert not computes_on_device(codec("adaptive(powersgd(rank=1))"), [Layer(Spec(name, (99, 99))) for name in "pq"])


@pytest.mark.parametrize("text", ["int8", "bf16", "topk(ratio=0.3)"])
def test_servers_do_not_notice(text: str) -> None:
    here, there = (Mixed(text, 2, there, servers=1) for there in (False, True))
    for step in range(2):
        for group in (here, there):
            group.step(gradients(2, step))
        same(here, there)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_gradients_of_other_types_are_converted_there(dtype: str) -> None:
    here, there = (Mixed("int8", 2, there, dtype=dtype) for there in (False, True))
    for group in (here, there):
        group.step(gradients(2, 3, here.arrays[0][0].dtype))
    same(here, there)


def test_buckets_that_cut_a_tensor_share_its_state_there() -> None:
    cut: Sequence[Sequence[Slice]] = [[Slice(0, 0, 3), Slice(1, 0, 1024)], [Slice(1, 1024, 1230)]]
    here, there = (Mixed("int8", 2, there, buckets=cut) for there in (False, True))
    for step in range(2):
        for group in (here, there):
            group.step([[row[:1027], row[1027:]] for (row,) in gradients(2, step)])
        same(here, there)


@pytest.mark.parametrize("text", ["int8", "bf16", "topk(ratio=0.3)"])
def test_a_gradient_that_is_not_finite_is_named_there_too(text: str, caplog: pytest.LogCaptureFixture) -> None:
    groups = [Mixed(text, 2, there) for there in (False, True)]
    for group in groups:
        inputs = gradients(2, 1)
        inputs[0][0][100] = np.nan
        caplog.clear()
        group.step(inputs)
        assert "rank 0: the gradient of 'p1' has a NaN or infinity" in caplog.text
        assert "'p0'" not in caplog.text
    here, there = groups
    np.testing.assert_array_equal(np.isnan(here.results[0]), np.isnan(there.results[0]))
    for mine, theirs in zip(here.ranks, there.ranks, strict=True):
        assert all(mine.saved()[key].tobytes() == array.tobytes() for key, array in theirs.saved().items())


@pytest.mark.parametrize("text", ["int8", "randomk(ratio=0.3)"])
def test_a_checkpoint_goes_from_a_device_to_hosts_and_back(text: str) -> None:
    first, other = Mixed(text, 2, there=True), Mixed(text, 2, there=False)
    first.step(gradients(2, 0))
    again = Mixed(text, 2, there=True)
    for group in (other, again):
        for rank in group.ranks:
            rank.load([one.saved() for one in first.ranks])
    for group in (first, other, again):
        group.step(gradients(2, 1))
    same(first, other)
    same(first, again)
    for rank in first.ranks:
        rank.forget()
    assert not any(array.any() for key, array in first.ranks[0].saved().items() if key != "clock")
    fewer = Mixed(text, 3, there=True)
    for rank in fewer.ranks:
        rank.load([one.saved() for one in other.ranks])
    np.testing.assert_allclose(fewer.residuals(), other.residuals(), atol=1e-4)
