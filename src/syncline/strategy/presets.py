"""Presets: one name for a whole strategy, after the training of deep learning frameworks of 2017.

A preset is no word of a strategy. Its name stands alone, and the strategy that is built, printed and sent to other
ranks is the one that it stands for.

The four frameworks are those of Shi and Chu, "Performance modeling and evaluation of distributed deep learning
frameworks on GPUs" (arXiv 1711.05979) and of Shi, Wang, Chu and Li, "A DAG model of synchronous stochastic gradient
descent in distributed deep learning" (arXiv 1805.03812). They differ in what sums the gradients, and in whether one
layer's gradients are summed while the layer before it still computes. The number of servers is 1 here; set it when
starting a training.
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
        "Variables lie on parameter servers, which apply each one's gradient as soon as all workers have sent it.",
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
        raise StrategyError(f"{preset.name} is a whole strategy; to change a word of it start from {preset.text!r}")
    return preset
