"""The search space of a tuning: the words of strategies, and their sizes, as a space of ``searchers``.

Owns the choices of each word, the text of a candidate, and the removal of candidates that run alike. The user's words
are fixed; all other words are searched. Without ``lossy``, the space contains only strategies with the mathematics of
synchronous training: no codec, no other sync mode, no gradients of an earlier step. Separate server processes are
excluded, because they need additional machines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import Any

from syncline import registry
from syncline.compression.reducers.ways import way_of
from syncline.errors import StrategyError, UsageError
from syncline.nouns import Group, Layer
from syncline.schedules import Schedule
from syncline.strategy.grammar import Part, read_part
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import AUTO, NONE, bind, build, kind_of, write
from syncline.tuning.algorithm_choice import candidates as distinct_algorithms

from ..searchers import Axis, Space

BUCKETS = ("1MiB", "2MiB", "4MiB", "8MiB", "16MiB", "25MiB", "64MiB")
SLICES = ("1MiB", "2MiB", "4MiB", "8MiB", "16MiB")
PIECES = (1, 2, 4, 8)
CODECS = ("bf16", "int8", "int4", "topk(ratio=0.01)", "onebit", "powersgd(rank=4)")
"""The codecs that ``lossy`` adds, in the order of their compression."""

MODES = ("local(steps=4)", "local(steps=16)")

_LIBRARIES = {"zmq": "zmq", "grpc": "grpc", "ucx": "ucxx"}
"""Transports whose libraries need no launcher, with the module that has to be installed."""

_WORDS = ("architecture", "sync", "codec", "schedule", "transport")
_SYNCHRONOUS = "bsp"
_PLAIN_BUCKET = "25MiB"
_SIZES = {"bucket": BUCKETS, "slice": SLICES}


def changes_mathematics(strategy: Strategy) -> bool:
    """Whether training differs from synchronous training by more than the order of additions."""
    stale = strategy.schedule != AUTO and strategy.schedule_object().apply == "next_step"
    return strategy.codec != NONE or _mode_of(strategy) != _SYNCHRONOUS or stale


def _mode_of(strategy: Strategy) -> str:
    return write("sync", strategy.sync)


@dataclass(frozen=True)
class Offer:
    """The conditions of the search space: the fixed words in ``asked``, and the workers, on one host or on one each.

    ``layers`` are the model's layers if known: of schedules that make the same buckets, one is kept. ``refuses``
    raises UsageError for a strategy that the framework cannot train under.
    """

    asked: Strategy
    workers: int
    one_host: bool
    lossy: bool = False
    layers: tuple[Layer, ...] = ()
    refuses: Callable[[Strategy], None] = lambda _: None
    _known: dict[tuple[str, ...], object] = field(default_factory=dict, repr=False, compare=False)

    def axes(self) -> tuple[Axis, ...]:
        """The axes of the space: one per word, and one per size of a part."""
        found = [self._architecture()]
        if "double_tree" in found[0].choices:
            found.append(Axis("pieces", PIECES, ordered=True, when={"architecture": ("double_tree",)}))
        modes = (_SYNCHRONOUS, *(MODES if self.lossy else ()))
        found.append(Axis("sync", modes if _mode_of(self.asked) == _SYNCHRONOUS else (_mode_of(self.asked),)))
        found.append(Axis("codec", self._said("codec", NONE) or ("none", *(self._codecs() if self.lossy else ()))))
        schedules = self._said("schedule", AUTO) or ("auto", *self._schedules())
        found.append(Axis("schedule", schedules))
        for name, sizes in _SIZES.items():
            having = tuple(one for one in schedules if name in _arguments("schedules", one))
            if having:
                found.append(Axis(name, sizes, ordered=True, when={"schedule": having}))
        found.append(Axis("transport", self._said("transport", AUTO) or ("auto", *self._transports())))
        return tuple(found)

    def space(self, predict: Callable[[str], float | None]) -> Space:
        """The space of all candidates; if several run alike, only the first. ``predict`` receives strategies' texts."""
        seen: set[object] = set()

        def valid(candidate: Mapping[str, Any]) -> bool:
            key = self._key(candidate)
            if key is None or key in seen:
                return False
            seen.add(key)
            return True

        return Space(self.axes(), valid, lambda candidate: predict(text_of(candidate)))

    def _said(self, word: str, default: Any) -> tuple[str, ...]:
        """The user's choice for a word as the only choice; empty if the user left it open."""
        part = getattr(self.asked, word)
        return () if part == default else (write(kind_of(word, part.name), part),)

    def _architecture(self) -> Axis:
        if said := self._said("architecture", AUTO):
            return Axis("architecture", said)
        resolved = Strategy().resolve(self._group, hosts=1 if self.one_host else self.workers)
        names = [*distinct_algorithms(resolved, self._group), f"ps(servers={self.workers}, on=workers)"]
        return Axis("architecture", ("auto", *names))

    def _codecs(self) -> list[str]:
        """The codecs of every lossy tuning, and those that other packages register."""
        others = [one for one in registry.entries("codecs") if not one.own]
        return [*CODECS, *(one.name for one in others if not any(each.required for each in one.parameters))]

    def _schedules(self) -> list[str]:
        found = []
        for entry in registry.entries("schedules"):
            if any(one.required for one in entry.parameters):
                continue
            if self.lossy or Strategy(schedule=Part(entry.name)).schedule_object().apply != "next_step":
                found.append(entry.name)
        return found

    def _transports(self) -> list[str]:
        found = [
            name for name, module in _LIBRARIES.items() if name in registry.names("transports") and _is_there(module)
        ]
        return (["tcp"] if self.one_host else []) + found

    def _key(self, candidate: Mapping[str, Any]) -> object:
        """A key that is equal for candidates that run alike; None for a candidate that is impossible or pointless."""
        if not self._is_sensible(candidate):
            return None
        run = self._run_of(*(candidate[name] for name in _WORDS))
        if run is None or candidate["schedule"] == "auto":
            return run
        schedule: Schedule = build("schedules", _schedule(candidate))
        layout: object = _schedule(candidate)
        if self.layers and not schedule.measures:
            try:
                layout = (_schedule(candidate).name, tuple(bucket.slices for bucket in schedule.buckets(self.layers)))
            except UsageError:
                return None  # more buckets than the limit
        return run, candidate.get("pieces", 1), layout

    def _run_of(self, *words: str) -> object:
        """The resolved words without sizes, which do not affect feasibility; None for an impossible combination."""
        if words not in self._known:
            self._known[words] = None
            with contextlib.suppress(UsageError):
                strategy = _parsed(*words)
                resolved = strategy.resolve(self._group, hosts=1 if self.one_host else self.workers)
                self.refuses(resolved)
                # A run measures what ``auto`` becomes, so it differs from the architecture that resolve() returns.
                measured = strategy.architecture == AUTO and strategy.codec == NONE
                run = strategy if measured else resolved
                self._known[words] = run.architecture, run.sync, run.codec, run.transport, strategy.schedule == AUTO
        return self._known[words]

    def _is_sensible(self, candidate: Mapping[str, Any]) -> bool:
        """Whether a combination is worth a measurement. Words that the user has fixed always are."""
        axes = self._choices
        first = {name: candidate[name] == choices[0] for name, choices in axes.items() if name in candidate}
        if candidate["schedule"] == "auto" and not all(first[name] for name in ("architecture", "sync", "codec")):
            return False  # schedule=auto is a candidate only with the other defaults: the tuning chooses schedules
        if not first["sync"]:  # rare exchanges gain little from codecs and schedules
            plain = candidate["schedule"] == "fixed" and candidate.get("bucket") == _PLAIN_BUCKET
            return bool(first["codec"] and plain)
        # Payloads without a plan travel to owners and back, whatever the architecture.
        return first["codec"] or first["architecture"] or not _has_carrier(candidate["codec"])

    @cached_property
    def _choices(self) -> Mapping[str, tuple[Any, ...]]:
        return {axis.name: axis.choices for axis in self.axes()}

    @property
    def _group(self) -> Group:
        return Group(self.workers, 0, () if self.one_host else tuple(range(self.workers)))


def text_of(candidate: Mapping[str, Any]) -> str:
    """The canonical text of a candidate's strategy."""
    text = str(_parsed(*(candidate[name] for name in _WORDS)))
    name = candidate["schedule"]
    if any(size in candidate for size in _SIZES):
        text = text.replace(f"schedule={name}", f"schedule={write('schedules', _schedule(candidate))}")
    if "pieces" in candidate:
        part = bind("algorithms", read_part(f"{candidate['architecture']}(pieces={candidate['pieces']})"))
        text = text.replace(candidate["architecture"], write("algorithms", part), 1)
    return text


def text_left_open(candidate: Mapping[str, Any]) -> str | None:
    """The strategy with ``auto`` as architecture, from which a run may choose this candidate's; None if it cannot."""
    strategy = _parsed(*(candidate[name] for name in _WORDS))
    if strategy.architecture == AUTO or strategy.roles is not None or candidate.get("pieces", PIECES[0]) != PIECES[0]:
        return None
    others = {name: choice for name, choice in candidate.items() if name != "pieces"}
    return text_of({**others, "architecture": AUTO.name})


def _schedule(candidate: Mapping[str, Any]) -> Part:
    """The schedule of a candidate, with its sizes as arguments."""
    sizes = ", ".join(f"{name}={candidate[name]}" for name in _SIZES if name in candidate)
    return _bound(f"{candidate['schedule']}({sizes})" if sizes else candidate["schedule"])


@lru_cache(maxsize=256)
def _bound(schedule: str) -> Part:
    return bind("schedules", read_part(schedule))


@lru_cache(maxsize=1 << 14)
def _parsed(architecture: str, sync: str, codec: str, schedule: str, transport: str) -> Strategy:
    return Strategy.parse(f"{architecture} sync={sync} codec={codec} schedule={schedule} transport={transport}")


@lru_cache(maxsize=64)
def _has_carrier(codec: str) -> bool:
    return way_of(Strategy.parse(f"ring codec={codec}").codec_object()).carrier is not None


def choices_of(space: Space, text: str) -> Mapping[str, Any] | None:
    """The candidate with this strategy's text; None if the space has none."""
    return next((candidate for candidate in space.candidates if text_of(candidate) == text), None)


def _arguments(kind: str, text: str) -> Sequence[str]:
    """The names of a part's arguments; empty if the text already sets arguments."""
    if "(" in text or text not in registry.names(kind):
        return ()
    return [one.name for one in registry.get(kind, text).parameters]


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, StrategyError):
        return False
