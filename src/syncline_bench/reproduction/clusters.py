"""The chapters on two clusters: rings against MPI_Allreduce and against parameter servers.

Sunway TaihuLight (Zhu, Liu, Fang 2020): owns the published figures, and the fit of a constant per layer that would
explain the factors over one server. The Tianhe GPU cluster (Zhang, Ran, Lai, Liu 2021): owns the search for constants
under which both published figures hold. The source names neither the network nor the GPU nor the number of servers; the
page states all these assumptions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from syncline.costs.cluster import Cluster

from ..predict.networks import inline, load_network
from ..report.units import milliseconds, significant
from .blocks import Chapter, Compared, Figures, Grid, gain, share, times
from .simulating import (
    BARE_GOOGLENET,
    FLAT_AND_TREE,
    TITLES,
    TREE,
    collective_s,
    efficiency,
    lasting,
    layer_bytes,
    replayed,
)

_REPORTED_RING = (2.3, 4.1)
_REPORTED_SERVER = {"alexnet": (256, 10.0), "googlenet": (32, 77.0), "resnet50": (32, 98.0)}
"""The number of workers, and the published factor of one server's time over a ring's, by network."""

_WITHOUT_HEADS = {"alexnet": "AlexNet", BARE_GOOGLENET: "GoogLeNet without heads", "resnet50": "ResNet-50"}

_FEW = 8
"""The number of nodes up to which the source finds little difference between ring and server."""

_NODES = (2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class _Reading:
    """An interpretation of the source, which gives numbers of parameters and no latency."""

    name: str
    width: int
    cluster: Cluster


def _readings() -> tuple[_Reading, _Reading]:
    cluster = load_network("taihulight")
    slower = cluster.replaced({"between.alpha": 4 * cluster.constants["between.alpha"].value})
    return _Reading("one byte per parameter, 1 us", 1, cluster), _Reading("float32, 4 us", 4, slower)


def against_the_library() -> Chapter:
    """The chapter on ring allreduce against MPI_Allreduce on 512 nodes."""
    held, rows = [], []
    for reading in _readings():
        for name, title in _WITHOUT_HEADS.items():
            nbytes = sum(layer_bytes(name, reading.width))
            seconds = {
                algorithm: collective_s(algorithm, nbytes, 512, reading.cluster)
                for algorithm in ("ring", "recursive_doubling", "tree", "halving_doubling")
            }
            ratios = {algorithm: seconds[algorithm] / seconds["ring"] for algorithm in seconds}
            what = f"{title}, 512 nodes, {reading.name}"
            held.append(Compared(what, _REPORTED_RING, ratios["recursive_doubling"], remark="recursive doubling"))
            cells = (times(ratio) for algorithm, ratio in ratios.items() if algorithm != "ring")
            rows.append((what, milliseconds(seconds["ring"]), *cells))
    return Chapter(
        "TaihuLight: ring against the library's allreduce",
        (
            "Zhu, Liu and Fang: a ring is 2.3 to 4.1 times faster than `MPI_Allreduce` on 512 nodes. Network"
            " `taihulight`: 14 GB/s per port, as published; the latency was not published and is assumed. The source's"
            " 60.97 MB is AlexNet's number of parameters in millions. Both interpretations are shown: only the ratio of"
            " latency to transfer time matters, and both give the same factors.",
            Figures(tuple(held)),
            "The factors of other algorithms of a library. Only recursive doubling lies in the published range.",
            Grid(("over ring", "ring, ms", "recursive doubling", "binomial tree", "halving-doubling"), tuple(rows)),
        ),
        ("The algorithm of TaihuLight's library was not published. The ratios suggest recursive doubling.",),
    )


def _server_s(way: str, name: str, workers: int, reading: _Reading, per_layer_s: float = 0.0) -> float:
    """The time of one server, which receives the gradient of each layer separately and sends its weights to all."""
    return sum(
        collective_s(way, nbytes, workers, reading.cluster) + per_layer_s for nbytes in layer_bytes(name, reading.width)
    )


def _ring_s(name: str, workers: int, reading: _Reading) -> float:
    return collective_s("ring", sum(layer_bytes(name, reading.width)), workers, reading.cluster)


def fitted_per_layer_s(reading: _Reading | None = None) -> float:
    """The seconds per layer that fit the three published factors best: least squares of their logarithms."""
    reading = reading or _readings()[0]
    known = [
        (_server_s(TREE, name, workers, reading), len(layer_bytes(name, 1)), _ring_s(name, workers, reading), ratio)
        for name, (workers, ratio) in _REPORTED_SERVER.items()
    ]

    def miss(constant_s: float) -> float:
        ratios = [((tree_s + layers * constant_s) / ring_s, ratio) for tree_s, layers, ring_s, ratio in known]
        return sum(math.log(ours / reported) ** 2 for ours, reported in ratios)

    return least(miss, 1e-6, 1.0)


def least(miss: Callable[[float], float], low: float, high: float) -> float:
    """The minimum of a unimodal function between two positive ends, by golden-section search on the logarithm."""
    golden = (math.sqrt(5) - 1) / 2
    left, right = math.log(low), math.log(high)
    for _ in range(80):
        first, second = right - golden * (right - left), left + golden * (right - left)
        left, right = (left, second) if miss(math.exp(first)) < miss(math.exp(second)) else (first, right)
    return math.exp((left + right) / 2)


def against_servers() -> Chapter:
    """The chapter on one server against a ring, at the published numbers of nodes."""
    reading = _readings()[0]
    constant_s = fitted_per_layer_s(reading)
    held = []
    for name, (workers, reported) in _REPORTED_SERVER.items():
        for way, per_layer_s in ((TREE, 0.0), (FLAT_AND_TREE, 0.0), (TREE, constant_s)):
            ratio = _server_s(way, name, workers, reading, per_layer_s) / _ring_s(name, workers, reading)
            added = f", and {milliseconds(per_layer_s)} ms per layer" if per_layer_s else ""
            what = f"{TITLES[name]}, {workers} nodes"
            held.append(Compared(what, reported, ratio, fit=per_layer_s > 0, remark=f"one server, {way}{added}"))
    few = {
        title: _server_s(TREE, name, _FEW, reading, constant_s) / _ring_s(name, _FEW, reading)
        for name, title in TITLES.items()
    }
    ratios = ", ".join(f"{times(ratio)} for {title}" for title, ratio in few.items())
    constant = f"{milliseconds(constant_s)} ms"
    return Chapter(
        "TaihuLight: one parameter server against a ring",
        (
            "The gradient of each layer travels to rank 0 separately, and the weights return to all ranks. Network"
            f" `taihulight`, {reading.name}. The constant of {constant} per layer is a fit to the three factors, by"
            " least squares of their logarithms: it represents no known cost.",
            Figures(tuple(held)),
            f"The source also says that the difference is small up to {_FEW} nodes. The fit contradicts this: one"
            f" server is slower there by {ratios}.",
        ),
        (
            "One server against a ring for GoogLeNet (77 times) and ResNet-50 (98 times) at 32 nodes: no costs of"
            f" messages, bytes and additions explain these factors. {constant} more per layer would, but contradicts"
            f" the source's statement on {_FEW} nodes.",
            "The last quarter of AlexNet's factor of 10 at 256 nodes.",
        ),
    )


def curves() -> Chapter:
    """The chapter on the communication times of both architectures by number of nodes."""
    reading = _readings()[1]
    blocks: list[Grid | str] = []
    for name, title in TITLES.items():
        rows = []
        for workers in _NODES:
            ring_s = _ring_s(name, workers, reading)
            servers_s = [_server_s(way, name, workers, reading) for way in (TREE, FLAT_AND_TREE)]
            cells = [milliseconds(seconds) for seconds in (ring_s, *servers_s)]
            rows.append((str(workers), *cells, *(times(seconds / ring_s) for seconds in servers_s)))
        megabytes = significant(sum(layer_bytes(name, reading.width)) / 1e6)
        head = ("nodes", "ring", "server, tree", "server, flat in", "tree over ring", "flat over ring")
        blocks += [f"{title}: {megabytes} MB in {len(layer_bytes(name, 1))} layers", Grid(head, tuple(rows))]
    return Chapter(
        "TaihuLight: communication time from 2 to 512 nodes",
        (
            f"Milliseconds of communication per iteration: a ring for all gradients at once, and one server layer by"
            f" layer, along trees in both directions or {FLAT_AND_TREE}. Network `taihulight`, {reading.name}, without"
            " the time of additions. A ring takes at most the time of twice the bytes, plus latency; a server's time"
            " grows without bound.",
            *blocks,
        ),
    )


_WORKERS = 32
_REPORTED_EFFICIENCY, _REPORTED_AHEAD = 0.97, 1.3
_EFFICIENT = 0.95
_AHEAD = (1.2, 1.4)
"""The range that counts as the published gain of 30 % over parameter servers."""

_RATES_GBIT = (20, 24, 28, 32, 36, 40, 56)
_ALPHAS_US = (2, 10, 30)
_SERVERS = (5, 6, 7, 8, 10, 12, 16)

_ALEXNET_BATCH, _ALEXNET_S = 1024, 0.180 + 0.340
"""AlexNet on one GPU, forward and backward (job files of github.com/HKBU-HPML/dl-scheduling)."""


@dataclass(frozen=True)
class Found:
    """Constants under which both published figures hold, with our figures."""

    name: str
    rate_gbit: int
    alpha_us: int
    servers: int
    efficiency: float
    ahead: float

    @property
    def place(self) -> tuple[int, int, int]:
        """The constants without the network: rate, latency and number of servers."""
        return self.rate_gbit, self.alpha_us, self.servers


def network(rate_gbit: float, alpha_us: float) -> Cluster:
    """A network with one GPU per port, and free additions on the GPU."""
    return inline(f"alpha={alpha_us}us,rate={rate_gbit}Gbit,gamma=0s")


def search() -> list[Found]:
    """All constants of a grid under which both published figures hold."""
    networks = {
        "AlexNet": lasting(replayed("alexnet"), _ALEXNET_BATCH, _ALEXNET_S),
        "ResNet-50": replayed("resnet50"),
    }
    found = []
    for name, model in networks.items():
        for rate in _RATES_GBIT:
            for alpha in _ALPHAS_US:
                cluster = network(rate, alpha)
                ring = efficiency("ring schedule=fixed(bucket=25MiB)", cluster, _WORKERS, model)
                if ring < _EFFICIENT:
                    continue
                for servers in _SERVERS:
                    served = efficiency(f"ps(servers={servers}) schedule=wait_free", cluster, _WORKERS, model)
                    if ring / served < _AHEAD[0]:
                        break  # more servers are even faster
                    if ring / served <= _AHEAD[1]:
                        found.append(Found(name, rate, alpha, servers, ring, ring / served))
    return found


def tianhe() -> Chapter:
    """The chapter, with the constants under which the published figures hold."""
    found = search()
    rows = [
        (one.name, str(one.rate_gbit), str(one.alpha_us), str(one.servers), share(one.efficiency), gain(one.ahead))
        for one in found
    ]
    places = {name: {one.place for one in found if one.name == name} for name in ("AlexNet", "ResNet-50")}
    both = sorted(places["AlexNet"] & places["ResNet-50"])
    held = []
    if both:
        misses = {place: sum(abs(one.ahead - _REPORTED_AHEAD) for one in found if one.place == place) for place in both}
        best = min(both, key=misses.__getitem__)
        where = f"{best[0]} Gbit/s, {best[1]} us, {best[2]} servers"
        for one in (one for one in found if one.place == best):
            what = f"{one.name}: efficiency of the ring, 32 GPUs"
            held += [
                Compared(what, _REPORTED_EFFICIENCY, one.efficiency, share, True, remark=where),
                Compared(f"{one.name}: ring over servers", _REPORTED_AHEAD, one.ahead, gain, True, remark=where),
            ]
    return Chapter(
        "Tianhe: ring and parameter servers on 32 GPUs",
        (
            "Zhang, Ran, Lai and Liu: 97 % scaling efficiency with a ring, and 30 % more throughput than with parameter"
            f" servers. Assumed: one GPU per port of {_RATES_GBIT[0]} to {_RATES_GBIT[-1]} Gbit/s, {_ALPHAS_US[0]} to"
            f" {_ALPHAS_US[-1]} us per message, free additions, {_SERVERS[0]} to {_SERVERS[-1]} servers on hosts of"
            " their own that exchange layer by layer, a ring in buckets of 25 MiB, ResNet-50 with 32 images in 211 ms"
            f" and AlexNet with {_ALEXNET_BATCH} in {_ALEXNET_S * 1e3:.0f} ms. The constants result from a search, so"
            f" this is a fit. Both figures hold (efficiency of at least {share(_EFFICIENT)}, {gain(_AHEAD[0])} to"
            f" {gain(_AHEAD[1])} over servers) {_range(both)}.",
            Figures(tuple(held)),
            "All constants of the search under which both figures hold:",
            Grid(
                ("network", "Gbit/s", "us per message", "servers", "ring efficiency", "ring over servers"), tuple(rows)
            ),
        ),
        ("The network, the GPUs, the batches and the number of servers of the Tianhe experiment were not published.",),
    )


def _range(both: list[tuple[int, int, int]]) -> str:
    """A text on the constants under which the figures hold for both networks."""
    if not both:
        return "for neither network at the constants of the other"
    rates, alphas, servers = (
        str(min(values)) if len(set(values)) == 1 else f"{min(values)} to {max(values)}"
        for values in zip(*both, strict=True)
    )
    return (
        f"for both networks at once with {rates} Gbit/s, {alphas} us per message and {servers} servers, in {len(both)}"
        " combinations of the search"
    )
