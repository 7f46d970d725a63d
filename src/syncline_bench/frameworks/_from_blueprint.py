"""The parts shared by frameworks that build the workload's network from its blueprint, on the CPU."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batches import Batch
from ..workloads import PLAIN, Part, Workload

Array = NDArray[Any]


class FromBlueprint(ABC):
    """A training on the CPU, which needs no waiting for a device and no mode for evaluations."""

    label_type: type[np.signedinteger[Any]] = np.int64

    @staticmethod
    def lacks(workload: Workload) -> str:
        """Networks without a blueprint, and options that only PyTorch has."""
        if workload.blueprint is None:
            return "its model is written for PyTorch only"
        if workload.computing != PLAIN:
            return "device=, channels_last= and autotune= are PyTorch's"
        return ""

    def taken(self, part: Part) -> tuple[Any, Any]:
        images, labels = part
        return np.ascontiguousarray(images.transpose(0, 2, 3, 1)), labels.astype(self.label_type, copy=False)

    def moved(self, batch: Batch) -> Batch:
        return batch

    def now(self) -> float:
        return time.perf_counter()

    def pause(self) -> None:  # noqa: B027 - which is the answer
        """Nothing to do."""

    def resume(self) -> None:  # noqa: B027 - which is the answer
        """Nothing to do."""

    @abstractmethod
    def copied(self) -> Mapping[str, Array]:
        """Weights by the blueprint's names, in its layout."""

    def digest(self) -> str:
        return digest_of(self.copied())


class InOneStep:
    """A framework whose ``backward`` computes a whole step of ``_batch`` and sets ``_loss``."""

    fused = True
    _batch: Batch
    _loss: float

    def forward(self, batch: Batch) -> None:
        self._batch = batch

    def update(self, position: int) -> float:  # noqa: ARG002
        return self._loss


def filled(array: Array, length: int) -> Array:
    """The array, padded at its end with zeros."""
    return np.concatenate([array, np.zeros((length - len(array), *array.shape[1:]), array.dtype)])


def scores(found: Sequence[tuple[Array, NDArray[np.int64]]]) -> tuple[float, float]:
    """Accuracy and mean cross entropy over pieces of a test set, given as the model's outputs and the labels."""
    right, loss, count = 0, 0.0, 0
    for said, labels in found:
        shifted = said - said.max(1, keepdims=True)
        logarithms = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        right += int((said.argmax(1) == labels).sum())
        loss -= float(logarithms[np.arange(len(labels)), labels].sum())
        count += len(labels)
    return right / count, loss / count


def digest_of(weights: Mapping[str, Array]) -> str:
    """The SHA-256 of the names, types and bytes of all arrays, in the order of the names."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(f"{name} {weights[name].dtype} {weights[name].shape}\n".encode())
        found.update(np.ascontiguousarray(weights[name]).tobytes())
    return found.hexdigest()
