"""Laws of codecs: nothing is lost, written out of bounds or invented, and declarations are true.

The declarations (``combine``, ``block``, ``contraction``, ``biased``, ``stochastic``, ``decay``) determine the laws
that apply. Codecs that work in rounds have neither encode nor decode; laws of their own test them with several ranks
(``rounds``). Laws about reducers apply to all codecs (``reducing``).
"""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codecs import Codec, Decays, PayloadError, Stochastic, Sums
from ..nouns import numpy_dtype
from ..strategy.grammar import read_part
from ..strategy.words import build
from . import reducing, rounds
from .laws import Laws, require, same
from .tensors import (
    KINDS,
    LARGE,
    ORDINARY,
    SIZES,
    Case,
    Room,
    arrays_of,
    crossed,
    decoded,
    drawn,
    encoded,
    same_state,
    values,
)

_ENCODING: Laws[Codec, Case] = Laws()


@_ENCODING.law(drawn())
def nothing_is_written_elsewhere(case: Case) -> None:
    """Encoding and decoding write only to the payload and the output."""
    state, x = case.state(), case.x
    payload = encoded(case.codec, x, state)
    decoded(case.codec, payload, x.size, state)
    decoded(case.codec, payload, x.size, state, onto=x)


@_ENCODING.law(drawn())
def sizes_are_as_declared(case: Case) -> None:
    """``wire_bytes`` predicts the size, exactly for payloads that are added or cut among owners."""
    expected, greatest = case.codec.wire_bytes(case.spec)
    require(0 <= expected <= greatest, f"wire_bytes expects {expected} bytes, and at most {greatest}")
    require(greatest % 4 == 0, f"the largest payload of {greatest} bytes is not a whole number of words")
    sent = 4 * encoded(case.codec, case.x, case.state(feedback=False)).size
    require(sent <= greatest, f"encode made {sent} bytes, but wire_bytes allows {greatest}")
    if case.codec.combine in ("sum", "owner"):
        require(
            sent == expected == greatest, f"encode made {sent} bytes, but wire_bytes declares {expected} to {greatest}"
        )


@_ENCODING.law(crossed(["zeros"], [0], 0))
def an_empty_tensor_is_no_payload(case: Case) -> None:
    """It can be decoded."""
    x = case.x
    require(case.codec.wire_bytes(case.spec)[0] == 0, "wire_bytes expects a payload for an empty tensor")
    for feedback in {False, case.codec.contraction}:
        state = case.state(feedback=feedback)
        payload = encoded(case.codec, x, state)
        require(payload.size == 0, f"encode made {payload.size} words for an empty tensor")
        decoded(case.codec, payload, 0, state)
        decoded(case.codec, payload, 0, state, onto=x)


@_ENCODING.law(drawn(sizes=(*SIZES[1:], *LARGE)), lambda case: case.codec.block > 0)
def pieces_that_begin_at_blocks_are_the_whole(case: Case) -> None:
    """Payloads and residuals are equal, and every piece can be decoded alone."""
    codec, x, draw = case.codec, case.x, case.draw()
    whole_state = case.state(rank=3)
    state = deepcopy(whole_state)
    whole = encoded(codec, x, whole_state)
    said = decoded(codec, whole, x.size, whole_state)
    blocks = -(-x.size // codec.block)
    inner = draw.permutation(np.arange(1, blocks))[: draw.integers(0, 4)]
    pieces = []
    for start, stop in pairwise([0, *(int(cut) * codec.block for cut in sorted(inner)), x.size]):
        piece = encoded(codec, x[start:stop], state, start)
        same(
            decoded(codec, piece, stop - start, state, start),
            said[start:stop],
            f"the values decoded from element {start}",
        )
        pieces.append(piece)
    same(np.concatenate(pieces), whole, "the words of the pieces")
    same_state(state, whole_state)


@_ENCODING.law(drawn())
def the_same_state_makes_the_same_payload(case: Case) -> None:
    """Two runs agree, with feedback if possible. The state's arrays are float32, as checkpoints require."""
    x = case.x
    state = case.state(rank=1, step=int(case.draw().integers(0, 10)))
    again = deepcopy(state)
    for _ in range(2):
        same(encoded(case.codec, x, state), encoded(case.codec, x, again), "the words of the second run")
        same_state(state, again)
        for name, array in arrays_of(state).items():
            require(array.dtype == np.float32, f"{name} has elements of {array.dtype}: checkpoints keep float32")
            require(array.flags.c_contiguous, f"{name} is not contiguous")
        state.step += 1
        again.step += 1


@_ENCODING.law(drawn())
def decoding_adds_the_values_that_it_would_write(case: Case) -> None:
    """``add=True`` adds what would be written without it."""
    state = case.state(feedback=False)
    payload = encoded(case.codec, case.x, state)
    before = values(str(case.draw().choice(KINDS)), case.size, case.seed + 1)
    with np.errstate(over="ignore"):
        wanted = decoded(case.codec, payload, case.size, state) + before
    same(decoded(case.codec, payload, case.size, state, onto=before), wanted, "what is added")


@_ENCODING.law(drawn(kinds=["huge"]))
def huge_numbers_are_sent_or_reported(case: Case) -> None:
    """Finite inputs decode to finite values or count as not finite as a whole block."""
    codec, x = case.codec, case.x
    state = case.state(step=case.seed % 4)
    out = np.empty(codec.wire_bytes(case.spec)[1] // 4, np.uint32)
    with np.errstate(all="ignore"):
        words, finite = codec.encode(x, out, state)
        sent = decoded(codec, out[:words], x.size, state)
    require(
        not finite or bool(np.isfinite(sent).all()), "encode reports finite=True, but the decoded values are not finite"
    )
    for name, array in arrays_of(state).items():
        require(np.isfinite(array).all(), f"{name} is not finite afterwards")


_NOT_FINITE = (np.nan, np.inf, -np.inf)


@_ENCODING.law(drawn(sizes=(*SIZES[1:], *LARGE)))
def non_finite_values_are_reported_and_not_kept(case: Case) -> None:
    """The block (or one element of the tensor) decodes to a non-finite value; the state is unchanged."""
    codec, x, draw, state = case.codec, case.x, case.draw(), case.state()
    for array in arrays_of(state).values():
        array[...] = draw.standard_normal(array.size)
    before = deepcopy(state)
    spots = draw.integers(0, x.size, draw.integers(1, 4))
    x[spots] = draw.choice(_NOT_FINITE)
    with np.errstate(all="ignore"):
        payload = encoded(codec, x, state, finite=False)
        sent = decoded(codec, payload, x.size, state)
        total = decoded(codec, payload, x.size, state, onto=np.ones(x.size, np.float32))
    for said in (sent, total):
        finite = np.isfinite(said)
        gone = finite[spots].any() if codec.block else finite.all()
        require(not gone, f"{x[spots[0]]} at element {spots[0]} decodes to {said[spots[0]]}")
    for name, array in arrays_of(state).items():
        require(np.isfinite(array).all(), f"{name} is not finite afterwards")
        kept = ~np.isfinite(sent) if codec.block else slice(None)
        same(array[kept], arrays_of(before)[name][kept], f"{name} of non-finite inputs")


@_ENCODING.law(crossed(["normal"], [1], 0))
def one_non_finite_element_is_reported(case: Case) -> None:
    """For codecs that encode a tensor as a whole."""
    for bad in _NOT_FINITE:
        state = case.state(feedback=False)
        payload = encoded(case.codec, np.array([bad], np.float32), state, finite=False)
        said = decoded(case.codec, payload, 1, state)
        require(not np.isfinite(said).any(), f"{bad} decodes to {said[0]}")


@_ENCODING.law(drawn())
def an_altered_payload_writes_nothing_elsewhere(case: Case) -> None:
    """A wrong length is refused; wrong words are refused or change numbers; writes stay inside ``out``."""
    codec, draw, state = case.codec, case.draw(), case.state(feedback=False)
    payload = encoded(codec, case.x, state)
    altered = payload.copy()
    if altered.size:
        count = int(draw.integers(1, altered.size + 1)) if draw.random() < 0.5 else 1
        altered[draw.integers(0, altered.size, count)] = draw.integers(0, 2**32, count, np.uint32)
        extreme = draw.choice(np.array([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], np.uint32))
        altered[draw.integers(0, min(4, altered.size))] = extreme
    cut = altered[: int(draw.integers(0, altered.size + 1))]
    longer = np.concatenate([altered, draw.integers(0, 2**32, int(draw.integers(1, 9)), np.uint32)])
    fixed = codec.combine in ("sum", "owner")
    for wrong in (altered, cut, longer):
        for add in (False, True):
            room = Room.of(case.size)
            room.floats[...] = 0
            try:
                with np.errstate(all="ignore"):
                    codec.decode(wrong.copy(), room.floats, state, add=add)
            except PayloadError:
                pass
            else:
                fault = f"{wrong.size} words were decoded, but encode makes {payload.size}"
                require(not fixed or wrong.size == payload.size, fault)
            room.check()


@_ENCODING.law(crossed(["normal"], [1, 5, 3000], 0))
def a_payload_of_another_length_is_refused(case: Case) -> None:
    state = case.state(feedback=False)
    payload = encoded(case.codec, case.x, state)
    for wrong in (payload[:0], payload[:-1], np.append(payload, np.uint32(0))):
        try:
            case.codec.decode(wrong, np.zeros(case.size, np.float32), state)
        except PayloadError:
            continue
        raise AssertionError(f"{wrong.size} words were decoded, but encode makes {payload.size}")


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


@_ENCODING.law(drawn(), keeps)
def unsent_parts_are_kept(case: Case) -> None:
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
        raise AssertionError(f"element {at}: of {wanted[at]}, {sent[at]} was sent and {state.residual[at]} kept")


@_ENCODING.law(
    crossed(ORDINARY, [700], 5),
    lambda case: not case.codec.biased and isinstance(case.codec, Stochastic) and case.codec.stochastic,
)
def the_mean_of_many_steps_is_the_input(case: Case) -> None:
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
        fault = f"the mean error of {steps} steps is {along.mean():.3g} along one direction, chance explains {sure:.3g}"
        require(abs(along.mean()) <= sure, fault)
    # Some hundred elements are rounded at random, so this ratio is near 1.
    few = 1 + 5.0 * np.sqrt(2 * np.sum(errors.var(axis=0) ** 2)) / max(np.sum(errors.var(axis=0)), _SMALLEST)
    found = np.sum(errors.mean(axis=0) ** 2) * steps / spread
    require(found <= few, f"the error of the mean of {steps} steps is {found:.3g} times that of chance")


@_ENCODING.law(drawn(kinds=ORDINARY), lambda case: case.codec.combine == "sum" and not case.codec.biased)
def numbers_that_are_added_are_the_nearest_of_their_type(case: Case) -> None:
    """The payload has the type that ``number`` declares; the rest of its last word is zero."""
    import ml_dtypes

    codec, x, state = case.codec, case.x, case.state(feedback=False)
    require(isinstance(codec, Sums), "a codec whose payloads are added must declare their type by number=")
    assert isinstance(codec, Sums)
    dtype: np.dtype[Any] = numpy_dtype(codec.number)
    payload = encoded(codec, x, state)
    largest = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    numbers = payload.view(dtype)
    same(numbers[: x.size], np.clip(x, -largest, largest).astype(dtype), "the numbers")
    require(not numbers[x.size :].any(), "the last word is not filled with zeros")
    same(decoded(codec, payload, x.size, state), numbers[: x.size].astype(np.float32), "what is decoded")


@_ENCODING.law(crossed(ORDINARY, [1, 2, 100, 3000], 11), lambda case: case.codec.contraction and bool(case.x.any()))
def a_contraction_is_one(case: Case) -> None:
    """In the mean over steps, decode(encode(x)) is nearer to x than 0 is."""
    steps, x = 30, case.x
    unit = float(np.abs(x).max())
    left = np.sum(((trials(case, steps) - x) / unit) ** 2, axis=1)
    least, whole = left.mean() - 5 * left.std() / np.sqrt(steps), np.sum((x.astype(np.float64) / unit) ** 2)
    require(least < whole, f"|x - decode(encode(x))|^2 is {left.mean() / whole:.3g} times |x|^2 in the mean")


@_ENCODING.law(crossed(["normal"], [3000], 2), lambda case: keeps(case) and decay_of(case.codec) == 1)
def feedback_makes_the_mean_of_many_steps_right(case: Case) -> None:
    """With a constant gradient, the sum of what was sent lags by no more than the residual."""
    steps, x, state = 30, case.x, case.state(feedback=True)
    assert state.residual is not None
    total = np.zeros(x.size)
    for state.step in range(1, steps + 1):
        total += decoded(case.codec, encoded(case.codec, x, state), x.size, state)
    lag = float(np.abs(total + state.residual - steps * x.astype(np.float64)).max())
    allowed = steps * steps * _EPSILON * float(np.abs(x).max() + np.abs(state.residual).max())
    require(
        lag <= allowed,
        f"{lag:.3g} is neither sent nor kept after {steps} steps, but rounding explains only {allowed:.3g}",
    )


LAWS: Laws[Codec, Any] = Laws(_ENCODING, rounds.LAWS, reducing.LAWS)


def check_codec(codec: str | Codec, *, seed: int = 0, examples: int = 30) -> tuple[str, ...]:
    """Check a codec, or the registered one of a text such as ``"topk(ratio=0.01)"``, against all laws that apply.

    Returns the names of these laws. Raises BrokenLaw, an AssertionError with the law, the codec and the failing
    example. ``examples`` are drawn for every law, from ``seed``. Statistical laws always use the same examples, so that
    a codec that has passed passes again.
    """
    built: Codec = build("codecs", read_part(codec)) if isinstance(codec, str) else codec
    return LAWS.hold(built, f"codec {codec}", seed, examples)
