"""Topologies: which links inside the network messages between two hosts share, beside the hosts' own ports.

Owns routes and capacities. A capacity is relative to one port: a link of capacity 1 carries what one port does. Does
not know seconds: who asks takes what is shared and what it carries. Links are numbered from 0 and go one way.

* ``switch``: nothing is shared but ports.
* ``fat_tree``: hosts hang at leaves; what goes from leaf to leaf goes up one link and down another, each with the ports
  of its leaf divided by the oversubscription (Leiserson, "Fat-trees", IEEE Trans. Computers 1985). Equal-cost paths are
  taken to be used evenly, which hashing only does on average.
* ``ring``: neighbours are joined by a link each way; messages take the shorter way, upwards where both are as short.
* ``torus``: rings in every dimension; messages go along the first dimension first, then the second and so on (Dally,
  Seitz, "Deadlock-free message routing", IEEE Trans. Computers 1987). Hosts next in number are neighbours in the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from syncline.errors import UsageError
from syncline.strategy.grammar import nearest, read_part, read_value

Ints = NDArray[np.int64]


class Topology(Protocol):
    """Which shared links messages use."""

    def crossings(self, src: Ints, dst: Ints, hosts: int) -> tuple[Ints, Ints]:
        """Of messages between hosts, one array entry each, every use of a link: which message, and which link.

        ``hosts`` is how many there are. Cost: linear in the uses.
        """
        ...

    def capacity(self, link: int) -> float:
        """What a link carries, relative to one port."""
        ...


def route(topology: Topology, src: int, dst: int, hosts: int) -> tuple[int, ...]:
    """The links that one message between two hosts uses, in the order of its way."""
    _, links = topology.crossings(np.array([src]), np.array([dst]), hosts)
    return tuple(links.tolist())


@dataclass(frozen=True)
class Switch:
    """One switch that carries whatever its ports do."""

    def crossings(self, src: Ints, dst: Ints, hosts: int) -> tuple[Ints, Ints]:  # noqa: ARG002
        """None."""
        return np.empty(0, np.int64), np.empty(0, np.int64)

    def capacity(self, link: int) -> float:
        """There is no link."""
        raise UsageError(f"a switch has no shared link {link}")

    def __str__(self) -> str:
        return "switch"


@dataclass(frozen=True)
class FatTree:
    """Two levels: leaves of so many hosts, joined by links that are ``oversubscription`` times too thin for all."""

    hosts_per_leaf: int
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        if self.hosts_per_leaf < 1 or not (math.isfinite(self.oversubscription) and self.oversubscription > 0):
            raise UsageError(f"{self}: a leaf has at least one host, and the oversubscription is a number above 0")

    def crossings(self, src: Ints, dst: Ints, hosts: int) -> tuple[Ints, Ints]:  # noqa: ARG002
        """Up from the sender's leaf (2 leaf) and down to the receiver's (2 leaf + 1), where they differ."""
        up, down = src // self.hosts_per_leaf, dst // self.hosts_per_leaf
        away = np.flatnonzero(up != down)
        links = np.stack([2 * up[away], 2 * down[away] + 1], axis=1)
        return np.repeat(away, 2), links.reshape(-1)

    def capacity(self, link: int) -> float:  # noqa: ARG002
        """That of the leaf's ports, thinned."""
        return self.hosts_per_leaf / self.oversubscription

    def __str__(self) -> str:
        return f"fat_tree(hosts_per_leaf={self.hosts_per_leaf}, oversubscription={self.oversubscription:g})"


@dataclass(frozen=True)
class Torus:
    """Rings in every dimension; without ``dims`` one ring of all hosts."""

    dims: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.dims):
            raise UsageError(f"{self}: a dimension has at least one host")

    def crossings(self, src: Ints, dst: Ints, hosts: int) -> tuple[Ints, Ints]:
        """Dimension by dimension the links to the next host, upwards or downwards."""
        dims = self.dims or (hosts,)
        if math.prod(dims) < hosts:
            raise UsageError(f"{self} has {math.prod(dims)} hosts, and {hosts} are needed: give larger dimensions")
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
        """That of a port."""
        return 1.0

    def __str__(self) -> str:
        return f"torus(dims={'x'.join(map(str, self.dims))})" if self.dims else "ring"


def topology_of(text: str) -> Topology:
    """The topology that a text names; raises UsageError, naming the nearest, for one that does not exist."""
    part = read_part(text)
    given = dict(part.args)
    makers: dict[str, tuple[Callable[..., Topology], dict[str, Callable[[str, str], Any]]]] = {
        "switch": (Switch, {}),
        "fat_tree": (FatTree, {"hosts_per_leaf": _count, "oversubscription": _number}),
        "ring": (Torus, {}),
        "torus": (Torus, {"dims": _dims}),
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


def _dims(text: str, what: str) -> tuple[int, ...]:
    return tuple(_count(size, what) for size in text.split("x"))
