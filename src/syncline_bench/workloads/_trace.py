"""Traces: measured or derived times of a network's layers, and the reader of trace files.

``models.replayed`` plays a trace, and ``_feed`` simulates its copies to the device. This module knows no torch.

A trace file is CSV with one line per layer, in forward order, and at least these columns, in any order:

    name,elements,forward_s,backward_s

``elements`` is the number of the layer's parameters, which a replay holds as one float32 tensor; 0 is a layer that only
takes time, such as a pooling. Times are seconds of one worker's batch. ``backward_s`` is the time from the gradient of
the layer's output to those of its input and parameters. An optional column ``h2d_s`` has the time for copying a batch
to the device; the lines' times add up, and it is usually empty or 0 in all but one. An optional column ``device`` names
the device that the layers computed on, ``cpu`` or ``cuda``, in one line or in all. With an optional column ``shape``,
such as ``768x3072``, the tensor has this shape; codecs of matrices depend on it. An optional column ``rows`` has the
share of the tensor's rows whose gradient is not zero, as of an embedding that few symbols of a batch use; empty is 1.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from syncline.costs.cluster import DEVICES
from syncline.errors import DataError, UsageError
from syncline.nouns import Spec

COLUMNS = ("name", "elements", "forward_s", "backward_s")
"""The required columns of a trace file; others are ignored, except ``h2d_s``."""

_MOST_DIGITS = 18
_COPIES, _DEVICE, _SHAPE, _ROWS = "h2d_s", "device", "shape", "rows"


@dataclass(frozen=True)
class TracedLayer:
    """A layer's parameters, named within the layer, and the seconds that one worker's batch takes in it.

    Raises UsageError for times that are negative or not finite.
    """

    name: str
    tensors: tuple[Spec, ...]
    forward_s: float
    backward_s: float
    h2d_s: float = 0.0
    rows: float = 1.0
    """The share of rows whose gradient is not zero."""

    def __post_init__(self) -> None:
        if not 0 < self.rows <= 1:
            raise UsageError(f"rows of layer {self.name!r} must be a share above 0 and up to 1, got {self.rows!r}")
        if not self.name:
            raise UsageError("a layer needs a name")
        times = {"forward_s": self.forward_s, "backward_s": self.backward_s, "h2d_s": self.h2d_s}
        for what, value in times.items():
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{what} of layer {self.name!r} must be seconds from 0 up, got {value!r}")


@dataclass(frozen=True)
class Trace:
    """A network as a sequence of layers in forward order; backward is the reverse.

    ``batch`` is the number of samples per worker that the times are for, None if unknown; ``device`` is where the
    layers computed, empty if unknown. Raises UsageError if there is no layer, no parameter, or a duplicate name.
    """

    name: str
    layers: tuple[TracedLayer, ...]
    batch: int | None = None
    device: str = ""

    def __post_init__(self) -> None:
        if not self.layers:
            raise UsageError(f"the trace {self.name} has no layers")
        name, count = Counter(layer.name for layer in self.layers).most_common(1)[0]
        if count > 1:
            raise UsageError(f"the trace {self.name} has {count} layers named {name!r}")
        if self.elements == 0:
            raise UsageError(f"no layer of the trace {self.name} has parameters: there would be nothing to exchange")

    @property
    def elements(self) -> int:
        """The number of parameters of all layers."""
        return sum(tensor.elements for layer in self.layers for tensor in layer.tensors)

    @property
    def nbytes(self) -> int:
        """The bytes of all gradients, uncompressed."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors)

    @property
    def forward_s(self) -> float:
        """The seconds of a whole forward pass."""
        return math.fsum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        """The seconds of a whole backward pass."""
        return math.fsum(layer.backward_s for layer in self.layers)

    @property
    def h2d_s(self) -> float:
        """The seconds for copying a batch to the device, 0 if not measured."""
        return math.fsum(layer.h2d_s for layer in self.layers)

    @property
    def total_s(self) -> float:
        """The seconds of an iteration's forward and backward pass, a lower bound that no exchange can reduce."""
        return self.forward_s + self.backward_s


def read_trace(path: str | Path) -> Trace:
    """The trace in a CSV file. DataError names the file and line of a fault, and what is expected."""
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            devices: set[str] = set()
            layers = tuple(_layers(csv.DictReader(file, strict=True), path, devices))
    except OSError as error:
        raise DataError(f"cannot read the trace {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"the trace {path} is not text in UTF-8: {error.reason}") from None
    try:
        return Trace(str(path), layers, device="".join(devices))
    except UsageError as error:
        raise DataError(f"{path}: {error}") from None


def _layers(rows: csv.DictReader[str], path: str | Path, devices: set[str]) -> Iterator[TracedLayer]:
    """The layers line by line; adds their device to ``devices``. DataError names the fault of a line."""
    seen: dict[str, int] = {}
    try:
        columns = [(column or "").strip() for column in rows.fieldnames or ()]
        missing = [name for name in COLUMNS if name not in columns]
        if missing:
            raise UsageError(
                f"the header of a trace is {','.join(COLUMNS)}; this one has no {' and no '.join(missing)}"
            )
        if len(set(columns)) < len(columns):
            raise UsageError(f"the header names a column twice: {','.join(columns)}")
        rows.fieldnames = columns
        for row in rows:
            layer = _layer(row)
            if layer.name in seen:
                raise UsageError(f"the layer {layer.name!r} was already on line {seen[layer.name]}: names differ")
            seen[layer.name] = rows.reader.line_num
            devices |= _device(row)
            if len(devices) > 1:
                raise UsageError(f"layers on {' and on '.join(sorted(devices))}: a trace is of one device")
            yield layer
    except (UsageError, csv.Error) as error:
        raise DataError(f"{path}, line {max(1, rows.reader.line_num)}: {error}") from None
    if not seen:
        raise DataError(f"{path}, line {rows.reader.line_num}: the trace has no layers")


def _layer(row: Mapping[str | None, str | list[str] | None]) -> TracedLayer:
    if None in row:
        raise UsageError("there are more values than columns: quote names that hold a comma")
    values: dict[str, str] = {}
    for column in COLUMNS:
        value = row[column]
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f"there is no {column}")
        values[column] = value.strip()
    for column in (_COPIES, _SHAPE, _ROWS):
        value = row.get(column)
        if isinstance(value, str) and value.strip():
            values[column] = value.strip()
    elements = _elements(values["elements"])
    tensors = (Spec("weight", _shape(values, elements)),) if elements else ()
    times = _number(values, "forward_s"), _number(values, "backward_s"), _number(values, _COPIES, 0.0)
    return TracedLayer(values["name"], tensors, *times, _number(values, _ROWS, 1.0))


def _shape(values: Mapping[str, str], elements: int) -> tuple[int, ...]:
    """The shape of a line, by default one dimension."""
    sizes = values.get(_SHAPE, str(elements)).split("x")
    shape = tuple(int(size) if _is_count(size) else 0 for size in sizes)
    if math.prod(shape) != elements:
        raise UsageError(f"shape must be sizes with the product {elements}, such as 768x3072, got {values[_SHAPE]!r}")
    return shape


def _device(row: Mapping[str | None, str | list[str] | None]) -> set[str]:
    """The device of a line, if it names one."""
    value = row.get(_DEVICE)
    named = {value.strip()} - {""} if isinstance(value, str) else set[str]()
    if unknown := named.difference(DEVICES):
        raise UsageError(f"device must be {' or '.join(DEVICES)}, got {unknown.pop()!r}")
    return named


def _elements(text: str) -> int:
    if not _is_count(text):
        raise UsageError(f"elements must be a whole number, 0 for a layer without parameters, got {text!r:.100}")
    return int(text)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _number(values: Mapping[str, str], column: str, default: float | None = None) -> float:
    if default is not None and column not in values:
        return default
    try:
        return float(values[column])
    except ValueError:
        kind = "a share" if column == _ROWS else "a number of seconds"
        raise UsageError(f"{column} must be {kind}, got {values[column]!r}") from None
