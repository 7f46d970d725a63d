"""Optimizer state as bytes: a round trip for every value and type, and a typed error for any other bytes."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import ProtocolError, UsageError
from syncline.frameworks.torch.records import _DTYPES, pack, unpack
from syncline.frameworks.torch.shard import Piece, Record

WHO = "server rank 2 (host, pid 7)"
WHOLE = Piece(0, 0, 4)


def packed(table: Any, bodies: bytes = b"") -> bytes:
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + bodies


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_type_and_value_comes_back() -> None:
    values: list[Any] = [None, True, 3, 1.5, "text", torch.zeros(0), torch.tensor(7.0), torch.arange(4.0).reshape(2, 2)]
    values += [torch.arange(3, dtype=torch.uint8).view(kind) for kind in _DTYPES.values() if kind.itemsize == 1]
    values += [torch.ones(3).to(kind) for kind in (torch.float16, torch.bfloat16, torch.complex64, torch.int64)]
    records = [Record(Piece(number, 0, 4), "k" * 10_000, value) for number, value in enumerate(values)]
    for before, after in zip(records, unpack(pack(records), WHO, 2), strict=True):
        assert (before.piece, before.key) == (after.piece, after.key)
        if isinstance(before.value, torch.Tensor):
            assert (before.value.dtype, before.value.shape) == (after.value.dtype, after.value.shape)
            assert raw(before.value) == raw(after.value)
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


numbers = st.one_of(st.integers(-2, 9), st.sampled_from([1 << 31, 1 << 62, 1 << 64, 1 << 80]), st.none(), st.floats())
plain = st.one_of(numbers, st.text(max_size=4), st.booleans(), st.lists(numbers, max_size=3))
kinds = st.one_of(st.none(), st.sampled_from(sorted(_DTYPES)), st.sampled_from(["load", "qint8", "tensor", ""]), plain)
entries = st.one_of(
    st.tuples(numbers, numbers, numbers, st.sampled_from(["exp_avg", "weights", ""]), kinds, plain).map(list),
    st.lists(plain, max_size=7),
)


@given(st.one_of(st.binary(max_size=80), st.builds(packed, st.lists(entries, max_size=3), st.binary(max_size=40))))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_records_or_a_fault_of_their_sender(data: bytes) -> None:
    try:
        records = unpack(data, WHO, 2)
    except ProtocolError:
        return
    assert all(record.piece.start <= record.piece.stop for record in records)
