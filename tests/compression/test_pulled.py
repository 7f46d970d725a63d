"""Laws of telling updates: the same bits for all, nothing lost but what cannot be kept, whatever the cuts."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest
from reducing import ELEMENTS, TEXTS, can_be_served, codec, gradients
from telling import EDGES, Served

from syncline.codecs import codec_of
from syncline.nouns import Spec, numpy_dtype
from syncline.testing.reducing import SHAPES

SERVABLE = [text for text in TEXTS if can_be_served(text)]


def keeps(text: str) -> bool:
    """Every tensor's codec is a contraction; ``adaptive`` mixes."""
    return all(codec_of(codec(text), Spec("p", shape))[0].contraction for shape in SHAPES)


@pytest.mark.parametrize(
    ("text", "workers", "servers", "owners"),
    [(row, *other) for row, other in zip(SERVABLE, cycle([(1, 1, 0), (3, 2, 0), (3, 0, 2)]))],
)
def test_all_workers_have_the_same_weights(text: str, workers: int, servers: int, owners: int) -> None:
    served = Served(text, workers, servers, owners)
    start = served.known[0].copy()
    for seed in range(3):
        served.step(seed)
        for other in served.known[1:workers]:
            assert other.tobytes() == served.known[0].tobytes()
        assert np.isfinite(served.known[0]).all()
    assert (served.known[0] != start).any()
    assert np.isfinite(served.held).all()


@pytest.mark.parametrize(("text", "dtype"), [*zip(SERVABLE, cycle(["float16", "bfloat16", "float64"]))])
def test_weights_of_other_types_too(text: str, dtype: str) -> None:
    served = Served(text, 2, 0, 2, dtype=dtype)
    for seed in range(3):
        served.step(seed)
        assert served.known[0].dtype == numpy_dtype(dtype)
        assert served.known[0].tobytes() == served.known[1].tobytes()
    assert np.isfinite(served.held.astype(np.float32)).all()


@pytest.mark.every(2)
@pytest.mark.parametrize("text", [text for text in SERVABLE if keeps(text)])  # the errors of others would grow
def test_what_is_not_said_is_kept_and_said_later(text: str) -> None:
    """Telling changes no weights of owners; told again and again without an update, workers come to have them."""
    served = Served(text, 2, 1)
    served.step(0, rate=0.0)
    before = served.held
    for one in served.updates[2].owned:
        one.weights[:] += np.random.default_rng(one.tensor).standard_normal(one.weights.size).astype(np.float32)
    wanted = served.held
    distance = first = np.linalg.norm(wanted - before)
    sent = sum(codec_of(codec(text), Spec("p", shape))[0].wire_bytes(Spec("p", shape))[0] for shape in SHAPES)
    for number in range(60 + 20 * 4 * ELEMENTS // max(sent, 1)):
        for made in served.codecs:
            made.resume_at(number)
        served.pull()
        assert served.held.tobytes() == wanted.tobytes()
        distance = np.linalg.norm(wanted - served.known[0])
        if distance < 0.05 * first:
            break
    assert distance < 0.05 * first


@pytest.mark.parametrize("text", [text for text in SERVABLE if not keeps(text)] + ["topk(ratio=0.3)"])
def test_what_must_not_be_kept_is_dropped_on_both_sides(text: str) -> None:
    """Codecs that are no contraction, and biased ones that were told to do without feedback."""
    served = Served(text, 2, 0, 2, feedback=False)
    for seed in range(3):
        served.step(seed)
        assert served.held.tobytes() == served.known[0].tobytes()
    assert not served.updates[0].keeps


@pytest.mark.parametrize("text", ["qsgd(levels=7)", "ternary"])
def test_unbiased_codecs_have_the_right_mean(text: str) -> None:
    served, steps = Served(text, 2, 1), 300
    start = served.known[0].astype(np.float64)
    change = 1e-3 * np.random.default_rng(1).standard_normal(ELEMENTS)
    for number in range(steps):
        for made in served.codecs:
            made.resume_at(number)
        for one in served.updates[2].owned:
            at = EDGES[one.tensor] + one.start
            one.weights[:] += change[at : at + one.weights.size].astype(np.float32)
        served.pull()
    moved = (served.known[0] - start) / steps
    assert np.linalg.norm(moved - change) < 0.2 * np.linalg.norm(change)


@pytest.mark.every(2)
@pytest.mark.parametrize("text", [text for text in SERVABLE if codec(text).combine != "sum"])
def test_the_result_does_not_depend_on_buckets_or_owners(text: str) -> None:
    one = Served(text, 3, 1)
    others = [Served(text, 3, 2), Served(text, 3, 0, 3), Served(text, 3, 1, single=True)]
    for seed in range(3):
        for served in (one, *others):
            served.step(seed)
        for other in others:
            assert other.known[0].tobytes() == one.known[0].tobytes()


def test_whole_tensors_are_shared_out_too() -> None:
    """Ten large tensors that must not be cut do not all fall to the first of two owners."""
    from syncline.compression.reducers import Operand
    from syncline.compression.reducers.owners import divide, share_out

    made = codec("topk(ratio=0.01)")
    parts = []
    for number in range(10):
        state = made.init(Spec(f"p{number}", (1 << 20,)), 0)
        parts.append(Operand(f"p{number}", made, np.zeros(1 << 20, np.float32), state, state))
    shares = share_out(parts, 2)
    assert [len(share) for share in shares] == [5, 5]
    pieces = divide(shares)
    assert len(pieces) > 1
    assert all(len(piece.shares[0]) == len(piece.shares[1]) for piece in pieces)
    for owner in range(2):
        names = [part.name for piece in pieces for part in piece.shares[owner]]
        assert names == [part.name for part in shares[owner]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("text", ["int8", "topk(ratio=0.3)", "fp16"])
def test_a_gradient_that_is_not_finite_reaches_the_owner(
    text: str, bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(text, 2, 1)
    given = gradients(2, ELEMENTS, 0)
    given[1][0][1000] = bad
    served.push(given)
    assert not np.isfinite(served.gradients[2][3:2003]).all()
    assert "'p1'" in caplog.text
