"""Codecs over torch tensors give what they give over arrays: on a GPU or, where there is none, interpreted."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from syncline.codecs import Codec, Encoded, Floats, Payload, PayloadError, State
from syncline.codecs._device import kernels_for, to_device
from syncline.errors import UsageError
from syncline.nouns import Spec
from syncline.strategy.grammar import read_part
from syncline.strategy.words import build

torch = pytest.importorskip("torch")
if find_spec("triton") is None:
    pytest.skip("kernels for GPUs need Triton", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CODECS = [
    "fp16",
    "bf16",
    "fp8",
    "int8",
    "int8(block=12)",
    "int4",
    "int4(block=64)",
    "qsgd",
    "qsgd(levels=7, block=320)",
    "qsgd(levels=100, block=600)",
    "natural",
    "ternary",
    "ternary(clip=0)",
    "ternary(rounding=nearest)",
    "onebit",
    "sign",
    "sign(vote=on)",
    "sign(vote=on, momentum=0.9)",
    "topk(ratio=0.01)",
    "topk(ratio=0.3)",
    "gtopk(ratio=1)",
    "randomk(ratio=0.3)",
    "randomk(ratio=0.01, decay=1)",
    "threshold(ratio=0.01)",
    "threshold(ratio=0.3, momentum=0.9)",
]
PAIRS = ("gather", "merge")
GUARD = 33
TILE = 1024
"""Elements that a program casts to 16 bits: where codecs know blocks of two, what can go wrong is at its borders."""

CHOSEN_FROM = 2048
"""Elements that a program chooses from, where the block is the tensor."""

over_codecs = pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, marks=[pytest.mark.slow] if CODECS[number - 1].startswith(text.partition("(")[0]) else [])
        for number, text in enumerate(CODECS)
    ],
)
FAMILIES = list({text.partition("(")[0]: text for text in CODECS}.values())
over_families = pytest.mark.parametrize("text", FAMILIES)
"""Each codec once: what its arguments do to the bits is for the first law."""
# The interpreter takes milliseconds for each operation on vectors, and numpy tells it of infinities that are meant.
few = settings(deadline=None, max_examples=2, phases=[Phase.explicit, Phase.reuse, Phase.generate])
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def built(text: str) -> Codec:
    codec: Codec = build("codecs", read_part(text))
    return codec


def gradient(kind: str, size: int, seed: int) -> Floats:
    draw = np.random.default_rng(seed)
    made = draw.standard_normal(size)
    if kind == "wide":
        made *= 10.0 ** draw.integers(-30, 30, size)
    elif kind == "denormal":
        made *= 2.0**-130
    elif kind == "ties":
        made = np.round(4 * made) / 8
    elif kind == "sparse":
        made = np.where(draw.random(size) < 0.01, made, 0)
    elif kind == "zeros":
        made *= 0
    elif kind == "huge":
        made = np.sign(made) * np.finfo(np.float32).max
    return made.astype(np.float32)


def span(codec: Codec) -> int:
    """Elements at whose multiples something might go wrong."""
    return codec.block if codec.block > 2 else TILE if codec.block else CHOSEN_FROM


@st.composite
def inputs(draw: st.DrawFn, codec: Codec) -> tuple[Floats, Floats, int]:
    """A gradient, a residual, and where in its tensor it starts: some of a block, one, or more."""
    block = span(codec)
    size = draw(st.sampled_from([1, 2, 3, block // 2 + 1, block - 1, block, block + 1, 2 * block]))
    size = max(size, 1)
    kind = draw(st.sampled_from(["normal", "wide", "denormal", "ties", "sparse", "zeros", "huge"]))
    seed = draw(st.integers(0, 1000))
    x = gradient(kind, size, seed)
    residual = np.zeros(size, np.float32) if kind == "huge" else gradient(kind, size, seed + 1)
    return x, residual, draw(st.integers(0, 2)) * block if codec.block else 0


class Both:
    """A codec, encoding the same on both sides."""

    def __init__(self, text: str, x: Floats, residual: Floats | None, start: int) -> None:
        self.codec = built(text)
        self.state = self.codec.init(Spec("layer.weight", (start + len(x),)), 1, residual is not None)
        self.state.step = 3
        if residual is not None:
            self.state.residual = np.concatenate([np.zeros(start, np.float32), residual])
        for kept in self.state.memory.values():
            kept[...] = gradient("ties", start + len(x), 9)
        self.on_device = to_device(self.state, DEVICE)
        self.start, self.size = start, len(x)
        room = self.codec.wire_bytes(Spec("", (len(x),)))[1] // 4
        self.host, device = np.zeros(room + GUARD, np.uint32), tensor(np.zeros(room + GUARD, np.uint32))
        self.encoded = self.codec.encode(x, self.host, self.state, start)
        given = tensor(x)
        self.device_encoded: Encoded = self.codec.encode(given, device, self.on_device, start)
        self.device = array(device)
        same(array(given), x)
        assert self.device_encoded.words == self.encoded.words
        assert bool(self.device_encoded.finite) == self.encoded.finite

    def remember_the_same(self) -> None:
        if self.state.residual is not None:
            same(array(self.on_device.residual), self.state.residual)
        for name, kept in self.state.memory.items():
            same(array(self.on_device.memory[name]), kept)

    def decoded(self, payload: Payload, onto: Floats | None = None) -> tuple[Floats, Floats]:
        """What both sides make of a payload, written, or added to an array."""
        mine = np.full(self.size + 2 * GUARD, 7, np.float32)
        if onto is not None:
            mine[GUARD:-GUARD] = onto
        theirs = tensor(mine)
        add = onto is not None
        self.codec.decode(payload, mine[GUARD:-GUARD], self.state, add=add, start=self.start)
        self.codec.decode(tensor(payload), theirs[GUARD:-GUARD], self.on_device, add=add, start=self.start)
        found = array(theirs).view(np.float32)
        assert (found[:GUARD] == 7).all()
        assert (found[-GUARD:] == 7).all()
        return mine[GUARD:-GUARD], found[GUARD:-GUARD]


def tensor(values: Any) -> Any:
    """A copy on the device, of words as int32."""
    return torch.from_numpy(values.view(np.int32 if values.dtype == np.uint32 else values.dtype).copy()).to(DEVICE)


def array(values: Any) -> Any:
    found = values.cpu().numpy()
    return found.view(np.uint32) if found.dtype == np.int32 else found


def same(mine: Any, theirs: Any) -> None:
    """Bit for bit."""
    np.testing.assert_array_equal(mine.view(np.uint32), theirs.view(np.uint32))


def alike(sides: tuple[Floats, Floats]) -> None:
    """Bit for bit, but for NaNs, which may be other ones."""
    mine, theirs = sides
    np.testing.assert_array_equal(np.isnan(mine), np.isnan(theirs))
    same(mine[~np.isnan(mine)], theirs[~np.isnan(theirs)])


@over_codecs
@few
@given(data=st.data())
def test_the_bits_are_those_of_the_host(text: str, data: st.DataObject) -> None:
    x, residual, start = data.draw(inputs(built(text)))
    feedback = data.draw(st.booleans()) or "momentum" in text
    both = Both(text, x, residual if feedback else None, start)
    same(both.device, both.host)
    both.remember_the_same()
    alike(both.decoded(both.host[: both.encoded.words], residual if data.draw(st.booleans()) else None))


@pytest.mark.every(2)
@pytest.mark.parametrize(("text", "number"), [*zip(FAMILIES, cycle([np.nan, -np.inf]))])
def test_what_is_not_finite_is_told_and_not_kept(text: str, number: float) -> None:
    codec = built(text)
    block = codec.block or CHOSEN_FROM
    x = gradient("normal", block + 1, 5)
    x[block // 3] = number
    both = Both(text, x, gradient("normal", block + 1, 6), 0)
    assert not both.device_encoded.finite
    assert not both.encoded.finite
    both.remember_the_same()
    mine, theirs = both.decoded(both.device[: both.encoded.words])
    alike((mine, theirs))
    assert not np.isfinite(theirs if codec.combine == "sum" and not codec.block else theirs[block // 3]).all()


@pytest.mark.every(2)
@over_families
def test_an_altered_payload_harms_nothing(text: str) -> None:
    size = (built(text).block or CHOSEN_FROM) + 5
    x = gradient("normal", size, 7)
    both = Both(text, x, x if "momentum" in text else None, 0)
    payload = both.host[: both.encoded.words]
    altered = np.random.default_rng(8).integers(0, 1 << 32, len(payload), np.uint32)
    refused = [payload[:-1], np.append(payload, np.uint32(0))]
    if both.codec.combine in PAIRS:
        refused.append(altered)
    else:
        with np.errstate(all="ignore"):
            alike(both.decoded(altered))
    for wrong in refused:
        with pytest.raises(PayloadError):
            both.codec.decode(tensor(wrong), tensor(np.zeros(size, np.float32)), both.on_device)


@over_families
def test_nothing_makes_an_empty_payload(text: str) -> None:
    both = Both(text, np.empty(0, np.float32), np.empty(0, np.float32), 0)
    assert both.device_encoded.words == 0
    assert bool(both.device_encoded.finite)


def test_pairs_at_the_ends_of_stretches() -> None:
    x, edges = np.zeros(131073, np.float32), [65535, 65536, 131071, 131072]
    x[edges] = -3
    both = Both("topk(ratio=0.00004)", x, None, 0)  # 5 elements, one of them a zero
    same(both.device, both.host)
    mine, theirs = both.decoded(both.host[: both.encoded.words])
    same(mine, theirs)
    assert np.flatnonzero(theirs).tolist() == edges


@pytest.mark.parametrize(
    ("kind", "momentum"),
    [*zip(["normal", "largest last", "largest last, not finite", "nearly all zero"], cycle(["", ", momentum=0.5"]))],
)
def test_a_sampled_threshold_chooses_the_same(kind: str, momentum: str) -> None:
    """Where it was a good guess, where far too many reach it, and where too few do."""
    x = gradient("normal", 3 * CHOSEN_FROM + 5, 11)
    if kind.startswith("largest last"):
        x = np.where(np.arange(len(x)) < len(x) - 10, np.sign(x), 100).astype(np.float32)
    if kind.endswith("not finite"):
        x[-5] = np.inf
    if kind == "nearly all zero":
        x[100:] = 0
    both = Both(f"threshold(ratio=0.3{momentum})", x, np.zeros_like(x), 0)
    same(both.device, both.host)
    both.remember_the_same()


@pytest.mark.parametrize(
    ("place", "word", "says"),
    [
        (0, 0xFFFFFFFF, "more pairs than there are elements"),
        (0, 5, "length"),
        (1, 200 << 16 | 3, "element beyond the tensor's 100"),
        (1, 3 << 16 | 4, "out of order"),
        (1, 4 << 16 | 4, "out of order"),
    ],
)
def test_altered_pairs_are_refused_before_anything_is_written(place: int, word: int, says: str) -> None:
    both = Both("topk(ratio=0.04)", np.arange(100, dtype=np.float32), None, 0)
    payload = both.host[: both.encoded.words].copy()
    payload[place] = word
    out = tensor(np.full(100, 7, np.float32))
    with pytest.raises(PayloadError, match=says):
        both.codec.decode(tensor(payload), out, both.on_device)
    assert (out == 7).all()


def test_what_needs_the_host_says_so() -> None:
    x, state = tensor(np.ones(9, np.float32)), State(Spec("a", (9,)), 0)
    payload = tensor(np.zeros(99, np.uint32))
    with pytest.raises(UsageError, match="leave clip= out"):
        built("threshold(ratio=0.5, clip=1)").encode(x, payload, state)
    gtopk: Any = built("gtopk(ratio=0.5)")
    with pytest.raises(UsageError, match="on the host"):
        gtopk.merge(payload, payload, payload, state)


def test_a_state_is_copied_to_the_device() -> None:
    state = State(Spec("a", (3,)), 0, np.arange(3, dtype=np.float32), 5, {"q": np.ones(2, np.float32)})
    there = to_device(state, DEVICE)
    there.residual += 1
    assert (there.step, there.seed()) == (5, state.seed())
    np.testing.assert_array_equal(array(there.residual), [1, 2, 3])
    np.testing.assert_array_equal(array(there.memory["q"]), [1, 1])
    np.testing.assert_array_equal(state.residual, [0, 1, 2])


def test_a_device_without_room_for_a_state_says_what_helps() -> None:
    state = State(Spec("a", (3,)), 0, np.zeros(3, np.float32))
    with pytest.raises(UsageError, match=r"state of 'a' cannot be copied to nowhere.*SYNCLINE_DEVICE_CODECS=off"):
        to_device(state, "nowhere")


def test_a_family_without_kernels_for_devices_says_so() -> None:
    with pytest.raises(UsageError, match="on the host"):
        kernels_for("passes", torch.zeros(1))


def test_a_block_too_large_for_a_program_is_refused() -> None:
    x, out = tensor(np.zeros(9, np.float32)), tensor(np.zeros(9, np.uint32))
    with pytest.raises(UsageError, match="on a GPU"):
        built("int8(block=65536)").encode(x, out, State(Spec("a", (9,)), 0))
