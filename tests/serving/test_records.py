"""Optimizer state as bytes: a round trip for every value and type, and a typed error for any other bytes."""

from __future__ import annotations

import json
import math
import struct
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ProtocolError, UsageError
from syncline.nouns import Slice
from syncline.serving.records import ITEM_BYTES, Elements, Record, pack, states_of, unpack, write_into

WHO = "server rank 2 (host, pid 7)"
WHOLE = Slice(0, 0, 4)


def packed(table: Any, bodies: bytes = b"") -> bytes:
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + bodies


def elements(dtype: str, *shape: int) -> Elements:
    """Bytes that count."""
    return Elements(dtype, shape, np.arange(math.prod(shape) * ITEM_BYTES[dtype]).astype(np.uint8))


def test_every_type_and_value_comes_back() -> None:
    values: list[Any] = [
        None,
        True,
        3,
        1.5,
        "text",
        elements("float32", 0),
        elements("float32"),
        elements("int64", 2, 2),
    ]
    values += [elements(dtype, 3) for dtype in ITEM_BYTES]
    records = [Record(Slice(number, 0, 4), "k" * 10_000, value) for number, value in enumerate(values)]
    for before, after in zip(records, unpack(pack(records), WHO, 2), strict=True):
        assert (before.slice, before.key) == (after.slice, after.key)
        if isinstance(before.value, Elements):
            assert isinstance(after.value, Elements)
            assert (before.value.dtype, before.value.shape) == (after.value.dtype, after.value.shape)
            assert before.value.data.tobytes() == after.value.data.tobytes()
            assert after.value.data.flags.writeable
        else:
            assert before == after
    with pytest.raises(UsageError, match="is a set, which cannot be sent"):
        pack([Record(WHOLE, "key", {1})])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "0 bytes"),
        (struct.pack("<Q", 1 << 63), f"a table of {1 << 63} bytes in 8"),
        (packed(5), "not iterable"),
        (packed([[0, 0, 4, "k", None]]), "unpack"),
        (packed([[0, 0, 4, "k", "load", []]]), "a tensor of type 'load'"),
        (packed([[0, 0, 4, "k", ["float32"], []]]), "unhashable"),
        (packed([[0, 0, 4, "k", "float32", [-1]]]), "shape"),
        (packed([[0, 0, 4, "k", "float32", [1 << 70]]]), "shape"),
        (packed([[0, 0, 4, "k", "float32", [1 << 40, 1 << 40]]]), "where 0 are left"),
        (packed([[0, 0, 4, "k", "float32", 4]], bytes(16)), "shape 4"),
        (packed([[0, 0, 4, "k", "float32", [4]]], bytes(15)), "a tensor of 16 bytes where 15 are left"),
        (packed([[0, 0, 4, "k", "float32", [4]]], bytes(17)), "1 bytes more than its table says"),
        (packed([[0, 0, 4, "k", None, 1], [0, 0, 4, "k", None, 2]]), "comes twice"),
        (packed([[0, 4, 0, "k", None, 1]]), "an entry"),
        (packed([[-1, 0, 4, "k", None, 1]]), "an entry"),
        (packed([[0, 0, 4, 5, None, 1]]), "an entry 5"),
        (packed([[0, 0, 4, "k", None, {"a": 1}]]), "is a dict"),
        (packed([[0, 0, 4, "k", None, [1]]]), "is a list"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "recursion"),
    ],
    ids=lambda value: value if isinstance(value, str) else "bytes",
)
def test_what_no_process_packs_is_a_fault_of_its_sender(data: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match=r"from server rank 2 \(host, pid 7\) make no sense: .*" + said) as fault:
        unpack(data, WHO, 2)
    assert fault.value.rank == 2


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[Slice]:
    """Slices that cover a tensor of so many elements."""
    edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=4))})
    return [Slice(0, start, stop) for start, stop in pairwise(edges)]


@given(st.data(), st.integers(1, 12), st.sampled_from(["uint8", "bfloat16", "float64"]))
def test_whoever_owned_a_tensor_before_others_can_take_it_over(data: st.DataObject, size: int, dtype: str) -> None:
    """State and weights are the same however they were, and are, cut; what is taken over is a copy."""
    whole = elements(dtype, size)
    bytes_of = whole.data.reshape(size, -1)
    before, after = data.draw(cuts(size)), data.draw(cuts(size))
    records = [
        Record(part, "momentum", Elements(dtype, (part.elements,), bytes_of[part.start : part.stop].reshape(-1)))
        for part in before
    ]
    step = elements("float32")
    for part, state in zip(after, states_of([*records, Record(before[0], "step", step)], after), strict=True):
        taken, plain = state["momentum"], state["step"]
        assert isinstance(taken, Elements)
        assert (taken.dtype, taken.shape) == (dtype, (part.elements,))
        assert taken.data.tobytes() == bytes_of[part.start : part.stop].tobytes()
        assert not np.shares_memory(taken.data, whole.data)
        assert isinstance(plain, Elements)
        assert plain.data.tobytes() == step.data.tobytes()
        assert not np.shares_memory(plain.data, step.data)
    if dtype != "bfloat16":
        target = np.zeros(size, dtype)
        write_into(records, [(part, target[part.start : part.stop]) for part in after])
        assert target.tobytes() == whole.data.tobytes()


@pytest.mark.parametrize("value", [1.0, None, elements("int8", 4), elements("float32", 3), elements("float32")])
def test_weights_of_another_form_are_refused(value: Any) -> None:
    target = np.ones(4, np.float32)
    with pytest.raises(ValueError, match="'weights' of tensor 0 has no elements of type float32"):
        write_into([Record(WHOLE, "weights", value)], [(WHOLE, target)])
    assert (target == 1).all()
