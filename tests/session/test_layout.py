"""Buckets are rank 0's, checked before they are told, whatever the schedules of others would make."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline import registry
from syncline.costs.plans import LinearCost
from syncline.errors import ProtocolError, UsageError
from syncline.nouns import Bucket, Layer, Slice, Spec
from syncline.schedules import Cost
from syncline.schedules.fixed import Fixed
from syncline.session.layout import BUCKETS, Layout, check_buckets, decide_layout, read_layout
from syncline.session.session import Session
from syncline.strategy.strategy import Strategy

LAYERS = (Layer(Spec("a", (4,))), Layer(Spec("b", (2, 3))), Layer(Spec("c", (5,), "float64")), Layer(Spec("d", (0,))))
D = Slice(3, 0, 0)
WHOLE = [Bucket((Slice(2, 0, 5),), "float64"), Bucket((D, Slice(1, 0, 6), Slice(0, 0, 4)), "float32")]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ([WHOLE[1]], "'c' is in no bucket"),
        ([WHOLE[0], Bucket((D, Slice(1, 0, 6), Slice(0, 0, 3)), "float32")], "elements 3 to 4 of 'a' are missing"),
        ([WHOLE[0], Bucket((D, Slice(1, 1, 6), Slice(0, 0, 4)), "float32")], "elements 0 to 1 of 'b' are missing"),
        ([*WHOLE, WHOLE[0]], "elements 0 to 5 of 'c' are in two slices"),
        ([*WHOLE, Bucket((Slice(1, 2, 4),), "float32")], "elements 2 to 4 of 'b' are in two slices"),
        ([*WHOLE, Bucket((Slice(0, 4, 9),), "float32")], "'a' has 4 elements, but a slice goes from 4 to 9"),
        ([WHOLE[0], Bucket((Slice(1, 0, 6), Slice(0, 0, 4)), "float32")], "'d' is in no bucket"),
        ([WHOLE[1], Bucket((Slice(2, 0, 5),), "float32")], "bucket 1 has type float32, but 'c' in it has type float64"),
        ([*WHOLE, Bucket((Slice(4, 0, 1),), "float32")], "bucket 2 has a slice of tensor 4, but there are 4"),
        ([*WHOLE, Bucket((Slice(-1, 0, 0),), "float32")], "bucket 2 has a slice of tensor -1"),
        ([*WHOLE, Bucket((), "float32")], "bucket 2 is empty"),
        ([Bucket((D,), "float32")] * BUCKETS, f"this model has {BUCKETS} buckets, but at most {BUCKETS - 1}"),
    ],
)
def test_what_is_no_layout_is_refused_by_name(changed: list[Bucket], says: str) -> None:
    check_buckets(LAYERS, WHOLE)
    with pytest.raises(UsageError, match=says):
        check_buckets(LAYERS, changed)


@given(st.data())
def test_every_cut_of_tensors_is_a_layout(data: st.DataObject) -> None:
    buckets = []
    for tensor, layer in enumerate(LAYERS):
        cuts = data.draw(st.lists(st.integers(1, max(1, layer.spec.elements - 1)), unique=True, max_size=4))
        edges = [0, *sorted(cut for cut in cuts if cut < layer.spec.elements), layer.spec.elements]
        buckets += [Bucket((Slice(tensor, start, stop),), layer.spec.dtype) for start, stop in pairwise(edges)]
    check_buckets(LAYERS, data.draw(st.permutations(buckets)))


@pytest.fixture
def moody(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A schedule that makes other buckets whenever it is asked; how many it made."""
    registry.names("schedules")
    monkeypatch.setitem(registry._entries, "schedules", dict(registry._entries["schedules"]))
    asked, made = count(1), []

    @registry.register("schedules", "moody")
    @dataclass(frozen=True)
    class Moody(Fixed):
        def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:
            made.append(4 * next(asked))
            return Fixed(made[-1]).buckets(layers, cost)  # type: ignore[arg-type]

    return made


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=2)"])
def test_rank_0_decides_and_servers_hear_of_it(group: Any, moody: list[int], strategy: str) -> None:
    layers = [Layer(Spec(f"w{index}", (index + 1,)), 0.5, 0.25) for index in range(6)]
    found: list[Layout] = group(f"{strategy} schedule=moody", 3, lambda session: decide_layout(session, layers))
    assert len(found) == (5 if strategy == "ps(servers=2)" else 3)
    buckets = tuple(Fixed(moody[-1]).buckets(layers))  # type: ignore[arg-type]
    assert set(found) == {Layout(tuple(layers), buckets, (0.0,) * len(buckets))}


def of_this_model(result: Any) -> Any:
    """A schedule that gives something else for the model of these tests."""

    def buckets(self: Fixed, layers: Sequence[Layer], cost: Any = None) -> Any:  # noqa: ARG001
        return result(cost) if tuple(layers) == LAYERS else []

    return buckets


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1)"])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"buckets": of_this_model(lambda _: [])}, "'a' is in no bucket"),
        ({"buckets": of_this_model(lambda cost: cost(1))}, "TypeError: 'NoneType' object is not callable"),
        ({"priority": lambda *_: "first"}, "ValueError: could not convert string to float: 'first'"),
        ({"priority": lambda *_: math.nan}, "ValueError: Out of range float values are not JSON compliant"),
    ],
)
def test_what_rank_0_cannot_lay_out_is_an_error_on_all(
    group: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str, strategy: str
) -> None:
    for name, value in changes.items():
        monkeypatch.setattr(Fixed, name, value)

    def body(session: Session) -> str:
        with pytest.raises(UsageError) as caught:
            decide_layout(session, LAYERS)
        return str(caught.value)

    (found,) = set(group(strategy, 2, body))
    assert found.startswith(f"schedule=fixed: {says}")


def test_numbers_of_numpy_and_generators_are_buckets_too(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def buckets(self: Fixed, layers: Sequence[Layer], cost: Cost | None = None) -> Any:  # noqa: ARG001
        for tensor, layer in enumerate(layers):
            edges = np.linspace(0, layer.spec.elements, 3).astype(int)
            yield Bucket(tuple(Slice(tensor, start, stop) for start, stop in pairwise(edges)), layer.spec.dtype)

    monkeypatch.setattr(Fixed, "buckets", buckets)
    found = group("ring", 2, lambda session: decide_layout(session, LAYERS))
    assert found[0] == found[1]
    assert len(found[0].buckets) == len(LAYERS)


COST = LinearCost(1e-3, 1e-9)


def said(**changes: Any) -> bytes:
    """What rank 0 tells of a layout, but for these."""
    plain = Layout(LAYERS, tuple(WHOLE), (0.0, 0.0)).plain() | {"passed": [0, 0, False]}
    return json.dumps(plain | changes).encode()


NONSENSE = [
    b"",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b'{"buckets": 1}',
    b'{"buckets": [], "priorities": [], "times_s": []}',
    said(priorities=[1.0]),
    said(priorities=["nan", 0]),
    said(priorities=[1e400, 0]),
    said(times_s=[]),
    said(times_s=[[0, 10**400]] * 4),
    said(times_s=[["nan", 0]] * 4),
    said(passed=[0, 0]),
    said(chosen={"schedule": "fixed"}),
    said(chosen={"schedule": "no such", "reason": "", "cost": None}),
    said(chosen={"schedule": "priority(slice=0B)", "reason": "", "cost": None}),
    said(chosen={"schedule": "fixed", "reason": "", "cost": ["nan", 0]}),
    said(chosen={"schedule": "fixed", "reason": "", "cost": [1]}),
    said(passed=[-1, 0, 0]),
    said(passed=[1e9, 0, 0]),
    said(passed=[1 << 70, 0, 0]),
    said(buckets=[["float64", [[2, 0.0, 5.0]]], ["float32", [[3, 0, 0], [1, 0, 6], [0, 0, 4]]]]),
    said(buckets=[["float64", [[2, False, 5]]], ["float32", [[3, 0, 0], [1, 0, 6], [0, 0, 4]]]]),
]


@pytest.mark.parametrize("told", NONSENSE, ids=lambda told: repr(told[:20]))
@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1)"])
def test_what_a_broken_rank_0_tells_is_named(group: Any, told: bytes, strategy: str) -> None:
    def body(session: Session) -> None:
        if session.index == 0:
            session.everyone.tell(told, "telling the buckets")
            return
        with pytest.raises(ProtocolError, match=r"telling the buckets: what rank 0.* makes no sense") as caught:
            decide_layout(session, LAYERS)
        assert caught.value.rank == 0

    group(strategy, 2, body)


@given(st.data())
def test_a_layout_is_what_its_plain_values_say(data: st.DataObject) -> None:
    times = st.floats(0, 1e3)
    layers = tuple(replace(layer, forward_s=data.draw(times), backward_s=data.draw(times)) for layer in LAYERS)
    known = Layout(layers, tuple(data.draw(st.permutations(WHOLE))), (data.draw(st.floats(-9, 9)), 0.0))
    assert read_layout(LAYERS, json.loads(json.dumps(known.plain()))) == known
    chosen = replace(known, schedule="wait_free", reason="because", cost=data.draw(st.sampled_from((COST, None))))
    assert read_layout(LAYERS, json.loads(json.dumps(chosen.plain()))) == chosen
    wrong = known.plain() | {"priorities": [1.0]}
    with pytest.raises(ValueError, match="1 priorities of 2 buckets"):
        read_layout(LAYERS, wrong)


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1)"])
def test_a_schedule_that_does_not_go_with_the_strategy_is_named(group: Any, strategy: str) -> None:
    """Rank 0 tells one that it could not have chosen."""
    plain = {"schedule": "split", "reason": "", "cost": None}

    def body(session: Session) -> None:
        if session.index == 0:
            session.everyone.tell(said(chosen=plain), "telling the buckets")
            return
        with pytest.raises(ProtocolError, match="schedule=split exchanges in two phases"):
            decide_layout(session, LAYERS)

    group(f"{strategy} codec=int8", 2, body)


def test_a_chosen_schedule_is_told_and_kept_where_no_other_can_be(group: Any, caplog: Any) -> None:
    """What is chosen counts on rank 0; a choice that fails leaves the layout that there is, with its schedule."""

    def body(session: Session) -> Layout:
        def choose(lay: Any) -> Layout:
            assert session.rank == 0
            strategy = Strategy.parse("ring schedule=wait_free transport=inproc")
            return replace(lay(strategy), schedule="wait_free", reason="because", cost=COST)

        def fail(_: Any) -> Layout:
            raise OSError("no clock")

        found = decide_layout(session, LAYERS, choose=choose)
        assert found.strategy_in(session.strategy).schedule.name == "wait_free"
        assert decide_layout(session, found.layers, choose=fail, before=found) == found
        with pytest.raises(UsageError, match="no clock"):
            decide_layout(session, found.layers, choose=fail)
        return found

    first, second = group("ring", 2, body)
    assert first == second
    assert (first.schedule, first.reason, first.cost, len(first.buckets)) == ("wait_free", "because", COST, 4)
    assert "no clock; buckets stay as they were" in caplog.text


def test_a_choice_that_fails_says_at_which_schedule(group: Any, caplog: Any) -> None:
    before = Layout(LAYERS, tuple(WHOLE), (0.0, 0.0), "merged", "because", COST)

    def choose(lay: Any) -> Layout:
        found: Layout = lay(Strategy.parse("ring schedule=wait_free transport=inproc"))
        return found

    def refuse(_: Sequence[Bucket]) -> None:
        raise UsageError("they are too many")

    def body(session: Session) -> Layout:
        return decide_layout(session, LAYERS, choose=choose, before=before, fits=refuse)

    assert group("ring", 2, body) == [before] * 2
    assert "schedule=auto, at wait_free: they are too many; buckets stay as they were" in caplog.text
