"""What an owner has: how evenly weights lie on owners, and what an optimizer keeps for every worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from syncline.nouns import Bucket, Group, Slice, numpy_dtype
from syncline.serving.protocol import ALL
from syncline.serving.records import Elements, State
from syncline.serving.shard import Groups, Holding, Shard, gathered, parted, planned
from syncline.strategy.strategy import Strategy


def of(*values: float, dtype: str = "float32") -> Elements:
    return Elements.of(np.array(values, numpy_dtype(dtype)))


def said(state: State) -> dict[str, Any]:
    """In what can be compared."""
    return {
        key: (value.dtype, value.shape, value.data.tobytes()) if isinstance(value, Elements) else value
        for key, value in state.items()
    }


def test_each_workers_state_comes_back() -> None:
    """Also of one that has pushed nothing."""
    states: list[State] = [{"m": of(1, 2), "step": 3}, {}, {"m": of(5, -2), "step": 1}]
    assert [said(one) for one in parted(gathered(states), 3)] == [said(one) for one in states]
    assert gathered([{}, {}]) == {}
    assert parted({}, 2) == [{}, {}]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_other_numbers_of_workers_begin_with_the_mean(dtype: str, workers: int) -> None:
    states: list[State] = [{"m": of(value, 0, dtype=dtype), "step": 1 + value} for value in range(3)]
    found = parted(gathered(states), workers)
    assert [said(one) for one in found] == [said({"m": of(1, 0, dtype=dtype), "step": 1})] * workers
    memories = {one["m"].data.ctypes.data for one in found if isinstance(one["m"], Elements)}
    assert len(memories) == workers


@pytest.mark.parametrize("newer", [{"m": of(2, 0.5)}, {"step": 4}, {"v": of(1, 1)}])
def test_each_workers_state_does_not_count_where_an_optimizer_without_workers_has_gone_on(newer: State) -> None:
    """It carries keys that it does not know along, and changes its own."""
    states: list[State] = [{"m": of(1, 2), "step": 3}, {"m": of(5, -2), "step": 1}]
    later = gathered(states) | newer
    assert [said(one) for one in parted(later, 2)] == [said({"m": of(3, 0), "step": 3} | newer)] * 2


def test_what_has_no_mean_is_one_workers() -> None:
    states: list[State] = [{"seen": of(1, 0, dtype="bool"), "size": of(1)}, {"seen": of(0, 0, dtype="bool"), "size": 2}]
    assert said(parted(gathered(states), 1)[0]) == said(states[0])


@dataclass
class Counts:
    """An optimizer that adds what it is pushed up, and gives the weights the sum."""

    holdings: Sequence[Holding]
    sums: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sums = [np.zeros_like(held.weights) for held in self.holdings]

    def squared_norm(self) -> float:
        raise NotImplementedError

    def apply(self, groups: Groups, scale: float) -> None:  # noqa: ARG002
        for held, total in zip(self.holdings, self.sums, strict=True):
            total += scale * held.gradient
            held.weights[:] = total

    def state(self) -> list[State]:
        return [{"sum": Elements.of(total)} for total in self.sums]

    def load(self, states: Sequence[State]) -> None:
        for total, state in zip(self.sums, states, strict=True):
            value = state.get("sum")
            total[:] = value.data.view(total.dtype) if isinstance(value, Elements) else 0


@pytest.mark.parametrize("apart", [False, True])
def test_pushes_go_by_their_own_workers_state(apart: bool) -> None:
    """Bucket by bucket too; a shard with that state goes on from it, also when its slices are cut otherwise."""
    weights, gradient = np.zeros(5), np.array([1.0, 2, 3, 4, 5])
    whole = Slice(0, 0, 5)
    holdings = [
        Holding(Slice(0, 0, 2), weights[:2], gradient[:2], 0),
        Holding(Slice(0, 2, 5), weights[2:], gradient[2:], 1),
    ]
    shard = Shard(holdings, Counts, [], apart=apart, workers=2)
    for worker, times in ((0, 1.0), (1, 10.0), (0, 1.0), (1, 10.0), (1, 10.0)):
        for bucket in (1, 0) if apart else (ALL,):
            shard.apply(bucket, [], times, worker)
    np.testing.assert_array_equal(weights, 30 * gradient)
    other = Shard([Holding(whole, np.zeros(5), gradient)], Counts, shard.state(), workers=2)
    other.apply(ALL, [], 1.0, 0)
    np.testing.assert_array_equal(other.holdings[0].weights, 3 * gradient)
    merged = Shard([Holding(whole, np.zeros(5), gradient)], Counts, shard.state())
    assert {record.key for record in merged.state()} == {"sum"}
    merged.apply(ALL, [], 0.0)
    np.testing.assert_array_equal(merged.holdings[0].weights, 16 * gradient)


def test_a_broken_step_leaves_the_weights_and_the_state_of_the_step_before() -> None:
    """Bucket 0 has made the third update, bucket 1 has not: the second one is known, the others are not."""
    weights, gradient = np.zeros(5), np.array([1.0, 2, 3, 4, 5])
    cuts = Slice(0, 0, 2), Slice(0, 2, 5)
    holdings = [
        Holding(cut, weights[cut.start : cut.stop], gradient[cut.start : cut.stop], i) for i, cut in enumerate(cuts)
    ]
    shard = Shard(holdings, Counts, [], apart=True)
    assert {record.key: record.value.data.any() for record in shard.after(7, 7) or []} == {
        "weights": False,
        "sum": False,
    }  # type: ignore[union-attr]
    for clock, bucket in ((8, 0), (8, 1), (9, 1), (9, 0), (10, 0)):
        assert shard.after(clock - 1, 7) is not None
        shard.keep(bucket, clock)
        shard.apply(bucket, [], 1.0)
    assert (shard.after(8, 7), shard.after(10, 7)) == (None, None)
    for record in shard.after(9, 7) or []:
        assert isinstance(record.value, Elements)
        np.testing.assert_array_equal(record.value.array, 2 * gradient[record.slice.start : record.slice.stop])
    assert len(shard.after(9, 7) or []) == 4


@pytest.mark.parametrize(("schedule", "network"), [*zip(["fixed", "priority"], cycle(["googlenet", "resnet50"]))])
def test_owners_share_the_weights_evenly(network: str, schedule: str) -> None:
    """Within 2 % of each other, and nothing is left out, for 65 of them too."""
    pytest.importorskip("torch")
    from syncline_bench.workloads import layers, load

    found = layers(load(f"synthetic:{network}").model(0))
    made = Strategy.parse(f"ps schedule={schedule}").schedule_object()
    buckets = list(made.buckets(found))
    arrays = [np.broadcast_to(np.float32(0), bucket.elements) for bucket in buckets]
    for servers in (1, 2, 3, 8, 65):
        for on, own in (("ranks", servers), ("workers", 0)):
            strategy = Strategy.parse(f"ps(servers={servers}, on={on})")
            push, _ = strategy.halves(Group(max(4, servers), own))
            shares = [
                sum(held.slice.elements for held in planned(buckets, arrays, arrays, push.owners, owner))
                for owner in push.owners
            ]
            assert sum(shares) == sum(layer.spec.elements for layer in found)
            assert max(shares) <= 1.02 * min(shares)


def test_the_shares_of_a_hosts_workers_do_not_cut_what_an_owner_has() -> None:
    bucket = Bucket((Slice(0, 0, 1000), Slice(1, 0, 500)), "float32")
    array = np.zeros(1500, np.float32)
    for text in ("ps(servers=2, local=on)", "ps(servers=2)"):
        push, _ = Strategy.parse(text).halves(Group(4, 2, (0, 0, 0, 1)))
        found = [[held.slice for held in planned([bucket], [array], [array], push.owners, owner)] for owner in (4, 5)]
        assert found == [[Slice(0, 0, 750)], [Slice(0, 750, 1000), Slice(1, 0, 500)]]
