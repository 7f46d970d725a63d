"""What block codecs have in common: the length of their payloads, and the part of a residual that they work on."""

from __future__ import annotations

from . import Floats, State
from ._checks import no_residual


def words_of(elements: int, block: int, codes: int, heads: int = 1) -> int:
    """The words of a payload whose blocks have ``heads`` words of scales and then ``codes`` codes to the word."""
    full, rest = divmod(elements, block)
    return full * (heads + -(-block // codes)) + (heads + -(-rest // codes) if rest else 0)


def residual_of(state: State, start: int, elements: int) -> Floats:
    """The residual of ``elements`` elements from ``start`` on; empty when there is no error feedback."""
    return no_residual() if state.residual is None else state.residual[start : start + elements]
