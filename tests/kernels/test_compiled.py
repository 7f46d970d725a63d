"""Compiled functions as Python calls them: every kind of parameter and result, and what is refused."""

from __future__ import annotations

from typing import Any

import elementwise
import numpy as np
import pytest

from syncline.kernels.compiled import Parameter, Signature


def test_a_signature_says_what_is_taken_and_returned() -> None:
    found = Signature.parse("(float32[], int64[,], bool, float64) -> int64, int64")
    assert found.parameters == (Parameter("float32", 1), Parameter("int64", 2), Parameter("bool"), Parameter("float64"))
    assert found.results == ("int64", "int64")
    assert found.layout == "=qqqqqqdq"  # an address follows each array's shape; the last word is where results go
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
        with pytest.raises(TypeError, match=f"everything takes 5 parameters, got {len(given)}"):
            elementwise.everything(*given)


def test_a_bound_function_reads_its_arrays_where_they_lie() -> None:
    numbers, seen = np.zeros(4, np.uint32), np.zeros(4, np.uint32)
    bound = elementwise.widen_e4m3s.bind(numbers, seen)
    for code in (0x38, 0x40):
        numbers[:] = code
        bound()
        np.testing.assert_array_equal(seen.view(np.float32), [2.0 ** ((code >> 3) - 7)] * 4)
