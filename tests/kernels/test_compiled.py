"""Compiled functions as Python calls them: every kind of parameter and result, and what is refused."""

from __future__ import annotations

import gc
from typing import Any

import elementwise
import numpy as np
import pytest

from syncline.kernels.marks import Parameter, Signature


def test_a_signature_says_what_is_taken_and_returned() -> None:
    found = Signature.parse("(float32[], int64[,], bool, float64) -> int64, int64")
    assert found.parameters == (Parameter("float32", 1), Parameter("int64", 2), Parameter("bool"), Parameter("float64"))
    assert found.results == ("int64", "int64")
    assert found.layout == "q" + 8 * "x" + "q" + 16 * "x" + "?7x" + "d"
    assert found.size == 2 + 3 + 1 + 1 + 2
    assert Signature.parse(str(found)) == found
    assert Signature.parse("()") == Signature((), ())


@pytest.mark.parametrize("size", [0, 1, 7])
@pytest.mark.parametrize("whole", [int, np.int64, np.uint32])
def test_every_kind_of_parameter_and_result(size: int, whole: Any) -> None:
    numbers, table = np.arange(size, dtype=np.float32), np.zeros((2, 3), np.int64)
    mask, flag = elementwise.everything(numbers, np.float32(0.1), whole(0xFFFFFFFF), True, table)
    assert (mask, flag) == (0xFFFFFFFF, 1)
    np.testing.assert_array_equal(numbers, np.arange(size, dtype=np.float32) * np.float32(0.1))
    np.testing.assert_array_equal(table, [[0, 1, 2], [10, 11, 12]])
    assert elementwise.total(np.array([0.5, 0.25], np.float32)) == 0.75
    assert elementwise.odd(3) is True
    assert elementwise.odd(4) is False
    assert elementwise.chances(0, 0, numbers) is None


GOOD = (np.zeros(3, np.float32), 1.0, 1, False, np.zeros((2, 2), np.int64))
READ_ONLY = np.zeros(3, np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, np.zeros(3, np.float64)),
        (0, np.zeros(3, ">f4")),
        (0, np.zeros((3, 1), np.float32)),
        (0, np.zeros(6, np.float32)[::2]),
        (0, READ_ONLY),
        (0, [0.0]),
        (0, None),
        (1, "1"),
        (2, 1.5),
        (2, 1 << 63),
        (0, np.zeros(13, np.uint8)[1:].view(np.float32)),
        (4, np.zeros(4, np.int64)),
        (4, np.zeros((2, 4), np.int64)[:, :2]),
        (4, np.zeros((2, 2), np.int64).T[::-1]),
    ],
)
def test_anything_else_is_refused_before_it_is_run(place: int, value: Any) -> None:
    given = [*GOOD[:place], value, *GOOD[place + 1 :]]
    with pytest.raises(TypeError):
        elementwise.everything(*given)


def test_so_is_another_number_of_parameters() -> None:
    for given in (GOOD[:-1], (*GOOD, 1)):
        with pytest.raises(TypeError, match="everything takes"):
            elementwise.everything(*given)


def test_a_bound_function_reads_its_arrays_where_they_lie_and_keeps_them() -> None:
    seen = np.zeros(4, np.uint32)

    def bound_to(code: int) -> Any:
        return elementwise.widen_e4m3s.bind(np.full(4, code, np.uint32), seen)

    calls = [bound_to(code) for code in (0x38, 0x40)]
    gc.collect()
    assert [np.full(4, 7, np.uint32).sum() for _ in range(20)] == [28] * 20  # where freed arrays would have been
    for call, value in zip(calls, (1.0, 2.0), strict=True):
        call()
        np.testing.assert_array_equal(seen.view(np.float32), [value] * 4)


def test_what_cannot_be_bound_is_refused() -> None:
    numbers = np.zeros(4, np.uint32)
    for given in ([], [numbers], [numbers] * 3):
        with pytest.raises(TypeError, match="cannot be bound"):
            elementwise.widen_e4m3s.bind(*given)
    with pytest.raises(TypeError, match="cannot be bound"):
        elementwise.everything.bind(*GOOD)
    with pytest.raises(TypeError, match="0 parameters are not bound, got 1"):
        elementwise.widen_e4m3s.bind(numbers, numbers)(1)


def test_types_that_are_equal_without_being_the_same_are_taken() -> None:
    other = np.dtype(np.float32).newbyteorder("<")
    numbers = np.array([0.5, 0.25], other)
    assert elementwise.total(numbers) == 0.75
    assert elementwise.total(np.frombuffer(bytearray(8), other)) == 0


@pytest.mark.parametrize("flag", [True, 1, np.bool_(True), 7])
def test_a_truth_value_is_one(flag: Any) -> None:
    assert elementwise.everything(*GOOD[:3], flag, GOOD[4])[1] == 1
