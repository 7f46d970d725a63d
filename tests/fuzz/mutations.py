"""Inputs for parsers: mutations of valid ones, the same for the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from copy import copy, deepcopy
from typing import Any

MOST_BYTES = 1 << 14
_NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    24,
    127,
    128,
    255,
    256,
    4096,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**56,
    2**63,
    2**64 - 1,
)
_VALUES = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**30, 1e308, -0.5, float("inf"), float("nan"), "", "x",
    "\x1b[2J", "\ud800", "9" * 20, [], {}, [[]], {"": 0},
)  # fmt: skip
_TEXTS = (
    b"[" * 3000, b"(" * 3000, b'{"a":' * 1500, b"9" * 5000, b"1e999", b"-1", b"NaN", b"null", b"\0", b"\n", b"\r\n",
    b",", b"=", b"(", b")", b":", b'"', b"\xff\xfe", b"\xed\xa0\x80", b"\xd9\xa2", b"\xc2\xb2",
    b"99999999999999", b"1-999999999", b"(x999999999)", b" ", b"%s", b"../../", b"inf", b"nan", b"true",
)  # fmt: skip


def mutated(draw: random.Random, valid: Sequence[bytes]) -> bytes:
    """One of the valid inputs, changed a few times; now and then unchanged, or other bytes."""
    kind = draw.random()
    if kind < 0.02:
        return draw.randbytes(draw.randrange(100))
    found = draw.choice(valid)
    if kind < 0.03:
        return found
    if kind < 0.4 and found[:1] in (b"[", b"{"):
        found = _restructured(draw, found)
        if draw.random() < 0.7:
            return found
    data = bytearray(found)
    while True:
        draw.choice(_CHANGES)(draw, data, valid)
        if draw.random() < 0.5:
            return bytes(data[:MOST_BYTES])


def _restructured(draw: random.Random, text: bytes) -> bytes:
    """JSON with other values, keys or items at some places: of lines of JSON one is changed."""
    if b"}\n{" in text:
        lines = text.split(b"\n")
        at = draw.randrange(len(lines))
        lines[at] = _restructured(draw, lines[at])
        return b"\n".join(lines)
    whole = [json.loads(text)]
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        holder: Any = whole
        while True:
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            if not keys:
                break
            key = draw.choice(keys)
            if isinstance(holder[key], (dict, list)) and draw.random() < 0.8:
                holder = holder[key]
                continue
            _replace(draw, holder, key)
            break
    return json.dumps(whole[0] if whole else None).encode()


def _replace(draw: random.Random, holder: Any, key: Any) -> None:
    how = draw.random()
    if how < 0.6:
        holder[key] = copy(draw.choice(_VALUES))
    elif how < 0.75:
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, draw.choice((copy(draw.choice(_VALUES)), deepcopy(holder[key]))))
    else:
        holder[draw.choice(("", "x", "name", "rows"))] = deepcopy(holder[key])


def _flip(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _byte(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[draw.randrange(len(data))] = draw.randrange(256)


def _number(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    size = draw.choice((1, 2, 4, 8))
    at = draw.randrange(max(1, len(data) - size + 1))
    if draw.random() < 0.7:
        at -= at % size
    data[at : at + size] = (draw.choice(_NUMBERS) & (1 << 8 * size) - 1).to_bytes(size, "little")


def _cut(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[draw.randrange(len(data) + 1) :]


def _lose(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = draw.randrange(len(data) + 1)
    del data[at : at + draw.choice((1, 2, 4, 8, 30))]


def _repeat(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = draw.randrange(len(data) + 1)
    data[at:at] = data[at : at + draw.choice((1, 4, 20, 200))] * draw.choice((1, 1, 2, 40))


def _put(draw: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = draw.randrange(len(data) + 1)
    data[at : at + draw.choice((0, 0, 1, 5))] = draw.choice(_TEXTS)


def _graft(draw: random.Random, data: bytearray, valid: Sequence[bytes]) -> None:
    other = draw.choice(valid)
    data[draw.randrange(len(data) + 1) :] = other[draw.randrange(len(other) + 1) :]


_CHANGES = (_flip, _byte, _byte, _number, _number, _cut, _lose, _repeat, _put, _put, _graft)
