"""``text``: a small transformer that predicts the next character of source code or of a file, ``text:FILE``.

Without a file it reads Python's standard library: modules in the order of their names, up to 512 KiB, so that nothing
has to be downloaded. Versions of Python differ in this text, so compare accuracies of one version only. Characters are
bytes; those beyond ASCII count as one. The text is cut into sequences, of which every sixteenth is for testing, and
accuracy is the share of characters predicted right. The global batch is constant, whatever the number of workers.

The recipe makes the result insensitive to rounding: no dropout, and the learning rate of ``_solver``. The optimizer is
AdamW (Loshchilov and Hutter, ICLR 2019).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from syncline.errors import DataError, UsageError
from syncline.registry import register

from ._solver import warm_cosine
from ._workload import Part, Workload, entropy

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

LENGTH = 64
SYMBOLS = 128
MOST_BYTES = 1 << 19
TEST_EVERY = 16
BATCH = 32
HEAD = 32
"""Values per head of the attention."""
MOST_WIDTH, MOST_LAYERS = 4096, 64


@dataclass(frozen=True)
class Sequences:
    """Sequences of characters, (n, ``LENGTH`` + 1) of type uint8; labels are the characters shifted by one."""

    symbols: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.symbols)

    def take(self, index: NDArray[np.int64]) -> Part:
        """Characters and the following ones, both (len(index), LENGTH) int64."""
        whole = self.symbols[index].astype(np.int64)
        return whole[:, :-1], np.ascontiguousarray(whole[:, 1:])


@register("workloads", "text", computes=True)
def text(argument: str = "", *, width: int = 128, layers: int = 6) -> Workload:
    """A transformer on characters of Python's standard library, or of a file; the global batch is constant.

    It has 12 ``layers`` x ``width``^2 parameters and a few more: 1.2 million by default.
    """
    if not (HEAD <= width <= MOST_WIDTH and width % HEAD == 0):
        raise UsageError(f"width must be a multiple of {HEAD} up to {MOST_WIDTH}, got {width}")
    if not 1 <= layers <= MOST_LAYERS:
        raise UsageError(f"layers must be a number from 1 to {MOST_LAYERS}, got {layers}")
    sequences = _cut(_read(Path(argument)) if argument else _library(), argument or "Python's standard library")
    tested = np.arange(len(sequences)) % TEST_EVERY == TEST_EVERY - 1
    return Workload(
        name=f"text:{argument}" if argument else "text",
        batch=BATCH,
        global_batch=True,
        epochs=1,
        train=Sequences(sequences[~tested]),
        test=Sequences(sequences[tested]),
        build=lambda: _build(width, layers),
        loss=entropy,
        optimizer=_optimizer,
        schedule=warm_cosine,
    )


def _library() -> bytes:
    """The beginning of the standard library's source code."""
    found = b""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        if not path.name.startswith("_sysconfigdata"):  # differs between installations of one version
            found += path.read_bytes()
        if len(found) >= MOST_BYTES:
            return found
    raise UsageError("this Python has no source code of its standard library to learn: give a file, text:FILE")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"text:{path}: the file cannot be read: {error.strerror or error}") from None


def _cut(data: bytes, where: str) -> NDArray[np.uint8]:
    """Sequences, each of which ends with the first character of the next."""
    symbols = np.minimum(np.frombuffer(data[:MOST_BYTES], np.uint8), SYMBOLS - 1)
    count = (len(symbols) - 1) // LENGTH
    if count < BATCH:
        raise UsageError(f"{where} has {len(data)} bytes, but a batch takes {BATCH * LENGTH + 1}: give a longer text")
    return np.lib.stride_tricks.sliding_window_view(symbols, LENGTH + 1)[: count * LENGTH : LENGTH]


def _build(width: int, layers: int) -> nn.Module:
    from .models.transformer import Transformer

    return Transformer(SYMBOLS, LENGTH, width, width // HEAD, layers)


def _optimizer(model: nn.Module) -> Optimizer:
    from torch.optim import AdamW

    return AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
