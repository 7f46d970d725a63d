"""Laws of codecs that work in rounds: sizes as declared, conservation over all ranks, equal bits on all.

A law simulates some ranks, each with its own gradient and state, and computes the sums between their rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..codecs import Codec, Floats, Rounds, State, codec_of
from ..nouns import Spec
from .laws import Laws, require, same
from .tensors import ORDINARY, arrays_of, same_state, values

SHAPES = ((8, 6), (64, 32, 3, 3), (1, 50), (50, 1), (7, 300), (300, 7), (16, 1, 5, 5), (129, 257), (50,), (), (0, 3))
"""Matrices of many proportions, and tensors that are not matrices."""


@dataclass(frozen=True)
class Together:
    """A codec, a tensor, and the gradients of some ranks: their kind and size, and the seed of the draws."""

    given: Codec
    shape: tuple[int, ...]
    world: int
    kind: str
    scale: float
    seed: int

    @property
    def codec(self) -> Codec:
        """The codec of the tensor."""
        return codec_of(self.given, self.spec).codec

    @property
    def rounds(self) -> Rounds:
        """The codec, checked to be a ``Rounds``."""
        codec = self.codec
        require(isinstance(codec, Rounds), "a codec that works in rounds needs average() and rounds()")
        assert isinstance(codec, Rounds)
        return codec

    @property
    def spec(self) -> Spec:
        """The tensor's spec."""
        return Spec("layer.weight", self.shape)

    def inputs(self, step: int = 0) -> list[Floats]:
        """The gradients of all ranks in a step."""
        elements, first = self.spec.elements, self.seed + 10 * step
        return [values(self.kind, elements, first + rank) * np.float32(self.scale) for rank in range(self.world)]

    def states(self, feedback: bool | None = None) -> list[State]:
        """New states. By default they have residuals if the codec supports error feedback."""
        wanted = self.codec.contraction if feedback is None else feedback
        return [self.codec.init(self.spec, rank, wanted) for rank in range(self.world)]

    def average(self, inputs: Sequence[Floats], states: Sequence[State]) -> tuple[list[Floats], list[bool]]:
        """One step of all ranks: their results, and whether each reported a finite input."""
        arrays, finite, _ = averaged(self.rounds, inputs, states)
        return arrays, finite

    def __str__(self) -> str:
        return f"a tensor of {self.shape} on {self.world} ranks ({self.kind!r} x {self.scale:g}, seed {self.seed})"


def averaged(
    codec: Rounds, inputs: Sequence[Floats], states: Sequence[State]
) -> tuple[list[Floats], list[bool], list[int]]:
    """The results of all ranks after a step, whether each reported a finite input, and the sizes of the sums.

    Raises AssertionError if the ranks' rounds differ.
    """
    arrays = [x.copy() for x in inputs]
    running = [codec.average(x, state, len(inputs)) for x, state in zip(arrays, states, strict=True)]
    finite: list[bool] = []
    sizes: list[int] = []
    while not finite:
        asked: list[Floats] = []
        for generator in running:
            try:
                asked.append(next(generator))
            except StopIteration as end:
                finite.append(end.value)
        require(not (finite and asked), f"{len(finite)} ranks have finished, but {len(asked)} continue")
        if asked:
            lengths = {array.size for array in asked}
            require(len(lengths) == 1, f"ranks sum arrays of different sizes: {sorted(lengths)} elements")
            sizes.append(asked[0].size)
            with np.errstate(all="ignore"):
                total = np.sum(asked, axis=0, dtype=np.float32)
            for array in asked:
                array[...] = total
    for state in states:
        state.step += 1
    return arrays, finite, sizes


def several(codec: Codec, seed: int, count: int) -> Iterator[Together]:
    """Tensors of every shape that the codec takes in rounds, in turn, on one to four ranks."""
    draw = np.random.default_rng(seed)
    for number in range(count):
        kind, exponent = str(draw.choice(ORDINARY)), float(draw.integers(-24, 21))
        scale = 1.0 if kind == "heavy" else 10.0**exponent  # these are of all sizes already
        shape, world = SHAPES[number % len(SHAPES)], int(draw.integers(1, 5))
        case = Together(codec, shape, world, kind, scale, int(draw.integers(0, 2**32)))
        if case.codec.combine == "rounds":
            yield case


LAWS: Laws[Codec, Together] = Laws()


@LAWS.law(several)
def rounds_are_as_declared(case: Together) -> None:
    """``rounds`` predicts the elements of every sum, ``wire_bytes`` the total bytes, on all ranks and in all steps."""
    declared, states = list(case.rounds.rounds(case.spec)), case.states()
    nbytes = 4 * sum(declared)
    require(case.codec.wire_bytes(case.spec) == (nbytes, nbytes), f"wire_bytes is not twice the {nbytes} of rounds()")
    for step in range(2):
        _, _, sizes = averaged(case.rounds, case.inputs(step), states)
        require(sizes == declared, f"arrays of {sizes} elements are summed, but rounds() declares {declared}")


@LAWS.law(several)
def all_ranks_have_the_same_bits_after_rounds(case: Together) -> None:
    """This includes the second step, which starts with state. Each rank reports a finite input."""
    states = case.states()
    for step in range(2):
        (first, *others), finite = case.average(case.inputs(step), states)
        require(all(finite), f"ranks report finite={finite} for finite inputs")
        require(np.isfinite(first).all(), "finite inputs give a result that is not finite")
        for rank, other in enumerate(others, 1):
            same(other.view(np.uint32), first.view(np.uint32), f"the bits of rank {rank} and rank 0")


@LAWS.law(several)
def rounds_repeat_themselves(case: Together) -> None:
    """The same states and inputs give the same results and states, bit for bit."""
    states = case.states()
    again = deepcopy(states)
    for step in range(2):
        results, _ = case.average(case.inputs(step), states)
        repeated, _ = case.average(case.inputs(step), again)
        for rank in range(case.world):
            same(repeated[rank].view(np.uint32), results[rank].view(np.uint32), f"the second run's bits of rank {rank}")
            same_state(again[rank], states[rank])


@LAWS.law(several, lambda case: case.codec.contraction)
def rounds_keep_unsent_parts(case: Together) -> None:
    """Over all ranks, results + residuals == inputs + previous residuals, up to the rounding of products."""
    states = case.states(feedback=True)
    for step in range(3):
        inputs = case.inputs(step)
        before = _total([*inputs, *(_residual(state) for state in states)])
        results, _ = case.average(inputs, states)
        after = _total([results[0], *(_residual(state) for state in states)])
        apart, allowed = np.abs(after - before), 1e-5 * np.abs(before).max(initial=0.0)
        if (apart > allowed).any():
            at = int(np.argmax(apart))
            raise AssertionError(f"element {at} in step {step}: {after[at]} of {before[at]} was sent or kept")


def _total(arrays: Sequence[Floats]) -> NDArray[np.float64]:
    total: NDArray[np.float64] = np.sum(arrays, axis=0, dtype=np.float64)
    return total


def _residual(state: State) -> Floats:
    require(state.residual is not None, "init(feedback=True) makes no residual")
    assert state.residual is not None
    return state.residual


@LAWS.law(several, lambda case: case.codec.contraction and bool(case.inputs()[0].any()))
def rounds_are_a_contraction(case: Together) -> None:
    """One rank's result is nearer to its gradient than 0 is, already in the first step."""
    x = case.inputs()[0]
    (result,), _, _ = averaged(case.rounds, [x], [case.codec.init(case.spec, 0)])
    unit = float(np.abs(x).max())
    left = np.sum(((result.astype(np.float64) - x) / unit) ** 2)
    whole = np.sum((x.astype(np.float64) / unit) ** 2)
    require(left < whole, f"|x - average(x)|^2 is {left / whole:.3g} times |x|^2")


@LAWS.law(several, lambda case: case.spec.elements > 0)
def non_finite_values_reach_all_ranks_and_no_memory(case: Together) -> None:
    """All results are non-finite, the rank at fault reports it, and the next step is normal."""
    for bad in (np.nan, np.inf, -np.inf):
        states, culprit = case.states(), case.seed % case.world
        case.average(case.inputs(), states)
        before = deepcopy(states)
        inputs = case.inputs(1)
        inputs[culprit][case.seed % case.spec.elements] = bad
        with np.errstate(all="ignore"):
            results, finite = case.average(inputs, states)
        require(
            finite == [rank != culprit for rank in range(case.world)],
            f"{bad} is an input of rank {culprit}, but ranks report finite={finite}",
        )
        for rank, (result, state, old) in enumerate(zip(results, states, before, strict=True)):
            require(not np.isfinite(result).all(), f"rank {rank} has a finite result although rank {culprit} has {bad}")
            for name, array in arrays_of(state).items():
                require(np.isfinite(array).all(), f"{name} of rank {rank} is not finite afterwards")
            if state.residual is not None and old.residual is not None:
                same(state.residual, old.residual, f"the residual of rank {rank}")
        results, finite = case.average(case.inputs(2), states)
        require(all(finite) and all(np.isfinite(one).all() for one in results), "the next step is not finite")
