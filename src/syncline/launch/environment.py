"""Finds the launcher of this process and the process's place in the run, from environment variables.

Owns the names of launchers' variables. Each launcher has a recogniser in ``RECOGNISERS``. A missing or contradictory
variable is a UsageError that names it. ``rank`` and ``world`` count processes: workers, then servers.

RANK, WORLD_SIZE and similar variables, which scripts and torch.distributed read, count workers only, because scripts
divide data by them. A server, which runs the script up to ``prepare``, sees the place of the last worker, on its own
host if there is one. ``syncline run`` sets them so; under other launchers ``init`` does (``Variables``).
"""

from __future__ import annotations

import itertools
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError

Environ = Mapping[str, str]

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")

NO_GROUP = (
    "none: a server takes no part in torch.distributed; call init_process_group() after syncline.prepare(), from which"
    " servers do not return"
)
"""A server's MASTER_PORT: init_process_group() fails there with this text instead of waiting forever."""

_COUNTING_ALL = ("torchrun", "variables")

REPEATS = "SYNCLINE_REPEATS"
"""The variable with a log of committed steps (``global_batches``) that this process, a single worker, repeats."""


@dataclass(frozen=True)
class Environment:
    """A process's place in its run. Raises UsageError if the numbers contradict each other.

    Rank 0 serves the meeting at ``address`` and ``port``; the address is empty if the launcher gives none. With
    ``agent_store`` torch's store is at that address, or it is ``store``; rank 0 writes the meeting's address to it.
    ``meeting_fd`` is the listening socket that the launcher opened for rank 0. The run's processes share ``secret``.
    ``servers`` and ``strategy`` are None unless the launcher sets them.
    """

    launcher: str
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    run_id: str = ""
    agent_store: bool = False
    store: Any = field(default=None, repr=False, compare=False)
    meeting_fd: int | None = None
    servers: int | None = None
    strategy: str | None = None
    secret: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.world < 1:
            raise UsageError(f"the world size must be at least 1, got {self.world}")
        if not 0 <= self.rank < self.world:
            raise UsageError(f"rank {self.rank} does not exist in a world of {self.world}: ranks count from 0")
        if not 0 <= self.local_rank < self.local_world:
            raise UsageError(f"local rank {self.local_rank} does not exist among {self.local_world} local processes")
        if self.local_world > self.world:
            raise UsageError(f"{self.local_world} local processes are more than the world of {self.world}")
        if not 0 <= self.port < 1 << 16:
            raise UsageError(f"port {self.port} does not exist: use 0 to 65535")
        if self.servers is not None and not 0 <= self.servers < self.world:
            raise UsageError(f"{self.servers} servers leave no worker in a world of {self.world} processes")

    @property
    def store_name(self) -> str:
        """The name of torch's store in messages."""
        return "torchrun's store" if self.store is None else "the process group's store"

    def where(self, rank: int) -> str:
        """The expected place of a process, such as `` (node 1, local rank 3)``, or empty if it is unknown."""
        if self.servers or not 1 < self.local_world < self.world or self.world % self.local_world:
            return ""
        node, local = divmod(rank, self.local_world)
        return f" (node {node}, local rank {local})"


def recognise(
    environ: Environ | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
) -> Environment:
    """This process's place: from the arguments, else from its launcher, else a world of one.

    Without a launcher, give ``rank``, ``world_size`` and ``address`` (``host:port`` of rank 0). UsageError names an
    argument or variable that is missing, wrong, or contradicts another.
    """
    variables = os.environ if environ is None else environ
    if rank is not None or world_size is not None or address is not None:
        return _explicit(variables, rank, world_size, address)
    for recogniser in RECOGNISERS:
        found = recogniser(variables)
        if found is not None:
            return found
    return Environment("none", **_told(variables))


def of_store(store: Any, rank: int, world_size: int, run_id: str) -> Environment:
    """The place of a process that gets its rank and a ``store`` from torch."""
    inner = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    host, port = getattr(inner, "host", ""), getattr(inner, "port", 0)
    return Environment(
        "torch",
        rank=rank,
        world=world_size,
        address=str(host),
        port=int(port),
        run_id=run_id,
        agent_store=True,
        store=store,
        **_told(os.environ),
    )


def _explicit(environ: Environ, rank: int | None, world_size: int | None, address: str | None) -> Environment:
    """A place given by arguments; variables of launchers are ignored."""
    if rank is None or world_size is None or (address is None and world_size > 1):
        raise UsageError("rank=, world_size= and address= belong together: give all three, or none under a launcher")
    host, port = ("127.0.0.1", 0) if address is None else _host_and_port(address)
    # On the loopback address all processes are on this host; otherwise the hosts of the others are unknown.
    local = host == "localhost" or host == "::1" or host.startswith("127.")
    return Environment(
        "arguments",
        rank=rank,
        world=world_size,
        local_rank=rank if local else 0,
        local_world=world_size if local else 1,
        address=host,
        port=port,
        run_id=environ.get("SYNCLINE_RUN_ID", ""),
        **_told(environ),
    )


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise UsageError(f"address= must be host:port of rank 0, such as 127.0.0.1:29500, got {address!r}")
    return host, int(port)


def _syncline(environ: Environ) -> Environment | None:
    """``syncline run``: the process's number, and the socket on which rank 0 serves the meeting.

    RANK and WORLD_SIZE count workers, for the script. MASTER_PORT stays free for a store of the script's own.
    """
    if "SYNCLINE_LAUNCHER" not in environ:
        return None
    return _ranked(
        environ,
        "syncline",
        names=("SYNCLINE_PROCESS", "SYNCLINE_PROCESSES"),
        port="SYNCLINE_MEETING_PORT",
        run_id=environ.get("SYNCLINE_RUN_ID", ""),
        meeting_fd=_number(environ, "SYNCLINE_MEETING_FD") if "SYNCLINE_MEETING_FD" in environ else None,
    )


def _torchrun(environ: Environ) -> Environment | None:
    """``torchrun``: its agent serves the store unless told otherwise.

    TORCHELASTIC_RESTART_COUNT differs between nodes of which some have joined later, so nothing may depend on it.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
    return _ranked(environ, "torchrun", run_id=environ["TORCHELASTIC_RUN_ID"], agent_store=agent)


def _variables(environ: Environ) -> Environment | None:
    """RANK and WORLD_SIZE set by hand or by a script, as PyTorch's ``env://`` reads them."""
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    return _ranked(environ, "variables", run_id=environ.get("SYNCLINE_RUN_ID", ""))


def _mpirun(environ: Environ) -> Environment | None:
    """``mpirun`` or ``mpiexec`` of Open MPI (OMPI_*, PMIX_*) and of MPICH's family (Hydra: PMI_*, MPI_LOCAL*)."""
    if "OMPI_COMM_WORLD_SIZE" in environ:
        names = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
        run_id = environ.get("PMIX_NAMESPACE", "")
    elif "PMI_SIZE" in environ and ("MPI_LOCALNRANKS" in environ or _STEP not in environ):
        names, run_id = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ""
    else:
        return None
    # Without an address rank 0 publishes one over MPI.
    told = "MASTER_ADDR" in environ or "MASTER_PORT" in environ
    return _placed(
        environ,
        "mpirun",
        names,
        address=_text(environ, "MASTER_ADDR") if told else "",
        port=_number(environ, "MASTER_PORT") if told else 0,
        run_id=run_id,
    )


_STEP = "SLURM_STEP_NUM_TASKS"
"""Set in the tasks of a step. A batch script is no task and runs alone, whatever SLURM_NTASKS says."""


def _srun(environ: Environ) -> Environment | None:
    """Slurm's ``srun``: rank 0 is on the first node of the step, at a port that follows from job and step."""
    if _STEP not in environ:
        return None
    run_id = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    _number(environ, "SLURM_PROCID")  # raises first if it is missing
    alone = _number(environ, _STEP) == 1
    return _placed(
        environ,
        "srun",
        ("SLURM_PROCID", _STEP, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        local_world=_tasks_here(environ),
        address=environ.get("MASTER_ADDR") or ("127.0.0.1" if alone else _first_node(environ)),
        port=_number(environ, "MASTER_PORT", derived_port(run_id)),
        run_id=run_id,
    )


def _first_node(environ: Environ) -> str:
    """The host of rank 0, or the loopback address if all tasks are on one host."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            hosts = expand_hosts(environ[name])
            return "127.0.0.1" if len(hosts) == 1 else hosts[0]
    raise UsageError(
        f"srun started {environ[_STEP]} tasks ({_STEP}), but SLURM_STEP_NODELIST is missing, which says where the first"
        " of them is: set MASTER_ADDR to its host"
    )


def _tasks_here(environ: Environ) -> int:
    """The number of tasks of the step on this node."""
    if "SLURM_STEP_TASKS_PER_NODE" not in environ:
        return _number(environ, "SLURM_LOCALID", 0) + 1  # at least
    counts = expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"])
    node = _number(environ, "SLURM_NODEID", 0)
    if node >= len(counts):
        raise UsageError(f"SLURM_NODEID={node} is not in SLURM_STEP_TASKS_PER_NODE, which has {len(counts)} nodes")
    return counts[node]


RECOGNISERS: tuple[Callable[[Environ], Environment | None], ...] = (_syncline, _torchrun, _variables, _mpirun, _srun)
"""Tried in this order: inside a Slurm step, torchrun and mpirun come before srun."""


def derived_port(job: str) -> int:
    """A port that follows from a job's name, below the ephemeral ports of the kernel."""
    return 20000 + zlib.crc32(os.fsencode(job)) % 12000


def _placed(
    environ: Environ, launcher: str, names: tuple[str, ...], *, local_world: int | None = None, **more: Any
) -> Environment:
    """An environment with the numbers in four variables. An error shows their values."""
    place: dict[str, Any] = {"rank": _number(environ, names[0]), "world": _number(environ, names[1])}
    place["local_rank"] = _number(environ, names[2], 0)
    place["local_world"] = _number(environ, names[3], 1) if local_world is None else local_world
    try:
        return Environment(launcher, **place, **more, **_told(environ))
    except UsageError as error:
        given = (*names, "MASTER_PORT", "SYNCLINE_SERVERS")
        values = ", ".join(f"{name}={environ[name]}" for name in given if name in environ)
        raise UsageError(f"{error} ({values})") from None


def _ranked(
    environ: Environ,
    launcher: str,
    *,
    names: tuple[str, str] = ("RANK", "WORLD_SIZE"),
    port: str = "MASTER_PORT",
    **more: Any,
) -> Environment:
    """The common variables of torchrun, ``syncline run`` and ``env://``."""
    _number(environ, names[0])  # raises first if it is missing
    world = _number(environ, names[1])
    alone = world == 1
    return _placed(
        environ,
        launcher,
        (*names, "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        # Without local numbers (env://) the other processes' hosts are unknown: count one process on this host.
        local_world=_number(environ, "LOCAL_WORLD_SIZE", 1 if "LOCAL_RANK" not in environ else world),
        address=environ.get("MASTER_ADDR", "127.0.0.1") if alone else _text(environ, "MASTER_ADDR"),
        port=_number(environ, port, 0 if alone else None),
        **more,
    )


def _told(environ: Environ) -> dict[str, Any]:
    """The values of Syncline's own variables."""
    secret = environ.get("SYNCLINE_SECRET") or None
    return {
        "servers": _number(environ, "SYNCLINE_SERVERS") if environ.get("SYNCLINE_SERVERS") else None,
        "strategy": environ.get("SYNCLINE_STRATEGY") or None,
        "secret": None if secret is None else os.fsencode(secret),
    }


def _text(environ: Environ, name: str) -> str:
    if not environ.get(name):
        raise UsageError(f"the environment variable {name} is missing: launchers set it, so set it too or use one")
    return environ[name]


def _number(environ: Environ, name: str, default: int | None = None) -> int:
    if name not in environ and default is not None:
        return default
    text = _text(environ, name)
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise UsageError(f"the environment variable {name} must be a whole number, got {text!r:.100}")
    return int(text)


_MOST_DIGITS = 18
_MOST_NODES = 1 << 20
"""The most nodes of a list of hosts or counts: a short text could name any number."""


def expand_hosts(text: str) -> list[str]:
    """The hosts of one of Slurm's lists (``gpu[1-3,07],login``), in order. UsageError for other text.

    An entry is a name with any number of bracketed ranges. The numbers of a range keep their leading zeros.
    """
    hosts: list[str] = []
    for entry in _split(text):
        pieces = re.split(r"\[([^\[\]]*)\]", entry)
        if not entry or any(mark in piece for piece in pieces for mark in "[]"):
            raise UsageError(f"{text!r} is not a list of hosts such as node[01-04]")
        choices = [list(_numbers(piece, text)) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        if len(hosts) + math.prod(map(len, choices)) > _MOST_NODES:
            raise UsageError(f"{text!r:.100} names more than {_MOST_NODES} hosts")
        hosts += ["".join(parts) for parts in itertools.product(*choices)]
    return hosts


def expand_counts(text: str) -> list[int]:
    """The counts of all nodes (``2(x3),1``) in order. UsageError for other text."""
    counts: list[int] = []
    for entry in text.split(","):
        found = _COUNT.fullmatch(entry.strip())
        if found is None or max(map(len, found.groups(""))) > _MOST_DIGITS:
            raise UsageError(f"{text!r:.100} is not a list of counts such as 2(x3),1")
        if len(counts) + int(found[2] or 1) > _MOST_NODES:
            raise UsageError(f"{text!r:.100} counts more than {_MOST_NODES} nodes")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _split(text: str) -> list[str]:
    """The entries between commas outside brackets."""
    return [entry.strip() for entry in re.split(r",(?![^\[\]]*\])", text)]


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for piece in ranges.split(","):
        found = _RANGE.fullmatch(piece)
        right = found is not None and max(map(len, found.groups(""))) <= _MOST_DIGITS
        if found is None or not right or not 0 <= int(found[2] or found[1]) - int(found[1]) < _MOST_NODES:
            raise UsageError(f"{text!r:.100} is not a list of hosts: {piece!r:.100} is not a range of numbers")
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            yield f"{number:0{len(found[1])}}"


def worker_places(hosts: Sequence[str], servers: int) -> list[dict[str, str]]:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE of every process, by its host. The last ones are servers."""
    workers = len(hosts) - servers
    on_host = Counter(hosts[:workers])
    local: Counter[str] = Counter()
    found = []
    for process, host in enumerate(hosts):
        number = local[host] if process < workers else max(0, on_host[host] - 1)
        local[host] += 1
        place = (min(process, workers - 1), workers, number, max(1, on_host[host]))
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        found.append({name: str(value) for name, value in zip(names, place, strict=True)})
    return found


class Variables:
    """This process's variables. ``count_workers`` replaces some; ``recognise`` uses the launcher's values."""

    def __init__(self) -> None:
        self._replaced: dict[str, tuple[str, str]] = {}  # the launcher's value, and the one in its place

    def recognise(self, **place: Any) -> Environment:
        """``recognise`` with the launcher's values."""
        variables = dict(os.environ)
        for name, (before, after) in self._replaced.items():
            if variables.get(name) == after:  # otherwise the script has set it since
                variables[name] = before
        return recognise(variables, **place)

    def count_workers(self, environment: Environment, servers: int) -> None:
        """Let the variables count workers only, if the launcher has counted the servers too."""
        if servers == 0 or environment.launcher not in _COUNTING_ALL:
            return
        first = environment.rank - environment.local_rank
        here = range(first, first + environment.local_world)
        hosts = ["here" if process in here else "elsewhere" for process in range(environment.world)]
        seen = worker_places(hosts, servers)[environment.rank]
        if environment.rank >= environment.world - servers:
            seen["MASTER_PORT"] = NO_GROUP
        for name in seen.keys() & os.environ.keys():
            before, after = self._replaced.get(name, ("", None))
            if os.environ[name] != after:
                before = os.environ[name]
            os.environ[name] = seen[name]
            self._replaced[name] = before, seen[name]
