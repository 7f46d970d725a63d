"""The result file of ``syncline bench-gradients``: what every number in it means, and its JSON form.

Owns the names, units and JSON of a ``GradientResult`` and its rows; the rules of ``bench_rows`` hold here too. Does not
know how anything was measured.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError
from .files import replace_text
from .rows import finite, known

BARE = "bare"
CONTIGUOUS = "contiguous"


@dataclass(frozen=True)
class GradientRow:
    """One form of an iteration's gradient exchange, for the network of one workload, among so many ranks.

    An iteration is ``zero_grad``, a backward pass that computes nothing, and, with several ranks, the exchange, until
    the mean is where the form has it. A repetition's time is that of its slowest rank; ``median_s`` and ``p99_s`` are
    over ``repetitions``. ``added_s`` is the median of what the form takes beyond ``bare``, in which no gradient is
    moved, in the same repetition; ``share = added_s / median_s``. ``passes`` is how often the form reads or writes all
    gradients beside the exchange among so many ranks, ``limit_s`` the time of that at the speed of plain copies by all
    ranks, measured in the same run, and ``of_limit = limit_s / added_s``, None where there is nothing to move; above 1
    the gradients lay in a cache, and it is no limit. ``cpu_s`` is the processor time of all ranks per iteration, which
    other work on the machine changes little, ``sent_bytes`` what a rank's transport counted. ``correct`` is of every
    element on every rank, before the timed repetitions and after the last one. ``error`` says why there are no figures.
    """

    workload: str
    form: str
    ranks: int
    tensors: int
    parameters: int
    bytes: int
    passes: int
    repetitions: int = 0
    median_s: float | None = None
    p99_s: float | None = None
    added_s: float | None = None
    share: float | None = None
    limit_s: float | None = None
    of_limit: float | None = None
    cpu_s: float | None = None
    sent_bytes: float | None = None
    correct: bool | None = None
    error: str | None = None

    @property
    def place(self) -> tuple[str, int]:
        """Rows of one place can be compared, and stand in one table and chart."""
        return self.workload, self.ranks

    @property
    def finished(self) -> bool:
        """True when it was measured without an error and every element was right."""
        return self.error is None and self.median_s is not None and self.correct is True


@dataclass(frozen=True)
class GradientResult:
    """A whole run: where and with what it was measured, and its rows."""

    machine: str
    cores: int
    versions: Mapping[str, str]
    commit: str | None
    modified: bool | None
    source_sha256: str
    started: str
    rows: tuple[GradientRow, ...] = ()

    def to_json(self) -> str:
        """The text of the result file: strict JSON."""
        return json.dumps(finite(dataclasses.asdict(self)), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> GradientResult:
        """Read a result file's text back; raises DataError where it is not one."""
        try:
            data = json.loads(text)
            rows = tuple(GradientRow(**known(GradientRow, item)) for item in data["rows"])
            return cls(**{**known(cls, data), "rows": rows})
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise DataError(f"this is not a result file of syncline bench-gradients: {error!r}") from None

    def save(self, path: Path) -> None:
        """Write the result file in one piece, so that a reader never sees half of it."""
        replace_text(path, self.to_json())


def places(rows: tuple[GradientRow, ...]) -> tuple[tuple[GradientRow, ...], ...]:
    """The rows of each place, everything in the order of the first rows."""
    found: dict[tuple[str, int], list[GradientRow]] = {}
    for row in rows:
        found.setdefault(row.place, []).append(row)
    return tuple(map(tuple, found.values()))
