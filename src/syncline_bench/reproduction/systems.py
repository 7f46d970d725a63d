"""The chapters on other systems and their published gains, and on iterations by stage under four frameworks.

Owns the settings, which are near to the papers', the networks between the hosts of four GPUs of Shi and Chu (2017), and
the assumed time of an update on a GPU. Papers publish maxima ("up to"). The compared figure is therefore the largest
gain of a search over link rates, which does not use a paper's own rate. A smaller one does not explain the gain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from syncline.costs.cluster import Cluster
from syncline.strategy.words import PRESETS

from ..predict import settings
from ..predict.networks import inline, load_network
from ..report.units import milliseconds, significant
from .blocks import Chapter, Compared, Figures, Grid, Held, Uncompared, gain, share, times
from .simulating import TITLES, collective_s, efficiency, fed, iteration, on_p100, replayed

_RATES_GBIT = (1, 2, 4, 8, 16, 32)
_ALPHA = "10us"
_MACHINES = 4
_SUMMIT_GPUS, _SUMMIT_PER_HOST = 24_576, 6
_PERIOD = 500


@dataclass(frozen=True)
class Best:
    """The largest gain of a search, and its link rate."""

    gain: float
    rate_gbit: float


def most_gain(strategy: str, baseline: str, workers: int, model: settings.Model) -> Best:
    """The largest gain in throughput of a strategy over a baseline, on links of 1 to 32 Gbit/s."""
    found = []
    for rate in _RATES_GBIT:
        slow, fast = (iteration(text, _link(rate), workers, model).iteration_s for text in (baseline, strategy))
        found.append(Best(slow / fast, rate))
    return max(found, key=lambda best: best.gain)


def _link(rate_gbit: float) -> Cluster:
    return inline(f"alpha={_ALPHA},rate={rate_gbit}Gbit,gamma=0s")


def _searched(what: str, reported: float, found: Best, remark: str) -> Compared:
    return Compared(what, reported, found.gain, gain, most=True, remark=f"{remark}; at {found.rate_gbit:g} Gbit/s")


def _horovod() -> list[Held]:
    """Tensors fused to 64 MiB on rings of 512 P100s."""
    cluster, strategy = load_network("25gbe"), "ring schedule=fixed(bucket=64MiB)"
    remark = "512 workers with a port of `25gbe` each, P100, 64 images"
    return [
        Compared(what, reported, efficiency(strategy, cluster, 512, on_p100(name)), share, remark=remark + more)
        for what, reported, name, more in (
            ("Horovod: Inception V3 and ResNet-101, 512 GPUs", 0.90, "resnet50", ", ResNet-50 in their place"),
            ("Horovod: VGG-16, 512 GPUs", 0.68, "vgg16", ""),
        )
    ]


def _priorities() -> list[Held]:
    """P3 and ByteScheduler: slices, layers near the input first, on parameter servers."""
    on_workers = f"ps(servers={_MACHINES}, on=workers)"
    served = f"ps(servers={_MACHINES})"
    held: list[Held] = [
        _searched(
            f"P3: {title}",
            reported,
            most_gain(f"{on_workers} schedule=priority", f"{on_workers} schedule=wait_free", _MACHINES, on_p100(name)),
            f"{_MACHINES} workers that serve, priority over wait-free",
        )
        for title, name, reported in (("ResNet-50", "resnet50", 1.25), ("VGG-19", "vgg19", 1.66))
    ]
    held.append(Uncompared("P3: Sockeye", "up to +38 %", "the layers and their times are not available"))
    bytescheduler = most_gain(f"{served} schedule=priority", f"{served} schedule=fifo", _MACHINES, on_p100("vgg16"))
    remark = f"VGG-16, {_MACHINES} workers and servers, priority over all after backward"
    held.append(_searched("ByteScheduler", 2.96, bytescheduler, remark))
    return held


def _byteps() -> list[Held]:
    """BytePS: servers on separate machines, which share no port with workers."""
    served = "ps(servers=16) schedule=priority(slice=4MiB)"
    remark = "VGG-16, 16 workers, 16 additional server machines, P100; against"
    return [
        _searched(what, reported, most_gain(served, baseline, 16, on_p100("vgg16")), f"{remark} {baseline}")
        for what, reported, baseline in (
            ("BytePS over allreduce", 1.84, "ring schedule=fixed(bucket=25MiB)"),
            ("BytePS over parameter servers", 3.45, "ps(servers=16, on=workers) schedule=wait_free"),
        )
    ]


def _dear() -> Held:
    """DeAR: reduce-scatter during backward, all-gather during the next forward pass."""
    cluster = load_network("10gbe_k80").replaced({"gamma": 0.0})
    gains = {}
    for name, title in TITLES.items():
        slow, fast = (
            iteration(f"ring schedule={schedule}", cluster, 64, replayed(name)).iteration_s
            for schedule in ("fixed(bucket=25MiB)", "split(slice=25MiB)")
        )
        gains[title] = slow / fast
    best = max(gains, key=gains.__getitem__)
    remark = (
        f"{best}, 64 workers with a port of `10gbe_k80` each, split over buckets of 25 MiB; maximum of three networks"
    )
    return Compared("DeAR on 10 GbE", 1.83, gains[best], gain, most=True, remark=remark)


def _collectives() -> list[Held]:
    """BlueConnect's two levels, and NCCL's double binary tree."""
    cluster = load_network("ib100")
    nbytes = replayed("resnet50").nbytes
    levels_s = collective_s("hierarchical", nbytes, 192, cluster, 4)
    held: list[Held] = []
    for flat in ("ring", "halving_doubling"):
        reduced = levels_s / collective_s(flat, nbytes, 192, cluster, 4)
        remark = f"ResNet-50's gradients, `ib100`, two levels against {flat}; the baseline is assumed"
        held.append(Compared("BlueConnect: synchronisation time, 192 GPUs", 0.13, reduced, gain, remark=remark))
    tree_s = collective_s("double_tree", 8, _SUMMIT_GPUS, cluster, _SUMMIT_PER_HOST)
    inside = cluster.inside or cluster.between
    ring_s = 2 * (_SUMMIT_GPUS - 1) * max(inside.busy_s(0), cluster.between.busy_s(0))
    remark = "8 bytes, `ib100` with 6 GPUs per host; a ring's 2 (N - 1) messages. A real tree's step costs more"
    held.append(Compared(f"double binary tree: latency, {_SUMMIT_GPUS:,} GPUs", 180.0, ring_s / tree_s, remark=remark))
    return held


def _diloco() -> Held:
    """DiLoCo: outer steps every 500 updates."""
    cluster, model = load_network("1gbe"), replayed("alexnet")
    every, seldom = (
        iteration(f"ring schedule=fifo{mode}", cluster, 8, model).busy_s["port"]
        for mode in ("", f" sync=diloco(steps={_PERIOD})")
    )
    remark = f"time of ports with 8 workers, diloco(steps={_PERIOD}), AlexNet on `1gbe`"
    return Compared("DiLoCo: less traffic", 500.0, every / seldom, times, remark=remark)


def _grace() -> list[Held]:
    """GRACE: compression at 1 Gbit/s, with free encoding: the upper bound of the gain from fewer bytes."""
    cluster, model = load_network("1gbe"), replayed("resnet50")
    dense_s = iteration("ring", cluster, 8, model).iteration_s
    remark = "ResNet-50, 8 workers on `1gbe`; encoding free"
    return [
        Compared(
            f"GRACE: {title} at 1 Gbit/s",
            reported,
            dense_s / iteration(f"ring codec={codec}", cluster, 8, model).iteration_s,
            most=True,
            remark=remark,
        )
        for title, reported, codec in (
            ("random-k 1 %", 4.95, "randomk(ratio=0.01)"),
            ("top-k 1 %", 2.2, "topk(ratio=0.01)"),
            ("PowerSGD", 1.65, "powersgd(rank=4)"),
        )
    ]


def systems() -> Chapter:
    """The chapter, with all figures."""
    held = (*_horovod(), *_byteps(), *_priorities(), _dear(), *_collectives(), _diloco(), *_grace())
    return Chapter(
        "Other systems",
        (
            "Each setting is as near to the paper's as the published data allow; the last column has the assumptions."
            f" Searches use links of {_RATES_GBIT[0]} to {_RATES_GBIT[-1]} Gbit/s with {_ALPHA} per message. A figure"
            " is also not explained if the model gives much more than was published: the model lacks encoding, copies"
            " to hosts and the processor time of messages.",
            Figures(tuple(held)),
        ),
        tuple(f"{one.what}: the model gives {one.written(one.ours)}." for one in held
              if isinstance(one, Compared) and one.verdict == "not explained"),
    )  # fmt: skip


GPUS = 4
_UPDATE_S_PER_BYTE = 1e-11
"""The time of an update, which reads weights, gradient and momentum and writes two of them, at 500 GB/s on a GPU."""


def clusters() -> dict[str, tuple[Cluster, tuple[int, ...]]]:
    """The networks by name, each with its numbers of workers."""
    update = {"update": _UPDATE_S_PER_BYTE}
    inside = load_network("pcie").replaced(update)
    ethernet, bus = load_network("10gbe_k80"), inside.constants
    constants = {
        **ethernet.constants,
        **{f"inside.{what}": bus[f"between.{what}"] for what in ("alpha", "beta")},
        "gamma": bus["gamma"],
    }
    outside = replace(ethernet, constants=constants, per_host=GPUS).replaced(update)
    return {
        "PCIe": (inside, (1, 2, 4)),
        "10 GbE": (outside, (GPUS * 4,)),
        "100 Gb/s InfiniBand": (load_network("ib100").replaced(update), (GPUS * 4,)),
    }


def _frameworks() -> dict[str, str]:
    """The strategies of the frameworks, by the frameworks' names; equal strategies share an entry."""
    found: dict[str, list[str]] = {}
    for name, preset in PRESETS.items():
        found.setdefault(preset.words, []).append(name)
    return {", ".join(names): words for words, names in found.items()}


def _written(seconds: float) -> str:
    """The time in milliseconds; rounding errors of zero become zero."""
    return milliseconds(seconds if abs(seconds) > 1e-9 else 0.0)


def stages() -> Chapter:
    """The chapter, with a table for each network."""
    blocks: list[str | Grid] = []
    hidden, reached = [], []
    for name, title in TITLES.items():
        model = fed(name, 1)
        rows, best = [], 0.0
        for place, (cluster, counts) in clusters().items():
            for workers in counts:
                for framework, words in _frameworks().items():
                    found = iteration(words, cluster, workers, model)
                    spent = (found.loading_s, found.h2d_s, found.forward_s, found.backward_s, found.exposed_s)
                    cells = (_written(seconds) for seconds in (*spent, found.update_s, found.iteration_s))
                    rate = significant(workers * model.batch / found.iteration_s)
                    alone_s = model.computing_s + model.batches.h2d_s
                    rows.append((place, str(workers), framework, *cells, rate, share(alone_s / found.iteration_s)))
                    best = max(best, alone_s / found.iteration_s) if place == "10 GbE" else best
        head = ("where", "workers", "framework", "loading", "copy", "forward", "backward", "exposed", "update",
                "iteration", "images/s", "efficiency")  # fmt: skip
        blocks += [f"{title}, milliseconds:", Grid(head, tuple(rows))]
        waits = [iteration("ring", clusters()["PCIe"][0], 1, fed(name, prefetch)).loading_s for prefetch in (0, 1)]
        hidden.append(f"{_written(waits[0])} and {_written(waits[1])} ms for {title}")
        reached.append(f"{share(best)} with {title}")
    return Chapter(
        "Four frameworks by stage",
        (
            "Shi and Chu: Caffe-MPI, CNTK, MXNet and TensorFlow, here as their"
            " [presets](../reference/strategies.md#presets), on one host of up to four GPUs and on four such hosts."
            " Loading, copies and prefetch are those of [frameworks.md](frameworks.md), which has measurements. The"
            " network is `pcie` inside hosts, and"
            f" `10gbe_k80` or `ib100` between them. Additions on GPUs are assumed to be free, and an update to take"
            f" {_UPDATE_S_PER_BYTE * 1e12:.0f} ps per byte of weights. MXNet and TensorFlow have the same strategy:"
            " one server, on a host of its own. The efficiency is relative to the same workers without any exchange.",
            *blocks,
            f"The wait for loading is, without prefetch and with one batch ahead, {'; '.join(hidden)}: prefetch hides"
            f" loading, as published. Over four hosts on Ethernet, the best of the four reaches an efficiency of"
            f" {', '.join(reached)}: as published, none scales if gradients are large relative to the computation. CNTK"
            " sends after backward and hides nothing; if latency dominates, its few messages compensate for that.",
        ),
        ("Stage times that depend on a framework's implementation: convolution algorithms, data layouts, decoding.",),
    )
