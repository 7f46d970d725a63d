"""The five words of a strategy and their possible values, bound to registered parts.

This file has the words, the names of the whole grammar, and the list of everything a strategy may say. ``rules`` has
the valid combinations, ``strategy`` the defaults and the resolution of ``auto``. Names, arguments, types and
capabilities come from the registry.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from .. import registry
from ..errors import NotBuiltError, StrategyError
from .grammar import Part, nearest
from .parts import bind, build, signature
from .presets import PRESETS

WORDS: Mapping[str, str] = {
    "architecture": "algorithms",
    "sync": "sync",
    "codec": "codecs",
    "schedule": "schedules",
    "transport": "transports",
}
"""The words of a strategy in the order of printing, each with the registry's kind of its parts."""

AUTO = Part("auto")
"""Resolved later: from the topology when the group is known, or from measurements."""

BSP, NONE = Part("bsp"), Part("none")

_HAS_AUTO = ("architecture", "codec", "schedule", "transport")

# fmt: off
PLANNED: Mapping[str, tuple[str, ...]] = {
    "architecture": (
        "ring", "recursive_doubling", "halving_doubling", "tree", "double_tree", "hierarchical", "direct", "ps",
        "native"
    ),
    "sync": (
        "bsp", "ssp", "asp", "local", "post_local", "easgd", "diloco", "gossip"
    ),
    "codec": (
        "none", "fp16", "bf16", "fp8", "int8", "int4", "qsgd", "natural", "ternary", "onebit", "sign", "topk",
        "threshold", "randomk", "gtopk", "powersgd", "adaptive", "feedback", "auto"
    ),
    "schedule": (
        "fifo", "wait_free", "fixed", "merged", "priority", "split", "delayed"
    ),
    "transport": (
        "shm", "tcp", "inproc", "torch", "mpi", "zmq", "grpc", "ucx"
    ),
}
# fmt: on
"""Every name of the grammar: NotBuiltError for those that the registry lacks."""


_ELSEWHERE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "architecture": {
        "allreduce": ("ring", "auto"), "nccl": ("native transport=torch(backend=nccl)",), "ddp": ("auto",),
        "gloo": ("native transport=torch",), "mpi": ("native transport=mpi", "ring transport=mpi"),
        "parameter_server": ("ps",), "rabenseifner": ("halving_doubling",),
    },
    "sync": {
        "async": ("asp", "bsp"), "asynchronous": ("asp", "bsp"), "sync": ("bsp",), "synchronous": ("bsp",),
        "stale": ("ssp", "bsp"), "local_sgd": ("local",),
    },
    "codec": {
        "float32": ("none",), "fp32": ("none",), "float16": ("fp16",), "half": ("fp16",), "bfloat16": ("bf16",),
        "1bit": ("onebit",), "signsgd": ("sign", "sign(vote=on)"), "terngrad": ("ternary",), "dgc": ("threshold",),
    },
    "schedule": {"bucket": ("fixed",), "layerwise": ("wait_free",), "wfbp": ("wait_free",)},
    "transport": {
        "gloo": ("torch",), "nccl": ("torch(backend=nccl)",), "socket": ("tcp",), "shared_memory": ("shm",),
    },
}  # fmt: skip
"""Names in other libraries and papers, and the corresponding parts here, the nearest first."""


def known_sync(given: object) -> bool:
    """Whether a strategy is synchronous and waits for all workers."""
    return bind("sync", BSP) == getattr(given, "sync", None)


def kind_of(word: str, name: str) -> str:
    """The registry's kind of a word's part. An architecture is an algorithm or a library's collective."""
    return "collectives" if word == "architecture" and name in registry.names("collectives") else WORDS[word]


def built_names(word: str) -> tuple[str, ...]:
    """The registered names for the word."""
    kind = WORDS[word]
    if kind != "algorithms":
        return registry.names(kind)
    return tuple(
        entry.name
        for kind in ("algorithms", "collectives")
        for entry in registry.entries(kind)
        if entry.capabilities.get("goal") == "allreduce"
    )


def bind_word(word: str, part: Part) -> Part:
    """The bound part of a word. Errors list the possible values."""
    if word in _HAS_AUTO and part.name == "auto":
        if part.args:
            raise StrategyError(f"{word}=auto takes no arguments")
        return AUTO
    _require_known(word, part)
    kind, built = kind_of(word, part.name), built_names(word)
    bound = bind(kind, part)
    entry = registry.get(kind, part.name)
    if "check" in entry.capabilities:
        entry.capabilities["check"](**bound.arguments)
    elif inspect.isclass(entry.target) and kind != "transports":
        build(kind, bound)  # its __post_init__ validates the ranges
    assert part.name in built
    return bound


def _require_known(word: str, part: Part) -> None:
    """Raise NotBuiltError or StrategyError unless the part and its nested parts have registered names."""
    built = built_names(word)
    if part.name not in built:
        for kind in ("algorithms", "collectives") if word == "architecture" else (WORDS[word],):
            if why := registry.left_out(kind, part.name):
                raise StrategyError(why)
        if part.name in PLANNED[word]:
            raise NotBuiltError(f"{word} {part.name!r} is not built yet; built are {', '.join(built)}")
        presets = PRESETS if word == "architecture" else ()
        hint = known_as(word, part.name) or nearest(part.name, (*built, *PLANNED[word], *presets))
        raise StrategyError(f"unknown {word} {part.name!r}{hint or '; there are ' + ', '.join(built)}")
    wraps = registry.get(kind_of(word, part.name), part.name).capabilities.get("wraps")
    for name, value in part.args:
        if wraps and name in ("", wraps):
            _require_known(word, Part(value) if isinstance(value, str) else value)


def known_as(word: str, name: str) -> str:
    """A hint for a name that is used elsewhere or belongs to another word; empty if it is unknown."""
    return _called_here(word, name) or belongs_to(name)


def _called_here(word: str, name: str) -> str:
    """A hint for a name that other libraries use, or for a collective that is no architecture."""
    plain = name.lower().replace("-", "_")
    if word == "architecture" and plain in registry.names("algorithms"):
        goal = registry.get("algorithms", plain).capabilities.get("goal", "").replace("_", "-")
        if not goal:
            return (
                ": it is registered without saying what its plan is for: write"
                f' @register("algorithms", "{plain}", goal="allreduce")'
            )
        return (
            f": it is a plan for {goal}, and gradients need an allreduce, such as ring; syncline show {plain} draws it,"
            f" syncline bench --collective {goal} measures it"
        )
    # An architecture has no key, so a bare name may be meant for any other word.
    for its_word in (word, *(WORDS if word == "architecture" else ())):
        there, prefix = (*built_names(its_word), "auto"), "" if its_word == word else f"{its_word}="
        shown = [
            repr(prefix + each) + ("" if each.partition("(")[0].split()[0] in there else " (not built yet)")
            for each in _ELSEWHERE[its_word].get(plain, ())
        ]
        if shown:
            return f"; did you mean {' or '.join(shown)}?"
    return ""


def belongs_to(name: str) -> str:
    """A hint for a name that belongs to another word."""
    for word in WORDS:
        if word != "architecture" and name in (*built_names(word), *PLANNED[word]) and name != "auto":
            return f": it is a {word}, write {word}={name}"
    return ": an architecture comes first" if name in (*built_names("architecture"), *PLANNED["architecture"]) else ""


@dataclass(frozen=True)
class Word:
    """One possible value of a word. ``text`` shows its arguments; ``summary`` is empty if it is not built yet."""

    word: str
    name: str
    text: str
    summary: str
    built: bool


def vocabulary() -> list[Word]:
    """Every possible value of every word, built or not, in printing order."""
    found = []
    for word in WORDS:
        if word in _HAS_AUTO:
            found.append(Word(word, "auto", "auto", _AUTO_SUMMARY[word], True))
        for name in built_names(word):
            entry = registry.get(kind_of(word, name), name)
            found.append(Word(word, name, signature(entry), entry.summary, True))
        known = {item.name for item in found if item.word == word}
        found += [Word(word, name, name, "", False) for name in PLANNED[word] if name not in known]
    return found


_AUTO_SUMMARY = {
    "architecture": "The fastest for each size of array, measured when the run starts; auto(budget=60s) also tries"
    " schedules.",
    "codec": "None, bf16, or int8 or int4 with error feedback: the fastest, measured when the run starts.",
    "schedule": "Starts as fixed, then what is predicted to be fastest from the times of a few steps.",
    "transport": "shm among the processes of one host, tcp between hosts.",
}
