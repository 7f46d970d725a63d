"""The chapters on published tables of real measurements: B-Caffe on K80s, and exchanges that share a link.

Owns the settings of these measurements. Reads the published tables from a folder, and owns the names of their CSV
columns. The data are public: B-Caffe's are from github.com/hclhkbu/B-Caffe (``logdata`` and ``scripts/gmwfbp.py``), the
concurrent exchanges from github.com/HKBU-HPML/dl-scheduling.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import numpy as np

from syncline.costs.cluster import Cluster, Floats
from syncline.errors import DataError
from syncline.nouns import Spec
from syncline.schedules import Cost
from syncline.strategy.strategy import Strategy

from ..predict import settings
from ..predict.fabric import shared_s
from ..predict.iterations import simulate
from ..predict.networks import load_network
from ..predict.settings import setting_of
from ..report.units import significant
from ..workloads import Trace
from ..workloads._trace import TracedLayer
from .blocks import Chapter, Compared, Figures, Grid, deviation_text, share
from .simulating import ONE_BY_ONE, lasting, replayed

LAYERS = "bcaffe_googlenet_k80_layers.csv"
THROUGHPUTS = "bcaffe_measured_throughput.csv"
ALLREDUCES = "bcaffe_osu_allreduce_10gbe.csv"
CONCURRENT = "dlscheduling_results_avg.csv"

SOURCES = {
    LAYERS: "github.com/hclhkbu/B-Caffe, `logdata`",
    THROUGHPUTS: "github.com/hclhkbu/B-Caffe, `scripts/gmwfbp.py`",
    ALLREDUCES: "github.com/hclhkbu/B-Caffe, `logdata`",
    CONCURRENT: "github.com/HKBU-HPML/dl-scheduling",
}

_ONE_NODE = ("tmpcomm.log", "0")
"""The log file and dump of the run on one node."""

T = TypeVar("T")


def missing(folder: Path | None, names: tuple[str, ...]) -> list[str]:
    """The tables of ``names`` that the folder lacks; all of them without a folder."""
    return [name for name in names if folder is None or not (folder / name).is_file()]


def _read(path: Path, read: Callable[[dict[str, str]], T]) -> list[T]:
    """Read each row with a function. Raises DataError, with the file and line, if a row is malformed."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            found = []
            for row in rows:
                try:
                    found.append(read(row))
                except (KeyError, TypeError, ValueError) as error:
                    raise DataError(f"{path}, line {rows.line_num}: {error!r} of {row}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read the table {path}: {error}") from None
    if not found:
        raise DataError(f"the table {path} has no rows")
    return found


def googlenet_on_k80(folder: Path, batch: int, iteration_s: float) -> settings.Model:
    """The logged layers of GoogLeNet. The rest of the iteration's time counts as forward, spread evenly.

    The log repeats a layer's time for its weight and its bias; it counts once.
    """
    rows = _read(folder / LAYERS, lambda row: ((row["file"], row["dump"]), int(row["elements"]), row["backward_us"]))
    tensors = [(elements, seconds) for where, elements, seconds in rows if where == _ONE_NODE]
    layers: list[tuple[list[int], str]] = []
    for elements, seconds in tensors:
        if layers and layers[-1][1] == seconds and len(layers[-1][0]) == 1:
            layers[-1][0].append(elements)
        else:
            layers.append(([elements], seconds))
    backward_s = sum(float(seconds) for _, seconds in layers) * 1e-6
    forward_s = (iteration_s - backward_s) / len(layers)
    found = tuple(
        TracedLayer(
            f"layer {number}",
            tuple(Spec(name, (count,)) for name, count in zip(("weight", "bias"), elements, strict=False)),
            forward_s,
            float(seconds) * 1e-6,
        )
        for number, (elements, seconds) in enumerate(layers)
    )
    return settings.traced("googlenet on a K80", Trace("googlenet on a K80", found), batch)


@dataclass(frozen=True)
class Throughput:
    """A measured case of B-Caffe; ``batch`` is per node."""

    model: str
    batch: int
    method: str
    nodes: int
    images_per_s: float


def throughputs(folder: Path) -> list[Throughput]:
    """The measured cases of all networks and methods."""
    return _read(
        folder / THROUGHPUTS,
        lambda row: Throughput(
            row["model"], int(row["batch_per_node"]), row["method"], int(row["nodes"]), float(row["images_per_s"])
        ),
    )


def allreduce_costs(folder: Path) -> dict[int, Cost]:
    """The seconds of an allreduce by its bytes, for each measured number of nodes.

    Interpolates linearly between the measured sizes; above the largest, it uses the bytes per second at that size.
    """
    rows = _read(
        folder / ALLREDUCES, lambda row: (int(row["nodes"]), float(row["bytes"]), float(row["avg_latency_us"]))
    )
    found: dict[int, Cost] = {}
    for nodes in sorted({nodes for nodes, _, _ in rows}):
        points = sorted((nbytes, 1e-6 * latency_us) for count, nbytes, latency_us in rows if count == nodes)
        found[nodes] = _along(*map(np.array, zip(*points, strict=True)))
    return found


def _along(sizes: Floats, seconds: Floats) -> Cost:
    rate = float(seconds[-1] / sizes[-1])

    def cost(nbytes: float) -> float:
        return float(np.interp(nbytes, sizes, seconds)) + rate * max(0.0, nbytes - float(sizes[-1]))

    return cost


def concurrent(folder: Path) -> dict[int, dict[int, float]]:
    """The seconds of concurrent exchanges, by their bytes and their number."""
    rows = _read(
        folder / CONCURRENT, lambda row: (int(row["msg_size"]), int(row["job_num"]), float(row["avg_latency"]))
    )
    found: dict[int, dict[int, float]] = {}
    for nbytes, count, latency_us in rows:
        found.setdefault(nbytes, {})[count] = 1e-6 * latency_us
    return found


METHODS = {
    "WFBP": "ring schedule=wait_free",
    "MG-WFBP": "ring schedule=merged",
    "SyncEASGD(no overlap, one fused allreduce)": "ring schedule=fifo",
}
"""The measured methods of B-Caffe, and the equal strategies."""

_SHORT = {"WFBP": "WFBP", "MG-WFBP": "MG-WFBP", "SyncEASGD(no overlap, one fused allreduce)": "one fused allreduce"}

_SHARED_BYTES = 40 * 2**20
"""The size of the exchanges that share a link, in the compared figure."""


def absent(title: str, folder: Path | None, names: tuple[str, ...]) -> Chapter | None:
    """A chapter that names the missing tables; None if all are there."""
    lacking = missing(folder, names)
    if not lacking:
        return None
    where = f"{folder} has no such file" if folder is not None else "no folder was given with `--data`"
    places = "; ".join(f"`{name}` ({SOURCES[name]})" for name in lacking)
    return Chapter(title, (f"Not computed: {where}. Missing, and public: {places}.",))


def images_per_s(
    strategy: str, cluster: Cluster, nodes: int, model: settings.Model, measured: Cost | None = None
) -> float:
    """The throughput of all nodes in a system that waits for each exchange. ``measured`` is the time of an exchange."""
    setting = replace(setting_of(Strategy.parse(strategy), cluster, nodes), measured=measured)
    return nodes * model.batch / simulate(setting, model, ONE_BY_ONE).iteration_s


class Cases:
    """The nine measured cases of a network, and their simulations in several ways."""

    def __init__(self, measured: Sequence[Throughput], model: settings.Model) -> None:
        self.several = [case for case in measured if case.nodes > 1]
        self._model = model
        self.ways: dict[str, list[float]] = {}

    def add(self, way: str, cluster: Cluster, costs: Mapping[int, Cost] | None = None) -> None:
        """Simulate all cases, with these exchange costs by number of nodes if given, under the name ``way``."""
        self.ways[way] = [
            images_per_s(METHODS[case.method], cluster, case.nodes, self._model, (costs or {}).get(case.nodes))
            for case in self.several
        ]

    def error(self, way: str) -> float:
        """The mean relative error of a way."""
        pairs = zip(self.ways[way], self.several, strict=True)
        return fmean(abs(ours / case.images_per_s - 1) for ours, case in pairs)

    def in_order(self, way: str) -> bool:
        """Whether MG-WFBP is at least as fast as WFBP, and WFBP faster than one fused allreduce."""
        found = {(case.method, case.nodes): ours for case, ours in zip(self.several, self.ways[way], strict=True)}
        order = ("MG-WFBP", "WFBP", "SyncEASGD(no overlap, one fused allreduce)")
        rates = [[found[method, nodes] for method in order] for nodes in sorted({nodes for _, nodes in found})]
        return all(merged >= free * (1 - 1e-9) and free > fused for merged, free, fused in rates)

    @property
    def grid(self) -> Grid:
        """The cases and the results of all ways as a table."""
        rows = []
        for index, case in enumerate(self.several):
            cells = [f"{_SHORT[case.method]}, {case.nodes} nodes", significant(case.images_per_s, 4)]
            for found in self.ways.values():
                cells += [significant(found[index], 4), deviation_text(found[index] / case.images_per_s - 1)]
            rows.append(tuple(cells))
        means = (cell for way in self.ways for cell in (f"order {'kept' if self.in_order(way) else 'lost'}",
                                                       f"mean {share(self.error(way))}"))  # fmt: skip
        head = ("case", "measured", *(cell for way in self.ways for cell in (way, "error")))
        return Grid(head, (*rows, ("all nine", "", *means)))


def _single(measured: Sequence[Throughput]) -> float:
    """The iteration time on one node."""
    one = next(case for case in measured if case.nodes == 1)
    return one.batch / one.images_per_s


def googlenet_cases(folder: Path) -> Cases:
    """GoogLeNet with the logged layers: with the published constants, and with the measured allreduce times."""
    known = [case for case in throughputs(folder) if case.model == "GoogleNet"]
    cases = Cases(known, googlenet_on_k80(folder, known[0].batch, _single(known)))
    cluster = load_network("10gbe_k80")
    cases.add("given constants", cluster)
    cases.add("OSU curve", cluster, allreduce_costs(folder))
    return cases


def resnet50_cases(folder: Path) -> Cases:
    """ResNet-50, whose layers were not published: the replay's layers, scaled to the time of one node."""
    known = [case for case in throughputs(folder) if case.model == "ResNet-50"]
    cases = Cases(known, lasting(replayed("resnet50"), known[0].batch, _single(known)))
    cluster = load_network("10gbe_k80")
    cases.add("gamma 2.5 ns", cluster)
    cases.add("gamma 0", cluster.replaced({"gamma": 0.0}))
    return cases


def bcaffe(folder: Path | None) -> Chapter:
    """The nine cases of GoogLeNet, and those of ResNet-50."""
    title = "B-Caffe on K80s and 10 GbE"
    lacking = absent(title, folder, (LAYERS, THROUGHPUTS, ALLREDUCES))
    if lacking is not None or folder is None:
        return lacking or Chapter(title, ())
    cases, others = googlenet_cases(folder), resnet50_cases(folder)
    constants = load_network("10gbe_k80").constants
    alpha, beta, gamma = (constants[name].value for name in ("between.alpha", "between.beta", "gamma"))
    at_eight = {case.method: ours for case, ours in zip(cases.several, cases.ways["given constants"], strict=True)
                if case.nodes == max(other.nodes for other in cases.several)}  # fmt: skip
    merged, free, fused = (at_eight[method] for method in ("MG-WFBP", "WFBP", list(METHODS)[-1]))
    eight = {case.method: case.images_per_s for case in cases.several if case.nodes == 8}
    measured = (eight[method] for method in ("MG-WFBP", "WFBP", list(METHODS)[-1]))
    fast, middle, slow = measured
    return Chapter(
        title,
        (
            "Images per second of all nodes. GoogLeNet has the logged layers and 64 images per node; the rest of the"
            " iteration's time counts as forward. The system waits for each exchange before the next."
            f" Network `10gbe_k80`: {1e6 * alpha:.2f} us per message, {1e9 * beta:.4f} ns per byte, {1e9 * gamma:.1f}"
            " ns per byte added. The authors fitted these constants to OSU's allreduce. The columns `OSU curve` use the"
            " measured allreduce times of 2, 4 and 8 nodes instead, with linear interpolation between sizes, and above"
            " 1 MiB the bytes per second at 1 MiB.",
            cases.grid,
            Figures(
                (
                    Compared("MG-WFBP over WFBP, 8 nodes", fast / middle, merged / free, fit=True),
                    Compared("MG-WFBP over one fused allreduce, 8 nodes", fast / slow, merged / fused, fit=True),
                )
            ),
            "ResNet-50, 32 images per node. Its layers were not published: the table uses the layers of"
            " `replay:resnet50`, scaled to the time of one node, with two values of gamma.",
            others.grid,
        ),
        (
            "ResNet-50 and GoogLeNet on the same cluster with one gamma. The value of 2.5 ns per byte fits GoogLeNet,"
            f" but its mean error for ResNet-50 is {share(others.error('gamma 2.5 ns'))}; with gamma 0 it is"
            f" {share(others.error('gamma 0'))}.",
        ),
    )


def fair_sharing(folder: Path | None) -> Chapter:
    """The chapter on exchanges that share a link."""
    title = "Exchanges that share one link"
    lacking = absent(title, folder, (CONCURRENT,))
    if lacking is not None or folder is None:
        return lacking or Chapter(title, ())
    found = concurrent(folder)
    rows = []
    for nbytes, seconds in sorted(found.items()):
        errors = sharing_errors(seconds)
        worst = max(errors, key=abs)
        rows.append((f"{nbytes >> 20} MiB", str(max(seconds)), share(fmean(map(abs, errors))), deviation_text(worst)))
    largest = found[_SHARED_BYTES]
    most = max(largest)
    held = Compared(
        f"seconds of {most} exchanges of 40 MiB at once",
        largest[most],
        shared_s([largest[1]] * most)[-1],
        significant,
        remark="max-min fair shares; the time of a single exchange as measured",
    )
    return Chapter(
        title,
        (
            "k allreduces between two nodes start together on one 1 GbE link. Under fair sharing they end together,"
            " after k times the time of a single one, which is taken from the table.",
            Figures((held,)),
            Grid(("each", "up to k", "mean error", "worst"), tuple(rows)),
        ),
        ("Single exchanges of 10 and 20 MiB, which are slower or faster than the share of one among many.",),
    )


def sharing_errors(seconds: Mapping[int, float]) -> list[float]:
    """The relative errors of fair sharing for two and more exchanges, based on the time of a single one."""
    return [shared_s([seconds[1]] * count)[-1] / took - 1 for count, took in sorted(seconds.items()) if count > 1]
