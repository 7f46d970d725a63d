"""Predicted iterations against those that one computes by hand, and against what no link can beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from syncline.costs.iteration import IterationTimes, Spent, VirtualLink, predict_iteration
from syncline.costs.plans import LinearCost
from syncline.engine.step import BucketPhase, Submit
from syncline.errors import UsageError
from syncline.nouns import Bucket, Layer, Spec
from syncline.schedules import Schedule
from syncline.strategy.grammar import read_part
from syncline.strategy.words import bind_word, build
from syncline.sync import SyncMode
from syncline.sync.bsp import Bsp
from syncline.testing.schedules import Every


class Laid(NamedTuple):
    buckets: Sequence[Bucket]
    priorities: Sequence[float]


def schedule(text: str) -> Schedule:
    found: Schedule = build("schedules", bind_word("schedule", read_part(text)))
    return found


def predicted(
    chosen: Schedule | str, layers: Sequence[Layer], cost: LinearCost, mode: SyncMode | None = None
) -> IterationTimes:
    one = schedule(chosen) if isinstance(chosen, str) else chosen
    buckets = one.buckets(layers, cost)
    laid = Laid(buckets, [one.priority(bucket) for bucket in buckets])
    return predict_iteration(layers, laid, one, mode or Bsp(), cost)


def alike(count: int, elements: int, forward_s: float, backward_s: float) -> list[Layer]:
    return [Layer(Spec(f"layer {number}", (elements,)), forward_s, backward_s) for number in range(count)]


ONE_PER_ELEMENT = LinearCost(0.0, 0.25)  # of four bytes
TWO = alike(2, 3, 1.0, 1.0)  # 2 s forward, 2 s backward, and 3 s each on the link


@pytest.mark.parametrize(
    ("text", "whole_s"),
    [
        ("fifo", 10.0),  # 2 backward, 6 on the link, 2 forward
        ("wait_free", 9.0),  # the last layer's from 1 to 4, the first one's to 7
        ("fixed", 10.0),  # one bucket
        ("merged", 9.0),
        # The first layer's overtakes from 2 to 5, when it goes forward; the last one's is done at 7.
        ("priority(slice=12B)", 8.0),
        # Reduced from 1 to 2, 2 to 3.5, gathered to 5, when the first layer goes; the last one's reduced to 5.5, to 7.
        ("split(slice=12B)", 8.0),
        ("delayed(bucket=1B)", 6.0),  # nothing waits but for the link
    ],
)
def test_schedules_take_what_one_computes_by_hand(text: str, whole_s: float) -> None:
    found = predicted(text, TWO, ONE_PER_ELEMENT)
    assert found == IterationTimes(pytest.approx(whole_s), pytest.approx(4.0))
    assert found.exposed_s == pytest.approx(whole_s - 4.0)


@dataclass(frozen=True)
class WaitFree:
    """As ``wait_free``, with as many in flight as one likes."""

    in_flight: int
    release = "ready"
    phases = "whole"
    apply = "step"
    measures = 0

    def buckets(self, layers: Sequence[Layer], cost: object = None) -> list[Bucket]:  # noqa: ARG002
        return schedule("wait_free").buckets(layers)

    def priority(self, bucket: Bucket) -> float:  # noqa: ARG002
        return 0.0


@pytest.mark.parametrize(
    ("in_flight", "whole_s"),
    [
        (4, 3 + 12.0),  # handed over at 2, 4 and 6; a second later they may go: from 3, 6 and 9 on
        (2, 3 + 12.0),  # the third waits until 6, and its latency passes beside the second
        (1, 3 + 14.0),  # from 2, 6 and 10 on, each with its latency
    ],
)
def test_latencies_pass_beside_each_other_as_far_as_the_schedule_lets_them(in_flight: int, whole_s: float) -> None:
    layers = alike(3, 3, 1.0, 2.0)
    assert predicted(WaitFree(in_flight), layers, LinearCost(1.0, 0.25)).whole_s == pytest.approx(whole_s)


@pytest.mark.parametrize(
    ("text", "whole_s"),
    [("delayed(bucket=1B)", 40.0), *((text, 41.5) for text in ("wait_free", "priority(slice=4B)", "split(slice=4B)"))],
)
def test_a_computation_that_hides_all_but_the_last_exchange_is_what_an_iteration_takes(
    text: str, whole_s: float
) -> None:
    """The last one that backward produces is needed first."""
    layers = alike(4, 1, 5.0, 5.0)
    assert predicted(text, layers, LinearCost(0.5, 0.25)).whole_s == pytest.approx(whole_s)


def test_a_sync_mode_that_exchanges_in_every_second_step_waits_in_these_only() -> None:
    found = predicted("fifo", TWO, ONE_PER_ELEMENT, Every(2))
    assert found == IterationTimes(pytest.approx(4.0 + 6.0 / 2), pytest.approx(4.0))


models = st.lists(
    st.tuples(st.integers(1, 1 << 20), st.floats(0, 0.01), st.floats(0, 0.01)), min_size=1, max_size=8
).map(lambda rows: [Layer(Spec(str(i), (size,)), forward, back) for i, (size, forward, back) in enumerate(rows)])
costs = st.builds(LinearCost, st.floats(0, 0.01), st.floats(1e-12, 1e-7))
texts = st.sampled_from(
    ["fifo", "wait_free", "fixed(bucket=64KiB)", "merged", "priority(slice=64KiB)", "split(slice=64KiB)", "delayed"]
)


@given(models, costs, texts)
def test_no_iteration_is_faster_than_its_computation_or_its_link(
    layers: list[Layer], cost: LinearCost, text: str
) -> None:
    found, fifo = predicted(text, layers, cost), predicted("fifo", layers, cost)
    nbytes = sum(layer.spec.nbytes for layer in layers)
    assert found.whole_s >= max(found.computing_s, cost.per_byte_s * nbytes) * (1 - 1e-9)
    assert fifo.whole_s == pytest.approx(found.computing_s + cost(nbytes))
    assert predicted(text, layers, cost) == found


@given(models, costs)
def test_where_exchanges_go_one_by_one_the_merged_buckets_end_soonest(layers: list[Layer], cost: LinearCost) -> None:
    """Two under way hide a latency at best, so that what it minimises is no less than what is predicted of it.

    Layers without any time are those before the first measurement.
    """
    assume(any(layer.backward_s for layer in layers))
    assert predicted("merged", layers, cost).whole_s <= predicted("fifo", layers, cost).whole_s * (1 + 1e-9)


def test_a_link_that_is_never_given_what_is_waited_for_says_so() -> None:
    link = VirtualLink(lambda _: Spent(0.0, 1.0), 1)
    first = BucketPhase(0, 0, "reduce_scatter")
    link.submit(0.0, Submit(BucketPhase(0, 0, "all_gather"), 0.0, after=first))
    with pytest.raises(UsageError, match="no operation in progress completes it"):
        link.carry_until(BucketPhase(0, 0, "all_gather"))
    link.submit(2.0, Submit(first, 0.0))
    assert link.carry_until(BucketPhase(0, 0, "all_gather")) == 4.0
