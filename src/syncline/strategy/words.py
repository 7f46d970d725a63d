"""The five words of a strategy, their possible values, bound to registered parts, and presets of whole strategies.

It converts a part's text to the registered function or class and back, for any kind of part: types and completes
arguments, builds and prints. It defines the words, and lists everything that a strategy may contain. Names, arguments,
types and capabilities come from the registry. ``rules`` has the valid combinations, ``strategy`` the defaults and the
resolution of ``auto``, ``grammar`` the syntax.

**Presets** are one name for a whole strategy, after the training of deep learning frameworks of 2017. A preset is not a
word of a strategy. Its name stands alone, and the strategy that is built, printed and sent to other ranks is the one
that it stands for. The four frameworks are compared by Shi and Chu, "Performance modeling and evaluation of distributed
deep learning frameworks on GPUs" (arXiv 1711.05979) and by Shi, Wang, Chu and Li, "A DAG model of synchronous
stochastic gradient descent in distributed deep learning" (arXiv 1805.03812). They differ in how gradients are summed,
and in whether one layer's gradients are summed while the layer before it still computes. The number of servers is 1
here; set it when starting a training.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from .. import registry
from ..algorithms import Roles
from ..errors import StrategyError
from .grammar import Part, check_value, nearest, read_value, write_value


def bind(kind: str, part: Part, shared: Sequence[registry.Parameter] = ()) -> Part:
    """The part with all its arguments typed, in order and completed with defaults.

    ``shared`` are arguments that all parts of the kind take besides their own. Raises UsageError for an unknown name or
    argument, a wrong type, a missing argument or a value out of range.
    """
    entry = registry.get(kind, part.name)
    wraps = entry.capabilities.get("wraps")
    parameters = (*entry.parameters, *shared)
    given = {_argument_name(entry, parameters, name, value): value for name, value in part.args}
    if len(given) < len(part.args):
        raise StrategyError(f"an argument of {part.name} is given twice")
    args: list[tuple[str, Any]] = []
    for parameter in parameters:
        what = f"{parameter.name} of {part.name}"
        if parameter.name not in given:
            if parameter.required:
                raise StrategyError(f"{part.name} needs {parameter.name}, as in {signature(entry)}")
            args.append((parameter.name, _default(entry, parameter)))
            continue
        value = given[parameter.name]
        if parameter.name == wraps:
            value = bind(kind, Part(value) if isinstance(value, str) else value)
        elif isinstance(value, Part):
            raise StrategyError(f"{what} takes no arguments of its own, got {value.name}(...)")
        else:
            if isinstance(value, str):
                value = read_value(value, parameter.annotation, what)
            value = check_value(value, parameter.annotation, what)
        args.append((parameter.name, value))
    return Part(part.name, tuple(args))


def build(kind: str, part: Part, *positional: Any) -> Any:
    """Call the registered function or class with the part's arguments, after building nested parts."""
    bound = bind(kind, part)
    arguments = {
        name: build(kind, value) if isinstance(value, Part) else value for name, value in bound.arguments.items()
    }
    return registry.get(kind, part.name).target(*positional, **arguments)


def roles_of(part: Part) -> Roles | None:
    """The roles that a bound architecture declares; None if all workers are alike or the library decides."""
    if part.name not in registry.names("algorithms"):
        return None
    declared = registry.get("algorithms", part.name).capabilities.get("roles")
    if declared is None:
        return None
    roles: Roles = declared(**part.arguments)
    return roles


def write(kind: str, part: Part, shared: Sequence[registry.Parameter] = ()) -> str:
    """The canonical text of a part that was bound with the same ``shared`` arguments."""
    entry = registry.get(kind, part.name)
    wraps = entry.capabilities.get("wraps")
    shown: list[str] = []
    for parameter in (*entry.parameters, *shared):
        value = part[parameter.name]
        if parameter.name == wraps:
            if parameter.required or value != _default(entry, parameter):
                shown.insert(0, write(kind, value))
        elif value != parameter.default or parameter.name in entry.capabilities.get("always_print", ()):
            shown.append(f"{parameter.name}={write_value(value, parameter.annotation)}")
    return f"{part.name}({', '.join(shown)})" if shown else part.name


def signature(entry: registry.Entry) -> str:
    """The entry with its arguments and defaults, for listings."""
    wraps = entry.capabilities.get("wraps")
    shown: list[str] = []
    for parameter in entry.parameters:
        if parameter.name == wraps:
            default = "" if parameter.required else f"={write(entry.kind, _default(entry, parameter))}"
            shown.insert(0, parameter.name.upper() + default)
        elif parameter.required:
            shown.append(f"{parameter.name}=...")
        else:
            shown.append(f"{parameter.name}={write_value(parameter.default, parameter.annotation)}")
    return f"{entry.name}({', '.join(shown)})" if shown else entry.name


def part_of(kind: str, built: Any) -> Part:
    """The bound part that ``build`` turns into an equal object. The object's class is a registered frozen dataclass."""
    entry = next(entry for entry in registry.entries(kind) if entry.target is type(built))
    wraps = entry.capabilities.get("wraps")
    values = {parameter.name: getattr(built, parameter.name) for parameter in entry.parameters}
    args = {name: part_of(kind, value) if name == wraps else value for name, value in values.items()}
    return Part(entry.name, tuple(args.items()))


def _default(entry: registry.Entry, parameter: registry.Parameter) -> Any:
    """The default of an argument; for a wrapped object, the part that it was built from."""
    if parameter.name == entry.capabilities.get("wraps"):
        return part_of(entry.kind, parameter.default)
    return parameter.default


def _argument_name(entry: registry.Entry, parameters: Sequence[registry.Parameter], name: str, value: Any) -> str:
    """The parameter for an argument. Raises StrategyError if there is none."""
    known = [parameter.name for parameter in parameters]
    if name in known:
        return name
    if name:
        takes = f"{entry.name} takes {', '.join(known)}" if known else f"{entry.name} takes no arguments"
        raise StrategyError(f"{entry.name} has no argument {name!r}{nearest(name, known) or '; ' + takes}")
    wraps = entry.capabilities.get("wraps")
    if wraps:
        return str(wraps)
    shown = value.name if isinstance(value, Part) else value
    first = f", as in {entry.name}({known[0]}={shown})" if known else f", and {entry.name} has none"
    raise StrategyError(f"arguments have names{first}")


_FALLBACK = "tcp"


@dataclass(frozen=True)
class Preset:
    """A named strategy.

    ``words`` are all but the transport. ``library`` is the original's message library, and ``transport`` its
    replacement, empty if left open. The transport is used only if it is registered and its ``package`` is installed.
    """

    name: str
    words: str
    library: str
    transport: str
    summary: str
    source: str

    @property
    def text(self) -> str:
        """The strategy in words."""
        return f"{self.words} transport={self._transport}" if self.transport else self.words

    @property
    def note(self) -> str:
        """The differences from the original; empty if there are none."""
        if not self.transport:
            return f"the original sums with {self.library}"
        if self._transport == self.transport:
            return ""
        return f"{self._transport} in the place of {self.library}"

    @property
    def _transport(self) -> str:
        return self.transport if _is_there(self.transport) else _FALLBACK


def _is_there(transport: str) -> bool:
    """Whether a transport is registered and its declared package is installed."""
    if transport not in registry.names("transports"):
        return False
    package = registry.get("transports", transport).capabilities.get("package")
    return package is None or find_spec(package) is not None


_PRESETS = (
    Preset(
        "caffe-mpi",
        "ring schedule=wait_free",
        "NCCL",
        "",
        "Allreduce among the workers, layer by layer while backward goes on.",
        "arXiv 1711.05979; github.com/Caffe-MPI/Caffe-MPI.github.io",
    ),
    Preset(
        "cntk",
        "ring schedule=fifo",
        "NCCL and MPI",
        "",
        "Allreduce among the workers, of all gradients when backward has ended.",
        "arXiv 1711.05979; Seide and Agarwal, KDD 2016",
    ),
    Preset(
        "mxnet",
        "ps(servers=1) schedule=wait_free",
        "ZeroMQ",
        "zmq",
        "Servers hold the weights and update them; layers are pushed and pulled while backward goes on.",
        "arXiv 1711.05979; Chen et al., arXiv 1512.01274 (KVStore)",
    ),
    Preset(
        "tensorflow",
        "ps(servers=1) schedule=wait_free",
        "gRPC",
        "grpc",
        "Parameter servers hold the variables and apply each gradient as soon as all workers have sent it.",
        "arXiv 1711.05979; Abadi et al., OSDI 2016",
    ),
)

PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _PRESETS}
"""All presets by name."""


def preset_of(words: list[tuple[str, Part]]) -> Preset | None:
    """The preset that a text names; None for a strategy. StrategyError for a preset with further words."""
    first = words[0] if words else ("", Part(""))
    preset = None if first[0] else PRESETS.get(first[1].name)
    if preset is None:
        return None
    if len(words) > 1 or first[1].args:
        raise StrategyError(
            f"{preset.name} is a complete strategy; to change one of its words start from {preset.text!r}"
        )
    return preset


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
    """Raise StrategyError unless the part and its nested parts have registered names."""
    built = built_names(word)
    if part.name not in built:
        for kind in ("algorithms", "collectives") if word == "architecture" else (WORDS[word],):
            if why := registry.left_out(kind, part.name):
                raise StrategyError(why)
        presets = PRESETS if word == "architecture" else ()
        hint = known_as(word, part.name) or nearest(part.name, (*built, *presets))
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
                ": its registration does not state the goal of its plan: write"
                f' @register("algorithms", "{plain}", goal="allreduce")'
            )
        return (
            f": it is a plan for {goal}, but gradients need an allreduce, such as ring; syncline show {plain} draws"
            f" it, syncline bench --collective {goal} measures it"
        )
    # An architecture has no key, so a bare name may be meant for any other word.
    for its_word in (word, *(WORDS if word == "architecture" else ())):
        prefix = "" if its_word == word else f"{its_word}="
        shown = [repr(prefix + each) for each in _ELSEWHERE[its_word].get(plain, ())]
        if shown:
            return f"; did you mean {' or '.join(shown)}?"
    return ""


def belongs_to(name: str) -> str:
    """A hint for a name that belongs to another word."""
    for word in WORDS:
        if word != "architecture" and name in built_names(word) and name != "auto":
            return f": it is a {word}, write {word}={name}"
    return ": an architecture comes first" if name in built_names("architecture") else ""


@dataclass(frozen=True)
class Word:
    """One possible value of a word. ``text`` shows its arguments."""

    word: str
    name: str
    text: str
    summary: str


def vocabulary() -> list[Word]:
    """Every possible value of every word, in printing order."""
    found = []
    for word in WORDS:
        if word in _HAS_AUTO:
            found.append(Word(word, "auto", "auto", _AUTO_SUMMARY[word]))
        for name in built_names(word):
            entry = registry.get(kind_of(word, name), name)
            found.append(Word(word, name, signature(entry), entry.summary))
    return found


_AUTO_SUMMARY = {
    "architecture": "The fastest for each size of array, measured when the run starts; auto(budget=60s) also tries"
    " schedules.",
    "codec": "The fastest of none, bf16, and int8 or int4 with error feedback, measured when the run starts.",
    "schedule": "Starts as fixed; switches to the schedule with the fastest prediction from the times of a few steps.",
    "transport": "shm among the processes of one host, tcp between hosts.",
}
