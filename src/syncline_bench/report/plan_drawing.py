"""Draws a plan as text: the transfers of every rank and step, a table of the steps, and the load of every rank.

Or as a picture: a line down for every rank, and an arrow for every transfer of a step.

Owns the layout, at most 80 columns wide. Does not know algorithms, bytes of real arrays, or times: loads are in n, the
size of the array. If the drawing of single transfers would be too long to follow, a line says that it is left out; the
two tables are always complete.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import groupby
from textwrap import wrap
from typing import TypeVar

import numpy as np

from syncline.errors import UsageError
from syncline.plans.plan import Plan, Transfer

WIDTH = 80
_MOST_LINES = 60
"""The drawing of single transfers is left out above this number of lines."""

Value = TypeVar("Value", bound=Hashable)

_SIGNS = {"reduce": "+", "copy": "="}


def draw_plan(plan: Plan) -> str:
    """The plan as lines of at most 80 characters: head, drawing, steps, load of each rank."""
    blocks = [_head(plan)]
    if len(plan):
        blocks += [_drawing(plan), _steps(plan)]
    blocks.append(_loads(plan))
    return "\n\n".join("\n".join(block) for block in blocks)


def _head(plan: Plan) -> list[str]:
    others = sorted(set(range(plan.world)) - set(plan.members))
    ranks = _counted(len(plan.members), "rank")
    ranks += f" and {_counted(len(others), 'server')} ({_span(others)})" if others else ""
    sizes = f"{_counted(plan.chunks, 'chunk')}, {_counted(plan.steps, 'step')}, {_counted(len(plan), 'transfer')}"
    lines = wrap(f"{plan.name}: {plan.goal} among {ranks}; {sizes}", WIDTH)
    if plan.owners == tuple(range(plan.chunks)):
        lines.append("Rank r owns chunk r.")
    elif plan.owners:
        owns = [f"rank {rank} owns {_span(chunks)}" for rank, chunks in _grouped(plan.owners)]
        lines += wrap(f"Chunks: {'; '.join(owns)}.", WIDTH)
    if plan.root is not None:
        lines.append(f"Rank {plan.root} is the root.")
    if plan.native:
        groups = "; ".join(_span(sorted(ranks)) for ranks in plan.native)
        text = f"Among the ranks {groups} the message library carries out the transfers by its own collectives."
        lines += wrap(text, WIDTH)
    return lines if len(plan) else [*lines, "Nothing has to be sent."]


# A picture -----------------------------------------------------------------------------------------------------------

_APART, _HIGH, _LEFT, _TOP, _LETTER = 84, 62, 62, 40, 7
_COLOURS = {"reduce": "#0072B2", "copy": "#D55E00"}
"""As the first two of all charts; copies are dashed as well, for readers who do not tell colours apart."""
_MOST_ARROWS = 400


def plan_svg(plan: Plan) -> str:
    """The plan as SVG in the colour of the text around it. UsageError if nobody could follow so many arrows."""
    if len(plan) > _MOST_ARROWS:
        raise UsageError(
            f"a picture of {len(plan)} transfers is too dense to read: show fewer ranks, or leave out --svg"
        )
    place = {step: _TOP + _HIGH * number for number, step in enumerate(np.unique(plan.step).tolist())}
    labels = _labels(plan)
    long = {where: _LETTER * len(text) + 8 for where, text in labels.items()}
    apart = max(_APART, *long.values(), 0)
    across = [_LEFT + apart * rank for rank in range(plan.world)]
    last = max(_APART // 2, *(pixels for (rank, _), pixels in long.items() if rank == plan.world - 1), 0)
    width, height = across[-1] + last, _TOP + _HIGH * len(place) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' role="img" font-family="sans-serif" font-size="12" fill="currentColor">',
        f"<title>{plan.name}: {plan.goal} among {_counted(plan.world, 'rank')}</title>",
    ]
    for rank, x in enumerate(across):
        name = f"rank {rank}" if rank in plan.members else f"server {rank}"
        lines.append(f'<text x="{x}" y="16" text-anchor="middle">{name}</text>')
        lines.append(f'<path d="M{x} {_TOP - 14}V{height}" stroke="currentColor" opacity="0.2"/>')
    lines += [f'<text x="4" y="{y + _HIGH // 2}" opacity="0.7">step {step}</text>' for step, y in place.items()]
    for transfer in plan:
        x, y, to = across[transfer.src], place[transfer.step], across[transfer.dst]
        lines += _arrow(x, y, to, y + _HIGH - 20, transfer.op)
    for (rank, step), text in labels.items():
        x, y = across[rank] + 4, place[step] + _HIGH - 6
        lines.append(f'<text x="{x}" y="{y}" font-size="11">{text}</text>')
    return "\n".join([*lines, "</svg>\n"])


def _labels(plan: Plan) -> dict[tuple[int, int], str]:
    """What each rank receives in each step; what arrives from several ranks has their number."""
    found: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    for transfer in plan:
        found[transfer.dst, transfer.step][_token(transfer).partition("<")[0]] += 1
    return {
        where: " ".join(token + f" x{count}" * (count > 1) for token, count in tokens.items())
        for where, tokens in found.items()
    }


def _arrow(x: int, y: int, to: int, end: int, op: str) -> Iterator[str]:
    """A line and its head."""
    dash = ' stroke-dasharray="5 3"' if op == "copy" else ""
    yield f'<path d="M{x} {y}L{to} {end}" stroke="{_COLOURS[op]}" stroke-width="1.6"{dash}/>'
    length = float(np.hypot(to - x, end - y))
    along, down = (to - x) / length, (end - y) / length
    left, right = ((to - 8 * along - 4 * side * down, end - 8 * down + 4 * side * along) for side in (1, -1))
    corners = f"M{to} {end}L{left[0]:.1f} {left[1]:.1f}L{right[0]:.1f} {right[1]:.1f}Z"
    yield f'<path d="{corners}" fill="{_COLOURS[op]}"/>'


# What every rank receives in every step ------------------------------------------------------------------------------


def _drawing(plan: Plan) -> list[str]:
    received: dict[tuple[int, int], list[str]] = {}
    for transfer in plan:
        received.setdefault((transfer.step, transfer.dst), []).append(_token(transfer))
    titles = [str(rank) for rank in range(plan.world)]
    edge = max(len("step"), len(str(int(plan.step[-1]))))
    width = max(len(text) for text in [*titles, *(token for cell in received.values() for token in cell)]) + 2
    per_row = max(1, (WIDTH - edge) // width)
    steps = np.unique(plan.step).tolist()
    lines = []
    for first in range(0, plan.world, per_row):
        ranks = range(first, min(first + per_row, plan.world))
        lines += ["", "rank".rjust(edge) + "".join(str(rank).rjust(width) for rank in ranks), "step".rjust(edge)]
        for step in steps:
            cells = [received.get((step, rank), []) for rank in ranks]
            for level in range(max(1, *(len(cell) for cell in cells))):
                start = str(step) if level == 0 else ""
                texts = (cell[level] if level < len(cell) else "." if level == 0 else "" for cell in cells)
                lines.append((start.rjust(edge) + "".join(text.rjust(width) for text in texts)).rstrip())
        if len(lines) > _MOST_LINES:
            return [f"The drawing of {len(plan)} single transfers is left out: it would be too long to read."]
    return ["What every rank receives: +2<1 adds chunk 2 of rank 1, =2<1 takes it over.", *lines]


def _token(transfer: Transfer) -> str:
    last = transfer.chunk + transfer.count - 1
    chunks = str(transfer.chunk) if transfer.count == 1 else f"{transfer.chunk}-{last}"
    return f"{_SIGNS[transfer.op]}{chunks}<{transfer.src}"


# One line per run of equal steps -------------------------------------------------------------------------------------


def _steps(plan: Plan) -> list[str]:
    rows = [("step", "transfers", "most/rank", "size", "who to whom")]
    lines = [(step, _step(plan, list(found))) for step, found in groupby(plan, key=lambda transfer: transfer.step)]
    for text, alike in groupby(lines, key=lambda line: line[1]):
        rows.append((_span(step for step, _ in alike), *text))
    note = "Steps; most/rank: messages of the busiest rank, out / in; size: of one message."
    return [note, *_table(rows)]


def _step(plan: Plan, transfers: Sequence[Transfer]) -> tuple[str, str, str, str]:
    counts = {op: sum(item.op == op for item in transfers) for op in _SIGNS}
    kinds = ", ".join(f"{number} {op}" for op, number in counts.items() if number)
    sent, received = np.bincount([item.src for item in transfers]), np.bincount([item.dst for item in transfers])
    return kinds, f"{sent.max()} / {received.max()}", _shares(plan, transfers), _pattern(plan, transfers)


def _shares(plan: Plan, transfers: Sequence[Transfer]) -> str:
    counts = sorted({item.count for item in transfers})
    low, high = counts[0], counts[-1]
    return f"{_fraction(low, plan.chunks)}" + (f" to {_fraction(high, plan.chunks)}" if high > low else "")


def _pattern(plan: Plan, transfers: Sequence[Transfer]) -> str:
    """The pairs if they are few, else what they have in common, else their number."""
    pairs = sorted({(item.src, item.dst) for item in transfers})
    if len(pairs) <= 3:
        return " ".join(f"{src}>{dst}" for src, dst in pairs)
    distances = {abs(src - dst) for src, dst in pairs}
    if len(distances) == 1 and {(dst, src) for src, dst in pairs} == set(pairs):
        return f"partners at distance {distances.pop()}"
    shifts = {dst - src for src, dst in pairs}
    if len(shifts) == 1:
        return f"{len(pairs)} pairs, r > r{shifts.pop():+d}"
    around = {shift % plan.world for shift in shifts}
    if len(around) == 1:
        return f"{len(pairs)} pairs, r > r+{around.pop()} modulo {plan.world}"
    if len(pairs) == plan.world * (plan.world - 1):
        return "all to all"
    return f"{len(pairs)} pairs"


# One line per kind of rank -------------------------------------------------------------------------------------------


def _loads(plan: Plan) -> list[str]:
    out, into = plan.bytes_sent(1.0), plan.bytes_received(1.0)
    messages = np.bincount(plan.src, minlength=plan.world), np.bincount(plan.dst, minlength=plan.world)
    kinds = [
        (
            "" if rank in plan.members else "server",
            str(messages[0][rank]),
            f"{out[rank]:.3f} n",
            str(messages[1][rank]),
            f"{into[rank]:.3f} n",
        )
        for rank in range(plan.world)
    ]
    rows: list[Sequence[str]] = [("rank", "", "messages out", "bytes out", "messages in", "bytes in")]
    for kind, ranks in _grouped(kinds):
        # A long list of ranks takes several lines; the numbers are in the first.
        first, *more = wrap(_span(ranks), 20)
        rows += [(first, *kind), *((line, "", "", "", "", "") for line in more)]
    return ["Load of every rank; n is the size of the array.", *_table(rows)]


# Text ----------------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True) if width).rstrip()


def _grouped(values: Iterable[Value]) -> list[tuple[Value, list[int]]]:
    """Every distinct value with its positions, in the order of first occurrence."""
    found: dict[Value, list[int]] = {}
    for place, value in enumerate(values):
        found.setdefault(value, []).append(place)
    return list(found.items())


def _span(numbers: Iterable[int]) -> str:
    """Text such as ``0-3, 7`` for ascending ``numbers``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _fraction(part: int, whole: int) -> str:
    share = Fraction(part, whole)
    return "n" if share == 1 else f"{share} n"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
