"""Pushes that are updates by themselves, simulated: throughput and staleness as the theory of each mode says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.nouns import Spec
from syncline.strategy.strategy import Strategy
from syncline.workloads import Speed, Trace
from syncline.workloads._trace import TracedLayer
from syncline_bench.predict.iterations import simulate
from syncline_bench.predict.models import Model, traced
from syncline_bench.predict.networks import inline
from syncline_bench.predict.settings import Iteration, setting_of

LAYERS = tuple(TracedLayer(f"layer {number}", (Spec("weight", (1000,)),), 0.01, 0.02) for number in range(4))
EVEN = traced("test", Trace("test", LAYERS), 8)
SLOW = replace(EVEN, speed=Speed(slow_rank=1, slowdown=3.0))
STALLS = replace(EVEN, speed=Speed(jitter=1.0))
FREE = inline("between.alpha=0s,between.beta=0s")


def found(text: str, of: Model, workers: int = 4, network: str = "") -> Iteration:
    cluster = inline(network) if network else FREE
    return simulate(setting_of(Strategy.parse(text), cluster, workers), of)


@pytest.mark.parametrize("schedule", ["wait_free", "fifo", "priority(slice=4KiB)"])
def test_asynchronous_workers_together_do_what_each_can_do_alone(schedule: str) -> None:
    one = found(f"ps(servers=1) sync=asp schedule={schedule}", EVEN, 1)
    assert one.iteration_s == pytest.approx(EVEN.computing_s)
    four = found(f"ps(servers=1) sync=asp schedule={schedule}", SLOW)
    assert 4 / four.iteration_s == pytest.approx((3 + 1 / 3) / EVEN.computing_s, rel=0.05)
    assert max(four.staleness) > 10


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_bound_on_staleness_holds_and_one_slow_worker_is_waited_for_as_without_it(bound: int) -> None:
    ssp, bsp = found(f"ps(servers=1) sync=ssp(staleness={bound})", SLOW), found("ps(servers=1)", SLOW)
    assert max(ssp.staleness) == bound
    assert ssp.iteration_s == pytest.approx(bsp.iteration_s, rel=0.02)


def test_stalls_are_evened_out_by_a_bound_and_by_a_backup_worker() -> None:
    bsp, ssp, asp = (found(f"ps(servers=1) sync={mode}", STALLS) for mode in ("bsp", "ssp(staleness=3)", "asp"))
    backup = found("ps(servers=1) sync=bsp(backup=1)", STALLS)
    assert asp.iteration_s < ssp.iteration_s < backup.iteration_s < bsp.iteration_s
    assert bsp.iteration_s > 1.25 * ssp.iteration_s


def test_a_server_that_all_push_to_is_the_bottleneck_and_several_share_it() -> None:
    network = "between.alpha=0s,between.beta=1e-5s"  # 0.16 s for a worker's 16 KB, in 0.12 s of computing
    one, two, eight = (found(f"ps(servers={servers}) sync=asp", EVEN, 4, network) for servers in (1, 2, 8))
    assert one.busy_s["port"] == pytest.approx(4 * 0.16, rel=0.02)
    assert 4 * 0.16 <= one.iteration_s < 0.12 + 2 * 4 * 0.16
    assert 2 * 0.16 <= two.iteration_s < one.iteration_s / 1.5
    assert eight.iteration_s < two.iteration_s


@pytest.mark.parametrize("mode", ["asp", "ssp(staleness=2)", "bsp(backup=1)"])
def test_more_buckets_than_a_schedule_lets_fly_are_pushed_all_the_same(mode: str) -> None:
    many = tuple(TracedLayer(f"layer {number}", (Spec("weight", (100,)),), 0.01, 0.02) for number in range(20))
    of = traced("many", Trace("many", many), 8)
    one = found(f"ps(servers=2) sync={mode} schedule=wait_free", of, 4, "between.alpha=1us,between.beta=1ns")
    assert one.iteration_s == pytest.approx(of.computing_s, rel=0.05)
    assert {"port", "back", "inside", "cores", "serving"} <= set(one.busy_s)


def test_ranks_of_a_host_share_its_port_and_messages_take_an_owners_time() -> None:
    network = "between.alpha=0s,between.beta=1e-5s"
    apart = found("ps(servers=8) sync=asp", EVEN, 4, network)
    setting = setting_of(Strategy.parse("ps(servers=8) sync=asp"), inline(network), 4, 4)
    assert simulate(setting, EVEN).iteration_s > 1.5 * apart.iteration_s
    software = found("ps(servers=1) sync=asp schedule=fifo", EVEN, 4, "between.alpha=0s,between.beta=0s,message=50ms")
    assert software.busy_s["serving"] == pytest.approx(4 * 2 * 0.05, rel=0.02)


def test_more_workers_than_can_be_simulated_in_good_time_are_refused() -> None:
    with pytest.raises(UsageError, match="up to 128"):
        found("ps(servers=1) sync=asp", EVEN, 129)


def test_updates_and_copies_take_the_owners_time_one_after_the_other() -> None:
    network = "between.alpha=0s,between.beta=0s,update=1e-5s"
    one = found("ps(servers=1) sync=asp", EVEN, 4, network)
    assert one.busy_s["serving"] == pytest.approx(4 * 0.16, rel=0.02)
    assert one.iteration_s == pytest.approx(4 * 0.16, rel=0.1)


def test_payloads_are_pushed_and_updates_pulled_where_they_are_less() -> None:
    network = "between.alpha=0s,between.beta=1e-5s"
    dense, coded = (found(f"ps(servers=1) sync=asp{codec}", EVEN, 2, network) for codec in ("", " codec=int8"))
    assert coded.iteration_s < dense.iteration_s / 1.5


@given(st.floats(1e-9, 1e-5), st.floats(0, 1e-5), st.sampled_from(["asp", "ssp(staleness=2)", "bsp(backup=1)"]))
@settings(max_examples=15)
def test_no_worker_is_faster_than_it_computes_and_every_run_is_the_same(beta: float, update: float, mode: str) -> None:
    network = f"between.alpha=1e-5s,between.beta={beta}s,update={update}s"
    one = found(f"ps(servers=1) sync={mode}", EVEN, 3, network)
    assert one.iteration_s >= max(EVEN.computing_s, one.busy_s["serving"]) * (1 - 0.1)
    assert one.exposed_s >= 0
    assert one == found(f"ps(servers=1) sync={mode}", EVEN, 3, network)
