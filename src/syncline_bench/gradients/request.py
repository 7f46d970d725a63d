"""What to measure, checked as a whole before any process starts, and what the ranks are told of it.

Owns the ``Request``, the reading of models' tensors, and ``Work``, the argument of every rank. Starts nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec

from syncline.errors import UsageError

from ..machine import available_memory_bytes
from ..report.units import size as size_text
from ..workloads import layers, load
from .forms import FORMS, Form, exchanges_only, forms_of

DEFAULT_WORKLOADS = ("synthetic:alexnet", "synthetic:googlenet", "synthetic:resnet50")
DEFAULT_RANKS = (1, 2)
DEFAULT_REPETITIONS = 15
WARM_UP = 2
"""Repetitions before those that count. They check the results of every form."""

MOST_RANKS = 64
"""The sums of more ranks would not be exact in float32."""
_PROCESS_BYTES = 250 << 20
_COPIES = 9
"""The arrays of the gradients' size in a rank: gradients, weights, a block for each of three kinds of forms, a block of
torch, two for the probe of memory, and one for messages in flight."""


@dataclass(frozen=True)
class Model:
    """The tensors of a workload's network that get gradients, float32."""

    workload: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def parameters(self) -> int:
        """The number of elements of all tensors."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return 4 * self.parameters


@dataclass(frozen=True)
class Request:
    """Models x forms x numbers of ranks."""

    models: tuple[Model, ...]
    forms: tuple[Form, ...]
    ranks: tuple[int, ...]
    repetitions: int
    asked: tuple[str, ...] = ()
    """The names of the requested forms; empty if all are measured."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """The requested forms that are not measured with a single rank, which exchanges nothing."""
        alone = 1 in self.ranks
        return tuple(name for name in self.asked if alone and exchanges_only(FORMS[name]))

    def forms_at(self, ranks: int) -> tuple[Form, ...]:
        """The forms that can be measured with this number of ranks."""
        return tuple(form for form in self.forms if ranks > 1 or not exchanges_only(form))

    def turns_at(self, ranks: int) -> int:
        """The number of turns with this number of ranks, for the progress display."""
        return len(self.models) * len(self.forms_at(ranks)) * (WARM_UP + self.repetitions)


@dataclass(frozen=True)
class Work:
    """The task of one set of ranks, which they get as JSON in their command line."""

    models: tuple[Model, ...]
    forms: tuple[str, ...]
    repetitions: int

    def to_json(self) -> str:
        """The task as an argument for the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Work:
        """The task from a rank's argument."""
        fields = json.loads(text)
        models = tuple(Model(item["workload"], tuple(map(tuple, item["shapes"]))) for item in fields["models"])
        return cls(**{**fields, "models": models, "forms": tuple(fields["forms"])})


def request_of(
    *,
    workloads: Sequence[str] = (),
    ranks: Sequence[int] = (),
    forms: Sequence[str] = (),
    repetitions: int = DEFAULT_REPETITIONS,
) -> Request:
    """A checked request. Empty sequences mean the defaults. Raises UsageError."""
    if repetitions < 1:
        raise UsageError(f"{repetitions} repetitions measure nothing: use 1 or more")
    worlds = tuple(dict.fromkeys(ranks or DEFAULT_RANKS))
    for world in worlds:
        if not 1 <= world <= MOST_RANKS:
            raise UsageError(f"{world} ranks cannot be compared: use 1 to {MOST_RANKS}")
    chosen = forms_of(forms)
    if find_spec("torch") is None:
        raise UsageError("gradients are PyTorch's: pip install 'syncline[torch]'")
    models = tuple(model_of(text) for text in dict.fromkeys(workloads or DEFAULT_WORKLOADS))
    request = Request(models, chosen, worlds, repetitions, tuple(dict.fromkeys(forms)))
    if forms and worlds == (1,) and set(request.left_out) == set(forms):
        raise UsageError(f"one rank alone exchanges nothing, which is all that {', '.join(forms)} does: use --ranks 2")
    _check_memory(request)
    return request


def model_of(workload: str) -> Model:
    """The tensors of a workload's network, which is built without memory. UsageError for types other than float32."""
    loaded = load(workload)
    import torch

    with torch.device("meta"):
        found = layers(loaded.build())
    other = next((layer.spec for layer in found if layer.spec.dtype != "float32"), None)
    if other is not None:
        raise UsageError(f"{workload}: {other.name} is {other.dtype}, and gradients are compared in float32 only")
    return Model(workload, tuple(layer.spec.shape for layer in found))


def _check_memory(request: Request) -> None:
    """Raise UsageError if the request would make the machine swap, or the kernel kill ranks."""
    largest, ranks = max(request.models, key=lambda model: model.nbytes), max(request.ranks)
    needed = ranks * (_COPIES * largest.nbytes + _PROCESS_BYTES)
    available = available_memory_bytes()
    if needed > available:
        raise UsageError(
            f"{ranks} ranks with up to {_COPIES} times the gradients of {largest.workload} each take"
            f" {size_text(needed)}, and {size_text(available)} of memory are available: use fewer --ranks, or other"
            " --workloads"
        )
