"""The networks of the published figures, as models with layers and times, and their simulation.

Owns the iteration times on each accelerator, with their sources. Layers and parameters are counted on the real
networks. The time of a batch is divided among the layers in proportion to their operations, as in replays.

Plans and iterations are those of ``predict``. The systems of the papers differ from Syncline in two habits: their
workers do not agree on a step beforehand, and some run one exchange at a time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from syncline.costs import plans
from syncline.costs.cluster import Cluster
from syncline.nouns import Group
from syncline.plans.plan import COPY, REDUCE, Plan
from syncline.strategy.strategy import Strategy

from ..predict import settings
from ..predict.iterations import simulate
from ..predict.settings import Habits, setting_of
from ..workloads import Trace, load

if TYPE_CHECKING:
    from torch import nn


TITLES = {"alexnet": "AlexNet", "googlenet": "GoogLeNet", "resnet50": "ResNet-50"}
"""The three networks of all sources, by their names in replays."""

BARE_GOOGLENET = "googlenet without heads"
"""GoogLeNet without its two auxiliary classifiers, which training adds."""

_PIPELINES = {
    "alexnet": "loading=100ms, h2d=14ms",
    "googlenet": "loading=25ms, h2d=4ms",
    "resnet50": "loading=13ms, h2d=2ms",
}
"""Loading at 2,500 images/s and copies at some 11 GB/s, as docs/results/frameworks.md has them."""

P100_IMAGES_PER_S = {"resnet50": 219.0, "vgg16": 154.0}
"""The throughput of one P100 with 64 images (TensorFlow's performance guide, 2017: NVIDIA DGX-1, synthetic data)."""

_P100_BATCH = 64
_FORWARD_SHARE = 1 / 3
"""The forward pass's share of an iteration if only the whole time was published: backward has twice the operations."""


@lru_cache
def replayed(name: str, pipeline: str = "") -> settings.Model:
    """A network with the times of ``replay``, on one GPU. ``pipeline`` has the replay's arguments for loading."""
    return settings.model_of(load(f"replay:{name}({pipeline})" if pipeline else f"replay:{name}"))


def fed(name: str, prefetch: int) -> settings.Model:
    """A network with the times of ``replay``, including loading and copies, with ``prefetch`` batches ahead."""
    return replayed(name, f"{_PIPELINES[name]}, prefetch={prefetch}")


def lasting(model: settings.Model, batch: int, seconds: float) -> settings.Model:
    """The model with both passes over ``batch`` samples scaled to ``seconds``."""
    factor = seconds / model.computing_s
    parts = tuple(
        part._replace(forward_s=part.forward_s * factor, backward_s=part.backward_s * factor) for part in model.parts
    )
    layers = tuple(
        replace(layer, forward_s=layer.forward_s * factor, backward_s=layer.backward_s * factor)
        for layer in model.layers
    )
    return replace(model, parts=parts, layers=layers, batch=batch)


@lru_cache
def on_p100(name: str) -> settings.Model:
    """ResNet-50, VGG-16 or VGG-19 with the times of a P100; VGG-19 has the operations per second of VGG-16."""
    if name == "resnet50":
        return lasting(replayed(name), _P100_BATCH, _P100_BATCH / P100_IMAGES_PER_S[name])
    sixteen_s = _P100_BATCH / P100_IMAGES_PER_S["vgg16"]
    seconds = sixteen_s * _vgg_operations(19) / _vgg_operations(16) if name == "vgg19" else sixteen_s
    return _vgg(int(name.removeprefix("vgg")), seconds)


@lru_cache
def layer_bytes(name: str, width: int) -> tuple[int, ...]:
    """The bytes of every layer's gradient, in forward order, with ``width`` bytes per parameter."""
    trace = _bare_googlenet() if name == BARE_GOOGLENET else load(f"replay:{name}").trace
    assert trace is not None  # replays have one
    return tuple(width * sum(spec.elements for spec in layer.tensors) for layer in trace.layers)


def _bare_googlenet() -> Trace:
    from ..workloads.models.flops import trace_of
    from ..workloads.models.networks import GoogLeNet

    return trace_of("googlenet", GoogLeNet, (3, 224, 224), 1, 1.0, 2.0)


_VGG = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""The number of convolutions in each stage, by depth (Simonyan, Zisserman, ICLR 2015)."""


def _vgg(depth: int, seconds: float) -> settings.Model:
    from ..workloads.models.flops import trace_of

    times = seconds * _FORWARD_SHARE, seconds * (1 - _FORWARD_SHARE)
    trace = trace_of(f"vgg{depth}", lambda: _vgg_module(depth), (3, 224, 224), _P100_BATCH, *times)
    return settings.traced(f"vgg{depth}", trace, _P100_BATCH)


def _vgg_module(depth: int) -> nn.Module:
    from torch import nn

    layers: list[nn.Module] = []
    inputs = 3
    for stage, count in enumerate(_VGG[depth]):
        outputs = min(512, 64 << stage)
        for _ in range(count):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    widths = (512 * 7 * 7, 4096, 4096, 1000)
    dense = [nn.Linear(given, made) for given, made in pairwise(widths)]
    return nn.Sequential(*layers, nn.Flatten(), *dense)


def _vgg_operations(depth: int) -> float:
    """The number of multiplications of a forward pass over one image."""
    side, inputs, found = 224, 3, 0.0
    for stage, count in enumerate(_VGG[depth]):
        outputs = min(512, 64 << stage)
        for _ in range(count):
            found += side * side * 9 * inputs * outputs
            inputs = outputs
        side //= 2
    return found + 512 * 7 * 7 * 4096 + 4096 * 4096 + 4096 * 1000


THEIRS = Habits(tickets=False)
"""Systems whose workers exchange no tickets before a step."""

ONE_BY_ONE = Habits(in_flight=1, tickets=False)
"""Systems that also wait for each exchange before the next."""

FLAT_AND_TREE, TREE = "flat in, tree out", "tree in, tree out"
"""Two ways of one server: it gathers gradients directly or along a tree, and broadcasts weights along a tree."""


def collective_s(algorithm: str, nbytes: float, workers: int, cluster: Cluster, per_host: int = 1) -> float:
    """The seconds of a single collective: an architecture's plan, or one of a server's two ways."""
    plan, placement = _plan(algorithm, workers, per_host)
    return plans.plan_s(plan, nbytes, cluster, placement)


@lru_cache(maxsize=128)
def _plan(algorithm: str, workers: int, per_host: int) -> tuple[Plan, plans.ProcessPlacement]:
    if algorithm == TREE:
        return _plan("tree", workers, per_host)
    if algorithm == FLAT_AND_TREE:
        return _flat_and_tree(workers)
    strategy = Strategy.parse(algorithm)
    nodes = tuple(worker // per_host for worker in range(workers)) if per_host > 1 else ()
    group = Group(workers, strategy.servers, nodes)
    return strategy.plan(group), plans.ProcessPlacement(group, per_host)


def _flat_and_tree(workers: int) -> tuple[Plan, plans.ProcessPlacement]:
    """A plan in which rank 0 receives from all other ranks one by one, and broadcasts along a tree."""
    tree, placement = _plan("tree", workers, 1)
    gathers = [(0, rank, 0, 0, tree.chunks, REDUCE) for rank in range(1, workers)]
    back = tree.rows[tree.op == COPY]
    rows = [*gathers, *((row[0] + 1, *row[1:]) for row in back.tolist())]
    return Plan.of(FLAT_AND_TREE, workers, tree.chunks, rows), placement


def iteration(text: str, cluster: Cluster, workers: int, model: settings.Model) -> settings.Iteration:
    """Simulate a model under a strategy, with the papers' habits. Returns the mean iteration."""
    return simulate(setting_of(Strategy.parse(text), cluster, workers), model, THEIRS)


def efficiency(text: str, cluster: Cluster, workers: int, model: settings.Model) -> float:
    """The scaling efficiency: throughput relative to the same workers without any exchange."""
    return model.computing_s / iteration(text, cluster, workers, model).iteration_s
