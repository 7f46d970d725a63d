"""Workloads: a model with its data and its solver, as trained in comparisons of strategies.

A workload is named by a text: ``digits``, ``text``, ``cifar10:PATH``, ``synthetic:resnet50``; the part after the colon
is passed to the workload. Arguments in parentheses come last, as in ``replay:alexnet(loading=100ms, prefetch=2)``: the
arguments of ``Pipeline`` and ``Speed`` for every workload, of ``Computing`` for workloads registered with
``computes=True``, and a workload's own keyword-only parameters. They have the syntax of strategy arguments.

Workloads are registered under their names. Networks for PyTorch are in ``models``; networks that other frameworks can
train also exist as data (``_blueprint``). This folder knows torch, but no strategies, groups or transports: a workload
gets a rank and a world size as two numbers. Importing this folder, listing the registered names and loading a workload
do not import torch. Building a model does, and so does deriving the times of ``replay:NETWORK``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TypeVar

from syncline.errors import UsageError
from syncline.nouns import Seconds
from syncline.registry import get, parameters_of
from syncline.strategy.grammar import read_part
from syncline.strategy.words import bind, write

from ._blueprint import Blueprint
from ._computing import PLAIN, Computing
from ._feed import AT_ONCE, Feed, Pipeline
from ._speed import EVEN, Speed, Tempo
from ._trace import Trace, TracedLayer
from ._workload import Images, Part, Workload, layers

__all__ = [
    "AT_ONCE",
    "EVEN",
    "PLAIN",
    "Blueprint",
    "Computing",
    "Feed",
    "Images",
    "Part",
    "Pipeline",
    "Speed",
    "Tempo",
    "Trace",
    "TracedLayer",
    "Workload",
    "layers",
    "load",
]

T = TypeVar("T")

_ARGUMENTS = re.compile(r"\([^()]*\)$")


def load(text: str) -> Workload:
    """The workload of that text, with its data in memory. Its name is the canonical form of the text.

    Raises UsageError for an unknown name or argument, DataError for data that cannot be read.
    """
    name, argument, arguments = _split(text.strip())
    entry = get("workloads", name)
    kinds = (Pipeline, Speed, Computing) if entry.capabilities.get("computes") else (Pipeline, Speed)
    shared = tuple(parameter for kind in kinds for parameter in parameters_of(kind))
    part = bind("workloads", read_part(f"{entry.name}{arguments}"), shared)
    given = part.arguments

    def taken(kind: type[T]) -> T:
        names = [parameter.name for parameter in parameters_of(kind)] if kind in kinds else []
        return kind(**{name: given.pop(name) for name in names})

    feed, speed, how = taken(Pipeline), taken(Speed), taken(Computing)
    workload = entry.target(argument, **given)
    if not isinstance(workload, Workload):
        raise UsageError(f"workload {entry.name!r} returned {type(workload).__name__}: it must return a Workload")
    if feed.h2d is None and workload.trace is not None:
        feed = replace(feed, h2d=Seconds(workload.trace.h2d_s))
    if how.channels_last == "on" and not isinstance(workload.train, Images):
        raise UsageError(f"channels_last=on is a layout of images, and {workload.name} has none: leave it out")
    shown = write("workloads", part, shared).removeprefix(entry.name)
    return replace(workload, name=workload.name + shown, pipeline=feed, speed=speed, computing=how)


def _split(text: str) -> tuple[str, str, str]:
    """The name, the part after its colon, and the arguments with their parentheses.

    Parentheses without an equals sign belong to a path, as in ``cifar10:data (1)``.
    """
    found = _ARGUMENTS.search(text)
    arguments = found[0] if found is not None and ("=" in found[0] or ":" not in text) else ""
    name, _, argument = text.removesuffix(arguments).strip().partition(":")
    return name, argument, arguments
