"""The chapter on the Tianhe GPU cluster: ring against parameter servers on 32 GPUs (Zhang, Ran, Lai, Liu 2021).

Owns the search for constants under which both published figures hold. The source names neither the network nor the GPU
nor the number of servers; the page states all these assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass

from syncline.costs.cluster import Cluster

from ..predict.networks import inline
from .blocks import Chapter, Compared, Figures, Grid, gain, share
from .nets import lasting, replayed
from .simulating import efficiency

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
