"""Presets: one name for a whole strategy, as deep learning frameworks of 2017 trained.

Owns the table of names and what each stands for. A preset is no word of a strategy: the name stands alone, and the
strategy that is built, printed and sent to other ranks is the one that it stands for.

The four frameworks are those of Shi and Chu, "Performance modeling and evaluation of distributed deep learning
frameworks on GPUs" (arXiv 1711.05979) and of Shi, Wang, Chu and Li, "A DAG model of synchronous stochastic gradient
descent in distributed deep learning" (arXiv 1805.03812): who sums gradients, and whether one layer's are summed while
the one before it still computes. How many servers there are is for whoever starts a training to say; here it is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from .. import registry
from ..errors import StrategyError
from .grammar import Part

_FALLBACK = "tcp"


@dataclass(frozen=True)
class Preset:
    """A named strategy.

    ``words`` are all but the transport. ``library`` is the message library of the original: ``transport`` is what
    stands for it, empty where that is left open. It is taken only where it is registered and its ``package`` installed.
    """

    name: str
    words: str
    library: str
    transport: str
    summary: str
    source: str

    @property
    def text(self) -> str:
        """The strategy that it stands for, in words."""
        return f"{self.words} transport={self._transport}" if self.transport else self.words

    @property
    def note(self) -> str:
        """What is not as in the original; empty where nothing is."""
        if not self.transport:
            return f"the original sums with {self.library}"
        if self._transport == self.transport:
            return ""
        return f"{self._transport} in the place of {self.library}"

    @property
    def _transport(self) -> str:
        return self.transport if _is_there(self.transport) else _FALLBACK


def _is_there(transport: str) -> bool:
    """Whether a transport is registered, and the package that it declares is installed."""
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
        "Variables lie on parameter servers, which apply each one's gradient as soon as all workers have sent it.",
        "arXiv 1711.05979; Abadi et al., OSDI 2016",
    ),
)

PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _PRESETS}
"""All presets by name."""


def preset_of(words: list[tuple[str, Part]]) -> Preset | None:
    """The preset that the words of a text name, None for a strategy; StrategyError for a preset with more words."""
    first = words[0] if words else ("", Part(""))
    preset = None if first[0] else PRESETS.get(first[1].name)
    if preset is None:
        return None
    if len(words) > 1 or first[1].args:
        raise StrategyError(f"{preset.name} is a whole strategy; to change a word of it start from {preset.text!r}")
    return preset
