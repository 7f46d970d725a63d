"""16-bit numbers and sums in compiled code: the bits are those of numpy and ml_dtypes, always."""

from __future__ import annotations

from typing import Any

import numpy as np
from bits import same
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from syncline.kernels import cpu
from syncline.kernels.passes import CODES, sum_arrays
from syncline.nouns import numpy_dtype


@st.composite
def sums(draw: Any) -> tuple[str, int, int, int, int, bool]:
    return (
        draw(st.sampled_from(sorted(CODES))),
        draw(st.integers(1, 6)),
        draw(st.integers(1, 6)),
        draw(st.sampled_from([0, 1, 2, 3, 31, 1023, 1024, 1025, 2049, 5000])),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.booleans()),
    )


def numbers(dtype: np.dtype[Any], count: int, size: int, seed: int) -> list[NDArray[Any]]:
    """Arrays whose sum depends on its order, or, of whole numbers, overflows."""
    draw = np.random.default_rng(seed)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return [draw.integers(info.min, info.max, size, dtype, endpoint=True) for _ in range(count)]
    return [(draw.standard_normal(size) * 10.0 ** draw.integers(-7, 5, size)).astype(dtype) for _ in range(count)]


def one_by_one(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    total = arrays[0].copy()
    for array in arrays[1:]:
        np.add(total, array, out=total)
    return total


def addresses(arrays: list[NDArray[Any]]) -> NDArray[np.int64]:
    return np.array([array.ctypes.data for array in arrays], np.int64)


@settings(deadline=None, max_examples=150)
@given(sums())
def test_sums_have_the_bits_of_numpy_adding_one_by_one(case: tuple[str, int, int, int, int, bool]) -> None:
    """Into some of the sources (the first among them), or elsewhere; aligned or not."""
    name, sources, targets, size, seed, unaligned = case
    dtype = numpy_dtype(name)
    given_arrays = numbers(dtype, sources, size, seed)
    with np.errstate(all="ignore"):
        wanted = one_by_one(given_arrays)
    room = [np.zeros((size + 1) * dtype.itemsize, np.uint8) for _ in range(sources + targets)]
    first = 1 if unaligned else 0
    arrays = [memory[first : first + size * dtype.itemsize].view(dtype) for memory in room]
    for array, values in zip(arrays, given_arrays, strict=False):
        array[...] = values
    chosen = arrays[:targets] if seed % 2 else arrays[sources : sources + targets]
    sum_arrays(CODES[name], dtype.itemsize, addresses(arrays[:sources]), addresses(chosen), size)
    for array in chosen:
        same(array, wanted)
    untouched = [array for array in arrays[:sources] if not any(array is target for target in chosen)]
    for array, values in zip(arrays, given_arrays, strict=False):
        if any(array is other for other in untouched):
            same(array, values)


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(["float16", "bfloat16", "float32", "int8", "int64", ">f4", ">f2"]),
    st.integers(1, 4),
    st.sampled_from([0, 1, 7, 4095, 4096, 70_001]),
    st.integers(0, 2**32 - 1),
)
def test_adding_into_an_array_has_the_same_bits_at_every_size(name: str, others: int, size: int, seed: int) -> None:
    dtype = np.dtype(name) if name.startswith(">") else numpy_dtype(name)
    arrays = [array.astype(dtype) for array in numbers(dtype.newbyteorder("="), others + 1, size, seed)]
    with np.errstate(all="ignore"):
        wanted = one_by_one(arrays)
        cpu.add_all_into(arrays[0], arrays[1:])
    same(arrays[0], wanted)
