"""What holds for every codec of the registry, whoever wrote it: one suite, run over the examples that each declares.

A law that does not concern a codec is skipped by what the codec declares (``combine``, ``block``, ``contraction``,
``biased``, ``stochastic``), never by its name. Codecs that alternate with sums over the ranks (``rounds``) have neither
encode nor decode and are not here.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from syncline import registry
from syncline.codecs import Chooses, Codec, Decays, Floats, Payload, PayloadError, State, Stochastic
from syncline.nouns import Spec, numpy_dtype
from syncline.strategy.grammar import read_part
from syncline.strategy.parts import build

EPSILON = 2.0**-23
SMALLEST = 2.0**-149
GUARD = 64
CANARY = 0xA5A5A5A5


def built(text: str) -> Codec:
    codec: Codec = build("codecs", read_part(text))
    return codec


def concrete(codec: Codec, spec: Spec) -> Codec:
    """The codec that encodes a tensor: what a choosing one chooses."""
    while isinstance(codec, Chooses):
        codec = codec.choose(spec)
    return codec


SIZES = [0, 1, 2, 3, 7, 19, 20, 21, 31, 32, 33, 255, 257, 1000, 1023, 1024, 1025, 2048, 2049, 5000]
LARGE = [10239, 10241, 16383, 16385, 40000, 70001]
KINDS = ["normal", "heavy", "sparse", "constant", "positive", "zeros", "powers", "wide", "ties", "tiny", "denormal"]


def spec_of(size: int) -> Spec:
    """A matrix, since codecs that choose leave vectors as they are."""
    return Spec("layer.weight", (1, size))


def in_rounds(text: str) -> bool:
    return any(concrete(built(text), spec_of(size)).combine == "rounds" for size in SIZES + LARGE)


def decay_of(codec: Codec) -> float:
    return float(np.float32(codec.decay)) if isinstance(codec, Decays) else 1.0


EXAMPLES = [
    text
    for entry in registry.entries("codecs")
    for text in entry.capabilities.get("examples", (entry.name,))
    if not in_rounds(text)
] + ["ternary(clip=0)", "sign(vote=on, scale=1, momentum=0.9)", "randomk(ratio=0.1, decay=1)"]
"""Also the papers' own arguments, which are no examples: they need another learning rate than most trainings have."""

every = pytest.mark.parametrize("text", EXAMPLES)
laws = settings(deadline=None, max_examples=30)


def values(kind: str, size: int, seed: int) -> Floats:
    """Finite gradients of many characters."""
    draw = np.random.default_rng(seed)
    normal = draw.standard_normal(size)
    scale = 10.0 ** draw.integers(-6, 4)
    made: dict[str, Any] = {
        "normal": lambda: scale * normal,
        "heavy": lambda: scale * normal * 10.0 ** draw.integers(-12, 9, size),
        "sparse": lambda: scale * normal * (draw.random(size) < 0.02),
        "constant": lambda: np.full(size, normal[0] if size else 0.0),
        "positive": lambda: np.abs(normal),
        "zeros": lambda: np.where(draw.random(size) < 0.5, 0.0, -0.0),
        "powers": lambda: np.sign(normal) * 2.0 ** draw.integers(-12, 12, size),
        "wide": lambda: normal * 2.0 ** draw.integers(-120, 120, size),
        "ties": lambda: np.round(normal) * 0.5,
        "tiny": lambda: normal * 1e-36,
        "denormal": lambda: normal * 1e-42,
        "huge": lambda: float(np.finfo(np.float32).max) * np.clip(normal, -1, 1),
    }
    array: Floats = np.asarray(made[kind](), np.float64).astype(np.float32)
    return array


@st.composite
def tensors(draw: Any, kinds: list[str] = KINDS, sizes: list[int] = SIZES + LARGE) -> Floats:
    return values(draw(st.sampled_from(kinds)), draw(st.sampled_from(sizes)), draw(st.integers(0, 2**32 - 1)))


@dataclass
class Room:
    """An array inside memory whose ends show whether anything was written beyond it."""

    memory: NDArray[np.uint32]

    @classmethod
    def of(cls, words: int) -> Room:
        return cls(np.full(words + 2 * GUARD, CANARY, np.uint32))

    @property
    def words(self) -> Payload:
        return self.memory[GUARD:-GUARD]

    @property
    def floats(self) -> Floats:
        return self.words.view(np.float32)

    def check(self) -> None:
        assert (self.memory[:GUARD] == CANARY).all(), "written before the start"
        assert (self.memory[-GUARD:] == CANARY).all(), "written behind the end"


def encoded(codec: Codec, x: Floats, state: State, start: int = 0, finite: bool = True) -> Payload:
    """The payload, made without a write elsewhere and without touching ``x``."""
    before = x.copy()
    room = Room.of(codec.wire_bytes(spec_of(x.size))[1] // 4)
    words, was_finite = codec.encode(x, room.words, state, start)
    room.check()
    np.testing.assert_array_equal(x.view(np.uint32), before.view(np.uint32))
    assert 0 <= words <= room.words.size
    assert was_finite == finite
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
    np.testing.assert_array_equal(payload, before)
    return room.floats.copy()


def arrays_of(state: State) -> dict[str, NDArray[Any]]:
    return ({} if state.residual is None else {"residual": state.residual}) | dict(state.memory)


def same_state(mine: State, other: State) -> None:
    theirs = arrays_of(other)
    assert arrays_of(mine).keys() == theirs.keys()
    for name, array in arrays_of(mine).items():
        np.testing.assert_array_equal(array.view(np.uint32), theirs[name].view(np.uint32), err_msg=name)


@every
@laws
@given(tensors(), st.integers(0, 2**32 - 1))
def test_what_is_not_sent_is_kept(text: str, x: Floats, seed: int) -> None:
    """decode(encode(x)) + residual == x + residual before, up to the rounding of each of the two.

    Where the residual decays, of what is not sent that part is kept.
    """
    codec = concrete(built(text), spec_of(x.size))
    if not codec.contraction:
        return  # no error feedback around it
    state = codec.init(spec_of(x.size), 0, feedback=True)
    if state.residual is None:
        return  # chosen to be without
    draw = np.random.default_rng(seed)
    state.residual[...] = x[draw.permutation(x.size)] * np.float32(draw.uniform(0, 2))
    wanted = x.astype(np.float64) + state.residual
    sent = decoded(codec, encoded(codec, x, state), x.size, state)
    left = decay_of(codec)
    error = np.abs(left * (sent.astype(np.float64) - wanted) + state.residual)
    allowed = EPSILON * (np.abs(wanted) + np.abs(sent)) + SMALLEST
    assert (error <= allowed).all(), f"element {np.argmax(error - allowed)} of {x.size}"


@every
@laws
@given(tensors())
def test_sizes_are_as_declared(text: str, x: Floats) -> None:
    codec = concrete(built(text), spec_of(x.size))
    expected, greatest = codec.wire_bytes(spec_of(x.size))
    assert 0 <= expected <= greatest
    assert greatest % 4 == 0
    sent = 4 * encoded(codec, x, codec.init(spec_of(x.size), 0)).size
    assert sent <= greatest
    if codec.combine in ("sum", "owner"):
        assert sent == expected == greatest


@every
def test_an_empty_tensor_is_no_payload(text: str) -> None:
    x = np.empty(0, np.float32)
    codec = concrete(built(text), spec_of(x.size))
    assert codec.wire_bytes(spec_of(x.size))[0] == 0
    for feedback in {False, codec.contraction}:
        state = codec.init(spec_of(x.size), 0, feedback)
        payload = encoded(codec, x, state)
        assert payload.size == 0
        decoded(codec, payload, 0, state)
        decoded(codec, payload, 0, state, onto=x)


@every
@laws
@given(tensors(sizes=[*SIZES[1:], *LARGE, 50000]), st.data())
def test_pieces_that_begin_at_blocks_are_the_whole(text: str, x: Floats, data: Any) -> None:
    """Payloads and residuals; and every piece can be decoded alone."""
    codec = concrete(built(text), spec_of(x.size))
    if not codec.block:
        return  # the tensor belongs together
    whole_state = codec.init(spec_of(x.size), 3, codec.contraction)
    state = deepcopy(whole_state)
    whole = encoded(codec, x, whole_state)
    said = decoded(codec, whole, x.size, whole_state)
    blocks = -(-x.size // codec.block)
    inner = data.draw(st.lists(st.integers(1, max(1, blocks - 1)), max_size=3, unique=True))
    cuts = [0, *sorted(cut * codec.block for cut in inner if cut < blocks), x.size]
    pieces = []
    for start, stop in pairwise(cuts):
        piece = encoded(codec, x[start:stop], state, start)
        np.testing.assert_array_equal(decoded(codec, piece, stop - start, state, start), said[start:stop])
        pieces.append(piece)
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    same_state(state, whole_state)


@every
@laws
@given(tensors(), st.integers(0, 9))
def test_the_same_state_makes_the_same_payload(text: str, x: Floats, step: int) -> None:
    """Two runs, with feedback where there can be; and the state's arrays are float32, as checkpoints keep them."""
    codec = concrete(built(text), spec_of(x.size))
    state = codec.init(spec_of(x.size), 1, codec.contraction)
    state.step = step
    again = deepcopy(state)
    for _ in range(2):
        np.testing.assert_array_equal(encoded(codec, x, state), encoded(codec, x, again))
        same_state(state, again)
        for name, array in arrays_of(state).items():
            assert array.dtype == np.float32, name
            assert array.flags.c_contiguous, name
        state.step += 1
        again.step += 1


@every
@laws
@given(tensors(), tensors())
def test_decoding_adds_what_it_would_write(text: str, x: Floats, other: Floats) -> None:
    codec = concrete(built(text), spec_of(x.size))
    state = codec.init(spec_of(x.size), 0)
    payload = encoded(codec, x, state)
    before = np.resize(other, x.size).astype(np.float32) if other.size else np.zeros(x.size, np.float32)
    with np.errstate(over="ignore"):
        wanted = decoded(codec, payload, x.size, state) + before
    np.testing.assert_array_equal(decoded(codec, payload, x.size, state, onto=before), wanted)


@every
@laws
@given(tensors(kinds=["huge"]), st.integers(0, 3))
def test_huge_numbers_are_sent_or_reported(text: str, x: Floats, step: int) -> None:
    """Finite inputs become finite, or count as not finite as a whole block; never something else without a word."""
    codec = concrete(built(text), spec_of(x.size))
    state = codec.init(spec_of(x.size), 0, codec.contraction)
    state.step = step
    out = np.empty(codec.wire_bytes(state.spec)[1] // 4, np.uint32)
    with np.errstate(all="ignore"):
        words, finite = codec.encode(x, out, state)
        sent = decoded(codec, out[:words], x.size, state)
    if finite:
        assert np.isfinite(sent).all()
    for array in arrays_of(state).values():
        assert np.isfinite(array).all()


@every
@laws
@given(
    tensors(sizes=[*SIZES[1:], *LARGE]),
    st.sampled_from([np.nan, np.inf, -np.inf]),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=3),
)
def test_what_is_not_finite_is_reported_and_not_kept(text: str, x: Floats, bad: float, where: list[float]) -> None:
    """The block (or one element of the tensor) decodes to something not finite; what is remembered of it stays."""
    codec = concrete(built(text), spec_of(x.size))
    state = codec.init(spec_of(x.size), 0, codec.contraction)
    for array in arrays_of(state).values():
        array[...] = np.random.default_rng(x.size).standard_normal(array.size)
    before = deepcopy(state)
    spots = [int(part * x.size) for part in where]
    x[spots] = bad
    with np.errstate(all="ignore"):
        payload = encoded(codec, x, state, finite=False)
        sent = decoded(codec, payload, x.size, state)
        total = decoded(codec, payload, x.size, state, onto=np.ones(x.size, np.float32))
    for said in (sent, total):
        if codec.block:
            assert not np.isfinite(said[spots]).any()
        else:
            assert not np.isfinite(said).all()
    for name, array in arrays_of(state).items():
        assert np.isfinite(array).all(), name
        kept = ~np.isfinite(sent) if codec.block else slice(None)
        np.testing.assert_array_equal(array[kept], arrays_of(before)[name][kept], err_msg=name)


@every
def test_one_element_that_is_not_finite(text: str) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        x = np.array([bad], np.float32)
        codec = concrete(built(text), spec_of(x.size))
        state = codec.init(spec_of(x.size), 0)
        assert not np.isfinite(decoded(codec, encoded(codec, x, state, finite=False), 1, state)).any()


@every
@laws
@given(tensors(), st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_an_altered_payload_writes_nothing_elsewhere(text: str, x: Floats, seed: int, add: bool, wild: bool) -> None:
    """Another length is refused; other words are refused or change numbers, and nothing beside ``out`` is written."""
    codec = concrete(built(text), spec_of(x.size))
    state = codec.init(spec_of(x.size), 0)
    payload = encoded(codec, x, state)
    draw = np.random.default_rng(seed)
    altered = payload.copy()
    if altered.size:
        count = int(draw.integers(1, altered.size + 1)) if wild else 1
        altered[draw.integers(0, altered.size, count)] = draw.integers(0, 2**32, count, np.uint32)
        extreme = draw.choice(np.array([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], np.uint32))
        altered[draw.integers(0, min(4, altered.size))] = extreme
    cut = altered[: int(draw.integers(0, altered.size + 1))]
    longer = np.concatenate([altered, draw.integers(0, 2**32, int(draw.integers(1, 9)), np.uint32)])
    for wrong in (altered, cut, longer):
        room = Room.of(x.size)
        room.floats[...] = 0
        try:
            with np.errstate(all="ignore"):
                codec.decode(wrong.copy(), room.floats, state, add=add)
        except PayloadError:
            pass
        else:
            if codec.combine in ("sum", "owner"):
                assert wrong.size == payload.size
        room.check()


@every
@pytest.mark.parametrize("size", [1, 5, 3000])
def test_a_payload_of_another_length_is_refused(text: str, size: int) -> None:
    x = values("normal", size, 0)
    codec = concrete(built(text), spec_of(x.size))
    state = codec.init(spec_of(x.size), 0)
    payload = encoded(codec, x, state)
    for wrong in (payload[:0], payload[:-1], np.append(payload, np.uint32(0))):
        with pytest.raises(PayloadError):
            codec.decode(wrong, np.zeros(size, np.float32), state)


def trials(codec: Codec, x: Floats, count: int) -> NDArray[np.float64]:
    """decode(encode(x)) of that many steps, one in each row; each with a new state, so that nothing is left over."""
    rows = np.empty((count, x.size))
    for step in range(count):
        state = codec.init(spec_of(x.size), 0)
        state.step = step
        rows[step] = decoded(codec, encoded(codec, x, state), x.size, state)
    return rows


ORDINARY = ["normal", "heavy", "sparse", "constant", "positive", "ties", "powers"]


@every
@pytest.mark.parametrize("kind", ORDINARY)
def test_the_mean_is_what_was_to_be_sent(text: str, kind: str) -> None:
    """The error of the mean of many steps has the size, and along x and the ones the sign, of chance alone."""
    steps = 600
    x = values(kind, 700, 5)
    codec = concrete(built(text), spec_of(x.size))
    if codec.biased or not (isinstance(codec, Stochastic) and codec.stochastic):
        return
    errors = trials(codec, x, steps) - x
    unit = float(np.abs(x).max())
    errors /= unit
    spread = float(np.mean(np.sum(errors**2, axis=1)))
    if spread == 0:
        return  # all elements are among the codec's numbers
    for direction in (x / unit, np.sign(x), np.ones(x.size), np.arange(x.size) % 2 - 0.5):
        along = errors @ direction
        sure = 5.0 * along.std() / np.sqrt(steps) + EPSILON * np.abs(direction).sum()
        assert abs(along.mean()) <= sure
    # Elements of which chance decides alone are some hundred, so that this ratio is near 1.
    few = 1 + 5.0 * np.sqrt(2 * np.sum(errors.var(axis=0) ** 2)) / max(np.sum(errors.var(axis=0)), SMALLEST)
    assert np.sum(errors.mean(axis=0) ** 2) * steps <= few * spread


@every
@laws
@given(tensors(kinds=ORDINARY))
def test_numbers_that_are_added_are_the_nearest_of_their_type(text: str, x: Floats) -> None:
    codec = concrete(built(text), spec_of(x.size))
    if codec.combine != "sum" or codec.biased:
        return
    state = codec.init(spec_of(x.size), 0)
    dtype = numpy_dtype(codec.number)  # type: ignore[attr-defined]
    payload = encoded(codec, x, state)
    import ml_dtypes

    largest = float(ml_dtypes.finfo(dtype).max)
    numbers = payload.view(dtype)
    np.testing.assert_array_equal(numbers[: x.size], np.clip(x, -largest, largest).astype(dtype))
    assert not numbers[x.size :].any()
    np.testing.assert_array_equal(decoded(codec, payload, x.size, state), numbers[: x.size].astype(np.float32))


@every
@pytest.mark.parametrize("kind", ORDINARY)
@pytest.mark.parametrize("size", [1, 2, 100, 3000])
def test_a_contraction_is_one(text: str, kind: str, size: int) -> None:
    """In the mean over steps, what decode(encode(x)) says is nearer to x than 0 is."""
    x = values(kind, size, 11)
    codec = concrete(built(text), spec_of(x.size))
    if not codec.contraction or not np.any(x):
        return
    unit = float(np.abs(x).max())
    left = np.sum(((trials(codec, x, 30) - x) / unit) ** 2, axis=1)
    assert left.mean() - 5 * left.std() / np.sqrt(30) < np.sum((x.astype(np.float64) / unit) ** 2)


@every
def test_feedback_makes_the_mean_of_many_steps_right(text: str) -> None:
    """The same gradient again and again: what was sent on the whole falls behind by no more than the residual."""
    x = values("normal", 3000, 2)
    codec = concrete(built(text), spec_of(x.size))
    if not codec.contraction or decay_of(codec) < 1:
        return
    state = codec.init(spec_of(x.size), 0, feedback=True)
    if state.residual is None:
        return
    total = np.zeros(x.size)
    for step in range(1, 31):
        state.step = step
        total += decoded(codec, encoded(codec, x, state), x.size, state)
    lag = total + state.residual - 30.0 * x.astype(np.float64)
    assert np.abs(lag).max() <= 30 * 30 * EPSILON * float(np.abs(x).max() + np.abs(state.residual).max())
