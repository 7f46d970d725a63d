"""Exposes objects of any framework as arrays in host memory: NumPy's own, the buffer protocol and DLPack.

Nothing is copied, and no framework is imported: the object's own protocol suffices. Memory on a device, and memory that
cannot be written although it must be, is refused with the object's name and a remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

Array = NDArray[Any]

_HOST_DEVICES = {1, 3, 11, 13}
"""DLPack's device types whose memory the processor can read: the host's own, pinned for a GPU, or shared with one."""
_MOST_WORK = 1_000_000
_DEVICES = {2: "CUDA device", 4: "OpenCL device", 7: "Vulkan device", 8: "Metal device", 10: "ROCm device"}


def is_memory(given: object) -> bool:
    """Whether an object is an array or exports its memory as one."""
    return isinstance(given, np.ndarray | memoryview | bytearray) or any(
        hasattr(given, name) for name in ("__dlpack__", "__array_interface__", "__cuda_array_interface__")
    ) or _view_of(given) is not None  # fmt: skip


def host_array(given: object, what: str) -> Array:
    """The array of an object's memory; messages call it ``what``. Raises UsageError if it has none on the host."""
    if isinstance(given, np.ndarray):
        return given
    kind = type(given).__name__
    if device := _device_of(given):
        raise UsageError(
            f"{what} is a {kind} on a {device}: Syncline needs host memory here; give a copy in host memory, such as"
            " cupy.asnumpy(array), and copy the updated values back"
        )
    try:
        view = _view_of(given)
        if view is not None:
            return np.asarray(view)
        if hasattr(given, "__dlpack__"):
            return np.from_dlpack(given)
        if hasattr(given, "__array_interface__"):
            return np.asarray(given)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise UsageError(f"{what} is a {kind} whose memory cannot be used as an array: {error}") from error
    raise UsageError(f"{what} is {kind}: give an array, or an object with the buffer protocol or DLPack")


def floating_array(given: object, what: str) -> Array:
    """The same, restricted to floating-point numbers in this machine's byte order."""
    array = host_array(given, what)
    if not (array.dtype.kind == "f" and array.dtype.isnative) and str(array.dtype) != "bfloat16":
        raise UsageError(f"{what} is {array.dtype}: give floating-point arrays, each with a name")
    return array


def check_writable(arrays: Mapping[str, Array]) -> None:
    """Raise UsageError for weights that cannot be updated in place, or that would be updated twice."""
    for name, array in arrays.items():
        if _overlaps_itself(array):
            raise UsageError(
                f"elements of the model's {name!r} share memory (its strides are {array.strides}), and would be"
                " updated more than once: give a copy, numpy.array(array)"
            )
        if not array.flags.writeable:
            raise UsageError(
                f"the model's {name!r} is in read-only memory, but Syncline updates weights in place: give a copy,"
                " numpy.array(array), or let its framework export writable memory"
            )
    names = list(arrays)
    for first, second in ((names[one], names[two]) for one, two in overlapping(list(arrays.values()))):
        raise UsageError(
            f"the model's {first!r} and {second!r} share memory, which would be updated twice: give the array under"
            " one name, with the sum of the gradients"
        )


def overlapping(arrays: Sequence[Array]) -> Iterator[tuple[int, int]]:
    """Pairs of arrays that share an element, whether or not they have gaps. The first one begins earlier in memory."""
    bounds = {number: _bounds(array) for number, array in enumerate(arrays) if array.size}
    open_: list[int] = []  # whose memory reaches the present one's
    for number in sorted(bounds, key=lambda number: bounds[number]):
        open_ = [one for one in open_ if bounds[one][1] > bounds[number][0]]
        yield from ((one, number) for one in open_ if _share(arrays[one], arrays[number]))
        open_.append(number)


def _bounds(array: Array) -> tuple[int, int]:
    """The address of an array's first byte, and the address after its last byte."""
    begin = int(array.__array_interface__["data"][0])
    reaches = [(count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True)]
    low, high = sum(one for one in reaches if one < 0), sum(one for one in reaches if one > 0)
    return begin + low, begin + high + array.itemsize


def _share(one: Array, other: Array) -> bool:
    """Whether two arrays with overlapping bounds share a byte. If that is too hard to decide, the answer is yes."""
    try:
        return np.shares_memory(one, other, max_work=_MOST_WORK)  # type: ignore[arg-type]  # any number will do
    except np.exceptions.TooHardError:
        return True


def _overlaps_itself(array: Array) -> bool:
    """Whether elements share memory, or may: a stride is smaller than the extent of the smaller strides."""
    reach = array.itemsize
    steps = sorted((abs(stride), n) for stride, n in zip(array.strides, array.shape, strict=True) if n > 1)
    for stride, count in steps if array.size else ():
        if stride < reach:
            return True
        reach += stride * (count - 1)
    return False


def _view_of(given: Any) -> memoryview | None:
    try:
        return memoryview(given)
    except (TypeError, ValueError, BufferError):
        return None


def _device_of(given: Any) -> str:
    """The name of an object's device; empty for host memory, or if the object names no device."""
    if hasattr(given, "__dlpack_device__"):
        kind, number = given.__dlpack_device__()
        return (
            "" if int(kind) in _HOST_DEVICES else f"{_DEVICES.get(int(kind), f'device of kind {int(kind)}')} ({number})"
        )
    return "CUDA device" if hasattr(given, "__cuda_array_interface__") else ""
