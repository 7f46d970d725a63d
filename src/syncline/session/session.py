"""One process's membership in a run: its group, strategy, engine, and the collectives that scripts call.

Every collective begins with an exchange of tickets (``tickets``). A session knows nothing of frameworks: it averages
arrays. ``launch.connecting`` makes sessions. A world of one worker and no server needs neither connections nor
threads, and every collective is the identity. What a process says and hears of the end is in ``ending``.
"""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import registry
from ..collectives import Collective
from ..compression.compression import Compression
from ..compression.reducers import Place
from ..compression.updates import Updates
from ..engine.engine import LIMIT_S, Engine
from ..engine.work import Work
from ..errors import ClosedError, MismatchError, PeerError, PeerTimeout, SynclineError, UsageError
from ..nouns import Bucket, Group, Layer
from ..plans.messages import Program, compile_program
from ..plans.plan import Plan
from ..strategy.choice import Choice
from ..strategy.strategy import Strategy
from ..strategy.words import AUTO, NONE
from ..transports import Transport
from ..wire.member import Roll
from .ending import Ending
from .stats import Stats
from .tickets import ALLREDUCE, BARRIER, BROADCAST, CALLS, GATHER, STEP, TABLE, Meeting, Ticket, ticket_table

Array = NDArray[Any]

# Keys tell the messages of exchanges in flight apart; buckets have the lowest.
BUCKET_KEYS = 1 << 20
MODEL_KEYS = 1 << 16
"""Keys of one model among them: several models may be in flight at once."""
WEIGHT_KEYS = 2 * BUCKET_KEYS
_CALL_KEYS = 4 * BUCKET_KEYS
_CALLS_IN_FLIGHT = 1 << 12
_MESSAGE_TAGS = 1 << 63


class Session:
    """This process's place in a run. Made in ``launch.connecting``; used by one thread at a time."""

    def __init__(
        self,
        strategy: Strategy,
        group: Group,
        index: int,
        transport: Transport | None,
        *,
        roll: Roll | None = None,
        local_rank: int = 0,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.strategy = strategy
        self.group = group
        self.index = index
        self.roll = roll
        self.choice: Choice | None = None
        self.chose_codec, self.reason = False, ""  # whether a codec was chosen by measuring, and why
        ending = self.ending = Ending(group, index, self.name)
        self._local_rank = local_rank
        self._pid = os.getpid()
        self._calls = 0
        self._next_key = 0
        self._models: list[weakref.ref[Any]] = []
        self.prepared: dict[int, Any] = {}  # what a framework has made of each, by its first key
        self._closed = False
        self._engine: Engine | None = None
        if transport is not None:
            self._engine = Engine(
                transport,
                limit_s=limit_s,
                explain=ending.explain,
                has_left=ending.has_left,
                on_raise=ending.came_back,
                find_culprit=ending.find_culprit,
            )
            ending.answer = self._engine.answer

    # Who we are.

    @property
    def is_worker(self) -> bool:
        """False in a process that only serves."""
        return self.index < self.group.workers

    @property
    def rank(self) -> int:
        """This worker's rank; a server answers with the last worker's, so that scripts that shard data go on."""
        return min(self.index, self.group.workers - 1)

    @property
    def local_rank(self) -> int:
        """This process's number on its host."""
        return self._local_rank

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self.group.workers

    @property
    def alone(self) -> bool:
        """True when there is nobody to exchange with."""
        return self._engine is None

    @property
    def engine(self) -> Engine:
        """The engine; raises ClosedError after the end and in forked children."""
        self.check_usable()
        if self._engine is None:
            raise ClosedError("a world of one worker has no engine")
        return self._engine

    def name(self, index: int) -> str:
        """How messages call a process."""
        role = "" if index < self.group.workers else "server "
        return role + (self.roll.name(index) if self.roll is not None else f"rank {index}")

    @property
    def forked(self) -> bool:
        """True in a process that was forked from the session's own."""
        return os.getpid() != self._pid

    def check_usable(self) -> None:
        """Raise ClosedError when this session cannot be used (any more, or here)."""
        if self.forked:
            raise ClosedError(
                "this process was forked from one that uses Syncline; only the parent can communicate: call"
                " syncline.init() after starting processes, or start them with the spawn method"
            )
        if self._closed:
            raise ClosedError("this session has been shut down")

    # Collectives.

    def meet(self, kind: int, argument: int = 0, weight: float = 0.0, flags: int = 0, announce: bool = True) -> Meeting:
        """Start showing tickets to all workers; ``announce`` as for ``Engine.exchange``."""
        self.check_usable()
        if not self.is_worker:
            raise UsageError(
                f"{self.name(self.index)} takes no part in {CALLS[kind]}: servers run the script up to"
                " syncline.prepare(), so make collective calls after it"
            )
        self._calls += 1
        mine = Ticket(kind, self._calls, argument & 0xFFFFFFFFFFFFFFFF, weight, flags)
        table = ticket_table(self.world_size, self.rank, mine)
        work = None
        if self._engine is not None and self.world_size > 1:
            program = _program("direct_all_gather", Group(self.world_size), self.index)
            work = self.engine.exchange(program, table, self._call_key(), CALLS[kind], announce=announce)
        return Meeting(work, table, mine, lambda rank, theirs: self.mismatch(rank, theirs, mine))

    def agree(self, kind: int, argument: int = 0, timeout: float | None = None) -> list[Ticket]:
        """Meet and wait: returns when all workers have come for the same call."""
        if self._engine is not None:
            self._engine.check_not_driving()  # before anything of the call is under way
        meeting = self.meet(kind, argument, announce=False)
        if meeting.work is not None:
            try:
                self.engine.wait(meeting.work, timeout=timeout)
            except PeerTimeout:
                if timeout is None or self.engine.error is not None:
                    raise  # the limit of progress, whose own error names them
                missing = [rank for rank in meeting.missing() if rank in self.engine.awaited]
                names = ", ".join(self.name(rank) for rank in missing)
                late = PeerTimeout(
                    f"{CALLS[kind]}: not reached within {timeout:.1f} s by {names}", rank=missing[0] if missing else -1
                )
                self.fail(late)
                raise late from None
        return meeting.tickets()

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until all workers are here; PeerTimeout names those that are not within ``timeout`` seconds.

        Servers, for which nobody waits, pass.
        """
        if self.is_worker:
            self.agree(BARRIER, timeout=timeout)

    def allreduce(self, array: Array, average: bool = True) -> None:
        """Replace ``array`` (one-dimensional, contiguous) by the workers' mean, or sum, in place."""
        if array.dtype.kind not in "fiuV" or array.dtype == np.bool_:
            raise UsageError(f"allreduce cannot sum elements of type {array.dtype}")
        if average and array.dtype.kind in "iu":
            raise UsageError(f"the mean of {array.dtype} is not one: use op='sum'")
        try:
            self.agree(ALLREDUCE, _fingerprint(array, average))
            if self.world_size > 1:
                self.run(self.allreduce_program(array.nbytes), array, "allreduce")
            if average:
                np.divide(array, array.dtype.type(self.world_size), out=array)
        except BaseException as error:
            self._interrupted(error)
            raise

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Replace ``array`` on every worker by that of ``root``."""
        if not 0 <= root < self.world_size:
            raise UsageError(f"there is no rank {root} in a world of {self.world_size}")
        try:
            self.agree(BROADCAST, _fingerprint(array, root))
            if self.world_size > 1:
                self.run(self.program("broadcast", root), array, "broadcast")
        except BaseException as error:
            self._interrupted(error)
            raise

    def gather(self, data: bytes) -> list[bytes]:
        """Every worker's bytes, in rank order, on every worker."""
        try:
            return self._gather(data)
        except BaseException as error:
            self._interrupted(error)
            raise

    def _gather(self, data: bytes) -> list[bytes]:
        self.agree(GATHER)
        if self.world_size == 1:
            return [data]
        gather = _program("all_gather", Group(self.world_size), self.index)
        sizes = np.zeros(self.world_size, np.int64)
        sizes[self.rank] = len(data)
        self.engine.run(gather, sizes, self._call_key(), "gather")
        widest = max(1, int(sizes.max()))
        table = np.zeros(self.world_size * widest, np.uint8)
        table[self.rank * widest : self.rank * widest + len(data)] = np.frombuffer(data, np.uint8)
        self.engine.run(gather, table, self._call_key(), "gather")
        return [table[rank * widest : rank * widest + int(size)].tobytes() for rank, size in enumerate(sizes)]

    def tell_all(self, data: bytes, root: int = 0) -> bytes:
        """The bytes of ``root`` on every worker; what others give does not count."""
        size = np.array([len(data)], np.int64)
        try:
            self.broadcast(size, root)
            body = np.zeros(int(size[0]), np.uint8)
            if self.rank == root:
                body[:] = np.frombuffer(data, np.uint8)
            self.broadcast(body, root)
            return body.tobytes()
        except BaseException as error:
            self._interrupted(error)
            raise

    def run(self, program: Program | Collective, array: Array, label: str) -> None:
        """Run a plan, or a library's collective, over the workers' arrays, at the same point of their scripts."""
        self.engine.run(program, array, self._call_key(), label)

    def program(self, goal: str, root: int = 0, *, nbytes: int = 0) -> Program:
        """This process's part in a collective of the workers, by the strategy's algorithm where it has one.

        ``nbytes`` is the size of the array, by which an allreduce may choose.
        """
        if goal == "allreduce":
            return _compile(self.allreduce_plan(nbytes), self.index)
        return _broadcast_program(self.world_size, self.index, root)

    def allreduce_program(self, nbytes: int) -> Program | Collective:
        """This process's part in an allreduce of the workers, or what the message library does instead."""
        return self.strategy.collective or self.program("allreduce", nbytes=nbytes)

    def allreduce_plan(self, nbytes: int) -> Plan:
        """The plan for an array of the workers; the servers' own exchange is not one of them."""
        if self.strategy.architecture.name == "ps":
            return _plan("ring", Group(self.world_size))
        return self.bucket_plan(nbytes)

    def bucket_program(self, nbytes: int) -> Program | Collective:
        """This process's part in the exchange of a bucket of ``nbytes``, or what the message library does instead."""
        return self.strategy.collective or _compile(self.bucket_plan(nbytes), self.index)

    def bucket_plan(self, nbytes: int) -> Plan:
        """The strategy's plan for a bucket of gradients, through servers where it has some."""
        if self.choice is not None:
            return _plan(self.choice.at(nbytes), self.group)
        return self.strategy.plan(self.group)

    def compression(
        self, layers: Sequence[Layer], buckets: Sequence[Bucket], arrays: Sequence[Array]
    ) -> Compression | None:
        """What the strategy's codec does to a model's buckets; None where they travel as they are."""
        if self.strategy.codec == NONE:
            return None
        served, held = self.strategy.architecture.name == "ps", self.strategy.server_holds_weights
        codec, name = self.strategy.codec_object(), self.name(self.index)
        return Compression(codec, layers, buckets, arrays, self._place(), served=served, held=held, name=name)

    def reduce(self, compression: Compression, number: int, key: int, label: str, **options: Any) -> Work:
        """Start the reduction of a compressed bucket; ``options`` are those of ``Engine.reduce``."""
        pieces, after = partial(compression.pieces, number), partial(compression.finish, number)
        return self.engine.reduce(pieces, self.bucket_program, key, label, after=after, **options)

    def pull(self, updates: Updates, number: int, key: int, label: str) -> Work:
        """Start to tell, or to hear, how a bucket's weights have been updated."""
        return self.engine.reduce(partial(updates.pieces, number), self.bucket_program, key, label)

    def _place(self) -> Place:
        """This process among those that reduce what is compressed: owners are the servers, or else all workers."""
        workers, architecture = self.group.workers, self.strategy.architecture
        owners = range(workers)
        if architecture.name == "ps":
            first = 0 if architecture["on"] == "workers" else workers
            owners = range(first, first + architecture["servers"])
        return Place(self.index, workers, tuple(owners), self.engine.room)

    def run_by(self, choice: Choice) -> None:
        """From now on choose the algorithm by size: ``architecture=auto``. All workers call it with the same table."""
        self.choice = choice
        self.strategy = replace(self.strategy, architecture=AUTO)

    def resume_with(self, choice: Choice) -> None:
        """Choose as a run before did; all workers call it, and a worker with another table is named.

        Nothing happens where the table is the same already.
        """
        if choice != self.choice:
            self.agree(TABLE, zlib.crc32(str(choice.table).encode()))
            self.run_by(choice)
            self.compare_plans()

    def resume_codec(self, text: str) -> bool:
        """Run the strategy that a run before had chosen under ``codec=auto``; False where nothing was left open.

        All workers call it; one that resumes from another text is named.
        """
        before = Strategy.parse(text)
        if not self.chose_codec or replace(before, codec=NONE) != replace(
            self.strategy, codec=NONE, architecture=before.architecture
        ):
            return False
        self.agree(TABLE, zlib.crc32(text.encode()))
        self.strategy, self.choice, self.reason = before, None, "as in the run that is resumed"
        self.compare_plans()
        return True

    def compare_plans(self) -> None:
        """Raise MismatchError where a worker has another plan of an algorithm that is not Syncline's own.

        All workers call it with the same strategy. Ranks that list the same transfers in another order would count
        messages differently, and add up what does not belong together.
        """
        names = {self.strategy.architecture.name} if self.choice is None else self.choice.names
        foreign = {name for name in names if name in registry.names("algorithms")}
        for name in sorted(name for name in foreign if not registry.get("algorithms", name).own):
            plan = self.strategy.plan(self.group) if self.choice is None else _plan(name, self.group)
            first, *others = self.gather(plan.digest.encode())
            for rank, theirs in enumerate(others, 1):
                if theirs != first:
                    raise MismatchError(
                        f"{name} has other transfers, or lists them in another order, on {self.name(rank)} than on"
                        f" {self.name(0)}: install one version of its package everywhere, and let it list transfers in"
                        " an order that the group alone decides (a set of texts has another one in each process)"
                    )

    def enter_model(self, model: object) -> int:
        """The first key for the buckets of one more model; all processes enter the same ones in the same order.

        A model that comes again has the same key again. Raises UsageError for too many, and for more than server
        processes serve.
        """
        for number, known in enumerate(self._models):
            if known() is model:
                if self.group.servers:
                    raise UsageError(
                        "server processes serve a model as it was prepared first: prepare it once, when all is frozen"
                        " and built that shall be, or use ps(on=workers), ring or another allreduce"
                    )
                return number * MODEL_KEYS
        number = len(self._models)
        if number > 0 and self.group.servers:
            raise UsageError(
                "server processes serve one model: put all models into one torch.nn.ModuleList with one optimizer, or"
                " use ps(on=workers), ring or another allreduce"
            )
        if number == BUCKET_KEYS // MODEL_KEYS:
            raise UsageError(f"a run can have up to {number} prepared models: put several into one torch.nn.ModuleList")
        self._models.append(weakref.ref(model))
        return number * MODEL_KEYS

    @property
    def models(self) -> list[Any]:
        """The models that were entered and still exist."""
        return [model for known in self._models if (model := known()) is not None]

    def broadcast_to_all(self, array: Array, key: int, label: str) -> Work:
        """Start a broadcast from worker 0 to all processes, servers included; every process calls it."""
        program = _broadcast_program(self.group.processes, self.index, 0)
        return self.engine.exchange(program, array, key, label)

    # Messages between workers and servers.

    def send(self, dst: int, data: bytes, label: str) -> Work:
        """Send a small message to a process."""
        return self.engine.send(dst, _MESSAGE_TAGS | self.index, data, label)

    def recv(self, src: int, label: str, nbytes: int = 1 << 16, tolerant: bool = False) -> Work:
        """Receive the next message of a process, of at most ``nbytes``."""
        return self.engine.recv(src, _MESSAGE_TAGS | src, nbytes, label, tolerant)

    # Measures and the end.

    def stats(self) -> Stats:
        """Totals since the start."""
        if self._engine is None:
            return Stats(str(self.strategy))
        transport = self._engine.transport
        sent, received = transport.traffic()
        algorithms = {} if self.choice is None else dict(self.choice.table)
        strategy, exchange = str(self.strategy), self.strategy.exchange
        blocked_s = self._engine.blocked_s
        return Stats(strategy, blocked_s, sent, received, transport.name, algorithms, exchange, self.reason)

    def fail(self, error: Exception) -> None:
        """This process gives up: tell everyone and end the engine. In a forked child it is none of its business."""
        if self.forked:
            return
        if self._engine is not None:
            self._engine.fail(error)
        self.ending.tell(error)
        self.ending.came_back()

    def shutdown(self) -> Exception | None:
        """End this process's part: finish what is under way, say goodbye, free everything. May be called again.

        Returns the failure that ended the run, if no call has raised it and this process did not cause it.
        """
        if self._closed or self.forked:
            return None
        fault = None if self._engine is None else self._engine.close(before_end=self.ending.say_goodbye)
        self._closed = True
        self.ending.close()
        return None if self.ending.known else fault or self.ending.verdict

    def forget_in_child(self) -> None:
        """In a forked child: close the parent's descriptors without a word."""
        self.ending.forget_in_child()
        if self._engine is not None:
            self._engine.transport.close()

    def mismatch(self, rank: int, theirs: Ticket, ours: Ticket) -> MismatchError:
        """The error for workers that came for different calls."""
        hint = "check that every rank makes the same calls in the same order with the same sizes"
        if STEP in (theirs.kind, ours.kind) and theirs.kind != ours.kind:
            hint = "do all ranks have the same number of batches? if not, wrap the loop in `with syncline.join():`"
        error = MismatchError(f"{self.name(rank)} is {theirs.text} while {self.name(self.rank)} is {ours.text}; {hint}")
        self.fail(error)
        return error

    def _interrupted(self, error: BaseException) -> None:
        """A call of several exchanges was left between two of them, by a signal's exception rather than one of ours."""
        if self._engine is not None and self._engine.error is None and not isinstance(error, SynclineError):
            self._engine.interrupted(error)

    def _call_key(self) -> int:
        self._next_key = (self._next_key + 1) % _CALLS_IN_FLIGHT
        return _CALL_KEYS + self._next_key

    def on_peer_failure(self, verdict: PeerError) -> None:
        """The watcher has found the first culprit: whoever waits here learns of it, with what it was waiting for."""
        engine = self._engine
        if engine is not None:
            doing = f"{self.name(self.index)}: during {engine.doing}: {verdict}"
            engine.fail(type(verdict)(doing, rank=verdict.rank, host=verdict.host))


@lru_cache(maxsize=256)
def _compile(plan: Plan, index: int) -> Program:
    return compile_program(plan, index)


@lru_cache(maxsize=256)
def _plan(algorithm: str, group: Group) -> Plan:
    plan: Plan = registry.get("algorithms", algorithm).target(group)
    return plan


def _program(algorithm: str, group: Group, index: int) -> Program:
    return _compile(_plan(algorithm, group), index)


@lru_cache(maxsize=64)
def _broadcast_program(world: int, index: int, root: int) -> Program:
    return compile_program(registry.get("algorithms", "broadcast").target(Group(world), root=root), index)


def _fingerprint(array: Array, extra: int) -> int:
    """A number that differs when arrays of different size or type meet."""
    return zlib.crc32(f"{array.size} {array.dtype} {int(extra)}".encode())
