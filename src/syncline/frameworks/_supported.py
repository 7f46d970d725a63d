"""What a run asks for that an adapter does not do: refused, or warned of, before any step."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import UsageError
from ..serving.owner import PushGroups, check_kept
from ..serving.shard import Groups
from ..session.session import Session
from ..strategy.strategy import Strategy
from ..sync import Agrees, Averages, momentum_of

log = logging.getLogger("syncline")

SILENT = {"unused": "error", "weight": 1, "ignore": (), "broadcast_buffers": True}
"""Options of ``syncline.prepare`` that say nothing."""


def check_packages(framework: str, oldest: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UsageError, with what to install, where a package that ``framework`` needs is missing or too old."""
    for name, version in oldest.items():
        wanted, needs = ".".join(map(str, version)), f"syncline.{framework} needs {name}"
        remedy = f"pip install 'syncline[{framework}]', which brings {name} {wanted} or newer"
        try:
            found = str(importlib.import_module(name).__version__)
        except ImportError as error:
            raise UsageError(f"{needs}, which cannot be imported ({error}): {remedy}") from error
        if tuple(map(int, re.findall(r"\d+", found)[: len(version)])) < version:
            raise UsageError(f"{needs} {wanted} or newer, and {found} is installed: {remedy}")


def check_options(options: Mapping[str, Any], why: str = "", known: Collection[str] = ()) -> None:
    """Raise UsageError for an option of ``syncline.prepare`` that says something, but for those that are ``known``."""
    for name in sorted(options.keys() - known):
        if options[name] != SILENT[name]:
            raise UsageError(f"{name}= is for models of PyTorch{why}")


def check_schedule(strategy: Strategy, framework: str) -> None:
    """Raise UsageError for a schedule whose steps end behind the next one, or that goes by times of layers.

    Where layers may wait for their own weights (``apply="layer"``), all are waited for in the step: a framework without
    hooks shows nobody when a weight is read first.
    """
    if strategy.budget_s:
        raise UsageError(
            f"auto(budget=) tries schedules on the live run, which Syncline does not do with {framework} yet: leave the"
            f" budget out, or search beforehand with syncline tune --framework {framework.lower()}"
        )
    schedule, name = strategy.schedule_object(), strategy.schedule.name
    why = ""
    if schedule.apply == "next_step":
        why = "applies gradients a step later (apply='next_step')"
    if schedule.measures:
        why = f"makes its buckets anew from the times of layers (measures={schedule.measures})"
    if why:
        raise UsageError(
            f"schedule={name} {why}, which Syncline does not do with {framework} yet: use schedule=fixed, or another"
            " one of which all has been exchanged when the step is made"
        )


def check_mode(strategy: Strategy, values: Groups, optimizer: str, keeps: bool) -> None:
    """Raise UsageError for a sync mode that does not fit an optimizer of these values, which keeps something or not."""
    mode, sync = strategy.sync_mode(), strategy.sync.name
    check_kept(momentum_of(mode), sync, optimizer, keeps)
    PushGroups(mode, 1, sync)(values)


def check_average(session: Session, otherwise: str) -> None:
    """Raise UsageError where ``average()`` of gradients is wanted, and weights are what workers exchange."""
    strategy = session.strategy
    if not session.alone and (strategy.server_holds_weights or isinstance(strategy.sync_mode(), Averages)):
        raise UsageError(
            f"{strategy}: average() gives gradients to an optimizer of the script's, and here weights are what is"
            f" exchanged: use {otherwise}, or ring or another allreduce"
        )


def warn_of_plain_steps(session: Session) -> None:
    """Say where one worker's weights would be others under the sync mode, which a world of one does not apply."""
    mode = session.strategy.sync_mode()
    if isinstance(mode, Agrees) and (mode.remembers or mode.pull(1) < 1):
        log.warning(
            "sync=%s does nothing with one worker: its steps are plain ones, and no outer optimizer or centre changes"
            " the weights as it would with several; compare with two workers or more",
            session.strategy.sync.name,
        )
