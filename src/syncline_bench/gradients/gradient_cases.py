"""The cases of ``syncline bench gradients``: forms of an iteration, models, and the request, checked before any start.

Backward produces gradients one by one, each in memory of its own. The exchange needs one block, and the optimizer
needs ``parameter.grad``. The moves between them are counted in *passes*: a pass reads or writes all gradients once. A
form's limit is its passes, times the bytes of the gradients, over the speed at which plain copies read and write.

========================  ======  ===============================================================================
form                      passes  moves
========================  ======  ===============================================================================
bare                      0       nothing is moved: backward, and the exchange of a block that is there already
contiguous                2       Syncline: read a fresh gradient, write it into its place; ``grad`` is the place
placed                    2       the same in a plain loop after backward, without Syncline's hooks and checks
accumulated               4       the same with ``zero_grad(set_to_none=False)``: write zeros, read gradient and
                                  place, write the place (autograd's accumulation)
copied:*                  4       read and write together, read and write back
layerwise:*               0       nothing is moved: every gradient is exchanged by itself, where it lies; the
                                  transport stages what is not its own memory, which is no pass of the form
========================  ======  ===============================================================================

Gradients are divided by the number of ranks on the way. ``contiguous``, ``placed`` and ``copied:mul`` do it while they
move them; between ranks the other forms divide in another read and write, two passes that are not in the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from syncline.errors import UsageError
from syncline.strategy.grammar import nearest

from ..machine import available_memory_bytes
from ..messages import Task
from ..report.bench import BARE, CONTIGUOUS
from ..report.units import size as size_text
from ..workloads import layers, load

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
class Form:
    """A form: its name, its passes, and whether it divides by the number of ranks in a pass of its own."""

    name: str
    passes: int
    divides_apart: bool = True

    def passes_at(self, ranks: int) -> int:
        """The passes with this number of ranks. A separate division adds one read and one write."""
        return self.passes + 2 * (self.divides_apart and ranks > 1)

    def limit_s(self, nbytes: int, ranks: int, bytes_per_s: float) -> float:
        """The least time of the passes by all ranks at once. ``bytes_per_s`` is the speed of all ranks together."""
        return self.passes_at(ranks) * nbytes * ranks / bytes_per_s


FORMS: Final = {
    form.name: form
    for form in (
        Form(BARE, 0, divides_apart=False),
        Form(CONTIGUOUS, 2, divides_apart=False),
        Form("placed", 2, divides_apart=False),
        Form("accumulated", 4),
        Form("copied:mul", 4, divides_apart=False),  # torch.mul(out=) in, torch._foreach_copy_ back: DDP without views
        Form("copied:foreach", 4),  # torch._foreach_copy_ into the block and back
        Form("copied:cat", 4),  # torch.cat(out=) into the block, torch._foreach_copy_ back
        Form("copied:flatten", 4),  # torch's _flatten_dense_tensors into a new block, which the transport stages
        Form("layerwise:all", 0),  # all under way at once
        Form("layerwise:one", 0),  # one after the other
    )
}
"""All forms, in the order of rows. ``bare`` is always measured: the time that a form adds is counted from it."""


def forms_of(names: Sequence[str]) -> tuple[Form, ...]:
    """``bare`` and the forms with these names; all forms without names. Raises UsageError for an unknown name."""
    for name in names:
        if name not in FORMS:
            hint = nearest(name, FORMS) or "; there are " + ", ".join(FORMS)
            raise UsageError(f"unknown form {name!r}{hint}")
    return tuple(form for form in FORMS.values() if not names or form.name in (BARE, *names))


def exchanges_only(form: Form) -> bool:
    """Whether only the exchange of a form moves data, so that a single rank has nothing to measure."""
    return form.passes == 0 and form.name != BARE


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
class Work(Task):
    """The task of one set of ranks."""

    models: tuple[Model, ...]
    forms: tuple[str, ...]
    repetitions: int


def request_of(
    *,
    workloads: Sequence[str] = (),
    ranks: Sequence[int] = (),
    forms: Sequence[str] = (),
    repetitions: int = DEFAULT_REPETITIONS,
) -> Request:
    """A checked request. Empty sequences mean the defaults. Raises UsageError."""
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
        raise UsageError(f"one rank alone exchanges nothing, but {', '.join(forms)} only exchanges: use --ranks 2")
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
        raise UsageError(f"{workload}: {other.name} is {other.dtype}, but gradients are compared in float32 only")
    return Model(workload, tuple(layer.spec.shape for layer in found))


def _check_memory(request: Request) -> None:
    """Raise UsageError if the request would make the machine swap, or the kernel kill ranks."""
    largest, ranks = max(request.models, key=lambda model: model.nbytes), max(request.ranks)
    needed = ranks * (_COPIES * largest.nbytes + _PROCESS_BYTES)
    available = available_memory_bytes()
    if needed > available:
        raise UsageError(
            f"{ranks} ranks with up to {_COPIES} times the gradients of {largest.workload} each take"
            f" {size_text(needed)}, but {size_text(available)} of memory are available: use fewer --ranks, or other"
            " --workloads"
        )
