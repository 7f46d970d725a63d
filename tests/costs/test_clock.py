"""Virtual resources against what one computes by hand, and what is conserved whatever uses them."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.costs.clock import Chains, Clock, Hindered, Operations, Resource, Share, Stage
from syncline.engine.step import BucketPhase, Submit


class Use(NamedTuple):
    at_s: float
    seconds: float
    priority: float = 0.0
    lane: str = ""


def ends(uses: list[Use], capacity: float = 1.0) -> tuple[list[float], Resource]:
    """When each is over."""
    clock, found = Clock(), [-1.0] * len(uses)
    resource = Resource(clock, capacity)

    def over(number: int) -> None:
        found[number] = clock.now_s

    for number, use in enumerate(uses):
        begin = partial(resource.use, use.seconds, partial(over, number), priority=use.priority, lane=use.lane)
        clock.at(use.at_s, begin)
    clock.run()
    return found, resource


@pytest.mark.parametrize(
    ("uses", "capacity", "expected"),
    [
        ([Use(0, 2), Use(1, 1)], 1.0, [2, 3]),
        ([Use(0, 2, 1), Use(1, 1, 0)], 1.0, [3, 2]),  # interrupted for the more urgent one
        ([Use(0, 2, lane="a"), Use(0, 2, lane="b")], 1.0, [4, 4]),
        ([Use(0, 2, lane="a"), Use(0, 1, lane="b")], 1.0, [3, 2]),
        ([Use(0, 2, lane="a"), Use(0, 1, lane="b")], 2.0, [2, 1]),
        ([Use(0, 1)], 0.5, [2]),
        ([Use(0, 2, lane="a"), Use(0, 2, lane="a"), Use(0, 2, lane="b")], 1.5, [8 / 3, 14 / 3, 8 / 3]),
        ([Use(0, 0), Use(0, 1)], 1.0, [0, 1]),
    ],
)
def test_jobs_end_when_one_computes_by_hand(uses: list[Use], capacity: float, expected: list[float]) -> None:
    assert ends(uses, capacity)[0] == pytest.approx(expected)


def test_a_lane_that_stands_for_several_takes_as_much_and_whoever_shares_is_held_up() -> None:
    clock, found = Clock(), dict.fromkeys(("workers", "server"), 0.0)
    cores = Resource(clock, 2.0)
    shares = {"workers": Share(cores, "workers", 3), "server": Share(cores, "server")}

    def over(name: str) -> None:
        found[name] = clock.now_s

    for name, seconds in (("workers", 2.0), ("server", 2.0)):
        shares[name].use(seconds, partial(over, name))
    clock.run()
    # Four want two cores, and each gets a half.
    assert found == pytest.approx({"workers": 4.0, "server": 4.0})
    shares["workers"].use(2.0, partial(over, "workers"))
    clock.run()
    assert found["workers"] == pytest.approx(4.0 + 3.0)  # three want two
    assert shares["workers"].busy_s == pytest.approx(4.0)


jobs = st.lists(
    st.builds(Use, st.floats(0, 10), st.floats(0, 3), st.sampled_from([0.0, 1.0]), st.sampled_from("abc")),
    min_size=1,
    max_size=12,
)


@given(jobs, st.sampled_from([0.3, 1.0, 2.0, 10.0]))
def test_what_is_served_is_what_was_asked_for_and_a_resource_never_does_more_than_it_can(
    uses: list[Use], capacity: float
) -> None:
    found, resource = ends(uses, capacity)
    total_s, last_s = sum(use.seconds for use in uses), max(found)
    assert resource.busy_s == pytest.approx(total_s)
    assert total_s <= capacity * (last_s - min(use.at_s for use in uses)) * (1 + 1e-9) + 1e-9
    for use, end_s in zip(uses, found, strict=True):
        assert end_s >= use.at_s + use.seconds / min(1.0, capacity) - 1e-9
    assert ends(uses, capacity)[0] == found


def test_an_operation_is_done_when_all_its_chains_are_and_its_stages_follow_one_another() -> None:
    clock = Clock()
    resources = {"port": Resource(clock), "cores": Resource(clock)}
    chains = [[Stage(None, 1), Stage("port", 2), Stage("cores", 3)], [Stage("cores", 4)], []]
    operations = Operations(clock, Chains(clock, resources, lambda _: chains), 1)
    first, second = (BucketPhase(0, bucket, "allreduce") for bucket in (0, 1))
    done: list[BucketPhase] = []
    for operation in (first, second):
        operations.submit(Submit(operation, 0.0))
        operations.when_done(operation, partial(done.append, operation))
    clock.run()
    # The cores are busy to 4, then until 7 with what has come at 3; the second begins when the first is done.
    assert operations.done_at == pytest.approx({first: 7, second: 14})
    assert done == [first, second]
    operations.when_done(first, partial(done.append, first))
    assert done[-1] == first


def test_nothing_begins_before_operations_are_open() -> None:
    clock = Clock()
    operations = Operations(clock, Chains(clock, {"port": Resource(clock)}, lambda _: [[Stage("port", 1)]]), 4)
    operations.opens_s = 5
    operations.submit(Submit(BucketPhase(0, 0, "allreduce"), 0.0))
    clock.run()
    assert clock.now_s == 6


def hindered(factor: float, begin_s: float, seconds: float, others: list[Use]) -> tuple[float, float]:
    """When a job ends beside the lane "engine" of a shared core, and for how long that lane was served meanwhile."""
    clock = Clock()
    share = Share(Resource(clock), "worker")
    layers = Hindered(clock, share, "engine", factor)
    ended = [-1.0]

    def over() -> None:
        ended[0] = clock.now_s

    for other in others:
        clock.at(other.at_s, partial(share.use, other.seconds, lambda: None, lane=other.lane))
    clock.at(begin_s, partial(layers.use, seconds, over))
    clock.run(over=lambda: ended[0] >= 0)
    return ended[0], layers.busy_s


@pytest.mark.parametrize(
    ("factor", "others", "expected"),
    [
        (0.5, [Use(1, 2, lane="engine")], 5.0),
        (2.0, [Use(1, 2, lane="engine")], 8.0),  # what is gained before and after makes up for what is lost
        (1.0, [Use(0, 3, lane="engine")], 7.0),
        (0.5, [Use(1, 2, lane="training")], 4.0),
        (0.5, [Use(1, 1, lane="engine"), Use(1, 1, lane="training")], 4.5),  # both get half of the core for two seconds
        (0.5, [Use(9, 1, lane="engine")], 4.0),
    ],
)
def test_a_job_loses_a_part_of_what_the_other_lane_is_served(factor: float, others: list[Use], expected: float) -> None:
    assert hindered(factor, 0.0, 4.0, others) == (pytest.approx(expected), pytest.approx(expected))


@given(
    st.floats(0, 3),
    st.floats(0.1, 5),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 2)), max_size=6),
)
def test_nothing_is_lost_but_the_part_of_what_was_served(
    factor: float, seconds: float, others: list[tuple[float, float]]
) -> None:
    """All of the other lane counts that ends before the job does; a lane serves its jobs one after the other."""
    end_s, _ = hindered(factor, 0.0, seconds, [Use(at_s, long_s, lane="engine") for at_s, long_s in others])
    free_s = served_s = 0.0
    for at_s, long_s in sorted(others):
        begin_s = max(free_s, at_s)
        free_s = begin_s + long_s
        served_s += max(0.0, min(free_s, end_s) - begin_s)
    assert end_s == pytest.approx(seconds + factor * served_s, abs=1e-6)
