"""Python functions as operations of a graph of TensorFlow, on arrays of its memory; in eager mode they are called.

A function reads what it is given for as long as the call lasts, without a copy. What it gives is TensorFlow's from then
on, which keeps the very memory where it can: give what nobody writes to until all that read it have been made. In eager
mode it is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...nouns import Spec

Array = NDArray[Any]
Function = Callable[..., Sequence[Array]]


_ALIGNMENT = 64
"""Of memory that TensorFlow takes as it is, in bytes; it copies what lies otherwise."""


def aligned(array: Array) -> Array:
    """A copy that TensorFlow can keep."""
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    found = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    np.copyto(found, array)
    return found


def invoke(function: Function, arguments: Sequence[Any], results: Sequence[Spec]) -> list[Any]:
    """Have the graph that is being made call a function of arrays; with what it gives, or what waits for it."""
    if tf.executing_eagerly():
        return [tf.constant(one) for one in function(*map(np.asarray, arguments))]
    types = [tf.as_dtype(spec.dtype) for spec in results]
    made = tf.numpy_function(function, list(arguments), types)
    if not results:
        return [made]
    for one, spec in zip(made, results, strict=True):
        one.set_shape(spec.shape)
    return list(made)
