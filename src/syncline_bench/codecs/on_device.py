"""Codecs on a device, timed by its own events: the contestants of ``bench codecs --device``, and of ``benchmarks/gpu``.

A time is the mean of ``CALLS`` calls in a row, so that the device does not wait for the processor between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from syncline.codecs import Codec, Floats, TakesTensors
from syncline.codecs._device import to_device, why_not
from syncline.errors import UsageError
from syncline.tuning.codec_times import Addition, Trial

CALLS = 20


def checked(name: str) -> Any:
    """The device of that name; raises UsageError, in one line, if codecs cannot work there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device={name}: torch knows no such device; choose cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device={name}: this machine has no CUDA device that torch {torch.__version__} can use")
    if reason := why_not(device):
        called = torch.cuda.get_device_name(device) if device.type == "cuda" else "this processor"
        raise UsageError(f"device={name}: kernels of codecs do not run on {called}: {reason}")
    return device


def seconds(act: Callable[[], object], device: Any, calls: int = CALLS) -> float:
    """The mean time of one call on a device."""
    if device.type != "cuda":
        begun_s = time.perf_counter()
        for _ in range(calls):
            act()
        return (time.perf_counter() - begun_s) / calls
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begun.record()
    for _ in range(calls):
        act()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3 / calls


class DeviceAddition(Addition):
    """``torch.add(a, b, out=c)`` on a device."""

    def __init__(self, elements: int, device: Any) -> None:
        self._device = device
        self._there, self._sum = torch.ones(elements, device=device), torch.empty(elements, device=device)

    def __call__(self, x: Floats) -> tuple[float]:
        """Seconds of one addition."""
        values = torch.from_numpy(x).to(self._device)
        return (seconds(lambda: torch.add(values, self._there, out=self._sum), self._device),)


class DeviceTrial(Trial):
    """A codec on a device. Raises UsageError for a codec that works on the processor only."""

    def __init__(self, text: str, feedback: bool, elements: int, device: Any) -> None:
        super().__init__(text, feedback, elements)
        if not isinstance(self._codec, TakesTensors) or not self._codec.takes_tensors:
            raise UsageError(f"{text} works on the processor only: leave --device out, or name other --codecs")
        self._device, self._state = device, to_device(self._state, device)
        self._sum = torch.zeros(elements, device=device)
        self._words = torch.zeros(len(self._payload), dtype=torch.int32, device=device)

    def _encode_and_decode(self, codec: Codec, x: Floats) -> tuple[float, float]:
        values: Any = torch.from_numpy(x).to(self._device)
        total: Any = self._sum
        room: Any = self._words
        words = codec.encode(values, room, self._state).words
        encode_s = seconds(lambda: codec.encode(values, room, self._state), self._device)
        decode_s = seconds(lambda: codec.decode(room[:words], total, self._state, add=True), self._device)
        self._sizes.append(4 * words)
        return encode_s, decode_s
