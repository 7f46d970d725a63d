"""Laws about values: nothing is lost, means are correct, and declared properties of the error are true."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...codecs import Codec, Decays, Stochastic, Sums
from ...nouns import numpy_dtype
from ..laws import Laws, require, same
from ..tensors import ORDINARY
from .cases import Case, crossed, decoded, drawn, encoded

_EPSILON = 2.0**-23
_SMALLEST = 2.0**-149


def keeps(case: Case) -> bool:
    """Whether error feedback is allowed and the codec has a residual to keep."""
    return case.codec.contraction and case.state(feedback=True).residual is not None


def decay_of(codec: Codec) -> float:
    """The factor on what the residual keeps."""
    return float(np.float32(codec.decay)) if isinstance(codec, Decays) else 1.0


def trials(case: Case, count: int) -> NDArray[np.float64]:
    """decode(encode(x)) of several steps, one per row, each with a new state."""
    x, rows = case.x, np.empty((count, case.size))
    for step in range(count):
        state = case.state(feedback=False, step=step)
        rows[step] = decoded(case.codec, encoded(case.codec, x, state), x.size, state)
    return rows


LAWS: Laws[Codec, Case] = Laws()


@LAWS.law(drawn(), keeps)
def what_is_not_sent_is_kept(case: Case) -> None:
    """decode(encode(x)) + residual == x + previous residual, up to the rounding of both terms.

    With a decaying residual, the kept part is multiplied by the factor.
    """
    x, draw, state = case.x, case.draw(), case.state(feedback=True)
    assert state.residual is not None
    state.residual[...] = x[draw.permutation(x.size)] * np.float32(draw.uniform(0, 2))
    wanted = x.astype(np.float64) + state.residual
    sent = decoded(case.codec, encoded(case.codec, x, state), x.size, state)
    left = decay_of(case.codec)
    error = np.abs(left * (sent.astype(np.float64) - wanted) + state.residual)
    beyond = error - (_EPSILON * (np.abs(wanted) + np.abs(sent)) + _SMALLEST)
    if (beyond > 0).any():
        at = int(np.argmax(beyond))
        raise AssertionError(f"of {wanted[at]}, element {at}, {sent[at]} was sent and {state.residual[at]} kept")


@LAWS.law(
    crossed(ORDINARY, [700], 5),
    lambda case: not case.codec.biased and isinstance(case.codec, Stochastic) and case.codec.stochastic,
)
def the_mean_is_what_was_to_be_sent(case: Case) -> None:
    """The error of the mean over many steps has the size of a random error, and no bias along x or along the ones."""
    steps, x = 600, case.x
    unit = float(np.abs(x).max())
    errors = (trials(case, steps) - x) / unit
    spread = float(np.mean(np.sum(errors**2, axis=1)))
    if spread == 0:
        return  # all elements are representable, so each step is the mean
    for direction in (x / unit, np.sign(x), np.ones(x.size), np.arange(x.size) % 2 - 0.5):
        along = errors @ direction
        sure = 5.0 * along.std() / np.sqrt(steps) + _EPSILON * np.abs(direction).sum()
        fault = f"the mean error of {steps} steps is {along.mean():.3g} along one direction, by chance {sure:.3g}"
        require(abs(along.mean()) <= sure, fault)
    # Some hundred elements are rounded at random, so this ratio is near 1.
    few = 1 + 5.0 * np.sqrt(2 * np.sum(errors.var(axis=0) ** 2)) / max(np.sum(errors.var(axis=0)), _SMALLEST)
    found = np.sum(errors.mean(axis=0) ** 2) * steps / spread
    require(found <= few, f"the error of the mean of {steps} steps is {found:.3g} times that of chance")


@LAWS.law(drawn(kinds=ORDINARY), lambda case: case.codec.combine == "sum" and not case.codec.biased)
def numbers_that_are_added_are_the_nearest_of_their_type(case: Case) -> None:
    """The payload has the type that ``number`` declares; the rest of its last word is zero."""
    import ml_dtypes

    codec, x, state = case.codec, case.x, case.state(feedback=False)
    require(isinstance(codec, Sums), "a codec whose payloads are added says by number= of which type they are")
    assert isinstance(codec, Sums)
    dtype: np.dtype[Any] = numpy_dtype(codec.number)
    payload = encoded(codec, x, state)
    largest = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    numbers = payload.view(dtype)
    same(numbers[: x.size], np.clip(x, -largest, largest).astype(dtype), "the numbers")
    require(not numbers[x.size :].any(), "the last word is not filled with zeros")
    same(decoded(codec, payload, x.size, state), numbers[: x.size].astype(np.float32), "what is decoded")


@LAWS.law(crossed(ORDINARY, [1, 2, 100, 3000], 11), lambda case: case.codec.contraction and bool(case.x.any()))
def a_contraction_is_one(case: Case) -> None:
    """In the mean over steps, decode(encode(x)) is nearer to x than 0 is."""
    steps, x = 30, case.x
    unit = float(np.abs(x).max())
    left = np.sum(((trials(case, steps) - x) / unit) ** 2, axis=1)
    least, whole = left.mean() - 5 * left.std() / np.sqrt(steps), np.sum((x.astype(np.float64) / unit) ** 2)
    require(least < whole, f"|x - decode(encode(x))|^2 is {left.mean() / whole:.3g} times |x|^2 in the mean")


@LAWS.law(crossed(["normal"], [3000], 2), lambda case: keeps(case) and decay_of(case.codec) == 1)
def feedback_makes_the_mean_of_many_steps_right(case: Case) -> None:
    """With a constant gradient, the sum of what was sent lags by no more than the residual."""
    steps, x, state = 30, case.x, case.state(feedback=True)
    assert state.residual is not None
    total = np.zeros(x.size)
    for state.step in range(1, steps + 1):
        total += decoded(case.codec, encoded(case.codec, x, state), x.size, state)
    lag = float(np.abs(total + state.residual - steps * x.astype(np.float64)).max())
    allowed = steps * steps * _EPSILON * float(np.abs(x).max() + np.abs(state.residual).max())
    require(lag <= allowed, f"{lag:.3g} is neither sent nor kept after {steps} steps, rounding explains {allowed:.3g}")
