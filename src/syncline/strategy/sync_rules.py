"""Rules of sync modes: engines must support a mode's answers, and the other words must be able to execute it."""

from __future__ import annotations

from ..codecs import Codec, LeavesOut, Sparse, Wraps, warmup_of
from ..sync import LOOKED_AT, Agrees, Averages, Mixes, SyncMode, alone, exchanges_gradients, wrong_application
from .combination import SOME_WORKERS, Combination, Fault, Rule, codec_of, variants, with_arguments
from .grammar import Part
from .parts import build, write
from .words import AUTO, BSP, NONE


def _what_is_applied_later_is_of_all(given: Combination) -> Fault | None:
    if given.schedule == AUTO or build("schedules", given.schedule).apply != "next_step":
        return None
    reason = f"schedule={given.schedule.name} has two steps under way"
    mode = build("sync", given.sync)
    if not (mode.merges and all(mode.due(step) for step in range(LOOKED_AT))):
        return f"{reason}, which takes a sync mode that merges all in every step", [{"sync": BSP}, {"schedule": AUTO}]
    if given.servers:
        why = "and servers that only sum take them one by one"
        return f"{reason}, {why}", [{"architecture": AUTO}, {"schedule": AUTO}]
    return None


def _engines_do_what_the_sync_mode_says(given: Combination) -> Fault | None:
    mode, name, remedies = build("sync", given.sync), given.sync.name, [{"sync": BSP}]
    for what in ("due", "may_proceed"):
        if not callable(getattr(mode, what, None)):
            return f"sync={name} has no {what}()", remedies
    averages = mode.averages if isinstance(mode, Averages) else None
    if averages is not None and not isinstance(mode, Agrees | Mixes):
        why = "and says neither what workers agree on (agree()) nor whose weights they take (mix())"
        return f"sync={name} exchanges weights, {why}", remedies
    merges = getattr(mode, "merges", None)
    if merges not in (True, False):
        return (
            f"sync={name} has merges={merges!r}: it says by True or False whether all pushes are one update",
            remedies,
        )
    if why := wrong_application(mode):
        return f"sync={name} {why}", remedies
    if averages is not None and not merges:
        return f"sync={name} exchanges weights, to which all come together, and has merges=False", remedies
    for clock in range(LOOKED_AT):
        try:
            due, goes_on, runs_ahead = (
                mode.due(clock),
                mode.may_proceed(clock, clock),
                mode.may_proceed(clock + 1, clock),
            )
            comes = False if averages is None else averages(clock)
        except Exception as error:
            return f"sync={name} fails at step {clock} ({type(error).__name__}: {error})", remedies
        if due not in (True, False):
            return f"sync={name} says {due!r} of whether step {clock} is due", remedies
        if comes not in (True, False) or (comes and due):
            why = "which is due as well: gradients or weights are exchanged" if due else "not True or False"
            return f"sync={name} says {comes!r} of whether weights are averaged after step {clock}, {why}", remedies
        if runs_ahead and merges and averages is None:
            return f"sync={name} lets workers run ahead of each other, which no engine does with merges=True", remedies
        if not goes_on:
            return f"sync={name} lets nobody go on after step {clock}", remedies
    return None


def _pushes_by_themselves_need_owners(given: Combination) -> Fault | None:
    if build("sync", given.sync).merges or given.server_holds_weights:
        return None
    reason = f"{_apart(given)}, which takes owners of the weights that apply it, and {given.architecture.name} has none"
    others = [] if given.roles is None else variants(given.architecture, lambda roles: roles.holds_weights)
    return reason, [*others, {"architecture": Part("ps")}, {"sync": BSP}]


def _apart(given: Combination) -> str:
    """The clause that says what each worker does by itself."""
    if alone(build("sync", given.sync)):
        return f"under sync={given.sync.name} every worker's push is an update by itself"
    return f"under sync={write('sync', given.sync)} owners take every worker's push by itself"


def _owners_are_told_every_push(given: Combination) -> Fault | None:
    mode = build("sync", given.sync)
    if mode.merges or all(mode.due(step) for step in range(LOOKED_AT)):
        return None
    reason = f"sync={given.sync.name} lets workers update by themselves in some steps, which owners of the weights miss"
    return reason, [{"sync": BSP}]


def _pushes_by_themselves_can_be_decoded(given: Combination) -> Fault | None:
    if build("sync", given.sync).merges or given.codec == NONE:
        return None
    where = _apart(given)
    if given.codec == AUTO:
        reason = f"{where}, and what codec=auto measures are payloads that are summed"
        return reason, [{"codec": NONE}, {"sync": BSP}]
    if warmup_of(codec_of(given)):
        reason = f"{where}, and its owners do not know whether a worker that resumes still warms up"
        return reason, [{"codec": with_arguments(given.codec, warmup=0)}, {"sync": BSP}]
    return None


def _other_buckets_need_all_workers(given: Combination) -> Fault | None:
    if given.schedule == AUTO or build("sync", given.sync).merges:
        return None
    if not build("schedules", given.schedule).measures:
        return None
    reason = (
        f"schedule={given.schedule.name} makes its buckets anew between two steps, which all workers do together, and"
        f" under sync={given.sync.name} they never come together"
    )
    return reason, [{"schedule": AUTO}, {"sync": BSP}]


def _weights_are_averaged_between_steps(given: Combination) -> Fault | None:
    if not isinstance(build("sync", given.sync), Averages):
        return None
    what = f"sync={given.sync.name} has every worker update its own weights, which are exchanged between two steps"
    if given.server_holds_weights:
        others = variants(given.architecture, lambda roles: not roles.holds_weights)
        return f"{what}, and with {given.architecture.name} owners hold them", [*others, {"architecture": AUTO}]
    if given.schedule == AUTO:
        return None
    schedule, name = build("schedules", given.schedule), given.schedule.name
    if schedule.apply != "step":
        return f"{what}, and schedule={name} would have steps end in the next iteration", [{"schedule": AUTO}]
    if schedule.measures:
        return f"{what}, and schedule={name} times exchanges of gradients in every step", [{"schedule": AUTO}]
    return None


def _what_is_left_is_told_once(given: Combination) -> Fault | None:
    mode: SyncMode = build("sync", given.sync)
    if given.codec == AUTO or not isinstance(mode, Agrees) or mode.pull(SOME_WORKERS) == 1:
        return None
    codec = codec_of(given)
    if not (isinstance(codec, Wraps) and _leaves_out(codec.codec)):
        return None
    reason = (
        f"sync={given.sync.name} leaves workers apart from what they agree on, so that each exchange tells how far once"
        f" more, and the error feedback in codec={write('codecs', given.codec)} would add to it what it has not sent of"
        " the last ones, until training diverges"
    )
    inner = [value for _, value in given.codec.args if isinstance(value, Part)]
    without: list[dict[str, Part]] = [{"codec": part} for part in inner if given.codec.name == "feedback"]
    return reason, [*without, {"codec": NONE}]


def _leaves_out(codec: Codec) -> bool:
    """Whether a codec may delay most of a tensor to later exchanges."""
    return isinstance(codec, Sparse) or (isinstance(codec, LeavesOut) and codec.leaves_out)


def _mixes_are_plans_between_workers(given: Combination) -> Fault | None:
    if not isinstance(build("sync", given.sync), Mixes):
        return None
    what = f"sync={given.sync.name} averages the weights of some workers"
    if given.codec != NONE:
        reason = (
            f"{what} as they are, and codec={given.codec.name} encodes what has been agreed on by all, or gradients"
        )
        return reason, [{"codec": NONE}]
    if given.servers:
        return f"{what}, which servers take no part in", [{"architecture": AUTO}]
    if given.transport.arguments.get("backend") == "nccl":
        return f"{what} by messages, which NCCL does not match by tag", [{"transport": AUTO, "architecture": AUTO}]
    if given.schedule != AUTO and build("schedules", given.schedule).phases != "whole":
        return f"{what} in one phase, and schedule={given.schedule.name} exchanges in two", [{"schedule": AUTO}]
    return None


def _servers_that_sum_remember_one_thing(given: Combination) -> Fault | None:
    mode: SyncMode = build("sync", given.sync)
    if given.codec in (NONE, AUTO) or not given.servers:
        return None
    if not (exchanges_gradients(mode) and isinstance(mode, Averages)):
        return None
    reason = (
        f"sync={given.sync.name} exchanges gradients first and then differences of weights, and servers that only sum"
        " would add what a codec has left of one to the other"
    )
    return reason, [{"architecture": AUTO}, {"codec": NONE}]


RULES: tuple[Rule, ...] = (
    _weights_are_averaged_between_steps,
    _mixes_are_plans_between_workers,
    _what_is_applied_later_is_of_all,
    _engines_do_what_the_sync_mode_says,
    _pushes_by_themselves_need_owners,
    _owners_are_told_every_push,
    _pushes_by_themselves_can_be_decoded,
    _other_buckets_need_all_workers,
    _servers_that_sum_remember_one_thing,
    _what_is_left_is_told_once,
)
