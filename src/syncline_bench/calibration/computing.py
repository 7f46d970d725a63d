"""Measures the time per byte that one thread needs to add, copy, update, encode and decode.

Owns the work that represents each constant; ``tuning.codec_times`` times the codecs. An update is a step of torch's
SGD. Without torch it is assumed to take as long as three passes over memory, and the result is marked as assumed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np

from syncline.codecs import Floats
from syncline.tuning.codec_times import Addition, Timed, Trial, every_codec, rounds_in_turn, variants

from .fits import Estimate, Samples
from .links import Told

_ELEMENTS = 4 << 20
"""The size of the arrays that are added, copied and updated. Like a model's gradients, it exceeds the caches."""

_CODEC_ELEMENTS = 1 << 21
_REPETITIONS, _CODEC_REPETITIONS = 15, 5
_TOGETHER = 4
"""The number of codecs that take turns. All codecs at once would need gigabytes."""

_PASSES = 1.5
"""The passes over memory of an update (two reads, one write) per those of a copy (one read, one write)."""


@dataclass(frozen=True)
class Computed:
    """Seconds per byte by constant, and the reasons for the constants that are assumed."""

    per_byte: dict[str, Estimate]
    assumed: dict[str, str]


def ways_of(texts: Sequence[str]) -> tuple[tuple[str, bool], ...]:
    """The codecs of these texts (all if empty), each with and without error feedback. UsageError for an unknown one.

    ``none`` selects no codec.
    """
    asked = texts or every_codec(choosing=True)
    return tuple(dict.fromkeys(way for text in asked if text != "none" for way in variants(text, _CODEC_ELEMENTS)))


def measure(ways: Sequence[tuple[str, bool]], told: Told) -> Computed:
    """Measure all constants. Takes about a second, and some tenths of a second for each codec."""
    told(0.0, "adding, copying, updating")
    found, assumed = _plain()
    for first in range(0, len(ways), _TOGETHER):
        told((1 + first) / (1 + len(ways)), ways[first][0])
        trials = [Trial(*way, _CODEC_ELEMENTS) for way in ways[first : first + _TOGETHER]]
        every = rounds_in_turn(trials, _CODEC_ELEMENTS, _CODEC_REPETITIONS)
        for trial, rounds in zip(trials, every, strict=True):
            encode, decode = (_per_byte(column, trial.elements) for column in zip(*rounds, strict=True))
            name = _name(trial.text, trial.feedback)
            found |= {f"codecs.{name}.encode": encode, f"codecs.{name}.decode": decode}
    return Computed(found, assumed)


def _name(text: str, feedback: bool) -> str:
    """The codec as a strategy's text writes it. A codec with a warm-up contains ``feedback`` already."""
    return f"feedback({text})" if feedback and not text.startswith("feedback(") else text


def _plain() -> tuple[dict[str, Estimate], dict[str, str]]:
    contestants: dict[str, Timed] = {"gamma": Addition(_ELEMENTS), "copy": _Copy(_ELEMENTS)}
    with contextlib.ExitStack() as stack:
        if find_spec("torch") is not None:
            from ..codecs.compositions import one_thread

            stack.enter_context(one_thread())
            contestants["update"] = _Update(_ELEMENTS)
        rounds = rounds_in_turn(list(contestants.values()), _ELEMENTS, _REPETITIONS)
    found = {
        name: _per_byte([times[0] for times in mine], _ELEMENTS) for name, mine in zip(contestants, rounds, strict=True)
    }
    if "update" in found:
        return found, {}
    copy = found["copy"]
    found["update"] = Estimate(_PASSES * copy.value, _PASSES * copy.low, _PASSES * copy.high, samples=0)
    return found, {"update": "assumed: three passes over memory, since torch is not installed"}


def _per_byte(times_s: Sequence[float], elements: int) -> Estimate:
    found = Samples(tuple(times_s)).estimate
    value, low, high = (number / (4 * elements) for number in (found.value, found.low, found.high))
    return replace(found, value=value, low=low, high=high)


class _Copy:
    """A copy of one array to another."""

    def __init__(self, elements: int) -> None:
        self._out = np.zeros(elements, np.float32)

    def __call__(self, x: Floats) -> tuple[float]:
        """Copy once. Returns the seconds."""
        begun = time.perf_counter()
        np.copyto(self._out, x)
        return (time.perf_counter() - begun,)


class _Update:
    """A step of torch's SGD on one tensor."""

    def __init__(self, elements: int) -> None:
        import torch

        self._weight = torch.zeros(elements, requires_grad=True)
        self._optimizer = torch.optim.SGD([self._weight], lr=0.01)

    def __call__(self, x: Floats) -> tuple[float]:
        """Apply the gradient ``x`` once. Returns the seconds."""
        import torch

        self._weight.grad = torch.from_numpy(x)
        begun = time.perf_counter()
        self._optimizer.step()
        return (time.perf_counter() - begun,)
