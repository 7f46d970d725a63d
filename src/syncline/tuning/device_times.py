"""What a codec costs on a GPU: seconds of encoding and decoding beside a copy within the GPU's memory.

Compression is bound by memory, so that the copy is what no kernel can beat. Times are those of the GPU's own events
around calls that are ordered one behind the other: what the host takes to order a call is hidden as it is in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..codecs import Codec, State, codec_of
from ..codecs._device import to_device
from ..errors import UsageError
from ..nouns import Spec

WARM_UP = 5
REPETITIONS = 30


@dataclass(frozen=True)
class DeviceTimes:
    """One codec on one GPU: medians in seconds over ``elements`` float32; ``nbytes`` is the payload's size.

    ``decode_s`` is decoding and adding to what is there.
    """

    device: str
    feedback: bool
    elements: int
    nbytes: int
    encode_s: float
    decode_s: float
    copy_s: float

    @property
    def encode_share(self) -> float:
        """Bytes that encoding reads and writes at least, per second, as a share of those of the copy.

        Those are the gradient and the payload, and with error feedback the residual, read and written.
        """
        moved = 4 * self.elements * (3 if self.feedback else 1) + self.nbytes
        return moved / self.encode_s / self._copied_per_s

    @property
    def decode_share(self) -> float:
        """The same of decoding and adding: the payload is read, the sum is read and written."""
        return (8 * self.elements + self.nbytes) / self.decode_s / self._copied_per_s

    @property
    def _copied_per_s(self) -> float:
        return 8 * self.elements / self.copy_s


def measure_on_gpu(codec: Codec, elements: int, repetitions: int = REPETITIONS) -> DeviceTimes:
    """Measure a codec on the current GPU; a matrix of so many elements, a new random gradient in every repetition.

    Takes up to 16 bytes of the GPU's memory for each element. Raises UsageError where there is no GPU, or where the
    codec has no kernels for one.
    """
    import torch

    if not torch.cuda.is_available():
        raise UsageError("there is no GPU to measure on: PyTorch finds no CUDA device here")
    if elements < 1 or repetitions < 1:
        raise UsageError(f"{elements} elements, {repetitions} repetitions: measure at least one")
    spec = Spec("gradient", (1, elements))
    codec, feedback, _ = codec_of(codec, spec)
    device = torch.device("cuda", torch.cuda.current_device())
    state: State = to_device(codec.init(spec, 0, feedback), device)
    x, out = torch.empty(elements, device=device), torch.zeros(elements, device=device)
    payload: Any = torch.empty(codec.wire_bytes(spec)[1] // 4, dtype=torch.int32, device=device)
    words = 0

    def encode() -> None:
        nonlocal words
        words = codec.encode(x, payload, state).words  # type: ignore[arg-type]

    calls: tuple[Callable[[], Any], ...] = (
        lambda: out.copy_(x),
        encode,
        lambda: codec.decode(payload[:words], out, state, add=True),  # type: ignore[arg-type]
    )
    rows = []
    for _ in range(WARM_UP + repetitions):
        x.normal_(std=0.01)
        rows.append([_timed(call) for call in calls])
        state.step += 1
    copy_s, encode_s, decode_s = (median(column) for column in zip(*rows[WARM_UP:], strict=True))
    return DeviceTimes(torch.cuda.get_device_name(device), feedback, elements, 4 * words, encode_s, decode_s, copy_s)


def _timed(call: Callable[[], Any]) -> float:
    """Seconds that the GPU takes for what a call orders."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    # Work in front lets the host order the call, and its end, before the GPU begins with it.
    torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
