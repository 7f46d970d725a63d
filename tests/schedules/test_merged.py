"""Merged buckets: nothing ends sooner than the best of all ways to cut, which small models have few of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from syncline.costs.plans import LinearCost, fit_line
from syncline.nouns import Bucket, Layer, Spec
from syncline.schedules import PushAndPull
from syncline.schedules.fixed import Fifo, Fixed, WaitFree
from syncline.schedules.merged import Merged

LAYERS = st.lists(
    st.builds(
        lambda elements, dtype, backward_s: (elements, dtype, backward_s),
        st.integers(0, 4000),
        st.sampled_from(["float32", "float64"]),
        st.floats(0, 0.02),
    ),
    min_size=1,
    max_size=7,
).map(
    lambda rows: [
        Layer(Spec(f"w{index}", (elements,), dtype), 0.0, backward_s)
        for index, (elements, dtype, backward_s) in enumerate(rows)
    ]
)
COSTS = st.builds(LinearCost, st.floats(1e-6, 1e-2), st.floats(1e-9, 1e-5))


def ends_s(layers: Sequence[Layer], cuts: Sequence[Sequence[Bucket]], cost: LinearCost) -> float:
    """When the last exchange ends: each group of buckets goes when its tensors are there, behind the ones before."""
    end_s = 0.0
    for group in cuts:
        first = min(part.tensor for bucket in group for part in bucket.slices)
        ready_s = sum(layer.backward_s for layer in layers[first:])
        end_s = max(end_s, ready_s) + sum(cost(bucket.nbytes) for bucket in group)
    return end_s


def every_cut(layers: Sequence[Layer]) -> list[list[list[Bucket]]]:
    """All ways to cut the list of tensors, last one first; a piece is a bucket of each element type in it."""
    order = range(len(layers))[::-1]
    found = []
    for count in range(len(layers)):
        for inner in combinations(range(1, len(layers)), count):
            edges = [0, *inner, len(layers)]
            found.append([piece(layers, order[a:b]) for a, b in pairwise(edges)])
    return found


def piece(layers: Sequence[Layer], tensors: Sequence[int]) -> list[Bucket]:
    part = [layers[index] for index in tensors[::-1]]
    return [
        Bucket(tuple(type(one)(tensors[::-1][one.tensor], one.start, one.stop) for one in bucket.slices), bucket.dtype)
        for bucket in Fifo().buckets(part)
    ]


def groups(buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """Buckets of one piece together: those of other element types between which no tensor of another piece lies."""
    found: list[list[Bucket]] = []
    for bucket in buckets:
        tensors = {part.tensor for part in bucket.slices}
        if found and max(tensors) > min(part.tensor for one in found[-1] for part in one.slices):
            found[-1].append(bucket)
        else:
            found.append([bucket])
    return found


def pulled_s(layers: Sequence[Layer], cuts: Sequence[Sequence[Bucket]], cost: PushAndPull) -> float:
    """When the last pull ends: each goes behind its push, the pull before, and the end of backward."""
    pushed_s, end_s, over_s = 0.0, 0.0, sum(layer.backward_s for layer in layers)
    for group in cuts:
        first = min(part.tensor for bucket in group for part in bucket.slices)
        ready_s = sum(layer.backward_s for layer in layers[first:])
        pushed_s = max(pushed_s, ready_s) + sum(cost.push(bucket.nbytes) for bucket in group)
        end_s = max(end_s, pushed_s, over_s) + sum(cost.pull(bucket.nbytes) for bucket in group)
    return end_s


@given(LAYERS, st.builds(PushAndPull, COSTS, COSTS))
def test_no_pull_ends_sooner_where_weights_come_back(layers: list[Layer], cost: PushAndPull) -> None:
    """Beside the pushes that follow, so that what is best is neither by the pushes alone nor by the sum of both."""
    if not any(layer.backward_s for layer in layers):
        layers = [Layer(layer.spec, 0.0, 0.001) for layer in layers]
    best_s = min(pulled_s(layers, cuts, cost) for cuts in every_cut(layers))
    made = Merged().buckets(layers, cost)
    assert pulled_s(layers, groups(made), cost) <= best_s * (1 + 1e-9)


def test_a_pull_that_costs_nothing_changes_nothing() -> None:
    layers = [Layer(Spec(f"w{index}", (400 * index + 1,)), 0.0, 0.001 * (index + 1)) for index in range(12)]
    push = LinearCost(1e-3, 1e-6)
    assert Merged().buckets(layers, PushAndPull(push, LinearCost(0.0, 0.0))) == Merged().buckets(layers, push)


@given(LAYERS, COSTS)
def test_nothing_ends_sooner(layers: list[Layer], cost: LinearCost) -> None:
    if not any(layer.backward_s for layer in layers):
        layers = [Layer(layer.spec, 0.0, 0.001) for layer in layers]
    best_s = min(ends_s(layers, cuts, cost) for cuts in every_cut(layers))
    made = Merged().buckets(layers, cost)
    assert ends_s(layers, groups(made), cost) <= best_s * (1 + 1e-9)


def test_latency_merges_and_bandwidth_does_not() -> None:
    layers = [Layer(Spec(f"w{index}", (1000,)), 0.0, 0.001) for index in range(20)]
    free = Merged().buckets(layers, LinearCost(0.0, 1e-7))
    assert free == WaitFree().buckets(layers)
    dear = Merged().buckets(layers, LinearCost(1.0, 1e-9))
    assert len(dear) == 1
    some = Merged().buckets(layers, LinearCost(0.003, 1e-9))
    assert 1 < len(some) < len(layers)
    assert len(some[-1].slices) < 20 - len(some[-1].slices)


def test_before_anything_is_measured_sizes_double() -> None:
    layers = [Layer(Spec(f"w{index}", (1024,))) for index in range(200)]
    sizes = [bucket.nbytes for bucket in Merged().buckets(layers)]
    assert sizes[:4] == [16 * 1024 * 2**index for index in range(4)]
    assert len(sizes) < len(Fixed(bucket=16 * 1024).buckets(layers))  # type: ignore[arg-type]
    timed = [Layer(layer.spec, 0.0, 0.001) for layer in layers]
    assert Merged().buckets(timed) == Merged().buckets(layers)


def test_cuts_that_cannot_pay_are_not_looked_at() -> None:
    """Where exchanges keep up with backward, those far back are not."""
    asked = 0

    def cost(nbytes: int) -> float:
        nonlocal asked
        asked += 1
        return 2e-5 + 1e-10 * nbytes

    layers = [Layer(Spec(f"w{index}", (50_000,)), 0.0, 1e-4) for index in range(1500)]
    Merged().buckets(layers, cost)
    assert asked < 20 * len(layers)


@given(
    st.just(0.0) | st.floats(1e-9, 1e-2),
    st.just(0.0) | st.floats(1e-11, 1e-6),
    st.lists(st.integers(1, 10**8), min_size=2, max_size=9, unique=True),
)
def test_a_line_is_found_again(base_s: float, per_byte_s: float, sizes: list[int]) -> None:
    """None of its numbers is negative, whatever noise there is."""
    known = LinearCost(base_s, per_byte_s)
    found = fit_line(sizes, [known(size) for size in sizes])
    if base_s == per_byte_s == 0:
        assert found is None
        return
    assert found is not None
    for size in sizes:
        assert abs(found(size) - known(size)) <= 1e-3 * known(size)
    falling = fit_line(sizes, [1 / size for size in sizes])
    assert falling is not None
    assert 0 <= falling.per_byte_s * max(sizes) <= 1e-6  # but for rounding
    assert falling.base_s >= 0
