"""Measuring codecs: what is measured for which text, in which order, and that the figures are of that codec."""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar

import numpy as np
import pytest

from syncline import registry
from syncline.codecs import Codec, Floats, State, Wraps, fresh_state
from syncline.compression.reducers.ways import WAYS
from syncline.errors import UsageError
from syncline.nouns import Spec
from syncline.strategy.grammar import read_part
from syncline.strategy.parts import build
from syncline.tuning import codec_times
from syncline.tuning.codec_times import Trial, every_codec, in_turn, measure_codec, measure_codecs, told, variants

N = 5000


@pytest.mark.parametrize("text", every_codec())
@pytest.mark.parametrize("elements", [1, N])
def test_every_codec_is_measured_in_every_way(text: str, elements: int) -> None:
    for name, feedback in variants(text, elements):
        found = measure_codec(f"feedback({name})" if feedback else name, elements, repetitions=1)
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


@pytest.mark.parametrize(("elements", "repetitions"), [(0, 1), (1, 0), (-5, 1)])
def test_nothing_cannot_be_measured(elements: int, repetitions: int) -> None:
    with pytest.raises(UsageError, match="1 or more"):
        measure_codec("int8", elements, repetitions)


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
