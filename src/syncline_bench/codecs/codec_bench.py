"""``syncline bench codecs``: codecs, ``np.add`` and compositions of PyTorch, in turn in one process.

Owns the list of contestants and the rows. ``tuning.codec_times`` runs and times a codec.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from syncline.codecs import Codec, TakesTensors
from syncline.errors import UsageError
from syncline.strategy.grammar import read_part
from syncline.strategy.words import build
from syncline.tuning.codec_times import Addition, CodecTimes, Progress, Timed, Trial, every_codec, in_turn, variants

from ..display import Display, shown
from ..machine import available_memory_bytes, provenance
from ..report.bench import CodecResult, CodecRow, render_codecs
from ..report.units import size as size_text

WORKERS = 4
"""Default number of ranks of the allreduce in the verdicts."""

_ARRAYS_PER_TRIAL = 4
_ARRAYS_PER_RUN = 8


@dataclass(frozen=True)
class Request:
    """Measurements asked for: ways of using codecs, as (text, error feedback), on arrays of ``elements`` float32."""

    ways: tuple[tuple[str, bool], ...]
    elements: int
    repetitions: int
    workers: int = WORKERS
    device: str = "cpu"

    @property
    def torch(self) -> bool:
        """Whether torch compositions, which run on the processor only, can be measured next to the codecs."""
        return self.device == "cpu" and find_spec("torch") is not None


def request_of(
    texts: Sequence[str], elements: int, repetitions: int, workers: int = WORKERS, device: str = "cpu"
) -> Request:
    """A checked request, for all codecs when ``texts`` is empty; raises UsageError with the remedy."""
    if device != "cpu":
        from .on_device import checked

        checked(device)
    wanted = texts or [text for text in every_codec() if device == "cpu" or _takes_tensors(text)]
    ways = dict.fromkeys(way for text in wanted for way in variants(text, elements))
    request = Request(tuple(ways), elements, repetitions, workers, device)
    needed = 4 * elements * (_ARRAYS_PER_TRIAL * len(ways) + _ARRAYS_PER_RUN)
    available = available_memory_bytes()
    if needed > available:
        raise UsageError(
            f"measuring {len(ways)} rows of {elements} elements in turn needs about {size_text(needed)}, but"
            f" {size_text(available)} are available: choose fewer --elements, or name some --codecs"
        )
    return request


def measure(request: Request, progress: Progress | None = None) -> CodecResult:
    """All rows of a request, in its order."""
    trials: list[Trial]
    if request.device == "cpu":
        trials = [Trial(text, feedback, request.elements) for text, feedback in request.ways]
        addition = Addition(request.elements)
    else:
        from .on_device import DeviceAddition, DeviceTrial, checked

        device = checked(request.device)
        trials = [DeviceTrial(text, feedback, request.elements, device) for text, feedback in request.ways]
        addition = DeviceAddition(request.elements, device)
    with contextlib.ExitStack() as stack:
        peers: Mapping[int, Timed] = {}
        if request.torch:
            from . import compositions  # the only part that needs torch

            stack.enter_context(compositions.one_thread())
            peers = compositions.peers_of(trials)
        contestants: list[Timed] = [addition, *trials, *peers.values()]
        found = in_turn(contestants, request.elements, request.repetitions, progress)
    (add_s,), ours, theirs = found[0], found[1 : 1 + len(trials)], found[1 + len(trials) :]
    torch_s = {place: times[0] for place, times in zip(peers, theirs, strict=True)}
    rows = [
        row_of(trial.result(times, add_s), torch_s.get(place), request.workers)
        for place, (trial, times) in enumerate(zip(trials, ours, strict=True))
    ]
    asked: dict[str, Any] = {name: getattr(request, name) for name in ("elements", "repetitions", "workers", "device")}
    return CodecResult(**provenance(), **asked, rows=tuple(rows))


def _takes_tensors(text: str) -> bool:
    codec: Codec = build("codecs", read_part(text))
    return isinstance(codec, TakesTensors) and codec.takes_tensors


def row_of(times: CodecTimes, torch_s: float | None, workers: int) -> CodecRow:
    """The row with these measurements."""
    gigabytes = 4 * times.elements / 1e9
    return CodecRow(
        times.codec,
        times.feedback,
        times.combine,
        times.elements,
        times.encode_s,
        times.decode_s,
        bytes=times.nbytes,
        bits_per_element=8 * times.nbytes / times.elements,
        encode_gb_per_s=gigabytes / times.encode_s,
        decode_gb_per_s=gigabytes / times.decode_s,
        np_add_gb_per_s=gigabytes / times.np_add_s,
        torch_s=torch_s,
        pays_below_bit_per_s=times.allreduce.pays_below_bit_per_s(workers),
    )


def run(
    elements: int,
    texts: Sequence[str] = (),
    *,
    repetitions: int,
    workers: int = WORKERS,
    device: str = "cpu",
    json_path: Path | None = None,
    console: Console | None = None,
) -> None:
    """Measure codecs, all if ``texts`` is empty, as ``display.shown`` does."""
    request = request_of(texts, elements, repetitions, workers, device)
    count = 1 + (2 if request.torch else 1) * len(request.ways)  # at most so many contestants take turns

    def measured(display: Display) -> CodecResult:
        with display.task("codecs", (repetitions + 1) * count) as task:

            def progress(repetition: int, place: int) -> None:
                doing = "warm-up" if repetition < 0 else f"repetition {repetition + 1} of {repetitions}"
                task.at((repetition + 1) * count + place, doing)

            return measure(request, progress)

    shown(measured, render_codecs, json_path=json_path, console=console)
