"""Checks for adapters without hooks: requests that they do not support are refused, or warned of, before any step."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from ..errors import NotBuiltError, UsageError
from ..serving.owner import PushGroups, check_kept
from ..serving.shard import Groups
from ..session.session import Session
from ..strategy.strategy import Strategy
from ..strategy.words import write
from ..sync import Agrees, Averages, momentum_with

log = logging.getLogger("syncline")

SILENT = {"unused": "error", "weight": 1, "ignore": (), "broadcast_buffers": True}
"""The neutral values of the options of ``syncline.prepare``."""


def check_packages(framework: str, oldest: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UsageError, with the install command, if a package that ``framework`` needs is missing or too old."""
    for name, version in oldest.items():
        wanted, needs = ".".join(map(str, version)), f"Syncline needs {name}"
        remedy = f"pip install 'syncline[{framework}]', which installs {name} {wanted} or newer"
        try:
            found = str(importlib.import_module(name).__version__)
        except ImportError as error:
            raise UsageError(f"{needs}, which cannot be imported ({error}): {remedy}") from error
        if tuple(map(int, re.findall(r"\d+", found)[: len(version)])) < version:
            raise UsageError(f"{needs} {wanted} or newer, but {found} is installed: {remedy}")


def check_options(options: Mapping[str, Any], why: str = "", known: Collection[str] = ()) -> None:
    """Raise UsageError unless every option of ``syncline.prepare`` is ``known`` or has its neutral value."""
    for name in sorted(options.keys() - known):
        if options[name] != SILENT[name]:
            raise UsageError(f"{name}= is for models of PyTorch{why}")


def weight_of_batches(session: Session, weight: object) -> Callable[[], float] | None:
    """A call with this worker's weight in the step under way, for ``weight="batch"`` of ``syncline.prepare``.

    These frameworks hand over gradients only, so the sampler tells the size of the batch. Raises UsageError for another
    weight, and for a strategy that exchanges weights.
    """
    if weight == 1 and type(weight) is not bool:
        return None
    if weight != "batch":
        raise UsageError(f"weight={weight!r} is for models of PyTorch; here it is 1, or 'batch' with global batches")
    if session.strategy.server_holds_weights or isinstance(session.strategy.sync_mode(), Averages):
        raise UsageError(
            f"weight='batch' weighs gradients, but {session.strategy} exchanges weights: use ring or another allreduce"
        )

    def of_part() -> float:
        if len(session.global_batches) != 1:
            raise session.fault(
                "weight='batch' counts the samples of syncline.sampler(global_batch=), of which this run has"
                f" {len(session.global_batches)}: make one, or leave weight= out"
            )
        weight: float = session.global_batches[0].weigh()
        return weight

    return of_part


class LastsWhole:
    """A model of which each worker has everything, and which outlives the sessions of an elastic run (``recovery``).

    ``copy_again`` copies all that there is. The object ``counted`` calls its ``finished`` after every step.
    """

    framework: ClassVar[str]
    shared = ()

    @property
    def counted(self) -> Any:
        """The object that knows when a step has finished."""
        return self

    def check_lasting(self, strategy: Strategy) -> None:
        """Raise NotBuiltError if owners hold the weights, or workers exchange them."""
        if isinstance(strategy.sync_mode(), Averages):
            raise NotBuiltError(
                f"syncline.elastic() works with models of {self.framework} under sync=bsp, not with"
                f" sync={write('sync', strategy.sync)}"
            )
        if strategy.server_holds_weights:
            raise NotBuiltError(
                f"syncline.elastic() works with models of {self.framework} that each worker updates itself, not with"
                f" {strategy}: use ring or another allreduce, or ps(on=workers, update=worker)"
            )

    def count(self, finished: Callable[[], object]) -> Callable[[], None]:
        """Call ``finished`` after every update of the weights, until the returned call."""
        counted = self.counted
        counted.finished = finished

        def end() -> None:
            counted.finished = lambda: None

        return end


def check_schedule(strategy: Strategy, framework: str) -> None:
    """Raise UsageError for a schedule whose steps end after the next one begins, or that measures layers.

    With ``apply="layer"`` the step waits for all layers: without hooks the first read of a weight cannot be seen.
    """
    if strategy.budget_s:
        raise UsageError(
            f"auto(budget=) tries schedules on the live run, which Syncline does not support with {framework} yet:"
            f" leave the budget out, or search beforehand with syncline tune --framework {framework.lower()}"
        )
    schedule, name = strategy.schedule_object(), strategy.schedule.name
    why = ""
    if schedule.apply == "next_step":
        why = "applies gradients a step later (apply='next_step')"
    if schedule.measures:
        why = f"forms new buckets from the times of layers (measures={schedule.measures})"
    if why:
        raise UsageError(
            f"schedule={name} {why}, which Syncline does not support with {framework} yet: use schedule=fixed, or"
            " another schedule that finishes its exchanges within the step"
        )


def check_no_replicas(session: Session, framework: str) -> None:
    """Raise UsageError if replicas are to be compared, because the calls of this framework do not get the weights."""
    if session.checks.replicas and not session.alone:
        raise UsageError(
            f"check_replicas compares weights, which Syncline does not see with {framework}: leave it out, or compare"
            " them in the script, for example by the digests from syncline.gather()"
        )


def check_mode(strategy: Strategy, values: Groups, optimizer: str, keeps: bool) -> None:
    """Raise UsageError for a sync mode that does not fit an optimizer with these values; ``keeps``: it has a state."""
    mode, sync = strategy.sync_mode(), strategy.sync.name
    momentum = momentum_with(mode, values)
    check_kept(momentum, sync, optimizer, keeps)
    PushGroups(mode, 1, sync, momentum)(values)


def decide_mode(session: Session, values: Groups, optimizer: str, keeps: bool) -> None:
    """As ``check_mode``, for the model that the session prepares."""
    check_mode(session.strategy, values, optimizer, keeps)
    session.decide_momentum(values)


def check_average(session: Session, otherwise: str) -> None:
    """Raise UsageError if the script wants averaged gradients from ``average()`` but workers exchange weights."""
    strategy = session.strategy
    if not session.alone and (strategy.server_holds_weights or isinstance(strategy.sync_mode(), Averages)):
        raise UsageError(
            f"{strategy}: average() returns gradients for the script's own optimizer, but this strategy exchanges"
            f" weights: use {otherwise}, or ring or another allreduce"
        )


def warn_of_plain_steps(session: Session) -> None:
    """Warn that one worker makes plain steps under a sync mode that would change the weights of several workers."""
    mode = session.strategy.sync_mode()
    if isinstance(mode, Agrees) and (mode.remembers or mode.pull(1) < 1):
        log.warning(
            "sync=%s does nothing with one worker: its steps are plain steps, without the outer optimizer or centre"
            " that several workers have; compare with two workers or more",
            session.strategy.sync.name,
        )
