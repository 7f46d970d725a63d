"""Feeds parsers mutations of valid inputs: each parses or raises a promised error, in bounded time and memory."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from mutations import mutated
from parsers import Parser

MOST_S = 2.0
"""The CPU time of one input."""
WAITS_S = 10.0
"""The time of one input, with waits."""
MOST_BYTES = 256 << 20
"""The memory that the parsing of one input may take."""
GROWTH_BYTES = 64 << 20
"""The memory that may be left of all inputs together."""
_BLOCK = 500  # inputs that share a generator
_SHOWN = 400


class Fault(NamedTuple):
    """An input that is neither parsed nor refused as promised."""

    parser: str
    what: str
    data: bytes

    def __str__(self) -> str:
        return f"{self.parser}: {self.what}\n    input {self.data[:_SHOWN]!r} ({len(self.data)} bytes)"


class _TooLong(BaseException):
    """An input takes more than its time."""


def fuzz(parser: Parser, count: int, seed: int = 0) -> list[Fault]:
    """The faults of ``count`` inputs: of each kind the one with the shortest input."""
    found: dict[str, Fault] = {}
    valid, parse = parser.make()
    parsed = 0
    for data in valid:
        with contextlib.suppress(*parser.errors):
            parse(data)
            parsed += 1
    if not parsed:
        return [Fault(parser.name, "no valid input is parsed", valid[0])]
    before = 0
    with _bounded():
        for number in range(count):
            if number % _BLOCK == 0:
                draw = random.Random(f"{parser.name} {seed} {number // _BLOCK}")
            if number == count // 10:
                before = _resident_bytes()
            data = mutated(draw, valid)
            what = _tried(parser, parse, data)
            if what and (what not in found or len(data) < len(found[what].data)):
                found[what] = Fault(parser.name, what, data)
        grown = _resident_bytes() - before
    if grown > GROWTH_BYTES:
        found["memory"] = Fault(parser.name, f"{grown >> 20} MiB are left of {count} inputs", b"")
    return list(found.values())


def _tried(parser: Parser, parse: object, data: bytes) -> str:
    """What is wrong with the end of a parse; empty if nothing is."""
    signal.setitimer(signal.ITIMER_PROF, MOST_S)
    signal.setitimer(signal.ITIMER_REAL, WAITS_S)
    try:
        parse(data)  # type: ignore[operator]
    except parser.errors:
        return ""
    except _TooLong:
        return f"takes more than {MOST_S:g} s of CPU time, or {WAITS_S:g} s"
    except Exception as error:
        where = [f"{Path(one.filename).name}:{one.lineno}" for one in traceback.extract_tb(error.__traceback__)]
        return f"{type(error).__name__} at {' '.join(where[-3:])}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    return ""


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise _TooLong

    handlers = {number: signal.signal(number, end) for number in (signal.SIGPROF, signal.SIGALRM)}
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
