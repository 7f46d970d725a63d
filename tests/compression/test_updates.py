"""Laws of updates by version: whoever comes to a version has the same bits, by the way that takes fewest bytes."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reducing import ELEMENTS, TEXTS, can_be_served
from telling import Served

from syncline.compression.reducers import Held, ReduceError
from syncline.compression.reducers.owners import share_out
from syncline.compression.updates import UpdateReceiver, UpdateSender
from syncline.nouns import numpy_dtype

SERVABLE = [text for text in TEXTS if can_be_served(text) and "warmup" not in text]


class Versions:
    """An owner of everything and some workers that pull by themselves, all on the codecs' memory of ``Served``."""

    def __init__(self, text: str, workers: int, dtype: str = "float32", feedback: bool | None = None) -> None:
        served = Served(text, workers, 1, dtype=dtype, feedback=feedback)
        made = served.codecs[workers]
        names = made.names
        self.own, self.known = served.known[workers].copy(), served.known[workers].copy()
        shares = [share_out(made.parts(0, array), 1)[0] for array in (self.known, self.own)]
        held = [Held(part.array, made.keeps_rest(names.index(part.name))) for part in shares[1]]
        self.telling = UpdateSender(shares[0], held)
        self.workers = served.known[:workers]
        self.has = [0] * workers
        self.hearing = [
            UpdateReceiver(share_out(compression.parts(0, array), 1)[0])
            for compression, array in zip(served.codecs, self.workers, strict=False)
        ]

    def update(self, seed: int, rate: float = 0.1) -> None:
        change = np.random.default_rng(seed).standard_normal(ELEMENTS)
        self.own[:] = (self.own - rate * change).astype(self.own.dtype)
        self.telling.update()

    def message(self, worker: int) -> Any:
        said = self.telling.since(self.has[worker])
        self.has[worker] = self.telling.version
        return said

    def pull(self, worker: int) -> int:
        """The bytes of the message."""
        said = self.message(worker)
        assert said.nbytes <= self.hearing[worker].greatest_bytes
        self.hearing[worker].take(said, "the owner")
        return int(said.nbytes)


@pytest.mark.parametrize(("text", "dtype"), [*zip(SERVABLE, cycle(["float32", "float64", "bfloat16"]))])
def test_whoever_has_come_to_a_version_has_the_same_bits(text: str, dtype: str) -> None:
    """One that pulls every update, one that pulls each third, and one that pulls once."""
    versions = Versions(text, 3, dtype)
    for number in range(7):
        versions.update(number)
        for worker, every in enumerate((1, 3, 7)):
            if (number + 1) % every == 0:
                versions.pull(worker)
                assert versions.workers[worker].tobytes() == versions.known.tobytes()
                assert versions.hearing[worker].version == versions.telling.version
    assert versions.known.dtype == numpy_dtype(dtype)
    assert np.isfinite(versions.known.astype(np.float32)).all()


@given(st.lists(st.one_of(st.none(), st.integers(0, 2), st.just(3)), max_size=30))
@settings(max_examples=30, deadline=None)
def test_in_any_order_of_updates_and_pulls(events: list[int | None]) -> None:
    """Of an update (None), of a pull by one of three workers, and of weights that were given to the owner (3)."""
    versions = Versions("int8", 3)
    whole = versions.hearing[0].greatest_bytes
    for seed, event in enumerate(events):
        if event is None:
            versions.update(seed)
        elif event == 3:
            versions.own[:] = seed
            versions.telling.renew()
        else:
            behind = versions.telling.version - versions.has[event]
            nbytes = versions.pull(event)
            assert versions.workers[event].tobytes() == versions.known.tobytes()
            assert nbytes <= whole
            if behind == 0:
                assert nbytes == 8
    np.testing.assert_allclose(versions.known, versions.own, atol=1.0)


def test_payloads_go_while_they_are_fewer_bytes_than_the_weights() -> None:
    versions = Versions("int8", 1)
    whole = versions.hearing[0].greatest_bytes
    found = []
    for behind in range(1, 7):
        for number in range(behind):
            versions.update(number)
        found.append(versions.pull(0))
    one = found[0]
    assert one < 0.3 * whole
    assert found[:3] == pytest.approx([one, 2 * one, 3 * one], rel=0.01)
    assert found[-2:] == [whole, whole]
    assert max(found) == whole


@pytest.mark.parametrize("text", ["int8", "feedback(int4)", "topk(ratio=0.3)"])
def test_what_is_not_said_is_kept_and_said_later(text: str) -> None:
    """The owner's weights do not depend on what is told of them; told again and again, workers come to have them."""
    versions = Versions(text, 1)
    versions.update(0)
    wanted = versions.own.copy()
    for _ in range(80):
        versions.update(0, rate=0.0)
        versions.pull(0)
    assert versions.own.tobytes() == wanted.tobytes()
    assert np.linalg.norm(versions.workers[0] - wanted) < 0.02 * np.linalg.norm(wanted)


@pytest.mark.parametrize("text", ["ternary", "topk(ratio=0.3)"])
def test_what_must_not_be_kept_is_dropped_on_both_sides(text: str) -> None:
    versions = Versions(text, 1, feedback=False)
    for number in range(3):
        versions.update(number)
        versions.pull(0)
        assert versions.own.tobytes() == versions.workers[0].tobytes()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda said: said[:5], "of 5 bytes is too short"),
        (lambda said: said[:-4], "has 1 payloads"),
        (lambda said: np.concatenate([said[:4], said[:4], said[8:]]), "has 3 payloads"),
        (lambda said: np.concatenate([np.full(8, 255, np.uint8), said[8:]]), "bytes of weights instead of"),
    ],
)
def test_a_message_that_cannot_be_names_its_sender(change: Any, says: str) -> None:
    versions = Versions("int8", 1)
    versions.update(0)
    versions.update(1)
    versions.pull(0)
    versions.update(2)
    before = versions.workers[0].copy()
    said = versions.message(0)
    with pytest.raises(ReduceError, match=f"rank 5: a message about updates of 'p0' .*{says}"):
        versions.hearing[0].take(change(said), "rank 5")
    assert versions.workers[0].tobytes() == before.tobytes()
    versions.update(3)
    with pytest.raises(ReduceError, match="leads to version 4, but this worker has version 2"):
        versions.hearing[0].take(versions.telling.since(3), "rank 5")
    assert versions.workers[0].tobytes() == before.tobytes()
