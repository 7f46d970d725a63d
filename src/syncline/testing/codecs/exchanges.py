"""Laws of codecs among ranks: equal bits for all, nothing lost, and correct predictions of traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...codecs import Chooses, Codec, Decays, Floats, Sums, Wraps, codec_of
from ...codecs.feedback import Feedback
from ...compression.reducers import levels, ways
from ...compression.reducers.ways import parts_of
from ...nouns import Slice
from ..laws import Laws, require, same
from ..reducing import SHAPES, Ranks, as_predicted

_EDGES = np.cumsum([0, *(int(np.prod(shape)) for shape in SHAPES)])


@dataclass(frozen=True)
class Exchanged:
    """A codec as a strategy applies it, with the exchanging workers, and servers if there are any.

    On two levels ``hosts`` are the workers of each host, which sum before compressing.
    """

    codec: Codec
    workers: int
    servers: int
    seed: int
    hosts: tuple[tuple[int, ...], ...] = ()

    def ranks(self, buckets: Sequence[Sequence[Slice]] | None = None) -> Ranks:
        """The processes before their first step."""
        return Ranks(self.codec, self.workers, buckets=buckets, servers=self.servers, hosts=self.hosts)

    def gradients(self, step: int) -> list[Floats]:
        """The gradients of every worker: all tensors, concatenated."""
        draw = np.random.default_rng([self.seed, step])
        return list(draw.standard_normal((self.workers, _EDGES[-1])).astype(np.float32))

    def __str__(self) -> str:
        on = f" on hosts {self.hosts}" if self.hosts else ""
        return f"{self.workers} workers{on} and {self.servers} servers (seed {self.seed})"


_HOSTS = ((0, 3), (1, 2, 4))
"""Two hosts of unequal size."""


def among(
    *sizes: tuple[int, int],
    feedback: bool | None = None,
    hosts: tuple[tuple[int, ...], ...] = (),
) -> Callable[[Codec, int, int], Iterator[Exchanged]]:
    """Groups of workers and servers, with error feedback where a strategy would use it or could.

    With ``hosts``, also their workers on two levels.
    """

    def cases(codec: Codec, seed: int, count: int) -> Iterator[Exchanged]:  # noqa: ARG001
        wanted = codec.contraction and (codec.biased or bool(feedback))
        whole: Codec = Feedback(codec) if wanted and not isinstance(codec, Chooses | Wraps) else codec
        for workers, servers in sizes:
            if not servers or ways.way_of(whole).servable:
                yield Exchanged(whole, workers, servers, seed)
        if hosts:
            yield Exchanged(whole, sum(map(len, hosts)), 0, seed, hosts)

    return cases


LAWS: Laws[Codec, Exchanged] = Laws()


@LAWS.law(among((1, 1), (2, 0), (2, 2), (3, 0), (3, 1), (5, 0), (5, 2), hosts=_HOSTS))
def all_workers_get_the_same_bits(case: Exchanged) -> None:
    """This holds for any owners, and all buffers are returned to the pool."""
    ranks = case.ranks()
    for step in range(3):
        ranks.step([[gradients] for gradients in case.gradients(step)])
        require(ranks.given_back, "memory for messages was taken and not given back")
        first, *others = ranks.results
        require(bool(np.isfinite(first.astype(np.float32)).all()), "what comes of finite gradients is not finite")
        for worker, other in enumerate(others, 1):
            same(other.view(np.uint32), first.view(np.uint32), f"the bits of worker {worker} beside worker 0")


@LAWS.law(among((1, 1), (3, 2), (5, 0), hosts=_HOSTS))
def what_travels_is_foreseen(case: Exchanged) -> None:
    """The bytes between processes follow from ``wire_bytes`` or ``rounds``, without any gradients."""
    ranks = case.ranks()
    at = tuple(range(case.workers, case.workers + case.servers)) or tuple(range(case.workers))
    for step in (0, 2):  # some codecs warm up
        for rank in ranks.ranks:
            rank.resume_at(step)
        for arrays, gradients in zip(ranks.arrays, case.gradients(step), strict=False):
            arrays[0][:] = gradients
        parts = parts_of(case.codec, ranks.layers, ranks.buckets[0], step)
        foreseen = ways.traffic(parts, case.workers, at, served=bool(case.servers))
        if case.hosts:
            foreseen = levels.traffic(parts, case.hosts)
        as_predicted([rank.pieces(0) for rank in ranks.ranks], foreseen)
        for rank in ranks.ranks:
            rank.finish(0)


@LAWS.law(among((3, 0), hosts=_HOSTS))
def the_result_does_not_depend_on_the_buckets(case: Exchanged) -> None:
    """One bucket or one per tensor gives the same bits, also in later steps, which start with residuals."""
    whole = case.ranks()
    single = case.ranks([[Slice(number, 0, layer.spec.elements)] for number, layer in enumerate(whole.layers)])
    for step in range(3):
        inputs = case.gradients(step)
        whole.step([[gradients] for gradients in inputs])
        single.step([[gradients[start:stop] for start, stop in pairwise(_EDGES)] for gradients in inputs])
        found, wanted = single.results[0], whole.results[0]
        same(found.view(np.uint32), wanted.view(np.uint32), "the bits of a bucket for each tensor, beside one for all")


def keeps_all(case: Exchanged) -> bool:
    """Whether there may be error feedback whose residuals keep everything that was not sent."""
    inner = case.codec.codec if isinstance(case.codec, Wraps) else case.codec
    return case.codec.contraction and not (isinstance(inner, Decays) and inner.decay != 1)


@LAWS.law(among((1, 0), (2, 0), (4, 0), feedback=True, hosts=_HOSTS), keeps_all)
def with_feedback_nothing_is_lost_among_ranks(case: Exchanged) -> None:
    """Over all steps, the inputs equal the results plus the residuals."""
    ranks = case.ranks()
    given, got = np.zeros(_EDGES[-1]), np.zeros(_EDGES[-1])
    for step in range(4):
        inputs = case.gradients(step)
        given += np.sum(inputs, axis=0, dtype=np.float64)
        ranks.step([[gradients] for gradients in inputs])
        got += ranks.results[0]
    apart = np.abs(got + ranks.residuals() - given)
    for layer, (start, stop) in zip(ranks.layers, pairwise(_EDGES), strict=True):
        inner, feedback, _ = codec_of(case.codec, layer.spec)
        # No residual sees the rounding of sums of 16-bit numbers and of products of matrices.
        coarse = isinstance(inner, Sums) and inner.number in ("float16", "bfloat16")
        bound = 0.2 if coarse else 1e-2 if inner.combine == "rounds" else 1e-4
        if feedback or inner.combine == "sum":
            lost = apart[start:stop].max()
            require(lost < bound, f"{lost:.3g} of an element of a tensor of {layer.spec.shape} is lost in four steps")
