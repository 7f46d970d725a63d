"""Kernels that apply what others are made of to every element of an array, so that tests can call it."""

from __future__ import annotations

import numpy as np

from syncline.kernels import blocks
from syncline.kernels.aot.compiled import compiled
from syncline.kernels.aot.native import bits_of_float, float_of_bits
from syncline.kernels.blocks import chance, draw, other_key
from syncline.kernels.cast import narrow_e4m3, widen_e4m3


@compiled("(int64, int64, float32[])")
def chances(seed, first, out):  # type: ignore[no-untyped-def]
    """The chances of as many elements from an index on."""
    key = np.uint32(seed)
    other = other_key(key)
    for i in range(out.size):
        out[i] = chance(draw(np.uint32(first + i), key, other))


@compiled("(uint16[], uint32[])")
def widen_float16(numbers, out):  # type: ignore[no-untyped-def]
    """Bits of float16 to bits of float32."""
    for i in range(out.size):
        out[i] = bits_of_float(blocks.widen_float16(numbers[i]))


@compiled("(uint32[], uint16[])")
def narrow_float16(numbers, out):  # type: ignore[no-untyped-def]
    """Bits of float32 to bits of float16."""
    for i in range(out.size):
        out[i] = blocks.narrow_float16(float_of_bits(numbers[i]))


@compiled("(uint16[], uint32[])")
def widen_bfloat16(numbers, out):  # type: ignore[no-untyped-def]
    """Bits of bfloat16 to bits of float32."""
    for i in range(out.size):
        out[i] = bits_of_float(blocks.widen_bfloat16(numbers[i]))


@compiled("(uint32[], uint16[])")
def narrow_bfloat16(numbers, out):  # type: ignore[no-untyped-def]
    """Bits of float32 to bits of bfloat16."""
    for i in range(out.size):
        out[i] = blocks.narrow_bfloat16(float_of_bits(numbers[i]))


@compiled("(uint32[], uint32[])")
def widen_e4m3s(numbers, out):  # type: ignore[no-untyped-def]
    """Bits of E4M3 to bits of float32."""
    for i in range(out.size):
        out[i] = bits_of_float(widen_e4m3(numbers[i]))


@compiled("(uint32[], uint32[])")
def narrow_e4m3s(numbers, out):  # type: ignore[no-untyped-def]
    """Bits of float32 to bits of E4M3."""
    for i in range(out.size):
        out[i] = narrow_e4m3(float_of_bits(numbers[i]))


@compiled("(float32[], float64, uint32, bool, int64[,]) -> int64, int64")
def everything(numbers, factor, mask, flag, table):  # type: ignore[no-untyped-def]
    """Every kind of parameter and result: scales the numbers, fills the table with its indices."""
    for i in range(numbers.size):
        numbers[i] *= np.float32(factor)
    for row in range(table.shape[0]):
        for column in range(table.shape[1]):
            table[row, column] = 10 * row + column
    return np.int64(mask), np.int64(flag)


@compiled("(float32[]) -> float64")
def total(numbers):  # type: ignore[no-untyped-def]
    """A result that is no whole number."""
    found = 0.0
    for i in range(numbers.size):
        found += numbers[i]
    return found


@compiled("(int64) -> bool")
def odd(number):  # type: ignore[no-untyped-def]
    """A result that is a truth value."""
    return number % 2 == 1
