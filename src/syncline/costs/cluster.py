"""A cluster as constants: links, adding, processors, codecs, topology; each constant with its range and source.

Owns how long a message occupies a port, which links inside the network messages share, the names of constants, and
copies with other constants. Does not know files or the times of anything that runs on the cluster.

**Links.** A message of n bytes occupies the sender's and the receiver's port for a + n b seconds (Hockney, "The
communication challenge for MPP", Parallel Computing 1994). The constants depend on ranges of sizes, since libraries
change protocols. The message arrives ``flight_s`` later, while both ports already serve others. LogGP (Alexandrov,
Ionescu, Schauser, Scheiman, SPAA 1995) is equivalent: sender and receiver each spend o, a port begins a message max(o,
g) + (n-1) G after the previous one, and a single message of n bytes takes o + (n-1) G + L + o. So a port is busy for
max(o, g) + (n-1) G, and the flight is the rest: L + 2 o - max(o, g).

**Topologies.** The capacity of a shared link is relative to one port. Links are numbered from 0 and have one direction.

* ``switch``: only ports are shared.
* ``fat_tree``: hosts are attached to leaves. A message between leaves uses one link up and another down; each has the
  capacity of its leaf's ports divided by the oversubscription (Leiserson, "Fat-trees", IEEE Trans. Computers 1985).
  The model assumes an even use of equal-cost paths, which hashing achieves only on average.
* ``ring``: neighbours have a link in each direction; messages take the shorter way, upwards if both are equal.
* ``torus``: rings in every dimension; messages are routed by dimension order (Dally, Seitz, "Deadlock-free message
  routing", IEEE Trans. Computers 1987). Hosts with consecutive numbers are neighbours in the last dimension.

**Constants.** Each has a dotted name, so that code which varies constants needs to know only names.

    between.alpha  between.beta  between.flight    a message, a byte, the flight: between hosts
    inside.alpha   inside.beta   inside.flight     the same within a host; without them hosts have no faster link
    native.alpha   native.beta                     the reduce-scatter and the all-gather of a message library inside a
                                                   host, together: fixed, and a byte of the array
    between.from_65536.alpha  ....beta             the same for messages (arrays) of that many bytes and more
    gamma                                          a byte added to another
    message  byte_cpu                              processor time of a message, and of a byte sent or received
    bucket                                         of a bucket and operation, in the thread that moves messages
    tensor  iteration                              of a gradient, and of an iteration, in the training thread
    update  copy                                   a byte of weights updated, a byte copied
    codecs.CODEC.encode  codecs.CODEC.decode       a byte of gradient; CODEC is the codec's text
    slowdown.cpu  slowdown.cuda                    see below

All are in seconds per message or per byte, except ``slowdown.DEVICE``: the seconds that layers on this device lose per
second of processor time of the thread that moves messages. Both compete for the memory's bandwidth, and for cores if
there are too few.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..strategy.grammar import nearest, read_part, read_value

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Piece:
    """The cost of messages of ``from_bytes`` and more: ``busy_s`` plus ``per_byte_s`` times the bytes."""

    from_bytes: float
    busy_s: float
    per_byte_s: float


@dataclass(frozen=True)
class LinkCost:
    """A full-duplex link between two ports; ``pieces`` are sorted by size and begin at 0.

    Raises UsageError for other pieces, and for numbers that are negative or not finite.
    """

    pieces: tuple[Piece, ...]
    flight_s: float = 0.0

    def __post_init__(self) -> None:
        numbers = [self.flight_s, *(number for piece in self.pieces for number in (piece.busy_s, piece.per_byte_s))]
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise UsageError(f"the seconds of a link must be finite and not negative, got {self}")
        starts = [piece.from_bytes for piece in self.pieces]
        if not starts or starts[0] != 0 or any(low >= high for low, high in pairwise(starts)):
            raise UsageError(f"the pieces of a link must start at 0 bytes and ascend, got {starts}: sort them")

    @classmethod
    def linear(cls, alpha_s: float, beta_s_per_byte: float, flight_s: float = 0.0) -> LinkCost:
        """Alpha seconds for each message and beta for each byte, for all sizes."""
        return cls((Piece(0, alpha_s, beta_s_per_byte),), flight_s)

    @overload
    def busy_s(self, nbytes: float) -> float: ...
    @overload
    def busy_s(self, nbytes: Floats) -> Floats: ...
    def busy_s(self, nbytes: float | Floats) -> float | Floats:
        """Seconds that a message of ``nbytes`` occupies a port; for an array of sizes, an array."""
        if isinstance(nbytes, np.ndarray):
            fixed_s, per_byte_s = self.constants(nbytes)
            return fixed_s + nbytes * per_byte_s
        found_piece = self.piece(nbytes)
        return found_piece.busy_s + nbytes * found_piece.per_byte_s

    @overload
    def bytes_s(self, nbytes: float) -> float: ...
    @overload
    def bytes_s(self, nbytes: Floats) -> Floats: ...
    def bytes_s(self, nbytes: float | Floats) -> float | Floats:
        """The bytes' part of ``busy_s``, which grows if a link is shared."""
        if isinstance(nbytes, np.ndarray):
            return nbytes * self.constants(nbytes)[1]
        return nbytes * self.piece(nbytes).per_byte_s

    def constants(self, nbytes: Floats) -> tuple[Floats, Floats]:
        """The seconds per message and the seconds per byte for messages of these sizes."""
        starts, fixed_s, per_byte_s = self._columns
        piece = np.searchsorted(starts, nbytes, side="right") - 1
        return fixed_s[piece], per_byte_s[piece]

    def piece(self, nbytes: float) -> Piece:
        """The piece that applies to messages of a size."""
        return next(piece for piece in reversed(self.pieces) if piece.from_bytes <= nbytes)

    @cached_property
    def _columns(self) -> tuple[Floats, Floats, Floats]:
        rows = np.array([(piece.from_bytes, piece.busy_s, piece.per_byte_s) for piece in self.pieces], np.float64)
        return rows[:, 0], rows[:, 1], rows[:, 2]


def loggp(latency_s: float, overhead_s: float, gap_s: float, gap_s_per_byte: float) -> LinkCost:
    """The link for LogGP's L, o, g and G.

    Raises UsageError if a byte takes longer than a message's overhead, or a gap longer than a message's flight.
    """
    busy_s = max(overhead_s, gap_s) - gap_s_per_byte
    flight_s = latency_s + 2 * overhead_s - max(overhead_s, gap_s)
    if busy_s < 0 or flight_s < 0:
        raise UsageError(
            f"LogGP with L={latency_s:g}, o={overhead_s:g}, g={gap_s:g}, G={gap_s_per_byte:g} needs G <= max(o, g) and"
            " max(o, g) <= L + 2o"
        )
    return LinkCost.linear(busy_s, gap_s_per_byte, flight_s)


def piecewise(rows: Sequence[tuple[float, float, float]], flight_s: float = 0.0) -> LinkCost:
    """A link from rows (from bytes, seconds per message, seconds per byte), in any order."""
    return LinkCost(tuple(Piece(*row) for row in sorted(rows)), flight_s)


Ints = NDArray[np.int64]


class Topology(Protocol):
    """Which shared links messages use."""

    def crossings(self, src: Ints, dst: Ints, hosts: int) -> tuple[Ints, Ints]:
        """Every use of a link by messages between hosts ``src`` and ``dst``: the message, and the link.

        ``hosts`` is the number of hosts. Cost: linear in the uses.
        """
        ...

    def capacity(self, link: int) -> float:
        """The capacity of a link, relative to one port."""
        ...


def route(topology: Topology, src: int, dst: int, hosts: int) -> tuple[int, ...]:
    """The links that one message between two hosts uses, in order."""
    _, links = topology.crossings(np.array([src]), np.array([dst]), hosts)
    return tuple(links.tolist())


@dataclass(frozen=True)
class Switch:
    """One switch that carries everything its ports can."""

    def crossings(self, src: Ints, dst: Ints, hosts: int) -> tuple[Ints, Ints]:  # noqa: ARG002
        """Empty: no link is shared."""
        return np.empty(0, np.int64), np.empty(0, np.int64)

    def capacity(self, link: int) -> float:
        """Raises UsageError: there is no shared link."""
        raise UsageError(f"a switch has no shared link {link}")

    def __str__(self) -> str:
        return "switch"


@dataclass(frozen=True)
class FatTree:
    """Two levels: leaves with ``hosts_per_leaf`` hosts each, joined by links with the given oversubscription."""

    hosts_per_leaf: int
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        if self.hosts_per_leaf < 1 or not (math.isfinite(self.oversubscription) and self.oversubscription > 0):
            raise UsageError(f"{self}: a leaf needs at least one host, and the oversubscription has to be above 0")

    def crossings(self, src: Ints, dst: Ints, hosts: int) -> tuple[Ints, Ints]:  # noqa: ARG002
        """Up from the sender's leaf (link 2 leaf) and down to the receiver's (2 leaf + 1), if these differ."""
        up, down = src // self.hosts_per_leaf, dst // self.hosts_per_leaf
        away = np.flatnonzero(up != down)
        links = np.stack([2 * up[away], 2 * down[away] + 1], axis=1)
        return np.repeat(away, 2), links.reshape(-1)

    def capacity(self, link: int) -> float:  # noqa: ARG002
        """The capacity of the leaf's ports, divided by the oversubscription."""
        return self.hosts_per_leaf / self.oversubscription

    def __str__(self) -> str:
        return f"fat_tree(hosts_per_leaf={self.hosts_per_leaf}, oversubscription={self.oversubscription:g})"


@dataclass(frozen=True)
class Torus:
    """Rings in every dimension; without ``dims`` one ring of all hosts."""

    dims: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.dims):
            raise UsageError(f"{self}: a dimension needs at least one host")

    def crossings(self, src: Ints, dst: Ints, hosts: int) -> tuple[Ints, Ints]:
        """The links to each next host, dimension by dimension, upwards or downwards."""
        dims = self.dims or (hosts,)
        if math.prod(dims) < hosts:
            raise UsageError(f"{self} has {math.prod(dims)} hosts, but {hosts} are needed: give larger dimensions")
        message, link = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        at, stride = src.copy(), math.prod(dims)
        for axis, size in enumerate(dims):
            stride //= size
            now, goal = at // stride % size, dst // stride % size
            up = (goal - now) % size
            downwards = 2 * up > size
            steps = np.where(downwards, size - up, up)
            which = np.repeat(np.arange(len(src)), steps)
            done = np.arange(len(which)) - np.repeat(np.cumsum(steps) - steps, steps)
            back = downwards[which]
            place = (now[which] + np.where(back, -done, done)) % size
            host = at[which] + (place - now[which]) * stride
            message.append(which)
            link.append((host * len(dims) + axis) * 2 + back)
            at += (goal - now) * stride
        order = np.argsort(np.concatenate(message), kind="stable")
        return np.concatenate(message)[order], np.concatenate(link)[order]

    def capacity(self, link: int) -> float:  # noqa: ARG002
        """The capacity of a port."""
        return 1.0

    def __str__(self) -> str:
        return f"torus(dims={'x'.join(map(str, self.dims))})" if self.dims else "ring"


def topology_of(text: str) -> Topology:
    """The topology with this text; raises UsageError, with the nearest name, for an unknown one."""
    part = read_part(text)
    given = dict(part.args)
    makers: dict[str, tuple[Callable[..., Topology], dict[str, Callable[[str, str], Any]]]] = {
        "switch": (Switch, {}),
        "fat_tree": (FatTree, {"hosts_per_leaf": _count, "oversubscription": _number}),
        "ring": (Torus, {}),
        "torus": (Torus, {"dims": lambda text, what: tuple(_count(size, what) for size in text.split("x"))}),
    }
    if part.name not in makers:
        raise UsageError(f"unknown topology {text!r}: choose one of {', '.join(makers)}{nearest(part.name, makers)}")
    make, readers = makers[part.name]
    unknown = [name for name in given if name not in readers]
    missing = [name for name in readers if name not in given and name != "oversubscription"]
    if unknown or missing:
        takes = ", ".join(f"{name}=" for name in readers) or "nothing"
        raise UsageError(f"topology {text!r}: {part.name} takes {takes}")
    return make(**{name: readers[name](str(value), f"{name} of {part.name}") for name, value in given.items()})


def _count(text: str, what: str) -> int:
    found: int = read_value(text, int, what)
    return found


def _number(text: str, what: str) -> float:
    found: float = read_value(text, float, what)
    return found


_PLAIN = ("gamma", "message", "byte_cpu", "bucket", "tensor", "iteration", "update", "copy")
_PIECE = re.compile(r"(between|inside|native)\.(?:from_(\d+)\.)?(alpha|beta)")
_CODEC = re.compile(r"codecs\.(.+)\.(encode|decode)")
SLOWDOWN = "slowdown."
DEVICES = ("cpu", "cuda")
_NAMES = (
    *(f"{end}.{what}" for end in ("between", "inside") for what in ("alpha", "beta", "flight")),
    "native.alpha",
    "native.beta",
    *_PLAIN,
    *(SLOWDOWN + device for device in DEVICES),
)

End = Literal["low", "high"]


@dataclass(frozen=True)
class Constant:
    """A number of seconds, its expected range, and its source.

    ``measured`` tells a measurement from an assumption. Without a range the number is exact. Raises UsageError for
    numbers that are negative or not finite, and for a range that excludes the value.
    """

    value: float
    low: float | None = None
    high: float | None = None
    measured: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        for number in (self.value, *self.range):
            if not (math.isfinite(number) and number >= 0):
                raise UsageError(f"a constant must be a finite number of seconds and not negative, got {number!r}")
        if not self.range[0] <= self.value <= self.range[1]:
            raise UsageError(f"a constant must lie in its range, got {self.value!r} and {self.range}")

    @property
    def range(self) -> tuple[float, float]:
        """The least and the greatest expected value."""
        return (self.value if self.low is None else self.low, self.value if self.high is None else self.high)

    def at(self, end: End) -> Constant:
        """The constant at one end of its range, as exact."""
        return Constant(self.range[end == "high"], measured=self.measured, source=self.source)


class CodecCosts(NamedTuple):
    """A codec's seconds per byte of gradient."""

    encode_s_per_byte: float
    decode_s_per_byte: float


class _Seconds:
    """A descriptor for a constant of a cluster; 0 if the cluster does not have it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, cluster: Cluster, owner: type[Cluster]) -> float:
        return cluster._seconds(self._name)


@dataclass(frozen=True)
class Cluster:
    """Hosts, their links and the cost of computing on them; the module's docstring lists the names of ``constants``.

    ``ports_per_host`` ports serve all ranks of a host; ``per_host`` is the default number of ranks on a host. ``cores``
    are shared by the ranks of a host, or of all hosts if these are namespaces of one machine (``one_machine``); None
    means enough cores. ``ready_made`` marks clusters that come with the library: a measured error of one says nothing
    about a user's file of the same name. Raises UsageError for constants that are unknown or missing.
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

    gamma_s_per_byte = _Seconds("gamma")
    message_s, byte_cpu_s, bucket_s = _Seconds("message"), _Seconds("byte_cpu"), _Seconds("bucket")
    tensor_s, iteration_s = _Seconds("tensor"), _Seconds("iteration")
    update_s_per_byte, copy_s_per_byte = _Seconds("update"), _Seconds("copy")

    def __post_init__(self) -> None:
        for key in self.constants:
            if key not in _NAMES and not _PIECE.fullmatch(key) and not _CODEC.fullmatch(key):
                known = ", ".join(_NAMES)
                raise UsageError(
                    f"network {self.name}: unknown constant {key!r}{nearest(key, _NAMES)}; choose from {known},"
                    " between.from_BYTES.alpha and codecs.CODEC.encode"
                )
        for key in ("between.alpha", "between.beta"):
            if key not in self.constants:
                raise UsageError(f"network {self.name}: {key} is missing: seconds per message, and per byte")
        for what in ("ports_per_host", "per_host"):
            if getattr(self, what) < 1:
                raise UsageError(f"network {self.name}: {what} must be at least 1, got {getattr(self, what)}")
        if self.cores is not None and self.cores < 1:
            raise UsageError(f"network {self.name}: hosts need at least one core, got {self.cores}")
        # Computed here for their checks: pieces begin at 0, and alpha and beta come together.
        self.between, self.inside, self.native, self.codecs  # noqa: B018

    @cached_property
    def between(self) -> LinkCost:
        """The link between two hosts."""
        found = self._link("between")
        assert found is not None  # __post_init__ has checked alpha and beta
        return found

    @cached_property
    def inside(self) -> LinkCost | None:
        """The link between two ranks of one host; None if they use the same link as ranks of different hosts."""
        return self._link("inside")

    @cached_property
    def native(self) -> LinkCost | None:
        """A message library's reduce-scatter and all-gather of an array inside a host, together; None if unknown."""
        return self._link("native")

    @cached_property
    def codecs(self) -> Mapping[str, CodecCosts]:
        """The costs of codecs, by their text."""
        matches = [match for key in self.constants if (match := _CODEC.fullmatch(key))]
        found = {}
        for text in dict.fromkeys(match[1] for match in matches):
            keys = [f"codecs.{text}.{what}" for what in ("encode", "decode")]
            if missing := [key for key in keys if key not in self.constants]:
                raise UsageError(f"network {self.name}: {missing[0]} is missing: a codec needs encode and decode")
            found[text] = CodecCosts(*(self._seconds(key) for key in keys))
        return found

    def slowdown(self, device: str) -> float:
        """The seconds that layers on a device lose for each second of the thread that moves messages; 0 if unknown."""
        return self._seconds(SLOWDOWN + device)

    def replaced(self, values: Mapping[str, float]) -> Cluster:
        """A copy with other values, exact and not measured, also of constants that it did not have."""
        given = {name: Constant(value, source="given") for name, value in values.items()}
        return replace(self, constants={**self.constants, **given})

    def at(self, end: End) -> Cluster:
        """A copy with every constant at one end of its range: the fastest, or slowest, cluster to expect."""
        return replace(self, constants={name: constant.at(end) for name, constant in self.constants.items()})

    def _seconds(self, name: str) -> float:
        constant = self.constants.get(name)
        return 0.0 if constant is None else constant.value

    def _link(self, end: str) -> LinkCost | None:
        pieces: dict[int, dict[str, float]] = {}
        for key, constant in self.constants.items():
            match = _PIECE.fullmatch(key)
            if match is not None and match[1] == end:
                numbers = pieces.setdefault(int(match[2] or 0), {})
                if match[3] in numbers:
                    raise UsageError(f"network {self.name}: {key} is also given under another name: leave one out")
                numbers[match[3]] = constant.value
        if not pieces:
            if f"{end}.flight" in self.constants:
                raise UsageError(f"network {self.name}: {end}.flight also needs {end}.alpha and {end}.beta")
            return None
        for start, numbers in pieces.items():
            if len(numbers) < 2:
                raise UsageError(
                    f"network {self.name}: {end} from {start} bytes needs alpha and beta, but has {numbers}"
                )
        rows = [(start, numbers["alpha"], numbers["beta"]) for start, numbers in pieces.items()]
        return piecewise(rows, self._seconds(f"{end}.flight"))
