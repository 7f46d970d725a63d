"""Finds the kernels of a codec by where an array is: a NumPy array in host memory, or a torch tensor on a device.

``encode`` and ``decode`` of codecs that declare it (``TakesTensors``) accept both. The kernels of a family have the
same names, arguments and payload bits on both sides: a payload encoded on a GPU can be decoded, summed and encoded
again on the host, and vice versa. On a device

    x, out        one-dimensional contiguous float32 tensors
    payloads      one-dimensional contiguous int32 tensors of the same bits
    the state     the codec's own, its arrays moved by ``to_device``
    finite        ``Encoded.finite`` is a tensor of one element: testing it waits for the device, whereas everything
                  else is only queued in the device's current stream

Two more operations wait for the device once: encoding by ``threshold``, whose payloads have no fixed length, and
decoding pairs of index and value, which are validated before anything is written.

The two sides may differ in the bits of a NaN in payloads of 16-bit numbers or pairs, in the signs of a block that is
not finite, and in the selection if more elements are NaN than pairs are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..errors import UsageError
from . import Floats, Payload, State

SWITCH = "SYNCLINE_DEVICE_CODECS"
"""The environment variable that leaves codecs to the processor if it is ``off``."""

_QUANTISERS = ("cast", "linear", "signs", "stochastic", "ternary")
"""The families of ``kernels.cuda.quantisers``. On the host each has a module, since modules compile as a whole."""


def on_device(array: Any) -> bool:
    """Whether ``array`` is a torch tensor, on whatever device, and not a numpy array."""
    return not isinstance(array, np.ndarray)


def kernels_for(family: str, array: Any) -> Any:
    """``kernels.<family>`` for a numpy array, the module of ``kernels.cuda`` with the family for a torch tensor.

    Raises UsageError if the family has no device kernels, or Triton is not installed.
    """
    return _kernels(family, not isinstance(array, np.ndarray))


@cache
def _kernels(family: str, device: bool) -> Any:
    if not device:
        return import_module(f"..kernels.{family}", __package__)
    if find_spec("triton") is None:
        raise UsageError("compressing on a GPU needs Triton: pip install 'syncline[cuda]'")
    if family not in ("sparse", *_QUANTISERS):
        raise UsageError(f"there are no kernels for {family} on a device: let the codec work on the host")
    return import_module(f"..kernels.cuda.{'sparse' if family == 'sparse' else 'quantisers'}", __package__)


def why_not(device: Any) -> str:
    """The reason why the kernels do not run on a device; empty if they do. Compiles and runs one kernel to find out."""
    try:
        import torch

        x, payload = torch.ones(2, device=device), torch.zeros(1, dtype=torch.int32, device=device)
        kernels_for("cast", x).encode_bfloat16(x, x[:0], halves(payload))
        return "" if int(payload) == _TWO_ONES else f"1, 1 were rounded to {int(payload):#x}"
    except Exception as error:  # a compiler, a driver and a library, each with errors of its own
        return f"{type(error).__name__}: {error}".partition("\n")[0]


_TWO_ONES = 0x3F803F80
"""Two ones as bfloat16."""


def halves(payload: Any) -> Any:
    """A payload as 16-bit words: numpy's uint16 or torch's int16."""
    if not on_device(payload):
        return payload.view(np.uint16)
    import torch

    return payload.view(torch.int16)


def floats(payload: Any) -> Any:
    """A payload as float32 numbers of numpy or torch."""
    if not on_device(payload):
        return payload.view(np.float32)
    import torch

    return payload.view(torch.float32)


def room_for(words: int, like: Any) -> Any:
    """A new array of ``words`` words, on the same side as ``like``."""
    if not on_device(like):
        return np.empty(words, np.uint32)
    import torch

    return torch.empty(words, dtype=torch.int32, device=like.device)


def words(x: Any) -> Any:
    """Float32 numbers as the words of a payload."""
    if not on_device(x):
        return x.view(np.uint32)
    import torch

    return x.view(torch.int32)


def all_finite(x: Any) -> Any:
    """Whether all numbers are finite, for ``Encoded.finite``."""
    if not on_device(x):
        return bool(np.isfinite(x).all())
    import torch

    return torch.isfinite(x).all()


def all_in_one(told: Sequence[Any]) -> Any:
    """The values of one-element tensors on a device, one word each."""
    import torch

    return torch.cat([one.reshape(1) for one in told]).to(torch.int32)


def bring_down(there: Any, here: Payload) -> None:
    """Copy words to host memory, in the device's current stream. Does not wait if the device can reach the memory."""
    import torch

    torch.from_numpy(here.view(np.int32)).copy_(there, non_blocking=True)


def bring_up(here: Payload, like: Floats) -> Any:
    """A copy of words on the device of ``like``, made as by ``bring_down``."""
    import torch

    return room_for(len(here), like).copy_(torch.from_numpy(here.view(np.int32)), non_blocking=True)


def on_host(array: Any) -> Any:
    """A numpy array, or a copy of a tensor as a numpy array. Waits for the device."""
    return array.cpu().numpy() if on_device(array) else array


def overwrite(array: Any, values: Any) -> None:
    """Replace the elements by those of an array of the same size or, on a device, also of a tensor there."""
    if not on_device(array):
        array[...] = values
    elif on_device(values):
        array.copy_(values)
    else:
        import torch

        array.copy_(torch.from_numpy(np.array(values, np.float32)))


def to_device(state: State, device: Any) -> State:
    """A state whose arrays are copied to tensors on a device. Raises UsageError if it has no memory for them."""
    import torch

    try:
        moved: dict[str, Any] = {
            name: None if array is None else torch.from_numpy(array).to(device, copy=True)
            for name, array in {**state.memory, "": state.residual}.items()
        }
        return replace(state, residual=moved.pop(""), memory=moved)
    except RuntimeError as error:  # torch's OutOfMemoryError is one
        why = str(error).partition("\n")[0]
        raise UsageError(
            f"the codec's state of {state.spec.name!r} cannot be copied to {device}: {why}; {SWITCH}=off leaves codecs"
            " and their state to the processor"
        ) from error
