"""The codec ``none``: gradients travel as they are, in their own element type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..registry import register
from ..types import Spec


@register("codecs", "none")
@dataclass(frozen=True)
class Dense:
    """No compression: the payload is the array itself."""

    combine: ClassVar[Literal["sum", "gather", "merge"]] = "sum"
    granularity: ClassVar[Literal["element", "block", "tensor"]] = "element"
    contraction: ClassVar[bool] = True

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        """Exactly the tensor's bytes."""
        return spec.nbytes, spec.nbytes
