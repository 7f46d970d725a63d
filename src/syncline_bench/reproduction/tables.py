"""Reads published tables from a folder: layers, measured throughputs, allreduce times, concurrent exchanges.

Owns the names of the CSV columns. The data are public: B-Caffe's are from github.com/hclhkbu/B-Caffe (``logdata`` and
``scripts/gmwfbp.py``), the concurrent exchanges from github.com/HKBU-HPML/dl-scheduling.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from syncline.costs.cluster import Floats
from syncline.errors import DataError
from syncline.nouns import Spec
from syncline.schedules import Cost

from ..predict import settings
from ..workloads import Trace
from ..workloads._trace import TracedLayer

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
