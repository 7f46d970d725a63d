"""The result file of ``syncline predict --workload``: what every number in it means, and its JSON form.

Owns the names, units and JSON of a ``Prediction`` and its rows; the rules of ``result_file`` hold here. Does not know
how anything was predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .result_file import ResultFile, reader


@dataclass(frozen=True)
class Predicted:
    """One strategy on so many workers of a network. Seconds are those of an iteration, in the mean.

    ``low_s`` to ``high_s`` is where ``iteration_s`` is expected. ``comm_s`` is for how long exchanges use the busiest
    of what they use; ``exposed_comm_s`` is what the training thread waits for them. ``scaling_efficiency`` is against
    one worker there. ``would_save_s`` are the seconds without what a resource costs, and ``remedy`` says what would
    remove the bottleneck. ``bytes_sent_per_step`` are a worker's. ``price`` is that of an epoch,
    where one was given, which takes ``epoch_s``.
    """

    strategy: str
    requested: str
    network: str
    workers: int
    per_node: int
    servers: int
    batch: int
    iteration_s: float
    low_s: float
    high_s: float
    images_per_s: float
    scaling_efficiency: float
    comm_s: float
    exposed_comm_s: float
    bottleneck: str
    remedy: str
    would_save_s: Mapping[str, float]
    loading_s: float
    h2d_s: float
    forward_s: float
    backward_s: float
    update_s: float
    other_s: float
    bytes_sent_per_step: float | None = None
    chosen: str = ""
    note: str = ""
    price: float | None = None
    epoch_s: float | None = None


@dataclass(frozen=True)
class Stated:
    """A constant of a network, as it was used: seconds, their range, and where they are from."""

    network: str
    name: str
    value: float
    low: float
    high: float
    measured: bool
    source: str


@dataclass(frozen=True, kw_only=True)
class Prediction(ResultFile):
    """Rows, the constants that they are from, and what a reader has to know to judge them.

    ``single_s`` is one worker's iteration on each network, ``knees`` the number of workers by network and strategy from
    which one more doubling brings too little, ``winners`` the fastest strategy by network and number of workers,
    ``break_even`` in words below which link speed each codec pays, ``holdout`` the model's error by network.
    """

    verb: ClassVar = "predict --workload"
    lists: ClassVar = {"rows": reader(Predicted), "constants": reader(Stated)}

    workload: str
    rows: tuple[Predicted, ...]
    constants: tuple[Stated, ...] = ()
    single_s: Mapping[str, float] = field(default_factory=dict)
    knees: tuple[Mapping[str, Any], ...] = ()
    winners: tuple[Mapping[str, Any], ...] = ()
    break_even: tuple[Mapping[str, Any], ...] = ()
    holdout: tuple[Mapping[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()
    price: float | None = None
    epoch_images: int | None = None
