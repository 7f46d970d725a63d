"""Replayed layers: the order in which gradients become ready, their values, and that accumulation stays right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from passing import batches

from syncline.errors import UsageError
from syncline.frameworks.torch import prepare
from syncline.nouns import Seconds, Spec
from syncline.session.session import Session
from syncline_bench.workloads import Speed, Workload, load
from syncline_bench.workloads._speed import Pacer
from syncline_bench.workloads._trace import Trace, TracedLayer
from syncline_bench.workloads.models.replayed import Replayed
from syncline_bench.workloads.replay import replayed


def layer(name: str, *shapes: tuple[int, ...], forward_s: float = 0.0, backward_s: float = 0.0) -> TracedLayer:
    tensors = tuple(Spec(f"part{index}", shape) for index, shape in enumerate(shapes))
    return TracedLayer(name, tensors, forward_s, backward_s)


TRACE = Trace(
    "small",
    (
        layer("data", forward_s=3.0, backward_s=5.0),
        layer("conv.1", (4, 3), (4,), forward_s=1.0, backward_s=2.0),
        layer("half", (7,), forward_s=0.5, backward_s=1.5),
    ),
    batch=4,
)


class Log:
    """A clock that notes what happens when; sleeping is instant."""

    def __init__(self) -> None:
        self.at = 0.0
        self.events: list[tuple[str, float]] = []

    def sleep(self, seconds: float) -> None:
        self.at += seconds

    def note(self, name: str) -> None:
        self.events.append((name, self.at))


def model_and_log() -> tuple[Replayed, Log]:
    log = Log()
    model = Replayed(TRACE, Pacer(lambda: log.at, log.sleep))
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: log.note(name))
    return model, log


def loss_of(model: torch.nn.Module, samples: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = replayed("r", TRACE).loss(model(samples), torch.zeros(len(samples)))
    return found


def test_gradients_become_ready_in_reverse_order_when_their_layer_has_taken_its_time() -> None:
    model, log = model_and_log()
    for child in model.children():
        child.register_forward_hook(lambda *_: log.note("forward"))
    loss_of(model, torch.ones(2, 1)).backward()
    assert log.events[:3] == [("forward", 3.0), ("forward", 4.0), ("forward", 4.5)]
    assert log.events[3] == ("2:half.part0", 6.0)
    assert sorted(log.events[4:]) == [("1:conv/1.part0", 8.0), ("1:conv/1.part1", 8.0)]
    # The layer without parameters takes its time as well, after all gradients are ready.
    assert log.at == TRACE.total_s == 13.0


def test_gradients_are_the_mean_of_the_batch_times_the_layers_position() -> None:
    model, _ = model_and_log()
    for _ in range(2):  # the second time in memory that is used again
        model.zero_grad()
        loss_of(model, torch.tensor([[1.0], [2.0], [4.5]])).backward()
        for name, parameter in model.named_parameters():
            share = (int(name.partition(":")[0]) + 1) / 3
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 2.5 * share))


def test_gradients_add_up_until_they_are_cleared() -> None:
    model, _ = model_and_log()
    for value in (1.0, 10.0, 100.0):
        loss_of(model, torch.full((1, 1), value)).backward()
    for name, parameter in model.named_parameters():
        share = (int(name.partition(":")[0]) + 1) / 3
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 111.0 * share))


def test_without_gradients_only_forward_takes_time() -> None:
    model, log = model_and_log()
    with torch.no_grad():
        assert not model(torch.ones(2, 1)).requires_grad
    assert log.at == TRACE.forward_s


def train(workload: Workload, rank: int, world: int, session: Session | None) -> list[torch.Tensor]:
    model = workload.model(0)
    optimizer = workload.optimizer(model)
    if session is not None:
        prepare(session, model, optimizer)
    passing = batches(workload, rank, world, 8, seed=1, epoch=0)
    for _ in range(5):
        samples, target = map(torch.from_numpy, next(passing))
        workload.loss(model(samples), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_two_workers_learn_what_one_does(group: Callable[..., list[Any]]) -> None:
    quick = replayed("quick", Trace("quick", (layer("a", (50, 3)), layer("b", (9,), backward_s=1e-4)), batch=4))
    alone = train(quick, 0, 1, None)
    assert all(float(weights.abs().min()) > 0 for weights in alone)
    for weights in group("ring", 2, lambda session: train(quick, session.rank, 2, session)):
        torch.testing.assert_close(weights, alone)


@pytest.mark.parametrize(
    ("name", "batch", "tensors", "elements", "forward_s", "backward_s"),
    [
        ("alexnet", 256, 16, 60_965_224, 0.045, 0.085),
        ("googlenet", 64, 128, 13_378_280, 0.1865, 0.2053),
        ("resnet50", 32, 161, 25_557_032, 0.076, 0.135),
    ],
)
def test_published_totals(
    name: str, batch: int, tensors: int, elements: int, forward_s: float, backward_s: float
) -> None:
    workload = load(f"replay:{name}")
    trace = workload.trace
    assert trace is not None
    assert (trace.forward_s, trace.backward_s) == pytest.approx((forward_s, backward_s))
    assert (trace.elements, sum(len(item.tensors) for item in trace.layers)) == (elements, tensors)
    assert workload.total_batch(4) == workload.total_batch(4, batch) == 4 * batch
    with pytest.raises(UsageError, match=f"are for {batch} samples per worker: leave --batch out"):
        workload.total_batch(4, batch + 1)
    with torch.device("meta"):
        names = [name for name, _ in Replayed(trace).named_parameters()]
    assert len(set(names)) == tensors


def test_a_tied_embedding_is_one_dense_tensor_and_the_first_so_its_gradient_is_ready_last() -> None:
    tied, apart = (load(f"replay:{name}").trace for name in ("gpt2", "bert_base"))
    assert tied is not None
    assert apart is not None
    assert tied.layers[0].tensors[0].shape == (50_257, 768)
    assert not any("output" in layer.name for layer in tied.layers)
    assert tied.layers[0].rows == 1
    words, places, kinds = apart.layers[:3]
    assert 0 < words.rows <= 1.001 * 128 / 30_522
    assert places.rows == pytest.approx(128 / 512)
    assert kinds.rows == 0.5
    assert all(layer.rows == 1 for layer in apart.layers[3:])


def test_a_gradient_with_few_rows_is_zero_elsewhere_in_every_step() -> None:
    sparse = replace(layer("words", (10, 3)), rows=0.3)
    model = Replayed(Trace("few", (sparse, layer("dense", (4,))), batch=2), Pacer(lambda: 0.0, lambda _: None))
    words, dense = model.parameters()
    for value in (1.0, 2.0):
        model.zero_grad()
        loss_of(model, torch.full((2, 1), value)).backward()
        assert words.grad is not None
        assert words.grad.any(1).nonzero().flatten().tolist() == [0, 3, 6]
        torch.testing.assert_close(words.grad[0], torch.full((3,), value / 2))
        torch.testing.assert_close(dense.grad, torch.full((4,), value))
    loss_of(model, torch.full((2, 1), 2.0)).backward()  # added to the memory of the first
    torch.testing.assert_close(words.grad[3], torch.full((3,), 2.0))


def test_unknown_networks_are_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match="did you mean 'replay:googlenet'"):
        load("replay:googlnet")
    with pytest.raises(UsageError, match=r"choose one of alexnet.*trace:FILE.csv"):
        load("replay")


def test_a_slow_worker_takes_the_times_of_the_trace_so_many_times() -> None:
    model, log = model_and_log()
    model.stretch(3.0)
    loss_of(model, torch.ones(2, 1)).backward()
    assert log.at == pytest.approx(3.0 * TRACE.total_s)


@pytest.mark.parametrize(("rank", "factor"), [(0, 2.0), (1, 6.0)])
def test_the_workload_stretches_the_model_of_the_worker_that_it_is_for(rank: int, factor: float) -> None:
    speed = Speed(step=Seconds(2 * TRACE.total_s), slow_rank=1, slowdown=3.0)
    model: Any = replace(replayed("r", TRACE), speed=speed).model(0, rank)
    assert model._pacer.stretch == pytest.approx(factor)
