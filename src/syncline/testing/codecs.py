"""Laws of codecs: nothing is lost, written elsewhere or made up, and what a codec declares is so.

What concerns a codec follows from what it declares (``combine``, ``block``, ``contraction``, ``biased``,
``stochastic``, ``decay``). Codecs that work in rounds have neither encode nor decode: what they do is only seen with
other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codecs import Chooses, Codec, Decays, Floats, Payload, PayloadError, State, Stochastic, Sums
from ..nouns import Spec, numpy_dtype
from ..strategy.grammar import read_part
from ..strategy.parts import build
from .laws import Laws, require, same
from .tensors import KINDS, LARGE, ORDINARY, SIZES, Room, spec_of, values

_EPSILON = 2.0**-23
_SMALLEST = 2.0**-149
_NOT_FINITE = (np.nan, np.inf, -np.inf)

Found = NDArray[np.float64]


def check_codec(codec: str | Codec, *, seed: int = 0, examples: int = 30) -> tuple[str, ...]:
    """Hold a codec, or the registered one of a text such as ``"topk(ratio=0.01)"``, to all laws that concern it.

    Returns the names of these laws. Raises BrokenLaw, an AssertionError with the law, the codec and the example that it
    fails for. So many ``examples`` are drawn for every law, from the ``seed``; where chance decides they are always the
    same, so that a codec that has passed passes again.
    """
    built: Codec = build("codecs", read_part(codec)) if isinstance(codec, str) else codec
    return LAWS.hold(built, f"codec {codec}", seed, examples)


@dataclass(frozen=True)
class Case:
    """A codec and a tensor: of which character, how many elements, and the seed of all that is drawn for it."""

    given: Codec
    kind: str
    size: int
    seed: int

    @cached_property
    def codec(self) -> Codec:
        """The codec that encodes the tensor: what a choosing one chooses."""
        codec = self.given
        while isinstance(codec, Chooses):
            codec = codec.choose(self.spec)
        return codec

    @property
    def spec(self) -> Spec:
        """The tensor's."""
        return spec_of(self.size)

    @property
    def x(self) -> Floats:
        """Its gradient."""
        return values(self.kind, self.size, self.seed)

    def draw(self) -> np.random.Generator:
        """For what a law chooses beside it."""
        return np.random.default_rng([self.seed, 1])

    def state(self, rank: int = 0, feedback: bool | None = None, step: int = 0) -> State:
        """A new state; with a residual, unless told otherwise, where error feedback may stand around the codec."""
        state = self.codec.init(self.spec, rank, self.codec.contraction if feedback is None else feedback)
        state.step = step
        return state

    def __str__(self) -> str:
        return f"{self.size} elements ({self.kind!r}, seed {self.seed})"


LAWS: Laws[Codec, Case] = Laws()


def drawn(
    kinds: Sequence[str] = KINDS, sizes: Sequence[int] = (*SIZES, *LARGE)
) -> Callable[[Codec, int, int], Iterator[Case]]:
    """Cases of all characters and sizes in turn, paired by chance."""

    def cases(codec: Codec, seed: int, count: int) -> Iterator[Case]:
        draw = np.random.default_rng(seed)
        chosen = np.resize(draw.permutation(sizes), count)
        characters = draw.permutation(np.resize(draw.permutation(kinds), count))
        for size, kind, own in sorted(zip(chosen, characters, draw.integers(0, 2**32, count), strict=True)):
            case = Case(codec, str(kind), int(size), int(own))
            if case.codec.combine != "rounds":
                yield case

    return cases


def crossed(kinds: Sequence[str], sizes: Sequence[int], own: int) -> Callable[[Codec, int, int], Iterator[Case]]:
    """Every character in every size, always the same: for laws that hold but for chance."""

    def cases(codec: Codec, seed: int, count: int) -> Iterator[Case]:  # noqa: ARG001
        for size in sizes:
            for kind in kinds:
                case = Case(codec, kind, size, own)
                if case.codec.combine != "rounds":
                    yield case

    return cases


def keeps(case: Case) -> bool:
    """Error feedback may stand around the codec, and there is something to keep."""
    return case.codec.contraction and case.state(feedback=True).residual is not None


def decay_of(codec: Codec) -> float:
    """The part of what is not sent that the residual keeps."""
    return float(np.float32(codec.decay)) if isinstance(codec, Decays) else 1.0


def encoded(codec: Codec, x: Floats, state: State, start: int = 0, finite: bool = True) -> Payload:
    """The payload, made without a write elsewhere and without touching ``x``."""
    before = x.copy()
    room = Room.of(codec.wire_bytes(spec_of(x.size))[1] // 4)
    words, was_finite = codec.encode(x, room.words, state, start)
    room.check()
    same(x.view(np.uint32), before.view(np.uint32), "encode changed its input")
    require(0 <= words <= room.words.size, f"encode says {words} words, and there is room for {room.words.size}")
    require(was_finite == finite, f"encode says finite={was_finite} of an input of which {finite} is right")
    return room.words[:words].copy()


def decoded(
    codec: Codec, payload: Payload, size: int, state: State, start: int = 0, onto: Floats | None = None
) -> Floats:
    """What a payload says, written or added ``onto`` something, without a write elsewhere."""
    room = Room.of(size)
    if onto is not None:
        room.floats[...] = onto
    before = payload.copy()
    codec.decode(payload, room.floats, state, add=onto is not None, start=start)
    room.check()
    same(payload, before, "decode changed the payload")
    return room.floats.copy()


def arrays_of(state: State) -> dict[str, NDArray[Any]]:
    """All arrays of a state, by name."""
    return ({} if state.residual is None else {"residual": state.residual}) | dict(state.memory)


def same_state(found: State, wanted: State) -> None:
    """Two states have the same bits."""
    mine, theirs = arrays_of(found), arrays_of(wanted)
    require(mine.keys() == theirs.keys(), f"the state has {sorted(mine)} in place of {sorted(theirs)}")
    for name, array in mine.items():
        same(array.view(np.uint32), theirs[name].view(np.uint32), f"the bits of {name}")


def trials(case: Case, count: int) -> Found:
    """decode(encode(x)) of that many steps, one in each row; each with a new state, so that nothing is left over."""
    x, rows = case.x, np.empty((count, case.size))
    for step in range(count):
        state = case.state(feedback=False, step=step)
        rows[step] = decoded(case.codec, encoded(case.codec, x, state), x.size, state)
    return rows


# What holds for every payload ----------------------------------------------------------------------------------------


@LAWS.law(drawn())
def nothing_is_written_elsewhere(case: Case) -> None:
    """Neither beside the payload and the output, nor into what is read."""
    state, x = case.state(), case.x
    payload = encoded(case.codec, x, state)
    decoded(case.codec, payload, x.size, state)
    decoded(case.codec, payload, x.size, state, onto=x)


@LAWS.law(drawn())
def sizes_are_as_declared(case: Case) -> None:
    """``wire_bytes`` says it without encoding: exactly, where payloads are added up or cut among owners."""
    expected, greatest = case.codec.wire_bytes(case.spec)
    require(0 <= expected <= greatest, f"wire_bytes expects {expected} bytes, and at most {greatest}")
    require(greatest % 4 == 0, f"the greatest payload, of {greatest} bytes, is no whole number of words")
    sent = 4 * encoded(case.codec, case.x, case.state(feedback=False)).size
    require(sent <= greatest, f"{sent} bytes were made where wire_bytes says {greatest} at most")
    if case.codec.combine in ("sum", "owner"):
        require(sent == expected == greatest, f"{sent} bytes were made where wire_bytes says {expected} to {greatest}")


@LAWS.law(crossed(["zeros"], [0], 0))
def an_empty_tensor_is_no_payload(case: Case) -> None:
    """Which can be decoded."""
    x = case.x
    require(case.codec.wire_bytes(case.spec)[0] == 0, "wire_bytes expects a payload of an empty tensor")
    for feedback in {False, case.codec.contraction}:
        state = case.state(feedback=feedback)
        payload = encoded(case.codec, x, state)
        require(payload.size == 0, f"{payload.size} words were made of an empty tensor")
        decoded(case.codec, payload, 0, state)
        decoded(case.codec, payload, 0, state, onto=x)


@LAWS.law(drawn(sizes=(*SIZES[1:], *LARGE)), lambda case: case.codec.block > 0)
def pieces_that_begin_at_blocks_are_the_whole(case: Case) -> None:
    """Payloads and residuals; and every piece can be decoded alone."""
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
        same(decoded(codec, piece, stop - start, state, start), said[start:stop], f"what is decoded from {start} on")
        pieces.append(piece)
    same(np.concatenate(pieces), whole, "the words of the pieces")
    same_state(state, whole_state)


@LAWS.law(drawn())
def the_same_state_makes_the_same_payload(case: Case) -> None:
    """Two runs, with feedback where there can be; and the state's arrays are float32, as checkpoints keep them."""
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


@LAWS.law(drawn())
def decoding_adds_what_it_would_write(case: Case) -> None:
    """``add=True`` is the sum of what was there and what is written without it."""
    state = case.state(feedback=False)
    payload = encoded(case.codec, case.x, state)
    before = values(str(case.draw().choice(KINDS)), case.size, case.seed + 1)
    with np.errstate(over="ignore"):
        wanted = decoded(case.codec, payload, case.size, state) + before
    same(decoded(case.codec, payload, case.size, state, onto=before), wanted, "what is added")


@LAWS.law(drawn(kinds=["huge"]))
def huge_numbers_are_sent_or_reported(case: Case) -> None:
    """Finite inputs become finite, or count as not finite as a whole block; never something else without a word."""
    codec, x = case.codec, case.x
    state = case.state(step=case.seed % 4)
    out = np.empty(codec.wire_bytes(case.spec)[1] // 4, np.uint32)
    with np.errstate(all="ignore"):
        words, finite = codec.encode(x, out, state)
        sent = decoded(codec, out[:words], x.size, state)
    require(not finite or bool(np.isfinite(sent).all()), "encode says finite=True, and what is decoded is not finite")
    for name, array in arrays_of(state).items():
        require(np.isfinite(array).all(), f"{name} is not finite afterwards")


# What is not finite, altered or too long -----------------------------------------------------------------------------


@LAWS.law(drawn(sizes=(*SIZES[1:], *LARGE)))
def what_is_not_finite_is_reported_and_not_kept(case: Case) -> None:
    """The block (or one element of the tensor) decodes to something not finite; what is remembered of it stays."""
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
        same(array[kept], arrays_of(before)[name][kept], f"{name} of what was not finite")


@LAWS.law(crossed(["normal"], [1], 0))
def one_element_that_is_not_finite_is_reported(case: Case) -> None:
    """Where a whole tensor is a number that is none."""
    for bad in _NOT_FINITE:
        state = case.state(feedback=False)
        payload = encoded(case.codec, np.array([bad], np.float32), state, finite=False)
        said = decoded(case.codec, payload, 1, state)
        require(not np.isfinite(said).any(), f"{bad} decodes to {said[0]}")


@LAWS.law(drawn())
def an_altered_payload_writes_nothing_elsewhere(case: Case) -> None:
    """Another length is refused; other words are refused or change numbers, and nothing beside ``out`` is written."""
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
                fault = f"{wrong.size} words were decoded where encode makes {payload.size}"
                require(not fixed or wrong.size == payload.size, fault)
            room.check()


@LAWS.law(crossed(["normal"], [1, 5, 3000], 0))
def a_payload_of_another_length_is_refused(case: Case) -> None:
    """By PayloadError."""
    state = case.state(feedback=False)
    payload = encoded(case.codec, case.x, state)
    for wrong in (payload[:0], payload[:-1], np.append(payload, np.uint32(0))):
        try:
            case.codec.decode(wrong, np.zeros(case.size, np.float32), state)
        except PayloadError:
            continue
        raise AssertionError(f"{wrong.size} words were decoded where encode makes {payload.size}")


# What is said of the numbers -----------------------------------------------------------------------------------------


@LAWS.law(drawn(), keeps)
def what_is_not_sent_is_kept(case: Case) -> None:
    """decode(encode(x)) + residual == x + residual before, up to the rounding of each of the two.

    Where the residual decays, of what is not sent that part is kept.
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
    """The error of the mean of many steps has the size, and along x and the ones the sign, of chance alone."""
    steps, x = 600, case.x
    unit = float(np.abs(x).max())
    errors = (trials(case, steps) - x) / unit
    spread = float(np.mean(np.sum(errors**2, axis=1)))
    if spread == 0:
        return  # all elements are among the codec's numbers: each step is the mean
    for direction in (x / unit, np.sign(x), np.ones(x.size), np.arange(x.size) % 2 - 0.5):
        along = errors @ direction
        sure = 5.0 * along.std() / np.sqrt(steps) + _EPSILON * np.abs(direction).sum()
        fault = f"the mean error of {steps} steps is {along.mean():.3g} along one direction, by chance {sure:.3g}"
        require(abs(along.mean()) <= sure, fault)
    # Elements of which chance decides alone are some hundred, so that this ratio is near 1.
    few = 1 + 5.0 * np.sqrt(2 * np.sum(errors.var(axis=0) ** 2)) / max(np.sum(errors.var(axis=0)), _SMALLEST)
    found = np.sum(errors.mean(axis=0) ** 2) * steps / spread
    require(found <= few, f"the error of the mean of {steps} steps is {found:.3g} times that of chance")


@LAWS.law(drawn(kinds=ORDINARY), lambda case: case.codec.combine == "sum" and not case.codec.biased)
def numbers_that_are_added_are_the_nearest_of_their_type(case: Case) -> None:
    """Of the type that ``number`` names; the rest of the last word is zero."""
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
    """In the mean over steps, what decode(encode(x)) says is nearer to x than 0 is."""
    steps, x = 30, case.x
    unit = float(np.abs(x).max())
    left = np.sum(((trials(case, steps) - x) / unit) ** 2, axis=1)
    least, whole = left.mean() - 5 * left.std() / np.sqrt(steps), np.sum((x.astype(np.float64) / unit) ** 2)
    require(least < whole, f"|x - decode(encode(x))|^2 is {left.mean() / whole:.3g} times |x|^2 in the mean")


@LAWS.law(crossed(["normal"], [3000], 2), lambda case: keeps(case) and decay_of(case.codec) == 1)
def feedback_makes_the_mean_of_many_steps_right(case: Case) -> None:
    """The same gradient again and again: what was sent on the whole falls behind by no more than the residual."""
    steps, x, state = 30, case.x, case.state(feedback=True)
    assert state.residual is not None
    total = np.zeros(x.size)
    for state.step in range(1, steps + 1):
        total += decoded(case.codec, encoded(case.codec, x, state), x.size, state)
    lag = float(np.abs(total + state.residual - steps * x.astype(np.float64)).max())
    allowed = steps * steps * _EPSILON * float(np.abs(x).max() + np.abs(state.residual).max())
    require(lag <= allowed, f"{lag:.3g} is neither sent nor kept after {steps} steps, rounding explains {allowed:.3g}")
