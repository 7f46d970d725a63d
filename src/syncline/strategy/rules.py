"""Validates combinations: the rules that every strategy must satisfy, and the search for the nearest valid one.

A rule is a function of the whole combination; parts do not know each other. It returns the fault and changes that may
fix it. The nearest valid combination is found by breadth-first search over these changes. This file has the rules of
libraries, servers and codecs; ``schedule_rules`` and ``sync_rules`` have the others. ``strategy`` prints strategies and
resolves ``auto``.
"""

from __future__ import annotations

from collections import deque

from .. import registry
from ..codecs import NeedsFeedback, Wraps, relay_of, warmup_of
from ..compression.reducers.ways import way_of
from ..errors import UsageError
from . import schedule_rules, sync_rules
from .combination import Combination, Fault, Rule, codec_of, variants, with_arguments
from .grammar import Part
from .parts import build, write
from .words import AUTO, NONE, bind_word


def fault_of(combination: Combination) -> Fault | None:
    """The fault of the first violated rule; None for a valid combination."""
    return next((fault for rule in RULES if (fault := rule(combination)) is not None), None)


def nearest_that_works(combination: Combination, fault: Fault) -> Combination | None:
    """The first valid combination that the remedies lead to, with the fewest changes."""
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
        found = fault_of(candidate)
        if found is None:
            return candidate
        todo.extend((candidate, more) for more in found[1])
    return None


# Rules -------------------------------------------------------------------------------------------------------------


def _native_needs_its_library(given: Combination) -> Fault | None:
    if given.collective is None or given.transport == AUTO:
        return None
    if registry.get("transports", given.transport.name).capabilities.get("allreduce"):
        return None
    reason = f"native calls the library's own collective, and transport={given.transport.name} has none"
    return reason, [{"transport": Part("torch")}, {"transport": Part("mpi")}, {"architecture": AUTO}]


def _native_sends_what_it_is_given(given: Combination) -> Fault | None:
    if given.collective is None or given.codec in (NONE, AUTO):
        return None
    reason = f"native hands the gradients to a library that knows nothing of codec={given.codec.name}"
    return reason, [{"architecture": AUTO}, {"codec": NONE}]


def _nccl_knows_collectives_only(given: Combination) -> Fault | None:
    if given.transport.arguments.get("backend") != "nccl" or given.collective is not None:
        return None
    reason = "NCCL has no messages that are matched by tag, so no plan runs over it"
    return reason, [{"architecture": Part("native")}, {"transport": with_arguments(given.transport, backend="gloo")}]


def _servers_are_needed(given: Combination) -> Fault | None:
    if given.roles is None or given.roles.owners >= 1:
        return None
    reason = f"{write('algorithms', given.architecture)} has no server, and at least one has to own the sums"
    return reason, variants(given.architecture, lambda roles: roles.owners >= 1)


def _weights_follow_updates(given: Combination) -> Fault | None:
    if not given.server_holds_weights or given.codec == AUTO:
        return None
    codec = codec_of(given)
    inner = relay_of(codec.codec if isinstance(codec, Wraps) else codec)
    if inner.contraction or not inner.biased:
        return None
    reason = (
        f"codec={given.codec.name} does not say how large an update is, and servers that hold the weights tell updates"
    )
    return reason, [*variants(given.architecture, lambda roles: not roles.holds_weights), {"codec": NONE}]


def _memory_needs_feedback(given: Combination) -> Fault | None:
    if given.codec == AUTO:
        return None
    codec = codec_of(given)
    if not isinstance(codec, NeedsFeedback) or not codec.needs_feedback:
        return None
    reason = f"codec={given.codec.name} accumulates what is not sent, which it cannot with feedback=off"
    return reason, [{"codec": Part("feedback", (("", given.codec),))}]


def _rounds_need_sums(given: Combination) -> Fault | None:
    if given.roles is None or given.codec == AUTO or way_of(codec_of(given)).servable:
        return None
    codec = write("codecs", given.codec)
    reason = f"codec={codec} needs sums over the workers while it computes, which servers do not make"
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
        f"error feedback around {inner.name} diverges: its error can be larger than the gradient, so that what is left"
        " for the next step grows from step to step"
    )
    return reason, [{"codec": inner}]


RULES: tuple[Rule, ...] = (
    _native_needs_its_library,
    _native_sends_what_it_is_given,
    _nccl_knows_collectives_only,
    _servers_are_needed,
    _weights_follow_updates,
    _memory_needs_feedback,
    _rounds_need_sums,
    *schedule_rules.RULES,
    *sync_rules.RULES,
    _servers_that_sum_count_no_steps,
    _feedback_needs_a_contraction,
)
"""The rules for all combinations; the first violated one is reported."""
