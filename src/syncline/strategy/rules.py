"""Validates combinations: the rules that every strategy must satisfy, and the search for the nearest valid one.

A ``Combination`` is the five words as a value. A rule is a function of it; parts do not know each other. A rule returns
the fault and changes that may fix it. The nearest valid combination is found by breadth-first search over these
changes. Rules of schedules and sync modes check that engines support a part's answers and that the other words can
execute it. ``strategy`` prints strategies and resolves ``auto``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

from .. import registry
from ..algorithms import Roles
from ..codecs import Codec, LeavesOut, NeedsFeedback, Sparse, Wraps, relay_of, warmup_of
from ..collectives import Collective
from ..compression.reducers.ways import way_of
from ..errors import PlanError, UsageError
from ..nouns import Group, Layer, Spec
from ..plans.check import phases
from ..schedules import Application, GoesAhead, Phases, Release, Schedule
from ..sync import (
    TESTED_STEPS,
    Agrees,
    Averages,
    Mixes,
    SyncMode,
    alone,
    exchanges_gradients,
    wrong_application,
)
from .grammar import Part
from .words import AUTO, BSP, NONE, WORDS, bind_word, build, roles_of, write

SOME_WORKERS = 4
"""The number of workers with which rules test answers that depend on it."""


@dataclass(frozen=True)
class Combination:
    """Architecture, sync mode, codec, schedule and transport as bound parts, in a possibly invalid combination."""

    architecture: Part = AUTO
    sync: Part = BSP
    codec: Part = NONE
    schedule: Part = AUTO
    transport: Part = AUTO

    def parts(self) -> Iterator[tuple[str, Part]]:
        """The five words with their parts, in printing order."""
        for word in WORDS:
            yield word, getattr(self, word)

    @cached_property
    def roles(self) -> Roles | None:
        """The roles of an architecture with owners; None if all workers are alike."""
        return roles_of(self.architecture)

    @property
    def servers(self) -> int:
        """The number of dedicated server processes that the strategy needs."""
        return 0 if self.roles is None else self.roles.servers

    @property
    def server_holds_weights(self) -> bool:
        """Whether servers apply the update. Otherwise every worker does."""
        return self.roles is not None and self.roles.holds_weights

    @property
    def native_inside(self) -> bool:
        """Whether the message library's own collectives sum inside hosts, as part of a plan."""
        return bool(self.architecture.arguments.get("inside") == "native")

    @property
    def on_device(self) -> bool:
        """Whether ranks add gradients in the memory of GPUs."""
        return bool(self.architecture.arguments.get("on") == "device")

    @cached_property
    def collective(self) -> Collective | None:
        """The library's collective that replaces a plan; None if there is a plan."""
        if self.architecture.name not in registry.names("collectives"):
            return None
        found: Collective = build("collectives", self.architecture)
        return found


Fault = tuple[str, list[dict[str, Part]]]
"""The fault of a combination, and changes that may fix it, the nearest first."""

Rule = Callable[[Combination], Fault | None]
"""A rule returns the fault of a combination, None if it satisfies the rule."""


def with_arguments(part: Part, **changes: Any) -> Part:
    """The part with some arguments changed."""
    return Part(part.name, tuple((part.arguments | changes).items()))


def variants(architecture: Part, wanted: Callable[[Roles], bool]) -> list[dict[str, Part]]:
    """The architecture with one argument changed, to 1 or to one of a few values, if its roles are then as
    ``wanted``.
    """
    found = []
    for parameter in registry.get("algorithms", architecture.name).parameters:
        few: dict[Any, tuple[Any, ...]] = {int: (1,), bool: (True, False)}
        for value in few.get(parameter.annotation, get_args(parameter.annotation)):
            changed = with_arguments(architecture, **{parameter.name: value})
            roles = roles_of(changed)
            if roles is not None and wanted(roles):
                found.append({"architecture": changed})
    return found


def codec_of(given: Combination) -> Codec:
    """The codec object, with nested codecs. The word must not be ``auto``."""
    codec: Codec = build("codecs", given.codec)
    return codec


def fault_of(combination: Combination) -> Fault | None:
    """The fault of the first violated rule; None for a valid combination."""
    return next((fault for rule in RULES if (fault := rule(combination)) is not None), None)


def nearest_that_works(combination: Combination, fault: Fault, judge: Rule = fault_of) -> Combination | None:
    """The first combination without a fault that the remedies lead to, with the fewest changes."""
    todo = deque((combination, changes) for changes in fault[1])
    seen = {combination}
    while todo:
        origin, changes = todo.popleft()
        try:
            changed = {word: bind_word(word, part) for word, part in (dict(origin.parts()) | changes).items()}
        except UsageError:
            continue
        candidate = Combination(**changed)
        if candidate in seen:
            continue
        seen.add(candidate)
        found = judge(candidate)
        if found is None:
            return candidate
        todo.extend((candidate, more) for more in found[1])
    return None


# Libraries, servers and codecs ----------------------------------------------------------------------------------------


def _native_needs_its_library(given: Combination) -> Fault | None:
    if given.transport == AUTO or not (given.native_inside or given.collective):
        return None
    declared = registry.get("transports", given.transport.name).capabilities
    if declared.get("collectives" if given.native_inside else "allreduce"):
        return None
    name = "inside=native" if given.native_inside else "native"
    reason = f"{name} calls the transport's own collectives, and transport={given.transport.name} has none"
    plan = with_arguments(given.architecture, inside="ring") if given.native_inside else AUTO
    return reason, [{"transport": Part("torch")}, {"transport": Part("mpi")}, {"architecture": plan}]


def _gpus_add_whole_gradients_of_one_host(given: Combination) -> Fault | None:
    if not given.on_device:
        return None
    reason, without = "with on=device ranks add", {"architecture": with_arguments(given.architecture, on="host")}
    if given.transport.name not in ("shm", "inproc"):
        why = f"in the memory of one host's GPUs, which transport={given.transport.name} does not promise"
        return f"{reason} {why}", [{"transport": Part("shm")}, without]
    if given.codec != NONE:
        return f"{reason} gradients as they are, and codec={given.codec.name} encodes them", [{"codec": NONE}, without]
    if given.sync.name != "bsp" or given.sync.arguments.get("backup"):
        why = f"every rank's gradients in every step, and sync={write('sync', given.sync)} does not"
        return f"{reason} {why}", [{"sync": BSP}, without]
    if given.schedule != AUTO and build("schedules", given.schedule).phases != "whole":
        why = f"in one phase, and schedule={given.schedule.name} exchanges in two"
        return f"{reason} {why}", [{"schedule": AUTO}, without]
    return None


def _native_sends_what_it_is_given(given: Combination) -> Fault | None:
    if given.collective is None or given.codec in (NONE, AUTO):
        return None
    reason = f"native passes gradients to a message library, which cannot apply codec={given.codec.name}"
    return reason, [{"architecture": AUTO}, {"codec": NONE}]


def _nccl_knows_collectives_only(given: Combination) -> Fault | None:
    if given.transport.arguments.get("backend") != "nccl" or given.collective is not None or given.native_inside:
        return None
    reason = "NCCL does not match messages by tag, so it cannot run plans"
    return reason, [{"architecture": Part("native")}, {"transport": with_arguments(given.transport, backend="gloo")}]


def _servers_are_needed(given: Combination) -> Fault | None:
    if given.roles is None or given.roles.owners >= 1:
        return None
    reason = f"{write('algorithms', given.architecture)} has no server, but it needs at least one to own the sums"
    return reason, variants(given.architecture, lambda roles: roles.owners >= 1)


def _replicas_follow_updates(given: Combination) -> Fault | None:
    roles = given.roles
    if roles is None or not roles.replicas:
        return None
    reason = f"in {write('algorithms', given.architecture)} a second process makes every owner's updates"
    without = variants(given.architecture, lambda roles: not roles.replicas)
    if not roles.holds_weights:
        return f"{reason}, but with update=worker all workers make them", without
    if given.codec != NONE:
        why = f"from sums of gradients, but under codec={given.codec.name} owners get payloads"
        return f"{reason} {why}", [{"codec": NONE}, *without]
    return None


def _weights_follow_updates(given: Combination) -> Fault | None:
    if not given.server_holds_weights or given.codec == AUTO:
        return None
    codec = codec_of(given)
    inner = relay_of(codec.codec if isinstance(codec, Wraps) else codec)
    if inner.contraction or not inner.biased:
        return None
    reason = f"servers that hold the weights send encoded updates, and codec={given.codec.name} loses their magnitudes"
    return reason, [*variants(given.architecture, lambda roles: not roles.holds_weights), {"codec": NONE}]


def _memory_needs_feedback(given: Combination) -> Fault | None:
    if given.codec == AUTO:
        return None
    codec = codec_of(given)
    if not isinstance(codec, NeedsFeedback) or not codec.needs_feedback:
        return None
    reason = f"codec={given.codec.name} accumulates unsent values in the error feedback, so feedback=off is impossible"
    return reason, [{"codec": Part("feedback", (("", given.codec),))}]


def _rounds_need_sums(given: Combination) -> Fault | None:
    if given.roles is None or given.codec == AUTO or way_of(codec_of(given)).servable:
        return None
    codec = write("codecs", given.codec)
    reason = f"codec={codec} works in rounds that each end with a sum over the workers, which servers do not support"
    return reason, [{"architecture": AUTO}, {"codec": NONE}]


def _servers_that_sum_count_no_steps(given: Combination) -> Fault | None:
    if given.codec == AUTO or not given.servers or given.server_holds_weights:
        return None
    if not warmup_of(codec_of(given)):
        return None
    reason = "servers that only sum do not know whether a resumed run still warms up"
    others = variants(given.architecture, lambda roles: roles.holds_weights)
    return reason, [*others, {"codec": with_arguments(given.codec, warmup=0)}]


def _feedback_needs_a_contraction(given: Combination) -> Fault | None:
    if given.codec.name != "feedback":
        return None
    inner = next(value for _, value in given.codec.args if isinstance(value, Part))
    if build("codecs", inner).contraction:
        return None
    reason = (
        f"error feedback around {inner.name} diverges: its error can be larger than the gradient, so the residual grows"
        " from step to step"
    )
    return reason, [{"codec": inner}]


# Schedules ------------------------------------------------------------------------------------------------------------


def _engines_do_what_the_schedule_says(given: Combination) -> Fault | None:
    if given.schedule == AUTO:
        return None
    schedule, name = build("schedules", given.schedule), given.schedule.name
    remedies = [{"schedule": AUTO}]
    for what, known in (("release", Release), ("phases", Phases), ("apply", Application)):
        value = getattr(schedule, what, None)
        if value not in get_args(known):
            words = " or ".join(map(repr, get_args(known)))
            return f"schedule={name} has {what}={value!r}, which no engine supports: it must be {words}", remedies
    in_flight = getattr(schedule, "in_flight", None)
    if not isinstance(in_flight, int) or in_flight < 1:
        why = "it must be the number of buckets in flight at once, 1 or more"
        return f"schedule={name} has in_flight={in_flight!r}: {why}", remedies
    measures = getattr(schedule, "measures", None)
    if not isinstance(measures, int) or measures < 0:
        return f"schedule={name} has measures={measures!r}: it must be a number of steps, 0 or more", remedies
    if why := _cannot_go_ahead(schedule):
        return f"schedule={name} {why}", remedies
    for what in ("buckets", "priority"):
        if not callable(getattr(schedule, what, None)):
            return f"schedule={name} has no {what}()", remedies
    try:
        _has_urgent_buckets(schedule)
    except Exception as error:
        return f"schedule={name} fails with a model of four layers ({type(error).__name__}: {error})", remedies
    return None


def _cannot_go_ahead(schedule: Schedule) -> str:
    """The fault in a schedule's declaration of local steps, if any."""
    local: object = isinstance(schedule, GoesAhead) and schedule.local
    if not isinstance(local, bool):
        return f"has local={local!r}: it must be True or False, and says whether workers make steps of their own"
    if local and schedule.apply != "next_step":
        return (
            f"has local=True (workers make steps of their own) and apply={schedule.apply!r}: engines support local"
            " steps with apply='next_step' only"
        )
    return ""


def _urgent_buckets_can_overtake(given: Combination) -> Fault | None:
    if given.schedule == AUTO or not _has_urgent_buckets(build("schedules", given.schedule)):
        return None
    reason = f"schedule={given.schedule.name} lets urgent buckets overtake others, but"
    if given.collective is not None and not _honours_priority("collectives", given.architecture):
        why = f"collectives of {given.architecture.name} cannot overtake"
        return f"{reason} {why}", [{"architecture": AUTO}, {"schedule": AUTO}]
    if given.transport != AUTO and not _honours_priority("transports", given.transport):
        why = f"messages of transport={given.transport.name} cannot overtake"
        return f"{reason} {why}", [{"transport": AUTO}, {"schedule": AUTO}]
    return None


def _two_phases_need_owners_of_chunks(given: Combination) -> Fault | None:
    if given.schedule == AUTO or build("schedules", given.schedule).phases == "whole":
        return None
    reason = f"schedule={given.schedule.name} exchanges in two phases, reduce-scatter and all-gather"
    remedies: list[dict[str, Part]] = [{"architecture": AUTO}, {"schedule": AUTO}]
    if given.codec != NONE:
        why = f"but payloads of codec={write('codecs', given.codec)} are not sums, which the all-gather needs"
        return f"{reason}, {why}", [{"codec": NONE}, {"schedule": AUTO}]
    if given.collective is not None:
        return f"{reason}, but {given.architecture.name} performs both at once", remedies
    if given.servers:
        return f"{reason}, but servers return their sums at once", remedies
    if given.architecture == AUTO:
        return None
    algorithm = registry.get("algorithms", given.architecture.name).target
    try:
        phases(algorithm(Group(SOME_WORKERS, servers=given.servers), **dict(given.architecture.args)))
    except PlanError as error:
        return f"{reason}, but {error}", remedies
    except UsageError:
        return None  # invalid for this number of workers; the real number is known later
    return None


def _owners_have_an_order_of_their_own(given: Combination) -> Fault | None:
    if given.schedule == AUTO or not given.server_holds_weights:
        return None
    schedule, name = build("schedules", given.schedule), given.schedule.name
    others = variants(given.architecture, lambda roles: not roles.holds_weights)
    if schedule.phases != "whole":
        reason = (
            f"schedule={name} exchanges in two phases, but with owners of the weights, push and pull are two phases"
            " already: workers pull a bucket as soon as it is updated"
        )
        return reason, [{"schedule": Part("priority")}, *others, {"schedule": AUTO}]
    if schedule.apply == "next_step":
        reason = f"schedule={name} has two steps in flight, but owners of the weights handle one step at a time"
        return reason, [*others, {"schedule": AUTO}]
    return None


def _honours_priority(kind: str, part: Part) -> bool:
    """Whether a part lets urgent data go first: all parts do unless they declare ``priority=False``."""
    return bool(registry.get(kind, part.name).capabilities.get("priority", True))


def _has_urgent_buckets(schedule: Schedule) -> bool:
    """Whether a schedule gives buckets different priorities, tested with a model whose layers it does not merge."""
    for elements in (1 << exponent for exponent in range(0, 31, 5)):
        layers = [Layer(Spec(f"layer {number}", (elements,))) for number in range(4)]
        buckets = list(schedule.buckets(layers))
        if len({schedule.priority(bucket) for bucket in buckets}) > 1:
            return True
        if len(buckets) >= len(layers):
            return False
    return False


# Sync modes -----------------------------------------------------------------------------------------------------------


def _two_steps_in_flight_need_merged_pushes(given: Combination) -> Fault | None:
    if given.schedule == AUTO or build("schedules", given.schedule).apply != "next_step":
        return None
    reason = f"schedule={given.schedule.name} has two steps in flight"
    mode = build("sync", given.sync)
    if not (mode.merges and all(mode.due(step) for step in range(TESTED_STEPS))):
        why = "which needs a sync mode that merges the pushes of all workers in every step"
        return f"{reason}, {why}", [{"sync": BSP}, {"schedule": AUTO}]
    if given.servers:
        why = "but servers that only sum handle one step at a time"
        return f"{reason}, {why}", [{"architecture": AUTO}, {"schedule": AUTO}]
    return None


def _engines_do_what_the_sync_mode_says(given: Combination) -> Fault | None:
    mode, name, remedies = build("sync", given.sync), given.sync.name, [{"sync": BSP}]
    for what in ("due", "may_proceed"):
        if not callable(getattr(mode, what, None)):
            return f"sync={name} has no {what}()", remedies
    averages = mode.averages if isinstance(mode, Averages) else None
    if averages is not None and not isinstance(mode, Agrees | Mixes):
        why = "but has neither agree(), for weights common to all workers, nor mix(), for means of some workers"
        return f"sync={name} exchanges weights, {why}", remedies
    merges = getattr(mode, "merges", None)
    if merges not in (True, False):
        return (
            f"sync={name} has merges={merges!r}: it must be True or False, and says whether all pushes form one update",
            remedies,
        )
    if why := wrong_application(mode):
        return f"sync={name} {why}", remedies
    if averages is not None and not merges:
        return f"sync={name} has merges=False, but exchanges weights, in which all workers take part", remedies
    for clock in range(TESTED_STEPS):
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
            return f"sync={name} returns {due!r} from due({clock}), which must be True or False", remedies
        if comes not in (True, False) or (comes and due):
            why = "but due() is True as well, and a step exchanges gradients or weights, not both"
            why = why if due else "which must be True or False"
            return f"sync={name} returns {comes!r} from averages({clock}), {why}", remedies
        if runs_ahead and merges and averages is None:
            return (
                f"sync={name} lets workers run ahead of each other, which no engine supports with merges=True",
                remedies,
            )
        if not goes_on:
            return f"sync={name} lets no worker go on after step {clock}", remedies
    return None


def _pushes_by_themselves_need_owners(given: Combination) -> Fault | None:
    if build("sync", given.sync).merges or given.server_holds_weights:
        return None
    reason = f"{_apart(given)}, which only owners of the weights can apply, but {given.architecture.name} has none"
    others = [] if given.roles is None else variants(given.architecture, lambda roles: roles.holds_weights)
    return reason, [*others, {"architecture": Part("ps")}, {"sync": BSP}]


def _hosts_push_sums(given: Combination) -> Fault | None:
    if given.roles is None or not given.roles.local or build("sync", given.sync).merges:
        return None
    flat = variants(given.architecture, lambda roles: not roles.local)
    reason = f"{write('algorithms', given.architecture)} adds up the gradients of a host's workers for one push"
    return f"{reason}, and {_apart(given)}", [*flat, {"sync": BSP}]


def _apart(given: Combination) -> str:
    """The clause of an error that says how pushes are applied without the other workers."""
    if alone(build("sync", given.sync)):
        return f"under sync={given.sync.name} every worker's push is an update of its own"
    return f"under sync={write('sync', given.sync)} owners receive every worker's push separately"


def _owners_are_told_every_push(given: Combination) -> Fault | None:
    mode = build("sync", given.sync)
    if mode.merges or all(mode.due(step) for step in range(TESTED_STEPS)):
        return None
    reason = f"under sync={given.sync.name} workers push nothing in some steps, so owners of the weights miss updates"
    return reason, [{"sync": BSP}]


def _pushes_by_themselves_can_be_decoded(given: Combination) -> Fault | None:
    if build("sync", given.sync).merges or given.codec == NONE:
        return None
    where = _apart(given)
    if given.codec == AUTO:
        reason = f"{where}, but codec=auto measures exchanges that sum payloads"
        return reason, [{"codec": NONE}, {"sync": BSP}]
    if warmup_of(codec_of(given)):
        reason = f"{where}, but owners do not know whether a resumed worker still warms up"
        return reason, [{"codec": with_arguments(given.codec, warmup=0)}, {"sync": BSP}]
    return None


def _other_buckets_need_all_workers(given: Combination) -> Fault | None:
    if given.schedule == AUTO or build("sync", given.sync).merges:
        return None
    if not build("schedules", given.schedule).measures:
        return None
    reason = (
        f"schedule={given.schedule.name} changes its buckets between two steps, for which all workers have to meet, but"
        f" under sync={given.sync.name} they never meet"
    )
    return reason, [{"schedule": AUTO}, {"sync": BSP}]


def _weights_are_averaged_between_steps(given: Combination) -> Fault | None:
    if not isinstance(build("sync", given.sync), Averages):
        return None
    what = f"under sync={given.sync.name} every worker updates its own weights, which are exchanged between two steps"
    if given.server_holds_weights:
        others = variants(given.architecture, lambda roles: not roles.holds_weights)
        return f"{what}, but with {given.architecture.name} owners hold the weights", [*others, {"architecture": AUTO}]
    if given.schedule == AUTO:
        return None
    schedule, name = build("schedules", given.schedule), given.schedule.name
    if schedule.apply != "step":
        return f"{what}, but under schedule={name} steps end in the next iteration", [{"schedule": AUTO}]
    if schedule.measures:
        return f"{what}, but schedule={name} measures an exchange of gradients in every step", [{"schedule": AUTO}]
    return None


def _distances_need_no_feedback(given: Combination) -> Fault | None:
    mode: SyncMode = build("sync", given.sync)
    if given.codec == AUTO or not isinstance(mode, Agrees) or mode.pull(SOME_WORKERS) == 1:
        return None
    codec = codec_of(given)
    if not (isinstance(codec, Wraps) and _leaves_out(codec.codec)):
        return None
    reason = (
        f"under sync={given.sync.name} workers keep a distance from the agreed weights, and every exchange sends this"
        f" distance again; the error feedback in codec={write('codecs', given.codec)} would add the parts that earlier"
        " exchanges left out, until training diverges"
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
        why = f"and codec={given.codec.name} encodes only gradients, or weights on which all workers agree"
        reason = f"{what} uncompressed, {why}"
        return reason, [{"codec": NONE}]
    if given.servers:
        return f"{what}, in which servers take no part", [{"architecture": AUTO}]
    if given.transport.arguments.get("backend") == "nccl" and not given.native_inside:
        why = "by messages with tags, which NCCL does not support"
        return f"{what} {why}", [{"transport": AUTO, "architecture": AUTO}]
    if given.schedule != AUTO and build("schedules", given.schedule).phases != "whole":
        return f"{what} in one phase, but schedule={given.schedule.name} exchanges in two", [{"schedule": AUTO}]
    return None


def _servers_that_sum_remember_one_thing(given: Combination) -> Fault | None:
    mode: SyncMode = build("sync", given.sync)
    if given.codec in (NONE, AUTO) or not given.servers:
        return None
    if not (exchanges_gradients(mode) and isinstance(mode, Averages)):
        return None
    reason = (
        f"sync={given.sync.name} exchanges gradients first and differences of weights later, and servers that only sum"
        " would add the codec's residual of the gradients to the differences"
    )
    return reason, [{"architecture": AUTO}, {"codec": NONE}]


# Elastic runs ---------------------------------------------------------------------------------------------------------

_ELASTIC_TRANSPORTS = ("auto", "shm", "tcp")


def elastic_fault_of(given: Combination) -> Fault | None:
    """Why a run with this strategy cannot go on without a lost worker, or with a new one.

    A reason completes "an elastic run works".
    """
    if not build("sync", given.sync).merges:
        fault = _servers_count_the_samples(given)
    else:
        fault = None if given.roles is None else _lost_owners_are_replaced(given, given.roles)
    if fault is not None:
        return fault
    if given.collective is not None or given.native_inside:
        return "with plans of Syncline, without collectives of a message library", [{"architecture": AUTO}]
    if given.on_device:
        others = [{"architecture": with_arguments(given.architecture, on="host")}]
        return "without memory of GPUs, which ends with its worker", [*others, {"architecture": AUTO}]
    if given.transport.name not in _ELASTIC_TRANSPORTS:
        return "over transport=auto, shm and tcp", [{"transport": AUTO}]
    if given.schedule != AUTO and build("schedules", given.schedule).apply != "step":
        return "with schedules whose steps end in their iteration", [{"schedule": Part("fixed")}]
    return None


def _servers_count_the_samples(given: Combination) -> Fault | None:
    """Where each push is an update by itself: a server has all of a push, or nothing, and so its samples."""
    roles = given.roles
    if roles is None or not (roles.apart or roles.replicas):
        followed = variants(given.architecture, lambda found: found.holds_weights and bool(found.replicas))
        apart = variants(given.architecture, lambda found: found.holds_weights and found.apart)
        why = "with server processes, or replicas=1, if each worker goes at its own pace"
        return why, [*followed, *apart, {"architecture": Part("ps")}, {"sync": BSP}]
    if roles.replicas and roles.apart and roles.owners == 1:
        two = {"architecture": with_arguments(given.architecture, servers=2)}
        return "with two server processes or more, which follow each other", [two, {"sync": BSP}]
    return None


def _lost_owners_are_replaced(given: Combination, roles: Roles) -> Fault | None:
    here = variants(given.architecture, lambda found: not found.apart)
    summing = variants(given.architecture, lambda found: not found.apart and not found.holds_weights)
    if roles.apart and not roles.holds_weights:
        return "without server processes that only add up", here
    if roles.holds_weights and not roles.replicas:
        followed = variants(given.architecture, lambda found: bool(found.replicas))
        return "without owners that alone hold the optimizer's state", [*followed, *summing, *here]
    if roles.apart and roles.owners == 1:
        return "with two server processes or more, which follow each other", here
    if roles.replicas and given.schedule != AUTO and build("schedules", given.schedule).measures:
        # New buckets come without the state of the step before.
        return "with replicas=1 and schedules that keep their buckets", [{"schedule": Part("fixed")}]
    return None


RULES: tuple[Rule, ...] = (
    _native_needs_its_library,
    _native_sends_what_it_is_given,
    _gpus_add_whole_gradients_of_one_host,
    _nccl_knows_collectives_only,
    _servers_are_needed,
    _replicas_follow_updates,
    _weights_follow_updates,
    _memory_needs_feedback,
    _rounds_need_sums,
    _engines_do_what_the_schedule_says,
    _urgent_buckets_can_overtake,
    _owners_have_an_order_of_their_own,
    _two_phases_need_owners_of_chunks,
    _weights_are_averaged_between_steps,
    _mixes_are_plans_between_workers,
    _two_steps_in_flight_need_merged_pushes,
    _engines_do_what_the_sync_mode_says,
    _pushes_by_themselves_need_owners,
    _hosts_push_sums,
    _owners_are_told_every_push,
    _pushes_by_themselves_can_be_decoded,
    _other_buckets_need_all_workers,
    _servers_that_sum_remember_one_thing,
    _distances_need_no_feedback,
    _servers_that_sum_count_no_steps,
    _feedback_needs_a_contraction,
)
"""The rules for all combinations; the first violated one is reported."""
