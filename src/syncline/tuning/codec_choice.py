"""``codec=auto``: chooses the fastest of a few harmless codecs by measurements of all workers.

A codec changes the mathematics. So the candidates are only those that keep the accuracy of training in every published
comparison: 16 bits, and 8 and 4 bits with error feedback. One array goes through the exchange that training will use,
with each candidate in turn. The times include link, processors and other users of both, so no model is needed
(``codec_times`` has one, for clusters that are not at hand). Compression must be clearly faster, not by a few percent.
Rank 0 decides and tells the others, and the strategy's text names the choice, in result rows and checkpoints.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import numpy as np

from .. import registry
from ..compression.compression import Compression
from ..compression.reducers.ways import way_of
from ..nouns import Bucket, Layer, Size, Slice, Spec
from ..session.session import Session
from ..strategy.choice import Choice
from ..strategy.grammar import read_part, write_value
from ..strategy.strategy import Strategy
from ..strategy.words import AUTO, NONE

log = logging.getLogger("syncline")

CANDIDATES = ("none", "bf16", "feedback(int8)", "feedback(int4)")
"""In order of increasing change. The first one within ``MARGIN`` of the fastest is chosen."""

MARGIN = 0.25
_MOST_ELEMENTS, _LEAST_ELEMENTS = 1 << 20, 1 << 14
_REPETITIONS = 3
_EXCHANGE_S = 0.15
"""The longest time for one dense exchange: on slow links all candidates are measured with a smaller array."""


def is_wanted(asked: Strategy, workers: int) -> bool:
    """Whether to choose a codec: ``auto``, more than one worker, and no server in their exchange."""
    return asked.codec == AUTO and workers > 1 and asked.roles is None and asked.collective is None


def choose_codec(session: Session, asked: Strategy) -> None:
    """Give the session the fastest codec; all workers call this together. ``session.reason`` says in words why."""
    with session.engine.uncounted():  # a run's start does not count as the training's communication
        _choose(session, asked)


def _choose(session: Session, asked: Strategy) -> None:
    dense, choice = session.strategy, session.choice
    session.chose_codec = True
    if dense.transport != AUTO and registry.get("transports", dense.transport.name).capabilities.get("one_host"):
        session.reason = "codec=none: shared memory is faster than encoding"
        return
    hosts = 1 if session.roll is None else session.roll.hosts
    if replace(dense, codec=read_part(CANDIDATES[-1])).resolve(session.group, hosts=hosts).codec == NONE:
        session.reason = "codec=none: all ranks are on one host, and two levels compress only between hosts"
        return
    array = session.engine.allocate(4 * _MOST_ELEMENTS, np.dtype(np.float32))
    array = array[: _elements(_measure(session, array[:_LEAST_ELEMENTS]))]
    times_s: dict[str, float] = {}
    for text in CANDIDATES:
        _take(session, asked, dense, choice, text)
        times_s[text] = _measure(session, array)
    best = min(times_s.values())
    chosen = next(text for text in times_s if times_s[text] <= best * (1 + MARGIN))
    chosen = session.tell_all(chosen.encode()).decode()
    _take(session, asked, dense, choice, chosen)
    shown = ", ".join(f"{text} {1e3 * seconds:.2f} ms" for text, seconds in times_s.items())
    size = write_value(Size(array.nbytes), Size)
    session.reason = session.tell_all(f"codec={chosen}, measured for {size}: {shown}".encode()).decode()
    log.info("rank %d: codec=auto: %s", session.rank, session.reason)


def _elements(seconds: float) -> int:
    """The size of the array to measure, from the time of the smallest one; the same on all ranks."""
    wanted = _LEAST_ELEMENTS
    while wanted < _MOST_ELEMENTS and seconds * (2 * wanted / _LEAST_ELEMENTS) <= _EXCHANGE_S:
        wanted *= 2
    return wanted


def _take(session: Session, asked: Strategy, dense: Strategy, choice: Choice | None, text: str) -> None:
    """Switch the session to a codec; ``dense`` and ``choice`` are its strategy and table without one."""
    session.strategy, session.choice = replace(dense, codec=read_part(text)), choice
    if way_of(session.strategy.codec_object()).carrier is not None:  # no plan carries it
        hosts = 1 if session.roll is None else session.roll.hosts
        open_again = replace(session.strategy, architecture=asked.architecture)
        session.strategy, session.choice = open_again.resolve(session.group, hosts=hosts), None


def _measure(session: Session, array: np.ndarray) -> float:
    """The slowest rank's median seconds over a few exchanges, without the first one."""
    layer, whole = Layer(Spec("codec=auto", (array.size,))), Bucket((Slice(0, 0, array.size),), "float32")
    compression = session.compression([layer], [whole], [array])
    draw = np.random.default_rng(session.rank)
    found = []
    for _ in range(1 + _REPETITIONS):
        array[:] = draw.standard_normal(array.size, np.float32)
        session.barrier()
        begun = time.perf_counter()
        _exchange(session, compression, array)
        found.append(time.perf_counter() - begun)
    seconds = np.array([np.median(found[1:])])
    parts = np.frombuffer(b"".join(session.gather(seconds.tobytes())))
    return float(parts.max())


def _exchange(session: Session, compression: Compression | None, array: np.ndarray) -> None:
    if compression is None:
        session.run(session.allreduce_program(array.nbytes), array, "choosing a codec")
    else:
        session.engine.wait(session.engine.start(session.coded_order(compression, 0, 0, "choosing a codec")))
