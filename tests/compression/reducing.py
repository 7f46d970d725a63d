"""What tests of reducers share: every codec of the registry, and the ranks of a run that exchange in the loop."""

from __future__ import annotations

from typing import Any

import numpy as np
from loop import Alter, Counted, run, untouched

from syncline import registry
from syncline.codecs import Codec
from syncline.compression.compression import Compression
from syncline.compression.reducers import Participant
from syncline.nouns import Bucket, Layer, Slice, Spec, numpy_dtype
from syncline.strategy.grammar import read_part
from syncline.strategy.parts import build

TEXTS = [text for entry in registry.entries("codecs") for text in entry.capabilities.get("examples", (entry.name,))]
TEXTS += ["randomk(ratio=0.01, decay=1)", "randomk(ratio=0.3, decay=1)"]
SHAPES = [(3,), (40, 50), (7,), (1,), (64, 33), (5000,)]
ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES)


def codec(text: str, feedback: bool | None = None) -> Codec:
    """A codec by its text, with the feedback that a strategy would put around it, or as told."""
    found: Codec = build("codecs", read_part(text))
    wanted = (found.biased and found.contraction) if feedback is None else feedback
    return build("codecs", read_part(f"feedback({text})")) if wanted and not text.startswith("feedback") else found


class Group:
    """The ranks of a run, with states that last over steps."""

    def __init__(
        self,
        codec: Codec,
        workers: int,
        shapes: Any = SHAPES,
        buckets: Any = None,
        servers: int = 0,
        dtype: str = "float32",
    ) -> None:
        self.layers = [Layer(Spec(f"p{number}", shape, dtype)) for number, shape in enumerate(shapes)]
        whole = [Slice(number, 0, layer.spec.elements) for number, layer in enumerate(self.layers)]
        self.buckets = [Bucket(tuple(part), dtype) for part in (buckets or [whole])]
        owners = tuple(range(workers, workers + servers)) or tuple(range(workers))
        self.rooms = [Counted() for _ in range(workers + servers)]
        self.arrays = [
            [np.zeros(bucket.elements, numpy_dtype(dtype)) for bucket in self.buckets] for _ in range(workers + servers)
        ]
        self.workers, self.codec = workers, codec
        self.ranks = [
            Compression(
                codec,
                self.layers,
                self.buckets,
                arrays,
                Participant(index, workers, owners, room),
                served=bool(servers),
                name=f"rank {index}",
            )
            for index, (arrays, room) in enumerate(zip(self.arrays, self.rooms, strict=True))
        ]

    def step(self, inputs: list[list[np.ndarray]], alter: Alter = untouched) -> int:
        """One exchange of all buckets: ``inputs`` are the gradients of every worker, by bucket; the bytes sent."""
        sent = 0
        for worker, gradients in enumerate(inputs):
            for array, gradient in zip(self.arrays[worker], gradients, strict=True):
                array[:] = gradient
        for number in range(len(self.buckets)):
            todo = [rank.pieces(number) for rank in self.ranks]
            for made in zip(*todo, strict=True):
                sent += run([start() for start in made], alter)
            for rank in self.ranks:
                rank.finish(number)
        self.given_back = all(room.out == 0 for room in self.rooms)
        return sent

    @property
    def results(self) -> list[np.ndarray]:
        return [np.concatenate(arrays) for arrays in self.arrays[: self.workers]]

    def residuals(self) -> np.ndarray:
        """What all ranks and owners still hold back, by element of the tensors."""
        saved = [rank.saved() for rank in self.ranks]
        parts = []
        for layer in self.layers:
            total = np.zeros(layer.spec.elements)
            for one in saved:
                total += one.get(f"own/{layer.spec.name}/residual", 0.0)
                for key, piece in one.items():
                    if key.startswith(f"again/{layer.spec.name}/"):
                        start = int(key.rpartition("/")[2])
                        total[start : start + piece.size] += piece
            parts.append(total)
        return np.concatenate(parts)


def gradients(workers: int, elements: int, seed: int, scale: float = 1.0) -> list[list[np.ndarray]]:
    draw = np.random.default_rng(seed)
    return [[(scale * draw.standard_normal(elements)).astype(np.float32)] for _ in range(workers)]


def can_be_served(text: str) -> bool:
    return codec(text).combine != "rounds"
