"""Saves and restores Syncline's part of a checkpoint.

It defines the layout of the state: plain values and tensors, as ``torch.save`` accepts. Codecs and owners of weights
define their own parts; ``api`` selects the models.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .compression.saved import Saved
from .errors import StrategyError, UsageError
from .plans.plan import ranks_text
from .session.layout import read_layout, reading_state
from .session.session import Session
from .strategy.choice import Choice
from .strategy.strategy import Strategy
from .strategy.words import NONE

if TYPE_CHECKING:
    from .frameworks.torch import Prepared

_OF_CODECS = ("codec", "differences")
"""The keys of ``BucketExchange.saved`` for each model."""


def save(session: Session, prepared: Sequence[Prepared]) -> dict[str, Any]:
    """The state of the run, with models in the order in which they were prepared. Collective.

    Models that were prepared in a group are under ``groups``, group by group.
    """
    _rest(prepared, "syncline.state_dict()")
    for made in prepared:
        if made.client is not None and not made.client.owned.together:
            made.client.consolidate()  # so that no rank waits for a step of a model that only exists here
    all_workers, *groups = _by_session(session, prepared)
    found = _saved(*all_workers)
    if groups:
        found["groups"] = [_saved(*group) | _place(*group, prepared) for group in groups]
    return found


def _by_session(session: Session, prepared: Sequence[Prepared]) -> list[tuple[Session, list[Prepared]]]:
    """The models of all workers, possibly none, and those of each group with models, in the order of groups."""
    found = [(one, [made for made in prepared if made.replica.session is one]) for one in session.family]
    return [(one, models) for one, models in found if models or one is session]


def _place(session: Session, models: Sequence[Prepared], prepared: Sequence[Prepared]) -> dict[str, list[int]]:
    """A group's ranks in the run, and the indices of its models among the prepared ones."""
    return {
        "ranks": [session.member.number(rank) for rank in range(session.world_size)],
        "models": [number for number, made in enumerate(prepared) if any(made is one for one in models)],
    }


def _saved(session: Session, prepared: Sequence[Prepared]) -> dict[str, Any]:
    """The state of models that share that session."""
    found: dict[str, Any] = {
        "strategy": session.recorded,
        "algorithms": [] if session.choice is None else [list(row) for row in session.choice.table],
        "world_size": session.world_size,
        "steps": [made.replica.steps for made in prepared],
    }
    if _has_layouts(session):
        found["layouts"] = [
            layout.plain() | {"measured": made.replica.exchange.measured and not layout.trial}
            for made in prepared
            for layout in [made.replica.exchange.layout]
        ]
    kept = [made.replica.exchange.saved() for made in prepared]
    for what in _OF_CODECS:
        if any(what in one for one in kept):
            found[what] = [_tensors(one[what]) if what in one else None for one in kept]
    apart = [made.replica.averaging for made in prepared]
    if any(apart):
        found["averaging"] = [one and one.saved() for one in apart]
    clients = [made.client for made in prepared]
    if any(client is not None and client.owned.keeps for client in clients):
        found["weights"] = [client and client.owners_weights() for client in clients]
    return found


def load(session: Session, prepared: Sequence[Prepared], state: Mapping[str, Any]) -> None:
    """Restore the result of ``save``. Collective.

    Raises UsageError for the state of another strategy or other models, and for anything else. Warns of missing parts,
    with the stack level of the caller's caller.
    """
    with reading_state():
        _rest(prepared, "syncline.load_state_dict()")
        all_workers, *groups = _by_session(session, prepared)
        if session.alone:
            _go_on_alone(session, state)
            return
        others: list[Mapping[str, Any]]
        if state["world_size"] == 1 and not state["steps"]:  # servers have the models of a worker
            _warn_of_steps(session)
            others = [_of_one(state, models) for _, models in groups]
            state = _of_one(state, all_workers[1])
        elif len(states := state.get("groups") or []) != len(groups):
            raise UsageError(
                f"this state has models of {len(states)} groups, but this rank has prepared models in {len(groups)}:"
                " prepare the same models in the same groups as before, and load the state that this group's ranks"
                " saved"
            )
        else:
            as_many = state["world_size"] == session.world_size
            others = [_of_group(_place(*group, prepared), states, as_many) for group in groups]
        for group, found in zip((all_workers, *groups), (state, *others), strict=True):
            _load(*group, found)


def _of_group(here: Mapping[str, Any], states: Sequence[Mapping[str, Any]], as_many: bool) -> Mapping[str, Any]:
    """The state of a group, found by its models, and by its ranks if the run has ``as_many`` workers again.

    The order in which groups were created does not matter. Raises UsageError if there is none.
    """
    for state in states:
        if state["models"] == here["models"] and (state["ranks"] == here["ranks"] or not as_many):
            return state
    raise UsageError(
        f"this rank has prepared {_placed(here)}, but this state has {'; '.join(map(_placed, states))} (models are"
        " numbered in the order of their preparation): prepare the same models in the same groups as before, and load"
        " the state that this group's ranks saved"
    )


def _placed(one: Mapping[str, Any]) -> str:
    models = ", ".join(map(str, one["models"]))
    return f"model{'s' * (len(one['models']) > 1)} {models} in the group of {ranks_text(one['ranks'])}"


def _of_one(state: Mapping[str, Any], prepared: Sequence[Prepared]) -> dict[str, Any]:
    """The state of a single worker, which neither exchanges nor counts steps, as a state of these models."""
    return {"strategy": state["strategy"], "world_size": 1, "steps": [0] * len(prepared)}


def _warn_of_steps(session: Session) -> None:
    if session.strategy.sync.name != "bsp" or session.strategy.codec != NONE:
        warnings.warn(
            f"this state comes from a single worker, which does not count steps: {str(session.strategy)!r} counts its"
            " steps from 0 again, for exchanges of weights and for a codec's warm-up",
            stacklevel=4,
        )


def _go_on_alone(session: Session, state: Mapping[str, Any]) -> None:
    """Resume with a single worker, which does not need the states that several workers keep."""
    _check_strategy(session, state)
    if any("codec" in one or "averaging" in one for one in (state, *(state.get("groups") or []))):
        warnings.warn(
            "a single worker restores only the weights that were loaded into the model; the other state of"
            f" {state['world_size']} workers is dropped, and residuals of codecs are lost: call consolidate() before"
            " such a checkpoint",
            stacklevel=4,
        )


def _check_strategy(session: Session, state: Mapping[str, Any]) -> None:
    if session.as_here(state["strategy"]) != str(session.strategy):
        raise UsageError(
            f"this state belongs to a run with {state['strategy']!r}, but this run has {str(session.strategy)!r}"
        )


def _under_this_architecture(session: Session, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a state that holds under another architecture, if the strategies differ in nothing else.

    Residuals of codecs, and the weights of owners, belong to the architecture; that they are missing causes a warning.
    """
    here = session.strategy
    try:
        before = Strategy.parse(state["strategy"])
        moved = replace(before, architecture=here.architecture, transport=here.transport)
    except StrategyError:
        return state
    if session.as_here(state["strategy"]) == str(here) or str(moved) != str(here):
        return state
    return {key: state[key] for key in ("world_size", "steps", "averaging") if key in state} | {"strategy": str(here)}


def _load(session: Session, prepared: Sequence[Prepared], state: Mapping[str, Any]) -> None:
    """Restore the state of models that share that session."""
    state = _under_this_architecture(session, state)
    if state["strategy"] != str(session.strategy) and session.resume_codec(state["strategy"]):
        for made in prepared:
            made.replica.exchange.compress()
    _check_strategy(session, state)
    if len(state["steps"]) != len(prepared):
        raise UsageError(f"this state has {len(state['steps'])} prepared models, but this run has {len(prepared)}")
    nothing = [None] * len(prepared)
    if state["world_size"] == session.world_size and _has_layouts(session):
        _resume_layouts(prepared, state.get("layouts") or nothing)
    codecs, apart, weights = (state.get(what) or nothing for what in (*_OF_CODECS, "weights"))
    for made, step, saved, other, owned in zip(prepared, state["steps"], codecs, apart, weights, strict=True):
        made.replica.trained.resume(step, dict(zip(_OF_CODECS, (_arrays(saved), _arrays(other)), strict=True)))
        compression, client = made.replica.exchange.compression, made.client
        if client is not None and (compression is not None or client.owned.keeps):
            client.resume(step, owned or {})
        if compression is None:
            session.warn_of_residuals(saved is not None, 4)
            continue
        lost = (saved is None and compression.keeps) or (owned is None and client is not None and client.owned.keeps)
        compression.warn_of_loss(str(session.strategy), lost, 4)
    for made, agreed in zip(prepared, state.get("averaging") or nothing, strict=True):
        if made.replica.averaging is not None:  # nothing stays of the run until now
            made.replica.averaging.load(agreed) if agreed is not None else made.replica.averaging.forget()
    if state.get("algorithms") and state["world_size"] == session.world_size:
        session.resume_with(Choice.read(state["algorithms"]))


def _rest(prepared: Sequence[Prepared], what: str) -> None:
    """Wait for everything in flight. GradientError if owners of weights are ahead of the script."""
    for made in prepared:
        made.replica.flush()
        made.replica.settle()  # the weights' exchange is still due because the optimizer was not called
        if made.client is not None:
            made.client.settle(what)


def _has_layouts(session: Session) -> bool:
    """Whether buckets, or the choice of a schedule, depend on measurements."""
    return session.chooses_schedule or session.strategy.schedule_object().measures > 0


def _resume_layouts(prepared: Sequence[Prepared], layouts: Sequence[Mapping[str, Any] | None]) -> None:
    """Resume with the saved buckets, so that sums round as before. Measure again if measuring was not finished."""
    for made, saved in zip(prepared, layouts, strict=True):
        if saved is not None:
            try:
                chosen = read_layout(made.replica.exchange.layout.layers, saved)
                made.replica.resume_with(chosen, bool(saved["measured"]))
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                raise UsageError(f"the buckets in this state belong to another model: {error}") from error


def _tensors(ranks: Sequence[Saved]) -> list[dict[str, Any]]:
    """A rank's state as ``torch.save`` accepts it."""
    import torch

    return [{key: torch.from_numpy(array) for key, array in rank.items()} for rank in ranks]


def _arrays(ranks: Sequence[Mapping[str, Any]] | None) -> list[Saved] | None:
    """The inverse of ``_tensors``."""
    return None if ranks is None else [{key: np.asarray(array) for key, array in rank.items()} for rank in ranks]
