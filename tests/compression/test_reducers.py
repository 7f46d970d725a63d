"""Reducing, for every codec of the registry, beyond its laws: faults, resumed runs, other types, altered messages."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reducing import ELEMENTS, TEXTS, can_be_served, codec, gradients

from syncline.codecs import Decays, codec_of
from syncline.errors import SynclineError, UsageError
from syncline.nouns import Spec, numpy_dtype
from syncline.strategy.grammar import read_part
from syncline.strategy.words import build
from syncline.testing.reducing import Ranks

MESSAGES = [text for text in TEXTS if codec(text).combine not in ("sum", "rounds") and "warmup" not in text]
"""Those whose first step already has payloads in messages."""

KEEPING = [text for text in TEXTS if not isinstance(one := build("codecs", read_part(text)), Decays) or one.decay == 1]
"""Those whose residuals keep all that was not sent."""


@pytest.mark.every(2)
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_not_finite_reaches_everyone_and_stays_in_no_state(
    text: str, bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    group = Ranks(codec(text), 3)
    group.step(gradients(3, ELEMENTS, 0))
    inputs = gradients(3, ELEMENTS, 1)
    inputs[1][0][1000] = bad  # in p1
    caplog.clear()
    before = group.ranks[1].saved()
    group.step(inputs)
    key = "own/p1/residual"
    if key in before:
        unit = codec_of(group.codec, Spec("p1", (40, 50)))[0].block or 2000
        unit = 1 if unit == 2 else unit  # numbers that share a word are still numbers of their own
        stays = slice(997 // unit * unit, (997 // unit + 1) * unit)
        assert group.ranks[1].saved()[key][stays].tobytes() == before[key][stays].tobytes()
    for result in group.results:
        assert not np.isfinite(result[3:2003]).all()
    assert "rank 1" in caplog.text
    assert "'p1'" in caplog.text
    assert "rank 0" not in caplog.text
    for rank in group.ranks:
        assert all(np.isfinite(array).all() for array in rank.saved().values())
    group.step(gradients(3, ELEMENTS, 2))
    assert all(np.isfinite(result).all() for result in group.results)


@pytest.mark.parametrize("text", TEXTS)
def test_a_resumed_run_goes_on_with_the_same_bits(text: str) -> None:
    first, other = Ranks(codec(text), 3), Ranks(codec(text), 3)
    for step in range(2):
        first.step(gradients(3, ELEMENTS, step))
    saved = [rank.saved() for rank in first.ranks]
    for rank in other.ranks:
        rank.load(saved)
    for step in range(2, 4):
        for group in (first, other):
            group.step(gradients(3, ELEMENTS, step))
        assert first.results[0].tobytes() == other.results[0].tobytes()


@pytest.mark.parametrize("text", TEXTS)
def test_another_number_of_workers_takes_all_that_was_kept(text: str) -> None:
    first, other = Ranks(codec(text), 3), Ranks(codec(text), 2)
    first.step(gradients(3, ELEMENTS, 0))
    for rank in other.ranks:
        rank.load([one.saved() for one in first.ranks])
    np.testing.assert_allclose(other.residuals(), first.residuals(), atol=1e-4)


@pytest.mark.parametrize("text", [text for text in TEXTS if can_be_served(text) and "warmup" not in text])
def test_servers_learn_the_step_from_the_workers(text: str) -> None:
    """A server's count begins at 0 when a run is resumed; what is drawn for a step follows the workers'."""
    first, other = Ranks(codec(text, feedback=False), 2, servers=1), Ranks(codec(text, feedback=False), 2, servers=1)
    for rank in first.ranks:
        rank.resume_at(7)
    for rank in other.ranks[:2]:
        rank.resume_at(7)
    for group in (first, other):
        group.step(gradients(2, ELEMENTS, 7))
    assert first.results[0].tobytes() == other.results[0].tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("text", TEXTS)
def test_gradients_of_other_types_are_converted(text: str, dtype: str) -> None:
    group = Ranks(codec(text), 2, dtype=dtype)
    group.step([[one[0].astype(group.arrays[0][0].dtype)] for one in gradients(2, ELEMENTS, 0)])
    one, two = group.results
    assert one.dtype == numpy_dtype(dtype)
    assert one.tobytes() == two.tobytes()
    assert np.isfinite(one.astype(np.float32)).all()
    assert one.any()


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
@pytest.mark.parametrize("text", TEXTS)
def test_integer_and_complex_gradients_are_refused(text: str, dtype: str) -> None:
    with pytest.raises(UsageError, match=f"'p0' is {dtype}"):
        Ranks(codec(text), 2, shapes=[(4,)], dtype=dtype)


@pytest.mark.every(2)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("text", MESSAGES)
def test_an_altered_message_is_refused_or_does_no_harm(text: str, data: st.DataObject) -> None:
    """Cut short, or with other words: an error that names the sender, or other numbers; nothing else."""
    group = Ranks(codec(text), 2, shapes=[(300,), (20, 30)])
    cut = data.draw(st.booleans())
    at = data.draw(st.integers(0, 1 << 20))
    word = data.draw(st.integers(0, 0xFFFFFFFF))

    def alter(src: int, dst: int, message: np.ndarray) -> np.ndarray:  # noqa: ARG001
        if src != 1 or message.nbytes < 4:
            return message
        if cut:
            return message[: at % message.nbytes]
        message.view(np.uint32)[at % (message.nbytes // 4)] = word
        return message

    try:
        group.step(gradients(2, 900, 0), alter)
    except SynclineError as error:
        refused = str(error)
    else:
        return
    assert re.search(r"rank [01]: .*'p[01]'", refused)


@pytest.mark.parametrize("text", MESSAGES)
def test_a_payload_of_another_codec_is_refused(text: str) -> None:
    group = Ranks(codec(text), 2, shapes=[(300, 40)])

    def alter(src: int, dst: int, message: np.ndarray) -> np.ndarray:  # noqa: ARG001
        message.view(np.uint32)[0] ^= 1
        return message

    with pytest.raises(SynclineError, match=r"rank [01].*'p0'.*another codec"):
        group.step(gradients(2, 12000, 0), alter)


def averages_out(text: str) -> bool:
    """Not what is biased and has nothing to make up for it."""
    chosen = codec(text)
    return not chosen.biased or codec_of(chosen, Spec("p", (4,)))[1]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "text", {text.partition("(")[0]: text for text in reversed(KEEPING) if averages_out(text)}.values()
)
def test_many_steps_of_a_constant_gradient_have_the_right_mean(text: str) -> None:
    """Error feedback and unbiasedness alike: what a codec does to one step averages out."""
    chosen = codec(text)
    group = Ranks(chosen, 2, shapes=[(30, 20)])
    inputs = gradients(2, 600, 7)
    sent, _ = chosen.wire_bytes(Spec("p", (30, 20)))
    total, steps = np.zeros(600), 100 + 20 * 2400 // max(sent, 1)  # an element may wait for as many steps as are saved
    for _ in range(steps):
        group.step([[one[0].copy()] for one in inputs])
        total += group.results[0]
    mean = sum(one[0].astype(np.float64) for one in inputs)
    assert np.linalg.norm(total / steps - mean) < 0.2 * np.linalg.norm(mean)


def test_codecs_know_how_many_workers_there_are() -> None:
    """Local clipping allows every worker limit / sqrt(N): four of the same gradient sum up to twice the limit."""
    group = Ranks(codec("threshold(ratio=1.0, clip=3.0)", feedback=False), 4, shapes=[(40, 50)])
    x = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    group.step([[x]] * 4)
    for arrays in group.arrays:
        np.testing.assert_allclose(np.linalg.norm(arrays[0]), 6.0, rtol=1e-5)


@pytest.mark.parametrize("text", ["bf16", "fp16"])
def test_sums_in_float32_are_rounded_once(text: str) -> None:
    """Whatever the number of ranks, whereas sums of 16 bits are rounded at every addition."""
    kind = numpy_dtype({"bf16": "bfloat16", "fp16": "float16"}[text])
    inputs = gradients(9, ELEMENTS, 5)
    total = np.zeros(ELEMENTS, np.float32)
    for (row,) in inputs:
        total += row.astype(kind).astype(np.float32)
    wanted = total.astype(kind).astype(np.float32)
    wide, narrow = (Ranks(codec(f"{text}(sum={sums})"), 9) for sums in ("fp32", "payload"))
    for group in (wide, narrow):
        group.step(inputs)
    np.testing.assert_array_equal(wide.results[0], wanted)
    far, near = (np.linalg.norm(group.results[0] - total) for group in (narrow, wide))
    assert far > 2 * near
