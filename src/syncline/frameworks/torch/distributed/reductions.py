"""What torch's reductions mean for arrays: how several ranks' become one.

Plans add; every other reduction combines whole arrays, in the order of ranks, so that all ranks that do it have the
same bits. Element types are handled as Gloo handles them: sums of bool are "or", complex numbers are two real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.distributed import ReduceOp

from ....errors import UsageError

Array = NDArray[Any]


class Reduction(NamedTuple):
    """How arrays are reduced: element by element with ``combine``, and the sum ``averaged`` afterwards."""

    name: str
    combine: Callable[..., Any]
    averaged: bool = False

    def adds(self, dtype: np.dtype[Any]) -> bool:
        """Whether a plan can do it, which adds numbers."""
        return self.combine is np.add and dtype != np.bool_

    def of(self, arrays: Sequence[Array], world: int) -> Array:
        """The result of arrays in the order of ranks, in new memory."""
        found = arrays[0].copy()
        with np.errstate(all="ignore"):  # infinite sums are torch's to see, as with any other backend
            for other in arrays[1:]:
                self.combine(found, other, out=found)
        self.finish(found, world)
        return found

    def finish(self, array: Array, world: int) -> None:
        """What is left to do, in place, when ``array`` is the sum of that many ranks."""
        if self.averaged and array.dtype.kind in "iu":
            np.floor_divide(array, world, out=array)
        elif self.averaged:
            np.divide(array, array.dtype.type(world), out=array)


_KNOWN = {
    ReduceOp.SUM: Reduction("sum", np.add),
    ReduceOp.AVG: Reduction("mean", np.add, averaged=True),
    ReduceOp.PRODUCT: Reduction("product", np.multiply),
    ReduceOp.MIN: Reduction("minimum", np.minimum),
    ReduceOp.MAX: Reduction("maximum", np.maximum),
    ReduceOp.BAND: Reduction("bitwise and", np.bitwise_and),
    ReduceOp.BOR: Reduction("bitwise or", np.bitwise_or),
    ReduceOp.BXOR: Reduction("bitwise xor", np.bitwise_xor),
}
_BY_NAME = {str(kind).rpartition(".")[2]: found for kind, found in _KNOWN.items()}
_BITWISE = {np.bitwise_and, np.bitwise_or, np.bitwise_xor}


def reduction_of(op: Any, dtype: np.dtype[Any], complex_numbers: bool = False) -> Reduction:
    """What torch's ``op`` is for such elements; raises NotImplementedError or UsageError where there is none."""
    name = str(getattr(op, "op", op)).rpartition(".")[2]
    found = _BY_NAME.get(name)
    if found is None:
        raise NotImplementedError(
            f"ReduceOp.{name} is not there in the backend syncline: use the backend nccl, or multiply before a sum"
        )
    if found.combine in _BITWISE and dtype.kind not in "iub":
        raise UsageError(f"ReduceOp.{name} is for whole numbers, not for {dtype}")
    if complex_numbers and found.combine is not np.add:
        raise UsageError(f"ReduceOp.{name} is not for complex numbers: use SUM or AVG")
    if found.averaged and dtype == np.bool_:
        raise UsageError("ReduceOp.AVG is not for bool: use SUM, MIN or MAX")
    return found
