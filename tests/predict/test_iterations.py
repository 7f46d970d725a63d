"""Iterations on clusters: what follows from times by hand, workers that come together, and workers that push apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_by_one import simulate_one_by_one
from syncline.costs.cluster import Cluster
from syncline.costs.iteration import Batches, Stretch, predict_iteration
from syncline.costs.plans import LinearCost, plan_time
from syncline.engine.step import BucketPhase
from syncline.errors import UsageError
from syncline.nouns import Bucket, Layer, Slice, Spec
from syncline.strategy.strategy import Strategy
from syncline.sync.bsp import Bsp
from syncline_bench.predict.iterations import Together, simulate
from syncline_bench.predict.networks import inline
from syncline_bench.predict.settings import Exchanges, Habits, Iteration, Model, lay_out, model_of, setting_of, traced
from syncline_bench.workloads import Images, Speed, Trace, Workload
from syncline_bench.workloads._trace import TracedLayer

MEGABYTE = 1 << 18


def model(*rows: tuple[int, float, float], batches: Batches | None = None, speed: Speed | None = None) -> Model:
    """Layers of so many elements, forward and backward seconds."""
    layers = [
        TracedLayer(f"layer {number}", (Spec("weight", (elements,)),) if elements else (), forward_s, backward_s)
        for number, (elements, forward_s, backward_s) in enumerate(rows)
    ]
    return traced("test", Trace("test", tuple(layers)), 1, batches or Batches(), speed or Speed())


def network(alpha: float = 0.0, beta: float = 0.25, gamma: float = 0.0, more: str = "") -> Cluster:
    return inline(f"between.alpha={alpha}s,between.beta={beta}s,gamma={gamma}s{more}")


def iteration_s(text: str, cluster: Cluster, of: Model, workers: int = 2, habits: Habits | None = None) -> float:
    return simulate(setting_of(Strategy.parse(text), cluster, workers), of, habits or Habits(tickets=False)).iteration_s


TWO = model((3, 1.0, 1.0), (3, 1.0, 1.0))
"""2 s forward, 2 s backward; a ring of two moves the 12 bytes of a layer in 3 s."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ring schedule=fifo", 10.0),
        ("ring schedule=wait_free", 9.0),
        ("ring schedule=priority(slice=12B)", 8.0),
        ("ring schedule=split(slice=12B)", 8.0),
        ("ring schedule=delayed(bucket=1B)", 6.0),
        ("ring schedule=fifo sync=local(steps=4)", 4.0 + 6.0 / 4),
        ("ring schedule=fifo sync=local(steps=3)", 4.0 + 6.0 / 3),
        ("ring schedule=fifo sync=diloco(steps=50)", 4.0 + 6.0 / 50),
        # Pushed from 3 and from 4 on, which share the port: one to 8, the other to 9; back to 13, and to 14.
        ("ps(servers=2) schedule=wait_free", 14.0),
    ],
)
def test_strategies_take_what_one_computes_by_hand(text: str, expected: float) -> None:
    assert iteration_s(text, network(), TWO) == pytest.approx(expected)


def test_exchanges_may_take_what_was_measured() -> None:
    setting = replace(setting_of(Strategy.parse("ring schedule=wait_free"), network(), 2), measured=lambda _: 5.0)
    assert simulate(setting, TWO, Habits(1, tickets=False)).iteration_s == pytest.approx(3 + 2 * 5.0)
    merged = replace(setting, strategy=Strategy.parse("ring schedule=merged"))
    assert simulate(merged, TWO, Habits(1, tickets=False)).iteration_s == pytest.approx(4 + 5.0)


@pytest.mark.parametrize("text", ["ring codec=int8", "ring schedule=split(slice=12B)", "ps(servers=1)"])
def test_what_was_measured_stands_for_plain_allreduces_only(text: str) -> None:
    setting = replace(setting_of(Strategy.parse(text), network(), 2), measured=lambda _: 5.0)
    with pytest.raises(UsageError, match=r"allreduce.*use (ring|wait_free)"):
        simulate(setting, TWO)


def test_a_layer_without_parameters_takes_time_and_is_never_waited_for() -> None:
    of = model((3, 1.0, 1.0), (0, 5.0, 5.0), (3, 1.0, 1.0))
    assert iteration_s("ring schedule=wait_free", network(), of) == pytest.approx(14 + 3.0)


@pytest.mark.parametrize(("prefetch", "expected"), [(0, 3 + 1 + 4.0), (1, 5.0), (2, 5.0)])
def test_batches_that_are_prepared_ahead_are_loaded_beside_the_rest(prefetch: int, expected: float) -> None:
    of = model((3, 1.0, 1.0), (3, 1.0, 1.0), batches=Batches(3.0, 1.0, prefetch))
    assert iteration_s("ring", network(beta=0.0), of, 1) == pytest.approx(expected)
    slow = replace(of, batches=Batches(30.0, 1.0, prefetch))
    assert iteration_s("ring", network(beta=0.0), slow, 1) == pytest.approx(30.0 + 5.0 * (prefetch == 0))


def test_the_slowest_worker_is_waited_for_and_stalls_add_up_beyond_their_mean() -> None:
    slow = replace(TWO, speed=Speed(slow_rank=1, slowdown=3.0))
    assert iteration_s("ring schedule=fifo", network(), slow) == pytest.approx(3 * 4 + 6.0)
    held_up = replace(TWO, speed=Speed(jitter=1.0))
    alone, four = (iteration_s("ring schedule=fifo", network(beta=0.0), held_up, workers) for workers in (1, 4))
    assert 4.0 < alone < four
    assert four == iteration_s("ring schedule=fifo", network(beta=0.0), held_up, 4)


def test_a_system_that_waits_for_each_exchange_hides_no_latency() -> None:
    of = model(*((3, 1.0, 1.0),) * 4)
    cluster = network(alpha=0.0, more=",between.flight=1s")
    many, one = (
        iteration_s("ring schedule=wait_free", cluster, of, habits=Habits(n, tickets=False)) for n in (None, 1)
    )
    assert one > many


def test_workers_agree_on_a_step_before_anything_of_it_goes() -> None:
    cluster = network(alpha=0.5, beta=0.0)
    with_tickets, without = (
        iteration_s("ring schedule=fifo", cluster, TWO, 3, Habits(tickets=there)) for there in (True, False)
    )
    assert with_tickets == pytest.approx(without)  # they agree while the first layers still compute
    short = model((3, 1.0, 0.0))
    assert iteration_s("ring", cluster, short, 3, Habits()) == pytest.approx(1 + 2 * 0.5 + 4 * 0.5)


def test_ranks_that_share_a_core_take_turns_on_it() -> None:
    busy = network(beta=0.0, more=",update=0.5s,cores=1,per_host=2")
    assert iteration_s("ring schedule=fifo", busy, TWO, 2) == pytest.approx(4 + 2 * 24 * 0.5)
    assert iteration_s("ring schedule=fifo", network(beta=0.0, more=",update=0.5s"), TWO) == pytest.approx(4 + 24 * 0.5)


@pytest.mark.parametrize(
    ("text", "device", "expected"),
    [
        # The thread that moves messages works 24 bytes times 10 ms for a bucket: beside the first layer, then alone.
        ("ring schedule=wait_free", "cpu", 4 + 0.5 * 0.24 + 0.24),
        ("ring schedule=wait_free", "", 4 + 0.24),
        ("ring schedule=wait_free", "cuda", 4 + 0.24),
        ("ring schedule=fifo", "cpu", 4 + 0.48),
    ],
)
def test_layers_lose_time_beside_messages_on_the_device_they_compute_on(
    text: str, device: str, expected: float
) -> None:
    beside = network(beta=0.0, more=",byte_cpu=0.01s,slowdown.cpu=0.5")
    assert iteration_s(text, beside, replace(TWO, device=device)) == pytest.approx(expected)
    uneven = replace(TWO, device=device, speed=Speed(slow_rank=1, slowdown=1 + 1e-9))  # all workers are simulated
    assert iteration_s(text, replace(beside, cores=2), uneven) == pytest.approx(expected)


rows = st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 0.01), st.floats(0, 0.01)), min_size=1, max_size=8)
schedules = st.sampled_from(["fifo", "wait_free", "fixed(bucket=64KiB)", "priority(slice=64KiB)", "split(slice=64KiB)"])


@given(rows, st.floats(0, 0.01), st.floats(1e-12, 1e-7), schedules)
@settings(max_examples=40)
def test_one_port_and_no_latency_is_the_model_that_choices_ask(
    given_rows: list[tuple[int, float, float]], alpha: float, beta: float, schedule: str
) -> None:
    """Messages occupy a port, so that all seconds of a ring of two are its port's."""
    of = model(*given_rows)
    setting = setting_of(Strategy.parse(f"ring schedule={schedule}"), network(alpha, beta), 2)
    laid = lay_out(setting, of)
    assert [layer.spec.elements for layer in of.layers] == [row[0] for row in given_rows]
    found = simulate(setting, of, Habits(tickets=False))
    bytes_s = sum(bucket.nbytes for bucket in laid.buckets) * beta
    assert found.busy_s["port"] == pytest.approx(bytes_s + 2 * alpha * len(laid.buckets), rel=1e-6)
    assert found.iteration_s >= max(of.computing_s, found.busy_s["port"]) * (1 - 1e-9)
    assert found.exposed_s == pytest.approx(found.iteration_s - of.computing_s, abs=1e-9)
    if alpha == 0:
        layers = [
            Layer(layer.spec, forward_s, backward_s)
            for layer, (_, forward_s, backward_s) in zip(of.layers, given_rows, strict=True)
        ]
        alike = predict_iteration(layers, laid, setting.strategy.schedule_object(), Bsp(), LinearCost(0.0, beta))
        assert found.iteration_s == pytest.approx(alike.whole_s)


@given(rows, schedules, st.sampled_from([2, 3, 8]), st.data())
@settings(max_examples=25)
def test_a_better_network_is_never_slower(
    given_rows: list[tuple[int, float, float]], schedule: str, workers: int, data: st.DataObject
) -> None:
    of, numbers = model(*given_rows), st.floats(0, 1)
    alpha, beta, gamma = (data.draw(numbers) * scale for scale in (1e-3, 1e-7, 1e-8))
    worse = [data.draw(st.floats(1, 3)) for _ in range(3)]
    slow = network(*(number * factor for number, factor in zip((alpha, beta, gamma), worse, strict=True)))
    one, other = (
        iteration_s(f"ring schedule={schedule}", at, of, workers) for at in (network(alpha, beta, gamma), slow)
    )
    assert one <= other * (1 + 1e-9)


def test_every_iteration_is_the_same_whenever_it_is_simulated() -> None:
    of = model(*((50_000, 0.001, 0.002),) * 6)
    for text in ("ring schedule=priority(slice=64KiB)", "direct codec=int8", "ps(servers=2)", "ring schedule=merged"):
        setting = setting_of(Strategy.parse(text), network(1e-5, 1e-9, 1e-9), 4)
        assert simulate(setting, of) == simulate(setting, of)


def test_a_codec_sends_less_and_takes_its_time() -> None:
    of = model(*((1 << 20, 0.001, 0.002),) * 4)
    cluster = network(1e-5, 1e-8)
    dense, coded = (iteration_s(text, cluster, of, 4) for text in ("direct", "direct codec=int8"))
    assert coded < dense / 2
    costly = network(1e-5, 1e-8, more=",codecs.feedback(int8).encode=1e-7s,codecs.feedback(int8).decode=1e-7s")
    assert iteration_s("direct codec=int8", costly, of, 4) > dense


def test_hosts_sum_in_float32_before_a_codec_whatever_the_gradients_type() -> None:
    """A library inside hosts takes as long for 16-bit gradients, which are widened before."""
    cluster = network(more=",inside.alpha=0s,inside.beta=0s,native.alpha=0s,native.beta=1e-9s")
    setting, found = setting_of(Strategy.parse("hierarchical(inside=native) codec=int8"), cluster, 4, per_host=2), []
    for dtype in ("float32", "bfloat16"):
        bucket = Bucket((Slice(0, 0, 1 << 20),), dtype)
        exchanges = Exchanges(setting, [Layer(Spec("weight", (1 << 20,), dtype))], [bucket])
        stages = [stage for chain in exchanges.chains(BucketPhase(0, 0, "allreduce")) for stage in chain]
        found.append(sum(stage.seconds for stage in stages if stage.resource == "inside"))
    assert found == pytest.approx([found[0]] * 2)
    assert found[0] > 0


@pytest.mark.parametrize("update", ["server", "worker"])
@pytest.mark.parametrize(("on", "payloads"), [("ranks", 1.0), ("workers", 0.5)])
def test_hosts_that_push_for_their_workers_send_one_payload(on: str, payloads: float, update: str) -> None:
    """Two hosts of four: a payload goes to two servers and one comes back, less the part of a server on the host."""
    of, cluster = model((1 << 22, 0.0, 0.0)), network(beta=1e-8, more=",inside.alpha=0s,inside.beta=0s")
    one_way_s = payloads * (1 << 22) * (1 + 4 / 1024) * 1e-8
    for local, times in (("on", 1), ("off", 4)):
        strategy = Strategy.parse(f"ps(servers=2, on={on}, update={update}, local={local}) codec=int8 schedule=fifo")
        setting = setting_of(strategy, cluster, 8, per_host=4)
        found = simulate(setting, of, Habits(tickets=False))
        assert found.iteration_s == pytest.approx(2 * times * one_way_s, rel=0.01)
        if local == "on":
            (bucket,) = lay_out(setting, of).buckets
            inside = 8 * 2 * 3 / 4 * bucket.nbytes
            sent = 8 * Exchanges(setting, of.layers, [bucket]).sent_bytes(bucket)
            by_servers = on == "workers"
            assert sent - inside == pytest.approx(2 * (1 + by_servers) * one_way_s / 1e-8, rel=0.01)


def test_hosts_of_one_worker_push_and_pull_as_without_hosts() -> None:
    of = model((1 << 20, 0.0, 0.0))
    for words in ("codec=int8", ""):
        flat, local = (
            iteration_s(f"ps(servers=1, update=worker{more}) {words}", network(beta=1e-8), of, 4)
            for more in ("", ", local=on")
        )
        assert local == pytest.approx(flat)


def test_a_workload_that_computes_has_no_times_and_the_remedy_is_named() -> None:
    images = Images(*([None] * 3))  # type: ignore[arg-type]
    computed = Workload("digits", 1, True, 1, images, None, *([None] * 4))  # type: ignore[list-item]
    with pytest.raises(UsageError, match="syncline record"):
        model_of(computed)


def test_a_longer_flight_can_make_an_iteration_shorter_where_urgent_exchanges_interrupt_others() -> None:
    """A scheduling anomaly, as of list schedules (Graham, SIAM J. Applied Mathematics 17, 1969).

    Nothing on three ranks is slower with a flight of 1 s but the whole: what comes earlier is what is urgent, and it
    interrupts messages that the ring of another exchange waits for on all ranks. Of the quick model, in which all
    ranks have one port together, this cannot be.
    """
    of = model((6, 2.0, 0.5), (3, 0.5, 1.0))
    setting = {
        flight: setting_of(
            Strategy.parse("ring schedule=split(slice=12B)"), network(gamma=0.1, more=f",between.flight={flight}s"), 3
        )
        for flight in (1.0, 1.5)
    }
    exact = {flight: simulate_one_by_one(one, of, Habits(tickets=False)).iteration_s for flight, one in setting.items()}
    quick = {flight: simulate(one, of, Habits(tickets=False)).iteration_s for flight, one in setting.items()}
    assert exact[1.0] > 1.02 * exact[1.5]
    assert quick[1.0] <= quick[1.5]


def test_gossip_takes_what_its_plans_take_whatever_the_number_of_workers() -> None:
    of, cluster = model(*((1 << 18, 0.001, 0.002),) * 4), network(beta=1e-8)
    times = {
        (graph, workers): simulate(
            setting_of(Strategy.parse(f"ring schedule=fifo sync=gossip(graph={graph})"), cluster, workers), of
        ).busy_s["port"]
        for graph in ("ring", "exponential")
        for workers in (4, 16)
    }
    assert times["ring", 16] == pytest.approx(times["ring", 4])
    assert times["ring", 4] == pytest.approx(2 * of.nbytes * 1e-8)
    assert times["exponential", 16] == pytest.approx(of.nbytes * 1e-8)


def test_workers_that_gossip_are_held_up_by_all_whose_tickets_they_wait_for() -> None:
    of = replace(TWO, speed=Speed(slow_rank=1, slowdown=3.0))
    for text in ("ring sync=gossip", "ring sync=gossip(graph=ring)"):
        assert iteration_s(text, network(beta=0.0), of, 5, Habits()) == pytest.approx(3 * 4.0)


@pytest.mark.parametrize("text", ["ring schedule=fifo", "ring schedule=priority(slice=12B)", "ps(servers=1)"])
@pytest.mark.parametrize("speed", [Speed(jitter=1.0), Speed(slow_rank=2, slowdown=2.0, jitter=0.3)])
def test_the_slowest_of_each_step_stands_for_all_workers(
    text: str, speed: Speed, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = setting_of(Strategy.parse(text), network(alpha=0.1, more=",update=0.01s,tensor=0.1s"), 5)
    of = replace(TWO, speed=speed)
    quick = simulate(setting, of)
    monkeypatch.setattr(Together, "_begin_together", False)
    found = simulate(setting, of)
    for name in ("iteration_s", "exposed_s", "forward_s", "backward_s", "update_s", "other_s"):
        # All that is counted ends with an iteration, which workers do at slightly different times.
        assert getattr(quick, name) == pytest.approx(getattr(found, name), rel=5e-3), name


@pytest.mark.parametrize(("cores", "one_machine"), [(None, False), (1, False), (64, True)])
def test_workers_that_differ_in_name_only_are_as_those_that_are_alike(cores: int | None, one_machine: bool) -> None:
    cluster = replace(network(more=",update=0.1s,tensor=0.5s"), cores=cores, one_machine=one_machine)
    in_name = replace(TWO, speed=Speed(slow_rank=1, slowdown=1 + 1e-9))
    for text in ("ring schedule=fifo", "ring schedule=delayed(bucket=1B)"):
        assert iteration_s(text, cluster, in_name, 8) == pytest.approx(iteration_s(text, cluster, TWO, 8))


def test_periods_that_are_too_long_are_refused() -> None:
    with pytest.raises(UsageError, match="up to 1000"):
        iteration_s("ring sync=local(steps=20000)", network(), TWO)


@pytest.mark.parametrize("slow_rank", [0, 2])
def test_stages_are_those_of_the_slowest_worker_whichever_it_is(slow_rank: int) -> None:
    slow = replace(TWO, speed=Speed(slow_rank=slow_rank, slowdown=3.0))
    found = simulate(setting_of(Strategy.parse("ring schedule=fifo"), network(), 3), slow)
    assert found.forward_s + found.backward_s == pytest.approx(12.0)


@pytest.mark.parametrize("workers", [8, 12])
@pytest.mark.parametrize("text", ["ring", "halving_doubling", "hierarchical", "direct"])
def test_several_ranks_on_a_host_take_what_their_plan_takes(text: str, workers: int) -> None:
    """Messages between hosts and inside them travel at the same time where a plan has them in one step."""
    cluster = network(1e-5, 1e-9, more=",inside.alpha=1e-5s,inside.beta=1e-9s")
    setting = setting_of(Strategy.parse(f"{text} schedule=fifo"), cluster, workers, 4)
    short = model((1 << 22, 0.0, 0.0))
    plan = setting.strategy.plan(setting.placement.group)
    expected = plan_time(plan, short.nbytes, cluster, setting.placement.hosts).whole_s
    found = simulate(setting, short, Habits(tickets=False)).iteration_s
    assert found == pytest.approx(expected, rel=0.25 if text == "direct" or workers == 12 else 0.05)


def test_a_bucket_of_nothing_is_exchanged_at_once() -> None:
    of = model((3, 1.0, 1.0), (3, 1.0, 1.0))
    empty = replace(of, layers=(*of.layers, Layer(Spec("empty", (0,)))), parts=(*of.parts, Stretch(0.0, 0.0, (2,))))
    assert iteration_s("direct codec=int8 schedule=wait_free", network(), empty) > 4


@pytest.mark.parametrize("text", ["ps(servers=1)", "ps(servers=1) sync=asp", "ps(servers=2, on=workers) sync=asp"])
def test_servers_of_one_machine_share_its_cores_with_workers(text: str) -> None:
    cluster = network(beta=0.01, more=",update=0.1s,tensor=0.5s,copy=0.1s")
    few, many = (
        iteration_s(text, replace(cluster, cores=cores, one_machine=True), TWO, 4, Habits()) for cores in (1, 64)
    )
    assert few > 1.1 * many


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
