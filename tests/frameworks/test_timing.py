"""Times of layers: from one gradient, or one module with parameters, to the next, and nothing of other passes."""

from __future__ import annotations

import pytest
import torch

from syncline.frameworks.torch.storage import layers_of
from syncline.frameworks.torch.timing import Clock, LayerTimes, clock_of
from syncline.nouns import Bucket, Slice
from syncline.training.exchange import BucketTimes


class Inner(torch.nn.Module):
    """A weight of its own around a layer."""

    def __init__(self, clock: Ticks) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.layer = torch.nn.Linear(3, 3)
        self._clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._clock.pass_s(5)
        y = self.layer(x)
        self._clock.pass_s(7)
        return y * self.scale


class Ticks:
    """A clock that goes on only when it is told to."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def pass_s(self, seconds: float) -> None:
        self.time_s += seconds

    def now(self) -> float:
        return self.time_s

    def between_s(self, start: float, stop: float) -> float:
        return stop - start


def parts(steps: int) -> tuple[Ticks, torch.nn.Module, LayerTimes]:
    clock = Ticks()
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), Inner(clock))
    model.register_forward_pre_hook(lambda *_: clock.pass_s(0.5))
    model[0].register_forward_hook(lambda *_: clock.pass_s(1))
    model[1].layer.register_forward_hook(lambda *_: clock.pass_s(2))  # type: ignore[union-attr]
    times = LayerTimes(model, list(model.named_parameters()), steps, clock, forward=True)
    return clock, model, times


def backward(clock: Ticks, times: LayerTimes, model: torch.nn.Module, spent: dict[int, float]) -> None:
    """A forward and a backward pass in which the gradients come after so many seconds each."""
    output = model(torch.ones(1, 2)).sum()
    clock.pass_s(100)  # the loss
    output.backward()
    for tensor, seconds in spent.items():
        clock.pass_s(seconds)
        times.produced(tensor)
    times.end_step()


def test_a_module_counts_for_its_first_tensor_until_the_next_is_called() -> None:
    clock, model, times = parts(1)
    backward(clock, times, model, {4: 1.0})
    found = times.of(layers_of(list(model.named_parameters())))
    assert [layer.spec.name for layer in found] == ["0.weight", "0.bias", "1.scale", "1.layer.weight", "1.layer.bias"]
    assert [layer.forward_s for layer in found] == [1, 0, 5, 9, 0]


def test_a_second_use_of_a_tensor_counts_for_the_last_one_that_was_needed_for_the_first_time() -> None:
    """The output layer of a tied embedding waits for nothing more."""
    clock = Ticks()
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(3)))
    model[2].weight = model[0].weight
    for layer, seconds in zip(model, (1, 3, 10), strict=True):
        layer.register_forward_hook(lambda *_, seconds=seconds: clock.pass_s(seconds))
    times = LayerTimes(model, list(model.named_parameters()), 2, clock, forward=True)
    for _ in range(2):
        backward(clock, times, model, {1: 2.0, 0: 4.0})
    found = times.of(layers_of(list(model.named_parameters())))
    assert [(layer.forward_s, layer.backward_s) for layer in found] == [(1, 4), (13, 2)]


def test_a_gradient_takes_from_the_one_before_to_itself_and_medians_count() -> None:
    clock, model, times = parts(3)
    for factor in (1, 50, 2):
        assert not times.enough
        backward(clock, times, model, {4: 1.0 * factor, 3: 4.0 * factor, 2: 0.0, 1: 3.0, 0: 8.0})
    assert times.enough
    found = times.of(layers_of(list(model.named_parameters())))
    assert [layer.backward_s for layer in found] == [8, 3, 0, 8, 2]


def test_what_is_no_step_does_not_count() -> None:
    clock, model, times = parts(1)
    with torch.no_grad():
        model(torch.ones(1, 2))
    x = torch.ones(1, 2, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    clock.pass_s(1000)
    times.produced(4)
    times.forget()
    backward(clock, times, model, {4: 1.0, 3: 1.0})
    found = times.of(layers_of(list(model.named_parameters())))
    assert [layer.backward_s for layer in found] == [0, 0, 0, 1, 1]
    assert [layer.forward_s for layer in found] == [1, 0, 5, 9, 0]


def test_after_the_measurement_the_model_is_as_it_was() -> None:
    clock, model, times = parts(1)
    before = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    times.detach()
    after = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert sum(before) == 3 + 2 + 3
    assert sum(after) == 3
    backward(clock, times, model, {4: 1.0})
    assert all(layer.forward_s == 0 for layer in times.of(layers_of(list(model.named_parameters()))))


def test_the_host_clock_goes_on() -> None:
    clock = clock_of(torch.device("cpu"))
    assert type(clock) is Clock
    assert clock.between_s(clock.now(), clock.now()) >= 0


def test_the_shortest_exchange_counts_which_waited_for_nobody() -> None:
    moments = iter([0.0, 5.0, 10.0, 13.0, 20.0, 24.0, 30.0, 36.0])
    times = BucketTimes(lambda: next(moments))
    buckets = [Bucket((Slice(0, 0, size),), "float32") for size in (250, 1000, 7)]
    assert times.cost(buckets) is None
    for number in (0, 0, 1, 1):
        times.begin(number)
        times.end(number)
    cost = times.cost(buckets)
    assert cost is not None
    assert [cost(1000), cost(4000)] == pytest.approx([3.0, 4.0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_says_how_long_it_computed() -> None:
    device = torch.device("cuda")
    model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 2048)).to(device)
    times = LayerTimes(model, list(model.named_parameters()), 1, clock_of(device), forward=True)
    for index, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: times.produced(index))  # type: ignore[misc]
    model(torch.ones(2048, 2048, device=device)).sum().backward()
    times.end_step()
    found = times.of(layers_of(list(model.named_parameters())))
    assert found[0].forward_s > 0
    assert sum(layer.backward_s for layer in found) > 0
