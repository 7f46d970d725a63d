"""Rows of ``syncline bench codecs`` as a table for the terminal, with the verdict of each codec in words.

Owns the words and which columns fit: a narrow terminal loses the comparison with torch, then decoding and the share of
``np.add``, never the bits or the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from syncline.tuning.codec_times import ANY_LINK_BIT_PER_S

from . import units
from .breaking import broken
from .codec_rows import CodecResult, CodecRow
from .columns import GAP, Column, fitting, width_of

_NAME_MOST = 25
_NAME_LEAST = 10


_COLUMNS: tuple[Column[CodecRow], ...] = (
    Column("fb", lambda row: "yes" if row.feedback else "", 0),
    Column("bits", lambda row: units.significant(row.bits_per_element), 0),
    Column("encode", lambda row: units.significant(row.encode_gb_per_s), 0),
    Column("decode", lambda row: units.significant(row.decode_gb_per_s), 2),
    Column("of add", lambda row: units.percent(row.encode_gb_per_s / row.np_add_gb_per_s), 1),
    Column("x torch", lambda row: units.MISSING if row.torch_s is None else _times(row.torch_s, row.encode_s), 3),
)


def render(result: CodecResult, width: int) -> RenderableType:
    """The table and what its columns mean."""
    if not result.rows:
        return Text("no rows")
    name = min(_NAME_MOST, max(len(row.codec) for row in result.rows))
    verdict = max(len(verdict_of(row)) for row in result.rows)

    def left(columns: Sequence[Column[CodecRow]]) -> int:
        return width - verdict - 2 * GAP - width_of(columns, result.rows)

    columns = fitting(_COLUMNS, lambda columns: left(columns) >= name)
    # What is left without the verdict: names break before it does.
    name = max(_NAME_LEAST, min(name, left(columns)))
    table = Table(title=_title(result), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("codec", overflow="fold", min_width=name)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in result.rows:
        cells = [Text(column.cell(row)) for column in columns]
        table.add_row(Text(broken(row.codec, name)), *cells, Text(verdict_of(row)))
    return Group(table, Text(_legend(result), style="dim"))


def verdict_of(row: CodecRow) -> str:
    """On which links the codec makes an allreduce faster: ``pays below 3.2 Gbit/s``."""
    rate = row.pays_below_bit_per_s
    if rate is None:
        return "never pays"
    if rate >= ANY_LINK_BIT_PER_S:
        return "pays on any link"
    return f"pays below {units.link_rate(rate)}"


def _times(slow_s: float, fast_s: float) -> str:
    return units.significant(slow_s / fast_s, 2)


def _title(result: CodecResult) -> str:
    return f"codecs on {result.elements:,} float32, one core"


def _legend(result: CodecResult) -> str:
    add = units.significant(result.rows[0].np_add_gb_per_s)
    return (
        "fb: with error feedback. bits: per element on the wire. encode, decode: GB/s of float32; decoding adds. "
        f"of add: encode as a share of np.add's {add} GB/s. x torch: times faster than the usual composition of torch "
        f"operations. pays: an allreduce of {result.workers} ranks is faster below that link speed."
    )
