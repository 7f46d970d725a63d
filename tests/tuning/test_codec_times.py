"""What codecs cost, and whether compression pays."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline import registry
from syncline.codecs import Codec, Combine, Floats, State, Wraps, fresh_state
from syncline.compression.reducers.ways import WAYS
from syncline.errors import UsageError
from syncline.nouns import Spec
from syncline.strategy.grammar import read_part
from syncline.strategy.words import build
from syncline.tuning import codec_times
from syncline.tuning.codec_times import (
    ANY_LINK_BIT_PER_S,
    Addition,
    CodecTimes,
    CodedAllreduce,
    Trial,
    dense,
    every_codec,
    in_turn,
    told,
    variants,
)

ELEMENTS = 1_000_000
HEAD_BYTES = 12  # of a message

seconds = st.floats(1e-5, 1.0)
workers = st.integers(2, 64)
combines = st.sampled_from(list(WAYS))


def allreduce(combine: Combine = "owner", **changes: Any) -> CodedAllreduce:
    values = {"nbytes": ELEMENTS, "encode_s": 8e-4, "decode_s": 4e-4, "add_s": 4e-4}
    return CodedAllreduce(WAYS[combine], ELEMENTS, **{**values, **changes})


@given(combines, workers, seconds, seconds, seconds, st.integers(1, 4 * ELEMENTS))
def test_it_pays_exactly_below_the_speed_that_is_named(
    combine: Combine, count: int, encode_s: float, decode_s: float, add_s: float, nbytes: int
) -> None:
    mine = CodedAllreduce(WAYS[combine], ELEMENTS, nbytes, encode_s, decode_s, add_s)
    other = dense(ELEMENTS, add_s)
    limit = mine.pays_below_bit_per_s(count)
    assert limit is None or 0 < limit <= ANY_LINK_BIT_PER_S
    if limit is None:
        assert mine.sent_bits(count) >= other.sent_bits(count)
        return

    def seconds_of(one: CodedAllreduce, bit_per_s: float) -> float:
        return one.sent_bits(count) / bit_per_s + one.computing_s(count)

    assert seconds_of(mine, limit * 0.999) < seconds_of(other, limit * 0.999)
    if limit < ANY_LINK_BIT_PER_S:
        assert seconds_of(mine, limit * 1.001) > seconds_of(other, limit * 1.001)


@given(combines, workers, st.floats(1.01, 10))
def test_cheaper_computing_or_fewer_bytes_pay_on_faster_links(combine: Combine, count: int, factor: float) -> None:
    def limit(**changes: Any) -> float:
        return allreduce(combine, **{"nbytes": ELEMENTS / 100, **changes}).pays_below_bit_per_s(count) or 0.0

    usual = limit()
    assert limit(encode_s=8e-4 * factor) <= usual
    assert limit(decode_s=4e-4 * factor) <= usual
    assert limit(nbytes=ELEMENTS / 100 * factor) <= usual


def test_an_exchange_that_sends_as_much_never_pays() -> None:
    assert allreduce(nbytes=4 * ELEMENTS).pays_below_bit_per_s(4) is None
    # Everybody gets everybody's payload: with enough ranks that is more than the dense allreduce sends.
    assert allreduce("gather", nbytes=ELEMENTS / 10).pays_below_bit_per_s(4) is not None
    assert allreduce("gather", nbytes=ELEMENTS / 10).pays_below_bit_per_s(1000) is None


def test_computing_less_than_the_dense_allreduce_pays_on_any_link() -> None:
    assert allreduce(encode_s=1e-6, decode_s=1e-6).pays_below_bit_per_s(4) == ANY_LINK_BIT_PER_S


def test_two_ranks_and_owners_by_hand() -> None:
    # Sent: one array each; 24 of 32 bits saved, but for the heads of two messages,. Computing: 1.5
    # encodes and 2 decodes instead of half an addition.
    limit = allreduce("owner").pays_below_bit_per_s(2)
    assert limit == pytest.approx((24 * ELEMENTS - 2 * 8 * HEAD_BYTES) / (1.5 * 8e-4 + 2 * 4e-4 - 0.5 * 4e-4))


def test_a_merge_on_a_tree_sends_two_payloads_per_level() -> None:
    for count, levels in ((2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)):
        assert allreduce("merge").sent_bits(count) == 2 * levels * 8 * (ELEMENTS + HEAD_BYTES)


N = 5000


def measure_codecs(texts: list[str], elements: int, repetitions: int) -> tuple[CodecTimes, ...]:
    """Codecs beside each other, each as its text says."""
    trials = [Trial(*told(text), elements) for text in texts]
    (add_s,), *times_s = in_turn([Addition(elements), *trials], elements, repetitions)
    return tuple(trial.result(found, add_s) for trial, found in zip(trials, times_s, strict=True))


@pytest.mark.parametrize("text", every_codec())
@pytest.mark.parametrize("elements", [1, N])
def test_every_codec_is_measured_in_every_way(text: str, elements: int) -> None:
    for name, feedback in variants(text, elements):
        (found,) = measure_codecs([f"feedback({name})" if feedback else name], elements, repetitions=1)
        assert (found.codec, found.feedback) == (name, feedback)
        assert found.nbytes > 0
        assert min(found.encode_s, found.decode_s, found.np_add_s) > 0
        assert found.elements == elements or found.combine == "rounds"


def test_codecs_beside_each_other_share_their_addition() -> None:
    first, second = measure_codecs(["int8", "feedback(int4)"], N, repetitions=2)
    assert first.np_add_s == second.np_add_s
    assert (first.feedback, second.feedback) == (False, True)
    assert first.nbytes == build("codecs", read_part("int8")).wire_bytes(Spec("", (N,)))[0]
    assert first.allreduce.way is WAYS["owner"]


def test_texts_are_canonical_and_feedback_is_told_apart() -> None:
    assert told("int8( block = 1024 )") == ("int8", False)
    assert told("feedback(int8(block=64))") == ("int8(block=64)", True)
    for text in ("int9", "int8(block=1)", "int8(blocks=2)", "int8 int4"):
        with pytest.raises(UsageError):
            told(text)


def test_feedback_is_measured_where_it_converges() -> None:
    assert variants("int8", N) == (("int8", False), ("int8", True))
    assert variants("feedback(int8)", N) == (("int8", True),)
    assert variants("none", N) == (("none", False),)
    for text in every_codec():
        codec: Codec = build("codecs", read_part(text))
        assert not isinstance(codec, Wraps)
        assert len(variants(text, N)) == 1 + codec.contraction


def test_contestants_take_turns_in_an_order_that_rotates() -> None:
    called: list[str] = []
    seen: list[bytes] = []

    def contestant(name: str) -> codec_times.Timed:
        def run(x: Floats) -> tuple[float, float]:
            called.append(name)
            seen.append(x[:4].tobytes())
            return float(len(called)), 1.0

        return run

    times_s = in_turn([contestant("a"), contestant("b"), contestant("c")], codec_times._LEAST_ELEMENTS, 3)
    assert "".join(called) == "abc" + "abc" + "bca" + "cab"
    assert len(set(seen)) == 4  # every repetition has a gradient of its own
    assert times_s == [(9.0, 1.0), (7.0, 1.0), (8.0, 1.0)]


def test_small_arrays_are_worked_on_often_enough_to_be_timed() -> None:
    calls = 0

    def run(x: Floats) -> tuple[float]:
        nonlocal calls
        assert x.size == 10
        calls += 1
        return (1.0,)

    in_turn([run], 10, 2)
    assert calls > 2 * 10


class Halves:
    """Sums two arrays in rounds, then writes the result."""

    combine: ClassVar[str] = "rounds"

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        return fresh_state(spec, rank, feedback)

    def average(self, x: Floats, state: State, world: int) -> Generator[Floats, None, None]:
        assert (x.size, world) == (state.spec.elements, 1)
        yield x[: x.size // 2]
        yield x[x.size // 2 :]
        x[:] = 0

    def rounds(self, spec: Spec) -> tuple[int, int]:
        return spec.elements // 2, spec.elements - spec.elements // 2


def test_a_codec_of_rounds_is_driven_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_times, "build", lambda *_: Halves())
    trial = Trial("powersgd", True, 12)
    x = np.arange(12, dtype=np.float32)
    encode_s, decode_s = trial(x)
    assert min(encode_s, decode_s) > 0
    assert x[-1] == 11  # the gradient is not the trial's to change
    found = trial.result((encode_s, decode_s), 1.0)
    assert (found.nbytes, found.elements, found.feedback) == (48, 12, True)


def test_the_codecs_of_the_registry_are_all_there() -> None:
    named = {text.partition("(")[0] for text in every_codec()}
    left_out = {entry.name for entry in registry.entries("codecs")} - named
    assert {"none", "feedback"} <= left_out <= {"none", "feedback", "adaptive", "auto"}
