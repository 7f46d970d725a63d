"""Where a codec works: on numpy arrays in host memory, or on torch tensors where the gradients are.

``encode`` and ``decode`` take either. They ask here for the kernels of their family, which have the same names, the
same arguments and the same payload bits on both sides: what was encoded on a GPU may be decoded, summed and encoded
again on the host, and the other way round. On a device

    x, out        one-dimensional contiguous float32 tensors
    payloads      one-dimensional contiguous int32 tensors of the same bits
    the state     the codec's own, its arrays moved by ``to_device``
    finite        ``Encoded.finite`` is a tensor of one element: asking whether it is true waits for the device,
                  everything else is only ordered in the device's current stream

Two more things wait for the device, once each: encoding by ``threshold``, whose payloads have no fixed length, and
decoding pairs of index and value, which are checked before anything is written.

A NaN in a payload of 16-bit numbers or of pairs, or a sign in a block that is not finite, may be another one than on
the host; so may the choice where more elements are NaN than pairs are sent.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..errors import UsageError
from . import State


def on_device(array: Any) -> bool:
    """True for a torch tensor, of whatever device; False for a numpy array."""
    return not isinstance(array, np.ndarray)


def kernels_for(family: str, array: Any) -> Any:
    """The module ``kernels.<family>`` for a numpy array, that of ``kernels.cuda`` for a torch tensor.

    Raises UsageError where a family has no kernels for devices, or Triton is not installed.
    """
    return _kernels(family, not isinstance(array, np.ndarray))


@cache
def _kernels(family: str, device: bool) -> Any:
    if not device:
        return import_module(f"..kernels.{family}", __package__)
    if find_spec("triton") is None:
        raise UsageError("compressing on a GPU needs Triton: pip install 'syncline[cuda]'")
    name = f"..kernels.cuda.{family}"
    if find_spec(name, __package__) is None:
        raise UsageError(f"there are no kernels for {family} on a device: let the codec work on the host")
    return import_module(name, __package__)


def halves(payload: Any) -> Any:
    """A payload as 16-bit words: uint16 of numpy, int16 of torch."""
    if not on_device(payload):
        return payload.view(np.uint16)
    import torch

    return payload.view(torch.int16)


def floats(payload: Any) -> Any:
    """A payload as numbers: float32 of numpy or torch."""
    if not on_device(payload):
        return payload.view(np.float32)
    import torch

    return payload.view(torch.float32)


def room_for(words: int, like: Any) -> Any:
    """An array of so many words, on the side of another one."""
    if not on_device(like):
        return np.empty(words, np.uint32)
    import torch

    return torch.empty(words, dtype=torch.int32, device=like.device)


def to_device(state: State, device: Any) -> State:
    """A state whose arrays are tensors on a device, copied there."""
    import torch

    return _moved(state, lambda array: torch.from_numpy(array).to(device, copy=True))


def to_host(state: State) -> State:
    """The reverse, for checkpoints: waits for the device."""
    return _moved(state, lambda tensor: tensor.cpu().numpy().copy())


def _moved(state: State, move: Any) -> State:
    residual = None if state.residual is None else move(state.residual)
    return replace(state, residual=residual, memory={name: move(array) for name, array in state.memory.items()})
