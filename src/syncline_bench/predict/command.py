"""The verb ``syncline predict`` without its options' syntax: request, prediction, file, table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..report import prediction_table
from ..report.files import STANDARD_OUTPUT, result_paths
from .collectives import predict_collectives
from .networks import load_network


def collectives(
    texts: Sequence[str],
    sizes: Sequence[int],
    workers: Sequence[int],
    network: str,
    *,
    origin: Mapping[str, Any],
    per_node: int | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> None:
    """Predict collectives, print the table and write the file; raises UsageError before anything is computed.

    ``origin`` says in the file where, when and with which code it was made.
    """
    (target,) = result_paths({"--json": json_path})
    console = console or Console(stderr=target == STANDARD_OUTPUT)
    result = replace(predict_collectives(texts, sizes, workers, load_network(network), per_node), **origin)
    if target is not None:
        result.save(target)
    console.print(prediction_table.render(result, console.width))
