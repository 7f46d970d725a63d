"""A cluster as numbers: links, adding, processors, codecs, topology; each number with its range and where it is from.

Owns what a cluster's constants are called, what may be asked of them, and copies with other ones. Does not know files
(``networks``) or times of anything that runs on it.

Every number is a ``Constant`` under a dotted name: what varies one constant, all of them or none goes by names and
knows no cluster. The names:

    between.alpha  between.beta  between.flight    a message, a byte, the flight: between hosts
    inside.alpha   inside.beta   inside.flight     the same inside a host; without them all messages go between
    between.from_65536.alpha  ....beta             of messages of that many bytes and more
    gamma                                          a byte added to another
    message  byte_cpu                              processor time of a message, and of a byte sent or received
    bucket                                         of a bucket and operation, in the thread that moves messages
    tensor  iteration                              of a gradient, and of an iteration, in the thread that trains
    update  copy                                   a byte of weights updated, of anything copied
    codecs.CODEC.encode  codecs.CODEC.decode       a byte of gradient, CODEC being the codec's text

Seconds per message, or per byte, throughout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from syncline.errors import UsageError
from syncline.strategy.grammar import nearest

from .links import Link, piecewise
from .topology import Switch, Topology

_PLAIN = ("gamma", "message", "byte_cpu", "bucket", "tensor", "iteration", "update", "copy")
_NAMES = (*(f"{end}.{what}" for end in ("between", "inside") for what in ("alpha", "beta", "flight")), *_PLAIN)
_PIECE = re.compile(r"(between|inside)\.(?:from_(\d+)\.)?(alpha|beta)")
_CODEC = re.compile(r"codecs\.(.+)\.(encode|decode)")

End = Literal["low", "high"]


@dataclass(frozen=True)
class Constant:
    """A number of seconds, the range in which it may be expected, and where it comes from.

    ``measured`` tells a measurement from an assumption. Without a range it is exact.
    Raises UsageError for numbers that are negative or not finite, and for a range without the value.
    """

    value: float
    low: float | None = None
    high: float | None = None
    measured: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        for number in (self.value, *self.range):
            if not (math.isfinite(number) and number >= 0):
                raise UsageError(f"a constant is a finite number of seconds and not negative, got {number!r}")
        if not self.range[0] <= self.value <= self.range[1]:
            raise UsageError(f"a constant lies in its range, got {self.value!r} and {self.range}")

    @property
    def range(self) -> tuple[float, float]:
        """The least and the greatest that may be expected."""
        return (self.value if self.low is None else self.low, self.value if self.high is None else self.high)

    def at(self, end: End) -> Constant:
        """The constant at one end of its range, exactly."""
        return Constant(self.range[end == "high"], measured=self.measured, source=self.source)


class CodecCosts(NamedTuple):
    """Seconds per byte of gradient that a codec takes."""

    encode_s_per_byte: float
    decode_s_per_byte: float


@dataclass(frozen=True)
class Cluster:
    """Hosts, their links and what computing costs on them; ``constants`` by their names, see the file's head.

    ``ports_per_host`` ports serve all ranks of a host; ``per_host`` is how many ranks a host has unless somebody says
    otherwise. ``cores`` are shared by the ranks of a host, or of all hosts where these are namespaces of one machine
    (``one_machine``); None: there are enough. ``ready_made`` clusters are those of the library under their names: what
    was measured of one says nothing of a file that is called the same. Raises UsageError for constants that are
    unknown, or that are missing.
    """

    name: str
    constants: Mapping[str, Constant] = field(hash=False)
    about: str = ""
    source: str = ""
    date: str = ""
    topology: Topology = field(default_factory=Switch)
    ports_per_host: int = 1
    per_host: int = 1
    cores: int | None = None
    one_machine: bool = False
    ready_made: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        for key in self.constants:
            if key not in _NAMES and not _PIECE.fullmatch(key) and not _CODEC.fullmatch(key):
                known = ", ".join(_NAMES)
                raise UsageError(
                    f"network {self.name}: unknown constant {key!r}{nearest(key, _NAMES)}; there are {known},"
                    " between.from_BYTES.alpha and codecs.CODEC.encode"
                )
        for key in ("between.alpha", "between.beta"):
            if key not in self.constants:
                raise UsageError(f"network {self.name}: {key} is missing: seconds per message, and per byte")
        for what in ("ports_per_host", "per_host"):
            if getattr(self, what) < 1:
                raise UsageError(f"network {self.name}: {what} is at least 1, got {getattr(self, what)}")
        if self.cores is not None and self.cores < 1:
            raise UsageError(f"network {self.name}: hosts have at least one core, got {self.cores}")
        # Their own checks: pieces begin at 0, alpha and beta come together.
        self.between, self.inside, self.codecs  # noqa: B018

    @cached_property
    def between(self) -> Link:
        """The link between two hosts."""
        found = self._link("between")
        assert found is not None  # alpha and beta are there
        return found

    @cached_property
    def inside(self) -> Link | None:
        """The link between two ranks of one host; None: they talk as ranks of different hosts do."""
        return self._link("inside")

    @cached_property
    def codecs(self) -> Mapping[str, CodecCosts]:
        """What codecs cost, by their text."""
        matches = [match for key in self.constants if (match := _CODEC.fullmatch(key))]
        found = {}
        for text in dict.fromkeys(match[1] for match in matches):
            keys = [f"codecs.{text}.{what}" for what in ("encode", "decode")]
            if missing := [key for key in keys if key not in self.constants]:
                raise UsageError(f"network {self.name}: {missing[0]} is missing: a codec has encode and decode")
            found[text] = CodecCosts(*(self._seconds(key) for key in keys))
        return found

    @property
    def gamma_s_per_byte(self) -> float:
        """Adding a byte to another."""
        return self._seconds("gamma")

    @property
    def message_s(self) -> float:
        """Processor time of sending or receiving a message."""
        return self._seconds("message")

    @property
    def byte_cpu_s(self) -> float:
        """Processor time of a byte sent or received."""
        return self._seconds("byte_cpu")

    @property
    def bucket_s(self) -> float:
        """Processor time of a bucket and operation, in the thread that moves messages."""
        return self._seconds("bucket")

    @property
    def tensor_s(self) -> float:
        """Processor time of a gradient in the thread that trains: what hooks take, and waiting for the interpreter."""
        return self._seconds("tensor")

    @property
    def iteration_s(self) -> float:
        """Processor time of an iteration in the thread that trains."""
        return self._seconds("iteration")

    @property
    def update_s_per_byte(self) -> float:
        """Updating a byte of weights."""
        return self._seconds("update")

    @property
    def copy_s_per_byte(self) -> float:
        """Copying a byte."""
        return self._seconds("copy")

    def replaced(self, values: Mapping[str, float]) -> Cluster:
        """The cluster with other values, which are exact and not measured; they may be constants that it lacked."""
        given = {name: Constant(value, source="given") for name, value in values.items()}
        return replace(self, constants={**self.constants, **given})

    def at(self, end: End) -> Cluster:
        """The cluster with every constant at one end of its range: the fastest, or the slowest, to be expected."""
        return replace(self, constants={name: constant.at(end) for name, constant in self.constants.items()})

    def _seconds(self, name: str) -> float:
        constant = self.constants.get(name)
        return 0.0 if constant is None else constant.value

    def _link(self, end: str) -> Link | None:
        pieces: dict[int, dict[str, float]] = {}
        for key, constant in self.constants.items():
            match = _PIECE.fullmatch(key)
            if match is not None and match[1] == end:
                numbers = pieces.setdefault(int(match[2] or 0), {})
                if match[3] in numbers:
                    raise UsageError(f"network {self.name}: {key} is given under another name, too: leave one out")
                numbers[match[3]] = constant.value
        if not pieces:
            if f"{end}.flight" in self.constants:
                raise UsageError(f"network {self.name}: {end}.flight needs {end}.alpha and {end}.beta beside it")
            return None
        for start, numbers in pieces.items():
            if len(numbers) < 2:
                raise UsageError(f"network {self.name}: {end} from {start} bytes needs alpha and beta, has {numbers}")
        rows = [(start, numbers["alpha"], numbers["beta"]) for start, numbers in pieces.items()]
        return piecewise(rows, self._seconds(f"{end}.flight"))
