"""Where the text of a strategy may be broken into lines: between words, then behind a comma, then behind a parenthesis.

A table's first column holds such texts, and none of them has a width that a terminal could be sure to have. Does not
know tables.
"""

from __future__ import annotations

import re

_PIECE = re.compile(r"[^\s(,]*[(,]?\s?")
_SMALL = re.compile(r"[^=_]*[=_]?\s?")


def pieces(text: str) -> list[str]:
    """The parts of a text that stay in one line, spaces at their ends included."""
    return [piece for piece in _PIECE.findall(text) if piece]


def widest_piece(text: str) -> int:
    """How wide a column has to be for ``text`` to be broken between its parts only."""
    return max((len(piece.rstrip()) for piece in pieces(text)), default=0)


def broken(text: str, width: int) -> str:
    """The text in lines of at most ``width``; only what fits no line by itself is broken anywhere."""
    lines = [""]
    for word in re.findall(r"\S+\s?", text):  # what fits a line stays whole, from the coarsest parts down
        for piece in [word] if len(word.rstrip()) <= width else pieces(word):
            for part in [piece] if len(piece.rstrip()) <= width else _SMALL.findall(piece):
                for start in range(0, max(1, len(part.rstrip())), width):
                    some = part[start : start + width] if len(part.rstrip()) > width else part
                    if len(lines[-1]) + len(some.rstrip()) > width:
                        lines.append("")
                    lines[-1] += some
    return "\n".join(line.rstrip() for line in lines)
