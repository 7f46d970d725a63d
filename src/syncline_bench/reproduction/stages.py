"""The chapter on iterations by stage under the strategies of four frameworks (Shi, Chu 2017), on hosts of four GPUs.

Owns the networks between these hosts, and the assumed time of an update on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

from syncline.costs.cluster import Cluster
from syncline.strategy.words import PRESETS

from ..predict.networks import load_network
from ..report.units import milliseconds, significant
from .blocks import Chapter, Grid, share
from .nets import TITLES, fed
from .simulating import iteration

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
            "Shi and Chu: Caffe-MPI, CNTK, MXNet and TensorFlow, here as their [presets](strategies.md#presets), on one"
            " host of up to four GPUs and on four such hosts. Loading, copies and prefetch are those of"
            " [frameworks.md](frameworks.md), which has measurements. The network is `pcie` inside hosts, and"
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
