"""The model's own error: predictions beside measurements that nothing was fitted on, by network.

Owns the files in ``measured/``, one for a network, named as it is, and what they say. A file is JSON: ``source``,
``date``, ``fitted`` (on what the constants were) and ``rows``, each with ``workload``, ``strategy``, ``workers``,
``measured_s`` and ``predicted_s``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

import numpy as np

from syncline.errors import DataError

USUAL = 0.9
"""The share of measurements that an interval is to hold."""


@dataclass(frozen=True)
class Holdout:
    """How far predictions are from measurements, as shares of these: in the mean, at worst, and ``usual`` for most."""

    network: str
    count: int
    mean: float
    worst: float
    usual: float
    source: str = ""
    date: str = ""
    fitted: str = ""


def holdout_of(network: str) -> Holdout | None:
    """The error on a network; None where it was never measured. Raises DataError for a file that says nothing."""
    path = resources.files(__package__) / "measured" / f"{network}.json"
    if "/" in network or not path.is_file():
        return None
    return parse_holdout(path.read_text(encoding="utf-8"), network)


def parse_holdout(text: str, network: str) -> Holdout | None:
    """The error that the text of a file tells; None where it has no rows."""
    try:
        data = json.loads(text)
        pairs = [(float(row["predicted_s"]), float(row["measured_s"])) for row in data["rows"]]
        texts = {name: str(data.get(name, "")) for name in ("source", "date", "fitted")}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError, ZeroDivisionError) as error:
        raise DataError(f"the measurements of {network} are none: {error!r}") from None
    if not pairs:
        return None
    errors = np.array([abs(predicted / measured - 1) for predicted, measured in pairs])
    usual = float(np.quantile(errors, USUAL))
    return Holdout(network, len(errors), float(errors.mean()), float(errors.max()), usual, **texts)
