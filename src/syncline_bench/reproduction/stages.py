"""Iterations by stage under the strategies of four frameworks (Shi, Chu 2017), on hosts of four GPUs.

Owns the networks that these hosts are put on, and what a GPU is assumed to take for an update.
"""

from __future__ import annotations

from dataclasses import replace

from syncline.costs.cluster import Cluster
from syncline.strategy.presets import PRESETS

from ..predict.networks import load_network
from ..report.units import milliseconds, significant
from .blocks import Chapter, Grid, share
from .nets import TITLES, fed
from .simulating import iteration

GPUS = 4
_UPDATE_S_PER_BYTE = 1e-11
"""An update reads weights, gradient and momentum and writes two of them, at 500 GB/s of a GPU's memory."""


def clusters() -> dict[str, tuple[Cluster, tuple[int, ...]]]:
    """Networks, and the numbers of workers on each."""
    update = {"update": _UPDATE_S_PER_BYTE}
    inside = load_network("pcie").replaced(update)
    ethernet, bus = load_network("10gbe"), inside.constants
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
    """Strategies by the names of the frameworks that they are those of."""
    found: dict[str, list[str]] = {}
    for name, preset in PRESETS.items():
        found.setdefault(preset.words, []).append(name)
    return {", ".join(names): words for words, names in found.items()}


def _written(seconds: float) -> str:
    """Milliseconds, without what rounding has left of nothing."""
    return milliseconds(seconds if abs(seconds) > 1e-9 else 0.0)


def stages() -> Chapter:
    """A table for each network."""
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
            " [frameworks.md](frameworks.md), which has measurements. Networks `pcie` inside hosts, `10gbe` and `ib100`"
            f" between; adding on GPUs is free, an update is assumed to take"
            f" {_UPDATE_S_PER_BYTE * 1e12:.0f} ps per byte of weights. MXNet and TensorFlow are one strategy:"
            " one server, on a host of its own. Efficiency is that of images per second against workers"
            " that exchange nothing.",
            *blocks,
            f"Loading is waited for without and with one batch ahead: {'; '.join(hidden)}: prefetch hides it, as was"
            f" found. Over four hosts on Ethernet the best of the four reaches an efficiency of {', '.join(reached)}:"
            " as was found, none scales where gradients are many for their compute. CNTK, which sends when backward has"
            " ended, hides nothing; where latency decides, its few messages win back what that costs.",
        ),
        ("Stage times that depend on how a framework is written: convolution algorithms, data layouts, decoding.",),
    )
