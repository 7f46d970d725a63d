"""The result file of ``syncline bench codecs``: what every number in it means, and its JSON form.

Owns the names, units and JSON of a ``CodecResult`` and its rows; the rules of ``result_file`` hold here. Does not
know how anything was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .result_file import ResultFile, reader


@dataclass(frozen=True)
class CodecRow:
    """One codec with or without error feedback; times are medians on one core, in seconds.

    ``codec`` is its text without the feedback. ``decode_s`` is decoding and adding; for a codec of several rounds
    ``encode_s`` is all computing before the last sum over the ranks and ``decode_s`` what follows it. ``bytes`` is the
    payload. GB/s are 4 bytes times ``elements`` over the seconds over 10^9, ``np_add`` being ``np.add(a, b, out=c)``.
    ``torch_s`` is the time in which the usual composition of torch operations does what ``encode_s`` is the time of;
    None where there is none. ``pays_below_bit_per_s`` is the link speed below which an allreduce gets faster by it,
    None where it does not at any, and 10^12 where it does on any link.
    """

    codec: str
    feedback: bool
    combine: str
    elements: int
    encode_s: float
    decode_s: float
    bytes: int
    bits_per_element: float
    encode_gb_per_s: float
    decode_gb_per_s: float
    np_add_gb_per_s: float
    torch_s: float | None = None
    pays_below_bit_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class CodecResult(ResultFile):
    """A whole run: where, with what and how it was measured, and its rows.

    ``workers`` is the number of ranks of the allreduce that ``pays_below_bit_per_s`` is about.
    """

    verb: ClassVar = "bench codecs"
    lists: ClassVar = {"rows": reader(CodecRow)}

    elements: int
    repetitions: int
    workers: int
    rows: tuple[CodecRow, ...] = ()
