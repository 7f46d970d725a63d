"""Rules of schedules: engines must support a schedule's answers, and the other words must be able to execute it."""

from __future__ import annotations

from typing import get_args

from .. import registry
from ..errors import PlanError, UsageError
from ..nouns import Group, Layer, Spec
from ..plans.check import phases
from ..schedules import Application, GoesAhead, Phases, Release, Schedule
from .combination import SOME_WORKERS, Combination, Fault, Rule, variants
from .grammar import Part
from .parts import build, write
from .words import AUTO, NONE


def _engines_do_what_the_schedule_says(given: Combination) -> Fault | None:
    if given.schedule == AUTO:
        return None
    schedule, name = build("schedules", given.schedule), given.schedule.name
    remedies = [{"schedule": AUTO}]
    for what, known in (("release", Release), ("phases", Phases), ("apply", Application)):
        value = getattr(schedule, what, None)
        if value not in get_args(known):
            words = " or ".join(map(repr, get_args(known)))
            return f"schedule={name} has {what}={value!r}, which no engine does: it is {words}", remedies
    in_flight = getattr(schedule, "in_flight", None)
    if not isinstance(in_flight, int) or in_flight < 1:
        return f"schedule={name} lets {in_flight!r} buckets be under way at once: it has to be 1 or more", remedies
    measures = getattr(schedule, "measures", None)
    if not isinstance(measures, int) or measures < 0:
        return f"schedule={name} measures {measures!r} steps: it has to be 0 or more", remedies
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
    """The fault in what a schedule says about local steps, if any."""
    local: object = isinstance(schedule, GoesAhead) and schedule.local
    if not isinstance(local, bool):
        return f"has local={local!r}: it says by True or False whether workers go ahead"
    if local and schedule.apply != "next_step":
        return (
            f"has workers make steps of their own (local=True) with apply={schedule.apply!r}, which engines do with"
            " apply='next_step' only"
        )
    return ""


def _urgent_buckets_can_overtake(given: Combination) -> Fault | None:
    if given.schedule == AUTO or not _has_urgent_buckets(build("schedules", given.schedule)):
        return None
    reason = f"schedule={given.schedule.name} lets urgent buckets overtake others, which"
    if given.collective is not None and not _honours_priority("collectives", given.architecture):
        return f"{reason} {given.architecture.name}'s collectives cannot", [{"architecture": AUTO}, {"schedule": AUTO}]
    if given.transport != AUTO and not _honours_priority("transports", given.transport):
        name = given.transport.name
        return f"{reason} messages of transport={name} cannot", [{"transport": AUTO}, {"schedule": AUTO}]
    return None


def _two_phases_need_owners_of_chunks(given: Combination) -> Fault | None:
    if given.schedule == AUTO or build("schedules", given.schedule).phases == "whole":
        return None
    reason = f"schedule={given.schedule.name} exchanges in two phases, reduce-scatter and all-gather"
    remedies: list[dict[str, Part]] = [{"architecture": AUTO}, {"schedule": AUTO}]
    if given.codec != NONE:
        why = f"and what codec={write('codecs', given.codec)} sends is not the sum that the second one takes on"
        return f"{reason}, {why}", [{"codec": NONE}, {"schedule": AUTO}]
    if given.collective is not None:
        return f"{reason}, and {given.architecture.name} makes both at once", remedies
    if given.servers:
        return f"{reason}, and servers answer what they have summed at once", remedies
    if given.architecture == AUTO:
        return None
    algorithm = registry.get("algorithms", given.architecture.name).target
    try:
        phases(algorithm(Group(SOME_WORKERS, servers=given.servers), **dict(given.architecture.args)))
    except PlanError as error:
        return f"{reason}, and {error}", remedies
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
            f"schedule={name} exchanges in two phases, and where owners hold the weights push and pull are these"
            " already: a bucket is pulled as soon as it has been updated"
        )
        return reason, [{"schedule": Part("priority")}, *others, {"schedule": AUTO}]
    if schedule.apply == "next_step":
        reason = f"schedule={name} has two steps under way, and owners of the weights take them one by one"
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


RULES: tuple[Rule, ...] = (
    _engines_do_what_the_schedule_says,
    _urgent_buckets_can_overtake,
    _owners_have_an_order_of_their_own,
    _two_phases_need_owners_of_chunks,
)
