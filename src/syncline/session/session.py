"""A training run as one of its processes sees it: the strategy, the programs of buckets, and the models.

A session is the communicator of all workers of a run, with its strategy and models; there may also be servers. A group
of workers with its own models is a session too, over the same process. ``launch.connecting`` makes the session of the
run, ``Session.within`` that of a group.
"""

from __future__ import annotations

import logging
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from .. import registry
from ..collectives import Collective
from ..compression.compression import Compression, computes_on_device
from ..compression.reducers import Device, Participant, Reducer
from ..engine.order import CodedOrder, Work
from ..errors import GradientError, MismatchError, StrategyError, UsageError, ViewEnds
from ..nouns import Bucket, Group, Layer
from ..plans.check import order_of_additions, phases
from ..plans.messages import Program
from ..plans.plan import Plan
from ..strategy.choice import Choice
from ..strategy.strategy import Strategy
from ..strategy.words import AUTO, NONE
from ..sync import Kept, momentum_of, momentum_with
from .checks import Checks
from .communicator import Array, Communicator, Everyone, compiled, phases_of, planned
from .member import AnyError, Membership
from .stats import Coordination, Pace, Stats, error_of
from .tickets import BUCKET_KEYS, TABLE

log = logging.getLogger("syncline")

MODEL_KEYS = 1 << 16
"""The number of bucket keys of one model. Several models may be in flight at once."""
_MESSAGE_TAGS = 1 << 63
_TOPIC_BITS = 32
"""The bits of a message's tag below the topic. They contain the sender."""

_MOMENTA: Mapping[Kept, str] = {
    "dana": "momentum=dana: each worker has its own momentum and looks ahead, as the optimizer is SGD with momentum",
    "shared": "momentum=shared: all pushes share the optimizer's state, as it is not SGD with momentum",
}
"""The decision of ``momentum=auto``, and its reason."""


class Session(Communicator):
    """This process's place in a run, or in a group of its workers.

    For one thread at a time. An owner of weights beside the training sends and receives its own messages.
    """

    def __init__(self, strategy: Strategy, member: Membership, number: int = 0, *, left_open: bool = False) -> None:
        super().__init__(member, range(member.group.workers), self._allreduce_in, number)
        self.strategy = strategy
        self.group = member.group
        self.roll = member.roll
        """The processes of the run. None if ranks are threads of one process."""
        self.alone = member.alone
        """Whether there is no other process to exchange with."""
        self.local_rank, self.observer = self.process.local_rank, self.process.observer
        self.everyone = Everyone(member, member.group)
        self.choice: Choice | None = None
        self.chose_codec, self.reason = False, ""  # whether a codec was chosen by measuring, and why
        self.decided: Kept | None = None
        """The decision of ``momentum=auto`` for the optimizer of the model that owners hold, alike on all processes."""
        self.left_out = NONE
        """A codec that compresses between hosts only, while all workers are on one."""
        self.left_open = left_open
        """Whether the run was started with ``architecture=auto``, which each group resolves for itself."""
        self.chooses_schedule = False
        """Whether each model's schedule is chosen by measuring."""
        self.schedules: dict[int, tuple[Strategy, str]] = {}
        """The strategies with chosen schedules, and the reasons, by the models' first keys."""
        self.pools: Any = None
        """The pool that distributes batches, once a sampler uses one."""
        self.numbers: tuple[int, ...] | None = None
        """The processes' numbers in an elastic run whose members have changed; None if they are the ranks."""
        self.serving: Callable[[], Any] | None = None
        """On a server that owns weights: ends all updates, and returns the parts that it has."""
        self.updated: Callable[[], object] | None = None
        """On such a server: called after an update, which all servers can make only once they have their parts."""
        self.elastic = False
        """Whether the launcher lets the run go on when a process is lost."""
        self.counted: Sequence[tuple[int, int, int]] = ()
        """Where each push is an update by itself: the samples whose pushes earlier sessions have put into the weights.
        """
        self.next_samples: Callable[[], Sequence[int]] | None = None
        """In an elastic run where each push is an update by itself: the samples of this worker's next push."""
        self.view = 1
        """The number of this group of members in an elastic run."""
        self.repairs = 0
        """The lost workers without which the run has gone on."""
        self.renewed: Callable[[], bool] | None = None
        """In an elastic run: whether the workers must end this session after the present step. Rank 0's answer counts.
        """
        self.lone: list[Any] | None = None
        """What models of PyTorch were prepared with, while this process is alone, and it or others join a run."""
        self.lasting: list[Any] = []
        """The models of other frameworks, with what outlives this session (``recovery.lasting``)."""
        self.ended: ViewEnds | None = None
        """What a call of this session has raised because a worker joins the run: a framework may pass on only its text.
        """
        self.global_batches: list[Any] = []
        """The samplers with a position that outlives the session."""
        self.coordination = Coordination()
        """The timing of this worker's steps relative to the others."""
        self.paces: dict[int, Pace] = {}
        """The steps of each model by its first key."""
        self.checks = Checks()
        """The checks that were asked for, the same on all workers."""
        self.error_every = 0
        """The number of steps between measures of a codec's error; 0 for none."""
        self.consolidates: dict[int, Callable[[], None]] = {}
        """By a model's first key: a call that gives the model the newest weights, on every worker that makes the call.
        """
        self._models: list[weakref.ref[Any] | None] = []  # by number; None for a number that is unused here
        self._left: set[int] = set()  # the numbers of released models, which other models may get
        self.prepared: dict[int, Any] = {}  # the frameworks' prepared models, by first keys
        self.weighed: set[int] = set()
        """The first keys of the models whose workers have the weights of their batches in the mean."""
        self.family: list[Session] = [self]
        """The session of all workers, and the sessions of this process's groups."""
        self._unfit = ""

    def within(self, ranks: Sequence[int], number: int) -> Session:
        """The session of some workers of the run, including this one, with the same strategy.

        ``ranks`` are their ranks in the run, ascending. None of them has used ``number`` (``SCOPES``).
        """
        member = Membership(self.process, ranks, number)
        made = Session(self.strategy, member, number, left_open=self.left_open)
        made.choice, made.chose_codec, made.reason = self.choice, self.chose_codec, self.reason
        made.left_out = self.left_out
        made.chooses_schedule = self.chooses_schedule and len(ranks) > 1
        made.checks, made.error_every = self.checks, self.error_every
        made.family = self.family
        made.family.append(made)
        made._fit_in()
        return made

    def _fit_in(self) -> None:
        """Resolve the strategy for this group of workers. If it is impossible there, models are refused."""
        asked = self.strategy.by_messages()  # the message library has groups for the run's hosts only
        if asked.servers:
            self._unfit = (
                f"{asked}: its server processes serve all workers of the run, not a group of them; use"
                f" ps(servers={asked.servers}, on=workers), or an allreduce such as ring"
            )
            return
        hosts = 1 if self.roll is None else self.roll.hosts
        try:
            found = asked.resolve(self.group, hosts=hosts, inproc=self.roll is None)
        except UsageError as error:
            self._unfit = f"{asked} in a group of {self.world_size}: {error}"
            return
        if self.choice is not None:
            found = replace(found, architecture=asked.architecture)
        self.strategy = replace(found, transport=asked.transport)
        self.leave_out(asked, "all ranks of the group")

    def leave_out(self, asked: Strategy, who: str = "all ranks") -> None:
        """Note a codec that was asked for and left out, because ``who`` are on one host."""
        if asked.codec not in (NONE, AUTO) and self.strategy.codec == NONE:
            self.left_out = asked.codec
            self.reason = f"codec={asked.codec.name} compresses between hosts only, and {who} are on one"

    @property
    def recorded(self) -> str:
        """The strategy as states name it: with a codec that is left out here, because other hosts may use it."""
        return str(self.strategy if self.left_out == NONE else replace(self.strategy, codec=self.left_out))

    def as_here(self, strategy: str) -> str:
        """The strategy of an earlier run with this run's transport, and its architecture if that was left open.

        A codec that is left out here is left out of it. None of these is a choice of the user: they follow from the
        processes and their hosts. If the earlier strategy cannot use this run's transport, it is returned unchanged.
        """
        before = Strategy.parse(strategy)
        if before.codec == self.left_out:
            before = replace(before, codec=NONE)
        left_open = self.left_open and not before.server_holds_weights
        architecture = self.strategy.architecture if left_open else before.architecture
        try:
            return str(replace(before, transport=self.strategy.transport, architecture=architecture))
        except StrategyError:
            return strategy

    def warn_of_residuals(self, has_them: bool, stacklevel: int) -> None:
        """Warn if a state ``has_them`` for a codec that is left out. ``stacklevel`` counts from the caller."""
        if has_them:
            warnings.warn(
                f"this state has residuals of codec={self.left_out.name}, which this run leaves out ({self.reason}):"
                " they are lost, and training does not continue bit for bit",
                stacklevel=stacklevel + 1,
            )

    def check_fit(self) -> None:
        """Raise UsageError if models in this group of workers cannot use the run's strategy."""
        if self._unfit:
            raise UsageError(self._unfit)

    @property
    def momentum(self) -> Kept:
        """Which pushes the optimizer's state belongs to; under ``auto`` before any optimizer is known, all."""
        return self.decided or momentum_with(self.strategy.sync_mode(), [])

    def decide_momentum(self, groups: Sequence[Mapping[str, Any]]) -> Kept:
        """Fix ``momentum`` for an optimizer with these groups of values, and return it.

        ``check_same_model`` compares it among all processes.
        """
        if momentum_of(self.strategy.sync_mode()) == "auto":
            self.decided = momentum_with(self.strategy.sync_mode(), groups)
            log.info("%s: sync=%s: %s", self.name(self.index), self.strategy.sync.name, _MOMENTA[self.decided])
        return self.momentum

    # This process.

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the session's own."""
        return self.process.forked

    def name(self, rank: int) -> str:
        """The name of a worker or server in messages."""
        return self.member.name(rank)

    def called(self, rank: int) -> str:
        """The short name of a worker: its number in the run."""
        return f"rank {self.member.number(rank)}"

    def check_usable(self) -> None:
        """Raise ClosedError unless this process can communicate."""
        self.process.check_usable()

    def fail(self, error: AnyError) -> AnyError:
        """As ``Process.fail``: ``raise session.fail(error)`` ends the run for all."""
        return self.process.fail(error)

    def fault(self, text: str) -> GradientError:
        """An error of this worker in a step, which ends the run for all."""
        return self.fail(GradientError(self.titled(f"{self.name(self.index)}: {text}")))

    def shutdown(self) -> Exception | None:
        """As ``Process.shutdown``; a group ends with the run."""
        return self.process.shutdown() if self is self.family[0] else None

    # Programs.

    def _allreduce_in(self, group: Group, nbytes: int) -> Plan | Collective:
        """The plan or library collective of an allreduce in a group of workers, without servers."""
        if self.strategy.collective is not None:
            return self.strategy.collective
        if self.choice is not None:
            return planned(self.choice.at(nbytes), group)
        if self.strategy.roles is not None:
            return planned(self.strategy.roles.beside, group)
        strategy = self.strategy if group == self.group else self.strategy.by_messages()
        return strategy.plan(group)

    def bucket_program(self, nbytes: int) -> Program | Collective:
        """This process's program of a bucket's exchange, or the message library's own collective."""
        return self.strategy.collective or compiled(self.bucket_plan(nbytes), self.index)

    def bucket_plan(self, nbytes: int) -> Plan:
        """The strategy's plan for a bucket of gradients, through the servers if there are any."""
        if self.choice is not None:
            return planned(self.choice.at(nbytes), self.group)
        return self.strategy.plan(self.group)

    def bucket_phase_program(self, phase: Literal["reduce_scatter", "all_gather"], nbytes: int) -> Program:
        """This process's program of one half of a bucket's exchange. A ring replaces a chosen plan without halves."""
        plan = self.bucket_plan(nbytes)
        if self.choice is not None and phases_of(plan) is None:
            plan = planned("ring", self.group)
        halves = phases_of(plan) or phases(plan)  # which raises PlanError
        return compiled(halves[phase == "all_gather"], self.index)

    def push_program(self, nbytes: int) -> Program:  # noqa: ARG002 - whatever the size
        """This process's program of the common push of all workers to the owners of the weights."""
        return compiled(self.strategy.halves(self.group)[0], self.index)

    def compression(
        self,
        layers: Sequence[Layer],
        buckets: Sequence[Bucket],
        arrays: Sequence[Array],
        device: Device | None = None,
    ) -> Compression | None:
        """The compression of a model's buckets by the strategy's codec. None without a codec.

        With a ``device`` the arrays are on it; ``computes_on_device`` must allow it.
        """
        if self.strategy.codec == NONE:
            return None
        served, held = self.strategy.roles is not None, self.strategy.server_holds_weights
        how = {"served": served, "held": held, "alone": not self.strategy.sync_mode().merges}
        me, name = replace(self._participant(), device=device), self.member.name(self.index)
        if me.hosts and me.works and len(me.hosts[me.encoder]) > 1:
            others = ", ".join(str(self.member.number(rank)) for rank in me.hosts[me.encoder] if rank != self.index)
            name = f"{name}, or rank {others} of its host"
        return Compression(self.strategy.codec_object(), layers, buckets, arrays, me, **how, name=name)

    def computes_on_device(self, layers: Sequence[Layer]) -> bool:
        """Whether a device that has the gradients of these layers could encode and decode them itself.

        The processor computes the sums of a host and the weights of owners.
        """
        if self.strategy.codec == NONE:
            return False
        me, held = self._participant(), self.strategy.server_holds_weights
        return (
            not me.hosts and not (held and me.owner >= 0) and computes_on_device(self.strategy.codec_object(), layers)
        )

    def coded_order(
        self, compression: Compression, number: int, key: int, label: str, *, tolerant: bool = False
    ) -> CodedOrder:
        """The order for the reduction of a compressed bucket."""
        pieces, after = partial(compression.pieces, number), partial(compression.finish, number)
        return self.reducers_order(pieces, key, label, tolerant=tolerant, after=after)

    def reducers_order(
        self,
        pieces: Callable[[], Sequence[Callable[[], Reducer]]],
        key: int,
        label: str,
        *,
        tolerant: bool = False,
        after: Callable[[], None] | None = None,
    ) -> CodedOrder:
        """The order that runs these reducers. Their sums run a bucket's plan."""
        return CodedOrder(pieces, self.bucket_program, key, label, tolerant, after)

    def _participant(self) -> Participant:
        """This process's part in compressed reductions. The owners are the servers, or without servers all workers."""
        workers, roles = self.group.workers, self.strategy.roles
        owners = tuple(range(workers)) if roles is None else roles.places(self.group)
        numbers = tuple(map(self.member.number, range(workers))) if self is not self.family[0] else ()
        hosts = self.strategy.hosts(self.group)
        native = self.strategy.native_inside
        return Participant(self.index, workers, owners, self.engine.room, hosts=hosts, called=numbers, native=native)

    def run_by(self, choice: Choice) -> None:
        """From now on choose the algorithm by size: ``architecture=auto``. All workers call it with the same table."""
        self.choice = choice
        self.strategy = replace(self.strategy, architecture=AUTO)  # and its budget, if it has one

    @property
    def adds_in_one_order(self) -> bool:
        """Whether all possible algorithms add ranks in the same order everywhere, so that buckets change no bit."""
        if self.strategy.collective is not None:
            return False
        if self.choice is None:
            orders = {order_of_additions(self.strategy.plan(self.group))}
        else:
            orders = {order_of_additions(planned(name, self.group)) for name in self.choice.names}
        return len(orders) == 1 and None not in orders

    def resume_with(self, choice: Choice) -> None:
        """Choose algorithms as an earlier run did. All workers call it; a worker with another table is named."""
        if choice != self.choice:
            self.agree(TABLE, zlib.crc32(str(choice.table).encode()))
            self.run_by(choice)
            self.compare_plans()

    def resume_codec(self, text: str) -> bool:
        """Run the strategy that an earlier run chose under ``codec=auto``. False if the codec was not left open.

        All workers call it; a worker with another text is named.
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
        """Raise MismatchError if a worker has another plan of an algorithm that is not part of Syncline.

        All workers call it. Ranks that list transfers in different orders would add unrelated chunks.
        """
        if self._unfit:
            return
        names = {self.strategy.architecture.name} if self.choice is None else self.choice.names
        foreign = {name for name in names if name in registry.names("algorithms")}
        for name in sorted(name for name in foreign if not registry.get("algorithms", name).own):
            plan = self.strategy.plan(self.group) if self.choice is None else planned(name, self.group)
            first, *others = self.gather(plan.digest.encode())
            for rank, theirs in enumerate(others, 1):
                if theirs != first:
                    raise MismatchError(
                        f"{name} has other transfers, or lists them in another order, on {self.name(rank)} than on"
                        f" {self.name(0)}: install one version of its package everywhere, and let only the group"
                        " determine the order of transfers (a set of strings has another order in each process)"
                    )

    def enter_model(self, model: object) -> int:
        """The first key for the buckets of a new or known model. All processes enter models in one order.

        Raises UsageError for too many models, and for more than one model with servers.
        """
        merges = self.strategy.sync_mode().merges
        who = "server processes" if merges else f"owners of weights under sync={self.strategy.sync.name}"
        others = "ps(on=workers), ring or another allreduce" if merges else "sync=bsp"
        served = bool(self.group.servers) or not merges
        number = next((i for i, one in enumerate(self._models) if one is not None and one() is model), None)
        if number is not None and served:
            raise UsageError(
                f"{who} serve a model as it was first prepared: prepare it once, after freezing and building all its"
                f" parts, or use {others}"
            )
        if number is None and self._models and served:
            raise UsageError(
                f"{who} serve one model: put all models into one torch.nn.ModuleList with one optimizer, or use"
                f" {others}"
            )
        if not served:
            number = self._number_for_all(number)
        self._models += [None] * ((number or 0) + 1 - len(self._models))
        self._models[number or 0] = weakref.ref(model)
        self._left.discard(number or 0)
        return (number or 0) * MODEL_KEYS

    def _number_for_all(self, known: int | None) -> int:
        """The number of a model: its own, or the first that is free on all workers. All workers call it.

        Some workers may have released a model that others still have. If only some know a model, the comparison of
        models names them.
        """
        most = BUCKET_KEYS // MODEL_KEYS
        free = [i for i in range(most) if i >= len(self._models) or self._models[i] is None or i in self._left]
        common = set(free)
        if not self.alone:
            common = set.intersection(*(set(theirs) for theirs in self.gather(bytes(free))))
        if known is not None:
            return known
        if not common:
            raise UsageError(
                f"a run can have up to {most} prepared models at a time: release trained models by"
                " syncline.release(model), or put several into one torch.nn.ModuleList or one dictionary of arrays"
            )
        return min(common)

    def leave_model(self, first_key: int) -> None:
        """Release the keys of a model that is trained, or continues in another group. UsageError if owners serve it."""
        if self.group.servers or not self.strategy.sync_mode().merges:
            raise UsageError(
                "the owners of the weights serve this model until the run ends: call syncline.shutdown(), and"
                " syncline.init() for the next one"
            )
        self._left.add(first_key // MODEL_KEYS)
        self.prepared.pop(first_key, None)
        self.weighed.discard(first_key)
        del self.consolidates[first_key]

    @property
    def models(self) -> list[Any]:
        """The models that were entered and still exist, including those of groups."""
        known = [one for session in self.family for one in session._entered()]
        return [model for one in known if (model := one()) is not None]

    @property
    def weighs_alike(self) -> bool:
        """Whether some model of these workers counts them alike, however large their batches are."""
        numbers = [i for i, one in enumerate(self._models) if one is not None and i not in self._left]
        return any(number * MODEL_KEYS not in self.weighed for number in numbers)

    def _entered(self) -> list[weakref.ref[Any]]:
        """References to the models that are not released."""
        return [one for i, one in enumerate(self._models) if one is not None and i not in self._left]

    @property
    def is_held(self) -> bool:
        """Whether models or samplers still use the session."""
        return bool(self._entered()) or self.pools is not None

    # Messages between workers and servers.

    def send(self, dst: int, data: bytes, label: str, topic: int = 0, tolerant: bool = False) -> Work:
        """Send a small message to a process, which may be this one. Messages of one topic keep their order."""
        return self.engine.send(dst, _MESSAGE_TAGS | topic << _TOPIC_BITS | self.index, data, label, tolerant)

    def recv(self, src: int, label: str, nbytes: int = 1 << 16, tolerant: bool = False, topic: int = 0) -> Work:
        """Receive the next message of a process about that topic, of at most ``nbytes``."""
        return self.engine.recv(src, _MESSAGE_TAGS | topic << _TOPIC_BITS | src, nbytes, label, tolerant)

    # Measures and the end.

    def stats(self) -> Stats:
        """Totals since the start. Callable from any thread."""
        went, here = self.coordination, list(self.family) if self is self.family[0] else [self]
        paces = [pace for one in here for pace in list(one.paces.values())]
        pace = max(paces, key=lambda one: one.steps, default=Pace())
        timed_steps, timed_s, step_s = pace.timed
        made = Stats(
            str(self.strategy),
            staleness=dict(went.staleness),
            version_lag=dict(went.version_lag),
            waited_s=dict(went.waited_s),
            at_s=time.perf_counter(),
            steps=pace.steps,
            step_s=step_s,
            timed_steps=timed_steps,
            timed_s=timed_s,
            samples=pace.samples(),
            compression_error=error_of(paces),
            members=(self.numbers or tuple(map(self.member.number, range(self.group.workers))))[: self.group.workers],
            view=self.view,
            repairs=self.repairs,
        )
        if self.member.alone:
            return made
        sent, received = self.engine.traffic()
        strategy, reason = self._running()
        return replace(
            made,
            strategy=str(strategy),
            blocked_s=self.engine.blocked_s,
            bytes_sent=sent,
            bytes_received=received,
            transport=self.engine.transport.name,
            algorithms={} if self.choice is None else dict(self.choice.table),
            exchange=self.strategy.exchange,
            reason=reason,
        )

    def _running(self) -> tuple[Strategy, str]:
        """The strategy, with the schedule that was chosen for the first model, and the reason."""
        told = "" if self.decided is None else _MOMENTA[self.decided]
        if not self.schedules:
            return self.strategy, "; ".join(filter(None, (self.reason, told)))
        chosen = sorted(self.schedules.items())
        reasons = [f"model {key // MODEL_KEYS}: {reason}" if key else reason for key, (_, reason) in chosen]
        return chosen[0][1][0], "; ".join(filter(None, (self.reason, told, *reasons)))
