"""``powersgd(rank=)``: sends a matrix of gradients as two thin factors, found by one step of power iteration.

A tensor is the matrix M of its first dimension by all others. With sums over the ranks in between, every rank computes

    P = sum of M Q        Q is remembered from the step before, the same on all ranks
    P = orthonormal columns that span P
    Q = sum of M^T P
    result P Q^T          the best approximation of the sum of the M in the space of P

Vogels, Karimireddy, Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", NeurIPS
2019. The rounds are linear in the M, so they only need sums, which an allreduce computes. With error feedback a rank
keeps M - P (M^T P)^T of its own M; over all ranks, residuals and result sum up to the inputs. P P^T is a projection,
hence a contraction. Unlike in the paper, Q is orthonormalized before it is remembered: it spans the same space, but
neither shrinks with the gradients nor loses directions when they vanish for a step.

Tensors with fewer than two dimensions, and tensors whose factors would not be smaller, are summed uncompressed. All
arithmetic is in the fixed order of ``kernels/low_rank.py``, so that replicas on different hosts agree.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import numpy as np

from ..errors import UsageError
from ..nouns import Spec
from ..registry import register
from . import Combine, Encoded, Floats, Payload, State, fresh_state, no_residual

_FACTOR = "q"

_OVERFLOWING = int(np.float32(2.0**100).view(np.uint32))
"""From this magnitude on products and sums may overflow: it counts as not finite, so that no state becomes infinite."""


@register("codecs", "powersgd", examples=("powersgd(rank=2)",))
@dataclass(frozen=True)
class PowerSGD:
    """Matrices as the product of two thin ones, found by power iteration across the ranks."""

    rank: int
    combine: ClassVar[Combine] = "rounds"
    block: ClassVar[int] = 0
    contraction: ClassVar[bool] = True
    biased: ClassVar[bool] = True
    leaves_out: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 1024:
            raise UsageError(f"rank={self.rank}: choose from 1 to 1024; 1 to 4 is usual")

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        """The bytes of both factors, or of the tensor if it is sent uncompressed."""
        nbytes = 4 * sum(self.rounds(spec))
        return nbytes, nbytes

    def rounds(self, spec: Spec) -> tuple[int, ...]:
        """The elements of P and of Q, or of the tensor if it is sent uncompressed."""
        return tuple(self.rank * side for side in _sides(spec)) if self._factors(spec) else (spec.elements,)

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        """The state of a matrix also has a random Q, the same on all ranks."""
        state = fresh_state(spec, rank, feedback)
        if self._factors(spec):
            state.memory[_FACTOR] = np.zeros(self.rank * _sides(spec)[1], np.float32)
            self._draw(state)
        return state

    def average(self, x: Floats, state: State, world: int) -> Generator[Floats, None, bool]:  # noqa: ARG002
        """Yield P and then Q to be summed, or once x itself; see ``Rounds``.

        If the sum is not finite, x becomes NaN on all ranks, the residual is unchanged, and Q is drawn again. Reads x
        four times, writes it twice, and makes 6 * rank multiplications and additions per element.
        """
        from ..kernels.low_rank import expand, orthonormalise, times, transposed_times
        from ..kernels.sparse import largest_magnitude

        residual = no_residual() if state.residual is None else state.residual
        if not self._factors(state.spec):
            finite = bool(np.isfinite(x).all())
            yield x
            return finite
        rows, columns = _sides(state.spec)
        p, mine = np.full(self.rank * rows, np.nan, np.float32), np.zeros(self.rank * columns, np.float32)
        q, seed = state.memory[_FACTOR], state.seed(shared=True)
        finite = bool(largest_magnitude(x, residual) < _OVERFLOWING)
        if finite:
            if residual.size:
                np.add(x, residual, out=x)
            times(x, q, p, self.rank)
        yield p
        going = bool(np.isfinite(p).all())  # tests the sum, so all ranks decide alike
        if going:
            orthonormalise(p, self.rank, seed)
            transposed_times(x, p, mine, self.rank)
        summed = mine.copy()
        yield summed
        if going and np.isfinite(summed).all():
            expand(x, residual, p, mine, summed, self.rank)
            q[:] = summed
            orthonormalise(q, self.rank, seed)
        else:
            x.fill(np.nan)
            self._draw(state)
        return finite

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:  # noqa: ARG002
        """Raises UsageError: the factors need rounds with the other ranks."""
        self._refuse()

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:  # noqa: ARG002
        """Raises UsageError, as ``encode``."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError("powersgd has no payload of a single rank: average() sums its factors over the ranks")

    def _factors(self, spec: Spec) -> bool:
        return len(spec.shape) > 1 and self.rank * sum(_sides(spec)) < spec.elements

    def _draw(self, state: State) -> None:
        from ..kernels.low_rank import orthonormalise

        state.memory[_FACTOR].fill(0)
        orthonormalise(state.memory[_FACTOR], self.rank, state.seed(shared=True))


def _sides(spec: Spec) -> tuple[int, int]:
    """The rows and columns of a tensor as a matrix; zero rows and columns if it is empty."""
    return spec.shape[0], spec.elements // max(spec.shape[0], 1)
