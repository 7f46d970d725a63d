"""What tests of pulled weights share: workers and owners that tell each other updates in the loop."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from reducing import ELEMENTS, codec, gradients

from syncline.compression.compression import Compression
from syncline.compression.reducers import Participant
from syncline.compression.updates import Updates
from syncline.nouns import Bucket, Layer, Slice, Spec, numpy_dtype
from syncline.testing.reducing import SHAPES, Counted, run

EDGES = np.cumsum([0, *(int(np.prod(shape)) for shape in SHAPES)])


class Served:
    """Workers and the owners of their weights, which are servers, or workers where there are none.

    With ``hosts`` their workers add up their gradients first.
    """

    def __init__(
        self,
        text: str,
        workers: int = 2,
        servers: int = 0,
        owners: int = 1,
        feedback: bool | None = None,
        single: bool = False,
        dtype: str = "float32",
        hosts: Sequence[tuple[int, ...]] = (),
        serving: tuple[int, ...] = (),
    ) -> None:
        layers = [Layer(Spec(f"p{number}", shape, dtype)) for number, shape in enumerate(SHAPES)]
        slices = [Slice(number, 0, layer.spec.elements) for number, layer in enumerate(layers)]
        self.layers = layers
        self.buckets = [Bucket((part,), dtype) for part in slices] if single else [Bucket(tuple(slices), dtype)]
        self.workers, places = workers, tuple(range(workers, workers + servers)) or serving
        places = places or tuple(range(owners))
        self.rooms = [Counted() for _ in range(workers + servers)]
        start = np.random.default_rng(5).standard_normal(ELEMENTS).astype(numpy_dtype(dtype))
        cuts = np.cumsum([0, *(bucket.elements for bucket in self.buckets)])
        self.known, self.gradients, self.codecs, self.updates = [], [], [], []
        for index, room in enumerate(self.rooms):
            flat, gradient = start.copy(), np.zeros_like(start)
            self.known.append(flat)
            self.gradients.append(gradient)
            me = Participant(index, workers, places, room, hosts=tuple(hosts))
            arrays = [gradient[a:b] for a, b in pairwise(cuts)]
            made = Compression(
                codec(text, feedback), layers, self.buckets, arrays, me, served=True, held=True, name=f"rank {index}"
            )
            self.codecs.append(made)
            self.updates.append(Updates(made, [flat[a:b] for a, b in pairwise(cuts)]))

    def push(self, inputs: list[list[np.ndarray]]) -> None:
        for worker, (given,) in enumerate(inputs):
            self.gradients[worker][:] = given
        self._drive([one.pieces for one in self.codecs])
        for made in self.codecs:
            for number in range(len(self.buckets)):
                made.finish(number)

    def pull(self) -> None:
        self._drive([one.pieces for one in self.updates])

    def _drive(self, pieces: list[Any]) -> None:
        for number in range(len(self.buckets)):
            for made in zip(*(one(number) for one in pieces), strict=True):
                run([start() for start in made])
        assert all(room.out == 0 for room in self.rooms)

    def step(self, seed: int, rate: float = 0.1) -> None:
        """Plain gradient descent at the owners."""
        self.descend(gradients(self.workers, ELEMENTS, seed), rate)

    def descend(self, inputs: list[list[np.ndarray]], rate: float = 0.1) -> None:
        self.push(inputs)
        for process, updates in enumerate(self.updates):
            for one in updates.owned:
                start = EDGES[one.tensor] + one.start
                gradient = self.gradients[process][start : start + one.weights.size]
                one.weights[:] = (one.weights - rate * gradient.astype(np.float64)).astype(one.weights.dtype)
        self.pull()

    @property
    def held(self) -> np.ndarray:
        """All owners' weights."""
        whole = np.full(ELEMENTS, np.nan, self.known[0].dtype)
        for updates in self.updates:
            for one in updates.owned:
                start = EDGES[one.tensor] + one.start
                assert np.isnan(whole[start : start + one.weights.size].astype(np.float32)).all(), "owned twice"
                whole[start : start + one.weights.size] = one.weights
        return whole
