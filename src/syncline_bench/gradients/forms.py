"""The forms of an iteration that are compared, and the least memory traffic of each beside the exchange.

Pure. Backward produces gradients one by one, each in memory of its own. The exchange needs one block, and the optimizer
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
move them; between ranks the others read and write once more for that, two passes which are not in the table above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from syncline.errors import UsageError
from syncline.strategy.grammar import nearest

from ..report.bench import BARE, CONTIGUOUS


@dataclass(frozen=True)
class Form:
    """A form: its name, its passes, a summary, and whether it divides by the number of ranks in a pass of its own."""

    name: str
    passes: int
    summary: str
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
        Form(BARE, 0, "no gradient is moved: backward alone, and the exchange of one block", divides_apart=False),
        Form(
            CONTIGUOUS,
            2,
            "Syncline's storage: each gradient is moved once, into its place in the bucket",
            divides_apart=False,
        ),
        Form(
            "placed",
            2,
            "the same moves in a loop after backward, without Syncline's hooks and checks",
            divides_apart=False,
        ),
        Form("accumulated", 4, "Syncline's storage with zero_grad(set_to_none=False): autograd adds in place"),
        Form(
            "copied:mul",
            4,
            "torch.mul(out=) into the block, torch._foreach_copy_ back, as DDP without views",
            divides_apart=False,
        ),
        Form("copied:foreach", 4, "torch._foreach_copy_ into the block and back"),
        Form("copied:cat", 4, "torch.cat(out=) into the block, torch._foreach_copy_ back"),
        Form(
            "copied:flatten", 4, "torch's _flatten_dense_tensors into a new block, which the transport stages, and back"
        ),
        Form("layerwise:all", 0, "an exchange per tensor, which the transport stages, all under way at once"),
        Form("layerwise:one", 0, "an exchange per tensor, which the transport stages, one after the other"),
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
    """Whether a form moves nothing but by the exchange, so that a single rank has nothing to measure."""
    return form.passes == 0 and form.name != BARE
